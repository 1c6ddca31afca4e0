"""A run is extended to more rounds, and ends where it would have ended with all of them from the beginning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import keyfed.run.loop as run_train
from keyfed import api
from keyfed.config.load import Config
from keyfed.errors import RunError
from keyfed.federated import descent
from keyfed.run import folder as run_folder
from keyfed.run.folder import read_metrics, read_run_toml
from keyfed.run.loop import train
from tests.end_to_end.test_resume import (
    ROUNDS,
    assert_same_run,
    checkpoints,
    result_of,
    tiny,
    without_times,
    write_corpus,
)
from tests.listeners import Heard

SHORT = 3  # rounds before a run is extended
OVER = {"average": 0.8, "schedule": "cosine", "warmup": 0.2, "final": 0.1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """The run that had all rounds from the beginning."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny(corpus), out)
    return out


def with_options(config: Config, **options: object) -> Config:
    return replace(config, options={**config.options, **options})


def test_an_extended_run_is_the_run_that_had_all_rounds(whole, corpus, tmp_path):
    out, listener = tmp_path / "run", Heard()
    train(tiny(corpus, SHORT), out)
    api.train(tiny(corpus), out, resume=True, listener=listener)
    assert_same_run(whole, out)
    assert f"the run of {SHORT} rounds is extended to {ROUNDS}; the local step size stays 1" in listener.lines
    assert read_run_toml(out)[0] == read_run_toml(whole)[0]
    made, before = read_run_toml(out)[1], read_run_toml(whole)[1]
    assert made == before | {"extended": f"from {SHORT} to {ROUNDS} rounds"}


def test_it_can_be_extended_twice_and_says_so(whole, corpus, tmp_path):
    out = tmp_path / "run"
    for rounds in (1, SHORT, ROUNDS):
        train(tiny(corpus, rounds), out, resume=True)
    assert_same_run(whole, out)
    assert read_run_toml(out)[1]["extended"] == f"from 1 to {SHORT} rounds; from {SHORT} to {ROUNDS} rounds"
    assert train(tiny(corpus), out, resume=True) == json.loads((out / "result.json").read_text("utf-8"))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_is_refitted_over_the_new_rounds(corpus, tmp_path, monkeypatch, schedule):
    """Against a transcription: one run whose first rounds follow the old schedule, and the others the new one."""
    over, listener = OVER | {"schedule": schedule}, Heard()
    train(tiny(corpus, SHORT, **over), tmp_path / "run")
    train(tiny(corpus, **over), tmp_path / "run", resume=True, listener=listener)
    refitted = descent.progress
    steps = [refitted(descent.Schedule(schedule, r, 0.2, 0.1), n) for r, n in ((3, 2), (6, 3), (6, 5))]
    assert (
        f"the run of 3 rounds is extended to 6; the local step size was {steps[0]:.4g} in round 3, is {steps[1]:.4g} "
        f"in round 4 and goes to {steps[2]:.4g} in round 6 (train.schedule={schedule}, over the new whole)"
    ) in listener.lines
    assert steps[0] < steps[1]

    def transcribed(given, round: int) -> float:
        return refitted(replace(given, rounds=SHORT) if round < SHORT else given, round)

    monkeypatch.setattr(descent, "progress", transcribed)
    train(tiny(corpus, **over), tmp_path / "transcribed")
    assert_same_run(tmp_path / "transcribed", tmp_path / "run")


def test_the_best_model_of_before_is_kept_where_no_later_one_is_better(corpus, tmp_path, monkeypatch):
    config = with_options(tiny(corpus, SHORT), lr=0.5)
    short = train(config, tmp_path / "run")
    worse = replace(config, train=replace(config.train, rounds=ROUNDS))

    kept = (tmp_path / "run" / "model.safetensors").read_bytes()
    real = run_train.validator

    def blind(kind):
        score = real(kind)

        def validate(*given):
            found = score(*given)
            return replace(found, nats=found.nats + found.tokens)  # every new model is worse than all before

        return validate

    monkeypatch.setattr(run_train, "validator", blind)
    result = train(worse, tmp_path / "run", resume=True)
    assert (result["best_round"], result["rounds"]) == (short["best_round"], ROUNDS)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == kept


@pytest.mark.parametrize("after", [SHORT + 1, ROUNDS - 1])
def test_an_extension_that_was_interrupted_goes_on(whole, corpus, tmp_path, after):
    out = tmp_path / "run"
    train(tiny(corpus, SHORT), out)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus), out, resume=True, listener=Heard(after))
    assert not (out / "result.json").exists(), "it is not taken for finished"
    train(tiny(corpus), out, resume=True)
    assert_same_run(whole, out)


