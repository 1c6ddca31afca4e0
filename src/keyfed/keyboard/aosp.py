r"""Dictionaries of Android's keyboard: a word list as text (`.combined`) and as a binary dictionary of version 202.

Both are what AOSP's LatinIME reads, and with it HeliBoard and FUTO Keyboard. A frequency is a probability on a
logarithmic scale of 0 to 255,

.. math:: f(p) = 255 + s \log_2 p, \qquad s = 8.58923700372,

so that 255 is certainty and eight steps are a factor of two. 0 means "never suggest"; what is written here has 1 at
least. A pair :math:`(v, w)` has the frequency of :math:`p(w \mid v)` in the text file and four bits in the binary one:
the range from f(w) to 255 is cut into 16.5 steps, and class c says that the pair lies c + 1 steps above f(w):

.. math:: d = \frac{255 - f(w)}{16.5}, \qquad c = \Big\lfloor \frac{f(v, w) - f(w) - 1 - d/2}{d} \Big\rfloor

A pair less than half a step above f(w) says nothing that f(w) does not say, and is left out.

**The binary file**, all numbers with the most significant byte first. A header: 9B C1 3A FE, version (2 bytes), options
(2 bytes, 0), size of the header (4 bytes), then attributes as pairs of strings. A character from 20 to FF is one byte,
any other three, of which the first is below 1F; 1F ends a string. Then a Patricia trie, as arrays of nodes:

    array   number of nodes (1 byte below 80, else 2 with the highest bit set), nodes
    node    flags; characters (one, or several ended by 1F); if it ends a word: frequency; if it has children: distance
            from this field to their array, in 1 to 3 bytes; if it has bigrams: those
    flags   C0: bytes of the distance; 20: several characters; 10: ends a word; 04: has bigrams; 01: may offend
    bigram  flags (80: one more follows; 40: the distance is negative; 30: its bytes; 0F: class), distance from behind
            the flags to the node of the second word

An array stands before those of its nodes' children, and these stand in the order of the nodes, each with all below it:
a reader finds the word at a position by comparing positions. The distances depend on each other's sizes. All begin with
three bytes and shrink until none changes; as they only shrink, this ends.

References:
  The Android Open Source Project, LatinIME: the comments of `FormatSpec.java`; `sample.combined`.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import DataError

Ints = NDArray[np.int64]

MAGIC, VERSION = b"\x9b\xc1\x3a\xfe", 202
SCALE, MOST, CLASSES = 8.58923700372, 255, 16
LONGEST = 47  # code points of a word: AOSP's tools drop one of 48, without a word
MOST_NODES, MOST_DISTANCE = 0x7FFF, 0xFFFFFF
MOST_PAIRS = 10_000  # of one word
LONGEST_KEY, LONGEST_VALUE = 256, 2_048  # code points of an attribute
END = b"\x1f"
SEVERAL, ENDS_WORD, HAS_PAIRS, OFFENDS = 0x20, 0x10, 0x04, 0x01  # flags of a node
MORE, BEHIND = 0x80, 0x40  # flags of a pair: another follows; its word stands before it
FIRST, LAST = "date", "version"  # FUTO Keyboard shows the attributes between these two
ATTRIBUTES = (FIRST, "dictionary", "description", "locale", LAST)


@dataclass(frozen=True, slots=True, eq=False)
class WordList:
    """What a dictionary holds.

    Attributes:
      about: its attributes, `ATTRIBUTES`.
      words: each once, in the order of their code points.
      frequency: 1 to 255 of each.
      offends: whether a word may offend; phones then keep it out of suggestions if their user wants that.
      first, second, pair_frequency: pairs of words by their places, by first and then second word.
    """

    about: Mapping[str, str]
    words: tuple[str, ...]
    frequency: Ints
    offends: NDArray[np.bool_]
    first: Ints
    second: Ints
    pair_frequency: Ints


def frequency_of(p: NDArray[np.float64]) -> Ints:
    """Return f(p), at least 1.

    Example:
      >>> frequency_of(np.array([1.0, 0.5, 0.06, 1e-12])).tolist()
      [255, 246, 220, 1]
    """
    with np.errstate(divide="ignore"):
        return np.clip(np.round(MOST + SCALE * np.log2(p)), 1, MOST).astype(np.int64)


def class_of(frequency: Ints, pair_frequency: Ints) -> Ints:
    """Return the class c of pairs; −1 where a pair says nothing that the second word's own frequency does not say."""
    step = (MOST - frequency) / (CLASSES + 0.5)
    above = pair_frequency - frequency - step / 2
    safe = np.where(step > 0, step, 1.0)
    c = np.floor((above - 1) / safe).astype(np.int64)
    return np.where((above > 0) & (step > 0), np.clip(c, 0, CLASSES - 1), -1)


def unfit(word: str) -> str | None:
    """Say why a word cannot stand in a dictionary, None if it can.

    Example:
      >>> [unfit(word) for word in ("don't", "1,5", "a b", "a" * 48)]
      [None, 'with a comma', 'with a blank or a control character', 'longer than 47 characters']
    """
    if not word:
        return "empty"
    if len(word) > LONGEST:
        return f"longer than {LONGEST} characters"
    if any(c.isspace() or unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in word):
        return "with a blank or a control character"
    if "," in word:
        return "with a comma"
    if not any(map(str.isalpha, word)):
        return "without a letter"
    return None


