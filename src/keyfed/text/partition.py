"""Who holds which text: the partition of a corpus over clients.

    natural      one client per author; some authors are held out and never trained on
    iid          lines shuffled by the seed, cut into shards of equal line count
    contiguous   equal contiguous pieces of the text
    quantity     contiguous pieces of very unequal size (10, 15, 5, 20, 25, 10, 5, 15, 5, 10)/120
    dirichlet    every client has its own mixture of topics (or authors)

Lines are the smallest unit: they are moved, never cut, changed or repeated, and no character is ever shuffled.
Held-out text is the published validation and test file where a corpus has one. Otherwise the last tenth of each
author's text is test and the tenth before it validation, by order, so that training text always precedes the text it
is judged on.

The rules (`partition_lines`) look at no text. A line is a number and a size, so that the same rules serve lines in
memory and lines on disk (`keyfed.text.table`). Sizes are whitespace words plus one line end per line, or characters
plus one line end.

A run may train on a part of the clients (`in_part`), so that another can train on the rest. Both are judged on the
same held-out text, that of all clients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, compress, pairwise
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError, nearest
from keyfed.text.ragged import Numbers, Ragged, blocks, bounds_of
from keyfed.text.vocab import UNK, Vocab

if TYPE_CHECKING:
    from keyfed.text.corpus import Corpus

Lines = tuple[str, ...]
PARTITIONS = ("natural", "iid", "contiguous", "quantity", "dirichlet")
QUANTITIES = (10, 15, 5, 20, 25, 10, 5, 15, 5, 10)
DEFAULT_CLIENTS = {"iid": 100, "contiguous": 100, "quantity": len(QUANTITIES), "dirichlet": 100}
TENTHS = (0.8, 0.1, 0.1)
FEW_AUTHORS = 5
BLOCK = 1 << 20  # lines that are cut at once

Sizes = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class ClientText:
    """The text of one client, in order of time; a split may be empty."""

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


@dataclass(frozen=True, slots=True)
class LineIndex:
    """What a partition needs to know of a corpus. Every author has a line.

    Attributes:
      corpus: its name, for errors.
      names: of the authors.
      first: author a wrote the lines first[a] … first[a + 1] − 1.
      sizes: of each line.
      natural: whether authors may be clients.
      published: numbers of the published validation and test lines; where there are none, authors' text is cut.
      topics: of each author; None where no author has one.
    """

    corpus: str
    names: Sequence[str]
    first: Numbers
    sizes: Sizes
    natural: bool
    published: tuple[Numbers | None, Numbers | None] = (None, None)
    topics: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class LinePartition:
    """The lines of every client, by number.

    Attributes:
      kind: one of `PARTITIONS`.
      names: of all clients; `train`, `valid` and `test` have one list for each.
      unseen: lines of authors never trained on, `unseen_names` (natural partitions).
      outside: validation and test lines of no client: published, or pooled where clients are artificial.
      part: which part of the clients is trained on; None for all.
      in_part: whether each client is in that part.
    """

    kind: str
    names: Sequence[str]
    train: Ragged
    valid: Ragged
    test: Ragged
    unseen_names: Sequence[str]
    unseen: Ragged
    outside: tuple[Numbers | None, Numbers | None]
    part: str | None = None
    in_part: NDArray[np.bool_] = field(default_factory=lambda: np.ones(0, np.bool_))

    def trained(self) -> tuple[Sequence[str], Ragged]:
        """Return names and training lines of the clients of this part; held-out text stays everybody's."""
        if self.part is None:
            return self.names, self.train
        return list(compress(self.names, self.in_part)), self.train.take(np.flatnonzero(self.in_part))


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
    """Say which clients are in a part: client c is in part 1 + hash(seed, c) mod n, whatever other clients there are.

    Raises:
      DataError: no client is.

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


def partition(corpus: Corpus, kind: str, **options: Any) -> Population:
    """Give the text of a corpus to clients; arguments and errors are those of `partition_lines`."""
    return texts_of(corpus, partition_lines(line_index(corpus), kind, **options))


def lines_in(corpus: Corpus) -> list[str]:
    """Return all lines in the order of their numbers: those of the authors, then the published ones."""
    authors = (author.lines for author in corpus.authors)
    return list(chain.from_iterable((*authors, corpus.valid or (), corpus.test or ())))


def line_index(corpus: Corpus, sizes: Sizes | None = None) -> LineIndex:
    """Return what a partition needs to know of a corpus in memory; `sizes` of its lines, where they are known."""
    authors = [author for author in corpus.authors if author.lines]
    first = bounds_of(np.array([len(author.lines) for author in authors], np.int64))
    valid, test = (len(lines) if lines is not None else 0 for lines in (corpus.valid, corpus.test))
    published = np.split(np.arange(first[-1], first[-1] + valid + test), [valid])
    return LineIndex(
        corpus=corpus.name,
        names=[author.name for author in authors],
        first=first,
        sizes=(line_sizes(lines_in(corpus), corpus.characters) if sizes is None else sizes)[: first[-1]],
        natural=corpus.natural,
        published=(None if corpus.valid is None else published[0], None if corpus.test is None else published[1]),
        topics=[a.topic or "" for a in authors] if any(a.topic is not None for a in authors) else None,
    )


def line_sizes(lines: Sequence[str], characters: bool) -> NDArray[np.int64]:
    """Return the tokens of each line, its end included."""
    count = (len(line) if characters else len(line.split()) for line in lines)
    return np.fromiter(count, np.int64, len(lines)) + 1


def texts_of(corpus: Corpus, cut: LinePartition) -> Population:
    """Return the lines themselves of every client."""
    lines = lines_in(corpus)

    def texts(numbers: Numbers) -> Lines:
        return tuple(map(lines.__getitem__, numbers.tolist()))

    def people(names: Sequence[str], *splits: Ragged) -> Iterator[ClientText]:
        return (ClientText(name, *(texts(split[k]) for split in splits)) for k, name in enumerate(names))

    mine = cut.in_part.tolist()
    clients = people(cut.names, cut.train, cut.valid, cut.test)
    nothing = Ragged.of([()] * len(cut.unseen_names))
    valid, test = (None if numbers is None else texts(numbers) for numbers in cut.outside)
    return Population(
        clients=tuple(c if trained else replace(c, train=()) for c, trained in zip(clients, mine, strict=True)),
        unseen=tuple(people(cut.unseen_names, nothing, nothing, cut.unseen)),
        valid=valid,
        test=test,
        natural=cut.kind == "natural",
        partition=cut.kind,
        part=cut.part,
        others=frozenset(name for name, trained in zip(cut.names, mine, strict=True) if not trained),
    )


def partition_lines(
    index: LineIndex,
    kind: str,
    *,
    clients: int | None,
    seed: int,
    unseen: float = 0.1,
    alpha: float = 0.5,
    part: str | None = None,
    clients_by: Literal["seed", "text"] = "seed",
    share: float = 1.0,
) -> LinePartition:
    """Give the lines of a corpus to clients.

    Args:
      kind: One of `PARTITIONS`.
      clients: Clients wanted; None takes every author (natural), 10 (quantity) or 100.
      clients_by: Which authors these are in a natural partition: drawn by the seed, or those with most text.
      seed: Draws held-out authors, shuffles lines, draws mixtures. The same seed gives the same population;
        the held-out authors depend on nothing but corpus, seed and `unseen`.
      unseen: Fraction of the authors (with enough text) held out of a natural partition.
      alpha: Concentration of the Dirichlet distribution: small is skewed, large is nearly IID.
      part: Which part of the clients may be trained on, see `in_part`; None for all.
      share: Of every author's training lines that are used, from the first on; held-out text stays whole.

    Raises:
      ConfigError: The kind does not exist or does not fit the corpus, or a number makes no sense.
      DataError: The corpus has no text, or lists an author twice.
    """
    if kind not in PARTITIONS:
        raise ConfigError(f"partition {kind!r} does not exist{nearest(kind, PARTITIONS)}; use {_listed(PARTITIONS)}")
    if kind == "natural" and not index.natural:
        raise ConfigError(f"{index.corpus} has no authors to be natural clients; use {_listed(PARTITIONS[1:])}")
    if clients is not None and clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    if not 0 <= unseen < 1:
        raise ConfigError(f"unseen must be a fraction from 0 to below 1, got {unseen}")
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"alpha must be positive, got {alpha}")
    if not 0 < share <= 1:
        raise ConfigError(f"share must be above 0 and at most 1, got {share}")
    _check_names(index)
    if kind == "natural":
        cut = _natural(index, clients, seed, unseen, clients_by, share)
    else:
        cut = _pooled(index, kind, clients or DEFAULT_CLIENTS[kind], seed, alpha, share)
    return replace(cut, part=part, in_part=in_part(cut.names, part, seed))


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_names(index: LineIndex) -> None:
    if not len(index.names):
        raise DataError(f"{index.corpus} has no text to deal out")
    if len(set(index.names)) < len(index.names):
        in_order = sorted(index.names)
        twin = next(a for a, b in pairwise(in_order) if a == b)
        raise DataError(f"{index.corpus} lists the author {twin!r} {in_order.count(twin)} times")


def _random(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(purpose.encode())])


# Cutting text at line boundaries


def _owners(sizes: Sizes, shares: Sequence[float]) -> Numbers:
    """Return for each line the part that the middle of the line falls into.

    Example:
      >>> _owners(np.array([4, 4, 1, 1]), [0.8, 0.1, 0.1]).tolist()
      [0, 0, 1, 2]
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    owners: Numbers = np.searchsorted(_cuts(tuple(shares)), (ends - sizes / 2) / ends[-1], side="right")
    return owners


