"""Flower's side of the server: a `Transport` over its grid.

A client announces a reply with the ids of its objects and sends those afterwards. Flower's own `pull_messages` takes
every reply that is announced and waits for its objects, one reply after the other and up to two hours each: a client
that announces and does not send holds up all others. Here one request lists what is announced, at our own pace, and
objects are fetched when they are there and never waited for. At the deadline there is one last look; an exchange ends
at most `LAST_SECONDS` after it.

What a reply may hold is checked before it is fetched (number of objects) and meanwhile (bytes). It is built by
itself: a garbled one costs its sender only. A reply counts by the message it answers, not by who it says it is from: an
error for a lost node comes from the SuperLink itself. Whatever is wrong, the client is `Lost` with a reason.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from flwr.app import Message

from keyfed.errors import DeployError
from keyfed.federated.types import ClientId, Reason
from keyfed.wire.flower.client import MESSAGE_TYPE, REASON_CAP, pack, unpack
from keyfed.wire.flower.patches import need
from keyfed.wire.transport import Answer, Lost, Post

CHUNK = 5 << 20  # bytes of an array that Flower puts into one object
FRAME_OBJECTS = 8  # of a reply besides its chunks: message, records, array
FRAME_BYTES, OBJECT_BYTES = 64 << 10, 200  # of a reply besides its chunks: all together, and more for each object


class Announced(NamedTuple):
    """A reply that its sender has announced: the message it answers, its own id, its objects (it is the last)."""

    answers: str
    name: str
    objects: tuple[str, ...]


class TooLarge(ValueError):
    """A reply that is larger than any answer to its message can be."""


class GridMailbox:
    """What is used of a SuperLink, through Flower's grid."""

    def __init__(self, grid: Any) -> None:
        need(all(hasattr(grid, name) for name in ("_runtime_client", "node", "run")), "another grid")
        self._grid = grid

    def get_nodes(self) -> Iterable[Any]:
        """Nodes that are connected."""
        return list(self._grid.get_nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        """Send messages; return their ids."""
        return list(self._grid.push_messages(messages))

    def announced(self, message_ids: Sequence[str]) -> Sequence[Announced]:
        """Replies to these messages that were announced since the last look."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        found = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        return [
            Announced(
                one.metadata.reply_to_message_id,
                one.metadata.message_id,
                tuple(tree.object_id for tree in iterate_object_tree(root)),
            )
            for one, root in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def fetch(self, name: str) -> bytes | None:
        """An object; None where it is not there yet, LookupError where it will never be."""
        from flwr.proto.message_pb2 import PullObjectRequest

        request = PullObjectRequest(node=self._grid.node, run_id=self._grid.run.run_id, object_id=name)
        found = self._grid._runtime_client.PullObject(request)
        if not found.object_found:
            raise LookupError(name)
        return bytes(found.object_content) if found.object_available else None

    def drop(self, name: str) -> None:
        """Let the SuperLink delete a reply: it was received, or is not wanted."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=name
        )
        self._grid._runtime_client.ConfirmMessageReceived(request)


class Coming:
    """A reply on its way.

    Attributes:
      misses: how often in a row its next object was not there.

    Args:
      most: bytes that its body may have.

    Raises:
      TooLarge: it announces more objects than such a body takes.
    """

    def __init__(self, announced: Announced, most: int) -> None:
        self.announced, self._most = announced, most
        self._missing = list(dict.fromkeys(reversed(announced.objects)))  # taken from the end: children come first
        self._contents: dict[str, bytes] = {}
        self._chunks = self._frame = self.misses = 0
        allowed = FRAME_OBJECTS + -(-most // CHUNK)
        if len(announced.objects) > allowed:
            raise TooLarge(f"a reply in {len(announced.objects):,} objects; expected at most {allowed:,}")
        self._heads = OBJECT_BYTES * allowed

    @property
    def count(self) -> tuple[int, int]:
        """Objects that came, and objects that were announced."""
        return len(self._contents), len(self._contents) + len(self._missing)

    def step(self, fetch: Callable[[str], bytes | None]) -> bool:
        """Fetch the next object if it is there; return whether it was.

        Raises:
          TooLarge: the reply has more bytes than it may have.
          LookupError: the object will never be there.
        """
        if not self._missing:
            return False
        content = fetch(self._missing[-1])
        if content is None:
            self.misses += 1
            return False
        self.misses = 0
        if content.startswith(b"ArrayChunk "):
            self._chunks += len(content)
        else:
            self._frame += len(content)
        if self._chunks > self._most + self._heads or self._frame > FRAME_BYTES + self._heads:
            raise TooLarge(f"a reply of over {self._most:,} bytes")
        self._contents[self._missing.pop()] = content
        return True

    @property
    def whole(self) -> bool:
        """Whether all objects have come."""
        return not self._missing

    def build(self) -> Message:
        """Return the reply; whatever is wrong with its objects is an exception."""
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        check_size(self._contents, self._most)
        built = inflate_object_from_contents(self.announced.name, self._contents)
        if not isinstance(built, Message):
            raise ValueError(f"a reply that is a {type(built).__name__}")
        return built


def check_size(contents: Mapping[str, bytes], cap: int) -> None:
    """Raise `TooLarge` for arrays that would have more than `cap` bytes: one chunk can be named a million times."""
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content

    total = 0
    for content in contents.values():
        if not content.startswith(b"Array "):
            continue
        _, children, _ = get_object_head_values_from_object_content(content)
        chunks = json.loads(content.partition(HEAD_BODY_DIVIDER)[2])["arraychunk_ids"]
        sizes = [len(contents[child]) - contents[child].find(HEAD_BODY_DIVIDER) - 1 for child in children]
        total += sum(sizes[k] for k in chunks)
    if total > cap:
        raise TooLarge(f"arrays of {total:,} bytes; at most {cap:,}")


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
        mailbox: GridMailbox,
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
