"""The keyboard in a real browser: what it learns, keeps and forgets, and what can be set."""

from __future__ import annotations

import json

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def text_of(keyboard) -> object:
    return keyboard.page.locator("#text")


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
    keyboard.type("zanquiti zanquiti zan")
    expect(keyboard.slot("left")).not_to_be_empty()
    assert "zanquiti" not in keyboard.shown()
    keyboard.type("quiti zan")
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(1)
    keyboard.panel()
    entry = keyboard.page.locator("#learnt li", has_text="zanquiti")
    expect(entry).to_contain_text("× 3")
    entry.locator("button").click()
    expect(entry).to_have_count(0)
    keyboard.close_panel()
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(0)


def test_the_text_is_there_after_a_reload(keyboard):
    """With its cursor; nothing in it is learnt twice; forgetting everything forgets it, whatever is typed behind it."""
    keyboard.type("thank zanquiti ")
    keyboard.press("ArrowLeft")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('zanquiti')")
    keyboard.reload()
    expect(text_of(keyboard)).to_have_value("thank zanquiti ")
    assert keyboard.page.evaluate("() => document.getElementById('text').selectionStart") == len("thank zanquiti")
    keyboard.type(" hello ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('hello')")
    assert keyboard.stored()["keyfed.personal"]["words"] == {"thank": 1, "zanquiti": 1, "hello": 1}
    keyboard.panel()
    keyboard.page.click("#forget-all")
    keyboard.page.click("#forget-all")
    keyboard.close_panel()
    keyboard.press("End")
    keyboard.type("more ")
    keyboard.reload()
    expect(text_of(keyboard)).to_have_value("")
    assert "zanquiti" not in json.dumps(keyboard.stored())


@pytest.mark.parametrize("how", ["incognito", "keep"])
def test_a_text_is_not_kept_where_it_should_not_be(keyboard, how):
    """Typed incognito, it is not even kept after that; the text of before is."""
    keyboard.type("thank ")
    keyboard.set(how, how == "incognito")
    keyboard.type("quetzoli ")
    keyboard.page.wait_for_timeout(500)
    keyboard.set(how, how != "incognito")
    keyboard.type("you ")
    keyboard.reload()
    expect(text_of(keyboard)).to_have_value("thank " if how == "incognito" else "")
    keyboard.press("Control+a")
    keyboard.press("Delete")
    keyboard.type("you ")
    keyboard.reload()
    expect(text_of(keyboard)).to_have_value("you ")


@pytest.mark.parametrize(
    "forget",
    ["byId('forget-all').click(); byId('forget-all').click();",
     "dispatchEvent(new StorageEvent('storage', {key: 'keyfed.personal'}));"],
    ids=["here", "in another tab"],
)  # fmt: skip
def test_a_text_typed_incognito_after_forgetting_is_not_kept(keyboard, forget):
    """Into a field that was empty when everything was forgotten, before the worker has answered."""
    keyboard.set("incognito", True)
    keyboard.page.evaluate(f"""() => {{
      const byId = (id) => document.getElementById(id);
      {forget}
      byId('text').value = 'quetzoli ';
      byId('text').dispatchEvent(new InputEvent('input', {{inputType: 'insertText'}}));
    }}""")
    keyboard.page.focus("#text")
    keyboard.press("End")
    keyboard.set("incognito", False)
    keyboard.type("you ")
    keyboard.page.wait_for_timeout(500)
    assert "quetzoli" not in json.dumps(keyboard.stored())
    keyboard.press("Control+a")
    keyboard.press("Delete")
    keyboard.type("thank ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.text']?.includes('thank ')")


def test_undo_brings_no_incognito_text_into_the_storage(keyboard):
    """The field was empty meanwhile, so that a text typed afresh would be kept and learnt."""
    keyboard.set("incognito", True)
    keyboard.type("hello quetzoli")
    keyboard.set("incognito", False)
    keyboard.page.focus("#text")
    keyboard.press("Control+a")
    keyboard.press("Delete")
    expect(text_of(keyboard)).to_have_value("")
    keyboard.press("Control+z")
    expect(text_of(keyboard)).to_have_value("hello quetzoli")
    keyboard.press("End")
    keyboard.type(" thank you ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('you')")
    keyboard.page.wait_for_timeout(500)
    assert "quetzoli" not in json.dumps(keyboard.stored())
    keyboard.press("Control+a")
    keyboard.press("Delete")
    keyboard.type("thank ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.text']?.includes('thank ')")


