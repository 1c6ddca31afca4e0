"""A client's side of a private round: when it takes part, what it remembers of that, and what it sends.

It takes part in every step once, and steps only go up: a server that counts them anew, because its folder was put back
from an older copy, is not answered, and hears of it in the hello. What leaves it is counted in its own ledger, over all
runs; what its owner's budget does not cover does not leave.
"""

from __future__ import annotations

from dataclasses import replace

from keyfed.engine.sums.codec import Vector
from keyfed.engine.sums.secure_round import report_of
from keyfed.engine.task import Finished
from keyfed.errors import PrivacyError
from keyfed.federated.types import Params, Share
from keyfed.private.dp.own_ledger import OwnLedger, Spend
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.learner import Learner
from keyfed.wire.messages import Rejected, pack, text_digest
from keyfed.wire.private_part import Asked, Promise, part_head


def _mark(run: str) -> str:
    """A run's name as the ledger keeps it; it comes from outside and may be long."""
    return text_digest(run)[:16]


def _spend(promise: Promise | None) -> Spend | None:
    """What one part of a run costs; None for a run that promises nothing."""
    return None if promise is None else Spend(promise.noise, promise.separation, promise.rounds)


class PrivateSide:
    """Private rounds of one client."""

    def __init__(self, name: str, store: DeviceStore, ledger: OwnLedger) -> None:
        self._name, self._store, self._ledger = name, store, ledger

    def affords(self, run: str, promise: Promise | None) -> None:
        """Refuse a run of which not even one part fits into the owner's budget.

        Raises:
          Rejected: "over budget".
        """
        try:
            self._ledger.allow(_mark(run), _spend(promise))
        except PrivacyError as e:
            raise Rejected("over budget", str(e)) from None

    def shown(self, run: str) -> None:
        """Note, before anything leaves, that this client takes part in a run that promises nothing."""
        self.affords(run, None)
        self._ledger.book(_mark(run), None)

    def wait_turn(self, run: str, promise: Promise | None, asked: Asked | None) -> None:
        """Refuse a call that comes earlier after this client's last part than the run promised, or a second time."""
        if asked is not None and promise is not None:
            self._store.refuse_early(run, asked.step, promise.separation or 1)
            self.affords(run, promise)

    def takes_part(self, run: str, promise: Promise | None, asked: Asked | None) -> None:
        """Note, before it is sent, that this client's part leaves it at this step."""
        self.wait_turn(run, promise, asked)
        if asked is not None:
            self._ledger.book(_mark(run), _spend(promise))
            self._store.took_part(run, asked.step, asked.clip)

    def answer(
        self, run: str, learner: Learner, theta: Params, asked: Asked, done: Finished, named: dict[str, object]
    ) -> bytes:
        """Return the clipped part of a plain sum; the report, of which nothing is noised, stays here."""
        assert learner.promise is not None, "a private run"
        part = learner.promise.part(done.upload, self._share(learner, done, theta), asked.clip)
        self.takes_part(run, learner.promise, asked)
        return pack(named | {"part": part_head(part)}, part.layers)

    def vector(self, learner: Learner, theta: Params, asked: Asked, done: Finished | None) -> Vector:
        """Return the clipped part of a masked sum; zeros where nothing was trained."""
        assert learner.promise is not None, "a private run"
        share = None if done is None else self._share(learner, done, theta)
        return learner.promise.vector(theta if done is None else done.upload, share, asked.clip)

    def _share(self, learner: Learner, done: Finished, theta: Params) -> Share:
        own = learner.method.mediator.share
        assert own is not None, "clients of a private run weigh themselves"
        return replace(own(report_of(self._name, done), list(theta)), clipped=done.clipped)
