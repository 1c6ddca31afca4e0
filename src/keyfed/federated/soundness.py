r"""What one client may do to a model, and when a model is good.

An upload may be at most a multiple κ of what the run has seen, the median of the medians of the last `WINDOW` rounds; a
longer one is shortened to that. A client counts at most a multiple of the median of tokens. One liar among ten moves a
median to a neighbour's number at most. The first round has no such numbers.

.. math::  ‖Δ_k‖ ≤ κ · \operatorname{med}_t \operatorname{med}_j ‖Δ_j^t‖, \qquad
           n_k ≤ κ_n · \operatorname{med}_t \operatorname{med}_j n_j^t

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


class UploadLimits(NamedTuple):
    """Multiples of medians that an upload may be at most; None for no limit.

    Attributes:
      norm: κ, of its norm.
      tokens: of the tokens it counts for.
      most: tokens that no client of the run can have (`data.max_tokens`), from the first round on.
    """

    norm: float | None = None
    tokens: float | None = None
    most: int | None = None


def caps_of(limits: UploadLimits, seen: Seen, pace: float = 1.0) -> Caps:
    """Return what uploads of the next round may be at most.

    Args:
      pace: the schedule's factor on this round's step size; what was seen is per unit of it.

    Example:
      >>> caps_of(UploadLimits(3.0, 4.0), Seen((1.0, 2.0, 9.0), (100.0, 50.0)))
      Caps(norm=6.0, tokens=300)
      >>> caps_of(UploadLimits(3.0, 4.0, most=200), Seen())
      Caps(norm=None, tokens=200)
    """
    norm = pace * limits.norm * statistics.median(seen.norms) if limits.norm and seen.norms else None
    tokens = [] if limits.most is None else [limits.most]
    if limits.tokens and seen.tokens:
        tokens.append(math.ceil(limits.tokens * statistics.median(seen.tokens)))
    return Caps(norm, min(tokens, default=None))


def seen_with(seen: Seen, norms: Sequence[float], tokens: Sequence[float]) -> Seen:
    """Return what was seen, with the medians of another round."""
    more = [(statistics.median(numbers),) if numbers else () for numbers in (norms, tokens)]
    return Seen((*seen.norms, *more[0])[-WINDOW:], (*seen.tokens, *more[1])[-WINDOW:])


def norm_of(change: Params) -> float:
    """Return the Euclidean norm over all layers."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in change.values()))


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


def judge_model(good: Good, state: State, nats: float, factor: float, clients: Mapping[ClientId, int]) -> Judged:
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
