"""Whether a claim holds: every place where it can be checked, how far chance reaches there, and the sum in words.

Values are compared as logarithms, since a difference of perplexities is a matter of ratio. The rule as a whole is on
the page of where studies stand (templates/studies.md.jinja).

A run that would gain from more rounds shows what its budget gave, and nothing of the method. So what a method can reach
is judged on rows that were doubled: the same settings, twice the rounds, the schedule of the step size fitted to them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyfed.lab.experiment.grid import AGAINST, Searched, Study, StudyClaim, matches
from keyfed.lab.experiment.store import OPEN, Row, place

FIXED = ("explore",)  # runners that have nothing random in them
CHANCE = 0.05  # that a mean is off by more than its margin, both sides together
ENDLESS = 1e5  # degrees of freedom from which Student's distribution is taken for the normal one
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)


@dataclass(frozen=True, slots=True)
class Spread:
    """A pooled standard deviation of logarithms over seeds; None where there are no two to pool."""

    sd: float | None
    freedom: float

    def margin(self, count: int, chance: float = CHANCE) -> float | None:
        """t(ν) · s / √n, how far the mean of n seeds may be off by chance."""
        return None if self.sd is None else quantile(self.freedom, chance) * self.sd / math.sqrt(count)


NOTHING = Spread(0.0, ENDLESS)  # of what has nothing random in it


def pooled(groups: Iterable[Sequence[float]]) -> Spread:
    """Pool the standard deviation within groups; one of a single value says nothing.

    s² = Σ_g Σ_i (x_gi − mean_g)² / ν, with ν = Σ_g (n_g − 1).

    Example:
      >>> pooled([[0.0, 1.0], [5.0]])
      Spread(sd=0.7071067811865476, freedom=1)
    """
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(None, 0)


def added(parts: Iterable[tuple[float, float]]) -> Spread:
    """The spread of a sum of independent parts, each a variance with its degrees of freedom.

    ν is Welch and Satterthwaite's, (Σ v)² / Σ v²/ν: a part that hardly varies takes none of the others' away.
    """
    known = [(variance, freedom) for variance, freedom in parts if variance]
    total = sum(variance for variance, _ in known)
    return Spread(math.sqrt(total), total**2 / sum(v**2 / freedom for v, freedom in known)) if total else NOTHING


def of_two(a: Spread, b: Spread) -> Spread:
    """The spread of a difference of two that share nothing: √(s_a² + s_b²); two of one pool have that pool's ν."""
    if a.sd is None or b.sd is None:
        return Spread(None, 0)
    return Spread(math.sqrt(2) * a.sd, a.freedom) if a is b else added([(s.sd**2, s.freedom) for s in (a, b) if s.sd])


def _inside(angle: float, freedom: float) -> float:
    """P(|T| ≤ √ν tan angle) of Student's T: ∫cos^(ν−1) from 0 to the angle, of that to π/2, by Gauss and Legendre."""
    whole = math.exp(math.lgamma(freedom / 2) + math.lgamma(0.5) - math.lgamma((freedom + 1) / 2)) / 2
    return float(angle / 2 * WEIGHTS @ np.cos(angle / 2 * (NODES + 1)) ** (freedom - 1)) / whole


@functools.cache  # the same few for every row of a table
def quantile(freedom: float, chance: float = CHANCE) -> float:
    """Student's quantile that |T| is beyond with this chance, for any degrees of freedom from 1 on.

    Example:
      >>> [round(quantile(freedom), 3) for freedom in (1, 2, 38)]
      [12.706, 4.303, 2.024]
    """
    freedom = min(freedom, ENDLESS)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 1 - chance else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def beyond_chance(distance: float, error: Spread) -> float:
    """The chance that a change is as far off as this, either way; 0 where there is nothing random."""
    if not error.sd:
        return 0.0 if distance else 1.0
    freedom = min(error.freedom, ENDLESS)
    return 1 - _inside(math.atan(abs(distance) / error.sd / math.sqrt(freedom)), freedom)


