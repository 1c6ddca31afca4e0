"""Learning curves: every local step against one torch run per client, on every way a client trains; not a bit moves."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from keyfed.engine.kernels.step import count_hits, fill_copies, layouts, make_copies, widened
from keyfed.engine.problem import Problem, TextObjective, solve_block
from keyfed.engine.simulate import Simulation
from keyfed.engine.task import CohortCurves, joined_curves, unstack
from keyfed.federated.cohort import Work
from keyfed.federated.methods import METHODS, build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec
from keyfed.model import language_model as lm
from keyfed.model.language_model import init_params

from .oracle import Local, solve_one
from .test_modules import Cells, Copy, with_module
from .test_stacking import CASES, CIFG, GRU, LSTM, SENTENCES, SIZES, STREAM, VOCAB, method_of, problem_of

EVERYBODY = range(len(SIZES))
NAMES = [f"client{k}" for k in EVERYBODY]
TWICE = Local(lr=0.5, momentum=0.5, clip=0.25, epochs=2)


def counted(problem: Problem) -> Problem:
    return replace(problem, curves=True)


def curves_of(problem: Problem, theta, clients, how: Local, works=None):
    solution = solve_block(problem, theta, clients, method_of(how), 2, works)
    return unstack(solution.curve, len(clients))


def assert_curve(got, want, close: float) -> None:
    """Steps behind a client's last are empty; the others are the reference's."""
    assert len(got) == len(want)
    for steps, expected in zip(got, want, strict=True):
        reference = np.array(expected, dtype=np.float64).reshape(-1, 3)
        assert not steps[len(reference) :].any()
        np.testing.assert_allclose(steps[: len(reference), 0], reference[:, 0], rtol=close)
        np.testing.assert_array_equal(steps[: len(reference), 1:], reference[:, 1:])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_step_of_every_client_is_that_of_one_torch_run(case):
    problem, theta = counted(problem_of(case.spec, case.batching)), init_params(case.spec, 3, torch.float64)
    got = curves_of(problem, theta, EVERYBODY, case.how)
    wanted = [solve_one(problem, theta, k, case.how, round=2).curve for k in EVERYBODY]
    assert sum(hits for curve in wanted for steps in curve for _, hits, _ in steps) > 0, "nothing was guessed"
    for curve, want in zip(got, wanted, strict=True):
        assert_curve(curve, want, 1e-9)


@pytest.mark.parametrize("batching", [STREAM, SENTENCES], ids=["stream", "sentences"])
@pytest.mark.parametrize("spec", [GRU, replace(LSTM, dropout=0.3)], ids=["gru", "lstm, dropout"])
def test_the_way_of_a_gpu_has_the_same_curves(monkeypatch, spec, batching):
    problem, theta = counted(problem_of(spec, batching)), init_params(spec, 3, torch.float64)
    works = [Work(), Work(epochs=1), Work(share=0.5), Work()]
    want = curves_of(problem, theta, EVERYBODY, TWICE, works)
    monkeypatch.setattr(TextObjective, "run_steps", lambda self, way, d: self._replay(spec, way, d))
    problem = counted(problem_of(spec, batching))
    curves_of(problem, theta, EVERYBODY, TWICE)  # leaves its traces in all places
    for got, expected in zip(curves_of(problem, theta, EVERYBODY, TWICE, works), want, strict=True):
        assert_curve(got, expected, 1e-9)
    few = curves_of(problem, theta, [2, 0], TWICE)  # fewer than there are places, the longer one last
    alone = [solve_one(problem, theta, k, TWICE, round=2).curve for k in (2, 0)]
    for got, expected in zip(few, alone, strict=True):
        assert_curve(got, expected, 1e-9)


def test_bf16_copies_never_guess_words_that_do_not_exist():
    """The copies' model is wider; their words beyond the vocabulary have a bias of −∞."""
    spec, m = widened(GRU), 2
    local = {name: torch.stack([p, -p]) for name, p in init_params(GRU, 3).items()}
    copies = make_copies(GRU, local)
    fill_copies(layouts(GRU), copies, local)
    assert spec.vocab > VOCAB
    features = torch.randn(m, 40, spec.width, generator=torch.Generator().manual_seed(1))
    features[..., GRU.width :] = 0
    weight, bias = lm.output_layer(spec, copies)
    own, own_bias = lm.output_layer(GRU, local)
    rounded = own.bfloat16().float()
    logits = torch.bmm(features[..., : GRU.width].bfloat16().float(), rounded.mT) + own_bias[:, None]
    targets = logits.argmax(-1)
    targets[:, ::3] = (targets[:, ::3] + 1) % VOCAB
    scale = torch.ones(m, 40)
    scale[1, :8] = 0  # padding
    right = (logits.argmax(-1) == targets) & (scale > 0)
    assert torch.equal(count_hits(features, weight, bias, targets, scale), right.sum(1).float())
    assert 0 < int(right.sum()) < m * 40


def test_logits_that_are_not_numbers_guess_nothing():
    features, weight = torch.full((1, 2, 3), torch.nan), torch.zeros(1, 5, 3)
    zero = torch.zeros(1, 2, dtype=torch.int64)
    assert float(count_hits(features, weight, torch.zeros(1, 5), zero, torch.ones(1, 2))) == 0


