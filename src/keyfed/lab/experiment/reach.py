"""Whether a row has stopped learning: what a method can reach is told of such rows alone.

A run that would gain from more rounds says what its budget gave, and nothing of the method. So a row is doubled: the
same settings, twice the rounds, the schedule of the step size fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.lab.experiment.claims import Claim
from keyfed.lab.experiment.grid import Searched, Study, matches
from keyfed.lab.experiment.statistics import Spread, pooled_spread
from keyfed.lab.experiment.table import Row, place

GAIN = 0.01  # from which twice the rounds are worth having, a share of one
EQUAL = 1.1  # ratio of two budgets of a search that still counts as equal
WITH_ROUNDS = ("train", "code-faithful")  # runners that learn by rounds; a count model has read everything at once
FITTED = ("train.rounds", "method.decay", "train.warmup", "train.average", "train.eval_every", "train.checkpoint_every")
ROUNDS, DECAY = 20, 1.0  # of a cell that sets none, as in defaults.toml


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a study as a claim needs them: those with its measure, by their labels."""

    study: Study
    claim: Claim
    rows: Sequence[Row]

    def at(self, labels: Mapping[str, Any]) -> Row | None:
        """The row with exactly these labels."""
        return next((row for row in self.rows if row.labels == labels), None)

    def against(self, row: Row) -> Row | None:
        """What a row is compared with: its labels with those of `than`.

        A row of what has no rounds need not have every axis: of those whose labels all fit, the one with most counts.
        """
        wanted = {**row.labels, **self.claim.than}
        exact = self.at(wanted)
        if exact is not None or self.claim.about != "reach":
            return exact
        fitting = [other for other in self.rows if other.labels.items() <= wanted.items()]
        fitting = [other for other in fitting if self.claim.than.items() <= other.labels.items()]
        return max(fitting, key=lambda other: len(other.labels), default=None)

    def is_doubled(self, row: Row) -> bool:
        """Tell whether a row only shows what twice the rounds gain."""
        return bool(self.claim.twice) and self.claim.twice.items() <= row.labels.items()


def waits(rows: Rows, sides: Sequence[Row], spreads: Mapping[str, Spread]) -> str:
    """Say what keeps a claim about what methods can reach from being judged on these rows; empty if nothing does."""
    learning = [side for side in sides if side.runner in WITH_ROUNDS]
    reasons = [reason for side in learning if (reason := _learns(rows, side, spreads[side.runner]))]
    return "; ".join([*reasons, *_unequal(rows.study, learning)])


def _learns(rows: Rows, row: Row, spread: Spread) -> str:
    """Why a row may still learn: it has no doubled run, or that one gains.

    With a mean a of the row and b of the doubled one the gain is ln(b / a) where more is better, else ln(a / b). One
    seed's standard deviation is that of both rows' own seeds where they have several, else the pooled one.
    """
    name, measure = place(row), rows.claim.measure
    twice = rows.at({**row.labels, **rows.claim.twice})
    if twice is None:
        return f"{name} has no run of twice the rounds"
    if not _is_refitted(row, twice):
        return f"{name}: the doubled run has other settings, not twice the rounds, or a schedule that does not fit them"
    if not twice.records:
        return f"{name}: the run of twice the rounds is open"
    both = row.seeds & twice.seeds
    once, doubled = (side.of_seeds(both) if both else side for side in (row, twice))
    a, b = once.mean(measure), doubled.mean(measure)
    if a is None or b is None or a <= 0 or b <= 0:
        return f"{name}: twice the rounds have no figure to compare"
    own = pooled_spread([row, twice], measure).sd
    limit = max(math.log1p(GAIN), (spread.sd if own is None else own) or 0.0)
    gain = math.log(b / a) * (1 if rises(measure) else -1)
    if gain < limit:
        return ""
    return f"{name}: twice the rounds gain {100 * math.expm1(gain):.1f} %, of at most {100 * math.expm1(limit):.1f} %"


def _is_refitted(row: Row, twice: Row) -> bool:
    """Tell whether a run has twice the rounds of another, falls to the same step size over them, and else is the same.

    What follows from the number of rounds (`FITTED`) may differ: the schedule, the average over rounds, validations.
    """
    one, other = (
        {key: value for key, value in side.cells[0].settings.items() if key not in FITTED} for side in (row, twice)
    )
    (rounds, decay), (more, slower) = (
        (int(s.get("train.rounds", ROUNDS)), float(s.get("method.decay", DECAY)))
        for s in (side.cells[0].settings for side in (row, twice))
    )
    return (
        one == other
        and more == 2 * rounds
        and math.isclose(rounds * math.log(decay), more * math.log(slower), abs_tol=0.05)
    )


def _unequal(study: Study, sides: Sequence[Row]) -> list[str]:
    """Say where settings were not searched, or with a budget that is not the other side's."""
    found = [(side, searched(study, side)) for side in sides]
    missing = [f"the settings of {place(side)} were not searched" for side, search in found if search is None]
    tokens = [search.tokens for _, search in found if search is not None]
    if missing or not tokens or max(tokens) <= EQUAL * min(tokens):
        return missing
    told = " and ".join(f"{place(side)} with {search.tokens / 1e6:,.0f} M" for side, search in found if search)
    return [f"settings were searched with unequal tokens: {told}"]


def searched(study: Study, row: Row) -> Searched | None:
    """How a row's settings were searched; None if no entry is about it."""
    return next((search for search in study.searched if matches(row.labels, search.where)), None)


def rises(measure: str) -> bool:
    """Tell whether more of a measure is better.

    Example:
      >>> rises("sentence_top1_words"), rises("perplexity")
      (True, False)
    """
    return measure.removeprefix("sentence_").startswith(("top", "accuracy")) or measure.endswith("_accuracy")
