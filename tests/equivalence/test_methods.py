"""Methods that must agree: limits, special cases, and the same method computed in another way."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.engine import task
from keyfed.engine.problem import Problem, make_store, solve_block
from keyfed.engine.simulate import Simulation
from keyfed.engine.sums.plain import RunningSum
from keyfed.federated import local, server, weigh
from keyfed.federated.methods import build_method, method_options
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Aggregate, Method, Params, Report, Share, State
from keyfed.model.language_model import ModelSpec, init_params
from keyfed.text.batches import Batching
from keyfed.text.vocab import EOS, SPECIALS
from tests.examples import examples

from .oracle import Local, client_epochs, train_client

VOCAB = 19
SPEC = ModelSpec("cifg", "cifg", VOCAB, embed=5, hidden=7, projection=5, tied=True, biases=1)
BATCHING = Batching("stream", 1, 8)


def stream(tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = rng.integers(len(SPECIALS), VOCAB, tokens)
    ids[rng.random(tokens) < 0.1] = EOS
    return ids.astype(np.int32)


def problem_of(sizes, spec: ModelSpec = SPEC, seeds=None) -> Problem:
    streams = [stream(n, s) for n, s in zip(sizes, seeds or range(len(sizes)), strict=True)]
    return Problem(spec, make_store(streams, [f"c{k}" for k in range(len(sizes))]), BATCHING, 5)


def theta_of(spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float64) -> Params:
    return init_params(spec, seed=2, dtype=dtype)


def method_of(name: str = "fedavg", **options) -> Method:
    """A method whose local solver is plain SGD unless said otherwise."""
    usual = {} if name == "fedsgd" else {"optimiser": "sgd", "lr": 2.0}
    known = method_options(name)
    return build_method(MethodSpec(name, {**{k: v for k, v in usual.items() if k in known}, **options}))


def rounds(problem: Problem, method: Method, theta: Params, n: int = 1, **simulation) -> tuple[State, list]:
    """Run n rounds over all clients through the simulation."""
    state, summaries = initial_state(method, theta), []
    with Simulation(problem, **simulation) as federation:
        for _ in range(n):
            state, summary = run_round(method, state, problem.store.names, federation)
            summaries.append(summary)
    return state, summaries


def aggregate_of(problem: Problem, method: Method, theta: Params, **simulation) -> Aggregate:
    with Simulation(problem, **simulation) as federation:
        reports = federation.train(theta, problem.store.names, method, 0)
        _, shares = method.mediator.weigh(method.mediator.init(), reports, list(theta))
        return federation.collect(shares)


def assert_equal(a: Params, b: Params, close: float) -> None:
    assert list(a) == list(b)
    for name, p in a.items():
        assert float((p - b[name]).abs().max()) <= close, name


def assert_moved(before: Params, after: Params) -> None:
    for name, p in before.items():
        assert not torch.equal(p, after[name]), f"{name} did not move"


# Limits


@pytest.mark.parametrize("rows", [1, 3])
def test_fedsgd_is_fedavg_of_one_full_batch_step(rows):
    sizes = [9, 7, 5] if rows == 1 else [25, 25, 9]  # each fits into one step of `rows` windows
    problem = problem_of(sizes)
    for k in range(len(sizes)):
        assert len(client_epochs(problem, k, rows, 1, 0)[0]) == 1
    theta = theta_of()
    a, (one,) = rounds(problem, method_of("fedsgd", lr=0.7, batch_size=rows), theta)
    b, (other,) = rounds(problem, method_of(lr=0.7, clip=None, batch_size=rows), theta)
    assert_equal(a.params, b.params, 1e-12)
    assert one.loss == pytest.approx(other.loss, abs=1e-12)
    assert_moved(theta, a.params)


def test_fedsgd_takes_the_gradient_of_all_a_clients_steps_at_theta():
    problem = problem_of([60])
    theta = theta_of()
    state, _ = rounds(problem, method_of("fedsgd", lr=0.7, batch_size=2), theta)
    (steps,) = client_epochs(problem, 0, 2, 1, 0)
    assert len(steps) > 1
    total = {name: torch.zeros_like(p) for name, p in theta.items()}
    # The state is carried through all steps, the parameters stand still: a step size of 1e-9 is as good as none.
    for n in range(1, len(steps) + 1):
        upto = train_client(SPEC, theta, [steps[:n]], Local(lr=1e-9)).upload
        before = train_client(SPEC, theta, [steps[: n - 1]], Local(lr=1e-9)).upload if n > 1 else None
        for name, u in upto.items():
            gradient = (u - (before[name] if before else 0)) / 1e-9
            total[name] += gradient * float(steps[n - 1].mask.sum())
    for name, p in theta.items():
        want = p + 0.7 * total[name] / 59
        assert float((state.params[name] - want).abs().max()) < 1e-6, name


@pytest.mark.parametrize("two_phases", [False, True])
def test_identical_clients_give_any_one_of_them(two_phases):
    theta = theta_of()
    method = method_of(lr=0.5, epochs=2, momentum=0.5, batch_size=2)
    if two_phases:
        method = replace(method, mediator=weigh.in_two_phases(method.mediator))
    many, _ = rounds(problem_of([40] * 5, seeds=[7] * 5), method, theta, 2)
    one, _ = rounds(problem_of([40], seeds=[7]), method, theta, 2)
    assert_equal(many.params, one.params, 1e-12)
    assert_moved(theta, many.params)


@settings(max_examples=10, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3))
def test_identical_clients_give_any_one_of_them_however_they_are_weighed(weights):
    theta = theta_of()
    names = {f"c{k}": w for k, w in enumerate(weights)}

    def share(report, layers):
        numbers = dict.fromkeys(layers, names[report.client])
        return Share(numbers, numbers)

    method = replace(method_of(lr=0.5, batch_size=2), mediator=weigh.separable(share))
    many, _ = rounds(problem_of([20] * 3, seeds=[7] * 3), method, theta)
    one, _ = rounds(problem_of([20], seeds=[7]), method, theta)
    assert_equal(many.params, one.params, 1e-12)


def test_one_client_is_central_sgd():
    problem = problem_of([61])  # 60 predictions divide into 3 rows: both ways of cutting give the same steps
    theta = theta_of()
    federated, ours = rounds(problem, method_of(lr=0.5, batch_size=3), theta, 3)
    central, theirs = rounds(replace(problem, sweep=60), method_of("central", lr=0.5, batch_size=3), theta, 3)
    assert_equal(federated.params, central.params, 1e-12)
    assert [s.loss for s in ours] == pytest.approx([s.loss for s in theirs], abs=1e-12)
    by_hand = train_client(SPEC, theta, client_epochs(problem, 0, 3, 3, 0), Local(lr=0.5, clip=1.0, epochs=3))
    assert_equal(federated.params, {n: p + by_hand.upload[n] for n, p in theta.items()}, 1e-12)
    assert ours[-1].loss == pytest.approx(by_hand.loss, abs=1e-12)


def test_the_average_is_weighted_by_tokens():
    problem = problem_of([50, 11, 23])
    theta = theta_of()
    method = method_of(lr=0.5, batch_size=2)
    state, (summary,) = rounds(problem, method, theta)
    alone = [solve_block(problem, theta, [k], method, 0) for k in range(3)]
    tokens = [49, 10, 22]  # a stream of n tokens predicts n − 1
    for name, p in theta.items():
        want = p + sum(n * a.upload[name][0] for n, a in zip(tokens, alone, strict=True)) / sum(tokens)
        assert float((state.params[name] - want).abs().max()) <= 1e-12
    nats = sum(n * float(a.loss) for n, a in zip(tokens, alone, strict=True))
    assert summary.loss == pytest.approx(nats / sum(tokens), abs=1e-12)
    assert summary.tokens == sum(tokens)
    want = sum(tokens) ** 2 / sum(n * n for n in tokens)
    assert all(e == pytest.approx(want) for e in summary.effective_clients.values())


def test_the_round_decays_the_step():
    problem = problem_of([9])
    theta = theta_of()
    method = method_of(lr=0.5, decay=0.5, clip=None)
    state, _ = rounds(problem, method, theta, 2)
    once, _ = rounds(problem, method_of(lr=0.5, clip=None), theta)
    twice, _ = rounds(problem, method_of(lr=0.25, clip=None), once.params)
    assert_equal(state.params, twice.params, 1e-12)


# The same sum in another way


def test_streamed_shares_equal_shares_in_two_phases():
    problem = problem_of([50, 11, 23, 31])
    theta = theta_of()
    method = method_of(lr=0.5, batch_size=2)
    later = replace(method, mediator=weigh.in_two_phases(method.mediator))
    assert later.mediator.share is None
    for block in (1, 3):
        streamed, one = rounds(problem, method, theta, 2, block=block)
        phased, other = rounds(problem, later, theta, 2, block=block)
        assert_equal(streamed.params, phased.params, 1e-12)
        assert one == other


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "options",
    [{"epochs": 1}, {"epochs": 2, "momentum": 0.9}, {"epochs": 2, "optimiser": "adam", "lr": 1e-3}],
    ids=["sgd", "momentum, 2 epochs", "adam, 2 epochs"],
)
def test_blocks_of_any_size_give_the_same_aggregate(options, dropout):
    spec = replace(SPEC, dropout=dropout)
    problem = problem_of([50, 11, 23, 31, 8], spec)
    theta = theta_of(spec, torch.float32)
    method = method_of(**({"lr": 0.5, "batch_size": 2} | options))
    whole = aggregate_of(problem, method, theta, block=1)
    for block in (2, 5, 8):
        other = aggregate_of(problem, method, theta, block=block)
        assert other.mass == whole.mass
        assert other.contributors == whole.contributors == problem.store.names
        assert_equal(other.mean(), whole.mean(), 1e-6)


@pytest.mark.usefixtures("workers_are_forked")
def test_worker_processes_change_nothing():
    spec = replace(SPEC, dropout=0.2)
    problem = problem_of([50, 11, 23, 31, 8, 17, 29], spec)
    theta = theta_of(spec, torch.float32)
    method = method_of(lr=0.5, batch_size=2, epochs=2, momentum=0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a run does
    try:
        alone, ours = rounds(problem, method, theta, 3, workers=1)
        together, theirs = rounds(problem, method, theta, 3, workers=2)
    finally:
        torch.set_num_threads(threads)
    for name, p in alone.params.items():
        assert torch.equal(p, together.params[name]), name
    assert ours == theirs


# Clients that must not enter the sum


def spoil(monkeypatch: pytest.MonkeyPatch, client: int, how: str) -> None:
    """Let one client return rubbish."""
    solve = task.solve_block

    def spoiled(problem, theta, clients, *rest):
        solution = solve(problem, theta, clients, *rest)
        if client in clients:
            k = list(clients).index(client)
            if how == "loss":
                solution.loss[k] = math.nan
            else:
                solution.upload["output.bias"][k, 3] = {"nan": math.nan, "inf": math.inf}[how]
        return solution

    monkeypatch.setattr(task, "solve_block", spoiled)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize(
    ("how", "reason"),
    [("loss", "non-finite report"), ("nan", "non-finite upload"), ("inf", "non-finite upload")],
)
@pytest.mark.parametrize("two_phases", [False, True])
def test_rubbish_is_refused_and_the_rest_averaged_exactly(monkeypatch, block, how, reason, two_phases):
    problem = problem_of([50, 11, 23])
    theta = theta_of()
    method = method_of(lr=0.5, batch_size=2)
    if two_phases:
        method = replace(method, mediator=weigh.in_two_phases(method.mediator))
    alone = [solve_block(problem, theta, [k], method, 0).upload for k in (0, 2)]
    spoil(monkeypatch, 1, how)
    aggregate = aggregate_of(problem, method, theta, block=block)
    assert [(r.client, r.reason) for r in aggregate.refused] == [("c1", reason)]
    assert aggregate.contributors == ("c0", "c2")
    for name, mean in aggregate.mean().items():
        want = (49 * alone[0][name][0] + 22 * alone[1][name][0]) / (49 + 22)
        assert float((mean - want).abs().max()) <= 1e-12
    state, (summary,) = rounds(problem, method, theta, block=block)
    assert [r.client for r in summary.refused] == ["c1"]
    assert math.isfinite(summary.loss)
    assert all(torch.isfinite(p).all() for p in state.params.values())


def test_a_client_whose_training_explodes_is_refused():
    problem = problem_of([50], ModelSpec("gru", "gru", VOCAB, embed=5, hidden=5))
    theta = theta_of(problem.spec, torch.float32)
    state, (summary,) = rounds(problem, method_of(lr=1e38, clip=None, batch_size=1), theta)
    assert [r.client for r in summary.refused] == ["c0"]
    assert_equal(state.params, theta, 0)


def test_a_round_in_which_all_are_refused_takes_no_step(monkeypatch):
    problem = problem_of([20])
    theta = theta_of()
    spoil(monkeypatch, 0, "nan")
    state, (summary,) = rounds(problem, method_of(lr=0.5), theta)
    assert_equal(state.params, theta, 0)
    assert summary.contributors == ()
    assert len(summary.refused) == 1
    assert state.round == 1


def test_a_layer_of_mass_zero_takes_no_step():
    theta = theta_of()
    still = "rnn.weight_hh_l0"

    def share(report, layers):
        numbers = {name: 0.0 if name == still else 1.0 for name in layers}
        return Share(numbers, numbers)

    method = replace(method_of(lr=0.5), mediator=weigh.separable(share))
    state, (summary,) = rounds(problem_of([50, 11]), method, theta)
    assert torch.equal(state.params[still], theta[still])
    assert_moved({n: p for n, p in theta.items() if n != still}, state.params)
    assert summary.effective_clients[still] == 0
    assert summary.effective_clients["output.bias"] == pytest.approx(2)


def test_a_round_without_clients_takes_no_step():
    problem, method, theta = problem_of([20]), method_of(lr=0.5), theta_of()
    with Simulation(problem) as federation:
        state, summary = run_round(method, initial_state(method, theta), [], federation)
    assert_equal(state.params, theta, 0)
    assert summary.contributors == ()
    assert state.round == 1


# Weights, whatever the clients

cohorts = st.lists(st.integers(0, 10**7), min_size=1, max_size=8)


@settings(max_examples=examples(50), deadline=None)
@given(tokens=cohorts, data=st.data())
def test_token_weights_are_a_distribution_over_survivors_in_any_order(tokens, data):
    layers = ["a", "b"]
    share = weigh.by_tokens().share
    clients = {f"c{k}": share(Report(f"c{k}", n, 1.0, n), layers) for k, n in enumerate(tokens)}
    survivors = data.draw(st.lists(st.sampled_from(sorted(clients)), min_size=1, unique=True))
    order = data.draw(st.permutations(survivors))
    rng = np.random.default_rng(len(tokens))
    uploads = {c: {n: torch.from_numpy(rng.normal(size=3)) for n in layers} for c in clients}
    like = {name: torch.zeros(3, dtype=torch.float64) for name in layers}

    def total(names):
        running = RunningSum(like)
        for c in names:
            running.add(c, uploads[c], clients[c])
        return running.aggregate(())

    one, other = total(survivors), total(order)
    for layer in layers:
        weights = [clients[c].scale[layer] / one.mass[layer] for c in survivors if one.mass[layer] > 0]
        assert all(math.isfinite(w) and w >= 0 for w in weights)
        assert not weights or sum(weights) == pytest.approx(1, abs=1e-12)
        assert one.mass[layer] == other.mass[layer]
        want = sum(w * uploads[c][layer] for w, c in zip(weights, survivors, strict=True)) if weights else like[layer]
        torch.testing.assert_close(one.mean()[layer], want, rtol=0, atol=1e-12)
        torch.testing.assert_close(one.mean()[layer], other.mean()[layer], rtol=0, atol=1e-12)
        at_most = len([c for c in survivors if clients[c].mass[layer] > 0])
        assert 0 <= one.effective_clients()[layer] <= at_most + 1e-9


@settings(max_examples=25, deadline=None)
@given(mass=st.just(0.0) | st.floats(1e-3, 1e6), lr=st.floats(-2, 2))
def test_the_server_divides_by_the_mass_once(mass, lr):
    total = {"a": torch.tensor([3.0, -6.0], dtype=torch.float64)}
    aggregate = Aggregate(total, {"a": mass}, {"a": mass}, {"a": mass**2}, ("c",))
    theta = {"a": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    after, _ = server.sgd(lr).step(theta, aggregate, {})
    want = theta["a"] + lr * total["a"] / mass if mass > 0 else theta["a"]
    torch.testing.assert_close(after["a"], want)
    assert torch.equal(theta["a"], torch.ones(2, dtype=torch.float64))


def test_fedsgds_steps_are_of_the_weights_type():
    """An engine chooses its kernels by it: sizes in double precision kept FedSGD from the fast ones on a GPU."""
    seen = []

    class Watching:
        clients, whole, pace = 2, torch.ones(2, dtype=torch.float64), None

        def run_steps(self, way, descent):
            seen.append(way.eta.dtype)

    local.full_gradient().solve({"w": torch.zeros(3)}, Watching(), 0)
    assert seen == [torch.float32]
