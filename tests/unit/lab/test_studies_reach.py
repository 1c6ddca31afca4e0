"""Verdicts that wait: what a method can reach is told where twice the rounds gain nothing, on both sides."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.lab.experiment import claims
from keyfed.lab.experiment.claims import (
    FAILS,
    HOLDS,
    LEARNING,
    NOT_JUDGED,
    RULE,
    compare_rows,
    said_verdict,
    verdict_on,
)
from keyfed.lab.experiment.grid import cells_of, study_from
from keyfed.lab.experiment.page import front_line, page_text
from keyfed.lab.experiment.table import OPEN, rows_of

DOCUMENT = """
title = "T"
paper = "P"
about = "A"
measures = ["perplexity", "top1"]
[axis.model]
counts = { study.order = 5 }
server = { method.name = "central" }
devices = { method.name = "fedavg" }
[axis.recipe]
short = { train.rounds = 10 }
long = { train.rounds = 40, train.schedule = "cosine" }
[axis.rounds]
once = {}
twice = { train.rounds = 80 }
[[grid]]
runner = "n-gram"
model = ["counts"]
[[grid]]
model = ["server", "devices"]
recipe = ["short"]
[[grid]]
model = ["server", "devices"]
recipe = ["long"]
rounds = ["once", "twice"]
[scale.smoke]
seeds = [1]
why = "quick"
[scale.standard]
seeds = [1, 2, 3]
why = "some"
[[searched]]
where = { model = "server", recipe = "long" }
trials = 10
tokens = 1_000_000
record = "r"
[[searched]]
where = { model = "devices", recipe = "long" }
trials = 12
tokens = 1_050_000
record = "r"
[[claims]]
says = "the network wins"
about = "reach"
kind = "lower"
of = { model = "devices" }
than = { model = "counts" }
twice = { rounds = "twice" }
[[claims]]
says = "devices win"
about = "reach"
kind = "lower"
of = { model = "devices" }
than = { model = "server" }
twice = { rounds = "twice" }
[[claims]]
says = "at ten rounds the counts win"
about = "budget"
kind = "higher"
of = { model = "devices", recipe = "short" }
than = { model = "server" }
"""
STUDY = study_from(tomllib.loads(DOCUMENT), Path("example.toml"))
COUNTS, BUDGET = STUDY.claims[0], STUDY.claims[2]
SHORT = {("counts",): 100.0, ("devices", "short"): 200.0, ("server", "short"): 150.0}
LONG = {("devices", "long", "once"): 80.0, ("server", "long", "once"): 70.0}
DOUBLED = {("devices", "long", "twice"): 79.9, ("server", "long", "twice"): 69.9}


def results(values, study=STUDY, scale="standard", spread=0.1, measure="perplexity"):
    """Results by cell id: `values` maps labels to the mean over seeds."""
    return {
        cell.id: {
            "id": cell.id, "seed": cell.seed, "curve": [],
            "measures": {measure: values[key] + spread * (cell.seed - 2)},
            "made": dict.fromkeys(("keyfed", "torch", "python", "hardware"), "1"),
            "rounds": None if cell.runner == "n-gram" else cell.settings["train.rounds"],
        }
        for cell in cells_of(study, scale)
        if (key := tuple(cell.labels.values())) in values
    }  # fmt: skip


def told(values, study=STUDY, claim=0, **more):
    return verdict_on(
        study, rows_of(study, "standard", results(values, study, **more)), study.claims[claim], "standard"
    )


def reasons(values, study=STUDY, claim=0, **more):
    rows = rows_of(study, "standard", results(values, study, **more))
    return "; ".join(c.waits for c in compare_rows(study, rows, study.claims[claim]) if c.waits)


def test_a_row_without_a_doubled_run_is_told_neither_way():
    for devices in (50.0, 100.0, 200.0):  # ahead, level and behind
        assert told(SHORT | {("devices", "short"): devices}) == LEARNING
    assert "devices, short has no run of twice the rounds" in reasons(SHORT)
    assert told({}) == OPEN


def test_settled_rows_are_told_and_those_that_still_learn_are_passed_over():
    assert told(SHORT | LONG) == LEARNING
    assert "devices, long, once: the run of twice the rounds is open" in reasons(SHORT | LONG)
    assert told(SHORT | LONG | DOUBLED) == HOLDS
    assert told(SHORT | LONG | DOUBLED, claim=1) == FAILS
    behind = {("devices", "long", "once"): 120.0, ("devices", "long", "twice"): 119.9}
    assert told(SHORT | LONG | DOUBLED | behind) == FAILS  # either way
    rows = rows_of(STUDY, "standard", results(SHORT | LONG | DOUBLED))
    assert [c.verdict for c in compare_rows(STUDY, rows, COUNTS)] == [LEARNING, HOLDS]  # a doubled run is no row


def test_both_sides_must_have_stopped():
    gaining = {("server", "long", "twice"): 60.0}
    assert told(SHORT | LONG | DOUBLED | gaining) == HOLDS  # the server is no side of it
    assert told(SHORT | LONG | DOUBLED | gaining, claim=1) == LEARNING
    assert "server, long, once: twice the rounds gain 16.7 %, of at most 1.0 %" in reasons(
        SHORT | LONG | DOUBLED | gaining, claim=1
    )


@pytest.mark.parametrize(
    ("twice", "spread", "verdict"),
    [(79.3, 0.1, HOLDS), (79.1, 0.1, LEARNING), (85.0, 0.1, HOLDS), (77.0, 4.0, HOLDS), (75.0, 4.0, LEARNING)],
    ids=["under-1", "over-1", "worse", "under-sd", "over-sd"],
)
def test_the_gain_is_held_against_a_hundredth_and_one_seeds_spread(twice, spread, verdict):
    assert told(SHORT | LONG | {("devices", "long", "twice"): twice}, spread=spread) == verdict


def test_more_is_better_of_shares():
    study = study_from(
        tomllib.loads(DOCUMENT.replace('kind = "lower"', 'kind = "higher"\nmeasure = "top1"')), Path("e.toml")
    )
    values = {
        ("counts",): 0.20,
        ("devices", "short"): 0.1,
        ("devices", "long", "once"): 0.25,
        ("devices", "long", "twice"): 0.26,
    }
    assert told(values, study, spread=0.0001, measure="top1") == LEARNING
    values["devices", "long", "twice"] = 0.24  # worse: nothing is gained
    assert told(values, study, spread=0.0001, measure="top1") == HOLDS


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tokens = 1_050_000", "tokens = 1_200_000", "searched with unequal tokens: devices, long, once with 1 M"),
        ('where = { model = "server", recipe = "long" }', 'where = { model = "server", recipe = "short" }',
         "the settings of server, long, once were not searched"),
        ("twice = { train.rounds = 80 }", "twice = { train.rounds = 60 }", "not twice the rounds"),
        ("twice = { train.rounds = 80 }", "twice = { train.rounds = 80, method.lr = 9.0 }", "has other settings"),
        ('train.schedule = "cosine" }', "method.decay = 0.9 }", "a schedule that does not fit them"),
    ],
    ids=["unequal", "not-searched", "rounds", "settings", "schedule"],
)  # fmt: skip
def test_a_search_and_a_schedule_must_fit(old, new, said):
    assert DOCUMENT.count(old) == 1
    study = study_from(tomllib.loads(DOCUMENT.replace(old, new)), Path("example.toml"))
    assert told(SHORT | LONG | DOUBLED, claim=1) == FAILS
    assert told(SHORT | LONG | DOUBLED, study, claim=1) == LEARNING
    assert said in reasons(SHORT | LONG | DOUBLED, study, claim=1)


def test_a_decay_that_was_refitted_fits():
    text = DOCUMENT.replace('train.schedule = "cosine" }', "method.decay = 0.9 }")
    text = text.replace("twice = { train.rounds = 80 }", "twice = { train.rounds = 80, method.decay = 0.94868 }")
    study = study_from(tomllib.loads(text), Path("example.toml"))
    assert told(SHORT | LONG | DOUBLED, study, claim=1) == FAILS


def test_a_claim_at_a_budget_is_judged_at_once_and_says_its_rounds():
    rows = rows_of(STUDY, "standard", results(SHORT))
    assert said_verdict(STUDY, rows, BUDGET, "standard") == "holds, at 10 rounds"
    assert said_verdict(STUDY, rows, COUNTS, "standard") == LEARNING
    assert verdict_on(STUDY, rows, COUNTS, "smoke") == said_verdict(STUDY, rows, BUDGET, "smoke") == NOT_JUDGED
    found = results(SHORT)
    assert f"The network wins: {LEARNING}." in page_text(STUDY, found)
    assert "At ten rounds the counts win: holds, at 10 rounds." in page_text(STUDY, found)
    assert "What keeps rows from being judged: devices, short has no run of twice the rounds" in page_text(STUDY, found)
    line = front_line(STUDY, found, COUNTS)
    assert f"**{LEARNING}**. short: 200.0 ± 0.1 against 100.0 ± 0.1 (+100.0 %)." in line
    assert any(LEARNING in paragraph for paragraph in RULE)


@given(st.floats(20.0, 500.0), st.floats(20.0, 500.0), st.floats(20.0, 500.0))
def test_no_figures_of_a_row_that_gains_make_a_verdict(once, gain, counts):
    """Property: where twice the rounds gain, whatever the numbers, nothing is told either way."""
    twice = once / (1.02 + gain / 1000)
    values = {("counts",): counts, ("devices", "long", "once"): once, ("devices", "long", "twice"): twice}
    assert told(values, spread=0.01) == LEARNING


def test_without_the_rule_an_undertrained_row_is_told(monkeypatch):
    monkeypatch.setattr(claims, "waits", lambda *_: "")
    assert told(SHORT).startswith(FAILS)
