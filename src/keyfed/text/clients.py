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

Sizes are whitespace words plus one line end per line, or characters plus one line end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError, nearest
from keyfed.text.vocab import UNK, Vocab

if TYPE_CHECKING:
    from keyfed.text.corpus import Author, Corpus

PARTITIONS = ("natural", "iid", "contiguous", "quantity", "dirichlet")
QUANTITIES = (10, 15, 5, 20, 25, 10, 5, 15, 5, 10)
DEFAULT_CLIENTS = {"iid": 100, "contiguous": 100, "quantity": len(QUANTITIES), "dirichlet": 100}
TENTHS = (0.8, 0.1, 0.1)
FEW_AUTHORS = 5
FEW_LINES = 64

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
    if kind not in PARTITIONS:
        raise ConfigError(f"partition {kind!r} does not exist{nearest(kind, PARTITIONS)}; use {_listed(PARTITIONS)}")
    if kind == "natural" and not corpus.natural:
        raise ConfigError(f"{corpus.name} has no authors to be natural clients; use {_listed(PARTITIONS[1:])}")
    if clients is not None and clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    if not 0 <= unseen < 1:
        raise ConfigError(f"unseen must be a fraction from 0 to below 1, got {unseen}")
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"alpha must be positive, got {alpha}")
    authors = _authors(corpus)
    if kind == "natural":
        return _natural(corpus, authors, clients, seed, unseen)
    return _pooled(corpus, authors, kind, clients or DEFAULT_CLIENTS[kind], seed, alpha)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _authors(corpus: Corpus) -> tuple[Author, ...]:
    authors = tuple(author for author in corpus.authors if author.lines)
    if not authors:
        raise DataError(f"{corpus.name} has no text to deal out")
    name, times = Counter(author.name for author in authors).most_common(1)[0]
    if times > 1:
        raise DataError(f"{corpus.name} lists the author {name!r} {times} times")
    return authors


def _random(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(purpose.encode())])


# Cutting text at line boundaries


def _sizes(lines: Sequence[str], characters: bool) -> NDArray[np.int64]:
    """Return the tokens of each line, its end included."""
    count = (len(line) if characters else len(line.split()) for line in lines)
    return np.fromiter(count, np.int64, len(lines)) + 1


def _owners(sizes: NDArray[np.int64], shares: Sequence[float]) -> NDArray[np.int64]:
    """Return for each line the part that the middle of the line falls into.

    Example:
      >>> _owners(np.array([4, 4, 1, 1]), [0.8, 0.1, 0.1]).tolist()
      [0, 0, 1, 2]
    """
    if len(shares) == 3 and len(sizes) <= FEW_LINES:
        # The same arithmetic without numpy, whose calls cost ten times as much for a handful of lines.
        few = sizes.tolist()
        total, cuts = sum(few), _cuts(tuple(shares))
        middle = ((end - size / 2) / total for end, size in zip(accumulate(few), few, strict=True))
        return np.array([bisect_right(cuts, m) for m in middle], np.int64)
    ends = np.cumsum(sizes)
    middles = (ends - sizes / 2) / ends[-1]
    bounds = _cuts(tuple(shares))
    owners: NDArray[np.int64] = np.searchsorted(bounds, middles, side="right")
    return owners


@lru_cache(maxsize=16)
def _cuts(shares: tuple[float, ...]) -> list[float]:
    return [float(cut) for cut in np.cumsum(shares)[:-1] / np.sum(shares)]


def _dealt(lines: Sequence[str], owners: NDArray[np.int64], parts: int) -> list[Lines]:
    piles: list[list[str]] = [[] for _ in range(parts)]
    for line, owner in zip(lines, owners.tolist(), strict=True):
        piles[owner].append(line)
    return [tuple(pile) for pile in piles]


def _three_parts(author: Author, corpus: Corpus) -> list[Lines]:
    """Cut train, validation and test; a part that is published elsewhere stays empty here."""
    train, valid, test = TENTHS
    valid = valid if corpus.valid is None else 0.0
    test = test if corpus.test is None else 0.0
    if valid == test == 0.0:
        return [author.lines, (), ()]
    shares = (train + (TENTHS[1] - valid) + (TENTHS[2] - test), valid, test)
    return _dealt(author.lines, _owners(_sizes(author.lines, corpus.characters), shares), 3)


# The partitions


def _natural(corpus: Corpus, authors: tuple[Author, ...], clients: int | None, seed: int, unseen: float) -> Population:
    held = _held_out(authors, corpus.characters, seed, unseen)
    ours = [i for i in range(len(authors)) if i not in held]
    if clients is not None:
        if clients > len(ours):
            raise ConfigError(
                f"{clients:,} clients asked for, but {corpus.name} has {len(ours):,} authors"
                f" beside the {len(held):,} held out"
            )
        chosen = _random(seed, "clients").permutation(len(ours))[:clients]
        ours = sorted(ours[i] for i in chosen.tolist())
    return Population(
        clients=tuple(ClientText(authors[i].name, *_three_parts(authors[i], corpus)) for i in ours),
        unseen=tuple(ClientText(authors[i].name, (), (), authors[i].lines) for i in sorted(held)),
        valid=corpus.valid,
        test=corpus.test,
        natural=True,
        partition="natural",
    )


