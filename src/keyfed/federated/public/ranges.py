r"""The public range 2^e of every layer in a sum of fixed point: how it starts, and how it moves with sums alone.

A range that is too small leaves clients out; one that is too large rounds everybody's numbers away. Nobody sees which
client was out of range in which layer, and any client may lie about it, so one client alone moves little:

    one over half of its range               + 1
    a quarter of all out of range            + 2, in every layer (two clients at least)
    fewer, in three rounds                   + 1, in every layer
    all at most an eighth                    − 1
    three quarters at most an eighth         − 1, where the range is over four times the first one

and no range is ever more than 2^8 times the first one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from keyfed.federated.types import Public, Sums

SMALLEST_RANGE, LARGEST_RANGE = -20, 28  # exponents of 2 of the largest number of a layer
ROOM_OF_RANGE = 2  # bits between the largest number seen and the range
ROOM_OF_DUALS = 6  # the same, where clients keep duals: their increments grow after the round in which they join
MOST_RAISED = 8  # bits between a range and the first one
HELD_BY_ONE = 2  # bits above the first range that a single client can hold against all the others
RAISED_BY_MANY, MANY = 2, 0.25  # bits, after a round in which this share of the clients was out of range
MAGNITUDES = LARGEST_RANGE - SMALLEST_RANGE + 2  # buckets of the largest number of a layer
PATIENCE = 3  # rounds with a single client out of range before ranges rise by a bit


def magnitude_bucket(largest: float) -> int:
    """Return the bucket of a layer's largest absolute number by powers of two; 0 is exactly zero."""
    return 0 if largest == 0 else max(1, math.ceil(math.log2(largest)) - SMALLEST_RANGE + 1)


def use_of_range(largest: float, exponent: int) -> tuple[float, float]:
    """Say whether a layer's largest number is over half its range 2^e, and whether it is small: at most an eighth.

    A layer that did not move at all is not small: it may be frozen, and its range must wait for it.
    """
    range_ = 2.0**exponent
    return float(largest > range_ / 2), float(0 < largest <= range_ / 8)


def first_ranges(largest: Mapping[str, int], room: int = ROOM_OF_RANGE) -> dict[str, int]:
    """Return a range for every layer from its highest bucket, 2^room times its largest number: usually four times.

    A layer that is all zeros gets the largest range of all.
    """
    most = max(largest.values(), default=0) or 1 - SMALLEST_RANGE  # nothing moved at all: a range of 2^2
    highest = LARGEST_RANGE + ROOM_OF_RANGE
    return {name: min((place or most) - 1 + SMALLEST_RANGE + room, highest) for name, place in largest.items()}


def next_ranges(public: Public, sums: Sums, contributors: int) -> Public:
    """Return public numbers with the next round's "ranges", and "outside": rounds waited before the next rise."""
    outside = round(sum(sums.get("out of range", (0.0,))))
    many = outside >= max(2.0, MANY * (contributors + outside))
    waited = public["outside"] + (outside > 0)
    due = not many and waited >= PATIENCE
    ranges = {
        name: _moved(e, public["first"][name], _uses(name, sums), contributors, many, due)
        for name, e in public["ranges"].items()
    }
    return {**public, "ranges": ranges, "outside": 0 if many or due else waited}


def raised_bits(public: Public) -> int:
    """Return by how many bits the widest range is above its first one: precision that sums have lost; at least 0."""
    ranges: dict[str, int] = public["ranges"]
    first: dict[str, int] = public["first"]
    return max([0, *(e - first[name] for name, e in ranges.items())])


def _uses(layer: str, sums: Sums) -> tuple[float, float]:
    """Return how many clients told that a layer is over half its range, and how many that it is small."""
    return sum(sums.get(f"large/{layer}", ())), sum(sums.get(f"small/{layer}", ()))


def _moved(exponent: int, first: int, uses: tuple[float, float], clients: int, many: bool, due: bool) -> int:
    large, small = uses
    most = min(first + MOST_RAISED, LARGEST_RANGE + ROOM_OF_RANGE)
    if many:
        return min(exponent + RAISED_BY_MANY, most)
    if clients and exponent > first + HELD_BY_ONE and small >= (1 - MANY) * clients:
        return exponent - 1
    if due or large >= 0.5:
        return min(exponent + 1, most)
    return max(exponent - 1, SMALLEST_RANGE) if clients and small > clients - 0.5 else exponent
