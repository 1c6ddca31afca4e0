"""The endpoint for pages: HTTPS next to the SuperLink, from the same home and the same roster.

A page that signs a request is known by its headers, before a byte of its body is read. A stranger gets the files of the
page, `about`, and one small request to enrol; whatever it sends, the answer is one typed line. Connections are counted
from their first packet (`wire.doors`). What pages send is bounded by the message that it answers, in bytes and in time.
Nothing is written to the disk but the roster and a bounded number of lines of a log. The ServerApp of a run reaches the
mailboxes by a socket in the home (`wire.joined`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.deploy.certificates import SERVER_CERT, SERVER_KEY, check_certificate, hosts_of
from keyfed.deploy.enrolment import FILE_CAP, KnownKeys
from keyfed.deploy.homes import SERVER_VARIABLE, ServerHome
from keyfed.deploy.links import WEB_ADDRESS, KnownLinks, WebAddress, enrol_page, page_leaves
from keyfed.deploy.processes import Processes, bound_log, free_port, opener, python, wait_until
from keyfed.errors import ConfigError, DeployError, KeyfedError, cut, described
from keyfed.files import write_atomically
from keyfed.wire.doors import (
    LARGE,
    MALFORMED,
    SLOW,
    Application,
    ConnectionLimits,
    Connections,
    Receive,
    Scope,
    Send,
    answer,
    most_connections,
    read_body,
    serve,
)
from keyfed.wire.frames import listening
from keyfed.wire.joined import WEB_SOCKET
from keyfed.wire.pages import FORMAT, Declined, Mailboxes, Proofs, answer_locally, refused_by_page
from keyfed.wire.roster import is_hex
from keyfed.wire.transport import Lost

NAME, PREFIX = "web", "/federation/"
READY_SECONDS, SMALL_SECONDS = 60.0, 10.0
ANSWER_BYTES = 1 << 28  # of a request from a page that is known; its own message sets a lower limit
READ = "authorization, content-type, keyfed-id, keyfed-sum, keyfed-error, keyfed-reason"
SHOWN = "keyfed-kind, keyfed-id, keyfed-deadline"
EMPTY = hashlib.sha256(b"").hexdigest()
DEFECT = Declined(500, "defect", "the server could not do this; its operator finds a line in logs/web.log")
BUSY = Declined(503, "busy", "the server cannot read its roster now; try again")
WHY = {
    MALFORMED: Declined(MALFORMED, "malformed", "the length of the body is not a number"),
    SLOW: Declined(SLOW, "slow", "the body took too long"),
    LARGE: Declined(LARGE, "too large", "the body is larger than what is expected here"),
}


@dataclass(frozen=True, slots=True)
class Page:
    """What the endpoint says of the page that it serves.

    Attributes:
      version: of the page.
      hash: of its code.
      origin: the only other place whose page may call this server; None for none.
    """

    version: str
    hash: str
    origin: str | None = None


class Endpoint:
    """The routes below /federation/ as a web application; every other path is the page's files.

    Args:
      home: the server's.
      site: serves the files.
      proven: is called with the (host, port) of a connection whose sender is known from here on.
    """

    def __init__(
        self,
        home: ServerHome,
        site: Application,
        page: Page,
        mailboxes: Mailboxes,
        proven: Callable[[Any], None] = lambda peer: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._site, self._page, self._proven, self._clock = home, site, page, proven, clock
        self._mailboxes, self._known, self._links = mailboxes, KnownKeys(home), KnownLinks(home)
        self._proofs = Proofs(self._known.page, clock)
        self._routes: Mapping[tuple[str, str], Callable[[_Request], Awaitable[None]]] = {
            ("GET", "about"): self._about,
            ("POST", "enrol"): self._enrol,
            ("POST", "next"): self._next,
            ("POST", "answer"): self._answer,
            ("POST", "leave"): self._leave,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or decline it in one line."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        request = _Request(scope, receive, send, str(scope.get("path", "")))
        try:
            await self._serve(request)
        except Declined as e:
            await request.decline(e)
        except Exception as e:
            # What is foreseen is declined above, without a line: a stranger could fill the log with lines.
            logging.getLogger(__name__).error(described(e))
            await request.decline(BUSY if isinstance(e, KeyfedError) else DEFECT)

    async def _serve(self, request: _Request) -> None:
        if not request.path.startswith(PREFIX):
            await self._site(request.scope, request.receive, request.send)
            return
        request.read_headers(self._page.origin)
        if request.scope["method"] == "OPTIONS":
            await request.reply(204)
            return
        route = self._routes.get((request.scope["method"], request.path.removeprefix(PREFIX)))
        if route is None:
            raise Declined(404, "unknown", "there is no such request; load the page again")
        await route(request)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Listen on the socket for the ServerApp as long as the server runs."""
        with ExitStack() as stack:
            while True:
                event = (await receive())["type"]
                if event == "lifespan.startup":
                    link = stack.enter_context(listening(self._home.path / WEB_SOCKET))
                    link.setblocking(False)
                    server = await asyncio.start_unix_server(
                        lambda reader, writer: answer_locally(self._mailboxes, reader, writer), sock=link
                    )
                    stack.callback(server.close)
                await send({"type": f"{event}.complete"})
                if event == "lifespan.shutdown":
                    return

    async def _about(self, request: _Request) -> None:
        enrolling = await asyncio.to_thread(self._links.is_enrolling, self._clock())
        page = {"version": self._page.version, "hash": self._page.hash}
        await request.say({"format": FORMAT, "page": page, "now": round(self._clock()), "enrolling": enrolling})

    async def _enrol(self, request: _Request) -> None:
        body = await request.body(FILE_CAP, SMALL_SECONDS)
        if body is None:
            return
        enrolled = await asyncio.to_thread(enrol_page, self._home, body, self._clock(), self._links)
        self._proven(request.peer)
        await request.say(enrolled)

    async def _next(self, request: _Request) -> None:
        name = await self._sender(request, EMPTY)
        if await request.body(0, SMALL_SECONDS) is None:
            return
        letter = await self._mailboxes.next(name, request.headers.get("keyfed-id", ""), request.closed())
        if letter is None:
            await request.reply(204)
            return
        about = {"keyfed-kind": letter.kind, "keyfed-id": letter.id, "keyfed-deadline": f"{letter.deadline:.0f}"}
        await request.reply(200, letter.body, {"content-type": "application/octet-stream", **about})

    async def _answer(self, request: _Request) -> None:
        body_sum = request.headers.get("keyfed-sum", "")
        name = await self._sender(request, body_sum)
        letter = self._mailboxes.waiting(name, request.headers.get("keyfed-id", ""))
        letter.readers += 1
        try:
            body = await request.body(letter.most, max(0.0, letter.deadline - self._clock()))
        except Declined as e:
            if e.status == LARGE:
                self._mailboxes.take(letter, Lost("too large", f"an answer of over {letter.most:,} bytes"))
            raise
        finally:
            letter.readers -= 1
        if body is None:
            return
        if hashlib.sha256(body).hexdigest() != body_sum:
            raise Declined(MALFORMED, "malformed", "the body is not the one whose sum was signed")
        error = request.headers.get("keyfed-error")
        if error is not None:
            self._mailboxes.take(letter, refused_by_page(error, request.headers.get("keyfed-reason", "")))
        else:
            self._mailboxes.take(letter, body)
        await request.reply(204)

    async def _leave(self, request: _Request) -> None:
        name = await self._sender(request, EMPTY)
        if await request.body(0, SMALL_SECONDS) is None:
            return
        identity = self._known.page(name)
        if identity is not None:
            await asyncio.to_thread(page_leaves, self._home, name, identity)
        self._mailboxes.forget(name)
        await request.reply(204)

    async def _sender(self, request: _Request, body_sum: str) -> str:
        if not is_hex(body_sum, 64):
            raise Declined(MALFORMED, "malformed", "expected the header keyfed-sum: the SHA-256 of the body")
        name = self._proofs.check(request.path, request.headers, body_sum)
        self._proven(request.peer)
        return name


