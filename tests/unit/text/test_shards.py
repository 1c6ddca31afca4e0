"""Streams on disk are the streams that were written."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.errors import DataError
from keyfed.text.ragged import NAME_BOUNDS, PackedNames, ShardWriter, streams_of

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
