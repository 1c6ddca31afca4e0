"""Accusations that a server can check: the liar of the two is named, and no key of two honest clients is ever shown."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keyfed.errors import Refused, SecureSumError
from keyfed.private.secagg import accusation
from keyfed.private.secagg import keys as curve
from keyfed.private.secagg import member as member_side
from keyfed.private.secagg.accusation import EVIDENCE_BYTES, evidence, is_usable, shown_key
from keyfed.private.secagg.keys import FIELD, ORDER, Identity, is_possessed, make_keys, possession
from keyfed.private.secagg.wire import package_text, seal, unseal

from .conftest import identity_of

ONES = np.ones(8, np.uint32)
KEYS = st.binary(min_size=32, max_size=32).map(X25519PrivateKey.from_private_bytes)


def public(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


@settings(max_examples=20, deadline=None)
@given(st.one_of(st.integers(0, 2**256 + 16), st.sampled_from([0, 1, 15, 16, ORDER - 1, ORDER, 16**64 - 1, 16**64])))
def test_multiples_of_the_base_point_from_the_table_are_those_of_doubling(scalar):
    doubled = (curve.BASE[0] * 2 % FIELD, curve.BASE[1] * 2 % FIELD, 2, curve.BASE[3] * 2 % FIELD)  # the same point
    assert doubled != curve.BASE
    assert curve.same(doubled, curve.BASE)
    assert curve.same(curve.times(scalar, curve.BASE), curve.times(scalar, doubled))


@settings(max_examples=25, deadline=None)
@given(KEYS, KEYS)
def test_what_is_shown_is_what_x25519_agrees_on(one, other):
    assume(public(one) != public(other))
    shown = evidence(one, public(other), b"sum")
    assert len(shown) == EVIDENCE_BYTES
    assert shown_key(public(one), public(other), b"sum", shown) == one.exchange(other.public_key())
    with pytest.raises(SecureSumError, match="proof does not hold"):
        shown_key(public(one), public(other), b"another sum", shown)
    with pytest.raises(SecureSumError, match="proof does not hold"):
        shown_key(public(other), public(one), b"sum", shown)


def order_eight() -> curve.Point:
    """Return a point of order 8: ℓ times a point of the curve."""
    for y in range(2, 100):
        point = curve._of_height(y, 0)
        if point is not None:
            small = curve.times(ORDER, point)
            if not curve.same(curve.times(4, small), curve.ZERO):
                return small
    raise AssertionError


def u_of(point: curve.Point) -> bytes:
    _, y, z, _ = point
    return ((z + y) * pow(z - y, -1, FIELD) % FIELD).to_bytes(32, "little")


def test_odd_public_keys_change_nothing():
    """A key with a part of low order, or with its top bit set, agrees as X25519 says, and so it is proved."""
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    lifted = curve.lifted(public(other))
    assert lifted is not None
    mixed = u_of(curve.plus(lifted, order_eight()))
    topped = public(other)[:31] + bytes([public(other)[31] | 128])
    for odd in (mixed, topped):
        shown = evidence(one, odd, b"sum")
        assert shown_key(public(one), odd, b"sum", shown) == one.exchange(X25519PublicKey.from_public_bytes(odd))
        assert is_usable(odd)


def test_no_other_key_can_be_proved():
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    shown = evidence(one, public(other), b"sum")
    agreed, small = curve.unpacked(shown[:32]), order_eight()
    assert agreed is not None
    moved = curve.packed(curve.plus(agreed, small)) + shown[32:]
    wrong = [os.urandom(EVIDENCE_BYTES), moved, shown[:-1], b"", bytes(EVIDENCE_BYTES)]
    wrong += [shown[:at] + bytes([shown[at] ^ 1]) + shown[at + 1 :] for at in range(0, EVIDENCE_BYTES, 5)]
    for data in wrong:
        with pytest.raises(SecureSumError, match="evidence"):
            shown_key(public(one), public(other), b"sum", data)


def test_a_point_of_another_group_proves_nothing_even_if_its_challenge_is_lucky(monkeypatch):
    """K + T passes the equations whenever c T = 0, one time in eight; only the look at its group refuses it."""
    one, other, small = X25519PrivateKey.generate(), X25519PrivateKey.generate(), order_eight()

    def forged() -> bytes:
        times, wanted = curve.times, curve.times(8, curve.lifted(public(other)))
        secret = curve.clamped(one.private_bytes_raw()) // 8 % ORDER
        own = curve.lifted(public(one))
        base = times(8, curve.BASE)
        if not curve.same(times(secret, base), own):
            secret = ORDER - secret
        agreed = curve.plus(times(secret, wanted), small)
        while True:
            nonce = int.from_bytes(os.urandom(64), "little") % ORDER
            c = accusation._challenge(b"sum", own, wanted, agreed, times(nonce, base), times(nonce, wanted))
            if (ORDER - c) % 8 == 0:
                z = (nonce + c * secret) % ORDER
                return curve.packed(agreed) + c.to_bytes(32, "little") + z.to_bytes(32, "little")

    data = forged()
    with pytest.raises(SecureSumError, match="outside the group"):
        shown_key(public(one), public(other), b"sum", data)
    monkeypatch.setattr(accusation, "in_group", lambda point: True)
    assert shown_key(public(one), public(other), b"sum", data) != one.exchange(other.public_key())


def test_keys_that_no_private_key_has_are_not_usable():
    low = [0, 1, FIELD - 1, FIELD, FIELD + 1]
    assert not any(is_usable(u.to_bytes(32, "little")) for u in low)
    assert not is_usable(u_of(order_eight()))
    assert all(is_usable(public(X25519PrivateKey.generate())) for _ in range(20))
    half = sum(is_usable(os.urandom(32)) for _ in range(200))  # the others lie on the twist
    assert 60 < half < 140


def related(channel: bytes, factor: int, shift: int) -> bytes:
    """A public key that is made from another one, of which nobody knows the private half."""
    point = curve.lifted(channel)
    assert point is not None
    return u_of(curve.plus(curve.times(factor, point), curve.times(shift, curve.BASE)))


@pytest.mark.parametrize(("factor", "shift"), [(2, 0), (1, 5), (ORDER - 1, 8)])
def test_a_channel_key_made_from_anothers_is_not_proved_to_be_ones_own(factor, shift):
    """With such a key the agreed secret of an accusation would tell that of an honest pair."""
    identity = Identity.make()
    _, honest = make_keys(identity, "k", 7)
    _, own = make_keys(identity, "j", 7)
    assert is_possessed(honest)
    assert is_possessed(own)
    made = replace(own, channel=related(honest.channel, factor, shift))
    assert is_usable(made.channel)
    for proof in (own.proof, honest.proof, bytes(64), os.urandom(64)):
        assert not is_possessed(replace(made, proof=proof))
    topped = honest.channel[:31] + bytes([honest.channel[31] | 128])
    assert not is_possessed(replace(own, channel=topped, proof=honest.proof))
    for change in ({"client": "j"}, {"serial": 8}, {"mask": own.mask}, {"channel": own.channel}):
        assert not is_possessed(replace(honest, **change))


def test_the_proof_is_the_signature_that_ed25519_verifies():
    """XEdDSA against the library: the same key read as an Ed25519 key."""
    for _ in range(8):
        private = X25519PrivateKey.generate()
        point = curve.lifted(public(private))
        assert point is not None
        Ed25519PublicKey.from_public_bytes(curve.packed(point)).verify(possession(private, b"text"), b"text")


# In a sum.


def accused(sums, name: str, sender: str, package: bytes, signature: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        sums.members[name].masked(ONES, sums.alive, {**sums.parcels[name], sender: package}, {sender: signature})
    assert caught.value.accused == sender
    return caught.value


def signed(cohort, sender: str, to: str, package: bytes) -> bytes:
    return identity_of(sender).sign(package_text(cohort.terms().digest(), sender, to, package))


def test_a_sender_of_a_package_that_does_not_open_is_named_by_the_server(make_cohort, share):
    cohort = make_cohort(4)
    sums = share(cohort)
    bad = sums.parcels["c0"]["c2"][:-1] + bytes([sums.parcels["c0"]["c2"][-1] ^ 1])
    sums.collector._packages["c2"]["c0"] = bad  # as c2 sent it
    refused = accused(sums, "c0", "c2", bad, signed(cohort, "c2", "c0", bad))
    assert refused.evidence is not None
    liar, how = sums.collector.judge("c0", "c2", refused.evidence)
    assert liar == "c2"
    assert "altered" in how
    assert sums.collector.judge("c1", "c2", refused.evidence)[0] == "c1"  # evidence of another pair
    assert sums.collector.judge("c0", "c9", refused.evidence) == ("c0", "it accuses c9, of which it was sent nothing")
    assert sums.collector.judge("c0", "c0", refused.evidence)[0] == "c0"


@pytest.mark.parametrize("what", ["other shares than their hashes", "a share outside the field"])
def test_a_package_that_opens_to_something_else_is_named_too(make_cohort, share, monkeypatch, what):
    cohort = make_cohort(4)
    sums = share(cohort)
    private = X25519PrivateKey.from_private_bytes(cohort.private["c2"][40:])
    agreed, digest = (
        private.exchange(X25519PublicKey.from_public_bytes(cohort.signed["c0"].channel)),
        cohort.terms().digest(),
    )
    shares = (b"\xff" * 33, bytes(33)) if "field" in what else (bytes(33), bytes(33))
    with monkeypatch.context() as patch:
        if "field" not in what:
            patch.setattr("keyfed.private.secagg.wire.share_hash", lambda *given: bytes(32))
        bad = seal(agreed, digest, "c2", "c0", bytes(32), shares, bytes(12))
    sums.collector._packages["c2"]["c0"] = bad
    refused = accused(sums, "c0", "c2", bad, signed(cohort, "c2", "c0", bad))
    assert refused.evidence is not None
    assert sums.collector.judge("c0", "c2", refused.evidence)[0] == "c2"


def test_a_false_accusation_names_the_accuser(make_cohort, share, monkeypatch):
    cohort = make_cohort(4)
    sums = share(cohort)
    good = sums.parcels["c0"]["c2"]

    def refuses(*given):
        raise SecureSumError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(member_side, "unseal", refuses)
        first = sums.alive[1]
        refused = accused(
            sums, "c0", first, sums.parcels["c0"][first], signed(cohort, first, "c0", sums.parcels["c0"][first])
        )
    assert refused.evidence is not None
    assert sums.collector.judge("c0", first, refused.evidence)[0] == "c0"
    assert sums.collector.judge("c0", "c2", os.urandom(EVIDENCE_BYTES))[0] == "c0"
    assert good == sums.collector.package("c2", "c0")


def test_a_server_that_alters_packages_is_shown_no_key(make_cohort, share, monkeypatch):
    """Else it would collect the shares of an honest client's secrets from all who accuse it; the mutant shows how."""

    def harvest(cohort) -> int:
        """Alter the packages of c0 to all others; return how many of its packages the server can open then."""
        sums, opened = share(cohort), 0
        for name in sums.alive[1:]:
            good = sums.parcels[name]["c0"]
            bad = good[:-1] + bytes([good[-1] ^ 1])
            refused = accused(sums, name, "c0", bad, signed(cohort, "c0", name, good))
            if refused.evidence is not None:
                digest = cohort.terms().digest()
                bound = member_side.framed(digest, name.encode(), b"c0")
                channels = (cohort.signed[name].channel, cohort.signed["c0"].channel)
                unseal(shown_key(*channels, bound, refused.evidence), digest, "c0", name, good)
                opened += 1
        return opened

    assert harvest(make_cohort(5)) == 0
    monkeypatch.setattr(member_side, "is_signature", lambda *given: True)
    assert harvest(make_cohort(5)) == 4  # at the threshold of 4 both secrets of c0 are known


