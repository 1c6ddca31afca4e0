"""What is added to a sum: bounded clients, the noise that was promised, and mutants that the same checks catch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from keyfed.engine.sums.noised import NoisedSum
from keyfed.errors import PrivacyError
from keyfed.federated.types import Refusal, Share
from keyfed.private.dp.accounting import usual_count_noise
from keyfed.private.dp.noise import clip_factor, clipped, derived, next_clip, norm_of, system, update_noise

from .neighbours import CALLED, CLAIMING, CLIP, LIKE, bounded, draws, largest_move, largest_step, mass_draws, noising

COUNT, MASSES, ROUNDING = 100_000, 15_000, 1e-9
ALIKE = Share(dict.fromkeys(LIKE, 1.0), dict.fromkeys(LIKE, 1.0))


@pytest.mark.parametrize("label", CLAIMING)
def test_no_neighbouring_cohorts_are_farther_apart_than_the_clip(label):
    worst = largest_move(bounded(label), 500)  # as many as the mutants get
    assert worst <= CLIP * (1 + ROUNDING)
    assert worst > CLIP * 0.99  # the search does reach it


@pytest.mark.slow
@pytest.mark.parametrize("label", CLAIMING)
def test_the_same_by_ten_thousand_tries_for_every_method(label):
    assert largest_move(bounded(label), 10_000, seed=1) <= CLIP * (1 + ROUNDING)


@pytest.mark.parametrize("label", ["fedavg", "fedavg, capped tokens", "fedadam", "fedadmm"])
def test_a_step_with_a_public_denominator_moves_by_clip_over_the_expected_cohort(label):
    assert largest_step(bounded(label), 1_000) <= CLIP * (1 + 1e-6)


# --- the noise itself -------------------------------------------------------------------------------------------------


def assert_gaussian(sample, std, chance=1e-3):
    """`chance`: how often sound noise may fail; noise without a seed is drawn anew in every run of the tests."""
    sample = sample.double().numpy()
    assert abs(sample.mean()) < stats.norm.isf(chance / 2) * std / math.sqrt(sample.size)
    assert sample.std() == pytest.approx(std, rel=0.01)
    assert stats.kstest(sample / std, "norm").pvalue > chance


def test_the_noise_added_is_the_noise_promised():
    assert_gaussian(draws(NoisedSum, COUNT, std=2.0), 2.0)


def test_system_noise_is_gaussian_and_never_the_same():
    one, two = (system()("w", torch.Size((COUNT,))) for _ in range(2))
    assert_gaussian(one, 1.0, chance=1e-7)
    assert_gaussian(two, 1.0, chance=1e-7)
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 5.5 / math.sqrt(COUNT)


def test_system_noise_reads_nothing_but_the_operating_systems_bytes():
    asked = []

    def entropy(count):
        asked.append(count)
        return bytes(range(256)) * (count // 256) + bytes(count % 256)

    system(entropy)("w", torch.Size((10, 10)))
    assert sum(asked) == 4 * 16 * 100


@pytest.mark.parametrize("other", [{"round": 1}, {"attempt": 1}, {"seed": 8}], ids=str)
def test_rounds_attempts_and_seeds_share_no_noise(other):
    one, two = draws(NoisedSum, COUNT), draws(NoisedSum, COUNT, **other)
    assert not torch.equal(one, two)
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 4 / math.sqrt(COUNT)
    assert torch.equal(one, draws(NoisedSum, COUNT))  # a simulation repeats


def test_layers_and_masses_have_noise_of_their_own():
    names = ["a", "b", "mass/a", "within"]
    drawn = torch.stack([derived(1, 0, 0)(name, torch.Size((COUNT,))) for name in names])
    apart = torch.corrcoef(drawn) - torch.eye(len(names), dtype=torch.float64)
    assert float(apart.abs().max()) < 4.5 / math.sqrt(COUNT)


def test_the_mass_of_a_ratio_has_the_noise_of_the_sum():
    masses, totals = mass_draws(NoisedSum, MASSES, std=2.0)
    assert_gaussian(masses, 2.0)
    others = [totals, mass_draws(NoisedSum, MASSES, round=1)[0], mass_draws(NoisedSum, MASSES, attempt=1)[0]]
    apart = torch.corrcoef(torch.stack([masses, *others])) - torch.eye(4, dtype=torch.float64)
    assert float(apart.abs().max()) < 4.5 / math.sqrt(MASSES)
    assert abs(float(torch.corrcoef(torch.stack([masses[:-1], masses[1:]]))[0, 1])) < 4.5 / math.sqrt(MASSES)


# --- mutants: each must fail the check that it was made for -----------------------------------------------------------


class NoClip(NoisedSum):
    def add(self, client, upload, share):
        for name in self._total:
            self._total[name] += upload[name].double() * share.scale[name]


class HalfNoise(NoisedSum):
    def __init__(self, like, given):
        super().__init__(like, given._replace(std=given.std / 2))


class RealisedDenominator(NoisedSum):
    def aggregate(self, refused):
        made = super().aggregate(refused)
        mass = dict.fromkeys(made.mass, float(max(1, len(made.contributors))))
        return type(made)(made.total, mass, made.weight, made.squares, made.contributors)


class TokenWeights(NoisedSum):
    """Weights after the clip, as Flower's wrapper around a mean by examples has them."""

    def add(self, client, upload, share):
        super().add(client, upload, share)
        extra = sum(float(u.abs().sum()) for u in upload.values()) % 7 + 1  # stands for n_k
        factor = clip_factor(norm_of(upload.values()), CLIP)
        for name in self._total:
            self._total[name] += extra * factor * upload[name].double()


