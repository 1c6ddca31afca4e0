r"""The dictionary of an export: what is a word, how frequent it is, how it is written. It comes with the package.

A language model's vocabulary is no dictionary: it lacks "pizza" and has "teh". A spelling list says what a word is;
a list of frequencies says only how often it is used. `scripts/dictionary.py` makes one file of both, and an export of
English words takes it. `dictionary.safetensors` has n folded words in ascending order, none twice.

- `shared`, uint8 [n]: how many characters a word begins with as the one before it does.
- `length`, uint8 [n]: how many characters follow.
- `letters`, uint8: these, UTF-8, one word after the other.
- `frequency`, uint8 [n]: q, for a share of 10^(−q/25) of all words that people write.
- `form`, uint8 [n]: 0 in lower case, 1 with a capital, 2 both, 3 as in `written`.
- `written`, uint8: UTF-8, a line for each word of form 3.

**Doubted words.** A word of the vocabulary that no list has counts as one if enough clients used it and it does not
look like a slip of a listed word. Others may be typed, but are not suggested, and are corrected like unknown words.

**Everyday English.** The base model learnt from technical chat. Its keyboard scales the network by

.. math:: p(w \mid h) \propto p_\mathrm{net}(w \mid h) \left(\frac{f(w)}{p_\mathrm{text}(w)}\right)^β

with the dictionary's frequency f and the share of w in the base's own text, which is public. The logarithm of the
quotient is the word's *tilt*. Runs have none: how often their clients write a word is what they are to learn.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from keyfed.errors import RunError
from keyfed.keyboard.keys import fold
from keyfed.run.base import Base
from keyfed.run.prepare import Prepared
from keyfed.text.vocab import SPECIALS, UNK, Vocab, words_of

FILE = Path(__file__).parent / "english" / "dictionary.safetensors.gz"
LICENCES = {
    "spelling": "SCOWL 2020.12.07 by Kevin Atkinson and others, permissive licences (english/LICENCE.txt)",
    "frequency": "wordfreq 3.1.1 by Robyn Speer and others, CC BY-SA 4.0",
    "file": "CC BY-SA 4.0",
}
LOWER, CAPITAL, BOTH, WRITTEN = range(4)
STEPS = 25  # of a power of ten
NAMES = ("shared", "length", "letters", "frequency", "form", "written")
LEAST_KNOWN = 0.6  # share of a vocabulary that must be listed, for the dictionary to be of its language
LEAST_CLIENTS = 0.005  # share of the clients who must use a word that no list has …
FEWEST_CLIENTS = 10  # … and how many at least
TOGETHER = 3e-7  # two words run together are such of which so large a share of all pairs would be, by chance
SLIP = 10  # a word looks like a slip of one that as many times the clients use
MOST_TILT = 4.0  # nats


@dataclass(frozen=True, slots=True)
class Dictionary:
    """Words and what is known of each.

    Attributes:
      words: folded, ascending.
      frequency: q, for a share of 10^(−q/25) of all words.
      forms: {word: how it is written} of those that are never in lower case.
      both: words that are also written with a capital, like may and May.
    """

    words: tuple[str, ...]
    frequency: NDArray[np.uint8]
    forms: Mapping[str, str]
    both: frozenset[str]

    def shares(self) -> dict[str, float]:
        """Return {word: its share of all words that people write}."""
        return dict(zip(self.words, (10.0 ** (-self.frequency.astype(np.float64) / STEPS)).tolist(), strict=True))


def to_bytes(dictionary: Dictionary) -> bytes:
    """Write a dictionary as `dictionary.safetensors`."""
    shared, length, letters, forms, written = bytearray(), bytearray(), list[str](), bytearray(), list[str]()
    before = ""
    for word in dictionary.words:
        same = next(
            (i for i, (a, b) in enumerate(zip(before, word, strict=False)) if a != b), min(len(before), len(word))
        )
        shared.append(same)
        length.append(len(word) - same)
        letters.append(word[same:])
        usual = dictionary.forms.get(word, word)
        if usual == word:
            forms.append(BOTH if word in dictionary.both else LOWER)
        else:
            forms.append(CAPITAL if usual == word.capitalize() else WRITTEN)
            written += [usual] if forms[-1] == WRITTEN else []
        before = word
    texts = {"letters": "".join(letters).encode(), "written": "\n".join(written).encode()}
    values = {"shared": bytes(shared), "length": bytes(length), "form": bytes(forms), **texts}
    tensors = {name: np.frombuffer(value, np.uint8) for name, value in values.items()}
    return bytes(save({**tensors, "frequency": dictionary.frequency}))


def from_bytes(data: bytes, origin: str) -> Dictionary:
    """Read what `to_bytes` wrote.

    Raises:
      RunError: the file is damaged.
    """
    try:
        tensors = load(data)
        if sorted(tensors) != sorted(NAMES) or any(t.dtype != np.uint8 or t.ndim != 1 for t in tensors.values()):
            raise ValueError(f"it holds {', '.join(sorted(tensors)) or 'nothing'}")
        shared, length, form, frequency = (tensors[name].tolist() for name in ("shared", "length", "form", "frequency"))
        if not len(shared) == len(length) == len(form) == len(frequency):
            raise ValueError("its columns differ in length")
        letters = bytes(tensors["letters"]).decode("utf-8")
        text = bytes(tensors["written"]).decode("utf-8")
        written = text.split("\n") if text else []
        if sum(length) != len(letters) or form.count(WRITTEN) != len(written):
            raise ValueError("its letters or forms are cut short")
        words, at, before = list[str](), 0, ""
        forms, both, others = dict[str, str](), set[str](), iter(written)
        for same, size, kind in zip(shared, length, form, strict=True):
            word = before[:same] + letters[at : at + size]
            if same > len(before) or not word > before:
                raise ValueError(f"{word[:40]!r} does not follow {before[:40]!r}")
            if kind == CAPITAL:
                forms[word] = word.capitalize()
            elif kind == BOTH:
                both.add(word)
            elif kind == WRITTEN:
                forms[word] = next(others)
                if fold(forms[word]) != word:
                    raise ValueError(f"{forms[word][:40]!r} is not how {word[:40]!r} is written")
            elif kind != LOWER:
                raise ValueError(f"{word[:40]!r} has the form {kind}")
            words.append(word)
            at, before = at + size, word
    except Exception as e:  # safetensors raises its own error class for damaged files
        raise RunError(f"{origin} is damaged: {e}") from None
    return Dictionary(tuple(words), tensors["frequency"], forms, frozenset(both))


@dataclass(frozen=True, slots=True)
class Lists:
    """What a keyboard has next to its model: a dictionary, and what that says of the model's vocabulary.

    Attributes:
      dictionary: the file, empty for none.
      doubted: words of the vocabulary that do not count as words.
      tilt: of each entry of the vocabulary; None: the model is taken as it is.
      counted: whether any of it was counted on clients' text.
    """

    dictionary: bytes = b""
    doubted: tuple[str, ...] = ()
    tilt: tuple[float, ...] | None = None
    counted: bool = False


NO_LISTS = Lists()


def lists_for(vocab: Vocab, uses: Sequence[Uses] | None, clients: int, *, tilted: bool) -> Lists:
    """Return the lists for a vocabulary; `NO_LISTS` where it is not English.

    Args:
      uses: of each entry of the vocabulary in the training text; None where nothing may be counted, or no text is here.
      clients: who wrote it.
      tilted: whether the model is to be scaled to everyday English.
    """
    if not is_english(vocab):
        return NO_LISTS
    return Lists(
        english()[0],
        tuple(doubted(vocab, None if uses is None else [use.clients for use in uses], clients)),
        tuple(tilt(vocab, [use.tokens for use in uses])) if tilted and uses is not None else None,
        uses is not None,
    )


def lists_of(vocab: Vocab, text: Prepared | None, packaged: Base | None) -> Lists:
    """Return the lists of an export. Only the base model is scaled: a run learns what its clients write.

    Args:
      text: a run's corpus, None where it may not be read or is not here.
      packaged: the base model, if that is what is exported.
    """
    if packaged is not None:
        uses = [Uses(*use) for use in packaged.uses] or None
        return lists_for(vocab, uses, packaged.manifest["data"]["trained_clients"], tilted=True)
    texts = [client.train for client in text.population.trained if client.train] if text is not None else []
    return lists_for(vocab, count_uses(texts, vocab) if texts else None, len(texts), tilted=False)


class Uses(NamedTuple):
    """How often a word was written, and by how many clients."""

    tokens: int
    clients: int


def count_uses(texts: Iterable[Iterable[str]], vocab: Vocab) -> list[Uses]:
    """Count the entries of a vocabulary in the lines of each client; those that the vocabulary lacks are `<unk>`."""
    tokens, clients = Counter[int](), Counter[int]()
    for lines in texts:
        mine = Counter(
            vocab.index.get(word, UNK)
            for line in lines
            for word in words_of(line, tokenised=vocab.tokenised, lower=vocab.lower)
        )
        tokens.update(mine)
        clients.update(mine.keys())
    return [Uses(tokens[i], clients[i]) for i in range(len(vocab))]


@cache
def english() -> tuple[bytes, Dictionary]:
    """Return the dictionary of the package: its file as an export has it, and what is in it.

    Raises:
      RunError: it is missing or damaged.
    """
    try:
        data = gzip.decompress(FILE.read_bytes())
    except (OSError, EOFError) as e:
        raise RunError(f"the keyboard's dictionary {FILE} cannot be read ({e}); install keyfed again") from None
    return data, from_bytes(data, str(FILE))


def is_english(vocab: Vocab) -> bool:
    """Whether most of a vocabulary is English: entries weigh 1/rank, because they are in order of falling frequency."""
    if vocab.kind != "word":
        return False
    listed = frozenset(english()[1].words)
    weighed = [
        (1 / rank, fold(word) in listed)
        for rank, word in enumerate(vocab.words[len(SPECIALS) :], start=1)
        if word.isalpha()
    ]
    whole = sum(weight for weight, _ in weighed)
    return whole > 0 and sum(weight for weight, known in weighed if known) >= LEAST_KNOWN * whole


def doubted(vocab: Vocab, writers: Sequence[int] | None, clients: int) -> list[str]:
    """Return the words of a vocabulary that do not count as words (module docstring).

    Args:
      writers: how many clients used each entry; None where nothing may be counted. Then all of them are used by enough,
        and entries compare by Zipf's law, as 1/rank.
      clients: how many there are.
    """
    shares = english()[1].shares()
    used = writers if writers is not None else [10**9 // (1 + rank) for rank in range(len(vocab))]
    least = 0 if writers is None else max(FEWEST_CLIENTS, LEAST_CLIENTS * clients)
    number = dict(zip(map(fold, reversed(vocab.words)), reversed(used), strict=True))
    found = []
    for word in vocab.words[len(SPECIALS) :]:
        key = fold(word)
        if key in shares or not any(map(str.isalpha, key)) or any(map(str.isdigit, key)):
            continue
        slip_of = max((number.get(other, 0) for other in _one_edit_away(key, shares)), default=0)
        if number[key] < least or slip_of >= SLIP * number[key] or _lacks_a_mark(key, shares):
            found.append(word)
    return found


def _lacks_a_mark(word: str, shares: Mapping[str, float]) -> bool:
    """Whether an apostrophe makes a listed word of it (dont), or a blank two of the commonest (alot)."""
    cuts = [(word[:i], word[i:]) for i in range(1, len(word))]
    return any(f"{a}'{b}" in shares or shares.get(a, 0) * shares.get(b, 0) >= TOGETHER for a, b in cuts)


def _one_edit_away(word: str, shares: Mapping[str, float]) -> set[str]:
    """Return the listed words that become this one by two letters swapped; of longer ones, by any one edit."""
    found = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    if len(word) > 3:
        places = range(len(word) + 1)
        found |= {word[:i] + word[i + 1 :] for i in places}
        found |= {word[:i] + c + word[i + gone :] for i in places for c in ascii_lowercase for gone in (0, 1)}
    return {other for other in found if other in shares} - {word}


def tilt(vocab: Vocab, uses: Sequence[int]) -> list[float]:
    """Return log f(w)/p_text(w) of every entry of a vocabulary, within ±`MOST_TILT` nats and to hundredths.

    A word that no list has gets the frequency of the rarest that one has; marks, numbers and line ends have none.

    Args:
      uses: of each entry, in the text that the model learnt from.
    """
    shares = english()[1].shares()
    rarest = min(shares.values())
    is_word = [i == UNK or (i > UNK and any(map(str.isalpha, word))) for i, word in enumerate(vocab.words)]
    whole = sum(n for n, counts in zip(uses, is_word, strict=True) if counts)
    found = [0.0] * len(vocab)
    for i, (word, n) in enumerate(zip(vocab.words, uses, strict=True)):
        if is_word[i]:
            everyday = _missing(vocab, shares) if i == UNK else shares.get(fold(word), rarest)
            quotient = log(everyday * whole / max(1, n))
            found[i] = round(min(MOST_TILT, max(-MOST_TILT, quotient)), 2)
    return found


def _missing(vocab: Vocab, shares: Mapping[str, float]) -> float:
    """How often people write a word that a vocabulary lacks."""
    return sum(shares.values()) - sum(shares.get(key, 0.0) for key in set(map(fold, vocab.words)))
