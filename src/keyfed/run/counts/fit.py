"""Smoothing of counts and weights of the mixture, fitted on clients' validation text by sums of histograms.

Every client counts its first `MOST_TOKENS` validation tokens. A published validation text is no client's: the server
reads it, and all of it.

Next to its histogram a client adds a 1 for every bucket that its tokens are in. What is fitted for a bucket is of k
clients or more: one of fewer is emptied, and takes what all others come to together. Sums with noise do without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.engine.sums.tallies import Entries, Fields
from keyfed.errors import DataError
from keyfed.model.mixture import BEST, BINS, CONFIDENCE_EDGES, FEWEST, Mixture, fit_weights, gains, mixture_of
from keyfed.model.ngram import Floats, Ints, KneserNey, Level, level_of
from keyfed.model.smoothing import BUCKETS, WIDTH, TextReading, fitted, read_on, smoothed, tallied, unsmoothed
from keyfed.model.tables import GramTable, Texts
from keyfed.run.counts.gather import Gathering, PublicSum
from keyfed.run.counts.levels import Noised, numbers_of
from keyfed.run.counts.noise import clear_of_noise

MOST_TOKENS = 4_096
TOKENS = "tokens"  # among the public numbers of a histogram: how many of each client's first tokens are counted
ROWS = (len(BEST.edges) + 1) * (len(CONFIDENCE_EDGES) + 1)  # of the mixture's histogram, for each length matched


def opening(streams: Mapping[str, NDArray[Any]], most: int | None = MOST_TOKENS) -> dict[str, NDArray[Any]]:
    """Return what of each client's validation text is counted; None for no limit, of a published text."""
    found = {name: stream[:most] for name, stream in streams.items() if len(stream) > 1}
    if not found:
        raise DataError(
            "there is no validation text, on which discounts and weights are fitted; clients have too few lines"
        )
    return found


