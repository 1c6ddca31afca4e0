"""The keys and what a character is on them; the decoder's numbers and tables, from the JSON files of the page.

The unit is one key width: the key in column c of row r has its centre at x = offset(r) + c + ½, y = r + ½.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from keyfed.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Constants:
    """`constants.json`, one field a name. Costs are in edits, scores in nats, distances in key widths.

    Attributes:
      extra: a letter typed that is not in the word; `extra_double` where it repeats the one typed before.
      miss: a letter of the word that was not typed; `miss_double` where it repeats the one before it in the word,
        `miss_mark` for an apostrophe or hyphen (`marks`).
      swap: two neighbouring letters in the wrong order.
      accent: é for e.
      sub_near: another key instead, for one key width between the two; at most `sub_far`.
      tap_weight: the same by where the finger came down, for a squared key width.
      max_typed: longest typed word that is looked at; `longest_word` longest one of the lexicon.
      alpha: nats an edit costs; `complete` nats for a word of which only the beginning was typed.
      fuzzy_from: letters from which a beginning with mistakes is completed.
      max_cost, max_cost_letter, max_cost_most: edits a candidate may cost.
      unknown_word, unknown_letter: log-probability of a word the lexicon does not know.
      correct_max: edits an autocorrection may mend.
      margin_unknown, margin_known: nats by which a correction has to win over an unknown and a known typed word.
      learn_after: uses after which a word or pair counts.
      k_unigram, k_bigram, lambda_most: see `keyfed.keyboard.personal`.
      most_entries: entries an import may hold.
      anchor, most_text, text_step: see `keyfed.keyboard.context`.
      joints: characters inside a typed word; `opening_joints` may open it, `closing_joints` may end it.
      plain_joints: how typographic ones are written in the lexicon.
      unlearnt: characters of words that are never learnt (addresses).
      sentence_end, sentence_close: marks after which a sentence starts, and what may stand behind them.
      no_blank_before: marks that take the place of an automatic blank.
      capital_i: words written with a capital wherever they stand.
      gesture_points: points of a resampled path.
      gesture_start, gesture_end: how far a swipe may begin and end from the word's first and last key.
      gesture_model, gesture_location, gesture_shape: weights of the model's nats and of the squared distances.
    """

    extra: float
    extra_double: float
    miss: float
    miss_double: float
    miss_mark: float
    swap: float
    accent: float
    sub_near: float
    sub_far: float
    tap_weight: float
    marks: str
    max_typed: int
    longest_word: int
    alpha: float
    complete: float
    fuzzy_from: int
    max_cost: float
    max_cost_letter: float
    max_cost_most: float
    unknown_word: float
    unknown_letter: float
    correct_max: float
    margin_unknown: float
    margin_known: float
    learn_after: int
    k_unigram: float
    k_bigram: float
    lambda_most: float
    most_entries: int
    anchor: int
    most_text: int
    text_step: int
    joints: str
    opening_joints: str
    closing_joints: str
    plain_joints: Mapping[str, str]
    unlearnt: str
    sentence_end: str
    sentence_close: str
    no_blank_before: str
    capital_i: Mapping[str, str]
    gesture_points: int
    gesture_start: float
    gesture_end: float
    gesture_model: float
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
    """Keys of a keyboard.

    Attributes:
      keys: centre of each letter's key.
    """

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
