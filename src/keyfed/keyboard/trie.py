"""All words of a lexicon as one tree of letters, in arrays, breadth first.

Node 0 is the root; the nodes of a depth lie side by side, ordered by parent and letter, so that a quantity that a node
takes over from its parent is computed for a whole depth at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.layout import fold

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
