r"""N-grams as tables of rows: what a client finds in its text, and which longer n-grams may be released.

A level's n-grams are rows, sorted by key = (row of the first n − 1 words) · V + last word, as in `ngram.Level`. The
numbers of rows are public: they follow from what was released. So a client can name an n-gram of the next length by
one integer, and no n-gram is named whose first or last n − 1 words were not released.

Text is read for all clients of a block at once; every function returns what each of them would find alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.model.ngram import Ints, Tokens

CANDIDATES = 1 << 22  # looked at at a time; bounds the memory


@dataclass(frozen=True, eq=False)
class GramTable:
    """The released n-grams of one length.

    Attributes:
      keys: ascending.
      clients: how many clients wrote each, by the sum.
      counts: how often, each client clipped.
      suffix: row of its last n − 1 words in the level below; 0 for n = 1.
    """

    keys: Ints
    clients: Ints
    counts: Ints
    suffix: Ints

    def find(self, keys: Ints) -> Ints:
        """Return the row of each key, −1 where there is none; a negative key has none."""
        return rows_in(self.keys, keys)


def rows_in(sorted_keys: Ints, keys: Ints) -> Ints:
    """Return where each key is among sorted ones, −1 where it is not.

    Example:
      >>> rows_in(np.array([2, 5]), np.array([5, 3, -1])).tolist()
      [1, -1, -1]
    """
    if not sorted_keys.size:
        return np.full(keys.shape, -1, np.int64)
    rows = np.minimum(np.searchsorted(sorted_keys, keys), sorted_keys.size - 1)
    return np.where(sorted_keys[rows] == keys, rows, -1)


class Texts(NamedTuple):
    """Text of several clients, one after the other.

    Attributes:
      reach: length of the longest n-gram that ends at a token: none crosses from one client, or line, into the next.
      predicted: whether a token is predicted by what precedes it; the first of a stream, or the line start, is not.
      counted: whether n-grams that end here count; a line start is written by no client.
      client: number of the client in its block.
    """

    tokens: Ints
    reach: Ints
    predicted: NDArray[np.bool_]
    counted: NDArray[np.bool_]
    client: Ints


def texts_of(streams: Sequence[Tokens], line_end: int | None = None) -> Texts:
    """Lay out clients' streams.

    Args:
      line_end: id of the token that ends a line, where every line is read on its own: its n-grams then begin with the
        line end before it. None for whole streams.

    Example:
      >>> text = texts_of([np.array([5, 2, 6, 2])], line_end=2)
      >>> text.tokens.tolist(), text.reach.tolist()
      ([2, 5, 2, 6, 2], [1, 2, 3, 2, 3])
    """
    start = [] if line_end is None else [line_end]
    pieces = [np.concatenate([start, stream]).astype(np.int64) if len(stream) else np.zeros(0, np.int64)
              for stream in streams]  # fmt: skip
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *pieces])
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = np.arange(tokens.size)
    opening = places == begins
    if line_end is not None and tokens.size:
        ends = np.where(tokens == line_end, places, 0)
        before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
        begins = np.maximum(begins, before)
    counted = ~opening if line_end is not None else np.ones(tokens.size, np.bool_)
    return Texts(tokens, places - begins + 1, ~opening, counted, np.repeat(np.arange(len(sizes)), sizes))


def keys_at(text: Texts, rows: Ints | None, n: int, vocab: int) -> Ints:
    """Return the key of the n-gram that ends at each token, −1 where its first or last n − 1 words have no row.

    Args:
      rows: of the (n − 1)-grams that end at each token (`rows_at`); None for n = 1.
    """
    if rows is None:
        return text.tokens.copy()
    before = np.concatenate([np.array([-1], np.int64), rows[:-1]])
    possible = (text.reach >= n) & (before >= 0) & (rows >= 0)
    return np.where(possible, before * vocab + text.tokens, -1)


def rows_at(text: Texts, tables: Sequence[GramTable], vocab: int) -> Ints | None:
    """Return the row of the last table's n-gram that ends at each token, −1 where there is none; None of no table."""
    rows: Ints | None = None
    for n, table in enumerate(tables, 1):
        rows = table.find(keys_at(text, rows, n, vocab))
    return rows


