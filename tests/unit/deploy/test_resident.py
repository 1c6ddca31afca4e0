"""The training process behind its socket: frames, one at a time, typed errors."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time

import pytest

from keyfed.deploy.trainer import alone, serve
from keyfed.errors import DataError, DeployError
from keyfed.wire import frames
from keyfed.wire.frames import HEAD, MAGIC, SOCKET, FrameError, ask, read_frame, write_frame
from keyfed.wire.messages import Rejected


def handle(kind, body):
    if kind == "rejected":
        raise Rejected("stale", "round 3 after round 4")
    if kind == "data":
        raise DataError("line 3 says: my password")
    if kind == "defect":
        raise ZeroDivisionError("my password")
    if kind == "slow":
        time.sleep(0.5)
    return body[::-1]


@pytest.fixture
def home(tmp_path):
    # Deep, so that the socket's path is longer than a system allows.
    place = tmp_path / ("x" * 60) / ("y" * 60)
    place.mkdir(parents=True)
    threading.Thread(target=serve, args=(place, handle), daemon=True).start()
    end = time.monotonic() + 10
    while not (place / SOCKET).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return place


def soon(seconds=10.0):
    return time.time() + seconds


def test_a_question_is_answered_by_a_socket_only_the_owner_opens(home):
    assert len(os.fsencode(home / SOCKET)) > 108
    assert ask(home / SOCKET, "echo", b"abc", soon()) == ({}, b"cba")
    assert ask(home / SOCKET, "echo", b"", soon()) == ({}, b"")
    assert stat.S_IMODE((home / SOCKET).stat().st_mode) == 0o600


def test_a_large_body_crosses(home):
    body = os.urandom(5_000_001)
    assert ask(home / SOCKET, "echo", body, soon(30))[1] == body[::-1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("rejected", {"error": "stale", "reason": "round 3 after round 4"}),
        ("data", {"error": "client error", "reason": "DataError"}),
        ("defect", {"error": "client error", "reason": "ZeroDivisionError"}),
    ],
)
def test_errors_are_typed_and_quote_no_text(home, kind, expected, capsys):
    assert ask(home / SOCKET, kind, b"", soon()) == (expected, b"")
    assert ask(home / SOCKET, "echo", b"ab", soon()) == ({}, b"ba")  # and it lives on


def test_a_question_past_its_deadline_is_not_put(home):
    with pytest.raises(FrameError, match="after its deadline"):
        ask(home / SOCKET, "echo", b"", time.time() - 1)
    with pytest.raises(FrameError, match="not answered before its deadline"):
        ask(home / SOCKET, "slow", b"", soon(0.1))


def test_a_question_that_waited_past_its_deadline_is_not_worked_on(home):
    link = socket.socket(socket.AF_UNIX)
    with link, frames.reachable(home / SOCKET) as name:
        link.connect(name)
        write_frame(link, {"kind": "echo", "deadline": time.time() - 1}, b"x")
        assert read_frame(link)[0]["error"] == "no answer"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n........",
        HEAD.pack(MAGIC, 1 << 30, 0),
        HEAD.pack(MAGIC, 2, 1 << 62) + b"{}",
        HEAD.pack(MAGIC, 2, 0) + b"[]",
        HEAD.pack(MAGIC, 3, 0) + b"\xff\xff\xff",
        HEAD.pack(MAGIC, 2, 5) + b"{}ab",
        b"",
    ],
    ids=["http", "huge-header", "huge-body", "no-object", "no-json", "cut-short", "nothing"],
)
def test_what_is_no_frame_ends_the_connection_and_nothing_else(home, data, capsys):
    with socket.socket(socket.AF_UNIX) as link, frames.reachable(home / SOCKET) as name:
        link.settimeout(5)
        link.connect(name)
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # what was sent too much has not been read
            assert link.recv(1) == b""
    assert ask(home / SOCKET, "echo", b"ab", soon()) == ({}, b"ba")


def test_nobody_there(tmp_path):
    with pytest.raises(FrameError, match="does not answer"):
        ask(tmp_path / SOCKET, "echo", b"", soon())


def test_one_training_process_a_home(home):
    with pytest.raises(DeployError, match="runs already"), alone(home):
        pass


def test_a_socket_left_by_a_killed_process_is_taken_over(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / SOCKET))
    left.close()
    threading.Thread(target=serve, args=(tmp_path, handle), daemon=True).start()
    end = time.monotonic() + 10
    answer = None
    while answer is None and time.monotonic() < end:
        try:
            answer = ask(tmp_path / SOCKET, "echo", b"ab", soon())
        except FrameError:
            time.sleep(0.02)
    assert answer == ({}, b"ba")


def test_a_body_above_the_cap_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "BODY_CAP", 10)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(FrameError, match="at most 10"):
        write_frame(ours, {}, b"x" * 11)


def test_the_frame_is_as_documented():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_frame(ours, {"a": 1}, b"xyz")
        assert theirs.recv(100) == b"KFR1" + struct.pack(">IQ", 8, 3) + b'{"a": 1}' + b"xyz"
