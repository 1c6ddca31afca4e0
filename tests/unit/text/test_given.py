"""Vocabularies from files: what is wrong with them is one line that names the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest

from keyfed.errors import DataError
from keyfed.text.vocab import SPECIALS, Vocab, build_vocab, count_tokens, cutter, read_vocab, summarise, vocab_sha256

LINES = ["the cat <unk> sat", "the dog", "", "cat cat"]


def word_vocab(*words: str) -> Vocab:
    return Vocab("word", (*SPECIALS, *words), lower=True, tokenised=True)


def counted(lines: list[str]) -> tuple[Mapping[str, int], int]:
    counts, _, line_ends = count_tokens([lines], cutter("word", tokenised=True, lower=True))
    return counts, line_ends


def test_a_vocabulary_is_read_back(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(word_vocab("the", "é").to_json())
    assert read_vocab(path, "word") == word_vocab("the", "é")
    assert vocab_sha256(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert vocab_sha256(None) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (word_vocab("a").to_json().encode()[:-5], "cut short"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "JSON object"),
        (b'{"kind": "word"}', "'lower'"),
        (word_vocab("a").to_json().replace('"a"', '"a", "a"').encode(), "twice"),
        (word_vocab().to_json().encode(), "without words"),
        (Vocab("char", (*SPECIALS, "a"), lower=False, tokenised=False).to_json().encode(), "model reads words"),
    ],
)
def test_a_damaged_or_unfit_file_is_one_line_that_names_it(tmp_path, content, said):
    path = tmp_path / "vocab.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        read_vocab(path, "word")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_one_line(tmp_path):
    with pytest.raises(DataError, match="no such vocabulary"):
        read_vocab(tmp_path / "none.json", "word")
    with pytest.raises(DataError, match=r"expected a vocab\.json"):
        read_vocab(tmp_path, "word")


def test_characters_in_lower_case_are_refused(tmp_path):
    (tmp_path / "v.json").write_text(Vocab("char", (*SPECIALS, "a"), lower=True, tokenised=False).to_json())
    with pytest.raises(DataError, match="keeps its case"):
        read_vocab(tmp_path / "v.json", "char")


def test_the_summary_of_a_built_vocabulary_is_the_builders():
    vocab, built = build_vocab([LINES], kind="word", size=6, lower=True, tokenised=True)
    assert summarise(vocab, *counted(LINES)) == built


def test_words_the_text_does_not_have_are_not_kept():
    vocab = word_vocab("the", "unheard", "of")
    found = summarise(vocab, *counted(LINES))
    assert (found.types, found.kept, found.dropped_types, found.dropped_tokens) == (5, 1, 3, 5)
    assert found.unknown_rate == 6 / 12
