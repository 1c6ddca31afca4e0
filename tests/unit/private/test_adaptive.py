"""What is told beside a private sum: losses for FedMed's switch and top-K, what they cost, and what is made of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy import stats

from keyfed.config.schema import PrivacyConfig
from keyfed.engine.sums.codec import half
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.sums.plain import RunningSum
from keyfed.errors import PrivacyError
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec, Part
from keyfed.federated.types import Report
from keyfed.federated.weigh import by_tokens, softmax_of_distance, switch_on_loss, top_k, uniform
from keyfed.private.dp.accounting import usual_count_noise
from keyfed.private.dp.noise import clip_factor, norm_of, update_noise
from keyfed.private.dp.private_method import (
    BELOW,
    LOSS,
    TRACKED,
    WITHIN,
    loss_limit,
    make_private,
    mean_loss,
    refuse_absence,
    still_moves,
)

from .neighbours import (
    CALLED,
    CLAIMING,
    CLIP,
    FOLLOWING,
    LIKE,
    bounded,
    client,
    largest_cost,
    largest_move,
    noising,
    told_noise,
)

ROUNDING = 1e-9
LAYERS = list(LIKE)

# --- what one client can do, all that is released together ------------------------------------------------------------


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("label", FOLLOWING)
def test_sum_and_half_counts_together_cost_no_more_than_z(label, quantile):
    made = bounded(label, quantile)
    worst = largest_cost(made, 1_000)
    assert worst <= 1 + ROUNDING
    # The search does reach what can be: who uploads is below the limit, and counts (1 − β)/β of a half there.
    least = 0.25 if BELOW in made.statistics and CLAIMING[label]["beta"] == 0.8 else 1.0
    assert worst > 0.99 * math.sqrt(1 - (1 - least**2) * (0.5 / 0.8) ** 2 / len(made.statistics))


@pytest.mark.parametrize("z", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("label", ["fedavg", "fedatt", "fedmed, both", "admm"])
def test_sum_and_counts_of_few_clients_cost_no_more_than_z_with_the_usual_noise(label, z):
    made = bounded(label, 0.5)
    bits = usual_count_noise(CALLED, z, losses=len(made.statistics) > 1)
    assert bits == z  # a twentieth of four would be more than z pays for
    worst = largest_cost(made, 1_000, z=z, bit_std=bits)
    assert worst <= 1 + ROUNDING
    least = 0.25 if BELOW in made.statistics else 1.0  # of a half, as above
    assert worst > 0.99 * math.sqrt(1 - (1 - least**2) * 0.5**2 / len(made.statistics))


@pytest.mark.slow
@pytest.mark.parametrize("label", FOLLOWING)
def test_the_same_by_ten_thousand_tries(label):
    assert largest_cost(bounded(label, 0.5), 10_000, seed=1) <= 1 + ROUNDING


@pytest.mark.parametrize(("z", "bits", "count"), [(1.0, 0.8, 3), (2.0, 5.0, 2), (0.5, 0.3, 1)])
def test_the_noise_of_all_half_counts_is_paid_for_within_z(z, bits, count):
    update = update_noise(z, bits)
    assert update**-2 + count * (0.5 / (bits * math.sqrt(count))) ** 2 == pytest.approx(z**-2)


@pytest.mark.parametrize("name", [WITHIN, LOSS, BELOW])
def test_every_half_count_has_the_noise_that_is_promised(name):
    sample = told_noise(NoisedSum, name, 2_000) / (3.0 * math.sqrt(3))
    assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-3
    assert float(sample.std()) == pytest.approx(1.0, rel=0.06)


def test_half_counts_share_no_noise():
    drawn = torch.stack([told_noise(NoisedSum, name, 2_000) for name in (WITHIN, LOSS, BELOW)])
    assert float((torch.corrcoef(drawn) - torch.eye(3)).abs().max()) < 4 / math.sqrt(2_000)


# --- mutants ----------------------------------------------------------------------------------------------------------


class Unnoised(NoisedSum):
    """Releases one of the half counts as it is."""

    name = LOSS

    def aggregate(self, refused):
        made = super().aggregate(refused)
        return replace(made, facts={**made.facts, self.name: [0.5 + self._counts[self.name] / self._noising.called]})


class UnnoisedBit(Unnoised):
    name = BELOW


class NoiseOfOne(NoisedSum):
    """Every half count has the noise that is enough for one alone."""

    def __init__(self, like, given):
        super().__init__(like, given._replace(bit_std=given.bit_std / math.sqrt(3)))


class UncutLoss(NoisedSum):
    def _clipped(self, upload, share):
        parts, masses, told = super()._clipped(upload, share)
        return parts, masses, {name: share.statistics.get(name, number + 0.5) - 0.5 for name, number in told.items()}


class WholeCounts(NoisedSum):
    """Counts 0 or 1: a client moves the count by one whole."""

    def _clipped(self, upload, share):
        parts, masses, told = super()._clipped(upload, share)
        return parts, masses, {name: number + 0.5 for name, number in told.items()}


class ExactTopK(NoisedSum):
    """Takes the client of lowest loss of the same round, as plain top-K does."""

    def __init__(self, like, given):
        super().__init__(like, given)
        self._best = math.inf

    def add(self, client, upload, share):
        loss = share.statistics[LOSS]
        if loss < self._best:
            self._best = loss
            factor = clip_factor(norm_of(upload.values()), CLIP)
            self._total = {name: u.double() * factor for name, u in upload.items()}


@pytest.mark.parametrize(("mutant", "name"), [(Unnoised, LOSS), (UnnoisedBit, BELOW), (NoiseOfOne, LOSS)])
def test_mutants_with_too_little_noise_are_caught(mutant, name):
    sample = told_noise(mutant, name, 200) / (3.0 * math.sqrt(3))
    assert stats.kstest(sample.numpy(), "norm").pvalue < 1e-3


@pytest.mark.parametrize("mutant", [UncutLoss, WholeCounts])
def test_mutants_that_do_not_bound_the_statistics_are_caught(mutant):
    assert largest_cost(bounded("fedmed, both", 0.5), 500, mutant) > 1.05


def test_the_mutant_that_ranks_the_losses_of_its_own_round_is_caught():
    made = bounded("fedmed, the switch")
    assert largest_move(made._replace(ratio=False), 500, ExactTopK) > CLIP * 1.5


# --- what a half count is ---------------------------------------------------------------------------------------------


def test_statistics_are_cut_and_never_none():
    assert (half(math.inf), half(-math.inf), half(0.75)) == (0.5, -0.5, 0.25)
    with pytest.raises(PrivacyError, match="refused before"):
        half(math.nan)


def test_who_is_above_the_limit_sends_zeros_and_does_not_believe_it_was_heard():
    made = bounded("fedmed, top-K", quantile=0.5)
    state = {**made.method.server.init(LIKE), TRACKED + BELOW: torch.tensor([3.0, 0.1, 0.0]).double()}
    share = made.method.mediator.released(state)
    total = NoisedSum(LIKE, noising(True, bit_std=0.0, statistics=made.statistics))
    upload = {name: torch.full_like(p, 100.0) for name, p in LIKE.items()}
    total.add("high", upload, share(Report("high", 5, 3.1, 5, dict.fromkeys(LIKE, 0.1)), LAYERS))
    found = total.aggregate(())
    assert found.contributors == ()
    assert all(not t.any() for t in found.total.values())
    assert found.facts[BELOW] == [0.5 - 0.5 / CALLED]
    assert found.facts[WITHIN] == [0.5 - 0.5 / CALLED]  # it would have been clipped: the clip learns of it all the same
    total.add("low", upload, share(Report("low", 5, 3.0, 5, dict.fromkeys(LIKE, 0.1)), LAYERS))
    assert total.aggregate(()).contributors == ("low",)


def test_nothing_but_a_round_can_weigh_by_what_was_released():
    made = bounded("fedmed, both")
    with pytest.raises(AssertionError, match="run_round"):
        made.method.mediator.share(client(random.Random(1), "a")[1], LAYERS)


# --- the switch -------------------------------------------------------------------------------------------------------


class Told:
    """A federation whose clients report given losses and upload nothing but small numbers; sums without noise."""

    def __init__(self, losses, told, ratio):
        self.losses, self.told, self.ratio, self.shares = losses, told, ratio, {}

    def train(self, params, cohort, method, round, public=None):
        given = noising(self.ratio, bit_std=0.0, statistics=self.told, called=float(len(cohort)), clip=1e3)
        self.sum = NoisedSum(LIKE, given)
        for k, name in enumerate(cohort):
            report = Report(name, 10 + k, self.losses[round][k], 5, dict.fromkeys(LIKE, 0.1 * k))
            self.shares[name] = method.mediator.share(report, LAYERS)
            self.sum.add(name, {layer: torch.full_like(p, 0.01) for layer, p in LIKE.items()}, self.shares[name])
        return {}

    def collect(self, shares):
        return self.sum.aggregate(())

    def acknowledge(self, contributors):
        pass


def run(made, losses, summaries=None):
    """Yield the state and the clients' shares after every round; keep its summary in a list."""
    state = initial_state(made.method, LIKE)
    federation = Told(losses, made.statistics, made.ratio)
    for row in losses:
        state, summary = run_round(made.method, state, [f"c{k}" for k in range(len(row))], federation)
        if summaries is not None:
            summaries.append(summary)
        yield state, dict(federation.shares)


