"""The parts of a search: what is tried, who goes on, who wins, what is refused."""

from __future__ import annotations

import math
import tomllib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.config.load import Config, UploadConfig, config_from
from keyfed.errors import ConfigError
from keyfed.federated.methods import METHODS
from keyfed.federated.spec import Part
from keyfed.lab.experiment.search import Listed, Range, at_edge, sample
from keyfed.lab.experiment.tune import (
    Outcome,
    budget,
    default_space,
    first_rounds,
    halve,
    judge,
    parse_search,
    until_compared,
    winner,
    winning_toml,
)

SPACES = [
    {"lr": Range(1e-3, 1e-1, log=True)},
    {"lr": Range(0.1, 10, log=True), "mu": Range(0.0, 1.0), "epochs": Range(1, 5, whole=True)},
    {"lr": Range(0.1, 10, log=True), "norm": Listed(("spectral", "frobenius"))},
]


@pytest.mark.parametrize("space", SPACES)
@given(seed=st.integers(0, 1000), count=st.integers(1, 20))
def test_samples_lie_inside_their_ranges_and_differ(space, seed, count):
    found = sample(space, count, seed)
    assert len(found) == count
    assert len({tuple(values.items()) for values in found}) == count
    for values in found:
        for key, one in space.items():
            if isinstance(one, Range):
                assert one.low <= values[key] <= one.high
                assert not one.whole or isinstance(values[key], int)
            else:
                assert values[key] in one.values


def test_samples_come_from_the_seed():
    space = SPACES[1]
    assert sample(space, 8, 1) == sample(space, 8, 1)
    assert sample(space, 8, 1) != sample(space, 8, 2)


@pytest.mark.parametrize("seed", range(5))
def test_samples_leave_no_hole_in_a_logarithmic_range(seed):
    one = Range(1e-4, 1.0, log=True)
    places = sorted(one.place(values["lr"]) for values in sample({"lr": one}, 12, seed))
    gaps = [b - a for a, b in pairwise(places)]
    assert max([places[0], *gaps, 1 - places[-1]]) < 2.5 / 12  # 12 independent draws leave a gap of 3.1 / 12 on average


def test_a_small_list_is_tried_whole():
    space = {"lr": Listed((0.1, 1.0)), "norm": Listed(("spectral", "frobenius"))}
    assert len(sample(space, 10, 1)) == 4
    assert len(sample(space, 3, 1)) == 3


def outcome(trial: int, nats: float | None, rounds: int = 9, moved: int = 0, status: Any = "finished") -> Outcome:
    return Outcome(trial, {"lr": trial}, status, rounds, nats, bytes=moved)


def test_halving_trains_the_first_trial_and_the_best_third_to_the_end():
    quality = [3.0, 9.0, 1.0, 8.0, 2.0, 7.0, 6.0, 1.5, 5.0, 4.0]
    calls: list[tuple[int, int]] = []

    def run(trial: int, rounds: int) -> Outcome:
        calls.append((trial, rounds))
        return outcome(trial, quality[trial] + 1 / rounds, rounds)

    outcomes = halve(10, 9, run)
    assert [o.trial for o in outcomes] == list(range(10))
    assert {o.trial for o in outcomes if o.rounds == 9} == {0, 2, 7, 4}
    assert calls == [(0, 9), *((k, 3) for k in range(1, 10)), (2, 9), (7, 9), (4, 9)]
    spent = sum(dict(calls).values())
    assert spent == budget(10, 9)
    best = winner(outcomes, 9)
    assert best is not None
    assert best.trial == 2


def test_trials_that_went_wrong_neither_go_on_nor_win():
    bad = {1: None, 2: math.nan, 3: 1.0}

    def run(trial: int, rounds: int) -> Outcome:
        return outcome(trial, bad.get(trial, 5.0), rounds, status="diverged" if trial in bad else "finished")

    outcomes = halve(5, 6, run)
    assert {o.trial for o in outcomes if o.rounds == 6} == {0, 4}
    assert winner([outcome(0, None, status="diverged")], 9) is None


def test_the_winner_has_trained_to_the_end_and_ties_go_to_fewer_bytes():
    short = outcome(1, 0.5, rounds=3, status="stopped")
    tied = [outcome(0, 2.0, moved=10), short, outcome(2, 2.0, moved=5), outcome(3, 2.5, moved=1)]
    best = winner(tied, 9)
    assert best is not None
    assert best.trial == 2


def test_few_rounds_are_one_round_at_first():
    assert [first_rounds(r) for r in (1, 2, 3, 8, 9)] == [1, 1, 1, 2, 3]


def record(number: int, nats: float | None, tokens: int = 100, **more: Any) -> dict[str, Any]:
    valid = {"nats": nats, "top1": 0.1, "top3": 0.2, "tokens": tokens}
    traffic = {"down": 10, "up": 5, "control": 1}
    return {
        "round": number, "valid": valid, "traffic": traffic, "elapsed": 1.0 * number, "refused": {},
        "contributors": ["a"], **more,
    }  # fmt: skip


def test_a_trial_is_judged_by_its_best_round_and_seeds_by_their_tokens():
    first = [record(1, 3.0), record(2, 2.0), record(3, 2.5)]
    second = [record(1, 5.0, 300), record(2, 4.0, 300), record(3, 6.0, 300)]
    found = judge(4, {"lr": 1.0}, [first, second], rounds=9, vocab=1000)
    assert found.nats == pytest.approx((2.0 * 100 + 4.0 * 300) / 400)
    assert (found.status, found.rounds, found.bytes, found.seconds) == ("stopped", 3, 96, 6.0)
    assert judge(4, {}, [first], rounds=3, vocab=1000).status == "finished"


