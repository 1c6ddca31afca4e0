"""`keyfed vocab`: the clients of a corpus vote, as they would in a federation, and the server writes vocab.json.

With `--dp` the election has a budget, and a ledger next to the file. Noise comes from the operating system. A seeded
vote repeats, and everybody with the seed can subtract its noise: it is SIMULATED. All votes on one corpus are in one
register, wherever their files lie: ε and δ of several votes add.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keyfed.config.load import Config
from keyfed.config.schema import DataConfig
from keyfed.errors import ConfigError, DataError, PrivacyError, RunError
from keyfed.files import append_durably, locked, write_atomically
from keyfed.private.dp.accounting import FINE, Release, calibrate, delta_for, epsilon
from keyfed.private.dp.ledger import Terms, open_ledger, verdict_of
from keyfed.private.dp.noise import derived, system
from keyfed.private.dp.statement import account
from keyfed.run.console import plural
from keyfed.run.encode import kind_of, read_people
from keyfed.text.catalogue import is_path
from keyfed.text.partition import ClientText, statistics
from keyfed.text.vocab import (
    MIN_CLIENTS,
    SPECIALS,
    Ballot,
    Election,
    Vote,
    ballot,
    cutter,
    elect,
    elect_privately,
    read_vocab,
    threshold,
)

SHOWN = 20  # new words that the terminal shows; --json has all


def elect_vocabulary(
    config: Config,
    out: Path,
    *,
    least_uses: int,
    most_words: int | None,
    allow_single: bool = False,
    phrases: Path | None = None,
    beyond: Path | None = None,
    entries: int | None = None,
    seeded: bool = False,
) -> dict[str, Any]:
    """Let the clients of a corpus elect a vocabulary, write it to `out` and return a report.

    Held-out text has no vote. Entries (`data.vocab`) and clients a word needs (`data.min_clients`, else `MIN_CLIENTS`)
    are the configuration's; the other arguments are those of `ballot` and `elect`. With a budget (`privacy.epsilon`)
    the counts are noised, and a word needs as many clients as the noise asks for.

    Args:
      phrases: JSON file for pairs of words and their noisy counts, with a budget: both releases share it.
      beyond: a public vocabulary, as vocab.json or as the folder of a run: clients vote for words that it lacks, and
        `out` is that vocabulary with the new words behind its own. `data.vocab` is not read.
      entries: of `out`, with `beyond`; None takes every new word of enough clients.
      seeded: with a budget, derive the noise from train.seed: the vote repeats, and is SIMULATED.

    Raises:
      ConfigError: A number makes no sense.
      DataError: No word has enough clients.
      RunError: `out` cannot be written, or holds another vocabulary.
    """
    if config.data.vocab_file is not None:
        raise ConfigError(f"data.vocab_file is {config.data.vocab_file}, and a vocabulary is to be made; leave it out")
    if out.is_dir():
        raise RunError(f"{out} is a folder; expected a file for the vocabulary, vocab.json for one")
    kind = kind_of(config)  # an unknown model is said before the corpus is read
    known = None
    if beyond is not None:  # a run's folder has a vocabulary, too
        known = read_vocab(beyond / "vocab.json" if beyond.is_dir() else beyond, kind)
        if entries is not None and entries <= len(known):
            raise ConfigError(
                f"--size {entries:,} leaves no room for new words: {beyond} has {len(known):,} entries already"
            )
    corpus, population = read_people(config)
    lower, size = config.data.lower and kind == "word", config.data.vocab
    if known is not None:
        known = replace(known, tokenised=corpus.tokenised)  # how text is cut is a matter of the text
        lower = known.lower
        size = None if entries is None else entries - len(known) + len(SPECIALS)
    cut: dict[str, Any] = {"lower": lower, "tokenised": corpus.tokenised}
    rules = {"kind": kind, **cut, "least_uses": least_uses, "most_words": most_words}
    old = () if known is None else known.index

    def ballots() -> Iterator[Ballot]:
        for client in population.trained:
            yield ballot(client.train, **rules, known=old)

    min_clients = config.data.min_clients or MIN_CLIENTS
    private: PrivateElection | None = None
    if config.privacy.on:
        if min_clients == 1 and not allow_single:
            min_clients = 2
        releases, earlier = 1 if phrases is None else 2, None if known is None else known.privacy
        clients = len(population.trained)
        private = PrivateElection(config, out, clients, most_words, releases, seeded=seeded, known=earlier)
        found = private.elect(ballots(), "words", size, min_clients)
    else:
        if phrases is not None:
            raise ConfigError("--phrases counts pairs of words under a budget; add --dp epsilon=NUMBER")
        if seeded:
            raise ConfigError("--seeded is for the noise of a vote under a budget; add --dp epsilon=NUMBER")
        found = elect(ballots(), size=size, min_clients=min_clients, allow_single=allow_single)
    if known is None:
        vocab, new = found.vocab(kind, **cut), {}
    else:
        votes = dict(zip(found.words, found.votes, strict=True))
        vocab, new = found.beyond(known), {"beyond": str(beyond), "entries": len(known) + len(votes), "new": votes}
    if private is not None:
        vocab = replace(vocab, privacy=private.vote)
        if phrases is not None:
            private.write_phrases(phrases, population.trained, **cut)
    data = vocab.to_json().encode()
    _write(out, data)
    report = {
        "out": str(out),
        "sha256": hashlib.sha256(data).hexdigest(),
        "data": corpus.name,
        "partition": population.partition,
        "kind": kind,
        "most_words": most_words,
        "kept": len(found.words),
        "least_votes": found.votes[-1],
        **new,
    }
    if private is not None:
        spent = private.account()
        if beyond is not None:  # its ledger does not cover where that came from
            public = f"{beyond} is taken to be public: what went into it is not in this ledger; its ε, if any, adds."
            spent = {**spent, "statement": [*spent["statement"], public]}
        return {**report, "phrases": None if phrases is None else str(phrases), "privacy": spent}
    elected = vocab.index.keys()
    sizes, losing = [], 0
    for words in ballots():  # once more, rather than kept: only a simulation has them all
        sizes.append(len(words))
        losing += not words <= elected
    return {
        **report,
        "min_clients": min_clients,
        "least_uses": least_uses,
        "clients": found.ballots,
        "types": found.types,
        "dropped_too_few": found.too_few,
        "dropped_no_room": found.no_room,
        "full_ballots": sum(n == most_words for n in sizes),
        "clients_losing_words": losing / len(sizes),
        "unknown": statistics(population, vocab)["oov"],
    }


def _write(out: Path, data: bytes) -> None:
    """Write a file that is not there yet: runs may have begun with what is."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists():
            if out.read_bytes() != data:
                raise RunError(f"{out} exists and is another file; choose another --out or remove it")
            return
    except OSError as error:
        raise RunError(f"{out}: {error.strerror or error}; choose another --out") from None
    write_atomically(out, data)


