"""A stranger in front of the SuperLink: what of its bytes is read, and how long its connections stay open.

Time is a loop's whose clock jumps to the next timer; bytes are counted. Nothing waits, nothing is measured.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
from types import SimpleNamespace

import httptools
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.deploy.enrolment import KnownKeys
from keyfed.deploy.homes import ServerHome
from keyfed.wire import doors
from keyfed.wire.doors import (
    LONGEST_ADDRESS,
    ConnectionLimits,
    Connections,
    Door,
    _without_trailers,
    most_connections,
)
from keyfed.wire.flower import gate as gates
from keyfed.wire.flower.gate import (
    BODY_SECONDS,
    FLEET,
    FLEET_CAP,
    HERE_CAP,
    LEAVE,
    LONGEST_PATH,
    Gate,
    allowed,
    node_proof,
)
from keyfed.wire.roster import Enrolled, Roster, key_sum
from tests.examples import examples

from .jumping import play

PATH = "/v1/fleet/push-object"
FAR, HERE = "203.0.113.9", "203.0.113.1"
NOW = datetime.datetime(2026, 11, 16, 12, 0, tzinfo=datetime.UTC)


class Request:
    """A request whose body comes in parts, some after a pause; counts what was read of it."""

    def __init__(self, parts, headers=(), path=PATH, client=FAR, pause=0.0, method="POST", end=True):
        self.parts, self.pause, self.end, self.read, self.calls = iter(parts), pause, end, 0, 0
        self.scope = {
            "type": "http", "path": path, "method": method, "headers": list(headers),
            "client": (client, 50000), "server": (HERE, 9092),
        }  # fmt: skip
        self.sent, self.reached, self.proven = [], [], []

    async def receive(self):
        self.calls += 1
        await asyncio.sleep(self.pause)
        body = next(self.parts, None)
        if body is None:
            return {"type": "http.request" if self.end else "http.disconnect", "body": b"", "more_body": False}
        self.read += len(body)
        return {"type": "http.request", "body": body, "more_body": True}

    async def send(self, message):
        self.sent.append(message)

    async def app(self, scope, receive, send):
        body, more = b"", True
        while more:  # as Flower does: all of it, whatever it is
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.reached.append(body)

    def through(self, proof=lambda headers: 0, leave=lambda wish: False):
        _, seconds = play(Gate(self.app, leave, proof, self.proven.append)(self.scope, self.receive, self.send))
        return (self.sent[0]["status"] if self.sent else None), seconds


def mega(count):
    return (bytes(1_000_000) for _ in range(count))


def length(count):
    return [(b"content-length", str(count).encode())]


KEY = ec.generate_private_key(ec.SECP384R1())
PUBLIC = KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signed(when=NOW, key=KEY, public=PUBLIC):
    text = when.isoformat()
    signature = key.sign(text.encode(), ec.ECDSA(hashes.SHA256()))
    return [
        (b"flwr-public-key", base64.b64encode(public)),
        (b"flwr-timestamp", text.encode()),
        (b"flwr-signature", base64.b64encode(signature)),
    ]


PROOF = node_proof(lambda key: key == key_sum(PUBLIC), lambda: NOW)


# ------------------------------------------------------------------------------------------------------------ bodies


def test_an_honest_body_passes_whole_and_its_connection_is_known():
    for headers in ([], length(8_000_000)):
        one = Request(mega(8), headers + signed())
        assert one.through(PROOF)[0] is None
        assert [len(body) for body in one.reached] == [8_000_000]
        assert one.proven == [(FAR, 50000)]


@pytest.mark.parametrize("change", ["none", "no key", "no time", "no signature", "twice", "old", "early", "naive"])
def test_without_proof_not_a_byte_is_read(change):
    headers = {
        "none": [], "no key": signed()[1:], "no time": signed()[::2], "no signature": signed()[:2],
        "twice": signed() + signed()[:1], "old": signed(NOW - datetime.timedelta(seconds=305)),
        "early": signed(NOW + datetime.timedelta(seconds=5)), "naive": signed(NOW.replace(tzinfo=None)),
    }[change]  # fmt: skip
    one = Request(mega(900), [*headers, (b"transfer-encoding", b"chunked")])
    assert one.through(PROOF)[0] == 401
    assert (one.calls, one.read, one.reached, one.proven) == (0, 0, [], [])
    assert (b"connection", b"close") in one.sent[0]["headers"]


def test_a_key_that_is_not_enrolled_and_a_signature_of_another_key_are_refused_unread():
    other = ec.generate_private_key(ec.SECP384R1())
    its = other.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for headers, status in ((signed(key=other, public=its), 412), (signed(key=other), 401)):
        one = Request(mega(900), headers)
        assert one.through(PROOF)[0] == status
        assert (one.calls, one.reached) == (0, [])


@given(st.lists(st.tuples(st.sampled_from([n for n, _ in signed()] + [b"host"]), st.binary(max_size=60)), max_size=5))
@settings(max_examples=examples(200), deadline=None)
def test_no_headers_but_the_right_ones_are_proof_and_none_raise(headers):
    assert PROOF(headers) in (401, 412)


def test_a_roster_that_cannot_be_read_lets_no_one_in_for_now(tmp_path):
    (tmp_path / "roster.json").write_text("{")
    known = KnownKeys(ServerHome(tmp_path))
    one = Request(mega(1), signed())
    assert one.through(node_proof(lambda key: key in known(), lambda: NOW))[0] == 503
    assert one.calls == 0


def test_the_mutant_without_proof_reads_a_stranger_to_the_limit():
    one = Request(mega(900))
    assert one.through(lambda headers: 0)[0] == 413
    assert one.read == 9_000_000


def test_a_length_over_the_limit_is_refused_unread():
    one = Request(mega(900), length(FLEET_CAP + 1))
    assert one.through()[0] == 413
    assert (one.calls, one.reached) == (0, [])


@pytest.mark.parametrize("headers", [[], [(b"transfer-encoding", b"chunked")], length(FLEET_CAP)])
def test_a_body_is_cut_at_the_limit_whatever_its_headers_say(headers):
    one = Request(mega(900), headers)
    assert one.through()[0] == 413
    assert (one.read, one.reached) == (9_000_000, [])


def test_a_body_that_is_longer_than_its_length_ends_there():
    one = Request([b"12345"] * 100, length(10))
    assert one.through()[0] == 413
    assert one.read == 15


@pytest.mark.parametrize("value", [b"-1", b"1e3", b"", b"9" * 21, "²".encode()])
def test_a_length_that_is_no_number_is_refused(value):
    one = Request([b"x"], [(b"content-length", value)])
    assert one.through()[0] == 400
    assert one.calls == 0


def test_the_mutant_without_a_limit_takes_everything(monkeypatch):
    monkeypatch.setattr(gates, "FLEET_CAP", 10**12)
    one = Request(mega(100))
    assert one.through()[0] is None
    assert one.read == 100_000_000


def test_a_slow_body_ends_by_the_time_limit(monkeypatch):
    one = Request((b"x" for _ in range(10**6)), pause=1.0)
    assert one.through() == (408, BODY_SECONDS)
    assert one.reached == []
    mute = Request([b"x"], pause=10**9)
    assert mute.through() == (408, BODY_SECONDS)
    monkeypatch.setattr(gates, "BODY_SECONDS", 10**7)  # the mutant waits for it
    one = Request((b"x" for _ in range(1000)), pause=1.0)
    assert one.through() == (None, 1001.0)


def test_a_sender_that_goes_away_reaches_nothing():
    one = Request([b"x"], end=False)
    assert one.through()[0] is None
    assert (one.reached, one.sent) == ([], [])


def test_the_other_paths_have_limits_too():
    health = Request(mega(9), path="/health")
    assert health.through()[0] == 413
    assert health.read == 1_000_000
    leave = Request([b"x"] * 100, path=LEAVE, pause=1.0)
    assert leave.through() == (408, gates.SMALL_SECONDS)
    program = Request(mega(900), path="/v1/control/start-run", client="127.0.0.1")
    assert program.through()[0] == 413
    assert program.read == HERE_CAP + 1_000_000
    far = Request(mega(900), path="/v1/control/start-run")
    assert far.through()[0] == 403
    assert far.calls == 0


# ------------------------------------------------------------------------------------------------------- connections


class Wire(asyncio.Transport):
    """A transport that notes whether it was ended."""

    def __init__(self, host=FAR, port=1):
        super().__init__()
        self.host, self.port, self.ended = host, port, False

    def get_extra_info(self, name, default=None):
        return {"peername": (self.host, self.port), "sockname": (HERE, 9092)}.get(name, default)

    def abort(self):
        self.ended = True


class Http:
    """uvicorn's side of a connection: a head is complete at its blank line."""

    def __init__(self):
        self.cycle, self.data, self.made, self.lost, self.paused = None, b"", 0, 0, 0

    def connection_made(self, transport):
        self.made += 1

    def connection_lost(self, exc):
        self.lost += 1

    def data_received(self, data):
        self.data += data
        if (self.cycle is None or self.cycle.response_complete) and b"\r\n\r\n" in self.data:
            self.cycle, self.data = SimpleNamespace(response_complete=False), b""

    def eof_received(self):
        return None

    def pause_writing(self):
        self.paused += 1

    def resume_writing(self):
        self.paused -= 1