def test_the_switch_is_the_plain_one_a_round_later():
    """Without noise the released mean loss is exact, and every decision is that of the round before."""
    rng, means = random.Random(5), [6.0, 5.2, 4.7, 4.4, 4.35, 4.3, 4.0, 3.99, 3.98, 3.5, 3.45, 3.44]
    losses = [[mean + rng.uniform(-0.4, 0.4) for _ in range(6)] for mean in means]
    plain = switch_on_loss(softmax_of_distance(), by_tokens(), 0.1)
    memory, expected = plain.init(), []
    for row in losses:
        reports = {f"c{k}": Report(f"c{k}", 10 + k, x, 5, dict.fromkeys(LIKE, 0.1 * k)) for k, x in enumerate(row)}
        memory, shares = plain.weigh(memory, reports, LAYERS)
        expected.append(shares["c1"].log is not None)
    found, seen = [], []
    for state, shares in run(bounded("fedmed, the switch"), losses):
        found.append(shares["c1"].scale["a"] != 1.0)  # without a public ŵ all count alike
        seen.append(float(state.server[TRACKED + LOSS][0]))
    assert False in expected
    assert found == [True, *expected[:-1]]
    assert seen == pytest.approx([sum(row) / len(row) for row in losses], abs=1e-9)


@pytest.mark.parametrize("options", [{}, {"beta": 0.8}])
def test_the_step_scales_adaptive_rounds_alone_and_a_round_says_which_it_was(options):
    """All upload 0.01: θ moves by η · 0.01 in an adaptive round, and by 0.01 in one that is FedAvg's."""
    made = make_private(build_method(MethodSpec("fedmed", {"step": 1.2, **options})), PrivacyConfig(noise=1.0))
    losses, summaries = [[x, x + 0.1, x - 0.1] for x in (5.0, 4.0, 3.99, 3.98, 3.0, 2.99, 2.98)], []
    at = [LIKE["a"], *(state.params["a"] for state, _ in run(made, losses, summaries))]
    moved = [float((after - before).max()) for before, after in pairwise(at)]
    assert [s.adaptive for s in summaries] == [True, True, True, False, False, True, False]
    assert moved == pytest.approx([0.012 if s.adaptive else 0.01 for s in summaries], rel=1e-6)


