"""The methods of the sources against limits, closed forms and direct transcriptions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from keyfed.config.load import Config, TrainConfig
from keyfed.engine.problem import measure, solve_block
from keyfed.engine.simulate import Simulation
from keyfed.errors import ConfigError
from keyfed.federated import distance, local, server, weigh
from keyfed.federated.cohort import Fate, Work, derive_seed
from keyfed.federated.descent import run_steps
from keyfed.federated.round import initial_state, run_round
from keyfed.federated.types import Aggregate, Gradient, Report
from keyfed.lab.experiment.cell import Workspace, config_of
from keyfed.lab.experiment.grid import cells_of, load_study
from keyfed.run import plan
from keyfed.run.metrics_line import report_bytes, round_traffic, sizes_of

from .quadratic import flat, quadratic
from .test_methods import SPEC, aggregate_of, assert_equal, assert_moved, method_of, problem_of, rounds, theta_of

SIZES = [50, 11, 23, 31]


def identical(a, b) -> None:
    assert list(a) == list(b)
    for name, p in a.items():
        assert torch.equal(p, b[name]), name


# FedProx


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("block", [1, 3])
def test_fedprox_without_its_term_is_fedavg(optimiser, block):
    problem, theta = problem_of(SIZES), theta_of(dtype=torch.float32)
    options = {"optimiser": optimiser, "lr": 0.01, "epochs": 2, "batch_size": 2}
    fedavg = method_of(**options)
    by_tokens, _ = rounds(problem, method_of("fedprox", mu=0.0, by_tokens=True, **options), theta, 2, block=block)
    identical(by_tokens.params, rounds(problem, fedavg, theta, 2, block=block)[0].params)
    uniform, _ = rounds(problem, method_of("fedprox", mu=0.0, **options), theta, 2, block=block)
    evenly = replace(fedavg, mediator=weigh.uniform())
    identical(uniform.params, rounds(problem, evenly, theta, 2, block=block)[0].params)
    pulled, _ = rounds(problem, method_of("fedprox", mu=0.5, **options), theta, 2, block=block)
    assert_moved(uniform.params, pulled.params)


class Slopes:
    """Two clients whose gradient does not depend on where they are; the second has no text for the last step."""

    clients = 2
    pace = None
    whole = torch.ones(2)

    run_steps = run_steps

    def __init__(self, slopes: list[list[float]]) -> None:
        self.slopes = slopes

    def steps(self, epoch):
        for number, slope in enumerate(self.slopes):
            tokens = torch.tensor([1.0, float(number < len(self.slopes) - 1)], dtype=torch.float64)
            grads = torch.tensor([slope, slope], dtype=torch.float64) * tokens[:, None]
            yield lambda params, tokens=tokens, grads=grads: Gradient(tokens, tokens, {"x": grads.clone()})


def test_the_proximal_gradient_is_added_after_clipping():
    slopes, lr, mu, clip = [[3.0, 4.0], [0.3, 0.4], [-6.0, 8.0]], 0.5, 0.3, 1.0
    theta = {"x": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    clipped = [np.array([0.6, 0.8]), np.array([0.3, 0.4]), np.array([-0.6, 0.8])]
    got = (
        local.local_solver(local.LocalOptions("sgd", lr=lr, clip=clip), mu).solve(theta, Slopes(slopes), 0).upload["x"]
    )
    for client, steps in enumerate((3, 2)):
        moved = np.zeros(2)  # w − θ
        for g in clipped[:steps]:
            moved = moved - lr * (g + mu * moved)
        np.testing.assert_allclose(got[client].numpy(), moved, atol=1e-15)
    got = (
        local.local_solver(local.LocalOptions("adam", lr=lr, clip=clip), mu).solve(theta, Slopes(slopes), 0).upload["x"]
    )
    for client, steps in enumerate((3, 2)):
        w = torch.nn.Parameter(theta["x"].clone())
        optimiser = torch.optim.Adam([w], lr=lr)
        for g in clipped[:steps]:
            w.grad = torch.from_numpy(g) + mu * (w.detach() - theta["x"])
            optimiser.step()
        torch.testing.assert_close(got[client], w.detach() - theta["x"], rtol=0, atol=1e-12)


def test_a_stronger_proximal_term_keeps_clients_nearer():
    problem, theta = problem_of([60]), theta_of()
    for optimiser, lr in (("sgd", 0.5), ("adam", 0.01)):
        moved = []
        for mu in (0.0, 0.1, 1.0):
            method = method_of("fedprox", mu=mu, optimiser=optimiser, lr=lr, epochs=3, batch_size=2)
            upload = solve_block(problem, theta, [0], method, 0).upload
            moved.append(sum(float((u**2).sum()) for u in upload.values()))
        assert moved[0] > moved[1] > moved[2], optimiser


# FedAtt


def test_fedatt_with_equal_distances_is_the_uniform_mean_times_the_step():
    problem, theta = problem_of(SIZES), theta_of()
    method = method_of("fedatt", lr=0.5, batch_size=2, step=1.2)

    def alike(theta, upload):
        return {name: torch.full((u.shape[0],), 7.25, dtype=torch.float64) for name, u in upload.items()}

    got, (summary,) = rounds(problem, replace(method, distance=alike), theta)
    uploads = [solve_block(problem, theta, [k], method, 0).upload for k in range(len(SIZES))]
    for name, p in theta.items():
        want = p + 1.2 * sum(u[name][0] for u in uploads) / len(SIZES)
        assert float((got.params[name] - want).abs().max()) < 1e-12
    assert all(e == pytest.approx(len(SIZES)) for e in summary.effective_clients.values())


@pytest.mark.parametrize("norm", ["spectral", "frobenius"])
def test_fedatt_is_its_equations(norm):
    problem, theta = problem_of(SIZES), theta_of()
    method = method_of("fedatt", lr=0.5, batch_size=2, norm=norm, temperature=0.2, step=1.3)
    got, (summary,) = rounds(problem, method, theta, block=3)
    uploads = [solve_block(problem, theta, [k], method, 0).upload for k in range(len(SIZES))]
    for name, p in theta.items():
        order = 2 if p.dim() == 2 and norm == "spectral" else None
        scores = torch.stack([torch.linalg.norm(u[name][0], ord=order) for u in uploads])
        weights = torch.softmax(scores / 0.2, 0)
        want = p + 1.3 * sum(w * u[name][0] for w, u in zip(weights, uploads, strict=True))
        assert float((got.params[name] - want).abs().max()) < 1e-12
        assert summary.effective_clients[name] == pytest.approx(float(1 / (weights**2).sum()))


@pytest.mark.parametrize(("name", "step"), [("fedavg", 1.0), ("fedatt", 1.5)])
@pytest.mark.parametrize("at", ["client", "client-first", "sum", "server"])
def test_the_noise_of_the_paper(name, step, at):
    """Equation 6: Σγ_k of the clients' noises, times the step. Equation 5: one noise for m clients, divided by m.

    At the server: β on θ' itself, whatever the step.
    """
    problem, theta = problem_of([23] * 4), theta_of()
    options = {"lr": 0.5, "batch_size": 2} | ({"step": step, "temperature": 1e9} if name == "fedatt" else {})
    clean, quiet = rounds(problem, method_of(name, **options), theta)
    noisy, loud = rounds(problem, method_of(name, noise=0.05, noise_at=at, **options), theta)
    again, _ = rounds(problem, method_of(name, noise=0.05, noise_at=at, **options), theta, block=3)
    assert_equal(noisy.params, again.params, 1e-12)
    added = torch.cat([(noisy.params[n] - p).reshape(-1) for n, p in clean.params.items()])
    want = {"server": 0.05, "sum": 0.05 * step / 4}.get(at, 0.05 * step / math.sqrt(4))
    assert float(added.std()) == pytest.approx(want, rel=0.15)
    assert abs(float(added.mean())) < 4 * want / math.sqrt(added.numel())
    same = quiet[0].effective_clients == loud[0].effective_clients
    assert same == (at != "client-first" or name == "fedavg")  # whether distances are measured before the noise
    silent, _ = rounds(problem, method_of(name, noise=0.0, noise_at=at, **options), theta)
    identical(clean.params, silent.params)
    still = method_of(name, noise=0.05, noise_at=at, **{**options, "lr": 1e-12})
    once, twice = (rounds(problem, still, theta, n)[0].params for n in (1, 2))
    for n, p in theta.items():  # a new round, new noise
        assert float((twice[n] - 2 * once[n] + p).abs().max()) > 1e-3


def test_fedsgd_as_fedatt_defines_it_is_one_epoch_of_everybody_then_the_mean():
    """The row of fedatt-table2: all clients, each one epoch of descent over its text, then Σ n_k/n w_k."""
    study = load_study("fedatt-table2", Path(__file__).parents[2] / "studies")
    row = next(c for c in cells_of(study, "standard") if c.labels["method"] == "FedSGD, one epoch")
    config = config_of(row.settings, row.seed, Workspace(Path("runs")))
    assert (config.method, config.options["epochs"], config.participation.fraction) == ("fedavg", 1, 1.0)
    problem, theta = problem_of(SIZES), theta_of()
    method = method_of(config.method, lr=0.5, batch_size=2, epochs=config.options["epochs"])
    got, (summary,) = rounds(problem, method, theta)
    alone = [solve_block(problem, theta, [k], method, 0) for k in range(len(SIZES))]
    tokens = [int(one.tokens[0]) for one in alone]
    assert summary.worked == sum(tokens) == sum(size - 1 for size in SIZES)  # everybody's text, once
    for name, p in theta.items():
        want = sum(n * (p + one.upload[name][0]) for n, one in zip(tokens, alone, strict=True)) / sum(tokens)
        assert float((got.params[name] - want).abs().max()) < 1e-12


def noise_of(problem, method, theta, *purpose):
    """The noise that a place of the first round draws."""
    return method.noise.draw(theta, torch.Generator().manual_seed(derive_seed(problem.seed, 0, *purpose)))


def test_the_noise_inside_the_sum_is_equation_5():
    """θ' = θ + (Σ Δ_k + β N) / m, with the noise given; m is the number of clients."""
    problem, theta = problem_of([23] * 4), theta_of()
    method = method_of("fedavg", lr=0.5, batch_size=2, noise=0.05, noise_at="sum")
    got, _ = rounds(problem, method, theta)
    drawn = noise_of(problem, method, theta, "server noise")
    uploads = [solve_block(problem, theta, [k], method, 0).upload for k in range(4)]
    for name, p in theta.items():
        want = p + (sum(u[name][0] for u in uploads) + drawn[name]) / 4
        assert float((got.params[name] - want).abs().max()) < 1e-12


