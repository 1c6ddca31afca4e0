r"""The numbers that a secure sum makes public: how they are counted, how they move, which of them a client accepts.

**Counts.** Clients send one-hot histograms inside the sum; their sum is a histogram of clients, without names. Weights
of a secure sum lie within [1/r, 1]: a size or a score counts exactly within a window of width log r below a public top.
`best_top` places that window by a histogram alone.

**Ranges.** Every layer has a public range 2^e in a sum of fixed point. Too small a range leaves clients out; too large
a range rounds their numbers away. Any client may lie about its range, so one client alone moves little:

    one over half of its range               + 1
    a quarter of all out of range            + 2, in every layer (two clients at least)
    fewer, in three rounds                   + 1, in every layer
    all at most an eighth                    − 1
    three quarters at most an eighth         − 1, where the range is over four times the first one

No range is ever more than 2^8 times the first one.

**Checks.** The server is trusted with the sum and with nothing else. Its public numbers decide how every client weighs
itself, so a client refuses numbers that no run of ours could arrive at (`check_public`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from keyfed.federated.types import Facts, Public, Sums

USUAL_RATIO = 16.0  # of the largest to the least scale, where the sum does not say it (`private.secagg.threshold`)
ROOMS = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 18.0)  # octaves below the top, edges of buckets
SATURATED = ROOMS.index(0.0) + 1  # buckets of clients above the top
MARGIN = 2.0  # clients that another window must hold more: one client alone, whatever it says, moves nothing
_SLACK = 1e-9
DEEPEST = 6  # a rule in a rule in a rule: top-K of a switch of two
MOST_TOKENS = 2.0**40  # of ŵ
MOST_NUMBER = 2.0**60  # of what a rule from outside keeps
MOST_CAP = 4096.0  # of a score's cap: twice the end of the last bucket of scores
LOSS_STEP, LOSSES = 1 / 32, 512  # buckets of a loss in nats, up to 16 and above


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


def joined(rules: Mapping[str, Facts]) -> Facts:
    """Return the facts of several rules together, each fact under its rule's name.

    Example:
      >>> joined({"inner": {"saturated": [0.0]}, "own": {"losses": [1.0]}})
      {'inner/saturated': [0.0], 'own/losses': [1.0]}
    """
    return {f"{rule}/{name}": numbers for rule, facts in rules.items() for name, numbers in facts.items()}


def under(prefix: str, sums: Sums) -> Sums:
    """Return the sums whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): numbers for name, numbers in sums.items() if name.startswith(prefix)}


def sums_of(rule: str, sums: Sums) -> Sums:
    """Return the sums of a rule's facts; "loss", "count" and "ratio" are everybody's."""
    return {**under(f"{rule}/", sums), **{name: sums[name] for name in ("loss", "count", "ratio") if name in sums}}


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
    """Return in how many clients a layer is over half its range, and in how many it is small."""
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


def check_public(public: object, layers: Sequence[str]) -> None:
    """Make sure that a round's public numbers are such that a run of ours can have.

    Args:
      public: as it came from the server: any JSON.
      layers: names of the model's layers.

    Raises:
      ValueError: anything odd; the text has no number of a client in it.
    """
    names = {"calibrated", "rule", "ranges", "first", "outside"}
    if not isinstance(public, dict) or set(public) != names:
        raise ValueError(f"public numbers are a JSON object with exactly {', '.join(sorted(names))}")
    calibrated = public["calibrated"]
    if not isinstance(calibrated, bool):
        raise ValueError("calibrated is neither true nor false")
    expected = set(layers) if calibrated else set()
    for what in ("ranges", "first"):
        _check_ranges(what, public[what], expected)
    if any(e > public["first"][name] + MOST_RAISED for name, e in public["ranges"].items()):
        raise ValueError(f"a range is over {MOST_RAISED} bits above the first one")
    if not _whole(public["outside"]) or not 0 <= public["outside"] < PATIENCE:
        raise ValueError(f"outside is not a whole number from 0 to {PATIENCE - 1}")
    _check_rule(public["rule"], expected, calibrated, DEEPEST)


def _check_ranges(what: str, ranges: object, layers: set[str]) -> None:
    most = LARGEST_RANGE + ROOM_OF_RANGE
    if not isinstance(ranges, dict) or set(ranges) != layers:
        raise ValueError(f"{what} are not those of the model's {len(layers)} layers")
    if not all(_whole(e) and SMALLEST_RANGE <= e <= most for e in ranges.values()):
        raise ValueError(f"{what}: expected whole numbers from {SMALLEST_RANGE} to {most}")


def _check_rule(rule: object, layers: set[str], calibrated: bool, depth: int) -> None:
    """Check what a rule keeps: our own names by their meaning, others for being small finite JSON."""
    if not isinstance(rule, dict):
        raise ValueError("a rule's public numbers are no JSON object")
    for name, value in rule.items():
        check = _KNOWN.get(name) if calibrated else None
        if check is not None and not check(value, layers):
            raise ValueError(f"the public number {name} of the rule is none that a run can have")
        if not _plain(value, depth):
            raise ValueError("a rule's public numbers are not finite, or nested too deep")
        if isinstance(value, dict) and name in _PARTS:
            _check_rule(value, layers, calibrated, depth - 1)


def _is_most(value: object, layers: set[str]) -> bool:
    """ŵ: a power of two."""
    return _number(value) and 1 <= value <= MOST_TOKENS and math.log2(value).is_integer()


def _are_caps(value: object, layers: set[str]) -> bool:
    return isinstance(value, dict) and set(value) == layers and all(
        _number(cap) and 0 <= cap <= MOST_CAP for cap in value.values()
    )  # fmt: skip


def _is_limit(value: object, layers: set[str]) -> bool:
    """τ: the upper end of a bucket, or none."""
    return value is None or (_number(value) and 0 < value < LOSSES * LOSS_STEP and (value / LOSS_STEP).is_integer())


def _are_losses(value: object, layers: set[str]) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(x is None or (_number(x) and x >= 0) for x in value)


_KNOWN: dict[str, Callable[[object, set[str]], bool]] = {
    "most": _is_most, "caps": _are_caps, "limit": _is_limit, "losses": _are_losses
}  # fmt: skip
_PARTS = ("inner", "adaptive", "otherwise")


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> TypeGuard[float]:
    """Whether this is a number that is not too large; JSON may hold whole numbers beyond any float, and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER


def _plain(value: object, depth: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_plain(x, depth - 1) for x in inner)
    return value is None or isinstance(value, bool | str) or _number(value)
