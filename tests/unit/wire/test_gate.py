"""Only the fleet is for the network; control and runtime answer this machine alone."""

from __future__ import annotations

import asyncio

import pytest

from keyfed.wire.flower.gate import LEAVE, LEAVE_CAP, Gate, allowed

FAR, HERE = "203.0.113.9", "203.0.113.1"


@pytest.mark.parametrize(
    ("path", "client", "expected"),
    [
        ("/v1/fleet/pull-messages", FAR, True),
        ("/health", FAR, True),
        (LEAVE, FAR, True),
        ("/v1/control/start-run", FAR, False),
        ("/v1/control/register-node", FAR, False),
        ("/v1/runtime/acquire-task", FAR, False),
        ("/docs", FAR, False),
        ("/", FAR, False),
        ("", FAR, False),
        ("/v1/fleet/../control/start-run", FAR, False),
        ("/v1/fleet//../control/start-run", FAR, False),
        ("/v1/fleet/%2e%2e/control/start-run", FAR, False),
        ("/V1/control/start-run", FAR, False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "127.8.8.8", True),
        ("/v1/control/start-run", "::1", True),
        ("/v1/control/start-run", "::ffff:127.0.0.1", True),
        ("/v1/control/start-run", "::ffff:203.0.113.9", False),
        ("/v1/control/start-run", HERE, True),
        ("/v1/control/start-run", None, False),
        ("/v1/control/start-run", "localhost", False),
    ],
)
def test_who_may_reach_what(path, client, expected):
    assert allowed(path, client, HERE) is expected


def call(path, client=FAR, kind="http", method="POST", body=(b"",), leave=lambda wish: False, headers=()):
    """Send one request through the gate; return what reached the application and what was answered."""
    reached, sent, parts = [], [], list(body)

    async def app(scope, receive, send):
        reached.append(scope["path"])

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind, "path": path, "method": method, "client": (client, 5), "server": (HERE, 9092), "headers": headers,
    }  # fmt: skip
    asyncio.run(Gate(app, leave, lambda headers: 0)(scope, receive, send))
    return reached, sent


def test_the_fleet_passes_and_control_is_refused():
    assert call("/v1/fleet/pull-messages") == (["/v1/fleet/pull-messages"], [])
    reached, sent = call("/v1/control/start-run")
    assert reached == []
    assert sent[0]["status"] == 403
    reached, sent = call("/v1/runtime/x", kind="websocket")
    assert (reached, sent[0]["type"]) == ([], "websocket.close")


@pytest.mark.parametrize("name", [b"X-Forwarded-For", b"forwarded", b"via", b"x-real-ip"])
def test_who_came_through_a_proxy_is_not_from_here(name):
    assert call("/v1/control/start-run", "127.0.0.1")[0] == ["/v1/control/start-run"]
    proxied = [(b"host", b"x"), (name, b"127.0.0.1")]
    assert call("/v1/control/start-run", "127.0.0.1", headers=proxied)[1][0]["status"] == 403
    assert call("/v1/fleet/pull-messages", "127.0.0.1", headers=proxied)[0] == ["/v1/fleet/pull-messages"]


def test_what_is_no_request_passes():
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    asyncio.run(Gate(app, lambda wish: False, lambda headers: 0)({"type": "lifespan"}, None, None))
    assert reached == ["lifespan"]


def test_a_wish_to_leave_never_reaches_flower_and_is_capped():
    wishes = []

    def leave(wish):
        wishes.append(wish)
        return wish == b"signed"

    reached, sent = call(LEAVE, body=(b"sig", b"ned"), leave=leave)
    assert (reached, sent[0]["status"], wishes) == ([], 202, [b"signed"])
    assert call(LEAVE, body=(b"forged",), leave=leave)[1][0]["status"] == 403
    assert call(LEAVE, method="GET", body=(b"signed",), leave=leave)[1][0]["status"] == 403
    assert call(LEAVE, body=(b"x" * LEAVE_CAP, b"x", b"never read"), leave=leave)[1][0]["status"] == 413
    assert wishes == [b"signed", b"forged"]
