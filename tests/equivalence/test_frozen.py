"""A frozen layer does not move, whatever the optimiser does; the others train as if it were a constant."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from keyfed.engine.kernels import capture
from keyfed.engine.problem import Problem, TextObjective, solve_block
from keyfed.engine.simulate import Simulation
from keyfed.federated.methods import METHODS, build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec
from keyfed.model.language_model import ModelSpec, init_params

from . import oracle
from .oracle import Local, solve_one
from .test_stacking import CIFG, GRU, LSTM, SIZES, STREAM, method_of, problem_of

EMBEDDING = "embedding.weight"
FROZEN = frozenset({EMBEDDING})
NAMES = [f"client{k}" for k in range(len(SIZES))]
FEW = [1]  # a client with little text, for Triton's interpreter
STATELESS = [name for name in METHODS if build_method(MethodSpec(name)).solver.start is None]


def frozen_problem(spec: ModelSpec, rounds: int = 2) -> Problem:
    return replace(problem_of(spec, STREAM), frozen=FROZEN, frozen_rounds=rounds)


class Constant(oracle.Oracle):
    """The reference with an embedding that torch does not differentiate."""

    def __init__(self, spec, theta):
        super().__init__(spec, theta)
        self.embedding.weight.requires_grad_(False)


HOWS = {
    "sgd with everything": Local(lr=0.5, momentum=0.9, weight_decay=0.05, clip=0.25, epochs=2),
    "adam": Local("adam", lr=1e-2, clip=0.25, epochs=2),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
@pytest.mark.parametrize("spec", [GRU, LSTM, replace(CIFG, tied=False)], ids=["tied", "lstm", "cifg"])
def test_frozen_clients_equal_torch_with_a_constant_embedding(monkeypatch, spec, how):
    problem, theta = frozen_problem(spec), init_params(spec, 3, torch.float64)
    got = solve_block(problem, theta, range(len(SIZES)), method_of(how), 1)
    monkeypatch.setattr(oracle, "Oracle", Constant)
    for k in range(len(SIZES)):
        want = solve_one(problem, theta, k, how, round=1).upload
        assert set(want) == set(theta) - FROZEN
        for name, u in want.items():
            torch.testing.assert_close(got.upload[name][k], u, rtol=0, atol=1e-10)
            assert u.abs().max() > 1e-6
    assert got.upload[EMBEDDING].count_nonzero() == 0
    thawed = solve_block(problem, theta, range(len(SIZES)), method_of(how), 2)
    assert thawed.upload[EMBEDDING].count_nonzero() > 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # Triton's interpreter counts in numpy
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_on_a_track_the_frozen_layer_stays_too(monkeypatch, kernels, bf16):
    if kernels == "plain" and bf16:
        pytest.skip("bf16 needs Triton")
    if kernels == "triton":
        triton = pytest.importorskip("keyfed.engine.kernels.triton_launch")
        monkeypatch.setattr(capture, "kernels_for", lambda gpu: triton.TRITON)
    spec = replace(GRU, tied=False)
    monkeypatch.setattr(TextObjective, "run_steps", lambda self, way, d: self._replay(spec, way, d))
    problem = replace(frozen_problem(spec), precision="bf16" if bf16 else "fp32")
    theta = init_params(spec, 3)
    method = method_of(Local(lr=0.5, momentum=0.5, weight_decay=0.05, clip=0.25, epochs=1, rows=2))
    first = solve_block(problem, theta, FEW, method, 2)  # not frozen: leaves its traces in the places
    got = solve_block(problem, theta, FEW, method, 1)
    again = solve_block(problem, theta, FEW, method, 2)
    monkeypatch.undo()
    want = solve_block(frozen_problem(spec), theta, FEW, method, 1)
    for name, u in want.upload.items():
        if not bf16:  # in the interpreter bf16 is as far from fp32 without any frozen layer: only that it stays is seen
            torch.testing.assert_close(got.upload[name], u, rtol=2e-4, atol=2e-6)
        assert torch.equal(first.upload[name], again.upload[name])
    assert got.upload[EMBEDDING].count_nonzero() == 0
    assert first.upload[EMBEDDING].count_nonzero() > 0


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "int8"])
def test_with_every_method_theta_keeps_its_embedding_to_the_bit(name, compressed):
    spec = MethodSpec(name, keep=0.5, quantise="int8") if compressed else MethodSpec(name)
    method, problem = build_method(spec), frozen_problem(LSTM)
    state = initial_state(method, init_params(LSTM, 3))
    began = state.params
    with Simulation(problem, block=2) as federation:
        for _ in range(2):
            state, summary = run_round(method, state, NAMES, federation)
            assert not summary.refused
        assert torch.equal(state.params[EMBEDDING], began[EMBEDDING])
        assert all(not torch.equal(state.params[n], p) for n, p in began.items() if n not in FROZEN)
        assert all(bool(p.isfinite().all()) for p in state.params.values())
        state, _ = run_round(method, state, NAMES, federation)
    assert not torch.equal(state.params[EMBEDDING], began[EMBEDDING])


def test_another_process_freezes_the_same():
    there = pickle.loads(pickle.dumps(frozen_problem(GRU, 7)))
    assert (there.frozen, there.frozen_rounds) == (FROZEN, 7)