def test_the_key_of_a_pair_opens_nothing_of_others(make_cohort, share):
    cohort = make_cohort(5)
    sums = share(cohort)
    bad = os.urandom(len(sums.parcels["c0"]["c2"]))
    refused = accused(sums, "c0", "c2", bad, signed(cohort, "c2", "c0", bad))
    digest = cohort.terms().digest()
    bound = member_side.framed(digest, b"c0", b"c2")
    agreed = shown_key(cohort.signed["c0"].channel, cohort.signed["c2"].channel, bound, refused.evidence)
    for sender in ("c1", "c3", "c4"):
        with pytest.raises(SecureSumError):
            unseal(agreed, digest, sender, "c0", sums.parcels["c0"][sender])
        with pytest.raises(SecureSumError):
            unseal(agreed, digest, "c0", sender, sums.parcels[sender]["c0"])
    assert sums.members["c0"]._secrets is None  # and the accuser is out of this sum
    with pytest.raises(Refused, match="out of turn"):
        sums.members["c0"].masked(ONES, sums.alive, sums.parcels["c0"])


def test_no_key_is_shown_of_a_channel_key_that_is_made_from_an_honest_clients(make_cohort, share, monkeypatch):
    """The mutant: without the look at the proof, the secret of an honest pair follows from what is shown."""
    cohort = make_cohort(4)
    sums = share(cohort)
    member, honest = sums.members["c0"], sums.members["c0"]._keys["c3"]
    made = replace(member._keys["c2"], channel=related(honest.channel, 2, 0))
    monkeypatch.setitem(member._keys, "c2", made)
    bad = sums.parcels["c0"]["c2"][:-1] + bytes([sums.parcels["c0"]["c2"][-1] ^ 1])
    secret = member._secrets.agreed["c3"]
    channel = member._secrets.channel
    assert accused(sums, "c0", "c2", bad, signed(cohort, "c2", "c0", bad)).evidence is None
    shown = evidence(channel, made.channel, b"sum")  # what the mutant would show
    twice = curve.unpacked(shown[:32])
    assert twice is not None
    half = curve.times(pow(2, -1, ORDER), twice)
    assert u_of(half) == secret
