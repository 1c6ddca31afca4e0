"""N-gram models against a slow transcription of the equations, and against the literature on PTB."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import ConfigError, DataError
from keyfed.model import ngram
from keyfed.model.ngram import KneserNey, Unigram, estimate_discounts, fit_kneser_ney, fit_unigram

Gram = tuple[int, ...]


class Oracle:
    """Interpolated Kneser–Ney, one dictionary per order, one recursion per probability."""

    def __init__(self, streams: Sequence[Sequence[int]], vocab_size: int, order: int, modified: bool) -> None:
        self.vocab_size, self.order = vocab_size, order
        self.adjusted: dict[Gram, int] = {}
        self.discounts: dict[int, dict[int, float]] = {}
        for n in range(1, order + 1):
            raw: Counter[Gram] = Counter()
            left: dict[Gram, set[int]] = {}
            for stream in streams:
                for i in range(len(stream) - n + 1):
                    gram = tuple(stream[i : i + n])
                    raw[gram] += 1
                    left.setdefault(gram, set()).add(stream[i - 1] if i else -1)  # −1: the start of a stream
            counts = dict(raw) if n == order else {gram: len(words) for gram, words in left.items()}
            self.adjusted.update(counts)
            self.discounts[n] = self.estimate(list(counts.values()), modified)

    @staticmethod
    def estimate(counts: list[int], modified: bool) -> dict[int, float]:
        n1, n2, n3, n4 = (counts.count(i) for i in (1, 2, 3, 4))
        if n1 == 0 or n2 == 0:
            return {1: 0.5, 2: 0.5, 3: 0.5}
        y = n1 / (n1 + 2 * n2)
        if modified and n3 > 0 and n4 > 0:
            three = {1: 1 - 2 * y * n2 / n1, 2: 2 - 3 * y * n3 / n2, 3: 3 - 4 * y * n4 / n3}
            if all(d > 0 for d in three.values()):
                return three
        return {1: y, 2: y, 3: y}

    def p(self, word: int, context: Gram) -> float:
        context = context[max(len(context) - self.order + 1, 0) :]
        lower = self.p(word, context[1:]) if context else 1 / self.vocab_size
        followers = {v: self.adjusted.get((*context, v), 0) for v in range(self.vocab_size)}
        total = sum(followers.values())
        if total == 0:
            return lower
        d = {0: 0.0} | self.discounts[len(context) + 1]
        freed = sum(d[min(a, 3)] for a in followers.values())
        return (followers[word] - d[min(followers[word], 3)] + freed * lower) / total


def zipf(seed: int, vocab_size: int, lengths: Sequence[int]) -> list[np.ndarray]:
    """Skewed random streams that repeat themselves, so that counts of 1 to 4 all occur."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab_size + 1) ** 1.5
    return [rng.choice(vocab_size, n, p=weights / weights.sum()).astype(np.int32) for n in lengths]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[np.ndarray], int]:
    vocab_size = draw(st.integers(1, 12))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
        return zipf(draw(st.integers(0, 999)), vocab_size, lengths), vocab_size
    words = st.lists(st.integers(0, vocab_size - 1), max_size=15)
    return [np.array(s, np.int32) for s in draw(st.lists(words, max_size=4))], vocab_size


def streams_of(vocab_size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, vocab_size - 1), max_size=8).map(lambda s: np.array(s, np.int32))


@settings(max_examples=120, deadline=None)
@given(corpora(), st.integers(1, 5), st.booleans(), st.data())
def test_next_equals_the_equations(
    corpus: tuple[list[np.ndarray], int], order: int, modified: bool, data: st.DataObject
) -> None:
    streams, vocab_size = corpus
    model = fit_kneser_ney(streams, vocab_size, order, modified)
    oracle = Oracle([s.tolist() for s in streams], vocab_size, order, modified)
    own = data.draw(st.sampled_from(streams)) if streams else np.zeros(0, np.int32)
    cut = data.draw(st.integers(0, own.size))
    for context in (own[:cut], data.draw(streams_of(vocab_size))):
        expected = [oracle.p(word, tuple(context.tolist())) for word in range(vocab_size)]
        np.testing.assert_allclose(model.next(context), expected, rtol=1e-10, atol=0)


