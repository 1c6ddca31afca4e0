"""The partitions, on the numbers of lines: who gets which.

Whole lines are the smallest unit: they are moved, never cut, changed or repeated, and no character is ever shuffled.
Nothing here looks at text. A line is a number and a size, so that the same rules deal out lines in memory
(`keyfed.text.partition`) and lines on disk (`keyfed.text.table`).

Sizes are whitespace words plus one line end per line, or characters plus one line end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError, nearest
from keyfed.text.ragged import Numbers, Ragged, blocks, bounds_of

PARTITIONS = ("natural", "iid", "contiguous", "quantity", "dirichlet")
QUANTITIES = (10, 15, 5, 20, 25, 10, 5, 15, 5, 10)
DEFAULT_CLIENTS = {"iid": 100, "contiguous": 100, "quantity": len(QUANTITIES), "dirichlet": 100}
TENTHS = (0.8, 0.1, 0.1)
FEW_AUTHORS = 5
BLOCK = 1 << 20  # lines that are cut at once

Sizes = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Written:
    """What dealing out needs to know of a corpus. Every author has a line.

    Attributes:
      corpus: its name, for errors.
      names: of the authors.
      first: author a wrote the lines first[a] … first[a + 1] − 1.
      sizes: of each line.
      natural: whether authors may be clients.
      published: whether validation and test text are published elsewhere, and authors' text is all for training.
      topics: of each author; None where no author has one.
    """

    corpus: str
    names: Sequence[str]
    first: Numbers
    sizes: Sizes
    natural: bool
    published: tuple[bool, bool] = (False, False)
    topics: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Dealt:
    """The lines of every client, by number.

    Attributes:
      names: of those who may be trained on; `train`, `valid` and `test` have one list for each.
      unseen: lines of authors never trained on, `unseen_names` (natural partitions).
      pooled: validation and test lines outside the clients, where clients are artificial.
    """

    names: Sequence[str]
    train: Ragged
    valid: Ragged
    test: Ragged
    unseen_names: Sequence[str]
    unseen: Ragged
    pooled: tuple[Numbers, Numbers] | None


def deal(
    written: Written, kind: str, *, clients: int | None, seed: int, unseen: float = 0.1, alpha: float = 0.5
) -> Dealt:
    """Deal lines out to clients; the arguments and errors are those of `keyfed.text.partition.partition`."""
    if kind not in PARTITIONS:
        raise ConfigError(f"partition {kind!r} does not exist{nearest(kind, PARTITIONS)}; use {_listed(PARTITIONS)}")
    if kind == "natural" and not written.natural:
        raise ConfigError(f"{written.corpus} has no authors to be natural clients; use {_listed(PARTITIONS[1:])}")
    if clients is not None and clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    if not 0 <= unseen < 1:
        raise ConfigError(f"unseen must be a fraction from 0 to below 1, got {unseen}")
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"alpha must be positive, got {alpha}")
    _check_names(written)
    if kind == "natural":
        return _natural(written, clients, seed, unseen)
    return _pooled(written, kind, clients or DEFAULT_CLIENTS[kind], seed, alpha)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_names(written: Written) -> None:
    if not len(written.names):
        raise DataError(f"{written.corpus} has no text to deal out")
    if len(set(written.names)) < len(written.names):
        in_order = sorted(written.names)
        twin = next(a for a, b in pairwise(in_order) if a == b)
        raise DataError(f"{written.corpus} lists the author {twin!r} {in_order.count(twin)} times")


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


def _three_parts(written: Written, shares: tuple[float, float, float]) -> NDArray[np.int64]:
    """Return how many lines of each author are train, validation and test, in this order: `_owners` for all at once.

    Example:
      >>> _three_parts(Written("c", "ab", np.array([0, 4, 5]), np.array([4, 4, 1, 1, 9]), True), TENTHS).tolist()
      [[2, 1, 1], [1, 0, 0]]
    """
    parts = np.empty((len(written.names), 3), np.int64)
    for authors in blocks(written.first, BLOCK):
        first = written.first[authors.start : authors.stop + 1]
        sizes = written.sizes[first[0] : first[-1]]
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


def _shares(published: tuple[bool, bool]) -> tuple[float, float, float]:
    """Return the shares of train, validation and test; a part that is published elsewhere is nothing here."""
    train, valid, test = TENTHS
    valid = 0.0 if published[0] else valid
    test = 0.0 if published[1] else test
    return train + (TENTHS[1] - valid) + (TENTHS[2] - test), valid, test


def _parts(written: Written, counts: Numbers, authors: Numbers | slice = slice(None)) -> list[Ragged]:
    """Cut train, validation and test of some authors, by order: training text precedes what it is judged on."""
    counts, first = counts[authors], written.first[:-1][authors]
    before = np.cumsum(counts, axis=1) - counts
    return [Ragged.runs(first + before[:, part], counts[:, part]) for part in range(3)]


def _own_counts(written: Written) -> Numbers:
    """Return the lines of train, validation and test of each author."""
    if written.published == (True, True):
        whole = np.diff(written.first)
        return np.stack([whole, 0 * whole, 0 * whole], axis=1)
    return _three_parts(written, _shares(written.published))


# The partitions


def _natural(written: Written, clients: int | None, seed: int, unseen: float) -> Dealt:
    thirds = _three_parts(written, TENTHS)
    held = _held_out(written, thirds, seed, unseen)
    ours = np.delete(np.arange(len(written.names)), held)
    if clients is not None:
        if clients > len(ours):
            raise ConfigError(
                f"{clients:,} clients asked for, but {written.corpus} has {len(ours):,} authors"
                f" beside the {len(held):,} held out"
            )
        chosen = _random(seed, "clients").permutation(len(ours))[:clients]
        ours = np.sort(ours[chosen])
    train, valid, test = _parts(written, thirds if written.published == (False, False) else _own_counts(written), ours)
    counts = np.diff(written.first)[held]
    names = written.names
    return Dealt(
        names=[names[i] for i in ours.tolist()],
        train=train,
        valid=valid,
        test=test,
        unseen_names=[names[i] for i in held.tolist()],
        unseen=Ragged.runs(written.first[held], counts),
        pooled=None,
    )


def _held_out(written: Written, thirds: Numbers, seed: int, unseen: float) -> Numbers:
    """Draw the fraction `unseen` of those authors whose text is long enough to be cut in three; in rising order.

    A fraction of all authors would be too many: where most wrote a line or two, the long texts would go.
    """
    authors = len(written.names)
    big = np.flatnonzero(thirds.all(axis=1))
    candidates = big if len(big) else np.arange(authors)
    wanted = int(unseen * len(candidates) + 0.5)
    if unseen > 0 and authors >= FEW_AUTHORS:
        wanted = max(1, wanted)
    order = _random(seed, "unseen").permutation(len(candidates))
    return np.sort(candidates[order[: min(wanted, authors - 1)]])


def _pooled(written: Written, kind: str, clients: int, seed: int, alpha: float) -> Dealt:
    parts = _parts(written, _own_counts(written))
    lines = parts[0].flat
    if clients > len(lines):
        raise ConfigError(f"{clients:,} clients asked for, but {written.corpus} has only {len(lines):,} training lines")
    if kind == "iid":
        shards = _iid(lines, clients, seed)
    elif kind == "dirichlet":
        topic = np.repeat(_topics(written), parts[0].counts())
        shards = _dirichlet(written, lines, topic, clients, seed, alpha)
    else:
        shares = QUANTITIES if kind == "quantity" else (1,)
        shards = _contiguous(lines, written.sizes[lines], [shares[k % len(shares)] for k in range(clients)])
    digits = len(str(clients - 1))
    nothing = Ragged(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))
    return Dealt(
        names=[f"{kind}-{k:0{digits}}" for k in range(clients)],
        train=shards,
        valid=nothing,
        test=nothing,
        unseen_names=[],
        unseen=Ragged.of([]),
        pooled=(parts[1].flat, parts[2].flat),
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


def _topics(written: Written) -> Numbers:
    """Return the number of each author's topic, in order of the topics' names; without topics every author is one."""
    names = list(written.names if written.topics is None else written.topics)
    numbers = {name: t for t, name in enumerate(sorted(set(names)))}
    return np.array([numbers[name] for name in names], np.int64)


def _dirichlet(written: Written, lines: Numbers, topic: Numbers, clients: int, seed: int, alpha: float) -> Ragged:
    r"""Cut each topic's text, in order, in proportion to what the clients' mixtures give it.

    Client k draws :math:`q_k \sim \mathrm{Dirichlet}(\alpha, …, \alpha)` over topics and gets the share
    :math:`q_k^t / \sum_j q_j^t` of topic t: topics and sizes are skewed, and the whole text is used. Who
    takes the first piece of a topic is drawn anew for each. A client left with nothing gets the last line of
    the client who has most.
    """
    topics, topic = np.unique(topic, return_inverse=True)  # those that have training text
    if len(topics) < 2:
        raise ConfigError(
            f"dirichlet mixes topics or authors, and {written.corpus} has one; use iid, contiguous or quantity"
        )
    random = _random(seed, "dirichlet")
    mixtures = random.dirichlet([alpha] * len(topics), size=clients)  # [client, topic]
    mixtures += np.finfo(np.float32).tiny  # a tiny alpha underflows: no topic may be wanted by nobody
    sizes = written.sizes[lines]
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
