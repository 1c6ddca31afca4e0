r"""One-shot empirical privacy: ε as measured from one trained model.

k canary clients each send a random unit vector times the clip S whenever they are picked. In d dimensions the cosine
between the model's change and a vector that nobody sent is N(0, 1/d), whatever the model. The cosines with the vectors
that were sent are fitted by a Gaussian; how far it lies from the null says how well an attacker who has the model and
a client's vector can tell whether that client took part, which is ε:

.. math::  μ = \sqrt d\,\bar c,\qquad δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)

It is an estimate, not an upper bound: it is that of one attack, which sees only the final model. A claimed ε below the
estimate's interval is contradicted; one above it is consistent with it, not proven.

References:
  Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, *One-shot Empirical Privacy Estimation for Federated Learning*,
  2023, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
NORMAL = NormalDist()
CONFIDENCE = 0.95  # of the interval that is shown
CERTAIN = 0.999  # of the interval that contradicts a claim: twenty sound runs in a row must pass
MOST = 1e4  # an ε above which nothing is told apart any more


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
        if high > MOST:
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
