"""Clients whose loss is a quadratic, so that the central optimum is known in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from keyfed.engine.simulate import Simulation
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.descent import run_steps
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.types import Gradient, Method, Params, State

DIMENSIONS = 4


@dataclass(frozen=True)
class Quadratic:
    """f_k(w) = ½ (w − b_k)ᵀ A_k (w − b_k), over two layers of two numbers; client k has `tokens[k]` tokens."""

    matrix: torch.Tensor  # [K, 4, 4]
    centre: torch.Tensor  # [K, 4]
    tokens: tuple[int, ...]
    seed: int = 3
    device: str = "cpu"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"q{k}" for k in range(len(self.tokens)))

    def objective(self, clients, round, rows, works=None, epochs=1) -> Bowl:
        return Bowl(self, list(clients), list(works or [Work()] * len(clients)), epochs)

    def optimum(self, alpha: list[float] | None = None) -> torch.Tensor:
        """argmin Σ α_k f_k."""
        weights = torch.tensor(alpha or self.tokens, dtype=torch.float64)[:, None, None] * self.matrix
        return torch.linalg.solve(weights.sum(0), (weights @ self.centre[:, :, None]).sum(0))[:, 0]


class Bowl:
    """The objective of some of the clients; an epoch is one step with the exact gradient."""

    run_steps = run_steps

    def __init__(self, problem: Quadratic, clients: list[int], works: list[Work], epochs: int) -> None:
        self.clients = len(clients)
        self.pace = None if all(w.pace == 1 for w in works) else torch.tensor([w.pace for w in works])
        self._matrix, self._centre = problem.matrix[clients], problem.centre[clients]
        self._tokens = self.whole = torch.tensor([problem.tokens[k] for k in clients], dtype=torch.float64)
        passes = [math.ceil(w.share * (w.epochs or epochs) - 1e-9) for w in works]
        self._passes = torch.tensor([max(1, p) for p in passes])

    def steps(self, epoch):
        yield partial(self._gradient, (self._passes > epoch).double())

    def _gradient(self, active: torch.Tensor, params: Params) -> Gradient:
        w = torch.cat([params["a"], params["b"]], 1)
        gradient = (self._matrix @ (w - self._centre)[:, :, None])[:, :, 0] * active[:, None]
        loss = 0.5 * ((w - self._centre) * (self._matrix @ (w - self._centre)[:, :, None])[:, :, 0]).sum(1)
        tokens = self._tokens * active
        return Gradient(loss * tokens, tokens, {"a": gradient[:, :2].clone(), "b": gradient[:, 2:].clone()})


def quadratic(clients: int = 8, seed: int = 0, condition: float = 3.0) -> Quadratic:
    """Clients whose optima lie apart; eigenvalues of A_k between 1/2 and condition/2."""
    random = torch.Generator().manual_seed(seed)
    turns = torch.linalg.qr(torch.randn(clients, DIMENSIONS, DIMENSIONS, generator=random, dtype=torch.float64)).Q
    values = 0.5 + 0.5 * (condition - 1) * torch.rand(clients, DIMENSIONS, generator=random, dtype=torch.float64)
    centres = 3 * torch.randn(clients, DIMENSIONS, generator=random, dtype=torch.float64)
    sizes = torch.randint(5, 50, (clients,), generator=random).tolist()
    return Quadratic(turns @ (values[:, :, None] * turns.mT), centres, tuple(sizes))


def origin() -> Params:
    return {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}


def flat(params: Params) -> torch.Tensor:
    return torch.cat([params["a"], params["b"]])


def run(
    problem: Quadratic,
    method: Method,
    rounds: int,
    *,
    present: float = 1.0,
    lost: float = 0.0,
    epochs: tuple[int, int] | None = None,
    least_work: float = 1.0,
    start: State | None = None,
    simulation: Simulation | None = None,
) -> tuple[State, list]:
    """Run rounds in which each client is called with chance `present` and its upload lost with chance `lost`."""
    random = torch.Generator().manual_seed(11)

    def dice() -> float:
        return float(torch.rand((), generator=random))

    state, summaries = start or initial_state(method, origin()), []
    federation = simulation or Simulation(problem, block=len(problem.names))
    for _ in range(rounds):
        cohort = [name for name in problem.names if dice() < present]
        fates = {}
        for name in cohort:
            passes = None
            if epochs is not None:
                passes = epochs[0] + int(dice() * (epochs[1] - epochs[0] + 1))
            gone = "dropped before upload" if dice() < lost else None
            share = least_work + (1 - least_work) * dice()
            fates[name] = Fate(problem.names.index(name), Work(epochs=passes, share=share), 0.0, gone)
        federation.expect(fates)
        state, summary = run_round(method, state, cohort, federation)
        summaries.append(summary)
    if simulation is None:
        federation.close()
    return state, summaries
