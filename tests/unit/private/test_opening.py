"""Rounds whose secure sum opens by one client: how likely they are, and that ε counts them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from keyfed.config.load import Config
from keyfed.config.schema import PrivacyConfig, SecureConfig
from keyfed.errors import PrivacyError
from keyfed.private.dp.accounting import (
    COARSE,
    MOST_MEMBERS,
    Opening,
    Release,
    at_rate_one,
    calibrate,
    chance,
    epsilon,
    most_met,
)
from keyfed.run.remote.private import hinge_of


@pytest.mark.parametrize("opening", [Opening(3), Opening(10), Opening(3, 7)], ids=["3", "10", "7 stay"])
def test_the_chance_is_that_of_drawing_so_many_others_that_one_decides(opening):
    for present, rate in ((5, 0.5), (30, 0.3), (200, 0.05)):
        count = np.arange(present)
        opens = np.array([opening.needed(int(m)) is not None for m in range(present + 1)])
        met = binom.pmf(count, present - 1, rate)[opens[:-1] != opens[1:]].sum()
        assert chance(present, rate, opening) == pytest.approx(met)


@given(st.floats(1e-9, 30), st.sampled_from([1e-4, 1e-8]), st.integers(40, 2000))
def test_a_client_meets_more_rounds_than_are_counted_with_the_stated_chance_at_most(mean, but_for, rounds):
    assert binom.sf(most_met(mean, but_for), rounds, mean / rounds) <= but_for * (1 + 1e-6)


@pytest.mark.parametrize(
    ("clients", "called", "floor", "delta"), [(100, 6, 3, 1e-6), (1000, 10, 3, 1e-6), (1000, 20, 10, 1e-7)]
)
def test_epsilon_covers_a_sum_that_opens_by_one_client(clients, called, floor, delta):
    """The δ of that event alone, by integrating over the two directions in which sums differ; without it ε is too low.

    The others send floor − 1 clips along one axis, the client one along the other; a closed sum is at the origin.
    """
    rate = called / clients
    met = chance(clients, rate, Opening(floor))
    x, y = np.meshgrid(np.linspace(-8, floor + 8, 900), np.linspace(-8, 9, 600), indexing="ij")
    area = (x[1, 0] - x[0, 0]) * (y[0, 1] - y[0, 0])

    def density(along, across):
        return np.exp(-((x - along) ** 2 + (y - across) ** 2) / 2) / (2 * math.pi)

    closed = (1 - rate) * density(0, 0)
    with_it, without = rate * density(floor - 1, 1) + closed, rate * density(floor - 1, 0) + closed

    def true_delta(eps):
        return met * float(np.maximum(with_it - math.exp(eps) * without, 0).sum() * area)

    assert true_delta(epsilon([Release(1.0, rate)], delta)) > delta
    assert true_delta(epsilon([Release(1.0, rate, hinge=met)], delta)) <= delta


def test_rounds_at_the_hinge_are_counted_however_the_ledger_is_split():
    def found(*rows):
        return epsilon(rows, 1e-5, grid=COARSE)

    whole = found(Release(1.0, 0.1, 50, 1e-3))
    assert found(Release(1.0, 0.1, 20, 1e-3), Release(1.0, 0.1, 30, 1e-3)) == pytest.approx(whole, rel=1e-9)
    assert found(Release(1.0, 0.1, 50)) < whole < found(Release(1.0, 1.0, 50))
    assert at_rate_one([Release(1.0, 0.1, 2, 0.5)], 1e-5) == ((Release(1.0, 1.0, 2),), 1e-5)


def test_noise_is_calibrated_for_them():
    z = calibrate(4.0, 1e-5, 0.1, 50, hinge=1e-4)
    assert z > calibrate(4.0, 1e-5, 0.1, 50)
    assert epsilon([Release(z, 0.1, 50, 1e-4)], 1e-5, grid=COARSE) == pytest.approx(4.0, rel=2e-3)


def test_cohorts_that_no_secure_sum_holds_are_refused():
    config = Config(secure=SecureConfig(on=True), privacy=PrivacyConfig(noise=1.0))
    with pytest.raises(PrivacyError, match=f"more than {MOST_MEMBERS:,} clients") as caught:
        hinge_of(config, 100_000, 4_000)
    fits = int(str(caught.value).rsplit(" ", 1)[1].replace(",", ""))
    assert hinge_of(config, 100_000, fits) < 1e-6
    with pytest.raises(PrivacyError, match="no secure sum opens"):
        hinge_of(config, 100_000, fits + 1)
