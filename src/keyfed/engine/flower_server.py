"""Flower's side of the server: a `Transport` over its grid.

Messages are pushed and replies pulled at our own pace (Flower's `send_and_receive` looks every 3 s). A reply counts by
the message it answers, not by who it says it is from: an error for a lost node comes from the SuperLink itself.
Everything a reply holds is checked before it is handed on; whatever is wrong with it, the client is `Lost` with a
reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, get_args

from flwr.app import Message

from keyfed.engine.flower_client import MESSAGE_TYPE, REASON_CAP, pack, unpack
from keyfed.engine.transport import Answer, Lost, Post
from keyfed.federated.types import ClientId, Reason

POLL_SECONDS = 0.25  # each look costs the SuperLink some 10 ms of its one core
GRACE_SECONDS = 5.0  # a message lives that much longer than we wait: its reply then counts as late, not as missing
REASONS: tuple[Reason, ...] = get_args(Reason)
# Of Flower's ErrorCode: what is gone or cannot be had; everything else is a defect on the client's side.
UNREACHABLE = (3, 4, 5)


class Mailbox(Protocol):
    """The part of Flower's Grid that is used."""

    def get_nodes(self) -> Iterable[Any]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class FlowerTransport:
    """Messages to the enrolled clients of a SuperLink.

    A client's name is the one its node key was enrolled under: the SuperLink has checked that key's signature, so that
    no client can go by another's name. Nodes whose key is in no entry are not clients.

    Args:
      grid: Flower's.
      name_of: the name that a node's public key was enrolled under, or None.
      run: text that names this run; a reply to another run's message is refused.
    """

    def __init__(
        self,
        grid: Mailbox,
        name_of: Callable[[bytes], ClientId | None],
        run: str,
        poll: float = POLL_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid, self._name_of, self._run = grid, name_of, run
        self._poll, self._sleep, self._clock = poll, sleep, clock
        self._nodes: dict[ClientId, int] = {}
        self.strays = 0

    def clients(self) -> Sequence[ClientId]:
        """Return the names of the enrolled clients that are connected now, in order."""
        found = ((self._name_of(node.public_key), node.node_id) for node in self._grid.get_nodes())
        self._nodes = {name: node for name, node in found if name is not None}
        return sorted(self._nodes)

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Send every client its post and return the replies that come within `seconds`; the others are lost."""
        if any(name not in self._nodes for name in posts):
            self.clients()
        end = self._clock() + seconds
        answers: dict[ClientId, Answer] = {
            name: Lost("unreachable", "not connected") for name in posts if name not in self._nodes
        }
        waiting = self._send({name: post for name, post in posts.items() if name in self._nodes}, seconds, answers)
        while waiting:
            for reply in self._pull(waiting, answers):
                name = waiting.pop(reply.metadata.reply_to_message_id, None)
                if name is None:
                    self.strays += 1  # a second reply, or one to nothing we wait for
                else:
                    answers[name] = self._check(reply, posts[name].kind, self._nodes[name])
            if self._clock() >= end:
                break
            if waiting:
                self._sleep(min(self._poll, max(0.0, end - self._clock())))
        answers |= {name: Lost("no answer", f"within {seconds:.0f} s") for name in waiting.values()}
        return {name: answers[name] for name in posts}

    def _send(
        self, posts: Mapping[ClientId, Post], seconds: float, answers: dict[ClientId, Answer]
    ) -> dict[str, ClientId]:
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
            name: Lost("unreachable", "the SuperLink took no message for it")
            for name, sent in zip(posts, ids, strict=True)
            if not sent
        }
        return {sent: name for name, sent in zip(posts, ids, strict=True) if sent}

    def _pull(self, waiting: dict[str, ClientId], answers: dict[ClientId, Answer]) -> list[Message]:
        """Return the replies that are there; where one cannot be built, all others still, and its client is lost.

        Raises:
          Exception: the SuperLink does not answer at all.
        """
        try:
            return list(self._grid.pull_messages(list(waiting)))
        except Exception:
            if not self._reachable():
                raise
        found: list[Message] = []
        for sent in list(waiting):
            try:
                found += self._grid.pull_messages([sent])
            except Exception as e:
                answers[waiting.pop(sent)] = Lost("malformed", f"its reply cannot be read ({type(e).__name__})")
        return found

    def _reachable(self) -> bool:
        try:
            return self._grid.get_nodes() is not None
        except Exception:
            return False

    def _check(self, reply: Message, kind: str, node: int) -> Answer:
        try:
            return self._read(reply, kind, node)
        except Exception as e:  # whatever a client can bring about costs that client only
            return Lost("malformed", _printable(f"{type(e).__name__}: {e}"))

    def _read(self, reply: Message, kind: str, node: int) -> Answer:
        if reply.has_error():
            code = int(reply.error.code)
            why: Reason = "unreachable" if code in UNREACHABLE else "client error"
            return Lost(why, _printable(reply.error.reason or f"Flower's error {code}"))
        if reply.metadata.src_node_id != node:
            return Lost("malformed", "the reply is from another node")
        body, head = unpack(reply.content)
        if "error" in head:
            told = next((reason for reason in REASONS if reason == head["error"]), None)
            return Lost(told or "client error", _printable(str(head.get("reason", ""))))
        if head.get("kind") != kind or head.get("run") != self._run:
            return Lost("stale", "the reply is to another run or stage")
        return body


def _printable(text: str) -> str:
    """Return what a client wrote as a line that is safe to print."""
    return "".join(c if c.isprintable() else " " for c in text)[:REASON_CAP]
