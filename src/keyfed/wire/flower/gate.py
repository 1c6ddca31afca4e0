"""Who gets through to a SuperLink: connections from their first packet, then requests by path and key.

Flower serves three things on one port: the fleet (nodes, which prove their key), control (which registers keys and
takes programs) and the runtime (which hands out the server's tasks). Only the fleet is for the network; the other two
answer this machine alone. One path is our own: a client's signed request to be forgotten.

Flower reads a whole body before it looks at the key. The `Gate` looks first: a request without the proof of an enrolled
key is answered from its head. What is read has a limit of bytes and of time.

How many connections there may be, and for how long, is `wire.doors`: a connection is known after a request on it has
passed the gate with the proof of an enrolled key, or came from this machine.
"""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from keyfed.errors import KeyfedError
from keyfed.wire.doors import (
    LARGE,
    MALFORMED,
    SLOW,
    Application,
    Headers,
    Receive,
    Scope,
    Send,
    answer,
    from_here,
    read_body,
)
from keyfed.wire.roster import key_sum

Proof = Callable[[Headers], int]

FLEET, HEALTH, LEAVE = "/v1/fleet/", "/health", "/keyfed/leave"
LONGEST_PATH = 1024  # characters
LEAVE_CAP = 4096
FLEET_CAP = 8_000_000  # Flower sends arrays in chunks of 5 MiB
HERE_CAP = 64_000_000  # programs and results of this machine's own runs
BODY_SECONDS = 120.0  # 8 MB in that time are 67 kB/s
SMALL_SECONDS = 10.0  # for bodies of at most LEAVE_CAP bytes
PROXIED = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}
UNPROVEN, FORBIDDEN, NOT_ENROLLED, UNREADY = 401, 403, 412, 503
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
        body = await read_body(receive, headers, cap, SMALL_SECONDS if small else BODY_SECONDS)
        if isinstance(body, int):
            await _refuse(send, body)
        elif body is None:
            return  # the sender has gone
        elif path == LEAVE:
            took = scope.get("method") == "POST" and self._leave(body)
            await (answer(send, 202, b"") if took else _refuse(send, FORBIDDEN))
        else:
            await self._app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Mapping[str, Any], path: str, headers: Headers) -> int:
        client, server = scope.get("client"), scope.get("server")
        # What came through a proxy, or says so, is not from here, whatever address that has.
        direct = not any(bytes(name).lower() in PROXIED for name, _ in headers)
        if not allowed(path, client[0] if client and direct else None, server[0] if server else None):
            return FORBIDDEN
        return self._proof(headers) if path.startswith(FLEET) else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then what the connection says (that it was closed)."""
    parts = [body]

    async def again() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    return again


async def _refuse(send: Send, status: int) -> None:
    await answer(send, status, WHY[status], (b"connection", b"close"))
