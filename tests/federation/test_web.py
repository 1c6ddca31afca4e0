"""The endpoint for pages over real HTTPS: enrolment by link, rounds with other clients, and what is refused."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from keyfed.config.load import check
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.links import make_links
from keyfed.deploy.processes import Processes, wait_until
from keyfed.deploy.web import start_web
from keyfed.keyboard.endpoint import MODULE
from keyfed.run.loop import train
from keyfed.run.remote.train import train_deployed
from keyfed.wire.joined import WEB_SOCKET, Joined, WebTransport
from keyfed.wire.roster import Roster, is_page
from tests.faults.deployed import QUICK, federation, last_model, session, small_config, vocabulary, write_texts

from .stand_in import Caller, Refusal, StandIn

WORKER = 'const SITE = {"version": "1", "headers": {}, "files": {"index.html": {}}};\n'


def write_page(folder):
    folder.mkdir()
    (folder / "index.html").write_text("<p>a page")
    (folder / "service-worker.js").write_text(WORKER)
    (folder / "page.json").write_text('{"version": "1", "hash": "00"}')
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("web")
    home = ServerHome(root / "server")
    make_certificates(home.path, [])
    with Processes(root) as processes:
        yield home, start_web(processes, home, "127.0.0.1", 0, MODULE, write_page(root / "page"), None)


@pytest.fixture
def joined(server):
    """Enrol a page by a link of its own; return what signs its requests."""
    home, address = server

    def join(name="", private=None):
        caller = Caller(address, home.ca, private)
        caller.enrol(make_links(home)[0], name)
        return caller

    return join


class Said:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def start(self, *given): ...
    def round(self, *given): ...


def federate(server, joined, tmp_path, pages, *, method="fedavg", rounds=2, patience=QUICK, close=None, **options):
    """Train with five clients, of whom `pages` come through the endpoint; return configuration, result, what was said.

    Args:
      close: a page's name and the message at which it is closed.
    """
    home, _ = server
    texts = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = check(small_config(tmp_path / "texts", path, method, secure=True, rounds=rounds, cohort=5, **options))
    others = [text for text in texts if text.name not in pages]
    transport, roster = federation(tmp_path / "clients", others, named=lambda text: text.name)
    opened = []
    for text in texts:
        if text.name in pages:
            handler = session(tmp_path / "pages", text, name=text.name)
            private = Ed25519PrivateKey.from_private_bytes(handler.store.identity().private_bytes())
            caller = joined(text.name, private)
            opened.append(StandIn(caller, handler, close[1] if close and close[0] == text.name else None))
            opened[-1].start()
    entries = Roster(home.roster).entries
    roster.write({name: entries[name] for name in pages})
    web = WebTransport(home.path / WEB_SOCKET)
    assert wait_until(lambda: set(pages) <= set(web.clients()), 20, lambda: True)
    said = Said()
    both = Joined(transport, web, lambda name: is_page(roster.entries[name]))
    result = train_deployed(config, vocab, tmp_path / "run", both, roster, said, patience=patience)
    for page in opened:
        page.close()
        page.caller.post("leave")
    return config, result, said.lines, opened


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_pages_and_other_clients_are_members_of_one_sum(server, joined, tmp_path, method):
    names = [f"client-{k}.txt" for k in (1, 2, 4)]
    config, result, said, opened = federate(server, joined, tmp_path, names, method=method)
    assert not [line for line in said if "left out" in line], said
    assert [page.failed for page in opened] == [None] * 3
    assert all(page.kinds.count("upload") >= 2 for page in opened)
    assert [result["rounds"], result["abandoned"]] == [2, 0]
    train(config, tmp_path / "simulated")
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "run")
    for name, p in simulated.items():
        assert float((p - deployed[name]).abs().max()) <= 1e-6, name


ABOUT, HOST = b"GET /federation/about HTTP/1.1\r\n", b"host: x\r\n"
STRANGE = [
    b"GET /federation/\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"\x00\xff" * 400 + b"\r\n\r\n",
    b"POST /federation/enrol HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /federation/next HTTP/1.1\r\n" + HOST + b"content-length: -1\r\n\r\n",
    b"HEAD /federation/about HTTP/1.0\r\n\r\n",
    ABOUT + HOST + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n",
]


def test_strangers_add_no_line_to_the_log(server):
    """Tokens of lone surrogates, requests that are none, no TLS at all: the log stays as it is."""
    home, address = server
    log = home.path.parent / "logs" / "web.log"
    before = log.stat().st_size
    caller = Caller(address, home.ca)
    said = {"format": "keyfed-web-enrol-1", "token": "\ud800" * 43, "name": "x", "identity": caller.identity.hex()}
    text = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    body = json.dumps(said | {"signature": caller.private.sign(text).hex()}).encode()
    for _ in range(20):
        with pytest.raises(Refusal) as refused:
            caller.send("POST", "/federation/enrol", body)
        assert (refused.value.status, refused.value.error) == (403, "link")
    host, _, port = caller.host.rpartition(":")
    for sent in STRANGE:
        for tls in (True, False):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as link:
                talk = caller.tls.wrap_socket(link, server_hostname=host) if tls else link
                talk.sendall(sent)
                talk.recv(1000)
                talk.close()
    caller.send("GET", "/federation/about")
    assert log.stat().st_size == before, log.read_text()[-2_000:]