LIMITS = ConnectionLimits(total=100, address=10, strangers=20, strangers_address=4)


def arrive(connections, *wires):
    """Open connections without TLS; return their doors."""
    loop, doors = asyncio.get_running_loop(), []
    for wire in wires:
        doors.append(Door(Http(), connections, None, loop))
        doors[-1].connection_made(wire)
    return doors


def wires(count, host=FAR, first=1):
    return [Wire(host, first + k) for k in range(count)]


async def after(seconds):
    await asyncio.sleep(seconds)


HEAD = b"POST /v1/fleet/push-object HTTP/1.1\r\n\r\n"


def test_a_head_that_does_not_end_ends_the_connection_however_it_drips():
    async def main():
        mute, dripping, honest = wires(3)
        doors = arrive(Connections(ConnectionLimits()), mute, dripping, honest)
        doors[2].data_received(HEAD)
        for _ in range(9):
            doors[1].data_received(b"x")
            await after(1.0)
        assert [mute.ended, dripping.ended] == [False, False]
        await after(1.01)
        assert mute.ended
        assert dripping.ended
        assert not honest.ended
        await after(100.0)
        assert not honest.ended  # a request that is being answered has no time limit here

    play(main())


def test_the_next_head_on_a_connection_has_the_same_limit():
    async def main():
        (wire,) = wires(1)
        (door,) = arrive(Connections(ConnectionLimits()), wire)
        door.data_received(HEAD)
        await after(60.0)
        door._http.cycle.response_complete = True
        await after(60.0)
        assert not wire.ended  # an idle connection is uvicorn's to close
        door.data_received(b"POST")
        await after(9.9)
        assert not wire.ended
        await after(0.2)
        assert wire.ended

    play(main())