def test_attention_after_noise_is_equations_2_and_6_of_what_clients_send():
    problem, theta = problem_of(SIZES), theta_of()
    options = {"lr": 0.5, "batch_size": 2, "temperature": 0.2, "step": 1.3, "noise": 0.3}
    method = method_of("fedatt", noise_at="client-first", **options)
    got, (summary,) = rounds(problem, method, theta, block=3)
    sent = []
    for k in range(len(SIZES)):
        noise = noise_of(problem, method, theta, problem.names[k], "noise")
        upload = solve_block(problem, theta, [k], method, 0).upload
        sent.append({name: u[0] + noise[name] for name, u in upload.items()})
    for name, p in theta.items():
        scores = torch.stack([torch.linalg.norm(w[name], ord=2 if p.dim() == 2 else None) for w in sent])
        weights = torch.softmax(scores / 0.2, 0)
        want = p + 1.3 * sum(a * w[name] for a, w in zip(weights, sent, strict=True))
        assert float((got.params[name] - want).abs().max()) < 1e-12
        assert summary.effective_clients[name] == pytest.approx(float(1 / (weights**2).sum()))
    before, _ = rounds(problem, method_of("fedatt", noise_at="client", **options), theta)
    assert max(float((got.params[name] - p).abs().max()) for name, p in before.params.items()) > 1e-3


