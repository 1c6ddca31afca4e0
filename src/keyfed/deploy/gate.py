"""Who may speak to which part of a SuperLink.

Flower serves three things on one port: the fleet (nodes, which prove their key), control (whoever can connect may register
keys and submit programs) and the runtime (whoever can connect may take the server's tasks). Only the fleet is for the
network; the other two are answered to this machine alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/v1/fleet/", "/health")


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
    return path == "/health" or path.startswith(OPEN[0]) or _from_here(client, server)


def _from_here(client: str | None, server: str | None) -> bool:
    if client is None:
        return False
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    # A machine that calls its own outer address comes from that very address.
    return (mapped or address).is_loopback or client == server


class Gate:
    """The rule as a layer around Flower's web application."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or answer 403."""
        if scope["type"] in ("http", "websocket"):
            client, server = scope.get("client"), scope.get("server")
            # A path with dots or doubled slashes is judged as it is: none of the open paths has any.
            path = str(scope.get("path", ""))
            plain = "/../" not in path and "//" not in path and "%" not in path
            if not plain or not allowed(path, client[0] if client else None, server[0] if server else None):
                if scope["type"] == "http":
                    await send({"type": "http.response.start", "status": 403, "headers": []})
                    await send({"type": "http.response.body", "body": b"only from the server's own machine"})
                else:
                    await send({"type": "websocket.close", "code": 1008})
                return
        await self._app(scope, receive, send)