def pooled_spread(rows: Iterable[Row], measure: str) -> Spread:
    """Pool the spread over seeds of a table's rows; those that failed or missed a target say nothing."""
    return pooled([*row.logs(measure).values()] for row in rows if not row.failure and not row.at_least(measure)[1])


def pooled_pairs(found: Mapping[frozenset[Any], Sequence[float]]) -> Spread:
    """Pool differences over seeds, by the two rows that each is of.

    Two differences that share a row have a correlation of ½, and their variances one of ¼. So k pairs of n seeds with
    one row in common have 4k/(k + 3) · (n − 1) degrees of freedom, fewer than k · (n − 1).
    """
    spread = pooled(found.values())
    known = [(rows, len(values) - 1) for rows, values in found.items() if len(values) > 1]
    if spread.sd is None or not known:
        return spread
    shared = sum(min(a, b) * (1 if p == q else 0.25 * bool(p & q)) for p, a in known for q, b in known)
    return replace(spread, freedom=sum(freedom for _, freedom in known) ** 2 / shared)


def spreads_of(rows: Sequence[Row], measure: str) -> dict[str, Spread]:
    """The spread over seeds of everything that runs the same way."""
    runners = dict.fromkeys(row.runner for row in rows)
    return {
        runner: NOTHING if runner in FIXED else pooled_spread([row for row in rows if row.runner == runner], measure)
        for runner in runners
    }


def differences(row: Row, other: Row, measure: str) -> list[float]:
    """ln(row / other) on every seed that both have."""
    ours, its = row.logs(measure), other.logs(measure)
    return [value - its[seed] for seed, value in ours.items() if seed in its]


INTERPOLATED = 1 / 5  # of the error of rounding that is left where a target's round is interpolated, see `step_error`


def step_error(row: Row, measure: str) -> float:
    """Standard deviation, relative to the mean, that seeds have at least where they may agree by rounding alone.

    A number rounded to multiples of w has w/√12; w is `train.eval_every`. Rounds to a target are rounded where they are
    those of a validation, and keep a fifth of that error, 0.058 w, where they were interpolated between two. Nine runs,
    validated at two sets of rounds, w = 2, differ at three targets by 0.10 rounds (root mean square): 0.037 w for each,
    which 27 comparisons know to a fifth or so. More seeds on the same grid of rounds do not make it smaller.
    """
    mean = row.at_least(measure)[0]
    if not mean or not measure.startswith("rounds_to") or row.runner in FIXED:
        return 0.0
    values = row.values(measure)
    left = 1.0 if any(value.is_integer() for value in values) else INTERPOLATED * math.sqrt(len(values))
    return row.eval_every / math.sqrt(12) / mean * left


