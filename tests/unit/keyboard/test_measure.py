"""What is counted while messages are typed, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.keyboard.layout import fold
from keyfed.keyboard.measure import WORD, Clock, Counts, type_lines
from keyfed.keyboard.predict import Predictor
from keyfed.keyboard.session import Keyboard
from keyfed.text.vocab import EOS, SPECIALS, Vocab

WORDS = ("the", "cat", "sat", "mat", "on", "under", "a", "don't", "house", "mouse", "river", "letter", "seven", "quick")
VOCAB = Vocab("word", (*SPECIALS, *WORDS), lower=True, tokenised=False)


def knowing(lines):
    """A source that knows what comes next in these lines."""
    follows = {}
    for line in lines:
        ids = [EOS, *VOCAB.encode([line]).tolist()]
        for n in range(1, len(ids)):
            follows[tuple(ids[:n])] = ids[n]

    def source(tokens):
        p = np.full(len(VOCAB), 1e-6)
        p[follows.get(tuple(tokens), EOS)] = 1.0
        return np.log(p / p.sum())

    return source


def blind(tokens):
    return np.full(len(VOCAB), -np.log(len(VOCAB)))


def typed(source, lines, seed=0):
    return type_lines(Keyboard(source, Predictor(VOCAB)), lines, np.random.default_rng(seed), Clock())


def test_a_keyboard_that_knows_saves_all_that_can_be_saved():
    line = "the cat sat on the mat, under a house"
    counts = typed(knowing([line]), [line])
    assert counts.words == counts.known == counts.top1 == counts.top3 == counts.picks == 9
    assert counts.characters == len(line) + 1
    # Every word is one stroke and brings its blank; a comma, the blank behind it and Enter are strokes of their own.
    assert counts.strokes == counts.ideal == 9 + 2 + 1
    assert counts.wrong_known == counts.wrong_unknown == 0


def test_words_outside_the_vocabulary_are_typed_letter_by_letter():
    counts = typed(blind, ["xylophon zebra"])
    assert (counts.words, counts.known, counts.top3, counts.picks) == (2, 0, 0, 0)
    assert counts.strokes == counts.ideal == counts.characters == len("xylophon zebra") + 1


def test_a_keyboard_that_knows_nothing_completes_what_only_one_word_can_be():
    counts = typed(blind, ["quick"])
    # Three of fourteen equal words are shown before the first letter; behind "q" only one is left.
    assert counts.strokes - 1 == 1 + 1
    assert counts.top3 == 0


def test_context_mends_slips_better_than_none():
    lines = ["the cat sat on a mat under the house a mouse don't river letter"] * 10
    with_context, without = typed(knowing(lines), lines), typed(blind, lines)
    assert with_context.slips == without.slips > 30
    assert with_context.slips_mended > without.slips_mended
    assert with_context.taps_right > with_context.taps_right_alone == without.taps_right_alone
    assert with_context.swipes_first / with_context.swiped > 0.95


def test_counts_add_up_and_shares_of_nothing_are_none():
    a = typed(blind, ["the cat"])
    both = a + a
    assert both.words == 2 * a.words
    assert both.summary()["saved"] == pytest.approx(a.summary()["saved"])
    assert Counts().summary()["top1"] is None
    assert set(Counts().summary()) == set(a.summary())


def test_time_is_noted_for_words_and_keystrokes_apart():
    clock = Clock()
    type_lines(Keyboard(blind, Predictor(VOCAB)), ["the zebra"], np.random.default_rng(0), clock)
    assert len(clock.words) == 2
    assert len(clock.keystrokes) >= len("zebra")
    assert clock.summary()["keystroke"]["p95_ms"] >= clock.summary()["keystroke"]["p50_ms"] > 0


def test_words_have_letters():
    assert WORD.findall("don't 42 a1 well-known — C’est x_y") == ["don't", "a", "well-known", "C’est", "x", "y"]
    assert fold("C’est") == "c'est"
