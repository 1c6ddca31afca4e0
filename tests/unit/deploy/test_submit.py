"""What is submitted, and how its output is followed."""

from __future__ import annotations

import contextlib
import math
import tomllib

import pytest

from keyfed.deploy import server_app as submitting
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.server_app import APP_CAP, Unfinished, build_app, event_line, follow, parse_line, submit, wait_for
from keyfed.deploy.up import client_name, parts_of, write_parts
from keyfed.errors import ConfigError, DeployError
from keyfed.text.corpus import Author, Corpus, read_corpus
from keyfed.wire.flower.commands import environment, write_connection


class Heard:
    def __init__(self):
        self.heard = []

    def say(self, line):
        self.heard.append(("say", line))

    def start(self, what, rounds, done):
        self.heard.append(("start", what, rounds, done))

    def round(self, record):
        self.heard.append(("round", record))


def test_the_folder_names_the_installed_program_and_carries_its_files(tmp_path):
    build_app(tmp_path / "app", {"run.json": b"{}"})
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["components"]["serverapp"] == "keyfed_run.server:app"
    assert project["project"]["dependencies"] == []
    assert (tmp_path / "app" / "keyfed_run" / "run.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("name", "data"), [("run.pickle", b""), ("run.json", b" " * (APP_CAP + 1))], ids=["kind", "size"]
)
def test_what_flower_does_not_carry_is_said(tmp_path, name, data):
    with pytest.raises(DeployError, match="Flower carries"):
        build_app(tmp_path / "app", {name: data})


def test_events_survive_being_printed_among_other_lines():
    heard = Heard()
    lines = [
        "Loading project\n",
        event_line("say", "two\nlines"),
        "\x1b[92mINFO\x1b[0m: " + event_line("start", ["fedavg", 3, 0]),
        event_line("round", {"round": 1, "loss": math.nan, "traffic": {"up": [math.inf, 2]}}),
        "keyfed-event {broken\n",
        event_line("result", {"a": 1}),
    ]
    assert follow(iter(lines), heard) == {"a": 1}
    (_, said), (_, *began), (_, record) = heard.heard
    assert said == "two\nlines"
    assert began == ["fedavg", 3, 0]
    assert math.isnan(record["loss"])
    assert record["traffic"] == {"up": [None, 2]}


def test_a_failed_run_is_an_error_with_its_words():
    with pytest.raises(DeployError, match="too few clients"):
        follow(iter([event_line("error", "too few clients")]), Heard())


def test_a_run_that_ends_without_a_result_says_what_it_printed_last():
    with pytest.raises(Unfinished, match="No such module"):
        follow(iter(["╭── Error ──╮\n", "│ No such module │\n", "╰──╯\n"]), Heard())


@pytest.mark.parametrize("line", ["", "hello", "keyfed-event ", "keyfed-event []", 'keyfed-event {"event": 1}'])
def test_what_is_no_event(line):
    assert parse_line(line) is None


class Impatient(Heard):
    def say(self, line):
        raise KeyboardInterrupt


def test_ctrl_c_ends_as_such_even_where_the_server_cannot_be_asked_to_stop(tmp_path, monkeypatch):
    command = tmp_path / "bin" / "flwr"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho started run 17\necho '{event_line('say', 'x').strip()}'\nexec sleep 60\n")
    command.chmod(0o755)
    asked = []

    def gone(home):
        def run(commands):
            asked.append((home.path, commands))
            raise DeployError("does the server run?")

        return run

    monkeypatch.setattr(submitting, "answers", lambda *a: True)
    monkeypatch.setattr(submitting, "flwr", gone)
    monkeypatch.setattr(submitting, "environment", lambda home: {"PATH": f"{command.parent}:/bin:/usr/bin"})
    with pytest.raises(KeyboardInterrupt):
        submit(ServerHome(tmp_path), tmp_path, Impatient(), "127.0.0.1:1", tmp_path / "own")
    assert asked == [(tmp_path / "own", [["stop", "17", "keyfed"]])]