@pytest.mark.parametrize(
    "records",
    [
        [record(1, None)],
        [record(1, math.log(10_001))],
        [record(1, 2.0, refused={"a": "exploding upload"}, contributors=[])],
    ],
)
def test_divergence_is_said(records):
    assert judge(1, {}, [records], rounds=1, vocab=1000).status == "diverged"


def test_comparison_waits_for_a_validation_and_does_not_look_beyond():
    records = [record(k, 1.0) for k in range(1, 7)]
    for k in (1, 2, 4, 5):
        del records[k - 1]["valid"]
    assert until_compared(records[:2], 2) is None
    found = until_compared(records, 2)
    assert found is not None
    assert found[-1]["round"] == 3


@pytest.mark.parametrize(
    ("value", "edge"), [(0.001, True), (0.0012, True), (0.01, False), (0.09, True), (0.5, True), (None, False)]
)
def test_a_value_at_the_edge_of_its_range_is_noticed(value, edge):
    assert at_edge({"lr": Range(1e-3, 1e-1, log=True)}, {"lr": value}) == (["lr"] if edge else [])


def test_lists_have_an_edge_only_if_they_have_an_inside():
    assert at_edge({"epochs": Listed((5, 1, 2))}, {"epochs": 5}) == ["epochs"]
    assert at_edge({"epochs": Listed((5, 1, 2))}, {"epochs": 2}) == []
    assert at_edge({"epochs": Listed((1, 2))}, {"epochs": 2}) == []
    assert at_edge({"norm": Listed(("spectral", "frobenius"))}, {"norm": "spectral"}) == []


@pytest.mark.parametrize(
    ("search", "hint"),
    [
        ("lr", "expected key=LOW..HIGH"),
        ("lr=", "expected key=LOW..HIGH"),
        ("lrr=1..2", "did you mean lr?"),
        ("data.vocab=10..20", "change the text or model"),
        ("lr=2..1", "LOW < HIGH"),
        ("lr=1..inf", "LOW < HIGH"),
        ("lr=a..b", "two numbers"),
        ("lr=1..2..3", "two numbers"),
        ("lr=0..1:log", "LOW > 0"),
        ("lr=1..2:lin", "expected :log"),
        ("optimiser=1..2", "list its values"),
        ("optimiser=sgd,adamm", "expected one of sgd, adam"),
        ("epochs=1.2..1.8", "two whole numbers"),
        ("lr=0.1", "at least two"),
        ("lr=0.1,0.1", "at least two"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(search, hint):
    with pytest.raises(ConfigError, match=hint.replace(".", r"\.").replace("?", r"\?")):
        parse_search(Config(), [search])


def test_a_search_says_again_what_it_read():
    searches = ["method.lr=0.001..0.1:log", "epochs=1..5", "clip=none,0.5,1"]
    space = parse_search(Config(), searches)
    assert {key: str(one) for key, one in space.items()} == {
        "lr": "0.001..0.1:log", "epochs": "1..5", "clip": "none,0.5,1.0",
    }  # fmt: skip
    assert parse_search(Config(), [f"{key}={one}" for key, one in space.items()]) == space
    with pytest.raises(ConfigError, match="twice"):
        parse_search(Config(), ["lr=1,2", "lr=3,4"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_something_to_search_and_its_values_are_taken(method):
    config = Config(method=method)
    space = default_space(config)
    assert ("r" if method == "liadmm" else "lr") in space
    for values in sample(space, 5, 1):
        parsed = config_from({"method": {"name": method, **values}}, "here")
        METHODS[method](**parsed.options)


def test_the_range_of_the_step_size_follows_the_optimiser():
    adam, sgd = (default_space(Config(options={"optimiser": o}))["lr"] for o in ("adam", "sgd"))
    assert isinstance(adam, Range)
    assert isinstance(sgd, Range)
    assert adam.high <= sgd.low


def test_the_winner_is_written_as_a_configuration():
    config = Config(method="fedatt", options={"optimiser": "sgd", "lr": 2.0, "epochs": 1, "clip": None})
    document = tomllib.loads(winning_toml(config, {"lr": 0.5, "step": 1.2}))
    assert document == {"method": {"name": "fedatt", "step": 1.2, "clip": "none", "optimiser": "sgd", "lr": 0.5}}
    assert config_from(document, "here").options["clip"] is None
    parts = Config(mediator=Part("uniform"), server=Part("adam", {"lr": 0.1}), upload=UploadConfig(quantise="int8"))
    again = config_from(tomllib.loads(winning_toml(parts, {"lr": 0.5})), "here")
    assert (again.server.name, again.server.options["lr"], again.mediator.name) == ("adam", 0.1, "uniform")
    assert again.upload.quantise == "int8"


def test_what_nobody_reads_is_not_searched():
    assert set(default_space(Config(method="fedadmm"))) == {"lr", "rho"}
    assert "server_lr" in default_space(Config(method="fedadmm", options={"server_step": "published"}))
    assert set(default_space(Config(method="fedadam", server=Part("sgd")))) == {"lr"}
    assert set(default_space(Config(method="fedatt", mediator=Part("tokens")))) == {"lr", "step"}
