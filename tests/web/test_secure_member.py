"""A client of a secure sum in JavaScript against Python's: the same bytes for the same entropy, the same refusals."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from keyfed.errors import Refused, SecureSumError
from keyfed.private.secagg.accusation import shown_key
from keyfed.private.secagg.collector import Collector
from keyfed.private.secagg.keys import (
    Identity,
    SignedKeys,
    agree,
    check_answer,
    framed,
    is_possessed,
    make_keys,
    verify,
)
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors
from keyfed.private.secagg.wire import add_mask, package_text
from tests.unit.private.conftest import counter

from .node_cases import Browser, needs_node

pytestmark = needs_node

SERIAL, CONTEXT = 7, b"model, round 1"


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


NAMES = ["c0", "c1", "ann", "bøb", "\uffee", "\U0001f600"]  # the last two sort otherwise by UTF-16 units


class Cohort:
    """Clients with keys; those named in `pages` are JavaScript's, and all have a twin in Python with its entropy."""

    def __init__(self, browser, names, pages, threshold, length=6):
        self.browser, self.pages, self.threshold, self.length = browser, set(pages), threshold, length
        self.identities = {name: Identity.make(counter(f"identity {name}")) for name in names}
        self.private, self.signed = {}, {}
        for name, identity in self.identities.items():
            self.private[name], self.signed[name] = make_keys(identity, name, SERIAL, counter(f"keys {name}"))
            if name in self.pages:
                self.draw(name)

    def draw(self, name):
        private = self.identities[name].private_bytes().hex()
        made = self.browser("keys", client=name, serial=SERIAL, identity=private, random=f"keys {name}")
        assert made == {"posted": self.signed[name].to_json(), "public": self.identities[name].public.hex()}
        return made

    def known(self):
        return {name: identity.public for name, identity in self.identities.items()}

    def terms(self, **changed):
        keys = {**self.signed, **changed}
        return SumTerms(CONTEXT, tuple(k for k in keys.values() if k), self.threshold, self.length)

    def given(self, name, terms=None, identities=None, floor=3):
        terms, identities = terms or self.terms(), self.known() if identities is None else identities
        return {
            "client": name, "cohort": [k.to_json() for k in terms.cohort], "threshold": terms.threshold,
            "length": terms.length, "context": terms.context.hex(), "floor": floor, "random": f"sum {name}",
            "identities": {k: v.hex() for k, v in identities.items()},
        }  # fmt: skip

    def twin(self, name, terms=None, identities=None, floor=3):
        known = self.known() if identities is None else identities
        return Member(name, self.private[name], terms or self.terms(), known, Floors(floor), counter(f"sum {name}"))


def hexed(mapping):
    return {name: value.hex() for name, value in mapping.items()}


def test_browsers_and_python_clients_are_members_of_one_sum_byte_for_byte(browser):
    """Six clients, four of them JavaScript's: one is silent, one is lost after its shares, four open the sum."""
    cohort = Cohort(browser, NAMES, NAMES[1:5], threshold=4)
    terms = cohort.terms()
    collector, twins = Collector(terms), {name: cohort.twin(name) for name in NAMES}
    rng = np.random.default_rng(1)
    values = {name: rng.integers(0, 2**32, 6, dtype=np.uint32) for name in NAMES}
    for name in NAMES:
        packages = twins[name].shares()
        if name in cohort.pages:
            assert browser("join", **cohort.given(name)) == terms.digest().hex()
            assert browser("shares", client=name) == hexed(packages)
        if name != "c1":
            collector.take_shares(name, packages)
    alive, parcels = collector.forward()
    for name in alive:
        sent = twins[name].masked(values[name], alive, parcels[name])
        if name in cohort.pages:
            received = hexed(parcels[name])
            page = browser("masked", client=name, values=values[name].tolist(), alive=list(alive), received=received)
            assert page == sent.astype("<u4").tobytes().hex()
        if name != "ann":
            collector.take_masked(name, sent)
    survivors = collector.survivors
    for name in survivors:
        answer = twins[name].unmask(survivors)
        if name in cohort.pages:
            assert browser("unmask", client=name, survivors=list(survivors)) == answer.hex()
        collector.take_unmask(name, answer)
    assert sorted(survivors) == sorted(set(NAMES) - {"c1", "ann"})
    expected = sum((values[name] for name in survivors), np.zeros(6, np.uint32))
    np.testing.assert_array_equal(collector.total(), expected)


