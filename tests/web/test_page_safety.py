"""The keyboard in a real browser: nothing leaves the page, the model is the trained one, what is broken is said."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from keyfed.keyboard.export import export_run
from keyfed.keyboard.serve import WEB, page_files

from .conftest import Site, Visit

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def text_of(keyboard) -> object:
    return keyboard.page.locator("#text")


# ---------------------------------------------------------------- nothing leaves the page


def requests_while_typing(keyboard) -> list[str]:
    """Take the network away from a loaded page, use everything, and return every request that was tried."""
    keyboard.requests.clear()
    keyboard.site.requests.clear()
    keyboard.context.set_offline(True)
    keyboard.type("thank yuo very ")
    expect(keyboard.slot("middle")).to_have_text("much")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("thank you very much ")
    keyboard.type("good ")
    keyboard.swipe("morning")
    keyboard.tap("we ")
    keyboard.set("source", "ngram")
    keyboard.set("source", "personal")
    keyboard.page.wait_for_timeout(400)
    return keyboard.requests + keyboard.site.requests


def test_no_request_after_the_page_has_loaded(keyboard):
    """Offline, and still everything works: no request of any kind is even tried."""
    assert requests_while_typing(keyboard) == []
    assert text_of(keyboard).input_value().startswith("thank you very much good morning ")


ON_INPUT = "document.getElementById('text').addEventListener('input', (e) => {"
LEAKS = {
    "/fetch": ("page.mjs", f"{ON_INPUT} fetch('/fetch?' + e.target.value).catch(() => 0); }});"),
    "/beacon": ("page.mjs", f"{ON_INPUT} navigator.sendBeacon('/beacon', e.target.value); }});"),
    "/socket": ("page.mjs", f"{ON_INPUT} new WebSocket('ws://' + location.host + '/socket'); }});"),
    "/worker": ("worker.mjs", "self.addEventListener('message', () => { fetch('/worker').catch(() => 0); });"),
}


def test_every_leak_is_noticed(visit):
    """The check above is worth something: a page that sends what is typed fails it, in whatever way it does."""
    keyboard = visit()

    def leaky(route):
        response = route.fetch()
        added = [leak for script, leak in LEAKS.values() if route.request.url.endswith(script)]
        route.fulfill(response=response, body="\n".join([response.text(), *added]))

    for script in ("page.mjs", "worker.mjs"):
        keyboard.context.route(f"**/{script}", leaky)
    keyboard.open()
    noticed = requests_while_typing(keyboard)
    assert [kind for kind in LEAKS if not any(kind in request for request in noticed)] == []
    keyboard.page.goto("about:blank")  # nothing fails after this
    keyboard.problems.clear()  # the failed requests are in the console


def test_nothing_comes_from_elsewhere(keyboard):
    """Everything the page loads has its own address."""
    keyboard.reload()
    assert keyboard.requests
    assert [url for url in keyboard.requests if not url.startswith(keyboard.site.address)] == []


def test_another_host_is_refused(site):
    """A name that somebody points to 127.0.0.1 gets nothing."""
    for host, status in [("evil.example", 400), (f"127.0.0.1:{site.port}", 200)]:
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
        connection.request("GET", "/", headers={"Host": host})
        answer = connection.getresponse()
        assert answer.status == status
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        connection.close()


def test_the_policy_stops_scripts_and_strings(keyboard):
    """Inline scripts, foreign workers and markup from strings are refused (so the policy is really there)."""
    refused = keyboard.page.evaluate(
        """() => ['innerHTML', 'worker', 'policy'].map((what) => {
          try {
            if (what === 'innerHTML') document.createElement('div').innerHTML = '<b>x</b>';
            if (what === 'worker') new Worker('/worker.mjs');
            if (what === 'policy') trustedTypes.createPolicy('other', {});
            return what;
          } catch { return ''; }
        })"""
    )
    assert refused == ["", "", ""]
    keyboard.problems.clear()


# ---------------------------------------------------------------- what is loaded

MOST_LOADED = 4_000_000  # bytes as they are sent


@pytest.fixture(scope="module")
def base_site(tmp_path_factory):
    """The page with the base model, as `keyfed keyboard base` serves it."""
    running = Site(export_run(Path("base"), tmp_path_factory.mktemp("base") / "keyboard").out)
    yield running
    running.stop()


def test_the_page_is_small_and_a_reload_loads_the_manifest_only(browser, base_site):
    """Weights in eight bits, everything gzipped; no WebAssembly, no graph; then 304 for all that has not changed."""
    keyboard = Visit(browser, base_site).open()
    first = list(base_site.sent)
    names = {name for name, _, _ in first}
    assert {"/", "/worker.mjs", "/decoder/network.mjs", "/model/weights.safetensors", "/model/vocab.json"} <= names
    assert [name for name in names if name.endswith((".wasm", ".onnx")) or "vendor" in name] == []
    assert 1_000_000 < sum(size for _, _, size in first) < MOST_LOADED
    own = sum(path.stat().st_size for path in {*page_files(WEB).values()})
    assert sum(size for name, _, size in first if not name.startswith("/model/")) < own / 2  # gzipped
    base_site.sent.clear()
    keyboard.reload()
    again = {name: (status, size) for name, status, size in base_site.sent}
    assert again.pop("/model/manifest.json")[0] == 200  # is never kept
    assert set(again.values()) == {(304, 0)}
    assert {"/", "/model/weights.safetensors", "/model/vocab.json"} <= set(again)
    assert keyboard.problems == []
    keyboard.close()


POLICY = [
    "default-src 'none'", "script-src 'self'", "worker-src 'self'", "connect-src 'self'", "style-src 'self'",
    "img-src 'self'", "manifest-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    "require-trusted-types-for 'script'", "trusted-types keyfed",
]  # fmt: skip


def test_the_policy_is_this_one(keyboard):
    """Nothing is compiled from bytes or strings: no `eval` of any kind, WebAssembly included."""
    answer = keyboard.page.goto(keyboard.site.address)
    assert answer.headers["content-security-policy"].split("; ") == POLICY
    keyboard.wait("ready")
    refused = keyboard.page.evaluate(
        """() => WebAssembly.compile(Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0)).then(() => "", (e) => e.name)"""
    )
    assert refused == "CompileError"
    keyboard.problems.clear()


# ---------------------------------------------------------------- the model


READ_VECTORS = """async (vectors) => {
  const {loadExport, sourceOf} = await import('/decoder/model.mjs');
  const source = sourceOf(await loadExport(new URL('model/', location.href)));
  const found = [];
  for (const {tokens, ids} of vectors) {
    const logp = await source.scores(Int32Array.from(tokens));
    const order = Array.from(logp.keys()).sort((a, b) => logp[b] - logp[a]);
    found.push({top: order.slice(0, 3), logp: ids.map((i) => logp[i])});
  }
  return found;
}"""


def test_the_browser_computes_what_pytorch_computes(keyboard, exported):
    """Log-probabilities of the exported vectors within 1e-4, and the same three words on top."""
    steps = json.loads((exported / "vectors.json").read_text("utf-8"))["steps"]
    assert len(steps) >= 3
    found = keyboard.page.evaluate(READ_VECTORS, steps)
    for want, got in zip(steps, found, strict=True):
        assert got["top"] == want["top"]
        assert got["logp"] == pytest.approx(want["logp"], abs=1e-4)


def test_states_are_kept_by_position(keyboard, exported):
    """One more word is one step; going back and on gives the same numbers as reading everything afresh."""
    script = """async () => {
      const {loadExport, WordSource} = await import('/decoder/model.mjs');
      const {Network} = await import('/decoder/network.mjs');
      const {readTensors} = await import('/decoder/safetensors.mjs');
      const {manifest, files} = await loadExport(new URL('model/', location.href));
      const model = new Network(manifest, readTensors(files['weights.safetensors']));
      let steps = 0;
      const step = (...given) => { steps++; return model.step(...given); };
      const counted = {vocab: model.vocab, zero: () => model.zero(), step};
      const kept = new WordSource(counted);
      const texts = [[2], [2, 5], [2, 5, 6], [2, 5, 6, 7], [2, 5, 8], [2, 5], [2, 9, 9]];
      const different = [];
      const costs = [];
      for (const ids of texts) {
        const before = steps;
        const got = Array.from(await kept.scores(Int32Array.from(ids)));
        costs.push(steps - before);
        const fresh = await new WordSource(model).scores(Int32Array.from(ids));
        different.push(Math.max(...got.map((x, i) => Math.abs(x - fresh[i]))));
      }
      return {costs, different};
    }"""
    found = keyboard.page.evaluate(script)
    assert found["costs"] == [1, 1, 1, 1, 1, 1, 2]
    assert max(found["different"]) == 0


def damage(name, change):
    """A route that changes a file on its way."""

    def handler(route):
        response = route.fetch()
        route.fulfill(response=response, body=change(response.body()))

    return f"**/model/{name}", handler


def flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


BROKEN = {
    "weights": ("weights.safetensors", flipped, "weights.safetensors is damaged"),
    "vocabulary": ("vocab.json", flipped, "vocab.json is damaged"),
    "cut short": ("ngram.safetensors", lambda body: body[:-10], "ngram.safetensors is damaged"),
    "manifest": ("manifest.json", lambda body: b"{", "manifest.json is damaged"),
    "other format": ("manifest.json", lambda body: b'{"format": 99}', "format 1, this one has 99"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_export_is_said_and_typing_works(visit, what):
    """One line on the page; keys, physical and on screen, still write."""
    name, change, message = BROKEN[what]
    keyboard = visit()
    keyboard.context.route(*damage(name, change))
    keyboard.open("failed")
    expect(keyboard.page.locator("#notice")).to_contain_text(message)
    keyboard.type("thank ")
    keyboard.tap("you")
    expect(text_of(keyboard)).to_have_value("thank you")
    assert keyboard.shown() == ["", "", ""]


def test_typing_works_before_the_model_is_there(visit):
    """Loading is shown and waits for nobody; suggestions appear for what was typed meanwhile."""
    keyboard = visit()
    held: list = []
    keyboard.context.route("**/weights.safetensors", lambda route: held.append(route))
    keyboard.page.goto(keyboard.site.address)
    keyboard.page.focus("#text")
    expect(keyboard.page.locator("#model-line")).to_contain_text("loading")
    keyboard.type("thank ")
    expect(text_of(keyboard)).to_have_value("thank ")
    for _ in range(200):
        if held:
            break
        keyboard.page.wait_for_timeout(50)
    for route in held:
        route.continue_()
    expect(keyboard.slot("middle")).to_have_text("you")
