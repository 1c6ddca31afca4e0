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
honest clients show keys by altering packages. Of an honest pair, therefore, no key is ever shown. Nor is one shown that
tells of such a pair: A_j could be 2 A_k, so that K is twice the secret of i and k. A client accuses only if j has
proved that it knows the private half of A_j (`keys.is_possessed`); then j can compute K itself. The package of i to
a liar j holds shares that j has anyway, of secrets of a client that sends no vector in this sum. The private key of i
is not shown: packages of all others to i stay closed. So the number of shares that a server and its colluding clients
hold of any upload is the same with and without accusations. Besides, a sum in which a key was shown is not opened.

References:
  Chaum and Pedersen, *Wallet Databases with Observers*, CRYPTO 1992.
"""

from __future__ import annotations

import os
from hashlib import sha512

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from keyfed.errors import SecureSumError
from keyfed.private.secagg.curve import (
    BASE,
    FIELD,
    ORDER,
    ZERO,
    Point,
    clamped,
    in_group,
    lifted,
    packed,
    plus,
    same,
    times,
    unpacked,
)
from keyfed.private.secagg.keys import Random, framed

EVIDENCE_BYTES = 96  # the agreed point, c, z
_NONCE_BYTES = 64  # reduced modulo the order: within 2⁻²⁵⁹ of uniform


def evidence(private: X25519PrivateKey, accused: bytes, bound: bytes, random: Random = os.urandom) -> bytes:
    """Show what a private key and the public key of the accused agree on, with the proof.

    Args:
      bound: what the proof is for; it proves nothing about another sum or another pair.
    """
    own = lifted(private.public_key().public_bytes_raw())
    other = lifted(accused)
    if own is None or other is None:
        raise SecureSumError(f"the X25519 key {accused.hex()} is not on the curve: there is nothing to prove")
    base, point = times(8, BASE), times(8, other)
    secret = clamped(private.private_bytes_raw()) // 8 % ORDER
    if not same(times(secret, base), own):  # the lifted point is one of ±A: take the sign that fits
        secret = ORDER - secret
    agreed = times(secret, point)
    nonce = int.from_bytes(random(_NONCE_BYTES), "little") % ORDER
    challenge = _challenge(bound, own, point, agreed, times(nonce, base), times(nonce, point))
    answer = (nonce + challenge * secret) % ORDER
    return packed(agreed) + challenge.to_bytes(32, "little") + answer.to_bytes(32, "little")


def shown_key(accuser: bytes, accused: bytes, bound: bytes, shown: bytes) -> bytes:
    """Return the 32 bytes that the pair's channel keys agree on (`keys.agree`), if the proof holds; else raise."""
    own, other = lifted(accuser), lifted(accused)
    agreed = unpacked(shown[:32]) if len(shown) == EVIDENCE_BYTES else None
    if own is None or other is None or agreed is None:
        raise SecureSumError("evidence that is not a point of the curve with its proof")
    challenge, answer = (int.from_bytes(shown[at : at + 32], "little") for at in (32, 64))
    base, point = times(8, BASE), times(8, other)
    if not (in_group(own) and in_group(agreed)) or same(point, ZERO):
        raise SecureSumError("evidence with a point outside the group of the base point")
    first = plus(times(answer, base), times(ORDER - challenge % ORDER, own))
    second = plus(times(answer, point), times(ORDER - challenge % ORDER, agreed))
    if challenge != _challenge(bound, own, point, agreed, first, second):
        raise SecureSumError("evidence whose proof does not hold: the key is not that of the pair")
    _, y, z, _ = agreed
    return ((z + y) * pow(z - y, -1, FIELD) % FIELD).to_bytes(32, "little")


def is_usable(public: bytes) -> bool:
    """Say whether an X25519 public key lies on the curve (not on its twist) and is not of low order.

    Every key that a private key has is usable. Another one only serves to make others refuse.
    """
    point = lifted(public)
    return point is not None and not same(times(8, point), ZERO)


def _challenge(bound: bytes, *points: Point) -> int:
    data = framed(b"keyfed accusation 1", bound, *(packed(p) for p in points))
    return int.from_bytes(sha512(data).digest(), "little") % ORDER
