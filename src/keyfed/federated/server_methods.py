r"""Methods whose server is an optimiser: FedAvg's clients and weights, another step of θ.

Clients solve and weigh as in `fedavg`; the mean upload Δ = Σ_k (n_k / Σ_j n_j)(w_k − θ) is (the negative of) a
pseudo-gradient for the server. A layer nobody contributed to takes no step, and its moments stay.
"""

from __future__ import annotations

from keyfed.federated import server
from keyfed.federated.options import Optimiser, local_solver, positive, with_local_options
from keyfed.federated.types import Method, ServerRule, Solver
from keyfed.federated.weigh import by_tokens


def _method(name: str, rule: ServerRule, solver: Solver, batch_size: int, epochs: int) -> Method:
    return Method(name=name, solver=solver, mediator=by_tokens(), server=rule, batch_size=batch_size, epochs=epochs)


@with_local_options
def fedadam(
    *,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.01,
    optimiser: Optimiser = "adam",
    lr: float = 0.01,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedAdam: the server moves by Adam along the mean upload.

    .. math::  m ← β_1 m + (1−β_1)Δ,\quad v ← β_2 v + (1−β_2)Δ^2,\quad θ' = θ + η \frac{m}{\sqrt v + τ}

    Reading: algorithm 2 with the mean weighted by tokens; no bias correction, τ outside the root, v starts at τ².

    Options:
      server_lr: the server's step size η.
      beta1: how much of the first moment survives a round, β₁.
      beta2: how much of the second moment survives a round, β₂.
      tau: floor τ of the denominator; the larger, the less adaptive.
      {local}

    References:
      Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, *Adaptive Federated Optimization*, 2020 (ICLR
      2021), algorithm 2.
    """
    solver = local_solver(optimiser, lr, momentum, clip, decay, epochs)
    rule = server.adam(positive("server_lr", server_lr), beta1, beta2, tau)
    return _method("fedadam", rule, solver, batch_size, epochs)


@with_local_options
def fedyogi(
    *,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.01,
    optimiser: Optimiser = "adam",
    lr: float = 0.01,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedYogi: the server moves by Yogi, whose second moment changes slowly in both directions.

    .. math::  m ← β_1 m + (1−β_1)Δ,\quad v ← v − (1−β_2)Δ^2\,\mathrm{sign}(v − Δ^2),\quad
               θ' = θ + η \frac{m}{\sqrt v + τ}

    Reading: algorithm 2 with the mean weighted by tokens; no bias correction, τ outside the root, v starts at τ².

    Options:
      server_lr: the server's step size η.
      beta1: how much of the first moment survives a round, β₁.
      beta2: how much of the second moment survives a round, β₂.
      tau: floor τ of the denominator; the larger, the less adaptive.
      {local}

    References:
      Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, *Adaptive Federated Optimization*, 2020 (ICLR
      2021), algorithm 2.
    """
    solver = local_solver(optimiser, lr, momentum, clip, decay, epochs)
    rule = server.yogi(positive("server_lr", server_lr), beta1, beta2, tau)
    return _method("fedyogi", rule, solver, batch_size, epochs)


@with_local_options
def fedadagrad(
    *,
    server_lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 0.01,
    optimiser: Optimiser = "adam",
    lr: float = 0.01,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedAdagrad: the server moves by Adagrad; a weight that has moved much moves less from then on.

    .. math::  m ← β_1 m + (1−β_1)Δ,\quad v ← v + Δ^2,\quad θ' = θ + η \frac{m}{\sqrt v + τ}

    Reading: algorithm 2 with the mean weighted by tokens; no bias correction, τ outside the root, v starts at τ².

    Options:
      server_lr: the server's step size η.
      beta1: how much of the first moment survives a round, β₁.
      tau: floor τ of the denominator; the larger, the less adaptive.
      {local}

    References:
      Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, *Adaptive Federated Optimization*, 2020 (ICLR
      2021), algorithm 2.
    """
    solver = local_solver(optimiser, lr, momentum, clip, decay, epochs)
    rule = server.adagrad(positive("server_lr", server_lr), beta1, tau)
    return _method("fedadagrad", rule, solver, batch_size, epochs)


@with_local_options
def fedavgm(
    *,
    server_lr: float = 1.0,
    beta: float = 0.3,
    optimiser: Optimiser = "adam",
    lr: float = 0.006,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedAvgM: federated averaging with momentum on the server.

    .. math::  v ← βv + Δ,\qquad θ' = θ + ηv

    Options:
      server_lr: the server's step size η; with β = 0 and η = 1 this is FedAvg.
      beta: how much of the velocity survives a round, β.
      {local}

    References:
      Hsu, Qi, Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*,
      2019.
    """
    solver = local_solver(optimiser, lr, momentum, clip, decay, epochs)
    rule = server.momentum(positive("server_lr", server_lr), beta)
    return _method("fedavgm", rule, solver, batch_size, epochs)


@with_local_options
def fednesterov(
    *,
    server_lr: float = 1.0,
    beta: float = 0.3,
    optimiser: Optimiser = "adam",
    lr: float = 0.006,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""Outer Nesterov: federated averaging with Nesterov momentum on the server.

    .. math::  v ← βv + Δ,\qquad θ' = θ + η(Δ + βv)

    Options:
      server_lr: the server's step size η.
      beta: how much of the velocity survives a round, β.
      {local}

    References:
      Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models*, 2023 (η = 0.7, β = 0.9
      for many more local steps; a round here is a short epoch, where less momentum was measured to be better).
    """
    solver = local_solver(optimiser, lr, momentum, clip, decay, epochs)
    rule = server.nesterov(positive("server_lr", server_lr), beta)
    return _method("fednesterov", rule, solver, batch_size, epochs)
