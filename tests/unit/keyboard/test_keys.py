"""Keys and folded words as a measurement has them; that the decoder has the same is in tests/web."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import ConfigError
from keyfed.keyboard.keys import base_letter, fold, layout_of, table


@pytest.mark.parametrize("name", ["qwerty", "qwertz", "azerty"])
def test_every_layout_has_each_letter_once_and_no_two_keys_in_one_place(name):
    keys = layout_of(name).keys
    assert sorted(keys) == sorted("abcdefghijklmnopqrstuvwxyz")
    assert sum(len(row) for row in table("layouts")[name]["rows"]) == len(set(keys.values())) == 26


def test_key_centres_and_distances_are_those_of_the_contract():
    layout = layout_of("qwerty")
    assert layout.centre("q") == (0.5, 0.5)
    assert layout.centre("a") == (0.75, 1.5)
    assert layout.centre("z") == (1.25, 2.5)
    assert layout.distance("q", "p") == 9.0
    assert layout.distance("q", "a") == math.hypot(0.25, 1.0)
    assert layout.distance("z", "x") == layout.distance("x", "z") == 1.0
    assert layout_of("qwertz").distance("z", "t") == 1.0


def test_an_accented_letter_lies_on_its_base_letters_key_and_marks_on_none():
    layout = layout_of("azerty")
    assert layout.centre("é") == layout.centre("e") == layout.centre("É")
    assert [layout.centre(c) for c in "'-7ß漢"] == [None] * 5
    assert layout.distance("a", "'") is None


def test_an_unknown_layout_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="use one of qwerty, qwertz, azerty"):
        layout_of("dvorak")


@given(st.text(max_size=20))
def test_folding_keeps_the_length_and_is_done_once(word):
    assert len(fold(word)) == len(word)
    assert fold(fold(word)) == fold(word) or any(len(c.lower()) > 1 for c in word)


@given(st.characters())
def test_a_base_letter_is_one_character_without_accents(c):
    base = base_letter(c)
    assert len(base) == 1
    assert unicodedata.normalize("NFD", base)[0].lower()[0] == base_letter(base)


def test_the_constants_make_sense():
    k = table("constants")
    weighed, of = k["cache_prior"]
    assert 0 < weighed < of
    assert all(isinstance(value, int | float | str | dict) for name, value in k.items() if name != "cache_prior")
    assert 0 < k["miss_mark"] < k["miss_double"] < k["miss"] <= k["extra"]
    assert k["accent"] < k["sub_near"] < k["sub_far"]
    assert k["swap"] < k["sub_near"] * 2
    assert k["margin_known"] > k["margin_unknown"] >= 0
    assert k["correct_max"] <= k["max_cost_most"]


def test_tables_hold_words_as_they_are_looked_up():
    emoji, offensive = table("emoji")["words"], set(table("offensive")["words"])
    assert 120 <= len(emoji) <= 200
    assert all(fold(word) == word and word.isalpha() for word in emoji)
    assert not any(any(map(str.isalnum, picture)) for picture in emoji.values())
    assert all(fold(word) == word and word.isalpha() for word in offensive)
    harmless = {"gay", "queer", "lesbian", "trans", "jew", "muslim", "breast", "penis", "class", "hell"}
    assert not offensive & harmless
    assert not offensive & set(emoji)
