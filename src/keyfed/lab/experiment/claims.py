"""Whether a claim holds: every place where it can be checked, how far chance reaches there, the sum in words, and why.

Values are compared as logarithms, since a difference of perplexities is a matter of ratio. `RULE` says the rule whole.
A run that would gain from more rounds shows what its budget gave, and nothing of the method. So what a method can reach
is judged on rows that were doubled: the same settings, twice the rounds, the schedule of the step size fitted to them.

A cause is a sentence of the study's file with numbers in braces, read from the cells:
`{mean.perplexity | data = PTB | method = positional unigram}`. First what, then the labels of the row. What is `mean`,
`spread` (mean ± standard deviation), `seeds` (every one), `range` (lowest to highest mean of several rows) or
`printed`, and the measure; `{verdict.NAME}` is the verdict on the claim of that name. `STUDY/` before it reads another
study. A sentence with a number that is not there yet, or of smoke scale only, is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, nearest
from keyfed.lab.experiment.grid import Searched, Study, StudyClaim, load_study, matches, study_folder
from keyfed.lab.experiment.statistics import (
    Spread,
    joint_margin,
    pooled_spread,
    same_shuffles,
    shuffled,
    spreads_of,
    stepped,
)
from keyfed.lab.experiment.store import (
    OPEN,
    Row,
    main_scale,
    place,
    rows_of,
    write_printed,
    write_row,
    write_seeds,
    write_value,
)

GAIN = 0.01  # from which twice the rounds are worth having, a share of one
EQUAL = 1.1  # ratio of two budgets of a search that still counts as equal
WITH_ROUNDS = ("train", "code-faithful")  # runners that learn by rounds; a count model has read everything at once
FITTED = ("train.rounds", "method.decay", "train.warmup", "train.average", "train.eval_every", "train.checkpoint_every")
ROUNDS, DECAY = 20, 1.0  # of a cell that sets none, as in defaults.toml


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a study as a claim needs them: those with its measure, by their labels."""

    study: Study
    claim: StudyClaim
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
    budgets = " and ".join(f"{place(side)} with {search.tokens / 1e6:,.0f} M" for side, search in found if search)
    return [f"settings were searched with unequal tokens: {budgets}"]


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


