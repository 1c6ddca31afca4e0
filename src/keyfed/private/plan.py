r"""How many clients a guarantee needs: the noise of one averaged release, beside the clip.

The mean of m clipped uploads carries Gaussian noise of norm about :math:`z S \sqrt{d} / m` over d parameters, and one
client moves it by at most S/m. The ratio :math:`z\sqrt{d}/m` of that noise to the clip S says whether anything can be
learnt: above 1 the noise is longer than the longest mean update; McMahan et al. 2018 trained at about 0.23.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keyfed.errors import PrivacyError
from keyfed.private.accounting import calibrate, check_delta


class Choice(NamedTuple):
    """One row of a plan: a budget, a cohort, and what they cost."""

    epsilon: float
    cohort: int
    rate: float
    z: float
    ratio: float


def noise_to_clip(z: float, parameters: int, cohort: float) -> float:
    """Return z·√d/m.

    Example:
      >>> round(noise_to_clip(1.0, 3_550_000, 10)), round(noise_to_clip(1.0, 3_550_000, 1000), 1)
      (188, 1.9)
    """
    return z * math.sqrt(parameters) / cohort


def plan(
    budgets: Iterable[float], cohorts: Sequence[int], *, population: int, delta: float, rounds: int, parameters: int
) -> list[Choice]:
    """Return the noise that each budget needs with each cohort. By RDP: a few per cent more noise than PLD needs."""
    check_delta(delta, population)
    for cohort in cohorts:
        if not 1 <= cohort <= population:
            raise PrivacyError(f"a cohort of {cohort:,} of {population:,} clients; expected 1 to {population:,}")
    found = []
    for eps in budgets:
        for cohort in cohorts:
            z = calibrate(eps, delta, cohort / population, rounds, "rdp")
            found.append(Choice(eps, cohort, cohort / population, z, noise_to_clip(z, parameters, cohort)))
    return found


def cohort_needed(
    eps: float, ratio: float, *, population: int, delta: float, rounds: int, parameters: int
) -> int | None:
    """Return the smallest cohort, to 2 %, whose noise is at most `ratio` clips; None if the whole population is not."""

    def enough(cohort: int) -> bool:
        z = calibrate(eps, delta, cohort / population, rounds, "rdp")
        return noise_to_clip(z, parameters, cohort) <= ratio

    low, high = 0, population
    if not enough(high):
        return None
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def measured_costs(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what privacy cost in the runs given: only what was measured there, never an estimate."""
    rows = []
    for name, result in results.items():
        private = result.get("privacy") or {}
        twin = private.get("twin")
        if not twin:
            continue
        rows.append(
            {
                "run": name,
                "method": result.get("method"),
                "verdict": private.get("verdict"),
                "epsilon": private.get("pld"),
                "ratio": private.get("noise_to_clip"),
                "perplexity": (result.get("test") or {}).get("perplexity"),
                "noiseless": (twin.get("test") or {}).get("perplexity"),
            }
        )
    return rows
