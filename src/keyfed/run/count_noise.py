"""The noise of a run's counts: settled once, written into its ledger, and kept when the run goes on.

Counts (of unclipped clients, of losses) are released beside the sum, and the round's z pays for both. How much noise
they have is given by the user, or follows from cohort and z when z is known (`private.dp.plan.usual_count_noise`). From
then on the first line of the ledger says it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keyfed.config.load import Config
from keyfed.private.dp.adaptive import WITHIN
from keyfed.private.dp.ledger import Terms, begun_terms
from keyfed.private.dp.noise import update_noise
from keyfed.private.dp.plan import MOST_LOSS_NOISE, usual_count_noise
from keyfed.private.dp.private_method import Bounded


def settle_count_noise(config: Config, bounded: Bounded, cohort: float, z: float) -> float | None:
    """Return the noise of the half counts of a new run, in clients of the fleet; None where nothing is counted.

    Raises:
      PrivacyError: the one that is given leaves nothing for the update.
    """
    if not bounded.told:
        return None
    given = config.privacy.count_noise
    found = usual_count_noise(cohort, z, losses=bounded.told != (WITHIN,)) if given is None else given
    update_noise(z, found)
    return found


def as_begun(config: Config, terms: Terms, out: Path) -> Terms:
    """Return the terms with the count noise of the ledger in `out`, if there is one: a run keeps what it began with.

    One that the user gives is compared with the ledger's like every other term.
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
    given, usual = config.privacy.count_noise, terms.cohort / 20
    if given is not None:
        return given
    return usual if bounded.told == (WITHIN,) else min(usual, MOST_LOSS_NOISE * terms.z)