HOLDS, FAILS, UNSURE = "holds", "does not hold", "cannot be told at this spread"
LEARNING = "cannot be told: still learning"
NOT_JUDGED, ABSENT = "not judged at smoke scale", "cannot be run here, what it needs is absent"
FAR = 1.5  # a ratio beyond which one seed is enough
MOST_NAMED = 2  # comparisons that a summary names
EVALUATIONS = 2  # standard deviations that one evaluation may be off
RULE = (
    "Means over seeds are compared as logarithms. s is the standard deviation over seeds, pooled over all "
    "configurations of a study that have several seeds and run the same way (networks, code-faithful variants and "
    "count models apart; diverged and untrained ones left out), with ν degrees of freedom; what has nothing "
    "random in it has s = 0. Rounds to a target are told at validations only, w rounds apart: there s is at least "
    "w/√12 rounds. m = t(ν) · √(s_a²/n_a + s_b²/n_b), with Student's 97.5 % quantile t, is how far two means may be "
    "apart by chance; between two pools ν is Welch and Satterthwaite's. Where an evaluation depends on a shuffle, t "
    "times the standard error of the mean over shuffles is added (in squares), unless both rows were scored on the "
    "same shuffles. Two rows are compared on the seeds that both have if these are two or more, else on all.",
    "An order that is claimed holds if the means differ that way by more than m, does not hold if they differ the "
    "other way by more than m, and cannot be told otherwise. A target that was not reached counts as more rounds "
    "than were run; a row that was not asked for the target is open. That something costs at most so much is told in "
    "the same way, from that much on. That two are close holds if the difference and m together are within the "
    "tolerance, does not if the difference less m is beyond it, and cannot be told otherwise.",
    "A printed figure is told as two that are close, with m = t(ν) · s / √n of ours. The tolerance is 5 % unless a "
    "claim says otherwise; where an evaluation depends on a shuffle, what was printed is one evaluation, and two "
    "standard deviations of one are added to the tolerance. A ratio of 1.05 one way is 1/1.05 the other, so limits "
    "are not symmetric in per cent.",
    "A bound holds if our mean is below it by more than m = t(ν) · s / √n, with s of that row's own seeds if it "
    "has several, and the pooled s else.",
    "Where no configuration has two seeds and so there is no s, a ratio of more than 1.5, beyond the tolerance where "
    "there is one, is told and nothing else. A claim holds if it does in every comparison; where comparisons differ "
    "they are counted, and where they are readings of the same thing one is enough. They are not corrected for their "
    "number. Nothing is judged at smoke scale: it only shows that a study runs.",
    "A claim at a stated budget of rounds or tokens is judged at that budget, and its rounds stand beside the verdict. "
    "A claim about what a method can reach is judged, either way, only on rows that have stopped learning. For that, "
    f"twice the rounds, with the schedule of the step size fitted to them, gain less than {100 * GAIN:g} % or less "
    "than one seed's standard deviation. Both sides need it, at settings that were searched with equal budgets of "
    f"tokens (within {100 * (EQUAL - 1):.0f} %). A count model has neither rounds nor a step size. Else the verdict is "
    f"“{LEARNING}”. Where a claim has rows of several settings, those that have stopped learning count.",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One place where a claim was checked.

    Attributes:
      row: what is compared, `against` with another row; None where it is with the printed value or a bound. Both have
        only the seeds that are compared.
      ours: the row's mean; `other` what it is compared with. `beyond` says which of the two are lower bounds only.
      change: ln(ours / other); `margin` how far that may be from 0 by chance; None where the spread is not known.
      limits: of the change, as logarithms: between them an order or a bound cannot be told, and a printed or a close
        figure holds; None where there are none. `outer`: beyond them a printed or a close figure does not hold.
      printed: the printed values of both, where both are.
      waits: what keeps a claim about what methods can reach from being judged here; empty where nothing does.
    """

    where: str
    row: Row
    against: Row | None
    ours: float | None
    other: float | None
    verdict: str
    change: float | None = None
    margin: float | None = None
    limits: tuple[float, float] | None = None
    outer: tuple[float, float] | None = None
    printed: tuple[float, float] | None = None
    beyond: tuple[bool, bool] = (False, False)
    waits: str = ""


def compare_rows(study: Study, rows: Sequence[Row], claim: StudyClaim) -> list[Comparison]:
    """Check a claim wherever it can be."""
    spreads = spreads_of(rows, claim.measure)
    known = Rows(study, claim, [row.known(claim.measure) for row in rows])
    found = []
    for row in known.rows:
        if not matches(row.labels, claim.of) or row.absent or known.is_doubled(row):
            continue
        if claim.kind in ("lower", "higher", "close", "costs"):
            other = known.against(row)
            if other is not None and not other.absent:
                found.append(_ordered(study, *_with_shared_seeds(row, other), claim, spreads))
        elif claim.kind == "below":
            found.append(_below(row, claim, spreads[row.runner]))
        else:
            printed = study.printed(row.labels, claim.measure)
            if printed is not None:
                found.append(_as_printed(row, printed, claim, spreads[row.runner]))
    return [_waiting(c, known, spreads) for c in found] if claim.about == "reach" else found


def _waiting(c: Comparison, rows: Rows, spreads: Mapping[str, Spread]) -> Comparison:
    """The comparison, without a verdict where one of its sides may still learn."""
    why = waits(rows, [side for side in (c.row, c.against) if side is not None], spreads)
    return replace(c, verdict=LEARNING, waits=why) if why and c.verdict != OPEN else c


def settled(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those that a verdict is told by: of a claim about what methods can reach, rows that have stopped learning."""
    if not any(c.verdict == LEARNING for c in comparisons):
        return list(comparisons)
    return [c for c in comparisons if c.verdict not in (LEARNING, OPEN)] or list(comparisons)


def _with_shared_seeds(row: Row, other: Row) -> tuple[Row, Row]:
    """Both rows with the seeds that both have, where these are two or more: luck of a third seed is no difference."""
    both = row.seeds & other.seeds
    return (row.of_seeds(both), other.of_seeds(both)) if len(both) > 1 else (row, other)


def is_absent(rows: Sequence[Row], claim: StudyClaim) -> bool:
    """Tell whether all rows that a claim is about are absent."""
    about = [row for row in rows if matches(row.labels, claim.of)]
    return bool(about) and all(row.absent for row in about)


def _where(row: Row, claim: StudyClaim) -> str:
    """A row in words, without what the claim itself says."""
    several = [axis for axis, label in claim.of.items() if not isinstance(label, str)]
    said = [axis for axis in (*claim.of, *claim.than) if axis not in several]
    return place(row, said) or place(row)


def _ordered(study: Study, row: Row, other: Row, claim: StudyClaim, spreads: Mapping[str, Spread]) -> Comparison:
    (a, above), (b, other_above) = row.at_least(claim.measure), other.at_least(claim.measure)
    mine, its = study.printed(row.labels, claim.measure), study.printed(other.labels, claim.measure)
    printed = (mine, its) if mine is not None and its else None
    where = _where(row, claim)
    if not row.records or not other.records:
        return Comparison(where, row, other, a, b, OPEN, printed=printed)
    if a is None or b is None or a <= 0 or b <= 0:
        return Comparison(where, row, other, a, b, UNSURE, printed=printed)
    one, two = (stepped(spreads[r.runner], r, claim.measure, mean) for r, mean in ((row, a), (other, b)))
    margin = joint_margin((one, len(row.records)), (two, len(other.records)), row.runner == other.runner)
    if margin is not None and claim.measure == "perplexity" and not same_shuffles(row, other):
        margin = math.hypot(margin, *(shuffled(r, mean) for r, mean in ((row, a), (other, b))))
    change, reach = math.log(a / b), math.log(FAR) if margin is None else margin
    verdict, limits, outer = _order_verdict(claim, change, reach, (above, other_above))
    known = None if above and other_above else change
    return Comparison(where, row, other, a, b, verdict, known, margin, limits, outer, printed, (above, other_above))


Limits = tuple[float, float] | None


def _order_verdict(
    claim: StudyClaim, change: float, reach: float, beyond: tuple[bool, bool]
) -> tuple[str, Limits, Limits]:
    """The verdict on a difference of two rows, and its limits. A lower bound is never judged to be lower."""
    if claim.kind == "close":
        tolerance = math.log1p(claim.within)
        apart = (change < 0 and not beyond[0]) or (change > 0 and not beyond[1])
        word, limits, outer = _within(change, tolerance, reach)
        wrong = (word == FAILS and not apart) or (word == HOLDS and any(beyond))
        return UNSURE if wrong else word, limits, outer
    middle = math.log1p(claim.bound or 0.0) if claim.kind == "costs" else 0.0
    lower, higher = change < middle - reach and not beyond[0], change > middle + reach and not beyond[1]
    wanted, unwanted = (higher, lower) if claim.kind == "higher" else (lower, higher)
    return HOLDS if wanted else FAILS if unwanted else UNSURE, (middle - reach, middle + reach), None


def _within(change: float, tolerance: float, reach: float) -> tuple[str, Limits, Limits]:
    """Whether a change is within a tolerance for sure, beyond it for sure, or neither; and where each begins."""
    sure, far = tolerance - reach, tolerance + reach
    word = HOLDS if abs(change) <= sure else FAILS if abs(change) > far else UNSURE
    return word, (-sure, sure) if sure >= 0 else None, (-far, far)


def _as_printed(row: Row, printed: float, claim: StudyClaim, spread: Spread) -> Comparison:
    ours, where = row.mean(claim.measure), _where(row, claim)
    if not row.records:
        return Comparison(where, row, None, None, printed, OPEN)
    if ours is None or ours <= 0:
        return Comparison(where, row, None, ours, printed, FAILS)
    change, tolerance = math.log(ours / printed), math.log1p(claim.within)
    margin = stepped(spread, row, claim.measure, ours).margin(len(row.records))
    one = row.evaluation() if claim.measure == "perplexity" else None
    if one is not None:  # what is printed is one evaluation, ours the mean over many
        tolerance += EVALUATIONS * one[0] / ours
        margin = None if margin is None else math.hypot(margin, shuffled(row, ours))
    verdict, limits, outer = _within(change, tolerance, math.log(FAR) if margin is None else margin)
    if margin is None:  # what one seed has is not told to hold, however wide the tolerance
        verdict, limits = FAILS if verdict == FAILS else UNSURE, None
    return Comparison(where, row, None, ours, printed, verdict, change, margin, limits, outer)


def _below(row: Row, claim: StudyClaim, pooled: Spread) -> Comparison:
    ours, bound, where = row.mean(claim.measure), claim.bound, _where(row, claim)
    assert bound is not None, "a claim of kind below has a bound"
    if not row.records:
        return Comparison(where, row, None, None, bound, OPEN)
    if ours is None or ours <= 0:
        return Comparison(where, row, None, ours, bound, FAILS)
    own = pooled_spread([row], claim.measure)
    spread = stepped(pooled if own.sd is None else own, row, claim.measure, ours)
    change, margin = math.log(ours / bound), spread.margin(len(row.records))
    reach = math.log(FAR) if margin is None else margin
    verdict = UNSURE if abs(change) <= reach else HOLDS if change < 0 else FAILS
    return Comparison(where, row, None, ours, bound, verdict, change, margin, (-reach, reach))


def judge(comparisons: Sequence[Comparison], scale: str, some: bool = False) -> str:
    """Sum up in words; counts come first where comparisons differ, and nothing holds for good while some are open.

    Only what was told is counted: what is open may come out either way.

    Args:
      some: whether one comparison that holds is enough.
    """
    comparisons = settled(comparisons)
    words = [c.verdict for c in comparisons]
    judged, waiting = [word for word in words if word != OPEN], words.count(OPEN)
    if not judged:
        return OPEN
    if scale == "smoke":
        return NOT_JUDGED
    if LEARNING in judged:
        return LEARNING
    held, count = judged.count(HOLDS), len(judged)
    after = f", {waiting} open" if waiting else ""
    if some and (held or waiting):
        return f"holds ({held} of {count}{after})" if held else f"does not hold so far (none of {count}{after})"
    if len(set(judged)) == 1:
        if len(words) == 1:
            return judged[0]
        if held:
            return f"holds so far ({held} of {count}{after})" if waiting else f"holds (all {count})"
        many = "none" if judged[0] == FAILS else count
        return f"{judged[0]} ({many} of {count}{after})"
    parts = [f"{held or 'none'} of {count} {'holds' if held < 2 else 'hold'}{after}"]
    for word, one, many in ((FAILS, "does not", "do not"), (UNSURE, "cannot be told", "cannot be told")):
        places = [c.where for c in comparisons if c.verdict == word]
        if 0 < len(places) <= MOST_NAMED and word == FAILS:
            parts.append(f"{' and '.join(places)} {one if len(places) == 1 else many}")
        elif places:
            parts.append(f"{len(places)} {one if len(places) == 1 else many}")
    return "; ".join(parts)


def verdict_on(study: Study, rows: Sequence[Row], claim: StudyClaim, scale: str) -> str:
    """The verdict on a claim, in words."""
    return ABSENT if is_absent(rows, claim) else judge(compare_rows(study, rows, claim), scale, claim.some)


def budget_of(comparisons: Sequence[Comparison], claim: StudyClaim) -> str:
    """After how many rounds a claim was judged, in words; empty where nothing was trained or it is not at a budget."""
    sides = [side for c in comparisons for side in (c.row, c.against) if side is not None and c.verdict != OPEN]
    found = sorted({int(r["rounds"]) for side in sides for r in side.records if r.get("rounds")})
    if claim.about != "budget" or not found:
        return ""
    ends = " to ".join(dict.fromkeys(f"{number:,}" for number in (found[0], found[-1])))
    return f"{'within' if claim.measure.startswith('rounds_to') else 'at'} {ends} round{'' if ends == '1' else 's'}"


def said_verdict(study: Study, rows: Sequence[Row], claim: StudyClaim, scale: str) -> str:
    """The verdict on a claim and the budget at which it was told."""
    verdict = verdict_on(study, rows, claim, scale)
    if verdict in (OPEN, NOT_JUDGED, ABSENT):
        return verdict
    budget = budget_of(compare_rows(study, rows, claim), claim)
    return f"{verdict}, {budget}" if budget else verdict


Results = Mapping[str, Mapping[str, Any]]
BRACES = re.compile(r"\{([^{}]*)\}")
ONE_ROW: Mapping[str, Callable[[Row, str], str]] = {
    "mean": lambda row, measure: write_value(row.mean(measure), measure),
    "spread": write_row,
    "seeds": write_seeds,
}
WHAT = (*ONE_ROW, "range", "printed", "verdict")


def causes(claim: StudyClaim, study: Study, found: Results, folder: Path | None = None) -> list[str]:
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
    verdict = verdict_on(study, rows_of(study, scale, found), claims[0], scale)
    return None if verdict == OPEN else verdict
