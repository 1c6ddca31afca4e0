"""A round ends by its deadline plus five seconds, whichever client is silent, and costs nobody else an answer.

The SuperLink is a fake with a clock of its own: objects of replies become available at set times, and every request to
it takes time. The mutant waits for one reply after the other, as Flower's own `pull_messages` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.wire.flower.client import pack
from keyfed.wire.flower.server import CHUNK, FRAME_BYTES, Announced, FlowerTransport, Unanswered
from keyfed.wire.messages import Rejected, control_head
from keyfed.wire.messages import pack as pack_message
from keyfed.wire.transport import Answer, Handler, Lost, Post, deliver
from tests.examples import examples

from .deployed import calls_of

NEVER = float("inf")
LATE = 5.0  # seconds after a deadline by which everything has ended
When = Callable[[int], float]  # the moment at which an object of a reply is there, by its place


class SuperLink:
    """A mailbox with a clock: each client's reply is announced at one moment, and its objects come at others."""

    def __init__(self, replies: dict[str, tuple[float, When]], body: bytes = b"ok", cost: float = 0.01) -> None:
        self.replies, self.body, self.cost = replies, body, cost
        self.nodes = {name: 100 + k for k, name in enumerate(replies)}
        self.now, self.fetched, self.dropped = 0.0, 0, []
        self._due: dict[str, tuple[float, bytes]] = {}
        self._waiting: dict[str, tuple[str, Message]] = {}

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, public_key=name.encode()) for name, node in self.nodes.items()]

    def push_messages(self, messages: Any) -> list[str]:
        names = {node: name for name, node in self.nodes.items()}
        out = []
        for m in messages:
            m.metadata.__dict__["_message_id"] = number = f"m{len(self._waiting)}-{len(out)}"
            out.append((number, (names[m.metadata.dst_node_id], m)))
        self._waiting |= dict(out)
        return [number for number, _ in out]

    def announced(self, ids: Any) -> list[Announced]:
        self.now += self.cost
        return [self._announce(i) for i in ids if self.replies[self._waiting[i][0]][0] <= self.now]

    def _announce(self, number: str) -> Announced:
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            iterate_object_tree,
        )

        name, m = self._waiting[number]
        reply = Message(pack(self.body, {"kind": m.content["head"]["kind"], "run": "r"}), reply_to=m)
        reply.metadata.__dict__["_src_node_id"] = self.nodes[name]
        ids = [t.object_id for t in iterate_object_tree(get_object_tree(reply))]
        when = self.replies[name][1]
        contents = {key: one.deflate() for key, one in get_all_nested_objects(reply).items()}
        # Chunks of two clients are the same object; a key of its own keeps the one from helping the other.
        self._due |= {f"{name}/{key}": (when(place), contents[key]) for place, key in enumerate(ids)}
        return Announced(number, ids[-1], tuple(f"{name}/{key}" for key in ids))

    def fetch(self, name: str) -> bytes | None:
        self.now += self.cost
        due, content = self._due[name]
        if due > self.now:
            return None
        self.fetched += len(content)
        return content

    def drop(self, name: str) -> None:
        self.dropped.append(name)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture(autouse=True)
def _flower(monkeypatch):
    """A task that may make messages. Objects are built under Flower's own ids, whatever the fake calls them."""
    from flwr.supercore.task_identity import TaskIdentity

    from keyfed.wire.flower import server

    monkeypatch.setattr(TaskIdentity, "_run_id", 5)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 3)
    build = server.Coming.build

    def renamed(self):
        self._contents = {key.rpartition("/")[2]: content for key, content in self._contents.items()}
        return build(self)

    monkeypatch.setattr(server.Coming, "build", renamed)


def exchange(link: SuperLink, seconds: float, most: int = control_head()) -> dict[str, Answer]:
    made = FlowerTransport(link, bytes.decode, "r", poll=0.5, sleep=link.sleep, clock=lambda: link.now)
    return dict(made.exchange({name: Post("train", b"theta", most) for name in link.replies}, seconds))


