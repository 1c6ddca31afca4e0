"""Learning after three uses, forgetting, blocking, incognito, carrying to another device: the decoder in node.

What is said of the cache of words that fade stands in test_cache.py; documents are compared without it here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keyfed.keyboard.keys import fold
from keyfed.keyboard.session import Decoder, TypedLine
from keyfed.text.vocab import SPECIALS, Vocab

from .node_cases import K, answers, needs_node

pytestmark = needs_node

WORDS = ["alpha", "beta", "gamma"]
LOGP = np.log(np.array([0.1, 0.1, 0.1, 0.1, 0.3, 0.2, 0.1]))
NOTHING: dict[str, Any] = {"format": 1, "words": {}, "pairs": {}, "dictionary": [], "blocked": []}


def learn(word, times, previous=""):
    return [["learn", word, previous]] * times


def after(*actions, **changed):
    """Return what was answered to each action, and what is learnt in the end."""
    (found,) = answers([{"op": "personal", "actions": list(actions), "constants": changed}])
    held = json.loads(found["held"])
    held.pop("cache", None)
    return found["answered"], held


def last(*actions, **changed):
    return after(*actions, **changed)[0][-1]


def held(*actions, **changed):
    return after(*actions, **changed)[1]


def chances(actions, previous="", own=()):
    case = {"op": "mixed", "logp": LOGP.tolist(), "previous": previous, "words": WORDS}
    document = None if actions is None else json.dumps(held(*actions))
    (found,) = answers([{**case, "own": list(own), "held": document}])
    number = lambda values: np.exp(np.array([-np.inf if v is None else v for v in values]))  # noqa: E731
    return number(found["main"]), number(found["own"])


def test_a_word_counts_from_the_third_use_on():
    assert last(*learn("Kiel", 2), ["knows", "kiel"]) is False
    assert last(*learn("Kiel", 2), *learn("kiel", 1), ["knows", "KIEL"]) is True
    (two, three) = answers([{"op": "personal", "actions": learn("Kiel", n, "in")} for n in (2, 3)])
    assert (two["uses"], two["after"]) == ([], [])
    assert three["uses"] == three["after"] == [["kiel", 3]]


def test_the_models_probabilities_are_renormalised_without_the_specials():
    case = {"op": "mixed", "logp": LOGP.tolist(), "previous": "", "words": WORDS, "own": []}
    (found,) = answers([{**case, "held": None}])
    np.testing.assert_allclose(found["model"], [0.5, 1 / 3, 1 / 6])
    np.testing.assert_allclose(chances([])[0], [0.5, 1 / 3, 1 / 6])


def test_words_and_pairs_are_mixed_as_the_equation_says():
    """Words of the lexicon have the cache, which knows one of them; one's own words their share of the uses."""
    p, others = chances([*learn("beta", 4, "alpha"), *learn("own", 6)], "alpha", ("own",))
    by_use, by_pair = min(K.lambda_most, 10 / (10 + K.k_unigram)), 4 / (4 + K.k_bigram)
    own = (1 - by_pair) * by_use * 0.6
    np.testing.assert_allclose(others, [own])
    kappa = K.cache_prior[0] / K.cache_prior[1]
    np.testing.assert_allclose(p, (1 - own) * ((1 - kappa) * np.array([0.5, 1 / 3, 1 / 6]) + kappa * np.eye(3)[1]))
    assert p.sum() + others.sum() == pytest.approx(1.0)


def test_a_listed_word_is_the_users_own_also_if_the_lexicon_has_it():
    share = K.learn_after / (K.learn_after + K.k_unigram)
    p, _ = chances([["add", "Beta"]])
    np.testing.assert_allclose(p, (1 - share) * np.array([0.5, 1 / 3, 1 / 6]) + share * np.eye(3)[1])


def test_the_share_of_personal_words_is_bounded():
    document = json.dumps({**NOTHING, "words": {"own": 100_000}, "pairs": {"x": {"own": 100_000}}})
    p, others = chances([["importJSON", document]], "", ("own",))
    assert others[0] == pytest.approx(K.lambda_most)
    assert p.sum() == pytest.approx(1 - K.lambda_most)


def test_forgetting_leaves_no_trace_of_a_word():
    actions = [*learn("beta", 5, "own"), *learn("own", 5, "beta"), ["add", "Own"], ["forget", "OWN"]]
    assert held(*actions) == {**NOTHING, "words": {"beta": 5}}
    np.testing.assert_array_equal(chances([*actions, ["forget", "beta"]])[0], chances([])[0])


