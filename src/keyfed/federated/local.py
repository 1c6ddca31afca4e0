r"""Local solvers: what a client does with θ and its own text. m stacked clients move in lockstep.

Each solver takes (θ, objective, round) and returns uploads w_k − θ. A client that has run out of text before its
neighbours is *inactive* for the rest of the epoch: it takes no step, not even with momentum.
Local optimiser state starts anew every round.
"""

from __future__ import annotations

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


class _Tally:
    """Counts nats and tokens: the loss reported is the last epoch's mean per token, never a mean of means."""

    def __init__(self) -> None:
        self.nats: Tensor | None = None
        self.tokens: Tensor | None = None
        self.worked: Tensor | None = None

    def start_epoch(self) -> None:
        self.nats = self.tokens = None

    def add(self, nats: Tensor, tokens: Tensor) -> None:
        self.nats = nats.double() if self.nats is None else self.nats + nats.double()
        self.tokens = tokens.double() if self.tokens is None else self.tokens + tokens.double()
        self.worked = tokens.double() if self.worked is None else self.worked + tokens.double()

    def solution(self, upload: Params, clients: int) -> Solution:
        zero = torch.zeros(clients, dtype=torch.float64)
        nats = zero if self.nats is None else self.nats
        tokens = zero if self.tokens is None else self.tokens
        worked = zero if self.worked is None else self.worked
        return Solution(upload, nats / tokens.clamp(min=1), tokens, worked)


def _start(theta: Params, clients: int) -> Params:
    """Give each client its own copy of θ."""
    return {name: p.unsqueeze(0).repeat(clients, *([1] * p.dim())) for name, p in theta.items()}


def _upload(local: Params, theta: Params) -> Params:
    """w_k − θ, in the local copy's own memory."""
    return {name: w.sub_(theta[name]) for name, w in local.items()}


def _pull(grads: Params, local: Params, theta: Params, active: Tensor, mu: float) -> None:
    """Add μ(w − θ), the gradient of the proximal term, in place; who is inactive is left alone."""
    if mu:
        for name, g in grads.items():
            g.addcmul_(local[name] - theta[name], per_client(active.to(g), g), value=mu)


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
    r"""E epochs of stochastic gradient descent from θ.

    .. math::  g ← \mathrm{clip}(∇f_k(w)) + μ(w − θ) + λ w,\; v ← m v + g,\; w ← w − η_t v,\; η_t = η · \text{decay}^t

    Args:
      lr: step size η.
      momentum: m, as in `torch.optim.SGD`.
      clip: largest norm of a client's gradient (of its mean nats per token), over all layers; None: no clipping.
      weight_decay: λ.
      decay: factor on the step size every round.
      epochs: passes over the client's text.
      mu: μ of the proximal term (μ/2)‖w − θ‖², added as a gradient after clipping; 0 is none at all.
    """

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        local = _start(theta, objective.clients)
        velocity: Params = {}
        eta = learning_rate(lr, decay, round)
        tally = _Tally()
        for epoch in range(epochs):
            tally.start_epoch()
            for step in objective.steps(epoch):
                nats, tokens, grads = step(local)
                tally.add(nats, tokens)
                clip_gradients(grads, clip)
                active = (tokens > 0).to(nats.dtype)
                _pull(grads, local, theta, active, mu)
                friction = momentum**active  # who is inactive keeps its velocity
                for name, g in grads.items():
                    if weight_decay:
                        g.addcmul_(local[name], per_client(active, g), value=weight_decay)
                    if momentum:
                        g = velocity[name].mul_(per_client(friction, g)).add_(g) if name in velocity else g
                        velocity[name] = g
                    if objective.clients == 1:  # a lone client is always active
                        local[name].add_(g, alpha=-eta)
                    else:
                        local[name].addcmul_(g, per_client(active, g), value=-eta)
        return tally.solution(_upload(local, theta), objective.clients)

    return Solver(solve)


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
    r"""E epochs of Adam from θ, with bias correction as in `torch.optim.Adam`; moments start at zero every round.

    .. math::  m ← β_1 m + (1−β_1) g,\; v ← β_2 v + (1−β_2) g^2,\;
               w ← w − η\,\frac{m/(1−β_1^t)}{\sqrt{v/(1−β_2^t)} + ε}

    g is the clipped gradient plus that of the proximal term, μ(w − θ); t counts each client's own active steps.
    """

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        local = _start(theta, objective.clients)
        first = {name: torch.zeros_like(w) for name, w in local.items()}
        second = {name: torch.zeros_like(w) for name, w in local.items()}
        taken = torch.zeros(objective.clients, dtype=torch.float64)
        eta = learning_rate(lr, decay, round)
        tally = _Tally()
        for epoch in range(epochs):
            tally.start_epoch()
            for step in objective.steps(epoch):
                nats, tokens, grads = step(local)
                tally.add(nats, tokens)
                clip_gradients(grads, clip)
                _pull(grads, local, theta, tokens > 0, mu)
                active = (tokens > 0).double().cpu()
                taken += active
                t = taken.clamp(min=1)
                # η (m/c₁) / (√(v/c₂) + ε) = η √c₂/c₁ · m / (√v + ε √c₂) with c = 1 − βᵗ
                root = (1 - beta2**t).sqrt()
                size = (active * eta * root / (1 - beta1**t)).to(nats)
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
        return tally.solution(_upload(local, theta), objective.clients)

    return Solver(solve)


def full_gradient() -> Solver:
    r"""One gradient of the client's whole local loss at θ; the upload is −∇f_k(θ). No local learning rate.

    .. math::  ∇f_k(θ) = \frac{1}{n_k}\sum_{\text{steps}} n_{\text{step}} ∇ℓ_{\text{step}}(θ)
    """

    def solve(theta: Params, objective: Objective, round: int) -> Solution:
        del round  # the gradient at θ is the same whenever it is taken
        local = _start(theta, objective.clients)
        total = {name: torch.zeros_like(w) for name, w in local.items()}
        tally = _Tally()
        for step in objective.steps(0):
            nats, tokens, grads = step(local)
            tally.add(nats, tokens)
            for name, g in grads.items():
                total[name].addcmul_(g, per_client(tokens.to(g), g))
        solution = tally.solution(total, objective.clients)
        count = solution.tokens.clamp(min=1)
        for g in total.values():
            g.div_(per_client(-count.to(g), g))
        return solution

    return Solver(solve)