def at(moment: float) -> tuple[float, When]:
    return moment, lambda place: moment


MUTE = (1.0, lambda place: NEVER)
DRIP = (1.0, lambda place: 1.0 + 150.0 * place)  # faster than a push session expires: Flower waits for two hours
HALF = (1.0, lambda place: 1.0 if place < 3 else NEVER)
SILENT = (NEVER, lambda place: NEVER)
HONEST = {"anna": at(2.0), "bert": at(3.0), "carl": at(55.0)}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [(MUTE, "not delivered"), (DRIP, "not delivered"), (HALF, "not delivered"), (SILENT, "no answer")],
    ids=["mute", "drip", "half", "silent"],
)
def test_one_client_delays_nobody(behaviour, reason, record_property):
    link = SuperLink({"aaron": behaviour, **HONEST})  # the first to be asked for
    answers = exchange(link, 60.0)
    assert {name: answers[name] for name in HONEST} == dict.fromkeys(HONEST, b"ok")
    assert answers["aaron"].reason == reason
    assert link.now <= 60.0 + LATE
    assert len(link.dropped) == len(HONEST) + (reason == "not delivered")  # the SuperLink keeps nothing of it
    record_property("fault", f"a reply that is {reason}: {link.now:.0f} s of a deadline of 60 s")
    record_property("outcome", "the others count")


def test_what_arrives_at_the_deadline_counts():
    link = SuperLink({"anna": at(9.9), "bert": (9.0, lambda place: 9.95), "carl": (9.0, lambda place: 10.2)})
    answers = exchange(link, 10.0)
    assert answers["anna"] == answers["bert"] == b"ok"
    assert answers["carl"] == Lost("not delivered", "announced 6 objects, 0 came within 10 s")


def test_what_was_announced_during_the_look_that_crossed_the_deadline_counts():
    link = SuperLink({"anna": (9.3, lambda place: 9.3), "bert": at(10.6)}, cost=0.15)
    answers = exchange(link, 10.0)  # anna's objects are fetched from 9.8 to 10.8; bert is seen by the last look only
    assert answers == {"anna": b"ok", "bert": b"ok"}
    assert 10.0 < link.now <= 10.0 + LATE


def test_fifty_mute_clients_of_a_hundred():
    link = SuperLink({f"c{k:03d}": MUTE if k % 2 else at(1.0 + k / 10) for k in range(100)})
    answers = exchange(link, 60.0)
    assert all(isinstance(answers[f"c{k:03d}"], Lost) == bool(k % 2) for k in range(100))
    assert link.now <= 60.0 + LATE


def test_a_slow_superlink_and_everything_at_the_last_moment():
    link = SuperLink({f"c{k}": at(59.0) for k in range(200)}, cost=0.2)
    answers = exchange(link, 60.0)
    assert link.now <= 60.0 + LATE
    came = [answer for answer in answers.values() if answer == b"ok"]
    assert len(came) >= 3
    # Who was not fetched in time is not to blame: that is no reply announced and not sent.
    assert {answer.reason for answer in answers.values() if answer != b"ok"} == {"no answer"}


def test_mute_clients_are_asked_for_last():
    mute = {f"a{k:02d}": MUTE for k in range(30)}
    link = SuperLink({**mute, "zoe": at(59.9)}, cost=0.15)
    assert exchange(link, 60.0)["zoe"] == b"ok"  # 30 looks for what is not there would take all of the last 4 s
    assert link.now <= 60.0 + LATE


def sequential(self, waiting, coming, posts, answers, until):
    """The mutant: wait for each reply in turn, as long as Flower does."""
    for sent in list(coming):
        one, began = coming.pop(sent), self._clock()
        while not one.whole and self._clock() < began + 180.0:
            if not one.step(self._mailbox.fetch):
                self._sleep(1.0)
        name = waiting.pop(sent)
        answers[name] = self._check(one, posts[name].kind, self._nodes[name]) if one.whole else self._missed(one, 60)


