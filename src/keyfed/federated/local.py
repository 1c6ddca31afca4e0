r"""Local solvers: what a client does with θ and its own text. m stacked clients move in lockstep.

A *descent* moves weights from anywhere, held near θ by a proximal term and tilted by a linear one; a *solver* says
where it starts and what is uploaded (`from_theta`: w_k − θ). A client that has run out of text before its neighbours is
*inactive* for the rest of the epoch: it takes no step, not even with momentum. Local optimiser state starts anew every
round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyfed.federated.types import Objective, Params, Solution, Solver


def per_client(numbers: Tensor, like: Tensor) -> Tensor:
    """View [m] numbers so that they multiply a stacked tensor [m, …]."""
    return numbers.reshape([-1] + [1] * (like.dim() - 1))


def gradient_norm(grads: Params) -> Tensor:
    """Return each client's Euclidean norm over all layers, [m]."""
    norms = [torch.linalg.vector_norm(g.reshape(g.shape[0], -1), dim=1) for g in grads.values()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return norm


def clip_gradients(grads: Params, most: float | None) -> None:
    """Scale each client's gradient in place so that its norm is at most `most`; None leaves it alone."""
    if most is None:
        return
    norm = gradient_norm(grads)
    scale = (most / norm.clamp(min=1e-12)).clamp(max=1.0)
    for g in grads.values():
        g.mul_(per_client(scale, g))


def learning_rate(lr: float, decay: float, round: int) -> float:
    """Return lr · decay^round, the step size of a round (rounds count from 0)."""
    return float(lr * decay**round)


class Tally:
    """Counts nats and tokens: the loss reported is the last epoch's mean per token, never a mean of means.

    A client that does fewer epochs than its neighbours reports the last one it took part in.
    """

    def __init__(self, clients: int) -> None:
        self._last = self._epoch = torch.zeros(2, clients, dtype=torch.float64)
        self._worked = torch.zeros(clients, dtype=torch.float64)

    def start_epoch(self) -> None:
        """Begin an epoch."""
        self._close()
        self._epoch = torch.zeros_like(self._last)

    def add(self, nats: Tensor, tokens: Tensor) -> None:
        """Count one step."""
        step = torch.stack([nats.double(), tokens.double()])
        self._epoch = self._epoch.to(step.device) + step
        self._worked = self._worked.to(step.device) + step[1]

    def _close(self) -> None:
        epoch = self._epoch
        self._last = torch.where(epoch[1] > 0, epoch, self._last.to(epoch.device))

    def solution(self, upload: Params, objective: Objective) -> Solution:
        """Return the uploads with what was counted."""
        self._close()
        nats, tokens = self._last
        whole = objective.whole.to(tokens) * (self._worked > 0)
        return Solution(upload, nats / tokens.clamp(min=1), whole, self._worked)


# (where to start, what to be near, objective, round, linear term) → (weights, counts); all stacked but the anchor θ.
Descent = Callable[[Params, Params, Objective, int, Params | None], tuple[Params, Tally]]


def start_at(theta: Params, clients: int) -> Params:
    """Give each client its own copy of θ."""
    return {name: p.unsqueeze(0).repeat(clients, *([1] * p.dim())) for name, p in theta.items()}


def from_theta(descent: Descent) -> Solver:
    """A client that starts from θ every round, keeps nothing and uploads w_k − θ."""

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        local, tally = descent(start_at(theta, objective.clients), theta, objective, round, None)
        return tally.solution({name: w.sub_(theta[name]) for name, w in local.items()}, objective)

    return Solver(solve)


def _pull(grads: Params, local: Params, theta: Params, active: Tensor, mu: float, dual: Params | None) -> None:
    """Add μ(w − θ) + y, the gradient of ⟨y, w⟩ + (μ/2)‖w − θ‖², in place; who is inactive is left alone."""
    for name, g in grads.items():
        if mu:
            g.addcmul_(local[name] - theta[name], per_client(active.to(g), g), value=mu)
        if dual is not None:
            g.addcmul_(dual[name], per_client(active.to(g), g))


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
    r"""E epochs of stochastic gradient descent.

    .. math::  g ← \mathrm{clip}(∇f_k(w)) + y_k + μ(w − θ) + λ w,\; v ← m v + g,\; w ← w − η_t v,\;
               η_t = η · \text{decay}^t

    Args:
      lr: step size η.
      momentum: m, as in `torch.optim.SGD`.
      clip: largest norm of a client's gradient (of its mean nats per token), over all layers; None: no clipping.
      weight_decay: λ.
      decay: factor on the step size every round.
      epochs: passes over the client's text.
      mu: μ of the proximal term (μ/2)‖w − θ‖², added as a gradient after clipping, like the linear term y; 0 is none.
    """

    def descend(
        local: Params, theta: Params, objective: Objective, round: int, dual: Params | None
    ) -> tuple[Params, Tally]:
        velocity: Params = {}
        eta = learning_rate(lr, decay, round)
        tally = Tally(objective.clients)
        for epoch in range(epochs):
            tally.start_epoch()
            for step in objective.steps(epoch):
                nats, tokens, grads = step(local)
                tally.add(nats, tokens)
                clip_gradients(grads, clip)
                active = (tokens > 0).to(nats.dtype)
                _pull(grads, local, theta, active, mu, dual)
                friction = momentum**active  # who is inactive keeps its velocity
                size = active if objective.pace is None else active * objective.pace.to(active)
                for name, g in grads.items():
                    if weight_decay:
                        g.addcmul_(local[name], per_client(active, g), value=weight_decay)
                    if momentum:
                        g = velocity[name].mul_(per_client(friction, g)).add_(g) if name in velocity else g
                        velocity[name] = g
                    if objective.clients == 1 and objective.pace is None:  # a lone client is always active
                        local[name].add_(g, alpha=-eta)
                    else:
                        local[name].addcmul_(g, per_client(size, g), value=-eta)
        return local, tally

    return descend


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
    r"""E epochs of Adam, with bias correction as in `torch.optim.Adam`; moments start at zero every round.

    .. math::  m ← β_1 m + (1−β_1) g,\; v ← β_2 v + (1−β_2) g^2,\;
               w ← w − η\,\frac{m/(1−β_1^t)}{\sqrt{v/(1−β_2^t)} + ε}

    g is the clipped gradient plus y + μ(w − θ), as in `descend_sgd`; t counts each client's own active steps.
    """

    def descend(
        local: Params, theta: Params, objective: Objective, round: int, dual: Params | None
    ) -> tuple[Params, Tally]:
        first = {name: torch.zeros_like(w) for name, w in local.items()}
        second = {name: torch.zeros_like(w) for name, w in local.items()}
        taken = torch.zeros(objective.clients, dtype=torch.float64)
        eta = learning_rate(lr, decay, round)
        tally = Tally(objective.clients)
        for epoch in range(epochs):
            tally.start_epoch()
            for step in objective.steps(epoch):
                nats, tokens, grads = step(local)
                tally.add(nats, tokens)
                clip_gradients(grads, clip)
                _pull(grads, local, theta, tokens > 0, mu, dual)
                active = (tokens > 0).double().cpu()
                taken += active
                t = taken.clamp(min=1)
                # η (m/c₁) / (√(v/c₂) + ε) = η √c₂/c₁ · m / (√v + ε √c₂) with c = 1 − βᵗ
                root = (1 - beta2**t).sqrt()
                size = active * eta * root / (1 - beta1**t)
                if objective.pace is not None:
                    size = size * objective.pace.to(size)
                size = size.to(nats)
                floor = (epsilon * root).to(nats)
                keep1 = (beta1**active).to(nats)  # who is inactive keeps its moments
                keep2 = (beta2**active).to(nats)
                for name, g in grads.items():
                    m = first[name].mul_(per_client(keep1, g)).add_(g, alpha=1 - beta1)
                    v = second[name].mul_(per_client(keep2, g)).addcmul_(g, g, value=1 - beta2)
                    denominator = v.sqrt().add_(per_client(floor, v))
                    if objective.clients == 1:
                        local[name].addcdiv_(m, denominator, value=-float(size))
                    else:
                        local[name].sub_(m.div(denominator).mul_(per_client(size, m)))
        return local, tally

    return descend


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

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        del round  # the gradient at θ is the same whenever it is taken
        local = start_at(theta, objective.clients)
        total = {name: torch.zeros_like(w) for name, w in local.items()}
        tally = Tally(objective.clients)
        for step in objective.steps(0):
            nats, tokens, grads = step(local)
            tally.add(nats, tokens)
            for name, g in grads.items():
                total[name].addcmul_(g, per_client(tokens.to(g), g))
        solution = tally.solution(total, objective)
        count = solution.worked.clamp(min=1)
        for g in total.values():
            g.div_(per_client(-count.to(g), g))
        return solution

    return Solver(solve)
