"""Why a claim holds or not: sentences of a study's file, whose numbers are read from the cells.

A number stands in braces: `{mean.perplexity | data = PTB | method = positional unigram}`. First what, then the labels
of the row. What is `mean`, `spread` (mean ± standard deviation), `seeds` (every one), `range` (lowest to highest mean
of several rows) or `printed`, and the measure; `{verdict.NAME}` is the verdict on the claim of that name. `STUDY/`
before it reads another study. A sentence with a number that is not there yet, or of smoke scale only, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, nearest
from keyfed.lab.experiment.claims import Claim
from keyfed.lab.experiment.grid import Study, load_study, matches, study_folder
from keyfed.lab.experiment.table import (
    OPEN,
    Row,
    main_scale,
    rows_of,
    write_printed,
    write_row,
    write_seeds,
    write_value,
)
from keyfed.lab.experiment.verdicts import verdict_on

Results = Mapping[str, Mapping[str, Any]]
BRACES = re.compile(r"\{([^{}]*)\}")
ONE_ROW: Mapping[str, Callable[[Row, str], str]] = {
    "mean": lambda row, measure: write_value(row.mean(measure), measure),
    "spread": write_row,
    "seeds": write_seeds,
}
WHAT = (*ONE_ROW, "range", "printed", "verdict")


def causes(claim: Claim, study: Study, found: Results, folder: Path | None = None) -> list[str]:
    """Return a claim's sentences with their numbers; those that lack one are left out."""
    filled = (fill(sentence, study, found, folder) for sentence in claim.cause)
    return [sentence for sentence in filled if sentence is not None]


def fill(sentence: str, study: Study, found: Results, folder: Path | None = None) -> str | None:
    """Put the numbers into a sentence; None if one of them is not there."""
    numbers = [_number(inside, study, found, folder) for inside in BRACES.findall(sentence)]
    if any(number is None for number in numbers):
        return None
    filled = iter(numbers)
    return BRACES.sub(lambda _: str(next(filled)), sentence)


def _number(inside: str, study: Study, found: Results, folder: Path | None) -> str | None:
    head, *conditions = (part.strip() for part in inside.split("|"))
    name, _, wanted = head.rpartition("/")
    if name:
        study = load_study(name, folder or study_folder())
    what, _, measure = wanted.partition(".")
    where = dict(_label(condition, study, inside) for condition in conditions)
    if what not in WHAT:
        raise ConfigError(
            f"{study.name}: {{{inside}}} begins with {what}{nearest(what, WHAT)}; one of {', '.join(WHAT)}"
        )
    if what == "verdict":
        return _verdict(measure, study, found, inside)
    if measure not in study.measures:
        raise ConfigError(f"{study.name}: {{{inside}}} asks for {measure}; expected one of {', '.join(study.measures)}")
    scale = main_scale(study, found)
    rows = [row for row in rows_of(study, scale or "paper", found) if matches(row.labels, where) and not row.absent]
    if what == "range":
        return _range(rows, measure) if scale not in (None, "smoke") else None
    if len(rows) > 1:
        raise ConfigError(f"{study.name}: {{{inside}}} fits {len(rows)} rows; expected one, add labels")
    if what == "printed":
        return write_printed(study.printed(rows[0].labels if rows else where, measure), measure)
    if scale in (None, "smoke") or not rows or rows[0].mean(measure) is None:
        return None
    return ONE_ROW[what](rows[0], measure)


def _label(condition: str, study: Study, inside: str) -> tuple[str, str]:
    axis, _, label = (part.strip() for part in condition.partition("="))
    if axis not in study.axes or label not in study.axes[axis]:
        known = study.axes.get(axis, study.axes)
        raise ConfigError(
            f'{study.name}: {{{inside}}} has "{condition}"{nearest(label or axis, known)}; expected AXIS = LABEL of it'
        )
    return axis, label


def _range(rows: Sequence[Row], measure: str) -> str | None:
    means = [mean for row in rows if (mean := row.mean(measure)) is not None]
    if not means:
        return None
    ends = dict.fromkeys(write_value(value, measure) for value in (min(means), max(means)))
    return " to ".join(ends)


def _verdict(name: str, study: Study, found: Results, inside: str) -> str | None:
    claims = [claim for claim in study.claims if claim.name == name]
    if not claims:
        raise ConfigError(f"{study.name}: {{{inside}}} names no claim; give one name = {name!r}")
    scale = main_scale(study, found)
    if scale in (None, "smoke"):
        return None
    told = verdict_on(study, rows_of(study, scale, found), claims[0], scale)
    return None if told == OPEN else told
