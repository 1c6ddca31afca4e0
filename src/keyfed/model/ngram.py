r"""The models to beat: an add-one-half unigram and interpolated Kneser–Ney n-grams.

Both are fitted on token streams (one per client; no n-gram crosses from one stream into the next) and
answer three questions: the nats of every token after the first, the k best next tokens, and the whole next
distribution. End-of-line is an ordinary token, so contexts run across lines.

**Kneser–Ney.** With :math:`h'` the context :math:`h` less its oldest word,

.. math::
   p_n(w \mid h) = \frac{a(hw) - D_n(a(hw))}{S(h)} + \gamma(h)\, p_{n-1}(w \mid h'), \qquad
   p_0(w) = \frac{1}{V}

.. math::
   S(h) = \sum_w a(hw), \qquad \gamma(h) = \frac{1}{S(h)} \sum_{w:\,a(hw)>0} D_n(a(hw)),

and :math:`p_n(\cdot \mid h) = p_{n-1}(\cdot \mid h')` where :math:`h` was never continued. At the highest
order :math:`a(g)` is how often :math:`g` occurs; below it is the number of different left neighbours of
:math:`g`. **The start of a stream counts as one left neighbour**, the same for all streams. So every n-gram
seen has :math:`a \ge 1` without padding. One that only opens streams has :math:`a = 1` however many
clients start with it. Near the start of a stream the context is simply shorter, and so is the order.

Variants: *interpolated modified* Kneser–Ney, :math:`D_n(1), D_n(2), D_n(3{+})` per order from
counts-of-counts (Chen & Goodman's "modified"), and the plain one with a single :math:`D_n`. Nothing is tuned
on held-out text and no n-gram is pruned.

References:
  Kneser & Ney, *Improved backing-off for m-gram language modeling*, ICASSP 1995.
  Chen & Goodman, *An empirical study of smoothing techniques for language modeling*, Computer Speech &
  Language 13(4), 1999 (interpolated and modified form, estimates of the discounts).

Example:
  >>> model = fit_kneser_ney([np.array([4, 5, 2, 4, 5, 2, 4], np.int32)], vocab_size=6, order=3)
  >>> model.top(np.array([4, 5], np.int32), k=1).tolist()
  [[5]]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, DataError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Tokens = NDArray[np.integer[Any]]

UNIGRAM_PRIOR = 0.5
CELLS = 1 << 20  # candidates ranked at a time by `top`; bounds its memory


@dataclass(frozen=True, eq=False)
class Unigram:
    r"""Frequency of each token, whatever came before.

    .. math:: p(w) = \frac{c(w) + 1/2}{\sum_v c(v) + V/2}

    Attributes:
      vocab_size: V; every id below it has positive probability.
      prob: p, [V].
      ranked: ids from most to least probable, ties by lower id, [V].
    """

    vocab_size: int
    prob: Floats
    ranked: Ints

    def nats(self, stream: Tokens) -> Floats:
        """Return −log p of every token after the first, [n − 1]."""
        return -np.log(self.prob[_checked(stream, self.vocab_size)[1:]])

    def top(self, stream: Tokens, k: int) -> NDArray[np.int32]:
        """Return the k most probable tokens for every position after the first, [n − 1, k]."""
        _check_k(k, self.vocab_size)
        positions = max(_checked(stream, self.vocab_size).size - 1, 0)
        return np.tile(self.ranked[:k].astype(np.int32), (positions, 1))

    def next(self, context: Tokens) -> Floats:
        """Return the distribution of the next token, [V]; the context does not matter."""
        _checked(context, self.vocab_size)
        return self.prob.copy()


@dataclass(frozen=True, eq=False)
class Level:
    """All n-grams of one length n, sorted by key = context · V + word.

    A context is the row of its (n − 1)-gram in the level below (0, the empty context, for n = 1), so its
    continuations lie side by side. Rows of contexts end with one more, reached by index −1: the context
    that was never seen.

    Attributes:
      keys: [grams], ascending.
      prob: p_n(w | h) of each n-gram, already interpolated, [grams].
      ranked: rows by context, then falling `prob`, then word, [grams].
      start: first continuation of each context, [contexts + 1].
      size: number of its continuations, [contexts + 1].
      backoff: γ, 1 where a context has no continuation, [contexts + 1].
    """

    keys: Ints
    prob: Floats
    ranked: Ints
    start: Ints
    size: Ints
    backoff: Floats

    def find(self, keys: Ints) -> Ints:
        """Return the row of each key, −1 where there is none; same shape."""
        if not self.keys.size:
            return np.full(keys.shape, -1, np.int64)
        rows = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return np.where(self.keys[rows] == keys, rows, -1)


@dataclass(frozen=True, eq=False)
class KneserNey:
    """Interpolated Kneser–Ney model (equations: module docstring).

    Attributes:
      order: longest n-gram, so the context is at most order − 1 tokens.
      vocab_size: V; every id below it has positive probability, seen or not.
      levels: n-grams of length 1, …, order.
      discounts: D(1), D(2), D(3+) of each length.
    """

    order: int
    vocab_size: int
    levels: tuple[Level, ...]
    discounts: tuple[tuple[float, float, float], ...]

    def nats(self, stream: Tokens) -> Floats:
        """Return −log p of every token after the first, given those before it, [n − 1]."""
        tokens = _checked(stream, self.vocab_size)
        p: Floats = np.full(tokens.size, 1.0 / self.vocab_size)
        for level, contexts, grams in self.trace(tokens):
            p *= level.backoff[contexts[:-1]]
            seen = grams >= 0
            p[seen] = level.prob[grams[seen]]
        return -np.log(p[1:])

    def top(self, stream: Tokens, k: int) -> NDArray[np.int32]:
        r"""Return the k most probable tokens for every position after the first, [n − 1, k].

        Exact for interpolated models, ties by lower id. A word that never followed :math:`h` has
        :math:`\gamma(h)\,p_{n-1}(w \mid h')`, and one that did has no less. So the k best of order n are among the k
        best continuations of :math:`h` and the k best of order n − 1: no level looks at more than 2k words.

        Not exact for counts that back off (`model.smoothing`), where a longer context can lower a word. A word that
        was not among the k best of order n − 1 may then be missed; `run.counts.mixing.Dense` has the whole
        distribution.
        """
        _check_k(k, self.vocab_size)
        tokens = _checked(stream, self.vocab_size)
        table = np.stack([contexts[1:-1] for _, contexts, _ in self.trace(tokens)], axis=1)
        table, where = np.unique(table, axis=0, return_inverse=True)  # equal contexts are ranked once
        best = np.empty((len(table), k), np.int32)
        step = max(1, CELLS // k)
        for at in range(0, len(table), step):
            best[at : at + step] = self._best(table[at : at + step], k)
        return best[where.reshape(-1)]

    def next(self, context: Tokens) -> Floats:
        """Return the distribution of the token after `context`, [V]; only its last order − 1 tokens count."""
        tokens = _checked(context, self.vocab_size)
        p = np.full(self.vocab_size, 1.0 / self.vocab_size)
        for level, contexts, _ in self.trace(tokens[max(tokens.size - self.order + 1, 0) :]):
            h = contexts[-1]
            p *= level.backoff[h]
            rows = slice(level.start[h], level.start[h] + level.size[h])
            p[level.keys[rows] % self.vocab_size] = level.prob[rows]
        return p

    def trace(self, tokens: Ints) -> Iterator[tuple[Level, Ints, Ints]]:
        """Yield per length n: its level, the context before each position [t + 1], the n-gram there [t]."""
        contexts = np.zeros(tokens.size + 1, np.int64)
        for level in self.levels:
            grams = level.find(contexts[:-1] * self.vocab_size + tokens)
            yield level, contexts, grams
            contexts = np.concatenate([np.array([-1]), grams])

    def _best(self, table: Ints, k: int) -> Ints:
        """Return the k most probable words for each row of context ids (one column a level), [rows, k]."""
        words = np.tile(np.arange(k, dtype=np.int64), (len(table), 1))
        p = np.full(words.shape, 1.0 / self.vocab_size)
        for level, h in zip(self.levels, table.T[:, :, None], strict=True):
            if not level.keys.size:
                break
            p *= level.backoff[h]
            p[level.find(h * self.vocab_size + words) >= 0] = -1.0  # ranked among the continuations instead
            inside = np.arange(k) < level.size[h]
            rows = level.ranked[np.where(inside, level.start[h] + np.arange(k), 0)]
            words = np.hstack([words, np.where(inside, level.keys[rows] % self.vocab_size, -1)])
            p = np.hstack([p, np.where(inside, level.prob[rows], -1.0)])
            keep = np.lexsort((words, -p), axis=-1)[:, :k]
            words, p = np.take_along_axis(words, keep, -1), np.take_along_axis(p, keep, -1)
        return words


@dataclass(frozen=True, eq=False)
class _Counts:
    """N-grams of one length: key, raw count, whether one opens a stream, row of the suffix one shorter."""

    keys: Ints
    count: Ints
    opens: NDArray[np.bool_]
    suffix: Ints


def fit_unigram(streams: Sequence[Tokens], vocab_size: int) -> Unigram:
    """Count the tokens of all streams (first ones too) and add one half to every id.

    Example:
      >>> fit_unigram([np.array([1, 1, 0])], vocab_size=2).next(np.array([])).tolist()
      [0.375, 0.625]
    """
    counts = np.zeros(vocab_size, np.int64)
    for stream in streams:
        counts += np.bincount(_checked(stream, vocab_size), minlength=vocab_size)
    prob = (counts + UNIGRAM_PRIOR) / (counts.sum() + UNIGRAM_PRIOR * vocab_size)
    return Unigram(vocab_size, prob, np.argsort(-prob, kind="stable"))


def fit_kneser_ney(streams: Sequence[Tokens], vocab_size: int, order: int = 5, modified: bool = True) -> KneserNey:
    """Count the n-grams of all streams up to `order` and smooth them (equations: module docstring).

    Args:
      streams: token ids, one array per client; n-grams stay inside a stream. Any may be empty.
      vocab_size: V, above every id.
      order: longest n-gram, at least 1.
      modified: three discounts per order (Chen & Goodman) instead of one (Kneser & Ney).
    """
    if order < 1:
        raise ConfigError(f"order is {order}; an n-gram model needs order 1 or more.")
    counts = _count(streams, vocab_size, order)
    levels: list[Level] = []
    discounts: list[tuple[float, float, float]] = []
    lower = np.array([1.0 / vocab_size])  # p_{n−1} of every (n − 1)-gram; below the unigrams: uniform
    for n, grams in enumerate(counts):
        adjusted = grams.count
        if n + 1 < order:
            adjusted = np.bincount(counts[n + 1].suffix, minlength=len(grams.keys)) + grams.opens
        discount = estimate_discounts(adjusted, modified)
        levels.append(_smooth(grams, adjusted, discount, lower, vocab_size))
        discounts.append(discount)
        lower = levels[-1].prob
    return KneserNey(order, vocab_size, tuple(levels), tuple(discounts))


def estimate_discounts(counts: Ints, modified: bool) -> tuple[float, float, float]:
    r"""Estimate D(1), D(2), D(3+) from counts-of-counts.

    .. math::
       Y = \frac{n_1}{n_1 + 2 n_2}, \qquad D(i) = i - (i+1)\, Y\, \frac{n_{i+1}}{n_i}, \quad i = 1, 2, 3

    with :math:`n_i` the number of n-grams of count i. If any of :math:`n_1 … n_4` is 0 or a D(i) is not
    positive (tiny data, or unigrams of a closed vocabulary), and whenever not `modified`, all three are Y; if
    :math:`n_1` or :math:`n_2` is 0, one half. Each lies strictly between 0 and i, so every γ is positive.

    Example:
      >>> estimate_discounts(np.array([1, 1, 1, 2]), modified=True)
      (0.6, 0.6, 0.6)
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6).tolist()
    if not (n[1] and n[2]):
        return 0.5, 0.5, 0.5
    y = n[1] / (n[1] + 2 * n[2])
    if modified and n[3] and n[4]:
        one, two, three = (i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3))
        if min(one, two, three) > 0:
            return one, two, three
    return y, y, y