def test_a_run_that_is_not_finished_can_be_extended_too(whole, corpus, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny(corpus, SHORT), out, listener=Heard(2))
    train(tiny(corpus), out, resume=True)
    assert_same_run(whole, out)


def test_a_process_that_dies_while_the_extension_is_written_loses_nothing(whole, corpus, tmp_path, monkeypatch):
    out = tmp_path / "run"
    train(tiny(corpus, SHORT), out)
    before = result_of(out), checkpoints(out), without_times(read_metrics(out))

    def dies(*given):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_run_toml", dies)
        with pytest.raises(OSError, match="no space"):
            train(tiny(corpus), out, resume=True)
    train(tiny(corpus, SHORT), out, resume=True)  # it is the short run again, finished once more
    assert (result_of(out), checkpoints(out), without_times(read_metrics(out))) == before
    train(tiny(corpus), out, resume=True)
    assert_same_run(whole, out)


def test_fewer_rounds_are_refused(whole, corpus):
    before = {p.name: p.stat().st_mtime_ns for p in whole.iterdir() if p.name != "run.lock"}
    with pytest.raises(RunError, match=rf"a run of {ROUNDS} rounds, {ROUNDS} of them done, and .* is {SHORT}"):
        train(tiny(corpus, SHORT), whole, resume=True)
    assert {p.name: p.stat().st_mtime_ns for p in whole.iterdir() if p.name != "run.lock"} == before


def test_an_extension_changes_the_rounds_and_nothing_else(corpus, tmp_path):
    out = tmp_path / "run"
    train(tiny(corpus, 1), out)
    with pytest.raises(RunError, match=r"started with another configuration: method\.lr: 1\.0 → 0\.5; go on"):
        train(with_options(tiny(corpus, 2), lr=0.5), out, resume=True)
    assert read_run_toml(out)[0].train.rounds == 1
    assert (out / "result.json").exists()


def test_a_run_at_its_target_is_not_extended(corpus, tmp_path):
    out = tmp_path / "run"
    train(tiny(corpus, SHORT, until="perplexity=100000"), out)
    with pytest.raises(RunError, match="has reached its target"):
        train(tiny(corpus, until="perplexity=100000"), out, resume=True)


def test_a_private_run_is_not_extended(corpus, tmp_path):
    def private(rounds: int) -> Config:
        config = tiny(corpus, rounds)
        return replace(
            config,
            privacy=replace(config.privacy, noise=1.0, twin=False),
            participation=replace(config.participation, sampling="poisson"),
        )

    out = tmp_path / "run"
    train(private(2), out)
    ledger = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(RunError, match="private run, whose noise and account are for 2 rounds"):
        train(private(4), out, resume=True)
    assert (out / "ledger.jsonl").read_bytes() == ledger


def test_layers_frozen_in_every_round_stay_frozen(corpus, tmp_path):
    train(tiny(corpus, SHORT, frozen_rounds=SHORT), tmp_path / "run")
    train(tiny(corpus, ROUNDS, frozen_rounds=SHORT), tmp_path / "run", resume=True)
    train(tiny(corpus, ROUNDS, frozen_rounds=ROUNDS), tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_central_training_beside_it_is_done_again_for_the_new_rounds(corpus, tmp_path):
    short = train(tiny(corpus, 2, central=True), tmp_path / "run")
    result = train(tiny(corpus, 4, central=True), tmp_path / "run", resume=True)
    assert len(read_metrics(tmp_path / "run" / "central")) == 4
    assert result["baselines"]["central"]["test"] != short["baselines"]["central"]["test"]


def test_the_command_line_extends_a_run_and_writes_its_report_again(train_tiny, keyfed):
    out, result = train_tiny(rounds=2)
    report = (out / "report.md").read_text("utf-8")
    code, stdout, stderr = keyfed("train", "--resume", "--out", out, "--rounds", 3, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["rounds"] == 3
    assert result["rounds"] == 2
    again = (out / "report.md").read_text("utf-8")
    assert again != report
    assert "from 2 to 3 rounds" in again
    code, _, stderr = keyfed("train", "--resume", "--out", out, "--rounds", 1)
    assert code == 2
    assert "a run of 3 rounds, 3 of them done" in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_a_federation_refuses_more_rounds(tmp_path):
    from keyfed.run.remote.train import train_deployed
    from tests.faults.deployed import QUICK, federation, small_config, vocabulary, write_texts

    texts = write_texts(tmp_path / "texts", 4)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, rounds=1)
    transport, roster = federation(tmp_path / "clients", texts)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    more = replace(config, train=replace(config.train, rounds=2))
    with pytest.raises(RunError, match=r"a run of 1 rounds with real clients, and .* is 2"):
        train_deployed(more, vocab, tmp_path / "run", transport, roster, patience=QUICK, resume=True)
