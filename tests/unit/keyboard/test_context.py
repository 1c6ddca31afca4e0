"""Text left of the cursor: the typed part, the words before, the anchor.

How words are written and where blanks go.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard.context import (
    WrittenText,
    all_capitals,
    anchored,
    capitalised,
    constants,
    display,
    last_part,
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
