"""Keys of a client: a lasting Ed25519 identity, and pairs of X25519 keys that serve one secure sum each.

A client posts the public halves of its next pair ahead of time, signed with its identity and numbered by a serial. The
`mask` key agrees on masks with every other client; its private half is shared so that the others can open the sum
without a client that was lost. The `channel` key encrypts those shares and is never shared. Private halves are written
nowhere by this module; who stores them until a sum (`OneTime.to_bytes`) deletes the file when the sum starts.

For proofs about X25519 keys, Curve25519 is taken as edwards25519, on which points can be added: y = (u − 1)/(u + 1).
That arithmetic is in Python's integers and not in constant time: it touches private keys that serve one sum, at the
client that drew them.

References:
  RFC 7748 (X25519; §4.1 the map), RFC 8032 (Ed25519; §5.1 formulas), RFC 5869 (HKDF).
  Perrin, *The XEdDSA and VXEdDSA Signature Schemes*, 2016.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import sha256, sha512

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from keyfed.errors import SecureSumError

Random = Callable[[int], bytes]

KEY_BYTES, SIGNATURE_BYTES, SERIAL_BYTES = 32, 64, 8
NAME_BYTES = 255
SIGNED_AS = b"keyfed one-time keys 1"
POSSESSED_AS = b"keyfed channel key 1"


def framed(*parts: bytes) -> bytes:
    """Join parts, each behind its length in eight bytes, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def derive(secret: bytes, *info: bytes) -> bytes:
    """Return a 32-byte key for one purpose: HKDF-SHA256 without salt, `info` framed."""
    return HKDF(SHA256(), KEY_BYTES, None, framed(*info)).derive(secret)


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret that two X25519 keys share (RFC 7748 §6.1); the all-zero one is an error."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise SecureSumError(
            f"the X25519 key {public.hex()} is of low order or no key: take no part with it"
        ) from error


class Identity:
    """A client's lasting key, by which its one-time keys are known to be its own."""

    __slots__ = ("_private", "public")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: bytes = private.public_key().public_bytes_raw()

    @classmethod
    def make(cls, random: Random = os.urandom) -> Identity:
        return cls.from_bytes(random(KEY_BYTES))

    @classmethod
    def from_bytes(cls, private: bytes) -> Identity:
        if len(private) != KEY_BYTES:
            raise SecureSumError(f"an identity's private key has {KEY_BYTES} bytes, not {len(private)}")
        return cls(Ed25519PrivateKey.from_private_bytes(private))

    def private_bytes(self) -> bytes:
        """Return the private key, to be kept in a file that only the client can read."""
        return self._private.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.public.hex()})"


class OneTime:
    """The private halves of the keys for one secure sum. `take` hands them out once."""

    __slots__ = ("_pair", "channel_public", "mask_public", "serial")

    def __init__(self, serial: int, mask: X25519PrivateKey, channel: X25519PrivateKey) -> None:
        self.serial = _serial(serial)
        self._pair: tuple[X25519PrivateKey, X25519PrivateKey] | None = (mask, channel)
        self.mask_public: bytes = mask.public_key().public_bytes_raw()
        self.channel_public: bytes = channel.public_key().public_bytes_raw()

    def take(self) -> tuple[X25519PrivateKey, X25519PrivateKey]:
        """Return (mask, channel) and forget them: a second sum with them would show the difference of two vectors."""
        pair, self._pair = self._unused(), None
        return pair

    def to_bytes(self) -> bytes:
        """Return serial and private keys, for a file that is deleted when the sum starts."""
        mask, channel = self._unused()
        return self.serial.to_bytes(SERIAL_BYTES, "big") + mask.private_bytes_raw() + channel.private_bytes_raw()

    @classmethod
    def from_bytes(cls, stored: bytes) -> OneTime:
        if len(stored) != SERIAL_BYTES + 2 * KEY_BYTES:
            raise SecureSumError(f"stored one-time keys have {SERIAL_BYTES + 2 * KEY_BYTES} bytes, not {len(stored)}")
        serial, keys = int.from_bytes(stored[:SERIAL_BYTES], "big"), stored[SERIAL_BYTES:]
        private = X25519PrivateKey.from_private_bytes
        return cls(serial, private(keys[:KEY_BYTES]), private(keys[KEY_BYTES:]))

    def _unused(self) -> tuple[X25519PrivateKey, X25519PrivateKey]:
        if self._pair is None:
            raise SecureSumError(f"the one-time keys with serial {self.serial} were used before: make new ones")
        return self._pair

    def __repr__(self) -> str:
        return f"OneTime(serial={self.serial}, {'used' if self._pair is None else 'unused'})"


