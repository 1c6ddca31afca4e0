r"""The words a keyboard can suggest: what the letters typed so far and a swipe cost against every one of them.

Letters: weighted Damerau–Levenshtein over a trie. With :math:`t_1 … t_i` typed, :math:`c_n` the letter of node n and
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

The trie lies in arrays, breadth first. Node 0 is the root. The nodes of a depth lie side by side, ordered by parent and
letter: what a node takes over from its parent is computed for a whole depth at once.

A swipe is decoded against the path of every word (after SHARK²). A word's template is the polyline through its keys, a
swipe the polyline of its points; both are resampled to 32 points at equal distances. With :math:`x_i` the swipe's
points and :math:`y_i` the template's,

.. math::
   \mathrm{location} = \frac1{32}\sum_i |x_i - y_i|, \qquad
   \mathrm{score}(w) = g_m \log p(w) - g_l\, \mathrm{location}^2 - g_s\, \mathrm{shape}^2

where shape is the same mean after both paths were centred and scaled to their larger side (at least one key). Only
words whose first and last key lie near the two ends are looked at.

References:
  Damerau, *A technique for computer detection and correction of spelling errors*, CACM 7(3), 1964.
  Kristensson & Zhai, *SHARK²: a large vocabulary shorthand writing system for pen-based computers*, UIST 2004.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from keyfed.keyboard.context import Constants, KeyLayout, Point, base_letter, fold, has_control, is_wordlike

Index = NDArray[np.intp]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trie:
    """A tree of letters."""

    alphabet: str  # characters in use, ascending
    parent: Index  # of each node, [nodes]; the root is its own
    char: NDArray[np.int16]  # each node's letter, a place in the alphabet, [nodes]; the root's is behind the last
    first: tuple[int, ...]  # first node of each depth and, at the end, the number of nodes, [depths + 1]
    node: Index  # of each word, [words]; words that are spelt alike share one

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


class Speller:
    """A lexicon's tree on a keyboard layout: starts and continues rows."""

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
    """Letters typed so far and what they cost; never changed, so that a backspace is `before`."""

    speller: Speller
    typed: tuple[str, ...]  # the letters, folded
    before: Typing | None  # the state before the last one; None before the first
    row: Floats  # D_i, [nodes]

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


def keys_of(word: str, layout: KeyLayout) -> list[Point]:
    """Return the centres of a word's keys; characters without a key are skipped, equal successive keys counted once."""
    found = [p for p in map(layout.centre, word) if p is not None]
    return [p for i, p in enumerate(found) if i == 0 or p != found[i - 1]]


def resample(paths: Floats, n: int) -> Floats:
    """Return n points at equal distances on each polyline, [paths, points, 2] → [paths, n, 2].

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
    """Paths of the words that can be swiped: at least two different keys."""

    word: Index  # place of each in the list of words, [templates]
    paths: Floats  # [templates, points, 2]
    shapes: Floats  # the same, centred and scaled
    ends: Floats  # first and last key, [templates, 2, 2]

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
      >>> from keyfed.keyboard.context import constants
      >>> [is_suggestible(w, constants()) for w in ("it's", "42", "...", "a\\x1b[31m", "a" * 41)]
      [True, True, False, False, False]
    """
    return len(word) <= k.longest_word and is_wordlike(word) and not has_control(word)


class KeyboardLexicon:
    """Words with their tree and the letters typed against it."""

    def __init__(self, words: Sequence[str], ids: Sequence[int], layout: KeyLayout, k: Constants) -> None:
        self.words = tuple(words)  # as they are written
        self.keys = tuple(map(fold, words))
        self.ids: Index = np.array(ids, np.intp)  # number of each word in the vocabulary, ascending, [words]
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
        """Return the costs of a typed word; what it shares with the one before is not computed again."""
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
