r"""How clients weigh themselves when no report may leave them: by their own numbers and public ones.

A softmax over clients is a ratio of two sums, and client k knows its own score. With a public cap c it sends
u_k = exp(s_k − c) as mass and u_k · Δ_k as upload, both inside one masked sum. c cancels in the ratio; it only places
the window of scores that count exactly. The same holds for token weights, n_k/ŵ with a public ŵ.

**No client may be most of a sum.** In every layer the scale, which multiplies the upload, is held within [1/r, 1]
(`held`). So scores count within [c − ln r, c], and tokens within [ŵ/r, ŵ]. r comes from the sum's threshold
(`private.secagg.threshold.most_ratio`), and the client computes it; no public number and no option of a method widens
it.

Public numbers come from sums alone: the first ones from histograms of a calibration sum before the first upload, later
ones from coarse histograms in every round. They are placed where most clients count exactly, and move only for two
clients or more (`numbers.best_top`).

Two rules need all losses of a round before they can weigh: FedMed's switch on the mean loss, and top-K by loss. Where
no loss leaves a client, both are known only after everybody has uploaded. So they go by the rounds before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from keyfed.errors import ConfigError, DoesNotFit
from keyfed.federated.public.numbers import (
    LOSS_STEP,
    LOSSES,
    MAGNITUDES,
    MOST_CAP,
    ROOM_OF_DUALS,
    ROOM_OF_RANGE,
    SATURATED,
    USUAL_RATIO,
    best_move,
    best_top,
    first_ranges,
    highest,
    joined,
    magnitude_bucket,
    next_ranges,
    one_hot,
    ratio_in,
    room_histogram,
    size_bucket,
    sums_of,
    under,
)
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
    WeighingRule,
)

SIZES = 32  # buckets of a number of tokens n: bucket b holds 2^(b−1) < n ≤ 2^b
LEAST_SCORE, SCORE_RATIO, SCORES = 0.05, 1.03, 360  # bucket b holds scores up to 0.05 · 1.03^b; the last one is 2039
LEAST_LOG = -700.0  # of a weight, so that e^log is not 0


def held(share: Share, ratio: float, *, silent: bool = False) -> Share:
    """Return a share with every scale at least 1/r; its mass grows alike. Scales above 1 are for the sum to refuse.

    This is the one place that keeps a client from being most of a layer's sum, whatever its rule said.

    Args:
      silent: the share may be all zeros (a simulation of top-K, which real clients refuse).

    Raises:
      DoesNotFit: a scale is 0, negative or no number: such a client would leave the others alone in the sum.
    """
    if silent and not any(share.scale.values()) and not any(share.mass.values()):
        return share
    if not all(scale > 0 for scale in share.scale.values()):
        raise DoesNotFit("a scale of 0 in a secure sum leaves the other clients alone in it; nothing was sent")
    scale = {name: max(own, 1 / ratio) for name, own in share.scale.items()}
    mass = {
        name: scale[name] if own == share.scale[name] else own * (scale[name] / share.scale[name])
        for name, own in share.mass.items()
    }
    return replace(share, scale=scale, mass=mass)


def clamped(own: Share, sent: Share, facts: Facts) -> Facts:
    """Say whether a client was clamped at either end in any layer: below 1/r, or above the public top."""
    above = {name.rpartition("room")[2] for name, row in facts.items() if _is_room(name) and sum(row[:SATURATED]) > 0}
    low = any(sent.scale[name] > scale for name, scale in own.scale.items())
    high = any(scale == 1 and ({"", f"/{name}"} & above) for name, scale in own.scale.items())
    return {"clamped": [float(low or high)]}


def _is_room(name: str) -> bool:
    return "/room/" in f"/{name}/"


def masked(rule: WeighingRule) -> PrivateRule:
    """Return the form of a rule that clients apply to themselves by public numbers, for sums that hide every report."""
    if rule.joins:
        return _joining()
    if rule.least is not None:
        return _known_before(rule, rule.least)
    return _with_caps(rule) if rule.exponential else _with_size(rule)


def below(rule: WeighingRule, report: Report, layer: str, top: float) -> float:
    """Return a client's weight as a share of a public top, min(w/top, 1): in logarithms exp(min(s, c) − c)."""
    weight = rule.weight(report, layer)
    if rule.exponential:
        return math.exp(max(min(weight, top) - top, LEAST_LOG))
    return min(weight / top, 1.0)


