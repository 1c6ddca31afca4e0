"""Dealing out by numbers: many authors at once as one by one."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.text import partition as partition_module
from keyfed.text.partition import TENTHS, LineIndex, _owners, _three_parts
from keyfed.text.ragged import Ragged, blocks, bounds_of, ranges


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_all_authors_are_cut_at_once_as_each_would_be_alone(monkeypatch, block):
    monkeypatch.setattr(partition_module, "BLOCK", block)
    rng = np.random.default_rng(3)
    sizes = [rng.integers(1, 30, rng.integers(1, 60)) for _ in range(300)]
    first = bounds_of(np.array([len(s) for s in sizes]))
    index = LineIndex("toy", [str(k) for k in range(300)], first, np.concatenate(sizes), True)
    for shares in (TENTHS, (0.9, 0.1, 0.0), (0.9, 0.0, 0.1)):
        alone = [np.bincount(_owners(s, shares), minlength=3).tolist() for s in sizes]
        assert _three_parts(index, shares).tolist() == alone


def test_ragged_lists_are_lists():
    lists = [[3, 1], [], [4, 1, 5], [9], []]
    ragged = Ragged.of(lists)
    assert [ragged[k].tolist() for k in range(5)] == lists
    assert ragged.counts().tolist() == [2, 0, 3, 1, 0]
    some = ragged.take(np.array([3, 1, 0]))
    assert [some[k].tolist() for k in range(3)] == [[9], [], [3, 1]]
    assert ranges(np.array([5, 0]), np.array([0, 0])).tolist() == []
    assert len(Ragged.of([])) == 0
    for most in (1, 2, 3, 100):
        found = list(blocks(ragged.bounds, most))
        assert [k for block in found for k in range(block.start, block.stop)] == list(range(5))
