r"""A count model and the weights of its mixture as a page gets them: a byte or two for each number.

`ngram.safetensors` of an exported keyboard is what `counts.safetensors` of a run computes with (`model.counts`), less
the counts. Contexts are numbered as rows of the level below, the empty context is row 0. For n = 1 … order:

    n{n}.gaps      uint16 [m]      contexts that have continuations: each less the one before, the first less −1
    n{n}.sizes     uint16 [m]      how many continuations each has
    n{n}.words     uint16 [grams]  the last word of each n-gram, ascending within a context
    n{n}.shares    uint8 [grams]   q, with p_n(w | h) ∝ 2^(−q/12) among the continuations of h
    n{n}.mass      float32 [m]     s(h), the sum of p_n(w | h) over the continuations
    n{n}.backoff   uint8 [m]       b, with γ(h) = 2^(8 − b/12)
    n{n}.bucket    uint8 [m]       how many of the mixture's count edges the context's uses reach

A probability moves by a few per cent. The mass is made from what was rounded, so that every distribution has the sum 1:

.. math:: s(h) = 1 - γ(h) \Big(1 - \sum_{w\ \text{after}\ h} p_{n-1}(w \mid h')\Big)

The metadata has one JSON object, `about`: order, vocab, `terms` (`CountTerms`) and `mixture` (`mixture.json`, or null).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from keyfed.errors import ConfigError, PrivacyError, RunError
from keyfed.model import counts
from keyfed.model import mixture as mixtures
from keyfed.model.counts import CountModel, CountTerms, counts_from_bytes, grams_of, metadata_of, terms_of
from keyfed.model.mixture import BEST, Mixture
from keyfed.model.ngram import Floats, Ints, KneserNey, Level, level_of
from keyfed.run.counts.noise import check_booked
from keyfed.text.vocab import EOS

Source = Callable[[Sequence[int]], Floats]

STEPS = 12  # of the rounding, to an octave
LARGEST = 2.0**8  # γ
MOST = 255  # such steps: 4e-7
MOST_WORDS = 1 << 16
LEAST_MASS = 1e-6  # of the continuations of a context


class Compact(NamedTuple):
    """What the file holds: a model that computes, its terms, buckets of every context by level, a mixture."""

    model: KneserNey
    terms: CountTerms
    buckets: tuple[Ints, ...]
    mixture: Mixture | None

    def place(self, context: Ints) -> int:
        """Return the place of a context, as `mixture.places_of` numbers it: what was matched, and its bucket."""
        assert self.mixture is not None
        found, row = 0, 0
        for n, level in enumerate(self.model.levels[: len(context) + 1]):
            row = self._row(context[len(context) - n :])
            if row < 0:
                break
            if level.size[row]:
                found = n * (len(self.mixture.context_edges) + 1) + int(self.buckets[n][row])
        return found

    def _row(self, gram: Ints) -> int:
        row = np.zeros(1, np.int64)
        for level, word in zip(self.model.levels, gram, strict=False):
            row = np.where(row >= 0, level.find(np.maximum(row, 0) * self.model.vocab_size + word), -1)
        return int(row[0])


def read_counts(run: Path, vocab_size: int, *, private: bool) -> CountModel:
    """Return what a run has counted, if it may leave the run.

    Args:
      private: whether the run's model has noise; its counts must have some too.

    Raises:
      RunError: there are no counts, or they are damaged.
      PrivacyError: they have no noise where they need some, or not that of their ledger.
    """
    path = run / counts.FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{run} has no counts; `keyfed counts {run}` counts") from None
    except OSError as e:
        raise RunError(f"{path} cannot be read: {e.strerror or e}") from None
    found = counts_from_bytes(data, vocab_size, str(path))
    if private or found.about.epsilon is not None:
        check_booked(run, found.about)
    return found


def has_counts(run: Path) -> bool:
    """Whether a run has counted."""
    return (run / counts.FILE).exists()


def counts_sum(run: Path) -> str | None:
    """Return the sum of what a run has counted and fitted, by which an export knows whether it is of that."""
    found = [(run / name).read_bytes() for name in (counts.FILE, mixtures.FILE) if (run / name).exists()]
    return hashlib.sha256(b"".join(found)).hexdigest() if found else None


def read_mixture(run: Path) -> Mixture | None:
    """Return the weights of a run's mixture, None where none were fitted."""
    path, counted = run / mixtures.FILE, run / counts.FILE
    if not path.exists():
        return None
    return mixtures.read_mixture(path, counted.read_bytes() if counted.exists() else None)


def counts_for_page(run: Path, vocab_size: int, *, private: bool) -> tuple[bytes | None, list[str]]:
    """Return a run's counts for a page, None where it has none that may leave it, and what there is to say."""
    if not has_counts(run):
        return None, ["without n-grams: the run has no counts, which `keyfed counts` makes; the network types alone"]
    try:
        found = read_counts(run, vocab_size, private=private)
    except PrivacyError as e:
        return None, [f"without n-grams: {e}"]
    return pack(found, read_mixture(run)), []


def said_of_counts(data: bytes | None, vocab_size: int, run: Path) -> dict[str, Any]:
    """Return what a manifest says of the counts in an export: how they were made, and the weights of the mixture."""
    if data is None:
        return {}
    found = unpack(data, vocab_size, "the export's counts")
    mixture = None if found.mixture is None else json.loads(found.mixture.to_json())
    return {"counts": {**asdict(found.terms), "sha256": counts_sum(run), "mixture": mixture}}


