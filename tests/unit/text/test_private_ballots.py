"""Noisy votes: what one client can change, and that its words alone do not pass."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from keyfed.errors import DataError
from keyfed.text.election import elect_privately, ngrams, threshold


def gaussian(seed):
    draw = random.Random(seed)
    return lambda count: [draw.gauss(0, 1) for _ in range(count)]


def without_noise(count):
    return [0.0] * count


@pytest.mark.parametrize(("sigma", "delta", "words"), [(10.0, 1e-6, 100), (1.0, 1e-9, 1), (50.0, 1e-10, 4000)])
def test_a_lonely_clients_words_pass_with_chance_delta_at_most(sigma, delta, words):
    tau = threshold(sigma, delta, words)
    one_passes = NormalDist(1, sigma).cdf(2 - tau)  # P(1 + noise ≥ τ), by symmetry about 1
    assert words * one_passes <= delta / 2 * 1.001
    assert -math.expm1(words * math.log1p(-one_passes)) == pytest.approx(delta / 2, rel=1e-4)


def test_words_of_few_clients_never_pass_in_ten_thousand_votes():
    crowd = [{"the", "of"}] * 400
    for seed in range(200):
        lonely = {f"secret{k}" for k in range(50)}
        found = elect_privately([*crowd, lonely], size=None, most_words=50, sigma=20.0, delta=1e-6, draw=gaussian(seed))
        assert not set(found.words) & lonely  # 10,000 words of one client


def test_counts_are_those_of_clients_where_there_is_no_noise():
    found = elect_privately(
        [{"a", "b"}, {"a"}, {"a", "b", "c"}], size=None, most_words=3, sigma=1e-9, delta=1e-6, draw=without_noise,
        min_clients=2,
    )  # fmt: skip
    assert found.words == ("a", "b")
    assert found.votes == (3, 2)
    assert (found.ballots, found.types, found.too_few) == (0, 0, 0)  # not noised, not told


def test_the_noise_is_added_to_every_count():
    crowd = [{f"w{k}" for k in range(300)}] * 1_000
    found = elect_privately(crowd, size=None, most_words=300, sigma=30.0, delta=1e-6, draw=gaussian(1))
    spread = [v - 1_000 for v in found.votes]
    assert len(spread) == 300
    assert math.sqrt(sum(x * x for x in spread) / 300) == pytest.approx(30, rel=0.15)


def test_a_ballot_that_is_too_long_is_refused():
    with pytest.raises(DataError, match="agreed"):
        elect_privately([{"a", "b"}], size=None, most_words=1, sigma=1.0, delta=1e-6, draw=without_noise)


def test_too_few_clients_say_what_to_do():
    with pytest.raises(DataError, match="--most-words"):
        elect_privately([{"a"}] * 10, size=None, most_words=100, sigma=10.0, delta=1e-6, draw=without_noise)


def test_an_imagined_fleet_scales_noise_and_threshold():
    found = elect_privately(
        [{"a"}] * 10 + [{"b"}],
        size=6,
        most_words=1,
        sigma=10.0,
        delta=1e-6,
        draw=gaussian(2),
        scale=1e-4,
        min_clients=2,
    )
    assert found.words == ("a",)
    assert found.votes == (10,)


def test_pairs_of_words():
    said = ngrams(["the cat sat", "the cat ran"], 2, lower=True, tokenised=True, most=3)
    assert "the cat" in said
    assert len(said) == 3
    assert ngrams(["one"], 2, lower=True, tokenised=True, most=3) == frozenset()
