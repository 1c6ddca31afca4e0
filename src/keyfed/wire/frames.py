"""What goes through a socket in a home: Flower's side of a client and its training process, ServerApp and endpoint.

    frame = "KFR1" · header length (u32) · body length (u64) · header (JSON object of strings and numbers) · body

Big-endian. A question's header holds `kind` and `deadline`; an answer's is empty, or holds `error` (a type) and
`reason`. The socket lies in the home and only its owner may open it. Lengths are checked before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keyfed.errors import DeployError
from keyfed.system import local_socket

SOCKET = "resident.sock"
MAGIC = b"KFR1"
HEAD = struct.Struct(">4sIQ")
HEADER_CAP = 8 * 1024  # a reason is cut at 500 characters, each of which JSON may write in twelve bytes
BODY_CAP = 1 << 30  # a model of 268 million parameters; Flower itself has no limit
BACKLOG = 64  # questions that wait to be read
PATH_CAP = 100  # bytes of a socket's path; the system allows 104 to 108


class FrameError(DeployError):
    """A frame that is too large, cut short or no frame; or no process listens."""


def write_frame(link: socket.socket, header: Mapping[str, Any], body: bytes | memoryview) -> None:
    """Send a frame whole."""
    if len(body) > BODY_CAP:
        raise FrameError(f"a message has {len(body):,} bytes; at most {BODY_CAP:,} are sent")
    link.sendall(frame_head(header, len(body)))
    if len(body):  # who has all of a frame may have answered and gone
        link.sendall(body)


def read_frame(link: socket.socket, cap: int = BODY_CAP) -> tuple[dict[str, Any], bytes]:
    """Receive a frame whole; lengths are checked before anything is kept."""
    size, length = _lengths(_read(link, HEAD.size), cap)
    return _header(_read(link, size)), bytes(_read(link, length))


async def receive_frame(reader: asyncio.StreamReader, cap: int = BODY_CAP) -> tuple[dict[str, Any], bytes]:
    """Receive a frame whole, as `read_frame` does, where many are awaited at a time."""
    try:
        size, length = _lengths(await reader.readexactly(HEAD.size), cap)
        return _header(await reader.readexactly(size)), await reader.readexactly(length)
    except asyncio.IncompleteReadError as e:
        raise FrameError(f"the other end closed after {len(e.partial):,} of {e.expected:,} bytes") from None


def frame_head(header: Mapping[str, Any], length: int) -> bytes:
    """Return what a frame has before its body."""
    head = json.dumps(dict(header)).encode()
    return HEAD.pack(MAGIC, len(head), length) + head


def _lengths(head: bytes | bytearray, cap: int) -> tuple[int, int]:
    magic, size, length = HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameError("what came over the local socket is not a frame of Keyfed's")
    if size > HEADER_CAP or length > cap:
        raise FrameError(f"a frame of {size:,} and {length:,} bytes; at most {HEADER_CAP:,} and {cap:,} are read")
    return size, length


def _header(data: bytes | bytearray) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):  # of ValueError also a number of thousands of digits
        raise FrameError("the header of a frame is not JSON") from None
    if not isinstance(header, dict):
        raise FrameError("the header of a frame is not an object")
    return header


def _read(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        n = link.recv_into(view[got:])
        if n == 0:
            raise FrameError(f"the other end closed after {got:,} of {count:,} bytes")
        got += n
    return data


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yield a name for a socket that is short enough for the system, whatever folder it is in."""
    if len(os.fsencode(path)) <= PATH_CAP:
        yield str(path)
        return
    if not sys.platform.startswith("linux"):
        raise FrameError(f"{path} is too long for a socket ({PATH_CAP} bytes); choose a shorter --home")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket that only its owner may open; one that a killed process left is replaced."""
    fresh = path.with_name(f".{path.name}.new")
    for old in (path, fresh):
        old.unlink(missing_ok=True)
    with local_socket() as server:
        before = os.umask(0o177)
        try:
            with reachable(fresh) as name:
                server.bind(name)
        finally:
            os.umask(before)
        server.listen(BACKLOG)
        fresh.replace(path)  # a client that sees the socket can connect to it
        try:
            yield server
        finally:
            path.unlink(missing_ok=True)


def ask(
    path: Path,
    kind: str,
    body: bytes,
    deadline: float,
    *,
    who: str = "the training process",
    grace: float = 0.0,
    **more: Any,
) -> tuple[dict[str, Any], bytes]:
    """Put one question to the process behind a socket and wait for its answer, at most until the deadline.

    Args:
      who: the process, for errors.
      grace: seconds after the deadline in which it may still say why there is no answer.
      more: strings and numbers of the question's header.

    Raises:
      FrameError: no process listens, the answer is late or is no frame.
    """
    left = deadline - time.time()
    if left <= 0:
        raise FrameError(f'"{kind}" came after its deadline')
    with local_socket() as link, reachable(path) as name:
        link.settimeout(left + grace)
        try:
            link.connect(name)
            write_frame(link, {**more, "kind": kind, "deadline": deadline}, body)
            return read_frame(link)
        except TimeoutError:
            raise FrameError(f'"{kind}" was not answered before its deadline') from None
        except OSError as e:
            raise FrameError(f"{who} does not answer ({e.strerror or e})") from None
