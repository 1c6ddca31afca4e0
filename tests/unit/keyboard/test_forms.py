"""How words are written: counted inside sentences, and never by one person alone."""

from __future__ import annotations

import pytest

from keyfed.keyboard.export import written_forms
from keyfed.text.vocab import SPECIALS, Vocab


def vocab(*words: str, **options) -> Vocab:
    return Vocab("word", (*SPECIALS, *words), **{"lower": True, "tokenised": False} | options)


def test_the_most_frequent_form_that_two_clients_write():
    clients = [["in Paris and PARIS", "in Paris"], ["to Paris, nasa"], ["from NASA"], ["about NASA"]]
    assert written_forms(clients, vocab("paris", "nasa", "in")) == {"paris": "Paris", "nasa": "NASA"}


def test_what_one_person_alone_writes_is_not_shipped_however_often():
    clients = [["my LoVe is my LoVe", "oh LoVe oh LoVe"], ["the love"]]
    assert written_forms(clients, vocab("love")) == {}
    assert written_forms([*clients, ["this LoVe"]], vocab("love")) == {"love": "LoVe"}


@pytest.mark.parametrize("line", ["However it is", "it is. However it is", 'so? "However it is', "(However it is"])
def test_the_start_of_a_sentence_says_nothing(line):
    assert written_forms([[line], [line]], vocab("however", "it", "is", "so")) == {}


def test_at_equal_counts_the_word_itself():
    assert written_forms([["a Bank", "a bank"], ["a Bank", "a bank"]], vocab("bank", "a")) == {}


def test_only_words_of_a_lower_cased_word_vocabulary():
    lines = [["in Paris"], ["in Paris"]]
    assert written_forms(lines, vocab("london")) == {}
    assert written_forms(lines, vocab("paris", lower=False)) == {}
    assert written_forms(lines, Vocab("char", (*SPECIALS, "p"), lower=True, tokenised=False)) == {}
    assert written_forms([["in Paris ."], ["in Paris ."]], vocab("paris", tokenised=True)) == {"paris": "Paris"}
