"""A whole sum with fixed entropy, byte by byte against a second implementation and against the bytes of before."""

from __future__ import annotations

import hashlib

import numpy as np

from .slow_sum import SlowSum, aes, gcm, x25519

# What every client sends in the sum below. Changes only with the protocol's version (`terms.PROTOCOL`).
TRANSCRIPT = "b211af5f8c3334d3147c6fd18ae06a0002cef3b4799ff0eb5e5b1bab1665b8fd"


def test_the_second_implementation_keeps_to_the_standards():
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")  # SP 800-38A F.1.5
    assert aes(key, block).hex() == "f3eed1bdb5d2a03c064b5a7e3db181f8"
    # The GCM specification's test cases 13 and 14: zero key and nonce, without and with a block of zeros.
    assert gcm(bytes(32), bytes(12), b"", b"").hex() == "530f8afbc74536b9a963b4f1c4cb738b"
    assert gcm(bytes(32), bytes(12), bytes(16), b"").hex() == (
        "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"
    )
    scalar, point = (  # RFC 7748 section 5.2, second vector
        "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
        "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
    )
    shared = "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957"
    assert x25519(bytes.fromhex(scalar), bytes.fromhex(point)).hex() == shared


def test_a_sum_with_fixed_entropy_sends_the_bytes_of_the_second_implementation(make_cohort, share, entropy):
    """Six clients: one is silent, one is lost after its shares, four open the sum."""
    cohort = make_cohort(6, threshold=4, length=6, pool="golden", seed="golden")
    values = {name: np.arange(6, dtype=np.uint32) * np.uint32(700_000_000 + at) for at, name in enumerate(cohort.names)}
    sums = share(cohort, silent=["c1"])
    sent = sums.upload({name: values[name] for name in ("c0", "c2", "c4", "c5")})
    survivors = sums.collector.survivors
    answers = {name: sums.members[name].unmask(survivors) for name in survivors}
    for name, answer in answers.items():
        sums.collector.take_unmask(name, answer)
    np.testing.assert_array_equal(sums.collector.total(), sum(values[name] for name in survivors))

    private = {name: (7, stored[8:40], stored[40:]) for name, stored in cohort.private.items()}
    slow = SlowSum(cohort.context, 4, 6, private, lambda name: entropy(f"golden sum {name}"))
    assert cohort.terms().digest() == slow.digest
    for name in sums.alive:
        assert sums.parcels[name] == {other: slow.packages[other][name] for other in sums.alive if other != name}
    for name in survivors:
        assert sent[name].tolist() == slow.masked(name, values[name].tolist(), sums.alive)
        assert answers[name] == slow.answer(name, sums.alive, survivors)

    transcript = hashlib.sha256(slow.digest)
    for name in sums.alive:
        transcript.update(b"".join(sums.parcels[name].values()))
    for name in survivors:
        transcript.update(sent[name].astype("<u4").tobytes() + answers[name])
    assert transcript.hexdigest() == TRANSCRIPT
