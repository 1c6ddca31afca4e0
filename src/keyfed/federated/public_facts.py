"""What clients tell inside a sum so that public numbers can move: one-hot histograms, under the names of their parts.

A sum of one-hot rows is a histogram of clients, and nobody sees which client is in which bucket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from keyfed.federated.types import Facts, Sums


def one_hot(place: int, length: int) -> list[float]:
    """Return zeros with a one at a place; places beyond the ends count as the ends.

    Example:
      >>> one_hot(1, 3), one_hot(7, 3)
      ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    """
    row = [0.0] * length
    row[min(max(place, 0), length - 1)] = 1.0
    return row


def highest(histogram: Sequence[float]) -> int:
    """Return the last bucket of a histogram that holds a client (at least half a count); 0 for an empty one."""
    return max((place for place, count in enumerate(histogram) if count >= 0.5), default=0)


def size_bucket(tokens: float) -> int:
    """Return b with 2^(b−1) < n ≤ 2^b.

    Example:
      >>> [size_bucket(n) for n in (1, 2, 3, 1024, 1025)]
      [0, 1, 2, 10, 11]
    """
    return math.ceil(math.log2(tokens)) if tokens > 1 else 0


def joined(parts: Mapping[str, Facts]) -> Facts:
    """Return the facts of several parts together, each fact under its part's name.

    Example:
      >>> joined({"inner": {"saturated": [0.0]}, "own": {"losses": [1.0]}})
      {'inner/saturated': [0.0], 'own/losses': [1.0]}
    """
    return {f"{part}/{name}": numbers for part, facts in parts.items() for name, numbers in facts.items()}


def under(prefix: str, sums: Sums) -> Sums:
    """Return the sums whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): numbers for name, numbers in sums.items() if name.startswith(prefix)}


def sums_of(part: str, sums: Sums) -> Sums:
    """Return the sums of a part's facts; "loss" and "count" are everybody's."""
    return {**under(f"{part}/", sums), **{name: sums[name] for name in ("loss", "count") if name in sums}}