def _count(streams: Sequence[Tokens], vocab_size: int, order: int) -> list[_Counts]:
    """Count the n-grams of length 1 … order; the row of one is the context id of those one longer."""
    parts = [_checked(stream, vocab_size) for stream in streams]
    tokens = np.concatenate([np.zeros(0, np.int64), *parts])
    offset = np.concatenate([np.zeros(0, np.int64), *(np.arange(part.size) for part in parts)])
    shorter = np.zeros(tokens.size, np.int64)  # row of the (n − 1)-gram that ends here
    counts: list[_Counts] = []
    for n in range(1, order + 1):
        ends = np.flatnonzero(offset >= n - 1)
        contexts = shorter[ends - 1] if n > 1 else shorter
        keys, first, rows, count = np.unique(
            contexts * vocab_size + tokens[ends], return_index=True, return_inverse=True, return_counts=True
        )
        opens = np.zeros(keys.size, np.bool_)
        opens[rows[offset[ends] == n - 1]] = True
        counts.append(_Counts(keys, count, opens, shorter[ends[first]]))
        shorter = np.full(tokens.size, -1, np.int64)
        shorter[ends] = rows
    return counts


def _smooth(
    grams: _Counts, adjusted: Ints, discount: tuple[float, float, float], lower: Floats, vocab_size: int
) -> Level:
    """Turn counts of one length into interpolated probabilities; `lower` is p_{n−1}, [contexts]."""
    context, unseen = grams.keys // vocab_size, len(lower)
    off = np.array([0.0, *discount])[np.minimum(adjusted, 3)]
    size = np.bincount(context, minlength=unseen + 1)
    total = np.bincount(context, weights=adjusted, minlength=unseen + 1)  # S(h)
    freed = np.bincount(context, weights=off, minlength=unseen + 1)
    backoff = np.divide(freed, total, out=np.ones(unseen + 1), where=total > 0)
    prob = backoff[context] * lower[grams.suffix] + (adjusted - off) / total[context]
    ranked = np.lexsort((-prob, context))  # stable: equal words stay in the order of their ids
    return Level(grams.keys, prob, ranked, np.cumsum(size) - size, size, backoff)


