r"""How clients weigh themselves when no report may leave them: by their own numbers and public ones.

A softmax over clients is a ratio of two sums, and client k knows its own score: with a public cap c it sends
u_k = exp(min(s_k, c) − c) as mass and u_k · Δ_k as upload, both inside one masked sum. c cancels in the ratio; it only
keeps every number within [0, 1]. The same holds for token weights, min(n_k/ŵ, 1) with a public ŵ.

Public numbers come from sums alone. The first ones from histograms of a calibration sum before the first upload; then
they move: up as soon as a client is saturated (its score or size was cut off, so that it counts for less than it
should), down when all clients lie far below. Two rules need all reports of a round before they can weigh, and get a
private variant that looks at the rounds before (`last_losses`): the switch on the mean loss, and top-K by loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from keyfed.errors import ConfigError
from keyfed.federated.last_losses import LOSS_STEP, LOSSES, below_last_quantile, switch_on_last_losses
from keyfed.federated.public_facts import highest, joined, one_hot, size_bucket, sums_of, under
from keyfed.federated.public_ranges import MAGNITUDES, first_ranges, magnitude_bucket, next_ranges
from keyfed.federated.types import (
    Facts,
    LayerNumbers,
    Mediator,
    Memory,
    Method,
    PrivateRule,
    Public,
    Report,
    Share,
    Sums,
)

__all__ = [  # those of `last_losses` and `public_facts` that a rule is made of, too
    "LOSSES", "LOSS_STEP", "MOST_CAP", "MOST_GROWTH", "SIZES", "below_last_quantile", "capped_softmax", "constant",
    "highest", "magnitude", "one_hot", "privately", "saturated_clients", "size_bucket", "standing",
    "switch_on_last_losses", "tokens",
]  # fmt: skip

MOST_GROWTH = 2.0**8  # of ŵ over the first one
SIZES = 32  # buckets of a number of tokens n: bucket b holds 2^(b−1) < n ≤ 2^b
LEAST_SCORE, SCORE_RATIO, SCORES = 0.05, 1.03, 360  # bucket b holds scores up to 0.05 · 1.03^b; the last one is 2039
MOST_CAP = 4096.0  # twice that
ROOMS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # from where on c − s falls into bucket 1, 2, …; below 0: saturated


def constant(weight_of: Callable[[Report], float], least: float = 0.0) -> PrivateRule:
    """Weigh by a number within [0, 1] that is known beforehand: nothing is told, nothing is learnt.

    Args:
      least: the smallest of all weights.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        del public
        numbers = dict.fromkeys(layers, weight_of(report))
        return Share(scale=numbers, mass=numbers)

    return _unlearning(share)._replace(least=lambda layers, public: dict.fromkeys(layers, least))


