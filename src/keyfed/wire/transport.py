"""How messages reach clients and their answers come back: Flower in a deployment, plain calls in a test.

A transport knows nothing of training. It carries bytes to named clients and brings back bytes, or why there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from keyfed.errors import KeyfedError
from keyfed.federated.types import ClientId, Reason
from keyfed.wire.messages import Kind, Rejected, control_head


class Post(NamedTuple):
    """A message to one client; its answer may have `most` bytes, and is not even fetched where it has more."""

    kind: Kind
    body: bytes
    most: int = control_head()


class Lost(NamedTuple):
    """Why no answer came; `detail` is for a person."""

    reason: Reason
    detail: str = ""


Answer = bytes | Lost


class Transport(Protocol):
    """Carries messages to clients."""

    def clients(self) -> Sequence[ClientId]:
        """Names of the clients that can be reached now, in order."""
        ...

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Send each client its message and wait at most so long; everybody in `posts` is in the answer."""
        ...


class Handler(Protocol):
    """A client's side of a transport."""

    def handle(self, kind: str, body: bytes) -> bytes:
        """Answer a message; what is wrong with it is a `KeyfedError`."""
        ...


Fault = Callable[[ClientId, Post, Handler], Answer]


class InProcess:
    """Clients in this process, called one after the other: what tests and `--secure` comparisons run on.

    Args:
      fault: stands between transport and clients; it may lose, delay, repeat or change messages. None: nothing does.
    """

    def __init__(self, handlers: Mapping[ClientId, Handler], fault: Fault | None = None) -> None:
        self.handlers = dict(handlers)
        self.fault = fault or deliver
        self.sent = 0
        self.received = 0

    def clients(self) -> Sequence[ClientId]:
        """Everybody, in order."""
        return sorted(self.handlers)

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Call every client in turn; nobody is ever late."""
        del seconds
        out: dict[ClientId, Answer] = {}
        for client, post in posts.items():
            self.sent += len(post.body)
            handler = self.handlers.get(client)
            answer = Lost("no answer") if handler is None else self.fault(client, post, handler)
            if isinstance(answer, bytes):
                self.received += len(answer)
            out[client] = answer
        return out


def deliver(client: ClientId, post: Post, handler: Handler) -> Answer:
    """Hand a message over; a client's own error is its answer."""
    del client
    try:
        return handler.handle(post.kind, post.body)
    except Rejected as e:
        return Lost(e.reason, e.detail)
    except KeyfedError as e:
        return Lost("client error", str(e))
