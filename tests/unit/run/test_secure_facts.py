"""What the report says about the ranges of secure sums."""

from __future__ import annotations

import pytest

from keyfed.run.secure import clamped_result, secure_facts, secure_result


def record(**more) -> dict:
    moved = {"masked": 4, "keys": 1, "shares": 1, "unmask": 1}
    cost = {"seconds": {"clients": 1.0, "server": 1.0}, "bytes": moved, "failed": None, "saturated": 0}
    return {"secure": cost | more}


def test_the_report_says_how_many_weights_were_clamped_and_nothing_of_runs_without_a_range():
    rows = [{"clamped": 2, "contributors": ["a"] * 4, "abandoned": False}] * 3
    found = clamped_result([*rows, {"clamped": 0, "contributors": [], "abandoned": True}, {"abandoned": False}])
    assert found == {"clients": 6, "of": 12}
    said = dict(secure_facts({"secure": True, "clamped": found}))["clamped weights, clients of all rounds"]
    assert said == "6 of 12 (50%) counted as an end of the public range of weights"
    assert clamped_result([{"abandoned": False}]) is None
    assert secure_facts({"secure": None}) == secure_facts({"secure": None, "clamped": None}) == []


@pytest.mark.parametrize(
    ("rounds", "said"),
    [([record(raised=0), record(raised=5), record(raised=2)], "5 bits of precision at most"), ([record()], None)],
    ids=["raised", "a run of before"],
)
def test_the_report_says_how_far_ranges_rose(rounds, said):
    facts = dict(secure_facts({"secure": secure_result(rounds)}))
    assert facts.get("ranges rose, and sums lost") == said
