"""Secure aggregation in a simulation: every client and the server play their real part of the protocol, in one process.

For the cost and the rounding of a masked sum. Clients that vanish before they report never send their shares; those
that vanish later, or whose numbers are refused, have sent shares but no vector. A vector is masked and added as each
client ends, so memory stays O(model). Below the threshold the sum stays closed and the round is abandoned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.gather import HiddenRound, kept
from keyfed.engine.sums.secure_round import (
    Purpose,
    aggregate_of,
    calibration_vector_of,
    context_of,
    learn_from_calibration,
    length,
    nothing_summed,
    vector_of,
)
from keyfed.engine.task import Finished
from keyfed.errors import SecureSumError, SecureSumOverflow
from keyfed.federated.public.numbers import raised_bits
from keyfed.federated.types import Aggregate, ClientId, Public, Refusal
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, SignedKeys, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.shamir import SHARE_BYTES
from keyfed.private.secagg.terms import CHECK_WORDS, SumTerms
from keyfed.private.secagg.threshold import Floors, SecureSettings
from keyfed.private.secagg.wire import HASH_BYTES, PACKAGE_BYTES

T = TypeVar("T")


class Costs:
    """Seconds at all clients and at the server, and bytes on the wire."""

    def __init__(self) -> None:
        self.seconds = {"clients": 0.0, "server": 0.0}
        self.bytes = {"masked": 0, "keys": 0, "shares": 0, "unmask": 0}

    def timed(self, where: str, work: Callable[[], T]) -> T:
        """Do some work and count its seconds for a place."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[where] += time.perf_counter() - began


def _posted(signed: SignedKeys) -> int:
    return len(json.dumps(signed.to_json()).encode())


def wire_bytes(words: int, members: int) -> dict[str, int]:
    """Return what one client moves in a secure sum of so many words and members, if everybody stays.

    Example:
      >>> wire_bytes(1_000_000, 10)["masked"]
      4000016
    """
    _, signed = make_keys(Identity.make(), "x" * 16, 1)
    return {
        "masked": 4 * (words + CHECK_WORDS),
        "keys": (members + 1) * _posted(signed),
        "shares": 2 * (members - 1) * PACKAGE_BYTES,
        "unmask": HASH_BYTES + members * SHARE_BYTES,
    }


class MaskedSum:
    """One secure sum, both sides of it: shares at once, vectors as they come, unmasked at the end."""

    def __init__(
        self, terms_context: bytes, length: int, hidden: HiddenRound, settings: SecureSettings, costs: Costs
    ) -> None:
        self._costs = costs
        identities = {client: Identity.make() for client in hidden.called}
        made = {client: make_keys(identity, client, 0) for client, identity in identities.items()}
        cohort = tuple(signed for _, signed in made.values())
        terms = SumTerms(terms_context, cohort, settings.threshold_of(len(cohort)), length)
        public = {client: identity.public for client, identity in identities.items()}
        floors = Floors(settings.floor)
        self.ratio = terms.ratio
        costs.bytes["keys"] += (len(cohort) + 1) * sum(_posted(signed) for signed in cohort)  # one up, all of them down
        self._collector = Collector(terms)
        self._members = {
            client: costs.timed("clients", lambda c=client: Member(c, made[c][0], terms, public, floors))  # type: ignore[misc]
            for client in hidden.training
        }
        for client, member in self._members.items():
            packages = costs.timed("clients", member.shares)
            costs.bytes["shares"] += 2 * sum(map(len, packages.values()))  # up to the server, and down from it
            self._collector.take_shares(client, packages)
        self._alive, self._parcels = self._collector.forward()

    def add(self, client: ClientId, vector: Vector) -> None:
        """Mask a client's vector and add it."""
        member, received = self._members[client], self._parcels.pop(client)
        masked = self._costs.timed("clients", lambda: member.masked(vector, self._alive, received))
        self._costs.bytes["masked"] += masked.nbytes
        self._costs.timed("server", lambda: self._collector.take_masked(client, masked))

    def total(self) -> tuple[Vector, tuple[ClientId, ...]]:
        """Open the sum of those who were added; return it and who they are."""
        survivors = self._collector.survivors
        for client in survivors:
            member = self._members[client]
            answer = self._costs.timed("clients", lambda member=member: member.unmask(survivors))  # type: ignore[misc]
            self._costs.bytes["unmask"] += len(answer)
            self._collector.take_unmask(client, answer)
        return self._costs.timed("server", self._collector.total), survivors


