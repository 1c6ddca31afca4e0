"""A stacked cohort of m clients equals m runs of the `torch.nn` oracle, one client each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from keyfed.engine.problem import Problem, make_store, solve_block
from keyfed.federated import descent as descents
from keyfed.federated import server
from keyfed.federated.descent import AdamRule, SgdRule
from keyfed.federated.local import from_theta
from keyfed.federated.types import Method
from keyfed.federated.weigh import by_tokens
from keyfed.model.language_model import ModelSpec, init_params
from keyfed.text.batches import Batching
from keyfed.text.vocab import EOS, SPECIALS

from .oracle import Local, solve_one

VOCAB = 23
SIZES = (61, 9, 34, 20)  # the second has less than one window, none divides evenly


def stream(tokens: int, seed: int) -> np.ndarray:
    """Random words with line ends in between."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(len(SPECIALS), VOCAB, tokens)
    ids[rng.random(tokens) < 0.15] = EOS
    return ids.astype(np.int32)


def problem_of(spec: ModelSpec, batching: Batching, sizes: tuple[int, ...] = SIZES, seed: int = 11) -> Problem:
    streams = [stream(n, 100 + k) for k, n in enumerate(sizes)]
    return Problem(spec, make_store(streams, [f"client{k}" for k in range(len(sizes))]), batching, seed)


def method_of(how: Local) -> Method:
    if how.optimiser == "adam":
        descent = descents.adam(AdamRule(0.9, 0.999, 1e-8, how.clip, 0.0), lambda round: how.lr, how.epochs)
    else:
        rule = SgdRule(how.momentum, how.clip, how.weight_decay, 0.0)
        descent = descents.sgd(rule, lambda round: how.lr, how.epochs)
    solver = from_theta(descent)
    return Method("test", solver, by_tokens(), server.sgd(1.0), batch_size=how.rows, epochs=how.epochs)


pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    how: Local
    batching: Batching


GRU = ModelSpec("gru", "gru", VOCAB, embed=6, hidden=6, tied=True)
LSTM = ModelSpec("lstm", "lstm", VOCAB, embed=5, hidden=7, layers=2)
CIFG = ModelSpec("cifg", "cifg", VOCAB, embed=5, hidden=8, projection=5, tied=True, biases=1)
NWP = ModelSpec("nwp", "lstm", VOCAB, embed=5, hidden=7, dense=4, biases=1)
STREAM = Batching("stream", 1, 10)
SENTENCES = Batching("sentences", 1, 10)
PACKED = Batching("packed", 1, 5)  # lines longer than a window go on in the next
CLIPPED = Local(lr=0.5, clip=0.25)

