"""`keyfed vocab --dp`: the election of a vocabulary under a budget, with a ledger beside the file.

Noise comes from the operating system. A seeded vote repeats, and whoever has the seed can take its noise off: it is
SIMULATED. All votes on one corpus are in one register, wherever their files lie: ε and δ of several votes add.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from keyfed.config.load import Config
from keyfed.config.schema import DataConfig
from keyfed.errors import ConfigError, DataError, PrivacyError, RunError
from keyfed.files import write_atomically
from keyfed.private.dp.accounting import FINE, Release, calibrate, epsilon
from keyfed.private.dp.ledger import Terms, open_ledger, verdict_of
from keyfed.private.dp.noise import derived, system
from keyfed.private.dp.plan import delta_for
from keyfed.private.dp.statement import account
from keyfed.run.console import plural
from keyfed.text.catalogue import is_path
from keyfed.text.election import Election, elect_privately, ngrams, threshold
from keyfed.text.partition import ClientText
from keyfed.text.vocab import Vote


def register_of(data: DataConfig) -> Path:
    """Return the register of all votes on a corpus: KEYFED_VOTES, else ~/.keyfed/votes, and a file for the corpus.

    A corpus is known by its name, or by where its text lies. Which clients of it vote does not matter: a vote of others
    is counted too, which is never too little. Text that was moved, and votes on other machines, are not known.
    """
    root = Path(os.environ.get("KEYFED_VOTES") or Path.home() / ".keyfed" / "votes")
    name = str(Path(data.name).expanduser().resolve()) if is_path(data.name) else data.name
    return root / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.jsonl"


def read_votes(register: Path) -> list[Vote]:
    """Return the votes in a register; a torn last line is a vote that released nothing.

    Raises:
      PrivacyError: the register cannot be read, or a line of it is damaged.
    """
    try:
        lines = register.read_bytes().split(b"\n")[:-1] if register.exists() else []
        return [Vote.read(json.loads(line)) for line in lines]
    except (OSError, ValueError, RecursionError, DataError) as e:
        raise PrivacyError(
            f"{register}: the register of votes cannot be read ({type(e).__name__}), so what was spent is not known; "
            "restore it, or remove it and count the earlier votes yourself"
        ) from None


def book_vote(register: Path, vote: Vote) -> None:
    """Append a vote, durably; only then may it be held."""
    try:
        register.parent.mkdir(parents=True, exist_ok=True)
        with register.open("a+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX)  # two votes at once are both in it
            f.seek(0)
            whole = f.read()
            f.truncate(whole.rfind(b"\n") + 1)
            f.seek(0, os.SEEK_END)
            f.write(json.dumps(vote._asdict()).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise PrivacyError(
            f"{register}: could not be written ({e.strerror or e}), so no vote was held; set KEYFED_VOTES to a folder "
            "that can be written to"
        ) from None


class PrivateElection:
    """Noisy counts of words (and of pairs) under one budget; every count is booked before its noise is drawn.

    Half of δ is for the noise and in the ledger, half for the threshold that keeps single clients' words out; of
    several releases each threshold has its part.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        clients: int,
        most_words: int | None,
        releases: int,
        *,
        seeded: bool = False,
        known: Vote | None = None,
    ) -> None:
        """Make ready for `releases` counts.

        Args:
          seeded: derive the noise from train.seed: the vote repeats, and is SIMULATED.
          known: what the vocabulary cost that new words are put behind, if a vote made it.
        """
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
        if z == 0:
            raise ConfigError("privacy.noise is 0: counts without noise are no vote under a budget; leave --dp out")
        self._seeded, self._register = seeded, register_of(config.data)
        self._min_clients = 0  # that a word needs in any case, by what was asked for so far
        self._sigma = z * math.sqrt(most_words)
        terms = Terms(
            delta=half, population=population, clients=clients, cohort=population, called=clients, z=z,
            mechanism="gaussian", randomness="derived" if seeded else "system", budget=p.epsilon,
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

        before = read_votes(self._register)
        eps = epsilon([Release(z, 1.0, releases)], half, population=population, grid=FINE)
        sums = [
            math.fsum(column) for column in zip((eps, self.delta), *((v.epsilon, v.delta) for v in before), strict=True)
        ]
        votes = 1 + len(before)
        if known is not None and known.id not in {v.id for v in before}:  # held elsewhere
            sums, votes = [sums[0] + known.all_epsilon, sums[1] + known.all_delta], votes + known.votes
        self.vote = Vote(os.urandom(12).hex(), verdict_of(terms, self.delta), eps, self.delta, votes, *sums)
        self._simulated = sum(v.verdict == "SIMULATED" for v in before)

    @property
    def least(self) -> float:
        """The noisy count that a word needs."""
        return max(threshold(self._sigma, self.delta / self._releases, self._most) * self._scale, self._min_clients)

    def elect(self, ballots: Iterable[Collection[str]], what: str, size: int | None, min_clients: int) -> Election:
        """Book the release, then count, add noise and elect."""
        self._min_clients = max(self._min_clients, min_clients)
        if not self._ledger.entries:
            book_vote(self._register, self.vote)
        entry = self._ledger.book(Release(self._ledger.terms.z, 1.0), what, 0)
        noise = derived(self._seed, 0, entry.attempt) if self._seeded else system()

        def draw(count: int) -> list[float]:
            drawn: list[float] = noise(what, torch.Size((count,))).tolist()
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
        told = account(self._ledger, fine=True, delta=self.delta, vote=True)
        return {
            **told, "statement": [*told["statement"], *self._over_votes()], "threshold": self.least,
            "count_noise": self._sigma * self._scale, "ledger": str(self._home), "vote": self.vote._asdict(),
        }  # fmt: skip

    def _over_votes(self) -> list[str]:
        """Say what all votes on this corpus cost together, where there was one before."""
        v = self.vote
        if v.votes == 1:
            return []
        worse = f" {self._simulated} of the earlier ones are SIMULATED and cost more." if self._simulated else ""
        return [
            f"With {plural(v.votes - 1, 'earlier vote')} of these clients: (ε, δ) = ({v.all_epsilon:.4g}, "
            f"{v.all_delta:.2g}) at most, added up.{worse}"
        ]
