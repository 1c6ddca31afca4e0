"""Smoothing of counts and weights of the mixture, fitted on clients' validation text by sums of histograms.

Every client counts its first `MOST_TOKENS` validation tokens. A published validation text is no client's: the server
reads it, and all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


def histogram_fields(length: int, members: int, most: int) -> Fields:
    """Return the fields of a histogram: all of a client's tokens, at most so many, may lie in one cell."""
    return Fields((length,), (members * most,))


def write_histogram(client: Ints, cell: Ints, length: int, members: int, most: int) -> Entries:
    """Return what clients write, from the client and the cell of every token."""
    both, count = np.unique(client * length + cell, return_counts=True)
    return histogram_fields(length, members, most).write([Entries(both // length, both % length, count)])


def summed_cells(
    gathering: Gathering,
    public: PublicSum,
    length: int,
    cells: Callable[[Texts], tuple[Ints, Ints]],
    noised: Noised | None = None,
    most: int = MOST_TOKENS,
) -> NDArray[Any]:
    """Sum histograms over clients.

    Args:
      cells: the client and the cell of every token of a block.
      most: tokens of a client.
    """
    fields = histogram_fields(length, gathering.members, most)
    public = PublicSum(public.purpose, {**public.numbers, TOKENS: np.array([most])})

    def write(text: Texts) -> Entries:
        return write_histogram(*cells(text), length, gathering.members, most)

    total: NDArray[Any] = np.zeros(length, np.int64)
    for opened in gathering.sums(public, fields.words, write):
        total += fields.read(opened.total)[0]
    return total if noised is None else noised(public.purpose, total, float(most))[0]


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
    gathering: Gathering, tables: Sequence[GramTable], vocab: int, noised: Noised | None = None, most: int = MOST_TOKENS
) -> KneserNey:
    """Smooth the released n-grams (`model.smoothing`), one sum for each length."""
    texts = [group.texts for group in gathering.groups]
    readings = {id(text): TextReading.begun(text, vocab) for text in texts}
    levels: list[Level] = []
    lower = np.array([1 / vocab])
    for n in range(1, len(tables) + 1):
        level = unsmoothed(tables, n, lower, vocab)

        def cells(text: Texts, n: int = n, level: Any = level, at: Any = readings) -> tuple[Ints, Ints]:
            return tallied(level, text, at[id(text)], n)

        public = PublicSum(f"smoothing {n}", smoothing_numbers(tables, levels))
        found = summed_cells(gathering, public, BUCKETS * WIDTH, cells, noised, most)
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
) -> tuple[Mixture, str]:
    """Fit the weights of the network from one summed histogram; return them, and what to say of empty buckets.

    With noise the mixture is the network alone, unless the weights gain more than noise could be (`mixture.gains`).

    Args:
      counts: the file that the weights are fitted for.
      noised: adds noise, and cuts nothing off.
    """
    rows = order * ROWS
    public = PublicSum("mixture", {"counts": np.frombuffer(counts, np.uint8)})
    found = summed_cells(gathering, public, rows * BINS, cells, None, most).reshape(rows, BINS)
    std, noisy = 0.0, found
    if noised is not None:
        flat, std = noised(public.purpose, found.reshape(-1), float(most))
        noisy = flat.reshape(rows, BINS)
        found = clear_of_noise(noisy, std)
    tokens = found.sum(1)
    few = int((tokens < FEWEST).sum())
    note = (
        f"{few} of {rows} buckets of the mixture have fewer than {FEWEST} of {math.floor(tokens.sum()):,} validation "
        "tokens; they take the weight of all together"
    )
    weights = fit_weights(found)
    if noised is not None and not gains(noisy, std, weights):
        return mixture_of(np.ones(rows), order), "the mixture is its network: under this noise counts gain nothing"
    return mixture_of(weights, order), note if few else ""