def test_forgetting_everything_empties_every_list():
    assert held(*learn("own", 5), ["add", "Two"], ["block", "three"], ["forgetAll"]) == NOTHING


@pytest.fixture(scope="module")
def decoder():
    vocab = Vocab("word", (*SPECIALS, *WORDS), lower=True, tokenised=False)
    with Decoder(vocab, lambda ids: LOGP) as one:
        yield one


@pytest.mark.parametrize("how", [{"incognito": True}, {"learn": False}])
def test_nothing_is_learnt_while_incognito_or_with_learning_off(decoder, how):
    decoder.forget_all()
    decoder._settings = how
    line = TypedLine(decoder)
    for c in "own own own own gammma ":
        line.type(c)
    assert line.text == "own own own own gamma "
    line.backspace()  # the correction is undone, and not learnt as one either
    assert line.text == "own own own own gammma "
    decoder._settings = {}
    assert decoder.learnt() == NOTHING


def test_incognito_suggests_from_the_model_but_still_knows_the_users_words(decoder):
    decoder.forget_all()
    decoder._settings = {"incognito": True}
    before = decoder.suggest("so ")
    decoder.learn([("gamm", "so")] * 50)
    assert decoder.suggest("so ") == before
    assert decoder.suggest("so gamm").correction is None
    decoder._settings = {}
    assert decoder.suggest("so ").slots[1].text == "gamm"


def test_with_learning_off_counts_are_still_used(decoder):
    decoder.forget_all()
    decoder.learn([("gamma", "so")] * 50)
    decoder._settings = {"learn": False}
    assert decoder.suggest("so ").slots[1].text == "gamma"
    decoder._settings = {}


NOT_LEARNT = ["b4", "a@b", "x.org", "and/or", "snake_case", "", "…", "a" * 41, "a\x1bb", "٣", "a b", "Ⅳ"]


def test_numbers_addresses_and_monsters_are_not_learnt():
    found = answers([{"op": "personal", "actions": learn(word, 5)} for word in NOT_LEARNT])
    assert [json.loads(one["held"]) for one in found] == [NOTHING] * len(NOT_LEARNT)


@pytest.mark.parametrize("word", ["می\u200cخواهم", "三月"])
def test_letters_of_any_script_are_learnt_also_those_that_mean_numbers(word):
    assert last(*learn(word, 3), ["knows", word]) is True


def test_a_number_before_a_word_is_not_kept_either():
    assert held(*learn("street", 5, "42")) == {**NOTHING, "words": {"street": 5}}


def test_an_undone_correction_makes_the_word_known_at_once():
    assert last(["keep", "Teh"], ["knows", "teh"]) is True


def test_a_use_that_was_undone_is_taken_back():
    undone = [["unlearn", "The", "so"], ["unlearn", "cat", "the"], ["unlearn", "never", "used"]]
    found = held(*learn("the", 2, "so"), *learn("cat", 1, "the"), *undone)
    assert found == {**NOTHING, "words": {"the": 1}, "pairs": {"so": {"the": 1}}}


def test_dictionary_words_count_as_used_three_times_and_keep_their_form():
    (found,) = answers([{"op": "personal", "actions": [["add", "McCoy"]]}])
    assert found["uses"] == [["mccoy", K.learn_after]]
    assert json.loads(found["held"])["dictionary"] == ["McCoy"]
    for word in ("", "two words", "…", "a" * 41):
        assert "cannot be a word of the dictionary" in last(["add", word])["error"]


@pytest.mark.parametrize("word", ["New York", "", "\n", "a\x1bb", "a" * 41, "b\u202ec"])
def test_what_an_import_would_refuse_cannot_be_blocked(word):
    answered, document = after(*learn("own", 3), ["block", word], ["block", "❤️"])  # an emoji is one word
    assert "cannot be blocked: expected one word" in answered[3]["error"]
    assert document["blocked"] == ["❤️"]
    assert held(["importJSON", json.dumps(document)]) == document


