"""One sum with real clients, the server's side: a secure sum in three messages, and the sum of a private round.

A clipped upload that comes in the clear is clipped once more, whatever its client says it did: it moves the sum by S at
most. In a masked sum single uploads cannot be looked at. Its numbers go round at 2³² and are folded back
(`codec.folded`), then what the clients sum up to is brought within what they may sum up to (`NoisedSum.take`). Honest
clients notice neither, and neither makes anybody's influence larger: folding and going to the nearest point of a ball
bring no two points further apart. So a client that lies can move a masked sum by more than S, but no sum beyond mS; and
whatever it does, an honest client moves the sum by S at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from keyfed.engine.sums.codec import Vector, words_of
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.sums.secure_round import Purpose, context_of, length
from keyfed.errors import BelowThreshold, Lied, SecureSumError
from keyfed.federated.types import ClientId, Method, Params, Public
from keyfed.private.dp.accounting import Opening, Stayed, beside
from keyfed.private.dp.noise import Noising
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import is_signature
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.wire import package_text
from keyfed.wire.counting import LARGEST, count_context
from keyfed.wire.messages import (
    Kind,
    Rejected,
    about_digest,
    control_head,
    digest_of,
    most_bytes,
    pack,
    parted_packages,
    read_tensors,
    shapes_of,
    sum_context,
    text,
)
from keyfed.wire.promise import Asked, share_of
from keyfed.wire.transport import Calls, with_model

MOST_STRAINED = 2  # sums that stayed closed; then clients that want more to stay than is usual are not called


class Summed(NamedTuple):
    """A sum that was opened.

    Attributes:
      members: clients whose keys were in its terms; what a vector's fixed point was made for.
      ratio: r of its terms.
      survivors: those whose vectors are in it.
    """

    total: Vector
    members: int
    ratio: int
    survivors: tuple[ClientId, ...]


class CountSum(NamedTuple):
    """One sum of a count.

    Attributes:
      largest: clients of the largest sum of the count.
      words: of a client's vector.
      before: clients of the last sum of the same text, who are all of these; None for none.
      apart: clients that two sums of one text differ by at least (`private.secagg.nested`).
    """

    purpose: str
    largest: int
    words: int
    before: int | None
    apart: int


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
    """Form a sum of what clients train or evaluate over those in `heads`; see `masked_total`.

    Args:
      part: the held-out text that clients evaluate along; None for none.
      words: numbers in a client's vector; None for those of a hidden round (`engine.sums.secure_round.length`).
      watch: is shown what collects the sum before anybody is called.
    """
    run = calls.run
    about = about_digest({**run.about, "secure": True})
    context = sum_context(run.name, run.attempt, about, part, context_of(params, method, public, round, purpose))
    words = length(method, params, purpose) if words is None else words
    heads = {client: {**head, "public": public, "evaluate": part} for client, head in heads.items()}
    return masked_total(calls, "train", heads, params, context, round, words, watch)


def count_sum(
    calls: Calls,
    clients: Sequence[ClientId],
    numbers: Params,
    theta: Params,
    round: int,
    summed: CountSum,
) -> Summed:
    """Form a sum of a count over these clients; see `masked_total`.

    Args:
      numbers: the public numbers of the sum, a flat tensor each.
      theta: the model where clients read with it, else empty.
    """
    purpose, largest = summed.purpose, summed.largest
    run = calls.run
    about = about_digest({**run.about, "secure": True})
    tensors = {**theta, **numbers}
    context = count_context(run.name, run.attempt, about, purpose, largest, digest_of(tensors))
    head = {"purpose": purpose, LARGEST: largest, "sizes": {name: t.numel() for name, t in numbers.items()}}
    heads = {client: {**calls.named(round), **head} for client in clients}
    return masked_total(calls, "count", heads, tensors, context, round, summed.words, after=summed)


def masked_total(
    calls: Calls,
    kind: Kind,
    heads: Mapping[ClientId, dict[str, Any]],
    tensors: Params,
    context: bytes,
    round: int,
    words: int,
    watch: Callable[[Collector], None] = lambda collector: None,
    after: CountSum | None = None,
) -> Summed:
    """Form a sum over the clients in `heads`, each of which has one-time keys in `calls.keys`.

    Args:
      kind: of the message that begins it, which has `tensors`.
      context: what the masks are bound to.
      words: of a client's vector.
      after: of a count: how many clients two sums of one text differ by at least.

    A client that is proved to lie is shut out: it dealt shares of another secret than its own, sent a package that does
    not open, accuses another falsely, or answers another share than it took. A sum in which a client accused another
    is not opened.

    Raises:
      Lied: it failed closed, and a client's lie is why; those that are proved to lie are shut out by then.
      SecureSumError: it failed closed; nothing of anybody was seen.
    """
    run = calls.run
    assert run.secure is not None, "settings of secure sums"
    fitting = set(calls.able_to_hide(heads))
    if calls.strained >= MOST_STRAINED:  # one of them could stop every sum by saying nothing at its end
        fitting = {c for c in fitting if calls.hide_among.get(c, 0) <= run.secure.threshold_of(len(heads))}
    for client in [client for client in heads if client not in fitting]:
        least = calls.hide_among[client]
        calls.leave_out(client, "hides among more", f"it takes part among {least} or more, not among {len(heads)}")
    heads = {client: head for client, head in heads.items() if client in fitting}
    if not heads:
        raise SecureSumError("no client is left to sum over")
    keys = tuple(calls.keys.pop(client) for client in heads)  # used now, whatever comes of it
    hide_among = max(calls.hide_among.get(client, 0) for client in heads)
    terms = SumTerms(context, keys, run.secure.threshold_of(len(keys), hide_among), words)
    raised = terms.threshold > run.secure.threshold_of(len(keys))
    apart = 0 if after is None else max(after.apart, hide_among)  # as many as the most cautious of them hides among
    collector = Collector(terms, max(0, apart - 1))
    watch(collector)
    told = {
        "cohort": [k.to_json() for k in terms.cohort],
        "identities": {client: calls.identity(client).hex() for client in heads},
        "threshold": terms.threshold,
        "members": len(keys),
    }

    signatures: dict[ClientId, dict[ClientId, bytes]] = {}
    liars: dict[ClientId, str] = {}

    def take_shares(client: ClientId, answer: bytes) -> None:
        head = calls.current(round, answer, entries=len(keys)).head
        next_keys = calls.signed_keys(client, head.get("keys"))
        try:
            packages, signatures[client] = parted_packages(head["parcels"])
            collector.take_shares(client, packages)
        except (SecureSumError, KeyError, TypeError, ValueError, AttributeError) as e:
            raise Rejected("malformed", f"shares that cannot be used ({e})") from None
        calls.keys[client] = next_keys

    def take_masked(client: ClientId, answer: bytes) -> None:
        received = calls.current(round, answer, most_bytes(expected))
        if "accuses" in received.head:
            liar, how = _judged(collector, calls, signatures, client, received.head)
            liars.setdefault(liar, how)
            raise Rejected("refused by client", f"it accuses {str(received.head['accuses'])[:80]}: {liar} lied")
        vector = read_tensors(received.tensors, expected)["masked"].numpy().view(np.uint32)
        _or_rejected(lambda: collector.take_masked(client, vector))

    def take_unmask(client: ClientId, answer: bytes) -> None:
        shares = calls.current(round, answer, entries=len(keys)).head.get("shares")
        if not isinstance(shares, str):
            raise Rejected("malformed", "no shares")
        _or_rejected(lambda: collector.take_unmask(client, bytes.fromhex(shares)))

    expected = {"masked": ((terms.sent_length,), torch.int32)}
    short = 8 + control_head(len(keys))
    calls.gather(kind, with_model({c: head | told for c, head in heads.items()}, tensors), take_shares, most=short)
    with _strain(calls, raised):
        alive, parcels = collector.forward()
    named = calls.named(round)
    posts = {}
    for client in alive:
        signed = {sender: (package + signatures[sender][client]).hex() for sender, package in parcels[client].items()}
        posts[client] = pack(named | {"alive": list(alive), "parcels": signed})
    calls.gather("upload", posts, take_masked, most=most_bytes(expected))
    if liars:
        for liar, how in liars.items():
            calls.shut_out(liar, how)
        raise Lied(f"{', '.join(liars)} lied about shares; the sum is not opened", by=liars)
    if after is not None and after.before is not None:
        collector.keep_apart(after.before, apart)
    survivors = collector.survivors
    opening = pack(named | {"survivors": list(survivors)})
    calls.gather("unmask", dict.fromkeys(survivors, opening), take_unmask, most=short)
    try:
        with _strain(calls, raised):
            total = collector.total()
    except Lied as e:
        for liar in e.by:
            calls.shut_out(liar, str(e))
        raise
    calls.strained = calls.strained if calls.strained >= MOST_STRAINED else 0
    for client in survivors:
        calls.lost.pop(client, None)  # its vector is in the sum, whether or not it helped to open it
    return Summed(total, len(keys), terms.ratio, survivors)


@contextmanager
def _strain(calls: Calls, raised: bool) -> Iterator[None]:
    """Count a sum that stays closed below a threshold which a client's own number has raised."""
    try:
        yield
    except BelowThreshold:
        calls.strained += raised
        raise


