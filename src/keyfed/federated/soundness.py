r"""When a model is good: finite numbers, and a validation that has not exploded.

A server step whose θ or server state is not finite is never taken. A model whose validation perplexity is at least
`factor` times the least one of the run, or no number, is bad: the run goes back to the last good model.

.. math::  \mathrm{bad}(ν) \iff ν \notin ℝ \;\text{ or }\; ν ≥ \min(ν_{\mathrm{good}}) + \ln(\mathrm{factor})

with ν the mean nats per token. Before the first validation the least one is ln V, that of a uniform guess over V words.
Going back means θ, the server rule's state, the mediator's memory, what the run has seen, and the states of clients
that keep any. The round counter does not go back: the next cohort is drawn as usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from keyfed.federated.types import ClientId, Params, State

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


class Judged(NamedTuple):
    """What a validation means for a run.

    Attributes:
      good: the last good model now.
      back: whether to go on from it; else the model that was validated goes on.
    """

    good: Good
    back: bool


def first_good(state: State, words: int) -> Good:
    """Return the model before the first round; it is expected to guess as well as a uniform one over so many words."""
    return Good(state, math.log(max(2, words)))


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