@settings(max_examples=120, deadline=None)
@given(corpora(), st.integers(0, 5), st.booleans(), st.data())
def test_one_model_three_answers(
    corpus: tuple[list[np.ndarray], int], order: int, modified: bool, data: st.DataObject
) -> None:
    """`next` is a positive distribution; `nats` and `top` read the same numbers from it."""
    streams, vocab_size = corpus
    model: Unigram | KneserNey = fit_unigram(streams, vocab_size)
    if order:
        model = fit_kneser_ney(streams, vocab_size, order, modified)
    stream = data.draw(st.one_of(streams_of(vocab_size), *map(st.just, streams)))
    k = data.draw(st.integers(1, vocab_size))
    after = [model.next(stream[:t]) for t in range(1, stream.size)]
    nats, top = model.nats(stream), model.top(stream, k)
    assert nats.dtype == np.float64
    assert nats.shape == (len(after),)
    assert top.dtype == np.int32
    assert top.shape == (len(after), k)
    for p, word, loss, best in zip(after, stream[1:], nats, top, strict=True):
        assert p.shape == (vocab_size,)
        assert p.min() > 0
        assert p.sum() == pytest.approx(1, abs=1e-12)
        assert loss == pytest.approx(-np.log(p[word]), rel=1e-13)
        np.testing.assert_array_equal(p[best], np.sort(p)[::-1][:k])
        assert all(a < b for a, b in pairwise(best) if p[a] == p[b])
        assert len(set(best.tolist())) == k


@pytest.mark.parametrize("modified", [True, False])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_top_is_the_head_of_argsort(order: int, modified: bool) -> None:
    """Also with ties (unseen words, equal counts), which go to the lower id."""
    model = fit_kneser_ney(zipf(1, 40, [400, 50]), 50, order, modified)
    stream = zipf(2, 50, [200])[0]
    for k in (1, 3, 50):
        expected = [np.argsort(-model.next(stream[:t]), kind="stable")[:k] for t in range(1, stream.size)]
        np.testing.assert_array_equal(model.top(stream, k), expected)


def test_top_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fit_kneser_ney(zipf(1, 20, [300]), 20)
    stream = zipf(2, 20, [100])[0]
    whole = model.top(stream, 3)
    monkeypatch.setattr(ngram, "CELLS", 10)
    np.testing.assert_array_equal(model.top(stream, 3), whole)


def test_three_discounts_are_reached() -> None:
    """The random corpora above are rich enough for the modified estimate, not only for its fallback."""
    streams = zipf(0, 12, [60, 60, 60])
    modified = fit_kneser_ney(streams, 12, 4).discounts
    assert any(len(set(three)) == 3 for three in modified)
    assert all(len(set(three)) == 1 for three in fit_kneser_ney(streams, 12, 4, modified=False).discounts)


@pytest.mark.parametrize(
    ("counts_of_counts", "modified", "expected"),
    [
        ((8, 4, 2, 1), True, (1 - 2 * 0.5 * 4 / 8, 2 - 3 * 0.5 * 2 / 4, 3 - 4 * 0.5 * 1 / 2)),
        ((8, 4, 2, 1), False, (0.5, 0.5, 0.5)),
        ((6, 1, 1, 0), True, (0.75, 0.75, 0.75)),  # no count of 4
        ((6, 1, 0, 1), True, (0.75, 0.75, 0.75)),  # no count of 3
        ((6, 1, 9, 1), True, (0.75, 0.75, 0.75)),  # D(2) would be negative
        ((0, 3, 2, 1), True, (0.5, 0.5, 0.5)),
        ((3, 0, 2, 1), True, (0.5, 0.5, 0.5)),
        ((0, 0, 0, 0), True, (0.5, 0.5, 0.5)),
    ],
)
def test_discounts_by_hand(counts_of_counts: tuple[int, ...], modified: bool, expected: tuple[float, ...]) -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [*counts_of_counts, 2])
    assert estimate_discounts(counts, modified) == pytest.approx(expected, abs=1e-15)


def test_start_of_a_stream_is_one_left_neighbour() -> None:
    """Word 0 only opens streams (twice), word 1 follows 0 and 2: a(0) = 1, a(1) = 2, a(2) = 1."""
    model = fit_kneser_ney([np.array([0, 1, 2, 1]), np.array([0, 1])], 4, order=2)
    d = model.discounts[0][0]  # n1 = 2, n2 = 1, so Y = 1/2
    assert d == 0.5
    gamma = 3 * d / 4
    np.testing.assert_allclose(
        model.next(np.zeros(0, np.int32)), [*((a - d) / 4 + gamma / 4 for a in (1, 2, 1)), gamma / 4]
    )


def test_ngrams_do_not_cross_streams() -> None:
    apart = fit_kneser_ney([np.array([0, 1]), np.array([2, 3])], 4, order=2)
    joined = fit_kneser_ney([np.array([0, 1, 2, 3])], 4, order=2)
    assert apart.next(np.array([1]))[2] == apart.next(np.array([1]))[3]
    assert joined.next(np.array([1]))[2] > joined.next(np.array([1]))[3]


