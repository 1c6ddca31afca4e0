"""What a study found: one row a configuration, mean and spread over seeds, and whether each claim holds.

The rule. Values are compared as logarithms, since a difference of perplexities is a matter of ratio. s is the standard
deviation over seeds, pooled over all configurations of a study that have several seeds and the same runner, with
ν = Σ(n − 1) degrees of freedom. Two means differ if |ln a − ln b| > t(ν) · s · √(1/n_a + 1/n_b), t being Student's
97.5 % quantile. A claimed order holds if they differ as claimed, does not hold if they differ the other way, and cannot
be told otherwise. `RULE` says it whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.run.markup import NONE, finite, show
from keyfed.run.studies_plan import SCALES, Cell, Claim, Labels, Study, cells_of, matches

HOLDS, FAILS, UNSURE, OPEN = "holds", "does not hold", "cannot be told at this spread", "open"
NOT_JUDGED = "not judged at smoke scale"
ENOUGH = 0.25  # share of a scale's cells that makes a page of them
FAR = 1.5  # a ratio beyond which one seed is enough to say that a figure is not the printed one
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip  # 97.5 % quantiles for 1 to 30 degrees of freedom
RULE = (
    "How it is told: means over seeds are compared as logarithms. s is the standard deviation over seeds, pooled over "
    "all configurations here that have several seeds and run the same way (networks, code-faithful variants and count "
    "models apart; diverged ones left out), with ν degrees of freedom. Two means differ if |ln a − ln b| > t(ν) · "
    "√(s_a²/n_a + s_b²/n_b), with Student's 97.5 % quantile t; where an evaluation depends on a shuffle, its standard "
    "error is added (in squares). An order that is claimed holds if they differ that way, does not hold if they differ "
    "the other way, and cannot be told otherwise; where there is one seed only and so no s, a ratio of more than 1.5 "
    "is told and nothing else. A printed figure holds if it cannot be told from ours: if it lies within the tolerance, "
    "t(ν) · s / √n added, and where an evaluation depends on a shuffle the standard deviation of one evaluation (in "
    "squares); without s, only a figure that is off by more than a factor of 1.5 does not hold. A bound holds if our "
    "mean is below it by more than t(ν) · s / √n. A claim holds if it does in every comparison, and does not hold if "
    "it fails in one; comparisons are not corrected for their number."
)


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration of a study at a scale: its cells, and the results of those that are finished."""

    labels: Labels
    runner: str
    cells: tuple[Cell, ...]
    records: tuple[Mapping[str, Any], ...]

    @property
    def absent(self) -> str:
        """Why it is not run here; empty where it is."""
        return self.cells[0].absent

    def values(self, measure: str) -> list[float]:
        """The finite values of a measure, one a seed."""
        found = (finite(record["measures"].get(measure)) for record in self.records)
        return [value for value in found if value is not None]

    def mean(self, measure: str) -> float | None:
        """Mean over the finished seeds; None if there is none, or one of them has no finite value."""
        values = self.values(measure)
        return statistics.fmean(values) if values and len(values) == len(self.records) else None

    @property
    def diverged(self) -> bool:
        """Whether it ended worse than guessing all words alike."""
        return any(
            (finite(r["measures"].get("perplexity")) or 0.0) > r.get("vocabulary", math.inf) for r in self.records
        )

    @property
    def chosen(self) -> str:
        """The rounds whose models were chosen on validation: `8`, or `8–12`; empty where there is none."""
        found = sorted(int(r["best_round"]) for r in self.records if r.get("best_round"))
        return "" if not found else "–".join(map(str, dict.fromkeys((found[0], found[-1]))))

    def evaluation(self) -> tuple[float, int] | None:
        """Standard deviation of one evaluation and its degrees of freedom, where it depends on a shuffle."""
        shuffles = [record["shuffles"] for record in self.records if record.get("shuffles")]
        freedom = sum(int(s["count"]) - 1 for s in shuffles if s["sd"] is not None)
        if not freedom:
            return None
        squares = sum((int(s["count"]) - 1) * float(s["sd"]) ** 2 for s in shuffles if s["sd"] is not None)
        return math.sqrt(squares / freedom), freedom


