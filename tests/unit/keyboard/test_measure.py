"""What is counted while messages are typed, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.keyboard.layout import constants
from keyfed.keyboard.measure import Clock, Counts, strokes_between, type_lines, words_in
from keyfed.keyboard.predict import Predictor
from keyfed.keyboard.session import Editor, Keyboard
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
    # Every word is one stroke and brings its blank; the comma moves that behind itself; Enter.
    assert counts.strokes == counts.ideal == 9 + 1 + 1
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


def test_words_are_what_the_keyboard_takes_for_one():
    line = "don't 42 a1 well-known — C’est x_y (see /etc/fstab, http://a.bc/de me@x.org) end."
    assert [word for _, word in words_in(line, constants())] == ["don't", "well-known", "C’est", "see", "end"]
    assert all(line[start:].startswith(word) for start, word in words_in(line, constants()))


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


def test_an_automatic_blank_is_moved_used_or_taken_back_as_the_editor_does():
    board = Keyboard(blind, Predictor(VOCAB))
    for between in (" ", ", ", ". ", "/", " (", "-", ": "):
        editor = Editor(board)
        for c in "quic":
            editor.type(c)
        editor.pick(next(s for s in editor.strip().slots if s is not None and s.text.lower() == "quick"))
        written, rest = 0, between
        while editor.text.lower() != "quick" + between and written < 9:
            if editor.text.lower() == "quick " and rest and rest[0] not in constants().no_blank_before + " ":
                editor.backspace()
            elif editor.text.lower().removeprefix("quick") == rest[: len(editor.text) - 5]:
                editor.type(rest[len(editor.text) - 5])
            else:
                editor.type(rest[0])
            written += 1
        assert written == strokes_between(between, True, constants()), between