def _known_before(rule: WeighingRule, least: float) -> PrivateRule:
    """Weigh by numbers that are known before the run: no client sends any fact, and no public number moves.

    A sum whose ratio r does not allow the least weight is refused; nothing is clamped.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        del public
        weights = {name: rule.weight(report, name) / rule.largest for name in layers}
        return Share(scale=weights, mass=weights)

    return _unlearning(share)._replace(least=lambda layers, public: dict.fromkeys(layers, least / rule.largest))


def _with_size(rule: WeighingRule) -> PrivateRule:
    r"""Weigh by min(n_k/ŵ, 1) with a public ŵ, a power of two: n_k / Σn after the server has divided by the mass.

    Exact for clients of ŵ/r to ŵ tokens; others count as the nearer end (`held`). ŵ is where most clients count
    exactly: by the calibration's histogram of sizes at first, then by how many factors of two clients lie below ŵ.
    The weight does not depend on the layer.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        weights = {name: below(rule, report, name, public["most"]) for name in layers}
        return Share(scale=weights, mass=weights)

    def facts(report: Report, layers: Sequence[str], public: Public) -> Facts:
        return {"room": room_histogram(math.log2(public["most"] / max(1, rule.weight(report, layers[0]))))}

    def first(report: Report, layers: Sequence[str]) -> Facts:
        return {"sizes": one_hot(size_bucket(rule.weight(report, layers[0])), SIZES)}

    def start(public: Public, sums: Sums) -> Public:
        found = [(max(0.0, place - 1.0), float(place), count) for place, count in enumerate(sums["sizes"])]
        return {**public, "most": _size(best_top(found, math.log2(ratio_in(sums))))}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        del contributors
        return {**public, "most": _size(math.log2(public["most"]) + best_move(sums["room"], ratio_in(sums)))}

    return PrivateRule(lambda: {"most": 1.0}, share, facts, first, start, learn)


def _size(octaves: float) -> float:
    """Return ŵ, a power of two of at least 1."""
    return 2.0 ** min(max(0, math.floor(octaves)), SIZES)


def _joining() -> PrivateRule:
    r"""Weigh all alike, and bring that mass when joining, whatever the method weighs by.

    A joining client's mass is read in the clear where it joins alone. By tokens it would be that client's number of
    tokens; so in secure sums it is 1, and only how many joined is seen.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        if "most" in public:  # of a run that was begun by tokens: its running mean is in other units
            raise ConfigError(
                "this secure run was begun by an older version, with weights by tokens; start it anew, or without "
                "secure sums"
            )
        return Share(scale=dict.fromkeys(layers, 1.0), mass=dict.fromkeys(layers, float(report.joining)))

    return _unlearning(share)._replace(least=lambda layers, public: dict.fromkeys(layers, 1.0))


def _with_caps(rule: WeighingRule) -> PrivateRule:
    r"""Weigh each layer by u = exp(min(s, c) − c) with a public cap c: the softmax, after division by the mass.

    .. math::  \frac{\sum_k u_k Δ_k}{\sum_k u_k} = \frac{\sum_k e^{s_k} Δ_k}{\sum_k e^{s_k}}
               \quad\text{if all } c − \ln r ≤ s_k ≤ c

    Scores outside count as the nearer end (`held`). c is where most clients count exactly. It comes from the
    calibration's histogram of scores first, then from how many factors of two clients' weights lie below 1. It is never
    above the rule's bound.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        weights = {name: below(rule, report, name, public["caps"][name]) for name in layers}
        return Share(scale=weights, mass=weights)

    def facts(report: Report, layers: Sequence[str], public: Public) -> Facts:
        caps = public["caps"]
        return {
            f"room/{name}": room_histogram((caps.get(name, 0.0) - rule.weight(report, name)) / math.log(2))
            for name in layers
        }

    def first(report: Report, layers: Sequence[str]) -> Facts:
        return {f"scores/{name}": one_hot(_score_bucket(rule.weight(report, name)), SCORES) for name in layers}

    def start(public: Public, sums: Sums) -> Public:
        edges = [0.0, *(LEAST_SCORE * SCORE_RATIO**place for place in range(SCORES))]
        caps = {}
        for name, histogram in under("scores/", sums).items():
            found = [(edges[place], edges[place + 1], count) for place, count in enumerate(histogram)]
            caps[name] = min(max(0.0, best_top(found, math.log(ratio_in(sums)))), rule.bound)
        return {**public, "caps": caps}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        del contributors
        rooms, ratio = under("room/", sums), ratio_in(sums)
        moved = {name: cap + math.log(2) * best_move(rooms[name], ratio) for name, cap in public["caps"].items()}
        return {**public, "caps": {name: min(max(0.0, cap), rule.bound, MOST_CAP) for name, cap in moved.items()}}

    return PrivateRule(lambda: {"caps": {}}, share, facts, first, start, learn)


