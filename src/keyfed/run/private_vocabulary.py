"""`keyfed vocab --dp`: the election of a vocabulary under a budget, with a ledger beside the file."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from keyfed.config import Config
from keyfed.errors import ConfigError, PrivacyError, RunError
from keyfed.files import write_atomically
from keyfed.private.accounting import Release, calibrate
from keyfed.private.budget import Terms, open_ledger
from keyfed.private.noise import derived
from keyfed.private.plan import delta_for
from keyfed.private.statement import account
from keyfed.run.console import plural
from keyfed.text.ballots import Election
from keyfed.text.clients import ClientText
from keyfed.text.private_ballots import elect_privately, ngrams, threshold


class PrivateElection:
    """Noisy counts of words (and of pairs) under one budget; every count is booked before its noise is drawn.

    Half of δ is for the noise and in the ledger, half for the threshold that keeps single clients' words out; of
    several releases each threshold has its part.
    """

    def __init__(self, config: Config, out: Path, clients: int, most_words: int | None, releases: int) -> None:
        p = config.privacy
        if most_words is None:
            raise ConfigError("with --dp a client's words must be bounded; set --most-words")
        if p.mechanism != "gaussian":
            raise ConfigError("privacy.mechanism=tree is for rounds of training; a vote has one")
        population = p.population or clients
        self.delta = delta_for(population, p.delta)
        half = self.delta / 2
        z = p.noise if p.noise is not None else calibrate(float(p.epsilon or 0), half, 1.0, releases)
        self._most, self._scale, self._seed, self._releases = (
            most_words,
            clients / population,
            config.train.seed,
            releases,
        )
        self._min_clients = 0  # that a word needs in any case, by what was asked for so far
        self._sigma = z * math.sqrt(most_words)
        terms = Terms(
            delta=half, population=population, clients=clients, cohort=population, called=clients, z=z,
            mechanism="gaussian", randomness="derived", budget=p.epsilon,
            sensitivity=f"Sensitivity: a client votes for at most {most_words:,} words, so all counts together move by "
            f"at most √{most_words:,}; a word needs as many clients as the threshold says.",
        )  # fmt: skip
        self._home = out.parent / f"{out.stem}.privacy"
        if out.exists():
            raise RunError(f"{out} exists; under a budget a vote is not repeated. Choose another --out")
        self._home.mkdir(parents=True, exist_ok=True)
        self._ledger = open_ledger(self._home, terms)
        if self._ledger.entries:  # its file was removed, or never written; the threshold's part of δ is for one vote
            raise PrivacyError(
                f"{self._home} has {plural(len(self._ledger.entries), 'release')} already; under a budget a vote is "
                "not repeated. Choose another --out: its epsilon adds to what was spent"
            )

    @property
    def least(self) -> float:
        """The noisy count that a word needs."""
        return max(threshold(self._sigma, self.delta / self._releases, self._most) * self._scale, self._min_clients)

    def elect(self, ballots: Iterable[Collection[str]], what: str, size: int | None, min_clients: int) -> Election:
        """Book the release, then count, add noise and elect."""
        self._min_clients = max(self._min_clients, min_clients)
        row = Release(self._ledger.terms.z, 1.0)
        entry = self._ledger.book(row, what, 0)

        def draw(count: int) -> list[float]:
            drawn: list[float] = derived(self._seed, 0, entry.attempt)(what, torch.Size((count,))).tolist()
            return drawn

        return elect_privately(
            ballots, size=size, most_words=self._most, sigma=self._sigma, delta=self.delta / self._releases, draw=draw,
            scale=self._scale, min_clients=min_clients,
        )  # fmt: skip

    def write_phrases(self, path: Path, clients: Sequence[ClientText], *, lower: bool, tokenised: bool) -> None:
        """Count pairs of words by clients, as words are; write those above the threshold with their noisy counts."""
        said = (ngrams(c.train, 2, lower=lower, tokenised=tokenised, most=self._most) for c in clients)
        found = self.elect(said, "pairs", None, 2)
        counts = dict(zip(found.words, found.votes, strict=True))
        write_atomically(path, json.dumps(counts, ensure_ascii=False, indent=0).encode())

    def account(self) -> dict[str, Any]:
        """What the vote has spent."""
        told = account(self._ledger, fine=True, delta=self.delta)
        return {
            **told, "threshold": self.least, "count_noise": self._sigma * self._scale,
            "ledger": str(self._home),
        }  # fmt: skip