def test_flower_is_started_without_telemetry_updates_installation_or_proxies(tmp_path):
    env = environment(
        tmp_path, {"PATH": "/bin", "https_proxy": "http://proxy", "FORWARDED_ALLOW_IPS": "*", "KEEP": "1"}
    )
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["FLWR_HOME"] == str(tmp_path / "flwr")
    assert "https_proxy" not in env
    assert "FORWARDED_ALLOW_IPS" not in env  # with it a caller's own word would count for where it calls from
    assert env["KEEP"] == "1"


def test_flwr_finds_our_superlink_and_no_other(tmp_path):
    write_connection(tmp_path, "127.0.0.1:9092", tmp_path / "ca.crt")
    found = tomllib.loads((tmp_path / "flwr" / "config.toml").read_text())["superlink"]
    assert found == {
        "default": "keyfed",
        "keyfed": {"address": "127.0.0.1:9092", "root-certificates": str(tmp_path / "ca.crt")},
    }


def test_waiting_for_clients_is_bounded():
    counts, said = iter([["a"], ["a"], ["a", "b"]]), []
    assert wait_for(lambda: next(counts), 2, 5.0, said.append, look=0.001) == 2
    assert len(said) == 2
    assert wait_for(lambda: ["a"], 2, 0.01, said.append, look=0.001) == 1


def corpus(natural, *authors):
    return Corpus("c", tuple(Author(name, lines) for name, lines in authors), natural=natural)


def test_a_natural_corpus_gives_its_largest_authors_to_clients(tmp_path):
    long = ("long line " * 9,)
    made = corpus(True, ("Al Gore", ("x",)), ("zoe", long), ("Bé", ("middle line",)), ("al-gore", ("yy",)))
    parts = parts_of(made, 3)
    assert parts == {"al-gore": ("yy",), "b": ("middle line",), "zoe": long}
    assert list(parts_of(made, 4)) == ["al-gore", "al-gore-2", "b", "zoe"]
    files = write_parts(parts, tmp_path / "text")
    assert sorted(files) == sorted(a.name for a in read_corpus(tmp_path / "text").authors)


def test_a_pool_is_cut_into_shards_without_loss():
    made = corpus(False, ("pool", tuple(f"line {k}" for k in range(10))))
    parts = parts_of(made, 3)
    assert [len(lines) for lines in parts.values()] == [3, 3, 4]
    assert [line for lines in parts.values() for line in lines] == [f"line {k}" for k in range(10)]


def test_too_many_clients_for_the_text():
    with pytest.raises(ConfigError, match="text for 1 clients; asked for 2"):
        parts_of(corpus(False, ("a", ("only",))), 2)


@pytest.mark.parametrize(("text", "name"), [("Ünö", "n"), ("---", "client"), ("A B/c.txt", "a-b-c.txt")])
def test_names_of_clients(text, name):
    assert client_name(text) == name


@pytest.mark.parametrize("gone", [True, False])
def test_a_superlink_that_is_gone_leaves_a_run_unfinished_and_other_errors_are_final(monkeypatch, capsys, gone):
    from types import SimpleNamespace

    from keyfed.deploy import server_app
    from keyfed.wire.flower.server import Unanswered

    def fail(*arguments):
        raise (Unanswered if gone else DeployError)("one line")

    monkeypatch.setattr(server_app, "die_with", lambda parent: None)
    monkeypatch.setattr(server_app, "train_submitted", fail)
    with contextlib.suppress(Unanswered):
        server_app.make_app("folder/app.py")(SimpleNamespace(), SimpleNamespace(run_id=1))
    with pytest.raises(DeployError) as found:
        follow(iter(capsys.readouterr().out.splitlines()), Heard())
    assert isinstance(found.value, Unfinished) is gone
