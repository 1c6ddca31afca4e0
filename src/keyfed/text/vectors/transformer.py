"""Word vectors from a transformer's token embedding: a word's vector is the mean of its pieces', or the first.

folder/
  model.safetensors                    wte.weight (GPT-2) or …word_embeddings.weight (BERT)
  tokenizer.json                       or
  vocab.json, merges.txt               GPT-2, or
  vocab.txt (tokenizer_config.json)    BERT
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from keyfed.errors import DataError
from keyfed.text.vectors.arrays import Tensor, tensors_of
from keyfed.text.vectors.rows import Gathering, Matrix, Progress, listed, shown
from keyfed.text.vectors.subword import Encode, byte_pair_encoder, word_piece_encoder

Pieces = Literal["mean", "first"]
EMBEDDINGS = ("wte.weight", "word_embeddings.weight")
_FILES = "tokenizer.json, or vocab.json and merges.txt (GPT-2), or vocab.txt (BERT)"


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
    tensor: Tensor


def embedding_in(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the token embedding, wherever in the model it hangs.

    Example:
      >>> table = Tensor("F32", (5, 2), 0)
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
    # Unless told otherwise BERT removes accents where it lowers.
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
    found: TokenEmbedding, tokenizer: Tokenizer, gathering: Gathering, pieces: Pieces, progress: Progress | None
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
    with found.file.open("rb") as file, np.errstate(over="ignore"):
        for k, number in enumerate(used):
            rows[k] = found.tensor.read(file, number, 1)[0]
            if progress is not None and (k % 4096 == 0 or k + 1 == len(used)):
                progress(size * (k + 1) // len(used), size)
    return rows