# Distances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (9, 9), (1, 5), (5, 1), (6,), (1,)])
def test_norms_are_those_of_torch(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    change = {"x": torch.randn(4, *shape, generator=generator, dtype=dtype)}
    theta = {"x": torch.zeros(shape, dtype=dtype)}
    got = distance.spectral()(theta, change)["x"]
    assert got.shape == (4,)
    if len(shape) == 2:
        want = torch.linalg.matrix_norm(change["x"].double(), ord=2)
    else:
        want = torch.linalg.vector_norm(change["x"].double(), dim=1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    flat = torch.linalg.vector_norm(change["x"].double().reshape(4, -1), dim=1)
    torch.testing.assert_close(distance.frobenius()(theta, change)["x"], flat)


def js(p: np.ndarray, q: np.ndarray) -> float:
    """Jensen–Shannon divergence as it is written, in nats."""
    m = (p + q) / 2

    def kl(a: np.ndarray) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, m, strict=True) if x > 0)

    return kl(p) / 2 + kl(q) / 2


def as_distributions(theta: np.ndarray, client: np.ndarray, reading: str) -> tuple[np.ndarray, np.ndarray]:
    if reading == "absolute":
        return np.abs(theta) / np.abs(theta).sum(), np.abs(client) / np.abs(client).sum()
    if reading == "softmax":
        return np.exp(theta) / np.exp(theta).sum(), np.exp(client) / np.exp(client).sum()
    if reading == "raw":  # equation 2 to the letter: nothing in the paper makes weights a distribution
        return np.abs(theta), np.abs(client)
    both = np.concatenate([theta, client])
    edges = np.linspace(both.min(), both.max(), distance.BINS + 1)
    return np.histogram(theta, edges)[0] / theta.size, np.histogram(client, edges)[0] / client.size


