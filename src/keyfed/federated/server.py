"""Server rules: how θ moves once the sum is there."""

from __future__ import annotations

from keyfed.federated.types import Aggregate, Params, ServerRule


def sgd(lr: float = 1.0) -> ServerRule:
    r"""Step along the mean upload: θ' = θ + η · Σγ_kΔ_k. With η = 1 and weights n_k/Σn this is FedAvg's average."""

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        mean = aggregate.mean()
        return {name: p + lr * mean[name] for name, p in params.items()}, state

    return ServerRule(init=lambda params: {}, step=step)
