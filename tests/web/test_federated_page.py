"""The page of a federation in a browser: consent, training on own text, a round; what leaves it, and that leaks are noticed."""

from __future__ import annotations

import json
import queue
import re
import secrets
import threading
import time
import zlib
from dataclasses import replace
from typing import Any

import pytest

from keyfed.keyboard import serve
from keyfed.keyboard.federated import write_federated
from keyfed.keyboard.site import files_served
from keyfed.run.plan import with_limits
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import Rejected, unpack
from keyfed.wire.roster import Enrolled
from tests.faults.deployed import QUICK, federation, small_config, vocabulary, write_texts

from .conftest import LOADED, SENTENCES, Visit

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
TOKEN = "t" * 43
MOST_PACKED = 0.97  # of a masked vector's bytes that are left when it is packed; random ones do not get smaller
OPENED = {"upload", "unmask"}


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
        self.said: dict[str, Any] = {"format": "keyfed-web-1", "enrolling": True, "page": {}}
        self.page = json.loads((folder / "page.json").read_text())
        self._posts: queue.Queue[tuple[str, str, bytes, queue.Queue[Any]]] = queue.Queue()
        self._open: dict[str, tuple[str, queue.Queue[Any]]] = {}
        self._site = serve.app_of(files_served(folder), ("127.0.0.1",), self.port, 80)
        self._server = uvicorn.Server(uvicorn.Config(self._app, interface="asgi3", log_level="error", lifespan="off", ws="none"))
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
            answer = JSONResponse({**self.said, "now": time.time(), "page": self.said["page"] or self.page})
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
                    named = {"keyfed-kind": kind, "keyfed-id": id, "keyfed-deadline": str(time.time() + 30)}
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
    for _ in range(24):
        member.type("weather likes school mountains\n")
    member.set("source", "network")
    before = after_words(member, "weather ", "likes")
    endpoint.requests.clear()
    member.panel()
    member.page.click("#tune")
    expect(member.page.locator("#looked")).to_contain_text("Your own model: of your held-back words", timeout=LOADED)
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
