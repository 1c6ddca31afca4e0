r"""Exposure: how much likelier a secret has become than random ones of its form.

A secret r is ranked by its nats among random candidates R of its form, itself included:

.. math::  \mathrm{exposure}(r) = \log_2 |R| − \log_2 \mathrm{rank}(r)

log₂|R| bits means that it is the likeliest of all: whoever knows the form can read it out. A secret that was never
planted has a uniform rank, so P(E ≥ x) = 2^−x: its median is 1 bit and its mean 1/ln 2 = 1.44.

References:
  Carlini, Liu, Erlingsson, Kos, Song, *The Secret Sharer*, USENIX Security 2019, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

CHANCE_BITS = math.log2(20)  # an exposure that one in twenty secrets reaches without having been planted
LEAST_P = 0.01  # of the Kolmogorov–Smirnov test, below which controls do not behave as controls must


def rank_of(nats: float, others: Numbers) -> float:
    """Return the rank of a secret among random candidates, 1 for the likeliest; ties count half.

    Example:
      >>> rank_of(2.0, np.array([1.0, 3.0, 4.0])), rank_of(2.0, np.array([2.0, 2.0]))
      (2.0, 2.0)
    """
    return 1.0 + float((others < nats).sum()) + 0.5 * float((others == nats).sum())


def exposure(rank: float, candidates: int) -> float:
    """Return log₂|R| − log₂ rank, in bits.

    Example:
      >>> exposure(1, 1024), exposure(512, 1024)
      (10.0, 1.0)
    """
    if not 1 <= rank <= candidates:
        raise ValueError(f"a rank of {rank} among {candidates} candidates")
    return math.log2(candidates) - math.log2(rank)


def chance_under(bits: float, users: int, epsilon: float, delta: float) -> float:
    r"""Return the largest chance that (ε, δ) for one client leaves to an exposure of so many bits.

    Without the canary P(E ≥ x) = 2^−x; with it, planted by u clients, group privacy allows
    e^{uε} 2^−x + δ (e^{uε} − 1)/(e^ε − 1). A tiny value contradicts the guarantee.

    Example:
      >>> round(chance_under(10, 1, 1.0, 1e-6), 5), chance_under(10, 16, 8.0, 1e-6)
      (0.00266, 1.0)
    """
    if users * epsilon > 700:
        return 1.0
    group = math.exp(users * epsilon)
    added = delta * (users if epsilon == 0 else (group - 1) / math.expm1(epsilon))
    return float(min(1.0, group * 2.0**-bits + added))


class Controls(NamedTuple):
    """How secrets that were never planted fare.

    Attributes:
      p: of the Kolmogorov–Smirnov test against P(E ≥ x) = 2^−x.
      behave: whether p > LEAST_P; if not, exposures of this audit mean nothing.
    """

    number: int
    median: float
    mean: float
    p: float
    behave: bool


def judge_controls(exposures: Sequence[float]) -> Controls:
    """Test the exposures of secrets that were never planted."""
    bits = np.asarray(exposures, np.float64)
    p = uniform_p(2.0**-bits)
    return Controls(len(bits), float(np.median(bits)), float(bits.mean()), p, p > LEAST_P)


def uniform_p(values: Numbers) -> float:
    r"""Return the p-value of the Kolmogorov–Smirnov test that values are uniform on (0, 1].

    D is the largest distance between the distribution functions, and
    P(D ≥ d) ≈ 2 Σ_j (−1)^{j−1} exp(−2 j² λ²) with Stephens' λ = (√n + 0.12 + 0.11/√n) d.

    Example:
      >>> round(uniform_p(np.linspace(0.005, 0.995, 100)), 3), uniform_p(np.full(50, 0.01)) < 1e-9
      (1.0, True)
    """
    x, n = np.sort(values), len(values)
    if n == 0:
        return math.nan
    steps = np.arange(n + 1) / n
    d = float(max((steps[1:] - x).max(), (x - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    if scaled < 0.2:  # the series needs many terms there, and its value is 1 to 1e-12
        return 1.0
    terms = (2 * (-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101))
    return float(min(1.0, max(0.0, sum(terms))))