@pytest.mark.parametrize("reading", ["absolute", "softmax", "histogram", "raw"])
def test_the_divergence_is_its_formula(reading):
    rng = np.random.default_rng(4)
    theta, change = rng.normal(size=(13, 5)), rng.normal(size=(3, 13, 5)) * np.array([1e-3, 1, 30])[:, None, None]
    theta[0, :3] = 0
    change[:, 0, 0] = 0
    got = distance.jensen_shannon(reading)({"x": torch.tensor(theta)}, {"x": torch.tensor(change)})["x"]
    for k in range(3):
        want = js(*as_distributions(theta.ravel(), (theta + change[k]).ravel(), reading))
        assert float(got[k]) == pytest.approx(want, rel=1e-9, abs=1e-14)
        assert 0 <= float(got[k]) <= distance.most_divergence(reading)


@pytest.mark.parametrize("reading", ["absolute", "softmax", "histogram"])
def test_the_divergence_of_extremes_is_a_number(reading):
    measured = distance.jensen_shannon(reading)
    zeros = torch.zeros(3, 4)
    assert measured({"x": zeros[0]}, {"x": zeros})["x"].tolist() == [0, 0, 0]
    apart = torch.tensor([[-3e6, 1e6, 0.0, 0.0]])
    value = float(measured({"x": torch.tensor([1e6, 0.0, 0.0, 0.0])}, {"x": apart})["x"])
    assert 0 < value <= math.log(2) + 1e-12
    same = torch.tensor([0.3, -0.2])
    assert float(measured({"x": same}, {"x": torch.zeros(1, 2)})["x"]) == 0


def test_distances_of_rubbish_are_nan_and_do_not_touch_the_others():
    change = torch.ones(3, 4, 2)
    change[1, 0, 0] = math.nan
    change[2, 0, 0] = math.inf
    for measured in (distance.spectral(), distance.frobenius(), distance.jensen_shannon()):
        first, *rest = measured({"x": torch.zeros(4, 2)}, {"x": change})["x"].tolist()
        assert math.isfinite(first)
        assert all(math.isnan(r) for r in rest)


# FedMed


def report(client: str, loss: float, tokens: int = 10, d: float = 0.0) -> Report:
    return Report(client, tokens, loss, tokens, {"x": d})


def test_the_switch_by_hand():
    switch = weigh.switch_on_loss(weigh.softmax_of_distance(), weigh.by_tokens(), threshold=0.1)
    memory = switch.init()
    chosen = []
    # Means of all losses, each client alike: 3.0, 2.85, 2.7, 2.75, 2.9, 2.0
    for losses in [(4.0, 2.0), (3.9, 1.8), (3.0, 2.4), (2.75, 2.75), (2.899, 2.901), (2.0, 2.0)]:
        reports = {c: report(c, loss, tokens) for c, loss, tokens in zip("ab", losses, (1, 1000), strict=True)}
        memory, shares = switch.weigh(memory, reports, ["x"])
        chosen.append("adaptive" if shares["a"].log is not None else "tokens")
    assert chosen == ["adaptive", "adaptive", "adaptive", "tokens", "adaptive", "adaptive"]
    assert memory["loss"] == 2.0
    assert switch.weigh(memory, {}, ["x"]) == (memory, {})


def test_a_threshold_of_exactly_the_change_is_adaptive():
    switch = weigh.switch_on_loss(weigh.softmax_of_distance(), weigh.by_tokens(), threshold=0.25)
    memory, _ = switch.weigh(switch.init(), {"a": report("a", 1.0)}, ["x"])
    _, at = switch.weigh(memory, {"a": report("a", 0.75)}, ["x"])
    _, below = switch.weigh(memory, {"a": report("a", 0.875)}, ["x"])
    assert at["a"].log is not None
    assert below["a"].log is None


