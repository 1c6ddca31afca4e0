"""The sum is exact whoever is lost and whenever, or it fails closed."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.errors import BelowThreshold, SecureSumError
from keyfed.private.secure_sum import Collector, usual_threshold

QUICK, ALL = 1500, 10_000


def one_case(make_cohort, share, generator: np.random.Generator) -> str:
    """Draw a cohort, a threshold and who is lost when; run the sum; return how it ended."""
    size = int(generator.integers(3, 7))
    threshold = int(generator.integers(size // 2 + 1, size + 1))
    cohort = make_cohort(size, threshold, int(generator.integers(1, 6)), context=generator.bytes(8))
    fates = generator.choice(
        ["before shares", "before upload", "before unmask", "stays"], size, p=[0.08, 0.1, 0.1, 0.72]
    )
    fate = dict(zip(cohort.names, fates, strict=True))
    values = {name: generator.integers(0, 1 << 32, cohort.length, np.uint32) for name in cohort.names}
    survivors = [name for name in cohort.names if fate[name] in ("before unmask", "stays")]
    helpers = [name for name in cohort.names if fate[name] == "stays"]
    try:
        sums = share(cohort, [name for name in cohort.names if fate[name] == "before shares"])
        sums.upload({name: values[name] for name in generator.permutation(survivors)})
        assert sums.collector.survivors == tuple(survivors)
        sums.answer(generator.permutation(helpers))
        total = sums.collector.total()
    except BelowThreshold:
        assert len(helpers) < threshold
        return "closed"
    assert len(helpers) >= threshold
    np.testing.assert_array_equal(total, sum(values[name] for name in survivors))
    return "exact" if len(survivors) == size else "exact with losses"


def outcomes(make_cohort, share, cases: int, seed: int) -> dict[str, int]:
    generator = np.random.default_rng(seed)
    ends = [one_case(make_cohort, share, generator) for _ in range(cases)]
    return {end: ends.count(end) for end in set(ends)}


def test_random_losses_end_in_the_exact_sum_or_closed(make_cohort, share):
    ends = outcomes(make_cohort, share, QUICK, 1)
    assert all(ends[end] > QUICK / 20 for end in ("exact", "exact with losses", "closed")), ends


@pytest.mark.slow
def test_ten_thousand_random_losses_end_in_the_exact_sum_or_closed(make_cohort, share):
    ends = outcomes(make_cohort, share, ALL, 2)
    assert all(ends[end] > ALL / 20 for end in ("exact", "exact with losses", "closed")), ends
