r"""What one client may do to a model, and when a model is good.

An upload may be at most a multiple κ of what the run has seen, the median of the medians of the last `WINDOW` rounds. A
longer one is shortened to that. A client counts at most a multiple of the median of tokens. One liar among ten moves a
median to a neighbour's number at most. The first round has no such numbers.

.. math::  ‖Δ_k‖ ≤ κ · \operatorname{med}_t \operatorname{med}_j ‖Δ_j^t‖, \qquad
           n_k ≤ κ_n · \operatorname{med}_t \operatorname{med}_j n_j^t

Uploads of one round are compared with each other, never with an earlier step: steps may overshoot. One is left out that
points clearly against the sum of the others' directions, measured by how much those agree among themselves (`opposed`).

.. math::  c_k = \cos(u_k, \sum_{j≠k} u_j), \quad u_k = \frac{Δ_k}{‖Δ_k‖}, \qquad
           k \text{ is left out} \iff c_k < −\max(ε, γ · \operatorname{med}_{j≠k} c_j^{(−k)})

with c^{(−k)} the cosines among the others alone. Lengths and tokens do not matter here, so no claim of a client does.

Where only sums are seen, a sum is not taken whose mean upload is longer than κ times the median one of the rounds
before. With clients that keep state it is how far θ moves, since their sum is of increments.

A server step whose θ or server state is not finite is never taken. A model whose validation perplexity is at least
`factor` times the least one of the run, or no number, is bad: the run goes back to the last good model.

.. math::  \mathrm{bad}(ν) \iff ν \notin ℝ \;\text{ or }\; ν ≥ \min(ν_{\mathrm{good}}) + \ln(\mathrm{factor})

with ν the mean nats per token. Before the first validation the least one is ln(1000 V): first steps may overshoot.
Without a factor the bound is ln(1000 V) throughout. A model that is `DOUBT` times worse than a uniform guess over the V
words is doubtful: it may have overshot, and is waited for while it falls. It is bad in the `PATIENCE`-th look in a row
that does not fall, or in the `MOST_DOUBTS`-th in a row.

Going back means θ, the server rule's state, the mediator's memory, what the run has seen, and the states of clients
that keep any. The round counter does not go back: the next cohort is drawn as usual.

A round has diverged in three cases: the median client's training loss is at least ln(1000 V); more clients are refused
for numbers that exploded than contribute; the step is not finite. Its step is not taken. Once a run has diverged,
it is not waited for: models and losses that are `DOUBT` times worse than a uniform guess are bad at once.

Each time a step size is halved, η ← η · 2^{−n}, the n-th time in a row n times. A step of 1000 comes down to 10^{−3} in
six rounds. It is the clients' own, or the server's where their training is sound and the model is not (`by_server`).
The factors survive: they are part of the run's state and do not go back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from keyfed.federated.types import Aggregate, Caps, ClientId, Method, Params, Reason, Seen, State

WINDOW = 8  # rounds that limits look back on
OVERSHOOT = 1000.0  # times the perplexity of a uniform guess, which a first model may have
LEAST_COMPARED = 4  # uploads of a round, below which their directions say nothing
CLEARLY = 0.05  # ε: a cosine nearer to zero than this is no direction against anybody
PIECE = 1 << 16  # numbers of each upload that are compared at a time
DOUBT = 1.5  # times the perplexity of a uniform guess, from which a model is waited for
PATIENCE, MOST_DOUBTS = 3, 6  # looks in a row at doubtful models: without a fall, and in all
MOST_RETURNS = 8  # to the same model, or rounds that diverge, one after the other; then the run ends
MOST_HALVINGS = 40  # of a run's local step size
EXPLODED: frozenset[Reason] = frozenset({"non-finite report", "non-finite upload", "exploding upload"})


class Watch(NamedTuple):
    """How a run notices that it diverges.

    Attributes:
      uniform: mean nats per token of a uniform guess; None where losses and refusals must not decide (private runs).
      factor: of the least validation perplexity, beyond which a model is bad; None for `OVERSHOOT` times uniform.
    """

    uniform: float | None = None
    factor: float | None = None


def diverged(watch: Watch, losses: Sequence[float], aggregate: Aggregate, *, eased: bool = False) -> str | None:
    """Say why a round's local training has diverged; None where it has not.

    Args:
      losses: of the clients, mean nats per token; the median is judged, which one client's claim does not move far.
      eased: a step size of the run was halved before.

    Example:
      >>> nothing = Aggregate({}, {}, {}, {}, ("anna", "ben"))
      >>> diverged(Watch(math.log(50)), [3.0, 900.0, 2.0], nothing) is None
      True
      >>> diverged(Watch(math.log(50)), [900.0, 900.0, 2.0], nothing)
      'the median client trains at 900 nats per token, and a uniform guess has 3.9'
    """
    if watch.uniform is None:
        return None
    burst = sum(refusal.reason in EXPLODED for refusal in aggregate.refused)
    called = len(aggregate.contributors) + len(aggregate.refused)
    if 2 * burst > called:
        return f"the training of {burst} of {called} clients gave numbers that exploded"
    typical = statistics.median_low(losses) if losses else 0.0
    if typical >= watch.uniform + math.log(DOUBT if eased else OVERSHOOT):
        return f"the median client trains at {typical:.4g} nats per token, and a uniform guess has {watch.uniform:.1f}"
    return None


def by_server(method: Method, loss: float, uniform: float) -> bool:
    """Whether it is the server's step that is too large: clients take none, or their own training is sound."""
    return method.solver.still or loss < uniform + math.log(DOUBT)


