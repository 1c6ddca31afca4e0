"""Who gets through to a SuperLink: connections from their first packet, then requests by path and key.

Flower serves three things on one port: the fleet (nodes, which prove their key), control (which registers keys and
takes programs) and the runtime (which hands out the server's tasks). Only the fleet is for the network; the other two
answer this machine alone. One path is our own: a client's signed request to be forgotten.

Flower reads a whole body before it looks at the key. The `Gate` looks first: a request without the proof of an enrolled
key is answered from its head. What is read has a limit of bytes and of time.

uvicorn limits neither the time of a TLS handshake nor of a request's head, and counts nothing before the handshake. So
the listening socket is plain, and TLS starts in a `Door`, after the connection was counted. A connection begins as a
stranger's. It is known once a request on it has passed the gate with the proof of an enrolled key, or came from this
machine. Where there are too many strangers, the one that has waited longest is closed. An honest client proves itself
within the first second, so it gets through while others fill the places.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import ipaddress
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from keyfed.errors import KeyfedError
from keyfed.system import raise_open_files
from keyfed.wire.roster import key_sum

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
Proof = Callable[[Headers], int]

FLEET, HEALTH, LEAVE = "/v1/fleet/", "/health", "/keyfed/leave"
LONGEST_PATH, LONGEST_ADDRESS = 1024, 64  # characters; an IPv6 address and its scope have 61
LEAVE_CAP = 4096
FLEET_CAP = 8_000_000  # Flower sends arrays in chunks of 5 MiB
HERE_CAP = 64_000_000  # programs and results of this machine's own runs
BODY_SECONDS = 120.0  # 8 MB in that time are 67 kB/s
SMALL_SECONDS = 10.0  # for bodies of at most LEAVE_CAP bytes
PROXIED = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}
MALFORMED, UNPROVEN, FORBIDDEN, SLOW, NOT_ENROLLED, LARGE, UNREADY = 400, 401, 403, 408, 412, 413, 503
WHY = {
    MALFORMED: b"the length of the body is not a number",
    UNPROVEN: b"the headers do not prove a node key",
    FORBIDDEN: b"only from the server's own machine",
    SLOW: b"the body took too long",
    NOT_ENROLLED: b"this node key is not enrolled",
    LARGE: b"the body is too large",
    UNREADY: b"the roster cannot be read",
}


def allowed(path: str, client: str | None, server: str | None) -> bool:
    """Whether a request from an address may reach a path: the fleet's from anywhere, all others from this machine.

    Example:
      >>> allowed("/v1/fleet/pull-messages", "203.0.113.9", "203.0.113.1")
      True
      >>> allowed("/v1/control/start-run", "203.0.113.9", "203.0.113.1")
      False
      >>> allowed("/v1/control/start-run", "127.0.0.1", "127.0.0.1")
      True
    """
    if len(path) > LONGEST_PATH:
        return False
    if "//" in path or "/." in path or "%" in path or "\\" in path:  # what another layer might read differently
        return False
    return path in (HEALTH, LEAVE) or path.startswith(FLEET) or from_here(client, server)


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


def node_proof(
    enrolled: Callable[[str], bool], now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
) -> Proof:
    """Return the check of Flower's three headers: key, time, and the key's signature of the time.

    Flower checks the same after it has read the body. The cheap checks come first: a stranger costs one SHA-256.

    Args:
      enrolled: whether the SHA-256 of a public key is in the roster.

    Returns:
      A function of the headers: 0 where they prove an enrolled key, else the status to answer.
    """
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    names = tuple(n.encode() for n in (FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER))

    def prove(headers: Headers) -> int:
        found: dict[bytes, list[bytes]] = {name: [] for name in names}
        for name, value in headers:
            if name.lower() in found:
                found[name.lower()].append(value)
        if any(len(values) != 1 for values in found.values()):
            return UNPROVEN
        key64, signed, signature64 = (found[name][0] for name in names)
        try:
            key, signature = (base64.b64decode(value, validate=True) for value in (key64, signature64))
            age = (now() - datetime.datetime.fromisoformat(signed.decode("ascii"))).total_seconds()
            if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
                return UNPROVEN
            if not enrolled(key_sum(key)):
                return NOT_ENROLLED
            return 0 if verify_signature(bytes_to_public_key(key), signed, signature) else UNPROVEN
        except KeyfedError:
            return UNREADY
        except (ValueError, TypeError, OverflowError, binascii.Error):
            return UNPROVEN

    return prove


class Gate:
    """The rules as a layer around Flower's web application.

    Args:
      leave: takes a wish to be forgotten; False where it is not from an enrolled client.
      proof: the status to refuse a fleet request's headers with, or 0.
      proven: is called with the (host, port) of a connection whose sender is known from here on.
    """

    def __init__(
        self,
        app: Application,
        leave: Callable[[bytes], bool],
        proof: Proof,
        proven: Callable[[Any], None] = lambda peer: None,
    ) -> None:
        self._app, self._leave, self._proof, self._proven = app, leave, proof, proven

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on with its whole body, or refuse it; a refusal closes the connection."""
        if scope["type"] == "websocket":  # Flower has none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = str(scope.get("path", "")), list(scope.get("headers", ()))
        refusal = self._refusal(scope, path, headers)
        if refusal:
            await _refuse(send, refusal)
            return
        small = path in (HEALTH, LEAVE)
        if not small:
            self._proven(scope.get("client"))
        cap = LEAVE_CAP if small else FLEET_CAP if path.startswith(FLEET) else HERE_CAP
        body = await _body(receive, headers, cap, SMALL_SECONDS if small else BODY_SECONDS)
        if isinstance(body, int):
            await _refuse(send, body)
        elif body is None:
            return  # the sender has gone
        elif path == LEAVE:
            took = scope.get("method") == "POST" and self._leave(body)
            await (_answer(send, 202, b"") if took else _refuse(send, FORBIDDEN))
        else:
            await self._app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Mapping[str, Any], path: str, headers: Headers) -> int:
        client, server = scope.get("client"), scope.get("server")
        # What came through a proxy, or says so, is not from here, whatever address that has.
        direct = not any(bytes(name).lower() in PROXIED for name, _ in headers)
        if not allowed(path, client[0] if client and direct else None, server[0] if server else None):
            return FORBIDDEN
        return self._proof(headers) if path.startswith(FLEET) else 0


