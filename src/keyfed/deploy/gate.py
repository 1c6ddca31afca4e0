"""Who may speak to which part of a SuperLink.

Flower serves three things on one port: the fleet (nodes, which prove their key), control (whoever can connect may
register keys and submit programs) and the runtime (whoever can connect may take the server's tasks). Only the fleet is
for the network; the other two are answered to this machine alone. One path is our own: a client's signed wish to be
forgotten.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET, HEALTH, LEAVE = "/v1/fleet/", "/health", "/keyfed/leave"
LEAVE_CAP = 4096
PROXIED = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}


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
    if "//" in path or "/." in path or "%" in path or "\\" in path:  # what another layer might read differently
        return False
    return path in (HEALTH, LEAVE) or path.startswith(FLEET) or _from_here(client, server)


def _from_here(client: str | None, server: str | None) -> bool:
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    # A machine that calls its own outer address comes from that very address.
    return bool((mapped or address).is_loopback) or client == server


class Gate:
    """The rule as a layer around Flower's web application.

    Args:
      leave: takes a wish to be forgotten; False where it is not from an enrolled client.
    """

    def __init__(self, app: Application, leave: Callable[[bytes], bool]) -> None:
        self._app, self._leave = app, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or answer 403."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        client, server = scope.get("client"), scope.get("server")
        path = str(scope.get("path", ""))
        # Who came through a proxy, or says so, is not from here, whatever address that has.
        direct = not any(bytes(name).lower() in PROXIED for name, _ in scope.get("headers", ()))
        if not allowed(path, client[0] if client and direct else None, server[0] if server else None):
            await _refuse(scope, send)
        elif path == LEAVE:
            body = await _body(receive, LEAVE_CAP)
            took = scope["type"] == "http" and scope.get("method") == "POST" and body is not None and self._leave(body)
            await (_answer(send, 202, b"") if took else _refuse(scope, send))
        else:
            await self._app(scope, receive, send)


async def _body(receive: Receive, cap: int) -> bytes | None:
    data, more = b"", True
    while more:
        part = await receive()
        data += part.get("body", b"")
        more = bool(part.get("more_body")) and part["type"] == "http.request"
        if len(data) > cap:
            return None
    return data


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "http":
        await _answer(send, 403, b"only from the server's own machine")
    else:
        await send({"type": "websocket.close", "code": 1008})


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