def _held_out(authors: tuple[Author, ...], characters: bool, seed: int, unseen: float) -> set[int]:
    """Draw the fraction `unseen` of those authors whose text is long enough to be cut in three.

    A fraction of all authors would be too many: where most wrote a line or two, the long texts would go.
    """
    everybody = range(len(authors))
    big = [i for i in everybody if len({*_owners(_sizes(authors[i].lines, characters), TENTHS).tolist()}) == 3]
    candidates = big or list(everybody)
    wanted = int(unseen * len(candidates) + 0.5)
    if unseen > 0 and len(authors) >= FEW_AUTHORS:
        wanted = max(1, wanted)
    order = _random(seed, "unseen").permutation(len(candidates)).tolist()
    return {candidates[i] for i in order[: min(wanted, len(authors) - 1)]}


def _pooled(
    corpus: Corpus, authors: tuple[Author, ...], kind: str, clients: int, seed: int, alpha: float
) -> Population:
    parts = [_three_parts(author, corpus) for author in authors]
    lines = tuple(chain.from_iterable(train for train, _, _ in parts))
    if clients > len(lines):
        raise ConfigError(f"{clients:,} clients asked for, but {corpus.name} has only {len(lines):,} training lines")
    if kind == "iid":
        shards = _iid(lines, clients, seed)
    elif kind == "dirichlet":
        trained = zip(_topics(authors), parts, strict=True)
        topics = [topic for topic, (train, _, _) in trained for _ in train]
        shards = _dirichlet(corpus, lines, topics, clients, seed, alpha)
    else:
        shares = QUANTITIES if kind == "quantity" else (1,)
        shards = _contiguous(lines, corpus.characters, [shares[k % len(shares)] for k in range(clients)])
    digits = len(str(clients - 1))
    return Population(
        clients=tuple(ClientText(f"{kind}-{k:0{digits}}", shard, (), ()) for k, shard in enumerate(shards)),
        unseen=(),
        valid=corpus.valid if corpus.valid is not None else tuple(chain.from_iterable(p[1] for p in parts)),
        test=corpus.test if corpus.test is not None else tuple(chain.from_iterable(p[2] for p in parts)),
        natural=False,
        partition=kind,
    )


def _iid(lines: Lines, clients: int, seed: int) -> list[Lines]:
    order = _random(seed, "iid").permutation(len(lines))
    return [tuple(lines[i] for i in shard.tolist()) for shard in np.array_split(order, clients)]


def _contiguous(lines: Lines, characters: bool, shares: Sequence[int]) -> list[Lines]:
    """Cut where the cumulative shares ask for it, leaving at least one line to everybody."""
    owners = _owners(_sizes(lines, characters), shares)
    starts = np.searchsorted(owners, np.arange(len(shares)))
    for k in range(1, len(shares)):
        room = len(lines) - (len(shares) - k)
        starts[k] = min(max(starts[k], starts[k - 1] + 1), room)
    ends = [*starts[1:].tolist(), len(lines)]
    return [lines[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]


def _topics(authors: tuple[Author, ...]) -> list[str]:
    """Return the topic of each author; without any topic in the corpus every author is one."""
    if all(author.topic is None for author in authors):
        return [author.name for author in authors]
    return [author.topic or "" for author in authors]


def _dirichlet(corpus: Corpus, lines: Lines, topics: list[str], clients: int, seed: int, alpha: float) -> list[Lines]:
    r"""Cut each topic's text, in order, in proportion to what the clients' mixtures give it.

    Client k draws :math:`q_k \sim \mathrm{Dirichlet}(\alpha, …, \alpha)` over topics and gets the share
    :math:`q_k^t / \sum_j q_j^t` of topic t: topics and sizes are skewed, and the whole text is used. Who
    takes the first piece of a topic is drawn anew for each. A client left with nothing gets the last line of
    the client who has most.
    """
    numbers = {name: t for t, name in enumerate(sorted(set(topics)))}
    if len(numbers) < 2:
        raise ConfigError(
            f"dirichlet mixes topics or authors, and {corpus.name} has one; use iid, contiguous or quantity"
        )
    random = _random(seed, "dirichlet")
    mixtures = random.dirichlet([alpha] * len(numbers), size=clients)  # [client, topic]
    mixtures += np.finfo(np.float32).tiny  # a tiny alpha underflows: no topic may be wanted by nobody
    sizes = _sizes(lines, corpus.characters)
    owners = np.empty(len(lines), np.int64)
    topic = np.array([numbers[name] for name in topics])
    by_topic = np.split(np.argsort(topic, kind="stable"), np.cumsum(np.bincount(topic))[:-1])
    for t, where in enumerate(by_topic):
        order = random.permutation(clients)
        owners[where] = order[_owners(sizes[where], mixtures[order, t].tolist())]
    _fill_empty(owners, clients)
    return _dealt(lines, owners, clients)


def _fill_empty(owners: NDArray[np.int64], clients: int) -> None:
    counts = np.bincount(owners, minlength=clients)
    for k in np.flatnonzero(counts == 0).tolist():
        donor = int(counts.argmax())
        owners[np.flatnonzero(owners == donor)[-1]] = k
        counts[[donor, k]] += (-1, 1)


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
