"""Where the keys of the page's layouts are, and how its lexicon writes a word: what measuring needs of the decoder.

The decoder itself is JavaScript (`web/decoder`) and reads its numbers and tables from the same files (`web/data`).
The unit of distance is one key width: the key in column c of row r has its centre at x = offset(r) + c + ½, y = r + ½.
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

Point: TypeAlias = tuple[float, float]


@cache
def table(name: str) -> Mapping[str, Any]:
    """Return a table of the page: constants, layouts, emoji or offensive."""
    text = files("keyfed.keyboard").joinpath("web", "data", f"{name}.json").read_text("utf-8")
    return {key: value for key, value in json.loads(text).items() if key != "comment"}


def fold(word: str) -> str:
    """Write a word as the lexicon does: lower case, code point by code point, and plain apostrophes and hyphens.

    A character whose lower case is several code points keeps the first, so that a word never changes its length.

    Example:
      >>> fold("Don’t"), fold("ÉTÉ"), len(fold("İ"))
      ("don't", 'été', 1)
    """
    plain = table("constants")["plain_joints"]
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
    layouts = table("layouts")
    if name not in layouts:
        raise ConfigError(f"layout {name!r} does not exist{nearest(name, layouts)}; use one of {', '.join(layouts)}")
    rows, offsets = layouts[name]["rows"], layouts[name]["offsets"]
    keys = {
        c: (offset + column + 0.5, number + 0.5)
        for number, (row, offset) in enumerate(zip(rows, offsets, strict=True))
        for column, c in enumerate(row)
    }
    return KeyLayout(name, keys)
