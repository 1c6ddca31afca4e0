"""The private variants of the two rules that need all losses of a round: they look at the rounds before.

FedMed switches on the mean loss, and lets the K clients of the lowest losses count. Where no loss leaves a client, a
round's mean and its histogram of losses are only known once everybody has uploaded, so they serve the next round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from keyfed.federated.public.facts import joined, one_hot, sums_of
from keyfed.federated.types import PrivateRule, Public, Report, Share, Sums

LOSS_STEP, LOSSES = 1 / 32, 512  # buckets of a loss in nats, up to 16 and above


def switch_on_last_losses(adaptive: PrivateRule, otherwise: PrivateRule, threshold: float) -> PrivateRule:
    r"""Use `adaptive` while the mean loss of the two rounds *before* differed by at least ε, else `otherwise`.

    .. math::  |L_{t−1} − L_{t−2}| ≥ ε: \text{adaptive},\qquad |L_{t−1} − L_{t−2}| < ε: \text{otherwise}

    One round later than `federated.weigh.switch_on_loss`: this round's mean loss is only known once everybody has
    uploaded. L is the unweighted mean over those whose upload arrived; the first two rounds are adaptive.
    """
    parts = {"adaptive": adaptive, "otherwise": otherwise}

    def chosen(public: Public) -> str:
        before, last = public["losses"]
        return "adaptive" if before is None or last is None or abs(last - before) >= threshold else "otherwise"

    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        name = chosen(public)
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
    )


def _each(
    parts: Mapping[str, PrivateRule], public: Public, move: Callable[[str, PrivateRule, Public], Public]
) -> Public:
    return {**public, **{name: move(name, rule, public[name]) for name, rule in parts.items()}}
