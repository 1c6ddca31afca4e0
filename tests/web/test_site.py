"""A site of files in a browser: installed, without its host, replaced by a newer one; what it never does."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from keyfed.keyboard import lan, serve
from keyfed.keyboard import site as sites
from keyfed.keyboard.serve import WEB

from .conftest import INSECURE_HOST, LOADED, Visit, browser_path
from .test_page_safety import ON_INPUT, requests_while_typing

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
FOLDER = "apps/keys"


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # a page and its service worker connect at once
    daemon_threads = True


class Host:
    """A host of plain files on 127.0.0.1 with a site in a subfolder, which can be stopped and started again."""

    def __init__(self, root: Path, export: Path) -> None:
        self.root, self.export, self.port = root, export, 0
        self.folder = root / FOLDER
        self.requests: list[str] = []
        self.written = sites.write_site(export, self.folder)
        self.start()
        self.address = f"http://127.0.0.1:{self.port}/{FOLDER}/"

    def start(self) -> None:
        requests = self.requests

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, *_: Any) -> None:
                requests.append(f"{self.command} {self.path}")

            def log_error(self, *_: Any) -> None: ...

        handler = functools.partial(Handler, directory=str(self.root))
        self._server = Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def write(self, web: Path) -> sites.Site:
        self.written = sites.write_site(self.export, self.folder, web)
        return self.written


@pytest.fixture
def host(exported, tmp_path):
    running = Host(tmp_path / "root", exported)
    yield running
    running.stop()


@pytest.fixture
def installed(browser, host):
    """A page that was visited and is kept."""
    one = Visit(browser, host).open()
    kept(one)
    yield one
    assert one.problems == []
    one.close()


def kept(visit: Visit) -> None:
    """Wait until the page says that it works offline."""
    expect(visit.page.locator("#panel")).to_contain_text("Works offlineyes", timeout=LOADED)


def versions(visit: Visit) -> list[str]:
    names: list[str] = visit.page.evaluate("caches.keys()")
    return [name.rpartition(" ")[2] for name in names]


def test_it_can_be_installed_and_needs_no_host_afterwards(installed, host):
    debugger = installed.context.new_cdp_session(installed.page)
    manifest = debugger.send("Page.getAppManifest")
    assert manifest["errors"] == []
    assert manifest["url"] == f"{host.address}manifest.webmanifest"
    assert json.loads(manifest["data"])["start_url"] == "./"
    # A context of playwright is an incognito window; all else is as in any other.
    problems = debugger.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [problem["errorId"] for problem in problems] == ["in-incognito"]
    host.stop()
    host.requests.clear()
    for offline in (False, True):  # the host is down; the network is
        installed.context.set_offline(offline)
        installed.reload()
        installed.type("thank yuo very ")
        expect(installed.slot("middle")).to_have_text("much")
    assert host.requests == []
    assert versions(installed) == [host.written.version]
    host.start()


def changed(tmp_path: Path, **more: str) -> Path:
    """A page with something added to its files."""
    web = Path(shutil.copytree(WEB, tmp_path / f"web-{len(list(tmp_path.iterdir()))}"))
    for name, text in more.items():
        path = web / {"page": "page.mjs", "worker": "service-worker.js"}[name]
        path.write_text(f"{path.read_text('utf-8')}\n{text}\n", "utf-8")
    return web


def update(visit: Visit) -> str:
    """Have the browser look for another version now, as it does at times by itself; what became of it."""
    found: str = visit.page.evaluate(
        """async () => {
          const registration = await navigator.serviceWorker.getRegistration();
          await registration.update();
          const coming = registration.installing ?? registration.waiting;
          if (!coming || coming.state === "installed") return coming?.state ?? "none";
          return new Promise((done) => { coming.onstatechange = () => done(coming.state); });
        }"""
    )
    return found


def test_a_newer_version_replaces_the_older_one_as_a_whole(installed, host, tmp_path):
    before = host.written.version
    others = f"keyfed http://127.0.0.1:{host.port}/apps/other/ 0123"
    installed.page.evaluate("(name) => caches.open(name).then(() => 0)", others)

    newer = changed(tmp_path, page="document.title = 'Newer';")
    now = host.write(newer).version
    weights = host.folder / "model" / "weights.safetensors"
    data = weights.read_bytes()
    for broken in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        weights.write_bytes(broken)
        assert update(installed) == "redundant"  # not a file of it is kept
        assert sorted(versions(installed)) == sorted([before, "0123"])
    weights.unlink()
    assert update(installed) == "redundant"
    installed.reload()
    assert installed.page.title() == "Keyfed keyboard"

    weights.write_bytes(data)
    assert update(installed) == "installed"
    assert sorted(versions(installed)) == sorted([before, now, "0123"])
    installed.reload()  # a window of the older version is open
    assert installed.page.title() == "Keyfed keyboard"
    expect(installed.page.locator("#panel")).to_contain_text("a newer version starts when this one is closed")
    for _ in range(50):
        installed.page.close()
        installed.page = installed.context.new_page()
        installed.page.set_default_timeout(LOADED)
        installed.open()
        if installed.page.title() == "Newer":
            break
    assert installed.page.title() == "Newer"
    kept(installed)
    assert sorted(versions(installed)) == sorted([now, "0123"])
    assert update(installed) == "none"


def test_no_request_while_typing_also_not_by_the_service_worker(installed, host):
    """What it asks for when it installs is what is listed, and nothing more; then nothing, though the host is there."""
    listed = {path for path in sites.files_of_site(host.folder) if path not in (sites.INDEX, sites.HEADER_FILE)}
    assert {f"GET /{FOLDER}/{path}" for path in {*listed, ""}} == set(host.requests)
    installed.reload()
    assert installed.page.evaluate("navigator.serviceWorker.controller.state") == "activated"
    assert [request for request in requests_while_typing(installed) if not is_check(request)] == []
    host.requests.clear()
    installed.context.set_offline(False)
    installed.type("my sister likes ")
    installed.page.wait_for_timeout(300)
    assert [request for request in host.requests if not is_check(request)] == []


def is_check(request: str) -> bool:
    """Whether it is the browser's own look for a newer version, some time after a page was loaded."""
    return request == f"GET /{FOLDER}/{sites.WORKER}"