class _Request:
    """One request: its headers, its body within limits, its answer.

    Attributes:
      begun: whether an answer has begun.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        self.path, self.peer, self.headers = path, scope.get("client"), dict[str, str]()
        self.scope, self.receive, self._send, self.begun = scope, receive, send, False
        self._shared: dict[str, str] = {}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a piece of an answer."""
        self.begun = True
        await self._send(message)

    def read_headers(self, origin: str | None) -> None:
        """Read the headers; a page of another place than ours, and of `origin`, is declined.

        Raises:
          Declined: a header comes twice, or from elsewhere.
        """
        for name, value in self.scope["headers"]:
            key = bytes(name).decode("latin-1").lower()
            if key in self.headers and key.startswith(("keyfed-", "authorization", "origin", "host")):
                raise Declined(MALFORMED, "malformed", f"the header {key[:40]} comes twice")
            self.headers[key] = bytes(value).decode("latin-1")
        said = self.headers.get("origin")
        if said is None or said == f"https://{self.headers.get('host', '')}":
            return
        if origin is None or said != origin:
            raise Declined(403, "origin", "this page is from another place than the server allows (--web-origin)")
        self._shared = {
            "access-control-allow-origin": origin, "access-control-allow-headers": READ,
            "access-control-allow-methods": "GET, POST", "access-control-expose-headers": SHOWN,
            "access-control-max-age": "600", "cross-origin-resource-policy": "cross-origin", "vary": "origin",
        }  # fmt: skip

    async def body(self, cap: int, seconds: float) -> bytes | None:
        """Return the body; None where its sender has gone.

        Raises:
          Declined: it is too large or too slow.
        """
        found = await read_body(self.receive, self.scope["headers"], cap, seconds)
        if isinstance(found, int):
            raise WHY[found]
        return found

    async def closed(self) -> None:
        """Return when the connection is closed."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def say(self, document: Mapping[str, Any]) -> None:
        """Answer with an object."""
        await self.reply(200, json.dumps(document).encode(), {"content-type": "application/json"})

    async def decline(self, why: Declined) -> None:
        """Answer why not, in one line; then the connection ends, since of its body not all was read.

        An answer that has begun is left as it is: the connection ends with it.
        """
        if self.begun:
            return
        said = json.dumps({"error": why.error, "reason": cut(str(why))}).encode()
        await self.reply(why.status, said, {"content-type": "application/json", "connection": "close"})

    async def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Answer."""
        fixed = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        pairs = [(k.encode(), v.encode()) for k, v in {**fixed, **self._shared, **(headers or {})}.items()]
        if status == 204:  # has no body, and no length of one
            await self.send({"type": "http.response.start", "status": status, "headers": pairs})
            await self.send({"type": "http.response.body"})
        else:
            await answer(self.send, status, body, *pairs)


