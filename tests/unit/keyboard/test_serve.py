"""The server answers with the page's files under its policy, to its own address, and with nothing else."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import posixpath
import re
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from keyfed.errors import ConfigError
from keyfed.keyboard import bundle, serve

PARTS = {bundle.GRAPH: b"graph", bundle.WEIGHTS: b"weights", bundle.VOCAB: b"{}", bundle.VECTORS: b"{}"}


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    for name, data in PARTS.items():
        (folder / name).write_bytes(data)
    files = {name: {"bytes": len(data), "sha256": bundle.sha256(data)} for name, data in PARTS.items()}
    (folder / bundle.MANIFEST).write_text(json.dumps({"format": 1, "files": files}))
    (folder / "private.txt").write_text("not in the manifest")
    (folder / bundle.NGRAM).write_bytes(b"not in the manifest either")
    return folder


@pytest.fixture
def ask(web, export):
    """A running server as a function: (path, method, host) → (status, headers, body)."""
    listening = serve.listen(0)
    port = listening.getsockname()[1]
    server = serve.make_server(serve.make_app(export, port, web))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()

    def call(path, method="GET", host=None, body=None, **more):
        talk = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            talk.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name in [f"127.0.0.1:{port}"] if host is None else host:
                talk.putheader("Host", name.replace("PORT", str(port)))
            for name, value in more.items():
                talk.putheader(name.replace("_", "-"), value)
            if body is not None:
                talk.putheader("Content-Length", str(len(body)))
            talk.endheaders(body)
            answer = talk.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            talk.close()

    call.port = port
    yield call
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    listening.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/index.html", "text/html; charset=utf-8"),
        ("/page.mjs", "text/javascript; charset=utf-8"),
        ("/decoder/engine.mjs", "text/javascript; charset=utf-8"),
        ("/style.css", "text/css; charset=utf-8"),
        ("/favicon.svg", "image/svg+xml"),
        ("/data/constants.json", "application/json"),
        ("/model/manifest.json", "application/json"),
        ("/model/model.onnx", "application/octet-stream"),
        ("/model/weights.safetensors", "application/octet-stream"),
        ("/model/vocab.json", "application/json"),
    ],
)
def test_files_have_their_type_and_every_header(ask, path, kind):
    status, headers, body = ask(path)
    assert (status, headers["content-type"]) == (200, kind)
    assert body
    check_headers(headers)
    assert headers["cache-control"] == ("no-store" if path == "/model/manifest.json" else "no-cache")
    again, other, empty = ask(path, "HEAD")
    assert (again, empty) == (200, b"")
    assert other["content-length"] == str(len(body))
    assert ask(path + "?typed=secret")[2] == body


def check_headers(headers):
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["connect-src"] == policy["worker-src"] == policy["style-src"] == policy["img-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "keyfed"
    assert "unsafe-inline" not in headers["content-security-policy"]
    assert "eval" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:PORT", "127.0.0.1", "localhost", "127.0.0.1:1", "localhost:PORT.evil", "[::1]:PORT",
     "0.0.0.0:PORT", "", None],
)  # fmt: skip
def test_another_host_is_refused(ask, host):
    for path in ("/", "/model/weights.safetensors", "/nowhere"):
        status, _, body = ask(path, host=[] if host is None else [host])
        assert status == 400
        assert b"weights" not in body


def test_two_hosts_are_refused(ask):
    assert ask("/", host=["127.0.0.1:PORT", "evil.example"])[0] == 400


def test_both_of_its_own_names_are_taken(ask):
    assert [ask("/", host=[name])[0] for name in ("127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT")] == [200] * 3


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/", "/model/manifest.json", "/nowhere"])
def test_nothing_but_reading(ask, method, path):
    status, headers, _ = ask(path, method, body=b"what somebody typed")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    check_headers(headers)


OUTSIDE = [
    "/nowhere", "/package.json", "/package-lock.json", "/notes.txt", "/data", "/data/", "/vendor/", "/INDEX.html",
    "/client/store.mjs", "/client", "/decoder/", "/decoder/../client/store.mjs",
    "/vendor/MANIFEST.json", "/model", "/model/", "/model/private.txt", "/model/ngram.safetensors", "/index.html/",
    "/model/../private.txt", "/model/%2e%2e/run", "/model/..%2fweb%2fnotes.txt", "/../notes.txt", "//etc/passwd",
    "/data/../package.json", "/%2e%2e/export/private.txt", "/data/..%2fpackage.json", "/..%5c..%5cnotes.txt",
    "/model/%00", "/model/manifest.json%00", "/./notes.txt", "/model//private.txt", "/%c3%28", "/" + "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_is_readable(ask, path):
    status, headers, body = ask(path)
    assert status == 404
    assert body == b"not found"
    check_headers(headers)


def test_links_out_of_the_folder_are_not_followed(web, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (web / "link.mjs").symlink_to(tmp_path / "secret")
    (web / "data" / "link.json").symlink_to(tmp_path / "secret")
    assert not [address for address in serve.page_files(web) if "link" in address]


def test_the_ordinary_page_is_served_no_module_of_a_client():
    """What only a federation's page needs is neither served here nor put into a site."""
    folders = {address.split("/")[1] for address in serve.page_files(serve.WEB) if address.count("/") > 1}
    assert folders == {*serve.FOLDERS, "data"}
    assert {"client", "secure", "training", "node"}.isdisjoint(folders)


