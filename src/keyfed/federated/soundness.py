r"""What one client may do to a model, and when a model is good.

An upload may be at most a multiple κ of what the run has seen, the median of the medians of the last `WINDOW` rounds; a
longer one is shortened to that. A client counts at most a multiple of the median of tokens. One liar among ten moves a
median to a neighbour's number at most. The first round has no such numbers.

.. math::  ‖Δ_k‖ ≤ κ · \operatorname{med}_t \operatorname{med}_j ‖Δ_j^t‖, \qquad
           n_k ≤ κ_n · \operatorname{med}_t \operatorname{med}_j n_j^t

Uploads of one round are compared with each other, never with an earlier step: steps may overshoot. One is left out that
points clearly against the sum of the others' directions, measured by how much those agree among themselves (`opposed`).

.. math::  c_k = \cos(u_k, \sum_{j≠k} u_j), \quad u_k = \frac{Δ_k}{‖Δ_k‖}, \qquad
           k \text{ is left out} \iff c_k < −\max(ε, γ · \operatorname{med}_{j≠k} c_j^{(−k)})

with c^{(−k)} the cosines among the others alone. Lengths and tokens do not matter here, so no claim of a client does.

Where only sums are seen, a sum whose mean upload is longer than κ times the median one of the rounds before is not
taken; with clients that keep state it is how far θ moves, since their sum is of increments.

A server step whose θ or server state is not finite is never taken. A model whose validation perplexity is at least
`factor` times the least one of the run, or no number, is bad: the run goes back to the last good model.

.. math::  \mathrm{bad}(ν) \iff ν \notin ℝ \;\text{ or }\; ν ≥ \min(ν_{\mathrm{good}}) + \ln(\mathrm{factor})

with ν the mean nats per token. Before the first validation the least one is ln(1000 V): first steps may overshoot.
Going back means θ, the server rule's state, the mediator's memory, what the run has seen, and the states of clients
that keep any. The round counter does not go back: the next cohort is drawn as usual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from keyfed.federated.types import Caps, ClientId, Params, Seen, State

WINDOW = 8  # rounds that limits look back on
OVERSHOOT = 1000.0  # times the perplexity of a uniform guess, which a first model may have
MOST_RETURNS = 5  # to the same model, one after the other; then the run ends with it
LEAST_COMPARED = 4  # uploads of a round, below which their directions say nothing
CLEARLY = 0.05  # ε: a cosine nearer to zero than this is no direction against anybody
PIECE = 1 << 16  # numbers of each upload that are compared at a time


@dataclass(frozen=True, slots=True)
class Good:
    """The last good model, with everything that a run needs to go on from it.

    Attributes:
      state: θ, server state and memory; `state.round` is the round after which it was the model.
      nats: least validation of all good models so far.
      clients: for every client that keeps state, the round of the one that counted then.
      returns: roll-backs to this model so far.
    """

    state: State
    nats: float
    clients: Mapping[ClientId, int] = field(default_factory=dict)
    returns: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the run has come back to this model so often that another try is pointless."""
        return self.returns >= MOST_RETURNS


class Limits(NamedTuple):
    """Multiples of medians that an upload may be at most; None for no limit.

    Attributes:
      norm: κ, of its norm.
      tokens: of the tokens it counts for.
      most: tokens that no client of the run can have (`data.max_tokens`), from the first round on.
      against: γ, how far an upload may point against the others of its round, as a share of their agreement.
    """

    norm: float | None = None
    tokens: float | None = None
    most: int | None = None
    against: float | None = None


def caps_of(limits: Limits, seen: Seen, pace: float = 1.0) -> Caps:
    """Return what uploads of the next round may be at most.

    Args:
      pace: the schedule's factor on this round's step size; what was seen is per unit of it.

    Example:
      >>> caps_of(Limits(3.0, 4.0), Seen((1.0, 2.0, 9.0), (100.0, 50.0)))
      Caps(norm=6.0, tokens=300, against=None)
      >>> caps_of(Limits(3.0, 4.0, most=200), Seen())
      Caps(norm=None, tokens=200, against=None)
    """
    norm = pace * limits.norm * statistics.median(seen.norms) if limits.norm and seen.norms else None
    tokens = [] if limits.most is None else [limits.most]
    if limits.tokens and seen.tokens:
        tokens.append(math.ceil(limits.tokens * statistics.median(seen.tokens)))
    return Caps(norm, min(tokens, default=None), limits.against)


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

    One after the other is taken away and the rest compared anew, so that a liar does not make others look opposed. The
    verdict holds only if more than half of all uploads agree in the end: then those left out are a minority.

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
        if not found[worst] < -max(CLEARLY, share * statistics.median(_agreement(cosines, rest))):
            return out if 2 * sum(c > 0 for c in found) > count else []
        out.append(kept[worst])
        kept = rest
    return []


def _agreement(cosines: torch.Tensor, among: Sequence[int]) -> list[float]:
    """Return the cosine of each of these uploads with the sum of the others' directions."""
    part = cosines[among][:, among]
    own, total = part.diagonal(), part.sum(1)
    others = (part.sum() - 2 * total + own).clamp_min(0.0).sqrt()  # the norm of that sum
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
    return Good(state, math.log(max(2, words)) + math.log(OVERSHOOT))


def exploded(nats: float, least: float, factor: float) -> bool:
    """Tell whether a validation has exploded against the least one of a run.

    Example:
      >>> exploded(math.log(290.0), math.log(100.0), 3.0), exploded(math.log(310.0), math.log(100.0), 3.0)
      (False, True)
      >>> exploded(math.nan, 5.0, 3.0)
      True
    """
    return not math.isfinite(nats) or nats >= least + math.log(factor)


def judge(good: Good, state: State, nats: float, factor: float, clients: Mapping[ClientId, int]) -> Judged:
    """Judge the model of a state by its validation.

    Args:
      clients: the rounds of the clients' states that count beside this model.
    """
    itself = same(state.params, good.state.params)
    if exploded(nats, good.nats, factor):
        return Judged(replace(good, returns=good.returns + 1), back=not itself)
    if itself:  # an abandoned round, or a model that was gone back to and validated once more
        return Judged(good, back=False)
    return Judged(Good(state, min(good.nats, nats), dict(clients)), back=False)


def gone_back(good: Good, round: int) -> State:
    """Return the state of the last good model, to go on from in a later round."""
    return replace(good.state, round=round)


def same(a: Params, b: Params) -> bool:
    """Tell whether two models are the same tensors, without looking at their numbers."""
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def finite(*models: Params) -> bool:
    """Tell whether every number of these tensors is finite."""
    flags = [torch.isfinite(t).all() for model in models for t in model.values() if t.is_floating_point()]
    return not flags or bool(torch.stack([f.cpu() for f in flags]).all())
