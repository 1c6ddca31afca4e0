"""Pages of browsers as clients: who sends a request, and a mailbox for each page.

A page has no node key of Flower's. It signs every request with its lasting identity, over the path, its name, the time
and the sum of the body:

    "keyfed-web-1" / path / NAME / TIME / id of the message or "" / SHA-256 of the body      (lines, "\\n" between them)

The time is in milliseconds. A signature serves one request. A page fetches its messages by long polls and posts its
answers; a mailbox holds at most one message. A page is there while one of its polls is open, and a little longer. While
it works on a message it keeps a poll open as well, so that a closed tab is known before the deadline.

Everything here runs in one thread, on one event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from keyfed.errors import DeployError
from keyfed.federated.types import ClientId, Reason
from keyfed.private.secagg.keys import is_signature
from keyfed.wire.frames import FrameError, frame_head, receive_frame
from keyfed.wire.roster import is_hex
from keyfed.wire.transport import Answer, Lost

FORMAT = "keyfed-web-1"
SCHEME = "Keyfed "
SKEW = 120_000  # milliseconds that a page's clock may differ from ours
MOST_PROOFS = 512  # requests of one page within the time that a signature is good for
LONGEST_HEADER = 400  # characters of a proof: a name of 64, a time of 15, a signature of 128
LONGEST_REASON = 300
POLL_SECONDS, AWAY_SECONDS, LOOK_SECONDS = 25.0, 20.0, 1.0
MOST_READERS = 2  # answers of one page that are read at a time: a broken connection and the next attempt
MOST_HELD = 1 << 30  # bytes of all messages that wait
REASONS: tuple[Reason, ...] = get_args(Reason)


class Declined(DeployError):
    """A request that is not served: status, type and one line for the page.

    Attributes:
      status: of the answer.
      error: type, for the page's program.
    """

    def __init__(self, status: int, error: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.error = status, error


def request_text(path: str, name: str, when: int, message: str, body_sum: str) -> bytes:
    """Return what a page signs of a request.

    Args:
      message: id of the message that is answered or worked on; "" for none.
      body_sum: SHA-256 of the body, hexadecimal.
    """
    return "\n".join([FORMAT, path, name, str(when), message, body_sum]).encode()


class Proofs:
    """Checks who sends a request, from its headers alone.

    Args:
      identity_of: the public key of an enrolled page, None for other names.
      clock: seconds.
    """

    def __init__(self, identity_of: Callable[[str], bytes | None], clock: Callable[[], float] = time.time) -> None:
        self._identity_of, self._clock = identity_of, clock
        self._seen: dict[str, dict[bytes, int]] = {}

    def check(self, path: str, headers: Mapping[str, str], body_sum: str) -> str:
        """Return the name of the page that signed a request.

        Raises:
          Declined: it is unsigned, of no enrolled page, of another time, of another key, or was sent before.
        """
        name, when, signature = _proof(headers.get("authorization", ""))
        identity = self._identity_of(name)
        if identity is None:
            self._seen.pop(name, None)
            raise Declined(403, "not enrolled", "this page is not enrolled here; ask for a new link")
        now = round(self._clock() * 1000)
        if abs(when - now) > SKEW:
            side = "ahead of" if when > now else "behind"
            off = abs(when - now) // 1000
            raise Declined(401, "clock", f"this device's clock is {off} s {side} the server's; set it right")
        message = headers.get("keyfed-id", "")
        if not is_signature(signature, request_text(path, name, when, message, body_sum), identity):
            raise Declined(401, "unproven", "the signature is not that of this page's identity over this request")
        seen = self._seen.setdefault(name, {})
        for old in [s for s, t in seen.items() if t < now - SKEW]:
            del seen[old]
        if signature in seen:
            raise Declined(401, "replayed", "this request was sent before; a page signs each anew")
        if len(seen) >= MOST_PROOFS:
            raise Declined(429, "busy", f"over {MOST_PROOFS} requests of this page within minutes; wait")
        seen[signature] = when
        return name


def _proof(text: str) -> tuple[str, int, bytes]:
    malformed = Declined(401, "unproven", "expected the header authorization: Keyfed NAME.TIME.SIGNATURE")
    if len(text) > LONGEST_HEADER or not text.startswith(SCHEME):
        raise malformed
    parts = text[len(SCHEME) :].rsplit(".", 2)
    if len(parts) != 3 or not parts[0] or not is_hex(parts[2], 128):
        raise malformed
    if not (parts[1].isascii() and parts[1].isdigit() and len(parts[1]) <= 15):
        raise malformed
    return parts[0], int(parts[1]), bytes.fromhex(parts[2])


@dataclass(slots=True, eq=False)
class Letter:
    """A message to a page.

    Attributes:
      most: bytes that its answer may have.
      deadline: in seconds since 1970.
      fetched: the page has it.
      watched: the page polls while it works on it.
      readers: answers to it that are being read.
    """

    id: str
    kind: str
    body: bytes
    most: int
    deadline: float
    answer: asyncio.Future[Answer]
    fetched: bool = False
    watched: bool = False
    readers: int = 0


@dataclass(slots=True, eq=False)
class _Mailbox:
    """Of one page: when its last poll ended, the message that waits or is worked on, the newest open poll."""

    seen: float
    letter: Letter | None = None
    poll: asyncio.Future[Letter | None] | None = None


class Mailboxes:
    """The messages to pages and their polls.

    Args:
      away: seconds without a poll after which a page is gone.
    """

    def __init__(
        self,
        poll: float = POLL_SECONDS,
        away: float = AWAY_SECONDS,
        look: float = LOOK_SECONDS,
        held: int = MOST_HELD,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._poll, self._away, self._look, self._held, self._clock = poll, away, look, held, clock
        self._boxes: dict[ClientId, _Mailbox] = {}

    def present(self) -> list[ClientId]:
        """Return the pages that are there, in order; forget those that are long gone."""
        gone = [name for name, box in self._boxes.items() if box.letter is None and self._is_away(box)]
        for name in gone:
            del self._boxes[name]
        return sorted(self._boxes)

    def _is_away(self, box: _Mailbox) -> bool:
        return box.poll is None and _now() - box.seen > self._away

    def forget(self, name: ClientId) -> None:
        """Drop a page that has left: its message is lost, its poll ends."""
        box = self._boxes.pop(name, None)
        if box is not None:
            if box.letter is not None:
                _settle(box.letter.answer, Lost("unreachable", "the page has left the federation"))
            if box.poll is not None:
                _settle(box.poll, None)

    async def exchange(self, name: ClientId, kind: str, body: bytes, most: int, deadline: float) -> Answer:
        """Give a page its message and wait for the answer, until the deadline or until the page is gone."""
        box = self._boxes.get(name)
        if box is None or self._is_away(box):
            return Lost("unreachable", "its page is not open")
        if box.letter is not None:
            return Lost("not now", "its page has another message to answer")
        body, held = self._shared(body)
        if held + len(body) > self._held:
            return Lost("not now", f"messages of {held:,} bytes wait for pages already")
        letter = Letter(os.urandom(16).hex(), kind, body, most, deadline, asyncio.get_running_loop().create_future())
        box.letter = letter
        if box.poll is not None:
            _settle(box.poll, letter)
        try:
            return await self._answered(box, letter)
        finally:
            box.letter = None
            if box.poll is not None:  # of the page that works on it
                _settle(box.poll, None)

    def _shared(self, body: bytes) -> tuple[bytes, int]:
        """Return a body, as the object that other mailboxes hold where they have the same; and the bytes held."""
        others = {id(box.letter.body): box.letter.body for box in self._boxes.values() if box.letter is not None}
        same = next((other for other in others.values() if other == body), None)
        held = sum(map(len, others.values()))
        return (body, held) if same is None else (same, held - len(same))

    async def _answered(self, box: _Mailbox, letter: Letter) -> Answer:
        seconds = letter.deadline - self._clock()
        while True:
            left = letter.deadline - self._clock()
            await asyncio.wait([letter.answer], timeout=max(0.0, min(left, self._look)))
            if letter.answer.done():
                return letter.answer.result()
            if left <= 0:
                return Lost("no answer", f"within {seconds:.0f} s")
            if not letter.readers and self._is_away(box) and (letter.watched or not letter.fetched):
                return Lost("unreachable", "its page was closed")

    async def next(self, name: ClientId, working: str, closed: Coroutine[Any, Any, None]) -> Letter | None:
        """Wait for a page's next message; None where there is none for now.

        Args:
          working: id of the message that the page works on, "" for none: then the end of that message is waited for.
          closed: is done when the connection is.

        Raises:
          Declined: a newer poll of this page has come, or the message that it works on is gone.
        """
        watch = asyncio.ensure_future(closed)
        try:
            return await self._polled(name, working, watch)
        finally:
            watch.cancel()

    async def _polled(self, name: ClientId, working: str, watch: asyncio.Future[None]) -> Letter | None:
        box = self._boxes.setdefault(name, _Mailbox(_now()))
        if box.poll is not None:
            box.poll.cancel()
        letter = None if box.letter is None or box.letter.answer.done() else box.letter
        if working and (letter is None or letter.id != working):
            raise Declined(409, "late", "the answer to this message is not awaited any more")
        if letter is not None and not working:
            letter.fetched, box.poll, box.seen = True, None, _now()
            return letter
        if letter is not None:
            letter.fetched = letter.watched = True
        mine: asyncio.Future[Letter | None] = asyncio.get_running_loop().create_future()
        box.poll = mine
        wait = self._poll if letter is None else max(0.0, letter.deadline - self._clock())
        try:
            waited: list[asyncio.Future[Any]] = [mine, watch]
            await asyncio.wait(waited, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if mine.cancelled():
                raise Declined(409, "elsewhere", "another tab of this page takes its messages now")
            found = mine.result() if mine.done() else None
            if found is not None:
                found.fetched = not watch.done()
            return found
        finally:
            box.seen = _now()
            if box.poll is mine:
                box.poll = None

    def waiting(self, name: ClientId, message: str) -> Letter:
        """Return the message that a page answers.

        Raises:
          Declined: that answer is not awaited, or too many are being read.
        """
        box = self._boxes.get(name)
        if box is None or box.letter is None or box.letter.id != message or box.letter.answer.done():
            raise Declined(409, "late", "this answer is not awaited: its time is over, or it has come already")
        if box.letter.readers >= MOST_READERS:
            raise Declined(429, "busy", "answers of this page are being read; wait for those")
        return box.letter

    def take(self, letter: Letter, answer: Answer) -> None:
        """Keep the answer to a message; the first counts.

        Raises:
          Declined: it came too late.
        """
        if letter.answer.done() or self._clock() >= letter.deadline:
            raise Declined(409, "late", "this answer is not awaited: its time is over, or it has come already")
        letter.answer.set_result(answer)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def refused_by_page(error: str, reason: str) -> Lost:
    """Return why a page does not answer, from what it wrote: a known type, and a line that is safe to print."""
    known = next((one for one in REASONS if one == error), None)
    printable = "".join(c if c.isprintable() else " " for c in reason[:LONGEST_REASON])
    return Lost(known or "client error", printable)


async def answer_locally(mailboxes: Mailboxes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one question of the ServerApp: which pages are there, or a message to one of them."""
    try:
        header, body = await receive_frame(reader)
        said: dict[str, str] = {}
        if header.get("kind") == "pages":
            data = json.dumps(mailboxes.present()).encode()
        else:
            said, data = await _posted(mailboxes, header, body)
        writer.write(frame_head(said, len(data)))
        writer.write(data)
        await writer.drain()
    except (FrameError, OSError):
        pass  # it has gone
    finally:
        writer.close()


async def _posted(mailboxes: Mailboxes, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, str], bytes]:
    name, kind, most, deadline = (header.get(key) for key in ("name", "message", "most", "deadline"))
    if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(most, int):
        return {"error": "client error", "reason": "a question without name, message and most"}, b""
    if not isinstance(deadline, int | float):
        return {"error": "client error", "reason": "a question without a deadline"}, b""
    answer = await mailboxes.exchange(name, kind, body, most, float(deadline))
    if isinstance(answer, Lost):
        return {"error": answer.reason, "reason": answer.detail}, b""
    return {}, answer
