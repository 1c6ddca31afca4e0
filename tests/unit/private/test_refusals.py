"""What a client does not do, whatever the server asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keyfed.errors import ConfigError, Refused, SecureSumError
from keyfed.private.secagg.keys import Identity, OneTime, _signed, agree, make_keys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors
from keyfed.private.secagg.wire import seal

ZEROS = np.zeros(8, np.uint32)


def terms_with(cohort, **replaced):
    """Return the cohort's terms with some members' keys replaced (None: left out)."""
    keys = {**cohort.signed, **replaced}
    return SumTerms(cohort.context, tuple(k for k in keys.values() if k is not None), cohort.threshold, cohort.length)


def test_a_cohort_below_the_floor(make_cohort):
    cohort = make_cohort(4)
    with pytest.raises(Refused, match="c0 refuses a cohort of 4: it takes part among 5 or more"):
        cohort.member("c0", floors=Floors(5))
    pair = make_cohort(2, threshold=2)
    with pytest.raises(Refused, match="cohort of 2: it takes part among 3"):
        Member("c0", OneTime.from_bytes(pair.private["c0"]), pair.terms(), pair.known)


def test_a_floor_that_hides_nothing_is_no_floor():
    with pytest.raises(ConfigError, match="floor of 1 clients hides nothing"):
        Floors(1)


@pytest.mark.parametrize(("size", "threshold", "taken"), [(4, 2, False), (4, 3, True), (5, 2, False), (5, 3, True)])
def test_a_threshold_has_to_be_more_than_half(make_cohort, size, threshold, taken):
    cohort = make_cohort(size, threshold)
    if taken:
        cohort.member("c0")
        return
    with pytest.raises(Refused, match=f"threshold {threshold} of {size}: it has to be more than half"):
        cohort.member("c0")


def test_its_own_keys_missing_or_altered(make_cohort):
    cohort = make_cohort(4)
    with pytest.raises(Refused, match=r"own one-time keys \(serial 7\) are missing"):
        cohort.member("c0", terms_with(cohort, c0=None))
    other = make_cohort(4).signed["c0"]  # signed by the same identity, but not these
    for altered in (other, replace(cohort.signed["c0"], serial=8), replace(cohort.signed["c0"], channel=other.channel)):
        with pytest.raises(Refused, match="were altered"):
            cohort.member("c0", terms_with(cohort, c0=altered))


def test_keys_with_a_bad_signature_or_of_an_unknown_client(make_cohort):
    cohort = make_cohort(4)
    _, forged = make_keys(Identity.make(), "c1", 7)
    with pytest.raises(Refused, match=r"the one-time keys of c1 \(serial 7\) are not signed by its identity"):
        cohort.member("c0", terms_with(cohort, c1=forged))
    with pytest.raises(Refused, match="not signed"):
        cohort.member("c0", terms_with(cohort, c0=replace(cohort.signed["c0"], signature=bytes(64))))
    known = {name: public for name, public in cohort.known.items() if name != "c2"}
    with pytest.raises(Refused, match="c0 refuses c2: no identity of that client is known here"):
        Member("c0", OneTime.from_bytes(cohort.private["c0"]), cohort.terms(), known)


def test_one_identity_under_two_names(make_cohort):
    cohort, twin = make_cohort(4), Identity.make()
    _, first = make_keys(twin, "c2", 7)
    _, second = make_keys(twin, "c3", 7)
    known = {**cohort.known, "c2": twin.public, "c3": twin.public}
    with pytest.raises(Refused, match="two of its clients have the same identity"):
        Member("c0", OneTime.from_bytes(cohort.private["c0"]), terms_with(cohort, c2=first, c3=second), known)


@pytest.mark.parametrize("weak", ["mask", "channel"])
def test_a_public_key_of_low_order(make_cohort, weak):
    cohort, evil = make_cohort(4), Identity.make()
    one_time, good = make_keys(evil, "c3", 7)
    bad = replace(good, **{weak: bytes(32)})
    bad = replace(bad, signature=evil.sign(_signed("c3", 7, bad.mask, bad.channel)))
    terms, known = terms_with(cohort, c3=bad), {**cohort.known, "c3": evil.public}
    members = {n: Member(n, OneTime.from_bytes(cohort.private[n]), terms, known) for n in ("c0", "c1", "c2")}
    says = "c0 refuses c3: the X25519 key 0000"
    if weak == "channel":
        with pytest.raises(Refused, match=says):
            members["c0"].shares()
    else:
        received = {name: member.shares()["c0"] for name, member in members.items() if name != "c0"}
        agreed = agree(one_time.take()[1], cohort.signed["c0"].channel)
        received["c3"] = seal(agreed, terms.digest(), "c3", "c0", bytes(32), (bytes(33), bytes(33)), bytes(12))
        members["c0"].shares()
        with pytest.raises(Refused, match=says):
            members["c0"].masked(ZEROS, terms.names, received)
    assert members["c0"]._secrets is None
    assert members["c0"]._pair is None
    assert not members["c0"]._held


def test_the_same_one_time_keys_for_a_second_sum(make_cohort):
    cohort = make_cohort(4)
    keys = OneTime.from_bytes(cohort.private["c0"])
    Member("c0", keys, cohort.terms(), cohort.known)
    with pytest.raises(Refused, match="c0 refuses a second sum: the one-time keys with serial 7 were used before"):
        Member("c0", keys, cohort.terms(context=b"round 2"), cohort.known)


def test_a_refused_sum_leaves_the_one_time_keys(make_cohort):
    cohort = make_cohort(4)
    keys = OneTime.from_bytes(cohort.private["c0"])
    with pytest.raises(Refused, match="more than half"):
        Member("c0", keys, cohort.terms(threshold=2), cohort.known)
    Member("c0", keys, cohort.terms(), cohort.known)


ALIVE = ["c0", "c1", "c2", "c3", "c4"]
BAD_LISTS = {
    "twice": (["c0", "c1", "c2", "c2"], "names a client twice"),
    "stranger": (["c0", "c1", "c2", "c3", "x"], "does not know from before: x"),
    "few": (["c0", "c1", "c2"], "refuses 3 (alive|survivors): its floor and the threshold want 4"),
    "not me": (["c1", "c2", "c3", "c4"], "without itself"),
    "nobody": ([], "refuses 0"),
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_a_list_of_clients_alive_that_does_not_fit(make_cohort, share, case):
    alive, says = BAD_LISTS[case]
    sums = share(make_cohort(5, threshold=4))
    parcel = {name: package for name, package in sums.parcels["c0"].items() if name in alive}
    with pytest.raises(Refused, match=says):
        sums.members["c0"].masked(ZEROS, alive, parcel)
    assert sums.members["c0"]._secrets is None
    with pytest.raises(Refused, match="out of turn"):
        sums.members["c0"].masked(ZEROS, sums.alive, sums.parcels["c0"])


@pytest.mark.parametrize("case", BAD_LISTS)
def test_a_list_of_survivors_that_does_not_fit(make_cohort, share, case):
    survivors, says = BAD_LISTS[case]
    sums = share(make_cohort(5, threshold=4))
    sums.upload({"c0": ZEROS})
    with pytest.raises(Refused, match=says):
        sums.members["c0"].unmask(survivors)
    assert not sums.members["c0"]._held
    with pytest.raises(Refused, match="out of turn"):
        sums.members["c0"].unmask(ALIVE)


def test_an_upload_that_different_lists_of_survivors_could_open(make_cohort):
    """Five clients, threshold 3: told only two others, a client could be opened with nobody colluding."""
    cohort = make_cohort(5, threshold=3)
    members = cohort.members()
    packages = {name: member.shares() for name, member in members.items()}
    parcel = {name: packages[name]["c0"] for name in ("c1", "c2", "c3")}
    says = "c0 refuses to upload among 4 alive of 5: at the threshold 3 a server that tells clients different lists"
    with pytest.raises(Refused, match=says):
        members["c0"].masked(ZEROS, ["c0", "c1", "c2", "c3"], parcel)


def test_survivors_below_its_own_floor(make_cohort):
    with pytest.raises(Refused, match="threshold 3: so many could open a sum, and it takes part among 4 or more"):
        make_cohort(5, threshold=3).member("c0", floors=Floors(4))
    cohort = make_cohort(5, threshold=4)
    members = {name: cohort.member(name, floors=Floors(4)) for name in cohort.names}
    packages = {name: member.shares() for name, member in members.items()}
    members["c0"].masked(ZEROS, ALIVE, {name: packages[name]["c0"] for name in ALIVE[1:]})
    with pytest.raises(Refused, match="refuses 3 survivors: its floor and the threshold want 4"):
        members["c0"].unmask(["c0", "c1", "c2"])


def test_survivors_that_never_shared(make_cohort, share):
    sums = share(make_cohort(5, threshold=4), silent=["c4"])
    sums.upload({"c0": ZEROS})
    with pytest.raises(Refused, match="survivors it does not know from before: c4"):
        sums.members["c0"].unmask(ALIVE)


def test_both_shares_of_one_client(make_cohort, share):
    sums = share(make_cohort(5, threshold=3))
    sums.upload({"c0": ZEROS})
    answer = sums.members["c0"].unmask(["c0", "c1", "c2"])
    assert len(answer) == 32 + 33 * 5  # one share per client alive
    with pytest.raises(Refused, match="out of turn: this sum is over"):
        sums.members["c0"].unmask(["c0", "c1", "c3"])  # would give the seed of c3 beside its key


def test_an_answer_holds_seeds_of_survivors_and_keys_of_the_lost_and_nothing_else(make_cohort, share):
    sums = share(make_cohort(4, threshold=3))
    sums.upload(dict.fromkeys(("c0", "c1", "c2"), ZEROS))
    held = dict(sums.members["c0"]._held)
    answer = sums.members["c0"].unmask(["c0", "c1", "c2"])
    assert answer[32:] == held["c0"][0] + held["c1"][0] + held["c2"][0] + held["c3"][1]


def test_calls_out_of_turn_change_nothing(make_cohort, share):
    cohort = make_cohort(4)
    fresh = cohort.member("c0")
    for call in (lambda: fresh.masked(ZEROS, cohort.names, {}), lambda: fresh.unmask(cohort.names)):
        with pytest.raises(Refused, match="this sum is new"):
            call()
    sums = share(cohort)
    for member in sums.members.values():
        with pytest.raises(Refused, match="this sum is shared, the call wants it new"):
            member.shares()
        with pytest.raises(Refused, match="this sum is shared, the call wants it masked"):
            member.unmask(cohort.names)
    sums.upload(dict.fromkeys(cohort.names, ZEROS))
    with pytest.raises(Refused, match="this sum is masked, the call wants it shared"):
        sums.members["c0"].masked(ZEROS, sums.alive, sums.parcels["c0"])
    sums.answer(cohort.names)
    assert sums.collector.total().tolist() == [0] * 8


@pytest.mark.parametrize("case", ["missing", "extra", "own"])
def test_packages_that_are_not_those_of_the_clients_alive(make_cohort, share, case):
    sums = share(make_cohort(5, threshold=4), silent=["c4"])
    parcel = dict(sums.parcels["c0"])
    wrong = {"missing": "c1", "extra": "c4", "own": "c0"}[case]
    if case == "missing":
        del parcel[wrong]
    else:
        parcel[wrong] = parcel["c1"]
    with pytest.raises(Refused, match=f"shares missing from, or not due from, {wrong}"):
        sums.members["c0"].masked(ZEROS, sums.alive, parcel)


@pytest.mark.parametrize(
    "values", [ZEROS[:7], ZEROS.astype(np.int32), ZEROS.reshape(2, 4)], ids=["length", "dtype", "shape"]
)
def test_values_that_are_not_those_of_the_terms(make_cohort, share, values):
    sums = share(make_cohort(4))
    with pytest.raises(SecureSumError, match=r"the terms say uint32 \[8\]"):
        sums.members["c0"].masked(values, sums.alive, sums.parcels["c0"])


def test_a_client_can_leave_at_any_time(make_cohort, share):
    sums = share(make_cohort(4, threshold=3))
    sums.members["c3"].forget()
    with pytest.raises(Refused, match="this sum is over"):
        sums.members["c3"].masked(ZEROS, sums.alive, sums.parcels["c3"])
    sums.upload(dict.fromkeys(("c0", "c1", "c2"), ZEROS))
    sums.answer(["c0", "c1", "c2"])
    assert sums.collector.total().tolist() == [0] * 8