def test_what_a_page_draws_by_itself_is_good_for_python(browser):
    identity = Identity.make()
    private = identity.private_bytes().hex()
    posted = browser("keys", client="page", serial=2**40, identity=private)["posted"]
    keys = SignedKeys.from_json(posted)
    verify(keys, identity.public)
    assert is_possessed(keys)
    assert browser("possessed", posted=posted) is True
    assert browser("possessed", posted={**posted, "serial": 3}) is False
    signed = bytes.fromhex(browser("answer", identity=private, client="page", kind="train", answer="abcd"))
    assert check_answer(identity.public, "page", "train", signed) == b"\xab\xcd"
    with pytest.raises(SecureSumError):
        check_answer(identity.public, "page", "unmask", signed)


def test_a_mask_longer_than_a_chunk_is_pythons(browser):
    for words, sign in ((2**18 + 5, 1), (2**18 - 1, -1), (3, -1)):
        vector = np.zeros(words, np.uint32)
        add_mask(vector, bytes(range(32)), sign)
        found = browser("mask", key=bytes(range(32)).hex(), words=words, sign=sign)
        assert found == sha256(vector.astype("<u4").tobytes()).hexdigest()


def test_names_sort_as_in_python(browser):
    names = ["b", "a", "ab", "", "\uffee", "\U0001f600", "Z", "é", "e\u0301", "\U0001f600a"]
    assert browser("sorted", names=names) == sorted(names)


def refusal_of(call):
    with pytest.raises(Refused) as refused:
        call()
    return str(refused.value)


def alike(page, python):
    """Whether both say the same, but for the identity that Python adds."""
    assert page["refused"].partition(" its identity")[0] == python.partition(" its identity")[0]


def test_terms_that_python_refuses_a_page_refuses_in_the_same_words(browser):
    names = ["c0", "c1", "c2", "c3"]
    cohort = Cohort(browser, names, ["c0"], threshold=3)
    c0, c1 = cohort.signed["c0"], cohort.signed["c1"]
    other = make_keys(cohort.identities["c0"], "c0", SERIAL, counter("other"))[1]
    known = cohort.known()
    cases = [
        {"floor": 5},
        {"terms": SumTerms(CONTEXT, tuple(cohort.signed.values()), 2, 6)},
        {"terms": SumTerms(CONTEXT, tuple(cohort.signed.values()), 3, 6), "floor": 4},
        {"terms": replace(cohort.terms(), cohort=tuple(k for k in cohort.signed.values() if k.client != "c0"))},
        {"terms": cohort.terms(c0=other)},
        {"terms": cohort.terms(c0=replace(c0, serial=8))},
        {"terms": cohort.terms(c0=replace(c0, channel=other.channel))},
        {"terms": cohort.terms(c1=replace(c1, signature=bytes(64)))},
        {"terms": cohort.terms(c1=replace(c1, mask=other.mask))},
        {"identities": {name: key for name, key in known.items() if name != "c2"}},
        {"identities": {**known, "c2": known["c1"]}},
    ]
    for case in cases:
        alike(
            browser.ask("join", **cohort.given("c0", **case)), refusal_of(lambda case=case: cohort.twin("c0", **case))
        )
    for wrong in ({"threshold": 9}, {"threshold": 0}, {"length": 0}, {"length": 2**48}):
        assert "error" in browser.ask("join", **{**cohort.given("c0"), **wrong})
    twice = cohort.given("c0")
    twice["cohort"].append(twice["cohort"][1])
    assert "twice" in browser.ask("join", **twice)["error"]
    for field, bad in (("mask", "zz" * 32), ("proof", "00"), ("serial", -1), ("serial", 1.5), ("client", "")):
        broken = cohort.given("c0")
        broken["cohort"][1] = {**broken["cohort"][1], field: bad}
        assert "error" in browser.ask("join", **broken)
    assert browser("join", **cohort.given("c0"))  # none of it used the keys up
    assert "used before" in browser.ask("join", **cohort.given("c0"))["refused"]


def started(browser, **how):
    """Four clients behind their shares: c0 is a page; return the cohort and what c0 receives."""
    names = ["c0", "c1", "c2", "c3"]
    cohort = Cohort(browser, names, ["c0"], threshold=3)
    browser("join", **cohort.given("c0", **how))
    browser("shares", client="c0")
    twins = {name: cohort.twin(name) for name in names}
    packages = {name: twin.shares() for name, twin in twins.items()}
    return cohort, twins["c0"], {name: packages[name]["c0"] for name in names[1:]}


