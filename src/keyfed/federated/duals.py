r"""Clients that remember: consensus by the alternating direction method of multipliers.

The federation solves min Σ_k α_k f_k(w_k) with all w_k = θ. Client k keeps its weights w_k and a dual y_k, the price of
disagreeing with θ. A round of client k is

.. math::  w_k ≈ \arg\min_w f_k(w) + ⟨y_k, w − θ⟩ + \tfrac{ρ}{2}‖w − θ‖^2,\qquad y_k ← y_k + ρ(w_k − θ),
           \qquad z_k = w_k + y_k/ρ

and the server's θ is the mean Σ_k α_k z_k / Σ_k α_k over **all clients that ever joined**, present or not. So a client
uploads the *increment* of z_k since the last one the server acknowledged, the whole z_k when it joins, and the server
keeps a running sum. A client whose upload was lost goes back to what was acknowledged: it is as if it had not been
called. Advancing what was sent without an acknowledgement corrupts θ for ever.

As published (`cohort_step`), every client is a member from the start and stands for the first θ, θ⁰. All upload
increments, and θ' = θ + (η/|S|) Σ_{k∈S} Δ_k. With η = |S|/m of m clients θ is the mean of all z_k in every round, and
the optimum is reached. With η = 1 it is that only if all take part. A client that starts from the θ that it finds
(`late`) leaves θ biased, whatever η is.

No clip bounds a whole z_k. So in a private run every client is a member from the start and stands for the first θ.
Client k uploads the clipped increment, also when it joins, and books it as sent (`engine.task`). The server steps θ' =
θ + Σ α_k Δ_k / W with the public weight W of all clients. If all take part in the first round, without clip and noise,
this is the same θ'. A client that misses the first round stands for the θ it finds. At the fixed point the sum of the
duals is then off by ρ times the distance of that θ from the first one. It is also off by ρ times the noise of all
rounds' sums.

References:
  Boyd, Parikh, Chu, Peleato, Eckstein, *Distributed Optimization and Statistical Learning via ADMM*, 2011.
  Zhou, Li, *Communication-Efficient ADMM-based Federated Learning*, 2021.
  Gong, Li, Freris, *FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity*, 2022
  (arXiv 2204.03529).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from keyfed.federated.descent import descend
from keyfed.federated.local import LocalOptions, local_descent, start_at
from keyfed.federated.types import Aggregate, JoinWeight, Objective, Params, ServerRule, Solution, Solver

StartFrom = Literal["stored", "model"]
Joining = Literal["whole", "first", "late"]
ORIGIN = "origin/"  # layers of the first θ in a server's state


def admm(local: LocalOptions, rho: float, start_from: StartFrom = "stored", joining: Joining = "whole") -> Solver:
    """Solve the augmented local problem by a descent, step the dual, upload the increment of z_k = w_k + y_k/ρ.

    State of a client: "w/…", "dual/…", "sent/…" (what the server has of z_k) and "alpha" (its weight; 0 before it
    joins).

    Args:
      local: options of the descent; its proximal term has μ = ρ.
      rho: ρ, how strongly clients are held to θ.
      start_from: local work goes on from the stored w_k, or from θ.
      joining: what a client uploads first: z_k whole; or its increment over the first θ (as published for FedADMM), or
        over the θ that it finds (late).
    """
    descent = local_descent(local, rho)

    def start(theta: Params) -> Params:
        like = next(iter(theta.values()))
        state = {f"w/{name}": p.clone() for name, p in theta.items()}
        state |= {f"dual/{name}": torch.zeros_like(p) for name, p in theta.items()}
        state |= {f"sent/{name}": torch.zeros_like(p) if joining == "whole" else p.clone() for name, p in theta.items()}
        return state | {"alpha": torch.zeros((), dtype=torch.float64, device=like.device)}

    def solve(theta: Params, objective: Objective, round: int, state: Params) -> Solution:
        dual = {name: state[f"dual/{name}"] for name in theta}
        if start_from == "stored":
            begin = {name: state[f"w/{name}"].clone() for name in theta}
        else:
            begin = start_at(theta, objective.clients)
        weights, tally = descend(descent, begin, theta, objective, round, dual)
        after, upload = {}, {}
        for name, w in weights.items():
            y = dual[name] + rho * (w - theta[name])
            after[f"w/{name}"], after[f"dual/{name}"] = w, y
            after[f"sent/{name}"] = state[f"sent/{name}"]
            upload[name] = w + y / rho - state[f"sent/{name}"]
        solution = tally.solution(upload, objective)
        own = _join_weight(state["alpha"], solution.tokens, joining == "whole")
        return solution._replace(join_weight=own, state=after | {"alpha": own.weight})

    return Solver(solve, start, first=joining == "first")


def _join_weight(alpha: Tensor, tokens: Tensor, whole: bool) -> JoinWeight:
    """A client's weight is fixed when it joins: the running sum could not follow a weight that changes."""
    new = alpha == 0
    return JoinWeight(torch.where(new, tokens.to(alpha), alpha), new & whole)


def running_mean() -> ServerRule:
    r"""Keep Z = Σα_k z_k and M = Σα_k over all clients that ever joined: Z ← Z + total, M ← M + mass, θ' = Z/M.

    Both are kept in double precision, so that increments of many rounds do not wear θ down.
    """

    def init(params: Params) -> Params:
        state = {f"sum/{name}": torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
        return state | {f"mass/{name}": torch.zeros((), dtype=torch.float64) for name in params}

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        after, kept = dict(params), dict(state)
        for name, p in params.items():
            total = kept[f"sum/{name}"] = state[f"sum/{name}"] + aggregate.total[name]
            mass = kept[f"mass/{name}"] = state[f"mass/{name}"] + aggregate.mass[name]
            if float(mass) > 0:
                after[name] = (total / float(mass)).to(p.dtype)
        return after, kept

    return ServerRule(init, step)


def cohort_step(lr: float = 1.0, clients: int | None = None) -> ServerRule:
    r"""Step by the cohort's increments: θ' = θ + (η/|S|) Σ_{k∈S} Δ_k (FedADMM, algorithm 1, line 10).

    State: "origin/…", the first θ, from which clients that join later start.

    Args:
      lr: η.
      clients: the number m of all clients, for η = |S|/m: θ' = θ + (1/m) Σ_{k∈S} Δ_k; None takes `lr`.
    """

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        size = lr if clients is None else len(aggregate.contributors) / clients
        mean = aggregate.mean()
        return {name: p + size * aggregate.step * mean[name] for name, p in params.items()}, state

    return ServerRule(lambda params: {f"{ORIGIN}{name}": p.clone() for name, p in params.items()}, step)
