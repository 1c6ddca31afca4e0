r"""What the letters typed so far cost against every word and every beginning of a word: one row a keystroke.

Weighted Damerau–Levenshtein over a trie. With :math:`t_1 … t_i` typed, :math:`c_n` the letter of node n and
:math:`\uparrow n` its parent,

.. math::
   D_0[n] = D_0[\uparrow n] + \mathrm{miss}(n), \qquad D_i[\mathrm{root}] = D_{i-1}[\mathrm{root}] + \mathrm{extra}_i

.. math::
   D_i[n] = \min\begin{cases}
     D_{i-1}[\uparrow n] + \mathrm{sub}_i(c_n) & t_i \text{ stands for } c_n\\
     D_{i-1}[n] + \mathrm{extra}_i & t_i \text{ is superfluous}\\
     D_i[\uparrow n] + \mathrm{miss}(n) & c_n \text{ was not typed}\\
     D_{i-2}[\uparrow\uparrow n] + \mathrm{swap} & t_i = c_{\uparrow n},\ t_{i-1} = c_n
   \end{cases}

:math:`D_i[n]` is the cost of the whole word at n, :math:`P_i[n] = \min(D_i[n], P_i[\uparrow n])` the cheapest
beginning of it. Exact: nothing is pruned. Only the third line looks inside the same row, so a row is a few operations
on all nodes and one short pass over the depths.

References:
  Damerau, *A technique for computer detection and correction of spelling errors*, CACM 7(3), 1964.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.layout import Layout, Point, base_letter, fold
from keyfed.keyboard.tables import Constants
from keyfed.keyboard.trie import Trie

Floats = NDArray[np.float64]


class Speller:
    """A lexicon's tree on a keyboard layout: starts and continues rows.

    Attributes:
      trie: the lexicon.
      layout: the keys.
    """

    def __init__(self, trie: Trie, layout: Layout, constants: Constants) -> None:
        self.trie = trie
        self.layout = layout
        self._k = constants
        self._plain: dict[str, Floats] = {}
        marks = np.array([*(c in constants.marks for c in trie.alphabet), False])
        miss = np.where(marks[trie.char], constants.miss_mark, constants.miss)
        miss[(trie.char == trie.above) & ~marks[trie.char]] = constants.miss_double
        miss[0] = 0.0
        self._miss = miss
        centres = [layout.centre(c) for c in trie.alphabet]
        self._centres = np.array([p or (np.nan, np.nan) for p in centres]).reshape(-1, 2)

    def start(self) -> Typing:
        """Return the state before the first letter."""
        row = np.zeros(len(self.trie))
        for nodes, above in self.trie.levels:
            row[nodes] = row[above] + self._miss[nodes]
        return Typing(self, (), None, row)

    def spell(self, word: str, taps: Sequence[Point | None] = ()) -> Typing:
        """Return the state after a whole word, letter by letter; `taps` are where the fingers came down."""
        state = self.start()
        for i, c in enumerate(word):
            state = state.key(c, taps[i] if i < len(taps) else None)
        return state

    def row(self, before: Typing, t: str, tap: Point | None) -> Floats:
        """Return D_i after D_{i−1} and D_{i−2} (module docstring)."""
        k, trie = self._k, self.trie
        doubled = bool(before.typed) and before.typed[-1] == t
        extra = k.extra_double if doubled else k.extra
        row = before.row[trie.parent]
        row += self.substitution(t, tap)[trie.char]
        np.minimum(row, before.row + extra, out=row)
        if before.before is not None:
            self._swap(row, before.before.row, before.typed[-1], t)
        row[0] = before.row[0] + extra
        for nodes, above in trie.levels:
            own = row[nodes]
            np.minimum(own, row[above] + self._miss[nodes], out=own)
        return row

    def _swap(self, row: Floats, two_before: Floats, earlier: str, t: str) -> None:
        first, second = self.trie.alphabet.find(t), self.trie.alphabet.find(earlier)
        if first < 0 or second < 0:
            return
        nodes = np.flatnonzero((self.trie.char == second) & (self.trie.above == first))
        row[nodes] = np.minimum(row[nodes], two_before[self.trie.grandparent[nodes]] + self._k.swap)

    def substitution(self, t: str, tap: Point | None) -> Floats:
        """Return sub(c) of typing t for every character of the alphabet, and for the root: [characters + 1]."""
        key = self.layout.centre(t)
        if tap is None or key is None:
            if t not in self._plain:
                self._plain[t] = np.array([*(self._without_tap(t, c) for c in self.trie.alphabet), np.inf])
            return self._plain[t]
        k = self._k
        at, hit = np.array(tap), np.array(key)
        squared = k.tap_weight * ((self._centres - at) ** 2).sum(-1)
        cost = np.maximum(0.0, squared - k.tap_weight * ((hit - at) ** 2).sum())
        cost = np.where(np.isnan(cost), k.sub_far, np.minimum(cost, k.sub_far))
        return np.append(cost, np.inf)

    def _without_tap(self, t: str, c: str) -> float:
        k = self._k
        if t == c:
            return 0.0
        if base_letter(t) == base_letter(c):
            return k.accent
        distance = self.layout.distance(t, c)
        return k.sub_far if distance is None else min(k.sub_far, k.sub_near * distance)


@dataclass(frozen=True, eq=False)
class Typing:
    """Letters typed so far and what they cost; never changed, so that a backspace is `before`.

    Attributes:
      typed: the letters, folded.
      before: the state before the last one; None before the first.
      row: D_i, [nodes].
    """

    speller: Speller
    typed: tuple[str, ...]
    before: Typing | None
    row: Floats

    def key(self, t: str, tap: Point | None = None) -> Typing:
        """Return the state after one more character."""
        t = fold(t)
        return Typing(self.speller, (*self.typed, t), self, self.speller.row(self, t, tap))

    @cached_property
    def beginnings(self) -> Floats:
        """P_i: cheapest beginning of each node, [nodes]."""
        best = self.row.copy()
        for nodes, above in self.speller.trie.levels:
            own = best[nodes]
            np.minimum(own, best[above], out=own)
        return best

    @cached_property
    def full(self) -> Floats:
        """F: cost of each word as a whole, [words]."""
        return self.row[self.speller.trie.node]

    @cached_property
    def completion(self) -> Floats:
        """C: cost of each word's cheapest true beginning, [words]."""
        return self.beginnings[self.speller.trie.word_parent]
