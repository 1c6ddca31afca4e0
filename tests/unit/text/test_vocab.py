"""Vocabularies from files: what is wrong with them is one line that names the file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import ConfigError, DataError
from keyfed.text.vocab import (
    EOS,
    SPECIALS,
    UNK,
    Vocab,
    cutter,
    read_vocab,
    summarise,
    vocab_sha256,
    words_of,
)
from tests.vocabulary import build_vocab, count_tokens

DATA = Path(os.environ.get("KEYFED_DATA", Path(__file__).parents[4] / "shared" / "data"))

# Text that is hard on a tokeniser: specials, joints, numbers, marks, emoji sequences, odd white space.
HARD = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(("don't", "well-being", "1,234.5", "1.5k", "'", "-", "’", "_", "<", "<pad>", "<unk>")),
        st.sampled_from(("İ", "ΑΣ", "Ǆ", "नमस्ते", "👍🏽", "🇩🇪")),
        st.sampled_from(("e\u0301", "\u0301", "👨\u200d👩\u200d👧", "❤\ufe0f", "\u200d", "\u2028", " ", "\t")),
    ),
    max_size=12,
).map("".join)


def raw(line: str) -> list[str]:
    return words_of(line, tokenised=False, lower=False)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Hello, world!", ["Hello", ",", "world", "!"]),
        ("don't don’t rock'n'roll", ["don't", "don't", "rock'n'roll"]),
        ("'tis the dogs' day", ["'", "tis", "the", "dogs", "'", "day"]),
        ("well-being -- a-b- -c", ["well-being", "-", "-", "a-b", "-", "-", "c"]),
        ("1,234.5 in 1999. 3rd 10:30 1.5k", ["1,234.5", "in", "1999", ".", "3rd", "10:30", "1.5k"]),
        ("$5 50% a_b", ["$", "5", "50", "%", "a", "_", "b"]),
        ("Straße élève e\u0301t नमस्ते привет", ["Straße", "élève", "e\u0301t", "नमस्ते", "привет"]),
        ("ok👍🏽👨\u200d👩\u200d👧🇩🇪❤\ufe0f", ["ok", "👍🏽", "👨\u200d👩\u200d👧", "🇩🇪", "❤\ufe0f"]),
        ("a <unk>b <x>", ["a", "<unk>", "b", "<", "x", ">"]),
        ("wait...", ["wait", ".", ".", "."]),
        ("क्\u200dष می\u200cخواهم", ["क्\u200dष", "می\u200cخواهم"]),
        ("", []),
        (" \t\u00a0", []),
    ],
)
def test_raw_text_is_cut_with_care(line: str, expected: list[str]) -> None:
    assert raw(line) == expected


def test_tokenised_text_is_only_split() -> None:
    assert words_of("Mr. <unk> 's $ N", tokenised=True, lower=False) == ["Mr.", "<unk>", "'s", "$", "N"]
    assert words_of("Mr. <UNK>", tokenised=True, lower=True) == ["mr.", "<unk>"]


@given(HARD, st.booleans())
def test_cutting_loses_nothing_and_is_stable(line: str, lower: bool) -> None:
    words = words_of(line, tokenised=False, lower=lower)
    seen = "".join((line.lower() if lower else line).split())
    plain = seen.replace("’", "'").replace("‐", "-").replace("‑", "-")
    assert "".join(words).replace("’", "'").replace("‐", "-").replace("‑", "-") == plain
    assert words_of(" ".join(words), tokenised=False, lower=lower) == words


@given(st.lists(HARD, min_size=1, max_size=6), st.sampled_from(["word", "char"]), st.booleans(), st.booleans())
def test_decoding_and_encoding_again_changes_nothing(lines: list[str], kind: str, lower: bool, tokenised: bool) -> None:
    seen = ["some words", *lines]
    vocab, summary = build_vocab([seen], kind=kind, size=None, lower=lower, tokenised=tokenised)
    ids = vocab.encode(seen)
    assert ids.dtype == np.int32
    assert (ids == EOS).sum() == len(seen)
    assert vocab.encode_context(vocab.decode(ids)).tolist() == ids.tolist()
    assert summary.tokens == len(ids)
    assert summary.unknown_rate == pytest.approx((ids == UNK).mean())
    assert Vocab.from_json(vocab.to_json()) == vocab


@given(
    st.lists(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=8).map(" ".join), max_size=4), max_size=5),
    st.integers(5, 13),
    st.integers(1, 3),
)
def test_words_go_by_frequency_then_by_themselves(clients: list[list[str]], size: int, min_clients: int) -> None:
    tokens = [word for lines in clients for line in lines for word in line.split()]
    eligible = [w for w in set(tokens) if sum(w in " ".join(ls) for ls in clients) >= min_clients]

    def build() -> tuple[Vocab, object]:
        return build_vocab(clients, kind="word", size=size, lower=False, tokenised=True, min_clients=min_clients)

    if not eligible:
        with pytest.raises(DataError):
            build()
        return
    vocab, summary = build()
    expected = sorted(eligible, key=lambda w: (-tokens.count(w), w))[: size - 4]
    assert list(vocab.words[4:]) == expected
    dropped = set(tokens) - set(expected)
    assert summary.dropped_types == len(dropped)
    assert summary.dropped_tokens == sum(tokens.count(w) for w in dropped)
    assert summary.rare_clients_types == len(set(tokens) - set(eligible))
    assert summary.types == summary.kept + summary.dropped_types


@pytest.mark.parametrize("tokenised", [True, False])
def test_literal_specials_are_unknown(tokenised: bool) -> None:
    lines = ["a <pad> <bos> <eos> <unk> a"]
    vocab, summary = build_vocab([lines], kind="word", size=None, lower=True, tokenised=tokenised)
    assert vocab.words == (*SPECIALS, "a")
    assert vocab.encode(lines).tolist() == [4, UNK, UNK, UNK, UNK, 4, EOS]
    assert (summary.types, summary.kept, summary.dropped_types, summary.dropped_tokens) == (5, 1, 0, 0)
    assert not set(SPECIALS) & set(vocab.index)


def test_characters() -> None:
    vocab, _ = build_vocab([["ab a", ""]], kind="char", size=None, lower=False, tokenised=False)
    assert vocab.words == (*SPECIALS, "a", " ", "b")
    assert vocab.encode(["a<eos>", "", "b"]).tolist() == [4, UNK, UNK, UNK, UNK, UNK, EOS, EOS, 6, EOS]
    assert vocab.encode_context("ab\na").tolist() == [4, 6, EOS, 4]
    assert vocab.decode([4, 5, 6, EOS, 1, 4, UNK, 0]) == "a b\na\N{REPLACEMENT CHARACTER}"


def test_context_has_no_end_and_keeps_line_ends() -> None:
    vocab, _ = build_vocab([["how are you"]], kind="word", size=None, lower=True, tokenised=False)
    how, are = vocab.index["how"], vocab.index["are"]
    assert vocab.encode_context("").tolist() == []
    assert vocab.encode_context("How\nare ").tolist() == [how, EOS, are]


def test_size_counts_the_specials_and_unknown_words_are_unknown() -> None:
    vocab, summary = build_vocab([["a a a b b c"]], kind="word", size=6, lower=False, tokenised=True)
    assert len(vocab) == 6
    assert vocab.encode(["c d a"]).tolist() == [UNK, UNK, 4, EOS]
    assert (summary.dropped_types, summary.dropped_tokens) == (1, 1)


def test_vocab_travels_between_processes() -> None:
    vocab, _ = build_vocab([["a b"]], kind="word", size=None, lower=False, tokenised=True)
    twin = pickle.loads(pickle.dumps(vocab))
    assert twin == vocab
    assert hash(twin) == hash(vocab)
    assert twin.encode(["b a"]).tolist() == vocab.encode(["b a"]).tolist()


GOOD = {"kind": "word", "lower": True, "tokenised": True, "words": [*SPECIALS, "a"]}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"kind": "byte"}, "kind"),
        ({"lower": 1}, "lower"),
        ({"words": None}, "words"),
        ({"words": ["a", *SPECIALS]}, "first 4"),
        ({"words": [*SPECIALS, "a", "a"]}, "twice"),
        ({"words": [*SPECIALS, "<unk>"]}, "twice"),
        ({"words": [*SPECIALS, ""]}, "empty"),
        ({"words": [*SPECIALS, "a b"]}, "white space"),
        ({"words": [*SPECIALS, 7]}, "not a string"),
        ({"kind": "char", "words": [*SPECIALS, "ab"]}, "single"),
        ({"kind": "char", "words": [*SPECIALS, "\n"]}, "single"),
    ],
)
def test_damaged_json_is_refused(damage: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        Vocab.from_json(json.dumps(GOOD | damage))


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(GOOD)[:-5]])
def test_what_is_no_vocabulary_is_refused(text: str) -> None:
    assert len(Vocab.from_json(json.dumps(GOOD))) == 5
    with pytest.raises(DataError):
        Vocab.from_json(text)


@pytest.mark.parametrize(
    "options", [{"size": 4}, {"size": -1}, {"min_clients": 0}, {"kind": "wrod"}], ids=lambda o: str(*o)
)
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    defaults = {"kind": "word", "size": None, "lower": False, "tokenised": True}
    with pytest.raises(ConfigError):
        build_vocab([["a"]], **(defaults | options))


def test_no_text_and_no_shared_word() -> None:
    for clients in ([], [[]], [[""]]):
        with pytest.raises(DataError, match="empty"):
            build_vocab(clients, kind="word", size=None, lower=False, tokenised=True)
    with pytest.raises(DataError, match="min_clients"):
        build_vocab([["a"], ["b"]], kind="word", size=None, lower=False, tokenised=True, min_clients=2)


def test_unknown_numbers_cannot_be_decoded() -> None:
    with pytest.raises(DataError, match="not in this vocabulary"):
        Vocab.from_json(json.dumps(GOOD)).decode([5])


def test_penn_treebank_counts() -> None:
    folder = DATA / "ptb"
    if not folder.is_dir():
        pytest.skip(f"no Penn Treebank under {folder}")
    text = {part: (folder / f"ptb.{part}.txt").read_text().splitlines() for part in ("train", "valid", "test")}
    vocab, summary = build_vocab([text["train"]], kind="word", size=None, lower=False, tokenised=True)
    assert summary.types == 9_999
    assert len(vocab) == 4 + 9_998
    streams = {part: vocab.encode(lines) for part, lines in text.items()}
    assert [len(s) for s in streams.values()] == [929_589, 73_760, 82_430]
    literal = sum(line.split().count("<unk>") for line in text["train"])
    assert (streams["train"] == UNK).sum() == literal
    assert vocab.encode_context(vocab.decode(streams["test"])).tolist() == streams["test"].tolist()


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
