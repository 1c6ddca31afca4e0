"""Keys, characters and the text left of the cursor: what the model has read, and the word being typed.

The decoder's numbers and tables come from the JSON files of the page (`web/data`). The unit of distance is one key
width: the key in column c of row r has its centre at x = offset(r) + c + ½, y = r + ½.

The model reads EOS and then the tokens from an anchor on, from a zero state. With n tokens the anchor is
a = 32·max(0, ⌊n/32⌋ − 1). So a pasted novel costs at most 63 steps, and one more word costs one step until the anchor
moves. The suggestions depend on the text alone. The other direction is here too: how a chosen word is written, and the
blanks around it.
"""

# english: part – typed_part and last_part are typedPart and lastPart of web/context.mjs

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from keyfed.errors import ConfigError, nearest
from keyfed.text.vocab import EOS, Vocab, words_of

JOINERS = "\u200c\u200d"


@dataclass(frozen=True, slots=True)
class Constants:
    """`constants.json`, one field a name. Costs are in edits, scores in nats, distances in key widths."""

    extra: float  # a letter typed that is not in the word
    extra_double: float  # the same where it repeats the one typed before
    miss: float  # a letter of the word that was not typed
    miss_double: float  # the same where it repeats the one before it in the word
    miss_mark: float  # the same for an apostrophe or hyphen (`marks`)
    swap: float  # two neighbouring letters in the wrong order
    accent: float  # é for e
    sub_near: float  # another key instead, for one key width between the two
    sub_far: float  # the most that another key costs
    tap_weight: float  # another key by where the finger came down, for a squared key width
    marks: str
    max_typed: int  # longest typed word that is looked at
    longest_word: int  # of the lexicon
    alpha: float  # nats an edit costs
    complete: float  # nats for a word of which only the beginning was typed
    fuzzy_from: int  # letters from which a beginning with mistakes is completed
    max_cost: float  # edits a candidate may cost
    max_cost_letter: float  # and as many more for each typed letter
    max_cost_most: float  # but never more than these
    unknown_word: float  # log-probability of a word the lexicon does not know
    unknown_letter: float  # and how much less for each of its letters
    correct_max: float  # edits an autocorrection may mend
    margin_unknown: float  # nats by which a correction has to win over an unknown typed word
    margin_known: float  # and over a known one
    learn_after: int  # uses after which a word or pair counts
    k_unigram: float  # this one and the next two: see `keyfed.keyboard.personal`
    k_bigram: float
    lambda_most: float
    most_entries: int  # entries an import may hold
    anchor: int  # this one and the next two: see the module's docstring and `last_part`
    most_text: int
    text_step: int
    joints: str  # characters inside a typed word
    opening_joints: str  # which may open it
    closing_joints: str  # which may end it
    plain_joints: Mapping[str, str]  # how typographic ones are written in the lexicon
    unlearnt: str  # characters of words that are never learnt (addresses)
    sentence_end: str  # marks after which a sentence starts
    sentence_close: str  # what may stand behind them
    no_blank_before: str  # marks that take the place of an automatic blank
    capital_i: Mapping[str, str]  # words written with a capital wherever they stand
    gesture_points: int  # points of a resampled path
    gesture_start: float  # how far a swipe may begin from the word's first key
    gesture_end: float  # and end from its last
    gesture_model: float  # weights of the model's nats and of the two squared distances
    gesture_location: float
    gesture_shape: float


def _read(name: str) -> dict[str, Any]:
    text = files("keyfed.keyboard").joinpath("web", "data", f"{name}.json").read_text("utf-8")
    return {key: value for key, value in json.loads(text).items() if key != "comment"}


@cache
def constants() -> Constants:
    """Return the numbers of the decoder."""
    return Constants(**_read("constants"))


@cache
def layout_table() -> Mapping[str, Any]:
    """Return rows and offsets of every layout, by name."""
    return _read("layouts")


@cache
def emoji_table() -> Mapping[str, str]:
    """Return the emoji of each word that has one."""
    return dict(_read("emoji")["words"])


@cache
def offensive_words() -> frozenset[str]:
    """Return the words that are not suggested while the filter is on."""
    return frozenset(_read("offensive")["words"])


Point: TypeAlias = tuple[float, float]


def fold(word: str) -> str:
    """Write a word as the lexicon does: lower case, code point by code point, and plain apostrophes and hyphens.

    A character whose lower case is several code points keeps the first, so that a word never changes its length.

    Example:
      >>> fold("Don’t"), fold("ÉTÉ"), len(fold("İ"))
      ("don't", 'été', 1)
    """
    plain = constants().plain_joints
    return "".join(plain.get(c) or c.lower()[0] for c in word)


@cache
def base_letter(c: str) -> str:
    """Return the letter without its accents: first code point of its canonical decomposition, lower case.

    Example:
      >>> base_letter("É"), base_letter("ñ"), base_letter("ß"), base_letter("'")
      ('e', 'n', 'ß', "'")
    """
    return unicodedata.normalize("NFD", c)[0].lower()[0]


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Keys of a keyboard: the centre of each letter's key."""

    name: str
    keys: Mapping[str, Point]

    def centre(self, c: str) -> Point | None:
        """Return the centre of a character's key, or of its base letter's; None for one without a key."""
        return self.keys.get(c) or self.keys.get(base_letter(c))

    def distance(self, a: str, b: str) -> float | None:
        """Return the key widths between two characters' keys, or None where one has no key.

        Example:
          >>> layout_of("qwerty").distance("q", "w"), layout_of("qwerty").distance("q", "'")
          (1.0, None)
        """
        p, q = self.centre(a), self.centre(b)
        return None if p is None or q is None else math.hypot(p[0] - q[0], p[1] - q[1])


@cache
def layout_of(name: str) -> KeyLayout:
    """Return a layout by name: qwerty, qwertz or azerty.

    Raises:
      ConfigError: There is no such layout.
    """
    table = layout_table()
    if name not in table:
        raise ConfigError(f"layout {name!r} does not exist{nearest(name, table)}; use one of {', '.join(table)}")
    rows, offsets = table[name]["rows"], table[name]["offsets"]
    keys = {
        c: (offset + column + 0.5, number + 0.5)
        for number, (row, offset) in enumerate(zip(rows, offsets, strict=True))
        for column, c in enumerate(row)
    }
    return KeyLayout(name, keys)


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
    """What a keyboard knows of the text left of the cursor."""

    ids: tuple[int, ...]  # what the model reads: EOS and the tokens from the anchor on
    previous: str  # the word before the one being typed, folded; empty at a line start and behind punctuation
    text: str  # the text before the typed letters (of a long one, its end)
    typed: str  # the letters of the word being typed


def read_context(before: str, vocab: Vocab, k: Constants, last: Context | None = None) -> Context:
    """Cut the text left of the cursor into context and typed part.

    Args:
      last: what was read before; while a word is being typed, its tokens are taken over.

    Example:
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
      >>> k = constants()
      >>> put(WrittenText("hello ", automatic=True), ",", k), put(WrittenText("hello "), ",", k).text
      (WrittenText(text='hello, ', automatic=True), 'hello ,')
    """
    if written.automatic and c in k.no_blank_before and written.text.endswith(" "):
        return WrittenText(f"{written.text[:-1]}{c} ", automatic=True)
    return WrittenText(written.text + c)