def test_the_mutant_without_a_timer_keeps_half_sent_requests_for_ever(monkeypatch):
    monkeypatch.setattr(Door, "_wait_for_head", lambda self: None)

    async def main():
        (wire,) = wires(1)
        arrive(Connections(ConnectionLimits()), wire)[0].data_received(b"POST")
        await after(10**6)
        assert not wire.ended

    play(main())


@pytest.mark.parametrize("mended", [True, False])
def test_headers_after_a_chunked_body_are_not_kept(mended):
    """uvicorn's parser hands trailers on as headers, and would keep every one of them with the request."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Kept(HttpToolsProtocol):
        """Only what keeps headers."""

        def __init__(self):
            self.headers, self.url, self.expect_100_continue = [], b"", False
            self.parser = httptools.HttpRequestParser(self)

        def on_message_begin(self):
            pass

        def on_headers_complete(self):
            self.complete = len(self.headers)

        def on_body(self, body):
            pass

        def on_message_complete(self):
            pass

    made = (_without_trailers(Kept) if mended else Kept)()
    made.parser.feed_data(b"POST /keyfed/leave HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
    for _ in range(100):
        made.parser.feed_data(b"aa: bb\r\n")
    assert made.complete == 2
    assert len(made.headers) == 2 if mended else len(made.headers) > 100


def test_a_long_head_and_a_request_beyond_all_bodies_end_the_connection():
    async def main():
        head, body = wires(2)
        limits = ConnectionLimits(request_bytes=5_000_000, stranger_bytes=300_000)
        connections = Connections(limits)
        (stranger,) = wires(1, first=9)
        doors = arrive(connections, head, body, stranger)
        for _ in range(16):
            doors[0].data_received(bytes(1024))
            assert not head.ended
        doors[0].data_received(b"x")
        assert head.ended
        doors[2].data_received(HEAD)
        for _ in range(3):
            doors[2].data_received(bytes(100_000))
            assert not stranger.ended
        doors[2].data_received(b"x")  # trailers, or a body that no gate has asked for
        assert stranger.ended
        connections.proven(body.get_extra_info("peername"))
        doors[1].data_received(HEAD)
        sent = 0
        while not body.ended:
            doors[1].data_received(bytes(1_000_000))
            sent += 1_000_000
        assert sent == limits.request_bytes + 1_000_000

    play(main())


def test_an_answer_that_is_not_read_ends_the_connection():
    async def main():
        lazy, slow = wires(2)
        doors = arrive(Connections(ConnectionLimits()), lazy, slow)
        for door in doors:
            door.data_received(HEAD)
            door.pause_writing()
        await after(119.0)
        doors[1].resume_writing()
        await after(2.0)
        assert (lazy.ended, slow.ended) == (True, False)

    play(main())


def test_strangers_of_one_address_close_each_other_and_no_one_else():
    async def main():
        connections = Connections(LIMITS)
        others = wires(3, "198.51.100.7")
        arrive(connections, *others)
        many = wires(50)
        arrive(connections, *many)
        assert [w.port for w in many if not w.ended] == [47, 48, 49, 50]  # the last ones; the longest waiting went
        assert not any(w.ended for w in others)
        assert connections.counts() == (7, 7)

    play(main())


def test_strangers_from_everywhere_do_not_keep_an_honest_client_out():
    async def main():
        connections = Connections(LIMITS)
        for k in range(200):
            arrive(connections, *wires(1, f"198.51.{k}.7"))
        mine = wires(1, "192.0.2.5")
        (door,) = arrive(connections, *mine)
        door.data_received(HEAD)
        connections.proven(("192.0.2.5", 1))
        for k in range(200):
            arrive(connections, *wires(1, f"198.51.{k}.8"))
        assert not mine[0].ended
        assert connections.counts() == (21, 20)

    play(main())


def test_known_clients_behind_one_address_have_its_limit_and_this_machine_has_none():
    async def main():
        connections = Connections(LIMITS)
        known = wires(12)
        for wire in known:
            arrive(connections, wire)
            connections.proven((FAR, wire.port))
        assert [w.ended for w in known] == [False] * 10 + [True] * 2
        for host in ("127.0.0.1", "::1", HERE):
            for wire in wires(25, host):
                arrive(connections, wire)
                connections.proven((host, wire.port))
                assert not wire.ended
        assert connections.counts() == (85, 0)
        for wire in wires(20, "127.0.0.1", 100):
            arrive(connections, wire)
            connections.proven(("127.0.0.1", wire.port))
        assert connections.counts() == (100, 0)  # the limit of all

    play(main())


def test_addresses_of_one_ipv6_network_count_together():
    async def main():
        connections = Connections(LIMITS)
        arrive(connections, *(Wire(f"2001:db8::{k:x}", k) for k in range(1, 9)))
        assert connections.counts() == (4, 4)
        arrive(connections, *(Wire(f"::ffff:198.51.100.{k}", k) for k in range(1, 9)))
        assert connections.counts() == (12, 12)

    play(main())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from(["open", "prove", "lose"])), max_size=80)
)
@settings(max_examples=examples(200), deadline=None)
def test_counts_are_those_of_the_connections_that_are_open(steps):
    limits = ConnectionLimits(total=9, address=4, strangers=6, strangers_address=2)

    async def main():
        connections, doors = Connections(limits), {}
        for host, port, what in steps:
            peer = (f"198.51.100.{host}", port)
            alive = peer in doors and not doors[peer][1].ended
            if what == "open" and not alive:
                wire = Wire(*peer)
                doors[peer] = (arrive(connections, wire)[0], wire)
            elif what == "prove" and alive:
                connections.proven(peer)
            elif what == "lose" and alive:
                doors.pop(peer)[0].connection_lost(None)
            open_now = [p for p, (_, wire) in doors.items() if not wire.ended]
            total, strangers = connections.counts()
            assert total == len(open_now) <= limits.total
            assert strangers <= limits.strangers
            assert all(sum(p[0] == host for p in open_now) <= limits.address for host, _ in open_now)
        for door, _ in doors.values():
            door.connection_lost(None)
            door.connection_lost(None)
        assert connections.counts() == (0, 0)
        assert not connections._peers

    play(main())


def test_the_limit_of_all_leaves_files_for_the_superlink_itself(monkeypatch):
    import resource

    now = [(1024, 2048)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: now.append(limits))
    assert most_connections(4096) == 2048 - 256
    assert now[-1] == (2048, 2048)
    now.append((10**6, 10**6))
    assert most_connections(4096) == 4096


# ------------------------------------------------------------------------------------------------------- the roster


def test_the_roster_is_parsed_once_a_change(tmp_path, monkeypatch):
    from keyfed.deploy import enrolment

    home, parsed = ServerHome(tmp_path), []
    real = enrolment.names_by_key
    monkeypatch.setattr(enrolment, "names_by_key", lambda home: parsed.append(1) or real(home))
    known = KnownKeys(home)
    roster = Roster(home.roster)
    assert known() == {}
    roster.write({"anna": Enrolled("aa", "1", "now")})
    for _ in range(1000):  # every node of a look
        assert known() == {"1": "anna"}
    roster.write({"anna": Enrolled("aa", "1", "now", revoked=True), "bert": Enrolled("aa", "2", "now")})
    assert known() == {"2": "bert"}
    home.roster.unlink()
    assert known() == {}
    assert len(parsed) == 4


# long paths and addresses


class Read(str):
    """A path that fails the test where it is looked through."""

    def __contains__(self, part):
        pytest.fail("looked through")


def test_a_path_that_is_too_long_is_refused_by_its_length(monkeypatch):
    longest = FLEET + "x" * (LONGEST_PATH - len(FLEET))
    assert allowed(longest, FAR, HERE)
    assert not allowed(Read(longest + "x"), FAR, HERE)
    monkeypatch.setattr(gates, "LONGEST_PATH", 10**9)  # the mutant
    with pytest.raises(pytest.fail.Exception, match="looked through"):
        allowed(Read(longest + "x"), FAR, HERE)


def test_an_address_that_is_too_long_is_not_parsed(monkeypatch):
    parsed = []
    real = doors.ipaddress.ip_address
    monkeypatch.setattr(doors.ipaddress, "ip_address", lambda text: (parsed.append(len(text)), real(text))[1])
    scoped = "fe80:1111:1111:1111:1111:1111:255.255.255.255%" + "e" * 15
    assert len(scoped) <= LONGEST_ADDRESS
    assert allowed("/docs", scoped, scoped)
    long = "1" * (LONGEST_ADDRESS + 1)
    assert not allowed("/docs", long, long)
    assert parsed == [len(scoped)]
    monkeypatch.setattr(doors, "LONGEST_ADDRESS", 10**9)  # the mutant
    allowed("/docs", long, long)
    assert parsed == [len(scoped), len(long)]