def test_top_k_by_hand():
    reports = {c: report(c, loss) for c, loss in [("e", 1.0), ("b", 2.0), ("d", 0.5), ("a", 2.0), ("c", 9.0)]}
    for beta, want in [
        (0.2, {"d"}),
        (0.01, {"d"}),
        (0.5, {"d", "e", "a"}),
        (0.8, {"d", "e", "a", "b"}),
        (1.0, set("abcde")),
    ]:
        mediator = weigh.top_k(beta, weigh.uniform())
        memory, shares = mediator.weigh(mediator.init(), reports, ["x"])
        assert set(shares) == want, beta
        assert memory is None
    switch = weigh.top_k(0.4, weigh.switch_on_loss(weigh.softmax_of_distance(), weigh.by_tokens()))
    memory, _ = switch.weigh(switch.init(), reports, ["x"])
    assert memory["loss"] == pytest.approx(14.5 / 5)  # of all reports, not of the two that upload


def test_fedmed_is_its_equations():
    problem, theta = problem_of(SIZES), theta_of()
    method = method_of("fedmed", lr=0.5, batch_size=2, temperature=0.01, threshold=1e9, beta=0.5)
    solved = [solve_block(problem, theta, [k], method, 0) for k in range(len(SIZES))]
    best = sorted(range(len(SIZES)), key=lambda k: float(solved[k].loss))[:2]
    first, (one,) = rounds(problem, method, theta)
    assert one.contributors == tuple(f"c{k}" for k in sorted(best))
    for name, p in theta.items():
        d = torch.stack([distance.jensen_shannon()(theta, solved[k].upload)[name][0] for k in best])
        weights = torch.softmax(d / 0.01, 0)
        want = p + sum(w * solved[k].upload[name][0] for w, k in zip(weights, best, strict=True))
        assert float((first.params[name] - want).abs().max()) < 1e-12
    # From the second round on, below such a threshold, it is the mean by tokens of the two best.
    second, (_, two) = rounds(problem, method, theta, 2)
    solved = [solve_block(problem, first.params, [k], method, 1) for k in range(len(SIZES))]
    best = [int(c[1:]) for c in two.contributors]
    tokens = [SIZES[k] - 1 for k in best]
    for name, p in first.params.items():
        want = p + sum(n * solved[k].upload[name][0] for n, k in zip(tokens, best, strict=True)) / sum(tokens)
        assert float((second.params[name] - want).abs().max()) < 1e-12


def algorithm_1(problem, theta, cohorts, *, eta, epsilon, beta, temperature, lr, epochs):
    """FedMed's algorithm 1 as printed, in numpy on quadratics: θ, branch (A or F) and uploading clients by round."""
    layers, last = (slice(0, 2), slice(2, 4)), None
    matrix, centre, n = problem.matrix.numpy(), problem.centre.numpy(), np.array(problem.tokens, dtype=float)
    for cohort in cohorts:
        w, loss = {}, {}
        for k in cohort:
            w[k] = theta.copy()
            for _ in range(epochs):
                off = w[k] - centre[k]
                loss[k] = 0.5 * off @ matrix[k] @ off
                w[k] = w[k] - lr * matrix[k] @ off
        mean = sum(loss.values()) / len(cohort)
        top = sorted(cohort, key=lambda k: (loss[k], k))[: max(1, math.floor(beta * len(cohort) + 0.5))]
        if last is None or abs(mean - last) >= epsilon:  # line 13: equations 2 to 5
            after = theta.copy()
            for layer in layers:
                p = np.abs(theta[layer]) / np.abs(theta[layer]).sum()
                d = np.array([js(p, np.abs(w[k][layer]) / np.abs(w[k][layer]).sum()) for k in top])
                gamma = np.exp(d / temperature) / np.exp(d / temperature).sum()
                after[layer] = theta[layer] - eta * sum(
                    g * (theta[layer] - w[k][layer]) for g, k in zip(gamma, top, strict=True)
                )
            branch = "A"
        else:  # line 15: the average of the clients' weights, without η
            branch, after = "F", sum(n[k] * w[k] for k in top) / sum(n[k] for k in top)
        theta, last = after, mean
        yield theta, branch, {f"q{k}" for k in top}


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_fedmed_is_algorithm_1_at_a_step_of_its_own(beta):
    problem = quadratic()
    options = {"lr": 0.05, "epochs": 2, "temperature": 0.01, "beta": beta}
    method = method_of("fedmed", clip=None, step=1.2, threshold=1.2, batch_size=1, **options)
    start = np.array([1.0, -2.0, 0.5, 3.0])
    cohorts = [[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6], *[[*range(8)]] * 3]
    state = initial_state(method, {"a": torch.tensor(start[:2]), "b": torch.tensor(start[2:])})
    branches = ""
    with Simulation(problem, block=8) as federation:
        printed = algorithm_1(problem, start, cohorts, eta=1.2, epsilon=1.2, **options)
        for cohort, (want, branch, top) in zip(cohorts, printed, strict=True):
            federation.expect({f"q{k}": Fate(k, Work(), 0.0, None) for k in cohort})
            state, summary = run_round(method, state, [f"q{k}" for k in cohort], federation)
            np.testing.assert_allclose(flat(state.params).numpy(), want, rtol=0, atol=1e-12)
            assert (summary.adaptive, set(summary.contributors)) == (branch == "A", top)
            branches += branch
    assert branches.count("A") >= 2
    assert branches.count("F") >= 2
    with pytest.raises(ConfigError, match=r"step=1\.2 is of adaptive rounds"):
        method_of("fedmed", step=1.2, adaptive=False, mediation=False)