@dataclass(frozen=True, slots=True)
class Histogram:
    """The layout of a histogram's cells, alike for all clients.

    Attributes:
      buckets: each has `width` cells.
      counted: whether clients are counted by bucket, too.
    """

    buckets: int
    width: int
    counted: bool = True

    @property
    def length(self) -> int:
        return self.buckets * self.width

    def fields(self, members: int, most: int) -> Fields:
        """Return the fields of a sum: all of a client's tokens, at most so many, may lie in one cell."""
        lengths, sizes = (self.length, self.buckets), (members * most, members)
        return Fields(lengths, sizes) if self.counted else Fields(lengths[:1], sizes[:1])

    def write(self, client: Ints, cell: Ints, members: int, most: int) -> Entries:
        """Return what clients write, from the client and the cell of every token."""
        both, count = np.unique(client * self.length + cell, return_counts=True)
        entries = [Entries(both // self.length, both % self.length, count)]
        if self.counted:
            there = np.unique(client * self.buckets + cell // self.width)
            entries.append(Entries(there // self.buckets, there % self.buckets, np.ones(there.size, np.int64)))
        return self.fields(members, most).write(entries)


SMOOTHING = Histogram(BUCKETS, WIDTH)


def mixture_histogram(order: int) -> Histogram:
    """Return the layout of the mixture's histogram."""
    return Histogram(order * ROWS, BINS)


def enough(clients: Ints, k: int) -> NDArray[np.bool_]:
    """Say what buckets are of k clients or more."""
    return np.asarray(clients >= k)


def summed_cells(
    gathering: Gathering,
    public: PublicSum,
    layout: Histogram,
    cells: Callable[[Texts], tuple[Ints, Ints]],
    noised: Noised | None = None,
    most: int = MOST_TOKENS,
    k: int = 0,
) -> NDArray[Any]:
    """Sum histograms over clients; return [buckets, width].

    Args:
      cells: the client and the cell of every token of a block.
      most: tokens of a client.
      k: clients that a bucket needs, else it is empty; 0 where clients are not counted.
    """
    layout = replace(layout, counted=k > 0)
    fields = layout.fields(gathering.members, most)
    public = PublicSum(public.purpose, {**public.numbers, TOKENS: np.array([most])})

    def write(text: Texts) -> Entries:
        return layout.write(*cells(text), gathering.members, most)

    total: NDArray[Any] = np.zeros(layout.length, np.int64)
    clients = np.zeros(layout.buckets, np.int64)
    for opened in gathering.sums(public, fields.words, write):
        found = fields.read(opened.total)
        total += found[0]
        clients += found[1] if k else 0
    if noised is not None:
        total = noised(public.purpose, total, float(most))[0]
    return np.where(enough(clients, k)[:, None], total.reshape(layout.buckets, layout.width), 0)


def smoothing_numbers(tables: Sequence[GramTable], levels: Sequence[Level]) -> dict[str, NDArray[Any]]:
    """Return the public numbers that the next length is smoothed by: what was released, and what was fitted."""
    numbers: dict[str, NDArray[Any]] = {**numbers_of(tables)}
    numbers |= {f"n{n}.counts": table.counts for n, table in enumerate(tables, 1)}
    for n, level in enumerate(levels, 1):
        numbers |= {f"n{n}.prob": level.prob, f"n{n}.backoff": level.backoff}
    return numbers


def smoothing_cells(
    text: Texts, tables: Sequence[GramTable], fitted_levels: Sequence[tuple[Floats, Floats]], vocab: int
) -> tuple[Ints, Ints]:
    """Return what a client adds for the next length, which it has to read from the beginning: see `fit_levels`.

    Args:
      fitted_levels: `prob` and `backoff` of the shorter lengths.
    """
    reading, lower = TextReading.begun(text, vocab), np.array([1 / vocab])
    for n, (prob, backoff) in enumerate(fitted_levels, 1):
        level = unsmoothed(tables, n, lower, vocab)
        done = level_of(level.table.keys, prob, backoff, level.size, vocab)
        reading, lower = read_on(done, level, text, reading, n), prob
    n = len(fitted_levels) + 1
    return tallied(unsmoothed(tables, n, lower, vocab), text, reading, n)


def fit_levels(
    gathering: Gathering,
    tables: Sequence[GramTable],
    vocab: int,
    noised: Noised | None = None,
    most: int = MOST_TOKENS,
    k: int = 0,
) -> KneserNey:
    """Smooth the released n-grams (`model.smoothing`), one sum for each length.

    Args:
      k: see `summed_cells`.
    """
    texts = [group.texts for group in gathering.groups]
    readings = {id(text): TextReading.begun(text, vocab) for text in texts}
    levels: list[Level] = []
    lower = np.array([1 / vocab])
    for n in range(1, len(tables) + 1):
        level = unsmoothed(tables, n, lower, vocab)

        def cells(text: Texts, n: int = n, level: Any = level, at: Any = readings) -> tuple[Ints, Ints]:
            return tallied(level, text, at[id(text)], n)

        public = PublicSum(f"smoothing {n}", smoothing_numbers(tables, levels))
        found = summed_cells(gathering, public, SMOOTHING, cells, noised, most, k)
        levels.append(fitted(level, found))
        readings = {id(text): read_on(levels[-1], level, text, readings[id(text)], n) for text in texts}
        lower = levels[-1].prob
    return smoothed(levels, vocab)


def fit_mixture(
    gathering: Gathering,
    counts: bytes,
    order: int,
    cells: Callable[[Texts], tuple[Ints, Ints]],
    noised: Noised | None = None,
    most: int = MOST_TOKENS,
    k: int = 0,
) -> tuple[Mixture, str]:
    """Fit the weights of the network from one summed histogram; return them, and what to say of empty buckets.

    With noise the mixture is the network alone, unless the weights gain more than noise could be (`mixture.gains`).

    Args:
      counts: the file that the weights are fitted for.
      noised: adds noise, and cuts nothing off.
      k: see `summed_cells`.
    """
    rows = order * ROWS
    public = PublicSum("mixture", {"counts": np.frombuffer(counts, np.uint8)})
    found = summed_cells(gathering, public, mixture_histogram(order), cells, None, most, k)
    std, noisy = 0.0, found
    if noised is not None:
        flat, std = noised(public.purpose, found.reshape(-1), float(most))
        noisy = flat.reshape(found.shape)
        found = clear_of_noise(noisy, std)
    tokens = found.sum(1)
    few = int((tokens < FEWEST).sum())
    note = (
        f"{few} of {rows} buckets of the mixture have fewer than {FEWEST} of {math.floor(tokens.sum()):,} validation "
        f"tokens{f', or those of fewer than {k} clients' if k else ''}; they take the weight of all others together"
    )
    weights = fit_weights(found)
    if noised is not None and not gains(noisy, std, weights):
        return mixture_of(np.ones(rows), order), "the mixture is its network: under this noise counts gain nothing"
    return mixture_of(weights, order), note if few else ""