def test_a_leak_by_the_service_worker_is_noticed(browser, host, tmp_path):
    """The check above is worth something."""
    passed = f"{ON_INPUT} navigator.serviceWorker.controller.postMessage(e.target.value); }});"
    sends = "self.addEventListener('message', ({data}) => fetch('leak?' + data));"
    host.write(changed(tmp_path, page=passed, worker=sends))
    leaky = Visit(browser, host).open()
    kept(leaky)
    leaky.reload()
    host.requests.clear()
    leaky.type("my sister likes ")
    leaky.page.wait_for_timeout(300)
    assert [request for request in host.requests if "sister" in request]
    leaky.close()


def test_the_worker_has_the_whole_policy_from_the_second_load_on(browser, host):
    """A host of plain files sends no header: the index has the policy, and the service worker adds it to the rest."""
    one = Visit(browser, host).open()
    kept(one)
    elsewhere = f"http://localhost:{host.port}/{FOLDER}/favicon.svg?"
    ask = "(url) => fetch(url, {mode: 'no-cors'}).then(() => 'sent', () => 'refused')"
    assert one.page.evaluate(ask, elsewhere + "page") == "refused"  # by the index
    one.reload()
    (worker,) = one.page.workers
    assert worker.evaluate(ask, elsewhere + "worker") == "refused"
    assert [request for request in host.requests if "favicon.svg?" in request] == []
    assert any("Content Security Policy" in problem for problem in one.problems)
    one.close()


def test_over_plain_http_it_says_why_and_types(browser, host):
    """Neither sums nor a service worker, where a browser trusts no name: one line, and letters are typed."""
    one = Visit(browser, host)
    one.page.goto(host.address.replace("127.0.0.1", INSECURE_HOST))
    assert one.page.evaluate("isSecureContext") is False
    one.wait("failed")
    said = "No suggestions: over plain http the browser lets a page check no file; open it over https"
    expect(one.page.locator("#notice")).to_contain_text(said)
    expect(one.page.locator("#panel")).to_contain_text("Works offlineno: needs https")
    one.type("thank ")
    one.tap("you")
    expect(one.page.locator("#text")).to_have_value("thank you")
    assert one.problems == []
    one.close()


def key_sum(certificate: Path) -> str:
    """What Chromium takes as a name of a trusted certificate: the sum of its public key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    data = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def test_in_a_network_a_browser_that_trusts_the_certificate_keeps_it(browser, exported, tmp_path, monkeypatch):
    """Before that it types and suggests, and says why it is not kept."""
    for package in ("starlette", "uvicorn", "cryptography", "segno"):
        pytest.importorskip(package)
    monkeypatch.setenv(lan.HOME, str(tmp_path / "home"))
    certificate = lan.kept_certificate("127.0.0.1")
    trust = f"--ignore-certificate-errors-spki-list={key_sum(certificate / 'server.crt')}"
    trusting = browser.browser_type.launch(executable_path=browser_path(), args=["--no-sandbox", trust])
    with serve.listen(0, "127.0.0.1") as listening:
        port = listening.getsockname()[1]
        running = lan.LanServer(exported, tmp_path / "site", "127.0.0.1", port, certificate)
        running.write()
        server = running.make()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wary = Visit(browser, running, ignore_https_errors=True).open()  # somebody went on past the warning
        said = "Works offlineno: this browser does not trust the certificate"
        expect(wary.page.locator("#panel")).to_contain_text(said, timeout=LOADED)
        wary.close()
        one = Visit(trusting, running).open()
        kept(one)
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
    one.reload()
    one.type("thank yuo very ")
    expect(one.slot("middle")).to_have_text("much")
    assert one.problems == []
    trusting.close()
