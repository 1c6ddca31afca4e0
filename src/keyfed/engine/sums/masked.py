"""Sums under secure aggregation: every client and the server play their real part of the protocol, in one process.

`MaskedSum` hands messages between `Member` and `Collector`, the state machines that real clients and servers run. What
a client writes and what a server reads of the opened sum are the functions that they use, too (`secure_round`,
`codec`). So a simulated sum is that of a federation, integer by integer; a simulation adds its cost and its rounding.
Clients that vanish before they report never send their shares; those that vanish later, or whose numbers are refused,
have sent shares but no vector. A vector is masked and added as each client ends, so memory stays O(model). Below the
threshold the sum stays closed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from keyfed.engine.sums.codec import Vector, encode_clipped, words_of
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.sums.plain import SelfWeighedRound
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
from keyfed.engine.task import Finished, kept
from keyfed.errors import SecureSumError, SecureSumOverflow
from keyfed.federated.public.numbers import raised_bits
from keyfed.federated.types import Aggregate, ClientId, Params, Public, Refusal, Share
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.dp.noise import Noising
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import Identity, SignedKeys, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.shamir import SHARE_BYTES
from keyfed.private.secagg.terms import CHECK_WORDS, SumTerms
from keyfed.private.secagg.threshold import PRIVATE_RATIO, Floors, SecureSettings
from keyfed.private.secagg.wire import HASH_BYTES, PACKAGE_BYTES


class Costs:
    """Seconds at all clients and at the server, and bytes on the wire."""

    def __init__(self) -> None:
        self.seconds = {"clients": 0.0, "server": 0.0}
        self.bytes = {"masked": 0, "keys": 0, "shares": 0, "unmask": 0}

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Count the seconds of a block for a place."""
        began = time.perf_counter()
        try:
            yield
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


class Attendance(NamedTuple):
    """Who is called to a secure sum, and which of them send their shares (see `SelfWeighedRound`)."""

    called: tuple[ClientId, ...]
    training: tuple[ClientId, ...]


class MaskedSum:
    """One secure sum, both sides of it: shares at once, vectors as they come, unmasked at the end.

    Args:
      reserve: vectors that can still be left out when all are there (`Collector.keep_apart`).

    Raises:
      SecureSumError: whatever a client refuses, or a server cannot open.
    """

    def __init__(
        self,
        context: bytes,
        length: int,
        current: SelfWeighedRound | Attendance,
        settings: SecureSettings,
        costs: Costs,
        reserve: int = 0,
    ) -> None:
        self._costs = costs
        identities = {client: Identity.make() for client in current.called}
        made = {client: make_keys(identity, client, 0) for client, identity in identities.items()}
        cohort = tuple(signed for _, signed in made.values())
        terms = SumTerms(context, cohort, settings.threshold_of(len(cohort)), length)
        public = {client: identity.public for client, identity in identities.items()}
        floors = Floors(settings.floor)
        self.ratio = terms.ratio
        costs.bytes["keys"] += (len(cohort) + 1) * sum(_posted(signed) for signed in cohort)  # one up, all of them down
        self._collector = Collector(terms, reserve)
        with costs.at("clients"):
            self._members = {
                client: Member(client, made[client][0], terms, public, floors) for client in current.training
            }
        for client, member in self._members.items():
            with costs.at("clients"):
                packages = member.shares()
            costs.bytes["shares"] += 2 * sum(map(len, packages.values()))  # up to the server, and down from it
            self._collector.take_shares(client, packages)
        self._alive, self._parcels = self._collector.forward()

    def add(self, client: ClientId, vector: Vector) -> None:
        """Mask a client's vector and add it."""
        with self._costs.at("clients"):
            masked = self._members[client].masked(vector, self._alive, self._parcels.pop(client))
        self._costs.bytes["masked"] += masked.nbytes
        with self._costs.at("server"):
            self._collector.take_masked(client, masked)

    def keep_apart(self, before: int, apart: int) -> None:
        """Leave out a few who were added, where too few are gone since an earlier sum; see `Collector`."""
        self._collector.keep_apart(before, apart)

    def total(self) -> tuple[Vector, tuple[ClientId, ...]]:
        """Open the sum of those who were added; return it and who they are."""
        survivors = self._collector.survivors
        for client in survivors:
            with self._costs.at("clients"):
                answer = self._members[client].unmask(survivors)
            self._costs.bytes["unmask"] += len(answer)
            self._collector.take_unmask(client, answer)
        with self._costs.at("server"):
            return self._collector.total(), survivors