def _new_lines(report: dict[str, Any]) -> list[str]:
    """Show the new words, most clients first."""
    words = list(report.get("new", ()))
    if not words:
        return []
    more = f" and {len(words) - SHOWN:,} more" if len(words) > SHOWN else ""
    return [f"new: {', '.join(words[:SHOWN])}{more}; with those of {report['beyond']} {report['entries']:,} entries"]


def vocabulary_text(report: dict[str, Any]) -> str:
    """Write the report for a person."""
    r, things = report, {"word": "words", "char": "characters"}[report["kind"]]
    if "privacy" in r:
        p = r["privacy"]
        return "\n".join(
            [
                f"{r['data']}: {r['kept']:,} {'new ' if 'new' in r else ''}{things} of at least {p['threshold']:,.3g} "
                f"clients by noisy counts (noise {p['count_noise']:,.3g}){'' if 'new' in r else ', and 4 specials'}",
                *_new_lines(r),
                f"{p['verdict']}: epsilon {p['pld']:.4g} (PLD) and delta {p['delta']:.2g}, threshold included",
                *p["statement"],
                f"written: {r['out']}" + ("" if r["phrases"] is None else f" and {r['phrases']}"),
            ]
        )
    unknown = ", ".join(f"{part} {rate:.2%}" for part, rate in r["unknown"].items() if rate is not None)
    lines = [
        f"{r['data']}: {r['clients']:,} clients ({r['partition']}) reported {r['types']:,} different {things}",
        f"{'beyond the vocabulary' if 'new' in r else 'vocabulary'}: {r['kept']:,} {things}, each of "
        f"{r['least_votes']:,} clients or more{'' if 'new' in r else ', and 4 specials'}; left out: "
        f"{r['dropped_too_few']:,} of fewer than {r['min_clients']} clients, {r['dropped_no_room']:,} for want of room",
        *_new_lines(r),
        f"unknown tokens: {unknown}",
        f"{r['clients_losing_words']:.1%} of the clients reported {things} that are left out",
    ]
    if r["full_ballots"]:
        lines.append(f"{r['full_ballots']:,} clients reported only their {r['most_words']:,} most frequent {things}")
    model = "" if r["kind"] == "word" else " --model char-lstm"
    lines += [f"written: {r['out']}", f"use it:  keyfed train --vocab {r['out']}{model}, with the same data and seed"]
    return "\n".join(lines)


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
        # Two votes at once are both in it.
        with locked(register.with_suffix(".lock"), wait=True):
            if register.exists():
                os.truncate(register, register.read_bytes().rfind(b"\n") + 1)
            append_durably(register, json.dumps(vote._asdict()).encode())
    except OSError as e:
        raise PrivacyError(
            f"{register}: could not be written ({e.strerror or e}), so no vote was held; set KEYFED_VOTES to a folder "
            "that can be written to"
        ) from None


def ngrams(lines: Iterable[str], order: int, *, lower: bool, tokenised: bool, most: int) -> frozenset[str]:
    """Return a client's most frequent runs of `order` words, joined by blanks: its ballot for phrases.

    Example:
      >>> sorted(ngrams(["a b a b", "c d"], 2, lower=True, tokenised=True, most=2))
      ['a b', 'b a']
    """
    cut = cutter("word", tokenised=tokenised, lower=lower)
    uses: Counter[str] = Counter()
    for line in lines:
        words = [word for word in cut(line) if word not in SPECIALS]
        uses.update(" ".join(words[k : k + order]) for k in range(len(words) - order + 1))
    return frozenset(sorted(uses, key=lambda phrase: (-uses[phrase], phrase))[:most])


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
        self._most, self._scale = most_words, clients / population
        self._seed, self._releases = config.train.seed, releases
        if z == 0:
            raise ConfigError("privacy.noise is 0: counts without noise are no vote under a budget; leave --dp out")
        self._seeded, self._register = seeded, register_of(config.data)
        self._min_clients = 0  # that a word needs in any case, by the elections so far
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
        spent = account(self._ledger, fine=True, delta=self.delta, vote=True)
        return {
            **spent, "statement": [*spent["statement"], *self._over_votes()], "threshold": self.least,
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
