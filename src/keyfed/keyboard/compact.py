r"""A count model and the weights of its mixture as a page gets them: a byte or two for each number.

`ngram.safetensors` of an exported keyboard is what `counts.safetensors` of a run computes with (`model.counts`), less
the counts. Contexts are numbered as rows of the level below, the empty context is row 0. For n = 1 … order:

    n{n}.gaps      uint16 [m]      contexts that have continuations: each less the one before, the first less −1
    n{n}.sizes     uint16 [m]      how many continuations each has
    n{n}.words     uint16 [grams]  the last word of each n-gram, ascending within a context
    n{n}.shares    uint8 [grams]   q, with p_n(w | h) ∝ 2^(−q/12) among the continuations of h
    n{n}.mass      float32 [m]     s(h), the sum of p_n(w | h) over the continuations
    n{n}.backoff   uint8 [m]       b, with γ(h) = 2^(−b/12)
    n{n}.bucket    uint8 [m]       how many of the mixture's count edges the context's uses reach

A probability moves by a few per cent. The mass is made from what was rounded, so that every distribution has the sum 1:

.. math:: s(h) = 1 - γ(h) \Big(1 - \sum_{w\ \text{after}\ h} p_{n-1}(w \mid h')\Big)

The metadata has `order`, `vocab`, `terms` (`CountTerms`) and `mixture` (`mixture.json`, or null).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from keyfed.errors import ConfigError, RunError
from keyfed.model.counts import CountModel, CountTerms, grams_of, metadata_of, terms_of
from keyfed.model.mixture import COUNT_EDGES, Mixture
from keyfed.model.ngram import Floats, Ints, KneserNey, Level, level_of

STEPS = 12  # of the rounding, to an octave
MOST = 255  # such steps: 4e-7
MOST_WORDS = 1 << 16
LEAST_MASS = 1e-6  # of the continuations of a context


class Compact(NamedTuple):
    """What the file holds: a model that computes, its terms, count buckets of every context by level, a mixture."""

    model: KneserNey
    terms: CountTerms
    buckets: tuple[Ints, ...]
    mixture: Mixture | None


def pack(found: CountModel, mixture: Mixture | None) -> bytes:
    """Write a count model as a page gets it.

    Raises:
      ConfigError: a vocabulary whose words two bytes cannot number.
    """
    vocab = found.model.vocab_size
    if vocab > MOST_WORDS:
        raise ConfigError(f"the vocabulary has {vocab:,} words; a page's n-grams have at most {MOST_WORDS:,}")
    edges = COUNT_EDGES if mixture is None else mixture.count_edges
    arrays: dict[str, NDArray[Any]] = {}
    levels: list[Level] = []
    for n, (level, counts) in enumerate(zip(found.model.levels, found.counts, strict=True), start=1):
        owner, size = level.keys // vocab, level.size[:-1]
        contexts = np.flatnonzero(size)
        gaps = np.diff(contexts, prepend=-1)
        if len(gaps) and gaps.max() >= MOST_WORDS:
            raise ConfigError(f"{gaps.max():,} n-grams in a row have no continuation; a page's n-grams have fewer")
        total = np.bincount(owner, weights=counts, minlength=len(size))[contexts]
        largest = np.zeros(len(size))
        np.maximum.at(largest, owner, level.prob)
        shares, gamma = _steps(level.prob / largest[owner]), _steps(level.backoff[contexts])
        rest = 1 - np.bincount(owner, weights=_lower(level, levels, vocab), minlength=len(size))[contexts]
        while (thin := 1 - 2.0 ** (-gamma / STEPS) * rest < LEAST_MASS).any():
            gamma = np.minimum(gamma + thin, MOST)
        mass = (1 - 2.0 ** (-gamma / STEPS) * rest).astype(np.float32)
        bucket = np.searchsorted(np.array(edges), total, side="right")
        for name, values, kind in (
            ("gaps", gaps, np.uint16), ("sizes", size[contexts], np.uint16), ("words", level.keys % vocab, np.uint16),
            ("shares", shares, np.uint8), ("backoff", gamma, np.uint8), ("bucket", bucket, np.uint8),
        ):  # fmt: skip
            arrays[f"n{n}.{name}"] = values.astype(kind)
        arrays[f"n{n}.mass"] = mass
        levels.append(_restored(level.keys, contexts, size, shares, mass, gamma, vocab))
    head = {"order": str(found.model.order), "vocab": str(vocab), "terms": json.dumps(asdict(found.about))}
    return bytes(save(arrays, {**head, "mixture": "null" if mixture is None else mixture.to_json()}))


def _steps(values: Floats) -> Ints:
    """Return numbers within 0 and 1 as steps of 1/12 octave below 1."""
    return np.clip(np.round(-STEPS * np.log2(np.maximum(values, 1e-30))), 0, MOST).astype(np.int64)


def _restored(
    keys: Ints, contexts: Ints, size: Ints, shares: Ints, mass: NDArray[Any], gamma: Ints, vocab: int
) -> Level:
    """Return a level from the numbers of the file."""
    owner = keys // vocab
    raw = 2.0 ** (-shares / STEPS)
    whole = np.bincount(owner, weights=raw, minlength=len(size))
    whole[contexts] = mass.astype(np.float64) / whole[contexts]
    backoff = np.ones(len(size) + 1)
    backoff[contexts] = 2.0 ** (-gamma / STEPS)
    return level_of(keys, raw * whole[owner], backoff, size, vocab)


def _lower(level: Level, below: list[Level], vocab: int) -> Floats:
    """Return p_{n−1}(w | h') of every n-gram of a level: the level below has its last n − 1 words."""
    if not below:
        return np.full(len(level.keys), 1.0 / vocab)
    words = grams_of([*(shorter.keys for shorter in below), level.keys], vocab)[:, 1:]
    rows = np.zeros(len(words), np.int64)
    for shorter, word in zip(below, words.T, strict=True):
        rows = shorter.find(rows * vocab + word)
        if len(rows) and rows.min() < 0:
            raise ValueError("an n-gram has an end that the level below does not have")
    return below[-1].prob[rows]


def unpack(data: bytes, vocab_size: int, origin: str) -> Compact:
    """Read what `pack` wrote.

    Raises:
      RunError: the file is damaged or does not fit the vocabulary.
    """
    try:
        head, arrays = metadata_of(data), load(data)
        terms = terms_of(head["terms"])
        mixture = None if head["mixture"] == "null" else Mixture.from_json(head["mixture"], origin)
        order, rows = int(head["order"]), 1
        if int(head["vocab"]) != vocab_size or (mixture is not None and mixture.order != order) or order < 1:
            raise ValueError(f"order {order} and {head['vocab']} words, the vocabulary has {vocab_size}")
        levels, buckets = list[Level](), list[Ints]()
        for n in range(1, order + 1):
            level, bucket = _level(arrays, n, rows, vocab_size)
            levels.append(level)
            buckets.append(bucket)
            rows = len(level.keys)
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise RunError(f"{origin} is damaged: {e}") from None
    return Compact(KneserNey(order, vocab_size, tuple(levels), ()), terms, tuple(buckets), mixture)


def _level(arrays: dict[str, NDArray[Any]], n: int, rows: int, vocab_size: int) -> tuple[Level, Ints]:
    names = ("gaps", "sizes", "words", "shares", "backoff", "bucket")
    gaps, sizes, words, shares, gamma, bucket = (arrays[f"n{n}.{name}"].astype(np.int64) for name in names)
    mass, contexts = arrays[f"n{n}.mass"], np.cumsum(gaps) - 1
    fits = len(gaps) == len(sizes) == len(mass) == len(gamma) == len(bucket) and len(words) == len(shares)
    if not fits or sizes.sum() != len(words) or (len(gaps) and contexts[-1] >= rows):
        raise ValueError(f"the tables of length {n} do not fit one another")
    if (sizes < 1).any() or (gaps < 1).any() or (len(words) and words.max() >= vocab_size):
        raise ValueError(f"the tables of length {n} name words that the vocabulary does not have")
    keys = np.repeat(contexts, sizes) * vocab_size + words
    if (np.diff(keys) <= 0).any() or not ((mass > 0) & (mass <= 1)).all():
        raise ValueError(f"the tables of length {n} are not in order")
    size, place = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    size[contexts], place[contexts] = sizes, bucket
    return _restored(keys, contexts, size, shares, mass, gamma, vocab_size), place