def test_lists_and_packages_that_do_not_fit_end_the_sum_for_a_page(browser):
    names = ["c0", "c1", "c2", "c3"]
    lists = [
        (["c0", "c1", "c1", "c2"], None), ([*names, "zoe"], None), (["c0", "c1"], None), (["c1", "c2", "c3"], None),
        (names, ["c1", "c2"]), (["c0", "c1", "c2"], None),
    ]  # fmt: skip
    for alive, due in lists:
        _, twin, received = started(browser)
        got = {name: received[name] for name in due or received}
        say = {"client": "c0", "values": [0] * 6, "alive": alive, "received": hexed(got)}
        page = browser.ask("masked", **say)
        python = refusal_of(lambda t=twin, a=alive, g=got: t.masked(np.zeros(6, np.uint32), a, g))
        if "names a client twice" not in python:  # Python lists them
            assert page["refused"] == python
        assert "refused" in page
        assert "over" in browser.ask("masked", **say)["refused"]  # no second try
        assert "over" in browser.ask("unmask", client="c0", survivors=names)["refused"]


def test_a_call_at_the_wrong_time_changes_nothing(browser):
    names = ["c0", "c1", "c2", "c3"]
    _, twin, received = started(browser)
    say = {"client": "c0", "values": [5] * 6, "alive": names, "received": hexed(received)}
    assert "shared" in browser.ask("unmask", client="c0", survivors=names)["refused"]
    assert "shared" in browser.ask("shares", client="c0")["refused"]
    sent = browser("masked", **say)
    assert sent == twin.masked(np.full(6, 5, np.uint32), names, received).astype("<u4").tobytes().hex()
    assert "masked" in browser.ask("masked", **say)["refused"]
    assert browser("unmask", client="c0", survivors=names[:3]) == twin.unmask(names[:3]).hex()
    assert "over" in browser.ask("unmask", client="c0", survivors=names)["refused"]


@pytest.mark.parametrize("signed", [True, False])
def test_a_package_that_does_not_open_is_accused_and_proved_where_its_sender_signed_it(browser, signed):
    names = ["c0", "c1", "c2", "c3"]
    cohort, twin, received = started(browser)
    received["c2"] = received["c2"][:-1] + bytes([received["c2"][-1] ^ 1])
    digest = cohort.terms().digest()
    text = package_text(digest, "c2", "c0", received["c2"])
    signature = cohort.identities["c2"].sign(text) if signed else bytes(64)
    signatures = {"c2": signature}
    page = browser.ask(
        "masked", client="c0", values=[0] * 6, alive=names, received=hexed(received), signatures=hexed(signatures)
    )
    with pytest.raises(Refused) as refused:
        twin.masked(np.zeros(6, np.uint32), names, received, signatures)
    assert [page["refused"], page["accused"]] == [str(refused.value), "c2"]
    assert page["evidence"] == (refused.value.evidence.hex() if signed else None)
    if signed:
        channels = [cohort.signed[name].channel for name in ("c0", "c2")]
        shown = shown_key(*channels, framed(digest, b"c0", b"c2"), bytes.fromhex(page["evidence"]))
        assert shown == agree(cohort_channel(cohort, "c2"), channels[0])


def cohort_channel(cohort, name):
    """Return the private half of a client's channel key, drawn again from its entropy."""
    drawn, _ = make_keys(cohort.identities[name], name, SERIAL, counter(f"keys {name}"))
    return drawn.take()[1]


def test_a_key_of_low_order_is_refused_and_its_owner_named(browser):
    names = ["c0", "c1", "c2", "c3"]
    cohort = Cohort(browser, names, ["c0"], threshold=3)
    identity = cohort.identities["c1"]
    c1 = cohort.signed["c1"]
    low = replace(c1, channel=bytes(32))
    text = framed(b"keyfed one-time keys 1", b"c1", SERIAL.to_bytes(8, "big"), low.mask, low.channel)
    low = replace(low, signature=identity.sign(text))
    browser("join", **cohort.given("c0", terms=cohort.terms(c1=low)))
    found = browser.ask("shares", client="c0")
    assert found["accused"] == "c1"
    assert "low order" in found["refused"]
