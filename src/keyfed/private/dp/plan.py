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
from keyfed.private.dp.accounting import calibrate, check_delta

LEAST_COUNT_NOISE, MOST_LOSS_NOISE = 1.0, 5.0  # in units of z


class NoiseChoice(NamedTuple):
    """One row of a plan: a budget, a cohort, and what they cost.

    Attributes:
      count_noise: noise of the count that a moving clip follows, in clients, where none is given.
      ratio: z·√d/m. With such a count the noise of the sum is longer, by 15.5 % at most (`usual_count_noise`).
    """

    epsilon: float
    cohort: int
    rate: float
    z: float
    count_noise: float
    ratio: float


def delta_for(population: int, given: float | None = None) -> float:
    """Return δ as given, or population^-1.1; refuse one that the population does not allow.

    Example:
      >>> f"{delta_for(1_000_000):.1e}"
      '2.5e-07'
    """
    if given is None and population < 2:
        raise PrivacyError(
            f"the population is {population:,}: nobody hides alone, and no delta is below 1/{population:,} by default; "
            "take at least 2 clients (--population), or set privacy.delta"
        )
    delta = population**-1.1 if given is None else given
    check_delta(delta, population)
    return delta


def noise_to_clip(z: float, parameters: int, cohort: float) -> float:
    """Return z·√d/m.

    Example:
      >>> round(noise_to_clip(1.0, 3_550_000, 10)), round(noise_to_clip(1.0, 3_550_000, 1000), 1)
      (188, 1.9)
    """
    return z * math.sqrt(parameters) / cohort


def usual_count_noise(cohort: float, z: float, *, losses: bool = False) -> float:
    r"""Return the noise σ_b of counts, in clients, where none is given.

    .. math::  σ_b = \max(m/20, z), \qquad \text{where losses are told } \min(\max(m/20, z), 5z)

    A twentieth of the cohort m does for the clip (Andrew et al. 2021). Of few clients it would take most of what z
    pays for, or more than all of it; with σ_b ≥ z a count takes a quarter at most, and the noise of the sum grows by
    1/√(1 − ¼), 15.5 %, at most (`noise.update_noise`). Losses are to be told apart to a fraction of a nat: 5z takes a
    hundredth of what the round may cost.

    Args:
      losses: clients tell their losses, too (`private.dp.private_method`).

    Example:
      >>> usual_count_noise(100, 1.0), usual_count_noise(4, 1.5), usual_count_noise(5000, 1.0, losses=True)
      (5.0, 1.5, 5.0)
    """
    usual = max(cohort / 20, LEAST_COUNT_NOISE * z)
    return min(usual, MOST_LOSS_NOISE * z) if losses else usual


def plan(
    budgets: Iterable[float], cohorts: Sequence[int], *, population: int, delta: float, rounds: int, parameters: int
) -> list[NoiseChoice]:
    """Return the noise that each budget needs with each cohort. By RDP: a few per cent more noise than PLD needs."""
    check_delta(delta, population)
    for cohort in cohorts:
        if not 1 <= cohort <= population:
            raise PrivacyError(f"a cohort of {cohort:,} of {population:,} clients; expected 1 to {population:,}")
    found = []
    for eps in budgets:
        for cohort in cohorts:
            z = calibrate(eps, delta, cohort / population, rounds, "rdp")
            ratio = noise_to_clip(z, parameters, cohort)
            found.append(NoiseChoice(eps, cohort, cohort / population, z, usual_count_noise(cohort, z), ratio))
    return found


def cohort_needed(
    eps: float, ratio: float, *, population: int, delta: float, rounds: int, parameters: int
) -> int | None:
    """Return the smallest cohort, to 2 %, whose noise is at most `ratio` clips; None if the population is too small.

    Solves m = z(m)·√d/ratio by going back and forth: z grows with the cohort, but slower than the cohort does.
    """

    def wanted(cohort: int) -> int:
        z = calibrate(eps, delta, cohort / population, rounds, "rdp")
        return math.ceil(noise_to_clip(z, parameters, ratio))

    cohort = min(population, max(1, math.ceil(math.sqrt(parameters) / ratio)))
    for _ in range(40):
        found = wanted(cohort)
        if found > population:
            return population if wanted(population) <= population else None
        if abs(found - cohort) <= 0.01 * cohort + 1:
            return max(found, cohort)
        cohort = found
    return None


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
