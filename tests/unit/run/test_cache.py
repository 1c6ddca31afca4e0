"""A person's own cache: what many clients are read as together is what each would read token by token."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.model.tables import texts_of
from keyfed.run.counts import cache
from keyfed.run.counts.cache import DECAY, PRIOR, PersonalCache

V, END = 30, 2
words = st.lists(st.integers(3, 9), max_size=25)


def by_hand(history, tokens):
    """Yield p_cache before each token but the first, and whether a pair took part: the equations, one by one."""
    events = [(None if n == 0 else history[n - 1], word) for n, word in enumerate(history)]
    for before, word in pairwise(tokens):
        u, b = Counter(), Counter()
        for age, (earlier, follower) in enumerate(reversed(events), 1):
            u[follower] += DECAY**age
            if earlier == before:
                b[follower] += DECAY**age
        mu = b.total() / (b.total() + 2)
        p = {w: mu * b[w] / (b.total() or 1) + (1 - mu) * u[w] / u.total() for w in u}
        yield p, bool(b)
        events.append((before, word))


def weighed_by_hand(read, own):
    """Return p of one client's tokens under the mixture with the cache."""
    explained, tokens = {False: PRIOR[0], True: PRIOR[0]}, {False: PRIOR[1], True: PRIOR[1]}
    for (p, paired), word, mixed in zip(*read, own, strict=True):
        kappa = explained[paired] / tokens[paired] if p else 0.0
        both = kappa * p.get(word, 0) + (1 - kappa) * mixed
        yield both
        if p:
            explained[paired] += kappa * p.get(word, 0) / both
            tokens[paired] += 1


@pytest.mark.parametrize("cells", [1 << 21, 40], ids=["at a time", "in blocks"])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_it_is_the_cache_of_each_client_alone(cells, clients):
    before, cache.CELLS = cache.CELLS, cells
    try:
        _each_client_alone([h for h, _ in clients], [t for _, t in clients])
    finally:
        cache.CELLS = before


def _each_client_alone(histories, texts):
    text = texts_of([np.array(own, np.int32) for own in texts], END)
    found = PersonalCache(text, [np.array(own, np.int32) for own in histories])
    mixed = torch.rand(text.tokens.size, V, generator=torch.Generator().manual_seed(1)).softmax(-1)
    true = mixed.gather(1, torch.from_numpy(text.tokens)[:, None])
    places = np.flatnonzero(text.predicted)
    rank = found.take(places, mixed[places], true[places])
    assert rank.clip(max=2).tolist() == (mixed > true).sum(1)[places].clamp(max=2).tolist()
    nats = found.weighed(-np.log(true[:, 0].double().numpy()))[0]
    at = 0
    for history, own in zip(histories, texts, strict=True):
        tokens = [END, *own] if own else []
        read = list(by_hand(history, tokens))
        for n, (p, paired) in enumerate(read, at + 1):
            there = found.ids[n] >= 0
            cached = dict(zip(found.ids[n][there].tolist(), found.p[n][there].tolist(), strict=True))
            assert cached == pytest.approx(p, rel=1e-5)
            assert found.paired[n] == paired
        expected = weighed_by_hand((read, own), true[at + 1 : at + 1 + len(own), 0].tolist())
        assert np.exp(-nats[at + 1 : at + 1 + len(own)]) == pytest.approx(list(expected), rel=1e-5)
        at += len(tokens)


def test_only_the_heaviest_words_take_part():
    """Of 200 words written in order the last `SUPPORT` are heaviest."""
    text = texts_of([np.array([7], np.int32)], END)
    found = PersonalCache(text, [np.arange(3, 203)])
    assert sorted(found.ids[1].tolist()) == list(range(203 - cache.SUPPORT, 203))
    assert found.p[1].sum() == pytest.approx(1, rel=1e-6)


def test_pairs_older_than_the_horizon_are_left_out(monkeypatch):
    """The cache of a text is that of its last words, as far as pairs go."""
    monkeypatch.setattr(cache, "HORIZON", 6)
    text = texts_of([np.array([4, 5], np.int32)])
    far, near = (PersonalCache(text, [np.array(own)]) for own in ([4, 8, 9, 9, 9, 9, 9, 9], [4, 8, 9, 9, 9, 9]))
    assert not far.paired[1]
    assert near.paired[1]
