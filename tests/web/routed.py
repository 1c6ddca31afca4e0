"""A federation's page without a server: every file and every answer is handed over by the test."""

from __future__ import annotations

import html
import json
import mimetypes
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keyfed import __version__

ORIGIN = "http://127.0.0.1:1"  # nothing listens there
TOKEN = "a" * 43
WORKER = """
const worker = new Worker('/federated/trainer.mjs', {type: 'module'});
window.states = [];
window.heard = [];
worker.onmessage = ({data}) => {
  window.heard.push(data);
  if (data.kind === 'state') window.state = data.state;
};
window.tell = (kind, more = {}) => worker.postMessage({kind, ...more});
window.settings = {consent: true, out: true, preview: false, minutes: 10, budget: 0, floor: 3};
tell('start', {model: new URL('/model/', location).href, page: {version: VERSION, hash: 'own'}, settings});
tell('allow', {why: null});
"""


class Federation:
    """A server's endpoint, as far as a page sees it.

    Attributes:
      asked: path, headers and body of every request.
      messages: kind and body of what the next polls are given.
      refused: paths that fail, and the type of the refusal; None for a connection that breaks.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.refused: dict[str, str | None] = {}
        self.messages: list[tuple[str, bytes]] = []

    def handle(self, route: Any) -> None:
        request = route.request
        path = urlsplit(request.url).path.rsplit("/", 1)[1]
        self.asked.append((path, request.headers, request.post_data_buffer or b""))
        if path in self.refused:
            error = self.refused[path]
            if error is None:
                return route.abort()
            return route.fulfill(status=403, json={"error": error, "reason": "said the test"})
        if path == "about":
            page = {"version": __version__, "hash": "own"}
            return route.fulfill(json={"format": "keyfed-web-1", "now": time.time(), "page": page, "enrolling": True})
        if path == "enrol":
            return route.fulfill(json={"name": json.loads(request.post_data)["name"] or "page"})
        if path == "next" and self.messages and not request.headers.get("keyfed-id"):
            kind, body = self.messages.pop(0)
            said = {"keyfed-kind": kind, "keyfed-id": os.urandom(16).hex(), "keyfed-deadline": str(time.time() + 60)}
            return route.fulfill(body=body, headers=said)
        return route.fulfill(status=204)

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _, _ in self.asked)

    def enrolments(self) -> list[dict[str, Any]]:
        return [json.loads(body) for path, _, body in self.asked if path == "enrol"]


def hand_over(folder: Path, federation: Federation, changes: dict[str, tuple[str, str]] | None = None) -> Any:
    """Return a route that serves a site with its policy, and the endpoint in place of a server.

    Args:
      changes: what is put in the place of what, by path.
    """

    index = (folder / "index.html").read_text("utf-8")
    policy = html.unescape(index.partition('http-equiv="Content-Security-Policy" content="')[2].partition('"')[0])

    def handle(route: Any) -> None:
        path = urlsplit(route.request.url).path.lstrip("/")
        if path.startswith("federation/"):
            return federation.handle(route)
        if path == "worker.html":
            script = WORKER.replace("VERSION", json.dumps(__version__))
            return route.fulfill(body=f"<!doctype html><script>{script}</script>", content_type="text/html")
        found = folder / (path or "index.html")
        if not found.is_file():
            return route.fulfill(status=404, body="")
        data = found.read_bytes()
        if changes and path in changes:
            old, new = changes[path]
            assert data.decode().count(old) == 1, path
            data = data.decode().replace(old, new).encode()
        kind = {".mjs": "text/javascript", ".js": "text/javascript"}.get(found.suffix) or mimetypes.guess_type(found)[0]
        headers = {"content-security-policy": policy} if kind == "text/javascript" else {}
        return route.fulfill(body=data, headers={"content-type": kind or "application/octet-stream", **headers})

    return handle


class Tab:
    """The training worker in an empty page: what a tab of the page is, without its keyboard."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.open()

    def open(self) -> None:
        """Load it, or load it again."""
        self.page.goto(f"{ORIGIN}/worker.html")
        self.wait("s => s.kept.most > 0")

    def tell(self, kind: str, **more: Any) -> None:
        self.page.evaluate("([kind, more]) => tell(kind, more)", [kind, more])

    def settings(self, **changed: Any) -> None:
        self.page.evaluate("c => { Object.assign(settings, c); tell('settings', {settings}); }", changed)

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.page.evaluate("window.state"))

    def wait(self, what: str) -> dict[str, Any]:
        """Wait until the state is so."""
        self.page.wait_for_function(f"() => window.state && ({what})(window.state)", timeout=20_000)
        return self.state

    def heard(self, kind: str) -> list[Any]:
        return list(self.page.evaluate("kind => window.heard.filter(one => one.kind === kind)", kind))

    def lines(self) -> list[str]:
        before = len(self.heard("lines"))
        self.tell("list")
        self.page.wait_for_function("n => window.heard.filter(one => one.kind === 'lines').length > n", arg=before)
        return [line["text"] for line in self.heard("lines")[-1]["lines"]]

    def join(self, name: str = "tab", token: str = TOKEN) -> None:
        self.tell("join", token=token, server=ORIGIN, name=name)

    def values(self, store: str) -> dict[str, Any]:
        """What lies in the database, by key; only what JSON has is whole."""
        return dict(self.page.evaluate(VALUES, store))

    def put(self, store: str, key: str, value: Any) -> None:
        self.page.evaluate(PUT, [store, key, value])


OPEN = """const database = await new Promise((done) => {
    const request = indexedDB.open('keyfed.federated');
    request.onsuccess = () => done(request.result);
  });"""
VALUES = f"""async (name) => {{
  {OPEN}
  const all = (what) => new Promise((done) => {{
    const request = database.transaction(name).objectStore(name)[what]();
    request.onsuccess = () => done(request.result);
  }});
  const [keys, values] = [await all('getAllKeys'), await all('getAll')];
  database.close();
  return Object.fromEntries(keys.map((key, n) => [key, values[n]]));
}}"""
PUT = f"""async ([name, key, value]) => {{
  {OPEN}
  const change = database.transaction(name, 'readwrite');
  change.objectStore(name).put(value, key);
  await new Promise((done) => {{ change.oncomplete = done; }});
  database.close();
}}"""
