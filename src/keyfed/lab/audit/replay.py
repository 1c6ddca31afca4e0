"""One round of a private run done again, as its ledger says it was done, and compared with what the run has kept.

The other attacks train again, with this package's code: a run whose own training forgot its noise would pass them. In a
simulation the noise derives from the seed, so the step between two checkpoints can be computed: clip, sum, the ledger's
noise, server rule. It must be the step that was taken, to a tenth of what the noise does to it; another machine rounds
otherwise, but not by that much.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keyfed.config.load import Config
from keyfed.engine.network import shapes
from keyfed.engine.task import keeps_state
from keyfed.errors import RunError
from keyfed.federated.round import initial_state
from keyfed.federated.types import Params, State
from keyfed.private.dp.ledger import Entry, Ledger, read_ledger
from keyfed.private.dp.noise import Draw, norm_of
from keyfed.private.dp.private_method import Bounded
from keyfed.run.checkpoint import read_checkpoint, rounds_in
from keyfed.run.loop import run_rounds, simulated_cohorts
from keyfed.run.plan import Choice
from keyfed.run.prepare import Prepared, make_problem
from keyfed.run.privacy import PrivateRun
from keyfed.run.ranks import federate

CLOSE = 0.1  # of the noise's effect on the step, by which a replayed step may differ from the one that was taken


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A round between two checkpoints: the state before it, the model after it."""

    before: State
    after: Params


class Noiseless(PrivateRun):
    """The same mechanism without its noise: what is left says what the noise does."""

    def _release(self, round: int) -> Draw:
        super()._release(round)
        return lambda name, shape: torch.zeros(shape, dtype=torch.float64)


def replay(
    run: Path, out: Path, config: Config, prepared: Prepared, bounded: Bounded, choice: Choice, theta: Params
) -> dict[str, Any]:
    """Do the last round again whose checkpoint, and the one before, are there; say how far off the run's own is.

    Args:
      out: a folder for the replay's ledgers.
      theta: the model before the first round.

    Returns:
      round, difference (of the two steps, in lengths of what the noise does to them) and contradicted; or `skipped`,
      the reason why nothing was replayed.
    """
    ledger = read_ledger(run)
    if ledger.terms.randomness != "derived":
        return {"skipped": "the noise is the operating system's, and nobody can draw it again"}
    if keeps_state(bounded.method):
        return {"skipped": f"clients of {bounded.method.name} keep state, which only they have"}
    step = last_step(run / "checkpoint", bounded, theta)
    if step is None:
        return {"skipped": "no two checkpoints of rounds next to each other are there (train.checkpoint_every=1)"}
    number = max((k for k, e in enumerate(ledger.entries) if _is_release(e, step.before.round)), default=None)
    if number is None:
        return {"round": step.before.round + 1, "difference": math.inf, "contradicted": True}
    given = (out, ledger, number, config, prepared, bounded, choice, step.before)
    noised, silent = _again(PrivateRun, *given), _again(Noiseless, *given)
    effect = _apart(noised, silent)
    off = _apart(noised, step.after)
    difference = off / effect if effect > 0 else math.inf
    return {"round": step.before.round + 1, "difference": difference, "contradicted": not difference <= CLOSE}


def last_step(folder: Path, bounded: Bounded, theta: Params) -> ReplayedStep | None:
    """Return the last round whose states before and after are there and whole."""
    for number in sorted(rounds_in(folder), reverse=True):
        try:
            after = read_checkpoint(folder, number).state.params
            if number == 1:
                return ReplayedStep(initial_state(bounded.method, theta), after)
            if number - 1 in rounds_in(folder):
                return ReplayedStep(read_checkpoint(folder, number - 1).state, after)
        except (OSError, ValueError, KeyError, TypeError, RunError):
            continue  # a damaged checkpoint: an earlier pair may be whole
    return None


def _is_release(entry: Entry, round: int) -> bool:
    return entry.what == "update" and entry.round == round


def _again(
    kind: type[PrivateRun],
    out: Path,
    ledger: Ledger,
    number: int,
    config: Config,
    prepared: Prepared,
    bounded: Bounded,
    choice: Choice,
    before: State,
) -> Params:
    """Return the model after the release `number` of the ledger, from the state before it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    guard = kind(config, bounded, out, ledger.terms)
    for entry in ledger.entries[:number]:  # so that attempt and leaf are those of the release
        guard.ledger.book(entry.row, entry.what, entry.round)
    method = bounded.method
    params = {name: before.params[name].to(choice.device) for name in shapes(prepared.spec)}
    server = {name: t.to(choice.device) for name, t in before.server.items()}
    state = replace(before, params=params, server=server)
    problem = make_problem(prepared, config, method, choice.device)
    with federate(config, problem, choice, None, None) as federation:
        cohorts = simulated_cohorts(config, prepared, method, federation, params, guard)
        return run_rounds(method, state, state.round + 1, federation, cohorts).params


def _apart(one: Params, two: Params) -> float:
    return norm_of(p.double().cpu() - two[name].double().cpu() for name, p in one.items())
