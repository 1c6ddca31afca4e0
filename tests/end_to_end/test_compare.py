"""`keyfed compare`: the same start for all methods, nothing trained twice, failures and interruptions survived."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import keyfed as library
from keyfed.lab.experiment import runner as comparing
from keyfed.run import loop as training
from keyfed.run.console import Narrator
from tests.end_to_end.conftest import TINY, write_corpus
from tests.end_to_end.test_cli import one_line

METHODS = ("fedavg", "fedatt:temperature=0.1,step=1.0")
FOLDERS = ("fedavg", "fedatt-temperature=0.1,step=1.0")
SETTINGS = [item for setting in [*TINY, "train.ngram_order=2"] for item in ("--set", setting)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, dict[str, Any], list[Any]]:
    """A comparison of two methods and two seeds: corpus, folder, result, and what each round began with."""
    corpus, out = write_corpus(tmp_path_factory.mktemp("data") / "corpus"), tmp_path_factory.mktemp("runs") / "out"
    began: list[Any] = []
    real = training.run_round

    def spy(method, state, cohort, *more, **named):
        began.append((method.name, state.round, state.params, list(cohort)))
        return real(method, state, cohort, *more, **named)

    dotted = dict(setting.split("=", 1) for setting in [*TINY, "train.ngram_order=2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "run_round", spy)
        result = library.compare(
            METHODS, data=str(corpus), rounds=2, seeds=2, out=out,
            **{key.replace(".", "_"): value for key, value in dotted.items()},
        )  # fmt: skip
    return corpus, out, result, began


@pytest.fixture
def no_report(monkeypatch):
    """Leave the plots out where a test does not look at them."""
    monkeypatch.setattr(comparing, "document", lambda *_: [])
    monkeypatch.setattr(comparing, "write_document", lambda *_: [])


def state_of(out: Path) -> dict[str, tuple[int, bytes]]:
    """When each run's files were written, and what is in them."""
    found = sorted([*out.rglob("metrics.jsonl"), *out.rglob("model.safetensors"), *out.rglob("baselines/*.json")])
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_all_methods_of_a_seed_have_the_same_initial_weights_and_cohorts(finished):
    *_, began = finished
    assert [(method, round) for method, round, *_ in began] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedatt", 0),
        ("fedatt", 1),
    ] * 2
    params, cohorts = [entry[2] for entry in began], [entry[3] for entry in began]
    for seed in (0, 4):
        assert all(params[seed][name].equal(params[seed + 2][name]) for name in params[seed])
        assert not all(params[seed + 1][name].equal(params[seed + 3][name]) for name in params[seed])
        assert cohorts[seed : seed + 2] == cohorts[seed + 2 : seed + 4]
    assert not params[0]["embedding.weight"].equal(params[4]["embedding.weight"])
    assert cohorts[:2] != cohorts[4:6]


def test_the_result_has_a_row_a_method_and_a_seed_each(finished):
    _, out, result, _ = finished
    assert {"data", "model", "budget", "seeds", "target", "baselines", "rows", "best"} <= set(result)
    assert result["seeds"] == [1, 2]
    assert {row["label"] for row in result["rows"]} == set(METHODS)
    assert result["rows"] == sorted(result["rows"], key=lambda row: row["test_mean"]["perplexity"])
    for row in result["rows"]:
        runs = [json.loads((out / row["folder"] / f"seed-{seed}" / "result.json").read_text()) for seed in (1, 2)]
        assert set(runs[0]) <= set(row)
        assert row["test"] == runs[0]["test"]
        assert [seed["test"] for seed in row["seeds"]] == [run["test"] for run in runs]
        mean = sum(run["test"]["perplexity"] for run in runs) / 2
        assert row["test_mean"]["perplexity"] == pytest.approx(mean)
        assert row["test_spread"]["perplexity"] > 0
        assert row["reached"] == 2  # the default target is reached by all
        assert row["baselines"] == {}  # scored once for all
    assert result["baselines"]["kneser_ney"]["test"]["perplexity"] > 1
    assert result["quick"] == {"data.max_tokens": 4_000, "train.test_tokens": 100_000}
    assert json.loads((out / "compare.json").read_text()) == result


