"""The transport over Flower's grid, with a grid that does as told and a clock of its own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.run import Run

from keyfed.errors import DeployError
from keyfed.wire.flower import server
from keyfed.wire.flower.client import pack, unpack
from keyfed.wire.flower.server import Announced, Coming, FlowerTransport, GridMailbox, TooLarge, Unanswered, check_size
from keyfed.wire.transport import Lost, Post

NODES = {"anna": 11, "bert": 12, "carl": 13}
FLOATS = {"body": ArrayRecord([np.zeros(2)]), "head": ConfigRecord({"kind": "train"})}
KEYS = {f"key of {name}".encode(): name for name in NODES}


class Grid:
    """Answers each message after so many looks with what `reply` makes of it."""

    def __init__(self, reply=None, looks=1, refuse=()):
        self.reply, self.looks, self.refuse = reply or good, looks, refuse
        self.sent, self.pulled, self.extra = {}, 0, []
        self.objects, self.dropped = {}, []

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

    def announced(self, ids):
        self.pulled += 1
        if self.pulled < self.looks:
            return []
        made = [self.reply(self.sent[i]) for i in ids]
        return [self.announce(m) for m in [*made, *self.extra] if m is not None]

    def announce(self, reply):
        ids, contents = deflated(reply)
        self.objects |= contents
        return Announced(reply.metadata.reply_to_message_id, ids[-1], tuple(ids))

    def fetch(self, name):
        return self.objects[name]

    def drop(self, name):
        self.dropped.append(name)


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


NPY = "numpy.ndarray"
GARBLED = {
    "empty": (3, b"", NPY),
    "huge": (1 << 50, b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (1<<50,), }\n", NPY),
    "zip": (4, b"PK\x03\x04", NPY),
    "header": (9, b"\x93NUMPY\x01\x00\x03\x00{((", NPY),
    "longer": (3, b"four", "bytes"),
    "negative": (-4, b"four", "bytes"),
}


@pytest.mark.parametrize("garbled", GARBLED.values(), ids=GARBLED)
def test_a_garbled_array_loses_its_client_only(garbled):
    size, data, kind = garbled
    array = ArrayRecord({"0": Array(dtype="uint8", shape=(size,), stype=kind, data=data)})

    def reply(m):
        if m.metadata.dst_node_id != 11:
            return good(m)
        head = ConfigRecord({"kind": "train", "run": "run 1"})
        return from_node(m, Message(RecordDict({"body": array, "head": head}), reply_to=m))

    answers, _ = exchange(Grid(reply))
    assert answers["anna"].reason == "malformed"
    assert answers["bert"] == b"ok"


def test_a_reply_whose_reading_fails_in_any_way_loses_its_client_only(monkeypatch):
    def broken(content):
        raise MemoryError("no room")

    answers, _ = exchange(Grid(lambda m: good(m) if m.metadata.dst_node_id == 11 else None), seconds=1.0)
    assert answers["anna"] == b"ok"
    monkeypatch.setattr(server, "unpack", broken)
    answers, _ = exchange(Grid(), names=("anna",))
    assert answers["anna"] == Lost("malformed", "MemoryError: no room")


def test_a_reply_that_flower_cannot_build_does_not_cost_the_others():
    class Breaking(Grid):
        def announced(self, ids):
            if any(self.sent[i].metadata.dst_node_id == 11 for i in ids):
                raise EOFError
            return super().announced(ids)

    answers, _ = exchange(Breaking())
    assert answers == {"anna": Lost("malformed", "its reply cannot be read (EOFError)"), "bert": b"ok"}


def test_a_superlink_that_is_gone_is_not_a_clients_fault():
    class Gone(Grid):
        def announced(self, ids):
            self.get_nodes = None  # whatever is asked from now on fails
            raise ConnectionError("gone")

    with pytest.raises(Unanswered, match="the SuperLink does not answer"):
        exchange(Gone())


def deflated(message):
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree

    objects = get_all_nested_objects(message)
    return [t.object_id for t in iterate_object_tree(get_object_tree(message))], {
        name: one.deflate() for name, one in objects.items()
    }


def coming(ids, contents, most=1 << 16):
    """A reply all of whose objects are there."""
    one = Coming(Announced("m0", ids[-1], tuple(ids)), most)
    while one.step(contents.get):
        pass
    return one


@pytest.mark.parametrize("body", [b"", b"abc", bytes(6 << 20)], ids=["empty", "three", "two-chunks"])
def test_a_message_crosses_flowers_own_parts_whole(body):
    ids, contents = deflated(Message(pack(body, {"kind": "x"}), dst_node_id=11, message_type="query.keyfed"))
    one = coming(ids, contents, len(body))
    assert one.whole
    assert unpack(one.build().content) == (body, {"kind": "x"})


def test_what_flower_cannot_build_is_an_error_of_that_reply():
    ids, contents = deflated(Message(pack(b"abc", {"kind": "x"}), dst_node_id=11, message_type="query.keyfed"))
    for name in ids:
        broken = {**contents, name: contents[name][:-1] + b"\xff"}
        if b"ArrayChunk" in contents[name][:20]:
            continue  # bytes of the body: any will do
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever Flower makes of it
            coming(ids, broken).build()


def test_one_chunk_that_is_named_a_million_times_is_not_joined():
    from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

    ids, contents = deflated(Message(pack(bytes(5000), {"kind": "x"}), dst_node_id=11, message_type="query.keyfed"))
    check_size(contents, 5000)
    name = next(n for n, content in contents.items() if content.startswith(b"Array "))
    array = Array(dtype="uint8", shape=(5000,), stype="bytes", data=bytes(5000))
    for times, found in ((1_000_000, "a reply of over"), (20_000, "arrays of 100,000,000 bytes")):
        told = {"dtype": "uint8", "shape": [5000], "stype": "bytes", "arraychunk_ids": [0] * times}
        bomb = {**contents, name: add_header_to_object_body(json.dumps(told).encode(), array)}
        with pytest.raises(TooLarge, match=found):
            coming(ids, bomb).build()


def test_flowers_own_grid_tells_what_is_announced_and_hands_over_what_is_there():
    from flwr.common.serde import message_to_proto
    from flwr.proto.message_pb2 import PullObjectResponse
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.superlink.grid import http_grid

    asked = [
        Message(pack(b"", {"kind": "train", "run": "run 1"}), dst_node_id=n, message_type="query.keyfed")
        for n in (11, 12)
    ]
    for number, m in enumerate(asked):
        m.metadata.__dict__["_message_id"] = f"m{number}"
    replies = [good(m) for m in asked]
    store = {}
    for reply in replies:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        store |= deflated(reply)[1]
    store[replies[0].object_id] = b""  # not sent yet
    told = PullAppMessagesResponse(
        messages_list=[message_to_proto(r) for r in replies], message_object_trees=[get_object_tree(r) for r in replies]
    )
    confirmed = []
    grid = http_grid.HttpGrid(token="t")
    grid._run = Run.create_empty(5)
    grid._client = SimpleNamespace(
        PullMessages=lambda request: told,
        PullObject=lambda r: PullObjectResponse(
            object_found=r.object_id in store,
            object_available=bool(store.get(r.object_id)),
            object_content=store.get(r.object_id),
        ),
        ConfirmMessageReceived=lambda request: confirmed.append(request.message_object_id),
        close=lambda: None,
    )
    mailbox = GridMailbox(grid)
    first, second = mailbox.announced(["m0", "m1"])
    assert (first.answers, second.answers) == ("m0", "m1")
    late, fine = Coming(first, 100), Coming(second, 100)
    for one in (late, fine):
        while one.step(mailbox.fetch):
            pass
    assert not late.whole
    assert late.count == (len(first.objects) - 1, len(first.objects))
    assert unpack(fine.build().content)[0] == b"ok"
    with pytest.raises(LookupError):
        mailbox.fetch("0" * 64)
    mailbox.drop(second.name)
    assert confirmed == [second.name]


def test_a_grid_of_another_version_is_refused():
    with pytest.raises(DeployError, match=r"flwr==1\.41\.0"):
        GridMailbox(object())


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
