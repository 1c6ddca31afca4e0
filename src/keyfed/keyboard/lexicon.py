r"""The words a keyboard can suggest: their tree, their places in the vocabulary, their swipe paths.

A swipe is decoded against the path of every word (after SHARK²). A word's template is the polyline through its keys, a
swipe the polyline of its points; both are resampled to 32 points at equal distances. With :math:`x_i` the swipe's
points and :math:`y_i` the template's,

.. math::
   \mathrm{location} = \frac1{32}\sum_i |x_i - y_i|, \qquad
   \mathrm{score}(w) = g_m \log p(w) - g_l\, \mathrm{location}^2 - g_s\, \mathrm{shape}^2

where shape is the same mean after both paths were centred and scaled to their larger side (at least one key). Only
words whose first and last key lie near the two ends are looked at.

References:
  Kristensson & Zhai, *SHARK²: a large vocabulary shorthand writing system for pen-based computers*, UIST 2004.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.context import has_control, is_wordlike
from keyfed.keyboard.layout import Constants, KeyLayout, Point, fold
from keyfed.keyboard.typed import Speller, Typing, build_trie

Floats = NDArray[np.float64]


def keys_of(word: str, layout: KeyLayout) -> list[Point]:
    """Return the centres of a word's keys; characters without a key are skipped, equal successive keys counted once."""
    found = [p for p in map(layout.centre, word) if p is not None]
    return [p for i, p in enumerate(found) if i == 0 or p != found[i - 1]]


def resample(paths: Floats, n: int) -> Floats:
    """Return n points at equal distances along each polyline, [paths, points, 2] → [paths, n, 2].

    Example:
      >>> resample(np.array([[[0.0, 0.0], [2.0, 0.0], [2.0, 2.0]]]), 3).tolist()
      [[[0.0, 0.0], [2.0, 0.0], [2.0, 2.0]]]
    """
    points = paths.shape[1]
    if points == 1:
        return np.repeat(paths, n, axis=1)
    lengths = np.sqrt((np.diff(paths, axis=1) ** 2).sum(-1))
    reached = np.concatenate([np.zeros((len(paths), 1)), np.cumsum(lengths, axis=1)], axis=1)
    targets = reached[:, -1:] * (np.arange(n) / (n - 1))
    segment = (reached[:, None, 1:-1] <= targets[:, :, None]).sum(-1)
    start, length = np.take_along_axis(reached, segment, 1), np.take_along_axis(lengths, segment, 1)
    share = np.divide(targets - start, length, out=np.zeros_like(targets), where=length > 0)[..., None]
    a = np.take_along_axis(paths, segment[..., None], 1)
    b = np.take_along_axis(paths, segment[..., None] + 1, 1)
    found: Floats = a + share * (b - a)
    return found


def shape_of(paths: Floats) -> Floats:
    """Return resampled paths centred on their mean and scaled to their larger side, at least one key."""
    side = np.ptp(paths, axis=1).max(-1)
    shapes: Floats = (paths - paths.mean(axis=1, keepdims=True)) / np.maximum(side, 1.0)[:, None, None]
    return shapes


def swipe_of(points: Iterable[Point]) -> list[Point]:
    """Return a swipe's points without those that are no numbers or repeat the one before."""
    found = [(float(x), float(y)) for x, y in points if np.isfinite(x) and np.isfinite(y)]
    return [p for i, p in enumerate(found) if i == 0 or p != found[i - 1]]