@lru_cache(maxsize=16)
def _cuts(shares: tuple[float, ...]) -> list[float]:
    return [float(cut) for cut in np.cumsum(shares)[:-1] / np.sum(shares)]


def _three_parts(index: LineIndex, shares: tuple[float, float, float]) -> NDArray[np.int64]:
    """Return how many lines of each author are train, validation and test, in this order: `_owners` for all at once.

    Example:
      >>> _three_parts(LineIndex("c", "ab", np.array([0, 4, 5]), np.array([4, 4, 1, 1, 9]), True), TENTHS).tolist()
      [[2, 1, 1], [1, 0, 0]]
    """
    parts = np.empty((len(index.names), 3), np.int64)
    for authors in blocks(index.first, BLOCK):
        first = index.first[authors.start : authors.stop + 1]
        sizes = index.sizes[first[0] : first[-1]]
        ends = np.cumsum(sizes, dtype=np.int64)
        before = np.concatenate([[0], ends])[first[:-1] - first[0]]  # tokens of the block's authors before this one
        counts = np.diff(first)
        total = np.diff(np.append(before, ends[-1]))
        middles = (ends - np.repeat(before, counts) - sizes / 2) / np.repeat(total, counts)
        number = np.repeat(np.arange(len(counts)) * 3, counts)
        for cut in _cuts(shares):
            number += middles >= cut
        parts[authors] = np.bincount(number, minlength=3 * len(counts)).reshape(-1, 3)
    return parts


