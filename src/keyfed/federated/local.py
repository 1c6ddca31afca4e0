r"""Local solvers: what a client does with θ and its own text. m stacked clients move in lockstep.

A *descent* (`descent.py`) moves weights from anywhere, held near θ by a proximal term and tilted by a linear one. A
*solver* says where it starts and what is uploaded (`from_theta`: w_k − θ). Local optimiser state starts anew every
round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keyfed.errors import ConfigError
from keyfed.federated import descent as descents
from keyfed.federated.descent import AdamRule, ClientBatch, Descent, SgdRule, Tally, descend, learning_rate, per_client
from keyfed.federated.types import Objective, Params, Solution, Solver

Optimiser = Literal["sgd", "adam"]


def start_at(theta: Params, clients: int) -> Params:
    """Give each client its own copy of θ."""
    return {name: p.unsqueeze(0).repeat(clients, *([1] * p.dim())) for name, p in theta.items()}


def from_theta(descent: Descent, tail: bool = False) -> Solver:
    """A client that starts from θ every round, keeps nothing and uploads w_k − θ.

    Args:
      tail: it reports the loss of w_k on its text, by one more pass, and not that of its last epoch as trained.
    """

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        local, tally = descend(descent, start_at(theta, objective.clients), theta, objective, round)
        loss = descents.loss_of(local, theta, objective) if tail else None
        solution = tally.solution({name: w.sub_(theta[name]) for name, w in local.items()}, objective)
        return solution if loss is None else solution._replace(loss=loss)

    return Solver(solve)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a client's own training, the same for every method.

    Attributes:
      optimiser: local optimiser, sgd or adam.
      lr: local step size η (with sgd about 1 to 5).
      momentum: local momentum, sgd only; starts at zero every round.
      clip: largest norm of a local gradient; none turns clipping off.
      decay: factor on the step size every round.
      epochs: local passes E over a client's text.
      batch_size: rows B of a local step.
    """

    optimiser: Optimiser = "adam"
    lr: float = 0.006
    momentum: float = 0.0
    clip: float | None = 1.0
    decay: float = 1.0
    epochs: int = 1
    batch_size: int = 10


def local_descent(options: LocalOptions, mu: float = 0.0) -> Descent:
    """Return the descent of these options; its step size in round t is lr · decay^t.

    Args:
      mu: μ of the proximal term (μ/2)‖w − θ‖². Its gradient is added after clipping, as that of the linear term is.
    """

    def eta(round: int) -> float:
        return learning_rate(options.lr, options.decay, round)

    if options.optimiser != "adam":
        return descents.sgd(SgdRule(options.momentum, options.clip, 0.0, mu), eta, options.epochs)
    if options.momentum:
        raise ConfigError(
            f"method.momentum={options.momentum} is an option of optimiser=sgd; Adam has its own (beta1 = 0.9)"
        )
    return descents.adam(AdamRule(0.9, 0.999, 1e-8, options.clip, mu), eta, options.epochs)


def local_solver(options: LocalOptions, mu: float = 0.0, tail: bool = False) -> Solver:
    """Return the solver that starts from θ and takes the descent of these options (`local_descent`, `from_theta`)."""
    return from_theta(local_descent(options, mu), tail)


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
        block = ClientBatch(local, theta, None, descent.begin(local), like.new_zeros(objective.clients), tally)
        objective.run_steps(block, descent)
        solution = tally.solution(block.memory, objective)
        count = solution.worked.clamp(min=1)
        for g in block.memory.values():
            g.div_(per_client(-count.to(g), g))
        return solution

    return Solver(solve, still=True)
