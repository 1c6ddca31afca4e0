r"""The one-shot estimate on a run: the same training once more, with canary clients that send random directions.

Every canary client is picked with the run's own sampling rate, independently in each round, and sends a random
direction ten times as long as the clip S. Its upload goes through the run's own `NoisedSum`, which has to shorten it to
S (a missing clip shows as an ε̂ far too large), and is added to everybody's where the sum is used: in front of the
server rule. What the final model tells about the canaries is compared with the claimed ε.

Where ε is that of an imagined fleet, the run's noise is that of the fleet's mean on the mean of the few who are there.
So a canary is scaled like the noise and called at the fleet's rate: the estimate is of what is claimed.

ε is measured from that one model. k canary clients each send a random unit vector times the clip S whenever they are
picked. In d dimensions the cosine between the model's change and a vector that nobody sent is N(0, 1/d), whatever the
model. The cosines with the vectors that were sent are fitted by a Gaussian; how far it lies from the null says how well
an attacker who has the model and a client's vector can tell whether that client took part, which is ε:

.. math::  μ = \sqrt d\,\bar c,\qquad δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)

It is an estimate, not an upper bound: it is that of one attack, which sees only the final model. A claimed ε below the
estimate's interval is contradicted; one above it is consistent with it, not proven.

References:
  Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, *One-shot Empirical Privacy Estimation for Federated Learning*,
  2023, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.config.load import Config
from keyfed.engine.sums.noised import NoisedSum
from keyfed.federated.cohort import derive_seed
from keyfed.federated.round import initial_state
from keyfed.federated.types import Aggregate, Method, Params, Share, State
from keyfed.private.dp.ledger import Terms
from keyfed.private.dp.noise import Noising
from keyfed.private.dp.private_method import CLIP, Bounded
from keyfed.run.checkpoint import Cohort
from keyfed.run.loop import run_rounds, simulated_cohorts
from keyfed.run.plan import Choice
from keyfed.run.prepare import FROZEN, Prepared, make_problem
from keyfed.run.privacy import PrivateRun
from keyfed.run.ranks import federate

Numbers = NDArray[np.float64]
NORMAL = NormalDist()
CONFIDENCE = 0.95  # of the interval that is shown
CERTAIN = 0.999  # of the interval that contradicts a claim: twenty sound runs in a row must pass
MOST_EPSILON = 1e4  # an ε above which nothing is told apart any more


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the δ of telling N(0, 1) from N(μ, 1) at ε."""
    if mu <= 0:
        return 0.0
    tail = math.erfc((mu / 2 + epsilon / mu) / math.sqrt(2)) / 2
    # e^ε Φ(−μ/2 − ε/μ) with the exponent taken in: e^ε alone overflows.
    weighted = math.exp(epsilon + math.log(tail)) if tail > 0 else 0.0
    return max(0.0, NORMAL.cdf(mu / 2 - epsilon / mu) - weighted)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε at which N(0, 1) and N(μ, 1) are (ε, δ)-indistinguishable.

    Example:
      >>> round(gaussian_epsilon(1.0, 1e-5), 4), gaussian_epsilon(0.0, 1e-5)
      (4.3772, 0.0)
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; expected 0 < delta < 1")
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
        if high > MOST_EPSILON:
            return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high


class Estimate(NamedTuple):
    """What one model tells about those who sent it vectors.

    Attributes:
      low, high: the 95 % interval of ε̂; `certain` is the 99.9 % lower end, which a claim is held against.
      floor: ε̂ of as many vectors that nobody sent: what the method says of nothing.
      mean, spread: of √d · cosine; 0 and 1 if nothing can be told.
      canaries, dimensions: k and d.
    """

    epsilon: float
    low: float
    high: float
    certain: float
    floor: float
    mean: float
    spread: float
    canaries: int
    dimensions: int
    delta: float