def rows_of(study: Study, scale: str, results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Group a study's cells by configuration, in the order of the grid; seeds beyond the scale's count too."""
    planned = cells_of(study, scale)
    more = sorted({int(r["seed"]) for r in results.values()} - {cell.seed for cell in planned})
    extra = cells_of(study, scale, more) if more else []
    grouped: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in planned:
        grouped.setdefault((cell.runner, *cell.labels.items()), []).append(cell)
    for cell in extra:
        if cell.id in results:
            grouped[cell.runner, *cell.labels.items()].append(cell)
    return [
        Row(cells[0].labels, cells[0].runner, tuple(cells), tuple(results[c.id] for c in cells if c.id in results))
        for cells in grouped.values()
    ]


def main_scale(study: Study, results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The scale that a page is about; None if nothing is finished.

    Of those above `smoke`, at which nothing is judged, the one with the largest share of its cells finished, unless
    that is less than `ENOUGH`; then the one with most finished cells.
    """
    counts = {scale: _counted(cells_of(study, scale), results) for scale in study.scales}
    found = {scale: (done, left) for scale, (done, left) in counts.items() if done}
    shares = {s: done / (done + left) for s, (done, left) in found.items() if s != "smoke"}
    enough = {s: share for s, share in shares.items() if share >= ENOUGH}
    if enough:
        return max(enough, key=lambda s: (enough[s], SCALES.index(s)))
    return max(found, key=lambda s: (found[s][0], -found[s][1], SCALES.index(s))) if found else None


def _counted(cells: Sequence[Cell], results: Mapping[str, Any]) -> tuple[int, int]:
    done = sum(cell.id in results for cell in cells)
    return done, sum(not cell.absent for cell in cells) - done


@dataclass(frozen=True, slots=True)
class Spread:
    """The pooled standard deviation of logarithms over seeds; None where no configuration has two."""

    sd: float | None
    freedom: int

    def margin(self, count: int) -> float | None:
        """t(ν) · s / √n, how far a mean may be off by chance."""
        return None if self.sd is None else quantile(self.freedom) * self.sd / math.sqrt(count)


def joint_margin(a: tuple[Spread, int], b: tuple[Spread, int]) -> float | None:
    """t(ν) · √(s_a²/n_a + s_b²/n_b), the least difference of two means that counts; the fewer degrees of freedom."""
    (one, n), (other, m) = a, b
    if one.sd is None or other.sd is None:
        return None
    return quantile(min(one.freedom, other.freedom)) * math.sqrt(one.sd**2 / n + other.sd**2 / m)


def quantile(freedom: int) -> float:
    """Student's 97.5 % quantile."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96


def pooled_spread(rows: Iterable[Row], measure: str) -> Spread:
    """Pool the spread over seeds of all rows that have several; those that diverged say nothing about the others.

    Example:
      >>> cell = Cell("s", "train", {}, {}, 1, "smoke")
      >>> both = tuple({"measures": {"nats": v}} for v in (1.0, math.e))
      >>> pooled_spread([Row({}, "train", (cell,), both)], "nats")
      Spread(sd=0.7071067811865476, freedom=1)
    """
    squares, freedom = 0.0, 0
    for row in rows:
        values = row.values(measure)
        if len(values) > 1 and min(values) > 0 and not row.diverged:
            logs = [math.log(value) for value in values]
            squares += statistics.variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(None, 0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One place where a claim was checked.

    Attributes:
      ours: the row's mean; `other` what it is compared with: another row's mean, the printed value or the bound.
      change: ln(ours / other); `margin` how far that may be from 0 by chance; None where the spread is not known.
      printed: the printed ours / other − 1, where both are printed.
    """

    where: str
    ours: float | None
    other: float | None
    change: float | None
    margin: float | None
    printed: float | None
    verdict: str


def compare_rows(study: Study, rows: Sequence[Row], claim: Claim) -> list[Comparison]:
    """Check a claim wherever it can be."""
    by_labels = {tuple(sorted(row.labels.items())): row for row in rows}
    spreads = spreads_of(rows, claim.measure)
    found = []
    for row in rows:
        if not matches(row.labels, claim.of) or row.absent:
            continue
        spread = spreads[row.runner]
        if claim.kind in ("lower", "higher"):
            other = by_labels.get(tuple(sorted({**row.labels, **claim.than}.items())))
            if other is not None and not other.absent:
                found.append(_ordered(study, row, other, claim, (spread, spreads[other.runner])))
        elif claim.kind == "below":
            found.append(_below(row, claim, spread))
        else:
            printed = study.printed(row.labels, claim.measure)
            if printed is not None:
                found.append(_as_printed(row, printed, claim, spread))
    return found


def spreads_of(rows: Sequence[Row], measure: str) -> dict[str, Spread]:
    """The spread over seeds of everything that runs the same way."""
    runners = dict.fromkeys(row.runner for row in rows)
    return {runner: pooled_spread([row for row in rows if row.runner == runner], measure) for runner in runners}


def place(row: Row, without: Iterable[str] = ()) -> str:
    """A row in words."""
    left_out = set(without)
    return ", ".join(
        label if not label.replace(".", "").isdigit() else f"{axis} = {label}"
        for axis, label in row.labels.items()
        if axis not in left_out
    )


def _ordered(study: Study, row: Row, other: Row, claim: Claim, spreads: tuple[Spread, Spread]) -> Comparison:
    a, b = row.mean(claim.measure), other.mean(claim.measure)
    mine, its = study.printed(row.labels, claim.measure), study.printed(other.labels, claim.measure)
    printed = mine / its - 1 if mine is not None and its else None
    where = place(row, claim.than) or place(row)
    if not row.records or not other.records:
        return Comparison(where, a, b, None, None, printed, OPEN)
    margin = joint_margin((spreads[0], len(row.records)), (spreads[1], len(other.records)))
    if a is None or b is None or a <= 0 or b <= 0:
        return Comparison(where, a, b, None, margin, printed, UNSURE)
    if margin is not None and claim.measure == "perplexity":
        margin = math.hypot(margin, *(_shuffled(r, mean) for r, mean in ((row, a), (other, b))))
    change = math.log(a / b)
    verdict = UNSURE
    if abs(change) > (math.log(FAR) if margin is None else margin):
        verdict = HOLDS if (change < 0) == (claim.kind == "lower") else FAILS
    return Comparison(where, a, b, change, margin, printed, verdict)


def _shuffled(row: Row, mean: float) -> float:
    """How far a mean over shuffles may be off by chance, relative; 0 where nothing is shuffled."""
    one = row.evaluation()
    if one is None:
        return 0.0
    sd, freedom = one
    return quantile(freedom) * sd / mean / math.sqrt(freedom + len(row.records))


def _as_printed(row: Row, printed: float, claim: Claim, spread: Spread) -> Comparison:
    ours = row.mean(claim.measure)
    if not row.records:
        return Comparison(place(row), None, printed, None, None, None, OPEN)
    if ours is None or ours <= 0:
        return Comparison(place(row), ours, printed, None, None, None, FAILS)
    change, margin = math.log(ours / printed), spread.margin(len(row.records))
    one = row.evaluation() if claim.measure == "perplexity" else None
    if one is not None:  # what is printed is one evaluation, ours the mean over many
        sd, freedom = one
        margin = math.hypot(margin or 0.0, quantile(freedom) * sd / ours)
    tolerance = math.log(1 + claim.within)
    if abs(change) <= tolerance + (margin or 0.0):
        verdict = HOLDS
    else:
        verdict = FAILS if margin is not None or abs(change) > math.log(FAR) else UNSURE
    return Comparison(place(row), ours, printed, change, margin, None, verdict)


def _below(row: Row, claim: Claim, spread: Spread) -> Comparison:
    ours, bound = row.mean(claim.measure), claim.bound
    assert bound is not None, "a claim of kind below has a bound"
    if not row.records:
        return Comparison(place(row), None, bound, None, None, None, OPEN)
    if ours is None or ours <= 0:
        return Comparison(place(row), ours, bound, None, None, None, FAILS)
    change, margin = math.log(ours / bound), spread.margin(len(row.records))
    verdict = UNSURE if abs(change) <= (margin or 0.0) else HOLDS if change < 0 else FAILS
    return Comparison(place(row), ours, bound, change, margin, None, verdict)


def judge(comparisons: Sequence[Comparison], scale: str) -> str:
    """Sum up: holds if it does everywhere, does not hold if it fails somewhere; a smoke scale proves nothing."""
    words = [c.verdict for c in comparisons if c.verdict != OPEN]
    if not words:
        return OPEN
    if scale == "smoke":
        return NOT_JUDGED
    if FAILS in words:
        return FAILS
    return HOLDS if all(word == HOLDS for word in words) else UNSURE


def tally(comparisons: Sequence[Comparison]) -> str:
    """Count in words: `2 hold, 1 does not, 1 cannot be told, 3 open`."""
    words = [c.verdict for c in comparisons]
    names = {
        HOLDS: ("holds", "hold"),
        FAILS: ("does not", "do not"),
        UNSURE: ("cannot be told",) * 2,
        OPEN: ("open",) * 2,
    }
    counts = [(words.count(word), one, many) for word, (one, many) in names.items()]
    return ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in counts if n)


