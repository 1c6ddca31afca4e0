"""The endpoint for pages under hostile requests, in jumping time: who is known, what is read, what a mailbox bears."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.deploy.homes import ServerHome
from keyfed.deploy.web import Endpoint, Page, check_origin, check_web
from keyfed.errors import ConfigError
from keyfed.wire.pages import AWAY_SECONDS, MOST_PROOFS, Declined, Mailboxes, Proofs, request_text
from keyfed.wire.roster import Enrolled, Roster, page_key
from keyfed.wire.transport import Lost
from tests.examples import examples

from .jumping import play

NOW = 1_800_000_000.0
PEER = ("203.0.113.9", 50000)
KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def public(key):
    return key.public_key().public_bytes_raw()


def clock():
    try:
        return NOW + asyncio.get_running_loop().time()
    except RuntimeError:
        return NOW


def proof(path, body=b"", message="", *, key=KEY, name="anna", when=None, text=None):
    when = round(clock() * 1000) if when is None else when
    signed = request_text(path, name, when, message, hashlib.sha256(body).hexdigest()) if text is None else text
    return f"Keyfed {name}.{when}.{key.sign(signed).hex()}"


class Ask:
    """One request to the endpoint; its body comes in pieces, some after a pause."""

    def __init__(self, endpoint, what, body=b"", message="", *, pieces=None, pause=0.0, signed=True, **headers):
        path = f"/federation/{what}"
        found = {"host": "fl:1", "keyfed-sum": hashlib.sha256(body).hexdigest()}
        found |= {"keyfed-id": message} if message else {}
        found |= {"authorization": proof(path, body, message)} if signed else {}
        found |= {key.replace("_", "-"): value for key, value in headers.items() if value is not None}
        self.endpoint, self.pieces, self.pause, self.read = (
            endpoint,
            iter([body] if pieces is None else pieces),
            pause,
            0,
        )
        self.scope = {
            "type": "http", "path": path, "method": "GET" if what == "about" else "POST", "client": PEER,
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in found.items()],
        }  # fmt: skip
        self.status, self.headers, self.body, self.gone = None, {}, b"", asyncio.Event()

    async def receive(self):
        await asyncio.sleep(self.pause)
        piece = next(self.pieces, None)
        if piece is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self.read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": len(piece) > 0 and self.pause > 0}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        self.body += message.get("body", b"")

    async def go(self):
        await self.endpoint(self.scope, self.receive, self.send)
        return self

    @property
    def error(self):
        said = json.loads(self.body)
        assert "\n" not in said["reason"]
        assert 10 < len(said["reason"]) < 200
        return self.status, said["error"]


@pytest.fixture
def home(tmp_path):
    home = ServerHome(tmp_path)
    Roster(home.roster).write({
        "anna": Enrolled(public(KEY).hex(), page_key(public(KEY)), ""),
        "node": Enrolled(public(OTHER).hex(), "00" * 32, ""),
        "gone": Enrolled(public(KEY).hex(), page_key(public(KEY)), "", revoked=True),
    })  # fmt: skip
    return home


def fresh(home):
    made = Endpoint(home, None, Page("1", "h", "https://page.example"), Mailboxes(clock=clock), clock=clock)
    made.proven = []
    made._proven = made.proven.append
    return made


@pytest.fixture
def endpoint(home):
    return fresh(home)


def run(*steps):
    """Play coroutines at the same time; return their results and the seconds that passed."""

    async def all_of():
        return await asyncio.gather(*(step() for step in steps))

    return play(all_of())


def one(endpoint, *given, **how):
    async def asked():
        return await Ask(endpoint, *given, **how).go()

    (found,), seconds = run(asked)
    return found, seconds


# ------------------------------------------------------------------------------------------------------------- who


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"signed": False}, (401, "unproven")),
        ({"authorization": "Keyfed x"}, (401, "unproven")),
        ({"authorization": "Basic " + "A" * 5_000}, (401, "unproven")),
        ({"authorization": "Keyfed anna.1.zz"}, (401, "unproven")),
        ({"keyfed_sum": "0" * 64}, (401, "unproven")),  # the signature is over another body
        ({"keyfed_sum": "x"}, (400, "malformed")),
        ({"keyfed_sum": None}, None),
    ],
)
def test_an_answer_without_proof_is_declined_before_its_body_is_read(endpoint, headers, expected):
    ask, seconds = one(endpoint, "answer", b"x" * 10_000, "0" * 32, **headers)
    assert ask.error == (expected or (409, "late"))
    assert (ask.read, seconds) == (0, 0.0)
    assert ask.headers["connection"] == "close"
    assert (endpoint.proven == []) == (expected is not None)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"key": OTHER}, (401, "unproven")),
        ({"name": "node", "key": OTHER}, (403, "not enrolled")),  # a node is no page
        ({"name": "gone"}, (403, "not enrolled")),
        ({"name": "stranger"}, (403, "not enrolled")),
        ({"name": "an.na"}, (403, "not enrolled")),
        ({"when": round((NOW - 121) * 1000)}, (401, "clock")),
        ({"when": round((NOW + 121) * 1000)}, (401, "clock")),
        ({"when": round((NOW + 119) * 1000)}, (409, "late")),
        ({"when": 10**14}, (401, "clock")),
    ],
)
def test_who_signs_and_when(endpoint, how, expected):
    path = "/federation/answer"
    ask, _ = one(endpoint, "answer", b"", "0" * 32, authorization=proof(path, b"", "0" * 32, **how))
    assert ask.error == expected
    if expected[1] == "clock":
        assert "device's clock is" in json.loads(ask.body)["reason"]


def test_a_signature_serves_once_on_one_path_and_for_one_message(endpoint):
    signed = proof("/federation/answer", b"", "0" * 32)
    assert one(endpoint, "answer", b"", "0" * 32, authorization=signed)[0].error == (409, "late")
    assert one(endpoint, "answer", b"", "0" * 32, authorization=signed)[0].error == (401, "replayed")
    assert one(endpoint, "answer", b"", "1" * 32, authorization=signed)[0].error == (401, "unproven")
    assert one(endpoint, "leave", b"", authorization=signed)[0].error == (401, "unproven")
    upper = signed[:-128] + signed[-128:].upper()
    assert one(endpoint, "answer", b"", "0" * 32, authorization=upper)[0].error == (401, "unproven")


def test_old_signatures_are_forgotten_and_a_page_that_sends_too_many_waits():
    now = [NOW]
    proofs = Proofs(lambda name: public(KEY), lambda: now[0])
    none = hashlib.sha256(b"").hexdigest()

    def check(n):
        when = round(now[0] * 1000) + n
        return proofs.check("/p", {"authorization": proof("/p", when=when)}, none)

    for n in range(MOST_PROOFS):
        check(n)
    with pytest.raises(Declined, match="wait") as found:
        check(MOST_PROOFS)
    assert (found.value.status, found.value.error) == (429, "busy")
    now[0] += 300
    assert check(0) == "anna"
    assert len(proofs._seen["anna"]) == 1


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
@settings(max_examples=examples(200), deadline=None)
def test_no_text_in_place_of_a_proof_passes_or_breaks(text):
    proofs = Proofs(lambda name: public(KEY), lambda: NOW)
    for said in (text, f"Keyfed {text}", f"Keyfed anna.{text}.{'0' * 128}", f"Keyfed {text}.1800000000000.{'0' * 128}"):
        with pytest.raises(Declined):
            proofs.check("/federation/next", {"authorization": said}, "0" * 64)


def test_names_that_nobody_has_leave_nothing_behind():
    proofs = Proofs(lambda name: None, lambda: NOW)
    for n in range(3_000):
        with pytest.raises(Declined, match="not enrolled"):
            proofs.check("/p", {"authorization": proof("/p", name=f"stranger-{n}")}, "0" * 64)
    assert proofs._seen == {}


def test_pages_of_other_places_are_declined_and_one_place_may_be_allowed(endpoint):
    for origin, expected in [
        ("https://evil.example", (403, "origin")), ("null", (403, "origin")), ("http://fl:1", (403, "origin")),
    ]:  # fmt: skip
        ask = one(endpoint, "next", origin=origin)[0]
        assert ask.error == expected
        assert "access-control-allow-origin" not in ask.headers
    same = one(endpoint, "answer", b"", "0" * 32, origin="https://fl:1")[0]
    assert same.error == (409, "late")
    assert "access-control-allow-origin" not in same.headers
    other = one(endpoint, "answer", b"", "1" * 32, origin="https://page.example")[0]
    assert other.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-credentials" not in other.headers
    before = Ask(endpoint, "answer", signed=False, origin="https://page.example")
    before.scope["method"] = "OPTIONS"
    play(before.go())
    assert (before.status, "keyfed-sum" in before.headers["access-control-allow-headers"]) == (204, True)


def test_headers_that_come_twice_and_paths_that_are_none_are_declined(endpoint):
    twice = Ask(endpoint, "next", signed=False)
    twice.scope["headers"] += [(b"authorization", b"a"), (b"Authorization", b"b")]
    play(twice.go())
    assert twice.error == (400, "malformed")
    for what in ("", "next/", "other", "../next"):
        assert one(endpoint, what)[0].error == (404, "unknown")


# -------------------------------------------------------------------------------------------------------- messages


def post(endpoint, seconds=100.0, kind="train", body=b"model", most=10):
    async def sent():
        await asyncio.sleep(1.0)
        return await endpoint._mailboxes.exchange("anna", kind, body, most, clock() + seconds)

    return sent


def page(endpoint, *answers, polls=True, at=0.0):
    """A page: it polls, and answers a message by each of `answers`, functions of the message's id; None: not at all."""

    async def lived():
        await asyncio.sleep(at)
        asked = []
        for make in answers:
            asked.append(await Ask(endpoint, "next").go())
            message = asked[-1].headers["keyfed-id"]
            work = asyncio.ensure_future(Ask(endpoint, "next", message=message).go()) if polls else None
            await asyncio.sleep(1.0)
            if make is None:
                if work is not None:
                    work.cancel()
                return asked
            asked.append(await make(message).go())
            if work is not None:
                asked.append(await work)
        return asked

    return lived


