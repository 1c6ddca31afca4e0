"""The page against the frozen transcript of two secure sums, and its cryptography against Python's, both ways."""

from __future__ import annotations

import base64
import json
from hashlib import sha256

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from keyfed.errors import SecureSumError
from keyfed.private.secagg.keys import Identity, agree, derive, is_signature
from keyfed.private.secagg.wire import add_mask, seal, unseal
from tests.golden import transcript
from tests.unit.private.conftest import counter

from .node_cases import Browser, answers, needs_node

pytestmark = needs_node

FROZEN = json.loads(transcript.TRANSCRIPT.read_text("utf-8"))
FEW = settings(max_examples=15, deadline=None)


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


@pytest.mark.parametrize("kind", ["ordinary", "private"])
def test_every_word_of_the_transcript_is_the_pages_too(browser, tmp_path, kind):
    frozen, names = FROZEN[kind], transcript.NAMES
    identities = {name: Identity.make(counter(f"identity {name}")) for name in names}
    for name in names:
        secret = identities[name].private_bytes().hex()
        made = browser("keys", client=name, serial=transcript.SERIAL, identity=secret, random=f"keys {kind} {name}")
        assert made["posted"] == frozen["posted"][name]
    vectors = vectors_of(tmp_path, kind)
    assert vectors == frozen["vectors"]
    terms = {
        "cohort": list(frozen["posted"].values()), "threshold": transcript.THRESHOLD, "context": kind.encode().hex(),
        "identities": {name: identity.public.hex() for name, identity in identities.items()}, "floor": 3,
        "length": len(vectors[names[0]]) // 8,
    }  # fmt: skip
    for name in names:
        assert browser("join", client=name, random=f"sum {kind} {name}", **terms) == frozen["digest"]
        assert browser("shares", client=name) == frozen["packages"][name]
    for name in names:
        received = {other: sealed[name] for other, sealed in frozen["packages"].items() if other != name}
        values = np.frombuffer(bytes.fromhex(vectors[name]), "<u4").tolist()
        sent = browser("masked", client=name, values=values, alive=names, received=received)
        assert sent == frozen["masked"][name]
    survivors = [name for name in names if name != transcript.LOST]
    for name in survivors:
        assert browser("unmask", client=name, survivors=survivors) == frozen["answers"][name]


def vectors_of(folder, kind):
    """The page's vectors of the uploads in the transcript, in hexadecimal."""
    cases = []
    for number, done in enumerate(FROZEN["clients"].values()):
        path = folder / f"{number}.safetensors"
        shaped = {n: np.array(done["upload"][n], np.float32).reshape(s) for n, s in transcript.LAYERS.items()}
        path.write_bytes(save(shaped))
        layers = list(transcript.LAYERS)
        if kind == "private":
            scales = transcript.scales_of(done)
            more = {"op": "clipped", "layers": layers, "scales": scales, "clip": transcript.CLIP, "isRatio": True}
        else:
            names = ("tokens", "nats", "top1", "top3", "words", "words_top1", "words_top3", "unknown")
            more = {
                "op": "vector", "mediator": {"name": "tokens"}, "public": transcript.PUBLIC, "ratio": 2,
                "members": len(transcript.NAMES), "score": dict(zip(names, transcript.SCORE, strict=True)),
                "done": {**done, "layers": layers},
            }  # fmt: skip
        cases.append({"path": str(path), **more})
    found = answers(cases, script="training_cases.mjs")
    words = [one["words" if kind == "private" else "upload"] for one in found]
    return {name: base64.b64decode(text).hex() for name, text in zip(FROZEN["clients"], words, strict=True)}


# WebCrypto against cryptography

KEYS, TEXTS, SHARES = st.binary(min_size=32, max_size=32), st.binary(max_size=90), st.binary(min_size=32, max_size=32)


@FEW
@given(one=KEYS, other=KEYS)
def test_x25519_agrees_on_both_sides(browser, one, other):
    own, theirs = X25519PrivateKey.from_private_bytes(one), X25519PrivateKey.from_private_bytes(other)
    here = agree(own, theirs.public_key().public_bytes_raw()).hex()
    assert browser("agree", secret=one.hex(), key=theirs.public_key().public_bytes_raw().hex()) == here
    assert browser("agree", secret=other.hex(), key=own.public_key().public_bytes_raw().hex()) == here


@FEW
@given(secret=KEYS, text=TEXTS, flip=st.integers(0, 511))
def test_ed25519_signs_and_checks_both_ways(browser, secret, text, flip):
    key = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    page = browser("sign", secret=secret.hex(), text=text.hex())
    assert page == Identity.from_bytes(secret).sign(text).hex()  # Ed25519 draws nothing
    assert is_signature(bytes.fromhex(page), text, key)
    say = {"text": text.hex(), "key": key.hex()}
    assert browser("signed", signature=page, **say) is True
    broken = bytearray.fromhex(page)
    broken[flip // 8] ^= 1 << flip % 8
    assert browser("signed", signature=broken.hex(), **say) is False
    assert not is_signature(bytes(broken), text, key)


@FEW
@given(
    secret=KEYS, info=st.lists(TEXTS, min_size=1, max_size=4), words=st.integers(1, 700), sign=st.sampled_from([1, -1])
)
def test_hkdf_and_the_keystream_of_aes_ctr(browser, secret, info, words, sign):
    key = derive(secret, *info)
    assert browser("derive", secret=secret.hex(), info=[one.hex() for one in info]) == key.hex()
    vector = np.zeros(words, np.uint32)
    add_mask(vector, key, sign)
    page = browser("mask", key=key.hex(), words=words, sign=sign)
    assert page == sha256(vector.astype("<u4").tobytes()).hexdigest()


@FEW
@given(agreed=KEYS, digest=KEYS, shares=st.tuples(SHARES, SHARES), nonce=st.binary(min_size=12, max_size=12))
def test_aes_gcm_seals_for_the_other_side_both_ways(browser, agreed, digest, shares, nonce):
    pair = (b"\0" + shares[0], b"\0" + shares[1])
    sealed = seal(agreed, digest, "bøb", "ann", bytes(32), pair, nonce)
    say = {"agreed": agreed.hex(), "digest": digest.hex(), "from": "bøb", "to": "ann"}
    sealing = {**say, "committed": bytes(32).hex(), "shares": [one.hex() for one in pair], "nonce": nonce.hex()}
    page = bytes.fromhex(browser("seal", **sealing))
    assert page == sealed
    assert unseal(agreed, digest, "bøb", "ann", page) == pair
    assert browser("unseal", **say, sealed=sealed.hex()) == [one.hex() for one in pair]
    altered = sealed[:-1] + bytes([sealed[-1] ^ 1])
    assert "altered" in browser.ask("unseal", **say, sealed=altered.hex())["error"]
    with pytest.raises(SecureSumError, match="altered"):
        unseal(agreed, digest, "bøb", "ann", altered)