async def _body(receive: Receive, headers: Headers, cap: int, seconds: float) -> bytes | int | None:
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
                part = await receive()
                if part["type"] != "http.request":
                    return None
                data += part.get("body", b"")
                if len(data) > cap:
                    return LARGE
                more = bool(part.get("more_body"))
    except TimeoutError:
        return SLOW
    return bytes(data)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then what the connection says (that it was closed)."""
    parts = [body]

    async def again() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    return again


async def _refuse(send: Send, status: int) -> None:
    await _answer(send, status, WHY[status], (b"connection", b"close"))


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


SPARE_FILES = 256  # for the database, logs and processes of the SuperLink


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
    request_bytes: int = 2 * FLEET_CAP
    here_bytes: int = 2 * HERE_CAP
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
      tls: None for tests without TLS.
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
    """Return what Flower calls as `uvicorn.run`: the same server, behind doors."""

    def run(**options: Any) -> None:
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
        if tls is None:
            raise RuntimeError("a SuperLink without TLS")
        server = uvicorn.Server(config)
        server.run()
        if not server.started:
            raise SystemExit(3)

    return run


def most_connections(total: int) -> int:
    """Raise this process's limit of open files as far as it needs and may; return how many connections fit."""
    limit = raise_open_files(total + SPARE_FILES)
    return total if limit is None else max(1, min(total, limit - SPARE_FILES))
