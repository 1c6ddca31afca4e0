"""Connections from their first packet, with limits: how many, how long, how many bytes.

uvicorn limits neither the time of a TLS handshake nor of a request's head, and counts nothing before the handshake. So
the listening socket is plain, and TLS starts in a `Door`, after the connection was counted. A connection begins as a
stranger's. It is known after a request on it proved who sent it. Where there are too many strangers, the one that has
waited longest is closed. An honest client proves itself within the first second, so it gets through while others fill
the places.

What is behind the doors decides who is known: `wire.flower.gate` for Flower's nodes, `wire.pages` for pages.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from keyfed.errors import ConfigError
from keyfed.system import raise_open_files

if TYPE_CHECKING:
    import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

HOST = "127.0.0.1"
LONGEST_ADDRESS = 64  # characters; an IPv6 address and its scope have 61
MALFORMED, SLOW, LARGE = 400, 408, 413


def from_here(client: str | None, server: str | None) -> bool:
    """Whether an address is this machine's own."""
    if client is None or len(client) > LONGEST_ADDRESS:
        return False
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    # A machine that calls its own outer address comes from that very address.
    return bool((mapped or address).is_loopback) or client == server


async def read_body(receive: Receive, headers: Headers, cap: int, seconds: float) -> bytes | int | None:
    """Return a whole body, or the status to refuse it with, or None when its sender has gone.

    Bytes are counted as they come: a body without a length, or longer than its length, ends at the limit.
    """
    for name, value in headers:
        if bytes(name).lower() == b"content-length":
            if not value.isdigit() or len(value) > 20:
                return MALFORMED
            if int(value) > cap:
                return LARGE
            cap = int(value)
    data, more = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more:
                piece = await receive()
                if piece["type"] != "http.request":
                    return None
                data += piece.get("body", b"")
                if len(data) > cap:
                    return LARGE
                more = bool(piece.get("more_body"))
    except TimeoutError:
        return SLOW
    return bytes(data)


async def answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


class Guard:
    """Around an application that is read only: the Host, the method, the headers of every answer.

    A request with another Host is refused: a web site that makes its name point to this machine gets nothing.

    Args:
      hosts: what a browser may write there.
      headers: of every answer.
    """

    def __init__(self, app: Application, hosts: Collection[str], headers: Mapping[str, str]) -> None:
        self._app, self._hosts = app, hosts
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it in one line."""
        if scope["type"] != "http":
            return
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        plain = (b"content-type", b"text/plain; charset=utf-8")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            await answer(guarded, 400, b"this server answers to its own address only", plain)
        elif scope["method"] not in ("GET", "HEAD"):
            await answer(guarded, 405, b"files are read here, nothing is taken", plain, (b"allow", b"GET, HEAD"))
        else:
            await self._app(scope, receive, guarded)


def listen(port: int, host: str = HOST, option: str = "--port") -> socket.socket:
    """Take a port of an address, any free one for 0; a browser that connects waits until the server runs.

    Args:
      option: names the port, for the error.

    Raises:
      ConfigError: the port is taken or may not be had, or the address is not one of this machine.
    """
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen(64)
    except (OSError, OverflowError) as e:
        taken.close()
        number = e.errno if isinstance(e, OSError) else None
        if number == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{host} is not an address of this machine; give one of its own with --address") from None
        why = "is taken" if number == errno.EADDRINUSE else f"cannot be had ({getattr(e, 'strerror', None) or e})"
        raise ConfigError(f"port {port} {why}; choose another with {option}, or 0 for any that is free") from None
    return taken


SPARE_FILES = 256  # for databases, logs and processes


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of connections.

    This machine's own addresses have no limit of their own: `keyfed up` runs all its clients there. Clients behind one
    address of a shared network count together, so the limit of an address leaves room for a hundred of them.

    Attributes:
      total: connections in all.
      address: connections from one address (IPv6: from one /64 network).
      strangers: strangers' connections in all.
      strangers_address: strangers' connections from one address.
      handshake_seconds: a TLS handshake.
      head_seconds: a request's head, from the handshake or its own first byte to its end.
      head_bytes: a request's head. Flower's have about 1 kB.
      request_bytes: a request with everything around its body; `here_bytes` from this machine, which sends programs.
      stranger_bytes: a request with everything around its body, while its sender has proved nothing.
      write_seconds: an answer that its receiver does not read.
      close_seconds: the end of a TLS connection.
    """

    total: int = 4096
    address: int = 512
    strangers: int = 1024
    strangers_address: int = 64
    handshake_seconds: float = 10.0
    head_seconds: float = 10.0
    head_bytes: int = 16_384
    request_bytes: int = 16_000_000
    here_bytes: int = 128_000_000
    stranger_bytes: int = 1 << 19
    write_seconds: float = 120.0
    close_seconds: float = 5.0