CASES = {
    "gru tied": Case(GRU, Local(lr=0.5), STREAM),
    "gru untied, one bias": Case(replace(GRU, tied=False, biases=1), CLIPPED, STREAM),
    "gru tied, sentences": Case(GRU, replace(CLIPPED, epochs=2), SENTENCES),
    "gru, weight decay, momentum, 2 epochs": Case(
        replace(GRU, tied=False), replace(CLIPPED, weight_decay=0.01, momentum=0.8, epochs=2), STREAM
    ),
    "lstm": Case(LSTM, Local(lr=0.5), STREAM),
    "lstm, momentum": Case(LSTM, replace(CLIPPED, momentum=0.9), STREAM),
    "lstm, momentum, 2 epochs": Case(LSTM, replace(CLIPPED, momentum=0.9, epochs=2), STREAM),
    "lstm, dropout": Case(replace(LSTM, dropout=0.3), CLIPPED, STREAM),
    "lstm, dropout, 2 epochs, sentences": Case(replace(LSTM, dropout=0.3), replace(CLIPPED, epochs=2), SENTENCES),
    "lstm tied, adam": Case(replace(LSTM, embed=7, tied=True), Local("adam", lr=1e-3, clip=0.25), STREAM),
    "lstm, projected, packed": Case(replace(CIFG, cell="lstm"), replace(CLIPPED, epochs=2), PACKED),
    "cifg": Case(CIFG, CLIPPED, STREAM),
    "cifg untied, two biases, momentum, dropout": Case(
        replace(CIFG, tied=False, biases=2, dropout=0.3), replace(CLIPPED, momentum=0.5), SENTENCES
    ),
    "cifg 2 layers, adam, 2 epochs": Case(
        replace(CIFG, layers=2), Local("adam", lr=1e-3, clip=0.25, epochs=2, rows=3), STREAM
    ),
    "cifg, everything": Case(
        replace(CIFG, dropout=0.3),
        replace(CLIPPED, momentum=0.9, epochs=2, rows=3),
        replace(STREAM, max_sentences=6, max_tokens=40),
    ),
    "nwp": Case(NWP, CLIPPED, STREAM),
    "nwp tied, sentences": Case(replace(NWP, dense=5, tied=True), CLIPPED, SENTENCES),
    "nwp, dropout, adam, 2 epochs, sentences": Case(
        replace(NWP, dropout=0.3), Local("adam", lr=1e-3, epochs=2, rows=3), SENTENCES
    ),
    "gru tied, packed": Case(GRU, replace(CLIPPED, epochs=2), PACKED),
    "gru untied, one bias, 2 layers, packed": Case(
        replace(GRU, tied=False, biases=1, layers=2), replace(CLIPPED, momentum=0.8, rows=3), PACKED
    ),
    "lstm, dropout, 2 epochs, packed": Case(replace(LSTM, dropout=0.3), replace(CLIPPED, epochs=2), PACKED),
    "cifg, everything, packed": Case(
        replace(CIFG, dropout=0.3),
        replace(CLIPPED, momentum=0.9, epochs=2, rows=3),
        replace(PACKED, max_sentences=6, max_tokens=40),
    ),
    "cifg untied, 2 layers, two biases, packed": Case(
        replace(CIFG, layers=2, tied=False, biases=2), Local("adam", lr=1e-3, clip=0.25, rows=4), PACKED
    ),
    "nwp, packed": Case(NWP, replace(CLIPPED, rows=4), PACKED),
    "nwp, pairs": Case(NWP, replace(CLIPPED, rows=4), Batching.of("pairs", 10, None, None)),
}


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_stacked_cohort_equals_one_torch_run_per_client(case, dtype, close):
    problem = problem_of(case.spec, case.batching)
    theta = init_params(case.spec, seed=3, dtype=dtype)
    members = range(len(SIZES))
    stacked = solve_block(problem, theta, members, method_of(case.how), round=2)
    clipped = 0
    for k in members:
        alone = solve_one(problem, theta, k, case.how, round=2)
        clipped += alone.clipped
        assert int(stacked.tokens[k]) == alone.tokens
        assert int(stacked.worked[k]) == alone.worked
        assert float(stacked.loss[k]) == pytest.approx(alone.loss, abs=close)
        assert list(stacked.upload) == list(theta)
        for name, want in alone.upload.items():
            got = stacked.upload[name][k]
            assert got.dtype == dtype
            assert float((got - want).abs().max()) <= close, f"client {k}, {name}"
    assert clipped or case.how.clip is None, "the case is meant to clip"


def test_the_order_in_a_block_does_not_matter():
    problem = problem_of(CIFG, STREAM)
    theta = init_params(CIFG, seed=3, dtype=torch.float64)
    method = method_of(replace(CLIPPED, momentum=0.9))
    there = solve_block(problem, theta, [0, 1, 2, 3], method, round=0)
    back = solve_block(problem, theta, [3, 2, 1, 0], method, round=0)
    for name, upload in there.upload.items():
        torch.testing.assert_close(upload, back.upload[name].flip(0), rtol=0, atol=1e-12)


def test_theta_is_not_touched():
    problem = problem_of(LSTM, STREAM)
    theta = init_params(LSTM, seed=3)
    before = {name: p.clone() for name, p in theta.items()}
    solve_block(problem, theta, [0, 1], method_of(replace(CLIPPED, momentum=0.9)), round=0)
    solve_block(problem, theta, [0], method_of(Local("adam", lr=1e-2)), round=0)
    for name, p in theta.items():
        assert torch.equal(p, before[name])
