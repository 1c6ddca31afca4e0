"""A server that is kept running: what it says and does, and how it ends; with no process and no clock."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from keyfed.deploy import superlink
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.superlink import DAY_SECONDS, TEND_SECONDS, serve
from keyfed.errors import DeployError


@contextmanager
def nothing(*_):
    yield


class Ended:
    """Processes of which the SuperLink lives for some looks."""

    def __init__(self, looks: int):
        self.looks = looks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ended(self) -> list[str]:
        self.looks -= 1
        return [] if self.looks >= 0 else [superlink.NAME]

    def log_tail(self, name: str, most: int) -> str:
        return "its last words"


@pytest.fixture
def seconds(monkeypatch):
    """A clock that only the server's own sleeping moves, whatever other threads do."""
    now = [0.0]
    own = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda pause: now.__setitem__(0, now[0] + pause))
    monkeypatch.setattr(superlink, "time", own)
    for name in ("only_one", "stop_at_signals"):
        monkeypatch.setattr(superlink, name, nothing)
    monkeypatch.setattr(superlink, "start_superlink", lambda processes, home, host, port: f"{host}:{port}")
    monkeypatch.setattr(superlink, "check_certificate", lambda path: (f"{path.name} ends soon",))
    return now


def said_by(home, monkeypatch, looks: int, wishes=()) -> list[str]:
    monkeypatch.setattr(superlink, "Processes", lambda path: Ended(looks))
    said: list[str] = []
    left = iter(wishes)
    with pytest.raises(DeployError, match="has ended; the end of its log:\nits last words"):
        serve(
            ServerHome(home), "127.0.0.1", 9092, started=lambda address: [f"listening on {address}"],
            tend=lambda: next(left, []), say=said.append,
        )  # fmt: skip
    return said


def test_it_says_how_it_began_and_what_was_done_meanwhile(tmp_path, monkeypatch, seconds):
    said = said_by(tmp_path, monkeypatch, 3, [[], ["anna has left", "ben has left"]])
    assert said == ["note: server.crt ends soon", "listening on 127.0.0.1:9092", "anna has left", "ben has left"]
    assert seconds == [3 * TEND_SECONDS]


def test_the_certificate_is_looked_at_once_a_day(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(superlink, "TEND_SECONDS", DAY_SECONDS / 4 + 1)
    assert said_by(tmp_path, monkeypatch, 13).count("note: server.crt ends soon") == 1 + 3
