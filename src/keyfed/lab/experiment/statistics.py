"""How far chance reaches: the spread over seeds of what runs the same way, Student's quantile, the margin of a mean."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keyfed.lab.experiment.store import Row

FIXED = ("explore",)  # runners that have nothing random in them
CHANCE = 0.05  # that a mean is off by more than its margin, both sides together
NORMAL = 1.959964  # the quantile without end of degrees of freedom
ENDLESS = 1e5  # degrees of freedom from which it is that one


@dataclass(frozen=True, slots=True)
class Spread:
    """The pooled standard deviation of logarithms over seeds; None where no configuration has two."""

    sd: float | None
    freedom: int

    def margin(self, count: int) -> float | None:
        """t(ν) · s / √n, how far a mean may be off by chance."""
        return joint_margin((self, count), (NOTHING, 1))

    def at_least(self, sd: float) -> Spread:
        """The same with a standard deviation of at least so much, where it has one."""
        return self if self.sd is None else replace(self, sd=max(self.sd, sd))


NOTHING = Spread(0.0, 0)  # of what has nothing random in it


def joint_margin(a: tuple[Spread, int], b: tuple[Spread, int], one_pool: bool = False) -> float | None:
    """t(ν) · √(s_a²/n_a + s_b²/n_b), the least difference of two means that counts.

    ν is Welch and Satterthwaite's, (v_a + v_b)² / (v_a²/ν_a + v_b²/ν_b) with v = s²/n: a side that hardly varies takes
    none of the other's degrees of freedom away.

    Args:
      one_pool: whether both spreads are of the same pool, whose degrees of freedom these are then.
    """
    (one, n), (other, m) = a, b
    if one.sd is None or other.sd is None:
        return None
    v, w = one.sd**2 / n, other.sd**2 / m
    if v + w == 0:
        return 0.0
    if one_pool:
        return quantile(one.freedom) * math.sqrt(v + w)
    shares = sum((part / (v + w)) ** 2 / spread.freedom for part, spread in ((v, one), (w, other)) if part)
    return quantile(1 / shares) * math.sqrt(v + w)


@functools.cache  # the same few for every row of a table
def quantile(freedom: float) -> float:
    """Student's 97.5 % quantile for any degrees of freedom above 0, also such that are not whole.

    t is where I_x(ν/2, 1/2) = 5 % at x = ν/(ν + t²), with the regularised incomplete beta function I: halved down to.

    Example:
      >>> [round(quantile(freedom), 3) for freedom in (1, 2, 38)]
      [12.706, 4.303, 2.024]
    """
    if freedom > ENDLESS:
        return NORMAL
    low, high = 0.0, 340.0  # of ln t; exp(2 · 340) is a number still
    for _ in range(60):
        middle = (low + high) / 2
        beyond = _incomplete_beta(freedom / (freedom + math.exp(2 * middle)), freedom / 2, 0.5)
        low, high = (middle, high) if beyond > CHANCE else (low, middle)
    return math.exp((low + high) / 2)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction, evaluated by Lentz's method from the side where it converges quickly."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            fraction *= c * d
        if abs(fraction - before) < 1e-12 * abs(fraction):
            break
    return front * fraction


def pooled(groups: Iterable[Sequence[float]]) -> Spread:
    """Pool the standard deviation of logarithms within groups; one of a single value, or not above 0, says nothing.

    s² = Σ_g Σ_i (ln x_gi − mean_g)² / ν, with ν = Σ_g (n_g − 1).

    Example:
      >>> pooled([[1.0, math.e], [5.0]])
      Spread(sd=0.7071067811865476, freedom=1)
    """
    squares, freedom = 0.0, 0
    for values in groups:
        if len(values) > 1 and min(values) > 0:
            logs = [math.log(value) for value in values]
            squares += statistics.variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(None, 0)


def pooled_spread(rows: Iterable[Row], measure: str) -> Spread:
    """Pool the spread over seeds of a table's rows; those that learnt nothing say nothing about the others."""
    return pooled(row.values(measure) for row in rows if not row.failure)


def spreads_of(rows: Sequence[Row], measure: str) -> dict[str, Spread]:
    """The spread over seeds of everything that runs the same way."""
    runners = dict.fromkeys(row.runner for row in rows)
    return {
        runner: NOTHING if runner in FIXED else pooled_spread([row for row in rows if row.runner == runner], measure)
        for runner in runners
    }


def stepped(spread: Spread, row: Row, measure: str, mean: float) -> Spread:
    """The spread where seeds may agree by rounding alone: rounds to a target are told at validations only.

    A number rounded to multiples of w has a standard deviation of w/√12 at least; w is `train.eval_every`.
    """
    if not measure.startswith("rounds_to") or row.runner in FIXED:
        return spread
    return spread.at_least(row.eval_every / math.sqrt(12) / mean)


def shuffled(row: Row, mean: float) -> float:
    """t times the standard error of a mean over shuffles, relative to it; 0 where nothing is shuffled."""
    one = row.evaluation()
    if one is None:
        return 0.0
    sd, freedom = one
    return quantile(freedom) * sd / mean / math.sqrt(freedom + len(row.records))


def same_shuffles(row: Row, other: Row) -> bool:
    """Tell whether two rows were scored on the same shuffles: they hang on the test's sentences and the seed alone.

    What a shuffle adds to one it adds to the other, and cancels in their ratio.
    """
    return bool(row.shuffle_keys) and row.shuffle_keys == other.shuffle_keys
