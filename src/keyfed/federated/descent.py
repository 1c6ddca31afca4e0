r"""Descents: how a step changes a client's weights. m stacked clients move in lockstep.

A descent is a value: what it remembers between steps (`begin`), how one gradient moves the tensors in place (`move`),
its step size by round and its epochs. Who runs the steps is the objective's business (`Objective.run_steps`): one after
the other (`run_steps`), or captured once and replayed on a GPU. The numbers of a rule stand in the open so that an
engine may take the same step with a kernel of its own.

A client that has run out of text before its neighbours is *inactive* for the rest of the epoch: it takes no step, not
even with momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from keyfed.federated.spec import Schedule
from keyfed.federated.types import Gradient, Objective, Params, Solution, Solver


class Tally:
    """Counts nats and tokens: the loss reported is the last epoch's mean per token, never a mean of means.

    A client that does fewer epochs than its neighbours reports the last one it took part in. Tensors are changed in
    place, so that a captured step goes on counting.
    """

    def __init__(self, clients: int, device: torch.device | str = "cpu") -> None:
        self.epoch = torch.zeros(2, clients, dtype=torch.float64, device=device)  # nats and tokens
        self.worked = torch.zeros(clients, dtype=torch.float64, device=device)
        self._last = torch.zeros_like(self.epoch)
        self.steps: list[list[Tensor]] = []  # nats, hits and tokens of every step, [3, m], where hits are counted

    def start_epoch(self) -> None:
        """Begin an epoch."""
        self._close()
        self.epoch.zero_()
        self.steps.append([])

    def add(self, nats: Tensor, tokens: Tensor, hits: Tensor | None = None) -> None:
        """Count one step; where its hits are counted too, it is kept as a step of the curve."""
        self.epoch.add_(torch.stack([nats.double(), tokens.double()]))
        self.worked.add_(tokens)
        if hits is not None:
            self.steps[-1].append(torch.stack([nats.double(), hits.double(), tokens.double()]))

    def clear(self) -> None:
        """Forget everything."""
        for counts in (self.epoch, self.worked, self._last):
            counts.zero_()
        self.steps = []

    def take(self, other: Tally, order: Tensor) -> None:
        """Become another tally, whose clients stand in another order."""
        for mine, theirs in ((self.epoch, other.epoch), (self.worked, other.worked), (self._last, other._last)):
            mine.copy_(theirs[..., order])

    def first(self, clients: int) -> Tally:
        """The tally of the first clients; it counts into the same tensors."""
        view = Tally(0)
        view.epoch, view.worked, view._last = self.epoch[:, :clients], self.worked[:clients], self._last[:, :clients]
        return view

    def _close(self) -> None:
        self._last.copy_(torch.where(self.epoch[1] > 0, self.epoch, self._last))

    def solution(self, upload: Params, objective: Objective) -> Solution:
        """Return the uploads with what was counted."""
        self._close()
        nats, tokens = self._last
        whole = objective.whole.to(tokens) * (self.worked > 0)
        solution = Solution(upload, nats / tokens.clamp(min=1), whole, self.worked)
        if not any(self.steps):
            return solution
        none = self.epoch.new_zeros(0, 3, len(self.worked))
        return solution._replace(curve=tuple(torch.stack(epoch) if epoch else none for epoch in self.steps))


@dataclass(frozen=True, slots=True)
class ClientBatch:
    """The tensors of stacked clients while they train; every step changes them in place.

    Attributes:
      local: weights w_k, [m, …].
      theta: θ that a proximal term holds them near; not stacked.
      dual: the linear term y_k, or None.
      memory: what the rule remembers, see `Descent.begin`.
      eta: each client's step size, [m].
    """

    local: Params
    theta: Params
    dual: Params | None
    memory: Params
    eta: Tensor
    tally: Tally

    def first(self, clients: int) -> ClientBatch:
        """The first clients, in the same tensors."""

        def part(stacked: Params) -> Params:
            return {name: t[:clients] for name, t in stacked.items()}

        dual = None if self.dual is None else part(self.dual)
        eta, tally = self.eta[:clients], self.tally.first(clients)
        return ClientBatch(part(self.local), self.theta, dual, part(self.memory), eta, tally)

    def like(self, clients: int) -> ClientBatch:
        """As many tensors of the same kinds for so many clients, all zero."""

        def zeros(stacked: Params) -> Params:
            return {name: t.new_zeros(clients, *t.shape[1:]) for name, t in stacked.items()}

        theta = {name: torch.zeros_like(p) for name, p in self.theta.items()}
        dual = None if self.dual is None else zeros(self.dual)
        eta, tally = self.eta.new_zeros(clients), Tally(clients, self.eta.device)
        return ClientBatch(zeros(self.local), theta, dual, zeros(self.memory), eta, tally)


@dataclass(frozen=True, slots=True)
class SgdRule:
    """Numbers of `sgd_move`."""

    momentum: float
    clip: float | None
    weight_decay: float
    mu: float


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Numbers of `adam_move`."""

    beta1: float
    beta2: float
    epsilon: float
    clip: float | None
    mu: float