def word_list(
    about: Mapping[str, str],
    words: Sequence[str],
    p: NDArray[np.float64],
    pairs: NDArray[np.int64],
    pair_p: NDArray[np.float64],
    offensive: Iterable[str] = (),
) -> tuple[WordList, dict[str, int]]:
    """Return the list of words and pairs that a dictionary can hold, and how many words it cannot hold, by reason.

    Args:
      p: of each word.
      pairs: places of two words in `words`, [n, 2].
      pair_p: of the second word after the first, [n].
      offensive: lower-case words that may offend.

    Raises:
      DataError: no word is left, or a word stands there twice.
    """
    check_about(about)
    why = [unfit(word) for word in words]
    order = sorted((i for i, reason in enumerate(why) if reason is None), key=lambda i: words[i])
    kept = tuple(words[i] for i in order)
    if not kept:
        raise DataError(f"none of {len(words):,} words can stand in a phone's dictionary")
    if len(set(kept)) < len(kept):
        twice = next(word for word, n in Counter(kept).items() if n > 1)
        raise DataError(f"the word list has {twice!r} twice; expected every word once")
    place = np.full(len(words), -1, np.int64)
    place[order] = np.arange(len(order))
    frequency = frequency_of(np.asarray(p, np.float64)[order])
    both = place[np.asarray(pairs, np.int64).reshape(-1, 2)]
    pair_frequency = frequency_of(np.asarray(pair_p, np.float64))
    both, pair_frequency = both[(both >= 0).all(1)], pair_frequency[(both >= 0).all(1)]
    says = class_of(frequency[both[:, 1]], pair_frequency) >= 0
    both, pair_frequency = both[says], pair_frequency[says]
    ranked = np.lexsort((both[:, 1], both[:, 0]))
    both, pair_frequency = both[ranked], pair_frequency[ranked]
    most = int(np.bincount(both[:, 0], minlength=1).max())
    if most > MOST_PAIRS:
        raise DataError(f"one word has {most:,} pairs; a dictionary holds at most {MOST_PAIRS:,} of a word")
    rude = frozenset(offensive)
    offends = np.array([word.lower() in rude for word in kept], np.bool_)
    found = WordList(dict(about), kept, frequency, offends, both[:, 0], both[:, 1], pair_frequency)
    return found, dict(Counter(reason for reason in why if reason is not None))


def check_about(about: Mapping[str, str]) -> None:
    """Refuse attributes that one of the two files, or one of the keyboards, would read as something else."""
    if tuple(about) != ATTRIBUTES:
        raise DataError(f"the dictionary's attributes are {', '.join(about)}; expected {', '.join(ATTRIBUTES)}")
    for key, value in about.items():
        wrong = sorted(set(value) & set(",=" if key == "dictionary" else ",=:"))
        if not value or len(key) >= LONGEST_KEY or len(value) >= LONGEST_VALUE or not value.isascii() or wrong:
            raise DataError(
                f"the dictionary's {key} is {value[:40]!r}; expected 1 to {LONGEST_VALUE - 1:,} ASCII characters "
                "without a comma, an equals sign or (but for its name) a colon"
            )
        if not value.isprintable():
            raise DataError(f"the dictionary's {key} has a control character: {value[:40]!r}")


