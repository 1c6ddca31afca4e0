"""Text left of the cursor → what the model has read, and the part of a word being typed.

The model reads EOS and then the tokens from an anchor on, from a zero state. With n tokens the anchor is
a = 32·max(0, ⌊n/32⌋ − 1): a pasted novel costs at most 63 steps, the suggestions depend on the text alone, and one more
word costs one step until the anchor moves. The other direction is here too: how a chosen word is written, and
the blanks around it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace

from keyfed.keyboard.layout import Constants, fold
from keyfed.text.vocab import EOS, Vocab, words_of

JOINERS = "\u200c\u200d"


def is_letter(c: str) -> bool:
    """Whether a character is a letter or a number of any script (Unicode L and N)."""
    return c.isalnum()


def has_number(word: str) -> bool:
    """Whether a word holds a digit or another number sign (Unicode N; 三 is a letter)."""
    return any(unicodedata.category(c)[0] == "N" for c in word)


def is_wordlike(word: str) -> bool:
    """Whether a token is a word or number, not a mark or symbol."""
    return any(map(is_letter, word))


def has_control(word: str) -> bool:
    """Whether a word holds a control, direction or surrogate character; the joiners of many scripts are none."""
    return any(unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in JOINERS for c in word)


def belongs(c: str) -> bool:
    """Whether a character is a letter, a number or a mark that belongs to one (as `words_of` has it)."""
    return is_letter(c) or c in JOINERS or ("\u0300" <= c < "\ufb50" and unicodedata.category(c) in ("Mn", "Mc"))


def typed_part(before: str, k: Constants) -> str:
    """Return the word being typed at the end of a text, or an empty string.

    Letters, numbers and the joints between them; a full stop only between two letters (addresses). It may end in an
    apostrophe or hyphen ("don'"), and begin with an `@`.

    Example:
      >>> from keyfed.keyboard.layout import constants
      >>> [typed_part(text, constants()) for text in ("I don’", "the end.", "see ex.am", "(hel", "well-k", "a ")]
      ['don’', '', 'ex.am', 'hel', 'well-k', '']
    """
    at, size = len(before), len(before)
    while at > 0:
        c = before[at - 1]
        if c == ".":
            if not (1 < at < size and belongs(before[at]) and belongs(before[at - 2])):
                break
        elif not (c in k.joints or belongs(c)):
            break
        at -= 1
    while at < size and not (is_letter(before[at]) or before[at] in k.opening_joints):
        at += 1
    typed = before[at:]
    return typed if typed and (belongs(typed[-1]) or typed[-1] in k.closing_joints) else ""


def last_part(text: str, k: Constants) -> str:
    """Return what is looked at of a long text: its end, from behind a blank, in steps so that it seldom moves.

    Example:
      >>> from dataclasses import replace
      >>> from keyfed.keyboard.layout import constants
      >>> last_part("one two three four", replace(constants(), most_text=12, text_step=4))
      'three four'
    """
    if len(text) <= k.most_text:
        return text
    start = k.text_step * -(-(len(text) - k.most_text) // k.text_step)
    for at in range(start - 1, len(text)):
        if text[at].isspace():
            return text[at + 1 :]
    return text[start:]


@dataclass(frozen=True, slots=True)
class Context:
    """What a keyboard knows of the text left of the cursor.

    Attributes:
      ids: what the model reads: EOS and the tokens from the anchor on.
      previous: the word before the one being typed, folded; empty at a line start and behind punctuation.
      text: the text before the typed part (of a long one, its end).
      typed: the part of a word being typed.
    """

    ids: tuple[int, ...]
    previous: str
    text: str
    typed: str


def read_context(before: str, vocab: Vocab, k: Constants, last: Context | None = None) -> Context:
    """Cut the text left of the cursor into context and typed part.

    Args:
      last: what was read before; while a word is being typed, its tokens are taken over.

    Example:
      >>> from keyfed.keyboard.layout import constants
      >>> from keyfed.text.vocab import SPECIALS
      >>> vocab = Vocab("word", (*SPECIALS, "the", "cat"), lower=True, tokenised=False)
      >>> read_context("Dog\\nThe ca", vocab, constants())
      Context(ids=(2, 3, 2, 4), previous='the', text='Dog\\nThe ', typed='ca')
    """
    kept = last_part(before, k)
    typed = typed_part(kept, k)
    text = kept[: len(kept) - len(typed)]
    if last is not None and last.text == text:
        return replace(last, typed=typed)
    return Context(anchored(vocab.encode_context(text).tolist(), k), previous_word(text), text, typed)


def anchored(tokens: list[int], k: Constants) -> tuple[int, ...]:
    """Return EOS and the tokens from the anchor on."""
    return (EOS, *tokens[k.anchor * max(0, len(tokens) // k.anchor - 1) :])


def previous_word(text: str) -> str:
    """Return the last word of the current line, folded, or an empty string if punctuation or nothing stands there.

    Example:
      >>> previous_word("Hello big World "), previous_word("Hello, "), previous_word("Hello\\n")
      ('world', '', '')
    """
    line = text[text.rfind("\n") + 1 :]
    tokens = words_of(line, tokenised=False, lower=False)
    return fold(tokens[-1]) if tokens and is_wordlike(tokens[-1]) else ""


def starts_sentence(text: str, k: Constants) -> bool:
    """Whether the next word starts a sentence: at the beginning, on a new line, or after an end mark and blanks.

    Example:
      >>> from keyfed.keyboard.layout import constants
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
      >>> from keyfed.keyboard.layout import constants
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
class WrittenText:
    """A text and whether the blank at its end was put there automatically."""

    text: str
    automatic: bool = False


def pick(before: str, typed: str, chosen: str) -> WrittenText:
    """Put a picked suggestion in the place of the typed part, with a blank behind it."""
    return WrittenText(f"{before[: len(before) - len(typed)]}{chosen} ", automatic=True)


def put(written: WrittenText, c: str, k: Constants) -> WrittenText:
    """Type one character; a mark takes the place of an automatic blank and gets one behind it.

    Example:
      >>> from keyfed.keyboard.layout import constants
      >>> k = constants()
      >>> put(WrittenText("hello ", automatic=True), ",", k), put(WrittenText("hello "), ",", k).text
      (WrittenText(text='hello, ', automatic=True), 'hello ,')
    """
    if written.automatic and c in k.no_blank_before and written.text.endswith(" "):
        return WrittenText(f"{written.text[:-1]}{c} ", automatic=True)
    return WrittenText(written.text + c)
