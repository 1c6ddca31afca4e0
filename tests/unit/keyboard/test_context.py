"""Text left of the cursor: the typed part, the words before, the anchor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.keyboard.context import anchored, last_part, previous_word, read_context, typed_part
from keyfed.keyboard.layout import constants
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
