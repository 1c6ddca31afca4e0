"""Masked sums equal plain ones: every method, with clients lost at every stage, over one round and several."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from keyfed.engine.simulate import Simulation
from keyfed.engine.sums import masked as masked_sums
from keyfed.engine.sums import secure_round
from keyfed.engine.sums.masked import MaskedSum, SecureSum
from keyfed.engine.sums.plain import RunningSum, SelfWeighedSum
from keyfed.engine.sums.secure_round import evaluation_of, evaluation_vector_of
from keyfed.errors import SecureSumError
from keyfed.federated import weigh as mediate
from keyfed.federated.cohort import Fate, Work
from keyfed.federated.public.numbers import LOSS_STEP
from keyfed.federated.public.rules import magnitude, privately
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.types import Mediator, Method, Params
from keyfed.federated.weigh import in_two_phases, kept
from keyfed.model.output import Score
from keyfed.private.secagg.threshold import SecureSettings, most_ratio, usual_threshold

from .test_methods import assert_moved, method_of, problem_of, theta_of

CLIENTS = 12  # nine must stay, so three may be lost; what a masked round costs grows with the square of its clients
SIZES = [20 + 5 * (7 * k % CLIENTS) for k in range(CLIENTS)]
LOST = {1: "dropped before upload", 3: "dropped before upload", 8: "dropped before upload"}
TWENTY = [20 + 5 * (7 * k % 20) for k in range(20)]
THREE_OF_TWENTY = {3: "dropped before upload", 8: "dropped before upload", 17: "dropped before upload"}
ADAM = {"optimiser": "adam", "lr": 0.01}
CASES: dict[str, tuple[str, dict]] = {
    "fedavg": ("fedavg", {}),
    "fedavg, adam": ("fedavg", ADAM),
    "fedprox": ("fedprox", {"mu": 0.01}),
    "fedatt": ("fedatt", {}),
    "fedatt, sharp": ("fedatt", {"temperature": 0.05}),
    "fedatt, bounded, frobenius": ("fedatt", {"norm": "frobenius", "bound": 0.5}),
    "fedmed, adaptive": ("fedmed", {"mediation": False}),
    "fedmed, adaptive, sharp": ("fedmed", {"mediation": False, "temperature": 0.01}),
    "fedmed, adaptive, warmer": ("fedmed", {"mediation": False, "temperature": 0.03}),
    "fedsgd": ("fedsgd", {}),
    "fedadam": ("fedadam", ADAM),
    "fedadam, bias corrected": ("fedadam", ADAM | {"bias_correction": True}),
    "fedyogi": ("fedyogi", ADAM),
    "fedadagrad": ("fedadagrad", ADAM),
    "fedavgm": ("fedavgm", {}),
    "fednesterov": ("fednesterov", {}),
    "admm": ("admm", {"rho": 0.01}),
    "admm, uniform": ("admm", {"rho": 0.01, "weights": "uniform"}),
    "liadmm": ("liadmm", {}),
    "fedadmm": ("fedadmm", {}),
    "fedadmm, as published": ("fedadmm", {"server_step": "published"}),
    "fedadmm, late": ("fedadmm", {"server_step": "late"}),
    "noise at the clients": ("fedatt", {"noise": 0.01}),
    "noise at the server": ("fedatt", {"noise": 0.01, "noise_at": "server"}),
}


def fates_of(lost, clients: int) -> dict[str, Fate]:
    return {f"c{k}": Fate(k, Work(), 1.0, lost.get(k)) for k in range(clients)}


def rounds(method: Method, theta: Params, n: int = 1, lost=LOST, sizes=SIZES, **simulation):
    """Run n rounds over all clients; `lost` may be a function of the round."""
    problem = problem_of(sizes)
    state, summaries, costs = initial_state(method, theta), [], []
    with Simulation(problem, **simulation) as federation:
        for round in range(n):
            federation.expect(fates_of(lost(round) if callable(lost) else lost, len(sizes)))
            state, summary = run_round(method, state, problem.store.names, federation)
            summaries.append(summary)
            costs.append(federation.secure)
    return state, summaries, costs


def masked(method: Method, theta: Params, n: int = 1, settings=SecureSettings(), **more):  # noqa: B008
    return rounds(privately(method), theta, n, hide=partial(SecureSum, settings=settings), **more)


def clear(method: Method, theta: Params, n: int = 1, **more):
    """Run the same rounds with the same clamped weights, in the clear: the plain run that a secure one is held to."""

    def sums(hidden):
        return SelfWeighedSum(hidden, RunningSum(hidden.theta), float(most_ratio(usual_threshold(len(hidden.called)))))

    return rounds(privately(method), theta, n, hide=sums, **more)


def alike(case: str) -> Method:
    """The plain method of a case; that of clients with duals weighs all alike, as its secure form does."""
    name, options = CASES[case]
    uniform = {"weights": "uniform"} if name in ("admm", "liadmm", "fedadmm") else {}
    return method_of(name, **options | uniform)


CLAMPED = {"fedatt, sharp", "fedmed, adaptive, sharp"}  # scores that differ by more than ln 13


def difference(got: Params, want: Params, theta: Params) -> float:
    """‖got − want‖ / ‖want − θ‖ over all layers together."""
    wrong = sum(float((got[name] - want[name]).double().square().sum()) for name in theta)
    moved = sum(float((want[name] - theta[name]).double().square().sum()) for name in theta)
    return math.sqrt(wrong / moved)


# Twenty clients for a mean, an attention, duals, and where twenty differ by more than the clamp; else twelve.
BY_TWENTY = {"fedavg", "fedatt", "fedadmm", *CLAMPED}


@pytest.mark.parametrize("case", list(CASES))
def test_a_masked_round_with_three_lost_is_the_plain_one(case):
    count, given = (20, {"lost": THREE_OF_TWENTY, "sizes": TWENTY}) if case in BY_TWENTY else (CLIENTS, {})
    name, options = CASES[case]
    method, theta = method_of(name, **options), theta_of(dtype=torch.float32)
    if case in CLAMPED:
        plain, (one,), _ = clear(method, theta, **given)
    else:
        plain, (one,), _ = rounds(alike(case), theta, **given)
    secure, (other,), (cost,) = masked(method, theta, **given)
    assert_moved(theta, secure.params)
    assert difference(secure.params, plain.params, theta) < 1e-5  # asked for: 1e-4
    assert sorted(other.contributors) == sorted(one.contributors)
    assert len(other.contributors) == cost["survivors"] == count - 3
    for layer, effective in one.effective_clients.items():
        assert other.effective_clients[layer] == pytest.approx(effective, rel=1e-4)
    assert other.weights is None
    assert other.saturated == one.saturated
    assert (other.clamped > 0) == (case in CLAMPED)
    if case in CLAMPED:
        assert one.clamped == other.clamped
        exact, _, _ = rounds(method, theta, **given)
        assert difference(secure.params, exact.params, theta) > 1e-3, "the method without a clamp is another one"


@pytest.mark.parametrize("case", ["fedatt", "fedatt, sharp", "fedmed, adaptive, warmer", "fedadam", "fedadmm"])
def test_several_masked_rounds_with_other_clients_lost_each_time_are_the_plain_ones(case):
    name, options = CASES[case]
    method, theta = method_of(name, **options), theta_of(dtype=torch.float32)

    def lost(round):
        early, late = 5 * round % CLIENTS, (5 * round + 2) % CLIENTS
        return {early: "dropped before report", late: "dropped before upload", (late + 1) % CLIENTS: "late"}

    clamps = case in ("fedatt, sharp", "fedmed, adaptive, warmer")
    plain, ours, _ = clear(method, theta, 3, lost=lost) if clamps else rounds(alike(case), theta, 3, lost=lost)
    secure, theirs, costs = masked(method, theta, 3, lost=lost)
    assert difference(secure.params, plain.params, theta) < 1e-5
    assert any(s.clamped for s in theirs) == clamps
    for one, other, cost in zip(ours, theirs, costs, strict=True):
        assert set(one.contributors) == set(other.contributors)
        assert cost["failed"] is None
        assert (other.saturated, other.clamped) == (one.saturated, one.clamped)


def test_loss_and_tokens_are_those_of_the_clients_in_the_sum():
    theta = theta_of(dtype=torch.float32)
    _, (plain,), _ = rounds(method_of("fedavg", epochs=2), theta, lost={})
    _, (secure,), _ = masked(method_of("fedavg", epochs=2), theta, lost={})
    assert (secure.tokens, secure.worked) == (plain.tokens, plain.worked)
    assert secure.loss == pytest.approx(plain.loss, abs=1e-6)
    _, (fewer,), _ = masked(method_of("fedavg", epochs=2), theta)
    assert fewer.tokens == plain.tokens - sum(SIZES[k] - 1 for k in LOST)


@pytest.mark.parametrize("case", ["fedatt", "fedadmm"])
def test_the_same_run_twice_gives_the_same_bits(case):
    name, options = CASES[case]
    method, theta = method_of(name, **options), theta_of(dtype=torch.float32)
    once, ours, costs = masked(method, theta, 2)
    again, theirs, others = masked(method, theta, 2)
    for layer, p in once.params.items():
        assert torch.equal(p, again.params[layer]), layer
    assert ours == theirs
    assert once.mediator == again.mediator
    assert [c["bytes"] for c in costs] == [c["bytes"] for c in others]


@pytest.mark.usefixtures("workers_are_forked")
def test_blocks_round_alike_and_worker_processes_change_no_bit():
    method, theta = method_of("fedatt", batch_size=2), theta_of(dtype=torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone, _, _ = masked(method, theta, 2)
        stacked, _, _ = masked(method, theta, 2, block=4)
        together, _, _ = masked(method, theta, 2, workers=2)
    finally:
        torch.set_num_threads(threads)
    assert difference(stacked.params, alone.params, theta) < 1e-5
    for layer, p in alone.params.items():
        assert torch.equal(p, together.params[layer]), layer


# The two rules that look at the rounds before


SETTLED = 0.03


def settled(losses: list[float]) -> bool:
    return len(losses) > 1 and abs(losses[-1] - losses[-2]) < SETTLED


def delayed(beta: float, adaptive: Mediator, arrived: set[str]) -> Mediator:
    """FedMed's mediation and top-K by the rounds before, as one would write them with the reports at hand.

    Memory: the mean losses of all rounds, and the K-th lowest loss of the last one.
    """
    parts = [in_two_phases(adaptive), in_two_phases(mediate.by_tokens())]

    def weigh(memory, reports, layers):
        losses, limit = memory
        _, shares = parts[settled(losses)].weigh(None, reports, layers)
        now = sorted(r.loss for client, r in reports.items() if client in arrived)
        highest = math.ceil(now[kept(beta, len(now)) - 1] / LOSS_STEP) * LOSS_STEP
        taken = {c: s for c, s in shares.items() if reports[c].loss <= (limit or highest)}
        return [[*losses, sum(now) / len(now)], highest], taken

    return Mediator(init=lambda: [[], None], weigh=weigh, adaptive=lambda before, after, state: not settled(before[0]))


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_fedmed_masked_is_fedmed_with_a_threshold_and_a_switch_of_the_rounds_before(beta):
    theta = theta_of(dtype=torch.float32)
    twenty = {"lost": THREE_OF_TWENTY, "sizes": TWENTY}
    arrived = {f"c{k}" for k in range(20)} - {f"c{k}" for k in THREE_OF_TWENTY}
    method = method_of("fedmed", threshold=SETTLED, beta=beta, temperature=0.05)
    adaptive = method_of("fedmed", mediation=False, temperature=0.05).mediator
    reference = replace(method, mediator=delayed(beta, adaptive, arrived))
    plain, ours, _ = rounds(reference, theta, 6, **twenty)
    secure, theirs, _ = masked(method, theta, 6, **twenty)
    losses = plain.mediator[0]
    assert {settled(losses[:t]) for t in range(6)} == {False, True}, "the switch must turn, or nothing is compared"
    assert [s.saturated for s in theirs] == [0] * 6
    assert difference(secure.params, plain.params, theta) < 1e-5
    assert [s.adaptive for s in theirs] == [not settled(losses[:t]) for t in range(6)]
    for one, other in zip(ours, theirs, strict=True):
        for layer, effective in one.effective_clients.items():
            assert other.effective_clients[layer] == pytest.approx(effective, rel=1e-4)
    if beta < 1:
        assert min(len(s.contributors) for s in ours) < len(arrived), "some lie above the threshold"
        assert all(len(s.contributors) == len(arrived) for s in theirs), "and nobody sees who"
    exact, _, _ = rounds(method, theta, 6, **twenty)
    assert difference(secure.params, exact.params, theta) > 1e-4, "a round later is not the same rule"


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_the_step_of_fedmed_without_reports_scales_adaptive_rounds_alone(beta):
    problem, turned = problem_of(SIZES), []
    plain, longer = (
        privately(method_of("fedmed", threshold=SETTLED, beta=beta, temperature=0.05, step=step)) for step in (1, 1.2)
    )
    state = initial_state(plain, theta_of())

    def sums(hidden):
        return SelfWeighedSum(hidden, RunningSum(hidden.theta), float(most_ratio(usual_threshold(len(hidden.called)))))

    with Simulation(problem, hide=sums) as federation:
        for _ in range(5):
            ends = []
            for method in (plain, longer):
                federation.expect(fates_of({}, CLIENTS))
                ends.append(run_round(method, state, problem.store.names, federation))
            (one, summary), (other, again) = ends
            assert summary.adaptive == again.adaptive
            for name, p in state.params.items():
                moved = (one.params[name] - p) * (1.2 if summary.adaptive else 1.0)
                torch.testing.assert_close(other.params[name], p + moved, rtol=0, atol=1e-12)
            turned.append(summary.adaptive)
            state = other
    assert turned[:2] == [True, True]
    assert False in turned


# Closed failures


@pytest.mark.parametrize("stage", ["dropped before report", "dropped before upload"])
def test_below_the_threshold_a_round_is_abandoned_and_the_next_one_goes_on(stage):
    method, theta = method_of("fedadmm"), theta_of(dtype=torch.float32)
    most = dict.fromkeys(range(4), stage)  # 8 are left, 9 are needed

    def lost(round):
        return most if round in (0, 2) else {}

    state, summaries, costs = masked(method, theta, 4, lost=lost)
    assert [s.abandoned for s in summaries] == [True, False, True, False]
    assert [c["failed"] is not None for c in costs] == [True, False, True, False]
    assert "8 of 12 clients" in costs[0]["failed"]
    assert all(s.contributors == () and math.isnan(s.loss) for s in summaries if s.abandoned)
    plain, _, _ = rounds(
        alike("fedadmm"), theta, 4, lost=lambda round: dict.fromkeys(range(12), "late") if lost(round) else {}
    )
    assert difference(state.params, plain.params, theta) < 1e-5, "as if nobody had been called in those rounds"


def test_a_cohort_below_the_floor_or_empty_is_abandoned():
    method, theta = privately(method_of("fedatt")), theta_of(dtype=torch.float32)
    for sizes, reason in (([50, 60], "refuses a cohort of 2"), ([], "a threshold of 1 in a cohort of 0")):
        problem = problem_of([50, 60, 70])
        with Simulation(problem, hide=partial(SecureSum, settings=SecureSettings())) as federation:
            state = initial_state(method, theta)
            after, summary = run_round(method, state, problem.store.names[: len(sizes)], federation)
            assert summary.abandoned
            assert reason in federation.secure["failed"]
        assert after.params is theta
        assert after.round == 1
        assert not after.mediator["calibrated"]


def test_too_few_left_for_the_floor_of_clients_is_a_closed_failure_too():
    theta = theta_of(dtype=torch.float32)
    few = dict.fromkeys(range(3), "dropped before report")
    _, (summary,), (cost,) = masked(method_of("fedavg"), theta, settings=SecureSettings(8, floor=10), lost=few)
    assert summary.abandoned
    assert "9 of 12 clients sent their shares; 10 are needed" in cost["failed"]


def altered(monkeypatch, change) -> None:
    """Let clients write other vectors: change(client, done, write), where write is what an honest client does."""
    real = masked_sums.vector_of

    def vector_of(client, done, *rest, silent):
        return change(client, done, lambda done: real(client, done, *rest, silent=silent), *rest)

    monkeypatch.setattr(masked_sums, "vector_of", vector_of)


def several(method: Method, n: int, sizes=SIZES, cohorts=None, theta=None):
    """Run n masked rounds, one after the other; return the states after each, the summaries and the costs."""
    method, problem = privately(method), problem_of(sizes)
    theta = theta_of(dtype=torch.float32) if theta is None else theta
    states, summaries, costs = [initial_state(method, theta)], [], []
    with Simulation(problem, hide=partial(SecureSum, settings=SecureSettings())) as federation:
        for t in range(n):
            names = problem.store.names[: len(sizes) if cohorts is None else cohorts[t]]
            state, summary = run_round(method, states[-1], names, federation)
            states.append(state)
            summaries.append(summary)
            costs.append(federation.secure)
    return states, summaries, costs


def grown(done, factor: float):
    return done._replace(upload={name: u * factor for name, u in done.upload.items()})


def test_clients_out_of_range_take_no_part_and_ranges_grow_for_a_quarter_of_them(monkeypatch):
    far, calls = {f"c{k}" for k in range(6)}, []

    def change(client, done, write, *rest):
        calls.append(client)
        return write(grown(done, 40.0) if client in far and len(calls) > len(TWENTY) else done)

    altered(monkeypatch, change)
    states, summaries, costs = several(method_of("fedprox"), 6, TWENTY)
    refused = [{r.client: r.reason for r in s.refused} for s in summaries]
    assert refused[0] == {}
    assert refused[1] == dict.fromkeys(far, "out of range")
    assert refused[5] == {}
    assert far <= set(summaries[-1].contributors)
    raised = [max(s.mediator["ranges"][name] - e for name, e in s.mediator["first"].items()) for s in states[1:]]
    assert raised[:2] == [0, 2]
    assert [c["raised"] for c in costs[1:]] == [max(0, bits) for bits in raised[:-1]]


def test_one_client_that_is_always_out_of_range_does_not_freeze_the_others(monkeypatch):
    def change(client, done, write, *rest):
        return write(grown(done, 1e9) if client == "c5" else done)

    altered(monkeypatch, change)
    states, summaries, _ = several(method_of("fedavg"), 12)
    assert all([r.reason for r in s.refused] == ["out of range"] for s in summaries)
    for state in states[1:]:
        assert all(e <= state.mediator["first"][name] + 4 for name, e in state.mediator["ranges"].items())
    assert states[-1].params.keys() == states[0].params.keys()
    assert_moved(states[-2].params, states[-1].params)


def test_a_client_of_a_dual_method_that_joins_alone_brings_a_mass_of_one_however_much_text_it_has():
    states, summaries, _ = several(method_of("fedadmm"), 4, [20] * 6 + [2000], [6, 7, 7, 7])
    assert [len(s.contributors) for s in summaries] == [6, 7, 7, 7]
    masses = [{float(m) for name, m in s.server.items() if name.startswith("mass/")} for s in states]
    assert masses == [{0.0}, {6.0}, {7.0}, {7.0}, {7.0}], "by tokens its mass would have been read in round 2"


LIES = {
    "a mass that takes the others' away": ("fedprox", {"mu": 0.01}, (1,), "the mass of layer .* is not its weight"),
    "all shares alike": ("fedprox", {"mu": 0.01}, (0, 1, 2), "the weight of layer .* is below that of its clients"),
    "standing": ("fedadmm", {"weights": "uniform"}, (0, 1, 2, 3), "the weight of layer .* is below that of its"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_client_that_lies_about_its_shares_stops_the_round_and_not_the_model(monkeypatch, lie):
    name, options, parts, message = LIES[lie]

    def change(client, done, write, theta, method, public, members, ratio):
        vector = write(done)
        if client == "c5":  # so that the sum of all shares is a hair above 0, and the mean a billion times too large
            uploads = sum(p.numel() for p in theta.values())
            one = 1 << 31 - (members - 1).bit_length() - 1
            for layer in range(len(theta)):
                for part in parts:
                    vector[uploads + 4 * layer + part] = (1 - (members - 1) * one) % 2**32
        return vector

    altered(monkeypatch, change)
    states, (summary,), (cost,) = several(method_of(name, **options), 1)
    assert re.search("a sum that cannot be right: " + message, cost["failed"])
    assert summary.abandoned
    assert all(torch.equal(p, states[0].params[layer]) for layer, p in states[1].params.items())


@pytest.mark.parametrize(("times", "opens"), [(1.0, True), (0.5, False)])
def test_a_sum_by_tokens_has_at_least_the_least_scale_of_every_client(monkeypatch, times, opens):
    def change(client, done, write, theta, method, public, members, ratio):
        vector = write(done)
        uploads = sum(p.numel() for p in theta.values())
        one = 1 << 31 - (members - 1).bit_length() - 1
        for layer in range(len(theta)):
            for part in (0, 1, 2):
                vector[uploads + 4 * layer + part] = int(times * one / ratio)
        return vector

    altered(monkeypatch, change)
    _, (summary,), (cost,) = several(method_of("fedavg"), 1)
    assert summary.abandoned != opens
    assert opens or re.search("the weight of layer .* is below that of its clients", cost["failed"])


@pytest.mark.parametrize(
    ("what", "message"), [("count", "counts other than"), ("magnitude", "the histogram magnitude")]
)
def test_a_client_that_counts_twice_stops_the_round(monkeypatch, what, message):
    if what == "count":
        real = secure_round.counts_of
        monkeypatch.setattr(secure_round, "counts_of", lambda done: real(done) | {"count": 1.5})
    else:
        monkeypatch.setattr(secure_round, "magnitude", lambda largest: [1.0, *magnitude(largest)[1:]])
    states, (summary,), (cost,) = several(method_of("fedavg"), 1)
    assert f"a sum that cannot be right: {message}" in cost["failed"].replace("it counts", "counts")
    assert summary.abandoned
    assert states[1].params is states[0].params


@pytest.mark.parametrize("case", ["fedavg", "fedatt", "fedadmm", "liadmm"])
def test_a_mean_beyond_the_bound_of_every_client_is_refused_and_one_within_is_not(monkeypatch, case):
    norms, sums = [], []
    real = masked_sums.aggregate_of

    def change(client, done, write, theta, *rest):
        moved = ((u - theta[n] if done.joining else u) for n, u in done.upload.items())
        norms.append(math.sqrt(sum(float(u.double().square().sum()) for u in moved)))
        return write(done)

    altered(monkeypatch, change)
    monkeypatch.setattr(masked_sums, "aggregate_of", lambda *args: sums.append(args) or real(*args))
    name, options = CASES[case]
    several(method_of(name, **options), 3)
    for args in sums:
        real(*args, bound=max(norms))
        with pytest.raises(SecureSumError, match=r"a sum that cannot be right: the mean of layer .* is beyond bound"):
            real(*args, bound=max(norms) / 1e3)


def test_clients_larger_than_all_before_are_counted_and_fit_later_if_they_are_most():
    states, summaries, _ = several(method_of("fedavg"), 3, [40] * 3 + [900] * 6, [3, 9, 9])
    assert [(s.saturated, s.clamped) for s in summaries] == [(0, 0), (6, 6), (0, 3)]
    assert [s.mediator["rule"]["most"] for s in states[1:]] == [64, 1024, 1024]
    _, summaries, _ = several(method_of("fedavg"), 3, [40] * 6 + [900], [6, 7, 7])
    assert [(s.saturated, s.clamped) for s in summaries] == [(0, 0), (1, 1), (1, 1)], "one client alone moves nothing"


def test_a_layer_that_stands_still_at_first_has_room_when_it_moves():
    theta = theta_of(dtype=torch.float32)
    problem = replace(problem_of(SIZES), frozen=frozenset({"embedding.weight"}), frozen_rounds=2)
    method = method_of("fedavg")

    def go(made, **simulation):
        state = initial_state(made, theta)
        with Simulation(problem, **simulation) as federation:
            for _ in range(4):
                state, summary = run_round(made, state, problem.store.names, federation)
                assert not summary.refused
        return state

    assert (
        difference(
            go(privately(method), hide=partial(SecureSum, settings=SecureSettings())).params, go(method).params, theta
        )
        < 1e-5
    )


# Sums that are handed in


@pytest.mark.parametrize("case", ["fedavg", "fedatt", "fedmed, adaptive", "fedadmm"])
def test_hidden_rounds_in_the_clear_are_the_plain_ones_in_whatever_sum_they_are_given(case):
    class Counting(RunningSum):
        added = 0

        def add(self, client, upload, share):
            Counting.added += 1
            assert share.log is None or not hidden, "no logarithm leaves a client that weighs itself"
            super().add(client, upload, share)

    name, options = CASES[case]
    method, theta, states = method_of(name, **options), theta_of(dtype=torch.float32), []
    for hidden in (False, True):
        state, summaries, costs = rounds(privately(method) if hidden else alike(case), theta, 2, gather=Counting)
        states.append(state)
        assert costs == [None, None]
        assert all(s.weights is None for s in summaries) == hidden
    assert Counting.added == 2 * 2 * (CLIENTS - 3)
    assert difference(states[1].params, states[0].params, theta) < 1e-5


# What the server sees


def test_a_masked_vector_is_not_the_vector_and_evaluations_add_up(monkeypatch):
    taken = {}
    real = MaskedSum.add

    def add(self, client, vector):
        mask = self._collector.take_masked
        monkeypatch.setattr(
            self._collector, "take_masked", lambda c, v: (taken.__setitem__(c, (vector, v)), mask(c, v))[1]
        )
        real(self, client, vector)

    monkeypatch.setattr(MaskedSum, "add", add)
    masked(method_of("fedavg"), theta_of(dtype=torch.float32))
    assert len(taken) == CLIENTS - 3
    for plain, sent in taken.values():
        assert (plain == sent[: len(plain)]).mean() < 0.01
    one, two = Score(100, 250.5, 20, 40, 80, 10, 25, 3), Score(7, 30.25, 1, 2, 5, 1, 2, 0)
    total = evaluation_vector_of(one, 3) + evaluation_vector_of(two, 3)
    assert evaluation_of(total, 3, 3) == (one + two, 2)