@pytest.mark.parametrize("behaviour", [MUTE, DRIP, HALF], ids=["mute", "drip", "half"])
def test_the_mutant_that_waits_for_each_reply_is_noticed(monkeypatch, behaviour):
    monkeypatch.setattr(FlowerTransport, "_fetch", sequential)
    link = SuperLink({"aaron": behaviour, **HONEST})
    answers = exchange(link, 60.0)
    assert link.now > 60.0 + LATE
    assert any(isinstance(answers[name], Lost) for name in HONEST) or link.now > 180.0


delays = st.one_of(st.just(NEVER), st.floats(0.0, 40.0))
behaviours = st.lists(st.tuples(delays, st.lists(delays, min_size=6, max_size=6)), min_size=1, max_size=6)


@settings(max_examples=examples(150), deadline=None)
@given(behaviours)
def test_whatever_clients_do_the_exchange_ends_and_who_delivered_counts(drawn):
    replies: dict[str, tuple[float, When]] = {
        f"c{k}": (announced, lambda place, moments=moments: moments[place])
        for k, (announced, moments) in enumerate(drawn)
    }
    link = SuperLink(replies, cost=0.001)
    answers = exchange(link, 20.0)
    assert link.now <= 20.0 + LATE
    for k, (announced, moments) in enumerate(drawn):
        if max(announced, *moments) <= 20.0:
            assert answers[f"c{k}"] == b"ok"
        if max(announced, *moments) > 20.0 + LATE:
            assert isinstance(answers[f"c{k}"], Lost)


# size: known before it is fetched, or found while it is


def test_a_reply_in_too_many_objects_is_not_fetched():
    link = SuperLink({"aaron": at(1.0), "anna": at(1.0)}, body=b"ok")
    announce = link._announce

    def many(number):
        found = announce(number)
        if link._waiting[number][0] != "aaron":
            return found
        return found._replace(objects=tuple(f"aaron/{k}" for k in range(1000)) + found.objects)

    link._announce = many
    answers = exchange(link, 10.0)
    assert answers["aaron"].reason == "too large"
    assert answers["anna"] == b"ok"
    assert link.fetched < FRAME_BYTES


def test_a_large_reply_is_fetched_no_further_than_its_cap():
    body = random.Random(1).randbytes(6 * CHUNK)
    link = SuperLink({"aaron": at(1.0)}, body=body)
    assert exchange(link, 10.0, most=len(body)) == {"aaron": body}
    few = SuperLink({"aaron": at(1.0)}, body=bytes(k for k in range(200)) * 1000)
    assert exchange(few, 10.0)["aaron"].reason == "too large"  # one chunk of 200 kB where 64 kB are expected
    two = SuperLink({"aaron": at(1.0)}, body=body[: 2 * CHUNK - 1])  # few enough objects, and too large ones
    assert exchange(two, 10.0)["aaron"].reason == "too large"
    assert two.fetched <= CHUNK + FRAME_BYTES
    many = SuperLink({"aaron": at(1.0)}, body=body)
    assert exchange(many, 10.0, most=CHUNK)["aaron"].reason == "too large"
    assert many.fetched == 0


def test_a_long_head_of_an_array_is_not_parsed():
    link = SuperLink({"aaron": at(1.0), "anna": at(1.0)})
    announce = link._announce

    def padded(number):
        found = announce(number)
        for key in found.objects:
            due, content = link._due[key]
            if key.startswith("aaron/") and content.startswith(b"Array "):
                link._due[key] = due, content + b" " * (1 << 20)
        return found

    link._announce = padded
    answers = exchange(link, 10.0)
    assert answers["aaron"].reason == "too large"
    assert answers["anna"] == b"ok"


# a SuperLink that fails


