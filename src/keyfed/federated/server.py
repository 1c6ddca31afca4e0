r"""Server rules: how θ moves once the sum is there.

Δ below is the mean upload Σγ_kΔ_k; it points towards the clients, so −Δ is the pseudo-gradient. A layer of mass 0 takes
no step, and its moments stay as they are. η is lr times `Aggregate.step`, which is 1 unless the run has diverged. State
is flat: "first/…" and "second/…" with the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyfed.federated.spec import decay_rate, positive
from keyfed.federated.types import Aggregate, Params, ServerRule

SecondMoment = Callable[[Tensor, Tensor], Tensor]


def sgd(lr: float = 1.0) -> ServerRule:
    r"""Step by the mean upload: θ' = θ + η · Σγ_kΔ_k. With η = 1 and weights n_k/Σn this is FedAvg's average."""

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        mean = aggregate.mean()
        return {name: p + lr * aggregate.step * mean[name] for name, p in params.items()}, state

    return ServerRule(init=lambda params: {}, step=step)


def mediated(lr: float) -> ServerRule:
    r"""`sgd`, where η is of adaptive rounds alone: a round that FedMed's switch leaves to FedAvg is its average.

    References:
      Wu, Liang, Wang, *FedMed*, Sensors 2020, algorithm 1, lines 13 and 15.
    """
    adaptive, plain = sgd(lr), sgd()

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        return (plain if aggregate.adaptive is False else adaptive).step(params, aggregate, state)

    return ServerRule(adaptive.init, step)


def momentum(lr: float = 1.0, beta: float = 0.9) -> ServerRule:
    r"""Heavy ball on the server: v ← βv + Δ, θ' = θ + ηv (FedAvgM; Hsu, Qi, Brown 2019)."""
    return _with_velocity(lr, beta, lambda mean, velocity: velocity)


def nesterov(lr: float = 0.7, beta: float = 0.9) -> ServerRule:
    r"""Nesterov momentum on the server: v ← βv + Δ, θ' = θ + η(Δ + βv), as `torch.optim.SGD(nesterov=True)`."""
    return _with_velocity(lr, beta, lambda mean, velocity: mean + beta * velocity)


def _with_velocity(lr: float, beta: float, direction: Callable[[Tensor, Tensor], Tensor]) -> ServerRule:
    decay_rate("beta", beta)

    def init(params: Params) -> Params:
        return {f"first/{name}": torch.zeros_like(p) for name, p in params.items()}

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        mean = aggregate.mean()
        after, moments = dict(params), dict(state)
        for name, p in params.items():
            if aggregate.mass[name] > 0:
                velocity = moments[f"first/{name}"] = beta * state[f"first/{name}"] + mean[name]
                after[name] = p + lr * aggregate.step * direction(mean[name], velocity)
        return after, moments

    return ServerRule(init, step)


def adam(
    lr: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3, bias_correction: bool = False
) -> ServerRule:
    r"""Adam on the server (FedAdam): v ← β₂v + (1 − β₂)Δ²; the rest is `_adaptive`'s.

    Args:
      bias_correction: Adam's own step, that of `torch.optim.Adam` with ε = τ. Then v starts at 0. The t-th step is by
        m/(1 − β₁^t) and v/(1 − β₂^t), and t is kept in the state "taken/…".

    References:
      Kingma, Ba, *Adam: A Method for Stochastic Optimization*, 2014 (ICLR 2015), algorithm 1.
    """
    decay_rate("beta2", beta2)
    corrected = beta2 if bias_correction else None
    return _adaptive(lr, beta1, tau, lambda v, square: beta2 * v + (1 - beta2) * square, corrected)


def yogi(lr: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerRule:
    r"""Yogi on the server (FedYogi): v ← v − (1 − β₂)Δ² sign(v − Δ²), so v changes slowly in both directions."""
    decay_rate("beta2", beta2)
    return _adaptive(lr, beta1, tau, lambda v, square: v - (1 - beta2) * square * torch.sign(v - square))


def adagrad(lr: float, beta1: float = 0.0, tau: float = 1e-3) -> ServerRule:
    r"""Adagrad on the server (FedAdagrad): v ← v + Δ²."""
    return _adaptive(lr, beta1, tau, lambda v, square: v + square)


def _adaptive(lr: float, beta1: float, tau: float, second: SecondMoment, corrected: float | None = None) -> ServerRule:
    r"""The common part of Reddi et al.'s rules.

    .. math::  m ← β_1 m + (1 − β_1)Δ,\quad v ← \mathrm{second}(v, Δ^2),\quad θ' = θ + η \frac{m}{\sqrt{v} + τ}

    m starts at 0 and v at τ²; no bias correction, τ outside the root.

    Args:
      corrected: β₂ of a bias correction of both moments, v starting at 0 (`adam`); None for none.

    References:
      Reddi et al., *Adaptive Federated Optimization*, 2020 (ICLR 2021), algorithm 2.
    """
    decay_rate("beta1", beta1)
    positive("tau", tau)

    def init(params: Params) -> Params:
        state = {f"first/{name}": torch.zeros_like(p) for name, p in params.items()}
        if corrected is not None:
            state |= {f"taken/{name}": torch.zeros((), dtype=torch.float64) for name in params}
        start = tau**2 if corrected is None else 0.0
        return state | {f"second/{name}": torch.full_like(p, start) for name, p in params.items()}

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        mean = aggregate.mean()
        after, moments = dict(params), dict(state)
        for name, p in params.items():
            if aggregate.mass[name] > 0:
                m = moments[f"first/{name}"] = beta1 * state[f"first/{name}"] + (1 - beta1) * mean[name]
                v = moments[f"second/{name}"] = second(state[f"second/{name}"], mean[name] ** 2)
                size = lr * aggregate.step
                if corrected is not None:
                    t = moments[f"taken/{name}"] = state[f"taken/{name}"] + 1
                    size, v = size / (1 - beta1 ** float(t)), v / (1 - corrected ** float(t))
                after[name] = p + size * m / (v.sqrt() + tau)
        return after, moments

    return ServerRule(init, step)