def test_the_loss_at_the_tail_is_that_of_the_trained_weights_on_their_own_text():
    problem, theta = problem_of(SIZES), theta_of()
    options = {"lr": 0.5, "batch_size": 2, "epochs": 2}
    clients = list(range(len(SIZES)))
    tail = solve_block(problem, theta, clients, method_of("fedmed", loss="tail", **options), 0)
    plain = solve_block(problem, theta, clients, method_of("fedmed", **options), 0)
    identical(tail.upload, plain.upload)
    assert torch.equal(tail.worked, plain.worked)
    look = method_of("fedsgd", batch_size=2)  # one pass that takes no step
    for k in clients:
        after = {name: p + tail.upload[name][k] for name, p in theta.items()}
        assert float(tail.loss[k]) == pytest.approx(float(solve_block(problem, after, [k], look, 0).loss), abs=1e-12)
    assert float((tail.loss - plain.loss).abs().min()) > 1e-3


def test_fedmed_goes_by_the_loss_at_the_tail():
    """On quadratics a client's loss as trained is that before its last step."""
    problem, start = quadratic(), {"a": torch.ones(2).double(), "b": torch.ones(2).double()}
    method = method_of("fedmed", clip=None, lr=0.3, batch_size=1, beta=0.25, loss="tail")
    after = flat(start) - 0.3 * (problem.matrix @ (flat(start) - problem.centre)[:, :, None])[:, :, 0] - problem.centre
    tail = 0.5 * (after * (problem.matrix @ after[:, :, None])[:, :, 0]).sum(1)
    with Simulation(problem, block=8) as federation:
        federation.expect({f"q{k}": Fate(k, Work(), 0.0, None) for k in range(8)})
        state, summary = run_round(method, initial_state(method, start), problem.names, federation)
    assert state.mediator["loss"] == pytest.approx(float(tail.mean()), abs=1e-12)
    assert set(summary.contributors) == {f"q{k}" for k in tail.argsort()[:2].tolist()}


def test_the_raw_reading_lets_one_client_be_everything():
    problem, theta = problem_of(SIZES), {name: 100 * p for name, p in theta_of().items()}
    method = method_of("fedmed", lr=5.0, clip=None, batch_size=2, reading="raw", mediation=False)
    _, (summary,) = rounds(problem, method, theta)
    _, (usual,) = rounds(problem, method_of("fedmed", lr=5.0, clip=None, batch_size=2, mediation=False), theta)
    assert min(summary.effective_clients.values()) < 1.5
    assert min(usual.effective_clients.values()) > 3.5


def test_fedmed_without_its_parts_is_fedavg():
    problem, theta = problem_of(SIZES), theta_of()
    bare = method_of("fedmed", lr=0.5, batch_size=2, adaptive=False, mediation=False)
    identical(
        rounds(problem, bare, theta, 2)[0].params, rounds(problem, method_of(lr=0.5, batch_size=2), theta, 2)[0].params
    )