class Descent(NamedTuple):
    """A local optimiser as a value.

    Attributes:
      rule: its numbers; None for a descent that only `move` knows how to take.
      begin: weights → what is remembered before the first step; tensors, changed in place by every step.
      move: (block, gradient) → nothing: one step in place. It may be captured: no tensor's value may be read on a GPU.
      eta: round → step size.
      epochs: passes over the client's text.
    """

    rule: SgdRule | AdamRule | None
    begin: Callable[[Params], Params]
    move: Callable[[ClientBatch, Gradient], None]
    eta: Callable[[int], float]
    epochs: int


def descend(
    descent: Descent, start: Params, theta: Params, objective: Objective, round: int, dual: Params | None = None
) -> tuple[Params, Tally]:
    """Take a descent's epochs from `start`, which is used up; return the weights and what was counted."""
    like = next(iter(start.values()))
    eta = torch.full((objective.clients,), descent.eta(round), dtype=torch.float64)
    if objective.pace is not None:
        eta = eta * objective.pace.to(eta)
    tally = Tally(objective.clients, like.device)
    block = ClientBatch(start, theta, dual, descent.begin(start), eta.to(like), tally)
    objective.run_steps(block, descent)
    return block.local, block.tally


def run_steps(objective: Objective, block: ClientBatch, descent: Descent) -> None:
    """Take every step of a descent, one after the other: the plain form of `Objective.run_steps`."""
    for epoch in range(descent.epochs):
        block.tally.start_epoch()
        for step in objective.steps(epoch):
            gradient = step(block.local)
            block.tally.add(gradient.nats, gradient.tokens, gradient.hits)
            descent.move(block, gradient)


def per_client(numbers: Tensor, like: Tensor) -> Tensor:
    """View [m] numbers so that they multiply a stacked tensor [m, …]."""
    return numbers.reshape([-1] + [1] * (like.dim() - 1))


