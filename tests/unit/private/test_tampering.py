"""Messages altered, replayed, repeated or meant for another sum: an error or the exact sum, never a wrong one."""

from __future__ import annotations

import numpy as np
import pytest

from keyfed.errors import BelowThreshold, Lied, Refused, SecureSumError
from keyfed.private.secagg import shamir
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.wire import PACKAGE_BYTES

ONES = np.ones(8, np.uint32)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 95, 96, 107, 108, 150, PACKAGE_BYTES - 1])
def test_an_altered_package_is_refused_by_name_and_the_refuser_is_lost(make_cohort, share, at):
    sums = share(make_cohort(4, threshold=3))
    parcel = {**sums.parcels["c0"], "c2": flipped(sums.parcels["c0"]["c2"], at)}
    with pytest.raises(Refused, match="c0 refuses to upload: the shares from c2 to c0 were altered"):
        sums.members["c0"].masked(ONES, sums.alive, parcel)
    sums.upload(dict.fromkeys(("c1", "c2", "c3"), ONES))
    sums.answer(["c1", "c2", "c3"])
    assert sums.collector.total().tolist() == [3] * 8


@pytest.mark.parametrize("how", ["of another sender", "to another client", "sent back", "cut", "of another round"])
def test_a_package_that_belongs_elsewhere_is_refused(make_cohort, share, how):
    cohort = make_cohort(4)
    sums = share(cohort)
    parcel = dict(sums.parcels["c0"])
    cohort.context = b"model, round 2"  # the same keys in another round
    parcel["c1"] = {
        "of another sender": parcel["c2"],
        "to another client": sums.parcels["c2"]["c1"],
        "sent back": sums.parcels["c1"]["c0"],
        "cut": parcel["c1"][:-1],
        "of another round": share(cohort).parcels["c0"]["c1"],
    }[how]
    with pytest.raises(Refused, match="the shares from c1 to c0 were altered or belong to other terms"):
        sums.members["c0"].masked(ONES, sums.alive, parcel)


def test_a_client_that_is_told_another_model_gives_nothing_away(make_cohort):
    """Its packages open nowhere and the others' not at it: all refuse before anything is uploaded."""
    cohort = make_cohort(4)
    members = {**cohort.members(), "c3": cohort.member("c3", cohort.terms(context=b"another model"))}
    collector = Collector(cohort.terms())
    for name, member in members.items():
        collector.take_shares(name, member.shares())
    alive, parcels = collector.forward()
    for name, member in members.items():
        culprit = "c0" if name == "c3" else "c3"
        with pytest.raises(Refused, match=f"the shares from {culprit} to {name} were altered or belong to other terms"):
            member.masked(ONES, alive, parcels[name])


def test_different_lists_of_the_living_leave_masks_that_do_not_cancel(make_cohort, share):
    sums = share(make_cohort(6, threshold=4))
    told = ["c0", "c1", "c2", "c3", "c4"]
    parcel = {name: sums.parcels["c0"][name] for name in told[1:]}
    sums.collector.take_masked("c0", sums.members["c0"].masked(ONES, told, parcel))
    sums.upload(dict.fromkeys(("c1", "c2", "c3", "c5"), ONES))
    sums.answer(["c1", "c2", "c3", "c5"])
    with pytest.raises(Refused, match="survivors it does not know from before: c5"):
        sums.members["c0"].unmask(sums.collector.survivors)
    with pytest.raises(SecureSumError, match="do not cancel"):
        sums.collector.total()
    with pytest.raises(SecureSumError, match="failed before and was thrown away"):
        sums.collector.total()


def test_a_vector_of_another_round_is_garbage_that_is_found_out(make_cohort, share):
    cohort = make_cohort(4)
    before = share(cohort)
    old = before.members["c0"].masked(ONES, before.alive, before.parcels["c0"])
    cohort.context = b"model, round 2"
    sums = share(cohort)
    sums.collector.take_masked("c0", old)
    sums.upload(dict.fromkeys(("c1", "c2", "c3"), ONES))
    sums.answer(["c1", "c2", "c3"])
    with pytest.raises(SecureSumError, match="do not cancel: one of them was told other terms"):
        sums.collector.total()


@pytest.mark.parametrize("lost", [False, True], ids=["seed", "mask key"])
@pytest.mark.parametrize("liars", [1, 2])
def test_wrong_answers_are_done_without_and_named(make_cohort, share, lost, liars):
    cohort = make_cohort(7, threshold=4)
    sums = share(cohort)
    survivors = cohort.names[1:] if lost else cohort.names
    sums.upload(dict.fromkeys(survivors, ONES))
    wrong = survivors[1 : 1 + liars]
    for name in survivors:
        answer = sums.members[name].unmask(sums.collector.survivors)
        if name in wrong:
            with pytest.raises(Lied, match=f"{name} answered another share of c0") as caught:
                sums.collector.take_unmask(name, answer[:32] + bytes(len(answer) - 32))
            assert caught.value.by == (name,)
        else:
            sums.collector.take_unmask(name, answer)
    assert sums.collector.total().tolist() == [len(survivors)] * 8


def test_one_wrong_share_without_answers_to_spare_closes_the_sum_and_its_sender_is_named(make_cohort, share):
    for at in (0, 2, 3):
        sums = share(make_cohort(4, threshold=3))
        sums.upload(dict.fromkeys(("c0", "c1", "c2"), ONES))
        sums.answer(["c0", "c1"])
        wrong = flipped(sums.members["c2"].unmask(sums.collector.survivors), 32 + 33 * at + 20)
        if at == 2:  # its own share has no hash; if the secret does not follow, that is c2's doing too
            sums.collector.take_unmask("c2", wrong)
            says = "the seed of c2 does not follow from the answers of c0, c1, c2: c2 shared it wrongly"
            with pytest.raises(Lied, match=says) as caught:
                sums.collector.total()
        else:
            with pytest.raises(Lied, match=f"c2 answered another share of c{at}") as caught:
                sums.collector.take_unmask("c2", wrong)
            with pytest.raises(BelowThreshold):
                sums.collector.total()
        assert caught.value.by == ("c2",)


