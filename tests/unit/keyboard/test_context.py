"""Keys and tables that both languages read; the text left of the cursor, and how a chosen word is written."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import ConfigError
from keyfed.keyboard.context import (
    Constants,
    WrittenText,
    all_capitals,
    anchored,
    base_letter,
    capitalised,
    constants,
    display,
    emoji_table,
    fold,
    last_part,
    layout_of,
    layout_table,
    offensive_words,
    pick,
    previous_word,
    put,
    read_context,
    starts_sentence,
    typed_part,
)
from keyfed.text.vocab import EOS, SPECIALS, UNK, Vocab

K = constants()
VOCAB = Vocab("word", (*SPECIALS, "a", "b", "."), lower=True, tokenised=False)


@pytest.mark.parametrize(
    ("before", "typed"),
    [
        ("", ""), ("hel", "hel"), ("hello ", ""), ("say hel", "hel"), ("say (hel", "hel"), ("don'", "don'"),
        ("don’t", "don’t"),
        ("'hel", "hel"), ("-hel", "hel"), ("well-k", "well-k"), ("well-", "well-"), ("end.", ""), ("end...", ""),
        ("so...and", "and"), ("www.ex", "www.ex"), ("@ann", "@ann"), ("me@x.or", "me@x.or"), ("snake_ca", "snake_ca"),
        ("/usr/bi", "/usr/bi"), ("3.1", "3.1"), ("a\nb", "b"), ("😀", ""), ("👩\u200d", ""), ("x😀ab", "ab"),
        ("नमस्ते", "नमस्ते"),
        ("e\u0301t", "e\u0301t"), ("שלום", "שלום"), ("a\x1b[31mb", "31mb"), ("'", ""), ("--", ""), ("...", ""),
        ("hi!", ""),
    ],
)  # fmt: skip
def test_the_word_being_typed(before, typed):
    assert typed_part(before, K) == typed


@settings(max_examples=200)
@given(st.text("ab'-.@ \n😀é", max_size=30))
def test_the_typed_part_is_a_suffix_and_typing_goes_on_with_it(before):
    typed = typed_part(before, K)
    assert before.endswith(typed)
    assert not any(c.isspace() for c in typed)
    assert typed_part(typed, K) == typed
    assert typed_part(before + "a", K).endswith("a")


@settings(max_examples=200)
@given(st.text("ab. \n😀é'", max_size=40))
def test_context_and_typed_part_make_up_the_text(before):
    context = read_context(before, VOCAB, K)
    assert context.text + context.typed == before
    assert context.ids == (EOS, *VOCAB.encode_context(context.text).tolist())


def test_the_last_context_is_taken_over_only_while_its_text_stands():
    first = read_context("a b ", VOCAB, K)
    assert read_context("a b b", VOCAB, K, first) == read_context("a b b", VOCAB, K)
    assert read_context("b b b", VOCAB, K, first) == read_context("b b b", VOCAB, K)


@pytest.mark.parametrize(("n", "start"), [(0, 0), (31, 0), (63, 0), (64, 32), (95, 32), (96, 64), (1000, 960)])
def test_the_model_reads_from_the_anchor_on(n, start):
    tokens = list(range(10, 10 + n))
    assert anchored(tokens, K) == (EOS, *tokens[start:])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", ""),
        ("The Cat ", "cat"),
        ("cat\n", ""),
        ("cat, ", ""),
        ("cat. the", "the"),
        ("don’t ", "don't"),
        ("x 😀 ", ""),
    ],
)
def test_the_previous_word(text, word):
    assert previous_word(text) == word


def test_a_line_end_is_read_as_one():
    assert read_context("a\n\nx b", VOCAB, K).ids == (EOS, 4, EOS, EOS, UNK)


def test_of_a_pasted_novel_only_the_end_is_read_and_its_start_seldom_moves():
    novel = "word " * 20_000
    starts = {len(novel) + n - len(last_part(novel + "a" * n, K)) for n in range(900)}
    assert len(starts) <= 2
    assert all(K.most_text - K.text_step - 5 <= len(novel) - start <= K.most_text for start in starts)
    context = read_context(novel, VOCAB, K)
    assert len(context.ids) <= 2 * K.anchor
    short = replace(K, most_text=10, text_step=4)
    assert last_part("aaaa bbbb cccc dddd", short) == "dddd"
    assert last_part("x" * 50, short) == "x" * 10


def test_a_word_of_ten_thousand_characters_is_one_word():
    assert typed_part("x" * 10_000, K) == "x" * 10_000
    assert len(read_context("a " + "x" * 10_000, VOCAB, K).typed) > K.max_typed


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
    assert pick("I am hap", "hap", "happy") == WrittenText("I am happy ", automatic=True)
    assert pick("I am ", "", "here") == WrittenText("I am here ", automatic=True)


@pytest.mark.parametrize("mark", list(".,!?:;)…"))
def test_a_mark_takes_the_place_of_an_automatic_blank_only(mark):
    assert put(WrittenText("so ", automatic=True), mark, K) == WrittenText(f"so{mark} ", automatic=True)
    assert put(WrittenText("so "), mark, K) == WrittenText(f"so {mark}")


@pytest.mark.parametrize("c", list("a1(\"'-\n "))
def test_other_characters_leave_the_blank(c):
    assert put(WrittenText("so ", automatic=True), c, K) == WrittenText(f"so {c}")


@pytest.mark.parametrize("name", ["qwerty", "qwertz", "azerty"])
def test_every_layout_has_each_letter_once_and_no_two_keys_in_one_place(name):
    keys = layout_of(name).keys
    assert sorted(keys) == sorted("abcdefghijklmnopqrstuvwxyz")
    assert sum(len(row) for row in layout_table()[name]["rows"]) == len(set(keys.values())) == 26


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


@given(st.text(max_size=20))
def test_folding_keeps_the_length_and_is_done_once(word):
    assert len(fold(word)) == len(word)
    assert fold(fold(word)) == fold(word) or any(len(c.lower()) > 1 for c in word)


@given(st.characters())
def test_a_base_letter_is_one_character_without_accents(c):
    base = base_letter(c)
    assert len(base) == 1
    assert unicodedata.normalize("NFD", base)[0].lower()[0] == base_letter(base)


def test_an_unknown_layout_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="use one of qwerty, qwertz, azerty"):
        layout_of("dvorak")


def test_the_constants_are_all_there_and_make_sense():
    k = constants()
    assert all(isinstance(getattr(k, f.name), int | float | str | dict) for f in dataclasses.fields(Constants))
    assert 0 < k.miss_mark < k.miss_double < k.miss <= k.extra
    assert k.accent < k.sub_near < k.sub_far
    assert k.swap < k.sub_near * 2
    assert k.margin_known > k.margin_unknown > 0
    assert k.correct_max <= k.max_cost_most


def test_tables_hold_words_as_they_are_looked_up():
    assert 120 <= len(emoji_table()) <= 200
    assert all(fold(word) == word and word.isalpha() for word in emoji_table())
    assert not any(any(map(str.isalnum, picture)) for picture in emoji_table().values())
    assert all(fold(word) == word and word.isalpha() for word in offensive_words())
    assert not offensive_words() & {
        "gay",
        "queer",
        "lesbian",
        "trans",
        "jew",
        "muslim",
        "breast",
        "penis",
        "class",
        "hell",
    }
    assert not offensive_words() & set(emoji_table())
