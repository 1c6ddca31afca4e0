"""Cut a word into the pieces of a transformer's tokenizer: byte-level BPE (GPT-2) and WordPiece (BERT).

    GPT-2    " unhappily" → "Ġunh", "app", "ily"      bytes written as letters, the most frequent pairs merged first
    BERT     "unhappily" → "un", "##hap", "##pily"    the longest piece that fits, from left to right

A word is encoded as it stands inside a sentence: GPT-2's with the blank before it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

Encode = Callable[[str], tuple[int, ...]]  # the numbers of a word's pieces; none where it cannot be written in them

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
