"""The transport over Flower's grid, with a grid that does as told and a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from keyfed.engine.flower_client import pack
from keyfed.engine.flower_server import FlowerTransport
from keyfed.engine.transport import Lost, Post

NODES = {"anna": 11, "bert": 12, "carl": 13}
FLOATS = {"body": ArrayRecord([np.zeros(2)]), "head": ConfigRecord({"kind": "train"})}
KEYS = {f"key of {name}".encode(): name for name in NODES}


class Grid:
    """Answers each message after so many looks with what `reply` makes of it."""

    def __init__(self, reply=None, looks=1, refuse=()):
        self.reply, self.looks, self.refuse = reply or good, looks, refuse
        self.sent, self.pulled, self.extra = {}, 0, []

    def get_nodes(self):
        known = [SimpleNamespace(node_id=n, public_key=f"key of {name}".encode()) for name, n in NODES.items()]
        return [*known, SimpleNamespace(node_id=99, public_key=b"key of nobody")]

    def push_messages(self, messages):
        ids = []
        for m in messages:
            number = f"m{len(self.sent)}"
            if m.metadata.dst_node_id in self.refuse:
                ids.append(None)
                continue
            m.metadata.__dict__["_message_id"] = number
            self.sent[number] = m
            ids.append(number)
        return ids

    def pull_messages(self, ids):
        self.pulled += 1
        if self.pulled < self.looks:
            return []
        made = [self.reply(self.sent[i]) for i in ids]
        return [m for m in made if m is not None] + self.extra


def good(m, node=None, **head):
    asked = m.content["head"]
    kind_and_run = {"kind": asked["kind"], "run": asked["run"]}
    return from_node(m, Message(pack(b"ok", {**kind_and_run, **head}), reply_to=m), node)


def from_node(m, reply, node=None):
    reply.metadata.__dict__["_src_node_id"] = node or m.metadata.dst_node_id
    return reply


class Clock:
    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def transport(grid):
    clock = Clock()
    made = FlowerTransport(grid, KEYS.get, "run 1", poll=0.5, sleep=clock.sleep, clock=lambda: clock.now)
    return made, clock


def exchange(grid, names=("anna", "bert"), seconds=10.0):
    made, clock = transport(grid)
    return made.exchange({name: Post("train", b"theta") for name in names}, seconds), clock


def test_clients_are_those_whose_keys_are_enrolled():
    assert transport(Grid())[0].clients() == ["anna", "bert", "carl"]


def test_everybody_answers():
    grid = Grid(looks=3)
    answers, clock = exchange(grid)
    assert answers == {"anna": b"ok", "bert": b"ok"}
    assert clock.now == 1.0
    message = grid.sent["m0"]
    assert message.metadata.ttl == pytest.approx(15.0)
    assert dict(message.content["head"]) | {"deadline": 0} == {"kind": "train", "run": "run 1", "deadline": 0}


def test_who_does_not_answer_in_time_is_lost_and_the_others_are_not():
    answers, clock = exchange(Grid(lambda m: good(m) if m.metadata.dst_node_id == 11 else None), seconds=2.0)
    assert answers == {"anna": b"ok", "bert": Lost("no answer", "within 2 s")}
    assert clock.now == pytest.approx(2.0)


def test_who_is_not_connected_or_not_enrolled_is_lost_at_once():
    answers, clock = exchange(Grid(), names=("anna", "zoe"))
    assert answers == {"anna": b"ok", "zoe": Lost("unreachable", "not connected")}
    assert clock.now == 0.0


def test_a_message_that_the_superlink_does_not_take():
    answers, _ = exchange(Grid(refuse=(12,)))
    assert answers["anna"] == b"ok"
    assert answers["bert"].reason == "unreachable"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(5, "unreachable"), (3, "unreachable"), (4, "unreachable"), (2, "client error"), (8, "client error")],
)
def test_errors_of_flower_count_by_the_message_they_answer(code, reason):
    # They come from the SuperLink, whose node id is 1.
    answers, _ = exchange(Grid(lambda m: Message(Error(code, "because"), reply_to=m)), names=("anna",))
    assert answers == {"anna": Lost(reason, "because")}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda m: good(m, error="stale", reason="old"), "stale"),
        (lambda m: good(m, error="a reason of its own", reason="x"), "client error"),
        (lambda m: good(m, kind="upload"), "stale"),
        (lambda m: good(m, run="run 0"), "stale"),
        (lambda m: good(m, node=12), "malformed"),
        (lambda m: from_node(m, Message(RecordDict({}), reply_to=m)), "malformed"),
        (lambda m: from_node(m, Message(RecordDict(FLOATS), reply_to=m)), "malformed"),
    ],
    ids=["refused", "own-type", "other-stage", "other-run", "other-node", "no-records", "floats"],
)
def test_what_is_wrong_with_a_reply_loses_its_client_only(reply, reason):
    answers, _ = exchange(Grid(lambda m: reply(m) if m.metadata.dst_node_id == 11 else good(m)))
    assert answers["anna"].reason == reason
    assert answers["bert"] == b"ok"


def test_what_a_client_writes_is_printed_safely():
    answers, _ = exchange(Grid(lambda m: good(m, error="stale", reason="a\x1b[31m\nb" + "x" * 999)), names=("anna",))
    assert answers["anna"].detail.startswith("a [31m b")
    assert len(answers["anna"].detail) == 300


def test_a_second_reply_and_one_to_nothing_are_passed_over():
    grid = Grid()
    stray = Message(pack(b"evil", {"kind": "train", "run": "run 1"}), dst_node_id=11, message_type="query.keyfed")
    again = {}

    def twice(m):
        reply = good(m)
        if m.metadata.dst_node_id == 11:
            again["reply"] = from_node(m, Message(pack(b"evil", {"kind": "train", "run": "run 1"}), reply_to=m))
            grid.extra = [again["reply"], stray]
        return reply

    grid.reply = twice
    made, _ = transport(grid)
    assert made.exchange({"anna": Post("train", b"")}, 5.0) == {"anna": b"ok"}
    assert made.strays == 2


def test_nothing_to_send():
    assert exchange(Grid(), names=())[0] == {}
