"""Successive halving in two steps: which trials train how long, and which one wins.

Trial 0 is the configuration as given and trains all R rounds, so that the result says what tuning bought. The other
trials train R/3 rounds; the best third of them go on to R. The winner is the one of lowest validation perplexity among
those that trained R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from keyfed.config.load import Value

THIRD = 3

Status = Literal["finished", "stopped", "diverged", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial has come to.

    Attributes:
      rounds: trained so far; `stopped` trials did not go on after these.
      nats: validation nats per token of the best round so far, over all seeds; None where there is none.
      bytes: moved down, up and in reports.
      note: why a trial was refused.
    """

    trial: int
    values: Mapping[str, Value]
    status: Status
    rounds: int = 0
    nats: float | None = None
    top1: float | None = None
    top3: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def rank(self) -> tuple[float, int, int]:
        """Lowest first: validation nats, then bytes; a trial that went wrong comes last."""
        usable = self.nats is not None and self.status in ("finished", "stopped")
        return (self.nats if usable and self.nats is not None else math.inf, self.bytes, self.trial)

    def row(self) -> dict[str, Any]:
        """Return it as plain values with its perplexity."""
        perplexity = math.exp(self.nats) if self.nats is not None and self.nats < 700 else None
        return {**asdict(self), "perplexity": perplexity}


def first_rounds(rounds: int) -> int:
    """Rounds after which the trials are compared for the first time.

    Example:
      >>> first_rounds(20), first_rounds(2)
      (6, 1)
    """
    return max(1, rounds // THIRD)


def halve(trials: int, rounds: int, run: Callable[[int, int], Outcome]) -> list[Outcome]:
    """Train trial 0 to the end, the others for a third of the rounds, the best third of those to the end.

    Args:
      trials: how many there are.
      run: (trial, rounds) trains a trial up to so many rounds, from where it stands, and says what came of it.
    """
    outcomes = [run(0, rounds)]
    outcomes += [run(k, first_rounds(rounds)) for k in range(1, trials)]
    best = sorted((o for o in outcomes[1:] if math.isfinite(o.rank[0])), key=lambda o: o.rank)
    for outcome in best[: going_on(trials)]:
        if outcome.rounds < rounds:
            outcomes[outcome.trial] = run(outcome.trial, rounds)
    return outcomes


def going_on(trials: int) -> int:
    """How many trials besides the first train all rounds."""
    return math.ceil((trials - 1) / THIRD)


def budget(trials: int, rounds: int) -> int:
    """Rounds that all trials train together.

    Example:
      >>> budget(10, 9)  # the default 9, nine others 3 each, three of them 6 more
      54
    """
    first = first_rounds(rounds)
    return rounds + (trials - 1) * first + going_on(trials) * (rounds - first)


def winner(outcomes: Sequence[Outcome], rounds: int) -> Outcome | None:
    """Return the best of those that trained all rounds; ties go to fewer bytes."""
    full = [o for o in outcomes if o.rounds >= rounds and math.isfinite(o.rank[0])]
    return min(full, key=lambda o: o.rank, default=None)


def until_compared(records: Sequence[Mapping[str, Any]], rounds: int) -> list[Mapping[str, Any]] | None:
    """Return a run's rounds up to its first validation at or after `rounds`; None if it has not got there."""
    for at, record in enumerate(records):
        if record["round"] >= rounds and record.get("valid"):
            return list(records[: at + 1])
    return None


def judge(
    trial: int, values: Mapping[str, Value], runs: Sequence[Sequence[Mapping[str, Any]]], rounds: int, vocab: int
) -> Outcome:
    """Add up the runs of a trial, one a seed: each is judged by its best validation, as `train` chooses its model.

    Args:
      rounds: those of a whole run.
      vocab: size of the vocabulary: who guesses ten times worse than evenly among its words has diverged.
    """
    best = [min((r["valid"] for r in run if r.get("valid")), key=_nats_or_inf) for run in runs]
    tokens = sum(b["tokens"] for b in best)

    def mean(key: str) -> float | None:
        numbers = [b[key] for b in best]
        return None if None in numbers else sum(n * b["tokens"] for n, b in zip(numbers, best, strict=True)) / tokens

    nats = mean("nats")
    reached = min(run[-1]["round"] for run in runs)
    # A model that never left its start because every client was thrown out has a finite perplexity, but did not train.
    thrown_out = any(r["refused"] and not r["contributors"] for run in runs for r in run)
    failed = nats is None or not nats < math.log(10 * vocab) or thrown_out
    status: Status = "diverged" if failed else "finished" if reached >= rounds else "stopped"
    return Outcome(
        trial, values, status, reached, nats, mean("top1"), mean("top3"),
        bytes=sum(sum(r["traffic"].values()) for run in runs for r in run),
        seconds=sum(run[-1]["elapsed"] for run in runs),
        note="every client of a round was refused" if thrown_out else "",
    )  # fmt: skip


def _nats_or_inf(valid: Mapping[str, Any]) -> float:
    return math.inf if valid["nats"] is None else float(valid["nats"])
