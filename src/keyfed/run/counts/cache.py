r"""A person's own cache: words and pairs that this person wrote, old ones fading, weighed for this person alone.

.. math:: p(w \mid h) = (1 - κ)\, p_\text{mixture}(w \mid h) + κ\, p_\text{cache}(w \mid h)

.. math:: p_\text{cache}(w \mid v) = μ \frac{b(v, w)}{B(v)} + (1 - μ) \frac{u(w)}{U}, \qquad μ = \frac{B(v)}{B(v) + 2}

u and b count a word and a pair with weight `DECAY` to the power of the tokens since; U and B are their sums. Only the
`SUPPORT` heaviest words take part, so that a phone stores little. κ has two values, by whether v was followed by a word
before. Each is the share of tokens that the cache explained so far, as EM's posterior says, from a prior of `PRIOR`.

What is `HORIZON` tokens old or older is left out of the pairs: its weight is below the rounding of a sum.

The cache begins with the text that the person trained on. It stays on the device: no sum and no export has it.

References:
  Kuhn and De Mori, *A cache-based natural language model for speech recognition*, 1990.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.model.ngram import Floats, Ints
from keyfed.model.tables import Texts

DECAY = 0.999
SUPPORT = 96
PRIOR = (1.0, 10.0)  # of this many tokens the cache explained so many
HORIZON = 40_000  # DECAY ** HORIZON is 4e-18
CELLS, LONGEST = 1 << 21, 4_096  # numbers, and tokens of one client, that are read at a time; bound the memory


class PersonalCache:
    """Caches of the clients of a text, before every token; the mixture's numbers come in any order (`take`).

    Attributes:
      ids, p: words and probabilities of the cache before each token, [tokens, SUPPORT]; −1 and 0 where it is empty.
      paired: whether the word before each token was followed by a word before.
    """

    def __init__(self, text: Texts, history: Sequence[NDArray[Any]]) -> None:
        """Read the text.

        Args:
          history: what each client wrote before.
        """
        size = text.tokens.size
        self._text = text
        self.ids = np.full((size, SUPPORT), -1, np.int32)
        self.p = np.zeros((size, SUPPORT), np.float32)
        self.paired = np.zeros(size, np.bool_)
        self._mixed = np.zeros((size, SUPPORT), np.float32)
        self._others = np.zeros((size, 3), np.float32)
        self._bounds = np.searchsorted(text.client, np.arange(len(history) + 1))
        for own, (begin, end) in zip(history, pairwise(self._bounds.tolist()), strict=True):
            if end - begin > 1:  # the first token of a client is not predicted
                self._read(np.asarray(own).astype(np.int64), begin, end)

    def _read(self, history: Ints, begin: int, end: int) -> None:
        """Fill in the cache before each token of one client; the first one is a context only."""
        tokens = self._text.tokens[begin:end]
        local, word = np.unique(np.concatenate([history, tokens[1:]]), return_inverse=True)
        before = np.concatenate([np.append(np.array([-1]), history)[: history.size], tokens[:-1]])
        follow = Followers(before)
        first = history.size
        for a, b in _blocks(local.size + follow.count[first:]):
            p, paired = _cache_before(word, follow, first + a, first + b, local.size)
            chosen = np.arange(local.size)[None]
            if local.size > SUPPORT:
                chosen = np.argpartition(p, local.size - SUPPORT, axis=1)[:, local.size - SUPPORT :]
                p = np.take_along_axis(p, chosen, 1)
            at = slice(begin + 1 + a, begin + 1 + b)
            self.ids[at, : p.shape[1]] = np.where(p > 0, local[chosen], -1)
            self.p[at, : p.shape[1]] = p / np.maximum(p.sum(1, keepdims=True), np.finfo(np.float64).tiny)
            self.paired[at] = paired

    def take(self, places: Ints, mixed: Tensor, true: Tensor) -> Ints:
        """Take the mixture's distribution before some tokens; what is not needed of it is lost.

        Args:
          mixed: [places, V]; overwritten.
          true: of the token that comes, [places, 1].

        Returns:
          How many words are more probable than the token: exact up to 2.
        """
        ids = torch.from_numpy(self.ids[places].astype(np.int64)).to(mixed.device)
        real = ids >= 0
        inside = mixed.gather(1, ids.clamp_min(0)).masked_fill_(~real, -1.0)
        flat = ids + torch.arange(len(places), device=mixed.device)[:, None] * mixed.shape[1]
        mixed.view(-1).index_fill_(0, flat[real], -1.0)
        others = mixed.topk(3, 1).values
        self._mixed[places], self._others[places] = inside.cpu().numpy(), others.cpu().numpy()
        above: Ints = ((inside > true).sum(1) + (others > true).sum(1)).cpu().numpy()
        return above

    def weighed(self, nats: Floats) -> tuple[Floats, Ints]:
        """Return nats and rank (up to 3) of every token under the mixture with the cache.

        Args:
          nats: of the mixture, at every token.
        """
        text = self._text
        own = np.exp(-nats)
        in_cache = np.where(self.ids == text.tokens[:, None], self.p, 0).sum(1)
        kappa = self._kappa(own, in_cache)
        true = kappa * in_cache + (1 - kappa) * own
        share = kappa[:, None]
        inside = (1 - share) * self._mixed + share * self.p
        above = (self.ids >= 0) & (self.ids != text.tokens[:, None]) & (inside > true[:, None])
        rank = above.sum(1) + ((1 - share) * self._others > true[:, None] * (1 + 1e-6)).sum(1)
        return -np.log(true), rank

    def _kappa(self, own: Floats, in_cache: Floats) -> Floats:
        """Return κ before every token: all clients' first tokens together, then their second ones, and so on."""
        kappa = np.zeros(own.size)
        filled = np.asarray(self.ids.max(1, initial=-1) >= 0)
        length = np.maximum(np.diff(self._bounds) - 1, 0)
        longest_first = np.argsort(-length, kind="stable")
        starts, length = self._bounds[longest_first] + 1, length[longest_first]
        explained, tokens = (np.full((length.size, 2), number) for number in PRIOR)
        for step in range(int(length.max(initial=0))):
            rows = np.arange(np.searchsorted(-length, -step))  # of more tokens than these
            at = starts[rows] + step
            which = self.paired[at].astype(np.int64)
            k = np.where(filled[at], explained[rows, which] / tokens[rows, which], 0.0)
            kappa[at] = k
            by_cache = k * in_cache[at]
            explained[rows, which] += by_cache / (by_cache + (1 - k) * own[at])
            tokens[rows, which] += k > 0
        return kappa


