"""Which text a client's training process reads."""

from __future__ import annotations

import os
import time

from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.homes import DAY, open_home
from keyfed.deploy.supernode import refusal
from keyfed.deploy.trainer import make_session, text_to_read
from keyfed.text.corpus import read_corpus
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.flower.patches import Pace


def home_with(tmp_path, **more):
    make_certificates(tmp_path / "server", [])
    (tmp_path / "notes").mkdir()
    for name, days in (("new.txt", 1), ("old.txt", 40)):
        (tmp_path / "notes" / name).write_text(f"{name} text\n")
        os.utime(tmp_path / "notes" / name, (time.time() - days * DAY,) * 2)
    return open_home(
        tmp_path / "home", name="anna", server="127.0.0.1:1", ca=tmp_path / "server" / "ca.crt",
        data=tmp_path / "notes", **more,
    )  # fmt: skip


def test_without_a_limit_the_text_is_read_where_it_is(tmp_path):
    home = home_with(tmp_path)
    assert text_to_read(home) == (tmp_path / "notes").resolve()


def test_with_a_limit_only_what_is_young_enough_is_read_and_nothing_is_copied(tmp_path):
    home = home_with(tmp_path, keep_days=30)
    for _ in range(2):
        read = text_to_read(home)
        assert [a.lines for a in read_corpus(read).authors] == [("new.txt text",)]
        assert all(p.is_symlink() for p in read.iterdir())
    assert (tmp_path / "notes" / "old.txt").exists()


def test_a_limit_never_reads_what_is_hidden_and_holds_for_a_single_file(tmp_path):
    home = home_with(tmp_path, keep_days=50)
    (tmp_path / "notes" / ".git").mkdir()
    (tmp_path / "notes" / ".git" / "config").write_text("token\n")
    assert sorted(p.resolve().name for p in text_to_read(home).iterdir()) == ["new.txt", "old.txt"]
    one = tmp_path / "notes" / "old.txt"
    assert text_to_read(open_home(home.path, data=one)) == one
    assert list(text_to_read(open_home(home.path, keep_days=30)).iterdir()) == []


def test_the_session_has_the_identity_that_was_enrolled(tmp_path):
    home = home_with(tmp_path)
    before = home.identity_key.read_bytes()
    session = make_session(home)
    assert session.name == "anna"
    assert DeviceStore(home.path).identity().private_bytes() == before
    assert home.identity_key.read_bytes() == before


def test_an_owner_takes_part_in_counts_only_after_saying_so_and_until_further_notice(tmp_path):
    home = home_with(tmp_path)
    assert home.settings().counts is False
    assert open_home(home.path, counts=True).settings().counts is True
    assert open_home(home.path, hide_among=4).settings().counts is True
    assert open_home(home.path, counts=False).settings().counts is False


def test_a_paused_client_begins_nothing_and_finishes_what_has_begun(tmp_path):
    home = home_with(tmp_path)
    assert refusal(home, "train") is None
    home.pause(True)
    assert "paused" in refusal(home, "hello")
    assert "paused" in refusal(home, "train")
    assert "paused" in refusal(home, "count")
    assert refusal(home, "unmask") is None


def test_conditions_hold_for_work_only(tmp_path, monkeypatch):
    from keyfed.deploy import homes

    monkeypatch.setitem(homes.CONDITIONS, "power", ("on power", lambda: False))
    home = home_with(tmp_path, when="power")
    assert refusal(home, "train") == refusal(home, "count") == "not on power"
    assert refusal(home, "hello") is None


def test_the_pace_is_quick_after_something_came_and_slow_later():
    pace = Pace(fast=0.1, slow=2.0, linger=0.05)
    assert pace.seconds() == 0.1
    time.sleep(0.06)
    assert pace.seconds() == 2.0
    pace.busy()
    assert pace.seconds() == 0.1
