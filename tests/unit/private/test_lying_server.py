"""Why a client counts who is alive: the attack of a server that tells everybody other survivors, carried out."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from keyfed.errors import Refused
from keyfed.private.secagg import shamir
from keyfed.private.secagg.keys import agree
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.wire import HASH_BYTES, add_mask, pair_key, self_key

SECRET = np.arange(8, dtype=np.uint32) * np.uint32(123_456_789)
TOLD = {"c0": ["c0", "c1", "c2", "c3"]}  # the victim hears of four alive, the others of all five
# Who is told that which clients are lost: every key of c1, c2 and c3 is asked for three times, the threshold.
LOST = {"c0": ["c3"], "c1": ["c2", "c3"], "c2": ["c1", "c3"], "c3": ["c1", "c2"], "c4": ["c1", "c2"]}


def attack(cohort) -> np.ndarray:
    """Return what a lying server makes of the upload of c0; nobody colludes, every client answers once."""
    members, terms = cohort.members(), cohort.terms()
    packages = {name: member.shares() for name, member in members.items()}
    uploads, answers = {}, {}
    for name, member in members.items():
        alive = TOLD.get(name, cohort.names)
        values = SECRET if name == "c0" else np.zeros(8, np.uint32)
        uploads[name] = member.masked(values, alive, {by: packages[by][name] for by in alive if by != name})
    for name, member in members.items():
        alive = TOLD.get(name, cohort.names)
        data = member.unmask([other for other in alive if other not in LOST[name]])[HASH_BYTES:]
        answers[name] = {of: data[33 * at : 33 * at + 33] for at, of in enumerate(alive)}
    places, digest, opened = terms.places(), terms.digest(), uploads["c0"].copy()
    seed = shamir.join({places[by]: shares["c0"] for by, shares in answers.items()}, terms.threshold)
    add_mask(opened, self_key(seed, digest, "c0"), -1)
    for other in ("c1", "c2", "c3"):
        shares = {places[by]: answers[by][other] for by in cohort.names if other in LOST[by]}
        private = X25519PrivateKey.from_private_bytes(shamir.join(shares, terms.threshold))
        add_mask(opened, pair_key(agree(private, cohort.signed["c0"].mask), digest, "c0", other), -1)
    return opened[:8]


def test_different_lists_open_an_upload_where_the_check_is_left_out(make_cohort, monkeypatch):
    monkeypatch.setattr(Member, "_check_lists_cannot_open", lambda self, alive: None)
    assert attack(make_cohort(5, threshold=3)).tolist() == SECRET.tolist()


def test_the_check_stops_it_before_anything_is_uploaded(make_cohort):
    with pytest.raises(Refused, match="c0 refuses to upload among 4 alive of 5"):
        attack(make_cohort(5, threshold=3))