def test_the_other_branch_is_the_mean_by_tokens():
    made = bounded("fedmed, the switch with capped tokens")
    *_, (_, shares) = run(made, [[2.0, 2.1, 2.2]] * 4)
    assert [shares[f"c{k}"].scale["a"] for k in range(3)] == [10 / 50, 11 / 50, 12 / 50]
    assert all(share.scale == share.mass for share in shares.values())


def test_a_threshold_of_nothing_never_switches_and_asks_for_no_losses():
    made = make_private(build_method(MethodSpec("fedmed", {"threshold": 0.0})), PrivacyConfig(noise=1.0))
    assert made.statistics == (WITHIN,)
    assert made.method.mediator.released is None


@pytest.mark.parametrize("start", [0.1, 4.0, 15.0])
def test_the_mean_loss_is_found_wherever_it_is_and_however_many_come(start):
    """With half of the expected cohort every step is half as long as it should be, and still arrives."""
    rule = mean_loss(0.1)
    numbers = rule.start
    for _ in range(40):
        told = min(max(rule.statistic(start, numbers), 0.0), 1.0)
        numbers = rule.learn(numbers, 0.5 + 0.5 * (told - 0.5))
    assert numbers[0] == pytest.approx(start, abs=1e-3)
    assert numbers[1] == 1.0
    assert not still_moves(numbers, 0.1)


