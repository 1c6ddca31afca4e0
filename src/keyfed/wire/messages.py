"""What travels between server and clients: a small JSON head and, where there are any, tensors as safetensors.

    b"KFM" | version of the protocol (1 digit) | length of the head (4 bytes, little-endian) | head | safetensors

Everything that comes from outside is hostile until checked. Lengths, depth and the number of values are capped before
anything is parsed, by what the kind of message needs; every check is one pass over the bytes. The tensors' names,
shapes and types are compared with what is expected before they are read, and nothing is ever unpickled. What is wrong
is a `Rejected` with a typed reason; its client is then a drop-out.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load, save

from keyfed.engine.task import Finished
from keyfed.errors import KeyfedError
from keyfed.federated.types import Params, Reason, Report
from keyfed.private.secagg.keys import SIGNATURE_BYTES

PROTOCOL = 2  # 1: heads of any size, no version said
MARK = b"KFM"
MAGIC = MARK + str(PROTOCOL).encode()
BEGIN_HEAD = 16 << 20  # bytes of a head that begins a run; a vocabulary of a million words fits
CONTROL_HEAD = 64 << 10  # bytes of any other head, besides its entries
ENTRY_HEAD = 800  # bytes of a head per entry: a member's package of shares, a layer's numbers
MEMBER_HEAD = 1 << 10  # bytes of a head per member whose keys and identity it lists
DEEPEST = 12  # nesting of a head
MOST_VALUES = 1 << 16  # values in any head: an empty list takes two bytes to write and a hundred to keep
VALUE_HEAD = 64  # bytes that a kind of head may have, per value that it may have
LONGEST_NUMBER = 40  # characters of a number in a head
LARGEST = 1e300  # of a number in a head
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

_NO_MARKS = bytes(sorted(set(range(256)) - set(b'"[]{},:')))

Kind = Literal["who", "hello", "train", "count", "upload", "unmask", "bye", "update keyfed: server protocol 2"]
TOO_OLD: Kind = (
    "update keyfed: server protocol 2"  # a client of protocol 1 refuses it, and writes its name into its log
)
NOT_OURS = "not a message of this protocol"  # all that a client of protocol 1 says to any other
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


def control_head(entries: int = 0) -> int:
    """Bytes that the head of a message may have that lists so many members or layers."""
    return CONTROL_HEAD + ENTRY_HEAD * entries


def most_values(head: int) -> int:
    """Values that a head may have whose kind may have so many bytes: 1,024, and twelve for each entry."""
    return min(MOST_VALUES, head // VALUE_HEAD)


def check_protocol(message: bytes, here: Literal["client", "server"]) -> None:
    """Refuse a message of another version of the protocol, and say which side is older.

    Raises:
      Rejected: "other protocol". Other bytes are left to `unpack`.
    """
    theirs = message[3:4]
    if message[:3] != MARK or not theirs.isdigit() or theirs == MAGIC[3:]:
        return
    client, server = (PROTOCOL, int(theirs)) if here == "client" else (int(theirs), PROTOCOL)
    raise Rejected("other protocol", mismatch(client, server))


def mismatch(client: int, server: int) -> str:
    """Say that client and server speak different versions of the protocol, and which of them to update."""
    older = "this client" if client < server else "the server"
    return f"this client speaks protocol {client}, the server {server}: update keyfed on {older}"


def unpack(message: bytes, most: int | None = None, head: int = BEGIN_HEAD) -> Received:
    """Read a message's head.

    Args:
      most: bytes beyond which it is not even looked at; None for no limit but the head's own.
      head: bytes that the head may have; it may have `most_values` of them.
    """
    if most is not None and len(message) > most:
        raise Rejected("too large", f"{len(message):,} bytes; expected at most {most:,}")
    check_protocol(message, "server")
    if len(message) < 8 or message[:4] != MAGIC:
        raise Rejected("malformed", NOT_OURS)
    (length,) = struct.unpack("<I", message[4:8])
    if length > min(head, len(message) - 8):
        raise Rejected(
            "malformed", f"a head of {length:,} bytes in a message of {len(message):,}; expected at most {head:,}"
        )
    return Received(read_json(message[8 : 8 + length], most_values(head)), message[8 + length :])


def read_json(data: bytes, values: int = MOST_VALUES) -> dict[str, Any]:
    """Read a JSON object, in time and memory linear in its length.

    Refused before anything is parsed: deep nesting, more than so many values. Refused while it is parsed: NaN,
    Infinity, long numbers, a key that stands twice, other encodings than UTF-8, anything but an object.
    """
    check_structure(data, values=values)
    try:
        head = json.loads(
            data.decode(),
            parse_constant=_refuse_constant,
            parse_int=_whole,
            parse_float=_real,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError):
        raise Rejected("malformed", "a head that is no JSON") from None
    if not isinstance(head, dict):
        raise Rejected("malformed", f"a head that is a {type(head).__name__}; expected an object")
    return head


def check_structure(data: bytes, deepest: int = DEEPEST, values: int = MOST_VALUES, keys: int = MOST_VALUES) -> None:
    """Refuse JSON that nests deeper or holds more values or keys than it may; found without parsing, in one pass.

    Escapes are taken out first: a run of backslashes pairs off from its left. What remains of a string has no quote in
    it, so that its quotes alone say what is inside a string.
    """
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    depth = count = named = 0
    inside = False
    for mark in marks:
        if mark == 0x22:  # a quote
            inside = not inside
        elif inside:
            continue
        elif mark in b"]}":
            depth -= 1
        elif mark == 0x3A:  # a colon: what stands before it is a key
            named += 1
            if named > keys:
                raise Rejected("malformed", f"a head of more than {keys:,} keys")
        else:  # a comma, or what opens an object or a list
            count += 1
            depth += mark != 0x2C
            if depth > deepest:
                raise Rejected("malformed", f"a head nested deeper than {deepest}")
            if count > values:
                raise Rejected("malformed", f"a head of more than {values:,} values")


def _refuse_constant(name: str) -> None:
    raise Rejected("malformed", f"{name} in a head; expected finite numbers")


def _whole(digits: str) -> int:
    return int(_short(digits))


def _real(digits: str) -> float:
    return float(_short(digits))


def _short(digits: str) -> str:
    if len(digits) > LONGEST_NUMBER:
        raise Rejected("malformed", f"a number of {len(digits):,} characters in a head; at most {LONGEST_NUMBER}")
    return digits


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Rejected("malformed", "a key that stands twice in a head")
    return found


def shapes_of(params: Params) -> Shapes:
    """What is expected of tensors that are like these."""
    return {name: (tuple(p.shape), p.dtype) for name, p in params.items()}


def most_bytes(expected: Shapes, head: int | None = None) -> int:
    """Bytes a message with these tensors may have: theirs, their header and a head.

    Args:
      head: bytes that the head may have; None for one entry a tensor.
    """
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected.values())
    return 16 + size + tensor_head(expected) + (control_head(len(expected)) if head is None else head)


def tensor_head(expected: Shapes) -> int:
    """Bytes that the safetensors header of these tensors may have; a name may be written in escapes of six bytes."""
    return 1024 + sum(200 + 6 * len(name.encode()) + 20 * len(shape) for name, (shape, _) in expected.items())


def tensor_values(expected: Shapes) -> int:
    """Values that the safetensors header of these tensors may have; a few more for what describes the file."""
    return 64 + sum(8 + len(shape) for shape, _ in expected.values())


def read_tensors(data: bytes, expected: Shapes) -> Params:
    """Read tensors that must have exactly these names, shapes and types; compared before anything is allocated."""
    if len(data) < 8:
        raise Rejected("wrong tensors", f"no tensors; expected {len(expected)}")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(tensor_head(expected), len(data) - 8):
        raise Rejected("malformed", f"a safetensors header of {length:,} bytes; at most {tensor_head(expected):,}")
    described = read_json(data[8 : 8 + length], tensor_values(expected))
    described.pop("__metadata__", None)
    if set(described) != set(expected):
        odd = min(set(described) ^ set(expected))
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


MOST_LOSS = 1e6  # nats per token that a report may say; a uniform guess over a million words has 14


def hello_text(name: str, run: str, nonce: str, hide_among: int) -> bytes:
    """Return what a client signs to prove who it is; the nonce is the server's, so that no old proof will do.

    Args:
      hide_among: the fewest clients of a secure sum that this client takes part in.
    """
    return json.dumps(["keyfed hello", name, run, nonce, hide_among]).encode()


def sum_context(run: str, attempt: int, about: str, part: str | None, round_context: bytes) -> bytes:
    """Return what a secure sum's masks are bound to.

    Clients that were told another configuration, vocabulary, attempt, text to evaluate, model, round or public number
    share no mask.

    Args:
      about: `about_digest` of what the run is about.
      part: the held-out text that is evaluated along; None for none.
      round_context: of `engine.sums.secure_round.context_of`.
    """
    return hashlib.sha256(json.dumps([run, attempt, about, part]).encode() + round_context).digest()


def about_digest(head: Mapping[str, Any]) -> str:
    """SHA-256 of what a run is about: what every client must have been told alike."""
    return text_digest({key: head.get(key) for key in ("config", "vocab", "method", "secure")})


def parted_packages(parcels: Mapping[str, str]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return packages and signatures by client, from signed packages in hexadecimal."""
    both = {str(name): bytes.fromhex(parcel) for name, parcel in parcels.items()}
    return (
        {name: parcel[:-SIGNATURE_BYTES] for name, parcel in both.items()},
        {name: parcel[-SIGNATURE_BYTES:] for name, parcel in both.items()},
    )


def report_head(done: Finished | Report) -> dict[str, Any]:
    """Return a report as it is sent; of training that diverged it says `MOST_LOSS`."""
    return {
        "tokens": done.tokens, "loss": min(done.loss, MOST_LOSS), "worked": done.worked,
        "distance": dict(done.distance), "weight": done.weight, "joining": done.joining,
    }  # fmt: skip


def finished_of(report: Any, layers: Mapping[str, object], upload: Params) -> Finished:
    """Read a report that came from outside; the inverse of `report_head`."""
    if not isinstance(report, dict):
        raise Rejected("malformed", "an answer without a report")
    distance = report.get("distance")
    if not isinstance(distance, dict) or not set(distance) <= set(layers):
        raise Rejected("malformed", "a report whose distances are not those of the model's layers")
    joining = report.get("joining")
    if not isinstance(joining, bool):
        raise Rejected("malformed", "a report that does not say whether its client joins")
    return Finished(
        0,
        upload,
        number(report, "loss", 0.0, MOST_LOSS),
        whole_number(report, "tokens", 0, 1 << 40),
        whole_number(report, "worked", 0, 1 << 40),
        {name: number(distance, name, 0.0) for name in distance},
        number(report, "weight", 0.0, float(1 << 40)),
        joining,
    )
