"""Personalisation: what it measures, what it leaves alone, where it is refused."""

from __future__ import annotations

import json
import math
import random

import pytest

import keyfed as library
from keyfed.model.output import Score
from keyfed.reports.finished import Personalisation, resolve, summarise
from keyfed.run.folder import Trained
from keyfed.run.prepare import prepare
from tests.end_to_end.conftest import sentence


def test_a_tiny_step_changes_nothing_and_totals_are_sums_of_counts(train_quietly, keyfed):
    out = train_quietly(rounds=2)
    stored = {p: p.read_bytes() for p in (out / "model.safetensors", out / "result.json", out / "metrics.jsonl")}
    code, stdout, stderr = keyfed("evaluate", out, "--personalise", "epochs=1,lr=1e-9", "--json")
    assert code == 0, stderr
    block = json.loads(stdout)["personalised"]
    assert block["clients"] == 7
    assert block["left_out"] == {"no_training_text": 0, "no_held_out_text": 0, "unseen": 1}
    assert block["before"]["perplexity"] == pytest.approx(json.loads(stdout)["test"]["perplexity"], rel=1e-6)
    assert block["after"]["perplexity"] == pytest.approx(block["before"]["perplexity"], rel=1e-5)
    clients = block["by_client"].values()
    for when in ("before", "after"):
        assert block[when]["tokens"] == sum(c["tokens"] for c in clients)
        nats = sum(c["tokens"] * c[when] for c in clients) / block[when]["tokens"]
        assert block[when]["nats"] == pytest.approx(nats, rel=1e-12)
    assert (out / "plots" / "personalised.png").read_bytes()[:4] == b"\x89PNG"
    assert stored == {p: p.read_bytes() for p in stored}


def test_a_client_tested_on_what_it_trained_on_gains(train_quietly, keyfed, corpus):
    draw = random.Random(99)
    block = [" ".join(reversed(sentence(draw).split())) for _ in range(10)]  # a language of its own
    (corpus / "parrot.txt").write_text("\n".join(block * 10) + "\n", "utf-8")
    out = train_quietly(rounds=3, data_unseen=0.0)
    measured = library.personalise(out, epochs=3, lr=3.0)
    parrot = measured["by_client"]["parrot.txt"]
    assert parrot["after"] < parrot["before"] - 0.05
    gains = [c["after"] < c["before"] for c in measured["by_client"].values()]
    assert measured["gaining"] == pytest.approx(sum(gains) / len(gains))
    code, stdout, _ = keyfed("evaluate", out, "--personalise", "epochs=3,lr=3")
    assert code == 0
    assert f"{sum(gains)} of 9 clients gain by 3 epochs of sgd with lr 3" in stdout


def test_personalising_the_only_client_is_one_more_round(train_quietly, tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "only.txt").write_text("\n".join(sentence(random.Random(k)) for k in range(100)) + "\n", "utf-8")
    results = {}
    for rounds in (2, 3):
        out = train_quietly(
            rounds=rounds, name=f"run{rounds}", data=folder, train_cohort=1, lr=0.5, momentum=0.5, model_dropout=0.2
        )
        results[rounds] = json.loads((out / "result.json").read_text())
        assert results[rounds]["best_round"] == rounds
    block = library.personalise(tmp_path / "run2", lr=0.5)
    assert block["before"]["nats"] == pytest.approx(results[2]["test"]["nats"], rel=1e-9)
    assert block["after"]["nats"] == pytest.approx(results[3]["test"]["nats"], rel=1e-6)
    assert block["after"]["nats"] != pytest.approx(block["before"]["nats"], rel=1e-4)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("fedavg", {"optimiser": "sgd", "lr": 2.0, "batch_size": 4}, Personalisation(1, 0.2, "sgd", 4)),
        ("fedprox", {}, Personalisation(1, 0.001, "adam", 10)),
        ("fedsgd", {"lr": 7.0}, Personalisation(1, 0.0006, "adam", 10)),  # its lr is the server's, not a local step
        ("central", {}, Personalisation(1, 0.0002, "adam", 20)),
    ],
)
def test_the_run_decides_what_is_not_said(corpus, tmp_path, method, options, expected):
    config = library.configure(method, data=str(corpus), data_window=8, **options)
    prepared = prepare(config)
    found = resolve(Personalisation(), Trained(tmp_path, config, method, prepared.spec, {}, prepared.vocab), prepared)
    assert (found.epochs, found.optimiser, found.batch_size) == (1, expected.optimiser, expected.batch_size)
    assert found.lr == pytest.approx(expected.lr)


def test_one_published_test_text_is_refused(train_quietly, keyfed):
    out = train_quietly(data_partition="iid", data_clients=5, rounds=1)
    code, _, stderr = keyfed("evaluate", out, "--personalise", "epochs=1")
    assert code == 2
    assert "one test text for all clients" in stderr
    assert "natural" in stderr


def test_settings_are_checked(train_quietly, keyfed):
    out = train_quietly(rounds=1)
    for given, hint in (
        ("epoch=2", "did you mean epochs?"),
        ("epochs", "expected key=value"),
        ("epochs=x", "expected a whole number"),
        ("epochs=0", "expected > 0"),
        ("lr=-1", "expected > 0"),
        ("optimiser=adamm", "expected one of sgd, adam"),
        ("optimiser=adam", "give lr too"),
        ("lr=1,lr=2", "twice"),
    ):
        code, stdout, stderr = keyfed("evaluate", out, "--personalise", given)
        assert (code, stdout) == (2, ""), given
        assert hint in stderr
        assert stderr.count("\n") == 1


def test_a_copy_that_diverged_is_no_gain_and_the_worst_decile_is_taken_anew():
    before = {f"c{k}": Score(tokens=10 * (k + 1), nats=20.0 * (k + 1), top1=k) for k in range(10)}
    after = {name: Score(s.tokens, s.nats / 2, s.top1 + 1) for name, s in before.items()}
    after["c3"] = Score(before["c3"].tokens, math.nan)
    found = summarise(before, after)
    assert found["gaining"] == 0.9
    assert found["worst_decile"]["before"]["perplexity"] == pytest.approx(math.exp(2))
    assert found["worst_decile"]["after"]["perplexity"] == math.inf
