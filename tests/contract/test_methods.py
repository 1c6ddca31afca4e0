"""What holds for every method: a new one gets all of it by adding one row."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keyfed
from keyfed.engine.client_state import ClientStates
from keyfed.engine.problem import Problem
from keyfed.engine.simulate import Simulation
from keyfed.engine.sums.plain import RunningSum
from keyfed.engine.task import keeps_state
from keyfed.errors import ConfigError
from keyfed.federated import server, weigh
from keyfed.federated.methods import METHODS, build_method, method_options
from keyfed.federated.round import RoundSummary, initial_state, run_round
from keyfed.federated.spec import MethodSpec, Part
from keyfed.federated.types import Aggregate, Mediator, Method, Report, State
from keyfed.text.batches import Batching
from tests.examples import examples

from ..equivalence import test_methods as equivalence
from ..equivalence.test_methods import assert_equal, assert_moved, rounds, spoil, theta_of

ROWS = [
    ("fedavg", {}),
    ("fedavg", {"noise": 0.01, "noise_at": "server"}),
    ("fedsgd", {}),
    ("fedprox", {}),
    ("fedprox", {"by_tokens": True}),
    ("fedatt", {}),
    ("fedatt", {"norm": "frobenius", "temperature": 0.01, "bound": 50.0}),
    ("fedatt", {"noise": 0.01, "noise_at": "server"}),
    ("fedmed", {}),
    ("fedmed", {"reading": "softmax", "temperature": 0.001, "mediation": False}),
    ("fedmed", {"reading": "histogram", "temperature": 0.1, "threshold": 0.0}),
    ("fedmed", {"beta": 0.5, "threshold": 10.0}),
    ("fedmed", {"beta": 0.5, "adaptive": False, "mediation": False}),
    ("fedadam", {}),
    ("fedyogi", {}),
    ("fedadagrad", {}),
    ("fedavgm", {}),
    ("fednesterov", {}),
    ("admm", {}),
    ("admm", {"rho": 0.5, "weights": "uniform", "start_from": "model"}),
    ("liadmm", {"r": 2.0}),
    ("fedadmm", {}),
    ("fedadmm", {"server_step": "published", "server_lr": 0.5}),
    ("fedavg", {"mediator": Part("attention", {"temperature": 0.5}), "server": Part("adam", {"lr": 0.1})}),
    ("fedprox", {"mediator": Part("divergence", {"switch": 0.1, "beta": 0.5}), "server": Part("nesterov")}),
    ("fedmed", {"mediator": Part("fixed", {"weights": "c0=3, c2=0.5"}), "server": Part("yogi", {"lr": 0.1})}),
    ("fedavg", {"quantise": "fp16"}),
    ("fedatt", {"quantise": "int8"}),
    ("fedavg", {"keep": 0.2}),
    ("fedadam", {"keep": 0.2, "quantise": "int8"}),
    ("admm", {"keep": 0.5, "quantise": "fp16"}),
    ("fedadam", {"bias_correction": True}),
    ("fedadmm", {"server_step": "late", "server_lr": 0.5}),
    ("liadmm", {"optimiser": "adam", "step": 0.001}),
    ("fedmed", {"loss": "tail", "beta": 0.5}),
    ("fedmed", {"reading": "raw", "mediation": False}),
]
IDS = [
    " ".join([name, *(f"{k}={v.name if isinstance(v, Part) else v}" for k, v in options.items())])
    for name, options in ROWS
]
SPECIFIED = ("mediator", "server", "keep", "quantise")
every_method = pytest.mark.parametrize(("name", "options"), ROWS, ids=IDS)
WITH_ALL = (0, 5, 10, 21)  # a mean, attention, the divergence's weights, duals


def each_with_one_of(values):
    """Every row with one value, in turns; four rows that differ in kind with every value."""
    return [
        pytest.param(*row, value, id=f"{IDS[k]}-{value}")
        for k, row in enumerate(ROWS)
        for n, value in enumerate(values)
        if k in WITH_ALL or k % len(values) == n
    ]


def problem_of(sizes, seeds=None) -> Problem:
    """Clients of one to two steps an epoch in windows of four tokens: a method has to do with steps, not with time."""
    return replace(equivalence.problem_of(sizes, seeds=seeds), batching=Batching("stream", 1, 4))


def build(name: str, options) -> Method:
    usual = {"lr": 0.5, "batch_size": 2, "epochs": 2, "momentum": 0.5, "optimiser": "sgd"}
    known = method_options(name)
    numbers = {k: v for k, v in usual.items() if k in known} | {k: v for k, v in options.items() if k in known}
    return build_method(MethodSpec(name, numbers, **{k: v for k, v in options.items() if k in SPECIFIED}))


Rounds = tuple[list[State], list[RoundSummary]]  # the states before, between and after some rounds
FOUR, TRAINED = [14, 6, 8, 10], 3  # tokens of four clients, and rounds of theirs that several tests look at
_kept: dict[tuple[str, str, str], Rounds] = {}


def run_once(what: str, name: str, options, run) -> Rounds:
    """Run once for every method what several tests compare with."""
    key = what, name, repr(options)
    if key not in _kept:
        _kept[key] = run(build(name, options))
    return _kept[key]


def trained(name: str, options) -> Rounds:
    """The four clients, one at a time and in their own order."""
    problem = problem_of(FOUR)
    return run_once("four", name, options, lambda method: each_round(method, problem, problem.store.names, TRAINED))


def each_round(method: Method, problem: Problem, cohort, n: int) -> Rounds:
    states, summaries = [initial_state(method, theta_of())], []
    with Simulation(problem) as federation:
        for _ in range(n):
            state, summary = run_round(method, states[-1], cohort, federation)
            states.append(state)
            summaries.append(summary)
    return states, summaries


def test_every_federated_method_has_a_row():
    assert {name for name, _ in ROWS} == set(METHODS) - {"central"}


@every_method
def test_it_trains_and_leaves_its_arguments_alone(name, options):
    method, theta = build(name, options), theta_of()
    (begun, *_, state), summaries = trained(name, options)
    assert_equal(begun.params, theta, 0)
    assert_moved(theta, state.params)
    assert all(bool(torch.isfinite(p).all()) for p in [*state.params.values(), *state.server.values()])
    assert all(p.shape == theta[n].shape and p.dtype == theta[n].dtype for n, p in state.params.items())
    assert json.loads(json.dumps(state.mediator)) == state.mediator
    for s in summaries:
        assert math.isfinite(s.loss)
        assert s.reported == 4
        assert len(s.contributors) == weigh.kept(method.uploading, 4)
        assert all(1 - 1e-9 <= e <= len(s.contributors) + 1e-9 for e in s.effective_clients.values())


@every_method
def test_a_round_after_a_restart_is_the_round_without_one(name, options, tmp_path):
    method, problem = build(name, options), problem_of([14, 6, 8])
    clients = ClientStates(tmp_path)
    state, _ = rounds(problem, method, theta_of(), 2, states=clients)
    versions = clients.versions()
    assert bool(versions) == keeps_state(method)
    again = State(
        {n: p.clone() for n, p in state.params.items()},
        json.loads(json.dumps(state.mediator)),
        {n: p.clone() for n, p in state.server.items()},
        state.round,
    )
    travelled = json.loads(json.dumps(asdict(method.spec)))
    for kind in ("mediator", "server"):
        travelled[kind] = Part(**travelled[kind]) if travelled[kind] else None
    fresh = build_method(MethodSpec(**travelled))
    ends = []
    for by, begin in ((method, state), (fresh, again)):
        kept = ClientStates(tmp_path, versions)  # what a checkpoint names is not removed by the round after it
        with Simulation(problem, states=kept) as federation:
            ends.append(run_round(by, begin, problem.store.names, federation))
    (one, first), (two, second) = ends
    assert_equal(one.params, two.params, 0)
    assert_equal(one.server, two.server, 0)
    assert one.mediator == two.mediator
    assert first == second


@every_method
def test_the_specification_builds_the_method_again(name, options):
    method = build(name, options)
    again = build_method(method.spec)
    assert again.spec == method.spec
    assert (again.name, again.epochs, again.batch_size, again.uploading) == (name, method.epochs, 2, method.uploading)
    assert set(method.spec.options) == set(build_method(MethodSpec(name)).spec.options)


@every_method
def test_identical_clients_give_any_one_of_them(name, options):
    method, theta = build(name, options), theta_of()
    many, _ = rounds(problem_of([12] * 5, seeds=[7] * 5), method, theta, 2)
    one, _ = rounds(problem_of([12], seeds=[7]), method, theta, 2)
    # Each client rounds to eight bits by its own dice; everything else is exact.
    assert_equal(many.params, one.params, 0.05 if options.get("quantise") == "int8" else 1e-12)
    assert_moved(theta, many.params)


@every_method
def test_the_order_of_the_cohort_changes_nothing(name, options):
    want = trained(name, options)[0][2]
    (*_, got), _ = each_round(build(name, options), problem_of(FOUR), ["c3", "c1", "c0", "c2"], 2)
    assert_equal(got.params, want.params, 1e-12)
    assert_equal(got.server, want.server, 1e-12)


@pytest.mark.parametrize(("name", "options", "block"), each_with_one_of([1, 3]))
def test_streamed_shares_equal_shares_in_two_phases(name, options, block):
    method, problem, theta = build(name, options), problem_of(FOUR), theta_of()
    later = replace(method, mediator=weigh.in_two_phases(method.mediator))
    if block == 1:
        states, summaries = trained(name, options)
        one, first = states[2], summaries[:2]
    else:
        one, first = rounds(problem, method, theta, 2, block=block)
    two, second = rounds(problem, later, theta, 2, block=block)
    assert_equal(one.params, two.params, 1e-12)
    assert [s.loss for s in first] == [s.loss for s in second]


@pytest.mark.parametrize(("name", "options", "how"), each_with_one_of(["loss", "nan", "inf"]))
def test_rubbish_is_refused_as_if_its_client_had_not_come(name, options, how, monkeypatch):
    problem = problem_of([14, 6, 8])
    (_, want), _ = run_once("two", name, options, lambda method: each_round(method, problem, ["c0", "c2"], 1))
    spoil(monkeypatch, 1, how)
    (_, got), (summary,) = each_round(build(name, options), problem, ["c0", "c1", "c2"], 1)
    assert_equal(got.params, want.params, 1e-12)
    assert [r.client for r in summary.refused] == ["c1"]
    assert summary.reported == 3


@every_method
def test_a_round_without_clients_takes_no_step(name, options):
    method, theta = build(name, options), theta_of()
    problem = problem_of([6, 8])
    state, _ = rounds(problem, method, theta)
    with Simulation(problem) as federation:
        after, summary = run_round(method, state, [], federation)
    assert_equal(after.params, state.params, 0)
    assert_equal(after.server, state.server, 0)
    assert after.mediator == state.mediator
    assert (summary.contributors, summary.reported) == ((), 0)


@pytest.fixture(scope="module")
def workers(workers_are_forked):
    """A federation in two worker processes, which take a method with every client; starting them is what costs."""
    with Simulation(problem_of([14, 6, 8, 10, 4]), workers=2) as federation:
        yield federation


@pytest.mark.parametrize("name", ["fedatt", "fedmed"])
def test_worker_processes_change_nothing(name, workers):
    problem = problem_of([14, 6, 8, 10, 4])
    theta = theta_of(dtype=torch.float32)
    method = build(name, {"beta": 0.5} if name == "fedmed" else {})
    alone, ours = rounds(problem, method, theta, 3, workers=1)
    together, theirs = initial_state(method, theta), []
    for _ in range(3):
        together, summary = run_round(method, together, problem.store.names, workers)
        theirs.append(summary)
    assert_equal(alone.params, together.params, 0)
    assert ours == theirs


# Mediators, whatever the reports

LAYERS = ["a", "b"]
MEDIATORS: dict[str, Mediator] = {
    "by_tokens": weigh.by_tokens(),
    "uniform": weigh.uniform(),
    "fixed": weigh.fixed({"c0": 3.0, "c1": 1e-6}),
    "softmax": weigh.softmax_of_distance(),
    "cold softmax": weigh.softmax_of_distance(temperature=0.01),
    "bounded softmax": weigh.softmax_of_distance(temperature=0.1, bound=5.0),
    "switch": weigh.switch_on_loss(weigh.softmax_of_distance(), weigh.by_tokens()),
    "top-K": weigh.top_k(0.5, weigh.softmax_of_distance()),
    "top-K of switch": weigh.top_k(0.3, weigh.switch_on_loss(weigh.softmax_of_distance(), weigh.uniform())),
}
distances = st.sampled_from([0.0, 1e-9, 1e4]) | st.floats(0, 1e4)
client_reports = st.lists(
    st.tuples(st.integers(1, 10**7), st.floats(0, 100), distances, distances), min_size=1, max_size=7
)


def weights_of(shares, order) -> dict[str, dict[str, float]]:
    """γ per layer: client k uploads the k-th unit vector, so the mean upload is the weights."""
    clients = sorted(shares)
    unit = torch.eye(len(clients), dtype=torch.float64)
    running = RunningSum({layer: torch.zeros(len(clients), dtype=torch.float64) for layer in LAYERS})
    for client in order:
        running.add(client, {layer: unit[clients.index(client)] for layer in LAYERS}, shares[client])
    aggregate = running.aggregate(())
    for layer, effective in aggregate.effective_clients().items():
        assert 1 - 1e-9 <= effective <= len(order) + 1e-9, layer
    return {layer: dict(zip(clients, mean.tolist(), strict=True)) for layer, mean in aggregate.mean().items()}


@pytest.mark.parametrize("name", MEDIATORS)
@settings(max_examples=examples(40), deadline=None)
@given(given_reports=client_reports, data=st.data())
def test_weights_are_a_distribution_over_survivors_in_any_order(name, given_reports, data):
    mediator = weigh.in_two_phases(MEDIATORS[name])
    reports = {
        f"c{k}": Report(f"c{k}", tokens, loss, tokens, {"a": a, "b": b})
        for k, (tokens, loss, a, b) in enumerate(given_reports)
    }
    memory, shares = mediator.weigh(mediator.init(), reports, LAYERS)
    assert json.loads(json.dumps(memory)) == memory
    backwards = dict(reversed(reports.items()))
    assert mediator.weigh(mediator.init(), backwards, LAYERS) == (memory, shares)
    survivors = data.draw(st.lists(st.sampled_from(sorted(shares)), min_size=1, unique=True))
    one = weights_of(shares, survivors)
    other = weights_of(shares, data.draw(st.permutations(survivors)))
    for layer in LAYERS:
        weights = one[layer]
        assert all(math.isfinite(w) and w >= 0 for w in weights.values())
        assert sum(weights.values()) == pytest.approx(1, abs=1e-12)
        assert weights == pytest.approx(other[layer], abs=1e-12)
        assert all(w == 0 for c, w in weights.items() if c not in survivors)


@settings(max_examples=examples(40), deadline=None)
@given(scores=st.lists(distances, min_size=1, max_size=7), temperature=st.sampled_from([0.01, 1.0, 100.0]))
def test_the_streamed_softmax_is_the_softmax(scores, temperature):
    share = weigh.softmax_of_distance(temperature).share
    shares = {f"c{k}": share(Report(f"c{k}", 1, 1.0, 1, {"a": d, "b": 0.0}), LAYERS) for k, d in enumerate(scores)}
    want = torch.softmax(torch.tensor(scores, dtype=torch.float64) / temperature, 0).tolist()
    got = weights_of(shares, list(shares))
    assert list(got["a"].values()) == pytest.approx(want, abs=1e-12)
    assert list(got["b"].values()) == pytest.approx([1 / len(scores)] * len(scores), abs=1e-12)


# Server rules


@pytest.mark.parametrize(
    "rule",
    [server.sgd(), server.momentum(), server.nesterov(), server.adam(0.1), server.yogi(0.1), server.adagrad(0.1)],
    ids=["sgd", "momentum", "nesterov", "adam", "yogi", "adagrad"],
)
def test_a_layer_of_mass_zero_takes_no_step_and_keeps_its_moments(rule):
    theta = {"a": torch.ones(2), "b": torch.ones(3)}
    upload = {"a": torch.full((2,), 0.5), "b": torch.full((3,), 0.5)}
    ones, squares = {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}
    params, state = rule.step(theta, Aggregate(upload, ones, ones, squares, ("c",)), rule.init(theta))
    mass = {"a": 0.0, "b": 1.0}
    silent = Aggregate({"a": torch.zeros(2), "b": upload["b"] / 2}, mass, mass, mass, ("c",))
    after, later = rule.step(params, silent, state)
    assert torch.equal(after["a"], params["a"])
    assert not torch.equal(after["b"], params["b"])
    assert set(later) == set(state)
    for key, moment in state.items():
        assert torch.equal(later[key], moment) == key.endswith("/a"), key


# Numbers that make no sense


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fedprox", "mu", -0.1),
        ("fedatt", "temperature", 0.0),
        ("fedatt", "step", -1.0),
        ("fedatt", "bound", 0.0),
        ("fedatt", "noise", -0.01),
        ("fedmed", "temperature", -1.0),
        ("fedmed", "step", 0.0),
        ("fedmed", "threshold", -0.1),
        ("fedmed", "beta", 0.0),
        ("fedmed", "beta", 1.5),
        ("fedmed", "adaptive", False),
        ("fedadam", "server_lr", 0.0),
        ("fedadam", "beta1", 1.0),
        ("fedadam", "beta2", -0.1),
        ("fedyogi", "beta2", 1.0),
        ("fedadam", "tau", 0.0),
        ("fedadagrad", "tau", math.nan),
        ("fedavgm", "beta", 1.0),
        ("fednesterov", "server_lr", math.inf),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(name, key, value):
    with pytest.raises(ConfigError, match=rf"method\.{key}"):
        build_method(MethodSpec(name, {key: value}))


def test_fixed_weights_must_be_numbers_of_at_least_zero():
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="client c1"):
            weigh.fixed({"c1": weight})


def test_the_core_of_the_methods_is_read_in_an_hour():
    folder = Path(keyfed.__file__).parent / "federated"
    core = ("types", "round", "weigh", "local", "server", "duals", "methods")
    assert sum(len((folder / f"{name}.py").read_text("utf-8").splitlines()) for name in core) <= 2000
