"""What clients of a secure sum accept as public numbers, and which methods they take no part in."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest

from keyfed.errors import ConfigError
from keyfed.federated import weigh
from keyfed.federated.methods import METHODS, fedavg, fedmed
from keyfed.federated.public.numbers import LOSS_STEP, check_public
from keyfed.federated.public.rules import magnitude, privately, refuse_isolating
from keyfed.federated.types import Report

LAYERS = ["bias", "weight"]


def calibrated(method) -> dict:
    """Return the public numbers of a hidden method after a calibration of three clients."""
    rule = privately(method).mediator.private
    sums: dict[str, list[float]] = {}
    for k in range(3):
        told = rule.first(Report(f"c{k}", 10 + k, 2.0 + k, 1, dict.fromkeys(LAYERS, 1.0), 10.0), LAYERS)
        told |= {f"magnitude/{name}": magnitude(0.1 * (k + 1)) for name in LAYERS}
        for name, numbers in told.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * len(numbers)), numbers, strict=True)]
    return rule.start(rule.init(), sums)


SUMMED = sorted(name for name, method in METHODS.items() if method().cohort != "pooled")


@pytest.mark.parametrize("name", SUMMED)
def test_the_public_numbers_of_every_method_are_accepted(name):
    method = METHODS[name]()
    check_public(privately(method).mediator.init(), LAYERS)
    check_public(json.loads(json.dumps(calibrated(method))), LAYERS)


def test_public_numbers_that_moved_are_accepted():
    rule = privately(fedavg()).mediator.private
    public = calibrated(fedavg())
    for _ in range(40):
        facts = {f"{use}/{name}": [0.0] for use in ("large", "small") for name in LAYERS}
        rooms = [2.0] + [0.0] * 12  # two always have far more
        public = rule.learn(public, facts | {"rule/room": rooms, "out of range": [1.0]}, 3)
        check_public(public, LAYERS)
    assert public["rule"]["most"] == 2.0**32, "as far as sizes go"


ODD = {
    "no object": ((), [1]),
    "a name too many": (("more",), 1),
    "neither true nor false": (("calibrated",), 1),
    "no ranges": (("ranges",), {}),
    "a range of another layer": (("ranges", "other"), 2),
    "a range far too large": (("ranges", "bias"), 31),
    "a range far too small": (("ranges", "bias"), -21),
    "a broken range": (("ranges", "bias"), 1.5),
    "a range that is true": (("ranges", "bias"), True),
    "a range without its first": (("first", "bias"), -20),
    "a wait that is over": (("outside",), 3),
    "no rule": (("rule",), None),
    "no size": (("rule", "inner", "otherwise", "most"), 0),
    "a size of no power of two": (("rule", "inner", "otherwise", "most"), 3.0),
    "a size beyond all": (("rule", "inner", "otherwise", "most"), 10**400),
    "no cap of a layer": (("rule", "inner", "adaptive", "caps"), {"bias": 1.0}),
    "a cap of nothing": (("rule", "inner", "adaptive", "caps", "bias"), math.nan),
    "a cap beyond all": (("rule", "inner", "adaptive", "caps", "bias"), 1e6),
    "a cap below 0": (("rule", "inner", "adaptive", "caps", "bias"), -1.0),
    "a threshold between two buckets": (("rule", "limit"), 2.5 * LOSS_STEP),
    "a threshold that is text": (("rule", "limit"), "2"),
    "losses of three rounds": (("rule", "inner", "losses"), [1.0, 1.0, 1.0]),
    "an infinity of its own": (("rule", "own"), [math.inf]),
    "a well": (("rule", "own"), [[[[[[[[1]]]]]]]]),
}


@pytest.mark.parametrize("case", list(ODD))
def test_odd_public_numbers_are_refused(case):
    public = calibrated(fedmed(beta=0.5))
    check_public(public, LAYERS)
    path, value = ODD[case]
    odd: object = copy.deepcopy(public)
    if path:
        place = odd
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
    else:
        odd = value
    with pytest.raises(ValueError, match=r"."):
        check_public(odd, LAYERS)


def test_top_k_is_refused_where_clients_are_real():
    for method in (fedavg(), fedmed(), privately(fedmed())):
        refuse_isolating(method)
    for method in (fedmed(beta=0.5), privately(fedmed(beta=0.5))):
        with pytest.raises(ConfigError, match=r"method.beta is 0.5 \(fedmed\): top-K .* read its upload; set method"):
            refuse_isolating(method)
    with pytest.raises(ConfigError, match=r"method\.beta"):
        refuse_isolating(replace(fedavg(), mediator=weigh.top_k(0.5, weigh.uniform())))


def test_fixed_weights_are_refused_beyond_the_ratio_of_a_sum():
    for weights, ratio in (({}, 1), ({"a": 16.0}, 16), ({"a": 0.5, "b": 2.0}, 4), ({"a": 1 / 3}, 3)):
        refuse_isolating(replace(fedavg(), mediator=weigh.fixed(weights)), ratio)
        refuse_isolating(privately(replace(fedavg(), mediator=weigh.fixed(weights))), ratio)
    odd = [({"a": 16.1}, 16, "16.1 times"), ({"a": 0.5, "b": 2.0}, 3, "4 times"), ({"a": 0.0}, 16, "a weight of 0")]
    for weights, ratio, message in odd:
        with pytest.raises(ConfigError, match=rf"fixed weights \(fedavg\): .*{message}.* allows {ratio}"):
            refuse_isolating(replace(fedavg(), mediator=weigh.fixed(weights)), ratio)
