"""Counts for tests: what a federation would have released of a run's training text, summed in one place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keyfed.keyboard.compact import pack
from keyfed.model import counts, mixture
from keyfed.model.counts import CountModel, CountTerms, counts_to_bytes, grams_of
from keyfed.model.mixture import Mixture, mixture_of
from keyfed.model.ngram import KneserNey, Tokens, fit_kneser_ney
from keyfed.reports.finished import corpus_of
from keyfed.run.folder import load_model

TERMS = CountTerms(k=3, cap=1_000, most=1_000_000, clients=4, vocab_sha256="ab" * 32)


def as_counts(fitted: KneserNey, terms: CountTerms = TERMS, uses: int = 9) -> CountModel:
    """Return a fitted model as if it had been counted; the numbers of clients and uses are invented."""
    numbers = tuple(np.arange(len(level.keys)) % 40 + terms.k for level in fitted.levels)
    return CountModel(fitted, numbers, tuple(uses * n for n in numbers), terms)


def counted(streams: Sequence[Tokens], vocab: int, order: int = 3, terms: CountTerms = TERMS) -> CountModel:
    """Return the n-grams of all streams."""
    return as_counts(fit_kneser_ney(streams, vocab, order), terms)


def ngram_file(fitted: KneserNey, fitted_mixture: Mixture | None = None, terms: CountTerms = TERMS) -> bytes:
    """Return a fitted model as an export has it."""
    return pack(as_counts(fitted, terms), fitted_mixture)


def half(order: int = 3) -> Mixture:
    """A mixture of equal weights."""
    return mixture_of(np.full(order * 4 * 6, 0.5), order)


def count_run(run: Path, terms: CountTerms = TERMS) -> Path:
    """Count a run's own training text into its folder, with a mixture of equal weights."""
    trained = load_model(run)
    store = corpus_of(trained, text=False).store
    found = counted([store.stream(k) for k in range(len(store))], len(trained.vocab), terms=terms)
    (run / counts.FILE).write_bytes(counts_to_bytes(found))
    (run / mixture.FILE).write_text(half().to_json())
    return run


def grams(found: KneserNey, n: int) -> set[tuple[int, ...]]:
    """Return the n-grams of a length."""
    return set(map(tuple, grams_of([level.keys for level in found.levels[:n]], found.vocab_size).tolist()))
