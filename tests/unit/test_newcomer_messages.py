"""What somebody sees who is new to the program: help, advice and refusals say what was typed and what helps."""

from __future__ import annotations

import errno
import json
import shlex
import tomllib
from typing import Any

import pytest
import typer

from keyfed.cli import app
from keyfed.cli.app import plainly
from keyfed.config.load import Config, apply_settings, check, config_from, to_document
from keyfed.deploy import up
from keyfed.errors import ConfigError, DataError, PrivacyError, RunError
from keyfed.files import write_atomically
from keyfed.lab.experiment.report import tune_text
from keyfed.lab.experiment.tune import winning_toml
from keyfed.private.dp.accounting import LEAST_NOISE, calibrate
from keyfed.reports.run_page import verdict
from keyfed.run.console import Narrator, plural
from keyfed.text.catalogue import load_corpus

SMALL = ("model.embed=6", "model.hidden=6", "data.window=4", "train.workers=1", "train.baselines=false")


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)


def write_clients(folder, clients: int, lines: int) -> None:
    folder.mkdir()
    for k in range(clients):
        text = "the state of the union is good and the people are well today\n"
        (folder / f"writer{k}.txt").write_text(text * lines)


def sets(*settings: str) -> list[str]:
    return [item for setting in settings for item in ("--set", setting)]


def refused(keyfed, *arguments: object) -> str:
    """What a command says that refuses: one line, exit code 2."""
    code, out, err = keyfed(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


# keyfed tune


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ["train.cohort=3", "data.vocab=60", "model.hidden=12", "train.rounds=7", "data.max_tokens=4000"]),
        ("fedprox", ["model.name=char-lstm", "mu=0.01", "lr=0.002"]),  # the last: what words have by default
        ("fedprox", ["model.name=char-lstm", "optimiser=sgd", "lr=0.015"]),  # what characters have, with adam
        ("fedavg", ["server.name=adam", "server.lr=0.1", "upload.keep=0.5", "secure.on=true", "train.seed=5"]),
        ("fedavg", ["privacy.epsilon=8", "privacy.population=1000", "participation.sampling=poisson"]),
    ],
)
def test_best_toml_is_the_whole_winner(method, settings):
    config = check(apply_settings(Config(method=method), settings))
    searched = apply_settings(config, ["train.baselines=false", "train.central=false"])
    found = check(config_from(tomllib.loads(winning_toml(searched, {"clip": 0.5})), "best.toml"))
    assert to_document(found) == to_document(check(apply_settings(config, ["clip=0.5"])))


def test_the_command_that_trains_the_winner_needs_nothing_else():
    result: dict[str, Any] = {
        "out": "my runs/tuned", "model": "gru", "settings": {"search": {}, "data": {"name": "sotu"}},
        "trials": [], "best": None, "toml": "[method]\n", "verdict": "", "edges": [],
    }  # fmt: skip
    lines = tune_text(result).splitlines()
    assert "train it:  keyfed train --config 'my runs/tuned/best.toml'" in lines
    assert "report:    'my runs/tuned/report.html'" in lines