def test_a_message_goes_to_its_page_and_the_answer_comes_back(endpoint):
    (asked, found), _ = run(page(endpoint, lambda message: Ask(endpoint, "answer", b"masked", message)), post(endpoint))
    fetched, answered, working = asked
    assert (fetched.status, fetched.body, fetched.headers["keyfed-kind"]) == (200, b"model", "train")
    assert float(fetched.headers["keyfed-deadline"]) == pytest.approx(NOW + 101, abs=1)
    assert [answered.status, working.status, found] == [204, 204, b"masked"]


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        (lambda e, m: Ask(e, "answer", b"x" * 11, m), (413, "too large"), "too large"),
        (lambda e, m: Ask(e, "answer", b"x" * 11, m, content_length="11"), (413, "too large"), "too large"),
        (lambda e, m: Ask(e, "answer", b"xx", m, pieces=[b"yy"]), (400, "malformed"), "no answer"),
        (lambda e, m: Ask(e, "answer", b"xx", m, content_length="xx"), (400, "malformed"), "no answer"),
        (lambda e, m: Ask(e, "answer", b"x" * 9, m, pieces=[b"x"] * 9, pause=60), (408, "slow"), "no answer"),
        (lambda e, m: Ask(e, "answer", b"", m, keyfed_error="stale", keyfed_reason="a\x00b"), None, "stale"),
        (lambda e, m: Ask(e, "answer", b"", m, keyfed_error="strange\x1b"), None, "client error"),
        (lambda e, m: Ask(e, "answer", b"", "f" * 32), (409, "late"), "no answer"),
    ],
)
def test_what_a_page_may_answer(endpoint, answer, status, expected):
    (asked, found), seconds = run(page(endpoint, lambda message: answer(endpoint, message)), post(endpoint))
    assert isinstance(found, Lost)
    assert found.reason == expected
    assert found.detail.isprintable()
    assert asked[1].error == status if status else asked[1].status == 204
    assert seconds < 130


