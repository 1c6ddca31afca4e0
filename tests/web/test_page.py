"""The keyboard in a real browser: every promise of the page, checked from outside."""

from __future__ import annotations

import http.client
import json
import re

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def text_of(keyboard) -> object:
    return keyboard.page.locator("#text")


# ---------------------------------------------------------------- suggestions


def test_typing_gives_suggestions(keyboard):
    """The best next word stands in the middle."""
    keyboard.type("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.type("you very ")
    expect(keyboard.slot("middle")).to_have_text("much")


def test_a_tap_on_the_strip_completes_the_word(keyboard):
    """The word and a blank are written, the focus stays in the text, the next word is offered."""
    keyboard.type("good mor")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("good morning ")
    expect(text_of(keyboard)).to_be_focused()
    expect(keyboard.slot("middle")).to_have_text("everybody")


def test_the_automatic_blank_makes_room_for_a_full_stop(keyboard):
    """A picked word's blank moves behind the mark, and the next word starts a sentence."""
    keyboard.type("good mor")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("good morning ")
    keyboard.type(".")
    expect(text_of(keyboard)).to_have_value("good morning. ")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_shortcuts_pick_suggestions(keyboard, place):
    """Alt with 1, 2, 3 takes the left, middle and right suggestion."""
    keyboard.type("the ")
    expect(keyboard.slot("middle")).to_have_text(re.compile("weather|window"))
    wanted = keyboard.shown()[place]
    assert wanted
    keyboard.press(f"Alt+{place + 1}")
    expect(text_of(keyboard)).to_have_value(f"the {wanted} ")


def test_a_suggestion_in_the_middle_of_a_word_replaces_all_of_it(keyboard):
    """The letters right of the cursor belong to the word that is replaced."""
    keyboard.type("good mornong everybody")
    for _ in range(len("ong everybody")):
        keyboard.press("ArrowLeft")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("good morning everybody")


def test_an_emoji_is_offered_but_never_in_the_middle(keyboard):
    """The emoji of a word stands on the right and follows the word when it is picked."""
    keyboard.type("we feel happy")
    expect(keyboard.slot("right")).to_have_attribute("data-kind", "emoji")
    expect(keyboard.slot("middle")).not_to_have_attribute("data-kind", "emoji")
    keyboard.set("emoji", False)
    expect(keyboard.slot("right")).not_to_have_attribute("data-kind", "emoji")


# ---------------------------------------------------------------- correction


def test_a_blank_corrects_and_backspace_takes_it_back(keyboard):
    """The typed word is recoverable, and then it is known."""
    keyboard.type("thank yuo")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.type(" ")
    expect(text_of(keyboard)).to_have_value("thank you ")
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("thank yuo ")
    keyboard.type("yuo ")
    expect(keyboard.slot("middle")).not_to_be_empty()
    expect(text_of(keyboard)).to_have_value("thank yuo yuo ")


@pytest.mark.parametrize("separator", [",", ".", "!", "?"])
def test_punctuation_corrects_too(keyboard, separator):
    """A mark ends a word like a blank, and the undo survives it."""
    keyboard.type("thank yuo" + separator)
    expect(text_of(keyboard)).to_have_value("thank you" + separator)
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("thank yuo" + separator)


def test_enter_corrects_and_learns(keyboard):
    """A line end is the end of a word."""
    keyboard.type("thank yuo")
    keyboard.press("Enter")
    expect(text_of(keyboard)).to_have_value("thank you\n")


def test_nothing_is_corrected_when_that_is_off(keyboard):
    """The switch is obeyed at once."""
    keyboard.set("autocorrect", False)
    keyboard.type("thank yuo ")
    expect(keyboard.slot("middle")).not_to_be_empty()
    expect(text_of(keyboard)).to_have_value("thank yuo ")


def test_very_fast_typing_is_corrected_all_the_same(keyboard):
    """No key is lost, and late corrections find their word although the text has gone on."""
    keyboard.type("thank yuo very mcuh see thme next weke ")
    expect(text_of(keyboard)).to_have_value("thank you very much see them next week ")
    keyboard.press("Enter")
    keyboard.type("thank yuo very ")
    expect(keyboard.slot("middle")).to_have_text("much")  # after “you very”, not after “yuo very”


# ---------------------------------------------------------------- what was learnt


def test_a_long_press_blocks_a_word(keyboard):
    """It is offered no more, not even by the model; the list shows it and gives it back."""
    keyboard.type("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.hold("middle")
    keyboard.page.locator(".menu .block").click()
    expect(keyboard.slot("middle")).not_to_have_text("you")
    assert "you" not in keyboard.shown()
    assert text_of(keyboard).input_value() == "thank "
    keyboard.panel()
    keyboard.page.locator("#blocked li button").click()
    expect(keyboard.page.locator("#blocked li")).to_have_count(0)
    keyboard.close_panel()
    expect(keyboard.slot("middle")).to_have_text("you")


def test_delete_on_a_suggestion_blocks_it(keyboard):
    """The same without a pointer: Tab to the strip, Delete, Enter; the focus goes back to the text."""
    keyboard.type("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.slot("middle").focus()
    keyboard.press("Delete")
    keyboard.press("Enter")
    expect(keyboard.slot("middle")).not_to_have_text("you")
    expect(text_of(keyboard)).to_be_focused()


def test_a_word_is_learnt_after_three_uses_and_forgotten_on_demand(keyboard):
    """Twice is not enough; deleting it from the list takes it out of the suggestions."""
    keyboard.type("zanzibar zanzibar zan")
    expect(keyboard.slot("left")).not_to_be_empty()
    assert "zanzibar" not in keyboard.shown()
    keyboard.type("zibar zan")
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(1)
    keyboard.panel()
    entry = keyboard.page.locator("#learnt li", has_text="zanzibar")
    expect(entry).to_contain_text("× 3")
    entry.locator("button").click()
    expect(entry).to_have_count(0)
    keyboard.close_panel()
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(0)


def test_what_was_learnt_stays_and_can_be_forgotten_whole(keyboard):
    """It is there after a reload; forgetting asks first, then removes it from the browser too."""
    keyboard.type("zanzibar zanzibar zanzibar ")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li", has_text="zanzibar")).to_have_count(1)
    keyboard.reload().type("zan")
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(1)
    keyboard.panel()
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt li")).not_to_have_count(0)
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt li")).to_have_count(0)
    assert "zanzibar" not in json.dumps(keyboard.stored())
    keyboard.close_panel()
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(0)


def test_no_text_is_stored(keyboard):
    """The browser keeps settings and counts; words seen once are counted, their order beyond pairs is gone."""
    keyboard.type("thank you very much ")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li")).not_to_have_count(0)
    stored = keyboard.stored()
    assert set(stored) <= {"keyfed.settings", "keyfed.personal"}
    assert set(stored["keyfed.personal"]) == {"format", "words", "pairs", "dictionary", "blocked"}
    assert "thank you" not in json.dumps(stored)
    assert keyboard.context.cookies() == []


def test_incognito_learns_and_stores_nothing_and_says_so(keyboard):
    """The sign is visible, storage does not change, and what was learnt before is not offered."""
    keyboard.type("zanzibar zanzibar zanzibar zan")
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(1)
    expect(keyboard.page.locator("#incognito-sign")).to_be_hidden()
    keyboard.set("incognito", True)
    expect(keyboard.page.locator("#incognito-sign")).to_be_visible()
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(0)
    before = keyboard.stored()
    keyboard.type("zibar quetzal quetzal quetzal quet")
    keyboard.set("emoji", False)
    keyboard.page.wait_for_timeout(500)
    assert keyboard.stored() == before
    keyboard.set("incognito", False)
    expect(keyboard.page.locator("#incognito-sign")).to_be_hidden()
    keyboard.page.wait_for_timeout(500)
    assert "quetzal" not in json.dumps(keyboard.stored())
    assert "quetzal" not in keyboard.shown()


def test_learning_can_be_turned_off(keyboard):
    """Off means off; the dictionary still takes words by hand."""
    keyboard.set("learn", False)
    keyboard.type("zanzibar zanzibar zanzibar ")
    keyboard.panel()
    keyboard.page.get_by_label("Add a word: My dictionary").fill("quetzal")
    keyboard.press("Enter")
    expect(keyboard.page.locator("#dictionary li")).to_have_text(["quetzal×"])
    expect(keyboard.page.locator("#learnt li", has_text="zanzibar")).to_have_count(0)
    keyboard.close_panel()
    keyboard.type("quet")
    expect(keyboard.page.locator(".slot", has_text="quetzal")).to_have_count(1)


def test_export_and_import(keyboard, tmp_path):
    """The file holds what was learnt; imported after forgetting everything it is all there again."""
    keyboard.type("zanzibar zanzibar zanzibar ")
    keyboard.panel()
    page = keyboard.page
    expect(page.locator("#learnt li", has_text="zanzibar")).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_text("Export to a file").click()
    path = tmp_path / "learnt.json"
    download.value.save_as(path)
    assert json.loads(path.read_text("utf-8"))["words"]["zanzibar"] == 3
    page.click("#forget-all")
    page.click("#forget-all")
    expect(page.locator("#learnt li")).to_have_count(0)
    page.set_input_files("#import-file", path)
    expect(page.locator("#learnt li", has_text="zanzibar")).to_have_count(1)


@pytest.mark.parametrize("content", ["not json", '{"format": 1, "words": {"a": -1}}', "[]"])
def test_a_bad_file_is_refused_whole(keyboard, tmp_path, content):
    """One line says why; what was there stays."""
    keyboard.type("zanzibar zanzibar zanzibar ")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li", has_text="zanzibar")).to_have_count(1)
    path = tmp_path / "bad.json"
    path.write_text(content, "utf-8")
    keyboard.page.set_input_files("#import-file", path)
    expect(keyboard.page.locator("#learnt-note.error")).not_to_be_empty()
    expect(keyboard.page.locator("#learnt li", has_text="zanzibar")).to_have_count(1)


def test_settings_persist(keyboard):
    """A reload finds the switches where they were."""
    keyboard.set("autocorrect", False)
    keyboard.set("layout", "azerty")
    keyboard.set("theme", "dark")
    keyboard.reload()
    assert not keyboard.page.locator('input[name="autocorrect"]').is_checked()
    expect(keyboard.page.locator("#keyboard")).to_have_attribute("data-layout", "azerty")
    expect(keyboard.page.locator("html")).to_have_attribute("data-theme", "dark")


@pytest.mark.parametrize("damaged", ["{", '{"source": 7, "layout": "dvorak", "autocorrect": "yes"}', "null"])
def test_damaged_storage_is_replaced_by_the_defaults(visit, damaged):
    """What an older version or a hand left in the storage cannot break the page."""
    keyboard = visit()
    script = f"localStorage.setItem('keyfed.settings', {json.dumps(damaged)})"
    keyboard.page.add_init_script(script)
    keyboard.open().type("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")


def test_a_browser_that_keeps_nothing(visit):
    """Blocked storage: everything works from memory, and the page says where things are kept."""
    keyboard = visit()
    keyboard.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})"
    )
    keyboard.open().type("zanzibar zanzibar zanzibar zan")
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(1)
    expect(keyboard.page.locator(".facts")).to_contain_text("memory")


