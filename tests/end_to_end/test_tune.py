"""A search on a small corpus: its folder, its resumption, what it does not read."""

from __future__ import annotations

import json

import pytest

import keyfed as library
from keyfed.errors import ConfigError
from keyfed.lab.experiment.tune import Tuning
from tests.end_to_end.conftest import TINY
from tests.listeners import Heard


@pytest.fixture
def tune_tiny(keyfed, corpus, tmp_path):
    """Tune and return (exit code, result or None, stderr)."""

    def call(*arguments: object, method: str = "fedavg", name: str = "tune", extra: tuple[str, ...] = ()):
        settings = [item for s in [*TINY, *extra] for item in ("--set", s)]
        out = ["--data", corpus, "--out", tmp_path / name, "--json"]
        code, stdout, stderr = keyfed("tune", method, *out, *settings, *arguments)
        return code, json.loads(stdout) if code == 0 else None, stderr

    return call


def valid_nats(folder) -> list[float]:
    return [json.loads(line)["valid"]["nats"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_search_finds_a_winner_without_the_test_text(tune_tiny, train_quietly, keyfed, tmp_path, corpus):
    arguments = ("--trials", 5, "--rounds", 3, "--search", "lr=0.5..8:log")
    code, result, stderr = tune_tiny(*arguments)
    assert code == 0, stderr
    assert "quick: data.max_tokens=4000;" in stderr
    trials = {t["trial"]: t for t in result["trials"]}
    assert sorted(trials) == [0, 1, 2, 3, 4]
    assert trials[0]["values"] == {"lr": 2.0}
    assert sorted(t["rounds"] for t in trials.values()) == [1, 1, 3, 3, 3]
    full = {k: t["nats"] for k, t in trials.items() if t["rounds"] == 3}
    assert 0 in full
    assert len(set(full.values())) == 3
    assert result["best"]["trial"] == min(full, key=lambda k: full[k])
    perplexities = [t["perplexity"] for t in result["trials"]]
    assert perplexities == sorted(perplexities)
    out = tmp_path / "tune"
    for k in full:
        tested = json.loads((out / f"trial-{k:02}" / "result.json").read_text())
        assert tested["test"]["tokens"] == 0
        assert tested["unseen"] is None
        assert tested["baselines"] == {}
        assert min(valid_nats(out / f"trial-{k:02}")) == full[k]
    for name in ("tune.json", "best.toml", "report.md", "report.html", "plots/search-lr.png"):
        assert (out / name).stat().st_size > 0, name

    # The winner's run, trained at one go, gives the same rounds; best.toml is its whole configuration.
    best = result["best"]["values"]["lr"]
    again = train_quietly(rounds=3, name="again", data_max_tokens=4000, lr=best)
    assert valid_nats(again) == valid_nats(out / f"trial-{result['best']['trial']:02}")
    code, _, stderr = keyfed("train", "--config", out / "best.toml", "--out", tmp_path / "by-file")
    assert code == 0, stderr
    assert valid_nats(tmp_path / "by-file") == valid_nats(again)
    assert (json.loads((tmp_path / "by-file" / "result.json").read_text())["baselines"]) != {}

    # Going on with a finished search trains nothing and says the same; other settings are refused.
    logs = {p: p.stat().st_mtime_ns for p in out.glob("trial-*/metrics.jsonl")}
    code, stdout, stderr = keyfed("tune", "--resume", "--out", out, "--json")
    assert code == 0, stderr
    assert json.loads(stdout) == result
    assert logs == {p: p.stat().st_mtime_ns for p in out.glob("trial-*/metrics.jsonl")}
    code, _, stderr = keyfed("tune", "--resume", "--out", out, "--trials", 3)
    assert (code, "tune.trials: 5 → 3" in stderr) == (2, True)
    code, _, stderr = keyfed("tune", "--out", out)
    assert (code, "--resume" in stderr) == (2, True)


def test_a_search_does_not_depend_on_the_test_text(tune_tiny, corpus):
    arguments = ("--trials", 2, "--rounds", 1, "--search", "lr=1,2,4")
    _, before, _ = tune_tiny(*arguments, name="before", extra=("data.unseen=0",))
    for path in corpus.iterdir():
        *lines, last = path.read_text("utf-8").splitlines()
        path.write_text("\n".join([*lines, " ".join("union" for _ in last.split())]) + "\n", "utf-8")
    _, after, _ = tune_tiny(*arguments, name="after", extra=("data.unseen=0",))
    assert [t["nats"] for t in before["trials"]] == [t["nats"] for t in after["trials"]]


def test_an_interrupted_search_ends_as_an_uninterrupted_one(corpus, tmp_path):
    config = library.configure(
        "fedavg", data=str(corpus), rounds=3, model_embed=8, model_hidden=12, data_vocab=60, train_cohort=3,
        train_workers=1, data_window=8, optimiser="sgd", lr=2.0, train_valid_tokens=500,
    )  # fmt: skip
    search = ["lr=0.5..8:log"]
    whole = library.tune(config, tmp_path / "whole", search=search, trials=3, seeds=2)
    assert len(list((tmp_path / "whole").glob("trial-*/metrics.jsonl"))) == 6
    for after in (5, 5, 4):  # of 14: in the default's second seed, among the short trials, in the one that goes on
        with pytest.raises(KeyboardInterrupt):
            library.tune(
                config, tmp_path / "cut", search=search, trials=3, seeds=2, resume=True, listener=Heard(count=after)
            )
    cut = library.tune(config, tmp_path / "cut", search=search, trials=3, seeds=2, resume=True)
    assert [(t["trial"], t["nats"], t["bytes"]) for t in cut["trials"]] == [
        (t["trial"], t["nats"], t["bytes"]) for t in whole["trials"]
    ]
    assert cut["toml"] == whole["toml"]


def test_trials_that_go_wrong_are_shown(tune_tiny, tmp_path):
    code, result, stderr = tune_tiny("--rounds", 1, "--trials", 4, "--search", "lr=2,1e9", "--search", "clip=1,-1")
    assert code == 0, stderr
    status = {tuple(t["values"].values()): t["status"] for t in result["trials"]}
    assert status[2.0, 1.0] == "finished"
    assert status[1e9, 1.0] == "diverged"
    assert status[2.0, -1.0] == "refused"
    assert result["best"]["trial"] == 0
    assert "tuning bought nothing" in result["verdict"]
    report = (tmp_path / "tune" / "report.md").read_text("utf-8")
    assert "diverged" in report
    assert "expected \\> 0" in report


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--search", "lrr=1..2"), "did you mean lr?"),
        (("--trials", 1), "at least 2 trials"),
        (("--rounds", 0), "at least 1 round"),
        (("--set", "train.cohort=100"), "fewer than the cohort of 100"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(tune_tiny, arguments, hint):
    code, _, stderr = tune_tiny(*arguments)
    assert code == 2
    assert hint in stderr
    assert "Traceback" not in stderr
    assert stderr.count("error: ") == 1


def test_a_training_run_is_not_mistaken_for_a_search(train_quietly, keyfed):
    out = train_quietly(rounds=1)
    code, _, stderr = keyfed("tune", "--resume", "--out", out)
    assert (code, "holds a training run" in stderr) == (2, True)


def test_the_text_a_client_reads_is_reduced_only_if_nothing_was_said(keyfed, tmp_path, monkeypatch):
    asked: list[Tuning] = []

    def refuse(tuning: Tuning, *_: object, **__: object) -> None:
        asked.append(tuning)
        raise ConfigError("seen")

    monkeypatch.setattr("keyfed.lab.experiment.tune.tune", refuse)
    file = tmp_path / "given.toml"
    file.write_text("[data]\nmax_tokens = 123\n")
    for name, arguments, most in (
        ("quick", [], 4000),
        ("characters", ["--model", "char-lstm"], 20_000),
        ("full", ["--full"], None),
        ("set", ["--set", "data.max_tokens=none"], None),
        ("file", ["--config", file], 123),
    ):
        code, _, stderr = keyfed("tune", *arguments, "--out", tmp_path / name)
        assert (code, "error: seen" in stderr) == (2, True)
        assert asked[-1].config.data.max_tokens == most, name
        assert ("quick: " in stderr) == (name in ("quick", "characters"))
