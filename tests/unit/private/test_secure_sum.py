"""The sum is exact whoever is lost and whenever, or it fails closed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from keyfed.errors import BelowThreshold, Refused, SecureSumError
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import least_alive, usual_threshold

QUICK, ALL = 200, 10_000


def one_case(make_cohort, share, generator: np.random.Generator) -> str:
    """Draw a cohort, a threshold and who is lost when; run the sum; return how it ended."""
    size = int(generator.integers(3, 7))
    threshold = int(generator.integers(size // 2 + 1, size + 1))
    pool, length = f"pool {generator.integers(50)}", int(generator.integers(1, 6))
    cohort = make_cohort(size, threshold, length, context=generator.bytes(8), pool=pool)
    fates = generator.choice(
        ["before shares", "before upload", "before unmask", "stays"], size, p=[0.08, 0.1, 0.1, 0.72]
    )
    fate = dict(zip(cohort.names, fates, strict=True))
    values = {name: generator.integers(0, 1 << 32, cohort.length, np.uint32) for name in cohort.names}
    survivors = [name for name in cohort.names if fate[name] in ("before unmask", "stays")]
    alive = [name for name in cohort.names if fate[name] != "before shares"]
    helpers = [name for name in cohort.names if fate[name] == "stays"]
    try:
        sums = share(cohort, [name for name in cohort.names if fate[name] == "before shares"])
        sums.upload({name: values[name] for name in generator.permutation(survivors)})
        assert sums.collector.survivors == tuple(survivors)
        sums.answer(generator.permutation(helpers))
        total = sums.collector.total()
    except BelowThreshold:
        assert len(helpers) < threshold or len(alive) < least_alive(size, threshold)
        return "closed"
    assert len(helpers) >= threshold
    assert len(alive) >= least_alive(size, threshold)
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


def test_the_usual_threshold_is_above_two_thirds():
    assert [usual_threshold(n) for n in (1, 2, 3, 4, 5, 6, 9, 50)] == [1, 2, 3, 3, 4, 5, 7, 34]
    assert all(2 * n < 3 * usual_threshold(n) <= 2 * n + 3 for n in range(1, 200))


@pytest.mark.parametrize("members", range(3, 60))
def test_the_usual_threshold_needs_no_more_alive_than_itself_and_a_lower_one_never_more_than_all(members):
    assert least_alive(members, usual_threshold(members)) == usual_threshold(members)
    for threshold in range(members // 2 + 1, members + 1):
        least = least_alive(members, threshold)
        assert threshold <= least <= members
        assert (least - 1) * threshold > members * (members - threshold)
        if least > threshold:  # one fewer, and the keys of all the others could be collected
            assert (least - 2) * threshold <= members * (members - threshold)


def test_fifty_clients_lost_at_every_stage(make_cohort, share):
    cohort = make_cohort(50, length=3)
    values = {name: np.full(3, 1 << 31, np.uint32) + np.uint32(at) for at, name in enumerate(cohort.names)}
    sums = share(cohort, silent=cohort.names[:5])
    sums.upload({name: values[name] for name in cohort.names[10:]})
    sums.answer(cohort.names[16:])
    expected = sum(range(10, 50)) + 40 * (1 << 31)
    assert sums.collector.total().tolist() == [expected % 2**32] * 3


@pytest.mark.parametrize("stage", ["shares", "uploads", "answers"])
def test_below_the_threshold_nothing_is_opened(make_cohort, share, stage):
    cohort = make_cohort(4, threshold=3)
    values = {name: np.zeros(8, np.uint32) for name in cohort.names}
    if stage == "shares":
        with pytest.raises(BelowThreshold, match="2 of 4 clients sent their shares; 3 are needed at the threshold 3"):
            share(cohort, silent=["c0", "c1"])
        return
    sums = share(cohort)
    sums.upload({name: values[name] for name in (["c0", "c1"] if stage == "uploads" else cohort.names)})
    if stage == "uploads":
        with pytest.raises(BelowThreshold, match="2 of 4 clients uploaded"):
            _ = sums.collector.survivors
        with pytest.raises(SecureSumError, match="before its survivors are settled"):
            sums.collector.total()
        with pytest.raises(Refused, match="refuses 2 survivors: its floor and the threshold want 3"):
            sums.members["c0"].unmask(["c0", "c1"])  # nor do the clients help
        return
    sums.answer(["c0", "c1"])
    with pytest.raises(BelowThreshold, match="2 of 4 clients answered"):
        sums.collector.total()
    sums.answer(["c2"])  # more answers may still come
    assert sums.collector.total().tolist() == [0] * 8


def test_every_threshold_of_the_answers_opens_the_same_sum(make_cohort, share):
    cohort = make_cohort(5, threshold=3)
    values = {name: np.arange(8, dtype=np.uint32) * (at + 1) for at, name in enumerate(cohort.names[:4])}
    for helpers in combinations(values, 3):
        sums = share(cohort)
        sums.upload(values)
        sums.answer(helpers)
        assert sums.collector.total().tolist() == [10 * i for i in range(8)]


def test_order_of_messages_and_of_the_cohort_does_not_matter(make_cohort):
    cohort = make_cohort(4)
    terms, turned = cohort.terms(), SumTerms(b"model, round 1", tuple(reversed(cohort.signed.values())), 3, 8)
    assert terms == turned
    members, collector = cohort.members(), Collector(turned)
    for name in reversed(cohort.names):
        collector.take_shares(name, dict(reversed(members[name].shares().items())))
    alive, parcels = collector.forward()
    for name in ("c2", "c0", "c3", "c1"):
        parcel = dict(reversed(parcels[name].items()))
        collector.take_masked(name, members[name].masked(np.ones(8, np.uint32), alive[::-1], parcel))
    for name in ("c1", "c3", "c0"):
        collector.take_unmask(name, members[name].unmask(collector.survivors[::-1]))
    assert collector.total().tolist() == [4] * 8


def test_the_digest_stands_for_all_the_terms(make_cohort):
    cohort, other = make_cohort(4), make_cohort(5)
    changes = [{}, {"context": b"model, round 2"}, {"threshold": 4}, {"length": 9}]
    digests = [cohort.terms(**change).digest() for change in changes] + [other.terms(threshold=3).digest()]
    serial = replace(cohort.signed["c0"], serial=8)
    digests.append(SumTerms(b"model, round 1", (serial, *list(cohort.signed.values())[1:]), 3, 8).digest())
    assert len(set(digests)) == len(digests)
    assert cohort.terms().digest() == cohort.terms().digest()


def test_terms_that_make_no_sense_are_an_error(make_cohort):
    cohort = make_cohort(3)
    for change, says in (({"threshold": 4}, "threshold of 4"), ({"threshold": 0}, "of 0"), ({"length": 0}, "over 0")):
        with pytest.raises(SecureSumError, match=says):
            cohort.terms(**change)
    keys = list(cohort.signed.values())
    with pytest.raises(SecureSumError, match="client c0 stands twice"):
        SumTerms(b"", (*keys, keys[0]), 3, 8)
    with pytest.raises(SecureSumError, match="stands twice in one cohort"):
        SumTerms(b"", (*keys, replace(keys[0], client="d")), 3, 8)


def test_the_values_are_not_changed_and_secrets_are_gone_after_the_sum(make_cohort, share):
    cohort = make_cohort(4)
    values = {name: np.arange(8, dtype=np.uint32) for name in cohort.names}
    sums = share(cohort)
    sums.upload(values)
    assert all(member._secrets is None and member._pair is None for member in sums.members.values())
    assert values["c0"].tolist() == list(range(8))
    sums.answer(cohort.names)
    assert all(not member._held for member in sums.members.values())
    assert sums.collector.total() is sums.collector.total()