def _parts(index: LineIndex, counts: Numbers, share: float, authors: Numbers | slice = slice(None)) -> list[Ragged]:
    """Cut train, validation and test of some authors, by order: training text precedes what it is judged on.

    Only the first `share` of an author's training lines is used, at least one line.
    """
    counts, first = counts[authors], index.first[:-1][authors]
    starts = first[:, None] + np.cumsum(counts, axis=1) - counts
    used = np.stack([np.ceil(share * counts[:, 0]).astype(np.int64), counts[:, 1], counts[:, 2]])
    return [Ragged.runs(starts[:, part], used[part]) for part in range(3)]


def _own_counts(index: LineIndex) -> Numbers:
    """Return the lines of train, validation and test of each author; what is published elsewhere is 0 here."""
    valid, test = (0.0 if lines is not None else 0.1 for lines in index.published)
    if not valid and not test:
        whole = np.diff(index.first)
        return np.stack([whole, 0 * whole, 0 * whole], axis=1)
    train, tenth, other = TENTHS
    return _three_parts(index, (train + (tenth - valid) + (other - test), valid, test))


# The partitions


def _natural(
    index: LineIndex, clients: int | None, seed: int, unseen: float, clients_by: str, share: float
) -> LinePartition:
    thirds = _three_parts(index, TENTHS)
    held = _held_out(index, thirds, seed, unseen)
    ours = np.delete(np.arange(len(index.names)), held)
    if clients is not None:
        if clients > len(ours):
            raise ConfigError(
                f"{clients:,} clients asked for, but {index.corpus} has {len(ours):,} authors"
                f" beside the {len(held):,} held out"
            )
        if clients_by == "text":  # of two with equally much, the one who comes first
            before = np.concatenate([[0], np.cumsum(index.sizes, dtype=np.int64)])
            order = np.argsort(-np.diff(before[index.first])[ours], kind="stable")
        else:
            order = _random(seed, "clients").permutation(len(ours))
        ours = np.sort(ours[order[:clients]])
    cut_too = all(lines is None for lines in index.published)
    train, valid, test = _parts(index, thirds if cut_too else _own_counts(index), share, ours)
    counts = np.diff(index.first)[held]
    names = index.names
    return LinePartition(
        kind="natural",
        names=[names[i] for i in ours.tolist()],
        train=train,
        valid=valid,
        test=test,
        unseen_names=[names[i] for i in held.tolist()],
        unseen=Ragged.runs(index.first[held], counts),
        outside=index.published,
    )


