"""Flower's side of the server: a `Transport` over its grid.

Messages are pushed and replies pulled at our own pace (Flower's `send_and_receive` looks every 3 s). Replies come in
objects (`guard`), which are fetched when they are there and never waited for: a reply that is slow, or announced
and never sent, delays no other. At the deadline there is one last look; an exchange ends at most
`LAST_SECONDS` after it. A reply counts by the message it answers, not by who it says it is from: an error for a lost
node comes from the SuperLink itself. Everything a reply holds is checked before it is handed on; whatever is wrong with
it, the client is `Lost` with a reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from flwr.app import Message

from keyfed.errors import DeployError
from keyfed.federated.types import ClientId, Reason
from keyfed.wire.flower.client import MESSAGE_TYPE, REASON_CAP, pack, unpack
from keyfed.wire.flower.guard import Announced, Coming, Mailbox, TooLarge
from keyfed.wire.transport import Answer, Lost, Post

POLL_SECONDS = 0.25  # each look costs the SuperLink some 10 ms of its one core
LAST_SECONDS = 4.0  # after the deadline, for fetching what has arrived by then
GRACE_SECONDS = 5.0  # a message lives that much longer than we wait: its reply then counts as late, not as missing
REASONS: tuple[Reason, ...] = get_args(Reason)
# Of Flower's ErrorCode: what is gone or cannot be had; everything else is a defect on the client's side.
UNREACHABLE = (3, 4, 5)


class Unanswered(DeployError):
    """The SuperLink does not answer, after all that Flower tries; the run goes on from its checkpoint."""


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Turn whatever a request to the SuperLink ends with into one line."""
    try:
        yield
    except Exception as e:  # how Flower's transports fail is not part of its interface
        why = f"the SuperLink does not answer ({type(e).__name__}); start the server and submit the run again to resume"
        raise Unanswered(why) from e