def shuffle_error(row: Row, measure: str) -> tuple[float, float]:
    """The variance of a mean over shuffles, relative to its square, and its ν; 0 where nothing is shuffled."""
    one, mean = row.evaluation(), row.mean(measure)
    if one is None or measure != "perplexity" or not mean:
        return 0.0, 1
    sd, freedom = one
    return (sd / mean) ** 2 / (freedom + len(row.records)), freedom


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
        if exact is not None:
            return exact
        fitting = [other for other in self.rows if self.claim.than.items() <= other.labels.items() <= wanted.items()]
        counts = [other for other in fitting if other.runner not in WITH_ROUNDS]
        return max(counts, key=lambda other: len(other.labels), default=None)

    def pairs(self) -> Iterable[tuple[Row, Row | None]]:
        """The rows that a claim is about, each with what it is compared with where that is another row."""
        for row in self.rows:
            if matches(row.labels, self.claim.of) and not row.absent and not self.is_doubled(row):
                other = self.against(row) if self.claim.kind in AGAINST else None
                if self.claim.kind not in AGAINST or (other is not None and not other.absent):
                    yield row, other

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """One place where a claim was checked.

    Attributes:
      row: what is compared, `against` with another row; None where it is with the printed value or a bound. Both have
        only the seeds that are compared.
      ours: the row's mean; `other` what it is compared with. `beyond` says which of the two are lower bounds only.
      change: ours against the other, as a logarithm; `margin` how far it may be off by chance; None: not known.
      edge: where the verdict turns: of the change itself for an order, a cost or a bound, else of its absolute value.
      spread: of one seed's change; `error` is the standard error of the mean over seeds and shuffles, as a spread.
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
    edge: float = 0.0
    spread: Spread = Spread(None, 0)
    error: Spread = Spread(None, 0)
    printed: tuple[float, float] | None = None
    beyond: tuple[bool, bool] = (False, False)
    waits: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between which logarithms the change lies, at the level at which Holm's rule decided it."""
        known = self.change is not None and self.margin is not None
        return (self.change - self.margin, self.change + self.margin) if known else None  # type: ignore[operator]

    def distance(self, kind: str) -> float:
        """How far the change is from where the verdict turns; below 0 the claim would hold."""
        assert self.change is not None
        if kind in CLOSE:
            return abs(self.change) - self.edge
        return (self.edge - self.change) if kind == "higher" else (self.change - self.edge)

    def decided(self, kind: str, chance: float) -> Comparison:
        """The comparison with its margin at a level, and its verdict. A lower bound is never judged to be lower."""
        margin = self.error.margin(1, chance)
        distance = self.distance(kind)
        reach = math.log(FAR) if margin is None else margin
        word = HOLDS if distance < -reach else FAILS if distance > reach else UNSURE
        if margin == 0 and distance == 0 and kind in CLOSE:
            word = HOLDS
        if kind == "printed" and margin is None and word == HOLDS:
            word = UNSURE  # one seed cannot show that it holds, however wide the tolerance
        return replace(self, margin=margin, verdict=UNSURE if self._only_bounds(word, kind) else word)

    def _only_bounds(self, word: str, kind: str) -> bool:
        """Whether a verdict would take a lower bound for the figure itself."""
        assert self.change is not None
        if kind in CLOSE and word == HOLDS:
            return any(self.beyond)
        lower = self.change < (0 if kind in CLOSE else self.edge)
        return word != UNSURE and self.beyond[0 if lower else 1]


CLOSE = ("printed", "close")  # kinds of claims that have a tolerance


def holm(found: Sequence[Comparison], kind: str) -> list[Comparison]:
    """Decide the comparisons of one claim, each at the level that Holm's rule gives it; open and waiting ones stay."""
    out = list(found)
    known = [n for n, c in enumerate(found) if c.verdict == UNSURE and c.change is not None]
    sure = [n for n in known if found[n].error.sd is not None]

    def chance(n: int) -> float:
        valid = not any(found[n].beyond) or found[n].decided(kind, 1.0).verdict != UNSURE
        return beyond_chance(found[n].distance(kind), found[n].error) if valid else 1.0

    left = len(sure)
    for n in sorted(sure, key=chance):
        out[n] = found[n].decided(kind, CHANCE / left)
        left -= out[n].verdict != UNSURE and left > 1
    for n in known:
        if n not in sure:
            out[n] = found[n].decided(kind, CHANCE)
    return out


