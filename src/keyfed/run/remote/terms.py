"""What a private run with real clients settles on before its first round: whom it is about, and what it promises."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from keyfed.config.load import Config
from keyfed.errors import ConfigError, PrivacyError
from keyfed.federated.cohort import cohort_size
from keyfed.federated.types import ClientId
from keyfed.files import write_atomically
from keyfed.private.dp.accounting import Opening, chance
from keyfed.private.dp.ledger import LEDGER, Terms
from keyfed.private.dp.private_method import Bounded
from keyfed.run.privacy import as_begun, terms_of
from keyfed.wire.device import run_bounded
from keyfed.wire.roster import Roster

ENROLLED = "enrolled.json"
MOST_AT_HINGE = 0.05  # chance of a round that opens by one client, above which a run is refused


class SettledTerms(NamedTuple):
    """What a private run has settled on before its first round."""

    bounded: Bounded
    terms: Terms
    names: tuple[ClientId, ...]

    def promised(self, config: Config) -> Config:
        """Return the configuration as clients hear it, with the numbers that were calibrated."""
        t, p = self.terms, config.privacy
        counted = p.count_noise if t.count_noise is None else t.count_noise  # as it was said when the run began
        return replace(config, privacy=replace(p, noise=t.z, delta=t.delta, separation=t.gap, count_noise=counted))


def refuse_imagined(config: Config) -> None:
    """Refuse what would make a private federation say more than it does."""
    if not config.privacy.on:
        return
    if config.privacy.population is not None:
        raise ConfigError(
            f"privacy.population is {config.privacy.population:,}: an imagined fleet, and this federation has real "
            "clients, whose guarantee is counted over those enrolled; leave it (--population) out"
        )
    if config.train.until is not None:
        raise ConfigError(
            "train.until reads clients' scores, and a private federation asks for none; set train.rounds instead"
        )


def settle(config: Config, out: Path, roster: Roster, *, raw_vocabulary: bool = False) -> SettledTerms | None:
    """Return the method's private form, the terms of the ledger and whom they are about; None without privacy.

    Args:
      raw_vocabulary: the vocabulary was made from the clients' text, without noise.
    """
    if not config.privacy.on:
        return None
    path = out / ENROLLED
    if not path.exists() and (out / LEDGER).exists():
        raise PrivacyError(
            f"{path} is gone, and the ledger beside it speaks of the clients listed there; restore it, or start "
            "another run"
        )
    names = json.loads(path.read_text("utf-8")) if path.exists() else list(roster.names())
    bounded, terms = terms_for(config, len(names))
    digest = hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()
    terms = as_begun(config, replace(terms, raw_vocabulary=raw_vocabulary, enrolled=digest), out)
    return SettledTerms(bounded, terms, tuple(names))


def terms_for(config: Config, clients: int) -> tuple[Bounded, Terms]:
    """Return the method's private form and what its ε is about with so many clients enrolled, or refuse."""
    if clients < 2:
        raise PrivacyError(
            f"{clients} clients are enrolled: with fewer than two no delta is below one in the number of clients; "
            "enrol more, or leave --dp out"
        )
    bounded = run_bounded(config)
    if bounded.method.mediator.released is not None:
        raise PrivacyError(
            f"{bounded.method.name} weighs clients by losses that earlier rounds released (the switch, top-K), and "
            "deployed clients are told the clip alone; set method.mediation=false and beta=1"
        )
    called = (
        clients if bounded.method.cohort == "all" else cohort_size(config.participation, config.train.cohort, clients)
    )
    if called > clients:
        raise PrivacyError(
            f"train.cohort is {called:,}, and {clients:,} clients are enrolled; set it to at most {clients:,}"
        )
    hinge = hinge_of(config, clients, called)
    return bounded, terms_of(config, bounded, clients, called, "system", hinge)


def hinge_of(config: Config, clients: int, called: int) -> float:
    """Return the chance that a client decides whether a round's secure sum opens, or refuse one that is large.

    Such a round costs as one without amplification (`private.dp.accounting`).
    """
    if not config.secure.on or config.privacy.mechanism == "tree" or called >= clients:
        return 0.0
    opening = Opening(config.secure.floor, config.secure.threshold)
    if called + 5 * math.sqrt(called) > opening.edges[1]:
        raise PrivacyError(
            f"train.cohort is {called:,}: rounds would call more than {opening.edges[1]:,} clients at times, and no "
            f"secure sum opens for so many; set it to at most {_fits(opening.edges[1]):,}"
        )
    found = chance(clients, called / clients, opening)
    if found > MOST_AT_HINGE:
        better = next(
            (m for m in range(called + 1, clients) if chance(clients, m / clients, opening) <= MOST_AT_HINGE), clients
        )
        raise PrivacyError(
            f"train.cohort is {called:,} of {clients:,}, and sums of fewer than {opening.edges[0]} stay closed: "
            f"with chance {found:.2g} a round opens by a single client, whom sampling then does not hide; set "
            f"train.cohort to {better:,} or more"
        )
    return found


def _fits(most: int) -> int:
    """The largest mean from which five standard deviations do not lead beyond `most`."""
    return math.floor(((math.sqrt(25 + 4 * most) - 5) / 2) ** 2)


def keep_enrolled(out: Path, settled: SettledTerms) -> None:
    """Write down whom the run's guarantee is about; a run that goes on speaks of the same."""
    if not (out / ENROLLED).exists():
        write_atomically(out / ENROLLED, json.dumps(list(settled.names), indent=0).encode())