def test_an_absolute_address_is_no_way_out(ask):
    with socket.create_connection(("127.0.0.1", ask.port), timeout=20) as raw:
        raw.sendall(b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


def test_an_old_client_that_names_no_host_is_refused(ask):
    with socket.create_connection(("127.0.0.1", ask.port), timeout=20) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


def test_what_is_asked_for_is_not_logged(capfd, ask):  # in this order: the server writes where capfd looks
    ask("/?typed=dear-diary")
    ask("/dear-diary", "POST", body=b"dear-diary")
    ask("/dear-diary", host=["dear-diary"])
    assert capfd.readouterr() == ("", "")


def test_a_new_export_is_served_without_a_restart(ask, export):
    assert ask("/model/ngram.safetensors")[0] == 404
    manifest = json.loads((export / bundle.MANIFEST).read_text())
    manifest["files"][bundle.NGRAM] = {"bytes": 1, "sha256": ""}
    (export / bundle.MANIFEST).write_text(json.dumps(manifest))
    assert ask("/model/ngram.safetensors")[0] == 200
    (export / bundle.MANIFEST).write_text("damaged")
    assert ask("/model/model.onnx")[0] == 404


def test_what_has_not_changed_is_not_sent_again(ask, export):
    path = "/model/weights.safetensors"
    status, headers, _ = ask(path)
    tag = headers["etag"]
    for held in (tag, f"W/{tag}", f'"other", {tag}'):
        status, headers, body = ask(path, if_none_match=held)
        assert (status, headers["etag"], body) == (304, tag, b"")
        check_headers(headers)
    assert ask(path, if_none_match='"other"')[0] == 200
    (export / bundle.WEIGHTS).write_bytes(b"newer weights")
    status, headers, body = ask(path, if_none_match=tag)
    assert (status, body) == (200, b"newer weights")
    assert headers["etag"] != tag


def test_a_browser_that_takes_gzip_gets_it(ask, web):
    (web / "page.mjs").write_text("const one = 1;\n" * 500)
    plain, small = ask("/page.mjs"), ask("/page.mjs", accept_encoding="deflate, GZIP, br")
    assert gzip.decompress(small[2]) == plain[2]
    assert len(small[2]) < len(plain[2]) / 10
    assert (small[1]["content-encoding"], small[1]["vary"]) == ("gzip", "accept-encoding")
    assert "content-encoding" not in plain[1]
    assert small[1]["content-length"] == str(len(small[2]))
    assert small[1]["content-type"] == plain[1]["content-type"]
    assert small[1]["etag"] != plain[1]["etag"]
    assert ask("/page.mjs", if_none_match=small[1]["etag"])[0] == 200  # another encoding is another sequence of bytes
    assert ask("/page.mjs", accept_encoding="gzip", if_none_match=small[1]["etag"])[0] == 304


def test_of_each_file_one_version_is_held_and_gzip_only_where_it_was_wanted_and_saves(tmp_path):
    held, path = {}, tmp_path / "weights"
    path.write_bytes(b"one " * 1000)
    plain = serve._sent(held, path, small=False)
    assert plain.packed is None
    assert gzip.decompress(serve._sent(held, path, small=True).packed) == path.read_bytes()
    assert serve._sent(held, path, small=False).tag == plain.tag
    path.write_bytes(os.urandom(1000))
    assert serve._sent(held, path, small=True).packed == b""
    assert list(held) == [path]


def test_what_gzip_does_not_make_smaller_is_sent_as_it_is(ask, export):
    (export / bundle.WEIGHTS).write_bytes(os.urandom(1000))
    status, headers, body = ask("/model/weights.safetensors", accept_encoding="gzip")
    assert (status, body) == (200, (export / bundle.WEIGHTS).read_bytes())
    assert "content-encoding" not in headers
    assert ask("/model/weights.safetensors", accept_encoding="gzip", if_none_match=headers["etag"])[0] == 304


def test_a_large_file_is_read_piece_by_piece(web, export, monkeypatch):
    """By what is read at a time and what is sent at a time."""
    data = os.urandom(3 * serve.PIECE + 5)
    (export / bundle.WEIGHTS).write_bytes(data)
    app = serve.make_app(export, 80, web)

    def messages(method):
        sent = []
        scope = {
            "type": "http", "method": method, "path": "/model/weights.safetensors", "query_string": b"",
            "headers": [(b"host", b"localhost")], "asgi": {"spec_version": "2.4"},
        }  # fmt: skip

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        asyncio.run(app(scope, receive, send))
        assert (b"content-length", str(len(data)).encode()) in sent[0]["headers"]
        return [message["body"] for message in sent[1:]]

    assert b"".join(messages("GET")) == data  # its sum is known from now on
    whole = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: whole(path) if path.suffix == ".json" else pytest.fail("whole")
    )
    bodies = messages("GET")
    assert b"".join(bodies) == data
    assert max(map(len, bodies)) == serve.PIECE
    assert messages("HEAD") == [b""]