@dataclass(frozen=True, slots=True)
class SignedKeys:
    """What a client posts for one secure sum: its name, two public keys with their serial, and its signature.

    Attributes:
      proof: that the client knows the private half of its channel key (`possession`).
    """

    client: str
    serial: int
    mask: bytes
    channel: bytes
    signature: bytes
    proof: bytes

    def __post_init__(self) -> None:
        _name(self.client)
        _serial(self.serial)
        sizes = {"mask": KEY_BYTES, "channel": KEY_BYTES, "signature": SIGNATURE_BYTES, "proof": SIGNATURE_BYTES}
        for field, size in sizes.items():
            value = getattr(self, field)
            if not isinstance(value, bytes) or len(value) != size:
                raise SecureSumError(f"the keys of {self.client}: {field} is not {size} bytes")

    def to_json(self) -> dict[str, str | int]:
        """Return a JSON object; keys and signature in hexadecimal."""
        keys = {key: getattr(self, key).hex() for key in ("mask", "channel", "signature", "proof")}
        return {"client": self.client, "serial": self.serial, **keys}

    @classmethod
    def from_json(cls, data: object) -> SignedKeys:
        """Read what `to_json` gave; anything else is an error."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise SecureSumError(f"signed keys are a JSON object with exactly {', '.join(sorted(names))}")
        return cls(
            data["client"],
            data["serial"],
            *(_from_hex(data[key], key) for key in ("mask", "channel", "signature", "proof")),
        )


def make_keys(identity: Identity, client: str, serial: int, random: Random = os.urandom) -> tuple[OneTime, SignedKeys]:
    """Draw the keys for one secure sum; return what the client keeps and what it posts."""
    drawn = random(2 * KEY_BYTES)
    private = OneTime.from_bytes(_serial(serial).to_bytes(SERIAL_BYTES, "big") + drawn)
    mask, channel = private.mask_public, private.channel_public
    text = _signed(client, serial, mask, channel)
    proof = possession(X25519PrivateKey.from_private_bytes(drawn[KEY_BYTES:]), framed(POSSESSED_AS, text))
    return private, SignedKeys(client, serial, mask, channel, identity.sign(text), proof)


def possession(private: X25519PrivateKey, text: bytes) -> bytes:
    r"""Prove that one knows the private half of an X25519 key: a signature of a text under it (XEdDSA).

    .. math::  A = aB,\quad r = H(a, \text{text}),\quad R = rB,\quad s = r + H(R, A, \text{text})\, a \bmod ℓ

    A is the point over the public key with even x; a is the private key or its negative, whichever has that point. The
    hash has A in it, so a proof for one key is none for a multiple of it.
    """
    public = private.public_key().public_bytes_raw()
    point = lifted(public)
    assert point is not None, "a public key that a private key has"
    secret = clamped(private.private_bytes_raw()) % ORDER
    if not same(times(secret, BASE), point):
        secret = ORDER - secret
    nonce = _hashed(b"keyfed possession nonce", secret.to_bytes(KEY_BYTES, "little"), framed(text))
    committed, own = packed(times(nonce, BASE)), packed(point)
    answer = (nonce + _hashed(committed, own, text) * secret) % ORDER
    return committed + answer.to_bytes(KEY_BYTES, "little")


def is_possessed(keys: SignedKeys) -> bool:
    """Say whether the owner of these keys has proved that it knows the private half of its channel key."""
    point = lifted(keys.channel)
    text = framed(POSSESSED_AS, _signed(keys.client, keys.serial, keys.mask, keys.channel))
    return point is not None and is_signature(keys.proof, text, packed(point))


def _hashed(*parts: bytes) -> int:
    return int.from_bytes(sha512(b"".join(parts)).digest(), "little") % ORDER


def verify(keys: SignedKeys, identity_public: bytes) -> None:
    """Raise unless the keys carry the signature of this identity for this client's name and serial."""
    if not is_signed(keys, identity_public):
        raise SecureSumError(
            f"the one-time keys of {keys.client} (serial {keys.serial}) are not signed by its identity "
            f"{identity_public.hex()}: they were altered, or the client has to enrol again"
        )


@lru_cache(maxsize=4096)  # all clients of a simulation check the same keys; nothing here is secret
def is_signed(keys: SignedKeys, identity_public: bytes) -> bool:
    text = _signed(keys.client, keys.serial, keys.mask, keys.channel)
    return is_signature(keys.signature, text, identity_public)


