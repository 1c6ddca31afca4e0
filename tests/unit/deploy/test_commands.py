"""The commands' own checks, without a server."""

from __future__ import annotations

import json
import signal

import pytest
from typer.testing import CliRunner

from keyfed.cli.app import app
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.enrolment import write_enrolment
from keyfed.deploy.homes import open_home
from keyfed.errors import DeployError, KeyfedError
from keyfed.text.vocab import SPECIALS, Vocab
from keyfed.wire.flower.commands import write_connection

VOCAB = Vocab("word", (*SPECIALS, "a"), True, False).to_json()


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def says(result):
    assert isinstance(result.exception, KeyfedError), result.output
    return str(result.exception)


@pytest.fixture
def home(tmp_path):
    make_certificates(tmp_path / "server", [])
    return open_home(
        tmp_path / "home", name="anna", server="127.0.0.1:9", ca=tmp_path / "server" / "ca.crt", when="power"
    )


def test_pause_resume_and_status(home):
    assert "paused" in call("client", "--home", home.path, "--pause").output
    found = json.loads(call("client", "--home", home.path, "--status", "--json").output)
    assert found["name"] == "anna"
    assert found["paused"] == "yes"
    assert found["running"] == "no"
    assert found["agreed"] == "not yet"
    assert found["trains when"] == "power"
    assert found["on power"] in ("yes", "no", "the system does not tell")
    call("client", "--home", home.path, "--resume")
    assert not home.paused()


def test_one_thing_at_a_time(home, tmp_path):
    assert "give one of" in says(call("client", "--home", home.path, "--pause", "--leave"))
    assert "give one of" in says(call("enroll", "--home", tmp_path / "server"))
    assert "give one of" in says(call("enroll", "x.json", "--list", "--home", tmp_path / "server"))
    assert "--make-certificates" in says(call("server", "--home", tmp_path / "server", "--name", "x.example"))


def test_a_client_that_was_not_set_up_is_said(tmp_path):
    for what in ("--pause", "--status", "--leave"):
        assert "not the home of a client" in says(call("client", "--home", tmp_path / "none", what))


def test_without_consent_a_client_is_not_started(home):
    result = call("client", "--home", home.path)
    assert "nobody can be asked here" in says(result)
    assert "What leaves this computer" in result.output
    assert not (home.path / "logs").exists()


def test_while_a_client_runs_its_settings_can_be_changed_and_no_second_one_starts(home):
    with home.alone():
        assert "runs there already" in says(call("client", "--home", home.path, "--yes"))
        result = call("client", "--home", home.path, "--when", "idle", "--yes")
        assert result.exit_code == 0
        assert "none was started" in result.output
        assert "runs there already" in says(call("client", "--home", home.path, "--leave", "--yes"))
    assert home.settings().when == ("idle",)
    assert not (home.path / "logs").exists()


def test_settings_are_not_changed_without_consent(home):
    assert "nobody can be asked here" in says(call("client", "--home", home.path, "--allow-plain"))
    assert not home.settings().plain


def test_leaving_a_server_that_does_not_answer_deletes_the_home_and_says_what_is_left_to_do(home):
    assert "--leave --yes" in says(call("client", "--home", home.path, "--leave"))
    assert home.path.exists()
    result = call("client", "--home", home.path, "--leave", "--yes")
    assert "keyfed enroll --forget anna" in result.output
    assert not home.path.exists()


def test_a_folder_in_which_no_server_was_started_is_said(home, tmp_path):
    write_enrolment(home)
    wrong = tmp_path / "wrong"
    for what in (["--list"], ["--list", "--json"], ["--forget", "anna"], [home.path / "enrol-anna.json"]):
        said = says(call("enroll", *what, "--home", wrong))
        assert said.startswith(f"no server was ever started in {wrong}; if yours has another folder: --home FOLDER")
        assert said.endswith(f"keyfed server --make-certificates --home {wrong}")
        assert not wrong.exists()


def test_a_server_without_clients_lists_none(home, tmp_path):
    assert json.loads(call("enroll", "--list", "--json", "--home", home.path.parent / "server").output) == {}
    assert "0 clients" in call("enroll", "--list", "--home", tmp_path / "server").output


