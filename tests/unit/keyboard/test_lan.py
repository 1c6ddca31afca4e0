"""A phone in the same network: one address, a certificate for it alone, and what a person is shown."""

from __future__ import annotations

import datetime
import http.client
import json
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("cryptography")
pytest.importorskip("segno")

from keyfed.deploy import certificates
from keyfed.errors import ConfigError, DeployError
from keyfed.keyboard import bundle, lan, serve, site

HERE = "127.0.0.1"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(lan.HOME, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def running(home, exported, tmp_path):
    """A server at 127.0.0.1 as at any address of a network."""
    with serve.listen(0, HERE) as listening:
        one = lan.LanServer(exported, tmp_path / "site", HERE, listening.getsockname()[1], lan.kept_certificate(HERE))
        one.write()
        server = one.make()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield one
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def ask(one, path, host=None, trusted=True):
    context = ssl.create_default_context(cafile=one.certificate / certificates.CA_CERT if trusted else None)
    talk = http.client.HTTPSConnection(HERE, one.port, timeout=20, context=context)
    try:
        talk.request("GET", path, headers={"Host": host or f"{HERE}:{one.port}"})
        answer = talk.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        talk.close()


def test_a_device_that_trusts_the_certificate_gets_the_site_and_nothing_else(running, home):
    status, headers, index = ask(running, "/")
    assert status == 200
    assert index == (running.folder / site.INDEX).read_bytes()
    assert headers["content-security-policy"] == serve.POLICY
    for path in site.files_of_site(running.folder) - {site.HEADER_FILE}:
        assert ask(running, f"/{path}")[2] == (running.folder / path).read_bytes()
    status, headers, body = ask(running, lan.CERTIFICATE)
    assert (status, headers["content-type"]) == (200, "application/x-x509-ca-cert")
    assert body == (home / HERE / certificates.CA_CERT).read_bytes()
    for path in ("/_headers", "/server.key", "/../server.key", "/model/model.onnx", "/model/"):
        assert ask(running, path)[0] == 404
    for host in ("evil.example", f"localhost:{running.port}", HERE):
        assert ask(running, "/", host)[0] == 400
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(running, "/", trusted=False)
    with socket.create_connection((HERE, running.port), timeout=20) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: " + f"{HERE}:{running.port}".encode() + b"\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP/")


def test_what_is_shown_says_where_what_and_how(running):
    text = running.text("the base model")
    assert text.startswith(f"https://{HERE}:{running.port}/  types on the base model; Ctrl-C ends it\n")
    for said in (
        certificates.fingerprint(running.certificate / certificates.CA_CERT), lan.CERTIFICATE, "Android:", "iPhone:",
        "cannot be installed", "Everybody in this network", "█",
    ):  # fmt: skip
        assert said in text
    assert "█" not in running.text("the base model", "ascii")


def test_what_to_know_before_a_model_is_given_away_is_shown(keyfed, exported, home, monkeypatch):
    manifest = json.loads((exported / bundle.MANIFEST).read_text())
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    arguments = ("keyboard", exported, "--lan", "--address", HERE, "--port", 0)
    code, plain, _ = keyfed(*arguments)
    (exported / bundle.MANIFEST).write_text(json.dumps({**manifest, "privacy": {"epsilon": 8.0}}))
    _, private, err = keyfed(*arguments)
    assert code == 0, err
    assert "trained with --dp" not in plain
    assert set(site.notes_on({"privacy": {}})) <= set(private.splitlines())


def test_a_certificate_is_private_and_kept_until_it_expires(home):
    folder = lan.kept_certificate(HERE)
    key = folder / certificates.SERVER_KEY
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {"ca.crt", "server.crt", "server.key"}  # not the authority's key
    if os.name == "posix":
        assert key.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        key.chmod(0o644)
    assert lan.kept_certificate(HERE) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    if os.name == "posix":
        assert key.stat().st_mode & 0o777 == 0o600
    assert certificates.hosts_of(folder / certificates.SERVER_CERT) == [HERE]
    assert lan.kept_certificate("127.0.0.2") != folder  # each network has its own
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=certificates.SERVER_DAYS + 1)
    certificates.make_for_one_address(folder, HERE, now=long_ago)
    old = key.read_bytes()
    lan.kept_certificate(HERE)
    assert key.read_bytes() != old
    certificates.check_certificate(folder / certificates.SERVER_CERT)


def test_a_certificate_that_cannot_be_used_is_one_line(home):
    folder = lan.kept_certificate(HERE)
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = {path.name: path.read_bytes() for path in lan.kept_certificate("127.0.0.2").iterdir()}
    for name, data in [
        ("ca.crt", b"damaged"), ("server.crt", b"damaged"), ("server.key", b"damaged"), ("ca.crt", None),
        ("server.crt", None), ("server.key", None), ("server.key", other["server.key"]),
        ("server.crt", other["server.crt"]),
    ]:  # fmt: skip
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
        with pytest.raises(DeployError, match="away to make a new one") as raised:
            lan.kept_certificate(HERE)
        assert "\n" not in str(raised.value)
        (folder / name).write_bytes(good[name])
    assert lan.kept_certificate(HERE) == folder


def test_one_address_of_a_local_network_is_served(monkeypatch):
    assert lan.chosen_address("192.168.1.5") == "192.168.1.5"
    assert lan.chosen_address(HERE) == HERE
    for wanted, said in [
        ("0.0.0.0", "no single network"), ("8.8.8.8", "address of the internet"), ("phone", "expected an IPv4 address"),
        ("::1", "expected an IPv4 address"), ("192.168.1.5:8017", "expected an IPv4 address"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            lan.chosen_address(wanted)

    class Nowhere(socket.socket):
        def connect(self, _):
            raise OSError("Network is unreachable")

    monkeypatch.setattr(lan.socket, "socket", Nowhere)
    with pytest.raises(ConfigError, match="in no network; connect it, or give its address with --address"):
        lan.chosen_address(None)


def test_mistakes_are_one_line(keyfed, exported, home):
    with serve.listen(0) as taken:
        port = taken.getsockname()[1]
        for arguments, said in [
            (("--address", HERE), "--address is for --lan"),
            (("--lan", "--address", "0.0.0.0"), "no single network"),
            (("--lan", "--address", "192.0.2.77"), "is not an address of this machine"),
            (("--lan", "--address", HERE, "--port", port), f"port {port} is taken"),
        ]:
            code, _, err = keyfed("keyboard", exported, *arguments, "--no-open")
            assert code == 2, arguments
            assert said in err, arguments
            assert len(err.strip().splitlines()) == 1
        folder = lan.kept_certificate(HERE)
        (folder / certificates.SERVER_CERT).write_text("damaged")
        code, _, err = keyfed("keyboard", exported, "--lan", "--address", HERE, "--port", 0)
        assert (code, len(err.strip().splitlines())) == (2, 1)
        assert "server.crt" in err
