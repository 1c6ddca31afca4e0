"""Swipes: the path of a word means that word, shaky ones mostly.

Rows over the whole trie against a plain table for each word. All of it is the decoder in node.
"""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keyfed.keyboard.keys import base_letter, fold, layout_of
from keyfed.keyboard.measure import swipe

from .node_cases import K, answers, needs_node

pytestmark = needs_node
some = settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

LAYOUT = layout_of("qwerty")
COMMON = """
the and for are but not you all any can her was one our out day get has him his how man new now old see two way
who boy did its let put say she too use about after again could every first found great house large learn never
other place plant point right small sound spell still study their there these thing think three water where which
world would write keyboard federated language company president don't well-being
"""
WORDS = COMMON.split()


def swiped(swipes, words=WORDS, logp=None, **changed):
    """Return the words near each swipe, best first, and the whole answer."""
    scores = [0.0] * len(words) if logp is None else list(logp)
    case = {"op": "swipes", "words": list(words), "swipes": swipes, "logp": scores, "constants": changed}
    (found,) = answers([case])
    ranked = [sorted(near, key=lambda one: -one[1]) for near in found["found"]]
    return [[words[number] for number, _ in near] for near in ranked], found


def keys_of(words):
    return swiped([], words)[1]["keys"]


def resample(paths, n):
    found = answers([{"op": "path", "points": path, "n": n} for path in paths])
    return [np.array(points).reshape(n, 2) for points in found]


def test_the_template_of_a_word_decodes_to_that_word():
    keys = keys_of(WORDS)
    for word, own, best in zip(WORDS, keys, swiped(keys)[0], strict=True):
        assert best[0] in [w for w, other in zip(WORDS, keys, strict=True) if other == own], word


def test_shaky_swipes_mostly_decode_to_their_word():
    rng = np.random.default_rng(5)
    shaken = [(np.array(keys) + rng.normal(0, 0.2, (len(keys), 2))).tolist() for keys in keys_of(WORDS)]
    paths = [(path + rng.normal(0, 0.05, (60, 2))).tolist() for path in resample(shaken, 60)]
    hits = sum(best[:1] == [word] for word, best in zip(WORDS, swiped(paths)[0], strict=True))
    assert hits > 0.85 * len(WORDS)


def test_a_steady_swipe_is_the_words_template():
    steady = [swipe(word, LAYOUT, np.random.default_rng(0), spread=0.0) for word in WORDS]
    for mine, template in zip(resample(steady, 32), resample(keys_of(WORDS), 32), strict=True):
        assert np.abs(mine - template).max() < 0.5  # only the tremor, which lengthens the path a little


def test_the_model_decides_between_words_of_one_path():
    words = ["to", "too"]
    for logp, best in (([-1.0, -5.0], "to"), ([-5.0, -1.0], "too")):
        assert swiped([keys_of(["to"])[0]], words, logp)[0][0][0] == best


def test_marks_are_skipped_and_double_letters_are_one_key():
    a, b, c, d, e, f = keys_of(["don't", "dont", "hello", "helo", "été", "ete"])
    assert (a, c, e) == (b, d, f)


def test_words_of_fewer_than_two_keys_cannot_be_swiped():
    assert swiped([], ["a", "ee", "'", "", "ab"])[1]["swipeable"] == [4]


def test_a_swipe_of_nothing_means_nothing_and_no_words_no_swipes():
    assert swiped([[], [[None, 1.0]]])[0] == [[], []]  # JSON has no NaN: null is no number either
    assert swiped([[[1.0, 1.0], [2.0, 1.0]]], [])[0] == [[]]