class Connections:
    """The connections that are open, by address, and which of them are strangers'."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._networks: dict[object, str] = {}  # every connection, and where it is from; "" for this machine
        self._counts: Counter[str] = Counter()
        self._strangers: dict[object, tuple[Any, Callable[[], None]]] = {}  # the longest waiting first; what closes it
        self._peers: dict[Any, object] = {}

    def enter(self, connection: object, peer: Any, server: Any, close: Callable[[], None]) -> bool:
        """Count a new connection; close a waiting stranger's to make room; False where there is no room."""
        network = _network(peer, server)
        its = [c for c in self._strangers if self._networks[c] == network] if network else []
        if len(its) >= self.limits.strangers_address or (network and self._counts[network] >= self.limits.address):
            if not its:
                return False
            self._close(its[0])
        if len(self._strangers) >= self.limits.strangers or len(self._networks) >= self.limits.total:
            if not self._strangers:
                return False
            self._close(next(iter(self._strangers)))
        self._networks[connection] = network
        self._counts[network] += 1
        self._strangers[connection] = peer, close
        self._peers[peer] = connection
        return True

    def proven(self, peer: Any) -> None:
        """Note that a connection's sender is known."""
        self._strangers.pop(self._peers.get(peer), None)

    def most_bytes(self, connection: object) -> int:
        """Return how many bytes a request on this connection may have, its trailers too, which are no body."""
        if not self._networks.get(connection, "?"):  # this machine: programs are submitted from here
            return self.limits.here_bytes
        return self.limits.stranger_bytes if connection in self._strangers else self.limits.request_bytes

    def leave(self, connection: object, peer: Any) -> None:
        """Forget a connection; again is no harm."""
        self._strangers.pop(connection, None)
        network = self._networks.pop(connection, None)
        if network is not None:
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]
        if self._peers.get(peer) is connection:
            del self._peers[peer]

    def counts(self) -> tuple[int, int]:
        """Return how many connections are open, and how many of them are strangers'."""
        return len(self._networks), len(self._strangers)

    def _close(self, connection: object) -> None:
        peer, close = self._strangers[connection]
        self.leave(connection, peer)
        close()


def _network(peer: Any, server: Any) -> str:
    host = str(peer[0]) if peer else "?"
    if from_here(host, str(server[0]) if server else None):
        return ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return host


