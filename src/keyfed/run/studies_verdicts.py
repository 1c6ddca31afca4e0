"""Whether a claim holds: every place where it can be checked, how far chance reaches there, and the sum of it in words.

Values are compared as logarithms, since a difference of perplexities is a matter of ratio. `RULE` says the rule whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keyfed.run.studies_claims import Claim
from keyfed.run.studies_plan import Study, matches
from keyfed.run.studies_table import OPEN, Row, place

HOLDS, FAILS, UNSURE = "holds", "does not hold", "cannot be told at this spread"
NOT_JUDGED, ABSENT = "not judged at smoke scale", "cannot be run here, what it needs is absent"
FAR = 1.5  # a ratio beyond which one seed is enough
FIXED = ("explore",)  # runners that have nothing random in them
MOST_NAMED = 2  # comparisons that a summary names
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip  # 97.5 % quantiles for 1 to 30 degrees of freedom
RULE = (
    "Means over seeds are compared as logarithms. s is the standard deviation over seeds, pooled over all "
    "configurations of a study that have several seeds and run the same way (networks, code-faithful variants and "
    "count models apart; diverged and untrained ones left out), with ν degrees of freedom; what has nothing "
    "random in it has s = 0. m = t(ν) · √(s_a²/n_a + s_b²/n_b), with Student's 97.5 % quantile t, is how far two "
    "means may be apart by chance; where an evaluation depends on a shuffle, its standard error is added (in "
    "squares).",
    "An order that is claimed holds if the means differ that way by more than m, does not hold if they differ the "
    "other way by more than m, and cannot be told otherwise. A target that was not reached counts as more rounds "
    "than were run. That something costs at most so much is told in the same way, from that much on. That two are "
    "close holds if the difference and m together are within the tolerance, and does not if the difference less m "
    "is beyond it.",
    "A printed figure holds if it is within the tolerance and m = t(ν) · s / √n of ours; where an evaluation "
    "depends on a shuffle, what was printed is one evaluation, and its standard deviation is added (in squares). "
    "The tolerance is 5 % unless a claim says otherwise; a ratio of 1.05 one way is 1/1.05 the other, so limits "
    "are not symmetric in per cent.",
    "A bound holds if our mean is below it by more than m = t(ν) · s / √n, with s of that row's own seeds if it "
    "has several, and the pooled s else.",
    "Where no configuration has two seeds and so there is no s, a ratio of more than 1.5 is told and nothing "
    "else. A claim holds if it does in every comparison; where comparisons differ they are counted, and where "
    "they are readings of the same thing one is enough. They are not corrected for their number. Nothing is "
    "judged at smoke scale: it only shows that a study runs.",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """The pooled standard deviation of logarithms over seeds; None where no configuration has two."""

    sd: float | None
    freedom: int

    def margin(self, count: int) -> float | None:
        """t(ν) · s / √n, how far a mean may be off by chance."""
        return joint_margin((self, count), (NOTHING, 1))


NOTHING = Spread(0.0, 0)  # of what has nothing random in it


def joint_margin(a: tuple[Spread, int], b: tuple[Spread, int]) -> float | None:
    """t(ν) · √(s_a²/n_a + s_b²/n_b), the least difference of two means that counts; the fewer degrees of freedom."""
    (one, n), (other, m) = a, b
    if one.sd is None or other.sd is None:
        return None
    freedom = min((spread.freedom for spread in (one, other) if spread.sd), default=0)
    return quantile(freedom) * math.sqrt(one.sd**2 / n + other.sd**2 / m) if freedom else 0.0


def quantile(freedom: int) -> float:
    """Student's 97.5 % quantile."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96


def pooled_spread(rows: Iterable[Row], measure: str) -> Spread:
    """Pool the spread over seeds of all rows that have several; those that learnt nothing say nothing about the others.

    Example:
      >>> from keyfed.run.studies_plan import Cell
      >>> cell = Cell("s", "train", {}, {}, 1, "smoke")
      >>> both = tuple({"measures": {"nats": v}} for v in (1.0, math.e))
      >>> pooled_spread([Row({}, "train", (cell,), both)], "nats")
      Spread(sd=0.7071067811865476, freedom=1)
    """
    squares, freedom = 0.0, 0
    for row in rows:
        values = row.values(measure)
        if len(values) > 1 and min(values) > 0 and not row.failure:
            logs = [math.log(value) for value in values]
            squares += statistics.variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(None, 0)