def _judged(
    collector: Collector,
    calls: Calls,
    signatures: Mapping[ClientId, Mapping[ClientId, bytes]],
    accuser: ClientId,
    head: Mapping[str, Any],
) -> tuple[ClientId, str]:
    """Return who lied where one client accuses another of its package, and how.

    Without evidence the accusation is that the package is not signed. This server has the package as it came, in an
    answer that the accused signed, so it sees for itself.
    """
    accused, shown = text(head, "accuses"), head.get("evidence")
    package, signature = collector.package(accused, accuser), signatures.get(accused, {}).get(accuser, b"")
    if package is None:
        return accuser, f"it accuses {accused[:80]}, of which it was sent nothing"
    signed = package_text(collector.terms.digest(), accused, accuser, package)
    if not is_signature(signature, signed, calls.identity(accused)):
        return accused, f"its shares for {accuser} are not signed for this sum"
    try:
        return collector.judge(accuser, accused, bytes.fromhex(shown) if isinstance(shown, str) else b"")
    except ValueError:
        return accuser, f"it accuses {accused} with evidence that is not hexadecimal"


def _or_rejected(take: Any) -> None:
    try:
        take()
    except Lied as e:
        raise Rejected("lied", str(e)) from None
    except (SecureSumError, ValueError) as e:
        raise Rejected("malformed", str(e)) from None


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
