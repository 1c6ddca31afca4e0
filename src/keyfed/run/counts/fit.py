"""Smoothing of counts and weights of the mixture, fitted on clients' validation text by sums of histograms.

Every client counts its first `MOST_TOKENS` validation tokens. A published validation text is no client's: the server
reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.engine.sums.tallies import Entries, Fields
from keyfed.errors import DataError
from keyfed.model.mixture import BINS, CONFIDENCE_EDGES, COUNT_EDGES, FEWEST, Mixture, fit_weights, mixture_of
from keyfed.model.ngram import Ints, KneserNey, Level
from keyfed.model.smoothing import BUCKETS, WIDTH, TextReading, fitted, read_on, smoothed, tallied, unsmoothed
from keyfed.model.tables import GramTable, Texts
from keyfed.run.counts.gather import Gathering
from keyfed.run.counts.levels import Noised

MOST_TOKENS = 4_096
ROWS = (len(COUNT_EDGES) + 1) * (len(CONFIDENCE_EDGES) + 1)  # of the mixture's histogram, for each length matched


def opening(streams: Mapping[str, NDArray[Any]], most: int = MOST_TOKENS) -> dict[str, NDArray[Any]]:
    """Return what of each client's validation text is counted."""
    found = {name: stream[:most] for name, stream in streams.items() if len(stream) > 1}
    if not found:
        raise DataError(
            "there is no validation text, on which discounts and weights are fitted; clients have too few lines"
        )
    return found


def summed_cells(
    gathering: Gathering,
    purpose: str,
    public: bytes,
    length: int,
    cells: Callable[[Texts], tuple[Ints, Ints]],
    noised: Noised | None = None,
    most: int = MOST_TOKENS,
) -> NDArray[Any]:
    """Sum histograms over clients.

    Args:
      cells: the client and the cell of every token of a block.
      most: tokens of a client; with noise all of them may lie in one cell.
    """
    fields = Fields((length,), (gathering.members * most,))

    def write(text: Texts) -> Entries:
        client, cell = cells(text)
        both, count = np.unique(client * length + cell, return_counts=True)
        return fields.write([Entries(both // length, both % length, count)])

    total: NDArray[Any] = np.zeros(length, np.int64)
    for opened in gathering.sums(purpose, public, fields.words, write):
        total += fields.read(opened.total)[0]
    return total if noised is None else noised(purpose, total, float(most))[0]


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

        public = lower.tobytes() + tables[n - 1].keys.tobytes()
        found = summed_cells(gathering, f"smoothing {n}", public, BUCKETS * WIDTH, cells, noised, most)
        levels.append(fitted(level, found))
        readings = {id(text): read_on(levels[-1], level, text, readings[id(text)], n) for text in texts}
        lower = levels[-1].prob
    return smoothed(levels, vocab)


def fit_mixture(
    gathering: Gathering,
    order: int,
    cells: Callable[[Texts], tuple[Ints, Ints]],
    noised: Noised | None = None,
    most: int = MOST_TOKENS,
) -> tuple[Mixture, str]:
    """Fit the weights of the network from one summed histogram; return them, and what to say of empty buckets."""
    rows = order * ROWS
    found = summed_cells(gathering, "mixture", order.to_bytes(4, "big"), rows * BINS, cells, noised, most)
    found = np.maximum(found.reshape(rows, BINS), 0)
    tokens = found.sum(1)
    few = int((tokens < FEWEST).sum())
    note = (
        f"{few} of {rows} buckets of the mixture have fewer than {FEWEST} of {math.floor(tokens.sum()):,} validation "
        "tokens; they take the weight of all together"
    )
    return mixture_of(fit_weights(found), order), note if few else ""
