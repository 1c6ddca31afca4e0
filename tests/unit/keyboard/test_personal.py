"""Learning after three uses, forgetting, blocking, incognito, carrying to another device."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import DataError
from keyfed.keyboard.context import constants, fold, layout_of
from keyfed.keyboard.lexicon import KeyboardLexicon
from keyfed.keyboard.personal import PersonalWords, mixed, without_specials

K = constants()
WORDS = ["alpha", "beta", "gamma"]
LEXICON = KeyboardLexicon(WORDS, [4, 5, 6], layout_of("qwerty"), K)
LOGP = np.log(np.array([0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.1]))


def learn(personal, word, times, previous=""):
    for _ in range(times):
        personal.learn(word, previous)
    return personal


def chances(personal, previous="", own=()):
    words, others = mixed(LOGP, previous, LEXICON, own, personal, K)
    return np.exp(words), np.exp(others)


def test_a_word_counts_from_the_third_use_on():
    personal = learn(PersonalWords(), "Kiel", 2)
    assert not personal.knows("kiel")
    assert personal.uses() == {}
    learn(personal, "kiel", 1)
    assert personal.knows("KIEL")
    assert personal.uses() == personal.uses_after("") == {"kiel": 3}


def test_the_models_probabilities_are_renormalised_without_the_specials():
    np.testing.assert_allclose(np.exp(without_specials(LOGP)), [0, 0, 0, 0, 0.5, 1 / 3, 1 / 6])
    np.testing.assert_allclose(chances(PersonalWords())[0], [0.5, 1 / 3, 1 / 6])


def test_words_and_pairs_are_mixed_as_the_equation_says():
    personal = learn(PersonalWords(), "beta", 4, "alpha")
    learn(personal, "own", 6, "")
    p, others = chances(personal, "alpha", ("own",))
    by_use, by_pair = min(K.lambda_most, 10 / (10 + K.k_unigram)), 4 / (4 + K.k_bigram)
    rest = 1 - by_pair
    expected = rest * (by_use * np.array([0, 0.4, 0]) + (1 - by_use) * np.array([0.5, 1 / 3, 1 / 6])) + [0, by_pair, 0]
    np.testing.assert_allclose(p, expected)
    np.testing.assert_allclose(others, [rest * by_use * 0.6])
    assert p.sum() + others.sum() == pytest.approx(1.0)


def test_the_share_of_personal_words_is_bounded():
    p, others = chances(learn(PersonalWords(), "own", 100_000, "x"), "", ("own",))
    assert others[0] == pytest.approx(K.lambda_most)
    assert p.sum() == pytest.approx(1 - K.lambda_most)


def test_forgetting_leaves_no_trace_of_a_word():
    personal = learn(learn(PersonalWords(), "beta", 5, "own"), "own", 5, "beta")
    personal.add("Own")
    personal.forget("OWN")
    assert "own" not in personal.to_json().lower()
    assert personal.words == {"beta": 5}
    assert personal.pairs == {}
    personal.forget("beta")
    np.testing.assert_array_equal(chances(personal)[0], chances(PersonalWords())[0])


def test_forgetting_everything_empties_every_list():
    personal = learn(PersonalWords(), "own", 5)
    personal.add("Two")
    personal.block("three")
    personal.forget_all()
    assert json.loads(personal.to_json()) == {"format": 1, "words": {}, "pairs": {}, "dictionary": [], "blocked": []}


@pytest.mark.parametrize("how", [{"incognito": True}, {"learning": False}])
def test_nothing_is_learnt_while_incognito_or_with_learning_off(how):
    personal = PersonalWords(**how)
    learn(personal, "own", 5)
    personal.keep("own")
    assert personal.words == personal.pairs == {}


def test_incognito_suggests_from_the_model_but_still_knows_the_users_words():
    personal = learn(PersonalWords(), "beta", 50)
    personal.incognito = True
    np.testing.assert_array_equal(chances(personal)[0], chances(PersonalWords())[0])
    assert personal.knows("beta")


def test_with_learning_off_counts_are_still_used():
    personal = learn(PersonalWords(), "beta", 50)
    personal.learning = False
    assert chances(personal)[0][1] > chances(PersonalWords())[0][1]


@pytest.mark.parametrize(
    "word", ["b4", "a@b", "x.org", "and/or", "snake_case", "", "…", "a" * 41, "a\x1bb", "٣", "a b"]
)
def test_numbers_addresses_and_monsters_are_not_learnt(word):
    personal = learn(PersonalWords(), word, 5)
    assert personal.words == {}


def test_a_number_before_a_word_is_not_kept_either():
    personal = learn(PersonalWords(), "street", 5, "42")
    assert personal.words == {"street": 5}
    assert personal.pairs == {}
    assert learn(PersonalWords(), "می\u200cخواهم", 3).knows("می\u200cخواهم")


def test_an_undone_correction_makes_the_word_known_at_once():
    personal = PersonalWords()
    personal.keep("Teh")
    assert personal.knows("teh")


def test_a_use_that_was_undone_is_taken_back():
    personal = learn(learn(PersonalWords(), "the", 2, "so"), "cat", 1, "the")
    personal.unlearn("The", "so")
    personal.unlearn("cat", "the")
    personal.unlearn("never", "used")
    assert (personal.words, personal.pairs) == ({"the": 1}, {"so": {"the": 1}})


def test_numbers_are_not_learnt_but_letters_that_mean_numbers_are():
    assert learn(PersonalWords(), "三月", 3).knows("三月")
    assert not learn(PersonalWords(), "Ⅳ", 3).knows("Ⅳ")


def test_dictionary_words_count_as_used_three_times_and_keep_their_form():
    personal = PersonalWords()
    personal.add("McCoy")
    assert personal.uses() == {"mccoy": K.learn_after}
    assert personal.dictionary == {"mccoy": "McCoy"}
    for word in ("", "two words", "…", "a" * 41):
        with pytest.raises(DataError, match="cannot be a word of the dictionary"):
            personal.add(word)


@pytest.mark.parametrize("word", ["New York", "", "\n", "a\x1bb", "a" * 41, "b\u202ec"])
def test_what_an_import_would_refuse_cannot_be_blocked(word):
    personal = learn(PersonalWords(), "own", 3)
    with pytest.raises(DataError, match=r"cannot be blocked: expected one word"):
        personal.block(word)
    assert personal.blocked == set()
    personal.block("❤️")  # an emoji is one word
    PersonalWords().take(personal.to_json())


def test_a_full_memory_drops_the_rarest_and_can_always_be_taken_back():
    personal = PersonalWords(constants=replace(K, most_entries=20))
    personal.add("Mine")
    learn(personal, "often", 5, "so")
    for i in range(200):
        personal.learn("x" + chr(97 + i % 26) * (1 + i // 26), "so")
        document = json.loads(personal.to_json())
        pairs = sum(map(len, document["pairs"].values()))
        assert len(document["words"]) + pairs + len(document["dictionary"]) <= 20
    assert personal.words["often"] == personal.pairs["so"]["often"] == 5
    assert "x" + "r" * 8 in personal.words  # the newest of the rare ones stays
    PersonalWords(constants=personal.constants).take(personal.to_json())


def test_the_users_own_lists_are_refused_not_cut_when_full():
    personal = PersonalWords(constants=replace(K, most_entries=3))
    learn(personal, "gone", 3)
    for word in ("one", "two", "three", "One"):
        personal.add(word)
    with pytest.raises(DataError, match="full"):
        personal.block("four")
    assert (personal.words, set(personal.dictionary)) == ({}, {"one", "two", "three"})


def test_export_and_import_carry_everything():
    personal = learn(learn(PersonalWords(), "Grüße", 4, "liebe"), "don’t", 3)
    personal.add("McCoy")
    personal.block("Bad")
    other = PersonalWords()
    learn(other, "gone", 9)
    other.take(personal.to_json())
    assert other.to_json() == personal.to_json()
    assert (other.words, other.pairs) == (personal.words, personal.pairs)
    assert other.version > 0


GOOD = {"format": 1, "words": {"a": 3}, "pairs": {"": {"a": 3}}, "dictionary": ["B"], "blocked": ["c"]}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"format": None}, {"words": []}, {"words": {"a": 0}}, {"words": {"a": -1}},
        {"words": {"a": 1.5}},
        {"words": {"a": True}}, {"words": {"a": "3"}}, {"words": {"a": 10**30}}, {"words": {"two words": 3}},
        {"words": {"": 3}}, {"words": {"a" * 41: 3}}, {"words": {"\x1b[31m": 3}}, {"pairs": {"a": 3}},
        {"pairs": {"a": {"b": None}}}, {"pairs": {"x y": {"b": 1}}}, {"dictionary": {"a": 1}}, {"dictionary": [1]},
        {"dictionary": ["\n"]}, {"blocked": [None]}, {"blocked": "abc"},
        {"words": {f"w{i}": 1 for i in range(100_001)}},
    ],
)  # fmt: skip
def test_a_damaged_import_is_refused_whole(change):
    personal = learn(PersonalWords(), "own", 3)
    before = personal.to_json()
    with pytest.raises(DataError, match=r"^learnt words: .+"):
        personal.take(json.dumps({**GOOD, **change}))
    assert personal.to_json() == before
    personal.take(json.dumps(GOOD))
    assert personal.knows("b")


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"format": 1}', "\x00"])
def test_what_is_no_export_is_refused(text):
    with pytest.raises(DataError, match=r"^learnt words: .+"):
        PersonalWords().take(text)


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=30))
def test_whatever_is_typed_can_be_exported_and_taken_back(typed):
    personal = PersonalWords()
    for word, previous in typed:
        personal.learn(word, previous)
    other = PersonalWords()
    other.take(personal.to_json())
    assert {fold(w): n for w, n in personal.words.items()} == other.words