def test_at_most_so_many_connections_are_answered(monkeypatch, request):
    """Others get 503, until one of them ends."""
    monkeypatch.setattr(serve, "MOST_CONNECTIONS", 3)
    ask = request.getfixturevalue("ask")
    idle = [socket.create_connection(("127.0.0.1", ask.port), timeout=20) for _ in range(3)]
    for one in idle:  # each is accepted
        one.sendall(b"GET / HTTP/1.1\r\n")
    try:
        assert reaches(lambda: ask("/")[0] == 503)
        idle.pop().close()
        assert reaches(lambda: ask("/")[0] == 200)
    finally:
        for one in idle:
            one.close()


def test_a_connection_without_a_whole_request_is_closed(monkeypatch, request):
    """Mute, in the middle of its first request, or of its second: none keeps a place."""
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(serve, "MOST_CONNECTIONS", 3)
    ask = request.getfixturevalue("ask")
    whole = f"HEAD / HTTP/1.1\r\nHost: 127.0.0.1:{ask.port}\r\n\r\n".encode()
    for sent in ((), (b"GET / HTTP/1.1\r\n",), (whole, b"GET / HTTP/1.1\r\n")):
        with socket.create_connection(("127.0.0.1", ask.port), timeout=20) as one:
            for said in sent:
                one.sendall(said)
                if said is whole:
                    assert one.recv(1 << 12).startswith(b"HTTP/1.1 200")
            assert one.recv(1) == b""  # else the socket's own time runs out
    assert ask("/")[0] == 200


def reaches(condition):
    end = time.monotonic() + 20
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return met


def test_a_taken_port_is_one_line_and_zero_finds_a_free_one():
    with serve.listen(0) as first, serve.listen(0) as second:
        port = first.getsockname()[1]
        assert first.getsockname()[0] == "127.0.0.1"
        assert port != second.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} is taken; choose another with --port"):
            serve.listen(port)


def test_a_missing_page_is_one_line(web):
    (web / "index.html").rename(web / "other.html")
    with pytest.raises(ConfigError, match=r"has no index\.html"):
        serve.page_files(web)


def test_a_browser_is_opened_only_where_there_is_a_display(monkeypatch):
    opened = []
    monkeypatch.setattr(serve.webbrowser, "open", opened.append)
    monkeypatch.setattr(serve.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not serve.open_browser("http://127.0.0.1:1/")
    monkeypatch.setitem(os.environ, "DISPLAY", ":0")
    assert serve.open_browser("http://127.0.0.1:1/")
    end = time.monotonic() + 10
    while not opened and time.monotonic() < end:
        time.sleep(0.01)
    assert opened == ["http://127.0.0.1:1/"]


@pytest.mark.parametrize("start", ["page.mjs", "worker.mjs"])
def test_no_module_waits_for_another(start):
    """All that the page imports is preloaded, and the worker names all of its modules: no layer waits for another."""

    def imported(name: str) -> set[str]:
        named = re.findall(r'^import [^;]*?"(\.[\w./]+)";', (serve.WEB / name).read_text("utf-8"), re.MULTILINE)
        return {posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in named}

    reached, waiting = set(), {start}
    while waiting:
        found = imported(waiting.pop())
        waiting |= found - reached
        reached |= found
    preloaded = re.findall(r'rel="modulepreload" href="([^"]+)"', (serve.WEB / "index.html").read_text("utf-8"))
    assert sorted(reached) == (sorted(preloaded) if start == "page.mjs" else sorted(imported(start)))
    assert len(reached) > 10
