"""A method as data: what is stored, compared and sent. No tensors here, so that reading a configuration is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """A part as data: its name and its numbers."""

    name: str
    options: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the local step size changes over a whole run.

    Attributes:
      shape: constant, linear or cosine.
      rounds: rounds R of the run.
      warmup: share of the rounds in which the step size rises to its full size.
      final: share of the step size that is left when the run ends.
    """

    shape: str
    rounds: int
    warmup: float = 0.0
    final: float = 0.0


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method as data: its name and numbers. This travels and is stored; both sides build the method from it.

    Attributes:
      mediator: a mediator in the place of the method's own, `server` a server rule; None keeps the method's.
      keep: share of the entries of an upload that is sent (top-k sparsification); 1 for all.
      quantise: how an upload's numbers are sent: none (as they are), fp16 or int8.
      schedule: how the local step size changes over the run; None: by the method's own `decay` alone.
      average: weight β of the past in the running average of θ that is served; None serves θ itself.
    """

    name: str
    options: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    mediator: Part | None = None
    server: Part | None = None
    keep: float = 1.0
    quantise: str = "none"
    schedule: Schedule | None = None
    average: float | None = None