def _score_bucket(score: float) -> int:
    return 0 if score <= LEAST_SCORE else math.ceil(math.log(score / LEAST_SCORE) / math.log(SCORE_RATIO) - 1e-9)


def magnitude(largest: float) -> list[float]:
    """Return the one-hot histogram of a layer's largest absolute number by powers of two; bucket 0 is exactly zero."""
    return one_hot(magnitude_bucket(largest), MAGNITUDES)


def privately(method: Method) -> Method:
    """Return the same method with clients that weigh themselves by public numbers; no report leaves them.

    Its mediator's memory is public:

    - "calibrated": whether the first numbers are there;
    - "rule": the rule's own numbers;
    - "ranges": the exponent of two that no number of a layer exceeds, for sums of fixed point;
    - "first": the calibration's ranges;
    - "outside": rounds with a client out of range since ranges last rose.

    Raises:
      ConfigError: the mediator has no private rule.
    """
    rule = method.mediator.private
    if method.report_free:
        return method
    if rule is None:
        raise ConfigError(
            f"the mediator of {method.name} has no rule by which clients weigh themselves with public numbers only; "
            "give it `private`, or leave secure aggregation off"
        )

    def weigh(memory: Memory, reports: object, layers: Sequence[str]) -> NoReturn:
        raise AssertionError("clients of a report-free method weigh themselves; there are no reports")

    private = _with_ranges(rule, ROOM_OF_RANGE if method.solver.start is None else ROOM_OF_DUALS)
    return replace(
        method, mediator=Mediator(private.init, weigh, None, private, rule=method.mediator.rule), report_free=True
    )


def _with_ranges(rule: PrivateRule, room: int) -> PrivateRule:
    """Join a rule with the ranges of the layers; its facts have names under "rule/".

    Args:
      room: bits between the largest number seen and the first range.
    """

    def start(public: Public, sums: Sums) -> Public:
        own = rule.start(public["rule"], sums_of("rule", sums))
        ranges = first_ranges({name: highest(seen) for name, seen in under("magnitude/", sums).items()}, room)
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
        adaptive=_adaptive_of(rule, "rule"),
    )


def _least_of(rule: PrivateRule) -> Callable[[Sequence[str], Public], LayerNumbers]:
    least = rule.least
    assert least is not None
    return lambda layers, public: least(layers, public["rule"])


def _adaptive_of(rule: PrivateRule, name: str) -> Callable[[Public], bool] | None:
    adaptive = rule.adaptive
    return None if adaptive is None else lambda public: adaptive(public[name])


def saturated_clients(sums: Sums) -> int:
    """Return how many clients were cut off in the layer that cut off most, from the facts of our own rules."""
    return round(max((sum(row[:SATURATED]) for name, row in sums.items() if _is_room(name)), default=0.0))


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


def switch_on_last_losses(adaptive: PrivateRule, otherwise: PrivateRule, threshold: float) -> PrivateRule:
    r"""Use `adaptive` while the mean loss of the two rounds *before* differed by at least ε, else `otherwise`.

    .. math::  |L_{t−1} − L_{t−2}| ≥ ε: \text{adaptive},\qquad |L_{t−1} − L_{t−2}| < ε: \text{otherwise}

    One round later than `federated.weigh.switch_on_loss`: this round's mean loss is only known once everybody has
    uploaded. L is the unweighted mean over those whose upload arrived; the first two rounds are adaptive.
    """
    parts = {"adaptive": adaptive, "otherwise": otherwise}

    def moved(public: Public) -> bool:
        before, last = public["losses"]
        return before is None or last is None or abs(last - before) >= threshold

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        name = "adaptive" if moved(public) else "otherwise"
        return parts[name].share(report, layers, public[name])

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        after = _each(parts, public, lambda name, rule, own: rule.learn(own, sums_of(name, sums), contributors))
        count = sums["count"][0]
        return {**after, "losses": [public["losses"][1], sums["loss"][0] / count]} if count >= 0.5 else after

    return PrivateRule(
        init=lambda: {"losses": [None, None], **{name: rule.init() for name, rule in parts.items()}},
        share=share,
        facts=lambda report, layers, public: joined(
            {name: rule.facts(report, layers, public[name]) for name, rule in parts.items()}
        ),
        first=lambda report, layers: joined({name: rule.first(report, layers) for name, rule in parts.items()}),
        start=lambda public, sums: _each(parts, public, lambda name, rule, own: rule.start(own, sums_of(name, sums))),
        learn=learn,
        adaptive=moved,
    )