def test_what_was_learnt_stays_and_can_be_forgotten_whole(keyboard):
    """It is there after a reload; forgetting asks first, then removes it from the browser too."""
    keyboard.type("zanquiti zanquiti zanquiti ")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li", has_text="zanquiti")).to_contain_text("× 3")  # all of it is stored
    keyboard.reload().type("zan")
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(1)
    keyboard.panel()
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt li")).not_to_have_count(0)
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt li")).to_have_count(0)
    assert "zanquiti" not in json.dumps(keyboard.stored())
    keyboard.close_panel()
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(0)


def test_the_text_is_stored_in_its_own_place_only(keyboard):
    """With the settings and counts; in these words seen once are counted, their order beyond pairs is gone.

    Nor do the weights of the cache say it, which are kept in twentieths: the words of a few sentences weigh alike.
    """
    keyboard.type("thank you very much ")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li")).not_to_have_count(0)
    keyboard.page.wait_for_function("() => localStorage['keyfed.text']?.includes('much ')")
    stored = keyboard.stored()
    assert stored.pop("keyfed.text") == {"text": "thank you very much ", "cursor": len("thank you very much ")}
    assert set(stored) <= {"keyfed.settings", "keyfed.personal", "keyfed.forgotten"}
    assert set(stored["keyfed.personal"]) == {"format", "words", "pairs", "dictionary", "blocked", "cache"}
    assert set(stored["keyfed.personal"]["cache"]["words"].values()) == {20}
    assert "thank you" not in json.dumps(stored)
    assert keyboard.context.cookies() == []


def test_incognito_learns_and_stores_nothing_and_says_so(keyboard):
    """The sign is visible, storage does not change, and what was learnt before is not offered."""
    keyboard.type("zanquiti zanquiti zanquiti zan")
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(1)
    expect(keyboard.page.locator("#incognito-sign")).to_be_hidden()
    keyboard.set("incognito", True)
    expect(keyboard.page.locator("#incognito-sign")).to_be_visible()
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(0)
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('zanquiti')")
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


@pytest.mark.parametrize("switch", ["incognito", "learn"])
def test_what_was_typed_incognito_is_not_learnt_as_the_word_before(keyboard, switch):
    """Neither whole, nor as the first half of a word, nor as the word before; what follows is learnt as usual."""
    page = keyboard.page
    keyboard.set(switch, switch == "incognito")
    keyboard.type("quetzal quetz")
    keyboard.set(switch, switch != "incognito")
    keyboard.type("alish hello thank ")
    expect(text_of(keyboard)).to_have_value("quetzal quetzalish hello thank ")
    page.wait_for_function("() => localStorage['keyfed.personal']?.includes('thank')")
    personal = keyboard.stored()["keyfed.personal"]
    assert personal["words"] == {"hello": 1, "thank": 1}
    assert personal["pairs"] == {"": {"hello": 1}, "hello": {"thank": 1}}
    page.evaluate("() => document.getElementById('text').setSelectionRange(7, 7)")
    keyboard.type(" morning ")
    page.wait_for_timeout(500)
    kept = keyboard.stored()
    assert "quetz" not in json.dumps(kept["keyfed.personal"])
    assert ("quetz" in json.dumps(kept)) == (switch == "learn")  # the text itself is only left out incognito


def test_a_correction_made_incognito_is_not_learnt_when_undone_later(keyboard):
    """The typed word belongs to the incognito text even though its undoing does not."""
    keyboard.set("incognito", True)
    keyboard.type("thank yuo ")
    expect(text_of(keyboard)).to_have_value("thank you ")
    keyboard.set("incognito", False)
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("thank yuo ")
    keyboard.page.wait_for_timeout(500)
    assert "yuo" not in json.dumps(keyboard.stored())


def test_a_word_taken_away_incognito_stays_away(keyboard):
    """Only learning stops: what a person deletes or blocks is stored."""
    keyboard.type("zanquiti ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('zanquiti')")
    keyboard.set("incognito", True)
    keyboard.panel()
    keyboard.page.locator("#learnt li", has_text="zanquiti").locator("button").click()
    keyboard.page.get_by_label("Add a word: Never suggested").fill("you")
    keyboard.press("Enter")
    expect(keyboard.page.locator("#blocked li")).to_have_text(["you×"])
    keyboard.page.wait_for_function("() => !localStorage['keyfed.personal'].includes('zanquiti')")
    assert keyboard.stored()["keyfed.personal"]["blocked"] == ["you"]


