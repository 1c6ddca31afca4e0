"""What a private run is about: its terms, calibrated from its budget, and the words in which it announces them.

Counts (of unclipped clients, of losses) are released with the sum, and the round's z pays for both. The user sets how
much noise they have, or it follows from cohort and z when z is known (`private.dp.plan.usual_count_noise`). It is
calibrated once and written into the first line of the ledger; a run that goes on keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from keyfed.config.load import Config
from keyfed.errors import PrivacyError
from keyfed.federated.types import Method
from keyfed.private.dp.accounting import calibrate, calibrate_tree
from keyfed.private.dp.adaptive import WITHIN
from keyfed.private.dp.ledger import Terms, begun_terms, verdict_of
from keyfed.private.dp.noise import update_noise
from keyfed.private.dp.opening import MOST_MEMBERS, Opening, chance
from keyfed.private.dp.plan import MOST_LOSS_NOISE, delta_for, noise_to_clip, usual_count_noise
from keyfed.private.dp.private_method import Bounded, bound, refuse_absence, refuse_participation

Randomness = Literal["system", "derived"]


def terms_of(
    config: Config,
    bounded: Bounded,
    clients: int,
    called: float,
    randomness: Randomness = "derived",
    hinge: float | None = None,
) -> Terms:
    """Return what a run's ε is about; the noise is calibrated here where a budget is given.

    Args:
      called: clients of a round, in expectation.
      randomness: where noise and cohorts come from; derived from the seed in every simulation.
      hinge: chance of a round in which sampling hides nobody, see `accounting.Release`; None for that of a simulation.

    Raises:
      PrivacyError: what cannot be had, a count noise that leaves nothing for the update among it.
    """
    p = config.privacy
    everybody = bounded.method.cohort == "all" or called == clients
    refuse_participation(config.participation, p.mechanism, everybody)
    refuse_absence(bounded, called, clients)
    population = p.population or clients
    groups = max(1, int(clients // called))
    cohort: float
    if p.mechanism == "tree":
        called = clients / groups  # those whose turn it is, see `members_in_turn`
    if p.population is None:
        cohort = called
    elif everybody:
        cohort = population
    else:
        cohort = p.cohort or max(1, population // 200)
    delta = delta_for(population, p.delta)
    gap = None
    if p.mechanism == "tree":
        most = groups if p.population is None else max(1, int(population // cohort))
        gap = p.separation or most
        if gap > most:
            raise PrivacyError(
                f"privacy.separation is {gap} rounds, but with {cohort:,.6g} of {population:,} clients in every round "
                f"a client has to come again after {most}; set it lower, or the cohort"
            )
    z = p.noise
    hinge = hinge_in(config, population, cohort) if hinge is None else hinge
    if z is None:
        assert p.epsilon is not None
        rounds = max(1, config.train.rounds)
        z = (
            calibrate_tree(p.epsilon, delta, gap, rounds)
            if gap is not None
            else calibrate(p.epsilon, delta, min(1.0, cohort / population), rounds, hinge=hinge)
        )
    return Terms(
        delta=delta, population=population, clients=clients, cohort=cohort, called=called, z=z, mechanism=p.mechanism,
        sensitivity=bounded.sensitivity, randomness=randomness, budget=p.epsilon, gap=gap,
        secure=config.secure.on, count_noise=settle_count_noise(config, bounded, cohort, z),
    )  # fmt: skip


def hinge_in(config: Config, population: int, cohort: float) -> float:
    """Return the chance that one client decides whether a secure sum of the fleet opens (`private.dp.opening`).

    0 where nothing is masked or nobody is drawn. An imagined fleet has the run's floor, and two thirds must stay;
    cohorts beyond what one sum holds are taken to be summed in parts.
    """
    if not config.secure.on or config.privacy.mechanism == "tree" or cohort >= population or cohort > MOST_MEMBERS:
        return 0.0
    return chance(population, cohort / population, opening_of(config))


def opening_of(config: Config) -> Opening:
    real = config.privacy.population is None  # a number that must stay is one of the clients there are
    return Opening(config.secure.floor, config.secure.threshold if real else None)


def announcement(t: Terms, counted: float | None, parameters: int) -> list[str]:
    """Say what is promised under these terms, and how long the noise of a mean is beside the clip.

    Args:
      counted: noise of counts, in clients; None where nothing is counted.
    """
    z = update_noise(t.z, counted)
    parts = "" if counted is None else f" (of the sum {z:.4g}, of counts {counted:.4g} clients)"
    how = f"rate {t.rate:.4g}" if t.gap is None else f"tree aggregation, {t.gap} rounds apart"
    budget = "no budget" if t.budget is None else f"budget epsilon {t.budget:g}"
    lines = [
        f"privacy: {verdict_of(t)}, {budget}, delta {t.delta:.2g}, noise {t.z:.4g}{parts}, {how}, population "
        f"{t.population:,}, cohort {t.cohort:,.6g}; noise of a mean {noise_to_clip(z, parameters, t.cohort):.3g} clips"
    ]
    if t.simulated:
        lines.append(
            f"a SIMULATED guarantee for population {t.population:,}, cohort {t.cohort:,.6g}; not a guarantee of this "
            "run"
        )
    return lines


def make_private(config: Config, method: Method, clients: int, called: float) -> tuple[Bounded, Terms] | None:
    """Return a method's private form and the terms of its ledger; None where nobody asked for one.

    Raises:
      PrivacyError: what cannot be had; nothing is written before.
    """
    if not config.privacy.on:
        return None
    bounded = bound(method, config.privacy)
    return bounded, terms_of(config, bounded, clients, called)


def settle_count_noise(config: Config, bounded: Bounded, cohort: float, z: float) -> float | None:
    """Return the noise of the half counts of a new run, in clients of the fleet; None where nothing is counted.

    Raises:
      PrivacyError: the user's leaves nothing for the update.
    """
    if not bounded.told:
        return None
    found = config.privacy.count_noise
    if found is None:
        found = usual_count_noise(cohort, z, losses=bounded.told != (WITHIN,))
    update_noise(z, found)
    return found


def as_begun(config: Config, terms: Terms, out: Path) -> Terms:
    """Return the terms with the count noise of the ledger in `out`, if there is one: a run keeps what it began with.

    One that the user sets is compared with the ledger's like every other term.
    """
    begun = begun_terms(out)
    if begun is None or (begun.count_noise is not None and config.privacy.count_noise is not None):
        return terms
    return replace(terms, count_noise=begun.count_noise)


def count_noise_of(config: Config, bounded: Bounded, terms: Terms) -> float | None:
    """Return the noise of the half counts of a run with these terms, in clients of the fleet; None for no counts.

    Ledgers that do not say it are of runs for which it was a twentieth of the cohort, however few that were.
    """
    if not bounded.told or terms.count_noise is not None:
        return terms.count_noise
    if config.privacy.count_noise is not None:
        return config.privacy.count_noise
    usual = terms.cohort / 20
    return usual if bounded.told == (WITHIN,) else min(usual, MOST_LOSS_NOISE * terms.z)
