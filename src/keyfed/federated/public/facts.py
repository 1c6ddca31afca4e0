"""What clients tell inside a sum so that public numbers can move: one-hot histograms, under the names of their parts.

A sum of one-hot rows is a histogram of clients, and nobody sees which client is in which bucket.

Weights of a secure sum lie within [1/r, 1]: a size or a score counts exactly within a window of width log r below a
public top. `best_top` places that window by a histogram alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from keyfed.federated.types import Facts, Sums

USUAL_RATIO = 16.0  # of the largest to the least scale, where whoever sums does not say it (`private.secagg.threshold`)
ROOMS = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 18.0)  # octaves below the top, edges of buckets
SATURATED = ROOMS.index(0.0) + 1  # buckets of clients above the top
MARGIN = 2.0  # clients that another window must hold more: one client alone, whatever it says, moves nothing
_SLACK = 1e-9


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


def room_histogram(octaves: float) -> list[float]:
    """Return the one-hot histogram of how many factors of two a weight lies below the public top; below 0: above it.

    Example:
      >>> room_histogram(0.5).index(1.0) - SATURATED, room_histogram(-0.5).index(1.0) - SATURATED
      (0, -1)
    """
    return one_hot(sum(octaves >= edge for edge in ROOMS), len(ROOMS) + 1)


def best_move(rooms: Sequence[float], ratio: float) -> float:
    """Return by how many octaves the top of a window of width log₂ r moves, from the histogram of rooms below it."""
    far = 2 * ROOMS[0], *ROOMS, 2 * ROOMS[-1]
    found = [(-far[place + 1], -far[place], count) for place, count in enumerate(rooms)]
    return best_top(found[::-1], math.log2(ratio), at=0.0)


def best_top(found: Sequence[tuple[float, float, float]], width: float, at: float | None = None) -> float:
    r"""Return the top c for which most clients lie within [c − width, c].

    Of equally good windows it is the highest, and c is such that its clients lie in the middle of it. A bucket that is
    wider than the window counts as its middle.

    Args:
      found: (low end, high end, clients) of every bucket, from low to high.
      at: the present top, which stays unless another one holds `MARGIN` clients more.

    Example:
      >>> best_top([(0.0, 1.0, 1.0), (5.0, 6.0, 3.0), (6.0, 7.0, 2.0)], width=4.0)
      8.0
      >>> best_top([(0.0, 1.0, 0.0), (5.0, 6.0, 3.0), (6.0, 7.0, 1.0)], width=4.0, at=6.5)
      6.5
    """
    seen = [
        (low, high, count) if high - low <= width else ((low + high) / 2, (low + high) / 2, count)
        for low, high, count in found
        if count >= 0.5
    ]

    def within(top: float) -> list[tuple[float, float]]:
        return [(low, count) for low, high, count in seen if high <= top + _SLACK and low >= top - width - _SLACK]

    best, chosen = 0.0, 0.0 if at is None else at
    for _, high, _ in seen:
        inside = within(high)
        held = sum(count for _, count in inside)
        if held >= best:
            best, chosen = held, (high + min(low for low, _ in inside) + width) / 2
    if at is not None and best < sum(count for _, count in within(at)) + MARGIN:
        return at
    return chosen


def ratio_in(sums: Sums) -> float:
    """Return the ratio of the largest to the least scale in the sum that these numbers come from."""
    return sums.get("ratio", (USUAL_RATIO,))[0]


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
    """Return the sums of a part's facts; "loss", "count" and "ratio" are everybody's."""
    return {**under(f"{part}/", sums), **{name: sums[name] for name in ("loss", "count", "ratio") if name in sums}}