def test_a_full_memory_drops_the_rarest_and_can_always_be_taken_back():
    actions = [["add", "Mine"], *learn("often", 5, "so")]
    for i in range(200):
        actions += [*learn("x" + chr(97 + i % 26) * (1 + i // 26), 1, "so"), ["exportJSON"]]
    answered, document = after(*actions, most_entries=20)
    for text in answered:
        if isinstance(text, str):
            now = json.loads(text)
            assert len(now["words"]) + sum(map(len, now["pairs"].values())) + len(now["dictionary"]) <= 20
    assert document["words"]["often"] == document["pairs"]["so"]["often"] == 5
    assert "x" + "r" * 8 in document["words"]  # the newest of the rare ones stays
    assert held(["importJSON", json.dumps(document)], most_entries=20) == document


def test_the_users_own_lists_are_refused_not_cut_when_full():
    own = [["add", word] for word in ("one", "two", "three", "One")]
    answered, document = after(*learn("gone", 3), *own, ["block", "four"], most_entries=3)
    assert "full" in answered[-1]["error"]
    assert (document["words"], document["dictionary"]) == ({}, ["One", "two", "three"])


def test_export_and_import_carry_everything():
    document = held(*learn("Grüße", 4, "liebe"), *learn("don’t", 3), ["add", "McCoy"], ["block", "Bad"])
    assert document == {
        "format": 1, "words": {"grüße": 4, "don't": 3}, "pairs": {"liebe": {"grüße": 4}, "": {"don't": 3}},
        "dictionary": ["McCoy"], "blocked": ["bad"],
    }  # fmt: skip
    assert held(*learn("gone", 9), ["importJSON", json.dumps(document)]) == document


def test_capitals_are_kept_as_they_were_voted():
    """Twice is enough; each use of another form takes a vote away; a correction has none."""
    emma = [["learn", "Emma", "", "Emma"]] * 2
    assert last(*emma[:1], ["written", "emma"]) is None
    assert last(*emma, ["written", "emma"]) == "Emma"
    assert last(*emma, ["learn", "emma", "", "emma"], ["written", "emma"]) is None
    assert last(*learn("Emma", 3), ["written", "emma"]) is None
    assert last(*emma, ["add", "eMMa"], ["written", "emma"]) == "eMMa"
    document = held(*emma)
    assert document["forms"] == {"Emma": 2}
    assert held(["importJSON", json.dumps(document)]) == document
    assert "forms" not in held(*emma, ["forget", "emma"])


def test_a_file_is_added_to_what_is_here():
    """The larger count of two, both dictionaries, and one's own way of writing; twice is the same as once."""
    other = held(*learn("Kiel", 4, "in"), ["learn", "Ulm", "", "Ulm"], ["add", "Foo"], ["block", "bad"])
    mine = [*learn("kiel", 2, "in"), *learn("own", 3), ["add", "foo"]]
    merged = [*mine, ["mergeJSON", json.dumps(other)]]
    found = held(*merged)
    assert found["words"] == {"kiel": 4, "own": 3, "ulm": 1}
    assert found["pairs"] == {"in": {"kiel": 4}, "": {"own": 3, "ulm": 1}}
    assert (found["forms"], found["dictionary"], found["blocked"]) == ({"Ulm": 1}, ["foo"], ["bad"])
    assert held(*merged, ["mergeJSON", json.dumps(other)]) == found
    answered, document = after(*mine, ["mergeJSON", "{"])
    assert answered[-1]["error"].startswith("learnt words: ")
    assert document == held(*mine)


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
        {"forms": []}, {"forms": {"Two words": 2}}, {"forms": {"Kiel": 0}},
        {"words": {f"w{i}": 1 for i in range(100_001)}},
    ],
)  # fmt: skip
def test_a_damaged_import_is_refused_whole(change):
    answered, document = after(*learn("own", 3), ["importJSON", json.dumps({**GOOD, **change})])
    assert answered[-1]["error"].startswith("learnt words: ")
    assert document == held(*learn("own", 3))


def test_a_whole_import_is_taken():
    assert last(*learn("own", 3), ["importJSON", json.dumps(GOOD)], ["knows", "b"]) is True


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"format": 1}', "\x00"])
def test_what_is_no_export_is_refused(text):
    assert last(["importJSON", text])["error"].startswith("learnt words: ")


@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_is_typed_can_be_exported_and_taken_back(data):
    word = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    typed = data.draw(st.lists(st.lists(st.tuples(word, word), max_size=30), min_size=30))
    found = answers([{"op": "personal", "actions": [["learn", *pair] for pair in pairs]} for pairs in typed])
    taken = answers([{"op": "personal", "actions": [["importJSON", one["held"]]]} for one in found])
    for one, other in zip(found, taken, strict=True):
        assert other["answered"] == [None]
        words = json.loads(one["held"])["words"]
        assert json.loads(other["held"])["words"] == {fold(word): n for word, n in words.items()}
