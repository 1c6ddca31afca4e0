"""Who holds which text: the partition of a corpus over clients.

    natural      one client per author; some authors are held out and never trained on
    iid          lines shuffled by the seed, dealt into shards of equal line count
    contiguous   equal contiguous pieces of the text
    quantity     contiguous pieces of very unequal size (10, 15, 5, 20, 25, 10, 5, 15, 5, 10)/120
    dirichlet    every client has its own mixture of topics (or authors)

Lines are the smallest unit: they are moved, never cut, changed or repeated, and no character is ever
shuffled. Held-out text is the published validation and test file where a corpus has one. Otherwise the last
tenth of each author's text is test and the tenth before it validation, by order, so that training text
always precedes the text it is judged on.

A run may train on a part of the clients (`in_part`), so that another can train on the rest; both are judged on the same
held-out text, that of all clients.

The rules themselves are in `keyfed.text.dealing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError
from keyfed.text.dealing import PARTITIONS, QUANTITIES, Written, deal
from keyfed.text.ragged import Numbers, Ragged, bounds_of
from keyfed.text.vocab import UNK, Vocab

if TYPE_CHECKING:
    from keyfed.text.corpus import Author, Corpus

__all__ = ["PARTITIONS", "QUANTITIES", "ClientText", "Population", "in_part", "parse_part", "partition", "statistics"]

Lines = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientText:
    """The text of one client, in order of time; parts may be empty."""

    name: str
    train: Lines
    valid: Lines
    test: Lines


@dataclass(frozen=True, slots=True)
class Population:
    """All clients of a corpus and the text they are judged on.

    Attributes:
      clients: Those who may be trained on, and those of other parts, who have no training text here.
      unseen: Authors never trained on (natural partitions); all their text is in `test`.
      valid: Validation lines outside the clients: published, or pooled where clients are artificial.
      test: Test lines outside the clients, likewise.
      natural: Whether a client is a real author.
      partition: One of `PARTITIONS`.
      part: Which part of the clients is trained on, `"1/2"`; None for all.
      others: Names of clients of the other parts.
    """

    clients: tuple[ClientText, ...]
    unseen: tuple[ClientText, ...]
    valid: Lines | None
    test: Lines | None
    natural: bool
    partition: str
    part: str | None = None
    others: frozenset[str] = frozenset()

    @property
    def trained(self) -> tuple[ClientText, ...]:
        """The clients of this part."""
        return tuple(c for c in self.clients if c.name not in self.others) if self.others else self.clients


def parse_part(text: str) -> tuple[int, int]:
    """Read which part of how many, `1/2`.

    Example:
      >>> parse_part("1/2")
      (1, 2)
    """
    number, _, parts = text.partition("/")
    if not (number.strip().isdecimal() and parts.strip().isdecimal() and 1 <= int(number) <= int(parts)):
        raise ConfigError(f'data.clients_part is "{text}"; expected a part of how many, 1/2 or 2/2 say')
    return int(number), int(parts)


def in_part(names: Sequence[str], part: str | None, seed: int) -> NDArray[np.bool_]:
    """Say which clients are in a part: client c is in part 1 + hash(seed, c) mod n, whoever else there is.

    Raises:
      DataError: nobody is.

    Example:
      >>> halves = [in_part(["ann", "bob", "eve"], f"{k}/2", 1) for k in (1, 2)]
      >>> (halves[0] ^ halves[1]).tolist()
      [True, True, True]
    """
    if part is None:
        return np.ones(len(names), np.bool_)
    number, parts = parse_part(part)
    common = hashlib.blake2b(f"{seed}/part of clients/".encode(), digest_size=8)

    def part_of(name: str) -> int:
        mine = common.copy()
        mine.update(name.encode(errors="surrogateescape"))
        return 1 + int.from_bytes(mine.digest(), "big") % parts

    found = np.fromiter((part_of(name) == number for name in names), np.bool_, len(names))
    if not found.any():
        raise DataError(f"part {part} holds none of the {len(names):,} clients; take fewer parts, or another seed")
    return found


def partition(
    corpus: Corpus,
    kind: str,
    *,
    clients: int | None,
    seed: int,
    unseen: float = 0.1,
    alpha: float = 0.5,
    part: str | None = None,
) -> Population:
    """Deal the text of a corpus out to clients.

    Args:
      corpus: The text by author.
      kind: One of `PARTITIONS`.
      clients: Clients wanted; None takes every author (natural), 10 (quantity) or 100.
      seed: Draws held-out authors, shuffles lines, draws mixtures. The same seed gives the same population;
        the held-out authors depend on nothing but corpus, seed and `unseen`.
      unseen: Fraction of the authors (with enough text) held out of a natural partition.
      alpha: Concentration of the Dirichlet distribution: small is skewed, large is nearly IID.
      part: Which part of the clients may be trained on, see `in_part`; None for all.

    Raises:
      ConfigError: The kind does not exist or does not fit the corpus, or a number makes no sense.
      DataError: The corpus has no text, or lists an author twice.
    """
    authors = [author for author in corpus.authors if author.lines]
    lines = list(chain.from_iterable(author.lines for author in authors))
    dealt = deal(written_by(corpus, authors, lines), kind, clients=clients, seed=seed, unseen=unseen, alpha=alpha)

    def texts(numbers: Numbers) -> Lines:
        return tuple(map(lines.__getitem__, numbers.tolist()))

    def people(names: Sequence[str], *parts: Ragged) -> tuple[ClientText, ...]:
        return tuple(ClientText(name, *(texts(part[k]) for part in parts)) for k, name in enumerate(names))

    valid, test = (None, None) if dealt.pooled is None else map(texts, dealt.pooled)
    nothing = Ragged.of([()] * len(dealt.unseen_names))
    everyone = people(dealt.names, dealt.train, dealt.valid, dealt.test)
    mine = in_part(dealt.names, part, seed).tolist()
    return Population(
        clients=tuple(c if trained else replace(c, train=()) for c, trained in zip(everyone, mine, strict=True)),
        unseen=people(dealt.unseen_names, nothing, nothing, dealt.unseen),
        valid=valid if corpus.valid is None else corpus.valid,
        test=test if corpus.test is None else corpus.test,
        natural=kind == "natural",
        partition=kind,
        part=part,
        others=frozenset(c.name for c, trained in zip(everyone, mine, strict=True) if not trained),
    )


def written_by(corpus: Corpus, authors: Sequence[Author], lines: Sequence[str]) -> Written:
    """Say what dealing out needs to know of a corpus in memory; `lines` are those of the authors, joined."""
    topics = [author.topic or "" for author in authors] if any(a.topic is not None for a in authors) else None
    return Written(
        corpus=corpus.name,
        names=[author.name for author in authors],
        first=bounds_of(np.array([len(author.lines) for author in authors], np.int64)),
        sizes=line_sizes(lines, corpus.characters),
        natural=corpus.natural,
        published=(corpus.valid is not None, corpus.test is not None),
        topics=topics,
    )


def line_sizes(lines: Sequence[str], characters: bool) -> NDArray[np.int64]:
    """Return the tokens of each line, its end included."""
    count = (len(line) if characters else len(line.split()) for line in lines)
    return np.fromiter(count, np.int64, len(lines)) + 1


# What came of it


def statistics(population: Population, vocab: Vocab) -> dict[str, object]:
    """Describe a population by numbers for a table.

    Tokens are those of `vocab.encode`, line ends included. `oov` is the fraction of tokens encoded as
    unknown, None where a part is empty. `gini` is 0 when clients have equally much training text and nears
    1 when one client has all of it.
    """
    parts: dict[str, list[Lines]] = {
        "train": [client.train for client in population.trained],
        "valid": [*(client.valid for client in population.clients), population.valid or ()],
        "test": [*(client.test for client in population.clients), population.test or ()],
        "unseen": [client.test for client in population.unseen],
    }
    streams = {part: [vocab.encode(lines) for lines in texts] for part, texts in parts.items()}
    tokens = {part: sum(map(len, found)) for part, found in streams.items()}
    unknown = {part: sum(int((s == UNK).sum()) for s in found) for part, found in streams.items()}
    sizes = np.array([len(stream) for stream in streams["train"]])
    marks = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return {
        "partition": population.partition,
        "natural": population.natural,
        "clients": len(population.trained),
        "unseen": len(population.unseen),
        "lines": {part: sum(map(len, texts)) for part, texts in parts.items()},
        "tokens": tokens,
        "tokens_per_client": dict(zip(("min", "q1", "median", "q3", "max"), marks, strict=True)),
        "gini": _gini(sizes),
        "oov": {part: unknown[part] / n if n else None for part, n in tokens.items()},
    }


def _gini(sizes: NDArray[np.int64]) -> float:
    r"""Return the Gini coefficient :math:`\sum_i (2i - n - 1) x_i / (n \sum_i x_i)`, x in rising order.

    Example:
      >>> _gini(np.array([5, 5, 5])), _gini(np.array([0, 0, 0, 8]))
      (0.0, 0.75)
    """
    x, n = np.sort(sizes), len(sizes)
    return float((2 * np.arange(1, n + 1) - n - 1) @ x / (n * x.sum())) if x.sum() else 0.0
