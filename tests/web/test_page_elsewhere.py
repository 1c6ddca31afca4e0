"""The page of a federation from a host of plain files: its policy on the first load, and a server of another origin."""

from __future__ import annotations

import functools
import http.server
import json
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from keyfed.deploy.certificates import SERVER_CERT, SERVER_KEY, make_certificates
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.links import link_of, make_links, web_address
from keyfed.deploy.processes import Processes, free_port
from keyfed.deploy.web import start_web
from keyfed.keyboard.endpoint import MODULE
from keyfed.keyboard.federated import write_federated
from keyfed.keyboard.site import HEADER_FILE
from keyfed.wire.joined import WEB_SOCKET, WebTransport

from .conftest import LOADED, Visit, browser_path
from .test_federated_page import federate, join, note
from .test_federated_page import kept as lines
from .test_site import kept, key_sum

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
RELOAD = "Reload this page"


class Host:
    """A host of plain files over TLS, with the certificate of a home.

    Attributes:
      headers: that it sends with every file.
    """

    def __init__(self, folder: Path, home: ServerHome, port: int) -> None:
        self.headers: dict[str, str] = {}
        headers = self.headers

        class Handler(http.server.SimpleHTTPRequestHandler):
            def end_headers(self) -> None:
                for name, value in headers.items():
                    self.send_header(name, value)
                super().end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", port), functools.partial(Handler, directory=folder)
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(home.path / SERVER_CERT, home.path / SERVER_KEY)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Elsewhere:
    """A server, and its page on another host: https://localhost:PORT; the same files under 127.0.0.1 are of a third."""

    def __init__(self, processes: Processes, root: Path, export: Path) -> None:
        self.home = ServerHome(root / "server")
        make_certificates(self.home.path, [])
        port, port_of_page = free_port(), free_port()
        self.origin, server = f"https://localhost:{port_of_page}", f"https://127.0.0.1:{port}"
        own = write_federated(export, root / "own")
        self.site = write_federated(export, root / "site", server)
        self.server = start_web(processes, self.home, "127.0.0.1", port, MODULE, own.folder, self.origin)
        self.host = Host(self.site.folder, self.home, port_of_page)
        self.address, self.third = f"{self.origin}/", f"https://127.0.0.1:{port_of_page}/"
        self.web = WebTransport(self.home.path / WEB_SOCKET)

    def link(self) -> str:
        """The fragment of a link, as `keyfed enroll --link` prints it."""
        pages = web_address(self.home)
        whole = link_of(pages.address, make_links(self.home)[0], pages.origin)
        assert whole.startswith(f"{self.origin}/#")
        return whole.partition("#")[2]


@pytest.fixture(scope="module")
def elsewhere(exported, tmp_path_factory):
    for package in ("starlette", "uvicorn", "cryptography"):
        pytest.importorskip(package)
    root = tmp_path_factory.mktemp("elsewhere")
    with Processes(root) as processes:
        made = Elsewhere(processes, root, exported)
        yield made
        made.host.stop()


@pytest.fixture(scope="module")
def trusting(browser, elsewhere):
    trust = f"--ignore-certificate-errors-spki-list={key_sum(elsewhere.home.path / SERVER_CERT)}"
    started = browser.browser_type.launch(executable_path=browser_path(), args=["--no-sandbox", trust])
    yield started
    started.close()


