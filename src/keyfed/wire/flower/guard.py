"""Replies as they arrive at the SuperLink: announced first, then object by object.

A client announces a reply with the ids of its objects and sends those afterwards. Flower's own `pull_messages` takes
every reply that is announced and waits for its objects, one reply after the other and up to two hours each: a client
that announces and does not send holds up all others. Here one request lists what is announced, and an object that is
not there yet is never waited for (`server` looks again). What a reply may hold is checked before it is fetched
(number of objects) and while it is fetched (bytes); it is built by itself, so that a garbled one costs its sender only.

This uses inner parts of flwr 1.41.0 (pinned): the grid's runtime client and the format of objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from flwr.app import Message

from keyfed.errors import DeployError

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


class Mailbox(Protocol):
    """What is used of a SuperLink."""

    def get_nodes(self) -> Iterable[Any]:
        """Nodes that are connected."""
        ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        """Send messages; return their ids."""
        ...

    def announced(self, message_ids: Sequence[str]) -> Sequence[Announced]:
        """Replies to these messages that were announced since the last look."""
        ...

    def fetch(self, name: str) -> bytes | None:
        """An object; None where it is not there yet, LookupError where it will never be."""
        ...

    def drop(self, name: str) -> None:
        """Let the SuperLink delete a reply: it was received, or is not wanted."""
        ...


class GridMailbox:
    """The mailbox of Flower's grid."""

    def __init__(self, grid: Any) -> None:
        if not all(hasattr(grid, name) for name in ("_runtime_client", "node", "run")):
            raise DeployError("this version of flwr has another grid; install flwr==1.41.0")
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