def tokens() -> PrivateRule:
    r"""Weigh by min(n_k/ŵ, 1) with a public ŵ, a power of two: n_k / Σn once the server has divided by the mass.

    Exact while nobody has more than ŵ tokens. ŵ doubles after a round in which somebody had, and halves after one in
    which nobody had more than ŵ/8. It is never above 2^8 times the first one: who says in every round that it has more
    does not round the others away.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        numbers = dict.fromkeys(layers, min(report.tokens / public["most"], 1.0))
        return Share(scale=numbers, mass=numbers)

    def facts(report: Report, layers: Sequence[str], public: Public) -> Facts:
        del layers
        n, most = report.tokens, public["most"]
        return {"saturated": [float(n > most)], "small": [float(n <= most / 8)]}

    def first(report: Report, layers: Sequence[str]) -> Facts:
        del layers
        return {"sizes": one_hot(size_bucket(report.tokens), SIZES)}

    def start(public: Public, sums: Sums) -> Public:
        most = 2.0 ** (highest(sums["sizes"]) + 1)
        return {**public, "most": most, "first": most}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        if sums["saturated"][0] >= 0.5:
            return {**public, "most": min(public["most"] * 2, public["first"] * MOST_GROWTH)}
        if sums["small"][0] > contributors - 0.5:
            return {**public, "most": max(1.0, public["most"] / 2)}
        return public

    return PrivateRule(lambda: {"most": 1.0, "first": 1.0}, share, facts, first, start, learn, _one_token)


def _one_token(layers: Sequence[str], public: Public) -> LayerNumbers:
    """A client has a token at least, and weighs 1/ŵ at least."""
    return dict.fromkeys(layers, 1 / public["most"])


def standing(uniform: bool) -> PrivateRule:
    r"""Weigh by α_k/ŵ, and bring that mass once, when joining (see `admm.once`); uniform is α_k = ŵ = 1.

    The server's running mean is in units of ŵ, so ŵ never changes after the first round: it is sixteen times the
    largest power of two of the first cohort. A client with more is refused ("does not fit", which moves no range):
    counting it for less would make θ wrong for ever.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        alpha = 1.0 if uniform else report.weight / public["most"]
        return Share(scale=dict.fromkeys(layers, alpha), mass=dict.fromkeys(layers, alpha * report.joining))

    if uniform:
        return _unlearning(share)._replace(least=lambda layers, public: dict.fromkeys(layers, 1.0))

    def first(report: Report, layers: Sequence[str]) -> Facts:
        del layers
        return {"sizes": one_hot(size_bucket(report.weight), SIZES)}

    def start(public: Public, sums: Sums) -> Public:
        return {**public, "most": 2.0 ** (highest(sums["sizes"]) + 4)}

    return _unlearning(share)._replace(init=lambda: {"most": 1.0}, first=first, start=start, least=_one_token)


def capped_softmax(score: Callable[[Report, str], float], bound: float = math.inf) -> PrivateRule:
    r"""Weigh each layer by u = exp(min(s, c) − c) with a public cap c: the softmax, once divided by the mass.

    .. math::  \frac{\sum_k u_k Δ_k}{\sum_k u_k} = \frac{\sum_k e^{s_k} Δ_k}{\sum_k e^{s_k}}
               \quad\text{if all } s_k ≤ c

    The first c is 1 to 3 above the largest score of the first cohort (from a histogram). After a round with saturated
    clients it rises by a quarter, at least by 1; when all lie more than 4 below it, it falls.

    Args:
      score: a client's score in a layer, at least 0.
      bound: largest score that can occur; c is never above it.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        caps = public["caps"]
        numbers = {name: math.exp(min(score(report, name), caps[name]) - caps[name]) for name in layers}
        return Share(scale=numbers, mass=numbers)

    def facts(report: Report, layers: Sequence[str], public: Public) -> Facts:
        told: Facts = {}
        for name in layers:
            room = public["caps"].get(name, 0.0) - score(report, name)
            told[f"room/{name}"] = one_hot(sum(room >= edge for edge in ROOMS), len(ROOMS) + 1)
        return told

    def first(report: Report, layers: Sequence[str]) -> Facts:
        return {f"scores/{name}": one_hot(_score_bucket(score(report, name)), SCORES) for name in layers}

    def start(public: Public, sums: Sums) -> Public:
        caps = {}
        for name, histogram in under("scores/", sums).items():
            edge = LEAST_SCORE * SCORE_RATIO ** highest(histogram)
            caps[name] = min(edge + min(1 + edge / 4, 3.0), bound)  # room for scores that grow, e^−3 of precision
        return {**public, "caps": caps}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        del contributors
        rooms = under("room/", sums)
        return {
            **public,
            "caps": {name: min(_moved(cap, rooms[name]), bound, MOST_CAP) for name, cap in public["caps"].items()},
        }

    def least(layers: Sequence[str], public: Public) -> LayerNumbers:
        return {name: math.exp(-public["caps"][name]) for name in layers}

    return PrivateRule(lambda: {"caps": {}}, share, facts, first, start, learn, least)


def _score_bucket(score: float) -> int:
    return 0 if score <= LEAST_SCORE else math.ceil(math.log(score / LEAST_SCORE) / math.log(SCORE_RATIO) - 1e-9)


def _moved(cap: float, rooms: Sequence[float]) -> float:
    """Return the next cap of a layer from the histogram of c − s, whose first bucket holds the saturated clients."""
    if rooms[0] >= 0.5:
        return cap + max(1.0, cap / 4)
    nearest = next((place for place, count in enumerate(rooms) if count >= 0.5), 0)
    room = ROOMS[nearest - 1] if nearest else 0.0  # every client has at least this much
    return cap - (room - 2) if room >= 4 else cap


def magnitude(largest: float) -> list[float]:
    """Return the one-hot histogram of a layer's largest absolute number by powers of two; bucket 0 is exactly zero."""
    return one_hot(magnitude_bucket(largest), MAGNITUDES)