def halved(state: State, times: int, *, server: bool) -> State:
    """Return the state with a step size halved so often, `MOST_HALVINGS` in all at most.

    Args:
      server: it is the server's; else the clients'.
    """
    if server:
        return replace(state, server_halvings=min(state.server_halvings + times, MOST_HALVINGS))
    return replace(state, halvings=min(state.halvings + times, MOST_HALVINGS))


def failed(state: State, *, server: bool) -> State:
    """Return the state after a round that diverged: the n-th one in a row halves the step n times."""
    return replace(halved(state, state.failed + 1, server=server), failed=state.failed + 1)


@dataclass(frozen=True, slots=True)
class Good:
    """The last good model, with everything that a run needs to go on from it.

    Attributes:
      state: θ, server state and memory; `state.round` is the round after which it was the model.
      nats: least validation of all good models so far.
      clients: for every client that keeps state, the round of the one that counted then.
      returns: roll-backs to this model so far.
      uniform: mean nats per token of a uniform guess.
      doubts: looks in a row at doubtful models since, and `lowest` the least of their validations.
    """

    state: State
    nats: float
    clients: Mapping[ClientId, int] = field(default_factory=dict)
    returns: int = 0
    uniform: float = math.inf
    doubts: int = 0
    lowest: float = math.inf

    @property
    def exhausted(self) -> bool:
        """Whether the run has come back to this model so often that another try is pointless."""
        return self.returns >= MOST_RETURNS


class UploadLimits(NamedTuple):
    """Multiples of medians that an upload may be at most; None for no limit.

    Attributes:
      norm: κ, of its norm.
      tokens: of the tokens it counts for.
      most: tokens that no client of the run can have (`data.max_tokens`), from the first round on.
      against: γ, how far an upload may point against the others of its round, as a share of their agreement.
      trim: share of the uploads that is left out at either end of every number (`engine.sums.plain.TrimmedSum`).
    """

    norm: float | None = None
    tokens: float | None = None
    most: int | None = None
    against: float | None = None
    trim: float | None = None