# keyfed up


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("central", [], "choose a federated method"),
        ("fedmed", ["beta=0.5", "secure.on=true"], "beta"),
        ("fedavg", ["upload.keep=0.1"], "upload.keep"),
        ("fedavg", ["participation.drop_after=0.1"], "participation.drop_after"),
    ],
)
def test_a_federation_that_cannot_be_is_refused_before_anything_starts(method, settings, why, tmp_path, monkeypatch):
    def started(*_: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr(up, "start_superlink", started)
    config = check(apply_settings(Config(method=method), ["train.cohort=3", *settings]))
    with pytest.raises(ConfigError, match=why):
        up.up(config, 3, tmp_path / "run", tmp_path, Narrator(), plain=not config.secure.on)
    assert list(tmp_path.iterdir()) == []


def test_logs_are_not_shown_for_an_impossible_setting(keyfed, monkeypatch):
    def fails(config: Config, clients: int, out: Any, root: Any, *_: object, **__: object) -> None:
        (root / "logs").mkdir()
        (root / "logs" / "server.log").write_text("a line of a log\n")
        raise error

    monkeypatch.setattr(up, "up", fails)
    error: Exception = ConfigError("no such thing")
    assert refused(keyfed, "up", "--clients", 3) == "error: no such thing\n"
    error = RunError("it stopped")
    assert "server.log: a line of a log" in keyfed("up", "--clients", 3)[2]


# Help


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [path, *(found for name, child in below.items() for found in commands(child, (*path, name)))]


def test_no_help_has_backslashes_and_every_argument_is_explained(keyfed):
    top = plainly(typer.main.get_command(app.app))
    assert len(commands(top)) > 20
    for path in commands(top):
        code, out, _ = keyfed(*path, "--help")
        assert code == 0
        assert "\\[" not in out, path
        _, _, arguments = out.partition("Arguments:\n")
        names = [line for line in arguments.partition("\n\n")[0].splitlines() if not line.startswith("   ")]
        for line in names:
            assert len(line.replace("[required]", "").split(maxsplit=1)) == 2, (path, line)
    assert "[default: 3; x>=1]" in " ".join(keyfed("suggest", "--help")[1].split())


def test_the_help_of_suggest_tells_a_text_from_a_field(keyfed):
    said = " ".join(keyfed("suggest", "--help")[1].split())
    assert "every line of it is a field that is being typed in. Its last word is completed" in said
    assert "without TEXT at most 3" in said


# Files


def test_space_is_asked_for_only_where_it_is_missing(tmp_path, monkeypatch):
    with pytest.raises(RunError) as missing:
        write_atomically(tmp_path / "none" / "v.json", b"{}")
    said = "could not be written (No such file or directory); choose a place that can be written to"
    assert str(missing.value).endswith(said)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("keyfed.files.os.fsync", full)
    with pytest.raises(RunError, match=r"Free some space$"):
        write_atomically(tmp_path / "v.json", b"{}")
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RunError, match=r"Free some space; a run goes on with --resume$"):
        write_atomically(tmp_path / "metrics.json", b"{}")


def test_a_private_vote_that_exists_is_not_said_to_be_removable(keyfed, tmp_path):
    write_clients(tmp_path / "text", 3, 8)
    (tmp_path / "v.json").write_text("{}")
    said = refused(keyfed, "vocab", "--data", "text", "--dp", "noise=1", "--out", "v.json")
    assert "Choose another --out" in said
    assert "remove" not in said


# Corpora


def test_too_few_people_are_dealt_out_as_shards_if_that_is_wanted(keyfed, tmp_path):
    write_clients(tmp_path / "text", 3, 8)
    said = refused(keyfed, "train", "fedavg", "--data", "text", "--dry-run", *sets(*SMALL))
    assert "text has 3 clients with enough text" in said
    assert "set train.cohort to at most 3, or data.partition=iid and data.clients=10" in said
    for advice in (["train.cohort=3"], ["data.partition=iid", "data.clients=10"]):
        code, _, err = keyfed("train", "fedavg", "--data", "text", "--dry-run", *sets(*SMALL, *advice))
        assert code == 0, err
    said = refused(
        keyfed, "train", "fedavg", "--data", "text", "--dry-run", *sets(*SMALL, "data.partition=iid", "data.clients=4")
    )
    assert "or data.clients higher" in said


def test_a_corpus_says_where_it_is_and_where_it_is_looked_for(keyfed, tmp_path):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / "tiny_shakespeare.txt").write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n" * 9)
    code, out, err = keyfed("data", "get", "tiny-shakespeare", "--data-dir", tmp_path)
    assert code == 0, err
    assert str(folder) in out
    with pytest.raises(DataError, match="--data-dir or KEYFED_DATA"):
        load_corpus("yelp", data_dir=tmp_path)


def test_what_would_be_ignored_is_refused(keyfed, tmp_path):
    assert "--models" in refused(keyfed, "methods", "fedavg", "--models")
    assert "not a folder" in refused(keyfed, "data", "list", "--data-dir", tmp_path / "none")
    assert keyfed("data", "list", "--data-dir", tmp_path)[0] == 0


# Privacy


@pytest.mark.parametrize("budget", [500, 35])  # 35: enough by PLD, not by RDP
def test_calibration_says_where_it_stopped(keyfed, budget):
    code, out, err = keyfed("privacy", "calibrate", "--epsilon", budget)
    assert code == 0, err
    assert f"noise 0.2, the least that is searched (epsilon 33.1), for epsilon {budget} " in out
    found = json.loads(keyfed("privacy", "calibrate", "--epsilon", budget, "--json")[1])
    assert found["pld"] == LEAST_NOISE
    assert found["epsilon_of_least_noise"] == pytest.approx(33.1, abs=0.05)


