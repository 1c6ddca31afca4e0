"""Tracks: staged text and fixed places give what steps one after the other give. Only graphs need a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keyfed.engine.kernels.capture import stage
from keyfed.engine.problem import Problem, make_store, solve_block
from keyfed.federated.cohort import Work
from keyfed.federated.methods import build_method
from keyfed.federated.spec import MethodSpec
from keyfed.model.language_model import ModelSpec, init_params
from keyfed.text.batches import Batching, stream_steps

GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no GPU"))]
SIZES = (150, 40, 333, 90, 201)


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [np.where(rng.random(n) < 0.1, 2, rng.integers(4, 30, n)).astype(np.int32) for n in SIZES]


def a_problem(device: str, kind: str, dropout: float, spec: ModelSpec | None = None) -> Problem:
    spec = spec or ModelSpec("s", "gru", vocab=30, embed=12, hidden=12, layers=2, tied=True, dropout=dropout)
    return Problem(spec, make_store(texts(), [f"c{k}" for k in range(len(SIZES))]), Batching(kind, 4, 7), 5, device)


def replayed(monkeypatch, problem: Problem) -> None:
    """Make clients on a CPU take the way of a GPU; only the capture is left out."""
    from keyfed.engine.problem import TextObjective

    monkeypatch.setattr(TextObjective, "run_steps", lambda self, way, d: self._replay(problem.spec, way, d))


METHODS = [
    MethodSpec("fedavg", {"optimiser": "sgd", "lr": 0.5, "momentum": 0.5, "epochs": 3}),
    MethodSpec("fedavg", {"optimiser": "adam", "lr": 0.01, "clip": 0.5, "epochs": 2}),
    MethodSpec("fedprox", {"optimiser": "sgd", "lr": 0.5, "mu": 0.1}),
    MethodSpec("fedsgd", {}),
    MethodSpec("fedadmm", {"epochs": 2}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", METHODS, ids=lambda s: f"{s.name}-{s.options.get('optimiser', '')}")
@pytest.mark.parametrize(("kind", "dropout"), [("stream", 0.0), ("sentences", 0.3), ("packed", 0.3)])
def test_a_block_on_a_track_is_the_block_step_by_step(monkeypatch, device, spec, kind, dropout):
    method, plain = build_method(spec), a_problem("cpu", kind, dropout)
    theta = init_params(plain.spec, 1)
    works = [Work(), Work(epochs=1), Work(share=0.5), Work(pace=0.5), Work()]
    want = solve_block(plain, theta, range(5), method, 3, works)
    wanted_of_few = solve_block(plain, theta, [2, 0], method, 3, works[1:3])
    problem = a_problem(device, kind, dropout)
    if device == "cpu":
        replayed(monkeypatch, problem)
    there = {name: p.to(device) for name, p in theta.items()}
    broken = {name: torch.full_like(p, torch.nan) for name, p in there.items()}
    solve_block(problem, broken, range(5), method, 2, works)  # leaves its traces in all places
    few = solve_block(problem, there, [2, 0], method, 3, works[1:3])
    for name, u in wanted_of_few.upload.items():
        torch.testing.assert_close(few.upload[name].cpu(), u, rtol=2e-4, atol=2e-6)
    got = solve_block(problem, there, range(5), method, 3, works)
    for name, u in want.upload.items():
        torch.testing.assert_close(got.upload[name].cpu(), u, rtol=2e-4, atol=2e-6)
    for counted in ("loss", "tokens", "worked"):
        torch.testing.assert_close(getattr(got, counted).cpu(), getattr(want, counted), rtol=1e-5, atol=1e-6)
    again = solve_block(problem, there, range(5), method, 3, works)
    assert all(torch.equal(again.upload[name], u) for name, u in got.upload.items()), "the same round, other bits"


@pytest.mark.parametrize("kind", ["sentences", "packed"])
def test_lines_in_another_order_each_epoch_are_staged_anew(monkeypatch, kind):
    method = build_method(MethodSpec("fedavg", {"optimiser": "sgd", "lr": 0.5, "epochs": 3}))
    plain, problem = a_problem("cpu", kind, 0.0), a_problem("cpu", kind, 0.0)
    theta = init_params(plain.spec, 1)
    want = solve_block(plain, theta, [2, 4], method, 3)
    replayed(monkeypatch, problem)
    got = solve_block(problem, theta, [2, 4], method, 3)
    for name, u in want.upload.items():
        torch.testing.assert_close(got.upload[name], u, rtol=2e-4, atol=2e-6)


def test_staged_steps_hold_every_token_once_and_shrink_with_those_at_work():
    clients = [stream_steps(t, 4, 7) for t in sorted(texts(), key=len, reverse=True)]
    staged = stage(clients, Batching("stream", 4, 7), capacity=5, device="cpu")
    assert len(staged) == max(len(c) for c in clients)
    assert sum(int((s.tokens[1] >= 0).sum()) for s in staged) == sum(len(t) - 1 for t in texts())
    widths = [s.tokens.shape[1] for s in staged]
    assert widths[0] == 5
    assert widths[-1] == 1
    assert widths == sorted(widths, reverse=True)
    assert [s.fresh for s in staged] == [True] + [False] * (len(staged) - 1)


def test_clients_that_stop_early_do_not_all_skip_the_same_lengths():
    problem = a_problem("cpu", "sentences", 0.0)
    twins = Problem(problem.spec, make_store([texts()[2]] * 2, ["a", "b"]), problem.batching, 5)
    whole, half = (
        twins.objective([0, 1], 3, 2, [Work(share=share)] * 2).epoch(0) for share in (1.0, 0.5)
    )  # fmt: skip
    widths = [[s.inputs.shape[1] for s in steps] for steps in whole]
    assert widths[0] == widths[1], "they visit lengths in the same order"
    assert [len(steps) for steps in half] == [-(-len(steps) // 2) for steps in whole]
    assert [s.inputs.shape[1] for s in half[0]] != [s.inputs.shape[1] for s in half[1]]


def test_a_track_laid_without_duals_is_not_taken_for_one_with_them(monkeypatch):
    from keyfed.federated.descent import descend
    from keyfed.federated.local import LocalOptions, local_descent, start_at

    problem = a_problem("cpu", "stream", 0.0)
    replayed(monkeypatch, problem)
    theta, descent = init_params(problem.spec, 1), local_descent(LocalOptions("sgd", lr=0.1, clip=None))
    moved = []
    for dual in (None, {name: torch.ones(2, *p.shape) for name, p in theta.items()}):
        objective = problem.objective([0, 2], 1, 4)
        moved.append(descend(descent, start_at(theta, 2), theta, objective, 1, dual)[0]["output.bias"])
    assert float((moved[0] - moved[1]).abs().max()) > 0.1