@pytest.fixture
def visit(trusting, elsewhere):
    opened: list[Visit] = []

    def start(**options: Any) -> Visit:
        opened.append(Visit(trusting, elsewhere, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def agree(one: Visit) -> None:
    one.panel()
    one.page.locator("input[name=consent]").check()


def workers(one: Visit) -> list[str]:
    return sorted(worker.url.rpartition("/")[2] for worker in one.page.workers)


ASK = "(url) => fetch(url, {mode: 'no-cors'}).then(() => 'sent', () => 'refused')"


def test_without_a_policy_of_its_own_the_worker_with_the_text_does_not_start(visit, elsewhere):
    """A plain host sends no header: nothing is kept before the service worker adds it, and the link is not spent."""
    one = visit()
    link = elsewhere.link()
    one.page.goto(f"{elsewhere.address}#{link}")
    one.wait("ready")
    agree(one)
    expect(note(one)).to_contain_text(RELOAD)
    assert workers(one) == ["keyboard.mjs"]
    one.close_panel()
    one.page.keyboard.insert_text("good morning everybody\nthank you very much\n")
    assert one.page.evaluate("indexedDB.databases()") == []
    kept(one)
    one.reload()
    one.page.evaluate("(hash) => { location.hash = hash; }", link)
    one.panel()
    expect(lines(one)).to_have_text("0 lines of at most 4,000")
    assert workers(one) == ["keyboard.mjs", "trainer.mjs"]
    (trainer,) = [worker for worker in one.page.workers if worker.url.endswith("trainer.mjs")]
    assert trainer.evaluate(ASK, f"{elsewhere.third}favicon.svg?leak") == "refused"
    one.page.click("#join")
    expect(one.page.locator("#rounds-note")).to_contain_text("waits for a round", timeout=LOADED)
    debugger = one.context.new_cdp_session(one.page)
    manifest = debugger.send("Page.getAppManifest")
    assert manifest["errors"] == []
    assert json.loads(manifest["data"])["keyfed"]["hash"] == elsewhere.site.hash
    one.page.click("#leave")  # the server would count it as there for some seconds more
    one.page.click("#leave")
    expect(note(one)).to_contain_text("the server has taken this page off its roster")


@pytest.mark.parametrize(
    ("change", "starts"),
    [(lambda policy: policy, True), (lambda policy: f"img-src *, {policy}", True), (lambda policy: "img-src *", False),
     (lambda policy: policy.replace("connect-src 'self'", "connect-src *"), False)],
)  # fmt: skip
def test_a_host_that_sends_the_policy_is_enough_and_another_policy_is_not(visit, elsewhere, change, starts):
    said = (elsewhere.site.folder / HEADER_FILE).read_text()
    (policy,) = [line.partition(": ")[2] for line in said.splitlines() if "content-security-policy: " in line]
    elsewhere.host.headers["content-security-policy"] = change(policy)
    one = visit(service_workers="block")
    try:
        one.open()
        agree(one)
        if starts:
            expect(lines(one)).to_have_text("0 lines of at most 4,000")
        else:
            expect(note(one)).to_contain_text(RELOAD)
        assert ("trainer.mjs" in workers(one)) is starts
    finally:
        elsewhere.host.headers.clear()


def test_a_page_of_another_host_takes_part_and_one_of_a_third_is_refused(visit, elsewhere, tmp_path):
    one = visit().open()
    kept(one)
    one.reload()
    agree(one)
    one.close_panel()
    join(elsewhere, one, "far", tmp_path)
    expect(one.page.get_by_label("Federation", exact=True)).to_contain_text(f"hash {elsewhere.site.hash}")
    expect(one.page.get_by_label("Federation", exact=True)).not_to_contain_text("the server's page is")
    found, recorded = federate(elsewhere, one, "far", tmp_path, 1, lambda recorded: None)
    assert [found["rounds"], found["abandoned"]] == [1, 0]
    assert len(recorded.uploads()) >= 2
    assert recorded.unmasked() == []
    asked = [url for url in one.requests if url.startswith(elsewhere.server)]
    assert asked
    assert {url.removeprefix(elsewhere.server).rpartition("/")[0] for url in asked} == {"/federation"}
    assert one.problems == []
    third = visit(bypass_csp=True)
    third.page.goto(elsewhere.third)
    third.wait("ready")
    read = "(url) => fetch(url).then(() => 'read', () => 'refused')"
    assert third.page.evaluate(read, f"{elsewhere.server}/federation/about") == "refused"
    assert one.page.evaluate(read, f"{elsewhere.server}/federation/about") == "read"
