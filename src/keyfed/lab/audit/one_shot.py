"""The one-shot estimate on a run: the same training once more, with canary clients that send random directions.

Every canary client is picked with the run's own sampling rate, independently in each round, and sends a random
direction ten times as long as the clip S. Its upload goes through the run's own `NoisedSum`, which has to shorten it to
S (a missing clip shows as an ε̂ far too large), and is added to everybody's where the sum is used: in front of the
server rule. What the final model tells about the canaries is compared with the claimed ε
(`keyfed.lab.audit.one_shot_estimate`).

Where ε is that of an imagined fleet, the run's noise is that of the fleet's mean on the mean of the few who are there.
So a canary is scaled like the noise and called at the fleet's rate: the estimate is of what is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyfed.config.load import Config
from keyfed.engine.sums.noised import NoisedSum
from keyfed.federated.round import initial_state
from keyfed.federated.sampling import derive_seed
from keyfed.federated.types import Aggregate, Method, Params, Share, State
from keyfed.lab.audit.one_shot_estimate import contradicts, cosines, estimate_epsilon, unit_vector
from keyfed.private.dp.ledger import Terms
from keyfed.private.dp.noise import Noising
from keyfed.private.dp.private_method import CLIP, Bounded
from keyfed.run.checkpoint import Cohort
from keyfed.run.choose import Choice
from keyfed.run.loop import run_rounds, simulated_cohorts
from keyfed.run.prepare import Prepared, make_problem
from keyfed.run.privacy import PrivateRun
from keyfed.run.ranks import federate
from keyfed.run.start.freeze import FROZEN

NUMBERS = 1 << 30  # random numbers an audit draws for canaries; a hundred million take about a second
FEWEST, MOST = 50, 1000
LONG = 10.0  # length of what a canary sends, in clips: a sum that does not clip gives it away
FEW_CALLS = 0.5  # calls of a canary over the run, in the mean, below which the attack could not have told anything
CROWDED = 0.02  # canaries of a round to dimensions, above which they hide each other


def how_many(dimensions: int, rate: float, rounds: int) -> int:
    """Canary clients of an audit: as many as can be drawn in time, and do not hide each other.

    As many again are drawn as nobody's. A round's canaries are nearly orthogonal, but each still has the others' sum as
    noise of variance rate·k/d beside the mechanism's z².
    """
    affordable = NUMBERS / dimensions / (2 + rate * rounds)
    return max(FEWEST, int(min(MOST, affordable, CROWDED * dimensions / rate)))


def canary_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the canaries' directions, and as many of directions that nobody sends."""
    return [derive_seed(seed, "one-shot", k) for k in range(2 * count)]


def picked(terms: Terms, canaries: int, seed: int, round: int) -> list[int]:
    """Say which canary clients are in a round: each by chance, or, where clients take turns, those whose turn it is."""
    if terms.gap is not None:
        return list(range(round % terms.gap, canaries, terms.gap))
    rng = np.random.default_rng(derive_seed(seed, "one-shot", "picked", round))
    return np.flatnonzero(rng.random(canaries) < terms.rate).tolist()


def also_sending(method: Method, sent: Params) -> Method:
    """Return the method whose next sum has these tensors in it, too."""
    own = method.server

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        total = {name: t + sent[name].to(t) if name in sent else t for name, t in aggregate.total.items()}
        return own.step(params, replace(aggregate, total=total), state)

    return replace(method, server=own._replace(step=step))


def sent_by(seeds: Iterable[int], like: Params, clip: float) -> Params:
    """Return the sum of what the canaries of these seeds send, each clipped by the sum that clips everybody."""
    size = sum(p.numel() for p in like.values())
    silent = Noising(clip, 0.0, None, 1.0, 1.0, None, lambda: lambda name, shape: torch.zeros(shape).double())
    summed, whole = NoisedSum(like, silent), dict.fromkeys(like, 1.0)
    for number, seed in enumerate(seeds):
        upload = cut(unit_vector(size, seed).mul_(LONG * clip), like)
        summed.add(f"canary {number}", upload, Share(whole, whole))
    return summed.aggregate(()).total


def cut(vector: Tensor, like: Params) -> Params:
    """Cut a flat vector into tensors of these shapes."""
    parts = vector.split([p.numel() for p in like.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(like.items(), parts, strict=True)}


def train_with_canaries(
    config: Config,
    prepared: Prepared,
    bounded: Bounded,
    terms: Terms,
    choice: Choice,
    theta: Params,
    out: Path,
    seeds: Sequence[int],
    rounds: int,
) -> tuple[Params, float]:
    """Train as the run did, with a canary client for every seed; return the last model and a canary's mean calls.

    Args:
      out: a folder for the ledger of this training.
    """
    guard, method = PrivateRun(config, bounded, out, terms), bounded.method
    sent_layers, calls = trained_layers(config, theta), 0
    problem = make_problem(prepared, config, method, choice.device)
    with federate(config, problem, choice, None, None) as federation:
        cohorts = simulated_cohorts(config, prepared, method, federation, theta, guard)

        def with_canaries(state: State) -> Cohort:
            nonlocal calls
            cohort = cohorts(state)
            own = [seeds[k] for k in picked(terms, len(seeds), config.train.seed, state.round)]
            calls += len(own)
            clipped = sent_by(own, sent_layers, float(state.server[CLIP]))
            sent = {name: t * (terms.called / terms.cohort) for name, t in clipped.items()}
            return replace(cohort, method=also_sending(method, sent))

        last = run_rounds(method, initial_state(method, theta), rounds, federation, with_canaries)
    return last.params, calls / len(seeds)


def trained_layers(config: Config, theta: Params) -> Params:
    """Return the layers that clients send in every round; canaries have no part in one that is frozen for a while."""
    return {name: p for name, p in theta.items() if name not in FROZEN or not config.train.frozen_rounds}


def flat_change(before: Params, after: Params) -> Tensor:
    """Return how far a model moved, as one vector, layers in the order of `before`."""
    return torch.cat([(after[name].double().cpu() - p.double().cpu()).flatten() for name, p in before.items()])


def judge(
    before: Params, after: Params, seeds: Sequence[int], delta: float, claimed: float | None, calls: float
) -> dict[str, Any]:
    """Compare the model's change with the canaries' directions; the second half of `seeds` was never sent.

    Args:
      calls: how often a canary took part, in the mean; one that never did cannot be told from nobody.
    """
    change, count = flat_change(before, after), len(seeds) // 2
    estimate = estimate_epsilon(cosines(change, seeds[:count]), cosines(change, seeds[count:]), len(change), delta)
    return {
        **estimate._asdict(),
        "claimed": claimed,
        "calls": calls,
        "power": calls >= FEW_CALLS,
        "contradicted": claimed is not None and contradicts(estimate, claimed),
    }
