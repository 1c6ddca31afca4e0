"""Streams on disk are the streams that were written."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.errors import DataError
from keyfed.text.ragged import NAME_BOUNDS, PackedNames, Ragged, ShardWriter, blocks, ranges, streams_of

STREAMS = {"ann": [5, 6, 2], "Zoë 😀": [], "": [7, 2], "last": [2]}


@pytest.fixture
def shard(tmp_path):
    with ShardWriter(tmp_path / "shard") as writer:
        for name, ids in STREAMS.items():
            writer.add(name, np.array(ids, np.int32))
    return tmp_path / "shard"


def test_what_is_written_is_read(shard):
    assert {name: ids.tolist() for name, ids in streams_of(shard)} == STREAMS


def test_packed_names_are_a_sequence(shard):
    names, plain = PackedNames(shard), tuple(STREAMS)
    assert tuple(names) == plain
    assert names[1:3] == plain[1:3]
    assert names[-1] == "last"
    assert names.index("ann") == 0
    assert "nobody" not in names
    with pytest.raises(IndexError):
        names[4]


def test_a_shard_without_streams_can_be_opened(tmp_path):
    with ShardWriter(tmp_path / "none"):
        pass
    assert list(streams_of(tmp_path / "none")) == []


def test_half_a_shard_is_refused(shard):
    (shard / NAME_BOUNDS).unlink()
    with pytest.raises(DataError, match="not a whole shard"):
        PackedNames(shard)


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
