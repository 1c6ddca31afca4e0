"""Who takes part in a round and how far they get."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from keyfed.errors import ConfigError
from keyfed.federated.cohort import Participation, Work, cohort_size, draw, plan_round, poisson_cohort, sample_by_size

SIZES = [100, 400, 50, 1000, 250, 700, 20, 900, 300, 600]


def plan(p: Participation, called=range(10), wanted=10, round=0, epochs=2, seed=1, down=10**6, up=10**6):
    return plan_round(
        p, list(called), wanted, epochs=epochs, tokens_of=lambda k: float(SIZES[k]), name_of=lambda k: f"c{k}",
        down=down, up=up, seed=seed, round=round,
    )  # fmt: skip


def test_by_default_everyone_does_everything_and_time_is_the_slowest_clients():
    made = plan(Participation())
    assert all(f.work == Work() and f.lost is None and f.reports for f in made.fates)
    moving = 1.0 + 8e6 / 20e6 + 8e6 / 5e6
    assert [f.seconds for f in made.fates] == pytest.approx([moving + 2 * n / 1000 for n in SIZES])
    assert made.seconds == pytest.approx(moving + 2 * 1000 / 1000)


def test_everything_is_a_function_of_seed_and_round():
    p = Participation(
        drop_before=0.3, drop_after=0.3, least_work=0.2, least_epochs=1, speed_spread=1.0, pace_spread=0.5
    )
    assert plan(p, epochs=5) == plan(p, epochs=5)
    assert plan(p, round=1, epochs=5) != plan(p, epochs=5)
    assert plan(p, seed=2, epochs=5) != plan(p, epochs=5)
    # A client's speed and step size are its own for good; its luck and work are drawn every round.
    first, second = (plan(p, round=n, epochs=5).fates for n in (0, 1))
    assert [f.work.pace for f in first] == [f.work.pace for f in second]
    assert [f.work.share for f in first] != [f.work.share for f in second]


def test_one_kind_of_bad_luck_leaves_the_others_alone():
    calm = Participation(least_work=0.5, speed_spread=1.0)
    rough = replace(calm, drop_after=0.5)
    assert [f.work for f in plan(calm).fates] == [f.work for f in plan(rough).fates]
    assert [f.seconds for f in plan(calm).fates] == [f.seconds for f in plan(rough).fates]


def test_chances_are_chances():
    p = Participation(drop_before=0.2, drop_after=0.25)
    fates = [f for n in range(400) for f in plan(p, round=n).fates]
    counted = Counter(f.lost for f in fates)
    assert counted["dropped before report"] / len(fates) == pytest.approx(0.2, abs=0.02)
    assert counted["dropped before upload"] / len(fates) == pytest.approx(0.8 * 0.25, abs=0.02)
    assert {f.reports for f in fates if f.lost == "dropped before upload"} == {True}
    assert {f.reports for f in fates if f.lost == "dropped before report"} == {False}


def test_work_is_drawn_between_its_least_and_all():
    fates = [
        f for n in range(100) for f in plan(Participation(least_work=0.3, least_epochs=2), round=n, epochs=4).fates
    ]
    shares, epochs = [f.work.share for f in fates], Counter(f.work.epochs or 4 for f in fates)
    assert 0.3 <= min(shares) < 0.35
    assert 0.95 < max(shares) <= 1
    assert set(epochs) == {2, 3, 4}
    assert max(epochs.values()) < 1.5 * min(epochs.values())


def test_a_straggler_uploads_what_it_has_or_is_left_out():
    deadline = 4.5  # 3 seconds of moving leave 1.5 for 1500 tokens
    partial = plan(Participation(deadline=deadline))
    for fate, size in zip(partial.fates, SIZES, strict=True):
        assert fate.lost is None
        assert fate.work.share == pytest.approx(min(1.0, 1500 / (2 * size)))
        assert fate.seconds <= deadline + 1e-9
    strict = plan(Participation(deadline=deadline, partial=False))
    assert [f.lost for f in strict.fates] == ["late" if 2 * n > 1500 else None for n in SIZES]
    assert strict.seconds == deadline
    nobody = plan(Participation(deadline=2.5))  # not even the model arrives in time
    assert {f.lost for f in nobody.fates} == {"late"}


def test_the_first_to_finish_are_taken_and_the_rest_not_needed():
    p = Participation(over_select=0.5)
    assert len(draw(p, 10, 6, lambda k: sum(SIZES[:k]), 1, 0)) == 9
    made = plan(p, called=range(9), wanted=6)
    taken = [f.client for f in made.fates if f.lost is None]
    assert taken == sorted(sorted(range(9), key=lambda k: SIZES[k])[:6])
    assert {f.lost for f in made.fates if f.client not in taken} == {"not needed"}
    assert made.seconds == max(f.seconds for f in made.fates if f.lost is None)


def test_a_round_closes_with_the_last_upload_it_needs_even_if_others_vanished():
    late = Participation(over_select=0.5, deadline=600.0, drop_before=0.3)
    for n in range(60):
        made = plan(late, called=range(9), wanted=6, round=n)
        arrived = [f.seconds for f in made.fates if f.lost is None]
        if len(arrived) >= 6:
            assert made.seconds == max(arrived) < 600
        else:
            assert made.seconds == 600
    alone = plan(Participation(drop_before=0.999), called=range(3), wanted=3)
    assert {f.lost for f in alone.fates} == {"dropped before report"}
    assert alone.seconds == max(f.seconds for f in alone.fates) > 0


def test_the_fraction_replaces_the_cohort():
    assert cohort_size(Participation(), 10, 43) == 10
    assert cohort_size(Participation(fraction=0.5), 10, 43) == 22
    assert cohort_size(Participation(fraction=0.001), 10, 43) == 1


def test_poisson_calls_each_client_independently():
    cohorts = [poisson_cohort(200, 0.1, 7, n) for n in range(600)]
    sizes = [len(c) for c in cohorts]
    mean = sum(sizes) / len(sizes)
    variance = sum((s - mean) ** 2 for s in sizes) / len(sizes)
    assert mean == pytest.approx(20, abs=0.6)
    assert variance == pytest.approx(200 * 0.1 * 0.9, rel=0.2)  # a fixed cohort's would be 0
    counted = Counter(k for c in cohorts for k in c)
    assert len(counted) == 200
    assert max(counted.values()) < 100
    assert all(c == sorted(set(c)) and c[-1] < 200 for c in cohorts if c)
    assert min(len(poisson_cohort(3, 0.01, 1, n)) for n in range(20)) == 0
    assert poisson_cohort(5, 1.0, 1, 0) == [0, 1, 2, 3, 4]
    assert len(poisson_cohort(10**9, 1e-8, 1, 0)) < 40  # the population is never listed
    with pytest.raises(ConfigError, match="expected 0 < chance"):
        poisson_cohort(5, 1.5, 1, 0)


def test_sampling_by_size_prefers_large_clients():
    counted = Counter(k for n in range(2000) for k in sample_by_size(SIZES, 1, 3, n))
    total = sum(SIZES)
    for k, size in enumerate(SIZES):
        assert counted[k] / 2000 == pytest.approx(size / total, abs=0.03)
    assert sample_by_size(SIZES, 10, 3, 0) == list(range(10))
    with pytest.raises(ConfigError, match="cohort of 11"):
        sample_by_size(SIZES, 11, 3, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drop_before": 1.0}, "drop_before is 1.0"),
        ({"drop_after": -0.1}, "drop_after is -0.1"),
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"least_work": 1.5}, "least_work is 1.5"),
        ({"least_epochs": 0}, "least_epochs is 0"),
        ({"minimum": 0}, "minimum is 0"),
        ({"speed": 0.0}, "speed is 0.0"),
        ({"up_mbit": math.inf}, "up_mbit is inf"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"deadline": 0.5}, "deadline is 0.5"),
        ({"over_select": 0.5, "sampling": "poisson"}, "over_select needs a fixed cohort"),
    ],
)
def test_what_makes_no_sense_is_said_by_name(changed, message):
    (problem,) = Participation(**changed).problems()
    assert message in problem
    assert Participation().problems() == []