def write_value(value: float | None, measure: str) -> str:
    """Write a measure: perplexities as everywhere, shares as percentages, nats with three decimals, rounds whole."""
    if value is None:
        return NONE
    if measure.startswith(("top", "accuracy", "first_accuracy", "oov")) or measure.endswith("_accuracy"):
        return f"{100 * value:.2f} %"
    if measure in ("nats", "train_nats") or measure.endswith("_entropy"):
        return f"{value:.3f}"
    if measure.startswith("rounds_to"):
        return f"{value:.1f}".removesuffix(".0")
    return show(value)


def write_row(row: Row, measure: str) -> str:
    """Write mean ± standard deviation over seeds (number of seeds)."""
    if row.absent:
        return "absent"
    if not row.records:
        return OPEN
    if not any(measure in record["measures"] for record in row.records):
        return NONE
    mean, values = row.mean(measure), row.values(measure)
    one = row.evaluation() if measure == "perplexity" and mean is not None else None
    after = "" if one is None else f"; one evaluation ± {one[0]:.1f}"
    after += "; diverged" if measure == "perplexity" and row.diverged else ""
    if mean is None:
        missing = len(row.records) - len(values)
        if measure.startswith("rounds_to"):
            return "not reached" if not values else f"not reached by {missing} of {len(row.records)} seeds"
        return "diverged" if not values else f"diverged with {missing} of {len(row.records)} seeds"
    if len(values) == 1:
        return write_value(mean, measure) + after
    scale = 100 if write_value(mean, measure).endswith("%") else 1
    digits = {"nats": 3, "train_nats": 3}.get(measure, 1 if mean >= 100 else 2)
    return f"{write_value(mean, measure).removesuffix(' %')} ± {scale * statistics.stdev(values):.{digits}f}" + (
        " %" if scale == 100 else after
    )