class ClipBeforeWeight(NoisedSum):
    """A clip in single layers: its norm over all of them is larger."""

    def add(self, client, upload, share):
        for name in self._total:
            part = upload[name].double()
            self._total[name] += part * clip_factor(norm_of([part]), CLIP)


class SameNoiseAgain(NoisedSum):
    def __init__(self, like, given):
        super().__init__(like, given._replace(release=lambda: derived(7, 0, 0)))


class UnnoisedMass(NoisedSum):
    """Divides by the mass as it is."""

    def aggregate(self, refused):
        made = super().aggregate(refused)
        floor = self._noising.floor
        return replace(made, mass={name: max(m / self._kappa, floor) for name, m in self._mass.items()})


class NoiseOfTheMassAgain(NoisedSum):
    """Gives the masses the noise that the sums have already."""

    def aggregate(self, refused):
        made = super().aggregate(refused)
        return replace(made, mass={name: float(t.sum()) / self._kappa for name, t in made.total.items()})


@pytest.mark.parametrize("mutant", [NoClip, TokenWeights, ClipBeforeWeight])
def test_mutants_that_do_not_bound_a_client_are_caught(mutant):
    assert largest_move(bounded("fedavg"), 500, mutant) > CLIP * 1.01


def test_the_mutant_with_half_the_noise_is_caught():
    with pytest.raises(AssertionError):
        assert_gaussian(draws(HalfNoise, COUNT, std=2.0), 2.0)


@pytest.mark.parametrize("mutant", [UnnoisedMass, HalfNoise])
def test_mutants_with_too_little_noise_of_the_mass_are_caught(mutant):
    with pytest.raises(AssertionError):
        assert_gaussian(mass_draws(mutant, 3_000, std=2.0)[0], 2.0)


def test_the_mutant_whose_mass_has_the_noise_of_its_sum_is_caught():
    masses, totals = mass_draws(NoiseOfTheMassAgain, 100)
    assert float(torch.corrcoef(torch.stack([masses, totals]))[0, 1]) > 0.99


def test_the_mutant_with_the_realised_denominator_is_caught():
    assert largest_step(bounded("fedavg"), 1_000, RealisedDenominator) > CLIP * 1.5


def test_the_mutant_that_uses_its_noise_twice_is_caught():
    assert torch.equal(draws(SameNoiseAgain, 100), draws(SameNoiseAgain, 100, attempt=1))
    assert not torch.equal(draws(NoisedSum, 100), draws(NoisedSum, 100, attempt=1))


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_upload_is_never_clipped_through(bad):
    total = NoisedSum(LIKE, noising())
    with pytest.raises(PrivacyError, match="finite"):
        total.add("a", {"a": torch.tensor([1.0, bad]), "b": torch.zeros(1)}, ALIKE)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in total._total.values())
    assert torch.isnan(clipped({"a": torch.tensor([math.nan])}, 1.0)["a"]).all()  # refused later, by its value


def test_a_norm_does_not_depend_on_the_order_of_its_numbers():
    """Every processor and the page's JavaScript clip by the same bits: the squares are summed without rounding."""
    made = torch.Generator().manual_seed(1)
    for size in (0, 1, 2, 3, 7, 1000, 4097):
        numbers = torch.randn(size, generator=made, dtype=torch.float64) * 10.0 ** torch.randint(
            -9, 9, (size,), generator=made
        )
        exact = math.sqrt(math.fsum(x * x for x in numbers.tolist()))
        mixed = numbers[torch.randperm(size, generator=made)]
        cut = size // 3
        assert {norm_of([numbers]), norm_of([mixed]), norm_of([mixed[:cut], mixed[cut:]])} == {exact}
        assert norm_of([mixed[:cut]], mixed[cut:].tolist()) == exact
    assert math.isnan(norm_of([torch.tensor([math.inf, 1.0])]))


def test_a_norm_that_single_precision_cannot_hold():
    total = NoisedSum(LIKE, noising())
    total.add("a", {"a": torch.full((2,), 3e38), "b": torch.zeros(1)}, ALIKE)
    assert float(total._total["a"].norm()) == pytest.approx(CLIP, rel=1e-12)


