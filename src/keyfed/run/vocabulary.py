"""`keyfed vocab`: the clients of a corpus vote, as they would in a federation, and the server writes vocab.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from keyfed.config.load import Config
from keyfed.errors import ConfigError, RunError
from keyfed.files import write_atomically
from keyfed.model.presets import preset
from keyfed.run.encode import read_people, vocab_rules
from keyfed.run.private_vocabulary import PrivateElection
from keyfed.text.election import MIN_CLIENTS, Ballot, Election, ballot, elect
from keyfed.text.partition import statistics
from keyfed.text.vocab import SPECIALS, Vocab, read_vocab

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
    characters = preset(config.model.name).characters  # an unknown model is said before the corpus is read
    known = None if beyond is None else _read_known(beyond, "char" if characters else "word", entries)
    corpus, population = read_people(config)
    rules = vocab_rules(config, natural=population.natural, clients=len(population.trained))
    kind, lower, size = rules["kind"], rules["lower"], config.data.vocab
    if known is not None:
        known = replace(known, tokenised=corpus.tokenised)  # how text is cut is a matter of the text
        lower = known.lower
        size = None if entries is None else entries - len(known) + len(SPECIALS)
    old = () if known is None else known.index

    def ballots() -> Iterator[Ballot]:
        for client in population.trained:
            yield ballot(
                client.train, kind=kind, lower=lower, tokenised=corpus.tokenised, least_uses=least_uses,
                most_words=most_words, known=old,
            )  # fmt: skip

    min_clients = config.data.min_clients or MIN_CLIENTS
    private: PrivateElection | None = None
    if config.privacy.on:
        if min_clients == 1 and not allow_single:
            min_clients = 2
        private = PrivateElection(
            config, out, len(population.trained), most_words, 1 if phrases is None else 2, seeded=seeded,
            known=None if known is None else known.privacy,
        )  # fmt: skip
        found = private.elect(ballots(), "words", size, min_clients)
    else:
        if phrases is not None:
            raise ConfigError("--phrases counts pairs of words under a budget; add --dp epsilon=NUMBER")
        if seeded:
            raise ConfigError("--seeded is for the noise of a vote under a budget; add --dp epsilon=NUMBER")
        found = elect(ballots(), size=size, min_clients=min_clients, allow_single=allow_single)
    if known is None:
        vocab, new = found.vocab(kind, lower=lower, tokenised=corpus.tokenised), {}
    else:
        vocab, new = found.beyond(known), _about_new(found, known, beyond)
    if private is not None:
        vocab = replace(vocab, privacy=private.vote)
        if phrases is not None:
            private.write_phrases(phrases, population.trained, lower=lower, tokenised=corpus.tokenised)
        data = vocab.to_json().encode()
        _write(out, data)
        return {
            "out": str(out),
            "sha256": hashlib.sha256(data).hexdigest(),
            "data": corpus.name,
            "partition": population.partition,
            "kind": kind,
            "most_words": most_words,
            "kept": len(found.words),
            "least_votes": found.votes[-1],
            **new,
            "phrases": None if phrases is None else str(phrases),
            "privacy": _with_start(private.account(), beyond),
        }
    elected = vocab.index.keys()
    sizes, losing = [], 0
    for said in ballots():  # once more, rather than kept: only a simulation has them all
        sizes.append(len(said))
        losing += not said <= elected
    data = vocab.to_json().encode()
    _write(out, data)
    return {
        "out": str(out),
        "sha256": hashlib.sha256(data).hexdigest(),
        "data": corpus.name,
        "partition": population.partition,
        "kind": kind,
        "min_clients": min_clients,
        "least_uses": least_uses,
        "most_words": most_words,
        "clients": found.ballots,
        "types": found.types,
        "kept": len(found.words),
        "dropped_too_few": found.too_few,
        "dropped_no_room": found.no_room,
        "least_votes": found.votes[-1],
        **new,
        "full_ballots": sum(n == most_words for n in sizes),
        "clients_losing_words": losing / len(sizes),
        "unknown": statistics(population, vocab)["oov"],
    }


def _read_known(beyond: Path, kind: Literal["word", "char"], entries: int | None) -> Vocab:
    """Read the vocabulary to go beyond; a run's folder has one."""
    known = read_vocab(beyond / "vocab.json" if beyond.is_dir() else beyond, kind)
    if entries is not None and entries <= len(known):
        raise ConfigError(
            f"--size {entries:,} leaves no room for new words: {beyond} has {len(known):,} entries already"
        )
    return known


def _with_start(account: dict[str, Any], beyond: Path | None) -> dict[str, Any]:
    """Say what the ledger of a vote beyond a vocabulary does not cover: where that came from."""
    if beyond is None:
        return account
    line = f"{beyond} is taken to be public: what went into it is not in this ledger; its ε, if any, adds."
    return {**account, "statement": [*account["statement"], line]}


def _about_new(found: Election, known: Vocab, beyond: Path | None) -> dict[str, Any]:
    votes = dict(zip(found.words, found.votes, strict=True))
    return {"beyond": str(beyond), "entries": len(known) + len(votes), "new": votes}


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
    if "new" not in report:
        return []
    words = list(report["new"])
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