class FlowerTransport:
    """Messages to the enrolled clients of a SuperLink.

    A client's name is the one its node key was enrolled under: the SuperLink has checked that key's signature, so that
    no client can go by another's name. Nodes whose key is in no entry are not clients.

    Args:
      mailbox: the SuperLink's.
      name_of: the name that a node's public key was enrolled under, or None.
      run: text that names this run; a reply to another run's message is refused.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        name_of: Callable[[bytes], ClientId | None],
        run: str,
        poll: float = POLL_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox, self._name_of, self._run = mailbox, name_of, run
        self._poll, self._sleep, self._clock = poll, sleep, clock
        self._nodes: dict[ClientId, int] = {}
        self.strays = 0

    def clients(self) -> Sequence[ClientId]:
        """Return the names of the enrolled clients that are connected now, in order."""
        found = ((self._name_of(node.public_key), node.node_id) for node in self._connected())
        self._nodes = {name: node for name, node in found if name is not None}
        return sorted(self._nodes)

    def _connected(self) -> Sequence[Any]:
        """Return the nodes that are connected; `Unanswered` where the SuperLink does not say."""
        with _answering():
            return list(self._mailbox.get_nodes())

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Send every client its post and return the replies that come within `seconds`; the others are lost."""
        if any(name not in self._nodes for name in posts):
            self.clients()
        end = self._clock() + seconds
        answers: dict[ClientId, Answer] = {
            name: Lost("unreachable", "not connected") for name in posts if name not in self._nodes
        }
        waiting = self._send({name: post for name, post in posts.items() if name in self._nodes}, seconds, answers)
        coming: dict[str, Coming] = {}
        while waiting:
            last = self._clock() >= end
            self._look(waiting, coming, posts, answers)
            self._fetch(waiting, coming, posts, answers, end + LAST_SECONDS)
            if last or not waiting:
                break
            left = end - self._clock()
            if left > 0:
                self._sleep(min(self._poll, left))
        for sent, name in waiting.items():
            answers[name] = self._missed(coming.get(sent), seconds)
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
        with _answering():
            ids = list(self._mailbox.push_messages(messages)) or [""] * len(messages)
        answers |= {
            name: Lost("unreachable", "the SuperLink took no message for it")
            for name, sent in zip(posts, ids, strict=True)
            if not sent
        }
        return {sent: name for name, sent in zip(posts, ids, strict=True) if sent}

    def _look(
        self,
        waiting: dict[str, ClientId],
        coming: dict[str, Coming],
        posts: Mapping[ClientId, Post],
        answers: dict[ClientId, Answer],
    ) -> None:
        """Note which replies were announced since the last look; one that is too large is not fetched."""
        for announced in self._announced([sent for sent in waiting if sent not in coming], waiting, answers):
            name = waiting.get(announced.answers)
            if name is None or announced.answers in coming:
                self.strays += 1  # a second reply, or one to nothing we wait for
                self._drop(announced.name)
                continue
            try:
                coming[announced.answers] = Coming(announced, posts[name].most)
            except TooLarge as e:
                answers[waiting.pop(announced.answers)] = Lost("too large", str(e))
                self._drop(announced.name)

    def _announced(
        self, ids: Sequence[str], waiting: dict[str, ClientId], answers: dict[ClientId, Answer]
    ) -> Sequence[Announced]:
        """Return what was announced; where one answer breaks the request, all others still, and its client is lost.

        Raises:
          Unanswered: the SuperLink does not answer at all.
        """
        if not ids:
            return []
        try:
            return self._mailbox.announced(ids)
        except Exception:
            self._connected()  # does the SuperLink answer at all?
        found: list[Announced] = []
        for sent in ids:
            try:
                found += self._mailbox.announced([sent])
            except Exception as e:
                answers[waiting.pop(sent)] = Lost("malformed", f"its reply cannot be read ({type(e).__name__})")
        return found

    def _fetch(
        self,
        waiting: dict[str, ClientId],
        coming: dict[str, Coming],
        posts: Mapping[ClientId, Post],
        answers: dict[ClientId, Answer],
        until: float,
    ) -> None:
        """Fetch what is there, reply by reply; those whose objects were missing before come last."""
        for sent in sorted(coming, key=lambda sent: coming[sent].misses):
            answer: Answer | None = self._fetched(coming[sent], until)
            if answer is None and coming[sent].whole:
                name = waiting[sent]
                answer = self._check(coming[sent], posts[name].kind, self._nodes[name])
            if answer is not None:
                answers[waiting.pop(sent)] = answer
                self._drop(coming.pop(sent).announced.name)

    def _fetched(self, coming: Coming, until: float) -> Lost | None:
        """Fetch the objects of a reply that are there; return why it is lost, or None.

        Raises:
          Unanswered: the SuperLink does not answer at all.
        """
        try:
            while self._clock() < until and coming.step(self._mailbox.fetch):
                pass
        except TooLarge as e:
            return Lost("too large", str(e))
        except LookupError:
            return Lost("not delivered", "an object that it announced is gone from the SuperLink")
        except Exception as e:  # Flower has tried again by itself
            self._connected()  # does the SuperLink answer at all?
            return Lost("unreachable", f"its reply cannot be fetched from the SuperLink ({type(e).__name__})")
        return None

    def _missed(self, coming: Coming | None, seconds: float) -> Lost:
        """Return why there is no answer: none was announced, or one that did not come whole."""
        within = f"within {seconds:.0f} s"
        if coming is None:
            return Lost("no answer", within)
        self._drop(coming.announced.name)
        came, count = coming.count
        if coming.misses == 0:  # its objects may be there: it is the server that did not come to fetch them
            return Lost("no answer", f"{came} of {count} objects were fetched {within}")
        return Lost("not delivered", f"announced {count} objects, {came} came {within}")

    def _drop(self, name: str) -> None:
        with contextlib.suppress(Exception):  # the SuperLink deletes it by itself when its run is over
            self._mailbox.drop(name)

    def _check(self, coming: Coming, kind: str, node: int) -> Answer:
        try:
            return self._read(coming.build(), kind, node)
        except TooLarge as e:
            return Lost("too large", str(e))
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
    return "".join(c if c.isprintable() else " " for c in text[:REASON_CAP])
