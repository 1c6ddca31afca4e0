"""What travels between server and clients: a small JSON head and, where there are any, tensors as safetensors.

    b"KFM1" | length of the head (4 bytes, little-endian) | head | safetensors

Everything that comes from outside is hostile until checked: lengths and depth are capped before anything is parsed, the
tensors' names, shapes and types are compared with what is expected before they are read, and nothing is ever unpickled.
What is wrong is a `Rejected` with a typed reason; its client is then a drop-out.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load, save

from keyfed.errors import KeyfedError
from keyfed.federated.types import Params, Reason

MAGIC = b"KFM1"
MOST_HEAD = 64 << 20  # bytes of a head; a vocabulary of a million words fits
MOST_TENSOR_HEAD = 1 << 20  # bytes of a safetensors header
DEEPEST = 12  # nesting of a head
LARGEST = 1e300  # of a number in a head
SLACK = 1.2  # a message may be this much longer than what is expected of it
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')  # a string as a whole, or a bracket

Kind = Literal["who", "hello", "train", "upload", "unmask", "bye"]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Rejected(KeyfedError):
    """A message that must not count, with a typed reason; `detail` is for a person."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail


class Received(NamedTuple):
    """A message that was read: its head, and the bytes of its tensors (not looked at yet)."""

    head: dict[str, Any]
    tensors: bytes


def pack(head: Mapping[str, Any], tensors: Params | None = None) -> bytes:
    """Write a message; numbers that are not finite cannot be sent.

    Example:
      >>> unpack(pack({"round": 3})).head
      {'round': 3}
    """
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    body = b"" if tensors is None else save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    return b"".join((MAGIC, struct.pack("<I", len(text)), text, body))


def unpack(message: bytes, most: int | None = None, head: int = MOST_HEAD) -> Received:
    """Read a message's head.

    Args:
      most: bytes beyond which it is not even looked at; None for no limit but the head's own.
      head: bytes that the head may have.
    """
    if most is not None and len(message) > most:
        raise Rejected("too large", f"{len(message):,} bytes; expected at most {most:,}")
    if len(message) < 8 or message[:4] != MAGIC:
        raise Rejected("malformed", "not a message of this protocol")
    (length,) = struct.unpack("<I", message[4:8])
    if length > min(head, len(message) - 8):
        raise Rejected("malformed", f"a head of {length:,} bytes in a message of {len(message):,}")
    return Received(read_json(message[8 : 8 + length]), message[8 + length :])


def read_json(data: bytes) -> dict[str, Any]:
    """Read a JSON object; NaN, Infinity, deep nesting and anything but an object are refused."""

    def refuse(name: str) -> None:
        raise Rejected("malformed", f"{name} in a head; expected finite numbers")

    if _depth(data) > DEEPEST:
        raise Rejected("malformed", f"a head nested deeper than {DEEPEST}")
    try:
        head = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Rejected("malformed", "a head that is no JSON") from None
    if not isinstance(head, dict):
        raise Rejected("malformed", f"a head that is a {type(head).__name__}; expected an object")
    return head


def _depth(data: bytes) -> int:
    """How deeply brackets nest, those inside strings not counted; found without parsing."""
    deepest = depth = 0
    for found in _MARKS.finditer(data):
        mark = data[found.start()]
        if mark in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in b"]}":
            depth -= 1
    return deepest


def shapes_of(params: Params) -> Shapes:
    """What is expected of tensors that are like these."""
    return {name: (tuple(p.shape), p.dtype) for name, p in params.items()}


def most_bytes(expected: Shapes) -> int:
    """Bytes a message with these tensors may have: theirs, a head, and some slack."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected.values())
    return int(SLACK * size) + 4 * MOST_TENSOR_HEAD


def read_tensors(data: bytes, expected: Shapes) -> Params:
    """Read tensors that must have exactly these names, shapes and types; compared before anything is allocated."""
    if len(data) < 8:
        raise Rejected("wrong tensors", f"no tensors; expected {len(expected)}")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(MOST_TENSOR_HEAD, len(data) - 8):
        raise Rejected("malformed", f"a safetensors header of {length:,} bytes")
    described = read_json(data[8 : 8 + length])
    described.pop("__metadata__", None)
    if set(described) != set(expected):
        odd = sorted(set(described) ^ set(expected))[0]
        what = "missing" if odd in expected else "not expected"
        raise Rejected("wrong tensors", f'tensor "{odd[:80]}" is {what}')
    place = 0
    for name, entry in sorted(described.items(), key=lambda item: _place(item[1])):
        shape, dtype = expected[name]
        if not isinstance(entry, dict) or _TYPES.get(str(entry.get("dtype"))) != dtype:
            got = entry.get("dtype") if isinstance(entry, dict) else entry
            raise Rejected("wrong type", f'"{name}" is {str(got)[:20]}; expected {dtype}')
        if entry.get("shape") != list(shape):
            raise Rejected("wrong shape", f'"{name}" is {str(entry.get("shape"))[:60]}; expected {list(shape)}')
        end = place + math.prod(shape) * dtype.itemsize
        if entry.get("data_offsets") != [place, end]:
            raise Rejected("malformed", f'"{name}" lies at {str(entry.get("data_offsets"))[:60]}')
        place = end
    if place != len(data) - 8 - length:
        raise Rejected("malformed", f"{len(data) - 8 - length:,} bytes of tensors; expected {place:,}")
    try:
        found = load(data)
    except Exception as e:  # the library's own error type is not part of its interface
        raise Rejected("malformed", f"tensors that cannot be read ({type(e).__name__})") from None
    return {name: found[name] for name in expected}


def _place(entry: object) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and offsets and isinstance(offsets[0], int):
        return offsets[0]
    return -1


def digest_of(params: Params) -> str:
    """SHA-256 of a model: names, shapes, types and numbers, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(params):
        p = params[name].detach().cpu().contiguous()
        total.update(f"{name}|{tuple(p.shape)}|{p.dtype}|".encode())
        total.update(p.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def text_digest(value: object) -> str:
    """SHA-256 of plain values, written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def whole_number(head: Mapping[str, Any], key: str, low: int = 0, high: int = 2**53) -> int:
    """Return a whole number of a head within bounds; a bool is none."""
    got = head.get(key)
    if not isinstance(got, int) or isinstance(got, bool) or not low <= got <= high:
        raise Rejected("malformed", f'"{key}" is {_shown(got)}; expected a whole number from {low} to {high}')
    return got


def number(head: Mapping[str, Any], key: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a finite number of a head within bounds."""
    got = head.get(key)
    if isinstance(got, int | float) and not isinstance(got, bool) and -LARGEST <= got <= LARGEST and low <= got <= high:
        return float(got)  # NaN compares false, and an integer of 400 digits is not turned into a float
    raise Rejected("non-finite report", f'"{key}" is {_shown(got)}; expected a finite number')


def _shown(value: object) -> str:
    """A value from outside, short; an integer of thousands of digits cannot even be written."""
    return "a long number" if isinstance(value, int) and abs(value) > LARGEST else str(value)[:40]


def text(head: Mapping[str, Any], key: str, most: int = 200) -> str:
    """Return a short text of a head."""
    got = head.get(key)
    if not isinstance(got, str) or len(got) > most:
        raise Rejected("malformed", f'"{key}" is {str(got)[:40]}; expected a text of at most {most} characters')
    return got