@dataclass(frozen=True)
class Templates:
    """Paths of the words that can be swiped: at least two different keys.

    Attributes:
      word: place of each in the list that was given, [templates].
      paths: [templates, points, 2].
      shapes: the same, centred and scaled.
      ends: first and last key, [templates, 2, 2].
    """

    word: NDArray[np.intp]
    paths: Floats
    shapes: Floats
    ends: Floats

    def score(self, points: Sequence[Point], logp: Floats, k: Constants) -> tuple[NDArray[np.intp], Floats]:
        """Return the words near a swipe and their scores.

        Args:
          points: the swipe, in key widths.
          logp: log-probability of every word that was given to `templates_of`.
        """
        swipe = swipe_of(points)
        if not swipe or not len(self.word):
            return np.zeros(0, np.intp), np.zeros(0)
        away = np.sqrt(((self.ends - np.array([swipe[0], swipe[-1]])) ** 2).sum(-1))
        near = np.flatnonzero((away[:, 0] <= k.gesture_start) & (away[:, 1] <= k.gesture_end))
        path = resample(np.array([swipe]), k.gesture_points)
        location = np.sqrt(((self.paths[near] - path) ** 2).sum(-1)).mean(-1)
        shape = np.sqrt(((self.shapes[near] - shape_of(path)) ** 2).sum(-1)).mean(-1)
        words = self.word[near]
        score = k.gesture_model * logp[words] - k.gesture_location * location**2 - k.gesture_shape * shape**2
        return words, score


def templates_of(words: Sequence[str], layout: KeyLayout, k: Constants) -> Templates:
    """Return the paths of folded words, those of equally many keys resampled at once."""
    keys = [keys_of(word, layout) for word in words]
    by_length: dict[int, list[int]] = {}
    for i, path in enumerate(keys):
        if len(set(path)) >= 2:
            by_length.setdefault(len(path), []).append(i)
    order = np.array([i for group in by_length.values() for i in group], np.intp)
    groups = [resample(np.array([keys[i] for i in group]), k.gesture_points) for group in by_length.values()]
    paths = np.concatenate([np.zeros((0, k.gesture_points, 2)), *groups])
    ends = np.array([[keys[i][0], keys[i][-1]] for i in order]).reshape(-1, 2, 2)
    return Templates(order, paths, shape_of(paths), ends)


def is_suggestible(word: str, k: Constants) -> bool:
    """Whether a vocabulary entry is a word or number of bearable length, without control characters.

    Example:
      >>> from keyfed.keyboard.layout import constants
      >>> [is_suggestible(w, constants()) for w in ("it's", "42", "...", "a\\x1b[31m", "a" * 41)]
      [True, True, False, False, False]
    """
    return len(word) <= k.longest_word and is_wordlike(word) and not has_control(word)


class KeyboardLexicon:
    """Words with their tree and the letters typed against it.

    Attributes:
      words: as they are written.
      keys: folded.
      ids: number of each word in the vocabulary, ascending, [words].
    """

    def __init__(self, words: Sequence[str], ids: Sequence[int], layout: KeyLayout, k: Constants) -> None:
        self.words = tuple(words)
        self.keys = tuple(map(fold, words))
        self.ids: NDArray[np.intp] = np.array(ids, np.intp)
        self._layout, self._k = layout, k
        self._speller = Speller(build_trie(self.words), layout, k)
        self._states = [self._speller.start()]
        self._pressed: list[tuple[str, Point | None]] = []

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def place(self) -> dict[str, int]:
        """Place of each folded word: the one spelt exactly so, else the first."""
        first = {key: i for i, key in reversed(list(enumerate(self.keys)))}
        return first | {key: i for i, key in enumerate(self.keys) if self.words[i] == key}

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """Places of all words that fold to each key."""
        found: dict[str, list[int]] = {}
        for i, key in enumerate(self.keys):
            found.setdefault(key, []).append(i)
        return found

    @cached_property
    def templates(self) -> Templates:
        """Swipe paths of the words; made when the first swipe comes."""
        return templates_of(self.keys, self._layout, self._k)

    def typing(self, typed: str, taps: Sequence[Point | None]) -> Typing:
        """Return the costs of a typed word; what it shares with the last one asked for is not computed again."""
        pressed = [(c, taps[i] if i < len(taps) else None) for i, c in enumerate(typed)]
        same = 0
        while same < min(len(pressed), len(self._pressed)) and pressed[same] == self._pressed[same]:
            same += 1
        del self._states[same + 1 :]
        for c, tap in pressed[same:]:
            self._states.append(self._states[-1].key(c, tap))
        self._pressed = pressed
        return self._states[-1]

    def outside(self, keys: Collection[str]) -> NDArray[np.bool_]:
        """Return which words do not fold to one of `keys`, [words]."""
        found = np.ones(len(self.words), np.bool_)
        for key in keys:
            found[self.places.get(key, [])] = False
        return found