def caps_of(limits: UploadLimits, seen: Seen, pace: float = 1.0) -> Caps:
    """Return what uploads of the next round may be at most.

    Args:
      pace: the schedule's factor on this round's step size; what was seen is per unit of it.

    Example:
      >>> caps_of(UploadLimits(3.0, 4.0), Seen((1.0, 2.0, 9.0), (100.0, 50.0)))
      Caps(norm=6.0, tokens=300, against=None, trim=None)
      >>> caps_of(UploadLimits(3.0, 4.0, most=200), Seen())
      Caps(norm=None, tokens=200, against=None, trim=None)
    """
    norm = pace * limits.norm * statistics.median(seen.norms) if limits.norm and seen.norms else None
    tokens = [] if limits.most is None else [limits.most]
    if limits.tokens and seen.tokens:
        tokens.append(math.ceil(limits.tokens * statistics.median(seen.tokens)))
    return Caps(norm, min(tokens, default=None), limits.against, limits.trim)


def seen_with(seen: Seen, norms: Sequence[float], tokens: Sequence[float]) -> Seen:
    """Return what was seen, with the medians of another round."""
    more = [(statistics.median(numbers),) if numbers else () for numbers in (norms, tokens)]
    return Seen((*seen.norms, *more[0])[-WINDOW:], (*seen.tokens, *more[1])[-WINDOW:])


def norm_of(change: Params) -> float:
    """Return the Euclidean norm over all layers."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in change.values()))


def against_others(uploads: Mapping[ClientId, Params], caps: Caps | None) -> list[ClientId]:
    """Return the clients of a round whose uploads are left out for their direction."""
    if caps is None or not caps.against:
        return []
    clients = list(uploads)
    return [clients[k] for k in opposed(cosines_of(list(uploads.values())), caps.against)]


def cosines_of(uploads: Sequence[Params]) -> torch.Tensor:
    """Return the cosine between every two uploads; that with an upload of zeros is 0.

    Memory is O(n · PIECE + n²), time O(n² · model) for n uploads.
    """
    products = torch.zeros(len(uploads), len(uploads), dtype=torch.float64)
    for name in uploads[0] if uploads else ():
        layer = [upload[name].reshape(-1) for upload in uploads]
        for start in range(0, layer[0].numel(), PIECE):
            piece = torch.stack([numbers[start : start + PIECE] for numbers in layer]).double().cpu()
            products += piece @ piece.T
    inverse = products.diagonal().rsqrt()
    inverse[~torch.isfinite(inverse)] = 0.0
    return products * inverse[:, None] * inverse[None, :]


def opposed(cosines: torch.Tensor, share: float) -> list[int]:
    """Return which uploads point clearly against the others, the most opposed one first.

    One after the other is taken away and the rest compared anew. An upload is opposed only if it also points against at
    least half of the others one by one: a liar who knows an honest upload can turn the sum of the others against it,
    but is one of them. The verdict holds only if more than half of all uploads agree in the end: then those left out
    are a minority.

    Args:
      cosines: of every two uploads, see `cosines_of`.
      share: γ, of the median agreement of the others.

    Example:
      >>> same, other = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([-3.0, -2.0])}
      >>> opposed(cosines_of([same, same, other, same, same]), 0.25)
      [2]
    """
    count = len(cosines)
    if count < LEAST_COMPARED:
        return []
    kept, out = list(range(count)), list[int]()
    while 2 * len(kept) > count:
        found = _agreement(cosines, kept)
        worst = min(range(len(kept)), key=lambda k: found[k])
        rest = kept[:worst] + kept[worst + 1 :]
        clearly = found[worst] < -max(CLEARLY, share * statistics.median(_agreement(cosines, rest)))
        one_by_one = statistics.median(cosines[kept[worst]][rest].tolist()) < 0
        if not (clearly and one_by_one):
            return out if 2 * sum(c > 0 for c in found) > count else []
        out.append(kept[worst])
        kept = rest
    return []


def _agreement(cosines: torch.Tensor, among: Sequence[int]) -> list[float]:
    """Return the cosine of each of these uploads with the sum of the others' directions."""
    chosen = cosines[among][:, among]
    own, total = chosen.diagonal(), chosen.sum(1)
    others = (chosen.sum() - 2 * total + own).clamp_min(0.0).sqrt()  # the norm of that sum
    found = torch.where(others > 1e-9, (total - own) / others, 0.0)
    return [float(c) for c in found]