def test_what_cannot_be_blocked_is_refused_with_the_reason(keyboard):
    """One such entry made everything learnt unreadable."""
    keyboard.panel()
    keyboard.page.get_by_label("Add a word: Never suggested").fill("New York")
    keyboard.press("Enter")
    expect(keyboard.page.locator("#blocked-note.error")).to_contain_text("cannot be blocked")
    expect(keyboard.page.locator("#blocked li")).to_have_count(0)


def test_blocking_an_emoji_leaves_its_word_alone(keyboard):
    """It is the picture that was taken off the strip, not what it stands for."""
    keyboard.type("pizza")
    expect(keyboard.page.locator('.slot.right[data-kind="emoji"]')).to_have_count(1)
    picture = keyboard.slot("right").text_content()
    keyboard.slot("right").focus()
    keyboard.press("Delete")
    keyboard.press("Enter")
    expect(keyboard.page.locator('.slot[data-kind="emoji"]')).to_have_count(0)
    expect(keyboard.page.locator("#blocked li")).to_have_text([f"{picture}×"])


UNREAD = '{"format": 1, "words": {"zanquiti": 5}, "pairs": {}, "dictionary": [], "blocked": ["new york"]}'


def test_what_cannot_be_read_is_kept_aside(visit):
    """It is said, never written over, and goes with everything else."""
    keyboard = visit()
    keyboard.open()
    keyboard.page.evaluate("(json) => localStorage.setItem('keyfed.personal', json)", UNREAD)
    keyboard.reload()
    expect(keyboard.page.locator("#notice")).to_contain_text("could not be read")
    keyboard.type("hello ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('hello')")
    assert json.loads(UNREAD) in keyboard.stored().values()
    keyboard.panel()
    keyboard.page.click("#forget-all")
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt li")).to_have_count(0)
    assert "zanquiti" not in json.dumps(keyboard.stored())


FULL = """Storage.prototype.setItem = function () { throw new DOMException('full', 'QuotaExceededError'); }"""


def test_a_full_storage_is_said_and_can_still_be_emptied(keyboard):
    """What was stored before is read and removed, though nothing can be written any more."""
    keyboard.type("zanquiti ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('zanquiti')")
    expect(keyboard.page.locator(".facts")).to_contain_text("this browser")
    keyboard.page.evaluate("() => { window.setting = Storage.prototype.setItem; }")
    keyboard.page.evaluate(f"() => {{ {FULL} }}")
    keyboard.type("hello ")
    expect(keyboard.page.locator(".facts")).to_contain_text("memory, until the page closes; this browser still has")
    keyboard.panel()
    keyboard.page.click("#forget-all")
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt li")).to_have_count(0)
    assert "zanquiti" not in json.dumps(keyboard.stored())
    keyboard.page.evaluate("() => { Storage.prototype.setItem = window.setting; }")


def test_forgetting_while_the_model_loads_wins(visit):
    """The worker was given the old copy before; switching incognito meanwhile stores nothing empty either."""
    keyboard = visit()
    keyboard.open().type("zanquiti ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('zanquiti')")
    held: list = []
    keyboard.context.route("**/weights.safetensors", lambda route: held.append(route))
    keyboard.page.reload()
    keyboard.page.locator("#forget-all").wait_for(state="attached")  # the page's script has run
    keyboard.set("incognito", True)
    keyboard.set("incognito", False)
    assert "zanquiti" in keyboard.stored()["keyfed.personal"]["words"]
    keyboard.panel()
    keyboard.page.click("#forget-all")
    keyboard.page.click("#forget-all")
    for _ in range(200):
        if held:
            break
        keyboard.page.wait_for_timeout(50)
    for route in held:
        route.continue_()
    keyboard.page.locator('html[data-state="ready"]').wait_for(state="attached")
    keyboard.close_panel()
    keyboard.type("hello ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('hello')")
    assert "zanquiti" not in json.dumps(keyboard.stored())
    expect(keyboard.page.locator("#learnt li")).to_have_count(1)


def test_what_one_tab_forgets_the_other_does_not_bring_back(visit):
    """Both tabs have the same words; the second one learns after the first one forgot."""
    first = visit()
    first.open().type("zanquiti ")
    first.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('zanquiti')")
    second = first.context.new_page()
    second.goto(first.site.address)
    second.locator('html[data-state="ready"]').wait_for(state="attached")
    expect(second.locator("#learnt li")).to_have_count(1)
    first.panel()
    first.page.click("#forget-all")
    first.page.click("#forget-all")
    expect(second.locator("#learnt li")).to_have_count(0)
    second.focus("#text")
    second.keyboard.type("hello ")
    expect(second.locator("#learnt li")).to_have_text(["hello× 1×"])
    expect(first.page.locator("#learnt li")).to_have_text(["hello× 1×"])
    assert set(first.stored()["keyfed.personal"]["words"]) == {"hello"}


