"""Any t shares give the secret, t - 1 fit every secret, wrong shares are found out."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import BelowThreshold, SecureSumError
from keyfed.private.secagg import shamir

SECRETS = st.binary(min_size=32, max_size=32)


@st.composite
def sharings(draw: st.DrawFn) -> tuple[bytes, int, dict[int, bytes]]:
    secret = draw(SECRETS)
    places = draw(st.lists(st.integers(1, 10_000), min_size=2, max_size=12, unique=True))
    threshold = draw(st.integers(2, len(places)))
    return secret, threshold, shamir.split(secret, threshold, places, os.urandom)


def test_the_field_is_prime():
    """Miller and Rabin's test with thirteen bases."""
    odd, twos = shamir.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41):
        powers = [pow(base, odd << k, shamir.PRIME) for k in range(twos)]
        assert powers[0] == 1 or shamir.PRIME - 1 in powers
    assert shamir.PRIME > 2**256


@settings(max_examples=100, deadline=None)
@given(sharings(), st.randoms(use_true_random=False))
def test_any_threshold_of_the_shares_gives_the_secret(sharing, order):
    secret, threshold, shares = sharing
    some = dict(order.sample(sorted(shares.items()), threshold))
    assert shamir.join(some, threshold) == secret


@settings(max_examples=100, deadline=None)
@given(sharings(), SECRETS)
def test_one_share_fewer_fits_every_other_secret(sharing, other):
    _, threshold, shares = sharing
    few, (missing, _) = dict(list(shares.items())[: threshold - 1]), list(shares.items())[threshold - 1]
    # The polynomial of degree t - 1 through the few shares and the other secret at 0 exists: its value at the missing
    # place is a share that a sharing of the other secret could have given.
    points = {place: int.from_bytes(share, "big") for place, share in few.items()} | {0: int.from_bytes(other, "big")}
    lacking = 0
    for own, value in points.items():
        weight = 1
        for x in points:
            if x != own:
                weight = weight * (missing - x) * pow(own - x, -1, shamir.PRIME) % shamir.PRIME
        lacking = (lacking + weight * value) % shamir.PRIME
    assert shamir.join({**few, missing: lacking.to_bytes(33, "big")}, threshold) == other


def test_shares_follow_the_polynomial_of_the_entropy():
    coefficients = [5, 7]
    noise = b"".join(c.to_bytes(48, "big") for c in reversed(coefficients))
    shares = shamir.split((11).to_bytes(32, "big"), 3, [1, 2, 9], lambda count: noise[:count])
    assert {x: int.from_bytes(share, "big") for x, share in shares.items()} == {
        x: 11 + 5 * x + 7 * x * x for x in (1, 2, 9)
    }


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32], ids=["zero", "largest"])
def test_extreme_secrets_survive(secret):
    assert shamir.join(shamir.split(secret, 2, [1, 2, 3], os.urandom), 2) == secret


@pytest.mark.parametrize(
    ("share", "is_one"),
    [
        (bytes(33), True),
        ((shamir.PRIME - 1).to_bytes(33, "big"), True),
        (shamir.PRIME.to_bytes(33, "big"), False),
        (bytes(32), False),
        (b"\xff" * 33, False),
        (b"", False),
    ],
)
def test_a_share_is_an_element_of_the_field(share, is_one):
    assert shamir.is_share(share) is is_one


@pytest.mark.parametrize(
    ("secret", "threshold", "places", "says"),
    [
        (bytes(31), 2, [1, 2], "32 bytes, not 31"),
        (bytes(32), 3, [1, 2], "threshold of 3 among 2"),
        (bytes(32), 0, [1, 2], "threshold of 0"),
        (bytes(32), 2, [0, 1], "above zero"),
        (bytes(32), 2, [1, 1], "distinct"),
    ],
    ids=["short secret", "high threshold", "no threshold", "place zero", "place twice"],
)
def test_what_cannot_be_shared_is_an_error(secret, threshold, places, says):
    with pytest.raises(SecureSumError, match=says):
        shamir.split(secret, threshold, places, os.urandom)


def test_what_cannot_be_joined_is_an_error():
    shares = shamir.split(bytes(32), 2, [1, 2], os.urandom)
    with pytest.raises(BelowThreshold, match="1 shares of a secret; 2 are needed"):
        shamir.join({1: shares[1]}, 2)
    with pytest.raises(SecureSumError, match="place 2 is not 33 bytes"):
        shamir.join({1: shares[1], 2: shares[2][1:]}, 2)
    with pytest.raises(SecureSumError, match="place 2 is not 33 bytes below"):
        shamir.join({1: shares[1], 2: b"\xff" * 33}, 2)
    above = (2**256 + 1).to_bytes(33, "big")
    with pytest.raises(SecureSumError, match="do not belong to one secret"):
        shamir.join({1: above, 2: above}, 2)