def test_a_body_over_its_length_costs_no_more_than_the_limit(endpoint):
    endless = (b"x" for _ in range(10_000))
    (asked, _), _ = run(
        page(endpoint, lambda message: Ask(endpoint, "answer", b"", message, pieces=endless, pause=0.001)),
        post(endpoint),
    )
    assert asked[1].error[0] == 413
    assert asked[1].read == 11


def test_a_tab_that_closes_is_lost_soon_and_one_that_is_silent_at_the_deadline(home):
    endpoint = fresh(home)
    (_, found), seconds = run(page(endpoint, None), post(endpoint, 600))
    assert found == Lost("unreachable", "its page was closed")
    assert seconds < 3 + AWAY_SECONDS + 2
    endpoint = fresh(home)
    (_, found), seconds = run(page(endpoint, None, polls=False), post(endpoint, 600))
    assert (found.reason, round(seconds)) == ("no answer", 601)


def test_a_page_that_was_never_there_is_lost_at_once(endpoint):
    (found,), seconds = run(post(endpoint))
    assert (found, seconds) == (Lost("unreachable", "its page is not open"), 1.0)


def test_of_two_polls_the_newer_counts_and_a_reload_gets_the_same_message_again(endpoint):
    async def reload():
        first = asyncio.ensure_future(Ask(endpoint, "next").go())
        await asyncio.sleep(0.1)
        second = await Ask(endpoint, "next").go()
        await asyncio.sleep(0.1)
        again = await Ask(endpoint, "next").go()
        await asyncio.sleep(0.1)
        done = await Ask(endpoint, "answer", b"ok", again.headers["keyfed-id"]).go()
        await asyncio.sleep(0.1)
        twice = await Ask(endpoint, "answer", b"ok2", again.headers["keyfed-id"]).go()
        await asyncio.sleep(0.1)
        after = await Ask(endpoint, "next", message=again.headers["keyfed-id"]).go()
        return await first, second, again, done, twice, after

    ((first, second, again, done, twice, after), found), _ = run(reload, post(endpoint))
    assert first.error == (409, "elsewhere")
    assert second.headers["keyfed-id"] == again.headers["keyfed-id"]
    assert (second.body, again.body, done.status, found) == (b"model", b"model", 204, b"ok")
    assert (twice.error, after.error) == ((409, "late"), (409, "late"))


