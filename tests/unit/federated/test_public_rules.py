"""Weights by public numbers: the same ratios as in the clear, caps that follow the clients, delayed exceptions."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyfed.errors import ConfigError, DoesNotFit
from keyfed.federated import weigh
from keyfed.federated.components import guarded
from keyfed.federated.methods import METHODS, fedavg
from keyfed.federated.public import rules
from keyfed.federated.public.numbers import LOSS_STEP, use_of_range
from keyfed.federated.public.rules import clamped, held, magnitude, privately
from keyfed.federated.types import Mediator, PrivateRule, Report, Share
from keyfed.federated.weigh import kept

LAYERS = ["bias", "weight"]


def report(client: str, tokens: int = 10, loss: float = 2.0, distance: float = 1.0, **more) -> Report:
    return Report(client, tokens, loss, tokens, {"bias": distance, "weight": 2 * distance}, **more)


def add_up(every) -> dict[str, list[float]]:
    rows = list(every)
    return {name: [sum(column) for column in zip(*(row[name] for row in rows), strict=True)] for name in rows[0]}


def started(rule: PrivateRule, reports) -> dict:
    return rule.start(rule.init(), add_up(rule.first(r, LAYERS) for r in reports))


def learnt(rule: PrivateRule, public, reports) -> dict:
    sums = add_up(rule.facts(r, LAYERS, public) for r in reports)
    sums |= {"loss": [sum(r.loss for r in reports)], "count": [float(len(reports))]}
    return rule.learn(public, sums, len(reports))


def parts(shares: list[Share], layer: str) -> list[float]:
    """Each client's part of a layer's mean."""
    return [s.scale[layer] / sum(t.mass[layer] for t in shares) for s in shares]


@given(st.integers(1, 2**27), st.lists(st.floats(1, 8), min_size=1, max_size=20))
def test_token_weights_are_those_of_fedavg_while_clients_lie_within_a_factor_of_eight(least, factors):
    rule = weigh.by_tokens().private
    sizes = [int(least * factor) for factor in factors]
    reports = [report(f"c{k}", n) for k, n in enumerate(sizes)]
    public = started(rule, reports)
    assert math.log2(public["most"]).is_integer()
    shares = [rule.share(r, LAYERS, public) for r in reports]
    assert [held(s, 16) for s in shares] == shares, "nobody is clamped"
    assert parts(shares, "bias") == pytest.approx([n / sum(sizes) for n in sizes])


@given(st.lists(st.integers(1, 2**31), min_size=1, max_size=20), st.sampled_from([1, 2, 3, 6, 16]))
def test_any_tokens_are_clamped_to_the_public_range_and_most_clients_are_not(sizes, ratio):
    rule = weigh.by_tokens().private
    reports = [report(f"c{k}", n) for k, n in enumerate(sizes)]
    sums = add_up(rule.first(r, LAYERS) for r in reports) | {"ratio": [float(ratio)]}
    most = rule.start(rule.init(), sums)["most"]
    shares = [held(rule.share(r, LAYERS, {"most": most}), ratio) for r in reports]
    assert [s.scale["bias"] for s in shares] == pytest.approx([min(max(n / most, 1 / ratio), 1.0) for n in sizes])
    assert all(s.mass == s.scale for s in shares)
    octaves = int(math.log2(ratio))
    fits = [sum(2 ** (b - octaves) < n <= 2**b for n in sizes) for b in range(33)]
    exact = sum(most / ratio <= n <= most for n in sizes)
    assert exact >= max(fits) or ratio == 1, "no window of whole octaves holds more"


# Buckets of scores are 3 % wide: below 22 two of them take 1.3 of the window's ln 16 = 2.77.
@given(st.floats(0, 20), st.lists(st.floats(0, 1.4), min_size=1, max_size=20))
@example(17.75, [0.0, 1.4])
def test_the_capped_softmax_is_the_softmax_while_scores_lie_within_the_window(least, more):
    rule = weigh.softmax_of_distance(temperature=2.0).private
    distances = [least + x for x in more]
    reports = [report(f"c{k}", distance=d) for k, d in enumerate(distances)]
    public = started(rule, reports)
    shares = [rule.share(r, LAYERS, public) for r in reports]
    assert [held(s, 16) for s in shares] == shares, "nobody is clamped"
    for layer, factor in (("bias", 0.5), ("weight", 1.0)):
        peak = max(distances) * factor
        assert peak <= public["caps"][layer] <= 1.03 * peak + 1.5, "scores lie in the middle of the window"
        weights = [math.exp(d * factor - peak) for d in distances]
        assert parts(shares, layer) == pytest.approx([w / sum(weights) for w in weights], abs=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.sampled_from([2, 3, 16]), st.floats(1e-6, 10))
def test_any_scores_are_clamped_to_the_window_below_the_cap(distances, ratio, temperature):
    rule = weigh.softmax_of_distance(temperature=temperature).private
    reports = [report(f"c{k}", distance=d) for k, d in enumerate(distances)]
    sums = add_up(rule.first(r, LAYERS) for r in reports) | {"ratio": [float(ratio)]}
    public = rule.start(rule.init(), sums)
    for r in reports:
        share = held(rule.share(r, LAYERS, public), ratio)
        for layer in LAYERS:
            cap = public["caps"][layer]
            wanted = math.exp(min(max(r.distance[layer] / temperature, cap - math.log(ratio)), cap) - cap)
            assert share.scale[layer] == pytest.approx(wanted, rel=1e-9)
            assert 1 / ratio <= share.scale[layer] <= 1


def test_a_scale_of_nothing_is_refused_unless_a_simulation_of_top_k_is_silent():
    nothing = dict.fromkeys(LAYERS, 0.0)
    for odd in (Share(nothing, nothing), Share({"bias": 1.0, "weight": 0.0}, nothing), Share({"bias": math.nan}, {})):
        with pytest.raises(DoesNotFit, match="a scale of 0"):
            held(odd, 16)
    assert held(Share(nothing, nothing), 16, silent=True) == Share(nothing, nothing)
    with pytest.raises(DoesNotFit, match="a scale of 0"):
        held(Share({"bias": 1.0, "weight": 0.0}, nothing), 16, silent=True)


def test_mass_is_raised_alike_and_clients_at_either_end_are_counted():
    own = Share({"bias": 0.01, "weight": 0.5}, {"bias": 0.002, "weight": 0.5})
    sent = held(own, 4)
    assert sent.scale == {"bias": 0.25, "weight": 0.5}
    assert sent.mass == pytest.approx({"bias": 0.05, "weight": 0.5})
    assert clamped(own, sent, {}) == {"clamped": [1.0]}
    rule = weigh.by_tokens().private
    for tokens, said in ((1, 1.0), (16, 0.0), (256, 0.0), (257, 1.0)):
        told = rule.facts(report("a", tokens), LAYERS, {"most": 256.0})
        share = rule.share(report("a", tokens), LAYERS, {"most": 256.0})
        assert clamped(share, held(share, 16), told) == {"clamped": [said]}


def test_a_bound_on_scores_bounds_the_cap_and_nobody_is_saturated_by_it():
    rule = weigh.softmax_of_distance(bound=1.5).private
    reports = [report("a", distance=0.1), report("b", distance=80.0)]
    public = started(rule, reports)
    assert public["caps"] == {"bias": 1.5, "weight": 1.5}
    assert rule.share(reports[1], LAYERS, public).scale["bias"] == 1
    assert add_up(rule.facts(r, LAYERS, public) for r in reports)["room/bias"][0] == 0
    assert learnt(rule, public, reports)["caps"] == public["caps"]


def test_clients_above_the_cap_count_as_at_it_and_several_of_them_lift_it():
    rule = weigh.softmax_of_distance().private
    near = report("a", distance=4.0)
    public = started(rule, [near])
    far = report("b", distance=9.0)
    assert rule.share(far, LAYERS, public).scale["bias"] == 1
    told = rule.facts(far, LAYERS, public)
    assert rules.saturated_clients({f"rule/{name}": numbers for name, numbers in told.items()}) == 1
    assert learnt(rule, public, [near, far]) == public, "one client alone moves nothing"
    assert learnt(rule, public, [near, near, far, far]) == public, "nor do as many as are exact now"
    for _ in range(3):
        public = learnt(rule, public, [near, far, far, far])
    assert public["caps"]["bias"] - math.log(16) < 9 < public["caps"]["bias"]
    assert learnt(rule, public, [near, far, far, far]) == public, "and stays"


def test_a_cap_far_above_everybody_comes_down_at_once():
    rule = weigh.softmax_of_distance().private
    public = started(rule, [report("a", distance=40.0)])
    near = [report("a", distance=3.0), report("b", distance=2.0)]
    for _ in range(8):
        public = learnt(rule, public, near)
    assert 3 < public["caps"]["bias"] < 9


def test_sizes_move_by_powers_of_two():
    rule = weigh.by_tokens().private
    public = started(rule, [report("a", 100)])
    assert public["most"] == 256
    assert learnt(rule, public, [report("b", 300), report("c", 20)]) == public, "one client alone moves nothing"
    public = learnt(rule, public, [report("b", 300), report("c", 2**31), report("d", 400)])
    assert public["most"] == 1024, "two do, and nobody follows the one far away"
    for _ in range(9):
        public = learnt(rule, public, [report("d", 9), report("e", 7)])
    assert public["most"] == 16, "down again, once and not farther"


@settings(max_examples=50)
@given(st.lists(st.integers(100, 1500), min_size=3, max_size=20), st.lists(st.integers(1, 2**40), max_size=8))
def test_one_liar_among_clients_that_agree_moves_no_public_size(sizes, lies):
    rule = weigh.by_tokens().private
    public = start = started(rule, [report(f"c{k}", n) for k, n in enumerate(sizes)])
    for lie in lies:
        public = learnt(rule, public, [*(report(f"c{k}", n) for k, n in enumerate(sizes)), report("liar", lie)])
    assert public == start


@pytest.mark.parametrize("uniform", [False, True])
def test_a_joining_client_of_a_secure_sum_brings_a_mass_of_one_whatever_its_tokens(uniform):
    rule = weigh.by_join_weight(uniform=uniform).private
    joining, returning = report("a", weight=300.0, joining=True), report("b", weight=50.0)
    public = started(rule, [joining, returning])
    one, two = rule.share(joining, LAYERS, public), rule.share(returning, LAYERS, public)
    assert one.mass["bias"] == one.scale["bias"] == two.scale["bias"] == 1
    assert two.mass["bias"] == 0
    assert learnt(rule, public, [report("c", weight=10.0)] * 3) == public
    with pytest.raises(ConfigError, match="begun by an older version, with weights by tokens; start it anew"):
        rule.share(joining, LAYERS, {"most": 64.0})


@pytest.mark.parametrize("weights", [{}, {"a": 4.0, "b": 0.0}, {"a": 0.25}])
def test_fixed_weights_keep_their_ratios_within_one(weights):
    mediator = weigh.fixed(weights)
    reports = [report(c) for c in "abc"]
    shares = [mediator.private.share(r, LAYERS, {}) for r in reports]
    plain = [mediator.share(r, LAYERS) for r in reports]
    assert parts(shares, "bias") == pytest.approx(parts(plain, "bias"))
    assert max(s.scale["bias"] for s in shares) <= 1


def test_the_switch_looks_at_the_two_rounds_before():
    rule = weigh.switch_on_loss(weigh.softmax_of_distance(), weigh.by_tokens(), 0.1).private
    losses = [3.0, 2.95, 2.5, 2.45, 2.44]
    public, chosen = started(rule, [report("a", 8, 3.0, 5.0), report("b", 4, 3.0)]), []
    for loss in losses:
        reports = [report("a", 8, loss + 0.5, 5.0), report("b", 4, loss - 0.5)]
        shares = [rule.share(r, LAYERS, public) for r in reports]
        chosen.append(parts(shares, "bias")[0] == pytest.approx(2 / 3))
        public = learnt(rule, public, reports)
    # by tokens in round t where the losses of t−1 and t−2 lie closer than ε
    assert chosen == [False, False, True, False, True]
    assert public["losses"] == pytest.approx([2.45, 2.44])


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 15.9), min_size=1, max_size=15), st.floats(0.05, 1.0))
def test_top_k_keeps_those_below_the_last_rounds_quantile(losses, beta):
    rule = weigh.top_k(beta, weigh.uniform()).private
    reports = [report(f"c{k}", loss=x) for k, x in enumerate(losses)]
    public = started(rule, reports)
    at = sorted(losses)[kept(beta, len(losses)) - 1]
    assert at <= public["limit"] < at + LOSS_STEP + 1e-9
    assert learnt(rule, rule.init(), reports)["limit"] == public["limit"]
    for r in reports:
        taken = rule.share(r, LAYERS, public)
        assert taken.mass["bias"] == taken.scale["bias"] == float(r.loss <= public["limit"])


def test_top_k_lets_everybody_count_while_losses_are_beyond_the_buckets():
    rule = weigh.top_k(0.5, weigh.uniform()).private
    assert started(rule, [report("a", loss=40.0), report("b", loss=50.0)])["limit"] is None


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_private_form_whose_memory_a_checkpoint_gives_back(name):
    method = privately(METHODS[name]())
    assert method.report_free
    assert privately(method) is method
    rule = method.mediator.private
    reports = [report(c, 10 + k, 2.0 + k, 1.0, weight=10.0, joining=True) for k, c in enumerate("abc")]
    sums = add_up(rule.first(r, LAYERS) for r in reports)
    sums |= add_up({f"magnitude/{name}": magnitude(0.1 * k) for name in LAYERS} for k in range(3))
    public = rule.start(method.mediator.init(), sums)
    assert public["calibrated"]
    facts = [rule.facts(r, LAYERS, public) for r in reports]
    lengths = {name: len(numbers) for name, numbers in rule.facts(reports[0], LAYERS, method.mediator.init()).items()}
    assert all({name: len(numbers) for name, numbers in f.items()} == lengths for f in facts)
    assert all(0 <= x <= 1 for f in facts for numbers in f.values() for x in numbers)
    after = rule.learn(public, add_up(facts) | {"loss": [9.0], "count": [3.0]}, 3)
    assert json.loads(json.dumps(after)) == after
    for r in reports:
        share = rule.share(r, LAYERS, after)
        assert all(0 <= share.scale[n] <= 1 and 0 <= share.mass[n] <= 1 for n in LAYERS)


def test_ranges_follow_the_largest_numbers():
    rule = privately(fedavg()).mediator.private
    first = {"rule/sizes": rules.one_hot(5, rules.SIZES)}
    numbers = {"bias": [0.3, 0.6], "weight": [0.0, 0.0]}
    first |= {f"magnitude/{n}": [sum(c) for c in zip(*map(magnitude, xs), strict=True)] for n, xs in numbers.items()}
    public = rule.start(rule.init(), first)
    assert public["ranges"] == {"bias": 2, "weight": 2}, "four times 2^0 ≥ 0.6; a layer of zeros gets the largest"

    def facts(largest: float, clients: int = 2) -> dict[str, list[float]]:
        large, small = use_of_range(largest, public["ranges"]["bias"])
        told = {"large/bias": [large], "small/bias": [small * clients], "large/weight": [0.0], "small/weight": [0.0]}
        return told | {"rule/room": rules.one_hot(7, 13)}

    assert rule.learn(public, facts(2.1), 2)["ranges"]["bias"] == 3
    assert rule.learn(public, facts(1.9), 2)["ranges"]["bias"] == 2
    assert rule.learn(public, facts(0.5), 2)["ranges"]["bias"] == 1
    assert rule.learn(public, facts(0.5, clients=1), 2)["ranges"]["bias"] == 2, "one client needs it"
    assert rule.learn(public, facts(0.0), 2)["ranges"] == public["ranges"]
    outside = rule.learn(public, {"out of range": [2.0]}, 0)
    assert outside["ranges"] == {"bias": 4, "weight": 4}
    assert outside["rule"] == public["rule"], "nobody arrived: nothing else is learnt"


def test_a_mediator_without_a_private_rule_is_refused_by_name():
    own = Mediator(init=lambda: None, weigh=lambda memory, reports, layers: (memory, {}))
    with pytest.raises(ConfigError, match=r"the mediator of mine has no rule .* secure aggregation off"):
        privately(replace(fedavg(), name="mine", mediator=own))
    assert weigh.top_k(0.5, own).private is None
    assert weigh.switch_on_loss(own, weigh.by_tokens()).private is None
    assert weigh.in_two_phases(weigh.by_tokens()).private is not None


ONES = dict.fromkeys(LAYERS, 1.0)
SLIPS = {
    "a share with logarithms": ("share", lambda r, layers, public: Share(ONES, ONES, ONES)),
    'layer "weight" is missing': ("share", lambda r, layers, public: Share({"bias": 1.0}, ONES)),
    "facts tells size": ("facts", lambda r, layers, public: {"size": [2.0]}),
    "first tells size": ("first", lambda r, layers: {"size": [float("nan")]}),
    "keeps a dict that JSON does not give back": ("start", lambda public, sums: {1: 2}),
}


@pytest.mark.parametrize("message", list(SLIPS))
def test_a_rule_from_outside_is_held_to_its_word(message):
    field, slip = SLIPS[message]
    given_to = {
        "share": (report("a"), LAYERS, {"most": 64.0}), "facts": (report("a"), LAYERS, {"most": 64.0}),
        "first": (report("a"), LAYERS), "start": ({"most": 1.0}, {"sizes": [1.0]}),
    }  # fmt: skip
    rule = weigh.by_tokens().private
    mediator = weigh.by_tokens()._replace(private=rule._replace(**{field: slip}))
    own = guarded(replace(fedavg(), name="mine", mediator=mediator)).mediator.private
    with pytest.raises(ConfigError, match=message):
        getattr(own, field)(*given_to[field])
    for other in set(given_to) - {field}:
        assert getattr(own, other)(*given_to[other]) == getattr(rule, other)(*given_to[other])