def test_a_loss_that_jumps_beyond_the_reach_is_followed():
    rule = mean_loss(0.1)
    numbers = (3.0, 1.0, 0.0, 9.0)
    moved = []
    for _ in range(8):
        numbers = rule.learn(numbers, min(max(rule.statistic(9.0, numbers), 0.0), 1.0))
        moved.append(still_moves(numbers, 0.1))
    assert numbers[0] == pytest.approx(9.0, abs=1e-9)
    assert moved[:3] == [True, True, True]
    assert not moved[-1]


def test_the_reach_is_never_too_short_for_the_threshold():
    rule = mean_loss(30.0)
    numbers = rule.start
    for _ in range(5):
        numbers = rule.learn(numbers, 0.5)
    assert numbers[1] == 60.0


# --- top-K ------------------------------------------------------------------------------------------------------------


def shares_below(beta, spread, rounds, come=1.0, noise=0.0, called=500, seed=1):
    """Yield the share of those who came that counts in every round; losses alike around a falling mean.

    Args:
      noise: of the released count, in expected cohorts.
    """
    rng, rule = random.Random(seed), loss_limit(beta)
    numbers = rule.start
    for t in range(rounds):
        mean = 4.0 + 2.0 * math.exp(-t / 15)
        losses = [rng.gauss(mean, spread) for _ in range(called) if rng.random() < come]
        yield sum(loss <= numbers[0] for loss in losses) / len(losses)
        counted = sum(half(rule.statistic(loss, numbers)) for loss in losses)
        numbers = rule.learn(numbers, 0.5 + counted / called + rng.gauss(0, noise))


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("come", [1.0, 0.6])
@pytest.mark.parametrize("spread", [0.05, 0.3])
@pytest.mark.parametrize("beta", [0.2, 0.5, 0.8, 0.9])
def test_about_a_share_beta_counts_in_every_round_however_many_come(beta, spread, come, noise):
    shares = list(shares_below(beta, spread, 100, come, noise))
    assert shares[0] == 1.0  # everybody counts at first
    late = shares[20:]
    assert sum(abs(share - beta) <= 0.25 for share in late) >= 0.9 * len(late)
    assert all(one or two for one, two in pairwise(late))  # never nobody twice in a row
    assert sum(late) / len(late) == pytest.approx(beta, abs=0.1)


@pytest.mark.parametrize("beta", [0.2, 0.5, 0.8])
def test_the_limit_finds_the_quantile_of_losses_that_stay(beta):
    losses = [2.0 + 0.01 * k for k in range(100)]
    rule = loss_limit(beta)
    numbers, shares = rule.start, []
    for _ in range(60):
        shares.append(sum(loss <= numbers[0] for loss in losses) / len(losses))
        numbers = rule.learn(numbers, sum(rule.statistic(loss, numbers) for loss in losses) / len(losses))
    assert shares[20:] == pytest.approx([beta] * 40, abs=0.1)
    assert shares[-20:] == pytest.approx([beta] * 20, abs=0.03)