def spreads_of(rows: Sequence[Row], measure: str) -> dict[str, Spread]:
    """The spread over seeds of everything that runs the same way."""
    runners = dict.fromkeys(row.runner for row in rows)
    return {
        runner: NOTHING if runner in FIXED else pooled_spread([row for row in rows if row.runner == runner], measure)
        for runner in runners
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One place where a claim was checked.

    Attributes:
      row: what is compared, `against` with another row; None where it is with the printed value or a bound.
      ours: the row's mean; `other` what it is compared with. `beyond` says which of the two are lower bounds only.
      change: ln(ours / other); `margin` how far that may be from 0 by chance; None where the spread is not known.
      limits: of the change, as logarithms: between them an order or a bound cannot be told, and a printed or a close
        figure holds; None where there are none.
      printed: the printed values of both, where both are.
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
    printed: tuple[float, float] | None = None
    beyond: tuple[bool, bool] = (False, False)


def compare_rows(study: Study, rows: Sequence[Row], claim: Claim) -> list[Comparison]:
    """Check a claim wherever it can be."""
    by_labels = {tuple(sorted(row.labels.items())): row for row in rows}
    spreads = spreads_of(rows, claim.measure)
    found = []
    for row in rows:
        if not matches(row.labels, claim.of) or row.absent:
            continue
        if claim.kind in ("lower", "higher", "close", "costs"):
            other = by_labels.get(tuple(sorted({**row.labels, **claim.than}.items())))
            if other is not None and not other.absent:
                found.append(_ordered(study, row, other, claim, (spreads[row.runner], spreads[other.runner])))
        elif claim.kind == "below":
            found.append(_below(row, claim, spreads[row.runner]))
        else:
            printed = study.printed(row.labels, claim.measure)
            if printed is not None:
                found.append(_as_printed(row, printed, claim, spreads[row.runner]))
    return found


def is_absent(rows: Sequence[Row], claim: Claim) -> bool:
    """Tell whether all rows that a claim is about are absent."""
    about = [row for row in rows if matches(row.labels, claim.of)]
    return bool(about) and all(row.absent for row in about)


def _where(row: Row, claim: Claim) -> str:
    """A row in words, without what the claim itself says."""
    several = [axis for axis, label in claim.of.items() if not isinstance(label, str)]
    said = [axis for axis in (*claim.of, *claim.than) if axis not in several]
    return place(row, said) or place(row)


def _ordered(study: Study, row: Row, other: Row, claim: Claim, spreads: tuple[Spread, Spread]) -> Comparison:
    (a, above), (b, other_above) = row.at_least(claim.measure), other.at_least(claim.measure)
    mine, its = study.printed(row.labels, claim.measure), study.printed(other.labels, claim.measure)
    printed = (mine, its) if mine is not None and its else None
    where = _where(row, claim)
    if not row.records or not other.records:
        return Comparison(where, row, other, a, b, OPEN, printed=printed)
    margin = joint_margin((spreads[0], len(row.records)), (spreads[1], len(other.records)))
    if a is None or b is None or a <= 0 or b <= 0:
        return Comparison(where, row, other, a, b, UNSURE, margin=margin, printed=printed)
    if margin is not None and claim.measure == "perplexity":
        margin = math.hypot(margin, *(_shuffled(r, mean) for r, mean in ((row, a), (other, b))))
    change, reach = math.log(a / b), math.log(FAR) if margin is None else margin
    verdict, limits = _told(claim, change, reach, (above, other_above))
    known = None if above and other_above else change
    return Comparison(where, row, other, a, b, verdict, known, margin, limits, printed, (above, other_above))


def _told(
    claim: Claim, change: float, reach: float, beyond: tuple[bool, bool]
) -> tuple[str, tuple[float, float] | None]:
    """The verdict on a difference of two rows, and its limits. A lower bound is never told to be lower."""
    if claim.kind == "close":
        tolerance = math.log1p(claim.within)
        sure = max(0.0, tolerance - reach)
        apart = (change < -tolerance - reach and not beyond[0]) or (change > tolerance + reach and not beyond[1])
        word = FAILS if apart else HOLDS if abs(change) <= sure and sure and not any(beyond) else UNSURE
        return word, (-sure, sure) if sure else None
    middle = math.log1p(claim.bound or 0.0) if claim.kind == "costs" else 0.0
    lower, higher = change < middle - reach and not beyond[0], change > middle + reach and not beyond[1]
    wanted, unwanted = (higher, lower) if claim.kind == "higher" else (lower, higher)
    return HOLDS if wanted else FAILS if unwanted else UNSURE, (middle - reach, middle + reach)


def _shuffled(row: Row, mean: float) -> float:
    """How far a mean over shuffles may be off by chance, relative; 0 where nothing is shuffled."""
    one = row.evaluation()
    if one is None:
        return 0.0
    sd, freedom = one
    return quantile(freedom) * sd / mean / math.sqrt(freedom + len(row.records))


def _as_printed(row: Row, printed: float, claim: Claim, spread: Spread) -> Comparison:
    ours, where = row.mean(claim.measure), _where(row, claim)
    if not row.records:
        return Comparison(where, row, None, None, printed, OPEN)
    if ours is None or ours <= 0:
        return Comparison(where, row, None, ours, printed, FAILS)
    change, margin = math.log(ours / printed), spread.margin(len(row.records))
    one = row.evaluation() if claim.measure == "perplexity" else None
    if one is not None:  # what is printed is one evaluation, ours the mean over many
        sd, freedom = one
        margin = math.hypot(margin or 0.0, quantile(freedom) * sd / ours)
    reach = math.log1p(claim.within) + (margin or 0.0)
    told = margin is not None or abs(change) > math.log(FAR)
    verdict = HOLDS if abs(change) <= reach else FAILS if told else UNSURE
    return Comparison(where, row, None, ours, printed, verdict, change, margin, (-reach, reach))


def _below(row: Row, claim: Claim, pooled: Spread) -> Comparison:
    ours, bound, where = row.mean(claim.measure), claim.bound, _where(row, claim)
    assert bound is not None, "a claim of kind below has a bound"
    if not row.records:
        return Comparison(where, row, None, None, bound, OPEN)
    if ours is None or ours <= 0:
        return Comparison(where, row, None, ours, bound, FAILS)
    own = pooled_spread([row], claim.measure)
    change, margin = math.log(ours / bound), (pooled if own.sd is None else own).margin(len(row.records))
    reach = math.log(FAR) if margin is None else margin
    verdict = UNSURE if abs(change) <= reach else HOLDS if change < 0 else FAILS
    return Comparison(where, row, None, ours, bound, verdict, change, margin, (-reach, reach))


def judge(comparisons: Sequence[Comparison], scale: str, some: bool = False) -> str:
    """Sum up in words; counts come first where comparisons differ, and nothing holds for good while some are open.

    Args:
      some: whether one comparison that holds is enough.
    """
    words = [c.verdict for c in comparisons]
    told, waiting = [word for word in words if word != OPEN], words.count(OPEN)
    if not told:
        return OPEN
    if scale == "smoke":
        return NOT_JUDGED
    held, count = told.count(HOLDS), len(words)
    after = f", {waiting} open" if waiting else ""
    if some and (held or waiting):
        return f"holds ({held} of {count}{after})" if held else f"does not hold so far (none of {len(told)}{after})"
    if len(set(told)) == 1:
        if count == 1:
            return told[0]
        if held:
            return f"holds so far ({held} of {count}{after})" if waiting else f"holds (all {count})"
        many = "none" if told[0] == FAILS else len(told)
        return f"{told[0]} ({many} of {count}{after})"
    parts = [f"{held or 'none'} of {count} {'holds' if held < 2 else 'hold'}"]
    for word, one, many in ((FAILS, "does not", "do not"), (UNSURE, "cannot be told", "cannot be told")):
        places = [c.where for c in comparisons if c.verdict == word]
        if 0 < len(places) <= MOST_NAMED and word == FAILS:
            parts.append(f"{' and '.join(places)} {one if len(places) == 1 else many}")
        elif places:
            parts.append(f"{len(places)} {one if len(places) == 1 else many}")
    return "; ".join(parts) + (f"; {waiting} open" if waiting else "")


def verdict_on(study: Study, rows: Sequence[Row], claim: Claim, scale: str) -> str:
    """The verdict on a claim, in words."""
    return ABSENT if is_absent(rows, claim) else judge(compare_rows(study, rows, claim), scale, claim.some)