def levels_to_arrays(model: KneserNey) -> dict[str, NDArray[Any]]:
    """Return a model's levels as the arrays of a file, four of each length (`model.counts` says what they mean)."""
    arrays: dict[str, NDArray[Any]] = {}
    for n, level in enumerate(model.levels, start=1):
        arrays[f"n{n}.start"] = level.start.astype(np.int32)  # that of the unseen context is the end of the last
        arrays[f"n{n}.words"] = (level.keys % model.vocab_size).astype(np.int32)
        arrays[f"n{n}.prob"] = level.prob.astype(np.float32)
        arrays[f"n{n}.backoff"] = level.backoff[:-1].astype(np.float32)
    return arrays


def levels_from_arrays(arrays: Mapping[str, NDArray[Any]], order: int, vocab_size: int) -> list[Level]:
    """Read the levels that `levels_to_arrays` wrote.

    Raises:
      ValueError, KeyError: arrays do not fit one another or the vocabulary.
    """
    levels, contexts = list[Level](), 1
    for n in range(1, order + 1):
        start, words = (arrays[f"n{n}.{name}"].astype(np.int64) for name in ("start", "words"))
        prob, backoff = (arrays[f"n{n}.{name}"].astype(np.float64) for name in ("prob", "backoff"))
        size = np.diff(start)
        fits = len(start) == contexts + 1 == len(backoff) + 1 and start[0] == 0 and start[-1] == len(words)
        if not fits or len(words) != len(prob) or (size < 0).any():
            raise ValueError(f"the tables of length {n} do not fit one another")
        if len(words) and not 0 <= words.min() <= words.max() < vocab_size:
            raise ValueError(f"words run to {words.max()}, the vocabulary has {vocab_size}")
        keys = np.repeat(np.arange(contexts), size) * vocab_size + words
        if (np.diff(keys) <= 0).any():
            raise ValueError(f"the words of length {n} are not in order")
        if not ((prob >= 0) & (prob <= 1)).all() or not ((backoff >= 0) & np.isfinite(backoff)).all():
            raise ValueError(f"a number of length {n} is no probability")
        levels.append(level_of(keys, prob, np.append(backoff, 1.0), size, vocab_size))
        contexts = len(words)
    return levels


def level_of(keys: Ints, prob: Floats, backoff: Floats, size: Ints, vocab_size: int) -> Level:
    """Return a level from its n-grams and the number of continuations of every context, the unseen one left out."""
    ranked = np.lexsort((-prob, keys // vocab_size))
    size = np.append(size, 0)
    return Level(keys, prob, ranked, np.cumsum(size) - size, size, backoff)


def _checked(stream: Tokens, vocab_size: int) -> Ints:
    """Return the stream as int64 after checking that it is flat and inside the vocabulary."""
    raw = np.asarray(stream)
    if raw.size and not np.issubdtype(raw.dtype, np.integer):
        raise DataError(f"a token stream holds {raw.dtype}; expected integers.")
    tokens = raw.astype(np.int64)
    if tokens.ndim != 1:
        raise DataError(f"a token stream has shape {list(tokens.shape)}; expected one dimension.")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise DataError(
            f"token ids run from {tokens.min()} to {tokens.max()}; the vocabulary has 0 to {vocab_size - 1}."
        )
    return tokens


def _check_k(k: int, vocab_size: int) -> None:
    if not 1 <= k <= vocab_size:
        raise ConfigError(f"k is {k}; expected 1 to {vocab_size}, the size of the vocabulary.")