def check_web(text: str) -> tuple[str, int]:
    """Return host and port of [HOST:]PORT; every address of this machine's own is 127.0.0.1 by default.

    Example:
      >>> check_web("9443"), check_web("0.0.0.0:9443")
      (('127.0.0.1', 9443), ('0.0.0.0', 9443))
    """
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ConfigError(f'--web is "{text}"; expected [HOST:]PORT, as 9443 or 0.0.0.0:9443')
    return host.strip("[]") or "127.0.0.1", int(port)


def check_origin(text: str) -> str:
    """Return the origin of a page that is installed elsewhere: https://HOST[:PORT] and no path."""
    host = text.removeprefix("https://").rstrip("/")
    if not text.startswith("https://") or not host or any(c in "/?#@ \t\r\n" or not c.isascii() for c in host):
        raise ConfigError(f'--web-origin is "{text}"; expected https://HOST[:PORT], where the page is installed')
    return f"https://{host.lower()}"


def shown_host(home: ServerHome, host: str) -> str:
    """Return the host under which pages reach an endpoint: a name of the certificate."""
    names = hosts_of(home.path / SERVER_CERT)
    if host not in ("0.0.0.0", "::"):
        if host not in names:
            known = ", ".join(names)
            raise ConfigError(f"--web {host} is not in the server's certificate ({known}); make one with --name")
        return host
    return next((name for name in names if name not in ("localhost", "127.0.0.1", "::1")), "127.0.0.1")


def start_web(
    processes: Processes, home: ServerHome, host: str, port: int, module: str, site: Path, origin: str | None
) -> str:
    """Start the endpoint of a home and return its address, https://HOST:PORT, after it answers.

    Args:
      module: runs `run_endpoint` for the page's files.
      site: folder of the page's files.

    Raises:
      DeployError: the certificate is missing or expired, the port is taken, or it did not come up in time.
    """
    check_certificate(home.path / SERVER_CERT)
    port = port or free_port(host)
    shown = shown_host(home, host)
    address = f"https://[{shown}]:{port}" if ":" in shown else f"https://{shown}:{port}"
    command = python(module, str(os.getpid()), host, str(port), str(site.absolute()), address, origin or "")
    processes.start(NAME, command, {**os.environ, SERVER_VARIABLE: str(home.path.resolve())})
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    reached = f"https://[{here}]:{port}" if ":" in here else f"https://{here}:{port}"
    if not wait_until(lambda: web_answers(reached, home.ca), READY_SECONDS, lambda: processes.alive(NAME)):
        said = processes.log_tail(NAME, 600)
        processes.stop(NAME)
        raise DeployError(f"the endpoint for pages did not come up on {address}; the end of logs/{NAME}.log:\n{said}")
    write_atomically(home.path / WEB_ADDRESS, json.dumps(asdict(WebAddress(address, origin))).encode())
    return address


def web_answers(address: str, ca: Path, seconds: float = 2.0) -> bool:
    """Whether an endpoint answers at an address with a certificate of this authority."""
    try:
        with opener(ca).open(f"{address}{PREFIX}about", timeout=seconds) as reply:
            return bool(json.loads(reply.read(FILE_CAP))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_endpoint(home: ServerHome, site: Application, page: Page, host: str, port: int) -> None:
    """Serve pages until a signal ends it."""
    bound_log()
    limits = replace(ConnectionLimits(), request_bytes=ANSWER_BYTES, here_bytes=ANSWER_BYTES)
    connections = Connections(replace(limits, total=most_connections(limits.total)))
    endpoint = Endpoint(home, site, page, Mailboxes(), connections.proven)
    serve(connections)(
        app=endpoint, host=host, port=port, lifespan="on", log_level="error", log_config=None, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=1,
        ssl_certfile=str(home.path / SERVER_CERT), ssl_keyfile=str(home.path / SERVER_KEY),
    )  # fmt: skip
