r"""Probabilities from released counts: a back-off model whose numbers are fitted on clients' validation text, as sums.

A federation lacks what Kneser and Ney count: n-grams of one client, which most n-grams are. What it has for a context
h is the count m(h) of all that follows it, and m(hw) of the words that k clients or more wrote there. With K(h) these
words and h' the context less its oldest word,

.. math::
   p(w \mid h) = (1 - β_h) \left[ λ_h \frac{a(hw)}{\sum_{v ∈ K} a(hv)}
                 + (1 - λ_h) \frac{p(w \mid h')}{\sum_{v ∈ K} p(v \mid h')} \right], \quad w ∈ K(h)

.. math::
   p(w \mid h) = β_h \frac{p(w \mid h')}{1 - \sum_{v ∈ K} p(v \mid h')}, \quad w ∉ K(h)

β and λ are those of the context's bucket: how large m is, and which share of it is of released words. β is the share of
validation tokens outside K(h); λ is fitted by EM (`mixture.fit_weights`). Both need sums over clients alone: tokens by
bucket, and histograms of ratios. One sum serves one length, the shortest first.

A shorter context is needed mostly where a longer one failed. So a count is reduced by what longer n-grams explain:

.. math:: a(hw) = m(hw) - θ \sum_{u:\, uhw \text{ released}} m(uhw), \qquad a ≥ 1/2

θ = 0.8 was chosen on the built-in chat (docs/counts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.model.mixture import BINS, FEWEST, binned, fit_weights
from keyfed.model.ngram import Floats, Ints, KneserNey, Level, level_of
from keyfed.model.tables import GramTable, Texts, keys_at

THETA = 0.8
TOTALS = (5, 10, 20, 50, 100, 300, 1_000, 5_000)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BUCKETS = (len(TOTALS) + 1) * (len(SHARES) + 1)
WIDTH = BINS + 1  # of a bucket's row: the ratios of tokens inside K(h), and how many lie outside
CERTAIN = 1 - 1e-9


@dataclass(frozen=True, eq=False)
class Unsmoothed:
    """One length before its β and λ are known.

    Attributes:
      relative: a(hw) / Σ a(hv) of each n-gram; `lower` p(w | h'); `below` Σ p(v | h') over K(h) of each context.
      bucket: of each context; `size` its released continuations.
    """

    table: GramTable
    relative: Floats
    lower: Floats
    below: Floats
    bucket: Ints
    size: Ints
    vocab: int


def unsmoothed(tables: Sequence[GramTable], n: int, lower: Floats, vocab: int) -> Unsmoothed:
    """Prepare the n-grams of length n.

    Args:
      lower: p of each (n − 1)-gram; below the unigrams one number, 1/V.
    """
    table, contexts = tables[n - 1], tables[n - 2].keys.size if n > 1 else 1
    context = table.keys // vocab
    reduced = reduced_counts(tables, n)
    totals = np.bincount(context, table.counts, contexts)
    whole = tables[n - 2].counts if n > 1 else totals
    share = np.clip(totals / np.maximum(whole, 1), 0, 1)
    bucket = np.searchsorted(TOTALS, totals, "right") * (len(SHARES) + 1) + np.searchsorted(SHARES, share, "right")
    own = lower[table.suffix]
    return Unsmoothed(
        table,
        relative=reduced / np.bincount(context, reduced, contexts)[context],
        lower=own,
        below=np.bincount(context, own, contexts).astype(np.float64),
        bucket=bucket.astype(np.int64),
        size=np.bincount(context, minlength=contexts),
        vocab=vocab,
    )


def reduced_counts(tables: Sequence[GramTable], n: int) -> Floats:
    """Return a(hw) of the n-grams of length n (module docstring)."""
    own = tables[n - 1].counts.astype(np.float64)
    if n == len(tables):
        return np.maximum(own, 0.5)
    longer = tables[n]
    explained = np.bincount(longer.suffix, longer.counts, own.size)
    return np.maximum(own - THETA * np.minimum(explained, own), 0.5)


@dataclass(frozen=True, eq=False)
class TextReading:
    """Where validation text stands after the levels so far: the row of the n-gram at each token, and its p."""

    rows: Ints | None
    p: Floats

    @classmethod
    def begun(cls, text: Texts, vocab: int) -> TextReading:
        return cls(None, np.full(text.tokens.size, 1 / vocab))


def _places(level: Unsmoothed, text: Texts, reading: TextReading, n: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the context of each token, the row of its n-gram, and where the context has continuations."""
    if reading.rows is None:
        context = np.zeros(text.tokens.size, np.int64)
        rows = level.table.find(keys_at(text, None, n, level.vocab))
        return context, rows, np.ones(text.tokens.size, np.bool_)
    before = np.concatenate([np.array([-1], np.int64), reading.rows[:-1]])
    context = np.where(text.reach >= n, before, -1)
    seen = (context >= 0) & (level.size[np.maximum(context, 0)] > 0)
    rows = np.where(context >= 0, level.table.find(context * level.vocab + text.tokens), -1)
    return np.maximum(context, 0), rows, seen


def tallied(level: Unsmoothed, text: Texts, reading: TextReading, n: int) -> tuple[Ints, Ints]:
    """Return the tokens' clients and their cells of the flat [BUCKETS, WIDTH] histogram: what clients send, summed."""
    context, rows, seen = _places(level, text, reading, n)
    chosen = np.flatnonzero(seen & text.predicted)
    at, row = context[chosen], rows[chosen]
    inside = row >= 0
    own = np.maximum(row, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(level.relative[own] * level.below[at] / level.lower[own])
    cell = np.where(inside, binned(np.where(inside, ratio, 0)), BINS)
    return text.client[chosen], level.bucket[at] * WIDTH + cell


def fitted(level: Unsmoothed, summed: NDArray[Any]) -> Level:
    """Return the level with β and λ from the summed histogram, [BUCKETS, WIDTH]."""
    found = np.maximum(summed.reshape(BUCKETS, WIDTH).astype(np.float64), 0)
    weight = fit_weights(found[:, :BINS])
    outside, tokens = found[:, BINS], found.sum(1)
    every = outside.sum() / tokens.sum() if tokens.any() else 0.5
    beta = np.clip((outside + FEWEST * every) / (tokens + FEWEST), 1e-4, 0.999)[level.bucket]
    beta = np.where(level.below >= CERTAIN, 0.0, beta)
    own = weight[level.bucket]
    context = level.table.keys // level.vocab
    inside = own[context] * level.relative + (1 - own[context]) * level.lower / level.below[context]
    backoff = np.where(level.size > 0, beta / np.maximum(1 - level.below, 1 - CERTAIN), 1.0)
    return level_of(level.table.keys, (1 - beta[context]) * inside, np.append(backoff, 1.0), level.size, level.vocab)


def read_on(level: Level, unfitted: Unsmoothed, text: Texts, reading: TextReading, n: int) -> TextReading:
    """Return where the text stands after a fitted level."""
    context, rows, seen = _places(unfitted, text, reading, n)
    p = np.where(seen, level.backoff[context] * reading.p, reading.p)
    return TextReading(rows, np.where(rows >= 0, level.prob[np.maximum(rows, 0)], p))


def smoothed(levels: Sequence[Level], vocab: int) -> KneserNey:
    """Return the fitted levels as a model that reads text."""
    return KneserNey(len(levels), vocab, tuple(levels), ())
