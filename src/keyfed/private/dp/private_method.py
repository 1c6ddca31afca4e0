r"""The private form of a method: which methods can carry a guarantee, in which form, and refusals by name.

In a private round a client's weight may depend on no other client. So FedAvg's n_k/Σn becomes 1/m (or min(n_k/ŵ, 1)
with a public ŵ) over a *public* denominator. Attention becomes a ratio of two noisy sums: client k sends u_k Δ_k and
u_k = exp(min(s_k, c) − c) with a public cap c. Either way the sum moves by at most the clip S when one
client is added or removed. Server rules come after the noise and cost nothing.

Two rules of FedMed read the losses of all clients: the switch between attention and tokens, and top-K. In a private
round a client sends one number t within [0, 1] for each, next to its clipped upload. The sum of t − ½ moves by ½ at
most when one client is added or removed. It has noise of its own that the round's z pays for, and is divided by the
expected cohort. What comes of it is public: it decides about the *next* round, never about its own.

Methods with a running mean have everybody as a member from the start, standing for the first θ; then the running mean
is θ plus the clipped increments over a public number of clients.

References:
  Andrew, Thakkar, McMahan, Ramaswamy, *Differentially Private Learning with Adaptive Clipping*, 2021 (arXiv
  1905.03871): the noisy bit that a quantile is followed by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from keyfed.config.schema import PrivacyConfig
from keyfed.errors import PrivacyError
from keyfed.federated.cohort import Participation
from keyfed.federated.components import averaged
from keyfed.federated.public.rules import below
from keyfed.federated.server import sgd
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import (
    Aggregate,
    LossSwitch,
    Mediator,
    Method,
    Params,
    Report,
    Rule,
    ServerRule,
    Share,
    TopK,
    WeighingRule,
)
from keyfed.federated.weigh import separable
from keyfed.private.dp.noise import next_clip

Numbers = Sequence[float]
WITHIN = "within"  # the half count that the clip follows
LOSS, BELOW = "loss", "below"  # those that the switch and the limit of top-K follow

MOST_LOSS = 16.0  # nats per token: above any loss that a model of 2^23 words begins with
NOT_YET = 1e300  # the change of a loss before there are two to compare: above every threshold, and finite
LEAST_REACH = 1.0  # nats: how far from each other the clients of one round usually lie
LEAST_STEP, MOST_STEP = 1e-3, 2.0  # nats: what the limit of top-K moves by at most in one round
WIDEN, NARROW = 1.2, 0.6  # slower up than down: one wrong side by chance must not cost a round without clients


class Tracker(NamedTuple):
    """Public numbers that follow the clients' losses by one noisy number a round.

    Attributes:
      start: the numbers before the first round.
      statistic: (a client's loss, the numbers) → t; the sum cuts it to [0, 1].
      learn: (the numbers, the noisy mean of t over the expected cohort) → the numbers of the next round.
    """

    start: tuple[float, ...]
    statistic: Callable[[float, Numbers], float]
    learn: Callable[[Numbers, float], tuple[float, ...]]


def mean_loss(threshold: float) -> Tracker:
    r"""Follow the mean loss L: numbers (L, reach r, last change of L, rounds seen).

    .. math::  t_k = ½ + \frac{ℓ_k − L}{2r},\qquad L ← L + 2r(\bar t − ½)

    A client sends how far its loss is from the last L, not the loss. The public denominator is not the number of
    clients that came; so it errs by a share of the *change* of L only. Exact, at no noise, while everybody's loss is
    within r of L and as many come as are expected. The reach starts with all losses inside. It halves every round down
    to max(1 nat, 2ε), and doubles after a round in which L moved by half of it or more.

    Args:
      threshold: ε, the change that the switch asks for.
    """
    least = max(LEAST_REACH, 2 * threshold)

    def statistic(loss: float, numbers: Numbers) -> float:
        mean, reach, *_ = numbers
        return 0.5 + (loss - mean) / (2 * reach)

    def learn(numbers: Numbers, noisy: float) -> tuple[float, ...]:
        mean, reach, _, seen = numbers
        change = 2 * reach * (min(max(noisy, 0.0), 1.0) - 0.5)
        after = min(2 * reach, max(MOST_LOSS / 2, least)) if abs(change) >= reach / 2 else max(reach / 2, least)
        # What the first round tells is its distance from a guess, not from a round before.
        return max(0.0, mean + change), after, change if seen else NOT_YET, seen + 1

    return Tracker((MOST_LOSS / 2, max(MOST_LOSS / 2, least), NOT_YET, 0.0), statistic, learn)


def still_moves(numbers: Numbers, threshold: float) -> bool:
    """Whether the released mean losses of the two rounds before differ by at least ε; true in the first two rounds."""
    return abs(numbers[2]) >= threshold


def loss_limit(beta: float) -> Tracker:
    r"""Follow the β-quantile of the losses: numbers (the limit τ, reach r, the last round's s).

    .. math::  t_k = ½ + \frac{1[ℓ_k ≤ τ] − β}{2\max(β, 1 − β)},\qquad
               s = \frac{e}{1 − β} \text{ if } e > 0 \text{ else } \frac{e}{β},\qquad τ ← τ − r s

    with e = 2 max(β, 1 − β)(t̄ − ½), which is (those below − β · those who came) / those expected. It is 0 at the
    quantile however many come: who is absent shortens a step and does not turn it. s is 1 if everybody is below τ, −1
    if nobody is.

    Losses may lie within hundredths of a nat of each other, all of them falling. So the reach finds its own size. After
    two rounds on the same side it grows, after two on different sides it shrinks, the more the further off they were:
    r ← r · (1.2 or 0.6)^min(1, |s| + |s of the round before|). τ starts above every loss: everybody counts until it has
    come down, at 2 nats a round.

    Args:
      beta: share β of the cohort that counts.
    """
    wide = 2 * max(beta, 1 - beta)

    def statistic(loss: float, numbers: Numbers) -> float:
        return 0.5 + (float(loss <= numbers[0]) - beta) / wide

    def learn(numbers: Numbers, noisy: float) -> tuple[float, ...]:
        limit, reach, before = numbers
        excess = wide * (min(max(noisy, 0.0), 1.0) - 0.5)
        side = max(-1.0, min(1.0, excess / (1 - beta) if excess > 0 else excess / beta))
        if side * before != 0:
            factor = WIDEN if side * before > 0 else NARROW
            reach *= factor ** min(1.0, abs(side) + abs(before))
        reach = min(max(reach, LEAST_STEP), MOST_STEP)
        return min(max(limit - reach * side, 0.0), MOST_LOSS), reach, side

    return Tracker((MOST_LOSS, MOST_STEP, 0.0), statistic, learn)


CLIP = "privacy/clip"  # the clip of the next round, in the server rule's state
TRACKED = "privacy/along/"  # before the names of trackers, in the server rule's state

ShareOf = Callable[[Report, Sequence[str]], Share]


class PrivateMethod(NamedTuple):
    """A method in its private form.

    Attributes:
      ratio: the sum is divided by its own noisy mass, not by a public number.
      sensitivity: what one client can do to the sum, in words.
      statistics: names of the half counts that are released with the sum; they pay for their noise within z.
      everybody: it is the method only if every client is called in every round.
      least: of a ratio: mass that is expected of a round if every weight is the least there is, in clients called.
    """

    method: Method
    ratio: bool
    sensitivity: str
    statistics: tuple[str, ...] = ()
    everybody: bool = False
    least: float = 1.0


FIXED = "Sensitivity: one client moves the sum of clipped uploads by at most the clip S; the denominator is public."
RATIO = (
    "Sensitivity: one client moves the sum of clipped [weight · upload, weight] by at most the clip S, its weight "
    "being {weight}; the noisy sum is divided by max(noisy mass, floor)."
)
SCORED, SIZED = "exp(min(score, c) − c) with a public cap c = {cap:.4g}", "1, or min(n/ŵ, 1) with a public ŵ"
COUNTED = " Beside it {what} moves a sum of its own by ½ at most, whose noise is paid for within z."
COUNTS = {LOSS: "the loss, cut to a public range,", BELOW: "whether the loss is below a public limit"}
MEMBERS = " Everybody is a member from the start, and books as sent the clipped increments that it sends."


def make_private(method: Method, p: PrivacyConfig) -> PrivateMethod:
    """Return the private form of a method, or refuse it by name."""
    spec = _spec_of(method)
    form = _form_of(method, _rule_of(method), p)
    made = replace(method, report_free=False, uploading=1.0)  # a client above the limit of top-K sends zeros
    if form.joins:
        rule = sgd(1.0)
        made = replace(made, server=rule if spec.average is None else averaged(rule, spec.average))
    statistics = (() if p.quantile is None else (WITHIN,)) + tuple(form.trackers)
    if not statistics and p.count_noise is not None:
        raise PrivacyError(
            f"privacy.count_noise is {p.count_noise:g}, but with privacy.quantile=none {spec.name} counts nothing; "
            "leave it out"
        )
    words = RATIO.format(weight=form.weight) if form.ratio else FIXED + (MEMBERS if form.joins else "")
    if form.trackers:
        words += COUNTED.format(what=" and ".join(COUNTS[name] for name in form.trackers))
    mediator = _adaptive(form) if form.trackers else separable(form.share)
    # The masked rule stays, for what clients of secure sums refuse.
    made = replace(made, mediator=mediator._replace(private=method.mediator.private))
    return PrivateMethod(_learning(made, p, form.trackers), form.ratio, words, statistics, form.joins, form.least)


class _Form(NamedTuple):
    """How a client weighs itself in a private round, read off the method's rule.

    Attributes:
      share: a client's own share, by its report and public numbers.
      weight: what it weighs, in words.
      ratio, least: see `PrivateMethod`.
      joins: the rule is that of a running mean.
      otherwise: the share while the loss does not move; None without a switch.
      threshold: ε of that switch.
      trackers: public numbers that follow the losses, by the names of their statistics.
    """

    share: ShareOf
    weight: str
    ratio: bool
    least: float
    joins: bool = False
    otherwise: ShareOf | None = None
    threshold: float = 0.0
    trackers: Mapping[str, Tracker] = {}


def _form_of(method: Method, rule: Rule, p: PrivacyConfig) -> _Form:
    """Read the private form off a rule; a kind of rule that is not known here is refused."""
    if isinstance(rule, WeighingRule):
        return _weighing(method, rule, p)
    if isinstance(rule, LossSwitch):
        form, otherwise = _form_of(method, rule.adaptive, p), _form_of(method, rule.otherwise, p)
        if form.trackers or otherwise.trackers or form.joins or otherwise.joins:
            raise PrivacyError(f"{method.name}: a switch between rules that are not plain weights has no private form")
        if not rule.threshold:  # it never leaves `adaptive`
            return form
        return form._replace(
            ratio=form.ratio or otherwise.ratio,
            otherwise=otherwise.share,
            threshold=rule.threshold,
            trackers={LOSS: mean_loss(rule.threshold)},
            least=min(form.least, otherwise.least),
        )
    if isinstance(rule, TopK):  # how many clients are below the limit is not public: their mass says it
        form = _form_of(method, rule.inner, p)
        if BELOW in form.trackers or form.joins:
            raise PrivacyError(f"{method.name}: top-K of this rule has no private form")
        trackers = {**form.trackers, BELOW: loss_limit(rule.beta)}
        return form._replace(ratio=True, least=rule.beta * form.least, trackers=trackers)
    raise PrivacyError(f"{method.name}: the sensitivity of a {type(rule).__name__} is not known; no --dp")


def _weighing(method: Method, rule: WeighingRule, p: PrivacyConfig) -> _Form:
    """Read the form of a rule without combinators.

    The least weight counts as far as it is known before the run: e^−c of a limited distance, the guess of a mean by
    tokens. A distance without a limit has a cap that the user chose, and no usual weight: its floor is the share that
    the user sets.
    """
    if rule.exponential:
        cap = min(rule.bound, rule.largest)
        if not math.isfinite(cap):
            where = "mediator.bound" if method.spec is not None and method.spec.mediator is not None else "method.bound"
            raise PrivacyError(
                f"{method.name}: attention to distances has no bound of its own, and a client's score must be capped "
                f"by a public number; set {where}, say 5"
            )
        least = math.exp(-cap) if math.isfinite(rule.largest) else 1.0
        return _Form(
            _all_layers(lambda report, name: below(rule, report, name, cap)), SCORED.format(cap=cap), True, least
        )
    if rule.least is not None:
        return _Form(_all_layers(rule.weight), SIZED, False, 1.0, rule.joins)
    if p.weight_cap is None:
        return _Form(_all_layers(lambda report, name: 1.0), SIZED, False, 1.0, rule.joins)
    most = p.weight_cap
    least = 1.0 if rule.joins else p.mean_weight
    return _Form(_all_layers(lambda report, name: below(rule, report, name, most)), SIZED, False, least, rule.joins)


def _all_layers(weight: Callable[[Report, str], float]) -> ShareOf:
    def share(report: Report, layers: Sequence[str]) -> Share:
        weights = {name: weight(report, name) for name in layers}
        return Share(scale=weights, mass=weights)

    return share


def _spec_of(method: Method) -> MethodSpec:
    """Return the specification of a method that can have a private form at all."""
    spec = method.spec
    if spec is None:
        raise PrivacyError(f'the method "{method.name}" is from outside the package and states no sensitivity: no --dp')
    if method.cohort == "pooled":
        raise PrivacyError(f"{spec.name} trains on everybody's text in one place: there is no client to protect")
    if spec.options.get("clients") is not None:
        raise PrivacyError(
            f"{spec.name}: method.clients counts the clients that came, which a private round does not say; leave it "
            "out (fedadmm: set server_lr to the share of clients that is called)"
        )
    if method.noise is not None:
        raise PrivacyError(
            "method.noise is FedAtt's perturbation, whose ε is ∞ because nothing is clipped; leave it out, --dp adds "
            "calibrated noise"
        )
    return spec


def _rule_of(method: Method) -> Rule:
    """Return the rule that a method weighs by; a mediator without one is refused, never taken for another."""
    rule = method.mediator.rule
    if rule is None:
        raise PrivacyError(
            f"the mediator of {method.name} has no weighing rule, so its sensitivity is not known: no --dp"
        )
    return rule


def _adaptive(form: _Form) -> Mediator:
    r"""Weigh by `form.share` while the loss moved, else by `form.otherwise`; count only below the limit of top-K.

    .. math::  |L_{t−1} − L_{t−2}| ≥ ε: \text{attention},\qquad ℓ_k > τ_t: \text{zeros}

    One round later than the plain switch, which sees the losses of its own round; τ is the quantile of rounds before.
    Both branches are ratios of noisy sums, so what is released has one form.
    """

    def released(state: Params) -> ShareOf:
        numbers = {name: tuple(state[TRACKED + name].tolist()) for name in form.trackers}
        settled = form.otherwise is not None and not moves(None, None, state)
        weigh = form.otherwise if form.otherwise is not None and settled else form.share

        def now(report: Report, layers: Sequence[str]) -> Share:
            statistics = {name: rule.statistic(report.loss, numbers[name]) for name, rule in form.trackers.items()}
            silent = BELOW in numbers and report.loss > numbers[BELOW][0]
            return replace(weigh(report, layers), statistics=statistics, silent=silent)

        return now

    def never(report: Report, layers: Sequence[str]) -> Share:
        raise AssertionError("clients weigh themselves by what was released; `run_round` knows it")

    def moves(before: object, after: object, state: Params) -> bool:
        return still_moves(state[TRACKED + LOSS].tolist(), form.threshold)

    return separable(never)._replace(released=released, adaptive=moves if LOSS in form.trackers else None)


def _learning(method: Method, p: PrivacyConfig, trackers: Mapping[str, Tracker]) -> Method:
    """Let the clip and what else a round goes by learn from what was released; they are part of the server's state."""
    inner = method.server
    quantile = p.quantile
    starts = {TRACKED + name: rule.start for name, rule in trackers.items()}

    def init(params: Params) -> Params:
        own = {CLIP: torch.tensor(p.clip, dtype=torch.float64)}
        return {
            **inner.init(params), **own, **{key: torch.tensor(x, dtype=torch.float64) for key, x in starts.items()}
        }  # fmt: skip

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        clip = state[CLIP]
        outside = {name: t for name, t in state.items() if name != CLIP and name not in starts}
        after, kept = inner.step(params, aggregate, outside)
        if quantile is not None:
            moved = next_clip(float(clip), aggregate.facts[WITHIN][0], quantile, p.clip_rate)
            clip = torch.full_like(clip, moved)
        learnt = {}
        for name, rule in trackers.items():
            before = state[TRACKED + name]
            learnt[TRACKED + name] = before.new_tensor(rule.learn(before.tolist(), aggregate.facts[name][0]))
        return after, {**kept, CLIP: clip, **learnt}

    return replace(method, server=ServerRule(init, step, inner.served))


def refuse_absence(private: PrivateMethod, called: float, clients: int) -> None:
    """Refuse a running mean over clients that are not all called: those who come late stand for a θ long gone."""
    if private.everybody and called != clients:
        name = private.method.name
        raise PrivacyError(
            f"{name}: a client that joins later would have to send all that was learnt before, w + y/ρ, which no "
            f"useful clip bounds; {called:g} of {clients} clients are called, so set train.cohort={clients} (everybody "
            "is a member from the start), or take fedadmm with server_step=published (late, with real clients)"
        )


def refuse_sized_duals(method: Method, p: PrivacyConfig) -> None:
    """Refuse weights by tokens of a running mean in secure sums: there its clients weigh alike, as without noise."""
    rule = method.mediator.rule
    if p.weight_cap is not None and isinstance(rule, WeighingRule) and rule.joins:
        raise PrivacyError(
            f"privacy.weight_cap is {p.weight_cap:g}, and in secure sums the clients of {method.name} weigh alike, so "
            "that no joining client's tokens can be read; leave it out, or set secure.on=false"
        )


def refuse_participation(p: Participation, mechanism: str, everybody: bool) -> None:
    """Refuse ways of taking part in which one client's presence decides about another's, by name."""
    if p.over_select:
        raise PrivacyError(
            f"participation.over_select is {p.over_select}: taking the first to finish lets one client push another "
            "out, which breaks the accounting; leave it out and set participation.deadline"
        )
    if p.minimum > 1:
        raise PrivacyError(
            f"participation.minimum is {p.minimum}: abandoning a round by who arrived tells who arrived; leave it out, "
            "a private round is always released and its denominator is public"
        )
    if mechanism == "gaussian" and not everybody and p.sampling != "poisson":
        raise PrivacyError(
            f"participation.sampling is {p.sampling}, and the accounting needs clients called independently of each "
            "other; set participation.sampling=poisson (or privacy.mechanism=tree)"
        )
    if mechanism == "tree" and p.sampling != "uniform":
        raise PrivacyError(
            f"participation.sampling is {p.sampling}, but with privacy.mechanism=tree clients take their turns; leave "
            "it out"
        )