def to_combined(words: WordList) -> str:
    """Return the text file: attributes, then every word with its pairs, the most frequent word first."""
    about = {"dictionary": words.about["dictionary"], **words.about}
    lines = [",".join(f"{key}={value}" for key, value in about.items())]
    bounds = np.searchsorted(words.first, np.arange(len(words.words) + 1))
    for i in np.lexsort((np.arange(len(words.words)), -words.frequency)).tolist():
        flag = ",possibly_offensive=true" if words.offends[i] else ""
        lines.append(f" word={words.words[i]},f={words.frequency[i]}{flag}")
        mine = slice(bounds[i], bounds[i + 1])
        for j, f in zip(words.second[mine].tolist(), words.pair_frequency[mine].tolist(), strict=True):
            lines.append(f"  bigram={words.words[j]},f={f}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A node: its characters, the word that ends here (−1: none), and below it."""

    letters: str
    word: int
    below: list[_Node]


def _trie(words: Sequence[str], low: int, high: int, depth: int) -> list[_Node]:
    """Return the nodes over words[low … high − 1], ascending, which share their first `depth` characters."""
    nodes = []
    while low < high:
        end = low + 1
        while end < high and words[end][depth] == words[low][depth]:
            end += 1
        shared = depth + 1
        while shared < len(words[low]) and words[low][shared] == words[end - 1][shared : shared + 1]:
            shared += 1
        is_word = len(words[low]) == shared
        below = _trie(words, low + is_word, end, shared)
        nodes.append(_Node(words[low][depth:shared], low if is_word else -1, below))
        low = end
    return nodes


def _arrays(nodes: list[_Node]) -> Iterator[list[_Node]]:
    """Yield an array and all below it, in the order of the file."""
    yield nodes
    for node in nodes:
        if node.below:
            yield from _arrays(node.below)


def to_binary(words: WordList) -> bytes:
    """Return the binary dictionary.

    Raises:
      DataError: more nodes in an array, or more bytes, than the format can address.
    """
    arrays = list(_arrays(_trie(words.words, 0, len(words.words), 0)))
    most = max(map(len, arrays))
    if most > MOST_NODES:
        raise DataError(f"{most:,} words begin unlike each other; a dictionary's node holds at most {MOST_NODES:,}")
    bounds = np.searchsorted(words.first, np.arange(len(words.words) + 1)).tolist()
    target, at = _targets(words, arrays, bounds)
    sizes, distance = _distances(target, at)
    body = bytearray()
    number = 0  # of the next distance
    classes = class_of(words.frequency[words.second], words.pair_frequency).tolist()
    for nodes in arrays:
        body += _count(len(nodes))
        for node in nodes:
            pairs = range(bounds[node.word], bounds[node.word + 1]) if node.word >= 0 else range(0)
            flags = (SEVERAL if len(node.letters) > 1 else 0) | (HAS_PAIRS if pairs else 0)
            flags |= sizes[number] << 6 if node.below else 0
            if node.word >= 0:
                flags |= ENDS_WORD | (OFFENDS if words.offends[node.word] else 0)
            body.append(flags)
            body += _letters(node.letters, ended=len(node.letters) > 1)
            if node.word >= 0:
                body.append(int(words.frequency[node.word]))
            if node.below:
                body += distance[number].to_bytes(sizes[number], "big")
                number += 1
            for pair in pairs:
                behind = BEHIND if distance[number] < 0 else 0
                body.append((MORE if pair + 1 < pairs.stop else 0) | behind | sizes[number] << 4 | classes[pair])
                body += abs(distance[number]).to_bytes(sizes[number], "big")
                number += 1
    return _header(words.about) + bytes(body)


def _targets(
    words: WordList, arrays: Sequence[list[_Node]], bounds: Sequence[int]
) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return what every distance points to, and where it stands.

    A place is (bytes before it that are not distances, number of distances before it).
    """
    fixed = number = 0
    place_of_array: dict[int, tuple[int, int]] = {}
    place_of_word = np.zeros((len(words.words), 2), np.int64)
    at: list[tuple[int, int]] = []
    points_to: list[int | list[_Node]] = []  # a word's place in the list, or an array
    for nodes in arrays:
        place_of_array[id(nodes)] = (fixed, number)
        fixed += len(_count(len(nodes)))
        for node in nodes:
            start = (fixed, number)
            fixed += 1 + len(_letters(node.letters, ended=len(node.letters) > 1))
            if node.word >= 0:
                place_of_word[node.word] = start
                fixed += 1
            if node.below:
                at.append((fixed, number))
                points_to.append(node.below)
                number += 1
            if node.word >= 0:
                for pair in range(bounds[node.word], bounds[node.word + 1]):
                    fixed += 1
                    at.append((fixed, number))
                    points_to.append(int(words.second[pair]))
                    number += 1
    target = np.array(
        [place_of_word[to] if isinstance(to, int) else place_of_array[id(to)] for to in points_to], np.int64
    ).reshape(-1, 2)
    here = np.array(at, np.int64).reshape(-1, 2)
    return (target[:, 0], target[:, 1]), (here[:, 0], here[:, 1])


def _distances(target: tuple[Ints, Ints], at: tuple[Ints, Ints]) -> tuple[list[int], list[int]]:
    """Return the bytes of every distance, and the distances, once both agree (module docstring)."""
    sizes = np.full(len(target[0]), 3, np.int64)
    while True:
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        distance = target[0] + before[target[1]] - at[0] - before[at[1]]
        long = np.abs(distance)
        needed = 1 + (long > 0xFF).astype(np.int64) + (long > 0xFFFF)
        if (needed == sizes).all():
            break
        sizes = needed
    if len(long) and long.max() > MOST_DISTANCE:
        raise DataError(
            f"the dictionary would be larger than {MOST_DISTANCE:,} bytes, the most that its format can address; "
            "export fewer words or pairs"
        )
    return sizes.tolist(), distance.tolist()


def _count(nodes: int) -> bytes:
    return bytes([nodes]) if nodes < 0x80 else (nodes | 0x8000).to_bytes(2, "big")


def _letters(text: str, *, ended: bool) -> bytes:
    coded = b"".join(bytes([ord(c)]) if 0x20 <= ord(c) <= 0xFF else ord(c).to_bytes(3, "big") for c in text)
    return coded + END if ended else coded


def _header(about: Mapping[str, str]) -> bytes:
    attributes = b"".join(_letters(text, ended=True) for pair in about.items() for text in pair)
    start = MAGIC + VERSION.to_bytes(2, "big") + bytes(2)
    return start + (len(start) + 4 + len(attributes)).to_bytes(4, "big") + attributes