def test_learning_can_be_turned_off(keyboard):
    """Off means off; the dictionary still takes words by hand."""
    keyboard.set("learn", False)
    keyboard.type("zanquiti zanquiti zanquiti ")
    keyboard.panel()
    keyboard.page.get_by_label("Add a word: My dictionary").fill("quetzal")
    keyboard.press("Enter")
    expect(keyboard.page.locator("#dictionary li")).to_have_text(["quetzal×"])
    expect(keyboard.page.locator("#learnt li", has_text="zanquiti")).to_have_count(0)
    keyboard.close_panel()
    keyboard.type("quet")
    expect(keyboard.page.locator(".slot", has_text="quetzal")).to_have_count(1)


def test_export_and_import(keyboard, tmp_path):
    """The file holds what was learnt; imported after forgetting everything it is all there again."""
    keyboard.type("zanquiti zanquiti zanquiti ")
    keyboard.panel()
    page = keyboard.page
    expect(page.locator("#learnt li", has_text="zanquiti")).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_text("Export to a file").click()
    path = tmp_path / "learnt.json"
    download.value.save_as(path)
    assert json.loads(path.read_text("utf-8"))["words"]["zanquiti"] == 3
    page.click("#forget-all")
    page.click("#forget-all")
    expect(page.locator("#learnt li")).to_have_count(0)
    page.set_input_files("#import-file", path)
    expect(page.locator("#learnt li", has_text="zanquiti")).to_have_count(1)


@pytest.mark.parametrize("content", ["not json", '{"format": 1, "words": {"a": -1}}', "[]"])
def test_a_bad_file_is_refused_whole(keyboard, tmp_path, content):
    """One line says why; what was there stays."""
    keyboard.type("zanquiti zanquiti zanquiti ")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li", has_text="zanquiti")).to_have_count(1)
    path = tmp_path / "bad.json"
    path.write_text(content, "utf-8")
    keyboard.page.set_input_files("#import-file", path)
    expect(keyboard.page.locator("#learnt-note.error")).not_to_be_empty()
    expect(keyboard.page.locator("#learnt li", has_text="zanquiti")).to_have_count(1)


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
    keyboard.open().type("zanquiti zanquiti zanquiti zan")
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(1)
    expect(keyboard.page.locator(".facts")).to_contain_text("memory")


def test_the_source_can_be_switched(keyboard):
    """Counts, network, both, and both with what was learnt answer on the same text; only the last knows own words."""
    keyboard.type("zanquiti zanquiti zanquiti thank ")
    for source in ("ngram", "network", "federated", "personal"):
        keyboard.set("source", source)
        expect(keyboard.page.locator("input[name=source]:checked")).to_have_value(source)
        expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.type("zan")
    expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(1)
    for source in ("ngram", "network", "federated"):
        keyboard.set("source", source)
        expect(keyboard.page.locator(".slot", has_text="zanquiti")).to_have_count(0)


def test_without_ngrams_the_label_names_the_source_in_use(visit):
    """Stored settings may name a source that this export does not have."""
    keyboard = visit()
    keyboard.page.add_init_script("localStorage.setItem('keyfed.settings', JSON.stringify({source: 'ngram'}))")

    def without(route):
        response = route.fetch()
        body = response.text().replace(
            'post("ready", { manifest, ngram: Boolean(ngram)', 'post("ready", { manifest, ngram: false'
        )
        route.fulfill(response=response, body=body)

    keyboard.context.route("**/worker.mjs", without)
    keyboard.open()
    expect(keyboard.page.locator("input[name=source]:checked")).to_have_value("personal")


def test_a_missing_table_is_said(visit):
    """The page does not just stay empty."""
    keyboard = visit()
    keyboard.context.route("**/data/layouts.json", lambda route: route.fulfill(status=404, body=""))
    keyboard.open("failed")
    expect(keyboard.page.locator("#notice")).to_contain_text("layouts.json is missing")
    keyboard.type("thank you")
    expect(text_of(keyboard)).to_have_value("thank you")
    keyboard.problems.clear()


def test_the_browsers_own_suggestions_are_off(keyboard):
    """No other service gets to see what is typed in any field."""
    assert text_of(keyboard).get_attribute("writingsuggestions") == "false"
    fields = keyboard.page.locator("textarea, input[type=text], input[type=search]")
    assert fields.evaluate_all("(all) => all.map((field) => field.spellcheck)") == [False] * fields.count()
