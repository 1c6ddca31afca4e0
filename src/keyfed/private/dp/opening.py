r"""Rounds of drawn clients whose secure sum opens or stays closed by a single client.

Amplification by sampling asks that "not drawn" looks like "drawn, and sends zeros". A masked sum of fewer clients than
`floor` stays closed, so it does not: with floor − 1 others drawn, one client's being drawn opens the sum of all.
Whoever sees that learns that it was drawn, and its part is hidden by the noise alone, without amplification.

How many others are drawn is independent of the client, of its text and of its own draw. So a row of the ledger carries
the chance h of such a round, a public number,

.. math::  h = \sum_m [\text{opens}(m) ≠ \text{opens}(m + 1)] \binom{n−1}{m} q^m (1−q)^{n−1−m}

for n clients there are, and `accounting` counts as many rounds at rate 1 as a client meets but for a small part of δ.
To book the rounds in which it *happened* at rate 1 would not do: the booking itself would tell, at its own edge.

Whether enough of those called stay has no known chance. A round in which some did not, and one client more or less
would have decided, is booked at rate 1 when it happens (`beside`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from keyfed.private.secagg.threshold import least_alive, usual_threshold

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
    """How many were called, shared keys, uploaded and helped to open; None for what was never asked."""

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
        return 0.0  # it opens for nobody
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