def test_the_report_has_table_plots_and_links_that_lead_somewhere(finished):
    _, out, result, _ = finished
    text = (out / "report.md").read_text("utf-8")
    assert result["verdict"] in text
    for folder in FOLDERS:
        assert (out / folder / "seed-2" / "run.toml").exists()
    assert "](fedavg/seed-2/)" in text
    assert {path.name for path in (out / "plots").iterdir()} == {
        "perplexity-rounds.png", "perplexity-tokens.png", "perplexity-bytes.png", "accuracy-rounds.png",
        "attention-fedatt-temperature=0.1,step=1.0.png",
    }  # fmt: skip
    page = (out / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 10  # five plots, for light and dark pages


def test_the_same_command_again_trains_nothing_and_says_the_same(finished, keyfed, no_report):
    corpus, out, result, _ = finished
    before = state_of(out)
    command = ("compare", *METHODS, "--data", corpus, "--rounds", 2, "--seeds", 2, "--out", out, *SETTINGS)
    code, stdout, stderr = keyfed(*command, "--json")
    assert code == 0, stderr
    assert json.loads(stdout) == result
    assert state_of(out) == before
    assert len(before) == 10
    assert "method 2 of 2, seed 2" in stderr
    assert "quick: data.max_tokens=4000, train.test_tokens=100000; --full" in stderr
    code, stdout, _ = keyfed(*command)
    assert code == 0
    assert result["verdict"] in stdout
    assert "unigram" in stdout


def test_a_changed_configuration_is_refused_in_one_line_before_anything_trains(finished, keyfed):
    corpus, out, _, _ = finished
    before = state_of(out)
    code, _, stderr = keyfed("compare", "fedmed", "fedavg", "--data", corpus, "--rounds", 5, "--out", out, *SETTINGS)
    assert code == 2
    line = one_line(stderr)
    assert "train.rounds: 2 → 5" in line
    assert "--out" in line
    assert state_of(out) == before
    assert not (out / "fedmed").exists()


def test_an_interrupted_comparison_goes_on_with_the_same_command(finished, keyfed, monkeypatch, no_report, tmp_path):
    corpus, _, result, _ = finished
    out = tmp_path / "out"
    command = ("compare", *METHODS, "--data", corpus, "--rounds", 2, "--seeds", 1, "--out", out, *SETTINGS, "--json")
    seen = []

    def stop_in_the_second_method(self, record):
        seen.append(record["round"])
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Narrator, "round", stop_in_the_second_method)
        code, _, stderr = keyfed(*command)
    assert code == 130
    assert f"go on with: keyfed compare fedavg fedatt:temperature=0.1,step=1.0 --data {corpus}" in stderr
    first = state_of(out / "fedavg")
    assert len((out / FOLDERS[1] / "seed-1" / "metrics.jsonl").read_text().splitlines()) == 1
    code, stdout, stderr = keyfed(*command)
    assert code == 0, stderr
    assert "resuming after round 1 of 2" in stderr
    assert state_of(out / "fedavg") == first
    whole = {row["label"]: row["seeds"][0]["test"] for row in result["rows"]}
    rows = json.loads(stdout)["rows"]
    assert {row["label"]: row["test"] for row in rows} == whole
    assert all(row["test_spread"]["perplexity"] is None for row in rows)


def test_a_failed_run_is_a_row_and_loses_no_other(finished, keyfed, tmp_path):
    corpus, *_ = finished
    out = tmp_path / "out"
    (out / "fedmed").mkdir(parents=True)
    (out / "fedmed" / "seed-1").write_text("in the way")
    command = ("compare", "fedmed", "fedavg", "--data", corpus, "--rounds", 1, "--out", out, *SETTINGS)
    code, stdout, stderr = keyfed(*command, "--json")
    assert code == 1
    assert "fedmed, seed 1 failed: " in stderr
    result = json.loads(stdout)
    assert [row["label"] for row in result["rows"]] == ["fedavg", "fedmed"]
    assert "is a file" in result["rows"][1]["failed"]["1"]
    assert set(result["rows"][0]) == set(result["rows"][1])
    assert result["failed"] == 1
    assert "is a file" in (out / "report.md").read_text("utf-8")
    before = state_of(out / "fedavg")
    (out / "fedmed" / "seed-1").unlink()
    code, stdout, _ = keyfed(*command)
    assert code == 0
    assert "one seed cannot tell" in stdout
    assert state_of(out / "fedavg") == before


def test_a_budget_of_tokens_gives_costly_rounds_fewer_of_them(finished, no_report, tmp_path):
    corpus, *_ = finished
    settings = [setting.split("=", 1) for setting in TINY]
    result = comparing.compare(
        ["fedavg", "fedsgd", "fedavg:epochs=2", "central"],
        [*settings, ("data.name", str(corpus)), ("train.rounds", 3), ("train.baselines", False)],
        budget="tokens", target="perplexity=1.5", out=tmp_path / "out",
    )  # fmt: skip
    rows = {row["label"]: row for row in result["rows"]}
    assert {label: row["rounds"] for label, row in rows.items()} == {
        "fedavg": 3, "fedsgd": 1, "fedavg:epochs=2": 1, "central": 3,
    }  # fmt: skip
    assert rows["central"]["tokens"] == pytest.approx(rows["fedavg"]["tokens"], rel=0.25)
    assert result["baselines"] == {}
    assert all(row["rounds_to_target"] is None for row in result["rows"])
    assert all(row["bytes"] > 0 for row in result["rows"])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("fedavg", "fedat"), "did you mean fedatt?"),
        (("fedavg", "fedavg"), "given twice"),
        ((), "METHOD"),
        (("fedavg", "--budget", "token"), "did you mean tokens?"),
        (("fedavg", "--target", "200"), "expected perplexity=NUMBER"),
        (("fedavg", "--seeds", "one"), "expected a number of seeds"),
        (("fedavg", "--set", "temperature=1"), "an option of none of fedavg"),
        (("fedavg", "--set", "lr"), "expected key=value"),
        (("fedavg", "--set", "train.cohort=99"), "fewer than the cohort of 99"),
        (("fedavg", "fedatt", "--set", "train.cohort=1"), "fedatt: fedatt weighs the clients of a round"),
        (("fedavg", "--data", "./no/such"), "no/such"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_trains_nothing(
    keyfed, finished, arguments, hint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    data = () if "--data" in arguments else ("--data", finished[0])
    code, _, stderr = keyfed("compare", *arguments, *data)
    assert code == 2
    assert hint in one_line(stderr)
    assert not (tmp_path / "runs").exists()


def test_every_run_of_a_comparison_can_write_tensorboard_events(keyfed, corpus, tmp_path):
    pytest.importorskip("tensorboard")
    settings = [item for s in TINY for item in ("--set", s)]
    out = tmp_path / "compared"
    code, _, err = keyfed(
        "compare",
        "fedavg",
        "fedprox",
        "--data",
        corpus,
        "--rounds",
        1,
        "--out",
        out,
        "--tensorboard",
        "--json",
        *settings,
    )
    assert code == 0, err
    for name in ("fedavg", "fedprox"):
        assert list((out / name / "seed-1" / "tensorboard").glob("events*"))