def test_no_key_of_a_word_is_further_from_a_swipe_than_it_reaches():
    swipes = [[LAYOUT.centre(word[0]), LAYOUT.centre(word[-1])] for word in ("put", "was", "out")]
    for (first, last), found in zip(swipes, swiped(swipes)[0], strict=True):
        line = np.linspace(first, last, 200)
        assert found
        for word, keys in zip(WORDS, map(np.array, keys_of(WORDS)), strict=True):
            ends = np.linalg.norm([keys[0] - first, keys[-1] - last], axis=1)
            between = np.linalg.norm(keys[:, None] - line, axis=2).min(1)
            if word in found:
                assert max(*ends, *between) <= K.gesture_reach


points = st.tuples(st.floats(0, 10), st.floats(0, 3))
paths = st.lists(st.lists(points, min_size=1, max_size=12), min_size=40, max_size=60)


@some
@given(paths)
def test_resampled_points_lie_at_equal_distances_along_the_path(drawn):
    for path, found in zip(drawn, resample(drawn, 32), strict=True):
        np.testing.assert_allclose(found[0], path[0], atol=1e-9)
        np.testing.assert_allclose(found[-1], path[-1], atol=1e-6)
        length = np.linalg.norm(np.diff(np.array(path), axis=0), axis=1).sum()
        steps = np.linalg.norm(np.diff(found, axis=0), axis=1)
        assert (steps <= length / 31 + 1e-6).all()  # corners are cut, never lengthened


def test_paths_are_resampled_as_by_hand():
    corner, resting, still, point = resample(
        [[[0, 0], [2, 0], [2, 2]], [[0, 0], [0, 0], [3, 4]], [[1, 1], [1, 1]], [[1, 2]]], 5
    )
    np.testing.assert_allclose(corner, [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2]])
    np.testing.assert_allclose(resting, [[0, 0], [0.75, 1], [1.5, 2], [2.25, 3], [3, 4]])
    np.testing.assert_allclose(still, [[1, 1]] * 5)
    np.testing.assert_allclose(point, [[1, 2]] * 5)


def plain_cost(swipe, keys, k):
    """Lay the keys on every choice of places, by the equations of gesture.mjs; the least cost."""
    length = np.linalg.norm(np.diff(swipe, axis=0), axis=1).sum()
    m = max(2, min(k["gesture_points"], math.ceil(length / k["gesture_step"]) + 1))
    (x,) = resample([swipe.tolist()], m)
    misses = ((x[None] - keys[:, None]) ** 2).sum(2)
    misses[misses > k["gesture_reach"] ** 2] = math.inf

    def bend(a, b):
        straight = np.linspace(x[a], x[b], b - a + 1)[1:-1]
        return length / (m - 1) * ((x[a + 1 : b] - straight) ** 2).sum()

    least = math.inf
    for between in combinations_with_replacement(range(m), len(keys) - 2):
        places = (0, *between, m - 1)
        missed = k["gesture_key"] * sum(misses[i, at] for i, at in enumerate(places))
        least = min(least, missed + k["gesture_bend"] * sum(bend(a, b) for a, b in pairwise(places)))
    return least


def test_a_cost_is_the_least_over_all_places_of_the_keys():
    rng = np.random.default_rng(3)
    changed = {"gesture_step": 0.6, "gesture_points": 9, "gesture_reach": 1.1}
    words = ["the", "there", "then", "tree", "we", "were", "put", "pot", "out", "was"]
    swipes = [swipe(word, LAYOUT, rng) for word in words]
    logp = rng.normal(-5, 2, len(words)).tolist()
    keys, found = keys_of(words), swiped(swipes, words, logp, **changed)[1]["found"]
    for points, near in zip(swipes, found, strict=True):
        scores = dict(near)
        for number, own in enumerate(keys):
            cost = plain_cost(np.array(points), np.array(own), {**vars(K), **changed})
            assert scores.get(number, -math.inf) == pytest.approx(logp[number] - cost, abs=1e-9)