def test_the_roster_is_listed(tmp_path):
    (tmp_path / "roster.json").write_text(
        json.dumps({"anna": {"identity": "ab" * 32, "node_key": "c" * 64, "enrolled": "2026-01-01", "revoked": True}})
    )
    assert "revoked" in call("enroll", "--list", "--home", tmp_path).output
    assert "anna" in json.loads(call("enroll", "--list", "--json", "--home", tmp_path).output)


def test_an_enrolment_file_that_is_not_there(tmp_path):
    assert "No such file" in says(call("enroll", tmp_path / "none.json", "--home", tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--clients", "2"), "take at least 3, or --plain"),
        (("up", "fedvag", "--clients", "3"), "did you mean fedavg"),
        (("train", "--plain"), "--plain goes with --federation"),
        (("train", "--plain", "--secure", "--federation", "127.0.0.1:1"), "not with --secure"),
        (("train", "--federation", "nonsense"), "HOST:PORT"),
        (("train", "--federation", "127.0.0.1:1", "--vocab", "missing.json"), "there is no such vocabulary"),
        (
            ("up", "--clients", "4", "--dp", "noise=1", "--set", "privacy.count_noise=0.2"),
            "privacy.quantile=none",
        ),
        (("up", "--clients", "1", "--plain", "--dp", "noise=1"), "1 clients are enrolled"),
        (("up", "--dp", "eps=1"), "expected epsilon=NUMBER or noise=NUMBER"),
        (
            ("train", "--federation", "127.0.0.1:1", "--dp", "epsilon=8", "--population", "1000000"),
            "an imagined fleet, and this federation has real clients",
        ),
    ],
    ids=[
        "two-clients",
        "method",
        "plain-alone",
        "plain-and-secure",
        "address",
        "vocabulary",
        "few-and-private",
        "one-and-private",
        "budget",
        "imagined",
    ],
)
def test_what_makes_no_sense_is_said_before_anything_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEYFED_SERVER_HOME", str(tmp_path / "server"))
    assert message in says(call(*arguments))


def test_a_signal_unwinds_a_submitted_run_and_the_hint_is_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.json").write_text(VOCAB)
    used = []

    def submit(server, app, listener, address, connection):
        used.append(connection)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("keyfed.deploy.up.submit", submit)
    monkeypatch.setattr("keyfed.deploy.up.unreachable", lambda server: None)
    result = call("train", "--federation", "127.0.0.1:1", "--plain", "--vocab", "vocab.json", "--out", "runs/a b")
    assert not used[0].exists()
    assert "keyfed train --resume --out 'runs/a b' --federation 127.0.0.1:1 --plain\n" in result.output
    assert result.exit_code != 0


def test_submitting_a_run_leaves_the_servers_own_files_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYFED_SERVER_HOME", str(tmp_path / "server"))
    write_connection(tmp_path / "server", "192.0.2.1:9092", tmp_path / "ca.crt")
    before = (tmp_path / "server" / "flwr" / "config.toml").read_bytes()
    (tmp_path / "vocab.json").write_text(VOCAB)
    used = []

    def submit(server, app, listener, address, connection):
        used.append((address, (connection / "flwr" / "config.toml").read_text()))
        raise DeployError("enough")

    monkeypatch.setattr("keyfed.deploy.up.submit", submit)
    monkeypatch.setattr("keyfed.deploy.up.unreachable", lambda server: None)
    arguments = ("train", "--federation", "127.0.0.1:1", "--vocab", tmp_path / "vocab.json", "--out", tmp_path / "run")
    assert says(call(*arguments)) == "enough"
    assert used[0][0] == "127.0.0.1:1"
    assert 'address = "127.0.0.1:1"' in used[0][1]
    assert (tmp_path / "server" / "flwr" / "config.toml").read_bytes() == before


def test_a_home_that_is_not_empty_is_not_used(tmp_path):
    (tmp_path / "x").write_text("mine")
    assert "not an empty folder" in says(call("up", "--clients", "3", "--home", tmp_path, "--out", tmp_path / "out"))
