r"""What a client of a secure sum makes sure of before it computes anything with the server's public numbers.

The server is trusted with the sum and with nothing else. Its public numbers decide how every client weighs itself, so
numbers that no run of ours could arrive at are refused as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

from keyfed.errors import ConfigError
from keyfed.federated.public.facts import USUAL_RATIO
from keyfed.federated.public.ranges import LARGEST_RANGE, MOST_RAISED, PATIENCE, ROOM_OF_RANGE, SMALLEST_RANGE
from keyfed.federated.public.rules import LOSS_STEP, LOSSES, MOST_CAP
from keyfed.federated.types import Method

DEEPEST = 6  # a rule in a rule in a rule: top-K of a switch of two
MOST_TOKENS = 2.0**40  # of ŵ
MOST_NUMBER = 2.0**60  # of what a rule from outside keeps


def refuse_isolating(method: Method, ratio: float = USUAL_RATIO) -> None:
    r"""Refuse a method with which whoever runs the server can make a sum of one client's upload.

    Under top-K clients with a loss above the public τ send zeros, and the histogram of losses is public: with τ between
    the two lowest losses the sum is one upload. No client can see that by itself. A simulation has nobody to hide from.

    Args:
      ratio: r of the sum (`private.secagg.threshold.most_ratio`); by default the largest that any sum has.

    Raises:
      ConfigError: the method takes the clients of lowest loss only, or has fixed weights beyond the ratio.
    """
    refuse_unequal(method, ratio)
    rule = method.mediator.private
    if method.uploading < 1 or (rule is not None and "limit" in _names(rule.init())):
        raise ConfigError(
            f"method.beta is {method.uploading:g} ({method.name}): top-K under secure sums lets the server choose a "
            "threshold below which a single client lies, and read its upload; set method.beta=1, or secure.on=false"
        )


def refuse_unequal(method: Method, ratio: float) -> None:
    """Refuse weights that are fixed beforehand and differ by more than a secure sum allows; 0 is beyond any ratio.

    Raises:
      ConfigError: with what would do.
    """
    rule = method.mediator.private
    if rule is None or rule.least is None:  # others are clamped
        return
    least = min(rule.least(["layer"], rule.init()).values())
    if least < 1 / ratio - 1e-9:
        found = f"the largest is {1 / least:.4g} times the least" if least > 0 else "a weight of 0 is among them"
        raise ConfigError(
            f"fixed weights ({method.name}): {found}, and a secure sum allows {ratio:g} times at most, so that no "
            "client's upload can be singled out; bring mediator.weights closer together (a client without one "
            "weighs 1), take more clients a round (up to 16 times), or set secure.on=false"
        )


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


def _names(kept: object) -> set[str]:
    """Return all names in nested public numbers."""
    if not isinstance(kept, dict):
        return set()
    return set(kept).union(*(_names(value) for value in kept.values()))
