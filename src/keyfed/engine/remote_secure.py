"""One secure sum with real clients, the server's side: three messages, then the total or nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from keyfed.engine.answers import sum_context
from keyfed.engine.calls import MOST_CONTROL, Calls, with_model
from keyfed.engine.device_store import about_digest
from keyfed.engine.messages import Rejected, most_bytes, pack, read_tensors
from keyfed.engine.secure_layout import Vector
from keyfed.engine.secure_round import Purpose, context_of, length
from keyfed.errors import SecureSumError
from keyfed.federated.types import ClientId, Method, Params, Public
from keyfed.private.secure_sum import Collector, Terms

_ACCUSES = re.compile(r"accuses (\S+): ")  # as a session writes it


class Summed(NamedTuple):
    """A sum that was opened.

    Attributes:
      members: clients whose keys were in its terms; what a vector's fixed point was made for.
      survivors: those whose vectors are in it.
    """

    total: Vector
    members: int
    survivors: tuple[ClientId, ...]


def secure_sum(
    calls: Calls,
    heads: Mapping[ClientId, dict[str, Any]],
    params: Params,
    method: Method,
    public: Public,
    round: int,
    purpose: Purpose,
    part: str | None,
    *,
    words: int | None = None,
    watch: Callable[[Collector], None] = lambda collector: None,
) -> Summed:
    """Form a sum over the clients in `heads`, each of which has one-time keys in `calls.keys`.

    Args:
      part: the held-out text that clients evaluate along; None for none.
      words: numbers in a client's vector; None for those of a hidden round (`secure_round.length`).
      watch: is shown what collects the sum before anybody is called.

    Raises:
      SecureSumError: it failed closed; nothing of anybody was seen.
    """
    run = calls.run
    assert run.secure is not None, "settings of secure sums"
    fitting = set(calls.able_to_hide(heads))
    for client in [client for client in heads if client not in fitting]:
        least = calls.hide_among[client]
        calls.leave_out(client, "hides among more", f"it takes part among {least} or more, not among {len(heads)}")
    heads = {client: head for client, head in heads.items() if client in fitting}
    if not heads:
        raise SecureSumError("no client is left to sum over")
    keys = tuple(calls.keys.pop(client) for client in heads)  # used now, whatever comes of it
    about = about_digest({**run.about, "secure": True})
    context = sum_context(run.name, run.attempt, about, part, context_of(params, method, public, round, purpose))
    words = length(method, params, purpose) if words is None else words
    hide_among = max(calls.hide_among.get(client, 0) for client in heads)
    terms = Terms(context, keys, run.secure.threshold_of(len(keys), hide_among), words)
    collector = Collector(terms)
    watch(collector)
    told = {
        "cohort": [k.to_json() for k in terms.cohort],
        "identities": {client: calls.identity(client).hex() for client in heads},
        "threshold": terms.threshold,
        "members": len(keys),
        "public": public,
        "evaluate": part,
    }

    def take_shares(client: ClientId, answer: bytes) -> None:
        head = calls.current(round, answer, MOST_CONTROL).head
        next_keys = calls.signed_keys(client, head.get("keys"))
        try:
            parcels = {str(to): bytes.fromhex(package) for to, package in head["parcels"].items()}
            collector.take_shares(client, parcels)
        except (SecureSumError, KeyError, TypeError, ValueError, AttributeError) as e:
            raise Rejected("malformed", f"shares that cannot be used ({e})") from None
        calls.keys[client] = next_keys

    def take_masked(client: ClientId, answer: bytes) -> None:
        expected = {"masked": ((terms.sent_length,), torch.int32)}
        received = calls.current(round, answer, most_bytes(expected))
        vector = read_tensors(received.tensors, expected)["masked"].numpy().view(np.uint32)
        _or_rejected(lambda: collector.take_masked(client, vector))

    def take_unmask(client: ClientId, answer: bytes) -> None:
        shares = calls.current(round, answer, MOST_CONTROL).head.get("shares")
        if not isinstance(shares, str):
            raise Rejected("malformed", "no shares")
        _or_rejected(lambda: collector.take_unmask(client, bytes.fromhex(shares)))

    calls.gather("train", with_model({c: head | told for c, head in heads.items()}, params), take_shares)
    alive, parcels = collector.forward()
    named = calls.named(round)
    posts = {
        client: pack(named | {"alive": list(alive), "parcels": {s: p.hex() for s, p in parcels[client].items()}})
        for client in alive
    }
    calls.gather("upload", posts, take_masked)
    for culprit in _accused(calls, len(keys)):
        calls.shut_out(culprit, "its shares do not open")
    survivors = collector.survivors
    calls.gather("unmask", dict.fromkeys(survivors, pack(named | {"survivors": list(survivors)})), take_unmask)
    total = collector.total()
    for client in survivors:
        calls.lost.pop(client, None)  # its vector is in the sum, whether or not it helped to open it
    return Summed(total, len(keys), survivors)


def _accused(calls: Calls, members: int) -> list[ClientId]:
    """Return whom more than a third of the members, and at least two, accuse of shares that do not open."""
    named = (_ACCUSES.match(detail) for detail in calls.details.values())
    votes = Counter(found[1] for found in named if found)
    return [client for client, count in votes.items() if count >= 2 and 3 * count > members]


def _or_rejected(take: Any) -> None:
    try:
        take()
    except (SecureSumError, ValueError) as e:
        raise Rejected("malformed", str(e)) from None