class SecureSum:
    """A round's secure sums: a calibration before the first upload, then the uploads.

    A sum that fails closed gives an empty aggregate, and `costs` says why.
    """

    def __init__(self, current: SelfWeighedRound, settings: SecureSettings) -> None:
        self._round, self._settings = current, settings
        self._public: Public = current.public
        self._costs = Costs()
        self._failed: str | None = None
        self._survivors = 0
        self._waiting: dict[ClientId, Finished] = {}
        self._uploads = self._begun("upload") if self._public["calibrated"] else None

    def add(self, client: ClientId, done: Finished) -> None:
        """Mask and add one client; before the first public numbers are there it waits."""
        if not self._public["calibrated"]:
            self._waiting[client] = kept(done)
        elif self._uploads is not None:
            current = self._round
            vector = vector_of(
                client, done, current.theta, current.method, self._public, len(current.called), self._uploads.ratio,
                silent=current.method.uploading < 1,
            )  # fmt: skip
            with self._failing_closed():
                self._uploads.add(client, vector)
            if self._failed is not None:  # all refuse alike where too few are left for their floor
                self._uploads = None

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Open the sum; an empty aggregate if it cannot be opened."""
        refused = list(refused)
        if not self._public["calibrated"]:
            refused += self._calibrate()
        current, found = self._round, None
        with self._failing_closed():
            if self._uploads is not None:
                total, survivors = self._uploads.total()
                self._survivors = len(survivors)
                found = aggregate_of(
                    total, current.theta, current.method, self._public, len(current.called), survivors,
                    self._uploads.ratio, refused,
                )  # fmt: skip
        return nothing_summed(current.theta, self._public, refused) if found is None else found

    @property
    def costs(self) -> Mapping[str, Any]:
        """What the round's sums cost, and how they ended; nothing in it is any single client's."""
        called = len(self._round.called)
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
        current, members = self._round, len(self._round.called)
        calibration = self._begun("calibration")
        with self._failing_closed():
            if calibration is None:
                return
            for client, done in self._waiting.items():
                calibration.add(client, calibration_vector_of(client, done, current.theta, current.method, members))
            total, survivors = calibration.total()
            self._public = learn_from_calibration(
                current.method, self._public, total, current.theta, members, calibration.ratio, len(survivors)
            )
        if self._failed is not None:
            return
        self._uploads = self._begun("upload")
        while self._waiting:
            client = next(iter(self._waiting))
            try:
                self.add(client, self._waiting.pop(client))
            except SecureSumOverflow as e:
                yield Refusal(client, e.reason)

    def _begun(self, purpose: Purpose) -> MaskedSum | None:
        current = self._round
        begun = None
        with self._failing_closed():
            context = context_of(current.theta, current.method, self._public, current.round, purpose)
            words = length(current.method, current.theta, purpose)
            begun = MaskedSum(context, words, current, self._settings, self._costs)
        return begun

    @contextmanager
    def _failing_closed(self) -> Iterator[None]:
        """Remember why a sum failed."""
        try:
            yield
        except SecureSumError as e:
            self._failed = str(e)


class MaskedNoisedSum(NoisedSum):
    """The sum of a private round under secure aggregation: clipped uploads travel masked, noise is added to their sum.

    The noise is added to the sum once it is open, so the server sees the sum without it. So weights are held within
    [1/r, 1] as in every secure sum, before the upload is clipped. r is 2 here, that of the smallest sum that opens:
    were it that of the round's own threshold, one client more could weigh all the others anew. Clients without text
    add zeros.

    A sum that cannot be opened (too few were called, or stayed) is released as noise alone, and costs its row. Whether
    it opens depends on who plays the protocol, not on what they send: the guarantee is about a client that sends zeros
    instead. So a client whose training is refused sends zeros, too; were it a drop-out, its text could close the sum of
    everybody.

    It does depend on who is *drawn*, which amplification by sampling asks to be hidden: where one client more opens the
    sum, being drawn shows. What that costs is in the rows of the ledger (`private.dp.accounting`, `PrivateRun.row`).
    """

    def __init__(self, like: Params, noising: Noising, current: SelfWeighedRound, settings: SecureSettings) -> None:
        super().__init__(like, noising, PRIVATE_RATIO)
        self._silent: set[ClientId] = set()
        self._words = words_of(self._total)
        self._masked: MaskedSum | None = None
        agreed = {"clip": noising.clip, "told": list(self._counts)}
        context = context_of(like, current.method, agreed, current.round, "upload")
        if len(current.called) <= MOST_MEMBERS:  # clients refuse more, and their sum could go round
            with self._staying_closed():
                self._masked = MaskedSum(context, self._words, current, settings, Costs())

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Clip and round one client's upload, and send it."""
        if share.silent:
            self._silent.add(client)
        self._send(client, encode_clipped(self._clipped(upload, share), self._total, self._noising.clip))

    def refuse(self, client: ClientId) -> None:
        """Add zeros for a client whose training is refused: it stays in the protocol, and is no contributor."""
        self._silent.add(client)
        self._send(client, np.zeros(self._words, np.uint32))

    def _send(self, client: ClientId, vector: Vector) -> None:
        with self._staying_closed():
            if self._masked is not None:
                self._masked.add(client, vector)

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Open the sum and release it with noise; noise alone if it stays closed."""
        with self._staying_closed():
            if self._masked is not None:
                total, survivors = self._masked.total()
                self.take(total, [client for client in survivors if client not in self._silent])
        return super().aggregate(refused)

    @contextmanager
    def _staying_closed(self) -> Iterator[None]:
        """Let a sum stay closed that fails."""
        try:
            yield
        except SecureSumError:
            self._masked = None