@some
@given(st.lists(st.text("abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=8), min_size=30, max_size=40))
def test_a_swipe_without_noise_finds_its_word_or_one_of_nearly_the_same_path(drawn):
    words = [word for word in dict.fromkeys([*drawn, *WORDS]) if len({LAYOUT.centre(c) for c in word} - {None}) > 1]
    keys = keys_of(words)
    for number, near in enumerate(swiped(keys, words)[1]["found"]):
        scores = dict(near)
        best = max(scores, key=scores.__getitem__)
        mine, other = resample([keys[number], keys[best]], 64)
        assert best == number or np.linalg.norm(mine - other, axis=1).mean() < 0.2, (words[number], words[best])


@some
@given(st.lists(st.sampled_from(WORDS), min_size=5, max_size=10), st.integers(0, 9))
def test_a_swipe_backwards_is_the_word_backwards(drawn, seed):
    rng = np.random.default_rng(seed)
    swipes = [swipe(word, LAYOUT, rng) for word in drawn]
    here = swiped(swipes, drawn)[1]["found"]
    there = swiped([points[::-1] for points in swipes], [word[::-1] for word in drawn])[1]["found"]
    for one, other in zip(here, there, strict=True):
        assert dict(other) == pytest.approx(dict(one), abs=1e-6)


def test_repeated_points_of_a_resting_finger_are_dropped():
    (found,) = answers([{"op": "swipeOf", "points": [(1, 1), (1, 1), (2, 1), (None, 0), (2, 1), (1, 1)]}])
    assert found == [[1, 1], [2, 1], [1, 1]]


LETTERS = "aabbeeost'-éß1Z"


def spelt(cases, layout="qwerty", most=1e9):
    """Return, for each (words, typed, taps), the costs of all words whole and of their cheapest beginnings."""
    return [seen[-1] for seen in spelt_by_letter(cases, layout, most)]


def spelt_by_letter(cases, layout, most=1e9):
    """Return the same after none, one, two … of the letters."""
    asked = [
        {
            "op": "rows", "words": words, "layout": layout, "most": most,
            "keys": [(c, taps[i] if i < len(taps) else None) for i, c in enumerate(typed)],
        }
        for words, typed, taps in cases
    ]  # fmt: skip
    return [[(number(one["whole"]), number(one["beginning"])) for one in found["seen"]] for found in answers(asked)]


def number(costs):
    """JSON has no infinity: what is above the bound is null."""
    return np.array([math.inf if cost is None else cost for cost in costs])


def cost(typed, word, taps=()):
    return spelt([([word], typed, taps)])[0][0][0]


def substitution(t, c, tap, layout):
    """sub(c) of the contract, one pair at a time."""
    key, other = layout.centre(t), layout.centre(c)
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


def reference(typed, word, taps, layout=LAYOUT):
    """The weighted Damerau–Levenshtein distances of all beginnings of both: a recursion, nothing shared."""
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
            found.append(d(i - 1, j - 1) + substitution(typed[i - 1], word[j - 1], tap, layout))
        if i > 1 and j > 1 and typed[i - 1] == word[j - 2] and typed[i - 2] == word[j - 1]:
            found.append(d(i - 2, j - 2) + K.swap)
        return min(found)

    return [[d(i, j) for j in range(len(word) + 1)] for i in range(len(typed) + 1)]


words = st.lists(st.text(LETTERS, min_size=1, max_size=7), min_size=1, max_size=8)
taps = st.lists(st.none() | points, max_size=7)


@some
@given(st.lists(st.tuples(words, st.text(LETTERS + "x’", max_size=7), taps), min_size=60, max_size=80))
def test_costs_equal_a_plain_table_word_by_word(cases):
    for (lexicon, typed, where), (full, completion) in zip(cases, spelt(cases), strict=True):
        plain = [reference(typed, word, where)[-1] for word in lexicon]
        np.testing.assert_allclose(full, [costs[-1] for costs in plain], atol=1e-12)
        np.testing.assert_allclose(completion, [min(costs[:-1]) for costs in plain], atol=1e-12)


@pytest.mark.parametrize("layout", ["qwerty", "qwertz", "azerty"])
def test_costs_after_every_letter_equal_a_plain_table_on_every_layout(layout):
    rng = random.Random(1)
    cases = []
    for letters in ["ab", "qwea", "eéèE'-", "asdfzxcv1’", "ñßaİΣ漢"] * 4:
        size = rng.randint(0, 6)
        typed = "".join(rng.choices(letters + "k", k=size))
        lexicon = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(rng.randint(1, 12))]
        cases.append((lexicon, typed, [rng.choice([None, (rng.uniform(-1, 11), rng.uniform(-1, 4))]) for _ in typed]))
    for (lexicon, typed, where), found in zip(cases, spelt_by_letter(cases, layout), strict=True):
        plain = [reference(typed, word, where, layout_of(layout)) for word in lexicon]
        for n, (full, completion) in enumerate(found):
            np.testing.assert_allclose(full, [rows[n][-1] for rows in plain], atol=1e-12)
            np.testing.assert_allclose(completion, [min(rows[n][:-1]) for rows in plain], atol=1e-12)


@some
@given(st.lists(st.tuples(words, st.text(LETTERS + "x’", max_size=7), taps), min_size=60, max_size=80))
def test_costs_up_to_the_bound_are_exact_and_others_are_none(cases):
    for most in (0.0, 0.7, 2.0):
        for pruned, whole in zip(spelt(cases, most=most), spelt(cases), strict=True):
            for some_costs, all_costs in zip(pruned, whole, strict=True):
                np.testing.assert_array_equal(some_costs, np.where(all_costs <= most, all_costs, math.inf))


@some
@given(st.lists(words, min_size=40, max_size=60))
def test_a_trie_holds_every_word_at_its_node_level_by_level(lexicons):
    cases = [{"op": "rows", "words": lexicon, "layout": "qwerty", "keys": []} for lexicon in lexicons]
    for lexicon, trie in zip(lexicons, answers(cases), strict=True):
        size = len(trie["parent"])
        assert size == len({fold(w)[:n] for w in lexicon for n in range(len(w) + 1)})
        assert all(parent < at for at, parent in enumerate(trie["parent"]) if at)
        kids = trie["kids"]
        assert [trie["parent"][n] for n in range(1, size)] == [
            n for n in range(size) for _ in range(kids[n], kids[n + 1])
        ]
        for word, node in zip(lexicon, trie["node"], strict=True):
            letters = []
            while node:
                letters.append(trie["alphabet"][trie["char"][node]])
                node = trie["parent"][node]
            assert "".join(reversed(letters)) == fold(word)


def test_a_trie_of_nothing_can_be_typed_on():
    ((full, completion),) = spelt([([], "abc", ())])
    assert full.shape == completion.shape == (0,)


def test_words_spelt_alike_share_a_node():
    (trie,) = answers([{"op": "rows", "words": ["Apple", "apple", "APPLE", "app"], "layout": "qwerty", "keys": []}])
    a, b, c, d = trie["node"]
    assert a == b == c != d


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
    assert spelt([([word], typed, ())])[0][0][0] == pytest.approx(cost)


def test_a_tap_between_two_keys_makes_the_neighbour_cheap():
    e, r = LAYOUT.centre("e"), LAYOUT.centre("r")
    between = ((e[0] + r[0]) / 2 + 0.01, e[1])
    costs = [cost("hrllo", "hello", [None, tap]) for tap in (None, r, between)]
    assert costs[2] < 0.05 < costs[1]
    assert costs[1] == pytest.approx(K.tap_weight)


def test_words_of_many_characters_and_scripts_are_only_letters_here():
    lexicon = ["שלום", "مرحبا", "😀", "naïve", "a" * 40]
    ((hebrew, _), (face, _), (long, _)) = spelt([(lexicon, typed, ()) for typed in ("שלום", "😀", "a" * 39)])
    assert (hebrew[0], face[2]) == (0.0, 0.0)
    assert long[4] == pytest.approx(K.miss_double)