def estimate_epsilon(seen: Numbers, unseen: Numbers, dimensions: int, delta: float) -> Estimate:
    r"""Estimate ε from cosines with vectors that were sent, and with others that were not.

    The variance is pooled: half that of the cosines, half the null's 1/d. With the fitted variance alone a few hundred
    canaries overestimate small ε. The interval is that of the mean over k canaries, carried through ε(μ), which rises
    with μ.
    """
    if len(seen) < 2:
        raise ValueError(f"{len(seen)} canaries; at least 2")
    scaled = np.sqrt(dimensions) * np.asarray(seen, np.float64)
    mean, spread = float(scaled.mean()), float(scaled.std(ddof=1))
    pooled = math.sqrt((spread**2 + 1.0) / 2)
    error = spread / math.sqrt(len(scaled))

    def at(shift: float) -> float:
        return gaussian_epsilon(max(0.0, mean + shift * error) / pooled, delta)

    shown, certain = NORMAL.inv_cdf(0.5 + CONFIDENCE / 2), NORMAL.inv_cdf(0.5 + CERTAIN / 2)
    floor = gaussian_epsilon(max(0.0, float(np.sqrt(dimensions) * np.mean(unseen))) / pooled, delta)
    return Estimate(
        at(0.0), at(-shown), at(shown), at(-certain), floor, mean, spread, len(scaled), dimensions, delta
    )  # fmt: skip


def contradicts(estimate: Estimate, claimed: float) -> bool:
    """Whether a claimed ε lies below what was measured, at 99.9 % confidence."""
    return estimate.certain > claimed


# Vectors that need no memory: each is drawn again from its seed


def unit_vector(dimensions: int, seed: int) -> Tensor:
    """Return a random direction, float32."""
    drawn = torch.empty(dimensions).normal_(0, 1, generator=torch.Generator().manual_seed(seed))
    return drawn.div_(drawn.double().norm().float())


def sum_of(dimensions: int, seeds: Iterable[int]) -> Tensor:
    """Return the sum of the random directions of these seeds."""
    total = torch.zeros(dimensions)
    for seed in seeds:
        total += unit_vector(dimensions, seed)
    return total


def cosines(change: Tensor, seeds: Iterable[int]) -> Numbers:
    """Return the cosine of a flat vector with the random direction of each seed."""
    flat = change.double()
    size = float(flat.norm())
    if size == 0 or not math.isfinite(size):
        raise ValueError(f"the model's change has norm {size}: there is nothing to compare with")
    found = (float(flat @ unit_vector(len(flat), seed).double()) / size for seed in seeds)
    return np.fromiter(found, np.float64)


def simulate(
    release: Callable[[Tensor, np.random.Generator], Tensor],
    *,
    dimensions: int,
    canaries: int,
    rate: float,
    rounds: int,
    seed: int,
) -> tuple[Numbers, Numbers]:
    """Run the attack on a mechanism alone: every round releases a noisy sum of whoever was picked.

    Args:
      release: (the sum of unit vectors of this round, generator) → what is released of it.

    Returns:
      Cosines of what was released in all, with the canaries and with as many vectors that nobody sent.
    """
    rng = np.random.default_rng(seed)
    seeds = rng.integers(0, 2**62, 2 * canaries).tolist()
    released = torch.zeros(dimensions)
    for picked in picks(rng, canaries, rate, rounds):
        released += release(sum_of(dimensions, (seeds[k] for k in picked)), rng)
    return cosines(released, seeds[:canaries]), cosines(released, seeds[canaries:])


def picks(rng: np.random.Generator, canaries: int, rate: float, rounds: int) -> Iterator[list[int]]:
    """Yield who is picked in each round: every canary independently, with the same probability."""
    for _ in range(rounds):
        yield np.flatnonzero(rng.random(canaries) < rate).tolist()


NUMBERS = 1 << 30  # random numbers an audit draws for canaries; a hundred million take about a second
FEWEST_CANARIES, MOST_CANARIES = 50, 1000
LONG = 10.0  # length of what a canary sends, in clips: a sum that does not clip gives it away
FEW_CALLS = 0.5  # calls of a canary over the run, in the mean, below which the attack could not have told anything
CROWDED = 0.02  # canaries of a round to dimensions, above which they hide each other


def how_many(dimensions: int, rate: float, rounds: int) -> int:
    """Canary clients of an audit: as many as can be drawn in time, and do not hide each other.

    As many again are drawn as nobody's. A round's canaries are nearly orthogonal, but each still has the others' sum as
    noise of variance rate·k/d beside the mechanism's z².
    """
    affordable = NUMBERS / dimensions / (2 + rate * rounds)
    return max(FEWEST_CANARIES, int(min(MOST_CANARIES, affordable, CROWDED * dimensions / rate)))