def is_signature(signature: bytes, message: bytes, identity_public: bytes) -> bool:
    """Say whether a signature of a message is this identity's."""
    try:
        Ed25519PublicKey.from_public_bytes(identity_public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def signed_answer(identity: Identity, client: str, kind: str, answer: bytes) -> bytes:
    """Return an answer with its client's signature behind it.

    The signature binds the client's name, the kind of message and all bytes of the answer; run, round and attempt are
    in its head.
    """
    return answer + identity.sign(_answer_text(client, kind, answer))


def check_answer(identity_public: bytes, client: str, kind: str, message: bytes) -> bytes:
    """Return an answer without its signature; raise if that is not this client's, or is for another kind of message."""
    answer, signature = message[:-SIGNATURE_BYTES], message[-SIGNATURE_BYTES:]
    if not is_signature(signature, _answer_text(client, kind, answer), identity_public):
        raise SecureSumError(
            f"an answer to {kind} without the signature of {client}: it was altered, or update {client}"
        )
    return answer


def _answer_text(client: str, kind: str, answer: bytes) -> bytes:
    return framed(b"keyfed answer 1", _name(client), kind.encode(), sha256(answer).digest())


def _signed(client: str, serial: int, mask: bytes, channel: bytes) -> bytes:
    return framed(SIGNED_AS, _name(client), serial.to_bytes(SERIAL_BYTES, "big"), mask, channel)


def _name(client: object) -> bytes:
    try:
        if isinstance(client, str) and 0 < len(name := client.encode()) <= NAME_BYTES:
            return name
    except UnicodeEncodeError:
        pass
    raise SecureSumError(f"a client's name is text of 1 to {NAME_BYTES} bytes, not {client!r:.80}")


def _serial(serial: object) -> int:
    if not isinstance(serial, int) or isinstance(serial, bool) or not 0 <= serial < 1 << 63:
        raise SecureSumError(f"a serial is a whole number from 0 below 2**63, not {serial!r:.80}")
    return serial


def _from_hex(value: object, field: str) -> bytes:
    try:
        if isinstance(value, str) and len(value) <= 2 * SIGNATURE_BYTES:
            return bytes.fromhex(value)
    except ValueError:
        pass
    raise SecureSumError(f"signed keys: {field} is not hexadecimal of the right length")


FIELD = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point's group; the curve has 8 times as many
D = -121665 * pow(121666, -1, FIELD) % FIELD
_ROOT = pow(2, (FIELD - 1) // 4, FIELD)  # of −1

Point = tuple[int, int, int, int]  # X, Y, Z, T with x = X/Z, y = Y/Z, xy = T/Z
ZERO: Point = (0, 1, 1, 0)


def plus(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % FIELD, (p[1] + p[0]) * (q[1] + q[0]) % FIELD
    c, d = 2 * p[3] * q[3] * D % FIELD, 2 * p[2] * q[2] % FIELD
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % FIELD, g * h % FIELD, f * g % FIELD, e * h % FIELD


def times(scalar: int, point: Point) -> Point:
    """Return a multiple of a point; those of the base point are added up from a table, which is six times as quick."""
    out = ZERO
    if point == BASE and scalar < 16**64:
        for row in _multiples_of_base():
            out = plus(out, row[scalar % 16])
            scalar //= 16
        return out
    for bit in bin(scalar)[2:]:
        out = plus(out, out)
        if bit == "1":
            out = plus(out, point)
    return out


@lru_cache(maxsize=1)
def _multiples_of_base() -> list[list[Point]]:
    """Return 16^i · j · B for the 64 digits i and their values j."""
    rows, power = [], BASE
    for _ in range(64):
        row = [ZERO]
        for _ in range(15):
            row.append(plus(row[-1], power))
        rows.append(row)
        power = plus(row[-1], power)
    return rows


def same(p: Point, q: Point) -> bool:
    return (p[0] * q[2] - q[0] * p[2]) % FIELD == 0 and (p[1] * q[2] - q[1] * p[2]) % FIELD == 0


def in_group(point: Point) -> bool:
    """Say whether a point is a multiple of the base point; else a proof may hold for K plus a point of low order."""
    return same(times(ORDER, point), ZERO)


def _of_height(y: int, odd: int) -> Point | None:
    """Return the point with this y whose x is odd or even; None if there is none."""
    above, below = (y * y - 1) % FIELD, (D * y * y + 1) % FIELD
    square = above * pow(below, -1, FIELD) % FIELD  # D is no square: below is never zero
    x = pow(square, (FIELD + 3) // 8, FIELD)
    if x * x % FIELD != square:
        x = x * _ROOT % FIELD
    if x * x % FIELD != square or (x == 0 and odd):
        return None
    x = FIELD - x if x and x % 2 != odd else x
    return x, y, 1, x * y % FIELD


def lifted(public: bytes) -> Point | None:
    """Return the point with even x over a u-coordinate, read as X25519 reads it; None for one of the twist."""
    u = (int.from_bytes(public, "little") & ((1 << 255) - 1)) % FIELD
    if (u + 1) % FIELD == 0:
        return None
    return _of_height((u - 1) * pow(u + 1, -1, FIELD) % FIELD, 0)


def packed(point: Point) -> bytes:
    """Return a point's 32 bytes: y, and the lowest bit of x."""
    inverse = pow(point[2], -1, FIELD)
    x, y = point[0] * inverse % FIELD, point[1] * inverse % FIELD
    return (y | (x & 1) << 255).to_bytes(32, "little")


def unpacked(data: bytes) -> Point | None:
    """Read what `packed` gave; None for anything else, and for zero."""
    whole = int.from_bytes(data, "little")
    y = whole & ((1 << 255) - 1)
    point = _of_height(y, whole >> 255) if y < FIELD else None
    return None if point is None or same(point, ZERO) else point


def clamped(private: bytes) -> int:
    """Return the number that X25519 reads in a private key."""
    return int.from_bytes(private, "little") & ~7 & ((1 << 255) - 1) | 1 << 254


BASE = _of_height(4 * pow(5, -1, FIELD) % FIELD, 0) or ZERO
