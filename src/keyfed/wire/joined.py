"""Two ways to reach clients as one: Flower's nodes and pages are members of the same sums.

`WebTransport` carries messages to pages, through the local socket of the endpoint that they poll (`wire.pages`).
`Joined` sends each client its message by its own transport, all at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from keyfed.errors import DeployError
from keyfed.federated.types import ClientId
from keyfed.files import parse_json
from keyfed.wire.frames import FrameError, ask
from keyfed.wire.pages import refused_by_page
from keyfed.wire.transport import Answer, Lost, Post, Transport

T = TypeVar("T")
WEB_SOCKET = "web.sock"
WHO = "the endpoint for pages"
LOOK_SECONDS = 5.0  # for the list of pages that are there
GRACE_SECONDS = 5.0  # the endpoint says by itself that a deadline has passed; we wait that much longer for it


def aside(work: Callable[[], T]) -> Future[T]:
    """Do something at the same time; Ctrl-C does not wait for it, as it would for an executor's thread."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=do, name="aside", daemon=True).start()
    return future


class WebTransport:
    """Messages to pages, through the endpoint's socket. Where no endpoint runs there are no pages.

    Args:
      socket: the endpoint's.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def clients(self) -> Sequence[ClientId]:
        """Return the names of the pages that are open now, in order."""
        try:
            _, body = ask(self._socket, "pages", b"", time.time() + LOOK_SECONDS, who=WHO)
            return sorted(str(name) for name in parse_json(body))
        except (DeployError, ValueError, TypeError):
            return []

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Give every page its message and return what comes within `seconds`; the others are lost."""
        deadline = time.time() + seconds
        waiting = {name: aside(self._sending(name, post, deadline)) for name, post in posts.items()}
        return {name: answer.result() for name, answer in waiting.items()}

    def _sending(self, name: ClientId, post: Post, deadline: float) -> Callable[[], Answer]:
        return lambda: self._sent(name, post, deadline)

    def _sent(self, name: ClientId, post: Post, deadline: float) -> Answer:
        try:
            said, answer = ask(
                self._socket, "post", bytes(post.body), deadline, who=WHO, grace=GRACE_SECONDS,
                name=name, message=post.kind, most=post.most,
            )  # fmt: skip
        except FrameError as e:
            return Lost("unreachable", str(e))
        if "error" in said:
            return refused_by_page(str(said["error"]), str(said.get("reason", "")))
        return answer if len(answer) <= post.most else Lost("too large", f"an answer of {len(answer):,} bytes")


class Joined:
    """A transport of two: pages by one, everybody else by the other.

    Args:
      is_page: whether a client is a page.
    """

    def __init__(self, others: Transport, pages: Transport, is_page: Callable[[ClientId], bool]) -> None:
        self._others, self._pages, self._is_page = others, pages, is_page

    def clients(self) -> Sequence[ClientId]:
        """Return everybody who can be reached by either, in order."""
        pages = [name for name in self._pages.clients() if self._is_page(name)]
        return sorted({*self._others.clients(), *pages})

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Send everybody's message at the same time; the answers are in the order of the posts."""
        to_pages = {name: post for name, post in posts.items() if self._is_page(name)}
        to_others = {name: post for name, post in posts.items() if name not in to_pages}
        from_pages = aside(lambda: self._pages.exchange(to_pages, seconds)) if to_pages else None
        answers = dict(self._others.exchange(to_others, seconds)) if to_others else {}
        if from_pages is not None:
            answers |= from_pages.result()
        return {name: answers[name] for name in posts}
