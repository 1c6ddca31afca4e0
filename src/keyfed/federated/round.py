"""One round, the same for every method and every transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from keyfed.federated.descent import progress
from keyfed.federated.duals import ORIGIN
from keyfed.federated.public.rules import saturated_clients
from keyfed.federated.soundness import (
    UploadLimits,
    Watch,
    by_server,
    caps_of,
    diverged,
    failed,
    finite,
    norm_of,
    seen_with,
)
from keyfed.federated.types import (
    Aggregate,
    Caps,
    ClientId,
    Federation,
    LayerNumbers,
    Memory,
    Method,
    Params,
    Refusal,
    Report,
    State,
)


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What a round tells the log.

    Attributes:
      loss: mean nats per token over the cohort's last local epoch, weighted by tokens (never a mean of means) over all
        who reported, whether or not their upload was wanted.
      tokens: tokens of that epoch over the cohort.
      worked: tokens predicted over all local epochs.
      reported: number of clients whose report arrived, refused ones too.
      effective_clients, weights, adaptive: see `Aggregate`.
      abandoned: too few uploads arrived: nothing was learnt, no client was acknowledged.
      report_free: the numbers above come from sums: of those whose upload arrived, not of all who trained.
      saturated: clients cut off by a public cap, in the layer where there are most; rounds without reports only.
      shortened: clients whose upload was longer than this run's limit.
      unsound: why the server's step was not taken, which is then an abandoned round; None where it was.
      diverged: `unsound` because local training or the step diverged: a step size is halved.
      clamped: clients whose weight was held at either end of its public range, in any layer; only without reports.
    """

    round: int
    loss: float
    tokens: int
    worked: int
    reported: int
    contributors: tuple[ClientId, ...]
    refused: tuple[Refusal, ...]
    effective_clients: LayerNumbers
    weights: Mapping[ClientId, LayerNumbers] | None = None
    abandoned: bool = False
    report_free: bool = False
    saturated: int = 0
    clamped: int = 0
    unsound: str | None = None
    shortened: tuple[ClientId, ...] = ()
    diverged: bool = False
    adaptive: bool | None = None


NOT_FINITE = "the step of the server gives numbers that are not finite"


def initial_state(method: Method, params: Params) -> State:
    """Return the state before the first round."""
    return State(params, method.mediator.init(), method.server.init(params), 0)


def run_round(
    method: Method,
    state: State,
    cohort: Sequence[ClientId],
    federation: Federation,
    minimum: int = 0,
    limits: UploadLimits | None = None,
    watch: Watch | None = None,
) -> tuple[State, RoundSummary]:
    """Train the cohort, weigh, sum, step: local solver + report + mediator + linear sum + server rule.

    Args:
      minimum: uploads below which the round is abandoned; it counts as a round, and everything stays as it was. A sum
        without reports needs one at least.
      limits: what one client may do at most, by what the run has seen; None for no limits.
      watch: how a round that diverged is noticed: its step is not taken and a step size is halved
        (`soundness`). None: only a step that is not finite is not taken, and nothing is halved.
    """
    if state.halvings:
        method = replace(method, halvings=state.halvings)
    if method.solver.first:
        origin = {name: state.server[ORIGIN + name] for name in state.params if ORIGIN + name in state.server}
        method = replace(method, origin=origin or None)  # none: begun when late clients started from the θ they found
    if limits is not None and not method.report_free:
        federation.limit(_caps(method, state, limits))
    gather, least = (_gather_sums, max(1, minimum)) if method.report_free else (_gather_reports, minimum)
    aggregate, reports, memory = gather(method, state, cohort, federation)
    abandoned = len(aggregate.contributors) < least
    summary = summarise(state.round, reports, aggregate, abandoned, method.report_free)
    # One client can claim any loss in a sum: without reports only refusals say that a round diverged.
    losses, eased = [r.loss for r in reports.values()], state.halvings + state.server_halvings > 0
    why = None if watch is None else diverged(watch, losses, aggregate, eased=eased)
    if why is not None:
        before = failed(replace(state, mediator=memory("not taken")), server=method.solver.still)
        return _not_taken(before, federation, replace(summary, diverged=True), why)
    if abandoned:
        federation.acknowledge(())
        return replace(state, mediator=memory("abandoned"), round=state.round + 1), summary
    if state.server_halvings:
        aggregate = replace(aggregate, step=0.5**state.server_halvings)
    params, server = method.server.step(state.params, aggregate, state.server)
    if not finite(params, server):
        before = replace(state, mediator=memory("not taken"))
        return _not_finite(method, before, federation, summary, watch)
    seen, pace = state.seen, _pace(method, state.round)
    if limits is not None:
        norms = aggregate.norms
        if method.report_free:
            norms = (_moved(method, state.params, params, aggregate),)
            why = _too_far(norms[0], caps_of(limits, state.seen, pace).norm, limits.norm)
            if why is not None:
                return _not_taken(replace(state, mediator=memory("not taken")), federation, summary, why)
        seen = seen_with(seen, [norm / pace for norm in norms], [r.tokens for r in reports.values()])
    federation.acknowledge(aggregate.contributors)
    after = memory("taken")
    return State(params, after, server, state.round + 1, seen, state.halvings, state.server_halvings), summary


