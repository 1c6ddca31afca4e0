"""Vectors of a transformer's token embedding: tokenizers made by hand, like GPT-2's and like BERT's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from keyfed.errors import ConfigError, DataError
from keyfed.text.vectors import load_vectors
from keyfed.text.vectors.transformer import byte_letters, byte_pair_encoder, gpt2_chunks, word_piece_encoder
from keyfed.text.vocab import SPECIALS

# "low" is learnt whole, "er" as an end, "est" not at all; every byte is a piece, as in GPT-2.
MERGES = [("l", "o"), ("Ġ", "lo"), ("Ġlo", "w"), ("e", "r"), ("Ġ", "c"), ("Ã", "©")]
BPE = {piece: k for k, piece in enumerate([*byte_letters(), *(a + b for a, b in MERGES), "unk", "<|endoftext|>"])}
WORD_PIECES = {
    p: k for k, p in enumerate(("[PAD]", "[UNK]", "low", "##er", "##est", "un", "##lo", "##w", "don", "'", "t", "cafe"))
}
RNG = np.random.default_rng(1)
GPT2_ROWS = RNG.normal(size=(len(BPE), 4)).astype(np.float32)
BERT_ROWS = RNG.normal(size=(len(WORD_PIECES), 4)).astype(np.float32)


def gpt2(folder: Path, *, name: str = "wte.weight", tokenizer: str = "files") -> Path:
    folder.mkdir()
    save_file({name: GPT2_ROWS, "h.0.ln_1.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    if tokenizer == "files":
        (folder / "vocab.json").write_text(json.dumps(BPE))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    else:
        merges = [f"{a} {b}" for a, b in MERGES] if tokenizer == "strings" else MERGES
        model = {"type": "BPE", "vocab": BPE, "merges": merges}
        content = {"model": model, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def bert(folder: Path, *, lower: bool = True, tokenizer: str = "vocab.txt") -> Path:
    folder.mkdir()
    save_file({"embeddings.word_embeddings.weight": BERT_ROWS}, folder / "model.safetensors")
    if tokenizer == "vocab.txt":
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in WORD_PIECES))
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    else:
        model = {"type": "WordPiece", "vocab": WORD_PIECES, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
        normaliser = {"type": "BertNormalizer", "lowercase": lower, "strip_accents": None}
        pre = {"type": "BertPreTokenizer"}
        content = {"model": model, "normalizer": normaliser, "pre_tokenizer": pre}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def mean_of(rows: np.ndarray, vocab: dict[str, int], *pieces: str) -> np.ndarray:
    return rows[[vocab[piece] for piece in pieces]].mean(axis=0)


@pytest.mark.parametrize("tokenizer", ["files", "strings", "pairs"])
@pytest.mark.parametrize("name", ["wte.weight", "transformer.wte.weight"])
def test_gpt2_like(tmp_path, name, tokenizer):
    folder = gpt2(tmp_path / "gpt2", name=name, tokenizer=tokenizer)
    words = (*SPECIALS, "low", "lower", "lowest", "café", "low's")
    got = load_vectors(folder, words, dim=3)
    pieces = [["Ġlow"], ["Ġlow", "er"], ["Ġlow", "e", "s", "t"], ["Ġc", "a", "f", "Ã©"], ["Ġlow", "'", "s"]]
    np.testing.assert_allclose(got.matrix[4:], [mean_of(GPT2_ROWS, BPE, *p) for p in pieces], atol=1e-6)
    assert got.matched.tolist() == [False] * 4 + [True] * 5  # the piece "unk" is no <unk>
    assert got.source == ("gpt2", f"{name}, byte-level BPE, mean of pieces")
    assert (got.report.lines, got.dim) == (len(BPE), 4)
    first = load_vectors(folder / "model.safetensors", words, pieces="first")
    np.testing.assert_array_equal(first.matrix[4:], [GPT2_ROWS[BPE[p[0]]] for p in pieces])


@pytest.mark.parametrize("tokenizer", ["vocab.txt", "tokenizer.json"])
def test_bert_like(tmp_path, tokenizer):
    words = (*SPECIALS, "Low", "lowest", "unlow", "don't", "Café", "zebra", "lowz")
    got = load_vectors(bert(tmp_path / "bert", tokenizer=tokenizer), words)
    pieces = [["low"], ["low", "##est"], ["un", "##lo", "##w"], ["don", "'", "t"], ["cafe"]]
    np.testing.assert_allclose(got.matrix[4:9], [mean_of(BERT_ROWS, WORD_PIECES, *p) for p in pieces], atol=1e-6)
    assert got.matched.tolist() == [True, False, False, True, *[True] * 5, False, False]
    np.testing.assert_array_equal(got.matrix[[0, 3]], BERT_ROWS[[0, 1]])
    assert got.report.specials == 2


@pytest.mark.parametrize("tokenizer", ["vocab.txt", "tokenizer.json"])
def test_bert_that_does_not_lower_keeps_case_and_accents(tmp_path, tokenizer):
    got = load_vectors(bert(tmp_path / "cased", lower=False, tokenizer=tokenizer), ("low", "Low", "café"))
    assert got.matched.tolist() == [True, True, False]
    assert (got.report.exact, got.report.lowered) == (1, 1)  # Low by its lower case, as in any file


def test_a_shard_holds_the_embedding(tmp_path):
    folder = gpt2(tmp_path / "gpt2")
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    save_file({"h.1.weight": np.ones(3, np.float32)}, folder / "model-00001-of-00002.safetensors")
    assert load_vectors(folder, ("low",)).matched.all()


def test_pieces_that_are_not_finite_are_counted(tmp_path):
    folder = gpt2(tmp_path / "gpt2")
    rows = GPT2_ROWS.copy()
    rows[BPE["er"]] = np.nan
    rows[BPE["s"]], rows[BPE["t"]] = np.inf, -np.inf
    save_file({"wte.weight": rows}, folder / "model.safetensors")
    got = load_vectors(folder, ("low", "lower", "lowst"))
    assert got.matched.tolist() == [True, False, False]
    assert got.report.not_finite == 2
    assert got.report.examples == {"not_finite": "pieces of 'lower'"}


def test_bad_folders_are_one_line(tmp_path):
    with pytest.raises(DataError, match="no token embedding in nothing"):
        load_vectors(tmp_path, ("low",))
    save_file({"h.weight": GPT2_ROWS}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"no token embedding in model.safetensors; expected wte.weight or"):
        load_vectors(tmp_path, ("low",))
    save_file({"wte.weight": GPT2_ROWS}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"no tokenizer beside the model; expected tokenizer.json"):
        load_vectors(tmp_path, ("low",))
    with pytest.raises(ConfigError, match="4 numbers a word, 5 were asked for"):
        load_vectors(tmp_path, ("low",), dim=5)
    for content, message in (
        ("{", "damaged tokenizer files"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "tokenizer.json is Unigram"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": ["a b c"]}, "pre_tokenizer": {"type": "ByteLevel"}}', "two"),
        ('{"model": {"type": "WordPiece", "vocab": {"low": 9999}}}', "piece 9,999, the embedding has 264 rows"),
        ('{"model": {"type": "WordPiece", "vocab": {"high": 1}}}', "none of our 1 words"),
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=message):
            load_vectors(tmp_path, ("low",))
    save_file({"wte.weight": GPT2_ROWS[0]}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"wte.weight is F32 \[4\]"):
        load_vectors(tmp_path, ("low",))


@pytest.mark.parametrize(
    ("merges", "expected"),
    [
        ([("b", "c"), ("a", "b")], ["Ġ", "a", "bc"]),
        ([("a", "b"), ("b", "c")], ["Ġ", "ab", "c"]),
        ([("b", "c"), ("a", "b"), ("a", "bc"), ("Ġ", "abc")], ["Ġabc"]),
    ],
)
def test_the_pair_learnt_first_is_merged_first(merges, expected):
    vocab = {piece: k for k, piece in enumerate(("Ġ", "a", "b", "c", "ab", "bc", "abc", "Ġabc"))}
    assert byte_pair_encoder(vocab, merges)("abc") == tuple(vocab[piece] for piece in expected)


@given(st.text(max_size=12))
def test_byte_pairs_spell_every_word(word):
    encode = byte_pair_encoder(BPE, MERGES)
    pieces = {k: piece for piece, k in BPE.items()}
    back = {letter: byte for byte, letter in enumerate(byte_letters())}
    spelled = bytes(back[letter] for k in encode(word) for letter in pieces[k])
    assert spelled.decode() == f" {word}"
    assert "".join(gpt2_chunks(word)) == word


@given(st.text("lowerstun", min_size=1, max_size=12))
def test_word_pieces_spell_the_word_or_nothing(word):
    numbers = word_piece_encoder(WORD_PIECES, lower=True, strip_accents=True)(word)
    pieces = {k: piece for piece, k in WORD_PIECES.items()}
    assert not numbers or "".join(pieces[k].removeprefix("##") for k in numbers) == word
