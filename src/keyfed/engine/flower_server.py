"""Flower's side of the server: a `Transport` over its grid.

Messages are pushed and replies pulled at our own pace (Flower's `send_and_receive` looks every 3 s). A reply counts by
the message it answers, not by who it says it is from: an error for a lost node comes from the SuperLink itself.
Everything a reply holds is checked before it is handed on; whatever is wrong with it, the client is `Lost` with a
reason.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import Message

from keyfed.engine.flower_client import MESSAGE_TYPE, REASON_CAP, pack, unpack
from keyfed.engine.transport import Lost, Post

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # a message lives that much longer than we wait: its reply then counts as late, not as missing
CODES = {
    1: "unavailable", 2: "failed", 3: "unavailable", 4: "unavailable", 5: "unavailable", 6: "failed", 7: "failed",
    8: "failed",
}  # fmt: skip  # of Flower's ErrorCode: the client is gone, or its side of Flower broke


class Node(Protocol):
    """What the grid tells of a node."""

    node_id: int
    public_key: bytes


class Mailbox(Protocol):
    """The part of Flower's Grid that is used."""

    def get_nodes(self) -> Iterable[Any]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


def key_sum(public_key: bytes) -> str:
    """Return what a roster holds of a node's public key."""
    return hashlib.sha256(public_key).hexdigest()


class FlowerTransport:
    """Messages to the enrolled clients of a SuperLink.

    A client's name is the one its node key was enrolled under: the SuperLink has checked that key's signature, so that
    no client can go by another's name. Nodes whose key is in no entry are not clients.

    Args:
      grid: Flower's.
      names: client name by `key_sum` of the node's key, read anew whenever clients are listed.
      run: text that names this run; a reply to another run's message is refused.
    """

    def __init__(
        self,
        grid: Mailbox,
        names: Callable[[], Mapping[str, str]],
        run: str,
        poll: float = POLL_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid, self._names, self._run = grid, names, run
        self._poll, self._sleep, self._clock = poll, sleep, clock
        self._nodes: dict[str, int] = {}
        self.refused: Counter[str] = Counter()

    def clients(self) -> Sequence[str]:
        """Return the names of the enrolled clients that are connected now, in order."""
        names = self._names()
        found = ((names.get(key_sum(node.public_key)), node.node_id) for node in self._grid.get_nodes())
        self._nodes = {name: node for name, node in found if name is not None}
        return sorted(self._nodes)

    def exchange(self, posts: Mapping[str, Post], seconds: float) -> Mapping[str, bytes | Lost]:
        """Send every client its post and return the replies that come within `seconds`; the others are lost."""
        if any(name not in self._nodes for name in posts):
            self.clients()
        end = self._clock() + seconds
        answers: dict[str, bytes | Lost] = {
            name: Lost("unavailable: not connected") for name in posts if name not in self._nodes
        }
        waiting = self._send({name: post for name, post in posts.items() if name in self._nodes}, seconds, answers)
        while waiting:
            for reply in list(self._grid.pull_messages(list(waiting))):
                name = waiting.pop(reply.metadata.reply_to_message_id, None)
                if name is None:
                    self.refused["stray"] += 1
                else:
                    answers[name] = self._check(reply, posts[name].kind, self._nodes[name])
            if self._clock() >= end:
                break
            if waiting:
                self._sleep(min(self._poll, max(0.0, end - self._clock())))
        answers |= {name: Lost(f"late: no reply within {seconds:.0f} s") for name in waiting.values()}
        for found in answers.values():
            if isinstance(found, Lost):
                self.refused[found.reason.partition(":")[0]] += 1
        return {name: answers[name] for name in posts}

    def _send(self, posts: Mapping[str, Post], seconds: float, answers: dict[str, bytes | Lost]) -> dict[str, str]:
        """Push all posts (a body that several get is sent to the SuperLink once); return client by message id."""
        if not posts:
            return {}
        deadline = time.time() + seconds
        messages = [
            Message(
                content=pack(post.body, {"kind": post.kind, "run": self._run, "deadline": deadline}),
                message_type=MESSAGE_TYPE,
                dst_node_id=self._nodes[name],
                ttl=seconds + GRACE_SECONDS,
            )
            for name, post in posts.items()
        ]
        ids = list(self._grid.push_messages(messages)) or [""] * len(messages)
        answers |= {
            name: Lost("unavailable: the SuperLink took no message for it")
            for name, sent in zip(posts, ids, strict=True)
            if not sent
        }
        return {sent: name for name, sent in zip(posts, ids, strict=True) if sent}

    def _check(self, reply: Message, kind: str, node: int) -> bytes | Lost:
        if reply.has_error():
            code = int(reply.error.code)
            return Lost(_reason(CODES.get(code, "failed"), reply.error.reason or f"Flower's error {code}"))
        if reply.metadata.src_node_id != node:
            return Lost("malformed: the reply is from another node")
        try:
            body, head = unpack(reply.content)
        except (ValueError, KeyError, TypeError) as e:
            return Lost(_reason("malformed", str(e)))
        if "error" in head:
            return Lost(_reason(str(head["error"]), str(head.get("reason", ""))))
        if head.get("kind") != kind or head.get("run") != self._run:
            return Lost(_reason("stale", f'the reply is to "{head.get("kind")}" of another run or stage'))
        return body


def _reason(error: str, reason: str) -> str:
    """Return a type and a reason in one line that is safe to print: a client wrote it."""
    text = "".join(c if c.isprintable() else " " for c in f"{error}: {reason}")
    return text[:REASON_CAP]
