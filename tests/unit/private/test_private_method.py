"""Which combinations carry a guarantee, and the words with which the others are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from keyfed.config.schema import PrivacyConfig
from keyfed.errors import PrivacyError
from keyfed.federated import weigh
from keyfed.federated.cohort import Participation
from keyfed.federated.methods import METHODS, build_method
from keyfed.federated.spec import MethodSpec, Part
from keyfed.federated.types import Aggregate, Report, TopK, WeighingRule
from keyfed.private.dp.private_method import CLIP, make_private, refuse_participation

from .neighbours import CLAIMING

PRIVACY = PrivacyConfig(noise=1.0)


def bounded(name, mediator=None, privacy=PRIVACY, **options):
    return make_private(build_method(MethodSpec(name, options, mediator)), privacy)


REFUSED = [
    ("central", {}, None, "one place"),
    ("fedatt", {}, None, "method.bound"),
    ("fedatt", {"bound": 3.0, "noise": 0.001}, None, "ε is ∞"),
    ("fedavg", {"noise": 0.001}, None, "ε is ∞"),
    ("fedprox", {}, Part("attention"), "mediator.bound"),
]


@pytest.mark.parametrize(("name", "options", "mediator", "words"), REFUSED)
def test_what_has_no_bound_is_refused_by_name(name, options, mediator, words):
    with pytest.raises(PrivacyError, match=words):
        bounded(name, mediator, **options)


def test_every_method_claims_a_bound_or_is_refused():
    claiming = {label.split(",")[0].split()[0] for label in CLAIMING}
    assert claiming | {name for name, *_ in REFUSED} == set(METHODS)


def test_a_method_from_outside_is_refused():
    with pytest.raises(PrivacyError, match="outside the package"):
        make_private(replace(build_method(MethodSpec("fedavg", {})), spec=None), PRIVACY)


def test_a_mediator_without_a_rule_is_refused_and_never_taken_for_tokens():
    method = build_method(MethodSpec("fedavg", {}))
    with pytest.raises(PrivacyError, match="no weighing rule"):
        make_private(replace(method, mediator=method.mediator._replace(rule=None)), PRIVACY)


@pytest.mark.parametrize("wrapped", [lambda rule: rule, lambda rule: TopK(0.5, rule)], ids=["alone", "inside"])
def test_a_kind_of_rule_that_is_not_known_is_refused(wrapped):
    class Guess(NamedTuple):
        weight: float = 1.0

    method = build_method(MethodSpec("fedavg", {}))
    with pytest.raises(PrivacyError, match="sensitivity of a Guess is not known"):
        make_private(replace(method, mediator=method.mediator._replace(rule=wrapped(Guess()))), PRIVACY)


@pytest.mark.parametrize(
    ("name", "mediator", "options", "ratio"),
    [
        ("fedavg", None, {}, False),
        ("fedavg", Part("attention", {"bound": 2.0}), {}, True),
        ("fedavg", Part("divergence"), {}, True),
        ("fedatt", Part("uniform"), {}, False),
        ("fedatt", None, {"bound": 2.0}, True),
        ("fedmed", None, {"mediation": False}, True),
        ("fedavg", Part("fixed", {"weights": "a=3"}), {}, False),
        ("fedmed", None, {}, True),
        ("fedmed", None, {"mediation": False, "adaptive": False, "beta": 0.5}, True),
        ("fedavg", Part("tokens", {"beta": 0.5}), {}, True),
        ("fedprox", Part("uniform", {"beta": 0.5}), {}, True),
        ("fedavg", Part("divergence", {"switch": 0.1}), {}, True),
        ("admm", None, {}, False),
    ],
)
def test_attention_is_a_ratio_and_the_rest_has_a_public_denominator(name, mediator, options, ratio):
    made = bounded(name, mediator, **options)
    assert made.ratio is ratio
    assert ("floor" in made.sensitivity) is ratio


@pytest.mark.parametrize(
    "mediator",
    [
        weigh.top_k(0.5, weigh.top_k(0.5, weigh.by_tokens())),
        weigh.top_k(0.5, weigh.by_join_weight()),
        weigh.switch_on_loss(weigh.top_k(0.5, weigh.by_tokens()), weigh.uniform()),
        weigh.switch_on_loss(weigh.by_tokens(), weigh.switch_on_loss(weigh.by_tokens(), weigh.uniform())),
        weigh.switch_on_loss(weigh.by_join_weight(), weigh.uniform()),
    ],
)
def test_rules_inside_rules_that_have_no_private_form_are_refused(mediator):
    with pytest.raises(PrivacyError, match="no private form"):
        make_private(replace(build_method(MethodSpec("fedavg", {})), mediator=mediator), PRIVACY)


RULES = {
    "tokens": weigh.by_tokens(),
    "uniform": weigh.uniform(),
    "fixed": weigh.fixed({"anna": 0.25, "ben": 0.5}),
    "attention": weigh.softmax_of_distance(2.0, bound=4.0),
    "divergence": weigh.softmax_of_distance(0.5, farthest=math.log(2)),
    "own": weigh.from_rule(WeighingRule(lambda report, layer: report.tokens / report.loss)),
}


@pytest.mark.parametrize("mediator", RULES.values(), ids=RULES)
def test_the_three_forms_of_a_rule_weigh_clients_in_the_same_ratios(mediator):
    """Plain, masked and private shares differ by a public factor only, while no client is clamped."""
    reports = [
        Report("anna", 40, 2.0, 40, {"w": 0.1}),
        Report("ben", 60, 1.5, 60, {"w": 0.6}),
        Report("cleo", 90, 1.6, 90, {"w": 0.3}),
    ]
    masked = mediator.private
    first = [masked.first(report, ["w"]) for report in reports]
    sums = {name: [sum(column) for column in zip(*(row[name] for row in first), strict=True)] for name in first[0]}
    public = masked.start(masked.init(), sums)
    method = replace(build_method(MethodSpec("fedavg", {})), mediator=mediator)
    private = make_private(method, replace(PRIVACY, weight_cap=1000.0)).method.mediator.share
    forms = {
        "plain": [mediator.share(report, ["w"]) for report in reports],
        "masked": [masked.share(report, ["w"], public) for report in reports],
        "private": [private(report, ["w"]) for report in reports],
    }
    ratios = {}
    for form, shares in forms.items():
        assert all(share.mass == share.scale for share in shares)
        weights = [share.scale["w"] * math.exp((share.log or {"w": 0.0})["w"]) for share in shares]
        ratios[form] = [weight / weights[0] for weight in weights]
    assert ratios["masked"] == pytest.approx(ratios["plain"])
    assert ratios["private"] == pytest.approx(ratios["plain"])


def test_weights_lie_between_nothing_and_one_whatever_is_reported():
    far = Report("x", 10**9, 1.0, 1, {"a": 1e9})
    for made in (
        bounded("fedavg"),
        bounded("fedavg", privacy=replace(PRIVACY, weight_cap=10.0)),
        bounded("fedatt", bound=3.0),
    ):
        assert made.method.mediator.share(far, ["a"]).scale["a"] == 1.0
    near = Report("x", 5, 1.0, 1, {"a": 0.0})
    assert (
        bounded("fedavg", privacy=replace(PRIVACY, weight_cap=10.0)).method.mediator.share(near, ["a"]).scale["a"]
        == 0.5
    )
    assert 0 < bounded("fedatt", bound=3.0).method.mediator.share(near, ["a"]).scale["a"] < 0.06


def test_the_divergence_caps_itself():
    assert "c = 0.6931" in bounded("fedmed", mediation=False).sensitivity
    assert "c = 1.386" in bounded("fedmed", mediation=False, temperature=0.5).sensitivity


def test_the_clip_is_part_of_the_servers_state_and_moves():
    method = bounded("fedadam").method
    params = {"w": torch.zeros(2)}
    state = method.server.init(params)
    assert float(state[CLIP]) == 20.0
    sums = Aggregate({"w": torch.ones(2)}, {"w": 2.0}, {"w": 0.0}, {"w": 0.0}, (), facts={"within": [1.0]})
    after, moved = method.server.step(params, sums, state)
    assert float(moved[CLIP]) < 20.0
    assert set(moved) == set(state)
    plain = build_method(MethodSpec("fedadam", {})).server
    torch.testing.assert_close(after["w"], plain.step(params, sums, plain.init(params))[0]["w"])


@pytest.mark.parametrize(
    ("change", "mechanism", "words"),
    [
        ({"over_select": 0.3}, "gaussian", "over_select"),
        ({"minimum": 2}, "gaussian", "minimum"),
        ({"sampling": "uniform"}, "gaussian", "sampling=poisson"),
        ({"sampling": "size"}, "gaussian", "sampling=poisson"),
        ({"sampling": "poisson"}, "tree", "turns"),
    ],
)
def test_ways_of_taking_part_that_break_the_accounting(change, mechanism, words):
    usual = Participation(sampling="poisson" if mechanism == "gaussian" else "uniform")
    refuse_participation(usual, mechanism, everybody=False)
    with pytest.raises(PrivacyError, match=words):
        refuse_participation(replace(usual, **change), mechanism, everybody=False)


def test_everybody_in_every_round_needs_no_draw():
    refuse_participation(Participation(), "gaussian", everybody=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": 0.0}, "privacy.clip"),
        ({"delta": 1.0}, "privacy.delta"),
        ({"quantile": 1.5}, "privacy.quantile"),
        ({"cohort": 10}, "privacy.cohort"),
        ({"cohort": 10, "population": 5}, "privacy.cohort"),
        ({"mechanism": "tree"}, "quantile=none"),
        ({"separation": 3}, "mechanism=tree"),
        ({"mean_weight": 2.0}, "mean_weight"),
        ({"noise": None, "population": 5}, "neither privacy.epsilon nor privacy.noise"),
    ],
)
def test_settings_that_make_no_sense(changes, words):
    problems = replace(PRIVACY, **changes).problems()
    assert any(words in problem for problem in problems), problems


def test_settings_that_make_sense():
    assert PRIVACY.problems() == PrivacyConfig().problems() == []
