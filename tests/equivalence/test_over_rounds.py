"""What spans the rounds of a run: the average of θ that is served, and the schedule of the local step size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.load import Config, TrainConfig, check, method_spec
from keyfed.errors import ConfigError
from keyfed.federated.descent import progress
from keyfed.federated.methods import METHODS, build_method
from keyfed.federated.round import initial_state
from keyfed.federated.spec import MethodSpec, Schedule
from tests.examples import examples

from .quadratic import flat, origin, quadratic, run

DUALS = ("admm", "liadmm", "fedadmm")
STEP = {"lr": 0.1}


def spec(name: str, **over: object) -> MethodSpec:
    options = {} if name == "liadmm" else STEP
    return MethodSpec(name, options, **over)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"central"}))
@pytest.mark.parametrize("weight", [0.0, 0.5, 0.98])
def test_the_served_model_is_the_bias_corrected_average_of_every_theta(name, weight):
    """Against the printed form: a ← βa + (1 − β)θ, divided by 1 − β^t."""
    problem, rounds = quadratic(), 7
    method = build_method(spec(name, average=weight))
    state, thetas = initial_state(method, origin()), []
    for t in range(1, rounds + 1):
        state, _ = run(problem, method, 1, start=state)
        thetas.append(flat(state.params))
        past = torch.zeros(4, dtype=torch.float64)
        for theta in thetas:
            past = weight * past + (1 - weight) * theta
        torch.testing.assert_close(flat(state.served(method)), past / (1 - weight**t), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fednesterov", "fedadam", *DUALS])
def test_training_goes_on_from_theta_itself(name):
    problem = quadratic()
    plain, _ = run(problem, build_method(spec(name)), 6, present=0.7, lost=0.2)
    method = build_method(spec(name, average=0.9))
    averaged, _ = run(problem, method, 6, present=0.7, lost=0.2)
    assert torch.equal(flat(plain.params), flat(averaged.params))
    assert not torch.equal(flat(averaged.served(method)), flat(averaged.params))
    assert plain.served(build_method(spec(name))) is plain.params


def test_before_the_first_round_the_start_is_served():
    method = build_method(spec("fedavg", average=0.9))
    start = initial_state(method, origin())
    assert torch.equal(flat(start.served(method)), flat(origin()))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fednesterov", *DUALS])
def test_a_schedule_multiplies_the_local_step_size(name):
    """A run whose factor is ½ in every round is the run with half the step size."""
    problem = quadratic()
    half = Schedule("linear", rounds=1, final=0.5)  # after its first round: ½ for ever
    full, smaller = {"lr": 0.1}, {"lr": 0.05}
    if name == "liadmm":  # its step size is 1/(ρ + r)
        full, smaller = {"rho": 2.0, "r": 8.0}, {"rho": 2.0, "r": 18.0}
    scheduled, plain = build_method(MethodSpec(name, full, schedule=half)), build_method(MethodSpec(name, smaller))
    one, _ = run(problem, scheduled, 4, start=replace(initial_state(scheduled, origin()), round=1))
    other, _ = run(problem, plain, 4, start=replace(initial_state(plain, origin()), round=1))
    torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=1e-12)
    assert not torch.equal(flat(one.params), flat(origin()))


def test_a_schedule_comes_on_top_of_the_methods_decay():
    problem = quadratic()
    schedule = Schedule("cosine", rounds=5, final=0.1)
    method = build_method(MethodSpec("fedavg", {"lr": 0.1, "decay": 0.9}, schedule=schedule))
    state = initial_state(method, origin())
    for t in range(5):
        step = 0.1 * 0.9**t * progress(schedule, t)
        expected, _ = run(problem, build_method(MethodSpec("fedavg", {"lr": step})), 1, start=state)
        state, _ = run(problem, method, 1, start=state)
        torch.testing.assert_close(flat(state.params), flat(expected.params), rtol=0, atol=1e-12)


@given(
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    rounds=st.integers(1, 300),
    warmup=st.floats(0, 0.9),
    final=st.floats(0, 1),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_schedule_rises_to_one_then_falls_to_its_end(shape, rounds, warmup, final):
    schedule = Schedule(shape, rounds, warmup, final)
    warm = min(int(warmup * rounds + 0.5), rounds - 1)
    factors = [progress(schedule, t) for t in range(rounds + 2)]
    assert all(0 <= f <= 1 for f in factors)
    assert factors[:warm] == sorted(factors[:warm])
    assert factors[warm] == pytest.approx(1.0)
    assert all(a >= b - 1e-12 for a, b in zip(factors[warm:], factors[warm + 1 :], strict=False))
    assert factors[rounds] == pytest.approx(1.0 if shape == "constant" else final)


def test_halfway_through_cosine_and_linear_are_in_the_middle():
    for shape in ("linear", "cosine"):
        assert progress(Schedule(shape, 10, 0.0, 0.2), 5) == pytest.approx(0.6)
    assert progress(Schedule("cosine", 12, 0.25, 0.0), 3) == 1.0
    assert progress(Schedule("cosine", 12, 0.0, 0.0), 3) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_the_configuration_says_the_schedule_of_its_own_rounds():
    config = Config(train=TrainConfig(rounds=40, schedule="cosine", warmup=0.1, final=0.05, average=0.98))
    assert method_spec(config).schedule == Schedule("cosine", 40, 0.1, 0.05)
    assert method_spec(config).average == 0.98
    assert method_spec(Config()).schedule is None


@pytest.mark.parametrize(
    ("settings_of_train", "words"),
    [
        ({"warmup": 1.0}, "train.warmup is 1.0"),
        ({"schedule": "linear", "final": 1.5}, "train.final is 1.5"),
        ({"final": 0.1}, "train.schedule=constant does not fall"),
        ({"average": 1.0}, "train.average is 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(settings_of_train, words):
    with pytest.raises(ConfigError, match=words):
        check(Config(train=TrainConfig(**settings_of_train)))


def test_fedsgd_has_no_local_step_to_schedule():
    with pytest.raises(ConfigError, match="fedsgd's clients take no step"):
        check(Config(method="fedsgd", train=TrainConfig(schedule="linear")))
