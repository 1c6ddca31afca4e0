"""A method as data: what is stored, compared and sent, and checks of its numbers. No torch, so that it loads fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from keyfed.errors import ConfigError


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


def positive(name: str, value: float, *, or_zero: bool = False) -> float:
    """Return a finite number above 0 (or 0, where that makes sense); anything else is an error."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        raise ConfigError(f"method.{name} is {value}; expected {name} {'≥' if or_zero else '>'} 0")
    return value


def decay_rate(name: str, value: float) -> float:
    """Return how much of a moment survives a round, 0 ≤ β < 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"method.{name} is {value}; expected 0 ≤ {name} < 1")
    return value


def share_of_clients(name: str, value: float) -> float:
    """Return a share of the cohort, 0 < β ≤ 1."""
    if not 0 < value <= 1:
        raise ConfigError(
            f"method.{name} is {value}; expected 0 < {name} ≤ 1: top-K keeps K = {name} · m of a cohort of m, "
            "at least one and never more than there are"
        )
    return value
