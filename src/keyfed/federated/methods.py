r"""Every method, as a composition of solver, mediator and server rule.

A method is a function of its hyper-parameters that returns a `Method`. Its keyword arguments *are* its options: the
command line, configuration files and `keyfed methods NAME` read them from the signature, and the docstring documents
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Literal

from keyfed.errors import ConfigError, nearest
from keyfed.federated import local, server
from keyfed.federated.mediate import by_tokens
from keyfed.federated.types import Method, MethodSpec, Solver

Optimiser = Literal["sgd", "adam"]


def _solver(optimiser: Optimiser, lr: float, momentum: float, clip: float | None, decay: float, epochs: int) -> Solver:
    if optimiser == "adam":
        if momentum:
            raise ConfigError(
                f"method.momentum={momentum} is an option of optimiser=sgd; Adam has its own (beta1 = 0.9)"
            )
        return local.adam(lr=lr, clip=clip, decay=decay, epochs=epochs)
    return local.sgd(lr=lr, momentum=momentum, clip=clip, decay=decay, epochs=epochs)


def fedavg(
    *,
    optimiser: Optimiser = "adam",
    lr: float = 0.003,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""Federated averaging: clients train for E epochs, the server takes the mean weighted by tokens.

    .. math::  w_k = \mathrm{solve}_E(f_k, θ),\qquad θ' = θ + \sum_k \frac{n_k}{\sum_j n_j}(w_k − θ)

    Options:
      optimiser: local optimiser, sgd or adam.
      lr: local step size η (with sgd about 1 to 5).
      momentum: local momentum, sgd only; starts at zero every round.
      clip: largest norm of a local gradient; none turns clipping off.
      decay: factor on the step size every round.
      epochs: local passes E over a client's text.
      batch_size: rows B of a local step.

    References:
      McMahan, Moore, Ramage, Hampson, Agüera y Arcas, *Communication-Efficient Learning of Deep Networks from
      Decentralized Data*, AISTATS 2017, algorithm 1.
    """
    return Method(
        name="fedavg",
        solver=_solver(optimiser, lr, momentum, clip, decay, epochs),
        mediator=by_tokens(),
        server=server.sgd(1.0),
        batch_size=batch_size,
        epochs=epochs,
    )


def fedsgd(*, lr: float = 1.0, batch_size: int = 10) -> Method:
    r"""Federated SGD: every client sends one full-batch gradient, the server takes one step. C = 1.

    .. math::  θ' = θ − η \sum_k \frac{n_k}{\sum_j n_j} ∇f_k(θ)

    Reading: *one gradient step* a round, as FedMed writes it.

    Options:
      lr: the server's step size η; there is no local one.
      batch_size: rows that go through the network together; the gradient is that of all of them.

    References:
      McMahan et al. 2017, section 2; Wu, Liang, Wang, *FedMed*, Sensors 2020, section 3.
    """
    return Method(
        name="fedsgd",
        solver=local.full_gradient(),
        mediator=by_tokens(),
        server=server.sgd(lr),
        batch_size=batch_size,
        epochs=1,
        cohort="all",
    )


def central(
    *,
    optimiser: Optimiser = "adam",
    lr: float = 0.002,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    batch_size: int = 20,
) -> Method:
    r"""Central training: the same model on everybody's text in one place, with the token budget of the federation.

    Not a federated method but the limit one is measured against: one client that holds the pooled text. A "round"
    reads as many tokens as a federated round's cohort would train on, going on where the last one stopped.

    Options:
      optimiser: sgd or adam.
      lr: step size η (with sgd about 1 to 5).
      momentum: sgd only; starts at zero every round.
      clip: largest norm of a gradient; none turns clipping off.
      decay: factor on the step size every round.
      batch_size: rows B of a step.
    """
    return Method(
        name="central",
        solver=_solver(optimiser, lr, momentum, clip, decay, epochs=1),
        mediator=by_tokens(),
        server=server.sgd(1.0),
        batch_size=batch_size,
        epochs=1,
        cohort="pooled",
    )


METHODS: dict[str, Callable[..., Method]] = {"fedavg": fedavg, "fedsgd": fedsgd, "central": central}


def method_options(name: str) -> dict[str, inspect.Parameter]:
    """Return a method's options (its keyword arguments); an unknown name is an error that says the nearest."""
    if name not in METHODS:
        raise ConfigError(f'method "{name}" is not known{nearest(name, METHODS)}. Methods: {", ".join(METHODS)}.')
    return dict(inspect.signature(METHODS[name]).parameters)


def build_method(spec: MethodSpec) -> Method:
    """Build a method from its specification; unknown options are errors that say the nearest."""
    options = method_options(spec.name)
    for key in spec.options:
        if key not in options:
            raise ConfigError(
                f'method.{key} is not an option of "{spec.name}"{nearest(key, options)}. Options: {", ".join(options)}.'
            )
    values: Mapping[str, object] = {
        name: spec.options.get(name, parameter.default) for name, parameter in options.items()
    }
    method = METHODS[spec.name](**values)
    resolved = MethodSpec(spec.name, dict(values))  # type: ignore[arg-type]
    return Method(**{f: getattr(method, f) for f in method.__dataclass_fields__ if f != "spec"}, spec=resolved)