def test_a_users_module_is_counted_stacked_and_alone():
    problem = counted(with_module(problem_of(GRU, STREAM), lambda vocab: Cells(GRU)))
    theta = problem.spec.init_params(3)
    stacked = curves_of(problem, theta, [0, 2, 3], TWICE)
    for k, curve in zip((0, 2, 3), stacked, strict=True):
        (alone,) = curves_of(problem, theta, [k], TWICE)
        assert sum(epoch[:, 1].sum() for epoch in alone) > 0
        assert_curve(curve, alone, 1e-4)


def test_a_users_module_has_the_curves_of_our_model():
    ours = counted(problem_of(GRU, STREAM))
    theta = init_params(GRU, 3)
    theirs = with_module(ours, lambda vocab: Copy(GRU))
    (got,), (want,) = (curves_of(p, theta, [0], TWICE) for p in (theirs, ours))
    assert_curve(got, want, 1e-4)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_counting_does_not_move_a_bit(name):
    method = build_method(MethodSpec(name))
    theta = init_params(replace(CIFG, dropout=0.2), 1)
    states = []
    for curves in (False, True):
        problem = replace(problem_of(replace(CIFG, dropout=0.2), STREAM), curves=curves)
        state = initial_state(method, theta)
        with Simulation(problem, block=3) as simulation:
            for _ in range(2):
                state, _ = run_round(method, state, NAMES, simulation)
            assert (simulation.curves is not None) == curves
        states.append(state)
    for plain, with_curves in zip(*(s.params.values() for s in states), strict=True):
        assert torch.equal(plain, with_curves)


def test_the_last_epoch_is_the_loss_that_the_round_reports():
    method, theta = build_method(MethodSpec("fedavg", {"epochs": 3, "batch_size": 2})), init_params(GRU, 1)
    with Simulation(counted(problem_of(GRU, STREAM)), block=3) as simulation:
        _, summary = run_round(method, initial_state(method, theta), NAMES, simulation)
        assert simulation.curves is not None
        line = simulation.curves.line()
    assert line["clients"] == len(SIZES)
    assert line["epoch"]["loss"][-1] == pytest.approx(summary.loss, rel=1e-12)
    assert sum(line["epoch"]["tokens"]) == sum(line["batch"]["tokens"]) == summary.worked
    assert line["epoch"]["clients"] == [len(SIZES)] * 3
    assert line["batch"]["clients"][0] == len(SIZES)
    assert min(line["batch"]["clients"]) == 1, "clients with less text have dropped out"
    by_client = line["by_client"].values()
    for number in range(3):
        steps = [k for k, epoch in enumerate(line["batch"]["epoch"]) if epoch == number + 1]
        tokens = [line["batch"]["tokens"][k] for k in steps]
        for key in ("loss", "accuracy"):
            of_steps = np.average([line["batch"][key][k] for k in steps], weights=tokens)
            of_clients = np.average(
                [c[key][number] for c in by_client], weights=[c["tokens"][number] for c in by_client]
            )
            assert line["epoch"][key][number] == pytest.approx(of_steps, rel=1e-12)
            assert line["epoch"][key][number] == pytest.approx(of_clients, rel=1e-12)
    assert line["epoch"]["loss"] == sorted(line["epoch"]["loss"], reverse=True), "it learns"


@pytest.mark.usefixtures("workers_are_forked")
def test_blocks_workers_and_parts_give_the_same_line():
    method, theta = build_method(MethodSpec("fedavg", {"epochs": 2, "batch_size": 2})), init_params(GRU, 1)
    problem = counted(problem_of(GRU, STREAM))
    assert pickle.loads(pickle.dumps(problem)).curves
    lines, numbers = [], []
    for block, workers, cohort in (
        (4, 1, NAMES),
        (1, 1, NAMES),
        (1, 2, NAMES),
        (4, 1, NAMES[::2]),
        (4, 1, NAMES[1::2]),
    ):
        with Simulation(problem, block=block, workers=workers) as simulation:
            simulation.train(theta, cohort, method, 0)
            assert simulation.curves is not None
            lines.append(simulation.curves.line())
            numbers.append(simulation.curves.numbers())
    joined = joined_curves([*numbers[3:], None], NAMES)
    assert joined is not None
    for line in (*lines[1:3], joined.line()):
        assert list(line["by_client"]) == NAMES
        for part in ("batch", "epoch"):
            assert line[part].keys() == lines[0][part].keys()
            for key, values in line[part].items():
                assert values == pytest.approx(lines[0][part][key], rel=1e-5)
    assert lines[1] == lines[2], "two processes, other bits"
    assert joined_curves([None, None], NAMES) is None


def test_epochs_that_nobody_took_are_not_told():
    curves = CohortCurves()
    curves.add("ann", (np.array([[2.0, 1.0, 2.0]]), np.zeros((0, 3))))
    assert curves.line()["epoch"] == {"loss": [1.0], "accuracy": [0.5], "tokens": [2], "clients": [1]}
    assert CohortCurves().line()["batch"]["loss"] == []
