r"""Small counts of many things in one secure sum: what a client writes of its n-grams, and what the server reads.

**Fields.** A vector of 32-bit words holds fields of cells. A cell of b bits shares its word with ⌊32/b⌋ − 1 others; b
is so large that the sum over all members fits. So counts of one client out of a hundred take 7 bits, four to a word.

**Sketches.** N-grams are too many to have a cell each. A sketch has `depth` rows of cells; a public hash function gives
every n-gram one cell of each row. A client sets its n-grams' cells to 1, also where several of them share one. So a
summed cell is the number of clients that wrote any of the n-grams in it, and

.. math::  \hat c(g) = \min_{r} \text{cell}_r(h_r(g)) \;≥\; c(g)

is never below the number of clients that wrote g. (In a count-min sketch a cell is a sum over n-grams; that of a set
is at most as large.) The server reads it at candidates only: n-grams that the level below admits.

**Recounts.** For a public list of n-grams a client writes which of them it wrote, and how often, at most `cap` times.

A client that lies may add any integers. A recount that honest clients cannot have is an error; nothing is read of it.

References:
  Cormode and Muthukrishnan, *An improved data stream summary: the count-min sketch and its applications*, 2005.
  Fan, Cao, Almeida and Broder, *Summary cache*, 2000 (counting Bloom filters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyfed.engine.sums.codec import Vector, must
from keyfed.errors import SecureSumError
from keyfed.model.ngram import Ints

WORD = 32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Entries(NamedTuple):
    """Cells that clients of a block write: by client; no client writes a cell twice."""

    client: Ints
    cell: Ints
    value: Ints


@dataclass(frozen=True, slots=True)
class Fields:
    """Where cells lie in a vector.

    Attributes:
      lengths: cells of each field.
      most: what a cell of each field sums up to at most.
    """

    lengths: tuple[int, ...]
    most: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not 0 < most < 1 << WORD for most in self.most):
            raise SecureSumError(f"a cell sums up to {max(self.most):,}; expected at most {(1 << WORD) - 1:,}")

    @property
    def words(self) -> int:
        """Length of the vector."""
        return self._begins()[-1]

    def bits(self, field: int) -> int:
        return self.most[field].bit_length()

    def _begins(self) -> list[int]:
        begins = [0]
        for field, length in enumerate(self.lengths):
            begins.append(begins[-1] - (-length // (WORD // self.bits(field))))
        return begins

    def write(self, entries: Sequence[Entries]) -> Entries:
        """Return the words that clients add to, from the cells of every field; a word may stand several times."""
        begins, found = self._begins(), list[Entries]()
        for field, (client, cell, value) in enumerate(entries):
            a_word = WORD // self.bits(field)
            shift = (cell % a_word) * self.bits(field)
            found.append(Entries(client, begins[field] + cell // a_word, value << shift))
        return Entries(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def read(self, total: Vector) -> list[Ints]:
        """Return the cells of every field."""
        if total.dtype != np.uint32 or total.shape != (self.words,):
            raise SecureSumError(f"a sum of {total.shape} {total.dtype}; expected {self.words} numbers of 32 bits")
        begins, found = self._begins(), list[Ints]()
        for field, length in enumerate(self.lengths):
            bits = self.bits(field)
            words = total[begins[field] : begins[field + 1]].astype(np.int64)
            shifts = np.arange(WORD // bits, dtype=np.int64) * bits
            found.append((words[:, None] >> shifts & (1 << bits) - 1).reshape(-1)[:length])
        return found


def vectors(written: Entries, words: int, clients: int) -> list[Vector]:
    """Return each client's vector, as a real client would send it."""
    made = [np.zeros(words, np.uint32) for _ in range(clients)]
    bounds = np.searchsorted(written.client, np.arange(clients + 1)) if _sorted(written.client) else None
    if bounds is None:
        order = np.argsort(written.client, kind="stable")
        return vectors(Entries(*(column[order] for column in written)), words, clients)
    for vector, begin, end in zip(made, bounds[:-1], bounds[1:], strict=True):
        np.add.at(vector, written.cell[begin:end], written.value[begin:end].astype(np.uint32))
    return made


def _sorted(numbers: NDArray[Any]) -> bool:
    return bool((np.diff(numbers) >= 0).all())


def added(written: Entries, words: int, contributing: NDArray[np.bool_]) -> Vector:
    """Return the sum of the vectors of those that contribute, modulo 2³², without forming one of them."""
    chosen = contributing[written.client]
    total = np.zeros(words, np.int64)
    np.add.at(total, written.cell[chosen], written.value[chosen])
    return (total & 0xFFFFFFFF).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Sketch:
    """Rows of cells; `seed` and the number of a row fix its hash function, which is public."""

    depth: int
    width: int
    seed: int

    def cell(self, row: int, keys: Ints) -> Ints:
        """Return the cell of each n-gram in a row, counted from the first row's first one (SplitMix64's finaliser)."""
        with np.errstate(over="ignore"):
            x = keys.astype(np.uint64) + _GOLDEN * np.uint64(1 + row + 64 * self.seed)
            x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
        place = (x >> np.uint64(32)) * np.uint64(self.width) >> np.uint64(32)  # within [0, width)
        found: Ints = place.astype(np.int64) + row * self.width
        return found

    def fields(self, members: int) -> Fields:
        return Fields((self.depth * self.width,), (members,))

    def write(self, client: Ints, keys: Ints) -> Entries:
        """Return the cells that clients set, each once, by client."""
        cells = np.concatenate([self.cell(row, keys) for row in range(self.depth)])
        size = self.depth * self.width
        both = np.unique(np.tile(client, self.depth) * size + cells)
        return Entries(both // size, both % size, np.ones(both.size, np.int64))

    def admitted(self, cells: NDArray[Any], keys: Ints, least: float) -> tuple[Ints, NDArray[Any]]:
        """Return the keys whose estimate reaches `least`, and their estimates; keys drop out row by row."""
        estimate = np.full(keys.size, np.inf)
        for row in range(self.depth):
            estimate = np.minimum(estimate, cells[self.cell(row, keys)])
            kept = estimate >= least
            keys, estimate = keys[kept], estimate[kept]
        return keys, estimate


def recount_fields(grams: int, members: int, cap: int) -> Fields:
    """Return the fields of a recount: who wrote each n-gram and how often; with a cap of 1 both are the same."""
    return Fields((grams,), (members,)) if cap == 1 else Fields((grams, grams), (members, members * cap))


def write_recount(client: Ints, row: Ints, count: Ints, cap: int) -> list[Entries]:
    """Return what clients write of the n-grams in these rows of the list."""
    present = Entries(client, row, np.ones(row.size, np.int64))
    return [present] if cap == 1 else [present, Entries(client, row, np.minimum(count, cap))]


def read_recount(fields: Fields, total: Vector, clients: int, cap: int) -> tuple[Ints, Ints]:
    """Return by how many clients each n-gram was written, and how often.

    Raises:
      SecureSumError: no honest clients can have this sum.
    """
    found = fields.read(total)
    wrote, counts = found[0], found[-1]
    must(wrote.size == 0 or int(wrote.max()) <= clients, f"more than {clients} clients wrote one n-gram")
    must(bool(((wrote <= counts) & (counts <= cap * wrote)).all()), f"an n-gram is written 1 to {cap} times a client")
    return wrote, counts