def said_of(found: CountModel) -> dict[str, Any]:
    """Return how counts were made, and how many n-grams of each length there are."""
    return {**asdict(found.about), "grams": [len(level.keys) for level in found.model.levels]}


def counts_source(found: Compact, *, lines: bool) -> Source:
    """Return the counts as a source of scores: tokens read, EOS first → log-probabilities of the next.

    Args:
      lines: whether a line is read on its own, from the end of the one before it.
    """
    return lambda tokens: np.log(found.model.next(_context(tokens, found, lines=lines)))


def mixture_source(network: Source, found: Compact, *, lines: bool) -> Source:
    """Return the network's scores mixed with those of the counts."""
    mixture = found.mixture
    assert mixture is not None

    def source(tokens: Sequence[int]) -> Floats:
        p, context = np.exp(network(tokens)), _context(tokens, found, lines=lines)
        place, sure = np.array([found.place(context)]), np.array([p.max()])
        weight = mixture.weight(place, sure)[0]
        mixed: Floats = np.log(weight * p + (1 - weight) * found.model.next(context))
        return mixed

    return source


def page_source(network: Source, found: Compact, *, lines: bool) -> Source:
    """Return what the page types on: the mixture, or the network where no weights were fitted."""
    return network if found.mixture is None else mixture_source(network, found, lines=lines)


def _context(tokens: Sequence[int], found: Compact, *, lines: bool) -> Ints:
    behind = next((n for n in range(len(tokens) - 1, -1, -1) if tokens[n] == EOS), 0) if lines else 0
    return np.array(tokens[max(behind, len(tokens) - found.model.order + 1) :], np.int64)


def pack(found: CountModel, mixture: Mixture | None) -> bytes:
    """Write a count model as a page gets it.

    Raises:
      ConfigError: a vocabulary whose words two bytes cannot number.
    """
    vocab = found.model.vocab_size
    if vocab > MOST_WORDS:
        raise ConfigError(f"the vocabulary has {vocab:,} words; a page's n-grams have at most {MOST_WORDS:,}")
    by = BEST if mixture is None else mixture.contexts
    arrays: dict[str, NDArray[Any]] = {}
    levels: list[Level] = []
    for n, level in enumerate(found.model.levels, start=1):
        owner, size = level.keys // vocab, level.size[:-1]
        contexts = np.flatnonzero(size)
        gaps = np.diff(contexts, prepend=-1)
        if len(gaps) and gaps.max() >= MOST_WORDS:
            raise ConfigError(f"{gaps.max():,} n-grams in a row have no continuation; a page's n-grams have fewer")
        largest = np.zeros(len(size))
        np.maximum.at(largest, owner, level.prob)
        shares, gamma = _steps(level.prob / largest[owner]), _steps(level.backoff[contexts] / LARGEST)
        rest = 1 - np.bincount(owner, weights=_lower(level, levels, vocab), minlength=len(size))[contexts]
        while (thin := 1 - _gamma(gamma) * rest < LEAST_MASS).any():
            gamma = np.minimum(gamma + thin, MOST)
        mass = (1 - _gamma(gamma) * rest).astype(np.float32)
        bucket = by.of_level(found, n)[contexts]
        for name, values, kind in (
            ("gaps", gaps, np.uint16), ("sizes", size[contexts], np.uint16), ("words", level.keys % vocab, np.uint16),
            ("shares", shares, np.uint8), ("backoff", gamma, np.uint8), ("bucket", bucket, np.uint8),
        ):  # fmt: skip
            arrays[f"n{n}.{name}"] = values.astype(kind)
        arrays[f"n{n}.mass"] = mass
        levels.append(_restored(level.keys, contexts, size, shares, mass, gamma, vocab))
    said = {"order": found.model.order, "vocab": vocab, "terms": json.dumps(asdict(found.about), sort_keys=True)}
    said["mixture"] = None if mixture is None else mixture.to_json()
    return bytes(save(arrays, {"about": json.dumps(said)}))  # one entry: several would be written in any order


def _steps(values: Floats) -> Ints:
    """Return numbers within 0 and 1 as steps of 1/12 octave below 1."""
    return np.clip(np.round(-STEPS * np.log2(np.maximum(values, 1e-30))), 0, MOST).astype(np.int64)


def _gamma(steps: Ints) -> Floats:
    return LARGEST * 2.0 ** (-steps / STEPS)


def _restored(
    keys: Ints, contexts: Ints, size: Ints, shares: Ints, mass: NDArray[Any], gamma: Ints, vocab: int
) -> Level:
    """Return a level from the numbers of the file."""
    owner = keys // vocab
    raw = 2.0 ** (-shares / STEPS)
    whole = np.bincount(owner, weights=raw, minlength=len(size))
    whole[contexts] = mass.astype(np.float64) / whole[contexts]
    backoff = np.ones(len(size) + 1)
    backoff[contexts] = _gamma(gamma)
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
        head, arrays = json.loads(metadata_of(data)["about"]), load(data)
        terms = terms_of(head["terms"])
        mixture = None if head["mixture"] is None else Mixture.from_json(head["mixture"], origin)
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


def terms_in(path: Path) -> CountTerms | None:
    """Return the terms of the counts in a file, None where it is damaged."""
    try:
        return terms_of(json.loads(metadata_of(path.read_bytes())["about"])["terms"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


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