class Broken(SuperLink):
    """A SuperLink whose requests fail from a moment on: those named, for a client or for all."""

    def __init__(self, *requests: str, client: str = "", since: float = 1.0) -> None:
        super().__init__({name: at(1.0) for name in ("aaron", "anna")})
        self.requests, self.client, self.since = requests, client, since

    def _fail(self, request: str, what: str = "") -> None:
        if request in self.requests and self.now >= self.since and what.startswith(self.client):
            raise ConnectionError("a body\nof several lines")

    def get_nodes(self) -> list[Any]:
        self._fail("get_nodes")
        return super().get_nodes()

    def push_messages(self, messages: Any) -> list[str]:
        self._fail("push_messages")
        return super().push_messages(messages)

    def announced(self, ids: Any) -> list[Announced]:
        self._fail("announced")
        return super().announced(ids)

    def fetch(self, name: str) -> bytes | None:
        self._fail("fetch", name)
        return super().fetch(name)


def test_a_reply_that_cannot_be_fetched_costs_its_client_only():
    answers = exchange(Broken("fetch", client="aaron"), 10.0)
    lost = answers["aaron"]
    assert isinstance(lost, Lost)
    assert lost == Lost("unreachable", "its reply cannot be fetched from the SuperLink (ConnectionError)")
    assert answers["anna"] == b"ok"


def test_a_client_that_goes_while_a_fetch_fails_harms_no_exchange():
    link = Broken("fetch", client="aaron")
    nodes = link.get_nodes
    link.get_nodes = lambda: nodes() if link.now < 1.0 else []  # by then all have disconnected
    answers = exchange(link, 10.0)
    assert answers["anna"] == b"ok"


@pytest.mark.parametrize(
    ("requests", "since"),
    [
        (("fetch", "get_nodes"), 1.0),
        (("announced", "get_nodes"), 1.0),
        (("push_messages",), 0.0),
        (("get_nodes",), 0.0),
    ],
)
def test_a_superlink_that_is_gone_is_one_line(requests, since):
    with pytest.raises(Unanswered) as found:
        exchange(Broken(*requests, since=since), 10.0)
    said = "the SuperLink does not answer (ConnectionError); start the server and submit the run again to resume"
    assert str(found.value) == said


# who is called again


def test_who_announces_and_does_not_send_is_shut_out_after_two(tmp_path):
    def mute(client: str, post: Post, handler: Handler) -> Answer:
        return Lost("not delivered") if client == "client-1" and post.kind == "bye" else deliver(client, post, handler)

    calls = calls_of(tmp_path, mute)
    for _ in range(2):
        assert calls.greet() == ["client-0", "client-1", "client-2"]
        calls.gather("bye", {"client-1": pack_message({"run": "other"})}, lambda client, answer: None)
        assert calls.lost == {"client-1": "not delivered"}
    assert calls.greet() == ["client-0", "client-2"]


def test_a_client_that_has_just_answered_is_not_left_alone_for_the_round_before(tmp_path):
    calls = calls_of(tmp_path)
    assert "client-1" in calls.greet()

    def refuse(client: str, answer: bytes) -> None:
        raise Rejected("stale", "for the test")

    body = pack_message({"run": "other"})
    calls._lose("client-1", "no answer", "in the round before")
    assert "client-1" in calls.greet()  # it answers the hello
    calls.gather("bye", {"client-1": body}, refuse)
    assert "client-1" in calls.greet()  # and is asked again at once


def test_a_client_that_leaves_a_hello_unanswered_is_left_alone(tmp_path):
    asked = []

    def silent(client: str, post: Post, handler: Handler) -> Answer:
        asked.append(client)
        return Lost("no answer") if client == "client-1" else deliver(client, post, handler)

    calls = calls_of(tmp_path, silent)
    assert calls.greet() == ["client-0", "client-2"]
    assert calls.greet() == ["client-0", "client-2"]
    assert asked.count("client-1") == 1
