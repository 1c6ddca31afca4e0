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

The trie lies in arrays, breadth first. Node 0 is the root; the nodes of a depth lie side by side, ordered by parent and
letter, so that a quantity that a node takes over from its parent is computed for a whole depth at once.

References:
  Damerau, *A technique for computer detection and correction of spelling errors*, CACM 7(3), 1964.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.layout import Constants, KeyLayout, Point, base_letter, fold

Index = NDArray[np.intp]


@dataclass(frozen=True)
class Trie:
    """A tree of letters.

    Attributes:
      alphabet: characters in use, ascending.
      parent: of each node, [nodes]; the root is its own.
      char: letter of each node as its place in the alphabet, [nodes]; the root has one of its own, behind the last.
      first: first node of each depth and, at the end, the number of nodes, [depths + 1].
      node: of each word, [words]; words that are spelt alike share one.
    """

    alphabet: str
    parent: Index
    char: NDArray[np.int16]
    first: tuple[int, ...]
    node: Index

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def grandparent(self) -> Index:
        """Parent's parent of each node."""
        return self.parent[self.parent]

    @cached_property
    def above(self) -> NDArray[np.int16]:
        """Letter of each node's parent."""
        return self.char[self.parent]

    @cached_property
    def levels(self) -> tuple[tuple[slice, Index], ...]:
        """For each depth from 1: its nodes and their parents."""
        bounds = pairwise(self.first[1:])
        return tuple((slice(start, stop), self.parent[start:stop]) for start, stop in bounds)

    @cached_property
    def word_parent(self) -> Index:
        """Node above each word's own."""
        return self.parent[self.node]

    def find(self, word: str) -> int | None:
        """Return the node a (folded) word ends at, or None where the tree has no such path."""
        at = 0
        for c in word:
            code = self.alphabet.find(c)
            if code < 0:
                return None
            at = self._children.get((at, code), -1)
            if at < 0:
                return None
        return at

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parent[1:].tolist(), self.char[1:].tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs, 1)}


def build_trie(words: Sequence[str]) -> Trie:
    """Build the tree of words; each is folded first (lower case, plain apostrophes).

    Example:
      >>> trie = build_trie(["to", "Tea", "ten"])
      >>> trie.alphabet, trie.parent.tolist(), trie.first, trie.node.tolist()
      ('aenot', [0, 0, 1, 1, 2, 2], (0, 1, 2, 4, 6), [3, 4, 5])
    """
    folded = [fold(word) for word in words]
    alphabet = "".join(sorted(set().union(*folded)))
    code = {c: i for i, c in enumerate(alphabet)}
    lengths = np.array([len(word) for word in folded], np.intp)
    deepest = int(lengths.max(initial=0))
    letters = np.zeros((len(words), deepest), np.intp)
    for row, word in zip(letters, folded, strict=True):
        row[: len(word)] = [code[c] for c in word]

    at = np.zeros(len(words), np.intp)  # node each word has reached
    parents, chars, first = [np.zeros(1, np.intp)], [np.array([len(alphabet)])], [0, 1]
    for depth in range(deepest):
        going = np.flatnonzero(lengths > depth)
        keys, inverse = np.unique(at[going] * len(alphabet) + letters[going, depth], return_inverse=True)
        parents.append(keys // len(alphabet))
        chars.append(keys % len(alphabet))
        at[going] = first[-1] + inverse
        first.append(first[-1] + len(keys))
    return Trie(alphabet, np.concatenate(parents), np.concatenate(chars).astype(np.int16), tuple(first), at)


Floats = NDArray[np.float64]


class Speller:
    """A lexicon's tree on a keyboard layout: starts and continues rows.

    Attributes:
      trie: the lexicon.
      layout: the keys.
    """

    def __init__(self, trie: Trie, layout: KeyLayout, constants: Constants) -> None:
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
