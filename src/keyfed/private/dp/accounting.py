r"""What a list of noisy releases costs: ε for a δ, by privacy loss distributions (PLD) and by Rényi divergences (RDP).

The unit is one client with everything it holds; neighbours differ by one client added or removed ("removed": it always
sends zeros). Both accountants give upper bounds; PLD is the tighter one and the certificate, RDP the second opinion.
The arithmetic is Google's `dp-accounting`, imported where it is used.

**Rounds whose secure sum opens by a single client.** Amplification by sampling asks that "not drawn" looks like "drawn,
and sends zeros". A masked sum of fewer clients than `floor` stays closed, so it does not: with floor − 1 others drawn,
one more client opens the sum. An observer learns that this client was drawn. Its upload is then protected by the noise
alone, without amplification. The number of others drawn is independent of the client, its text and its own draw. So a
row of the ledger carries the chance h of such a round, a public number, for n clients:

.. math::  h = \sum_m [\text{opens}(m) ≠ \text{opens}(m + 1)] \binom{n−1}{m} q^m (1−q)^{n−1−m}

As many rounds are counted at rate 1 as a client meets but for a small share of δ. To book the rounds in which it
*happened* at rate 1 would not do: the booking itself would tell, at its own edge. Whether enough of those called stay
has no known chance. A round in which some left, and one client more or less would have decided, is booked at rate 1
when it happens (`beside`).

**How many clients a guarantee needs** (`plan`). The mean of m clipped uploads carries Gaussian noise of norm about
:math:`z S \sqrt{d} / m` over d parameters, and one client moves it by at most S/m. The ratio :math:`z\sqrt{d}/m` of
that noise to the clip S says whether anything can be learnt. Above 1 the noise is longer than the longest mean update;
McMahan et al. 2018 trained at about 0.23.

References:
  McMahan, Ramage, Talwar, Zhang, *Learning Differentially Private Recurrent Language Models*, 2018 (arXiv 1710.06963).
  Kairouz et al., *Practical and Private (Deep) Learning without Sampling or Shuffling*, 2021 (arXiv 2103.00039).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from keyfed.errors import PrivacyError
from keyfed.private.secagg.threshold import least_alive, usual_threshold
from keyfed.system import pip_line

Accountant = Literal["pld", "rdp"]
FINE, COARSE = 1e-4, 1e-3  # width of a PLD's steps; a coarser one is as valid, ten times as fast and a little looser
LEAST_NOISE = 0.2  # where calibration starts: a PLD of less noise takes minutes


@dataclass(frozen=True, slots=True)
class Release:
    """`count` noisy sums of one kind.

    Attributes:
      z: standard deviation of the noise, divided by the sum's sensitivity to one client. 0: no noise, ε = ∞.
      q: chance with which a client is called, independently of all others (Poisson sampling); 1: no amplification.
      hinge: chance that a client meets a round in which sampling does not hide it (`hinge`): such a one costs as q = 1.
    """

    z: float
    q: float
    count: int = 1
    hinge: float = 0.0


@dataclass(frozen=True, slots=True)
class TreeRelease:
    """The first `leaves` prefix sums of one noise tree (DP-FTRL); no client need be sampled.

    Attributes:
      z: standard deviation of one node's noise, divided by the clip.
      gap: a client that took part in round t takes part in t + gap at the earliest.
      tree: which tree; rows of different trees compose as independent mechanisms.
    """

    z: float
    gap: int
    leaves: int = 1
    tree: int = 0


Row = Release | TreeRelease


def merge(rows: Iterable[Row]) -> list[Row]:
    """Add up rows of the same kind, in a fixed order: a PLD composed row by row is ten times slower.

    Example:
      >>> merge([Release(1.0, 0.1), Release(2.0, 0.1), Release(1.0, 0.1, 3)])
      [Release(z=1.0, q=0.1, count=4, hinge=0.0), Release(z=2.0, q=0.1, count=1, hinge=0.0)]
    """
    plain: dict[tuple[float, float], list[tuple[int, float]]] = {}
    trees: dict[tuple[float, int, int], int] = {}
    for row in rows:
        if isinstance(row, Release):
            plain.setdefault((row.z, row.q), []).append((row.count, row.hinge))
        else:
            trees[row.z, row.gap, row.tree] = trees.get((row.z, row.gap, row.tree), 0) + row.leaves
    return [
        *(_added(z, q, parts) for (z, q), parts in sorted(plain.items()) if any(count for count, _ in parts)),
        *(TreeRelease(z, gap, leaves, tree) for (z, gap, tree), leaves in sorted(trees.items()) if leaves),
    ]


def _added(z: float, q: float, parts: list[tuple[int, float]]) -> Release:
    """One row for many: their counts, and the mean of their chances; in an order of its own, so that sums repeat."""
    count = sum(n for n, _ in parts)
    return Release(z, q, count, math.fsum(n * hinge for n, hinge in parts) / count)


def most_met(mean: float, but_for: float) -> int:
    r"""Return how many of independent rounds a client meets at most, of `mean` in expectation, but for a chance.

    Chernoff's bound for chances that may differ: P(X ≥ k) ≤ e^{−μ}(eμ/k)^k for k > μ.

    Example:
      >>> most_met(0.0, 1e-8), most_met(1e-9, 1e-8), most_met(0.1, 1e-8), most_met(5.0, 1e-8)
      (0, 0, 5, 23)
    """
    if mean == 0:
        return 0
    k = math.floor(mean) + 1
    while -mean + k * (1 + math.log(mean / k)) > math.log(but_for):
        k += 1
    return k - 1


def at_rate_one(rows: Sequence[Row], delta: float) -> tuple[tuple[Row, ...], float]:
    """Return merged rows in which the rounds that a pivotal client meets are at rate 1, and what is left of δ.

    A hundredth of δ is for the chance that it meets more of them. Of different noise the least is taken first.
    """
    mean = math.fsum(r.count * r.hinge for r in rows if isinstance(r, Release) and r.q < 1)
    met = most_met(mean, delta / 100)
    whole = sum(r.count for r in rows if isinstance(r, Release) and r.hinge and r.q < 1)
    left = delta if mean == 0 or met >= whole else delta * 0.99
    found: list[Row] = []
    for row in rows:  # merged ones are in the order of their noise
        if isinstance(row, Release) and row.hinge and row.q < 1:
            here = min(met, row.count)
            met -= here
            found += [Release(row.z, 1.0, here), Release(row.z, row.q, row.count - here)]
        else:
            found.append(row)
    return tuple(merge(found)), left


def epsilon(
    rows: Sequence[Row], delta: float, kind: Accountant = "pld", *, population: int | None = None, grid: float = FINE
) -> float:
    """Return the ε of all rows together for a δ; ∞ without noise, 0 without releases.

    Args:
      population: clients in all; a δ of 1/population or more is refused, since it lets a mechanism publish one of them.
      grid: width of the steps of a PLD.
    """
    check_delta(delta, population)
    merged = tuple(merge(rows))
    for row in merged:
        _check_row(row)
    if not merged:
        return 0.0
    if any(row.z == 0 for row in merged):
        return math.inf
    return _epsilon(*at_rate_one(merged, delta), kind, grid)


@lru_cache(maxsize=256)
def _epsilon(rows: tuple[Row, ...], delta: float, kind: Accountant, grid: float) -> float:
    dpa = _dp_accounting()
    if kind == "rdp":
        accountant = dpa.rdp.RdpAccountant()
        accountant.compose(dpa.ComposedDpEvent([_event(dpa, row) for row in rows]))
        return float(accountant.get_epsilon(delta))
    whole = dpa.pld.privacy_loss_distribution.identity(value_discretization_interval=grid)
    for row in rows:
        whole = whole.compose(_distribution(row, grid))
    return float(whole.get_epsilon_for_delta(delta))


def _event(dpa: Any, row: Row) -> Any:
    """The `dp-accounting` event of a row. A noise tree is one Gaussian release of all its nodes."""
    if isinstance(row, TreeRelease):
        return dpa.GaussianDpEvent(row.z / math.sqrt(forest_sensitivity(row.leaves, row.gap)))
    gaussian = dpa.GaussianDpEvent(row.z)
    one = gaussian if row.q == 1 else dpa.PoissonSampledDpEvent(row.q, gaussian)
    return dpa.SelfComposedDpEvent(one, row.count)


def _distribution(row: Row, grid: float) -> Any:
    """The privacy loss distribution of a row: what a `PLDAccountant` makes of its event, but for one thing.

    It would find that of a single sampled release again for every count, which takes ten times as long as to compose it
    with itself: a run that looks after its budget asks after every round.
    """
    if isinstance(row, TreeRelease):
        return _one_release(row.z / math.sqrt(forest_sensitivity(row.leaves, row.gap)), 1.0, grid)
    if row.q == 1:
        return _one_release(row.z / math.sqrt(row.count), 1.0, grid)
    return _one_release(row.z, row.q, grid).self_compose(row.count)


@lru_cache(maxsize=8)
def _one_release(z: float, q: float, grid: float) -> Any:
    made = _dp_accounting().pld.privacy_loss_distribution
    return made.from_gaussian_mechanism(standard_deviation=z, value_discretization_interval=grid, sampling_prob=q)


@lru_cache(maxsize=64)
def calibrate(
    target: float, delta: float, q: float, rounds: int, kind: Accountant = "pld", hinge: float = 0.0
) -> float:
    """Return the noise multiplier z with which `rounds` releases cost at most ε = `target`, to 1e-4.

    Args:
      hinge: see `Release`.

    Example:
      >>> round(calibrate(1.0, 1e-5, q=0.01, rounds=1000, kind="rdp"), 3)
      1.513
    """
    if not 0 < target < math.inf:
        raise PrivacyError(f"epsilon is {target}; expected a number above 0")
    check_delta(delta)
    _check_row(Release(1.0, q, rounds, hinge))
    dpa = _dp_accounting()

    def rows_of(z: float) -> tuple[tuple[Row, ...], float]:
        return at_rate_one((Release(z, q, rounds, hinge),), delta)

    for bound in dict.fromkeys(("rdp", kind)):  # the quick one first; the search itself begins with the other
        if _epsilon(*rows_of(LEAST_NOISE), bound, COARSE) <= target:
            return LEAST_NOISE

    found = dpa.calibrate_dp_mechanism(
        lambda: _Remembering(dpa.NoOpDpEvent(), kind), lambda z: rows_of(z)[0], target, rows_of(1.0)[1],
        dpa.LowerEndpointAndGuess(LEAST_NOISE, 1.0), tol=1e-4,
    )  # fmt: skip
    return float(found)


@dataclass
class _Remembering:
    """What a search asks of an accountant. It comes back to the ends of its bracket, and the lower one is dear."""

    ledger: Any
    kind: Accountant
    rows: tuple[Row, ...] = ()

    def compose(self, rows: tuple[Row, ...]) -> _Remembering:
        self.rows = rows
        return self

    def get_epsilon(self, delta: float) -> float:
        return _epsilon(self.rows, delta, self.kind, COARSE)


def calibrate_tree(target: float, delta: float, gap: int, rounds: int) -> float:
    """Return the z of a noise tree whose `rounds` prefix sums cost at most ε = `target`; exact, as for one Gaussian."""
    if not 0 < target < math.inf:
        raise PrivacyError(f"epsilon is {target}; expected a number above 0")
    check_delta(delta)
    sigma = float(_dp_accounting().get_sigma_gaussian(target, delta))
    return sigma * math.sqrt(forest_sensitivity(rounds, gap))


def rho_to_eps(rho: float, delta: float) -> float:
    """Return the ε of a Gaussian mechanism with zero-concentrated ρ = sensitivity²/(2σ²)."""
    check_delta(delta)
    return float(_dp_accounting().get_epsilon_gaussian(math.sqrt(1 / (2 * rho)), delta))


@lru_cache(maxsize=4096)
def forest_sensitivity(leaves: int, gap: int, times: int | None = None) -> int:
    r"""Return the squared sensitivity of all nodes of a noise forest to one client of clip 1, exactly.

    The nodes over T leaves are the whole dyadic blocks [j·2^h, (j+1)·2^h) ⊂ [0, T). A client takes part in a set P of
    rounds, any two at least `gap` apart. It moves a node by |P ∩ block|. So this is the maximum over P of
    Σ_blocks |P ∩ block|².

    Args:
      times: rounds a client takes part in at most; None for as many as the gap allows.

    Example:
      >>> forest_sensitivity(2000, gap=314, times=6)  # Gboard's Spanish model: ρ = 79/(2·7²) = 0.81
      79
    """
    if leaves < 1 or gap < 1:
        raise PrivacyError(f"{leaves} rounds with a separation of {gap}; both are at least 1")
    most = -(-leaves // gap) if times is None else min(times, -(-leaves // gap))
    # Best value for (times used, rounds from the next block's start in which the client must still wait).
    reached: dict[tuple[int, int], int] = {(0, 0): 0}
    for height in range(leaves.bit_length() - 1, -1, -1):
        if not leaves >> height & 1:
            continue
        following: dict[tuple[int, int], int] = {}
        for (used, wait), value in reached.items():
            for count, after, worth in _block(height, wait, gap, most):
                if used + count <= most:
                    key = (used + count, after)
                    following[key] = max(following.get(key, 0), value + worth)
        reached = following
    return max(reached.values())


@lru_cache(maxsize=100_000)
def _block(height: int, wait: int, gap: int, most: int) -> tuple[tuple[int, int, int], ...]:
    """What a client can do in one tree of 2^height leaves after waiting: (times, wait after it, Σ |P ∩ block|²).

    A block no longer than the gap holds it once at most, and then as early as it may come. All leaves of the block have
    the same ancestors, and an early one leaves more room after it.
    """
    size = 1 << height
    found: dict[tuple[int, int], int] = {(0, max(0, wait - size)): 0}
    if size <= gap:
        if wait < size and most:
            found[1, max(0, wait + gap - size)] = height + 1
    else:
        for left, between, first in _block(height - 1, wait, gap, most):
            for right, after, second in _block(height - 1, between, gap, most):
                count = left + right
                if count <= most:
                    found[count, after] = max(found.get((count, after), 0), first + second + count**2)
    # Of the same number of times, a longer wait is only kept where it is worth more.
    kept: list[tuple[int, int, int]] = []
    for (count, after), worth in sorted(found.items()):
        if not any(c == count and a <= after and w >= worth for c, a, w in kept):
            kept.append((count, after, worth))
    return tuple(kept)


def check_delta(delta: float, population: int | None = None) -> None:
    """Refuse a δ that is no probability, or that one client in the population would exceed."""
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta}; expected 0 < delta < 1")
    if population is not None and delta * population >= 1:
        raise PrivacyError(
            f"delta is {delta:g} for {population:,} clients: at 1/{population:,} or more a mechanism may publish one "
            f"client whole; set it below {1 / population:.1e}, say {population**-1.1:.1e}"
        )


def _check_row(row: Row) -> None:
    if not 0 <= row.z < math.inf:
        raise PrivacyError(f"noise is {row.z}; expected 0 ≤ noise < ∞")
    if isinstance(row, TreeRelease):
        if row.gap < 1 or row.leaves < 0:
            raise PrivacyError(f"{row.leaves} rounds with a separation of {row.gap}; expected at least 1")
        return
    if not 0 < row.q <= 1:
        raise PrivacyError(f"rate is {row.q}; expected 0 < rate ≤ 1, the chance that a client is called")
    if not 0 <= row.hinge <= 1:
        raise PrivacyError(f"the chance of a round without amplification is {row.hinge}; expected one within 0 and 1")
    if row.count < 0:
        raise PrivacyError(f"rounds is {row.count}; expected at least 0")


def _dp_accounting() -> Any:
    try:
        import dp_accounting
        from absl import logging
        from dp_accounting import pld, rdp
    except ImportError as e:
        raise PrivacyError(
            f"epsilon needs the package dp-accounting ({e}); install it with: {pip_line('privacy')}"
        ) from None
    del pld, rdp  # imported so that they are parts of dp_accounting
    logging.set_verbosity(logging.ERROR)  # RDP says which orders it leaves out: that is looser, and valid
    return dp_accounting


MOST_MEMBERS = 4096  # clients of one secure sum: each holds a share of every other's keys


class Opening(NamedTuple):
    """When a secure sum opens.

    Attributes:
      floor: clients that must be called, and must stay.
      threshold: clients that must stay; None for more than two thirds of those called.
    """

    floor: int
    threshold: int | None = None

    @property
    def edges(self) -> tuple[int, int]:
        """The fewest and the most clients of a sum that opens if all stay."""
        if self.threshold is None:
            return self.floor, MOST_MEMBERS
        stays = max(self.floor, self.threshold)
        return stays, min(MOST_MEMBERS, 2 * stays - 1)

    def needed(self, called: int) -> tuple[int, int] | None:
        """Return how many must share their keys, and how many must upload and answer; None if it cannot open."""
        low, high = self.edges
        if not low <= called <= high:
            return None
        threshold = max(self.floor, usual_threshold(called) if self.threshold is None else self.threshold)
        return least_alive(called, threshold), threshold


class Stayed(NamedTuple):
    """How many were called, shared keys, uploaded and helped to open; None for what was never requested."""

    called: int
    shared: int | None = None
    uploaded: int | None = None
    answered: int | None = None


def chance(present: int, rate: float, opening: Opening) -> float:
    """Return h, the chance that of the others exactly so many are drawn that one client decides.

    Args:
      present: clients that can be called, the one in question among them.

    Example:
      >>> round(chance(100, 0.06, Opening(3)), 3), chance(10_000, 0.05, Opening(3)) < 1e-100
      (0.043, True)
    """
    low, high = opening.edges
    if low > high:
        return 0.0  # it never opens
    return min(1.0, sum(_binomial(m, present - 1, rate) for m in {low - 1, high}))


def beside(stayed: Stayed, opening: Opening) -> bool:
    """Whether one client would have decided, called or not, staying or not; not where everybody stayed (`chance`).

    Example:
      >>> [beside(Stayed(*n), Opening(3)) for n in ((9, 9, 9, 9), (9, 8, 8, 8), (9, 7, 7, 7), (9, 6), (9, 5))]
      [False, False, True, True, False]
    """
    if all(n is None or n == stayed.called for n in stayed[1:]):
        return False

    def opens(called: int, staying: int) -> bool:
        needed = opening.needed(stayed.called + called)
        if needed is None:
            return False
        least = (needed[0], needed[1], needed[1])
        return all(n is None or n + staying >= enough for n, enough in zip(stayed[1:], least, strict=True))

    return any(opens(*change) != opens(0, 0) for change in ((-1, -1), (1, 1), (0, -1), (0, 1)))


def _binomial(k: int, n: int, p: float) -> float:
    if not 0 <= k <= n:
        return 0.0
    if p >= 1:
        return float(k == n)
    choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(choose + k * math.log(p) + (n - k) * math.log1p(-p))


LEAST_COUNT_NOISE, MOST_LOSS_NOISE = 1.0, 5.0  # in units of z


class NoiseChoice(NamedTuple):
    """One row of a plan: a budget, a cohort, and what they cost.

    Attributes:
      count_noise: noise of the count that a moving clip follows, in clients, where none is given.
      ratio: z·√d/m. With such a count the noise of the sum is longer, by 15.5 % at most (`usual_count_noise`).
    """

    epsilon: float
    cohort: int
    rate: float
    z: float
    count_noise: float
    ratio: float


def delta_for(population: int, given: float | None = None) -> float:
    """Return δ as given, or population^-1.1; refuse one that the population does not allow.

    Example:
      >>> f"{delta_for(1_000_000):.1e}"
      '2.5e-07'
    """
    if given is None and population < 2:
        raise PrivacyError(
            f"the population is {population:,}: nobody hides alone, and no delta is below 1/{population:,} by default; "
            "take at least 2 clients (--population), or set privacy.delta"
        )
    delta = population**-1.1 if given is None else given
    check_delta(delta, population)
    return delta


def noise_to_clip(z: float, parameters: int, cohort: float) -> float:
    """Return z·√d/m.

    Example:
      >>> round(noise_to_clip(1.0, 3_550_000, 10)), round(noise_to_clip(1.0, 3_550_000, 1000), 1)
      (188, 1.9)
    """
    return z * math.sqrt(parameters) / cohort


def usual_count_noise(cohort: float, z: float, *, losses: bool = False) -> float:
    r"""Return the noise σ_b of counts, in clients, where none is given.

    .. math::  σ_b = \max(m/20, z), \qquad \text{where losses are told } \min(\max(m/20, z), 5z)

    A twentieth of the cohort m does for the clip (Andrew et al. 2021). Of few clients it would take most of what z
    pays for, or more than all of it; with σ_b ≥ z a count takes a quarter at most, and the noise of the sum grows by
    1/√(1 − ¼), 15.5 %, at most (`noise.update_noise`). Losses are to be told apart to a fraction of a nat: 5z takes a
    hundredth of what the round may cost.

    Args:
      losses: clients tell their losses, too (`private.dp.private_method`).

    Example:
      >>> usual_count_noise(100, 1.0), usual_count_noise(4, 1.5), usual_count_noise(5000, 1.0, losses=True)
      (5.0, 1.5, 5.0)
    """
    usual = max(cohort / 20, LEAST_COUNT_NOISE * z)
    return min(usual, MOST_LOSS_NOISE * z) if losses else usual


def plan(
    budgets: Iterable[float], cohorts: Sequence[int], *, population: int, delta: float, rounds: int, parameters: int
) -> list[NoiseChoice]:
    """Return the noise that each budget needs with each cohort. By RDP: a few per cent more noise than PLD needs."""
    check_delta(delta, population)
    for cohort in cohorts:
        if not 1 <= cohort <= population:
            raise PrivacyError(f"a cohort of {cohort:,} of {population:,} clients; expected 1 to {population:,}")
    found = []
    for eps in budgets:
        for cohort in cohorts:
            z = calibrate(eps, delta, cohort / population, rounds, "rdp")
            ratio = noise_to_clip(z, parameters, cohort)
            found.append(NoiseChoice(eps, cohort, cohort / population, z, usual_count_noise(cohort, z), ratio))
    return found


def cohort_needed(
    eps: float, ratio: float, *, population: int, delta: float, rounds: int, parameters: int
) -> int | None:
    """Return the smallest cohort, to 2 %, whose noise is at most `ratio` clips; None if the population is too small.

    Solves m = z(m)·√d/ratio by going back and forth: z grows with the cohort, but slower than the cohort does.
    """

    def wanted(cohort: int) -> int:
        z = calibrate(eps, delta, cohort / population, rounds, "rdp")
        return math.ceil(noise_to_clip(z, parameters, ratio))

    cohort = min(population, max(1, math.ceil(math.sqrt(parameters) / ratio)))
    for _ in range(40):
        found = wanted(cohort)
        if found > population:
            return population if wanted(population) <= population else None
        if abs(found - cohort) <= 0.01 * cohort + 1:
            return max(found, cohort)
        cohort = found
    return None


def measured_costs(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what privacy cost in the runs given: only what was measured there, never an estimate."""
    rows = []
    for name, result in results.items():
        private = result.get("privacy") or {}
        twin = private.get("twin")
        if not twin:
            continue
        rows.append(
            {
                "run": name,
                "method": result.get("method"),
                "verdict": private.get("verdict"),
                "epsilon": private.get("pld"),
                "ratio": private.get("noise_to_clip"),
                "perplexity": (result.get("test") or {}).get("perplexity"),
                "noiseless": (twin.get("test") or {}).get("perplexity"),
            }
        )
    return rows
