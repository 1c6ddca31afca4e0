"""A vocabulary that comes from a file (`data.vocab_file`) instead of from the training text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Literal

from keyfed.errors import DataError
from keyfed.text.vocab import SPECIALS, Vocab, VocabSummary, cutter

READS = {"word": "words", "char": "characters"}


def read_vocab(path: Path, kind: Literal["word", "char"]) -> Vocab:
    """Read a vocab.json for a model that reads words or characters.

    Raises:
      DataError: The file is missing, damaged, empty or of the other kind.
    """
    data = _bytes_of(path)
    try:
        vocab = Vocab.from_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); expected a vocab.json") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if vocab.kind != kind:
        raise DataError(
            f"{path}: a vocabulary of {READS[vocab.kind]}, and the model reads {READS[kind]}; take a model or a "
            "vocabulary of the other kind"
        )
    if len(vocab) == len(SPECIALS):
        raise DataError(f"{path}: a vocabulary without words, only the {len(SPECIALS)} specials")
    if kind == "char" and vocab.lower:
        raise DataError(f"{path}: characters in lower case, and a character model keeps its case; set lower to false")
    return vocab


def vocab_sha256(path: str | None) -> str | None:
    """Return the SHA-256 of a vocabulary's file, None for none."""
    return None if path is None else hashlib.sha256(_bytes_of(Path(path))).hexdigest()


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such vocabulary; `keyfed vocab --out FILE` makes one, and every finished run has a "
            "vocab.json"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; expected a vocab.json") from None


def summarise(vocab: Vocab, counts: Mapping[str, int], line_ends: int) -> VocabSummary:
    """Say what a vocabulary keeps of a text it was not built from: `kept` are the words that the text has, too.

    Args:
      counts: Occurrences of each word of the text.
      line_ends: Number of its lines.
    """
    known = [word for word in counts if word in vocab.index]
    words = [word for word in counts if word not in SPECIALS]
    total, kept = sum(counts.values()), sum(counts[word] for word in known)
    return VocabSummary(
        types=len(counts),
        kept=len(known),
        dropped_types=len(words) - len(known),
        dropped_tokens=sum(counts[word] for word in words) - kept,
        tokens=total + line_ends,
        rare_clients_types=0,
        unknown_rate=(total - kept) / max(1, total + line_ends),
    )


def count_words(lines: Iterable[str], vocab: Vocab) -> Counter[str]:
    """Count the words of a text as a vocabulary cuts it."""
    return Counter(chain.from_iterable(map(cutter(vocab.kind, tokenised=vocab.tokenised, lower=vocab.lower), lines)))
