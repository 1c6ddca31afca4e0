"""How many clients a budget needs."""

from __future__ import annotations

import pytest

from keyfed.errors import PrivacyError
from keyfed.private.plan import cohort_needed, measured_costs, noise_to_clip, plan

FLEET = {"population": 1_000_000, "delta": 1e-7, "rounds": 100, "parameters": 1_000_000}


def test_the_figures_of_the_documentation():
    assert noise_to_clip(1.0, 3_550_000, 10) == pytest.approx(188, abs=1)
    assert noise_to_clip(1.0, 3_550_000, 1000) == pytest.approx(1.9, abs=0.02)
    assert noise_to_clip(1.0, 1_350_000, 5000) == pytest.approx(0.23, abs=0.005)


def test_the_cohort_that_is_needed_is_enough_and_not_much_more_than_enough():
    m = cohort_needed(8.0, 1.0, **FLEET)
    (just,) = plan([8.0], [m], **FLEET)
    (less,) = plan([8.0], [m * 9 // 10], **FLEET)
    assert just.ratio <= 1.02
    assert less.ratio > 1


def test_a_population_that_is_too_small_is_said():
    assert cohort_needed(1.0, 0.01, population=1000, delta=1e-5, rounds=1000, parameters=10**7) is None


def test_a_cohort_larger_than_the_population_is_refused():
    with pytest.raises(PrivacyError, match="cohort"):
        plan([8.0], [11], population=10, delta=0.01, rounds=1, parameters=5)


def test_only_what_was_measured_is_told():
    measured = {"method": "fedavg", "test": {"perplexity": 120.0}, "privacy": {"pld": 7.9, "verdict": "SIMULATED",
                "noise_to_clip": 0.1, "twin": {"test": {"perplexity": 100.0}}}}  # fmt: skip
    assert measured_costs({"a": {"test": {"perplexity": 3.0}}, "b": {"privacy": {"pld": 1.0}}}) == []
    (row,) = measured_costs({"a": measured})
    assert (row["perplexity"], row["noiseless"], row["epsilon"]) == (120.0, 100.0, 7.9)
