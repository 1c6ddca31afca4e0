"""Where a round's uploads go: the few verbs of a sum, plain, noised or masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from keyfed.engine.task import Finished
from keyfed.federated.types import Aggregate, ClientId, Method, Params, Public, Refusal, Share


class Gathering(Protocol):
    """Where uploads go as each client ends; `simulate.RunningSum` unless a simulation is given another."""

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client; the upload is only valid until this returns."""
        ...

    def refuse(self, client: ClientId) -> None:
        """Hear that a client which could have uploaded was refused, for what it trained."""
        ...

    def shift(self, by: Params) -> None:
        """Move the mean of every layer that has one by a given amount."""
        ...

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum over those added."""
        ...


class HiddenRound(NamedTuple):
    """What is known of a round whose reports stay with the clients, before anybody trains.

    Attributes:
      called: the members of its sums.
      training: those of them whose training will come to an end.
    """

    theta: Params
    method: Method
    public: Public
    round: int
    called: tuple[ClientId, ...]
    training: tuple[ClientId, ...]


class HiddenGathering(Protocol):
    """Where clients that weigh themselves by public numbers go as each ends."""

    @property
    def costs(self) -> Mapping[str, Any] | None:
        """What the sum cost, for the log, once it is there; None where that is nothing."""
        ...

    def add(self, client: ClientId, done: Finished) -> None:
        """Add one client; its upload is only valid until this returns.

        Raises:
          SecureSumOverflow: its numbers do not fit; it takes no part.
        """
        ...

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum, with `facts` and the `public` numbers it was formed with; empty if it failed closed."""
        ...


MakeHidden = Callable[[HiddenRound], HiddenGathering]


def kept(done: Finished) -> Finished:
    """Return a copy that stays valid."""
    return done._replace(upload={name: u.clone() for name, u in done.upload.items()})