def privately(method: Method) -> Method:
    """Return the same method with clients that weigh themselves by public numbers; no report leaves them.

    Its mediator's memory is public: {"calibrated": whether the first numbers are there, "rule": the rule's own,
    "ranges": the exponent of two that no number of a layer exceeds, for sums of fixed point, "first": the calibration's
    ranges, "outside": rounds with a client out of range since ranges last rose}.

    Raises:
      ConfigError: the mediator has no private rule.
    """
    rule = method.mediator.private
    if method.hidden:
        return method
    if rule is None:
        raise ConfigError(
            f"the mediator of {method.name} has no rule by which clients weigh themselves with public numbers only; "
            "give it `private`, or leave secure aggregation off"
        )

    def weigh(memory: Memory, reports: object, layers: Sequence[str]) -> NoReturn:
        raise AssertionError("clients of a hidden method weigh themselves; there are no reports")

    private = _with_ranges(rule)
    return replace(method, mediator=Mediator(private.init, weigh, None, private), hidden=True)


def _with_ranges(rule: PrivateRule) -> PrivateRule:
    """Join a rule with the ranges of the layers; its facts are told under "rule/"."""

    def start(public: Public, sums: Sums) -> Public:
        own = rule.start(public["rule"], sums_of("rule", sums))
        ranges = first_ranges({name: highest(seen) for name, seen in under("magnitude/", sums).items()})
        return {"calibrated": True, "rule": own, "ranges": ranges, "first": dict(ranges), "outside": 0}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        after = next_ranges(public, sums, contributors)
        if contributors:
            after["rule"] = rule.learn(public["rule"], sums_of("rule", sums), contributors)
        return after

    return PrivateRule(
        init=lambda: {"calibrated": False, "rule": rule.init(), "ranges": {}, "first": {}, "outside": 0},
        share=lambda report, layers, public: rule.share(report, layers, public["rule"]),
        facts=lambda report, layers, public: joined({"rule": rule.facts(report, layers, public["rule"])}),
        first=lambda report, layers: joined({"rule": rule.first(report, layers)}),
        start=start,
        learn=learn,
        least=None if rule.least is None else _least_of(rule),
    )


def _least_of(rule: PrivateRule) -> Callable[[Sequence[str], Public], LayerNumbers]:
    least = rule.least
    assert least is not None
    return lambda layers, public: least(layers, public["rule"])


def saturated_clients(sums: Sums) -> int:
    """Return how many clients were cut off in the layer that cut off most, from the facts of our own rules."""
    flags = [s[0] for name, s in sums.items() if name.endswith("/saturated") or "/room/" in name]
    return round(max(flags, default=0.0))


def _unlearning(share: Callable[[Report, Sequence[str], Public], Share]) -> PrivateRule:
    """A rule that tells nothing and whose public numbers stay as they are."""
    return PrivateRule(
        init=dict,
        share=share,
        facts=lambda report, layers, public: {},
        first=lambda report, layers: {},
        start=lambda public, sums: public,
        learn=lambda public, sums, contributors: public,
    )