class SecureSum:
    """A round's secure sums: a calibration before the first upload, then the uploads.

    A sum that fails closed gives an empty aggregate, and `costs` says why.
    """

    def __init__(self, hidden: HiddenRound, settings: SecureSettings) -> None:
        self._hidden, self._settings = hidden, settings
        self._public: Public = hidden.public
        self._costs = Costs()
        self._failed: str | None = None
        self._survivors = 0
        self._waiting: dict[ClientId, Finished] = {}
        self._uploads = self._opened("upload") if self._public["calibrated"] else None

    def add(self, client: ClientId, done: Finished) -> None:
        """Mask and add one client; before the first public numbers are there it waits."""
        if not self._public["calibrated"]:
            self._waiting[client] = kept(done)
        elif self._uploads is not None:
            hidden = self._hidden
            vector = vector_of(
                client, done, hidden.theta, hidden.method, self._public, len(hidden.called), self._uploads.ratio,
                silent=hidden.method.uploading < 1,
            )  # fmt: skip
            if not self._added(self._uploads, client, vector):
                self._uploads = None

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Open the sum; an empty aggregate if it cannot be opened."""
        refused = list(refused)
        if not self._public["calibrated"]:
            refused += self._calibrate()
        hidden = self._hidden
        found = None if self._uploads is None else self._total(self._uploads)
        if found is None or self._uploads is None:
            return nothing_summed(hidden.theta, self._public, refused)
        total, survivors = found
        self._survivors, members = len(survivors), len(hidden.called)
        try:
            return aggregate_of(
                total, hidden.theta, hidden.method, self._public, members, survivors, self._uploads.ratio, refused
            )
        except SecureSumError as e:
            self._failed = str(e)
            return nothing_summed(hidden.theta, self._public, refused)

    @property
    def costs(self) -> Mapping[str, Any]:
        """What the round's sums cost, and how they ended; nothing in it is any single client's."""
        called = len(self._hidden.called)
        return {
            "members": called,
            "threshold": self._settings.threshold_of(called),
            "survivors": self._survivors,
            "failed": self._failed,
            "raised": raised_bits(self._public),
            "seconds": dict(self._costs.seconds),
            "bytes": dict(self._costs.bytes),
        }

    def _calibrate(self) -> Iterable[Refusal]:
        """Sum everybody's histograms, then add those who waited; return who is out of range all the same."""
        hidden, members = self._hidden, len(self._hidden.called)
        calibration = self._opened("calibration")
        if calibration is None:
            return
        for client, done in self._waiting.items():
            vector = calibration_vector_of(client, done, hidden.theta, hidden.method, members)
            if not self._added(calibration, client, vector):
                return
        found = self._total(calibration)
        if found is None:
            return
        total, survivors = found
        try:
            self._public = learn_from_calibration(
                hidden.method, self._public, total, hidden.theta, members, calibration.ratio, len(survivors)
            )
        except SecureSumError as e:
            self._failed = str(e)
            return
        self._uploads = self._opened("upload")
        while self._waiting:
            client = next(iter(self._waiting))
            try:
                self.add(client, self._waiting.pop(client))
            except SecureSumOverflow as e:
                yield Refusal(client, e.reason)

    def _opened(self, purpose: Purpose) -> MaskedSum | None:
        hidden = self._hidden
        try:
            context = context_of(hidden.theta, hidden.method, self._public, hidden.round, purpose)
            return MaskedSum(context, length(hidden.method, hidden.theta, purpose), hidden, self._settings, self._costs)
        except SecureSumError as e:
            self._failed = str(e)
            return None

    def _added(self, summed: MaskedSum, client: ClientId, vector: Vector) -> bool:
        """Whether the client took part: all refuse alike where too few are left for their floor."""
        try:
            summed.add(client, vector)
        except SecureSumError as e:
            self._failed = str(e)
        return self._failed is None

    def _total(self, summed: MaskedSum) -> tuple[Vector, tuple[ClientId, ...]] | None:
        try:
            return summed.total()
        except SecureSumError as e:
            self._failed = str(e)
            return None
