"""The audit's mathematics on numbers whose answer is known: exposure, one-shot ε, membership, words from an update."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from keyfed.lab.audit import canaries as ex
from keyfed.lab.audit import inference, retrain

# Exposure


def test_secrets_that_nobody_planted_have_a_median_of_one_bit_and_pass_the_test():
    rng = np.random.default_rng(1)
    bits = [ex.exposure(ex.rank_of(own, others), 1000) for own, others in
            ((rng.normal(), rng.normal(size=999)) for _ in range(600))]  # fmt: skip
    controls = ex.judge_controls(bits)
    assert controls.median == pytest.approx(1.0, abs=0.15)
    assert controls.mean == pytest.approx(1 / math.log(2), abs=0.15)
    assert controls.p > 0.01
    assert controls.behave


def test_secrets_that_are_likelier_than_random_ones_fail_the_test_of_controls():
    rng = np.random.default_rng(1)
    bits = [ex.exposure(ex.rank_of(own, others), 1000) for own, others in
            ((rng.normal(-0.7), rng.normal(size=999)) for _ in range(300))]  # fmt: skip
    assert not ex.judge_controls(bits).behave


def test_exposure_is_all_bits_for_the_first_of_all_and_none_for_the_last():
    assert ex.exposure(1, 2048) == 11
    assert ex.exposure(2048, 2048) == 0
    with pytest.raises(ValueError, match="rank of 0"):
        ex.exposure(0, 10)


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.1])
def test_the_test_for_uniform_numbers_agrees_with_scipy(shift):
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).random(400) * (1 - shift)
    assert ex.uniform_p(values) == pytest.approx(stats.kstest(values, "uniform").pvalue, abs=0.01)


def test_group_privacy_bounds_how_exposed_a_canary_may_be():
    # Randomised response on "is it planted" with ε: P(E ≥ x) grows by at most e^ε.
    assert ex.chance_under(5, 1, math.log(2), 0.0) == pytest.approx(2 * 2**-5)
    assert ex.chance_under(5, 2, math.log(2), 0.0) == pytest.approx(4 * 2**-5)
    assert ex.chance_under(20, 1, 0.0, 1e-3) == pytest.approx(2**-20 + 1e-3)
    assert ex.chance_under(11, 4, 5.0, 1e-6) == 1.0


# One-shot ε


@pytest.mark.parametrize("mu", [0.1, 1 / 7, 1.0, 3.0])
def test_epsilon_of_two_gaussians_has_the_delta_of_the_closed_form(mu):
    epsilon, normal = retrain.gaussian_epsilon(mu, 1e-5), NormalDist()
    delta = normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


def gaussian(z: float):
    """A mechanism that adds noise of multiplier z to a sum of unit vectors."""

    def release(total: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return total + z * torch.from_numpy(rng.standard_normal(len(total), np.float32))

    return release


def estimate(z: float, seed: int, rounds: int = 1, rate: float = 1.0) -> retrain.Estimate:
    """Run the attack on a mechanism alone: every round releases a noisy sum of the canaries that were picked."""
    d, k = 6_000, 150
    rng = np.random.default_rng(seed)
    seeds = rng.integers(0, 2**62, 2 * k).tolist()
    released, release = torch.zeros(d), gaussian(z)
    for _ in range(rounds):
        total = torch.zeros(d)
        for picked in np.flatnonzero(rng.random(k) < rate).tolist():
            total += retrain.unit_vector(d, seeds[picked])
        released += release(total, rng)
    seen, unseen = retrain.cosines(released, seeds[:k]), retrain.cosines(released, seeds[k:])
    return retrain.estimate_epsilon(seen, unseen, d, 1e-5)


def contradicts(estimate: retrain.Estimate, claimed: float) -> bool:
    return estimate.certain > claimed


CLAIMED = {1.0: 4.377178, 2.0: 1.993}  # one release, δ = 1e-5


@pytest.mark.parametrize("z", CLAIMED)
def test_a_sound_mechanism_passes_on_every_seed(z):
    for seed in range(20):
        found = estimate(z, seed)
        assert not contradicts(found, CLAIMED[z]), (seed, found)
        assert found.certain <= found.low <= found.epsilon <= found.high


def test_estimates_lie_around_the_true_epsilon():
    found = [estimate(1.0, seed).epsilon for seed in range(10)]
    assert np.mean(found) == pytest.approx(CLAIMED[1.0], rel=0.1)


@pytest.mark.parametrize("actual", [0.0, 0.5])
def test_a_mechanism_with_less_noise_than_it_claims_is_flagged_on_every_seed(actual):
    for seed in range(5):
        assert contradicts(estimate(actual, seed), CLAIMED[1.0])


def test_many_sampled_rounds_pass_against_the_accountant():
    accountant = pytest.importorskip("dp_accounting.pld")
    import dp_accounting as dpa

    event = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0)), 20)
    claimed = accountant.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    for seed in range(3):
        assert not contradicts(estimate(1.0, seed, rounds=20, rate=0.1), claimed)
        assert contradicts(estimate(0.0, seed, rounds=20, rate=0.1), claimed)


def test_vectors_that_nobody_sent_give_the_floor():
    rng = np.random.default_rng(0)
    nothing = rng.normal(0, 0.01, (2, 1000))
    found = retrain.estimate_epsilon(nothing[0], nothing[1], 10_000, 1e-5)
    assert found.certain == 0
    assert found.epsilon < 0.2
    assert found.floor < 0.2
    assert found.spread == pytest.approx(1, abs=0.1)


def test_a_direction_is_the_same_each_time_it_is_drawn_and_has_length_one():
    a, b = retrain.unit_vector(1000, 5), retrain.unit_vector(1000, 5)
    assert torch.equal(a, b)
    assert float(a.norm()) == pytest.approx(1, abs=1e-6)
    assert retrain.cosines(a.double(), [5]) == pytest.approx([1.0])
    with pytest.raises(ValueError, match="nothing to compare"):
        retrain.cosines(torch.zeros(3), [1])


# Membership


def test_areas_under_the_curve_agree_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(2)
    members, others = rng.normal(0.5, 1, 200).round(1), rng.normal(0, 1, 150).round(1)
    label, score = [1] * 200 + [0] * 150, np.concatenate([members, others])
    assert inference.auc(members, others) == pytest.approx(metrics.roc_auc_score(label, score))
    false, true, _ = metrics.roc_curve(label, score, drop_intermediate=False)
    assert inference.true_positives(members, others) == pytest.approx(true[false <= 0.01].max())


def test_an_attack_on_nothing_is_a_coin_and_one_on_everything_is_sure():
    rng = np.random.default_rng(4)
    coin = inference.attack(rng.normal(size=400), rng.normal(size=400), seed=1)
    assert coin.auc_interval[0] < 0.5 < coin.auc_interval[1]
    sure = inference.attack(rng.normal(8, 1, 400), rng.normal(size=400), seed=1)
    assert sure.auc > 0.999
    assert sure.tpr == 1.0
    assert sure.auc_interval[0] > 0.5


# Words from an update


COUNTS = np.array([5, 0, 9, 2, *([3] * 30), *([0] * 70)])  # four specials, 30 words the client has, 70 it has not


def test_rows_that_changed_are_the_words():
    change = torch.zeros(104, 8)
    change[4:34] = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    found = inference.judge_guesses(inference.score_words(change), COUNTS, 4)
    assert (found.recovered, found.precision, found.recall) == (1.0, 1.0, 1.0)
    assert found.chance == pytest.approx(0.3)
    assert found.better_than_chance


def test_a_bias_that_rises_is_a_word_and_specials_are_never_guessed():
    change = torch.full((104,), -0.1)
    change[:4] = 9.0
    change[4:31] = 0.5  # 27 of 30 rise, three fall less than words the client has not
    change[31:34] = -0.05
    found = inference.judge_guesses(inference.score_words(change), COUNTS, 4)
    assert found.recovered == 1.0
    assert (found.precision, found.recall) == (1.0, 0.9)


def test_uniform_numbers_recover_what_chance_does():
    rng = np.random.default_rng(7)
    drawn = [torch.from_numpy(rng.integers(0, 2**32, 104, np.uint32).view(np.int32)).double() for _ in range(200)]
    found = [inference.judge_guesses(scores, COUNTS, 4) for scores in drawn]
    assert np.mean([f.recovered for f in found]) == pytest.approx(0.3, abs=0.02)
    assert not any(f.better_than_chance for f in found)


def test_an_epsilon_of_thousands_is_still_a_number():
    assert 1250 < retrain.gaussian_epsilon(50.0, 1e-5) < 1600
