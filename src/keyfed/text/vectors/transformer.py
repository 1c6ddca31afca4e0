"""Word vectors from a transformer's token embedding: a word's vector is the mean of its pieces', or the first.

folder/
  model.safetensors                    wte.weight (GPT-2) or …word_embeddings.weight (BERT)
  tokenizer.json                       or
  vocab.json, merges.txt               GPT-2, or
  vocab.txt (tokenizer_config.json)    BERT

A word is cut into pieces by byte-level BPE (GPT-2) or WordPiece (BERT), as it stands inside a sentence: GPT-2's with
the blank before it.

    GPT-2    " unhappily" → "Ġunh", "app", "ily"      bytes written as letters, the most frequent pairs merged first
    BERT     "unhappily" → "un", "##hap", "##pily"    the longest piece that fits, from left to right
"""

from __future__ import annotations

import json
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from keyfed.errors import DataError
from keyfed.text.vectors.files import Matrix, Progress, VectorRows, listed, shown

Encode = Callable[[str], tuple[int, ...]]  # the numbers of a word's pieces; none where it cannot be written in them

Pieces = Literal["mean", "first"]
EMBEDDINGS = ("wte.weight", "word_embeddings.weight")
_FILES = "tokenizer.json, or vocab.json and merges.txt (GPT-2), or vocab.txt (BERT)"
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_LONGEST_WORD = 100  # characters; BERT's own limit