def gradient_norm(grads: Params) -> Tensor:
    """Return each client's Euclidean norm over all layers, [m]."""
    norms = [torch.linalg.vector_norm(g.reshape(g.shape[0], -1), dim=1) for g in grads.values()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return norm


def clip_scale(norm: Tensor, most: float) -> Tensor:
    """Return the factor that brings a norm down to at most `most`, [m]."""
    return (most / norm.clamp(min=1e-12)).clamp(max=1.0)


def clip_gradients(grads: Params, most: float | None) -> None:
    """Scale each client's gradient in place so that its norm is at most `most`; None leaves it alone."""
    if most is None:
        return
    scale = clip_scale(gradient_norm(grads), most)
    for g in grads.values():
        g.mul_(per_client(scale, g))


def _pull(grads: Params, block: ClientBatch, active: Tensor, mu: float) -> None:
    """Add μ(w − θ) + y, the gradient of ⟨y, w⟩ + (μ/2)‖w − θ‖², in place; who is inactive is left alone."""
    for name, g in grads.items():
        if mu:
            g.addcmul_(block.local[name] - block.theta[name], per_client(active.to(g), g), value=mu)
        if block.dual is not None:
            g.addcmul_(block.dual[name], per_client(active.to(g), g))


def _alone(block: ClientBatch, gradient: Gradient) -> bool:
    """One active client on a CPU: its step size may be read as a number, which saves a pass."""
    return len(block.eta) == 1 and block.eta.device.type == "cpu" and float(gradient.tokens) > 0


def sgd(rule: SgdRule, eta: Callable[[int], float], epochs: int) -> Descent:
    """E epochs of `sgd_move`."""

    def begin(local: Params) -> Params:
        return {name: torch.zeros_like(w) for name, w in local.items()} if rule.momentum else {}

    return Descent(rule, begin, partial(sgd_move, rule), eta, epochs)


def sgd_move(rule: SgdRule, block: ClientBatch, gradient: Gradient) -> None:
    r"""One step of stochastic gradient descent.

    .. math::  g ← \mathrm{clip}(∇f_k(w)) + y_k + μ(w − θ) + λ w,\; v ← m v + g,\; w ← w − η v
    """
    grads = gradient.grads
    active = (gradient.tokens > 0).to(block.eta)
    clip_gradients(grads, rule.clip)
    _pull(grads, block, active, rule.mu)
    friction = rule.momentum**active  # who is inactive keeps its velocity
    size, alone = active * block.eta, _alone(block, gradient)
    for name, g in grads.items():
        if rule.weight_decay:
            g.addcmul_(block.local[name], per_client(active, g), value=rule.weight_decay)
        if rule.momentum and alone:
            g = torch.add(g, block.memory[name], alpha=rule.momentum, out=block.memory[name])
        elif rule.momentum:
            g = block.memory[name].mul_(per_client(friction, g)).add_(g)
        if alone:
            block.local[name].add_(g, alpha=-float(block.eta))
        else:
            block.local[name].addcmul_(g, per_client(size, g), value=-1)


def adam(rule: AdamRule, eta: Callable[[int], float], epochs: int) -> Descent:
    """E epochs of `adam_move`; moments start at zero."""

    def begin(local: Params) -> Params:
        like = next(iter(local.values()))
        return {
            **{f"first/{name}": torch.zeros_like(w) for name, w in local.items()},
            **{f"second/{name}": torch.zeros_like(w) for name, w in local.items()},
            "taken": torch.zeros(like.shape[0], dtype=torch.float64, device=like.device),
        }

    return Descent(rule, begin, partial(adam_move, rule), eta, epochs)


def adam_sizes(rule: AdamRule, taken: Tensor, active: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return each client's step size with both bias corrections, and ε for it, [m].

    .. math::  η\,\frac{m/c_1}{\sqrt{v/c_2} + ε} = η\frac{\sqrt{c_2}}{c_1} · \frac{m}{\sqrt v + ε\sqrt{c_2}},\quad
               c = 1 − β^t
    """
    t = taken.clamp(min=1)
    root = (1 - rule.beta2**t).sqrt()
    return (active * eta * root / (1 - rule.beta1**t)).to(eta), (rule.epsilon * root).to(eta)


def adam_move(rule: AdamRule, block: ClientBatch, gradient: Gradient) -> None:
    r"""One step of Adam, with bias correction as in `torch.optim.Adam`.

    .. math::  m ← β_1 m + (1−β_1) g,\; v ← β_2 v + (1−β_2) g^2,\;
               w ← w − η\,\frac{m/(1−β_1^t)}{\sqrt{v/(1−β_2^t)} + ε}

    g is the clipped gradient plus y + μ(w − θ), as in `sgd_move`; t counts each client's own active steps.
    """
    grads = gradient.grads
    active = (gradient.tokens > 0).to(block.eta)
    clip_gradients(grads, rule.clip)
    _pull(grads, block, active, rule.mu)
    block.memory["taken"].add_(active)
    size, floor = adam_sizes(rule, block.memory["taken"], active, block.eta)
    keep1, keep2 = rule.beta1**active, rule.beta2**active  # who is inactive keeps its moments
    alone = _alone(block, gradient)
    for name, g in grads.items():
        m = block.memory[f"first/{name}"].mul_(per_client(keep1, g)).add_(g, alpha=1 - rule.beta1)
        v = block.memory[f"second/{name}"].mul_(per_client(keep2, g)).addcmul_(g, g, value=1 - rule.beta2)
        denominator = v.sqrt().add_(per_client(floor, v))
        if alone:
            block.local[name].addcdiv_(m, denominator, value=-float(size))
        else:
            block.local[name].sub_(m.div(denominator).mul_(per_client(size, m)))


def total_gradient() -> Descent:
    """One epoch that adds up tokens · gradient at weights that do not move."""

    def begin(local: Params) -> Params:
        return {name: torch.zeros_like(w) for name, w in local.items()}

    def move(block: ClientBatch, gradient: Gradient) -> None:
        for name, g in gradient.grads.items():
            block.memory[name].addcmul_(g, per_client(gradient.tokens.to(g), g))

    return Descent(None, begin, move, lambda round: 0.0, 1)


_STILL = Descent(None, lambda local: {}, lambda block, gradient: None, lambda round: 0.0, 1)


def loss_of(local: Params, theta: Params, objective: Objective) -> Tensor:
    """Return each client's mean nats per token on its own text, by a pass with dropout that moves nothing."""
    like = next(iter(local.values()))
    tally = Tally(objective.clients, like.device)
    objective.run_steps(ClientBatch(local, theta, None, {}, like.new_zeros(objective.clients), tally), _STILL)
    return tally.solution({}, objective).loss


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
        self.clients, self.steps, self.run_steps = objective.clients, objective.steps, objective.run_steps
        pace = torch.full((self.clients,), factor, dtype=torch.float64)
        self.pace: Tensor | None = pace if objective.pace is None else pace * objective.pace.to(pace)
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