def test_absent_clients_do_not_move_the_limit():
    """At the quantile the count is 0 in expectation, whoever is missing: not so if an absent one counted as a half."""
    rule = loss_limit(0.8)
    numbers = (3.0, 0.1, 0.0)
    halves = [half(rule.statistic(loss, numbers)) for loss in (1.0, 1.5, 2.0, 2.5, 3.5)]
    for called in (5, 50):
        assert rule.learn(numbers, 0.5 + sum(halves) / called)[0] == pytest.approx(3.0, abs=1e-12)
    assert max(map(abs, halves)) == 0.5  # all the room there is


def test_a_limit_never_leaves_the_losses_that_can_be():
    rule = loss_limit(0.5)
    numbers = rule.start
    for noisy in (-3.0, math.inf, 0.0, 0.0, 0.0, *[1.0] * 30, *[0.0] * 30):
        numbers = rule.learn(numbers, noisy)
        assert 0 <= numbers[0] <= 16.0
        assert 1e-3 <= numbers[1] <= 2.0


@pytest.mark.parametrize(("label", "inner"), [("fedmed, top-K", "attention"), ("fedmed tokens, top-K", "alike")])
def test_without_noise_and_clip_and_with_the_right_limit_it_is_plain_top_k(label, inner):
    rng, made = random.Random(3), bounded(label)
    beta = 0.8 if inner == "attention" else 0.5
    plain = top_k(beta, softmax_of_distance() if inner == "attention" else uniform())
    reports, uploads = {}, {}
    for k in range(10):
        name = f"c{k}"
        reports[name] = Report(name, 7, rng.uniform(1, 5), 7, {layer: rng.uniform(0, 0.6) for layer in LIKE})
        uploads[name] = {layer: torch.tensor([rng.gauss(0, 1) for _ in p]) for layer, p in LIKE.items()}
    limit = sorted(r.loss for r in reports.values())[round(beta * 10) - 1]
    state = {**made.method.server.init(LIKE), TRACKED + BELOW: torch.tensor([limit, 0.1, 0.0], dtype=torch.float64)}
    share = made.method.mediator.released(state)
    private, exact = NoisedSum(LIKE, noising(True, clip=1e6)), RunningSum(LIKE)
    shares = plain.weigh(plain.init(), reports, LAYERS)[1]
    for name, report in reports.items():
        private.add(name, uploads[name], share(report, LAYERS))
        if name in shares:
            exact.add(name, uploads[name], shares[name])
    one, two = private.aggregate(()), exact.aggregate(())
    assert one.contributors == two.contributors
    for layer in LIKE:
        torch.testing.assert_close(one.mean()[layer], two.mean()[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", [Part("attention", {"bound": 3.0, "beta": 0.5}), Part("uniform", {"beta": 0.5})])
def test_a_mediator_by_name_has_its_top_k_too(part):
    made = make_private(build_method(MethodSpec("fedprox", {}, part)), PrivacyConfig(noise=1.0, quantile=None))
    assert made.statistics == (BELOW,)
    assert made.method.uploading == 1.0  # zeros are sent, too
    assert "below a public limit" in made.sensitivity


def test_a_noise_for_counts_that_nothing_reads_is_refused():
    privacy = PrivacyConfig(noise=1.0, quantile=None, count_noise=5.0)
    with pytest.raises(PrivacyError, match="counts nothing"):
        make_private(build_method(MethodSpec("fedavg", {})), privacy)
    assert make_private(build_method(MethodSpec("fedmed", {})), privacy).statistics == (LOSS,)


# --- running means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["admm", "liadmm", "fedadmm, the running mean"])
def test_a_running_mean_needs_everybody_and_says_so(label):
    made = bounded(label)
    assert made.everybody
    refuse_absence(made, 8, 8)
    with pytest.raises(PrivacyError, match=r"3 of 8 clients are called, so set train\.cohort=8"):
        refuse_absence(made, 3, 8)
    refuse_absence(bounded("fedadmm"), 3, 8)


def test_the_weight_in_a_running_mean_is_that_of_the_joining():
    made = bounded("admm, capped tokens")
    report = Report("a", tokens=7, loss=1.0, worked=7, weight=20.0)
    assert made.method.mediator.share(report, ["w"]).scale == {"w": 20 / 50}
    assert bounded("admm").method.mediator.share(report, ["w"]).scale == {"w": 1.0}
