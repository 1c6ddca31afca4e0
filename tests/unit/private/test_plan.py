"""How many clients a budget needs."""

from __future__ import annotations

import pytest

from keyfed.errors import PrivacyError
from keyfed.private.dp.accounting import cohort_needed, measured_costs, noise_to_clip, plan, usual_count_noise
from keyfed.private.dp.noise import update_noise

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


@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("z", [0.3, 1.0, 2.5, 40.0])
@pytest.mark.parametrize("cohort", [1, 2.5, 4, 20, 50, 100, 799, 800, 5000, 1_000_000])
def test_a_count_has_noise_of_a_twentieth_of_the_cohort_and_never_takes_more_than_a_quarter(cohort, z, losses):
    found = usual_count_noise(cohort, z, losses=losses)
    if cohort / 20 >= z:  # as it always was
        assert found == (min(cohort / 20, 5 * z) if losses else cohort / 20)
    else:
        assert found == z
    assert update_noise(z, found) <= z * 2 / 3**0.5 * (1 + 1e-12)


def test_a_fleet_of_four_has_a_plan():
    (row,) = plan([8.0], [4], population=4, delta=4**-1.1, rounds=5, parameters=1000)
    assert row.count_noise == row.z > 4 / 20
    (large,) = plan([8.0], [5000], **FLEET)
    assert large.count_noise == 250 > large.z


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