def test_more_noise_than_the_least_is_as_before(keyfed):
    assert calibrate(8.0, 1e-5, 1.0, 1) == pytest.approx(0.6003, abs=1e-3)
    assert json.loads(keyfed("privacy", "calibrate", "--epsilon", 8, "--json")[1])["epsilon_of_least_noise"] is None


def test_no_rounds_have_no_noise_to_calibrate(keyfed):
    for verb in (("calibrate", "--epsilon", 8), ("plan",)):
        assert "'--rounds'" in refused(keyfed, "privacy", *verb, "--rounds", 0)


def test_a_population_of_one_is_named(keyfed, tmp_path):
    write_clients(tmp_path / "text", 3, 8)
    private = ["--data", "text", "--dp", "epsilon=8", "--population", 1]
    for verb in (["train", *sets(*SMALL, "train.cohort=3")], ["vocab"]):
        said = refused(keyfed, *verb, *private)
        assert "the population is 1: nobody hides alone" in said
        assert "at least 2 clients (--population), or set privacy.delta" in said


# What was typed


@pytest.mark.parametrize("text", ["perplexity=abc", "perplexity=", "speed=3", "nats=-1"])
def test_a_target_is_shown_whole(keyfed, text):
    said = refused(keyfed, "train", "--until", text)
    assert f'train.until is "{text}"; expected perplexity=NUMBER or nats=NUMBER' in said


def test_plain_does_not_speak_of_secure_where_nobody_did(keyfed):
    assert "--secure" not in refused(keyfed, "train", "--plain")
    assert "not with --secure" in refused(keyfed, "train", "--plain", "--secure")


def test_a_vocabulary_of_two_is_an_error_of_its_option(keyfed):
    assert "'--size'" in refused(keyfed, "vocab", "--size", 2)


# A run


def test_a_run_without_test_text_says_so_and_its_commands_can_be_copied(keyfed, tmp_path):
    write_clients(tmp_path / "text", 2, 1)
    arguments = ["train", "--data", "text", "--rounds", 1, "--out", "my run", *sets(*SMALL, "train.cohort=2")]
    code, out, err = keyfed(*arguments)
    assert code == 0, err
    assert "valid perplexity –  top-1 –  top-3 –" in err
    assert "There is no test text, so fednesterov was not tested" in out
    assert not any(word in out + err for word in (" inf", "nan", "diverged"))
    assert "\n1 round in" in out
    commands_ = dict(line.split(":", 1) for line in out.splitlines() if line.startswith(("report:", "try:")))
    assert shlex.split(commands_["report"]) == ["my run/report.html"]
    *command, text = shlex.split(commands_["try"])
    assert command == ["keyfed", "suggest", "my run"]
    assert set(text.split()) <= set("the state of the union is good and the people are well today".split())  # noqa: SIM905

    said = refused(keyfed, "train", "--resume", "--out", "my run", "--seed", 2)
    assert "train.seed: 1 → 2" in said
    assert "take another --out (with --init 'my run' from its weights)" in said
    code, _, err = keyfed(*arguments, "--out", "another", "--init", "my run", "--dry-run")
    assert code == 0, err


def test_a_diverged_run_is_still_called_so():
    assert "diverged" in verdict({"test": {"perplexity": None, "tokens": 100}})


def test_one_is_not_many():
    assert [plural(n, "author") for n in (0, 1, 2, 1000)] == ["0 authors", "1 author", "2 authors", "1,000 authors"]


def test_a_default_delta_needs_two_clients():
    from keyfed.private.dp.accounting import delta_for

    with pytest.raises(PrivacyError, match="population is 1"):
        delta_for(1)
    assert delta_for(1, 0.5) == 0.5
    assert delta_for(1000) == pytest.approx(1000**-1.1)


def test_plots_where_nothing_can_be_written_are_refused_before_a_corpus_is_read(keyfed, tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    code, out, err = keyfed("data", "explore", "nowhere", "--out", tmp_path / "file" / "plots")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --out {tmp_path / 'file' / 'plots'}: Not a directory; choose a folder")
    assert err.count("\n") == 1