def test_a_zero_upload_is_no_division_by_zero():
    total = NoisedSum(LIKE, noising())
    total.add("a", {name: torch.zeros_like(p) for name, p in LIKE.items()}, ALIKE)
    assert total.aggregate(()).contributors == ("a",)


def test_an_empty_cohort_releases_noise_and_books_it():
    booked = []

    def release():
        booked.append(1)
        return derived(1, 0, 0)

    made = NoisedSum(LIKE, noising(std=1.0, release=release)).aggregate([Refusal("x", "no text")])
    assert booked == [1]
    assert float(made.total["a"].abs().sum()) > 0
    assert made.mass == dict.fromkeys(LIKE, CALLED)


def test_nothing_is_drawn_before_the_release_is_booked():
    order = []

    def release():
        order.append("book")

        def draw(name, shape):
            order.append("draw")
            return torch.zeros(shape, dtype=torch.float64)

        return draw

    total = NoisedSum(LIKE, noising(release=release))
    total.add("a", LIKE, ALIKE)
    assert order == []
    total.aggregate(())
    assert order[0] == "book"
    assert order.count("book") == 1


def test_without_noise_and_clip_a_ratio_is_the_softmax():
    made = bounded("fedatt")
    from keyfed.federated.types import Report

    reports = [Report(name, 5, 1.0, 5, {"a": s, "b": 0.3}) for name, s in (("x", 0.2), ("y", 1.4))]
    uploads = [
        {"a": torch.tensor([1e-3, 0.0]), "b": torch.tensor([2e-3])},
        {"a": torch.tensor([0.0, 2e-3]), "b": torch.zeros(1)},
    ]
    total = NoisedSum(LIKE, noising(ratio=True)._replace(clip=100.0))
    for upload, report in zip(uploads, reports, strict=True):
        total.add(report.client, upload, made.method.mediator.share(report, list(LIKE)))
    weight = torch.softmax(torch.tensor([0.2, 1.4]), 0)
    torch.testing.assert_close(
        total.aggregate(()).mean()["a"], weight[0] * uploads[0]["a"] + weight[1] * uploads[1]["a"]
    )


def test_a_ratio_never_divides_by_less_than_the_floor():
    made = NoisedSum(LIKE, noising(ratio=True, std=50.0, release=lambda: derived(3, 0, 0))).aggregate(())
    assert min(made.mass.values()) == 0.01


def test_frozen_layers_are_not_noised():
    made = NoisedSum(LIKE, noising(std=1.0, release=lambda: derived(1, 0, 0), frozen=frozenset({"a"}))).aggregate(())
    assert torch.equal(made.total["a"], torch.zeros(2))
    assert float(made.total["b"].abs().sum()) > 0


def test_what_a_client_books_as_sent_is_within_the_clip():
    upload = {"a": torch.full((1000,), 3.0), "b": torch.tensor([4.0])}
    assert norm_of(clipped(upload, 2.0).values()) <= 2.0
    assert all(torch.equal(u, upload[name]) for name, u in clipped(upload, 1e6).items())


# --- adaptive clipping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "bits", "expected"), [(1, 5, 1.005038), (1, 2.5, 1.020621), (2, 5, 2.041241), (0.5, 5, 0.500626)]
)
def test_golden_noise_of_the_update_beside_the_count(z, bits, expected):
    assert update_noise(z, bits) == pytest.approx(expected, abs=1e-6)
    assert usual_count_noise(20 * bits, z) == bits  # of cohorts of twenty times that and more, without being told


@pytest.mark.parametrize(("cohort", "z", "expected"), [(4, 1, 1.154701), (4, 2.5, 2.886751), (3, 0.2, 0.230940)])
def test_golden_noise_of_the_update_of_few_clients(cohort, z, expected):
    assert update_noise(z, usual_count_noise(cohort, z)) == pytest.approx(expected, abs=1e-6)


def test_a_count_that_takes_all_the_noise_is_refused():
    with pytest.raises(PrivacyError, match="count_noise"):
        update_noise(1.0, 0.5)


def test_the_clip_finds_the_median_of_the_norms():
    norms, clip = [1.0, 2.0, 3.0, 4.0, 100.0], 20.0
    for _ in range(300):
        clip = next_clip(clip, sum(n <= clip for n in norms) / len(norms), 0.5, 0.2)
    assert 2.0 <= clip <= 4.0


def test_the_count_of_unclipped_clients_moves_by_half_a_client():
    def count(*uploads):
        total = NoisedSum(LIKE, noising(bit_std=0.0))
        for k, size in enumerate(uploads):
            total.add(str(k), {"a": torch.tensor([size, 0.0]), "b": torch.zeros(1)}, ALIKE)
        return (total.aggregate(()).facts["within"][0] - 0.5) * CALLED

    assert count() == 0
    assert count(0.1) == 0.5
    assert count(99.0) == -0.5
    assert count(0.1, 99.0, 0.2) == 0.5
