"""What methods share in their options: the local solver's, and the checks of numbers that would make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeVar

from keyfed.errors import ConfigError
from keyfed.federated import local
from keyfed.federated.descent import Descent
from keyfed.federated.types import Solver

Optimiser = Literal["sgd", "adam"]
F = TypeVar("F", bound=Callable[..., object])

LOCAL = """      optimiser: local optimiser, sgd or adam.
      lr: local step size η (with sgd about 1 to 5).
      momentum: local momentum, sgd only; starts at zero every round.
      clip: largest norm of a local gradient; none turns clipping off.
      decay: factor on the step size every round.
      epochs: local passes E over a client's text.
      batch_size: rows B of a local step.
"""


def with_local_options(method: F) -> F:
    """Write the local solver's options, the same for all methods, where the docstring says `{local}`."""
    method.__doc__ = (method.__doc__ or "").replace("      {local}\n", LOCAL)
    return method


def local_descent(
    optimiser: Optimiser, lr: float, momentum: float, clip: float | None, decay: float, epochs: int, mu: float = 0.0
) -> Descent:
    """Return the local descent of a method's options; `mu` is the proximal term's."""
    if optimiser == "adam":
        if momentum:
            raise ConfigError(
                f"method.momentum={momentum} is an option of optimiser=sgd; Adam has its own (beta1 = 0.9)"
            )
        return local.descend_adam(lr=lr, clip=clip, decay=decay, epochs=epochs, mu=mu)
    return local.descend_sgd(lr=lr, momentum=momentum, clip=clip, decay=decay, epochs=epochs, mu=mu)


def local_solver(
    optimiser: Optimiser,
    lr: float,
    momentum: float,
    clip: float | None,
    decay: float,
    epochs: int,
    *,
    mu: float = 0.0,
) -> Solver:
    """Return the local solver of a method's options, which starts from θ; `mu` is the proximal term's."""
    return local.from_theta(local_descent(optimiser, lr, momentum, clip, decay, epochs, mu))


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
