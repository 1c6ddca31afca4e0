"""Flower's side of a client, with real messages of Flower's and no network."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from keyfed.wire.flower.client import MESSAGE_TYPE, REASON_CAP, answer, pack, unpack
from keyfed.wire.frames import FrameError


def message(content):
    return Message(content, dst_node_id=7, message_type=MESSAGE_TYPE)


def question(kind="train", body=b"abc", **more):
    return message(pack(body, {"kind": kind, "run": "r1", "deadline": time.time() + 60, **more}))


def put(kind, body, deadline):
    return {}, body[::-1]


def willing(kind):
    return None


def told(reply):
    return dict(reply.content["head"])


def test_the_answer_goes_back_with_kind_and_run():
    reply = answer(question(), put, willing)
    assert unpack(reply.content) == (b"cba", {"kind": "train", "run": "r1"})
    assert reply.metadata.message_type == MESSAGE_TYPE


@pytest.mark.parametrize("body", [b"", b"\0", bytes(range(256)) * 5000])
def test_bodies_cross_unchanged(body):
    assert unpack(pack(body, {"kind": "x"}))[0] == body


def test_a_message_past_its_deadline_is_not_put():
    reply = answer(question(deadline=time.time() - 1), lambda *a: pytest.fail("put"), willing)
    assert told(reply)["error"] == "no answer"


def test_a_client_that_does_not_want_to_says_so():
    reply = answer(question(), lambda *a: pytest.fail("put"), lambda kind: f"no {kind}")
    assert told(reply) == {"kind": "train", "error": "not now", "reason": "no train"}


def test_errors_of_the_training_process_travel_as_they_are():
    reply = answer(question(), lambda *a: ({"error": "stale", "reason": "r" * 1000}, b""), willing)
    assert told(reply) == {"kind": "train", "error": "stale", "reason": "r" * REASON_CAP}


def test_a_training_process_that_is_gone_is_said():
    def gone(*_):
        raise FrameError("the training process does not answer")

    assert told(answer(question(), gone, willing))["error"] == "unreachable"


ARRAY = np.zeros(3, np.uint8)
BODY, HEAD = ArrayRecord([ARRAY]), ConfigRecord({"kind": "train", "deadline": 9e12})


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"body": BODY}),
        RecordDict({"body": BODY, "head": HEAD, "more": HEAD}),
        RecordDict({"body": HEAD, "head": BODY}),
        RecordDict({"body": ArrayRecord([ARRAY, ARRAY]), "head": HEAD}),
        RecordDict({"body": ArrayRecord([]), "head": HEAD}),
        RecordDict({"body": ArrayRecord([np.zeros(3, np.float32)]), "head": HEAD}),
        RecordDict({"body": ArrayRecord([np.zeros((2, 2), np.uint8)]), "head": HEAD}),
        RecordDict({"body": BODY, "head": ConfigRecord({"kind": "train"})}),
        RecordDict({"body": BODY, "head": ConfigRecord({"kind": "train", "deadline": "soon"})}),
    ],
    ids=["none", "no-head", "more", "swapped", "two", "no-array", "floats", "matrix", "no-deadline", "no-number"],
)
def test_what_is_no_message_of_ours_is_refused(content):
    assert told(answer(message(content), lambda *a: pytest.fail("put"), willing))["error"] == "malformed"


def test_torch_is_not_imported():
    code = "import sys, keyfed.wire.flower.client, keyfed.deploy.supernode, keyfed.deploy.superlink; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