def test_the_source_can_be_switched(keyboard):
    """n-gram, federated and federated + personal answer on the same text; only the last knows the user's words."""
    keyboard.type("zanzibar zanzibar zanzibar thank ")
    for source, name in [("ngram", "n-gram"), ("federated", "federated"), ("personal", "federated + personal")]:
        keyboard.set("source", source)
        expect(keyboard.page.locator("#meter-source")).to_have_text(name)
        expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.type("zan")
    expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(1)
    for source in ("ngram", "federated"):
        keyboard.set("source", source)
        expect(keyboard.page.locator(".slot", has_text="zanzibar")).to_have_count(0)


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
    "fetch": ("page.mjs", f"{ON_INPUT} fetch('/x?' + e.target.value).catch(() => 0); }});"),
    "beacon": ("page.mjs", f"{ON_INPUT} navigator.sendBeacon('/x', e.target.value); }});"),
    "socket": ("page.mjs", f"{ON_INPUT} new WebSocket('ws://' + location.host + '/' + e.target.value.length); }});"),
    "worker": ("worker.mjs", "self.addEventListener('message', () => { fetch('/x').catch(() => 0); });"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_noticed(visit, leak):
    """The check above is worth something: a page that sends what is typed fails it."""
    keyboard = visit()
    script, added = LEAKS[leak]

    def leaky(route):
        response = route.fetch()
        route.fulfill(response=response, body=f"{response.text()}\n{added}")

    keyboard.context.route(f"**/{script}", leaky)
    keyboard.open()
    assert requests_while_typing(keyboard) != []
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


# ---------------------------------------------------------------- the model


READ_VECTORS = """async (vectors) => {
  const {loadExport, loadRuntime, StepModel, WordSource} = await import('/model.mjs');
  const exported = await loadExport(new URL('model/', location.href));
  const model = await StepModel.open(await loadRuntime(location.href), exported);
  const source = new WordSource(model);
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
      const {loadExport, loadRuntime, StepModel, WordSource} = await import('/model.mjs');
      const exported = await loadExport(new URL('model/', location.href));
      const model = await StepModel.open(await loadRuntime(location.href), exported);
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


def test_blocked_webassembly_is_said_and_typing_works(visit):
    """The n-grams stand in for the network."""
    keyboard = visit()
    keyboard.context.route("**/*.wasm", lambda route: route.abort())
    keyboard.open()
    expect(keyboard.page.locator("#notice")).to_contain_text("WebAssembly")
    keyboard.type("thank ")
    expect(text_of(keyboard)).to_have_value("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.problems.clear()


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
    "cut short": ("model.onnx", lambda body: body[:-10], "model.onnx is damaged"),
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
    keyboard.context.route("**/*.wasm", lambda route: held.append(route))
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


# ---------------------------------------------------------------- any text at all


def paste(keyboard, text: str) -> None:
    keyboard.context.grant_permissions(["clipboard-read", "clipboard-write"])
    keyboard.page.evaluate("(text) => navigator.clipboard.writeText(text)", text)
    keyboard.press("Control+v")


@pytest.mark.parametrize("what", ["novel", "long word", "emoji", "right to left", "control characters", "lines"])
def test_any_text_can_be_pasted_and_typing_goes_on(keyboard, what):
    """The page answers, and the next words get their suggestions."""
    texts = {
        "novel": "thank you very much see them next week " * 5_500, "long word": "x" * 10_000,
        "emoji": "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷" * 400,
        "right to left": "שלום עולם مرحبا بالعالم " * 50, "control characters": "\x01\x02\u202e\ufeff\u0000\ud7ff" * 50,
        "lines": "\n" * 5_000,
    }  # fmt: skip
    paste(keyboard, texts[what])
    keyboard.type(" thank ")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.type("yuo ")
    expect(keyboard.slot("middle")).to_have_text("very")
    assert text_of(keyboard).input_value().endswith(" thank you ")


def test_a_long_word_typed_by_hand(keyboard):
    """Beyond the engine's limit there are no suggestions, and no trouble."""
    keyboard.type("y" * 120)
    expect(text_of(keyboard)).to_have_value("y" * 120)
    expect(keyboard.slot("middle")).to_be_empty()
    keyboard.type(" thank ")
    expect(keyboard.slot("middle")).to_have_text("you")


def test_an_input_method_is_left_alone(keyboard):
    """While it composes nothing touches the text; afterwards the strip follows."""
    methods = keyboard.context.new_cdp_session(keyboard.page)
    keyboard.type("thank ")
    for part in ("y", "yu", "yuo"):
        methods.send("Input.imeSetComposition", {"text": part, "selectionStart": len(part), "selectionEnd": len(part)})
    keyboard.page.wait_for_timeout(200)
    assert text_of(keyboard).input_value() == "thank yuo"
    methods.send("Input.insertText", {"text": "you"})
    expect(text_of(keyboard)).to_have_value("thank you")
    keyboard.type(" ")
    expect(keyboard.slot("middle")).to_have_text("very")


def test_the_browsers_own_undo_still_works(keyboard):
    """Ctrl+Z goes back over a correction."""
    keyboard.type("thank yuo ")
    expect(text_of(keyboard)).to_have_value("thank you ")
    keyboard.press("Control+z")
    expect(text_of(keyboard)).not_to_have_value("thank you ")


# ---------------------------------------------------------------- keys on the screen


def test_the_keys_write_and_start_sentences_with_a_capital(keyboard):
    """Shift is set by the text, used once, and locked by two presses."""
    keyboard.tap("good")
    keyboard.key(" ").click()
    expect(text_of(keyboard)).to_have_value("Good ")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.key("shift").dblclick()
    keyboard.tap("ab")
    expect(text_of(keyboard)).to_have_value("Good AB")
    keyboard.key("backspace").click()
    expect(text_of(keyboard)).to_have_value("Good A")
    expect(text_of(keyboard)).to_be_focused()
    keyboard.key("shift").click()
    keyboard.tap("b")
    expect(text_of(keyboard)).to_have_value("Good Ab")


def test_a_tap_between_two_keys_is_read_with_the_context(keyboard):
    """Positions reach the decoder: the edge of “t” towards “y” after “thank ” is a “y”."""
    keyboard.type("thank ")
    box = keyboard.key("t").bounding_box()
    keyboard.page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    keyboard.tap("ou")
    keyboard.key(" ").click()
    expect(text_of(keyboard)).to_have_value("thank you ")


def test_symbols_held_keys_and_repeated_backspace(keyboard):
    """The second page, accents by holding a key, and a held backspace."""
    keyboard.type("x")
    keyboard.key("page-symbols").click()
    keyboard.tap("12")
    keyboard.key("page-letters").click()
    box = keyboard.key("u").bounding_box()
    keyboard.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    keyboard.page.mouse.down()
    keyboard.page.locator(".popup .bubble").nth(1).wait_for()
    first = keyboard.page.locator(".bubble.chosen").text_content()
    keyboard.page.mouse.up()
    expect(text_of(keyboard)).to_have_value(f"x12{first}")
    keyboard.key("backspace").hover()
    keyboard.page.mouse.down()
    expect(text_of(keyboard)).to_have_value("")
    keyboard.page.mouse.up()


def test_a_swipe_writes_a_word(keyboard):
    """The best reading is written with a blank, others are one tap away, backspace removes the whole word."""
    keyboard.type("good ")
    keyboard.swipe("morning")
    expect(text_of(keyboard)).to_have_value("good morning ")
    keyboard.swipe("everybody")
    expect(text_of(keyboard)).to_have_value("good morning everybody ")
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("good morning ")
    keyboard.type("thank")
    keyboard.swipe("you")
    expect(text_of(keyboard)).to_have_value("good morning thank you ")


def test_another_reading_of_a_swipe(keyboard):
    """Picking a neighbour in the strip replaces the word."""
    keyboard.type("good ")
    keyboard.swipe("you")
    expect(keyboard.slot("left")).not_to_be_empty()
    keyboard.page.wait_for_timeout(100)
    other = keyboard.shown()[0]
    keyboard.slot("left").click()
    expect(text_of(keyboard)).to_have_value(f"good {other} ")


def test_azerty(keyboard):
    """The keys stand where the layout has them, and swipes are decoded on it."""
    keyboard.set("layout", "azerty")
    first = keyboard.page.locator(".keyrow").first.locator(".key").first
    expect(first).to_have_attribute("data-key", "a")
    keyboard.type("good ")
    keyboard.swipe("morning")
    expect(text_of(keyboard)).to_have_value("good morning ")


def test_the_keys_can_be_used_without_a_pointer(keyboard):
    """One tab stop, arrows to walk, Enter to press: what a screen reader does."""
    keyboard.key("q").focus()
    keyboard.press("ArrowRight")
    keyboard.press("ArrowDown")
    expect(keyboard.page.locator(".key:focus")).to_have_attribute("data-key", "a")
    keyboard.press("Enter")
    expect(text_of(keyboard)).to_have_value("A")


def test_names_for_screen_readers(keyboard):
    """Everything that can be operated has a role and a name; the strip is announced when typing pauses."""
    page = keyboard.page
    expect(page.get_by_role("textbox", name="Text")).to_be_visible()
    expect(page.get_by_role("group", name="Suggestions")).to_be_visible()
    expect(page.get_by_role("button", name="Backspace")).to_be_visible()
    expect(page.get_by_role("button", name="Settings", exact=True)).to_be_visible()
    keyboard.type("thank ")
    expect(page.get_by_role("button", name="you", exact=True)).to_be_visible()
    expect(page.locator("#live")).to_contain_text("Suggestions: you")
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, input')].filter((e) => !(e.ariaLabel || e.textContent.trim()"
        " || e.labels?.length || e.hidden)).map((e) => e.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize("size", [(320, 568), (390, 844), (844, 390), (768, 1024), (1280, 800), (1920, 1080)])
def test_it_fits_every_screen(keyboard, size):
    """No horizontal scrolling, and all keys inside the window."""
    keyboard.page.set_viewport_size({"width": size[0], "height": size[1]})
    assert keyboard.page.evaluate("document.documentElement.scrollWidth") <= size[0]
    for box in [one.bounding_box() for one in keyboard.page.locator(".key").all()]:
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
        assert box["y"] + box["height"] <= size[1]
    assert keyboard.page.locator("#text").bounding_box()["height"] >= 40


def test_latency_and_savings_are_shown(keyboard):
    """The status has numbers, and window.keyfedStats is a copy nobody can write to."""
    keyboard.reload()
    keyboard.type("good mor")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.slot("middle").click()
    expect(keyboard.page.locator("#meter-latency")).to_contain_text("ms")
    expect(keyboard.page.locator("#meter-saved")).not_to_contain_text("0 % keys")
    stats = keyboard.page.evaluate("() => { window.keyfedStats.written.length = 0; return window.keyfedStats; }")
    assert len(stats["written"]) > 0
    assert stats["keys"] == 9
    assert stats["chars"] == len("good morning ")
