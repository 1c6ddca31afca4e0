"""How a word is written, and the blanks around it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keyfed.keyboard.context import is_letter
from keyfed.keyboard.tables import Constants
from keyfed.text.vocab import Vocab, words_of


def starts_sentence(text: str, k: Constants) -> bool:
    """Whether the next word starts a sentence: at the beginning, on a new line, or after an end mark and blanks.

    Example:
      >>> from keyfed.keyboard.tables import constants
      >>> [starts_sentence(text, constants()) for text in ("", "Hi\\n ", "Hi. ", 'He said "hi!" ', "3.", "so, ")]
      [True, True, True, True, False, False]
    """
    bare = text.rstrip()
    if not bare or "\n" in text[len(bare) :]:
        return True
    if bare == text:
        return False
    return bare.rstrip(k.sentence_close).endswith(tuple(k.sentence_end))


def is_capital(c: str) -> bool:
    """Whether a character has another lower case."""
    return c.lower() != c


def all_capitals(typed: str) -> bool:
    """Whether a word has at least two letters, all of them capitals (marks and digits do not count)."""
    letters = [c for c in typed if c.lower() != c.upper()]
    return len(letters) >= 2 and all(map(is_capital, letters))


def capitalised(word: str) -> str:
    """Return a word with its first letter upper case; one whose upper case is several letters stays (ß)."""
    upper = word[:1].upper()
    return upper + word[1:] if len(upper) == 1 else word


def display(word: str, typed: str, sentence: bool, forms: Mapping[str, str], k: Constants) -> str:
    """Return a word as it is shown.

    Args:
      word: as the vocabulary has it.
      typed: the part that was typed: its capitals are kept.
      sentence: whether the word starts a sentence; counts where nothing was typed.
      forms: the form most often written of the words that are not simply lower case.

    Example:
      >>> from keyfed.keyboard.tables import constants
      >>> forms = {"iphone": "iPhone", "london": "London"}
      >>> [display(*a, forms, constants()) for a in (("london", "lo", False), ("the", "Th", False),
      ...     ("the", "", True), ("the", "TH", False), ("i'm", "im", False), ("iphone", "ip", True))]
      ['London', 'The', 'The', 'THE', "I'm", 'iPhone']
    """
    shown = k.capital_i.get(word) or forms.get(word, word)
    if all_capitals(typed):
        return shown.upper()
    if is_capital(typed[0]) if typed else sentence:
        return capitalised(shown)
    return shown


def most_frequent_forms(lines: Iterable[str], vocab: Vocab) -> dict[str, str]:
    """Return the form most often written in training of every word of a lower-case vocabulary, where it differs.

    The first word of a sentence has a capital for another reason and is not counted. Ties go to the vocabulary's form,
    then by the form itself.

    Example:
      >>> from keyfed.text.vocab import SPECIALS
      >>> vocab = Vocab("word", (*SPECIALS, "in", "paris", "the"), lower=True, tokenised=False)
      >>> most_frequent_forms(["In Paris the", "The Paris. The", "in paris"], vocab)
      {'paris': 'Paris'}
    """
    if not vocab.lower or vocab.kind != "word":
        return {}
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        opens = True
        for token in words_of(line, tokenised=vocab.tokenised, lower=False):
            if any(map(is_letter, token)):
                if not opens and token.lower() in vocab.index:
                    seen[token.lower()][token] += 1
                opens = False
            elif token in (".", "!", "?", "…"):
                opens = True
    forms = {word: min(found, key=lambda f: (-found[f], f != word, f)) for word, found in seen.items()}
    return {word: form for word, form in sorted(forms.items()) if form != word}


@dataclass(frozen=True, slots=True)
class Written:
    """A text and whether the blank at its end was put there automatically."""

    text: str
    automatic: bool = False


def pick(before: str, typed: str, chosen: str) -> Written:
    """Put a picked suggestion in the place of the typed part, with a blank behind it."""
    return Written(f"{before[: len(before) - len(typed)]}{chosen} ", automatic=True)


def put(written: Written, c: str, k: Constants) -> Written:
    """Type one character; a mark takes the place of an automatic blank and gets one behind it.

    Example:
      >>> from keyfed.keyboard.tables import constants
      >>> put(Written("hello ", automatic=True), ",", constants()), put(Written("hello "), ",", constants()).text
      (Written(text='hello, ', automatic=True), 'hello ,')
    """
    if written.automatic and c in k.no_blank_before and written.text.endswith(" "):
        return Written(f"{written.text[:-1]}{c} ", automatic=True)
    return Written(written.text + c)