class Http(Protocol):
    """What a Door needs of uvicorn's protocol of a connection."""

    cycle: Any
    """The last request whose head is complete; `cycle.response_complete` once it is answered."""

    def connection_made(self, transport: Any) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Door(asyncio.Protocol):
    """One connection: counted, then TLS, then handed to uvicorn with limits of time and bytes.

    Args:
      tls: None for a server of this machine alone.
    """

    def __init__(
        self,
        http: Http,
        connections: Connections,
        tls: ssl.SSLContext | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._http, self._connections, self._tls, self._loop = http, connections, tls, loop
        self._limits = connections.limits
        self._raw: asyncio.Transport | None = None
        self._peer: Any = None
        self._shaking: asyncio.Task[None] | None = None
        self._open = False  # whether uvicorn knows of it
        self._early = bytearray()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, and start TLS."""
        assert isinstance(transport, asyncio.Transport)
        self._raw, self._peer = transport, transport.get_extra_info("peername")
        server = transport.get_extra_info("sockname")
        if isinstance(self._peer, tuple):
            self._peer = self._peer[:2]
        if not self._connections.enter(self, self._peer, server, transport.abort):
            transport.abort()
        elif self._tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._shaking = self._loop.create_task(self._shake(transport, self._tls))

    async def _shake(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secure = await self._loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=self._limits.handshake_seconds,
                ssl_shutdown_timeout=self._limits.close_seconds,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError):  # gone, too slow, not TLS, or closed to make room
            secure = None
        if secure is None:
            transport.abort()
            self._connections.leave(self, self._peer)
        else:
            self._begin(secure)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._open = True
        self._http.connection_made(transport)
        self._wait_for_head()
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        """Hand bytes on, unless a head is too long or too slow."""
        if not self._open:  # the client's first bytes can come with the end of the handshake
            self._early += data
            return
        self._http.data_received(data)
        self._bytes += len(data)
        cycle = self._http.cycle
        if cycle is None or cycle.response_complete:
            self._wait_for_head()
            if self._bytes > self._limits.head_bytes:
                self._abort()
        elif self._timer is not None:  # the head is complete; what comes now is body
            self._timer.cancel()
            self._timer, self._bytes = None, 0
        elif self._bytes > self._connections.most_bytes(self):
            self._abort()

    def _wait_for_head(self) -> None:
        if self._timer is None:
            self._timer, self._bytes = self._loop.call_later(self._limits.head_seconds, self._abort), 0

    def _abort(self) -> None:
        if self._raw is not None:
            self._raw.abort()

    def eof_received(self) -> bool | None:
        """Hand it on."""
        return self._http.eof_received() if self._open else None

    def pause_writing(self) -> None:
        """Hand it on; an answer that is not read ends the connection."""
        self._http.pause_writing()
        self._write_timer = self._loop.call_later(self._limits.write_seconds, self._abort)

    def resume_writing(self) -> None:
        """Hand it on."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._connections.leave(self, self._peer)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._open:
            self._open = False
            self._http.connection_lost(exc)


def _without_trailers(protocol: Any) -> Any:
    """Return uvicorn's protocol with headers that come after a chunked body left out; it would keep every one."""
    if not hasattr(protocol, "on_header"):  # h11 bounds them itself
        return protocol

    class Heads(protocol):  # type: ignore[misc]
        """Takes headers while a head is read."""

        in_head = True

        def on_message_begin(self) -> None:
            self.in_head = True
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self.in_head:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self.in_head = False
            super().on_headers_complete()

    return Heads


def serve(connections: Connections) -> Callable[..., None]:
    """Return what serves an application as `uvicorn.run` would, which Flower calls: the same server, behind doors."""

    def run(**options: Any) -> None:
        server, tls = _server(connections, options)
        if tls is None:
            raise RuntimeError("a server without TLS")
        server.run()
        if not server.started:
            raise SystemExit(3)

    return run


LOCAL = ConnectionLimits(
    total=64, strangers=64, head_seconds=10.0, here_bytes=16_384, request_bytes=16_384, write_seconds=30.0
)
"""Of a server for this machine alone, which reads no bodies: one more connection closes the one that waits longest."""


def local_server(app: Application, limits: ConnectionLimits = LOCAL) -> uvicorn.Server:
    """Return a server without TLS, for this machine alone: `run(sockets=[…])` answers until `should_exit` is set."""
    # No logging of uvicorn's: to configure it would close the handlers of everybody else in this process.
    options = {"app": app, "lifespan": "off", "log_config": None, "log_level": "error", "server_header": False}
    return _server(Connections(limits), {**options, "timeout_graceful_shutdown": 1})[0]


def _server(connections: Connections, options: Mapping[str, Any]) -> tuple[uvicorn.Server, ssl.SSLContext | None]:
    """Return uvicorn's server behind doors, and the TLS that these start."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    def door(**its: Any) -> Door:
        loop = asyncio.get_running_loop()
        http: Any = _without_trailers(AutoHTTPProtocol)(**{**its, "_loop": loop})
        return Door(http, connections, tls, loop)

    # No access log: Flower leaves routine successes out of it, so that it is a file for strangers to fill.
    fixed: dict[str, Any] = {"http": door, "ws": "none", "proxy_headers": False, "access_log": False}
    # asyncio's own loop: uvloop begins to read after `connection_made`, so that bytes before TLS would be lost.
    fixed["loop"] = "asyncio"
    config = uvicorn.Config(**{**options, **fixed})
    config.load()
    tls, config.ssl = config.ssl, None  # uvicorn listens without TLS; the door starts it
    return uvicorn.Server(config), tls


def most_connections(total: int) -> int:
    """Raise this process's limit of open files as far as it needs and may; return how many connections fit."""
    limit = raise_open_files(total + SPARE_FILES)
    return total if limit is None else max(1, min(total, limit - SPARE_FILES))
