r"""The sum of a private round with real clients: their clipped parts, checked, clipped again, noised.

A part that comes in the clear is clipped once more, whatever its client says it did: it moves the sum by S at most. In
a masked sum single parts cannot be looked at, and its numbers go round at 2³². A sum of honest clients stays within
±2³⁰; beyond that a number is folded back, 2³¹ − v and −2³¹ − v, so that it is continuous all the way round (`folded`):
else a liar could put a number beside the seam, where the smallest change of an honest client flips its sign. Then what
the clients sum up to is brought within m·S,

.. math::  Σ · \min(1, mS/‖Σ‖),\qquad m = ⌈n + 5\sqrt n⌉

for n clients that are called in expectation: m is public, and does not depend on who was drawn.

Honest clients notice neither, and neither makes anybody's influence larger: folding and going to the nearest point of a
ball bring no two points further apart. So a client that lies can move a masked sum by more than S, but no sum beyond
mS; and whatever it does, an honest client moves the sum by S at most.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.masked import FixedPointSum
from keyfed.engine.sums.noised import NoisedSum, words_of
from keyfed.errors import SecureSumError
from keyfed.federated.types import ClientId, Method, Params
from keyfed.private.dp.accounting import Opening, Stayed, beside
from keyfed.private.dp.noise import Noising, norm_of
from keyfed.private.secagg.collector import Collector
from keyfed.wire.calls import Calls, with_model
from keyfed.wire.messages import Rejected, most_bytes, read_tensors, shapes_of
from keyfed.wire.private_part import Asked, share_of
from keyfed.wire.server_secure import Summed, secure_sum

Heads = dict[ClientId, dict[str, Any]]


def plain_sum(calls: Calls, heads: Heads, params: Params, round: int, noising: Noising, asked: Asked) -> NoisedSum:
    """Call the cohort and sum its parts, in the order called; each is let go as soon as it is in the sum."""
    summed, expected = NoisedSum(params, noising), shapes_of(params)
    told = {"public": asked.public, "send": True}  # not how many were drawn: amplification rests on nobody knowing

    def take(client: ClientId, answer: bytes) -> None:
        received = calls.current(round, answer, most_bytes(expected), len(expected))
        layers = read_tensors(received.tensors, expected)
        share = share_of(received.head.get("part"), params, ratio=noising.floor is not None)
        if not all(bool(torch.isfinite(layer).all()) for layer in layers.values()):
            raise Rejected("non-finite upload", f"the part of {client}")
        summed.add(client, layers, share)

    bodies = with_model({c: head | told for c, head in heads.items()}, params)
    calls.gather("train", bodies, take, most=most_bytes(expected))
    return summed


class Masked(NamedTuple):
    """A masked sum of a private round.

    Attributes:
      failed: why it stayed closed; None if it opened. Closed it is empty.
      beside: not all stayed, and one client more or less would have decided whether it opens (`private.dp.accounting`).
    """

    summed: NoisedSum
    failed: str | None
    beside: bool


def masked_sum(
    calls: Calls, heads: Heads, params: Params, method: Method, round: int, noising: Noising, asked: Asked
) -> Masked:
    """Open the sum of the cohort's masked parts, or say why it stayed closed."""
    collected: list[Collector] = []
    summed, failed = NoisedSum(params, noising), None
    try:
        found = secure_sum(
            calls, heads, params, method, asked.public, round, "upload", None, words=words_of(params),
            watch=collected.append,
        )  # fmt: skip
        summed = OpenedSum(params, noising, found)
    except SecureSumError as e:
        failed = str(e)
    assert calls.run.secure is not None, "settings of secure sums"
    opening = Opening(calls.run.secure.floor, calls.run.secure.threshold)
    return Masked(summed, failed, any(beside(Stayed(len(heads), *c.stayed), opening) for c in collected))


def folded(total: Vector) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Read words as signed numbers within ±2³⁰: a triangle wave, along which neighbours on the circle stay neighbours.

    Example:
      >>> folded(np.array([5, 2**32 - 5, 2**30, 2**31 - 1, 2**31, 2**31 + 1], np.uint32)).tolist()
      [5.0, -5.0, 1073741824.0, 1.0, 0.0, -1.0]
    """
    signed = total.astype(np.int32).astype(np.float64)
    turned = np.copysign(2.0**31, signed) - signed
    return np.where(np.abs(signed) > 2.0**30, turned, signed)


def most_called(expected: float) -> int:
    """Return ⌈n + 5√n⌉: a public number above which hardly ever so many are drawn where n are expected.

    Example:
      >>> most_called(100.0)
      150
    """
    return math.ceil(expected + 5 * math.sqrt(expected))


class OpenedSum(FixedPointSum):
    """A private sum that was opened: what its clients wrote, within what they may sum up to."""

    def __init__(self, like: Params, noising: Noising, found: Summed) -> None:
        super().__init__(like, noising)
        self._read(folded(found.total))
        clients = most_called(noising.called)
        most, norm = clients * noising.clip, norm_of(self._total.values(), self._mass.values())
        if norm > most:
            for total in self._total.values():
                total.mul_(most / norm)
            self._mass = {name: mass * most / norm for name, mass in self._mass.items()}
        self._told = {name: min(max(count, -clients / 2), clients / 2) for name, count in self._told.items()}
        self._contributors = list(found.survivors)