class Gathered(NamedTuple):
    """What arrived of a round.

    Attributes:
      reports: of the clients; none where they weigh themselves by public numbers.
      memory: the mediator's memory after the round, by what becomes of the sum.
    """

    aggregate: Aggregate
    reports: Mapping[ClientId, Report]
    memory: Callable[[Literal["taken", "abandoned", "not taken"]], Memory]


def _gather_reports(method: Method, state: State, cohort: Sequence[ClientId], federation: Federation) -> Gathered:
    if method.mediator.released is not None:
        share = method.mediator.released(state.server)
        method = replace(method, mediator=method.mediator._replace(share=share))
    reports = federation.train(state.params, cohort, method, state.round)
    memory, shares = method.mediator.weigh(state.mediator, reports, list(state.params))
    aggregate = federation.collect(shares)
    if method.mediator.adaptive is not None:
        aggregate = replace(aggregate, adaptive=method.mediator.adaptive(state.mediator, memory, state.server))
    return Gathered(aggregate, reports, lambda outcome: memory if outcome == "taken" else state.mediator)


def _gather_sums(method: Method, state: State, cohort: Sequence[ClientId], federation: Federation) -> Gathered:
    """Gather without reports: clients weigh themselves by public numbers, and those learn from the sum.

    An abandoned round still changes the public numbers, since they may be the reason that nothing arrived. A sum that
    is not taken teaches only how many clients were out of range.
    """
    rule = method.mediator.private
    assert rule is not None, "a method without reports has a rule by public numbers"
    federation.train(state.params, cohort, method, state.round, state.mediator)
    aggregate = federation.collect(None)
    used = state.mediator if aggregate.public is None else aggregate.public
    aggregate = replace(aggregate, adaptive=None if rule.adaptive is None else rule.adaptive(used))

    def memory(outcome: str) -> Memory:
        sums = aggregate.facts
        if outcome == "not taken":
            sums = {name: numbers for name, numbers in sums.items() if name == "out of range"}
        return rule.learn(used, sums, len(aggregate.contributors) if outcome == "taken" else 0)

    return Gathered(aggregate, {}, memory)


def _caps(method: Method, state: State, limits: UploadLimits) -> Caps:
    """Return what uploads may be at most; directions are compared where an upload is a change of the model.

    A client with a dual sends what it stands for, or the increment of that, which may well point against the others.
    """
    caps = caps_of(limits, state.seen, _pace(method, state.round))
    return caps if method.solver.start is None else caps._replace(against=None)


def _pace(method: Method, round: int) -> float:
    """Return the factor that schedule and halvings have on a round's step size, and so on the length of uploads."""
    schedule = None if method.spec is None else method.spec.schedule
    factor = 1.0 if schedule is None else max(progress(schedule, round), 1e-6)
    return factor * 0.5**method.halvings


def _not_finite(
    method: Method, state: State, federation: Federation, summary: RoundSummary, watch: Watch | None
) -> tuple[State, RoundSummary]:
    """Do not take a step that is not finite; a run that is watched halves a step size."""
    if watch is not None:
        server = watch.uniform is not None and by_server(method, summary.loss, watch.uniform)
        state, summary = failed(state, server=server), replace(summary, diverged=True)
    return _not_taken(state, federation, summary, NOT_FINITE)


def _not_taken(state: State, federation: Federation, summary: RoundSummary, why: str) -> tuple[State, RoundSummary]:
    """Leave everything as it was: the round is used, and no client was in it."""
    federation.acknowledge(())
    return replace(state, round=state.round + 1), replace(summary, abandoned=True, unsound=why)


def _moved(method: Method, before: Params, after: Params, aggregate: Aggregate) -> float:
    """Return the norm of a sum's mean upload; where clients keep state, how far it moves θ."""
    if method.solver.start is None:
        return norm_of(aggregate.mean())
    return norm_of({name: after[name] - p for name, p in before.items()})


def _too_far(moved: float, most: float | None, factor: float | None) -> str | None:
    """Say that a step is longer than the steps before allow; None for one that is not."""
    if most is None or factor is None or not moved > most:
        return None
    times = moved / (most / factor) if most else math.inf
    return (
        f"the mean upload is {times:.3g} times as long as that of the median round before, and {factor:g} times is the "
        "limit (upload.limit); a client may have lied"
    )


def summarise(
    round: int, reports: Mapping[ClientId, Report], aggregate: Aggregate, abandoned: bool, report_free: bool = False
) -> RoundSummary:
    """Condense a round for the log; clients that were refused do not count."""
    if report_free:
        tokens, worked, nats = (aggregate.facts.get(name, (0.0,))[0] for name in ("tokens", "worked", "nats"))
    else:
        tokens = sum(r.tokens for r in reports.values())
        worked = sum(r.worked for r in reports.values())
        nats = sum(r.loss * r.tokens for r in reports.values())
    called = {*(aggregate.contributors if report_free else reports), *(r.client for r in aggregate.refused)}
    return RoundSummary(
        round=round,
        loss=nats / tokens if tokens else float("nan"),
        tokens=int(tokens),
        worked=int(worked),
        reported=len(called),
        contributors=aggregate.contributors,
        refused=aggregate.refused,
        effective_clients=aggregate.effective_clients(),
        weights=None if report_free else aggregate.weights,
        abandoned=abandoned,
        report_free=report_free,
        saturated=saturated_clients(aggregate.facts),
        clamped=int(aggregate.facts.get("clamped", (0.0,))[0] + 0.5),
        shortened=() if report_free else aggregate.shortened,
        adaptive=aggregate.adaptive,
    )
