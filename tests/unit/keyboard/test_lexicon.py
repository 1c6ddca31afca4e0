"""Swipes: the path of a word means that word, shaky ones mostly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard.layout import constants, layout_of
from keyfed.keyboard.lexicon import keys_of, resample, shape_of, swipe_of, templates_of

K = constants()
LAYOUT = layout_of("qwerty")
COMMON = """
the and for are but not you all any can her was one our out day get has him his how man new now old see two way
who boy did its let put say she too use about after again could every first found great house large learn never
other place plant point right small sound spell still study their there these thing think three water where which
world would write keyboard federated language company president don't well-being
"""
WORDS = COMMON.split()
TEMPLATES = templates_of(WORDS, LAYOUT, K)


def best(points, logp=None):
    words, score = TEMPLATES.score(points, np.zeros(len(WORDS)) if logp is None else logp, K)
    return [WORDS[i] for i in words[np.argsort(-score, kind="stable")]]


@pytest.mark.parametrize("word", WORDS)
def test_the_template_of_a_word_decodes_to_that_word(word):
    same_path = [w for w in WORDS if keys_of(w, LAYOUT) == keys_of(word, LAYOUT)]
    assert best(keys_of(word, LAYOUT))[0] in same_path


def test_shaky_swipes_mostly_decode_to_their_word():
    rng = np.random.default_rng(5)
    hits = 0
    for word in WORDS:
        keys = np.array(keys_of(word, LAYOUT)) + rng.normal(0, 0.2, (len(keys_of(word, LAYOUT)), 2))
        path = resample(keys[None], 60)[0] + rng.normal(0, 0.05, (60, 2))
        hits += best([tuple(p) for p in path])[:1] == [word]
    assert hits > 0.85 * len(WORDS)


def test_the_model_decides_between_words_of_one_path():
    likely = np.where([w == "to" for w in ("to", "too")], -1.0, -5.0)
    two = templates_of(("to", "too"), LAYOUT, K)
    for logp in (likely, likely[::-1]):
        words, score = two.score(keys_of("to", LAYOUT), logp, K)
        assert words[score.argmax()] == logp.argmax()


def test_marks_are_skipped_and_double_letters_are_one_key():
    assert keys_of("don't", LAYOUT) == keys_of("dont", LAYOUT)
    assert keys_of("hello", LAYOUT) == keys_of("helo", LAYOUT)
    assert keys_of("été", LAYOUT) == keys_of("ete", LAYOUT)


def test_words_of_fewer_than_two_keys_cannot_be_swiped():
    assert templates_of(["a", "ee", "'", "", "ab"], LAYOUT, K).word.tolist() == [4]


@pytest.mark.parametrize("points", [[], [(np.nan, 1.0)], [(np.inf, 0.0)]])
def test_a_swipe_of_nothing_means_nothing(points):
    words, score = TEMPLATES.score(points, np.zeros(len(WORDS)), K)
    assert len(words) == len(score) == 0


def test_no_words_no_swipes():
    words, _ = templates_of([], LAYOUT, K).score([(1.0, 1.0), (2.0, 1.0)], np.zeros(0), K)
    assert len(words) == 0


def test_only_words_that_begin_and_end_near_the_swipes_ends_are_looked_at():
    found = best([LAYOUT.centre("t"), LAYOUT.centre("e")])
    first, last = np.array(LAYOUT.centre("t")), np.array(LAYOUT.centre("e"))
    for word in WORDS:
        keys = np.array(keys_of(word, LAYOUT))
        near = np.linalg.norm(keys[0] - first) <= K.gesture_start and np.linalg.norm(keys[-1] - last) <= K.gesture_end
        assert (word in found) == near


paths = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(paths)
def test_resampled_points_lie_at_equal_distances_along_the_path(path):
    points = resample(np.array([path]), 32)[0]
    np.testing.assert_allclose(points[0], path[0], atol=1e-9)
    np.testing.assert_allclose(points[-1], path[-1], atol=1e-6)
    length = np.linalg.norm(np.diff(np.array(path), axis=0), axis=1).sum()
    steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
    assert (steps <= length / 31 + 1e-6).all()  # corners are cut, never lengthened


@settings(max_examples=50, deadline=None)
@given(paths, st.tuples(st.floats(-5, 5), st.floats(-5, 5)))
def test_a_shape_does_not_depend_on_where_it_is_drawn(path, by):
    at = resample(np.array([path]), 32)
    np.testing.assert_allclose(shape_of(at), shape_of(at + np.array(by)), atol=1e-9)


def test_repeated_points_of_a_resting_finger_are_dropped():
    assert swipe_of([(1, 1), (1, 1), (2, 1), (float("nan"), 0), (2, 1), (1, 1)]) == [(1, 1), (2, 1), (1, 1)]
