r"""How clients weigh themselves when no report may leave them: by their own numbers and public ones.

A softmax over clients is a ratio of two sums, and client k knows its own score: with a public cap c it sends
u_k = exp(min(s_k, c) − c) as mass and u_k · Δ_k as upload, both inside one masked sum. c cancels in the ratio; it only
keeps every number within [0, 1]. The same holds for token weights, min(n_k/ŵ, 1) with a public ŵ.

Public numbers come from sums alone. The first ones from histograms of a calibration sum before the first upload; then
they move: up as soon as a client is saturated (its score or size was cut off, so that it counts for less than it
should), down when all clients lie far below. Two rules need all reports of a round before they can weigh, and get a
private variant that looks at the rounds before: the switch on the mean loss, and top-K by loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from keyfed.errors import ConfigError
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

MOST_GROWTH = 2.0**8  # of ŵ over the first one
SIZES = 32  # buckets of a number of tokens n: bucket b holds 2^(b−1) < n ≤ 2^b
LEAST_SCORE, SCORE_RATIO, SCORES = 0.05, 1.03, 360  # bucket b holds scores up to 0.05 · 1.03^b; the last one is 2039
MOST_CAP = 4096.0  # twice that
ROOMS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # from where on c − s falls into bucket 1, 2, …; below 0: saturated
LOSS_STEP, LOSSES = 1 / 32, 512  # buckets of a loss in nats, up to 16 and above


def one_hot(place: int, length: int) -> list[float]:
    """Return zeros with a one at a place; places beyond the ends count as the ends.

    Example:
      >>> one_hot(1, 3), one_hot(7, 3)
      ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    """
    row = [0.0] * length
    row[min(max(place, 0), length - 1)] = 1.0
    return row


def highest(histogram: Sequence[float]) -> int:
    """Return the last bucket of a histogram that holds a client (at least half a count); 0 for an empty one."""
    return max((place for place, count in enumerate(histogram) if count >= 0.5), default=0)


def size_bucket(tokens: float) -> int:
    """Return b with 2^(b−1) < n ≤ 2^b.

    Example:
      >>> [size_bucket(n) for n in (1, 2, 3, 1024, 1025)]
      [0, 1, 2, 10, 11]
    """
    return math.ceil(math.log2(tokens)) if tokens > 1 else 0


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
        for name, histogram in _under("scores/", sums).items():
            edge = LEAST_SCORE * SCORE_RATIO ** highest(histogram)
            caps[name] = min(edge + min(1 + edge / 4, 3.0), bound)  # room for scores that grow, e^−3 of precision
        return {**public, "caps": caps}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        del contributors
        rooms = _under("room/", sums)
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


def switch_on_last_losses(adaptive: PrivateRule, otherwise: PrivateRule, threshold: float) -> PrivateRule:
    r"""Use `adaptive` while the mean loss of the two rounds *before* differed by at least ε, else `otherwise`.

    .. math::  |L_{t−1} − L_{t−2}| ≥ ε: \text{adaptive},\qquad |L_{t−1} − L_{t−2}| < ε: \text{otherwise}

    One round later than `mediate.switch_on_loss`: this round's mean loss is only known once everybody has uploaded. L
    is the unweighted mean over those whose upload arrived; the first two rounds are adaptive.
    """
    parts = {"adaptive": adaptive, "otherwise": otherwise}

    def chosen(public: Public) -> str:
        before, last = public["losses"]
        return "adaptive" if before is None or last is None or abs(last - before) >= threshold else "otherwise"

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        name = chosen(public)
        return parts[name].share(report, layers, public[name])

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        after = _each(parts, public, lambda name, rule, own: rule.learn(own, _inner(name, sums), contributors))
        count = sums["count"][0]
        return {**after, "losses": [public["losses"][1], sums["loss"][0] / count]} if count >= 0.5 else after

    def least(layers: Sequence[str], public: Public) -> LayerNumbers:
        name = chosen(public)
        own = parts[name].least
        return dict.fromkeys(layers, 0.0) if own is None else own(layers, public[name])

    return PrivateRule(
        init=lambda: {"losses": [None, None], **{name: rule.init() for name, rule in parts.items()}},
        share=share,
        facts=lambda report, layers, public: _joined(
            {name: rule.facts(report, layers, public[name]) for name, rule in parts.items()}
        ),
        first=lambda report, layers: _joined({name: rule.first(report, layers) for name, rule in parts.items()}),
        start=lambda public, sums: _each(parts, public, lambda name, rule, own: rule.start(own, _inner(name, sums))),
        learn=learn,
        least=least,
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
            {"losses": bucket(report)} | _joined({"inner": inner.facts(report, layers, public["inner"])})
        ),
        first=lambda report, layers: {"losses": bucket(report)} | _joined({"inner": inner.first(report, layers)}),
        start=lambda public, sums: moved(public, sums, inner.start(public["inner"], _inner("inner", sums))),
        learn=lambda public, sums, contributors: moved(
            public, sums, inner.learn(public["inner"], _inner("inner", sums), contributors)
        ),
    )


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
        own = rule.start(public["rule"], _inner("rule", sums))
        ranges = first_ranges({name: highest(seen) for name, seen in _under("magnitude/", sums).items()})
        return {"calibrated": True, "rule": own, "ranges": ranges, "first": dict(ranges), "outside": 0}

    def learn(public: Public, sums: Sums, contributors: int) -> Public:
        after = next_ranges(public, sums, contributors)
        if contributors:
            after["rule"] = rule.learn(public["rule"], _inner("rule", sums), contributors)
        return after

    return PrivateRule(
        init=lambda: {"calibrated": False, "rule": rule.init(), "ranges": {}, "first": {}, "outside": 0},
        share=lambda report, layers, public: rule.share(report, layers, public["rule"]),
        facts=lambda report, layers, public: _joined({"rule": rule.facts(report, layers, public["rule"])}),
        first=lambda report, layers: _joined({"rule": rule.first(report, layers)}),
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


def _each(
    parts: Mapping[str, PrivateRule], public: Public, move: Callable[[str, PrivateRule, Public], Public]
) -> Public:
    return {**public, **{name: move(name, rule, public[name]) for name, rule in parts.items()}}


def _joined(parts: Mapping[str, Facts]) -> Facts:
    return {f"{part}/{name}": numbers for part, facts in parts.items() for name, numbers in facts.items()}


def _under(prefix: str, sums: Sums) -> Sums:
    return {name.removeprefix(prefix): numbers for name, numbers in sums.items() if name.startswith(prefix)}


def _inner(part: str, sums: Sums) -> Sums:
    """Return the facts of a part; "loss" and "count" are everybody's."""
    return {**_under(f"{part}/", sums), **{name: sums[name] for name in ("loss", "count") if name in sums}}
