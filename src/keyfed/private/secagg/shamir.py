r"""Shamir's secret sharing of 32-byte secrets over a prime field.

.. math:: f(x) = s + a_1 x + \dots + a_{t-1} x^{t-1} \bmod p, \qquad
          s = f(0) = \sum_{i \in T} f(x_i) \prod_{j \in T, j \ne i} \frac{x_j}{x_j - x_i}

with p = 2²⁵⁶ + 297, the smallest prime above every 32-byte secret, and uniform coefficients a. The share of place x > 0
is f(x); any t shares give s, and t-1 of them fit every s equally well. The arithmetic is Python's: no claim of constant
time is made.

References:
  Shamir, *How to share a secret*, CACM 22(11), 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from keyfed.errors import BelowThreshold, SecureSumError

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
_UNIFORM_BYTES = 48  # reduced modulo p: within 2⁻¹²⁷ of uniform


def split(secret: bytes, threshold: int, places: Sequence[int], random: Callable[[int], bytes]) -> dict[int, bytes]:
    """Share a secret among `places` (distinct, above zero) so that `threshold` of them restore it."""
    if len(secret) != SECRET_BYTES:
        raise SecureSumError(f"a secret to share has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(places):
        raise SecureSumError(
            f"a threshold of {threshold} among {len(places)} places; it lies between 1 and their number"
        )
    if len(set(places)) != len(places) or not all(0 < place < PRIME for place in places):
        raise SecureSumError(f"places of shares are distinct and above zero, not {list(places)}")
    noise = random(_UNIFORM_BYTES * (threshold - 1))
    chance = (noise[at : at + _UNIFORM_BYTES] for at in range(0, len(noise), _UNIFORM_BYTES))
    downwards = [*(int.from_bytes(part, "big") % PRIME for part in chance), int.from_bytes(secret, "big")]
    return {place: _value(downwards, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Restore the secret from the first `threshold` shares of a mapping from place to share."""
    if not 1 <= threshold <= len(shares):
        raise BelowThreshold(f"{len(shares)} shares of a secret; {threshold} are needed, at least 1")
    first = dict(islice(shares.items(), threshold))
    for place, share in first.items():
        if not 0 < place < PRIME or not is_share(share):
            raise SecureSumError(f"the share of place {place} is not {SHARE_BYTES} bytes below the field's prime")
    weighed = zip(_weights(tuple(first)), first.values(), strict=True)
    value = sum(weight * int.from_bytes(share, "big") for weight, share in weighed) % PRIME
    if value >= 1 << (8 * SECRET_BYTES):
        raise SecureSumError(f"the shares of places {list(shares)} do not belong to one secret")
    return value.to_bytes(SECRET_BYTES, "big")


def is_share(share: bytes) -> bool:
    """Say whether bytes are an element of the field."""
    return len(share) == SHARE_BYTES and int.from_bytes(share, "big") < PRIME


def _value(downwards: Sequence[int], x: int) -> int:
    """Evaluate a polynomial by Horner's rule; the highest coefficient comes first."""
    value = 0
    for coefficient in downwards:
        value = (value * x + coefficient) % PRIME
    return value


@lru_cache(maxsize=64)  # a server joins the shares of the same clients once per secret
def _weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights: f(0) = Σ weight_i f(place_i)."""
    weights = []
    for own in places:
        above = below = 1
        for other in places:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
