"""Which n-grams at least k clients wrote, and how often: level by level, over sums.

Level 1 is a recount of the vocabulary's words. Level n begins with a sketch of the n-grams whose first and last n − 1
words were released; it is read at these candidates only. Those that reach k are the list of a recount. What reaches k
in the recount is released.

So the sketch admits, and the recount decides: a sketch's estimate is never too low, but may be too high. The list of a
recount goes to all clients, and so it has n-grams of an estimate of k or more only. Where sums have noise, both numbers
have to reach k and a multiple of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.engine.sums.tallies import Entries, Sketch, read_recount, recount_fields, write_recount
from keyfed.errors import ConfigError, Lied
from keyfed.model.ngram import Ints
from keyfed.model.tables import GramTable, Texts, candidates, last_rows, limited, rows_in, shared_score, written
from keyfed.run.counts.gather import Gathering, PublicSum

MOST_ORDER = 6
DEPTH, DEPTH_NOISED = 4, 2
FALSE_ADMITTED = 10_000  # n-grams that noise alone may put on the list of a recount
FALSE_RELEASED = 1  # … and into what is released

Noised = Callable[[str, NDArray[Any], float], tuple[NDArray[np.float64], float]]
"""(what, cells, L2 norm of a client's cells) → cells with noise, and its standard deviation."""


@dataclass(frozen=True, slots=True)
class CountPlan:
    """The public numbers of a count: every client has them before the first sum.

    Attributes:
      order: longest n-gram.
      k: clients that an n-gram needs.
      cap: how often a client's use of one n-gram counts at most.
      most: n-grams of one length that a client contributes at most.
      sketches: one for each length from 2 on.
    """

    order: int
    k: int
    cap: int
    most: int
    vocab_sha256: str
    sketches: tuple[Sketch, ...]


def sketches_of(
    budget: float, order: int, members: int, vocab: int, seed: int, depth: int, said: str = "--"
) -> tuple[Sketch, ...]:
    """Return the sketches that a client's budget in bytes has room for, alike for every length.

    Args:
      said: what stands before the name of an option.

    Raises:
      ConfigError: a row would have fewer cells than the vocabulary has words.
    """
    if order == 1:
        return ()
    cells_a_word = 32 // members.bit_length()
    width = int(budget / 4 / (order - 1)) * cells_a_word // depth
    if width < vocab:
        needed = 4 * (order - 1) * -(-vocab * depth // cells_a_word)
        raise ConfigError(
            f"{budget / 1e6:g} MB a client leave {width:,} cells a row for each of {order - 1} sketches, fewer than "
            f"the vocabulary has words ({vocab:,}); give {said}megabytes {needed / 1e6:.2g} or "
            f"more, or a lower {said}order"
        )
    return tuple(Sketch(depth, width, seed + n) for n in range(2, order + 1))


@dataclass(frozen=True, slots=True)
class LevelFound:
    """What one level came to, for the report: candidates looked at, n-grams admitted by the sketch, released."""

    candidates: int
    admitted: int
    released: int
    threshold: float


def count_ngrams(
    gathering: Gathering, plan: CountPlan, vocab: int, noised: Noised | None = None
) -> tuple[list[GramTable], list[LevelFound]]:
    """Return the released n-grams of each length; a length of which nothing is released ends it."""
    tables: list[GramTable] = []
    report: list[LevelFound] = []
    for n in range(1, plan.order + 1):
        looked, keys, estimates = (
            (vocab, *words_listed(vocab)) if n == 1 else _admitted(gathering, plan, tables, vocab, noised)
        )
        if not keys.size:
            break
        table, threshold = _recounted(gathering, plan, tables, keys, estimates, vocab, noised)
        report.append(LevelFound(looked, keys.size, table.keys.size, threshold))
        if not table.keys.size:
            break
        tables.append(table)
    return tables, report


def write_sketch(text: Texts, tables: Sequence[GramTable], plan: CountPlan, vocab: int, members: int) -> Entries:
    """Return what clients write of the n-grams one longer than the tables': of those that most can have written."""
    found = written(text, tables, vocab)
    found = limited(found, shared_score(found.key, tables, vocab), plan.most)
    sketch = plan.sketches[len(tables) - 1]
    return sketch.fields(members).write([sketch.write(found.client, found.key)])


def write_list(
    text: Texts,
    tables: Sequence[GramTable],
    keys: Ints,
    estimates: NDArray[np.float64],
    plan: CountPlan,
    vocab: int,
    members: int,
) -> Entries:
    """Return what clients write of a list of n-grams, one longer than the tables'."""
    found = written(text, tables, vocab)
    rows = rows_in(keys, found.key)
    found = found.of(rows >= 0)
    found = limited(found, estimates[rows[rows >= 0]], plan.most)
    cells = write_recount(found.client, rows_in(keys, found.key), found.count, plan.cap)
    return recount_fields(keys.size, members, plan.cap).write(cells)


def words_listed(vocab: int) -> tuple[Ints, NDArray[np.float64]]:
    """Return the list of the first recount, every word, and in which order a client takes them where it must choose."""
    return np.arange(vocab), -np.arange(vocab).astype(np.float64)


def numbers_of(tables: Sequence[GramTable]) -> dict[str, Ints]:
    """Return released n-grams as the public numbers of a sum."""
    numbered = enumerate(tables, 1)
    return {f"n{n}.{name}": found for n, t in numbered for name, found in (("keys", t.keys), ("clients", t.clients))}


def _admitted(
    gathering: Gathering, plan: CountPlan, tables: Sequence[GramTable], vocab: int, noised: Noised | None
) -> tuple[int, Ints, NDArray[np.float64]]:
    """Sum the sketch of the next length and read it at the candidates."""
    n = len(tables) + 1
    sketch = plan.sketches[n - 2]
    fields = sketch.fields(gathering.members)
    cells: NDArray[Any] = np.zeros(sketch.depth * sketch.width, np.int64)

    def write(text: Texts) -> Entries:
        return write_sketch(text, tables, plan, vocab, gathering.members)

    for opened in gathering.sums(PublicSum(f"sketch {n}", numbers_of(tables)), fields.words, write):
        cells += fields.read(opened.total)[0]
    least = float(plan.k)
    if noised is not None:
        cells, std = noised(f"sketch {n}", cells, math.sqrt(plan.most * sketch.depth))
        looked = sum(keys.size for keys in candidates(tables, vocab))
        least += std * _quantile((FALSE_ADMITTED / max(looked, FALSE_ADMITTED + 1)) ** (1 / sketch.depth))
    count, keys, estimates = 0, [np.zeros(0, np.int64)], [np.zeros(0)]
    for block in candidates(tables, vocab):
        count += block.size
        some, estimate = sketch.admitted(cells, block, least)
        keys.append(some)
        estimates.append(estimate)
    return count, np.concatenate(keys), np.concatenate(estimates)


def _recounted(
    gathering: Gathering,
    plan: CountPlan,
    tables: Sequence[GramTable],
    keys: Ints,
    estimates: NDArray[np.float64],
    vocab: int,
    noised: Noised | None,
) -> tuple[GramTable, float]:
    """Count the n-grams of a list, and release those of at least k clients."""
    n = len(tables) + 1
    fields = recount_fields(keys.size, gathering.members, plan.cap)

    def write(text: Texts) -> Entries:
        return write_list(text, tables, keys, estimates, plan, vocab, gathering.members)

    wrote: NDArray[Any] = np.zeros(keys.size, np.int64)
    counts: NDArray[Any] = np.zeros(keys.size, np.int64)
    listed = {"list.keys": keys, "list.estimates": estimates} if tables else {}  # the words are known
    public = PublicSum(f"recount {n}", {**numbers_of(tables), **listed})
    for opened in gathering.sums(public, fields.words, write):
        try:
            own, often = read_recount(fields, opened.total, opened.clients, plan.cap)
        except Lied as e:
            gathering.leave_out(f"recount {n}", opened.clients, f"recount {n}: {e}")
            continue
        wrote, counts = wrote + own, counts + often
    least = float(plan.k)
    if noised is not None:
        wrote, std = noised(f"recount {n}", wrote, math.sqrt(plan.most))
        least += std * _quantile(FALSE_RELEASED / max(keys.size, 2))
        counts = wrote = np.rint(wrote).astype(np.int64)
    kept = released(wrote, least)
    keys = keys[kept]
    suffix = last_rows(keys, tables, vocab) if tables else np.zeros(keys.size, np.int64)
    return GramTable(keys, wrote[kept], counts[kept], suffix), least


def released(clients: NDArray[Any], least: float) -> NDArray[np.bool_]:
    """Say which n-grams are released: no number below k passes, `least` is k or more."""
    return np.asarray(clients >= least)


def _quantile(chance: float) -> float:
    """Return how many standard deviations a normal exceeds with this chance; 0 where that is even."""
    return max(0.0, -NormalDist().inv_cdf(min(max(chance, 1e-300), 0.5)))
