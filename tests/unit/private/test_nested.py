"""Sums of one text: what a client refuses, so that no combination of them is of a few clients."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import Refused
from keyfed.private.secagg.nested import Chain, to_leave_out
from keyfed.private.secagg.threshold import usual_threshold

NAMES = [f"c{n:02d}" for n in range(12)]
APART = 3


def summed(chain, survivors, cohort=None, threshold=None):
    cohort = survivors if cohort is None else cohort
    return chain.joined(cohort, threshold or usual_threshold(len(cohort)), APART).settled(survivors, APART)


def after_all():
    return summed(Chain(), NAMES)


@pytest.mark.parametrize("gone", [1, 2])
def test_survivors_that_lack_a_few_are_refused_at_the_end(gone):
    chain = after_all().joined(NAMES, 9, APART)
    with pytest.raises(Refused, match=f"lack {gone} of the clients of an earlier sum"):
        chain.settled(NAMES[gone:], APART)


def test_the_same_clients_and_enough_fewer_are_taken():
    fewer = summed(after_all(), NAMES[3:])
    assert summed(summed(after_all(), NAMES), NAMES[3:], NAMES[1:]) == fewer
    assert fewer.opened == frozenset(NAMES[3:])


@pytest.mark.parametrize(
    ("cohort", "threshold", "said"),
    [
        ([*NAMES[1:], "new"], 9, "1 of the 12 clients were not in an earlier sum"),
        (NAMES[:4], 3, "the threshold 3 of a later sum of the same text: 4 or more"),
        (NAMES[1:], 10, "they have to be the same clients, or 3 fewer with 10 left"),
    ],
)
def test_a_cohort_that_does_not_fit_is_refused_before_anything_is_sent(cohort, threshold, said):
    with pytest.raises(Refused, match=said):
        after_all().joined(cohort, threshold, APART)


def test_half_of_the_first_clients_are_too_few():
    """Else two later sums could be of disjoint clients, of whom none knows both, and leave one client over."""
    with pytest.raises(Refused, match="6 survivors of a text of which 12 clients began: 7 are needed"):
        after_all().joined(NAMES, 6, APART).settled(NAMES[:6], APART)


def test_who_was_lost_does_not_come_back():
    fewer = summed(after_all(), NAMES[3:])
    with pytest.raises(Refused, match="3 of the 12 clients were not in an earlier sum"):
        fewer.joined(NAMES, 9, APART)


def test_a_sum_that_was_joined_and_not_opened_binds_its_cohort():
    chain = after_all().joined(NAMES[3:], 7, APART)
    with pytest.raises(Refused, match="not in an earlier sum"):
        chain.joined(NAMES, 9, APART)
    assert summed(chain, NAMES[3:]).opened == frozenset(NAMES[3:])


def test_three_sums_of_which_each_two_differ_enough_can_single_out_a_client():
    """Why sums have to be nested: U, U without abc, U without ade and U without bcde give twice a."""
    everybody = set(NAMES)
    lists = [everybody - {NAMES[n] for n in gone} for gone in ((0, 1, 2), (0, 3, 4), (1, 2, 3, 4))]
    chain = summed(after_all(), lists[0])
    for other in lists[1:]:
        with pytest.raises(Refused):
            chain.joined(other, usual_threshold(len(other)), APART)


@given(st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES))), max_size=8))
def test_no_combination_of_accepted_sums_is_of_a_few(tries):
    """Clients that were in the same accepted sums are weighed alike by every combination: there are enough of them."""
    chain, accepted = Chain(), []
    for cohort, lost in tries:
        try:
            chain = summed(chain, sorted(cohort - lost), sorted(cohort)) if cohort else chain
            accepted.append(cohort - lost)
        except Refused:
            continue
    accepted = [one for one in accepted if one]
    kinds = [tuple(name in one for one in accepted) for name in NAMES]
    for kind in {kind for kind in kinds if any(kind)}:
        assert kinds.count(kind) >= min(APART, len(accepted[0]))


@given(st.integers(3, 40), st.integers(0, 10))
def test_what_a_server_leaves_out_is_what_clients_accept(members, lost):
    stayed = members - lost
    left = stayed - to_leave_out(members, stayed, APART)
    assert left <= stayed
    assert members - left == 0 or members - left >= APART
    names = [str(n) for n in range(members)]
    if left >= usual_threshold(members):
        assert summed(summed(Chain(), names), names[:left], names).opened == frozenset(names[:left])


def test_it_is_written_and_read():
    chain = summed(after_all(), NAMES[4:])
    for one in (Chain(), chain, after_all().joined(NAMES, 9, APART)):
        assert Chain.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(ValueError, match="lists of names"):
        Chain.from_json({"first": 1, "spare": 1, "within": [1], "opened": None})
