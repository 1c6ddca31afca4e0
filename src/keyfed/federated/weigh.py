"""Mediators: how much each client counts in the sum, from its report. Each is a rule, of which all forms are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from keyfed.errors import ConfigError
from keyfed.federated.public import rules
from keyfed.federated.spec import positive, share_of_clients
from keyfed.federated.types import (
    ClientId,
    LossSwitch,
    Mediator,
    Memory,
    Params,
    PrivateRule,
    Report,
    Share,
    TopK,
    WeighingRule,
)

Reports = Mapping[ClientId, Report]
Shares = Mapping[ClientId, Share] | None


def by_tokens() -> Mediator:
    r"""Weigh clients by their number of training tokens, γ_k = n_k / Σ_j n_j (FedAvg).

    Every client knows its own n_k: it scales its upload by n_k and sends n_k as mass. The server divides by the mass
    that arrived, so the weights of clients that vanished are spread over the rest exactly.

    References:
      McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, 2017, algorithm 1.

    Example:
      >>> share = by_tokens().share(Report("a", tokens=30, loss=1.0, worked=30), ["output.bias"])
      >>> share.scale["output.bias"], share.mass["output.bias"]
      (30.0, 30.0)
    """
    return from_rule(WeighingRule(lambda report, layer: float(report.tokens)))


def uniform() -> Mediator:
    r"""Let every client count alike, γ_k = 1/m, however much text it has."""
    return fixed()


def fixed(weights: Mapping[ClientId, float] | None = None) -> Mediator:
    r"""Weigh clients by numbers set beforehand, γ_k = a_k / Σ_j a_j; a client that is not named weighs 1.

    Example:
      >>> share = fixed({"a": 3.0}).share
      >>> [share(Report(client, tokens=1, loss=1.0, worked=1), ["bias"]).mass["bias"] for client in "ab"]
      [3.0, 1.0]
    """
    known = dict(weights or {})
    for client, weight in known.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"the weight of client {client} is {weight}; expected a finite number of at least 0")
    return from_rule(
        WeighingRule(
            lambda report, layer: known.get(report.client, 1.0),
            largest=max([1.0, *known.values()]),
            least=min([1.0, *known.values()]),
        )
    )


def by_join_weight(uniform: bool = False) -> Mediator:
    r"""Weigh clients by α_k, their weight in a running mean. Mass α_k is counted when a client joins, none later.

    In secure sums α_k = 1 (`federated.public.rules.masked`).

    Args:
      uniform: α_k = 1; else the client's tokens when it joined.
    """
    if uniform:
        return from_rule(WeighingRule(lambda report, layer: 1.0, largest=1.0, least=1.0, joins=True))
    return from_rule(WeighingRule(lambda report, layer: report.weight, joins=True))


def softmax_of_distance(temperature: float = 1.0, bound: float | None = None, farthest: float = math.inf) -> Mediator:
    r"""Weigh clients by how far each layer moved (attentive aggregation).

    .. math::  γ_k^l = \frac{\exp(d_k^l / T)}{\sum_j \exp(d_j^l / T)}

    The distance d is the method's. T = 1 is the published rule. Where distances differ by many T it is nearly one-hot,
    where they differ by little it is a uniform mean (see `effective_clients`). A ratio of two sums: client k knows its
    own score, so it weighs itself, and the softmax over the clients that arrive is exact.

    Args:
      temperature: T.
      bound: largest score d/T that counts, so that a client cannot buy weight by moving far; None: no bound.
      farthest: largest d that can occur; ∞ for a distance without a limit.

    References:
      Ji et al., *Learning Private Neural Language Modeling with Attentive Aggregation*, 2019, equation 2.

    Example:
      >>> share = softmax_of_distance(temperature=2.0).share
      >>> share(Report("a", 1, 1.0, 1, distance={"bias": 3.0}), ["bias"]).log["bias"]
      1.5
    """
    positive("temperature", temperature)
    most = math.inf if bound is None else positive("bound", bound)

    def score(report: Report, layer: str) -> float:
        return min(report.distance[layer] / temperature, most)

    return from_rule(WeighingRule(score, exponential=True, bound=most, largest=farthest / temperature))


def switch_on_loss(adaptive: Mediator, otherwise: Mediator, threshold: float = 0.1) -> Mediator:
    r"""Use one mediator while the training loss still moves, another once it has settled (FedMed's mediation).

    .. math::  |L_t − L_{t−1}| ≥ ε: \text{adaptive},\qquad |L_t − L_{t−1}| < ε: \text{otherwise}

    L_t is the unweighted mean of the losses of *all* reports of round t, nats per token; the first round is adaptive.
    It needs this round's reports before it can weigh, so uploads wait. Memory: the last L and both mediators' memories;
    a round without reports changes nothing.

    References:
      Wu, Liang, Wang, *FedMed*, Sensors 2020, equations 6 and 7, algorithm 1.
    """
    positive("threshold", threshold, or_zero=True)
    branches = {"adaptive": in_two_phases(adaptive), "otherwise": in_two_phases(otherwise)}

    def weigh(memory: Memory, reports: Reports, layers: Sequence[str]) -> tuple[Memory, Shares]:
        if not reports:
            return memory, {}
        after = {**memory, "loss": math.fsum(r.loss for r in reports.values()) / len(reports)}
        chosen = "adaptive" if moved(memory, after) else "otherwise"
        inner, shares = branches[chosen].weigh(memory[chosen], reports, layers)
        return {**after, chosen: inner}, shares

    def moved(before: Memory, after: Memory, server: Params | None = None) -> bool:
        return before["loss"] is None or abs(after["loss"] - before["loss"]) >= threshold

    private, rule = None, None
    if adaptive.private is not None and otherwise.private is not None:
        private = rules.switch_on_last_losses(adaptive.private, otherwise.private, threshold)
    if adaptive.rule is not None and otherwise.rule is not None:
        rule = LossSwitch(adaptive.rule, otherwise.rule, threshold)

    def init() -> Memory:
        return {"loss": None, **{name: branch.init() for name, branch in branches.items()}}

    return Mediator(init=init, weigh=weigh, private=private, rule=rule, adaptive=moved)


def kept(beta: float, clients: int) -> int:
    """Return K = max(1, ⌊βm + ½⌋), how many of m clients top-K keeps.

    Example:
      >>> kept(0.5, 5), kept(0.01, 5), kept(1.0, 5)
      (3, 1, 5)
    """
    return max(1, math.floor(beta * clients + 0.5))


def top_k(beta: float, inner: Mediator) -> Mediator:
    r"""Let only the K = max(1, ⌊βm + ½⌋) clients of lowest loss upload; `inner` weighs them.

    m is the number of reports; ties go to the smaller client id. `inner` sees all reports (FedMed's switch averages
    all losses), memory is its own. Not closed under drop-outs: a client that vanishes after being chosen is not
    replaced.

    References:
      Wu, Liang, Wang, *FedMed*, Sensors 2020, equations 8 and 9.
    """
    share_of_clients("beta", beta)
    waiting = in_two_phases(inner)

    def weigh(memory: Memory, reports: Reports, layers: Sequence[str]) -> tuple[Memory, Shares]:
        memory, shares = waiting.weigh(memory, reports, layers)
        assert shares is not None, "a mediator in two phases gives shares"
        best = sorted(reports, key=lambda client: (reports[client].loss, client))[: kept(beta, len(reports))]
        return memory, {client: shares[client] for client in best if client in shares}

    private = None if inner.private is None else rules.below_last_quantile(partial(kept, beta), inner.private)
    rule = None if inner.rule is None else TopK(beta, inner.rule)
    return Mediator(waiting.init, weigh, private=private, rule=rule, adaptive=inner.adaptive)


def from_rule(rule: WeighingRule) -> Mediator:
    """Make a mediator of a weighing rule; it works in the clear and in secure sums, with reports or without."""

    def share(report: Report, layers: Sequence[str]) -> Share:
        weights = {name: rule.weight(report, name) for name in layers}
        if rule.exponential:
            ones = dict.fromkeys(layers, 1.0)
            return Share(scale=ones, mass=ones, log=weights)
        mass = {name: weight * report.joining for name, weight in weights.items()} if rule.joins else weights
        return Share(scale=weights, mass=mass)

    return separable(share, rules.masked(rule))._replace(rule=rule)


def separable(share: Callable[[Report, Sequence[str]], Share], private: PrivateRule | None = None) -> Mediator:
    """Make a mediator of a client's own share, for what no `WeighingRule` can say; it keeps no memory.

    Args:
      private: the same by public numbers only, for secure sums; None where there is none.
    """

    def weigh(memory: Memory, reports: Reports, layers: Sequence[str]) -> tuple[Memory, None]:
        del reports, layers  # every client has weighed itself already
        return memory, None

    return Mediator(init=lambda: None, weigh=weigh, share=share, private=private)


def in_two_phases(mediator: Mediator) -> Mediator:
    """Make a separable mediator wait for all reports: the same shares, uploads kept until then."""
    share = mediator.share
    if share is None:
        return mediator

    def weigh(memory: Memory, reports: Reports, layers: Sequence[str]) -> tuple[Memory, Shares]:
        return memory, {client: share(report, layers) for client, report in reports.items()}

    return mediator._replace(weigh=weigh, share=None)
