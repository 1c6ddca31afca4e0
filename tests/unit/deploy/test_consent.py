"""Consent comes first, is asked in plain words, and is recorded."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest

from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.consent import ask, asking, given, need_consent, words
from keyfed.deploy.homes import open_home
from keyfed.errors import DeployError

TEXT = words("anna", "fl.example.org:9092", "/home/anna/notes", plain=False)


def test_the_words_name_what_leaves_and_what_stays():
    for part in ("anna", "fl.example.org:9092", "/home/anna/notes", "never sent", "public keys", "--leave", "--pause"):
        assert part in TEXT
    assert "takes no part in such runs" in TEXT
    assert "shortens its changes to a public length before they leave" in TEXT
    assert "takes part in such runs too" in words("a", "b:1", "c", plain=True)


def test_counting_is_told_to_who_agrees_to_it_and_asked_anew(tmp_path):
    """Who takes no part in counts is told what was always told, so that an older agreement holds."""
    told = words("anna", "fl.example.org:9092", "/home/anna/notes", plain=False, counts=True, hide_among=5)
    for part in ("which words", "up to 6 words", "over 5 people or more", "fewer than 3 too", "No noise hides that"):
        assert part in told
        assert part not in TEXT
    assert max(map(len, told.splitlines())) <= 120
    ask(tmp_path, TEXT, yes=True, read=None, say=lambda line: None)
    assert not given(tmp_path, told)


def test_without_an_answer_nothing_is_recorded(tmp_path):
    said = []
    with pytest.raises(DeployError, match="--yes"):
        ask(tmp_path, TEXT, yes=False, read=None, say=said.append)
    with pytest.raises(DeployError, match="did not agree"):
        ask(tmp_path, TEXT, yes=False, read=lambda: "no\n", say=said.append)
    with pytest.raises(DeployError, match="did not agree"):
        ask(tmp_path, TEXT, yes=False, read=lambda: "", say=said.append)
    assert TEXT in said
    assert not given(tmp_path)


@pytest.mark.parametrize(("yes", "how"), [(True, "--yes"), (False, "typed")])
def test_an_answer_is_recorded_with_its_date_and_words(tmp_path, yes, how):
    now = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
    ask(tmp_path, TEXT, yes=yes, read=lambda: "Yes\n", say=lambda line: None, now=now)
    record = json.loads((tmp_path / "consent.json").read_text())
    assert record["date"] == "2026-05-01T12:00:00+00:00"
    assert record["how"] == how
    assert record["words"] == TEXT
    assert given(tmp_path, TEXT)


def start(tmp_path, answer, **more):
    agree = asking(tmp_path / "home", yes=False, read=lambda: answer, say=lambda line: None)
    return open_home(tmp_path / "home", agree=agree, **more)


@pytest.fixture
def first(tmp_path):
    make_certificates(tmp_path / "server", [])
    return {"name": "anna", "server": "127.0.0.1:9092", "ca": tmp_path / "server" / "ca.crt"}


def test_who_does_not_agree_at_first_leaves_nothing_behind(tmp_path, first):
    with pytest.raises(DeployError, match="did not agree"):
        start(tmp_path, "no", **first)
    assert not (tmp_path / "home").exists()


def test_settings_that_are_not_agreed_to_do_not_hold(tmp_path, first):
    home = start(tmp_path, "yes", **first)
    need_consent(home)
    before = home.settings()
    with pytest.raises(DeployError, match="did not agree"):
        start(tmp_path, "no", server="elsewhere.example.org:9092", plain=True)
    assert home.settings() == before
    need_consent(home)
    home.write(dataclasses.replace(before, plain=True))  # as if somebody had changed the file
    with pytest.raises(DeployError, match="no consent"):
        need_consent(home)


def test_a_first_start_that_was_broken_off_goes_on(tmp_path, first):
    start(tmp_path, "yes", **first)
    (tmp_path / "home" / "client.json").unlink()
    need_consent(start(tmp_path, "no: the same words are not asked twice", **first))


def test_the_same_words_are_not_asked_twice_but_others_are(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYFED_CLIENT_HOME", str(tmp_path))
    said = []
    ask(tmp_path, TEXT, yes=True, read=None, say=said.append)
    ask(tmp_path, TEXT, yes=False, read=None, say=said.append)
    assert len(said) == 1
    other = words("anna", "elsewhere.example.org:9092", "/home/anna/notes", plain=False)
    with pytest.raises(DeployError, match="nobody can be asked"):
        ask(tmp_path, other, yes=False, read=None, say=said.append)


@pytest.mark.parametrize("text", ["", "{}", '{"agreed": false, "sha256": "x"}', "[]"])
def test_a_damaged_record_is_no_consent(tmp_path, text):
    (tmp_path / "consent.json").write_text(text)
    assert not given(tmp_path)
