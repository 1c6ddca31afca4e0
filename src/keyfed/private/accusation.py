r"""An accusation that a server can check: the key of one pair, with a proof that it is the right one.

Client i received a package from j that does not open, or holds other shares than j committed to. It shows the secret
that the two channel keys agree on, K = a_i A_j, and proves that it is that secret (Chaum and Pedersen, made
non-interactive by a hash):

.. math:: \log_{8B} A_i = \log_{8 A_j} K, \qquad
          R_1 = r·8B,\; R_2 = r·8A_j,\; c = H(\dots, R_1, R_2),\; z = r + c m \bmod ℓ, \quad a_i = 8m

The server computes R₁ = z·8B − cA_i and R₂ = z·8A_j − cK, compares the hash, and opens the package itself. If it opens
to shares that fit their hashes, the accuser lied; otherwise the sender did. No third client can be blamed.

What the server learns. K opens two packages: that of j to i, and that of i to j. A client accuses only if the package
carries the signature of j (`Member.masked`), so an honest j is never accused by an honest i, and a server cannot make
honest clients show keys by altering packages. Of an honest pair, therefore, no key is ever shown. The package of i to
a liar j holds shares that j has anyway, of secrets of a client that sends no vector in this sum. The private key of i
is not shown: packages of all others to i stay closed. So the number of shares that a server and its colluding clients
hold of any upload is the same with and without accusations. Besides, a sum in which a key was shown is not opened.

Arithmetic is that of edwards25519, to which Curve25519 corresponds by y = (u − 1)/(u + 1), in Python's integers and not
in constant time. It touches one private key, of a pair that serves one sum, at a client that has left that sum.

References:
  Chaum and Pedersen, *Wallet Databases with Observers*, CRYPTO 1992. RFC 7748 §4.1 (the map), RFC 8032 §5.1 (formulas).
"""

from __future__ import annotations

import os
from hashlib import sha512

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from keyfed.errors import SecureSumError
from keyfed.private.keys import Random, framed

FIELD = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point's group; the curve has 8 times as many
D = -121665 * pow(121666, -1, FIELD) % FIELD
_ROOT = pow(2, (FIELD - 1) // 4, FIELD)  # of −1
EVIDENCE_BYTES = 96  # the agreed point, c, z
_NONCE_BYTES = 64  # reduced modulo the order: within 2⁻²⁵⁹ of uniform

Point = tuple[int, int, int, int]  # X, Y, Z, T with x = X/Z, y = Y/Z, xy = T/Z
ZERO: Point = (0, 1, 1, 0)


def evidence(private: X25519PrivateKey, accused: bytes, bound: bytes, random: Random = os.urandom) -> bytes:
    """Show what a private key and the public key of the accused agree on, with the proof.

    Args:
      bound: what the proof is for; it proves nothing about another sum or another pair.
    """
    own = _lifted(private.public_key().public_bytes_raw())
    other = _lifted(accused)
    if own is None or other is None:
        raise SecureSumError(f"the X25519 key {accused.hex()} is not on the curve: there is nothing to prove")
    base, point = _times(8, _BASE), _times(8, other)
    secret = _clamped(private.private_bytes_raw()) // 8 % ORDER
    if not _same(_times(secret, base), own):  # the lifted point is one of ±A: take the sign that fits
        secret = ORDER - secret
    agreed = _times(secret, point)
    nonce = int.from_bytes(random(_NONCE_BYTES), "little") % ORDER
    challenge = _challenge(bound, own, point, agreed, _times(nonce, base), _times(nonce, point))
    answer = (nonce + challenge * secret) % ORDER
    return _packed(agreed) + challenge.to_bytes(32, "little") + answer.to_bytes(32, "little")


def shown_key(accuser: bytes, accused: bytes, bound: bytes, shown: bytes) -> bytes:
    """Return the 32 bytes that the pair's channel keys agree on (`keys.agree`), if the proof holds; else raise."""
    own, other = _lifted(accuser), _lifted(accused)
    agreed = _unpacked(shown[:32]) if len(shown) == EVIDENCE_BYTES else None
    if own is None or other is None or agreed is None:
        raise SecureSumError("evidence that is not a point of the curve with its proof")
    challenge, answer = (int.from_bytes(shown[at : at + 32], "little") for at in (32, 64))
    base, point = _times(8, _BASE), _times(8, other)
    if not (_in_group(own) and _in_group(agreed)) or _same(point, ZERO):
        raise SecureSumError("evidence with a point outside the group of the base point")
    first = _plus(_times(answer, base), _times(ORDER - challenge % ORDER, own))
    second = _plus(_times(answer, point), _times(ORDER - challenge % ORDER, agreed))
    if challenge != _challenge(bound, own, point, agreed, first, second):
        raise SecureSumError("evidence whose proof does not hold: the key is not that of the pair")
    _, y, z, _ = agreed
    return ((z + y) * pow(z - y, -1, FIELD) % FIELD).to_bytes(32, "little")


def is_usable(public: bytes) -> bool:
    """Say whether an X25519 public key lies on the curve (not on its twist) and is not of low order.

    Every key that a private key has is usable. Another one only serves to make others refuse.
    """
    point = _lifted(public)
    return point is not None and not _same(_times(8, point), ZERO)


def _plus(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % FIELD, (p[1] + p[0]) * (q[1] + q[0]) % FIELD
    c, d = 2 * p[3] * q[3] * D % FIELD, 2 * p[2] * q[2] % FIELD
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % FIELD, g * h % FIELD, f * g % FIELD, e * h % FIELD


def _times(scalar: int, point: Point) -> Point:
    out = ZERO
    for bit in bin(scalar)[2:]:
        out = _plus(out, out)
        if bit == "1":
            out = _plus(out, point)
    return out


def _same(p: Point, q: Point) -> bool:
    return (p[0] * q[2] - q[0] * p[2]) % FIELD == 0 and (p[1] * q[2] - q[1] * p[2]) % FIELD == 0


def _in_group(point: Point) -> bool:
    """Say whether a point is a multiple of the base point; else a proof may hold for K plus a point of low order."""
    return _same(_times(ORDER, point), ZERO)


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


def _lifted(public: bytes) -> Point | None:
    """Return the point with even x over a u-coordinate, read as X25519 reads it; None for one of the twist."""
    u = (int.from_bytes(public, "little") & ((1 << 255) - 1)) % FIELD
    if (u + 1) % FIELD == 0:
        return None
    return _of_height((u - 1) * pow(u + 1, -1, FIELD) % FIELD, 0)


def _packed(point: Point) -> bytes:
    inverse = pow(point[2], -1, FIELD)
    x, y = point[0] * inverse % FIELD, point[1] * inverse % FIELD
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _unpacked(data: bytes) -> Point | None:
    whole = int.from_bytes(data, "little")
    y = whole & ((1 << 255) - 1)
    point = _of_height(y, whole >> 255) if y < FIELD else None
    return None if point is None or _same(point, ZERO) else point


def _clamped(private: bytes) -> int:
    return int.from_bytes(private, "little") & ~7 & ((1 << 255) - 1) | 1 << 254


def _challenge(bound: bytes, *points: Point) -> int:
    data = framed(b"keyfed accusation 1", bound, *(_packed(p) for p in points))
    return int.from_bytes(sha512(data).digest(), "little") % ORDER


_BASE = _of_height(4 * pow(5, -1, FIELD) % FIELD, 0) or ZERO