def byte_pair_encoder(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Encode:
    """Return GPT-2's encoder.

    Args:
      vocab: The number of each piece, bytes written as `byte_letters` writes them.
      merges: Pairs in the order in which they were learnt: the earlier is merged first.

    Example:
      >>> letters = {"Ġ": 0, "a": 1, "b": 2, "Ġa": 3, "ab": 4, "Ġab": 5}
      >>> encode = byte_pair_encoder(letters, [("a", "b"), ("Ġ", "ab")])
      >>> encode("ab"), encode("aab"), encode("ac")
      ((5,), (0, 1, 4), ())
    """
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    letters = byte_letters()

    def encode(word: str) -> tuple[int, ...]:
        numbers: list[int] = []
        for chunk in gpt2_chunks(f" {word}"):
            spelled = [letters[byte] for byte in chunk.encode("utf-8", "surrogatepass")]
            for piece in _merge(spelled, ranks):
                if piece not in vocab:
                    return ()
                numbers.append(vocab[piece])
        return tuple(numbers)

    return encode


def _merge(pieces: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge the pair that was learnt first, wherever it stands, until no pair is known."""
    while len(pieces) > 1:
        pairs = set(pairwise(pieces))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        merged: list[str] = []
        at = 0
        while at < len(pieces):
            if tuple(pieces[at : at + 2]) == best:
                merged.append(best[0] + best[1])
                at += 2
            else:
                merged.append(pieces[at])
                at += 1
        pieces = merged
    return pieces


@cache
def byte_letters() -> tuple[str, ...]:
    """Return the letter for each byte: itself where it can be printed, otherwise one from U+0100 on.

    Example:
      >>> byte_letters()[ord("a")], byte_letters()[ord(" ")], byte_letters()[0]
      ('a', 'Ġ', 'Ā')
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def gpt2_chunks(text: str) -> list[str]:
    """Cut a text as GPT-2 does before any merging: contractions, letters, numbers, marks, each with its blank.

    Example:
      >>> gpt2_chunks(" don't"), gpt2_chunks(" 1,234.5k"), gpt2_chunks(" 's")
      ([' don', "'t"], [' 1', ',', '234', '.', '5', 'k'], [" '", 's'])
    """
    chunks: list[str] = []
    at = 0
    while at < len(text):
        short = next((c for c in _CONTRACTIONS if text.startswith(c, at)), None)
        if short is not None:
            end = at + len(short)
        else:
            first = at + 1 if text[at] == " " and at + 1 < len(text) and not text[at + 1].isspace() else at
            end = first + 1
            while end < len(text) and _kind(text[end]) == _kind(text[first]):
                end += 1
        chunks.append(text[at:end])
        at = end
    return chunks


def _kind(letter: str) -> str:
    if letter.isspace():
        return "blank"
    category = unicodedata.category(letter)[0]
    return category if category in "LN" else "mark"


def word_piece_encoder(
    vocab: Mapping[str, int], *, lower: bool, strip_accents: bool, prefix: str = "##", unknown: str = "[UNK]"
) -> Encode:
    """Return BERT's encoder.

    A word is cut at punctuation marks first ("don't": don, ', t), then each part into the longest pieces.

    Args:
      lower: Whether the tokenizer writes everything in lower case.
      strip_accents: Whether it removes accents.
      prefix: What stands before a piece that goes on a word.
      unknown: The piece for what cannot be written in pieces; a word that holds such a part has no pieces.

    Example:
      >>> vocab = {"[UNK]": 0, "un": 1, "##hap": 2, "##py": 3, "'": 4}
      >>> encode = word_piece_encoder(vocab, lower=True, strip_accents=True)
      >>> encode("Unhappy"), encode("un'un"), encode("unsad")
      ((1, 2, 3), (1, 4, 1), ())
    """

    def encode(word: str) -> tuple[int, ...]:
        numbers: list[int] = []
        for part in bert_parts(word, lower=lower, strip_accents=strip_accents):
            found = _longest_pieces(part, vocab, prefix)
            if not found or vocab.get(unknown) in found:
                return ()
            numbers += found
        return tuple(numbers)

    return encode


def _longest_pieces(part: str, vocab: Mapping[str, int], prefix: str) -> list[int]:
    if len(part) > _LONGEST_WORD:
        return []
    numbers: list[int] = []
    at = 0
    while at < len(part):
        start = prefix if at else ""
        end = next((e for e in range(len(part), at, -1) if start + part[at:e] in vocab), None)
        if end is None:
            return []
        numbers.append(vocab[start + part[at:end]])
        at = end
    return numbers


def bert_parts(word: str, *, lower: bool, strip_accents: bool) -> list[str]:
    """Normalise a word as BERT does, and cut it at blanks, punctuation marks and Chinese characters.

    Example:
      >>> bert_parts("Élève's", lower=True, strip_accents=True)
      ['eleve', "'", 's']
      >>> bert_parts("well-Being", lower=False, strip_accents=False)
      ['well', '-', 'Being']
    """
    if lower:
        word = word.lower()
    if strip_accents:
        word = "".join(c for c in unicodedata.normalize("NFD", word) if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if _stands_alone(c) else c for c in word)
    return spaced.split()


def _stands_alone(letter: str) -> bool:
    code = ord(letter)
    ascii_mark = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    chinese = 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x2CEAF
    compatible = 0xF900 <= code <= 0xFAFF or 0x2F800 <= code <= 0x2FA1F
    return ascii_mark or chinese or compatible or unicodedata.category(letter).startswith("P")


# Safetensors


class TensorHead(NamedTuple):
    """What a safetensors file says of a tensor: its type (F32, BF16, U8, …) and shape."""

    type: str
    shape: tuple[int, ...]


@contextmanager
def safetensors_in(path: Path) -> Iterator[Any]:
    """Open a safetensors file; its header is checked, its tensors are read when they are asked for."""
    try:
        with readable(path), safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(f"{path}: damaged safetensors header, or cut off ({error}); fetch it again") from error


def tensors_of(path: Path) -> dict[str, TensorHead]:
    """Read the header of a safetensors file.

    Raises:
      DataError: The header is damaged, or a tensor would lie outside the file.
    """
    with safetensors_in(path) as file:
        heads = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: TensorHead(head.get_dtype(), tuple(head.get_shape())) for name, head in heads.items()}


def rows_of(tensor: Any, first: int, count: int) -> Matrix:
    """Return rows `first`, …, `first + count - 1` of a tensor in an open file, in float32."""
    rows: Matrix = tensor[first : first + count].float().numpy()
    return rows


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what reading can raise into one line."""
    try:
        yield
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{path}: damaged ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


# The embedding and its tokenizer


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer's pieces, and how a word is cut into them."""

    kind: Literal["byte-level BPE", "WordPiece"]
    vocab: Mapping[str, int]
    encode: Encode


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """A token embedding [pieces, dim] in a safetensors file."""

    file: Path
    name: str
    tensor: TensorHead


def embedding_in(tensors: Mapping[str, TensorHead]) -> str | None:
    """Return the name of the token embedding, wherever in the model it hangs.

    Example:
      >>> table = TensorHead("F32", (5, 2))
      >>> embedding_in({"h.0.weight": table, "transformer.wte.weight": table})
      'transformer.wte.weight'
    """
    return next((n for n in sorted(tensors) for e in EMBEDDINGS if n == e or n.endswith(f".{e}")), None)


def find_embedding(folder: Path) -> TokenEmbedding:
    """Find the token embedding among a folder's safetensors files.

    Raises:
      DataError: There is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        tensors = tensors_of(file)
        name = embedding_in(tensors)
        if name is not None:
            return TokenEmbedding(file, name, tensors[name])
    raise DataError(
        f"{folder}: no token embedding in {listed(file.name for file in files)}; "
        f"expected {' or '.join(EMBEDDINGS)} in a .safetensors file"
    )


def check_embedding(found: TokenEmbedding) -> int:
    """Return the embedding's dimension, or raise DataError where it is none."""
    if len(found.tensor.shape) != 2 or found.tensor.type not in ("F64", "F32", "F16", "BF16"):
        raise DataError(
            f"{found.file}: {found.name} is {found.tensor.type} {list(found.tensor.shape)}; "
            "expected floating-point numbers [pieces, dim]"
        )
    return found.tensor.shape[1]


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer's files.

    Raises:
      DataError: They are missing, damaged, or of another kind of tokenizer.
    """
    try:
        if (folder / "tokenizer.json").is_file():
            return _from_tokenizer_json(_read_json(folder / "tokenizer.json"))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            vocab = _read_json(folder / "vocab.json")
            lines = (folder / "merges.txt").read_text("utf-8").split("\n")
            return _byte_pairs(vocab, [line for line in lines if line.strip() and not line.startswith("#version")])
        if (folder / "vocab.txt").is_file():
            pieces = (folder / "vocab.txt").read_text("utf-8").removesuffix("\n").split("\n")
            return _word_pieces({piece.rstrip("\r"): k for k, piece in enumerate(pieces)}, _bert_settings(folder))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{folder}: damaged tokenizer files ({error}); fetch them again") from error
    except OSError as error:
        raise DataError(f"{folder}: tokenizer cannot be read ({error.strerror or error})") from error
    raise DataError(f"{folder}: no tokenizer beside the model; expected {_FILES}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested without end") from None


def _bert_settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config = _read_json(file) if file.is_file() else {}
    # BERT's own defaults where the file says nothing.
    return {"lowercase": config.get("do_lower_case", True), "strip_accents": config.get("strip_accents")}


def _numbered(vocab: Mapping[str, int]) -> Mapping[str, int]:
    if not all(type(number) is int for number in vocab.values()):
        raise ValueError("a piece whose number is none")
    return vocab


def _byte_pairs(vocab: Mapping[str, int], merges: list[Any]) -> Tokenizer:
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"merge {next(p for p in pairs if len(p) != 2)} is not of two pieces")
    vocab = _numbered(vocab)
    return Tokenizer("byte-level BPE", vocab, byte_pair_encoder(vocab, [(a, b) for a, b in pairs]))


def _word_pieces(vocab: Mapping[str, int], settings: Mapping[str, Any], **marks: str) -> Tokenizer:
    vocab, lower, accents = _numbered(vocab), bool(settings.get("lowercase")), settings.get("strip_accents")
    # By default BERT removes accents where it lowers.
    encode = word_piece_encoder(vocab, lower=lower, strip_accents=lower if accents is None else bool(accents), **marks)
    return Tokenizer("WordPiece", vocab, encode)


def _from_tokenizer_json(content: dict[str, Any]) -> Tokenizer:
    model = content["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "WordPiece")
    if kind == "BPE" and "ByteLevel" in _types(content.get("pre_tokenizer")):
        return _byte_pairs(model["vocab"], model["merges"])
    if kind == "WordPiece":
        marks = {"prefix": model.get("continuing_subword_prefix", "##"), "unknown": model.get("unk_token", "[UNK]")}
        return _word_pieces(model["vocab"], _normaliser(content.get("normalizer")), **marks)
    raise ValueError(f"tokenizer.json is {kind} after {_types(content.get('pre_tokenizer'))}; expected {_FILES}")


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a step of tokenizer.json, or the steps that it is made of."""
    if not step:
        return []
    return list(step.get("normalizers") or step.get("pretokenizers") or [step])


def _types(step: dict[str, Any] | None) -> list[str]:
    return [str(part.get("type")) for part in _parts(step)]


def _normaliser(step: dict[str, Any] | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"lowercase": False, "strip_accents": None}
    for part in _parts(step):
        if part.get("type") == "BertNormalizer":
            settings = {"lowercase": part.get("lowercase", True), "strip_accents": part.get("strip_accents")}
        elif part.get("type") == "Lowercase":
            settings["lowercase"] = True
        elif part.get("type") == "StripAccents":
            settings["strip_accents"] = True
    return settings


def read_token_embedding(
    found: TokenEmbedding, tokenizer: Tokenizer, gathering: VectorRows, pieces: Pieces, progress: Progress | None
) -> None:
    """Give every name looked for the vector of its pieces.

    A special is looked for among the pieces as a whole: cut into pieces, `<unk>` would be read as its letters.
    Its name must show that it is one: a piece "unk" belongs to "chunk".
    """
    gathering.begin(found.tensor.shape[1])
    gathering.lines = found.tensor.shape[0]
    numbers: dict[bytes, tuple[int, ...]] = {}
    for name in gathering.slots:
        text = name.decode("utf-8", "surrogatepass")
        if text in gathering.whole:
            numbers[name] = (tokenizer.vocab[text],) if text in tokenizer.vocab and not text.isalpha() else ()
        else:
            numbers[name] = tokenizer.encode(text)
    if pieces == "first":
        numbers = {name: ids[:1] for name, ids in numbers.items()}
    used = sorted({number for ids in numbers.values() for number in ids})
    if used and not 0 <= used[0] <= used[-1] < found.tensor.shape[0]:
        raise DataError(
            f"{found.file}: the tokenizer names piece {used[-1]:,}, the embedding has {found.tensor.shape[0]:,} rows; "
            "expected model and tokenizer of one folder to belong together"
        )
    rows = _rows(found, used, progress)
    place = {number: k for k, number in enumerate(used)}
    for name, ids in numbers.items():
        if ids:
            with np.errstate(invalid="ignore"):  # ∞ − ∞; noted when the row is kept
                vector = rows[[place[number] for number in ids]].mean(axis=0, dtype=np.float64)
            gathering.keep(gathering.slots[name], vector, f"pieces of {shown(name)}")


def _rows(found: TokenEmbedding, used: list[int], progress: Progress | None) -> Matrix:
    """Read the rows of the pieces used, and no others."""
    rows = np.empty((len(used), found.tensor.shape[1]), np.float32)
    size = rows.nbytes
    with safetensors_in(found.file) as file:
        table = file.get_slice(found.name)
        for k, number in enumerate(used):
            rows[k] = rows_of(table, number, 1)[0]
            if progress is not None and (k % 4096 == 0 or k + 1 == len(used)):
                progress(size * (k + 1) // len(used), size)
    return rows
