r"""Membership inference: how well a score tells those who were trained on from those who were not.

The score is a loss (members' is lower), or how much it fell between two models (members' fell more). AUC is the
probability that a member scores above a non-member, ½ for a coin; the true positive rate at 1 % false positives says
whether an attacker is ever sure, which AUC hides.

References:
  Carlini et al., *Membership Inference Attacks From First Principles*, S&P 2022 (why the low false positive rate).
  Zanella-Béguelin et al., *Analyzing Information Leakage of Updates to Natural Language Models*, CCS 2020 (snapshots).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
FALSE_POSITIVES = 0.01
RESAMPLES = 200


class Attack(NamedTuple):
    """How well a score tells members from others, each figure with its 95 % bootstrap interval."""

    members: int
    others: int
    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    tpr_interval: tuple[float, float]

    @property
    def succeeds(self) -> bool:
        """Whether members are told apart better than by a coin."""
        return self.auc_interval[0] > 0.5


def auc(members: Numbers, others: Numbers) -> float:
    """Return P(member's score > other's), ties half (Mann–Whitney).

    Example:
      >>> auc(np.array([3.0, 4.0]), np.array([1.0, 2.0])), auc(np.array([1.0, 1.0]), np.array([1.0]))
      (1.0, 0.5)
    """
    ranked = np.sort(others)
    below = np.searchsorted(ranked, members, side="left")
    within = np.searchsorted(ranked, members, side="right")
    return float((below + within).mean() / (2 * len(others)))


def true_positives(members: Numbers, others: Numbers, false_positives: float = FALSE_POSITIVES) -> float:
    """Return the share of members above a threshold that at most so large a share of the others exceeds.

    Example:
      >>> true_positives(np.array([0.5, 2.0]), np.linspace(0, 1, 100))
      0.5
    """
    allowed = int(false_positives * len(others) + 1e-9)
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -np.inf
    return float((members > threshold).mean())


def attack(members: Numbers, others: Numbers, seed: int) -> Attack:
    """Judge a score, larger for members, with bootstrap intervals."""
    if len(members) < 2 or len(others) < 2:
        raise ValueError(f"{len(members)} members and {len(others)} others; at least 2 of each")
    rng = np.random.default_rng(seed)
    drawn = [
        (rng.choice(members, len(members)), rng.choice(others, len(others))) for _ in range(RESAMPLES)
    ]  # fmt: skip
    return Attack(
        len(members),
        len(others),
        auc(members, others),
        _interval([auc(m, o) for m, o in drawn]),
        true_positives(members, others),
        _interval([true_positives(m, o) for m, o in drawn]),
    )


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
