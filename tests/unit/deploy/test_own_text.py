"""A client looks at its text with its owner: columns, a preview on the own terminal, hints that work as printed."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from keyfed.cli import federation
from keyfed.cli import server as commands
from keyfed.deploy.certificates import check_certificate, make_certificates
from keyfed.deploy.consent import ask, given
from keyfed.deploy.homes import ClientHome, open_home
from keyfed.deploy.supernode import Client
from keyfed.deploy.trainer import make_session, text_to_read
from keyfed.errors import DeployError
from keyfed.text.catalogue import look_at
from keyfed.text.corpus import pseudonym, read_corpus

SECRET = "zebraquantum"
ROWS = [f"{k};general;{who};the words of {who} number {k} {SECRET}" for k in range(20) for who in ("anna", "ben")]


@pytest.fixture
def start(keyfed, tmp_path, monkeypatch):
    """Start a client, which stops as soon as it would take part."""
    make_certificates(tmp_path / "server", [])

    def stop(self):
        raise DeployError("it takes part")

    monkeypatch.setattr(Client, "start", stop)
    options = ("--server", "127.0.0.1:1", "--ca", tmp_path / "server" / "ca.crt", "--name", "anna", "--yes")
    return lambda *more: keyfed("client", "--home", tmp_path / "my home", *options, *more)


def test_a_client_takes_the_columns_that_train_takes(start, tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("k;place;who;words\n" + "\n".join(ROWS))
    code, _, err = start("--data", table)
    assert code == 2
    assert "name them with --author-column NAME --text-column NAME" in err
    code, _, err = start("--data", table, "--author-column", "who", "--text-column", "words", "--me", "anna")
    assert err.endswith("error: it takes part\n"), err
    assert "20 lines, 140 words, read as table by semicolons" in err
    assert SECRET not in err
    home = ClientHome(tmp_path / "my home")
    assert home.settings().reading() == {"author_column": "who", "text_column": "words"}
    assert look_at(table, "anna", home.settings().reading()).lines == 20
    assert make_session(home) is not None, "later starts need no options"


def test_what_would_be_learnt_by_mistake_is_said_to_the_owner(start, tmp_path):
    (tmp_path / "log.txt").write_text("".join(f"2024-03-12 21:{k:02} {SECRET} is here again\n" for k in range(40)))
    _, _, err = start("--data", tmp_path / "log.txt")
    assert "notice: 100% of the lines begin with a date or time" in err
    assert SECRET not in err


def test_a_preview_is_shown_on_a_terminal_only(keyfed, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(f"one {SECRET}\x1b[31m with some words\n" * 10)
    command = ("client", "--home", tmp_path / "none", "--preview", "--data", tmp_path / "a.txt")
    code, out, err = keyfed(*command)
    assert (code, out) == (2, "")
    assert "on a terminal only" in err
    assert SECRET not in err
    monkeypatch.setattr(federation, "_on_terminal", lambda: True)
    code, out, err = keyfed(*command)
    assert (code, err) == (0, "")
    assert out.count(SECRET) == federation.PREVIEW
    assert "\x1b" not in out, "nothing in a text steers the terminal"
    assert not (tmp_path / "none").exists()


def test_hints_name_a_home_that_is_not_the_usual_one(keyfed, tmp_path, monkeypatch):
    make_certificates(tmp_path / "server", [])
    home = open_home(tmp_path / "my home", name="anna", server="127.0.0.1:1", ca=tmp_path / "server" / "ca.crt")
    _, out, _ = keyfed("client", "--home", home.path, "--pause")
    command = shlex.split(out.partition("go on with: ")[2])
    assert command == ["keyfed", "client", "--resume", "--home", str(home.path)]
    assert keyfed(*command[1:])[1] == "taking part again\n"
    monkeypatch.setenv("KEYFED_CLIENT_HOME", str(home.path))
    assert keyfed("client", "--pause")[1] == "paused; go on with: keyfed client --resume\n"
    place = tmp_path / "my server"
    steps = commands._next_steps(place, "127.0.0.1:9092", "127.0.0.1", 9092)
    assert any(line.endswith(f"enrol-NAME.json --home {shlex.quote(str(place))}") for line in steps)
    assert any(f"--federation {shlex.quote(str(place))} --vocab" in line for line in steps)
    monkeypatch.setenv("KEYFED_SERVER_HOME", str(place))
    steps = commands._next_steps(place, "127.0.0.1:9092", "127.0.0.1", 9092)
    assert any(line.endswith("enrol-NAME.json") for line in steps)
    assert any("--federation 127.0.0.1:9092 --vocab" in line for line in steps)


def test_the_status_says_how_much_text_there_is(keyfed, tmp_path):
    make_certificates(tmp_path / "server", [])
    data = tmp_path / "chat.txt"
    more = {"name": "anna", "server": "127.0.0.1:1", "ca": tmp_path / "server" / "ca.crt", "data": data}

    def text_of() -> str:
        code, out, _ = keyfed("client", "--home", tmp_path / "home", "--status", "--json")
        assert code == 0
        return json.loads(out)["text"]

    data.write_text("we meet at nine at the station\n" * 4, "utf-8")
    open_home(tmp_path / "home", **more)
    assert text_of() == f"{data}: 1 file, 4 lines, 28 words"
    data.write_text("".join(f"12/03/2024, 21:0{k} - {who}: secret words\n" for k in range(9) for who in ("Al", "Bo")))
    assert "messages of 2 people" in text_of()
    assert "secret" not in text_of()
    data.unlink()
    assert text_of() == f"{data}: nothing there yet"


def test_the_commands_of_the_consent_can_be_run_with_the_home_that_is_named(tmp_path, monkeypatch):
    said = []
    home = tmp_path / "my home"
    ask(home, "the words", yes=True, read=None, say=said.append)
    assert said == ["the words", f"The commands above need the option --home {shlex.quote(str(home))}"]
    assert given(home, "the words"), "what was agreed to are the words alone"
    monkeypatch.setenv("KEYFED_CLIENT_HOME", str(home))
    said.clear()
    ask(home, "other words", yes=True, read=None, say=said.append)
    assert said == ["other words"]


def test_a_certificate_that_is_missing_is_made_where_it_is_looked_for(tmp_path, monkeypatch):
    home = tmp_path / "my server"
    with pytest.raises(DeployError, match=re.escape(f"`keyfed server --make-certificates --home '{home}'` makes it")):
        check_certificate(home / "server.crt")
    monkeypatch.setenv("KEYFED_SERVER_HOME", str(home))
    with pytest.raises(DeployError, match="`keyfed server --make-certificates` makes it"):
        check_certificate(home / "server.crt")


def test_an_export_in_a_folder_is_one_for_a_client_that_keeps_text_for_days(tmp_path):
    make_certificates(tmp_path / "server", [])
    data = tmp_path / "slack"
    (data / "general").mkdir(parents=True)
    (data / "users.json").write_text('[{"id": "U1", "profile": {"display_name": "Anna"}}]')
    (data / "general" / "2024-03-12.json").write_text('[{"type": "message", "user": "U1", "ts": "1.0", "text": "hi"}]')
    home = open_home(
        tmp_path / "home", name="a", server="127.0.0.1:1", ca=tmp_path / "server" / "ca.crt", data=data, keep_days=30
    )
    (author,) = read_corpus(text_to_read(home)).authors
    assert (author.name, author.lines) == (pseudonym("Anna"), ("hi",))