def compare_rows(study: Study, rows: Sequence[Row], claim: StudyClaim) -> list[Comparison]:
    """Check a claim wherever it can be."""
    measure, known = claim.measure, Rows(study, claim, [row.known(claim.measure) for row in rows])
    singles = spreads_of(rows, measure)
    found = []
    pairs = pair_spreads(study, rows, measure) if claim.kind in AGAINST else {}
    for row, other in known.pairs():
        if other is not None:
            spread = pairs.get(frozenset((row.runner, other.runner))) or of_two(
                singles[row.runner], singles[other.runner]
            )
            found.append(_ordered(study, row, other, claim, spread))
        elif claim.kind == "below":
            assert claim.bound is not None, "a claim of kind below has a bound"
            own = pooled_spread([row], measure)
            found.append(_alone(row, claim.bound, 0.0, claim, singles[row.runner] if own.sd is None else own))
        elif (printed := study.printed(row.labels, measure)) is not None:
            found.append(_alone(row, printed, math.log1p(claim.within), claim, singles[row.runner]))
    if claim.about == "reach":
        found = [_waiting(c, known, singles) for c in found]
    return holm(found, claim.kind)


def pair_spreads(study: Study, rows: Sequence[Row], measure: str) -> dict[frozenset[str], Spread]:
    """The spread over seeds of all differences that the claims of a study's table are about, by how both sides run."""
    groups: dict[frozenset[str], dict[frozenset[Any], list[float]]] = {}
    for claim in study.claims:
        if claim.measure == measure and claim.kind in AGAINST:
            for row, other in Rows(study, claim, [row.known(measure) for row in rows]).pairs():
                sides = [row] if other is None else [row, other]
                if other is not None and not any(side.failure or side.at_least(measure)[1] for side in sides):
                    key = frozenset((tuple(row.labels.items()), tuple(other.labels.items())))
                    runners = frozenset((row.runner, other.runner))
                    groups.setdefault(runners, {})[key] = differences(row, other, measure)
    found = {runners: pooled_pairs(group) for runners, group in groups.items()}
    return {runners: spread for runners, spread in found.items() if spread.sd is not None}


def _waiting(c: Comparison, rows: Rows, spreads: Mapping[str, Spread]) -> Comparison:
    """The comparison, without a verdict where one of its sides may still learn."""
    why = waits(rows, [side for side in (c.row, c.against) if side is not None], spreads)
    return replace(c, verdict=LEARNING, waits=why) if why and c.verdict != OPEN else c


