"""What a client's session asks of whoever has its text."""

from __future__ import annotations

from typing import Protocol

from keyfed.engine.task import Finished, Turn
from keyfed.federated.types import Method, Params
from keyfed.model.output import Score
from keyfed.wire.messages import Shapes
from keyfed.wire.private_part import Promise


class Learner(Protocol):
    """A client's own text under a run's model.

    Attributes:
      method: the run's method, built here from its specification.
      shapes: what a model of this run looks like.
      digest: hash of the method's specification as this package understands it.
      bound: largest norm of an upload; None for no bound.
      floor: the fewest clients of a secure sum that the run itself promises (`secure.floor`).
      promise: what a private run is held to; None for a run that promises nothing.
    """

    method: Method
    shapes: Shapes
    digest: str
    bound: float | None
    floor: int
    promise: Promise | None

    def solve(self, theta: Params, round: int, turn: Turn) -> Finished:
        """Train for a round."""
        ...

    def evaluate(self, theta: Params, part: str) -> Score:
        """Count nats and hits on held-out text, `valid` or `test`."""
        ...
