"""Methods as a user runs them: what they log, what they refuse, how they go on after an interruption."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from keyfed.run.folder import load_model, read_metrics
from keyfed.run.loop import train
from tests.listeners import Heard

from .test_resume import checkpoints, tiny, without_times


def with_method(config, name, **options):
    return replace(config, method=name, options={**config.options, **options})


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedmed", {"beta": 0.6, "threshold": 0.05}), ("fedyogi", {}), ("fednesterov", {}), ("fedatt", {})],
)
def test_an_interrupted_run_ends_where_it_would_have_ended(corpus, tmp_path, name, options):
    config = with_method(tiny(corpus, rounds=4, checkpoint_every=2), name, **options)
    train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again", listener=Heard(2))
    train(config, tmp_path / "again", resume=True)
    one, two = (read_metrics(tmp_path / run) for run in ("whole", "again"))
    assert without_times(one) == without_times(two)
    ends = [checkpoints(tmp_path / run)["round-000004"] for run in ("whole", "again")]
    assert ends[0] == ends[1]
    assert load_model(tmp_path / "again").spec == load_model(tmp_path / "whole").spec


def test_the_ledger_and_the_attention_of_fedmed(corpus, tmp_path):
    config = tiny(corpus, rounds=2, cohort=4)
    plain = train(config, tmp_path / "fedavg")
    half = train(with_method(config, "fedmed", beta=0.5), tmp_path / "fedmed")
    assert half["traffic"]["up"] * 2 == plain["traffic"]["up"]
    assert half["traffic"]["down"] == plain["traffic"]["down"]
    assert half["traffic"]["control"] > plain["traffic"]["control"]  # all report, and distances too
    for record in read_metrics(tmp_path / "fedmed"):
        layers = record["effective_by_layer"]
        assert record["effective_clients"] == pytest.approx(sum(layers.values()) / len(layers))
        assert all(1 <= e <= 2 + 1e-9 for e in layers.values())
        assert len(record["contributors"]) == 2
        assert record["cohort"] == 4
    train(with_method(tiny(corpus, rounds=1, cohort=4), "fedmed", beta=0.1), tmp_path / "one")
    (alone,) = read_metrics(tmp_path / "one")  # the paper's β = 0.1 of ten clients: one upload, which is the mean
    assert (len(alone["contributors"]), alone["effective_clients"]) == (1, pytest.approx(1.0))
    losses = [record["loss"] for record in read_metrics(tmp_path / "fedmed")]
    assert [record["adaptive"] for record in read_metrics(tmp_path / "fedmed")] == [
        True,
        abs(losses[1] - losses[0]) > 0.1,
    ]
    assert not any({"effective_by_layer", "adaptive"} & set(record) for record in read_metrics(tmp_path / "fedavg"))


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("fedatt", {"temperature": 1e-4}, "a higher temperature"),
        ("fedmed", {"mediation": False}, "a lower temperature"),
        ("fedavg", {}, None),
    ],
)
def test_attention_that_does_too_much_or_nothing_is_said_once(corpus, tmp_path, name, options, word):
    heard = Heard()
    train(with_method(tiny(corpus, rounds=2), name, **options), tmp_path / "run", listener=heard)
    lines = [line for line in heard.lines if "attention" in line]
    assert len(lines) == (word is not None)
    assert word is None or word in lines[0]


def test_bad_options_are_refused_before_a_folder_is_made(keyfed, corpus, tmp_path):
    out = tmp_path / "run"
    for method, setting, why in [
        ("fedmed", "beta=1.5", "0 < beta ≤ 1"),
        ("fedatt", "temperature=0", "temperature > 0"),
        ("fedatt", "temprature=2", "did you mean temperature?"),
        ("fedadam", "tau=-1", "tau > 0"),
    ]:
        code, _, err = keyfed("train", method, "--data", corpus, "--out", out, "--set", setting)
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert why in err
        assert not out.exists()
    code, _, err = keyfed("train", "fedatt", "--data", corpus, "--out", out, "--set", "train.cohort=1")
    assert code == 2
    assert "a cohort of 1 has nothing to weigh" in err


def test_a_dry_run_counts_what_top_k_uploads(keyfed, corpus):
    args = ("--data", corpus, "--set", "train.cohort=4", "--dry-run", "--json")
    _, plain, _ = keyfed("train", "fedavg", *args)
    code, half, err = keyfed("train", "fedmed", "--set", "beta=0.5", *args)
    assert code == 0, err
    one, two = json.loads(plain)["bytes_per_round"], json.loads(half)["bytes_per_round"]
    assert two["up"] * 2 == one["up"]
    assert two["down"] == one["down"]
    assert two["control"] > one["control"]