def test_order_one_ignores_the_context() -> None:
    model = fit_kneser_ney([np.array([0, 0, 0, 1, 1, 2])], 5, order=1)  # raw counts 3, 2, 1: Y = 1/3
    d = 1 / 3
    expected = np.array([3 - d, 2 - d, 1 - d, 0, 0]) / 6 + 3 * d / 6 / 5
    for context in ([], [2], [4, 4, 4]):
        np.testing.assert_allclose(model.next(np.array(context, np.int32)), expected, rtol=1e-14)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_nothing_to_learn_from_is_uniform(order: int) -> None:
    for streams in ([], [np.zeros(0, np.int32)]):
        for model in (fit_kneser_ney(streams, 5, order), fit_unigram(streams, 5)):
            np.testing.assert_array_equal(model.next(np.array([3, 1])), np.full(5, 0.2))
            assert model.top(np.array([4, 4]), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("order", [1, 2, 5])
def test_short_streams(order: int, length: int) -> None:
    stream = np.array([3, 4], np.int32)[:length]
    for model in (fit_kneser_ney([stream], 6, order), fit_unigram([stream], 6)):
        assert model.nats(stream).shape == (max(length - 1, 0),)
        assert model.top(stream, 2).shape == (max(length - 1, 0), 2)
        assert model.next(stream).sum() == pytest.approx(1, abs=1e-12)


def test_never_seen_words_back_off_to_the_shorter_context() -> None:
    model = fit_kneser_ney([np.array([0, 1, 2, 0, 1, 3, 1, 2])], 6, order=4)
    np.testing.assert_array_equal(model.next(np.array([5, 0, 1])), model.next(np.array([0, 1])))
    np.testing.assert_array_equal(model.next(np.array([0, 1, 5])), model.next(np.zeros(0, np.int32)))
    np.testing.assert_array_equal(model.next(np.array([3, 3, 3, 3, 0, 1])), model.next(np.array([3, 0, 1])))


def test_unigram_adds_one_half() -> None:
    model = fit_unigram([np.array([2, 2, 3]), np.array([2])], 4)
    np.testing.assert_allclose(model.next(np.zeros(0, np.int32)), np.array([0.5, 0.5, 3.5, 1.5]) / 6)
    assert model.top(np.array([0, 1]), 4).tolist() == [[2, 3, 0, 1]]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="order is 0"):
        fit_kneser_ney([], 5, order=0)
    for model in (fit_kneser_ney([np.array([1, 2])], 5), fit_unigram([np.array([1, 2])], 5)):
        for k in (0, 6):
            with pytest.raises(ConfigError, match="expected 1 to 5"):
                model.top(np.array([1, 2]), k)
        for bad in ([1, 5], [-1, 2]):
            with pytest.raises(DataError, match="the vocabulary has 0 to 4"):
                model.nats(np.array(bad))
        with pytest.raises(DataError, match="one dimension"):
            model.next(np.zeros((2, 2), np.int32))
        with pytest.raises(DataError, match="expected integers"):
            model.next(np.array([0.5]))


def ptb_folder() -> Path:
    root = Path(__file__).resolve().parents[3]
    return Path(os.environ.get("KEYFED_DATA", root.parent / "shared" / "data")) / "ptb"


@pytest.fixture(scope="module")
def ptb() -> tuple[np.ndarray, np.ndarray, int]:
    """Training and test text, one stream each, over the 10,000 types of the training text, pad and bos."""
    folder = ptb_folder()
    if not (folder / "ptb.train.txt").is_file():
        pytest.skip(f"no Penn Treebank in {folder}; set KEYFED_DATA to the folder that holds ptb/")

    ids = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}

    def read(part: str) -> np.ndarray:
        lines = (folder / f"ptb.{part}.txt").read_text(encoding="utf-8").splitlines()
        words = [word for line in lines for word in (*line.split(), "<eos>")]
        if part == "train":
            for word in words:
                ids.setdefault(word, len(ids))
        return np.array([ids[word] for word in words], np.int32)

    train, test = read("train"), read("test")
    assert (train.size, test.size, len(ids)) == (929_589, 82_430, 10_002)
    return train, test, len(ids)


def test_ptb_unigram(ptb: tuple[np.ndarray, np.ndarray, int]) -> None:
    train, test, vocab_size = ptb
    perplexity = np.exp(fit_unigram([train], vocab_size).nats(test).mean())
    assert perplexity == pytest.approx(639.5, abs=0.1)


@pytest.mark.parametrize(
    ("order", "modified", "expected"),
    [(2, True, 185.70), (3, True, 148.38), (5, True, 141.06), (5, False, 143.66)],
)
def test_ptb_perplexity(ptb: tuple[np.ndarray, np.ndarray, int], order: int, modified: bool, expected: float) -> None:
    """Published: about 141 for the modified 5-gram over the closed vocabulary."""
    train, test, vocab_size = ptb
    model = fit_kneser_ney([train], vocab_size, order, modified)
    nats = model.nats(test)
    assert np.exp(nats.mean()) == pytest.approx(expected, abs=0.02)
    top = model.top(test, 3)
    for t in (1, 2, 5, 1000, 40_000, 82_429):
        p = model.next(test[:t])
        assert p.sum() == pytest.approx(1, abs=1e-12)
        assert nats[t - 1] == pytest.approx(-np.log(p[test[t]]), rel=1e-13)
        np.testing.assert_array_equal(top[t - 1], np.argsort(-p, kind="stable")[:3])
