"""What the report says about the ranges of secure sums."""

from __future__ import annotations

import pytest

from keyfed.run.secure import secure_facts, secure_result


def record(**more) -> dict:
    moved = {"masked": 4, "keys": 1, "shares": 1, "unmask": 1}
    cost = {"seconds": {"clients": 1.0, "server": 1.0}, "bytes": moved, "failed": None, "saturated": 0}
    return {"secure": cost | more}


@pytest.mark.parametrize(
    ("rounds", "said"),
    [([record(raised=0), record(raised=5), record(raised=2)], "5 bits of precision at most"), ([record()], None)],
    ids=["raised", "a run of before"],
)
def test_the_report_says_how_far_ranges_rose(rounds, said):
    facts = dict(secure_facts({"secure": secure_result(rounds)}))
    assert facts.get("ranges rose, and sums lost") == said
