"""How many a client hides among: its own number, bound in its hello, in every sum, whatever the server does."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.schema import SecureConfig
from keyfed.errors import RunError
from keyfed.private.secagg import member as member_module
from keyfed.private.secagg.keys import Identity
from keyfed.private.secagg.terms import check_terms
from keyfed.private.secagg.threshold import Floors, SecureSettings
from keyfed.run.folder import read_metrics
from keyfed.run.remote import device
from keyfed.run.remote.train import train_deployed
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.messages import Rejected, hello_text, pack, unpack
from keyfed.wire.roster import Enrolled, Roster, mark_of, roster_hash
from keyfed.wire.transport import Calls, Lost, deliver

from .deployed import QUICK, federation, session, small_config, vocabulary, write_texts
from .private import deploy, enrol, private_config

VICTIM = "client-0"


class Lines:
    """A listener that keeps what was said."""

    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)

    def start(self, what, rounds, done): ...

    def round(self, record): ...


def build(folder, clients=5, *, floor=3, victim=3, **more):
    """A secure federation whose first client hides among `victim` or more, and its configuration."""
    texts = write_texts(folder / "texts", clients)
    vocab, path = vocabulary(folder)
    transport, roster = federation(folder / "clients", texts)
    transport.handlers[VICTIM] = session(folder / "clients", texts[0], floor=victim)
    config = small_config(folder / "texts", path, secure=True, **{"cohort": clients, "rounds": 1, **more})
    secure = SecureConfig(on=True, floor=floor)
    return transport, roster, vocab, replace(config, secure=secure)


def test_a_client_that_cannot_hide_among_enough_is_left_out_and_the_server_says_so(tmp_path, record_property):
    transport, roster, vocab, config = build(tmp_path, 5, victim=6)
    lines = Lines()
    train_deployed(config, vocab, tmp_path / "run", transport, roster, lines, patience=QUICK)
    (record,) = read_metrics(tmp_path / "run")
    assert record["refused"] == {VICTIM: "hides among more"}
    assert len(record["contributors"]) == 4
    assert any(
        f"{VICTIM} is left out: hides among more (it takes part among 6 or more, not among 5)" in s for s in lines.said
    )
    record_property("fault", "server: a cohort smaller than a client's --hide-among")
    record_property("outcome", "that client is left out with its reason; exact sum of the others")


def test_who_wants_exactly_as_many_as_there_are_takes_part_and_all_must_stay(tmp_path):
    transport, roster, vocab, config = build(tmp_path, 5, victim=5)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    (record,) = read_metrics(tmp_path / "run")
    assert len(record["contributors"]) == 5


def test_a_client_that_wants_everybody_to_stay_and_goes_itself_stops_two_rounds(tmp_path, monkeypatch, record_property):
    """Its own number raises the threshold to all of them; twice is enough to see that it is not to be had."""

    def mute(client, post, handler):
        return Lost("no answer") if client == VICTIM and post.kind == "unmask" else deliver(client, post, handler)

    def lines(name):
        transport, roster, vocab, config = build(tmp_path / name, 6, victim=6, rounds=5)
        transport.fault = mute
        train_deployed(config, vocab, tmp_path / name / "run", transport, roster, patience=QUICK)
        return read_metrics(tmp_path / name / "run")

    found = lines("mended")
    assert [line["abandoned"] for line in found] == [True, True, False, False, False]
    assert all(VICTIM not in line["contributors"] and len(line["contributors"]) == 5 for line in found[2:])
    assert found[-1]["refused"][VICTIM] == "hides among more"
    monkeypatch.setattr("keyfed.wire.sums.MOST_STRAINED", 10**9)  # the mutant
    with pytest.raises(RunError, match="no round"):
        lines("mutant")
    record_property("fault", "secure: a client that hides among all, and is mute when the sum is opened")
    record_property("outcome", "two rounds closed; then it is left out, and the others go on")


def test_one_drop_out_below_the_number_keeps_the_sum_closed(tmp_path, record_property):
    transport, roster, vocab, config = build(tmp_path, 5, victim=5, rounds=2)
    seen = []

    def fault(client, post, handler):
        if post.kind == "train":
            seen.append(unpack(post.body).head)
        lost = client == "client-4" and post.kind == "upload" and unpack(post.body).head["round"] == 0
        return Lost("no answer") if lost else deliver(client, post, handler)

    transport.fault = fault
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    first, second = read_metrics(tmp_path / "run")
    assert first["abandoned"]
    assert not second["abandoned"]
    assert {head["threshold"] for head in seen if head["round"] == 1 and head["members"] == 5} == {5}
    record_property("fault", "secure: a drop-out leaves fewer than a client hides among")
    record_property("outcome", "the sum stays closed; the next round commits")


@pytest.mark.parametrize("mutant", [False, True])
def test_a_server_that_ignores_the_number_gets_nothing_from_that_client(tmp_path, monkeypatch, mutant):
    """The server does not care; the check of the client holds alone, and without it the client is in the sum."""
    transport, roster, vocab, config = build(tmp_path, 4, victim=5)
    monkeypatch.setattr(Calls, "able_to_hide", lambda self, clients: sorted(clients))
    monkeypatch.setattr(SecureSettings, "threshold_of", lambda self, members, hide_among=0: 2 * members // 3 + 1)
    if mutant:
        monkeypatch.setattr(
            member_module,
            "check_terms",
            lambda me, keys, terms, known, floors: check_terms(me, keys, terms, known, Floors(2)),
        )
        monkeypatch.setattr("keyfed.wire.client.Floors", lambda cohort: Floors(3))
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    (record,) = read_metrics(tmp_path / "run")
    assert (VICTIM in record["contributors"]) == mutant
    assert record["refused"].get(VICTIM) == (None if mutant else "refused by client")


def test_a_threshold_below_the_number_is_refused_though_the_cohort_is_large_enough(tmp_path, monkeypatch):
    transport, roster, vocab, config = build(tmp_path, 6, victim=6)
    monkeypatch.setattr(SecureSettings, "threshold_of", lambda self, members, hide_among=0: 5)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    (record,) = read_metrics(tmp_path / "run")
    assert record["refused"] == {VICTIM: "refused by client"}


@pytest.mark.parametrize("mutant", [False, True])
def test_the_runs_own_floor_reaches_the_clients(tmp_path, monkeypatch, mutant):
    """`secure.floor` is told, and a client refuses a smaller cohort. When it is not told, four hide among four."""
    if mutant:
        monkeypatch.setitem(device.TOLD, "secure", ("on",))
    transport, roster, vocab, config = build(tmp_path, 5, floor=5)
    monkeypatch.setattr(Calls, "able_to_hide", lambda self, clients: sorted(clients))
    monkeypatch.setattr(SecureSettings, "threshold_of", lambda self, members, hide_among=0: 2 * members // 3 + 1)
    monkeypatch.setattr("keyfed.run.remote.rounds.RemoteRunLoop._draw", lambda self, present: list(present)[:4])
    with nullcontext() if mutant else pytest.raises(RunError, match="was completed: nothing was learnt"):
        train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    (record,) = read_metrics(tmp_path / "run")
    assert record["abandoned"] != mutant
    assert len(record["contributors"]) == (4 if mutant else 0)


def test_the_number_is_signed_with_the_hello(tmp_path, record_property):
    """Somebody between server and client that lowers the number breaks the proof."""
    transport, roster, vocab, config = build(tmp_path, 5, victim=4)

    def lower(client, post, handler):
        answer = deliver(client, post, handler)
        if client == VICTIM and post.kind == "hello":
            return pack(unpack(answer).head | {"hide_among": 3})
        return answer

    transport.fault = lower
    lines = Lines()
    train_deployed(config, vocab, tmp_path / "run", transport, roster, lines, patience=QUICK)
    (record,) = read_metrics(tmp_path / "run")
    assert VICTIM not in record["contributors"]
    record_property("fault", "server: another --hide-among than the client signed")
    record_property("outcome", "the proof of the hello does not fit: not enrolled")


def test_the_text_that_is_signed_has_the_number_in_it():
    assert hello_text("a", "run", "n", 3) != hello_text("a", "run", "n", 4)


@given(st.lists(st.integers(2, 12), max_size=12))
@settings(deadline=None)
def test_the_largest_set_is_left_in_which_everybody_hides_among_enough(wanted):
    calls = Calls.__new__(Calls)
    calls.hide_among = {f"c{k}": n for k, n in enumerate(wanted)}
    left = calls.able_to_hide(calls.hide_among)
    assert all(calls.hide_among[c] <= len(left) for c in left)
    for size in range(len(left) + 1, len(wanted) + 1):  # no larger set does: not even the most modest clients
        assert sorted(wanted)[size - 1] > size


def test_a_private_run_leaves_out_who_wants_more_than_its_floor(tmp_path):
    config = private_config(tmp_path, clients=5, secure=True, rounds=1)
    transport, roster = enrol(tmp_path)
    transport.handlers[VICTIM] = session(tmp_path / "clients", tmp_path / "texts" / f"{VICTIM}.txt", floor=4)
    lines = Lines()
    called = []

    def fault(client, post, handler):
        called.append((client, post.kind))
        return deliver(client, post, handler)

    transport.fault = fault
    deploy(tmp_path, config, transport, roster, listener=lines)
    assert (VICTIM, "train") not in called
    assert ("client-1", "train") in called
    assert f"{VICTIM} is left out: hides among more (4; secure.floor is 3)" in lines.said


# Strangers


def identity(name):
    return Identity.from_bytes(name.encode().ljust(32, b"."))


def marks(*names):
    return [mark_of(name, identity(name).public.hex()) for name in names]


def test_the_first_roster_is_taken_and_a_mostly_new_one_refused_unless_trusted(tmp_path):
    store = DeviceStore(tmp_path)
    store.meet(marks("me", "a", "b", "c"))
    store.meet(marks("me", "a", "b", "c", "d", "e"))  # two new ones of six
    swapped = marks("me", "x1", "x2", "x3")
    with pytest.raises(Rejected, match="3 of the 4 clients on the roster were never seen") as caught:
        store.meet(swapped)
    assert caught.value.reason == "strangers"
    assert roster_hash(swapped) in caught.value.detail
    assert store.roster()["hash"] == roster_hash(marks("me", "a", "b", "c", "d", "e"))
    store.meet(swapped, trusted=roster_hash(swapped))
    assert store.roster()["hash"] == roster_hash(swapped)


@pytest.mark.parametrize("listed", ["x", [1], ["short"], [["a" * 32]], {}])
def test_a_roster_that_is_none_is_refused(tmp_path, listed):
    with pytest.raises(Rejected, match="a roster that is not a list of marks"):
        DeviceStore(tmp_path).meet(listed)


def test_a_cohort_of_strangers_is_refused_after_somebody_is_known(tmp_path):
    store = DeviceStore(tmp_path)
    first = {name: identity(name).public for name in ("me", "a", "b", "c")}
    store.refuse_strangers(first, "me")  # everybody is new: there is no first round otherwise
    store.pin(first)
    store.refuse_strangers({n: identity(n).public for n in ("me", "a", "b", "x", "y")}, "me")
    with pytest.raises(Rejected, match="2 of the 3 others of this sum are on no roster"):
        store.refuse_strangers({n: identity(n).public for n in ("me", "a", "x", "y")}, "me")
    store.meet(marks("me", "a", "b", "c", "x"))
    store.refuse_strangers({n: identity(n).public for n in ("me", "a", "x", "y")}, "me")


@pytest.mark.parametrize("mutant", [False, True])
def test_invented_clients_do_not_isolate_somebody_who_knows_others(tmp_path, monkeypatch, mutant, record_property):
    """A server that, after an honest run, calls one client together with two that it has invented itself."""
    transport, roster, vocab, config = build(tmp_path, 4)
    train_deployed(config, vocab, tmp_path / "run", transport, roster, patience=QUICK)
    if mutant:
        monkeypatch.setattr(DeviceStore, "refuse_strangers", lambda self, identities, me: None)
        monkeypatch.setattr(DeviceStore, "meet", lambda self, listed, trusted="": None)
    victim = transport.handlers[VICTIM]
    sybils = write_texts(tmp_path / "sybils", 3)[1:]
    invented, _ = federation(tmp_path / "sybil-homes", sybils)
    invented.handlers = {f"x-{name}": s for name, s in invented.handlers.items()}
    for name, one in invented.handlers.items():
        one.name = name
    everybody = Roster(tmp_path / "other-roster.json")
    for name, one in {**invented.handlers, VICTIM: victim}.items():
        everybody.write({name: Enrolled(one.store.identity().public.hex(), name.encode().hex(), "2026-01-01")})
    invented.handlers[VICTIM] = victim
    patience = replace(QUICK, quorum=0.05)
    if mutant:
        train_deployed(config, vocab, tmp_path / "attack", invented, everybody, patience=patience)
        (record,) = read_metrics(tmp_path / "attack")
        assert VICTIM in record["contributors"]
        return
    with pytest.raises(Exception, match=r"only [0-9] of at least 3 clients came"):
        train_deployed(config, vocab, tmp_path / "attack", invented, everybody, patience=patience)
    record_property("fault", "server: invents most of a roster")
    record_property("outcome", "a client that knows others refuses it: strangers")


def test_the_server_prints_the_roster_that_its_clients_keep(tmp_path):
    transport, roster, vocab, config = build(tmp_path, 3)
    lines = Lines()
    train_deployed(config, vocab, tmp_path / "run", transport, roster, lines, patience=QUICK)
    (said,) = [line for line in lines.said if line.startswith("roster ")]
    kept = json.loads((tmp_path / "clients" / VICTIM / "roster.json").read_text())
    assert kept["hash"] == roster_hash(roster.marks())
    assert kept["hash"] in said
    assert kept["clients"] == 3


def test_keys_of_a_refused_cohort_are_not_used_up(tmp_path):
    store = DeviceStore(tmp_path)
    signed = store.new_keys("me")
    store.pin({"me": store.identity().public, "a": identity("a").public})
    with pytest.raises(Rejected, match="others of this sum"):
        store.refuse_strangers({"me": store.identity().public, "x": identity("x").public}, "me")
    assert store.take_keys(signed.serial) is not None
