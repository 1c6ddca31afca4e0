"""The words a keyboard can suggest: their tree, their places in the vocabulary, their swipe paths."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.context import has_control, is_wordlike
from keyfed.keyboard.gesture import Templates, templates_of
from keyfed.keyboard.layout import Layout, Point, fold
from keyfed.keyboard.tables import Constants
from keyfed.keyboard.trie import build_trie
from keyfed.keyboard.typed import Speller, Typing


def is_suggestible(word: str, k: Constants) -> bool:
    """Whether a vocabulary entry is a word or number of bearable length, without control characters.

    Example:
      >>> from keyfed.keyboard.tables import constants
      >>> [is_suggestible(w, constants()) for w in ("it's", "42", "...", "a\\x1b[31m", "a" * 41)]
      [True, True, False, False, False]
    """
    return len(word) <= k.longest_word and is_wordlike(word) and not has_control(word)


class Lexicon:
    """Words with their tree and the letters typed against it.

    Attributes:
      words: as they are written.
      keys: folded.
      ids: number of each word in the vocabulary, ascending, [words].
    """

    def __init__(self, words: Sequence[str], ids: Sequence[int], layout: Layout, k: Constants) -> None:
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