def test_a_page_has_one_message_and_two_readers_at_most(endpoint):
    async def crowd():
        fetched = await Ask(endpoint, "next").go()
        message = fetched.headers["keyfed-id"]
        slow = [
            asyncio.ensure_future(Ask(endpoint, "answer", b"x" * k, message, pieces=[b"x"] * k, pause=50).go())
            for k in (5, 6)
        ]
        await asyncio.sleep(0.1)
        third = await Ask(endpoint, "answer", b"ok", message).go()
        return third, await asyncio.gather(*slow)

    (((third, slow), found, other)), _ = run(crowd, post(endpoint), post(endpoint))
    assert third.error == (429, "busy")
    assert [one.error for one in slow] == [(408, "slow")] * 2
    assert found.reason == "no answer"
    assert other == Lost("not now", "its page has another message to answer")


def test_a_poll_without_a_message_ends_and_bodies_of_polls_are_not_taken(home):
    ask, seconds = one(fresh(home), "next")
    assert (ask.status, seconds) == (204, 25.0)
    assert one(fresh(home), "next", pieces=[b"x"])[0].error == (413, "too large")


def test_mailboxes_share_equal_bodies_and_hold_so_many_bytes():
    async def all_of():
        boxes = Mailboxes(held=100, clock=clock)
        waits = []
        for name in ("a", "b", "c"):
            waits.append(asyncio.ensure_future(boxes.next(name, "", asyncio.sleep(1000))))
        await asyncio.sleep(0)
        sent = [boxes.exchange(n, "train", b"x" * 60 if n != "c" else b"y" * 60, 9, clock() + 5) for n in "abc"]
        found = await asyncio.gather(*sent)
        letters = await asyncio.gather(*waits)
        return found, {id(letter.body) for letter in letters[:2]}, boxes.present()

    (found, bodies, present), _ = play(all_of())
    assert [one.reason for one in found] == ["no answer", "no answer", "not now"]
    assert "60 bytes wait" in found[2].detail
    assert len(bodies) == 1
    assert "c" in present


def test_addresses_of_the_command_line_are_checked():
    assert check_web("[::1]:9443") == ("::1", 9443)
    for wrong in ("x", "1:x", "99999", "", ":"):
        with pytest.raises(ConfigError, match="expected"):
            check_web(wrong)
    assert check_origin("https://A.example/") == "https://a.example"
    for wrong in ("http://a", "https://", "https://a/b", "https://a@b", "https://a?b", "a"):
        with pytest.raises(ConfigError, match="expected"):
            check_origin(wrong)
