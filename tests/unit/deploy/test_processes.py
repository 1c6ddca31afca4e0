"""Processes are found and ended whatever they do."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from keyfed.deploy.processes import (
    MOST_LOG,
    BoundedLog,
    Processes,
    descendants,
    die_with,
    free_port,
    locked,
    marked,
    parents,
    refuse_taken,
    running,
    stop_at_signals,
    tail,
    unbroken,
    wait_until,
)
from keyfed.errors import DeployError
from keyfed.wire.joined import aside

# A process that ignores SIGTERM, with a child in a session of its own that ignores it too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


def gone(pid):
    return wait_until(lambda: not running(pid), 5, lambda: True, 0.02)


def test_a_stubborn_process_and_its_escaped_child_are_ended(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    with Processes(tmp_path) as processes:
        parent = processes.start("one", [sys.executable, str(tmp_path / "stubborn.py"), "child"])
        assert wait_until(lambda: processes.log_tail("one").count("ready") == 2, 10, lambda: True)
        family = descendants(parent.pid)
        assert len(family) == 1
        assert (tmp_path / "processes.json").exists()
        processes.stop_all(patience=0.3)
    assert gone(parent.pid)
    assert all(gone(pid) for pid in family)
    assert not (tmp_path / "processes.json").exists()


def test_an_orphan_is_found_by_its_mark(tmp_path):
    # The parent has ended before anything is stopped, so that no line of descent leads to its child.
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    processes = Processes(tmp_path)
    parent = processes.start("one", [sys.executable, "-c", script])
    assert parent.wait(10) == 0
    mark = processes._mark
    (orphan,) = marked(mark)
    processes.stop_all(patience=0.5)
    assert gone(orphan)
    assert marked(mark) == []


def test_the_family_is_read_from_proc(tmp_path):
    for pid, name, parent in ((10, "a", 1), (11, "b (c) d", 10), (12, "e", 11), (13, "f", 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1\n")
    (tmp_path / "14").mkdir()
    (tmp_path / "14" / "stat").write_text("nonsense")
    assert parents(tmp_path) == {10: 1, 11: 10, 12: 11, 13: 1}
    assert sorted(descendants(10, tmp_path)) == [11, 12]
    assert not running(99, tmp_path)


def test_a_command_that_is_not_there_is_said(tmp_path):
    with Processes(tmp_path) as processes, pytest.raises(DeployError, match="cannot be started"):
        processes.start("one", [str(tmp_path / "none")])


def test_waiting_ends_when_what_it_waits_for_has_died():
    began = time.monotonic()
    assert not wait_until(lambda: False, 30, lambda: False)
    assert time.monotonic() - began < 5


def test_a_child_ends_soon_after_its_parent(tmp_path):
    child = (
        "import os, sys, time; from keyfed.deploy.processes import die_with; die_with(int(sys.argv[1]), 0.05);"
        "open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    parent = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid()), "
    parent += "sys.argv[1]]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path / "pid")])
    try:
        assert wait_until(lambda: tail(tmp_path / "pid") != "", 20, lambda: process.poll() is None)
    finally:
        process.kill()
        process.wait(5)
    assert gone(int(tail(tmp_path / "pid")))


def test_a_process_whose_parent_is_there_stays():
    thread = die_with(os.getppid(), 0.01, leave=lambda code: pytest.fail("left"))
    time.sleep(0.05)
    assert thread.is_alive()


def test_sigterm_unwinds_like_ctrl_c():
    with pytest.raises(KeyboardInterrupt), stop_at_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_tidying_up_is_not_broken_off():
    before = signal.getsignal(signal.SIGINT)
    with unbroken():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_free_port_can_be_bound(host):
    with socket.create_server((host, free_port(host)), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        pass


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DeployError, match=rf"^port {port} of 127\.0\.0\.1 is taken; choose another with --port$"):
            refuse_taken("127.0.0.1", port)
    refuse_taken("127.0.0.1", port)
    with pytest.raises(DeployError, match="cannot be had"):
        refuse_taken("192.0.2.1", port)


def test_what_is_done_aside_hands_over_its_result_or_its_error_and_keeps_nobody_waiting():
    assert aside(lambda: "done").result(5) == "done"

    def fails():
        raise DeployError("no text")

    with pytest.raises(DeployError, match="no text"):
        aside(fails).result(5)
    code = "import time; from keyfed.wire.joined import aside; aside(lambda: time.sleep(600)); raise SystemExit(130)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 130


def test_a_lock_is_held_by_one_and_waited_for(tmp_path):
    with locked(tmp_path / "lock"), pytest.raises(DeployError, match="somebody"), locked(tmp_path / "lock", "somebody"):
        pass
    with locked(tmp_path / "lock", "somebody"):
        pass


def test_the_end_of_a_log(tmp_path):
    assert tail(tmp_path / "none") == ""
    (tmp_path / "log").write_bytes(b"a" * 50 + b"\xffend\n")
    assert tail(tmp_path / "log", 5) == "\ufffdend"


def test_a_long_log_is_put_aside_when_a_process_starts(tmp_path):
    log = tmp_path / "logs" / "one.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * (MOST_LOG + 1))
    for _ in range(2):
        with Processes(tmp_path) as started:
            started.start("one", [sys.executable, "-c", "print('here')"]).wait(20)
    assert log.read_text() == "here\nhere\n"
    assert (log.parent / "one.old.log").stat().st_size == MOST_LOG + 1


def test_a_process_logs_a_bounded_number_of_bounded_lines(capfd):
    handler = BoundedLog(lines=3, longest=100)
    for n in range(50):
        handler.handle(logging.LogRecord("any", logging.ERROR, "x", 1, f"{n} " + "y" * 5_000, None, None))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 4
    assert all(len(line) < 160 for line in said)
    assert said[-1] == "no more lines are logged until the next start"