def below_last_quantile(kept: Callable[[int], int], inner: PrivateRule) -> PrivateRule:
    r"""Let only clients whose loss is at most τ count: the K-th lowest loss of the round before, from a histogram.

    Clients above τ send zeros. τ is the upper end of a bucket of 1/32 nats; in the first round it comes from that
    round's own calibration. As losses fall, more than K clients lie below the last round's τ: this is the price of not
    telling one's loss.

    Args:
      kept: K for a number of clients.
    """

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        limit = public["limit"]
        if limit is not None and report.loss > limit:
            none = dict.fromkeys(layers, 0.0)
            return Share(scale=none, mass=none)
        return inner.share(report, layers, public["inner"])

    def bucket(report: Report) -> list[float]:
        return one_hot(math.ceil(report.loss / LOSS_STEP) - 1, LOSSES)

    def limit_of(histogram: Sequence[float]) -> float | None:
        clients = round(sum(histogram))
        seen = 0.0
        for place, count in enumerate(histogram[:-1]):
            seen += count
            if clients and seen >= kept(clients) - 0.5:
                return (place + 1) * LOSS_STEP
        return None  # the K-th loss lies beyond the last bucket: everybody counts

    def moved(public: Public, sums: Sums, own: Public) -> Public:
        return {**public, "limit": limit_of(sums["losses"]), "inner": own}

    return PrivateRule(
        init=lambda: {"limit": None, "inner": inner.init()},
        share=share,
        facts=lambda report, layers, public: (
            {"losses": bucket(report)} | joined({"inner": inner.facts(report, layers, public["inner"])})
        ),
        first=lambda report, layers: {"losses": bucket(report)} | joined({"inner": inner.first(report, layers)}),
        start=lambda public, sums: moved(public, sums, inner.start(public["inner"], sums_of("inner", sums))),
        learn=lambda public, sums, contributors: moved(
            public, sums, inner.learn(public["inner"], sums_of("inner", sums), contributors)
        ),
        adaptive=_adaptive_of(inner, "inner"),
    )


def _each(
    parts: Mapping[str, PrivateRule], public: Public, move: Callable[[str, PrivateRule, Public], Public]
) -> Public:
    return {**public, **{name: move(name, rule, public[name]) for name, rule in parts.items()}}


def refuse_isolating(method: Method, ratio: float = USUAL_RATIO) -> None:
    r"""Refuse a method with which the server can make a sum of one client's upload.

    Under top-K clients with a loss above the public τ send zeros, and the histogram of losses is public. With τ between
    the two lowest losses the sum is one upload. No client can see that by itself. A simulation has no server to hide
    from.

    Args:
      ratio: r of the sum (`private.secagg.threshold.most_ratio`); by default the largest that any sum has.

    Raises:
      ConfigError: the method takes the clients of lowest loss only, or has fixed weights beyond the ratio.
    """
    refuse_unequal(method, ratio)
    rule = method.mediator.private
    if method.uploading < 1 or (rule is not None and "limit" in _names(rule.init())):
        raise ConfigError(
            f"method.beta is {method.uploading:g} ({method.name}): top-K under secure sums lets the server choose a "
            "threshold below which a single client lies, and read its upload; set method.beta=1, or secure.on=false"
        )


def refuse_unequal(method: Method, ratio: float) -> None:
    """Refuse weights that are fixed beforehand and differ by more than a secure sum allows; 0 is beyond any ratio.

    Raises:
      ConfigError: with what would do.
    """
    rule = method.mediator.private
    if rule is None or rule.least is None:  # others are clamped
        return
    least = min(rule.least(["layer"], rule.init()).values())
    if least < 1 / ratio - 1e-9:
        found = f"the largest is {1 / least:.4g} times the least" if least > 0 else "a weight of 0 is among them"
        raise ConfigError(
            f"fixed weights ({method.name}): {found}, and a secure sum allows {ratio:g} times at most, so that no "
            "client's upload can be singled out; bring mediator.weights closer together (a client without one "
            "weighs 1), take more clients a round (up to 16 times), or set secure.on=false"
        )


def _names(kept: object) -> set[str]:
    """Return all names in nested public numbers."""
    if not isinstance(kept, dict):
        return set()
    return set(kept).union(*(_names(value) for value in kept.values()))
