"""Identities, one-time keys, what they are derived by."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import SecureSumError
from keyfed.private.secagg.keys import Identity, OneTime, SignedKeys, agree, derive, framed, make_keys, verify

RFC_7748 = {
    "section 5.2": (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    ),
    "section 6.1, Bob": (
        "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
        "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
        "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742",
    ),
}


@pytest.mark.parametrize("vector", RFC_7748.values(), ids=RFC_7748)
def test_agreement_is_x25519_of_rfc_7748(vector):
    private, public, secret = map(bytes.fromhex, vector)
    assert agree(X25519PrivateKey.from_private_bytes(private), public) == secret


def test_derivation_is_hkdf_sha256_of_rfc_5869():
    """Appendix A.1, through the library; A.3 (no salt) through `derive`'s form of it."""
    key = HKDF(SHA256(), 42, bytes(range(13)), bytes(range(0xF0, 0xFA))).derive(b"\x0b" * 22)
    assert key.hex() == ("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")
    unsalted = HKDF(SHA256(), 42, None, b"").derive(b"\x0b" * 22)
    assert unsalted.hex() == ("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8")
    assert derive(b"\x0b" * 22) == unsalted[:32]


@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_different_parts_frame_differently(one, other):
    assert (framed(*one) == framed(*other)) == (one == other)


def test_purposes_give_different_keys():
    assert len({derive(bytes(32), *info) for info in ((), (b"",), (b"a", b"b"), (b"ab",), (b"b", b"a"))}) == 5


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")], ids=["zero", "one"])
def test_points_of_low_order_are_refused(point):
    with pytest.raises(SecureSumError, match="low order"):
        agree(X25519PrivateKey.generate(), point)


def test_an_identity_survives_its_file_and_signs_alike():
    identity = Identity.make()
    again = Identity.from_bytes(identity.private_bytes())
    assert (again.public, again.sign(b"x")) == (identity.public, identity.sign(b"x"))
    with pytest.raises(SecureSumError, match="32 bytes, not 31"):
        Identity.from_bytes(bytes(31))


def test_nothing_private_is_shown():
    identity = Identity.make()
    one_time, _ = make_keys(identity, "a", 3)
    shown = repr(identity) + repr(one_time)
    assert identity.private_bytes().hex() not in shown
    assert one_time.to_bytes()[8:40].hex() not in shown


def test_one_time_keys_survive_their_file_and_are_handed_out_once():
    one_time, signed = make_keys(Identity.make(), "a", 3)
    again = OneTime.from_bytes(one_time.to_bytes())
    assert (again.serial, again.mask_public, again.channel_public) == (3, signed.mask, signed.channel)
    again.take()
    for use in (again.take, again.to_bytes):
        with pytest.raises(SecureSumError, match="serial 3 were used before"):
            use()
    with pytest.raises(SecureSumError, match="72 bytes, not 71"):
        OneTime.from_bytes(bytes(71))


def test_signed_keys_survive_json():
    _, signed = make_keys(Identity.make(), "Zoë", 2**63 - 1)
    assert SignedKeys.from_json(json.loads(json.dumps(signed.to_json()))) == signed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"client": ""}, "name"),
        ({"client": "x" * 256}, "name"),
        ({"client": "\ud800"}, "name"),
        ({"client": 5}, "name"),
        ({"serial": -1}, "serial"),
        ({"serial": True}, "serial"),
        ({"serial": "1"}, "serial"),
        ({"serial": 2**63}, "serial"),
        ({"mask": "00"}, "mask is not 32 bytes"),
        ({"mask": "zz" * 32}, "mask is not hexadecimal"),
        ({"mask": 7}, "mask is not hexadecimal"),
        ({"channel": "00" * 33}, "channel is not 32 bytes"),
        ({"signature": "00" * 63}, "signature is not 64 bytes"),
        ({"signature": "00" * 1_000_000}, "signature is not hexadecimal of the right length"),
        ({"more": 1}, "exactly"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[:12],
)
def test_damaged_json_is_an_error(change, says):
    _, signed = make_keys(Identity.make(), "a", 0)
    with pytest.raises(SecureSumError, match=says):
        SignedKeys.from_json({**signed.to_json(), **change})


@pytest.mark.parametrize("data", [None, [], "x", {}], ids=repr)
def test_other_json_is_an_error(data):
    with pytest.raises(SecureSumError, match="exactly channel, client, mask, proof, serial, signature"):
        SignedKeys.from_json(data)


def test_a_signature_stands_for_name_serial_and_both_keys():
    identity = Identity.make()
    _, signed = make_keys(identity, "a", 1)
    _, other = make_keys(identity, "a", 1)
    verify(signed, identity.public)
    changes = (
        {"client": "b"},
        {"serial": 2},
        {"mask": other.mask},
        {"channel": other.channel},
        {"signature": bytes(64)},
    )
    for change in changes:
        with pytest.raises(SecureSumError, match="not signed by its identity"):
            verify(replace(signed, **change), identity.public)
    for public in (Identity.make().public, bytes(31)):
        with pytest.raises(SecureSumError, match="not signed by its identity"):
            verify(signed, public)