def test_top_k_uploads_half_the_models_and_reports_all():
    problem, theta = problem_of(SIZES), theta_of()
    ledger = {}
    for key, method in {
        "fedavg": method_of(lr=0.5, batch_size=2),
        "all": method_of("fedmed", lr=0.5, batch_size=2),
        "half": method_of("fedmed", lr=0.5, batch_size=2, beta=0.5),
    }.items():
        sizes = replace(sizes_of(method, theta), down=1000, up=1000)
        _, summaries = rounds(problem, method, theta, 3)
        traffic = [round_traffic(sizes, len(SIZES), s) for s in summaries]
        ledger[key] = {k: sum(t[k] for t in traffic) for k in ("down", "up", "control")}
    assert ledger["half"]["up"] * 2 == ledger["fedavg"]["up"] == 3 * 4 * 1000
    assert ledger["half"]["down"] == ledger["all"]["down"] == ledger["fedavg"]["down"]
    assert ledger["half"]["control"] == ledger["all"]["control"]
    # FedMed's reports are longer than FedAvg's by the distances they carry, and that is counted.
    assert ledger["all"]["control"] - ledger["fedavg"]["control"] == 12 * (report_bytes(list(theta)) - report_bytes())


def test_the_loss_of_a_round_is_that_of_all_who_trained():
    problem, theta = problem_of(SIZES), theta_of()
    _, (all_upload,) = rounds(problem, method_of(lr=0.5, batch_size=2), theta)
    _, (half,) = rounds(problem, method_of("fedmed", lr=0.5, batch_size=2, beta=0.5), theta)
    assert (half.loss, half.tokens, half.worked) == (all_upload.loss, all_upload.tokens, all_upload.worked)


# Server optimisers


@pytest.mark.parametrize(
    ("name", "options", "close"),
    [
        ("fedadam", {"beta1": 0.0, "beta2": 0.0, "tau": 1e8, "server_lr": 1e8}, 1e-6),
        ("fedavgm", {"beta": 0.0, "server_lr": 1.0}, 0),
        ("fednesterov", {"beta": 0.0, "server_lr": 1.0}, 1e-15),
    ],
)
def test_server_optimisers_without_memory_are_fedavg(name, options, close):
    problem, theta = problem_of(SIZES), theta_of()
    got, _ = rounds(problem, method_of(name, lr=0.5, batch_size=2, **options), theta, 3)
    want, _ = rounds(problem, method_of(lr=0.5, batch_size=2), theta, 3)
    assert_equal(got.params, want.params, close)


def by_hand(rule: str, deltas: list[float], lr: float, b1: float, b2: float, tau: float) -> list[float]:
    """Reddi et al., algorithm 2, on one number."""
    x, m, v, out = 1.0, 0.0, tau**2, []
    for d in deltas:
        m = b1 * m + (1 - b1) * d
        if rule == "adam":
            v = b2 * v + (1 - b2) * d**2
        elif rule == "yogi":
            v = v - (1 - b2) * d**2 * np.sign(v - d**2)
        else:
            v = v + d**2
        x = x + lr * m / (math.sqrt(v) + tau)
        out.append(x)
    return out


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
def test_adaptive_rules_are_the_published_algorithm(rule):
    deltas = [0.3, -0.1, 0.0, 0.002, -0.5, 0.04]
    lr, b1, b2, tau = 0.1, 0.8, 0.9, 0.05
    made = server.adagrad(lr, b1, tau) if rule == "adagrad" else getattr(server, rule)(lr, b1, b2, tau)
    params = {"x": torch.ones(1, dtype=torch.float64)}
    state, got = made.init(params), []
    for d in deltas:
        total = {"x": torch.tensor([4 * d], dtype=torch.float64)}
        params, state = made.step(params, Aggregate(total, {"x": 4.0}, {"x": 4.0}, {"x": 4.0}, ("c",)), state)
        got.append(float(params["x"]))
    assert got == pytest.approx(by_hand(rule, deltas, lr, b1, b2, tau), abs=1e-14)