def canary_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the canaries' directions, and as many of directions that nobody sends."""
    return [derive_seed(seed, "one-shot", k) for k in range(2 * count)]


def picked(terms: Terms, canaries: int, seed: int, round: int) -> list[int]:
    """Say which canary clients are in a round: each by chance, or, where clients take turns, those whose turn it is."""
    if terms.gap is not None:
        return list(range(round % terms.gap, canaries, terms.gap))
    rng = np.random.default_rng(derive_seed(seed, "one-shot", "picked", round))
    return np.flatnonzero(rng.random(canaries) < terms.rate).tolist()


def also_sending(method: Method, sent: Params) -> Method:
    """Return the method whose next sum has these tensors in it, too."""
    own = method.server

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        total = {name: t + sent[name].to(t) if name in sent else t for name, t in aggregate.total.items()}
        return own.step(params, replace(aggregate, total=total), state)

    return replace(method, server=own._replace(step=step))


def sent_by(seeds: Iterable[int], like: Params, clip: float) -> Params:
    """Return the sum of what the canaries of these seeds send, each clipped by the sum that clips everybody."""
    size = sum(p.numel() for p in like.values())
    silent = Noising(clip, 0.0, None, 1.0, 1.0, None, lambda: lambda name, shape: torch.zeros(shape).double())
    summed, whole = NoisedSum(like, silent), dict.fromkeys(like, 1.0)
    for number, seed in enumerate(seeds):
        upload = cut(unit_vector(size, seed).mul_(LONG * clip), like)
        summed.add(f"canary {number}", upload, Share(whole, whole))
    return summed.aggregate(()).total


def cut(vector: Tensor, like: Params) -> Params:
    """Cut a flat vector into tensors of these shapes."""
    parts = vector.split([p.numel() for p in like.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(like.items(), parts, strict=True)}


def train_with_canaries(
    config: Config,
    prepared: Prepared,
    bounded: Bounded,
    terms: Terms,
    choice: Choice,
    theta: Params,
    out: Path,
    seeds: Sequence[int],
    rounds: int,
) -> tuple[Params, float]:
    """Train as the run did, with a canary client for every seed; return the last model and a canary's mean calls.

    Args:
      out: a folder for the ledger of this training.
    """
    guard, method = PrivateRun(config, bounded, out, terms), bounded.method
    sent_layers, calls = trained_layers(config, theta), 0
    problem = make_problem(prepared, config, method, choice.device)
    with federate(config, problem, choice, None, None) as federation:
        cohorts = simulated_cohorts(config, prepared, method, federation, theta, guard)

        def with_canaries(state: State) -> Cohort:
            nonlocal calls
            cohort = cohorts(state)
            own = [seeds[k] for k in picked(terms, len(seeds), config.train.seed, state.round)]
            calls += len(own)
            clipped = sent_by(own, sent_layers, float(state.server[CLIP]))
            sent = {name: t * (terms.called / terms.cohort) for name, t in clipped.items()}
            return replace(cohort, method=also_sending(method, sent))

        last = run_rounds(method, initial_state(method, theta), rounds, federation, with_canaries)
    return last.params, calls / len(seeds)


def trained_layers(config: Config, theta: Params) -> Params:
    """Return the layers that clients send in every round; canaries have no part in one that is frozen for a while."""
    return {name: p for name, p in theta.items() if name not in FROZEN or not config.train.frozen_rounds}


def flat_change(before: Params, after: Params) -> Tensor:
    """Return how far a model moved, as one vector, layers in the order of `before`."""
    return torch.cat([(after[name].double().cpu() - p.double().cpu()).flatten() for name, p in before.items()])


def judge(
    before: Params, after: Params, seeds: Sequence[int], delta: float, claimed: float | None, calls: float
) -> dict[str, Any]:
    """Compare the model's change with the canaries' directions; the second half of `seeds` was never sent.

    Args:
      calls: how often a canary took part, in the mean; one that never did cannot be told from nobody.
    """
    change, count = flat_change(before, after), len(seeds) // 2
    estimate = estimate_epsilon(cosines(change, seeds[:count]), cosines(change, seeds[count:]), len(change), delta)
    return {
        **estimate._asdict(),
        "claimed": claimed,
        "calls": calls,
        "power": calls >= FEW_CALLS,
        "contradicted": claimed is not None and contradicts(estimate, claimed),
    }
