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

The rules themselves are in `keyfed.text.dealing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keyfed.text.dealing import PARTITIONS, QUANTITIES, Written, deal
from keyfed.text.ragged import Numbers, Ragged, bounds_of
from keyfed.text.vocab import UNK, Vocab

if TYPE_CHECKING:
    from keyfed.text.corpus import Author, Corpus

__all__ = ["PARTITIONS", "QUANTITIES", "ClientText", "Population", "partition", "statistics"]

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
      clients: Those who may be trained on.
      unseen: Authors never trained on (natural partitions); all their text is in `test`.
      valid: Validation lines outside the clients: published, or pooled where clients are artificial.
      test: Test lines outside the clients, likewise.
      natural: Whether a client is a real author.
      partition: One of `PARTITIONS`.
    """

    clients: tuple[ClientText, ...]
    unseen: tuple[ClientText, ...]
    valid: Lines | None
    test: Lines | None
    natural: bool
    partition: str


def partition(
    corpus: Corpus, kind: str, *, clients: int | None, seed: int, unseen: float = 0.1, alpha: float = 0.5
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
    return Population(
        clients=people(dealt.names, dealt.train, dealt.valid, dealt.test),
        unseen=people(dealt.unseen_names, nothing, nothing, dealt.unseen),
        valid=valid if corpus.valid is None else corpus.valid,
        test=test if corpus.test is None else corpus.test,
        natural=kind == "natural",
        partition=kind,
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
        "train": [client.train for client in population.clients],
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
        "clients": len(population.clients),
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
