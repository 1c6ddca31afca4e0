r"""A person's own cache: words and pairs that this person wrote, old ones fading, weighed for this person alone.

.. math:: p(w \mid h) = (1 - κ)\, p_\text{mixture}(w \mid h) + κ\, p_\text{cache}(w \mid h)

.. math:: p_\text{cache}(w \mid v) = μ \frac{b(v, w)}{B(v)} + (1 - μ) \frac{u(w)}{U}, \qquad μ = \frac{B(v)}{B(v) + 2}

u and b count a word and a pair with weight `DECAY` to the power of the tokens since; U and B are their sums. Only the
`SUPPORT` heaviest words take part, so that a phone stores little. κ has two values, by whether v was followed by a word
before. Each is the share of tokens that the cache explained so far, as EM's posterior says, from a prior of `PRIOR`.

The cache begins with the text that the person trained on. It stays on the device: no sum and no export has it.

References:
  Kuhn and De Mori, *A cache-based natural language model for speech recognition*, 1990.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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


class PersonalCache:
    """Caches of the clients of a text, read token by token; the mixture's numbers come in any order (`take`).

    Attributes:
      ids, p: words and probabilities of the cache before each token, [tokens, SUPPORT]; −1 and 0 where it is empty.
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
        bounds = np.searchsorted(text.client, np.arange(len(history) + 1))
        for own, a, b in zip(history, bounds[:-1], bounds[1:], strict=True):
            self._read(np.asarray(own).astype(np.int64), a, b)

    def _read(self, history: Ints, begin: int, end: int) -> None:
        """Fill in the cache before each token of one client."""
        words = np.concatenate([history, self._text.tokens[begin:end]])
        local, number = np.unique(words, return_inverse=True)
        u, growth = np.zeros(local.size), 1.0 / DECAY
        pairs: dict[int, dict[int, float]] = defaultdict(dict)
        weight, before = 1.0, -1
        for at, word in enumerate(number.tolist()):
            place = at - history.size
            if place >= 0 and self._text.predicted[begin + place]:
                self._fill(begin + place, local, u, pairs.get(before), weight)
            elif place >= 0:
                before = word  # a line or a stream begins here
                continue
            u[word] += weight
            if before >= 0:
                followers = pairs[before]
                followers[word] = followers.get(word, 0.0) + weight
            before = word
            weight *= growth
            if weight > 1e200:
                u /= weight
                pairs = defaultdict(dict, {v: {w: x / weight for w, x in f.items()} for v, f in pairs.items()})
                weight = 1.0

    def _fill(self, at: int, local: Ints, u: Floats, followers: dict[int, float] | None, weight: float) -> None:
        total = u.sum()
        if total <= 0:
            return
        p = u / total
        if followers:
            own = np.fromiter(followers.keys(), np.int64, len(followers))
            often = np.fromiter(followers.values(), np.float64, len(followers)) / weight
            sum_of = often.sum()
            share = sum_of / (sum_of + 2)
            p *= 1 - share
            p[own] += share * often / sum_of
            self.paired[at] = True
        chosen = np.argpartition(-p, SUPPORT)[:SUPPORT] if p.size > SUPPORT else np.flatnonzero(p > 0)
        kept = p[chosen]
        self.ids[at, : chosen.size] = local[chosen]
        self.p[at, : chosen.size] = kept / kept.sum()

    def take(self, places: Ints, mixed: Tensor) -> None:
        """Take the mixture's distribution before some tokens: what is needed of it, [places, V]."""
        ids = torch.from_numpy(np.maximum(self.ids[places], 0).astype(np.int64))
        self._mixed[places] = mixed.gather(1, ids).numpy()
        rest = mixed.clone()
        real = torch.from_numpy(self.ids[places] >= 0)
        rows = torch.arange(len(places))[:, None].expand_as(ids)
        rest[rows[real], ids[real]] = -1.0
        self._others[places] = rest.topk(3, 1).values.numpy()

    def weighed(self, nats: Floats) -> tuple[Floats, Ints]:
        """Return nats and rank (up to 3) of every token under the mixture with the cache.

        Args:
          nats: of the mixture, at every token.
        """
        text = self._text
        own = np.exp(-nats)
        in_cache = np.where(self.ids == text.tokens[:, None], self.p, 0).sum(1)
        kappa = np.zeros(text.tokens.size)
        client = -1
        for at in np.flatnonzero(text.predicted).tolist():
            if text.client[at] != client:
                client = text.client[at]
                explained, tokens = [PRIOR[0]] * 2, [PRIOR[1]] * 2
            which = int(self.paired[at])
            k = explained[which] / tokens[which] if self.ids[at, 0] >= 0 else 0.0
            kappa[at] = k
            both = k * in_cache[at] + (1 - k) * own[at]
            if k:
                explained[which] += k * in_cache[at] / both
                tokens[which] += 1
        true = kappa * in_cache + (1 - kappa) * own
        share = kappa[:, None]
        inside = (1 - share) * self._mixed + share * self.p
        above = (self.ids >= 0) & (self.ids != text.tokens[:, None]) & (inside > true[:, None])
        rank = above.sum(1) + ((1 - share) * self._others > true[:, None] * (1 + 1e-6)).sum(1)
        return -np.log(true), rank
