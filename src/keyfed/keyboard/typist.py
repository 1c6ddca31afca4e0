"""A person who types: slips of the finger, taps beside the key, swipes; all drawn by a seed.

Nobody's typing was recorded: these are simple models of it, the same for every language model that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyfed.keyboard.layout import Layout, Point, fold

TAP_SPREAD = 0.25  # standard deviation of a tap around its key's centre, key widths, in x and in y: 9 % hit another key
SWIPE_SPREAD = 0.25  # of a swipe around the keys it passes
SWIPE_TREMOR = 0.03  # of every point of it
POINTS_A_KEY = 8  # points a key width, as a screen reports them
SLIPS = ("neighbour", "omission", "swap", "doubling", "insertion")
SHARES = (0.40, 0.25, 0.15, 0.10, 0.10)


@dataclass(frozen=True, slots=True)
class Tapped:
    """A word as it came out: the characters of the keys that were hit, and where the finger came down."""

    typed: str
    taps: tuple[Point | None, ...]


def neighbours(c: str, layout: Layout) -> list[str]:
    """Return the letters whose keys touch a letter's key.

    Example:
      >>> from keyfed.keyboard.layout import layout_of
      >>> neighbours("q", layout_of("qwerty"))
      ['w', 'a']
    """
    return [k for k in layout.keys if k != c and (d := layout.distance(c, k)) is not None and d < 1.3]


def misspell(word: str, layout: Layout, rng: np.random.Generator) -> str:
    """Return a word with one slip: a neighbouring key, a letter left out, two swapped, one doubled, one too many.

    A word in which the drawn slip cannot happen, or changes nothing, comes back as it is.
    """
    slip = rng.choice(SLIPS, p=SHARES)
    at = int(rng.integers(len(word)))
    if slip == "omission":
        return word[:at] + word[at + 1 :]
    if slip == "doubling":
        return word[: at + 1] + word[at:]
    if slip == "swap":
        at = int(rng.integers(max(1, len(word) - 1)))
        return word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :]
    near = neighbours(fold(word[at]), layout)
    if not near:
        return word
    other = near[int(rng.integers(len(near)))]
    return word[:at] + other + word[at + (slip == "neighbour") :]


def tap(word: str, layout: Layout, rng: np.random.Generator, spread: float = TAP_SPREAD) -> Tapped:
    """Type a word by taps spread around the keys' centres; each types the key it is nearest to."""
    typed: list[str] = []
    taps: list[Point | None] = []
    letters = list(layout.keys)
    centres = np.array(list(layout.keys.values()))
    for c in word:
        centre = layout.centre(fold(c))
        offset = rng.normal(0.0, spread, 2)  # drawn for every character, so that one more does not move the others
        if centre is None:
            typed.append(c)
            taps.append(None)
            continue
        point = np.array(centre) + offset
        nearest = letters[int(((centres - point) ** 2).sum(1).argmin())]
        meant = letters[int(((centres - np.array(centre)) ** 2).sum(1).argmin())]
        typed.append(c if nearest == meant else nearest)
        taps.append((float(point[0]), float(point[1])))
    return Tapped("".join(typed), tuple(taps))


def swipe(word: str, layout: Layout, rng: np.random.Generator, spread: float = SWIPE_SPREAD) -> list[Point]:
    """Return the points of a swipe over a word's keys: each passed off its centre, straight between, with a tremor."""
    centres = [c for c in (layout.centre(fold(c)) for c in word) if c is not None]
    corners = [np.array(c) + rng.normal(0.0, spread, 2) for n, c in enumerate(centres) if n == 0 or c != centres[n - 1]]
    path = [corners[0]] if corners else []
    for a, b in pairwise(corners):
        steps = max(1, round(float(np.hypot(*(b - a))) * POINTS_A_KEY))
        path += [a + (b - a) * n / steps for n in range(1, steps + 1)]
    return [(float(x), float(y)) for x, y in (p + rng.normal(0.0, SWIPE_TREMOR, 2) for p in path)]


def has_path(word: str, layout: Layout) -> bool:
    """Whether a word can be swiped: two different keys at least."""
    return len({layout.centre(fold(c)) for c in word} - {None}) > 1