class Judged(NamedTuple):
    """What a validation means for a run.

    Attributes:
      good: the last good model now.
      back: whether to go on from it; else the model that was validated goes on.
    """

    good: Good
    back: bool


def first_good(state: State, words: int) -> Good:
    """Return the model before the first round, of which nothing is known.

    A first step may overshoot: until a model was validated, only one is bad that is far worse than a uniform guess over
    so many words, `OVERSHOOT` times.
    """
    return Good(state, uniform_nats(words) + math.log(OVERSHOOT), uniform=uniform_nats(words))


def uniform_nats(words: int) -> float:
    """Return the mean nats per token of a uniform guess over so many words."""
    return math.log(max(2, words))


def exploded(nats: float, least: float, factor: float) -> bool:
    """Tell whether a validation has exploded against the least one of a run.

    Example:
      >>> exploded(math.log(290.0), math.log(100.0), 3.0), exploded(math.log(310.0), math.log(100.0), 3.0)
      (False, True)
      >>> exploded(math.nan, 5.0, 3.0)
      True
    """
    return not math.isfinite(nats) or nats >= least + math.log(factor)


def judge_model(good: Good, state: State, nats: float, factor: float | None, clients: Mapping[ClientId, int]) -> Judged:
    """Judge the model of a state by its validation.

    Args:
      factor: of the least validation perplexity, beyond which a model is bad; None for `OVERSHOOT` times uniform.
      clients: the rounds of the clients' states that count with this model.
    """
    itself = same(state.params, good.state.params)
    bad = exploded(nats, good.uniform, OVERSHOOT) if factor is None else exploded(nats, good.nats, factor)
    if bad:
        return Judged(returned(good), back=not itself)
    if itself:  # an abandoned round, or a model that was gone back to and validated once more
        return Judged(good, back=False)
    eased = state.halvings or state.server_halvings
    if nats >= good.uniform + math.log(DOUBT):
        doubts, lowest = good.doubts + 1, min(good.lowest, nats)
        if eased or doubts >= MOST_DOUBTS or (doubts >= PATIENCE and nats > lowest):
            return Judged(returned(good), back=True)
        return Judged(replace(good, doubts=doubts, lowest=lowest), back=False)
    if eased and nats > good.uniform:  # not bad, and nothing to go back to
        return Judged(good, back=False)
    return Judged(Good(state, min(good.nats, nats), dict(clients), uniform=good.uniform), back=False)


def returned(good: Good) -> Good:
    """Return the last good model with one more roll-back to it."""
    return replace(good, returns=good.returns + 1, doubts=0, lowest=math.inf)


def suspect(good: Good, state: State) -> Judged:
    """Judge a model from which rounds diverge in a row, however small the step: the model itself is bad."""
    if state.failed < PATIENCE or same(state.params, good.state.params):
        return Judged(good, back=False)
    return Judged(returned(good), back=True)


def gone_back(good: Good, state: State, *, server: bool = False, claimed: bool = False) -> State:
    """Return the last good model, to go on from where a run stands, with a smaller step size.

    Args:
      server: the server's step size is halved (`by_server`), not the clients'.
      claimed: only a sum over clients said that the model is bad, which one of them can bring about: the first return
        to a model halves nothing.
    """
    last, eased = good.state, halved(state, max(0, good.returns - claimed), server=server)
    return State(
        last.params, last.mediator, last.server, state.round, last.seen, eased.halvings, eased.server_halvings
    )  # fmt: skip


def given_up(good: Good, state: State) -> bool:
    """Whether a run has diverged so often in a row that another try is pointless."""
    return good.exhausted or state.failed >= MOST_RETURNS


def same(a: Params, b: Params) -> bool:
    """Tell whether two models are the same tensors, without looking at their numbers."""
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def finite(*models: Params) -> bool:
    """Tell whether every number of these tensors is finite."""
    flags = [torch.isfinite(t).all() for model in models for t in model.values() if t.is_floating_point()]
    return not flags or bool(torch.stack([f.cpu() for f in flags]).all())
