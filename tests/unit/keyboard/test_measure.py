"""What is counted while messages are typed, against counting by hand.

A person who types: slips, taps and swipes by a seed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard import measure
from keyfed.keyboard.keys import layout_of
from keyfed.keyboard.measure import Counts, KeystrokeClock, type_lines, words_in
from keyfed.keyboard.session import Decoder, node_program
from keyfed.text.vocab import EOS, SPECIALS, Vocab

WORDS = ("the", "cat", "sat", "mat", "on", "under", "a", "don't", "house", "mouse", "river", "letter", "seven", "quick")
needs_node = pytest.mark.skipif(node_program() is None, reason="node is not installed")
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
    with Decoder(VOCAB, source) as keyboard:
        return type_lines(keyboard, lines, np.random.default_rng(seed), KeystrokeClock())


@needs_node
def test_a_keyboard_that_knows_saves_all_that_can_be_saved():
    line = "the cat sat on the mat, under a house"
    counts = typed(knowing([line]), [line])
    assert counts.words == counts.known == counts.top1 == counts.top3 == counts.picks == 9
    assert counts.characters == len(line) + 1
    # Every word is one stroke and brings its blank; the comma moves that behind itself; Enter.
    assert counts.strokes == counts.ideal == 9 + 1 + 1
    assert counts.wrong_known == counts.wrong_unknown == 0


@needs_node
def test_words_outside_the_vocabulary_are_typed_letter_by_letter():
    counts = typed(blind, ["xylophon zebra"])
    assert (counts.words, counts.known, counts.top3, counts.picks) == (2, 0, 0, 0)
    assert counts.strokes == counts.ideal == counts.characters == len("xylophon zebra") + 1


@needs_node
def test_a_keyboard_that_knows_nothing_completes_what_only_one_word_can_be():
    counts = typed(blind, ["quick"])
    # Three of fourteen equal words are shown before the first letter; behind "q" only one is left.
    assert counts.strokes - 1 == 1 + 1
    assert counts.top3 == 0


@needs_node
def test_context_mends_slips_better_than_none():
    lines = ["the cat sat on a mat under the house a mouse don't river letter"] * 10
    with_context, without = typed(knowing(lines), lines), typed(blind, lines)
    assert with_context.slips == without.slips > 30
    assert with_context.slips_mended > without.slips_mended
    assert with_context.taps_right > with_context.taps_right_alone == without.taps_right_alone
    assert with_context.swipes_first / with_context.swiped > 0.95


@needs_node
def test_counts_add_up_and_shares_of_nothing_are_none():
    a = typed(blind, ["the cat"])
    both = a + a
    assert both.words == 2 * a.words
    assert both.summary()["saved"] == pytest.approx(a.summary()["saved"])
    assert Counts().summary()["top1"] is None
    assert set(Counts().summary()) == set(a.summary())


@needs_node
def test_time_is_noted_for_words_and_keystrokes_apart():
    clock = KeystrokeClock()
    with Decoder(VOCAB, blind) as keyboard:
        type_lines(keyboard, ["the zebra"], np.random.default_rng(0), clock)
    assert len(clock.words) == 2
    assert len(clock.keystrokes) >= len("zebra")
    assert clock.summary()["keystroke"]["p95_ms"] >= clock.summary()["keystroke"]["p50_ms"] > 0


def test_words_are_what_the_keyboard_takes_for_one():
    line = "don't 42 a1 well-known — C’est x_y (see /etc/fstab, http://a.bc/de me@x.org) end."
    assert [word for _, word in words_in(line)] == ["don't", "well-known", "C’est", "see", "end"]
    assert all(line[start:].startswith(word) for start, word in words_in(line))


@needs_node
def test_corrections_are_looked_for_in_words_that_would_have_been_picked_too():
    line = "the cat"

    def stubborn(tokens):
        """Sure of "mat", whatever was typed, and sees what is meant second."""
        p = np.full(len(VOCAB), 1e-12)
        p[VOCAB.index["mat"]] = 1.0
        p[VOCAB.index["cat"]] = 1e-9
        return np.log(p / p.sum())

    counts = typed(stubborn, [line])
    assert counts.picks == 2
    assert counts.wrong_known == 1  # "cat" typed to its end would become "mat"


QWERTY = layout_of("qwerty")
words = st.text("abcdefghijklmnopqrstuvwxyzé'", min_size=1, max_size=12)


def edits(a: str, b: str) -> int:
    """Damerau–Levenshtein distance, plainly."""
    rows = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            same = a[i - 1] != b[j - 1]
            rows[i][j] = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + same)
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                rows[i][j] = min(rows[i][j], rows[i - 2][j - 2] + 1)
    return rows[-1][-1]


@settings(max_examples=200, deadline=None)
@given(words, st.integers(0, 10**6))
def test_a_slip_is_one_edit_and_drawn_by_the_seed(word, seed):
    slipped = measure.misspell(word, QWERTY, np.random.default_rng(seed))
    assert edits(word, slipped) <= 1
    assert slipped == measure.misspell(word, QWERTY, np.random.default_rng(seed))


def test_all_kinds_of_slips_happen_in_their_shares():
    rng = np.random.default_rng(0)
    slipped = [measure.misspell("keyboard", QWERTY, rng) for _ in range(4000)]
    longer, shorter = (np.mean([len(s) == n for s in slipped]) for n in (9, 7))
    assert longer == pytest.approx(0.2, abs=0.03)
    assert shorter == pytest.approx(0.25, abs=0.03)


@settings(max_examples=100, deadline=None)
@given(words)
def test_taps_without_spread_type_the_word(word):
    tapped = measure.tap(word, QWERTY, np.random.default_rng(0), spread=0.0)
    assert tapped.typed == word
    assert [t is None for t in tapped.taps] == [QWERTY.centre(c) is None for c in word]


def test_taps_hit_another_key_as_often_as_their_spread_says():
    rng = np.random.default_rng(1)
    tapped = "".join(measure.tap("g" * 100, QWERTY, rng).typed for _ in range(50))
    # A key is one wide and one high: 1 − P(|x| < ½) P(|y| < ½) = 1 − 0.9545² = 0.089; the rows are shifted, too.
    assert np.mean([c != "g" for c in tapped]) == pytest.approx(0.09, abs=0.02)


def test_words_on_one_key_have_no_path():
    assert not measure.has_path("aaa", QWERTY)
    assert not measure.has_path("'", QWERTY)
    assert measure.has_path("as", QWERTY)