def _held_out(index: LineIndex, thirds: Numbers, seed: int, unseen: float) -> Numbers:
    """Draw the fraction `unseen` of those authors whose text is long enough to be cut in three; in rising order.

    A fraction of all authors would be too many: where most wrote a line or two, the long texts would go.
    """
    authors = len(index.names)
    big = np.flatnonzero(thirds.all(axis=1))
    candidates = big if len(big) else np.arange(authors)
    wanted = int(unseen * len(candidates) + 0.5)
    if unseen > 0 and authors >= FEW_AUTHORS:
        wanted = max(1, wanted)
    order = _random(seed, "unseen").permutation(len(candidates))
    return np.sort(candidates[order[: min(wanted, authors - 1)]])


def _pooled(index: LineIndex, kind: str, clients: int, seed: int, alpha: float, share: float) -> LinePartition:
    parts = _parts(index, _own_counts(index), share)
    lines = parts[0].flat
    if clients > len(lines):
        usual = " by default" if clients == DEFAULT_CLIENTS[kind] else ""
        raise ConfigError(
            f"{index.corpus} has {len(lines):,} training line{'s' * (len(lines) != 1)}, and {clients:,} clients{usual} "
            f"need one each; set data.clients to at most {max(1, len(lines)):,} (and train.cohort), or put line ends "
            "between sentences"
        )
    if kind == "iid":
        shards = _iid(lines, clients, seed)
    elif kind == "dirichlet":
        topic = np.repeat(_topics(index), parts[0].counts())
        shards = _dirichlet(index, lines, topic, clients, seed, alpha)
    else:
        shares = QUANTITIES if kind == "quantity" else (1,)
        shards = _contiguous(lines, index.sizes[lines], [shares[k % len(shares)] for k in range(clients)])
    digits = len(str(clients - 1))
    nothing = Ragged(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))
    valid, test = (
        pooled.flat if lines is None else lines for pooled, lines in zip(parts[1:], index.published, strict=True)
    )
    return LinePartition(
        kind=kind,
        names=[f"{kind}-{k:0{digits}}" for k in range(clients)],
        train=shards,
        valid=nothing,
        test=nothing,
        unseen_names=[],
        unseen=Ragged.of([]),
        outside=(valid, test),
    )


def _iid(lines: Numbers, clients: int, seed: int) -> Ragged:
    order = _random(seed, "iid").permutation(len(lines))
    each, more = divmod(len(lines), clients)
    return Ragged(lines[order], bounds_of(np.array([each + 1] * more + [each] * (clients - more))))


def _contiguous(lines: Numbers, sizes: Sizes, shares: Sequence[int]) -> Ragged:
    """Cut where the cumulative shares ask for it, leaving at least one line to everybody."""
    owners = _owners(sizes, shares)
    starts = np.searchsorted(owners, np.arange(len(shares)))
    for k in range(1, len(shares)):
        room = len(lines) - (len(shares) - k)
        starts[k] = min(max(starts[k], starts[k - 1] + 1), room)
    return Ragged(lines, np.append(starts, len(lines)))


def _topics(index: LineIndex) -> Numbers:
    """Return the number of each author's topic, in order of the topics' names; without topics every author is one."""
    names = list(index.names if index.topics is None else index.topics)
    numbers = {name: t for t, name in enumerate(sorted(set(names)))}
    return np.array([numbers[name] for name in names], np.int64)


def _dirichlet(index: LineIndex, lines: Numbers, topic: Numbers, clients: int, seed: int, alpha: float) -> Ragged:
    r"""Cut each topic's text, in order, in proportion to what the clients' mixtures give it.

    Client k draws :math:`q_k \sim \mathrm{Dirichlet}(\alpha, …, \alpha)` over topics and gets the share
    :math:`q_k^t / \sum_j q_j^t` of topic t: topics and sizes are skewed, and the whole text is used. Who
    takes the first piece of a topic is drawn anew for each. A client left with nothing gets the last line of
    the client who has most.
    """
    topics, topic = np.unique(topic, return_inverse=True)  # those that have training text
    if len(topics) < 2:
        raise ConfigError(
            f"dirichlet mixes topics or authors, and {index.corpus} has one; use iid, contiguous or quantity"
        )
    random = _random(seed, "dirichlet")
    mixtures = random.dirichlet([alpha] * len(topics), size=clients)  # [client, topic]
    mixtures += np.finfo(np.float32).tiny  # a tiny alpha underflows: every topic must be wanted by some client
    sizes = index.sizes[lines]
    owners = np.empty(len(lines), np.int64)
    by_topic = np.split(np.argsort(topic, kind="stable"), np.cumsum(np.bincount(topic))[:-1])
    for t, where in enumerate(by_topic):
        order = random.permutation(clients)
        owners[where] = order[_owners(sizes[where], mixtures[order, t].tolist())]
    _fill_empty(owners, clients)
    return Ragged(lines[np.argsort(owners, kind="stable")], bounds_of(np.bincount(owners, minlength=clients)))


def _fill_empty(owners: Numbers, clients: int) -> None:
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
