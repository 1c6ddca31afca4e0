"""How words are written and where blanks go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.keyboard.context import (
    Written,
    all_capitals,
    capitalised,
    display,
    pick,
    put,
    starts_sentence,
)
from keyfed.keyboard.layout import constants

K = constants()
FORMS = {"london": "London", "iphone": "iPhone", "nasa": "NASA"}


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("", True), ("   ", True), ("Hello\n", True), ("Hello \n  ", True), ("Hello. ", True), ("Hello! ", True),
        ("Hello? ", True), ("Hello… ", True), ('"Hello." ', True), ("(Hello.) ", True), ("he said “hello.”  ", True),
        ("Hello ", False), ("Hello", False), ("Hello.", False), ("Hello, ", False), ("3.14 is ", False), ("a: ", False),
    ],
)  # fmt: skip
def test_where_sentences_start(text, starts):
    assert starts_sentence(text, K) == starts


@pytest.mark.parametrize(
    ("word", "typed", "sentence", "shown"),
    [
        ("the", "", False, "the"), ("the", "", True, "The"), ("the", "t", True, "the"), ("the", "T", False, "The"),
        ("the", "TH", False, "THE"), ("the", "Th", False, "The"), ("london", "lo", False, "London"),
        ("london", "", True, "London"), ("london", "LON", False, "LONDON"), ("nasa", "n", False, "NASA"),
        ("iphone", "ip", False, "iPhone"), ("i", "i", False, "I"), ("i'm", "im", False, "I'm"),
        ("école", "E", False, "École"),
        ("ß", "S", False, "ß"), ("straße", "ST", False, "STRASSE"), ("don't", "DON'T", False, "DON'T"),
        ("שלום", "ש", True, "שלום"),
        ("1st", "", True, "1st"),
    ],
)  # fmt: skip
def test_words_are_shown_with_their_form_and_the_typed_capitals(word, typed, sentence, shown):
    assert display(word, typed, sentence, FORMS, K) == shown


def test_all_capitals_need_two_letters():
    assert [all_capitals(w) for w in ("I", "OK", "O'K", "Ok", "A1", "", "漢字", "R2D2")] == [
        False, True, True, False, False, False, False, True,
    ]  # fmt: skip


@given(st.text(max_size=10))
def test_a_capital_changes_the_first_letter_only(word):
    shown = capitalised(word)
    assert shown[1:] == word[1:]
    assert len(shown) == len(word)


def test_a_picked_word_replaces_the_typed_part_and_a_blank_follows():
    assert pick("I am hap", "hap", "happy") == Written("I am happy ", automatic=True)
    assert pick("I am ", "", "here") == Written("I am here ", automatic=True)


@pytest.mark.parametrize("mark", list(".,!?:;)…"))
def test_a_mark_takes_the_place_of_an_automatic_blank_only(mark):
    assert put(Written("so ", automatic=True), mark, K) == Written(f"so{mark} ", automatic=True)
    assert put(Written("so "), mark, K) == Written(f"so {mark}")


@pytest.mark.parametrize("c", list("a1(\"'-\n "))
def test_other_characters_leave_the_blank(c):
    assert put(Written("so ", automatic=True), c, K) == Written(f"so {c}")
