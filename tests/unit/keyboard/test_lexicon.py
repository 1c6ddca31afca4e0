"""Swipes: the path of a word means that word, shaky ones mostly.

Rows over the whole trie against a plain table for each word.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard.context import base_letter, constants, fold, layout_of
from keyfed.keyboard.lexicon import Speller, build_trie, keys_of, resample, shape_of, swipe_of, templates_of

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


LETTERS = "aabbeeost'-éß1Z"


def speller_of(words):
    return Speller(build_trie(words), LAYOUT, K)


def spell(speller, word, taps=()):
    """The state after a whole word, letter by letter."""
    state = speller.start()
    for i, c in enumerate(word):
        state = state.key(c, taps[i] if i < len(taps) else None)
    return state


def substitution(t, c, tap):
    """sub(c) of the contract, one pair at a time."""
    key, other = LAYOUT.centre(t), LAYOUT.centre(c)
    if tap is not None and key is not None:
        if other is None:
            return K.sub_far
        near, far = (sum((a - b) ** 2 for a, b in zip(tap, p, strict=True)) for p in (key, other))
        return min(K.sub_far, max(0.0, K.tap_weight * far - K.tap_weight * near))
    if t == c:
        return 0.0
    if base_letter(t) == base_letter(c):
        return K.accent
    return K.sub_far if key is None or other is None else min(K.sub_far, K.sub_near * math.dist(key, other))


def miss(word, j):
    if word[j] in K.marks:
        return K.miss_mark
    return K.miss_double if j and word[j] == word[j - 1] else K.miss


def reference(typed, word, taps):
    """The weighted Damerau–Levenshtein distances of all beginnings of a word: a recursion, nothing shared."""
    typed, word = fold(typed), fold(word)

    @cache
    def d(i, j):
        extra = K.extra_double if i > 1 and typed[i - 1] == typed[i - 2] else K.extra
        found = [0.0] if i == j == 0 else []
        if i:
            found.append(d(i - 1, j) + extra)
        if j:
            found.append(d(i, j - 1) + miss(word, j - 1))
        if i and j:
            tap = taps[i - 1] if i - 1 < len(taps) else None
            found.append(d(i - 1, j - 1) + substitution(typed[i - 1], word[j - 1], tap))
        if i > 1 and j > 1 and typed[i - 1] == word[j - 2] and typed[i - 2] == word[j - 1]:
            found.append(d(i - 2, j - 2) + K.swap)
        return min(found)

    return [d(len(typed), j) for j in range(len(word) + 1)]


words = st.lists(st.text(LETTERS, min_size=1, max_size=7), min_size=1, max_size=8)
taps = st.lists(st.none() | st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=7)


@settings(max_examples=150, deadline=None)
@given(words, st.text(LETTERS + "x’", max_size=7), taps)
def test_costs_equal_a_plain_table_word_by_word(lexicon, typed, where):
    state = spell(speller_of(lexicon), typed, where)
    plain = [reference(typed, word, where) for word in lexicon]
    np.testing.assert_allclose(state.full, [costs[-1] for costs in plain], atol=1e-12)
    np.testing.assert_allclose(state.completion, [min(costs[:-1]) for costs in plain], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(words, st.lists(st.sampled_from([*LETTERS, "<"]), max_size=14))
def test_backspaces_lead_back_to_what_typing_the_rest_gives(lexicon, keys):
    speller = speller_of(lexicon)
    state, left = speller.start(), ""
    for key in keys:
        if key == "<":
            state, left = state.before or state, left[:-1]
        else:
            state, left = state.key(key), left + key
    np.testing.assert_array_equal(state.row, spell(speller, left).row)
    assert "".join(state.typed) == fold(left)


@settings(max_examples=60, deadline=None)
@given(words)
def test_a_trie_holds_every_word_at_its_node_level_by_level(lexicon):
    trie = build_trie(lexicon)
    assert trie.first[-1] == len(trie) == len({fold(w)[:n] for w in lexicon for n in range(len(w) + 1)})
    assert (trie.parent[1:] < np.arange(1, len(trie))).all()
    for word, node in zip(lexicon, trie.node.tolist(), strict=True):
        letters = []
        while node:
            letters.append(trie.alphabet[trie.char[node]])
            node = int(trie.parent[node])
        assert "".join(reversed(letters)) == fold(word)


def test_a_trie_of_nothing_can_be_typed_on():
    state = spell(speller_of([]), "abc")
    assert state.full.shape == state.completion.shape == (0,)
    assert len(build_trie([])) == 1


def test_words_spelt_alike_share_a_node():
    trie = build_trie(["Apple", "apple", "APPLE", "app"])
    assert trie.node[0] == trie.node[1] == trie.node[2] != trie.node[3]


@pytest.mark.parametrize(
    ("typed", "word", "cost"),
    [
        ("the", "the", 0.0),
        ("teh", "the", K.swap),
        ("dont", "don't", K.miss_mark),
        ("don’t", "don't", 0.0),
        ("runing", "running", K.miss_double),
        ("helllo", "hello", K.extra_double),
        ("hllo", "hello", K.miss),
        ("hrllo", "hello", K.sub_near),
        ("hpllo", "hello", K.sub_far),
        ("cafe", "café", K.accent),
        ("THE", "the", 0.0),
        ("", "ab", 2 * K.miss),
        ("p", "é", K.sub_far),
    ],
)
def test_one_mistake_costs_what_its_constant_says(typed, word, cost):
    assert spell(speller_of([word]), typed).full[0] == pytest.approx(cost)


def test_a_tap_between_two_keys_makes_the_neighbour_cheap():
    speller = speller_of(["hello"])
    e, r = LAYOUT.centre("e"), LAYOUT.centre("r")
    between = ((e[0] + r[0]) / 2 + 0.01, e[1])
    costs = [spell(speller, "hrllo", [None, tap]).full[0] for tap in (None, r, between)]
    assert costs[2] < 0.05 < costs[1]
    assert costs[1] == pytest.approx(K.tap_weight)


def test_words_of_many_characters_and_scripts_are_only_letters_here():
    lexicon = ["שלום", "مرحبا", "😀", "naïve", "a" * 40]
    assert spell(speller_of(lexicon), "שלום").full[0] == 0.0
    assert spell(speller_of(lexicon), "😀").full[2] == 0.0
    assert spell(speller_of(lexicon), "a" * 39).full[4] == pytest.approx(K.miss_double)
