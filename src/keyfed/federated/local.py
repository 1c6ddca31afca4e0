r"""Local solvers: what a client does with θ and its own text. m stacked clients move in lockstep.

A *descent* (`descent.py`) moves weights from anywhere, held near θ by a proximal term and tilted by a linear one; a
*solver* says where it starts and what is uploaded (`from_theta`: w_k − θ). Local optimiser state starts anew every
round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyfed.federated import descent as descents
from keyfed.federated.descent import AdamRule, Descent, SgdRule, Tally, Way, descend, per_client
from keyfed.federated.spec import Schedule
from keyfed.federated.types import Objective, Params, Solution, Solver


def learning_rate(lr: float, decay: float, round: int) -> float:
    """Return lr · decay^round, the step size of a round (rounds count from 0)."""
    return float(lr * decay**round)


def progress(schedule: Schedule, round: int) -> float:
    r"""Return the factor on the step size in a round (rounds count from 0): a rule of progress over the whole run.

    .. math::  t < w:\ \frac{t + 1}{w + 1},\qquad
               \text{linear: } 1 − (1 − f) p,\qquad
               \text{cosine: } f + (1 − f) \frac{1 + \cos πp}{2},\qquad p = \frac{t − w}{R − w}

    w is the number of warm-up rounds, f the share that is left in the end. A run that goes on beyond R stays at f.
    """
    warm = min(int(schedule.warmup * schedule.rounds + 0.5), max(0, schedule.rounds - 1))
    if round < warm:
        return (round + 1) / (warm + 1)
    if schedule.shape == "constant":
        return 1.0
    done = min((round - warm) / max(1, schedule.rounds - warm), 1.0)
    left = 1 - done if schedule.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.final + (1 - schedule.final) * left


class _Paced:
    """An objective whose clients all take their steps by a common factor."""

    def __init__(self, objective: Objective, factor: float) -> None:
        self.clients = objective.clients
        own = objective.pace
        self.pace: Tensor | None = torch.full((self.clients,), factor, dtype=torch.float64)
        if own is not None:
            self.pace = self.pace * own.to(self.pace)
        self.steps, self.walk = objective.steps, objective.walk
        self._objective = objective

    @property
    def whole(self) -> Tensor:
        """Tokens of each client's whole epoch; known once its steps have been taken."""
        return self._objective.whole

    @whole.setter
    def whole(self, tokens: Tensor) -> None:
        self._objective.whole = tokens


def scheduled(solver: Solver, schedule: Schedule) -> Solver:
    """Return the solver with a step size that follows a schedule over the run, on top of its own `decay`."""

    def solve(theta: Params, objective: Objective, round: int, *state: Params) -> Solution:
        return solver.solve(theta, _Paced(objective, progress(schedule, round)), round, *state)

    return solver._replace(solve=solve)


def start_at(theta: Params, clients: int) -> Params:
    """Give each client its own copy of θ."""
    return {name: p.unsqueeze(0).repeat(clients, *([1] * p.dim())) for name, p in theta.items()}


def from_theta(descent: Descent) -> Solver:
    """A client that starts from θ every round, keeps nothing and uploads w_k − θ."""

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        local, tally = descend(descent, start_at(theta, objective.clients), theta, objective, round)
        return tally.solution({name: w.sub_(theta[name]) for name, w in local.items()}, objective)

    return Solver(solve)


def descend_sgd(
    *,
    lr: float,
    momentum: float = 0.0,
    clip: float | None = None,
    weight_decay: float = 0.0,
    decay: float = 1.0,
    epochs: int = 1,
    mu: float = 0.0,
) -> Descent:
    r"""E epochs of stochastic gradient descent, see `descent.sgd_move`; η_t = η · decay^t.

    Args:
      lr: step size η.
      momentum: m, as in `torch.optim.SGD`.
      clip: largest norm of a client's gradient (of its mean nats per token), over all layers; None: no clipping.
      weight_decay: λ.
      decay: factor on the step size every round.
      epochs: passes over the client's text.
      mu: μ of the proximal term (μ/2)‖w − θ‖², added as a gradient after clipping, like the linear term y; 0 is none.
    """
    rule = SgdRule(momentum, clip, weight_decay, mu)
    return descents.sgd(rule, lambda round: learning_rate(lr, decay, round), epochs)


def sgd(
    *,
    lr: float,
    momentum: float = 0.0,
    clip: float | None = None,
    weight_decay: float = 0.0,
    decay: float = 1.0,
    epochs: int = 1,
    mu: float = 0.0,
) -> Solver:
    """E epochs of `descend_sgd` from θ."""
    return from_theta(
        descend_sgd(lr=lr, momentum=momentum, clip=clip, weight_decay=weight_decay, decay=decay, epochs=epochs, mu=mu)
    )


def descend_adam(
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    clip: float | None = None,
    decay: float = 1.0,
    epochs: int = 1,
    mu: float = 0.0,
) -> Descent:
    """E epochs of Adam, see `descent.adam_move`; moments start at zero every round."""
    rule = AdamRule(beta1, beta2, epsilon, clip, mu)
    return descents.adam(rule, lambda round: learning_rate(lr, decay, round), epochs)


def adam(
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    clip: float | None = None,
    decay: float = 1.0,
    epochs: int = 1,
    mu: float = 0.0,
) -> Solver:
    """E epochs of `descend_adam` from θ."""
    return from_theta(
        descend_adam(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, clip=clip, decay=decay, epochs=epochs, mu=mu)
    )


def full_gradient() -> Solver:
    r"""One gradient of the client's whole local loss at θ; the upload is −∇f_k(θ). No local learning rate.

    .. math::  ∇f_k(θ) = \frac{1}{n_k}\sum_{\text{steps}} n_{\text{step}} ∇ℓ_{\text{step}}(θ)
    """
    descent = descents.total_gradient()

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        del round  # the gradient at θ is the same whenever it is taken
        local = start_at(theta, objective.clients)
        like = next(iter(local.values()))
        tally = Tally(objective.clients, like.device)
        # No step is taken; the sizes are of the weights' own type all the same, by which an engine chooses its kernels.
        way = Way(local, theta, None, descent.begin(local), like.new_zeros(objective.clients), tally)
        objective.walk(way, descent)
        solution = tally.solution(way.memory, objective)
        count = solution.worked.clamp(min=1)
        for g in way.memory.values():
            g.div_(per_client(-count.to(g), g))
        return solution

    return Solver(solve, still=True)
