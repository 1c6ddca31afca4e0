r"""Methods whose clients keep a dual variable between rounds (`federated.duals` explains the common part).

All three share the running mean over joined clients on the server; they differ in how a client solves its local
problem. Clients need to come back: with fewer than about three participations each, the duals have nothing to say.
"""

from __future__ import annotations

from typing import Literal

from keyfed.errors import ConfigError
from keyfed.federated import server, weigh
from keyfed.federated.duals import StartFrom, once, running_mean
from keyfed.federated.duals import admm as admm_solver
from keyfed.federated.local import descend_sgd
from keyfed.federated.options import Optimiser, local_descent, positive, with_local_options
from keyfed.federated.types import Method, Solver

Weights = Literal["tokens", "uniform"]


def _method(name: str, solver: Solver, weights: Weights, batch_size: int, epochs: int) -> Method:
    return Method(
        name=name,
        solver=solver,
        mediator=once(uniform=weights == "uniform"),
        server=running_mean(),
        batch_size=batch_size,
        epochs=epochs,
    )


@with_local_options
def admm(
    *,
    rho: float = 0.0001,
    weights: Weights = "tokens",
    start_from: StartFrom = "stored",
    optimiser: Optimiser = "adam",
    lr: float = 0.01,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""ADMM: clients solve their augmented problem by local epochs; θ is the mean over all clients that ever joined.

    .. math::  w_k ≈ \arg\min_w f_k(w) + ⟨y_k, w − θ⟩ + \frac{ρ}{2}‖w − θ‖^2,\quad y_k ← y_k + ρ(w_k − θ),\quad
               θ' = \frac{\sum_k α_k (w_k + y_k/ρ)}{\sum_k α_k}

    Reading: the source gives every client a weight w_i and its own ρ_i; with ρ_i = α_i ρ and scaled duals the local
    steps are unweighted and the mean is weighted by α. The minimiser is inexact: E epochs. The first round is twice
    FedProx's step with μ = ρ.

    With --dp every client is a member from the start and must be called in every round; it sends clipped increments,
    and the denominator is public (docs/privacy.md).

    Options:
      rho: ρ, how strongly clients are held to θ.
      weights: α_k: the client's tokens when it joined, or uniform; secure sums weigh all alike.
      start_from: local work goes on from the stored w_k, or from the model θ.
      {local}

    References:
      Zhou, Li, *Communication-Efficient ADMM-based Federated Learning*, 2021; next-character report, section 6.3,
      algorithm 2; Boyd et al. 2011.
    """
    positive("rho", rho)
    solver = admm_solver(
        lambda mu: local_descent(optimiser, lr, momentum, clip, decay, epochs, mu), rho, start_from=start_from
    )
    return _method("admm", solver, weights, batch_size, epochs)


def liadmm(
    *,
    rho: float = 0.0001,
    r: float = 0.25,
    weights: Weights = "tokens",
    start_from: StartFrom = "stored",
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""LIADMM: ADMM whose local problem is linearised, so that every local step has a closed form.

    .. math::  w_k ← w_k − \frac{ρ(w_k − θ) + ∇f_k(w_k) + y_k}{ρ + r},\qquad y_k ← y_k + ρ(w_k − θ),\qquad
               θ' = \frac{\sum_k α_k (w_k + y_k/ρ)}{\sum_k α_k}

    Reading: "a few such steps" is one for every local batch of E epochs, with that batch's gradient; the published
    method takes the gradient of the whole local loss (batch_size large enough gives that).

    With --dp every client is a member from the start and must be called in every round; it sends clipped increments,
    and the denominator is public (docs/privacy.md).

    Options:
      rho: ρ, how strongly clients are held to θ.
      r: r, the curvature assumed of f_k; the local step size is 1/(ρ + r).
      weights: α_k: the client's tokens when it joined, or uniform; secure sums weigh all alike.
      start_from: local work goes on from the stored w_k, or from the model θ.
      clip: largest norm of a local gradient; none turns clipping off.
      decay: factor on the step size every round.
      epochs: local passes E over a client's text.
      batch_size: rows B of a local step.

    References:
      Zhou, Li, *Communication-Efficient ADMM-based Federated Learning*, 2021; next-character report, section 6.3.
    """
    positive("rho", rho)
    positive("r", r, or_zero=True)
    solver = admm_solver(
        lambda mu: descend_sgd(lr=1 / (rho + r), clip=clip, decay=decay, epochs=epochs, mu=mu),
        rho,
        start_from=start_from,
    )
    return _method("liadmm", solver, weights, batch_size, epochs)


def fedadmm(
    *,
    rho: float = 0.0001,
    weights: Weights = "tokens",
    start_from: StartFrom = "stored",
    server_step: Literal["running", "published"] = "running",
    server_lr: float = 1.0,
    lr: float = 4.0,
    momentum: float = 0.0,
    clip: float | None = 1.0,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 10,
) -> Method:
    r"""FedADMM: ADMM by local SGD with as many epochs as a client can afford; increments of w + y/ρ are uploaded.

    .. math::  w_k ← w_k − η(∇f_k(w_k) + y_k + ρ(w_k − θ)),\quad y_k ← y_k + ρ(w_k − θ),\quad
               θ' = \frac{\sum_k α_k (w_k + y_k/ρ)}{\sum_k α_k}

    Reading: `server_step=published` is θ' = θ + (η_s/m) Σ_k Δ_k over the round's cohort, Δ_k the increments: biased, or
    diverging, under partial participation even on quadratics. The default is the running mean, which is exact. Clients'
    own numbers of epochs E_k come from participation.least_epochs.

    With --dp `server_step=published` allows cohorts of some clients; with the running mean every client is a member
    from the start and must be called in every round (docs/privacy.md).

    Options:
      rho: ρ, how strongly clients are held to θ; the report's runs have 0.1, which hardly lets a language model move.
      weights: α_k: the client's tokens when it joined, or uniform (server_step=running only); secure sums weigh all
        alike.
      start_from: local work goes on from the stored w_k, or from the model θ.
      server_step: running (mean over all joined clients) or published (uniform over the cohort).
      server_lr: η_s of server_step=published.
      lr: local step size η.
      momentum: local momentum; starts at zero every round.
      clip: largest norm of a local gradient; none turns clipping off.
      decay: factor on the step size every round.
      epochs: local passes E over a client's text.
      batch_size: rows B of a local step.

    References:
      Gong, Li, Freris, *FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity*,
      2022 (arXiv 2204.03529), algorithm 1; next-character report, section 6.4.
    """
    positive("rho", rho)
    positive("server_lr", server_lr)
    published = server_step == "published"
    if not published and server_lr != 1:
        raise ConfigError(
            f"method.server_lr={server_lr} is the step of server_step=published; the running mean has none"
        )
    solver = admm_solver(
        lambda mu: descend_sgd(lr=lr, momentum=momentum, clip=clip, decay=decay, epochs=epochs, mu=mu),
        rho,
        start_from=start_from,
        joining="increment" if published else "whole",
    )
    if not published:
        return _method("fedadmm", solver, weights, batch_size, epochs)
    return Method("fedadmm", solver, weigh.uniform(), server.sgd(server_lr), batch_size, epochs)
