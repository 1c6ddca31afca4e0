"""Where the keys are, and what a character is on them.

The unit is one key width: the key in column c of row r has its centre at x = offset(r) + c + ½, y = r + ½.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from keyfed.errors import ConfigError, nearest
from keyfed.keyboard.tables import constants, layout_table

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
class Layout:
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
def layout_of(name: str) -> Layout:
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
    return Layout(name, keys)
