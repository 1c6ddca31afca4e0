"""Messages from outside: whatever the bytes, they are read as they were meant, or refused with a reason."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.wire.messages import Rejected, digest_of, pack, read_tensors, shapes_of, unpack
from tests.examples import examples

PARAMS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([1.5, -2.0])}
WHOLE = pack({"run": "r", "round": 3}, PARAMS)
EXPECTED = shapes_of(PARAMS)


def test_a_message_is_read_as_it_was_written():
    received = unpack(WHOLE)
    assert received.head == {"run": "r", "round": 3}
    read = read_tensors(received.tensors, EXPECTED)
    assert list(read) == list(PARAMS)
    assert all(torch.equal(read[name], p) for name, p in PARAMS.items())
    assert digest_of(read) == digest_of(PARAMS)


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_a_number_only(place, by):
    data = bytearray(WHOLE)
    data[place] ^= by
    try:
        received = unpack(bytes(data))
        read = read_tensors(received.tensors, EXPECTED)
    except Rejected:
        return
    assert {name: (tuple(p.shape), p.dtype) for name, p in read.items()} == EXPECTED


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: WHOLE[:8] + tail))
def test_any_bytes_are_refused(data):
    with pytest.raises(Rejected):
        read_tensors(unpack(data).tensors, EXPECTED)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_cut_message_is_refused(length):
    with pytest.raises(Rejected):
        read_tensors(unpack(WHOLE[:length]).tensors, EXPECTED)


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "header",
    [
        b'{"a.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[8,56]},'
        b'"b":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}}',
        b'{"a.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[8,56]},"b":{"dtype":"F32","shape":[2]}}',
        b'{"a.weight":1,"b":2}',
        b'{"a.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[8,56]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}',
        b"[" * 100_000,
        b"{" + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % k for k in range(10_000)) + b"}",
    ],
    ids=["overlap", "u64 shape", "no offsets", "no objects", "NaN", "deep", "many entries"],
)
def test_a_hostile_header_is_refused(header):
    with pytest.raises(Rejected):
        read_tensors(safetensors(header, bytes(56)), EXPECTED)


def test_a_header_that_claims_to_be_gigantic_is_refused_before_it_is_read():
    with pytest.raises(Rejected, match="header"):
        read_tensors(struct.pack("<Q", 2**63) + b"{}", EXPECTED)


def test_numbers_that_are_not_finite_cannot_be_sent():
    with pytest.raises(ValueError, match="JSON"):
        pack({"loss": float("nan")})
