"""A person who types: slips, taps and swipes by a seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard import measure
from keyfed.keyboard.layout import constants, layout_of
from keyfed.keyboard.lexicon import resample, templates_of

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


@settings(max_examples=100, deadline=None)
@given(st.text("abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=10))
def test_a_steady_swipe_is_the_words_template(word):
    if not measure.has_path(word, QWERTY):
        return
    path = measure.swipe(word, QWERTY, np.random.default_rng(0), spread=0.0)
    mine = resample(np.array([path]), 32)[0]
    template = templates_of([word], QWERTY, constants())
    assert np.abs(mine - template.paths[0]).max() < 0.5  # only the tremor, which lengthens the path a little


def test_words_on_one_key_have_no_path():
    assert not measure.has_path("aaa", QWERTY)
    assert not measure.has_path("'", QWERTY)
    assert measure.has_path("as", QWERTY)
