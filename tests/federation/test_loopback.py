"""Messages through a real SuperLink with TLS and node keys; what is refused; what is lost; what comes back.

The tests of this file run in order on one federation: the later ones kill parts of it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import urllib.error
import urllib.request

import pytest

from keyfed.deploy import superlink
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.enrolment import (
    act_on_wishes,
    ask_to_be_forgotten,
    enrol,
    forget,
    leave_statement,
    names_by_key,
    read_enrolment,
    write_enrolment,
)
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.processes import descendants, running
from keyfed.deploy.superlink import start_superlink
from keyfed.errors import DeployError

pytestmark = pytest.mark.federation

BIG = 200_000_000


def step(kind, body="x", seconds=60.0, **more):
    return {"kind": kind, "body": body, "seconds": seconds, **more}


def test_messages_cross_and_200_megabytes_come_back(federation, record_property):
    small = [step("hello", f"x{k}") for k in range(5)]
    found = federation.play(*small, step("unmask"), step("upload", random=BIG, seconds=240.0, to=["anna"]))
    for one in found[:5]:
        assert one["answers"] == {"anna": "same", "bert": "same"}
    assert found[5]["answers"] == {name: ["refused by client", "not twice"] for name in ("anna", "bert")}
    assert found[6]["answers"] == {"anna": "same"}
    record_property("seconds per message", sorted(one["seconds"] for one in found[:5])[2])
    record_property("seconds for 200 MB down and up", found[6]["seconds"])


def test_the_program_that_the_server_sends_is_not_run_by_clients(federation):
    # A client that ran what was submitted would unpack it into its own folder first.
    for name in federation.clients:
        assert not list((federation.root / name / "flwr").rglob("*.py"))


def test_a_plaintext_client_is_refused(federation):
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(f"http://{federation.address}/health", timeout=10)
    host, _, port = federation.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as link:
        link.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n\r\n")
        link.settimeout(10)
        with contextlib.suppress(OSError):
            assert b"200" not in link.recv(100)


def test_a_server_with_an_expired_certificate_is_refused(federation, monkeypatch):
    old = ServerHome(federation.root / "expired")
    make_certificates(old.path, [])
    monkeypatch.setattr(superlink, "NAME", "expired")
    address = start_superlink(federation.processes, old, "127.0.0.1", 0)
    late, said = federation.stranger("late", address, old.ca)
    enrol(old, [read_enrolment(write_enrolment(late.home).read_bytes())])  # only the certificate is in the way
    federation.processes.stop("expired")
    for name in ("server.key", "server.crt"):
        (old.path / name).unlink()
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
    make_certificates(old.path, [], now=long_ago, days=10)
    port = int(address.rpartition(":")[2])
    with pytest.raises(DeployError, match="expired"):  # our own server does not even start
        start_superlink(federation.processes, old, "127.0.0.1", port)
    monkeypatch.setattr(superlink, "check_certificate", lambda path: ())
    monkeypatch.setattr(superlink, "answers", lambda address, ca: listens(address))
    assert start_superlink(federation.processes, old, "127.0.0.1", port) == address
    late.start()
    try:
        assert federation.eventually(lambda: "expired" in federation.log("late-node") or tended(late, said))
        assert "certificate" in federation.log("late-node").lower()
        assert "SuperNode ID" not in federation.log("late-node")
    finally:
        for name in ("late-node", "late-resident", "expired"):
            federation.processes.stop(name)


def listens(address):
    try:
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1).close()
    except OSError:
        return False
    return True


def tended(client, said):
    client.tend()
    return bool(said)


def test_a_key_that_is_not_enrolled_is_refused(federation):
    stranger, said = federation.stranger("mallory")
    stranger.start()
    try:
        assert federation.eventually(lambda: tended(stranger, said))
        assert "does not take this client's key" in said[0]
        assert "SuperNode ID" not in federation.log("mallory-node")
    finally:
        for part in ("node", "resident"):
            federation.processes.stop(f"mallory-{part}")


def test_a_node_that_is_killed_during_a_message_is_lost_by_the_deadline_and_comes_back(federation):
    node = federation.processes._running["bert-node"]

    def kill(line):
        if line == "step train":
            assert federation.eventually(lambda: "Received successfully" in federation.log("bert-node")[-400:], 20)
            os.kill(node.pid, signal.SIGKILL)

    found = federation.play(step("train", "3", seconds=40.0), step("hello", to=["anna"]), on_say=kill)
    assert found[0]["answers"]["anna"] == "same"
    assert found[0]["answers"]["bert"][0] in ("no answer", "unreachable")
    assert found[0]["seconds"] < 40.0 + 15.0
    assert found[1]["answers"] == {"anna": "same"}

    def back():  # Flower takes a node again when it has missed two heartbeats, a minute later
        federation.clients["bert"].tend()
        return federation.log("bert-node").count("SuperNode ID") == 2

    assert federation.eventually(back, 150)
    assert federation.play(step("hello"))[0]["answers"] == {"anna": "same", "bert": "same"}


def test_a_superlink_that_is_killed_and_started_again_has_its_nodes_back(federation):
    server = federation.processes._running["superlink"]
    children = descendants(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)
    assert federation.eventually(lambda: not any(running(pid) for pid in children), 30)
    port = int(federation.address.rpartition(":")[2])
    assert start_superlink(federation.processes, federation.server, "127.0.0.1", port) == federation.address

    def tended():
        for client in federation.clients.values():
            client.tend()
        return all(federation.processes.alive(f"{name}-node") for name in federation.clients)

    assert federation.eventually(tended, 60)
    assert federation.play(step("hello", seconds=90.0))[0]["answers"] == {"anna": "same", "bert": "same"}


def test_a_client_that_leaves_is_forgotten_and_one_that_is_sent_away_too(federation):
    bert = federation.clients["bert"].home
    assert ask_to_be_forgotten(bert) is None
    assert act_on_wishes(federation.server) == ["bert"]
    assert ask_to_be_forgotten(bert) == "the server does not know this client"
    assert leave_statement(bert)
    assert federation.play(step("hello"), clients=1)[0]["answers"] == {"anna": "same"}
    forget(federation.server, "anna")
    assert names_by_key(federation.server) == {}