@dataclass(frozen=True, eq=False)
class Written:
    """N-grams that clients wrote: by client, then by key.

    Attributes:
      count: how often.
    """

    client: Ints
    key: Ints
    count: Ints

    def of(self, chosen: NDArray[np.bool_]) -> Written:
        return Written(self.client[chosen], self.key[chosen], self.count[chosen])


def written(text: Texts, tables: Sequence[GramTable], vocab: int) -> Written:
    """Return the distinct n-grams, one longer than the tables', that every client wrote."""
    keys = keys_at(text, rows_at(text, tables, vocab), len(tables) + 1, vocab)
    chosen = (keys >= 0) & text.counted
    clients, keys = text.client[chosen], keys[chosen]
    order = np.lexsort((keys, clients))
    clients, keys = clients[order], keys[order]
    new = np.ones(keys.size, np.bool_)
    new[1:] = (np.diff(clients) != 0) | (np.diff(keys) != 0)
    first = np.flatnonzero(new)
    return Written(clients[first], keys[first], np.diff(np.append(first, keys.size)))


def limited(found: Written, score: NDArray[Any], most: int) -> Written:
    """Keep at most so many n-grams of every client, those of the highest score; ties go to the lower key.

    Example:
      >>> found = Written(np.array([0, 0, 0, 1]), np.array([3, 4, 9, 3]), np.array([1, 1, 1, 1]))
      >>> limited(found, np.array([2, 7, 7, 1]), 2).key.tolist()
      [4, 9, 3]
    """
    if not found.key.size or np.bincount(found.client).max() <= most:
        return found
    order = np.lexsort((found.key, -score, found.client))
    clients = found.client[order]
    begins = np.flatnonzero(np.concatenate([[True], np.diff(clients) != 0]))
    rank = np.arange(clients.size) - np.repeat(begins, np.diff(np.append(begins, clients.size)))
    chosen = np.zeros(rank.size, np.bool_)
    chosen[order[rank < most]] = True
    return found.of(chosen)


def shared_score(keys: Ints, tables: Sequence[GramTable], vocab: int) -> Ints:
    """Return the fewer clients of an n-gram's first and of its last n − 1 words: no more can have written it all."""
    below = tables[-1]
    first = keys // vocab
    found: Ints = np.minimum(below.clients[first], below.clients[last_rows(keys, tables, vocab)])
    return found


def last_rows(keys: Ints, tables: Sequence[GramTable], vocab: int) -> Ints:
    """Return the rows of the last n − 1 words of n-grams in the last table; −1 where there is none."""
    below = tables[-1]
    middle = below.suffix[keys // vocab] if len(tables) > 1 else np.zeros(keys.size, np.int64)
    return below.find(middle * vocab + keys % vocab)


def candidates(tables: Sequence[GramTable], vocab: int) -> Iterator[Ints]:
    """Yield the keys of all n-grams whose first and last n − 1 words are released, ascending, in blocks."""
    below = tables[-1]
    if len(tables) == 1:
        middle, contexts = np.zeros(below.keys.size, np.int64), 1
    else:
        middle, contexts = below.suffix, tables[-2].keys.size
    start = np.searchsorted(below.keys, np.arange(contexts + 1) * vocab)
    size = np.diff(start)[middle]
    ends = np.cumsum(size)
    at = 0
    while at < size.size:
        upto = max(at + 1, int(np.searchsorted(ends, (ends[at - 1] if at else 0) + CANDIDATES, side="right")))
        block = size[at:upto]
        offset = np.arange(int(block.sum())) - np.repeat(np.cumsum(block) - block, block)
        rows = np.repeat(start[middle[at:upto]], block) + offset
        yield np.repeat(np.arange(at, upto), block) * vocab + below.keys[rows] % vocab
        at = upto
