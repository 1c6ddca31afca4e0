"""How a word is written, and the blanks around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keyfed.keyboard.tables import Constants


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
