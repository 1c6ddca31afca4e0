"""Counts as a page gets them: rounded, every distribution still whole, and damage refused."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.errors import ConfigError, RunError
from keyfed.keyboard.compact import pack, unpack
from keyfed.model.counts import CountModel, CountTerms
from keyfed.model.mixture import BEST, COUNTED, mixture_of, places_of
from keyfed.model.ngram import fit_kneser_ney

V = 30
TERMS = CountTerms(k=3, cap=4, most=100, clients=12, vocab_sha256="ab" * 32)
STREAM = np.concatenate([[2, 4 + k % 7, 4 + (k * k) % 25] for k in np.random.default_rng(1).integers(200, size=300)])


def counts(order: int = 4) -> CountModel:
    fitted = fit_kneser_ney([STREAM], V, order)
    numbers = tuple(np.arange(len(level.keys)) % 40 + 3 for level in fitted.levels)
    return CountModel(fitted, numbers, tuple(7 * n for n in numbers), TERMS)


def test_every_distribution_is_whole_and_near_the_one_that_was_counted():
    written = counts()
    read = unpack(pack(written, None), V, "file")
    assert (read.terms, read.mixture) == (TERMS, None)
    for end in range(60):
        context = STREAM[max(0, end - 3) : end]
        p = read.model.next(context)
        assert p.sum() == pytest.approx(1, abs=1e-6)
        assert np.abs(np.log(p / written.model.next(context))).max() < 0.15  # sums of a few steps of 3 %
        assert p.min() > 0


@pytest.mark.parametrize("by", [BEST, COUNTED], ids=lambda by: by.by)
def test_buckets_are_those_of_the_mixture(by):
    written = counts()
    mixture = mixture_of(np.linspace(0, 1, 4 * 4 * 6), 4, by)
    read = unpack(pack(written, mixture), V, "file")
    assert read.mixture == mixture
    places = places_of(written, STREAM, by)
    assert np.unique(places).size > 4
    found = np.zeros_like(places)
    for n, (level, contexts, _) in enumerate(read.model.trace(STREAM.astype(np.int64))):
        here = contexts[1:-1]
        found = np.where(level.size[here] > 0, n * 4 + np.append(read.buckets[n], 0)[here], found)
    assert found.tolist() == places.tolist()


@pytest.mark.parametrize("at", [0, 9, 300, -1])
def test_damage_is_one_line(at):
    data = bytearray(pack(counts(), None))
    data = data[:-1] if at == -1 else data
    data[at] ^= 0xFF
    with pytest.raises(RunError, match="file is damaged"):
        unpack(bytes(data), V, "file")
    with pytest.raises(RunError, match="the vocabulary has 29"):
        unpack(pack(counts(), None), V - 1, "file")


def test_a_vocabulary_of_more_words_than_two_bytes_number_is_refused():
    fitted = fit_kneser_ney([STREAM], 70_000, 2)
    numbers = tuple(np.full(len(level.keys), 3) for level in fitted.levels)
    with pytest.raises(ConfigError, match="70,000 words"):
        pack(CountModel(fitted, numbers, numbers, TERMS), None)
