"""Processes are found and ended whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from keyfed.deploy.processes import (
    Processes,
    descendants,
    die_with,
    marked,
    parents,
    running,
    stop_at_signals,
    tail,
    unbroken,
    wait_until,
)
from keyfed.errors import DeployError

# A process that ignores SIGTERM, with a child in a session of its own that ignores it too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


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


def test_the_end_of_a_log(tmp_path):
    assert tail(tmp_path / "none") == ""
    (tmp_path / "log").write_bytes(b"a" * 50 + b"\xffend\n")
    assert tail(tmp_path / "log", 5) == "\ufffdend"
