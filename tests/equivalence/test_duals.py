"""Clients with duals against closed forms: the central optimum, the running mean, FedProx's step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from keyfed.engine.client_state import ClientStates, read_state
from keyfed.engine.simulate import Simulation
from keyfed.errors import ConfigError
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.methods import build_method
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Method

from .quadratic import flat, origin, quadratic, run
from .test_methods import assert_equal, assert_moved, method_of, problem_of, rounds, theta_of

EXACT = {"rho": 1.0, "clip": None, "batch_size": 1}
ROWS = {
    "admm": {"optimiser": "sgd", "lr": 0.4, "epochs": 12},
    "liadmm": {"r": 1.5, "epochs": 3},
    "fedadmm": {"lr": 0.3, "epochs": 5},
}
ROUNDS = 85  # an exact method is below 1e-8 after 80 of them, whatever is lost
every_method = pytest.mark.parametrize("name", ROWS)


def method(name: str, **options) -> Method:
    return build_method(MethodSpec(name, {**EXACT, **ROWS[name], **options}))


def distance(problem, state, alpha=None) -> float:
    return float((flat(state.params) - problem.optimum(alpha)).abs().max())


# The central optimum


@every_method
def test_half_the_clients_and_lost_uploads_still_reach_the_central_optimum(name):
    problem = quadratic()
    state, summaries = run(problem, method(name), ROUNDS, present=0.5, lost=0.2)
    assert distance(problem, state) < 1e-8
    lost = sum(s.reported - len(s.contributors) for s in summaries)
    called = sum(s.reported for s in summaries)
    assert 0.4 < called / (ROUNDS * 8) < 0.6
    assert 0.1 < lost / called < 0.3


@every_method
def test_uniform_weights_reach_the_optimum_of_the_plain_mean(name):
    problem = quadratic()
    state, _ = run(problem, method(name, weights="uniform"), ROUNDS, present=0.5, lost=0.2)
    assert distance(problem, state, [1.0] * 8) < 1e-8
    assert distance(problem, state) > 0.1


def test_unequal_work_and_a_start_from_the_model_reach_it_too():
    problem = quadratic()
    state, _ = run(problem, method("fedadmm", epochs=6), ROUNDS, present=0.5, lost=0.2, epochs=(1, 6))
    assert distance(problem, state) < 1e-8
    state, _ = run(problem, method("fedadmm", epochs=6), ROUNDS, present=0.5, lost=0.2, least_work=0.1)
    assert distance(problem, state) < 1e-8
    exact = method("admm", start_from="model", epochs=30)
    state, _ = run(problem, exact, ROUNDS, present=0.5)
    assert distance(problem, state) < 1e-8


@every_method
def test_late_joiners_are_counted_from_when_they_join(name):
    problem = quadratic()
    early = replace(problem, matrix=problem.matrix[:6], centre=problem.centre[:6], tokens=problem.tokens[:6])
    with Simulation(problem, block=8) as federation:
        state, _ = run(early, method(name), 20, present=0.5, lost=0.2, simulation=federation)
        assert distance(problem, state) > 1e-2
        state, _ = run(problem, method(name), ROUNDS, present=0.5, lost=0.2, start=state, simulation=federation)
    assert distance(problem, state) < 1e-8


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedadmm", {"server_step": "published"}), ("admm", {"weights": "uniform"}), ("liadmm", {"weights": "uniform"})],
)
def test_with_all_clients_members_from_the_first_model_the_optimum_is_reached(name, options):
    problem = quadratic()
    state, summaries = run(problem, method(name, clients=8, **options), ROUNDS, present=0.5, lost=0.2)
    assert any(len(s.contributors) < 8 for s in summaries)
    assert distance(problem, state, [1.0] * 8) < 1e-8


@pytest.mark.parametrize(
    "options",
    [
        {"server_step": "published"},
        {"server_step": "late"},
        {"server_step": "late", "server_lr": 0.5},  # half of the clients are called: the mean share |S|/m
    ],
)
def test_a_whole_step_and_late_starts_are_biased(options):
    problem = quadratic()
    state, _ = run(problem, method("fedadmm", **options), ROUNDS, present=0.5)
    assert distance(problem, state) > 1e-2
    assert distance(problem, state, [1.0] * 8) > 1e-2


def test_fedprox_is_biased():
    problem = quadratic()
    prox = build_method(
        MethodSpec("fedprox", {"mu": 1.0, "by_tokens": True, "optimiser": "sgd", "lr": 0.3, "epochs": 9})
    )
    state, _ = run(problem, prox, ROUNDS)
    assert distance(problem, state) > 1e-2


# The listings of the sources, by clients that keep everything


def listing(problem, cohorts, rho, lr, epochs, server):
    """FedADMM's algorithm 1 as printed, in numpy: w_i = θ⁰ and y_i = 0 at the start, θ after every round.

    `server` is line 10, or the report's argmin over all m clients: (θ, increments of the cohort, all w + y/ρ) → θ'.
    """
    matrix, centre = problem.matrix.numpy(), problem.centre.numpy()
    theta = np.zeros(4)
    w, y = [theta.copy() for _ in matrix], [np.zeros(4) for _ in matrix]
    for cohort in cohorts:
        before = {i: w[i] + y[i] / rho for i in cohort}
        for i in cohort:
            for _ in range(epochs):
                w[i] = w[i] - lr * (matrix[i] @ (w[i] - centre[i]) + y[i] + rho * (w[i] - theta))
            y[i] = y[i] + rho * (w[i] - theta)
        increments = [w[i] + y[i] / rho - before[i] for i in cohort]
        theta = server(theta, increments, [w[i] + y[i] / rho for i in range(len(w))])
        yield theta


COHORTS = [[0, 3, 5], [1, 3], [0, 1, 2, 6], [7], [0, 1, 2, 3, 4, 5, 6, 7], [2, 4]]
LISTED = {
    "step 1": ("fedadmm", {"server_step": "published"}, lambda t, d, z: t + sum(d) / len(d)),
    "step 0.3": (
        "fedadmm", {"server_step": "published", "server_lr": 0.3}, lambda t, d, z: t + 0.3 / len(d) * sum(d)
    ),
    "step |S|/m": (
        "fedadmm", {"server_step": "published", "clients": 8}, lambda t, d, z: t + (len(d) / 8) / len(d) * sum(d)
    ),
    "argmin over all, admm": ("admm", {"weights": "uniform", "clients": 8}, lambda t, d, z: sum(z) / 8),
    "argmin over all, liadmm": ("liadmm", {"weights": "uniform", "clients": 8}, lambda t, d, z: sum(z) / 8),
}  # fmt: skip


def listed(name, problem, state, made, cohorts, federation):
    for number, cohort in enumerate(cohorts):
        federation.expect({f"q{k}": Fate(k, Work(), 0.0, None) for k in cohort})
        state, _ = run_round(made, state, [f"q{k}" for k in cohort], federation)
        yield number, state


@pytest.mark.parametrize("case", LISTED)
def test_under_partial_participation_it_is_the_listing_of_the_source(case):
    name, options, server = LISTED[case]
    problem, made = quadratic(), method(name, **options)
    lr = 1 / (1.0 + ROWS["liadmm"]["r"]) if name == "liadmm" else ROWS[name]["lr"]
    want = list(listing(problem, COHORTS, 1.0, lr, ROWS[name]["epochs"], server))
    with Simulation(problem, block=3) as federation:
        for number, state in listed(name, problem, initial_state(made, origin()), made, COHORTS, federation):
            np.testing.assert_allclose(flat(state.params).numpy(), want[number], rtol=0, atol=1e-12)
    late = method("fedadmm", server_step="late")
    with Simulation(problem, block=3) as federation:
        *_, (_, other) = listed("fedadmm", problem, initial_state(late, origin()), late, COHORTS, federation)
    assert float((flat(other.params) - torch.tensor(want[-1])).abs().max()) > 0.01


def test_the_first_model_is_state_and_a_run_from_before_it_was_goes_on_as_it_began(tmp_path):
    """θ⁰ comes from the state that a checkpoint holds; a state that has none is of a run whose clients started late."""
    problem = quadratic()
    made, late = method("fedadmm", server_step="published"), method("fedadmm", server_step="late")
    ends = {}
    for case, start in (("first", made), ("before", late)):
        states = ClientStates(tmp_path / case)
        with Simulation(problem, block=8, states=states) as federation:
            *_, (_, half) = listed("", problem, initial_state(start, origin()), start, COHORTS[:2], federation)
        assert (states.first is not None) == (case == "first")
        (tmp_path / case / "first.state").unlink(missing_ok=True)  # it is made again from the server's state
        again = ClientStates(tmp_path / case, states.versions())
        with Simulation(problem, block=8, states=again) as federation:
            *_, (_, ends[case]) = listed("", problem, half, made, COHORTS[2:], federation)
    for case, start in (("first", made), ("before", late)):
        with Simulation(problem, block=8) as federation:
            *_, (_, whole) = listed("", problem, initial_state(start, origin()), start, COHORTS, federation)
        assert torch.equal(flat(ends[case].params), flat(whole.params))
    assert not torch.equal(flat(ends["first"].params), flat(ends["before"].params))


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_liadmm_takes_a_step_size_of_its_own(optimiser):
    """The report's Adam with a step size of 0.001, by the gradient of the augmented problem: ADMM's local work."""
    problem = quadratic()
    ours = method("liadmm", optimiser=optimiser, step=0.001)
    theirs = method("admm", optimiser=optimiser, lr=0.001, epochs=ROWS["liadmm"]["epochs"])
    one, other = (run(problem, made, 4, present=0.5)[0] for made in (ours, theirs))
    assert torch.equal(flat(one.params), flat(other.params))
    assert not torch.equal(flat(one.params), flat(run(problem, method("liadmm"), 4, present=0.5)[0].params))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("liadmm", {"optimiser": "adam"}, r"needs a step size of its own; set method\.step"),
        ("liadmm", {"step": 0.0}, r"method\.step is 0\.0; expected step > 0"),
        ("admm", {"clients": 8}, "set weights=uniform"),
        ("admm", {"clients": 0, "weights": "uniform"}, r"method\.clients is 0"),
        ("fedadmm", {"clients": 8}, "running does not read it"),
        ("fedadmm", {"clients": 8, "server_step": "published", "server_lr": 0.5}, "clients have none"),
    ],
)
def test_options_that_say_two_things_are_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        method(name, **options)


class Careless(Simulation):
    """A federation that tells every client that trained that its upload arrived."""

    def acknowledge(self, contributors):
        super().acknowledge(self._trained)


def test_advancing_without_an_acknowledgement_corrupts_the_model():
    problem = quadratic()
    with Careless(problem, block=8) as federation:
        state, _ = run(problem, method("fedadmm"), ROUNDS, present=0.5, lost=0.2, simulation=federation)
    assert distance(problem, state) > 1e-3


@pytest.mark.parametrize("compressed", [{"quantise": "fp16"}, {"keep": 0.5}, {"keep": 0.5, "quantise": "int8"}])
def test_compression_does_not_move_the_optimum(compressed):
    """What was left out stays in the next increment, so θ converges all the same."""
    problem = quadratic()
    packed = build_method(MethodSpec("fedadmm", {**EXACT, **ROWS["fedadmm"]}, **compressed))
    state, _ = run(problem, packed, 120, present=0.5, lost=0.2)
    assert distance(problem, state) < 1e-8


@pytest.mark.parametrize("compressed", [{"keep": 0.1}, {"keep": 0.3, "quantise": "int8"}])
def test_joining_under_compression_keeps_the_weights_that_are_not_sent(compressed):
    problem, theta = problem_of([50, 11, 23]), theta_of()
    made = build_method(MethodSpec("fedadmm", {"lr": 0.5, "batch_size": 2}, **compressed))
    exact = build_method(MethodSpec("fedadmm", {"lr": 0.5, "batch_size": 2}))
    packed, _ = rounds(problem, made, theta)
    whole, _ = rounds(problem, exact, theta)
    for name, p in theta.items():
        moved, meant = packed.params[name] - p, whole.params[name] - p
        assert float(moved.norm()) <= 1.5 * float(meant.norm()), name
        assert float((packed.params[name] == 0).double().mean()) <= float((p == 0).double().mean()), name


# The running mean and the first round


@every_method
def test_the_model_is_the_mean_of_all_joined_clients_after_every_round(name, tmp_path):
    problem, made = quadratic(), method(name)
    states = ClientStates(tmp_path)
    with Simulation(problem, states=states) as federation:
        state = initial_state(made, origin())
        for number in range(12):
            cohort = [problem.names[k] for k in range(8) if (k + number) % 3 or number > 8]
            unlucky = cohort[number % 4]
            gone = {unlucky: Fate(problem.names.index(unlucky), Work(), 0.0, "dropped before upload")}
            federation.expect(gone)
            state, _ = run_round(made, state, cohort, federation)
            joined = {c: read_state(states.acknowledged(c)) for c in problem.names if states.acknowledged(c)}
            weights = {c: problem.tokens[problem.names.index(c)] for c in joined}
            assert weights == {c: int(s["alpha"]) for c, s in joined.items()}
            for layer, p in state.params.items():
                z = {c: s[f"w/{layer}"] + s[f"dual/{layer}"] / 1.0 for c, s in joined.items()}
                want = sum(weights[c] * z[c] for c in joined) / sum(weights.values())
                assert float((p - want).abs().max()) < 1e-12, (number, layer)
    assert len(joined) == 8


@every_method
def test_a_lost_upload_is_as_if_the_client_had_not_been_called(name):
    problem, made = quadratic(), method(name)
    ends = []
    for called in (problem.names, problem.names[:5]):
        with Simulation(problem) as federation:
            state, _ = run_round(made, initial_state(made, origin()), problem.names[:7], federation)
            lost = {c: Fate(k, Work(), 0.0, "dropped before upload") for k, c in enumerate(problem.names) if k >= 5}
            federation.expect({c: fate for c, fate in lost.items() if c in called})
            state, _ = run_round(made, state, called, federation)
            federation.expect({})
            ends.append(run_round(made, state, problem.names, federation)[0])
    for layer, p in ends[0].params.items():
        assert torch.equal(p, ends[1].params[layer])


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_first_admm_round_is_twice_a_proximal_round(optimiser):
    problem, theta = problem_of([50, 11, 23]), theta_of()
    options = {"optimiser": optimiser, "lr": 0.01, "epochs": 2, "batch_size": 2}
    prox, _ = rounds(problem, method_of("fedprox", mu=0.3, by_tokens=True, **options), theta)
    duals, _ = rounds(problem, method_of("admm", rho=0.3, **options), theta)
    assert_moved(theta, prox.params)
    twice = {name: p + 2 * (prox.params[name] - p) for name, p in theta.items()}
    assert_equal(duals.params, twice, 1e-12)


def test_liadmm_is_fedadmm_with_its_step_size():
    problem, theta = problem_of([50, 11, 23]), theta_of()
    one, _ = rounds(problem, method_of("liadmm", rho=0.2, r=1.8, epochs=2, batch_size=2), theta, 3)
    other, _ = rounds(problem, method_of("fedadmm", rho=0.2, lr=0.5, epochs=2, batch_size=2), theta, 3)
    assert_equal(one.params, other.params, 1e-12)


@pytest.mark.parametrize("weights", ["tokens", "uniform"])
def test_with_one_local_solver_admm_liadmm_and_fedadmm_are_one_method(weights):
    problem, theta = problem_of([50, 11, 23]), theta_of()
    common = {"rho": 0.2, "weights": weights, "epochs": 2, "batch_size": 2}
    steps = {"admm": {"optimiser": "sgd", "lr": 0.5}, "liadmm": {"r": 1.8}, "fedadmm": {"lr": 0.5}}
    admm, liadmm, fedadmm = (rounds(problem, method_of(n, **common, **own), theta, 3)[0] for n, own in steps.items())
    assert_moved(theta, admm.params)
    assert_equal(liadmm.params, admm.params, 1e-12)
    assert_equal(fedadmm.params, admm.params, 1e-12)


def test_one_client_without_a_pull_to_the_model_is_local_training_that_goes_on():
    """ρ → 0 and one client: z − θ is what the client moved twice over; w is plain SGD that never restarts."""
    problem, theta = problem_of([40]), theta_of()
    made = method_of("fedadmm", rho=1e-9, lr=0.3, batch_size=2)
    plain, _ = rounds(problem, method_of("fedavg", optimiser="sgd", lr=0.3, batch_size=2), theta)
    duals, _ = rounds(problem, made, theta)
    for name, p in theta.items():
        want = p + 2 * (plain.params[name] - p)
        assert float((duals.params[name] - want).abs().max()) < 1e-6, name


@pytest.mark.usefixtures("workers_are_forked")
@pytest.mark.parametrize("name", ["admm"])
def test_worker_processes_change_nothing_for_clients_that_remember(name):
    problem, theta = problem_of([50, 11, 23, 31, 8]), theta_of(dtype=torch.float32)
    made = build_method(MethodSpec(name, {"batch_size": 2}, keep=0.5, quantise="int8"))
    alone, ours = rounds(problem, made, theta, 3, workers=1)
    together, theirs = rounds(problem, made, theta, 3, workers=2)
    assert_equal(alone.params, together.params, 0)
    assert ours == theirs


@every_method
def test_stacked_clients_equal_clients_one_at_a_time(name):
    problem, theta = problem_of([50, 11, 23, 31]), theta_of()
    made = method_of(name, batch_size=2, epochs=2)
    one, _ = rounds(problem, made, theta, 3, block=1)
    many, _ = rounds(problem, made, theta, 3, block=3)
    assert_equal(one.params, many.params, 1e-10)
