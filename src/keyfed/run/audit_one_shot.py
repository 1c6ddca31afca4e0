"""The one-shot estimate on a run: the same training once more, with canary clients that send random directions.

Every canary client is picked with the run's own sampling rate, independently in each round, and sends a random unit
vector times the clip S. Its upload goes into the same sum as everybody's, noise included, so it is added where the sum
is used: in front of the server rule. What the final model tells about the canaries is compared with the claimed ε
(`keyfed.private.audit.one_shot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyfed.federated.sampling import derive_seed
from keyfed.federated.types import Aggregate, Method, Params, ServerRule
from keyfed.private.audit.one_shot import contradicts, cosines, estimate_epsilon, sum_of

NUMBERS = 1 << 30  # random numbers an audit draws for canaries; a hundred million take about a second
FEWEST, MOST = 100, 1000


def how_many(dimensions: int, rate: float, rounds: int) -> int:
    """Canary clients that fit into the numbers an audit may draw: as many again are drawn as nobody's."""
    return max(FEWEST, min(MOST, int(NUMBERS / dimensions / (2 + rate * rounds))))


def canary_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the canaries' directions, and as many of directions that nobody sends."""
    return [derive_seed(seed, "one-shot", k) for k in range(2 * count)]


def with_canaries(method: Method, seeds: Sequence[int], rate: float, size: float, seed: int) -> Method:
    """Return the method whose sums also have canary clients in them.

    Args:
      seeds: one a canary client.
      rate: the chance that one is picked in a round.
      size: norm of what it sends.
      seed: draws who is picked; the number of a round is that of the server's steps.
    """
    own, round = method.server, [0]

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        rng = np.random.default_rng(derive_seed(seed, "one-shot", "picked", round[0]))
        round[0] += 1
        picked = np.flatnonzero(rng.random(len(seeds)) < rate).tolist()
        sent = sum_of(sum(p.numel() for p in params.values()), (seeds[k] for k in picked)).mul_(size)
        parts = zip(params.items(), sent.split([p.numel() for p in params.values()]), strict=True)
        total = {name: aggregate.total[name] + part.view(p.shape).to(p) for (name, p), part in parts}
        return own.step(params, replace(aggregate, total=total), state)

    return replace(method, server=ServerRule(own.init, step))


def flat_change(before: Params, after: Params) -> Tensor:
    """Return how far a model moved, as one vector, layers in the order of `before`."""
    return torch.cat([(after[name].double().cpu() - p.double().cpu()).flatten() for name, p in before.items()])


def judge(before: Params, after: Params, seeds: Sequence[int], delta: float, claimed: float | None) -> dict[str, Any]:
    """Compare the model's change with the canaries' directions; the second half of `seeds` was never sent."""
    change, count = flat_change(before, after), len(seeds) // 2
    estimate = estimate_epsilon(cosines(change, seeds[:count]), cosines(change, seeds[count:]), len(change), delta)
    return {
        **estimate._asdict(),
        "claimed": claimed,
        "contradicted": claimed is not None and contradicts(estimate, claimed),
    }
