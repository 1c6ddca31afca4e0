r"""The sum of a private round with real clients: their clipped parts, checked, clipped again, noised.

A part that comes in the clear is clipped once more, whatever its client says it did: it moves the sum by S at most. In
a masked sum single parts cannot be looked at. Its numbers go round at 2³² and are folded back (`codec.folded`), then
what the clients sum up to is brought within what they may sum up to (`NoisedSum.take`). Honest clients notice neither,
and neither makes anybody's influence larger: folding and going to the nearest point of a ball bring no two points
further apart. So a client that lies can move a masked sum by more than S, but no sum beyond mS; and whatever it does,
an honest client moves the sum by S at most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from keyfed.engine.sums.codec import words_of
from keyfed.engine.sums.noised import NoisedSum
from keyfed.errors import SecureSumError
from keyfed.federated.types import ClientId, Method, Params
from keyfed.private.dp.accounting import Opening, Stayed, beside
from keyfed.private.dp.noise import Noising
from keyfed.private.secagg.collector import Collector
from keyfed.wire.calls import Calls, with_model
from keyfed.wire.messages import Rejected, most_bytes, read_tensors, shapes_of
from keyfed.wire.private_part import Asked, share_of
from keyfed.wire.server_secure import secure_sum

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
        summed.take(found.total, found.survivors)
    except SecureSumError as e:
        failed = str(e)
    assert calls.run.secure is not None, "settings of secure sums"
    opening = Opening(calls.run.secure.floor, calls.run.secure.threshold)
    return Masked(summed, failed, any(beside(Stayed(len(heads), *c.stayed), opening) for c in collected))