class Followers:
    """Which words followed each word of one client's text.

    Attributes:
      before: the word before each word, −1 where there is none.
      count: earlier words, at most `HORIZON` back, that had the same word before them.
    """

    def __init__(self, before: Ints) -> None:
        self.before = before
        self._order = np.argsort(before, kind="stable")
        groups = before[self._order]
        self._rank = np.empty(before.size, np.int64)
        self._rank[self._order] = np.arange(before.size)
        oldest = np.maximum(np.arange(before.size) - HORIZON, 0)
        both = groups * before.size + self._order  # ascending
        begin = np.searchsorted(both, before * before.size + oldest)
        self.count = np.where(before >= 0, self._rank - begin, 0)

    def earlier(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """Return (row, word number) for every earlier follower of the words begin … end − 1, counted from begin."""
        count = self.count[begin:end]
        row = np.repeat(np.arange(count.size), count)
        offset = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        return row, self._order[(self._rank[begin:end] - count)[row] + offset]


def _blocks(cost: Ints) -> Iterator[tuple[int, int]]:
    """Cut words into blocks that are read at a time."""
    begin, ends = 0, np.cumsum(cost)
    while begin < cost.size:
        spent = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, spent + CELLS, side="right"))
        end = min(max(end, begin + 1), begin + LONGEST)
        yield begin, end
        begin = end


def _cache_before(word: Ints, follow: Followers, begin: int, end: int, size: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return p_cache before the words begin … end − 1 of a client, [words, size], and whether pairs took part."""
    rows = np.arange(end - begin)
    u = np.zeros((rows.size, size))
    u[0] = np.bincount(word[:begin], DECAY ** np.arange(begin, 0, -1), size)
    u[rows[1:], word[begin : end - 1]] += DECAY ** -rows[:-1].astype(np.float64)  # relative to the block's beginning
    np.cumsum(u, axis=0, out=u)
    p = u / np.maximum(u.sum(1, keepdims=True), np.finfo(np.float64).tiny)
    row, place = follow.earlier(begin, end)
    age = begin + row - place
    b = np.bincount(row * size + word[place], DECAY**age, rows.size * size).reshape(rows.size, size)
    total = b.sum(1, keepdims=True)
    mu = total / (total + 2)
    paired = follow.count[begin:end] > 0
    p = np.where(paired[:, None], (1 - mu) * p + mu * b / np.maximum(total, np.finfo(np.float64).tiny), p)
    return p, paired