@pytest.mark.parametrize("lost", [(), (2, 3)])
def test_server_adam_with_bias_correction_is_kingma_and_ba_and_torch(lost):
    """Over rounds in which the layer got nothing no step is counted, as torch counts none without a gradient."""
    lr, b1, b2, tau = 0.001, 0.9, 0.999, 1e-7
    rule = server.adam(lr, b1, b2, tau, bias_correction=True)
    ours = {"x": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    theirs = torch.nn.Parameter(ours["x"].clone())
    optimiser = torch.optim.Adam([theirs], lr=lr, betas=(b1, b2), eps=tau)
    state = rule.init(ours)
    x, m, v, t = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2), 0
    for number, d in enumerate(([0.5, 0.1], [-0.2, 0.3], [0.0, 0.0], [0.4, -1e-7], [0.01, 20.0], [0.3, 0.2])):
        mass, upload = float(number not in lost), torch.tensor(d, dtype=torch.float64)
        total = {"x": 3 * mass * upload}
        ours, state = rule.step(ours, Aggregate(total, *[{"x": 3 * mass}] * 3, ("c",)), state)
        theirs.grad = -upload if mass else None
        optimiser.step()
        if mass:
            g, t = -np.array(d), t + 1
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            x = x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + tau)
        torch.testing.assert_close(ours["x"], theirs.detach(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(ours["x"].numpy(), x, rtol=0, atol=1e-12)
    assert float(state["taken/x"]) == t == 6 - len(lost)


def test_fedadam_with_bias_correction_goes_on_from_a_stored_state_and_is_another_step():
    problem, theta = problem_of(SIZES), theta_of()
    options = {"lr": 0.5, "batch_size": 2, "server_lr": 0.01, "beta2": 0.999, "tau": 1e-7}
    adam = method_of("fedadam", bias_correction=True, **options)
    state, mean = initial_state(adam, theta), aggregate_of(problem, adam, theta).mean()
    with Simulation(problem) as federation:
        first, _ = run_round(adam, state, problem.store.names, federation)
        want = {name: p + 0.01 * mean[name] / (mean[name].abs() + 1e-7) for name, p in theta.items()}
        assert_equal(first.params, want, 1e-12)  # m̂ = Δ and v̂ = Δ²: whatever β, the first step is of size η
        second, _ = run_round(adam, first, problem.store.names, federation)
    forgotten = {key: torch.zeros_like(t) if key.startswith("taken/") else t for key, t in first.server.items()}
    with Simulation(problem) as federation:
        again, _ = run_round(adam, replace(first, server=dict(first.server)), problem.store.names, federation)
        wrong, _ = run_round(adam, replace(first, server=forgotten), problem.store.names, federation)
    assert_equal(again.params, second.params, 0)
    assert any(not torch.equal(wrong.params[name], p) for name, p in second.params.items())
    plain, _ = rounds(problem, method_of("fedadam", **options), theta, 2)
    assert max(float((plain.params[name] - p).abs().max()) for name, p in second.params.items()) > 0.01


@pytest.mark.parametrize("nesterov", [False, True])
def test_server_momentum_is_that_of_torch(nesterov):
    rule = server.nesterov(0.7, 0.9) if nesterov else server.momentum(0.7, 0.9)
    ours = {"x": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    theirs = torch.nn.Parameter(ours["x"].clone())
    optimiser = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=nesterov)
    state = rule.init(ours)
    for d in ([0.5, 0.1], [-0.2, 0.3], [0.0, 0.0], [0.4, -0.6]):
        upload = torch.tensor(d, dtype=torch.float64)
        ours, state = rule.step(ours, Aggregate({"x": upload}, {"x": 1.0}, {"x": 1.0}, {"x": 1.0}, ("c",)), state)
        theirs.grad = -upload
        optimiser.step()
        torch.testing.assert_close(ours["x"], theirs.detach(), rtol=0, atol=1e-14)


# Where the distances are measured


def test_every_client_tells_its_own_distance():
    problem, theta = problem_of(SIZES), theta_of()
    method = method_of("fedatt", lr=0.5, batch_size=2)
    solution = solve_block(problem, theta, [0, 1, 2], method, 0)
    numbers = measure(method, theta, solution.upload, 3)
    want = distance.spectral()(theta, solution.upload)
    assert [list(n) for n in numbers] == [list(theta)] * 3
    assert all(numbers[k][name] == float(want[name][k]) for k in range(3) for name in theta)
    assert measure(method_of(), theta, solution.upload, 3) == [{}, {}, {}]


def test_blocks_of_any_size_give_the_same_attention():
    problem, theta = problem_of(SIZES), theta_of(SPEC, torch.float32)
    method = method_of("fedatt", lr=0.5, batch_size=2)
    whole = aggregate_of(problem, method, theta)
    other = aggregate_of(problem, method, theta, block=3)
    assert_equal(whole.mean(), other.mean(), 1e-6)


# Combinations that make no sense


@pytest.mark.parametrize("name", ["fedatt", "fedmed"])
def test_attention_with_a_cohort_of_one_is_refused(name, monkeypatch):
    monkeypatch.setattr(plan, "members_of", lambda *_: 1)
    store = type("One", (list,), {"names": ["a"]})([0])
    prepared = SimpleNamespace(store=store, corpus=SimpleNamespace(name="text"))
    with pytest.raises(ConfigError, match=rf"{name} weighs the clients .* cohort of 1"):
        plan.plan(Config(method=name, train=TrainConfig(cohort=1)), prepared)