def settled(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those that decide a verdict: of a claim about what methods can reach, rows that have stopped learning."""
    if not any(c.verdict == LEARNING for c in comparisons):
        return list(comparisons)
    return [c for c in comparisons if c.verdict not in (LEARNING, OPEN)] or list(comparisons)


def is_absent(rows: Sequence[Row], claim: StudyClaim) -> bool:
    """Tell whether all rows that a claim is about are absent."""
    about = [row for row in rows if matches(row.labels, claim.of)]
    return bool(about) and all(row.absent for row in about)


def _where(row: Row, claim: StudyClaim) -> str:
    """A row in words, without what the claim itself says."""
    several = [axis for axis, label in claim.of.items() if not isinstance(label, str)]
    said = [axis for axis in (*claim.of, *claim.than) if axis not in several]
    return place(row, said) or place(row)


def _ordered(study: Study, row: Row, other: Row, claim: StudyClaim, spread: Spread) -> Comparison:
    """Two rows on the seeds that both have; where they have none or one, only what is far apart is decided."""
    measure, where = claim.measure, _where(row, claim)
    mine, its = study.printed(row.labels, measure), study.printed(other.labels, measure)
    printed = (mine, its) if mine is not None and its else None
    both = row.seeds & other.seeds
    if both:
        row, other = row.of_seeds(both), other.of_seeds(both)
    (a, above), (b, other_above) = row.at_least(measure), other.at_least(measure)
    if not row.records or not other.records:
        return Comparison(where, row, other, a, b, OPEN, printed=printed)
    beyond = (above, other_above)
    if a is None or b is None or a <= 0 or b <= 0 or all(beyond):
        return Comparison(where, row, other, a, b, UNSURE, printed=printed, beyond=beyond)
    found = differences(row, other, measure)
    if both and not found:  # each seed has a 0 on one side
        return Comparison(where, row, other, a, b, UNSURE, printed=printed, beyond=beyond)
    change = statistics.fmean(found) if both else math.log(a / b)
    steps = math.hypot(*(step_error(side, measure) for side in (row, other)))
    if len(found) < 2 and spread.sd:  # one seed has no spread of its own, and takes none of other rows
        spread = Spread(None, 0)
    if spread.sd is not None:
        spread = replace(spread, sd=max(spread.sd, steps))
    shared = bool(row.shuffle_keys) and row.shuffle_keys == other.shuffle_keys  # what a shuffle adds cancels then
    shuffles = [] if shared else [shuffle_error(side, measure) for side in (row, other)]
    edge = math.log1p(claim.within if claim.kind == "close" else claim.bound or 0.0 if claim.kind == "costs" else 0.0)
    spread = spread if both else Spread(None, 0)
    error = _error(spread, len(found) or len(row.records), shuffles)
    return Comparison(where, row, other, a, b, UNSURE, change, None, edge, spread, error, printed, beyond)


def _error(spread: Spread, count: int, shuffles: Sequence[tuple[float, float]]) -> Spread:
    """The standard error of a mean over seeds, of which each is a mean over shuffles."""
    return spread if spread.sd is None else added([(spread.sd**2 / count, spread.freedom), *shuffles])


def _alone(row: Row, other: float, edge: float, claim: StudyClaim, spread: Spread) -> Comparison:
    """A row against a printed figure or a bound."""
    ours, where = row.mean(claim.measure), _where(row, claim)
    if not row.records:
        return Comparison(where, row, None, None, other, OPEN)
    if ours is None or ours <= 0:
        return Comparison(where, row, None, ours, other, FAILS)
    spread = spread if spread.sd is None else replace(spread, sd=max(spread.sd, step_error(row, claim.measure)))
    one, shuffles = row.evaluation() if (claim.kind, claim.measure) == ("printed", "perplexity") else None, []
    if one is not None:  # what is printed is one evaluation, ours the mean over many
        edge += EVALUATIONS * one[0] / ours
        shuffles = [shuffle_error(row, claim.measure)]
    error = _error(spread, len(row.records), shuffles)
    return Comparison(
        where, row, None, ours, other, UNSURE, math.log(ours / other), edge=edge, spread=spread, error=error
    )


def judge(comparisons: Sequence[Comparison], scale: str, some: bool = False) -> str:
    """Sum up in words; counts come first where comparisons differ, and nothing holds for good while some are open.

    Only what was decided is counted: what is open may come out either way.

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


def budget_of(comparisons: Sequence[Comparison], claim: StudyClaim) -> str:
    """After how many rounds a claim was judged, in words; empty where nothing was trained or it is not at a budget."""
    sides = [side for c in comparisons for side in (c.row, c.against) if side is not None and c.verdict != OPEN]
    found = sorted({int(r["rounds"]) for side in sides for r in side.records if r.get("rounds")})
    if claim.about != "budget" or not found:
        return ""
    ends = " to ".join(dict.fromkeys(f"{number:,}" for number in (found[0], found[-1])))
    return f"{'within' if claim.measure.startswith('rounds_to') else 'at'} {ends} round{'' if ends == '1' else 's'}"


def verdict_on(study: Study, rows: Sequence[Row], claim: StudyClaim, scale: str) -> str:
    """The verdict on a claim, in words."""
    return ABSENT if is_absent(rows, claim) else judge(compare_rows(study, rows, claim), scale, claim.some)


def said_verdict(study: Study, rows: Sequence[Row], claim: StudyClaim, scale: str) -> str:
    """The verdict on a claim and the budget at which it was decided."""
    comparisons = compare_rows(study, rows, claim)
    verdict = ABSENT if is_absent(rows, claim) else judge(comparisons, scale, claim.some)
    budget = "" if verdict in (OPEN, NOT_JUDGED, ABSENT) else budget_of(comparisons, claim)
    return f"{verdict}, {budget}" if budget else verdict
