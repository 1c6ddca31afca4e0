"""One round, the same for every method and every transport."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keyfed.federated.local import progress
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
    Method,
    Params,
    Refusal,
    Report,
    State,
    Sums,
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
      effective_clients: (Σ scale)² / Σ scale² per layer; m when all count alike.
      weights: each contributor's share of the sum per layer; None where nobody may know.
      abandoned: too few uploads arrived: nothing was learnt, nobody was acknowledged.
      hidden: the numbers above come from sums: of those whose upload arrived, not of all who trained.
      saturated: clients cut off by a public cap, in the layer where there are most; hidden rounds only.
      shortened: clients whose upload was longer than this run's limit.
      unsound: why the server's step was not taken, which is then an abandoned round; None where it was.
      diverged: `unsound` because local training or the step diverged: a step size is halved.
      clamped: clients whose weight was held at either end of its public range, in any layer; hidden rounds only.
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
    hidden: bool = False
    saturated: int = 0
    clamped: int = 0
    unsound: str | None = None
    shortened: tuple[ClientId, ...] = ()
    diverged: bool = False


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
      minimum: uploads below which the round is abandoned; it counts as a round, and everything stays as it was.
      limits: what one client may do at most, by what the run has seen; None for no limits.
      watch: how a round that diverged is noticed: its step is not taken and a step size is halved
        (`soundness`). None: only a step that is not finite is not taken, and nothing is halved.
    """
    if state.halvings:
        method = replace(method, halvings=state.halvings)
    if method.hidden:
        return _hidden_round(method, state, cohort, federation, minimum, limits, watch)
    if limits is not None:
        federation.limit(_caps(method, state, limits))
    if method.mediator.released is not None:
        share = method.mediator.released(state.server)
        method = replace(method, mediator=method.mediator._replace(share=share))
    reports = federation.train(state.params, cohort, method, state.round)
    memory, shares = method.mediator.weigh(state.mediator, reports, list(state.params))
    aggregate = federation.collect(shares)
    abandoned = len(aggregate.contributors) < minimum
    summary = summarise(state.round, reports, aggregate, abandoned)
    losses, eased = [r.loss for r in reports.values()], state.halvings + state.server_halvings > 0
    why = None if watch is None else diverged(watch, losses, aggregate, eased=eased)
    if why is not None:
        state = failed(state, server=method.solver.still)
        return _not_taken(state, federation, replace(summary, diverged=True), why)
    if abandoned:
        federation.acknowledge(())
        return replace(state, round=state.round + 1), summary
    params, server = method.server.step(state.params, _eased(state, aggregate), state.server)
    if not finite(params, server):
        return _not_finite(method, state, federation, summary, watch)
    federation.acknowledge(aggregate.contributors)
    seen = state.seen
    if limits is not None:
        norms = [norm / _pace(method, state.round) for norm in aggregate.norms]
        seen = seen_with(seen, norms, [report.tokens for report in reports.values()])
    return State(params, memory, server, state.round + 1, seen, state.halvings, state.server_halvings), summary


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


def _eased(state: State, aggregate: Aggregate) -> Aggregate:
    """Let the server take its step by the factor that is left of it."""
    return replace(aggregate, step=0.5**state.server_halvings) if state.server_halvings else aggregate


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


def _hidden_round(
    method: Method,
    state: State,
    cohort: Sequence[ClientId],
    federation: Federation,
    minimum: int,
    limits: UploadLimits | None,
    watch: Watch | None,
) -> tuple[State, RoundSummary]:
    """Run a round without reports: clients weigh themselves by public numbers, and those learn from the sum.

    An empty sum is an abandoned round. What an abandoned round still changes are the public numbers: they may be the
    reason that nothing arrived.
    """
    rule = method.mediator.private
    assert rule is not None, "a hidden method has a private rule"
    federation.train(state.params, cohort, method, state.round, state.mediator)
    aggregate = federation.collect(None)
    arrived = len(aggregate.contributors)
    abandoned = arrived < max(1, minimum)
    used = state.mediator if aggregate.public is None else aggregate.public
    summary = _summarise_sums(state.round, aggregate, abandoned)
    # One client can claim any loss in a sum: only refusals count here.
    diverging = None if watch is None else diverged(watch, [], aggregate)
    if diverging is not None:
        before = replace(state, mediator=rule.learn(used, _outside(aggregate), 0))
        before = failed(before, server=method.solver.still)
        return _not_taken(before, federation, replace(summary, diverged=True), diverging)
    if abandoned:
        federation.acknowledge(())
        return replace(state, mediator=rule.learn(used, aggregate.facts, 0), round=state.round + 1), summary
    params, server = method.server.step(state.params, _eased(state, aggregate), state.server)
    moved = 0.0 if limits is None else _moved(method, state.params, params, aggregate)
    bad = not finite(params, server)
    why = None
    if not bad and limits is not None:
        why = _too_far(moved, caps_of(limits, state.seen, _pace(method, state.round)).norm, limits.norm)
    if bad or why is not None:  # a sum that is not believed teaches nothing either, but for who was out of range
        before = replace(state, mediator=rule.learn(used, _outside(aggregate), 0))
        if why is None:
            return _not_finite(method, before, federation, summary, watch)
        return _not_taken(before, federation, summary, why)
    federation.acknowledge(aggregate.contributors)
    seen = state.seen if limits is None else seen_with(state.seen, [moved / _pace(method, state.round)], [])
    learnt = rule.learn(used, aggregate.facts, arrived)
    return State(params, learnt, server, state.round + 1, seen, state.halvings, state.server_halvings), summary


def _outside(aggregate: Aggregate) -> Sums:
    """Return the one fact that is learnt from a sum that is not taken: how many clients were out of range."""
    return {name: numbers for name, numbers in aggregate.facts.items() if name == "out of range"}


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


def _summarise_sums(round: int, aggregate: Aggregate, abandoned: bool) -> RoundSummary:
    tokens, worked, nats = (aggregate.facts.get(name, (0.0,))[0] for name in ("tokens", "worked", "nats"))
    return RoundSummary(
        round=round,
        loss=nats / tokens if tokens else float("nan"),
        tokens=int(tokens),
        worked=int(worked),
        reported=len(aggregate.contributors) + len(aggregate.refused),
        contributors=aggregate.contributors,
        refused=aggregate.refused,
        effective_clients=aggregate.effective_clients(),
        abandoned=abandoned,
        hidden=True,
        saturated=saturated_clients(aggregate.facts),
        clamped=int(aggregate.facts.get("clamped", (0.0,))[0] + 0.5),
    )


def summarise(
    round: int, reports: Mapping[ClientId, Report], aggregate: Aggregate, abandoned: bool = False
) -> RoundSummary:
    """Condense a round for the log; clients that were refused do not count."""
    tokens = sum(r.tokens for r in reports.values())
    nats = sum(r.loss * r.tokens for r in reports.values())
    return RoundSummary(
        round=round,
        loss=nats / tokens if tokens else float("nan"),
        tokens=tokens,
        worked=sum(r.worked for r in reports.values()),
        reported=len(reports.keys() | {r.client for r in aggregate.refused}),
        contributors=aggregate.contributors,
        refused=aggregate.refused,
        effective_clients=aggregate.effective_clients(),
        weights=aggregate.weights,
        abandoned=abandoned,
        shortened=aggregate.shortened,
    )
