"""A stranger without a key: large bodies, half-sent requests, many connections, against a real SuperLink."""

from __future__ import annotations

import base64
import contextlib
import datetime
import re
import socket
import ssl
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keyfed.wire.doors import ConnectionLimits
from keyfed.wire.flower.gate import NOT_ENROLLED, UNPROVEN

pytestmark = pytest.mark.federation

LARGE = 900_000_000
GROWTH = 50_000_000


def memory(process, field="VmHWM"):
    """The bytes of memory that a process has (VmRSS) or has had at most (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return 1024 * int(found[1])


def connect(federation, secure=True):
    host, _, port = federation.address.rpartition(":")
    link = socket.create_connection((host, int(port)), 10)
    if not secure:
        return link
    context = ssl.create_default_context(cafile=str(federation.server.ca))
    return context.wrap_socket(link, server_hostname="127.0.0.1")


def post(federation, headers, parts):
    """Send a request until the server closes; return its status and how many bytes of the body were taken."""
    sent, answer = 0, b""
    with connect(federation) as link:
        link.settimeout(30)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        link.sendall(f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        with contextlib.suppress(OSError):
            for part in parts:
                link.sendall(part)
                sent += len(part)
        with contextlib.suppress(OSError):
            answer = link.recv(4096)
    status = re.match(rb"HTTP/1.1 (\d+)", answer)
    return (int(status[1]) if status else None), sent


def signed(key, when):
    """Flower's three headers, rightly made with a key."""
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": when,
        "flwr-signature": base64.b64encode(key.sign(when.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
    }


def chunked(total, size=1_000_000):
    block = bytes(size)
    for _ in range(total // size):
        yield b"%x\r\n%b\r\n" % (size, block)


def test_a_body_of_900_megabytes_costs_a_stranger_nothing_but_its_own_time(federation, record_property):
    server = federation.processes._running["superlink"]
    before = memory(server, "VmRSS")
    highest = memory(server)
    plain = (bytes(1_000_000) for _ in range(LARGE // 1_000_000))
    key = ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.UTC).isoformat()
    mine = serialization.load_ssh_private_key(federation.clients["anna"].home.node_key.read_bytes(), None)
    stolen = {**signed(mine, now), "flwr-signature": signed(key, now)["flwr-signature"]}
    tries = {
        "a length": ({"Content-Length": LARGE}, plain, UNPROVEN),
        "chunks": ({"Transfer-Encoding": "chunked"}, chunked(LARGE), UNPROVEN),
        "an unknown key": ({"Transfer-Encoding": "chunked", **signed(key, now)}, chunked(LARGE), NOT_ENROLLED),
        "a known key, another's signature": ({"Transfer-Encoding": "chunked", **stolen}, chunked(LARGE), UNPROVEN),
        "an enrolled client": ({"Transfer-Encoding": "chunked", **signed(mine, now)}, chunked(LARGE), 413),
    }
    for name, (headers, parts, expected) in tries.items():
        status, sent = post(federation, headers, parts)
        assert status in (expected, None), name  # None: the server had closed while the body was being sent
        assert sent < LARGE / 10, name
        record_property(f"bytes taken: {name}", sent)
    grown = max(memory(server) - highest, memory(server, "VmRSS") - before)
    record_property("growth of the SuperLink in bytes", grown)
    assert grown < GROWTH
    assert federation.play({"kind": "hello", "body": "x", "seconds": 60.0})[0]["answers"] == {
        "anna": "same", "bert": "same",
    }  # fmt: skip


def test_half_sent_requests_are_closed_and_clients_get_through_meanwhile(federation, record_property):
    half = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nX-Half: "
    began = time.monotonic()
    links = [connect(federation, secure=False) for _ in range(30)]  # not even a handshake
    links += [connect(federation) for _ in range(30)]  # a handshake, and nothing more
    for _ in range(30):
        links.append(connect(federation))
        links[-1].sendall(half)
    drip = links[-1]
    found = federation.play({"kind": "hello", "body": "x", "seconds": 60.0})
    assert found[0]["answers"] == {"anna": "same", "bert": "same"}
    its = ConnectionLimits()
    limit = its.handshake_seconds + its.head_seconds + its.close_seconds
    closed = []
    while len(closed) < len(links) and time.monotonic() - began < 3 * limit:
        with contextlib.suppress(OSError):
            drip.sendall(b"x")  # a byte now and then keeps nothing open
        for link in links:
            if link not in closed and ended(link):
                closed.append(link)
        time.sleep(0.2)
    took = time.monotonic() - began
    for link in links:
        link.close()
    record_property("half-sent requests closed", f"{len(closed)} of {len(links)} after {took:.0f} s")
    assert len(closed) == len(links) == 90
    assert federation.processes.alive("superlink")


def ended(link):
    link.settimeout(0.01)
    try:
        return link.recv(100) == b""
    except (TimeoutError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
