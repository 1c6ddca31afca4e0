"""The curve of X25519 as edwards25519, on which points can be added: for proofs about X25519 keys.

Curve25519 corresponds to edwards25519 by y = (u − 1)/(u + 1). Arithmetic is in Python's integers and not in constant
time: it touches private keys that serve one sum, at the client that drew them.

References:
  RFC 7748 §4.1 (the map), RFC 8032 §5.1 (formulas).
"""

from __future__ import annotations

FIELD = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point's group; the curve has 8 times as many
D = -121665 * pow(121666, -1, FIELD) % FIELD
_ROOT = pow(2, (FIELD - 1) // 4, FIELD)  # of −1

Point = tuple[int, int, int, int]  # X, Y, Z, T with x = X/Z, y = Y/Z, xy = T/Z
ZERO: Point = (0, 1, 1, 0)


def plus(p: Point, q: Point) -> Point:
    """Return p + q."""
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % FIELD, (p[1] + p[0]) * (q[1] + q[0]) % FIELD
    c, d = 2 * p[3] * q[3] * D % FIELD, 2 * p[2] * q[2] % FIELD
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % FIELD, g * h % FIELD, f * g % FIELD, e * h % FIELD


def times(scalar: int, point: Point) -> Point:
    """Return a multiple of a point."""
    out = ZERO
    for bit in bin(scalar)[2:]:
        out = plus(out, out)
        if bit == "1":
            out = plus(out, point)
    return out


def same(p: Point, q: Point) -> bool:
    """Say whether two points are the same."""
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
