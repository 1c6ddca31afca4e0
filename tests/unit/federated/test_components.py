"""Mediators and server rules exchanged by name."""

from __future__ import annotations

import tomllib

import pytest
import torch

from keyfed.config.load import Config, apply_settings, check, config_from, dump_toml, method_spec, to_document
from keyfed.errors import ConfigError
from keyfed.federated import server
from keyfed.federated.methods import build_method
from keyfed.federated.spec import MethodSpec, Part

from ...equivalence.test_methods import assert_equal, method_of, problem_of, rounds, theta_of


def test_fedavg_with_attention_and_a_step_is_fedatt():
    problem, theta = problem_of([50, 11, 23]), theta_of()
    options = {"optimiser": "sgd", "lr": 0.5, "batch_size": 2}
    spec = MethodSpec(
        "fedavg", options, mediator=Part("attention", {"temperature": 0.3}), server=Part("sgd", {"lr": 1.2})
    )
    made, _ = rounds(problem, build_method(spec), theta, 2)
    fedatt, _ = rounds(problem, method_of("fedatt", temperature=0.3, **options), theta, 2)
    assert_equal(made.params, fedatt.params, 0)


def test_fedavg_with_divergence_under_top_k_is_fedmed():
    problem, theta = problem_of([50, 11, 23, 31]), theta_of()
    options = {"optimiser": "sgd", "lr": 0.5, "batch_size": 2}
    part = Part("divergence", {"temperature": 0.01, "switch": 0.2, "beta": 0.5})
    made, ours = rounds(problem, build_method(MethodSpec("fedavg", options, mediator=part)), theta, 3)
    own = method_of("fedmed", temperature=0.01, threshold=0.2, beta=0.5, **options)
    fedmed, theirs = rounds(problem, own, theta, 3)
    assert_equal(made.params, fedmed.params, 0)
    assert [len(s.contributors) for s in ours] == [len(s.contributors) for s in theirs] == [2, 2, 2]


def test_fedavg_with_a_server_optimiser_is_that_method():
    problem, theta = problem_of([50, 11, 23]), theta_of()
    options = {"optimiser": "sgd", "lr": 0.5, "batch_size": 2}
    for name, part in (
        ("fedadam", Part("adam", {"lr": 0.1, "tau": 0.01})),
        ("fedyogi", Part("yogi", {"lr": 0.1, "tau": 0.01})),
        ("fedavgm", Part("momentum", {"lr": 1.0, "beta": 0.3})),
    ):
        made, _ = rounds(problem, build_method(MethodSpec("fedavg", options, server=part)), theta, 3)
        assert_equal(made.params, rounds(problem, method_of(name, **options), theta, 3)[0].params, 0)


def test_fixed_weights_by_name():
    problem, theta = problem_of([50, 11, 23]), theta_of()
    part = Part("fixed", {"weights": "c0=0, c1=2.5"})
    _, (summary,) = rounds(problem, build_method(MethodSpec("fedavg", {"optimiser": "sgd"}, mediator=part)), theta)
    weights = {client: w["output.bias"] for client, w in summary.weights.items()}
    assert weights == pytest.approx({"c0": 0.0, "c1": 2.5 / 3.5, "c2": 1 / 3.5})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mediator.name=atention"], r'mediator\.name is "atention" \(did you mean attention\?\)'),
        (["server.name=adamw"], r"expected one of sgd, momentum"),
        (["server.lr=0.1"], r"server\.lr needs server\.name first"),
        (["server.name=adam", "server.beta=0.1"], r'server\.beta is not an option of "adam"'),
        (["server.name=adam"], r'server "adam" needs server\.lr'),
        (["server.name=adam", "server.lr=-1"], r"server\.lr is -1\.0; expected lr > 0"),
        (["server.name=momentum", "server.beta=1"], r"server\.beta is 1\.0"),
        (["mediator.name=attention", "mediator.temperature=0"], r"mediator\.temperature is 0\.0"),
        (["mediator.name=attention", "mediator.norm=max"], r"expected one of spectral, frobenius"),
        (["mediator.name=tokens", "mediator.beta=2"], r"mediator\.beta is 2\.0"),
        (["mediator.name=fixed", "mediator.weights=a:3"], r'mediator\.weights has "a:3"'),
    ],
)
def test_parts_that_make_no_sense_are_said_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(apply_settings(Config(), settings))


@pytest.mark.parametrize("name", ["admm", "liadmm", "fedadmm"])
def test_a_running_mean_keeps_its_own_parts(name):
    with pytest.raises(ConfigError, match=f"{name} is a running mean"):
        check(apply_settings(Config(method=name), ["server.name=sgd"]))


def test_parts_are_written_in_full_and_read_back():
    settings = ["server.name=adam", "server.lr=0.1", "mediator.name=attention", "upload.quantise=int8"]
    config = check(apply_settings(Config(method="fedprox"), settings))
    document = to_document(config)
    assert document["server"] == {
        "name": "adam", "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "bias_correction": False
    }  # fmt: skip
    again = config_from(tomllib.loads(dump_toml(document)), "run.toml")
    assert to_document(again) == document
    assert method_spec(again).quantise == "int8"
    none = apply_settings(again, ["server.name=none", "mediator.name=none"])
    assert none.server is None
    assert none.mediator is None


def test_another_name_starts_from_its_own_defaults():
    config = apply_settings(Config(), ["server.name=adam", "server.lr=0.1", "server.name=sgd"])
    assert config.server == Part("sgd")
    theta = {"a": torch.ones(2)}
    assert server.sgd().init(theta) == {}
