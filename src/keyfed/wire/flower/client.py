"""Flower's side of a client: hands each message to the training process and its answer back. No torch in here.

A message has a `head` (kind, run, deadline) and a `body` (bytes, as an array so that Flower sends it in chunks). What
goes wrong travels back as a type and a reason in the reply's head: the server drops the client for this round and says
why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from keyfed.wire.frames import BODY_CAP, SOCKET, FrameError, ask

HEAD, BODY = "head", "body"
MESSAGE_TYPE = "query.keyfed"
REASON_CAP = 300  # characters of a reason that travel
KINDS_CAP = 32
BODY_TYPE = "bytes"

Ask = Callable[[str, bytes, float], tuple[dict[str, Any], bytes]]
Refuse = Callable[[str], str | None]


def pack(body: bytes | memoryview, head: Mapping[str, str | float | int]) -> RecordDict:
    """Return the content of a message; its body travels as it is, in no format that would have to be read."""
    array = Array(dtype="uint8", shape=(len(body),), stype=BODY_TYPE, data=bytes(body))
    return RecordDict({BODY: ArrayRecord({"0": array}), HEAD: ConfigRecord(dict(head))})


def unpack(content: RecordDict) -> tuple[bytes, dict[str, Any]]:
    """Return body and head of a message, after checking that it has the shape that `pack` makes.

    Raises:
      ValueError: it has another.
    """
    if set(content.keys()) != {HEAD, BODY}:
        raise ValueError(f"records {sorted(content.keys())}; expected {BODY} and {HEAD}")
    body, head = content[BODY], content[HEAD]
    if not isinstance(body, ArrayRecord) or not isinstance(head, ConfigRecord):
        raise ValueError("records of the wrong kind")
    if len(body) != 1:
        raise ValueError(f"{len(body)} arrays; expected one")
    (array,) = body.values()
    if array.dtype != "uint8" or array.stype != BODY_TYPE or len(array.shape) != 1:
        raise ValueError(f"a body of {array.dtype[:20]} in {array.stype[:20]}; expected bytes")
    if array.shape[0] != len(array.data) or len(array.data) > BODY_CAP:
        raise ValueError(f"a body of {len(array.data):,} bytes that says {array.shape[0]}; at most {BODY_CAP:,}")
    return array.data, dict(head)


def answer(message: Message, put: Ask, refuse: Refuse) -> Message:
    """Return the reply to a message: the training process's answer, or a typed refusal."""

    def sorry(kind: str, error: str, reason: str) -> Message:
        head = {"kind": kind, "error": error, "reason": reason[:REASON_CAP]}
        return Message(pack(b"", head), reply_to=message)

    try:
        body, head = unpack(message.content)
        kind, deadline = str(head["kind"])[:KINDS_CAP], float(head["deadline"])
    except Exception as e:  # whatever the server can bring about
        return sorry("?", "malformed", f"not a message of Keyfed's: {e}")
    if time.time() >= deadline:
        return sorry(kind, "no answer", f'"{kind}" came after its deadline')
    refused = refuse(kind)
    if refused is not None:
        return sorry(kind, "not now", refused)
    try:
        told, data = put(kind, body, deadline)
    except FrameError as e:
        return sorry(kind, "unreachable", str(e))
    if "error" in told:
        return sorry(kind, str(told["error"]), str(told.get("reason", "")))
    return Message(pack(data, {"kind": kind, "run": str(head.get("run", ""))}), reply_to=message)


def make_app(home: Path | None = None, refuse: Refuse = lambda kind: None) -> ClientApp:
    """Return the ClientApp of a client.

    Args:
      home: the client's home; what `--node-config home=` says by default.
      refuse: says why the client will not take a kind of message now, or None.
    """
    app = ClientApp()

    @app.query("keyfed")
    def keyfed(message: Message, context: Context) -> Message:
        place = home if home is not None else Path(str(context.node_config["home"]))
        return answer(message, lambda kind, body, deadline: ask(place / SOCKET, kind, body, deadline), refuse)

    return app


app = make_app()