def with_another_seed(cohort, monkeypatch):
    """Return the collector of a sum of which c1 shares another seed than the one it uses."""
    members, collector, split = cohort.members(), Collector(cohort.terms()), shamir.split
    for name, member in members.items():
        with monkeypatch.context() as patch:
            if name == "c1":
                patch.setattr(shamir, "split", lambda secret, *rest: split(bytes(32), *rest))
            collector.take_shares(name, member.shares())
    alive, parcels = collector.forward()
    for name in alive:
        collector.take_masked(name, members[name].masked(ONES, alive, parcels[name]))
    for name in alive:
        collector.take_unmask(name, members[name].unmask(collector.survivors))
    return collector, alive


def test_a_client_that_shares_another_seed_than_it_uses_is_named(make_cohort, monkeypatch):
    collector, _ = with_another_seed(make_cohort(4), monkeypatch)
    with pytest.raises(Lied, match="the seed of c1 does not follow from the answers of c0, c1, c2, c3") as caught:
        collector.total()
    assert caught.value.by == ("c1",)


def test_a_dealer_of_the_wrong_secret_costs_one_interpolation(make_cohort, monkeypatch):
    """Work is counted: sets of shares joined. Trying sets until one fits took 48 minutes for 4,096 clients."""
    collector, alive = with_another_seed(make_cohort(12), monkeypatch)
    joined, join = [], shamir.join
    monkeypatch.setattr(shamir, "join", lambda *given: joined.append(given) or join(*given))
    with pytest.raises(Lied):
        collector.total()
    assert len(joined) <= len(alive)
    assert len({tuple(shares)[:8] for shares, _ in joined}) == 1  # one set of places: weights are computed once


def test_messages_that_do_not_fit_leave_the_sum_as_it_was(make_cohort):
    cohort = make_cohort(6, threshold=4)
    members, collector = cohort.members(), Collector(cohort.terms())
    packages = {name: member.shares() for name, member in members.items()}

    def wrong(says, call, *arguments):
        with pytest.raises(SecureSumError, match=says):
            call(*arguments)

    first = packages["c0"]
    wrong("x is not in the cohort", collector.take_shares, "x", first)
    wrong("c0 sent shares for 4 clients", collector.take_shares, "c0", {n: first[n] for n in cohort.names[1:5]})
    wrong("not for exactly all the others", collector.take_shares, "c1", first)
    wrong("not 190 bytes long", collector.take_shares, "c0", {**first, "c1": b"short"})
    wrong("different commitments", collector.take_shares, "c0", {**first, "c1": flipped(first["c1"], 3)})
    wrong("before its survivors are settled", collector.total)
    for name in cohort.names[:5]:
        collector.take_shares(name, packages[name])
    wrong("c0 sent its shares twice", collector.take_shares, "c0", first)
    wrong("without being among the clients alive", collector.take_masked, "c0", np.ones(12, np.uint32))
    alive, parcels = collector.forward()
    assert collector.forward() == (alive, parcels)
    wrong("c5 came after", collector.take_shares, "c5", packages["c5"])
    wrong("c5 uploaded without being among", collector.take_masked, "c5", np.ones(12, np.uint32))
    vectors = {name: members[name].masked(ONES, alive, parcels[name]) for name in alive}
    wrong("x is not in the cohort", collector.take_masked, "x", vectors["c0"])
    wrong(r"c0 uploaded uint32 \[8\]; a masked vector is uint32 \[12\]", collector.take_masked, "c0", ONES)
    wrong("c0 uploaded int64", collector.take_masked, "c0", vectors["c0"].astype(np.int64))
    for name in ("c0", "c1", "c2", "c3"):
        collector.take_masked(name, vectors[name])
    wrong("c0 uploaded twice", collector.take_masked, "c0", vectors["c0"])
    wrong("c0 answered without being asked", collector.take_unmask, "c0", bytes(197))
    survivors = collector.survivors
    wrong("c4 came after the survivors were settled", collector.take_masked, "c4", vectors["c4"])
    wrong("c4 answered without being asked", collector.take_unmask, "c4", members["c4"].unmask(alive))
    answers = {name: members[name].unmask(survivors) for name in survivors}
    wrong("x is not in the cohort", collector.take_unmask, "x", answers["c0"])
    wrong("c0 answered 196 bytes; the shares of this sum are 197", collector.take_unmask, "c0", answers["c0"][1:])
    wrong("for other terms or other survivors", collector.take_unmask, "c0", flipped(answers["c0"], 0))
    for name in survivors:
        collector.take_unmask(name, answers[name])
    wrong("c0 answered twice", collector.take_unmask, "c0", answers["c0"])
    assert collector.total().tolist() == [4] * 8


def test_an_answer_of_another_round_or_for_other_survivors_is_refused(make_cohort, share):
    cohort = make_cohort(4, threshold=3)
    old = share(cohort)
    old.upload(dict.fromkeys(cohort.names, ONES))
    replayed = old.members["c0"].unmask(cohort.names)
    for context in (b"model, round 1", b"model, round 2"):
        cohort.context = context
        sums = share(cohort)
        sums.upload(dict.fromkeys(cohort.names[: 3 if context == b"model, round 1" else 4], ONES))
        _ = sums.collector.survivors
        with pytest.raises(SecureSumError, match="c0 answered for other terms or other survivors"):
            sums.collector.take_unmask("c0", replayed)
