"""The keyboard in a real browser: the parts around the keys. Menu, strip, panel, imports, what is counted."""

from __future__ import annotations

import json
import re

import pytest

from .node_cases import answers, needs_node

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def text_of(keyboard) -> object:
    return keyboard.page.locator("#text")


# ---------------------------------------------------------------- the strip


@pytest.mark.parametrize("place", ["left", "middle", "right"])
def test_the_menu_of_a_suggestion_shows_its_word(keyboard, place):
    """Nothing of “Never suggest …” is cut off, and it lies inside the page."""
    keyboard.type("thank y")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.slot(place).evaluate("(slot) => { slot.firstChild.textContent = 'extraordinarily'; }")
    keyboard.hold(place)
    item = keyboard.page.locator(".menu .block")
    assert item.evaluate("(item) => item.scrollWidth <= item.clientWidth")
    box = keyboard.page.locator(".menu").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    keyboard.page.locator(".menu .keep").click()


def test_only_the_coming_correction_is_coloured(keyboard):
    """Others may be corrections too; a blank takes one."""
    keyboard.type("thank yuor")
    expect(keyboard.page.locator('.slot[data-kind="correction"]')).not_to_have_count(0)
    keyboard.page.evaluate(
        """async () => {
          const {SuggestionStrip} = await import('/page/strip.mjs');
          const root = document.createElement('div');
          root.id = 'two';
          document.body.append(root);
          const slot = (text) => ({text, word: text, kind: 'correction'});
          new SuggestionStrip(root, document.createElement('p'), {})
            .show({slots: [slot('doing'), slot('going'), null], correction: 'going'});
        }"""
    )
    expect(keyboard.page.locator("#two .will-correct")).to_have_text(["going"])
    spoken = keyboard.page.locator("#two .slot").evaluate_all("(slots) => slots.map((slot) => slot.ariaLabel)")
    assert spoken == ["doing", "going, correction", "No right suggestion"]
    keyboard.page.evaluate("() => document.getElementById('two').remove()")


def test_nothing_stays_lit_after_a_touch(visit):
    """A finger has no place where it rests: colours of a pointer above are for devices that have one."""
    keyboard = visit(has_touch=True, is_mobile=True)
    keyboard.open().type("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.slot("middle").tap()
    expect(text_of(keyboard)).to_have_value("thank you ")
    lit = """() => [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])
      .filter((rule) => rule.selectorText?.includes(':hover')).map((rule) => rule.selectorText)"""
    assert keyboard.page.evaluate(lit) == []
    plain = "(slot) => ['rgba(0, 0, 0, 0)', 'transparent'].includes(getComputedStyle(slot).backgroundColor)"
    for _ in range(100):
        if keyboard.slot("middle").evaluate(plain):
            break
        keyboard.page.wait_for_timeout(20)
    assert keyboard.slot("middle").evaluate(plain)


def test_without_scripts_the_page_says_so(browser, site):
    """Where it can be seen."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(site.address)
    box = page.locator("noscript p").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 844
    context.close()


# ---------------------------------------------------------------- the panel


def test_the_panel_is_a_dialog(keyboard):
    """Tab stays inside it, the rest is out of reach, Escape closes it and the focus goes back."""
    page = keyboard.page
    expect(page.locator("#panel")).not_to_have_attribute("role", "dialog")
    keyboard.panel()
    expect(page.get_by_role("dialog", name="Status and settings")).to_be_visible()
    assert page.evaluate("() => document.querySelector('main').inert")
    stops = []
    for _ in range(60):
        stops.append(
            page.evaluate("() => [document.activeElement.closest('#panel') !== null, document.activeElement.id]")
        )
        keyboard.press("Tab")
    assert all(inside for inside, _ in stops), stops
    assert [name for _, name in stops].count("close-panel") >= 2  # round and round
    page.focus("#close-panel")
    keyboard.press("Shift+Tab")
    assert page.evaluate("() => document.activeElement.closest('#panel') !== null")
    keyboard.press("Escape")
    expect(page.locator("#panel.open")).to_have_count(0)
    expect(page.locator("#open-panel")).to_be_focused()
    assert not page.evaluate("() => document.querySelector('main').inert")
    page.set_viewport_size({"width": 1280, "height": 800})  # there the panel stands next to the keyboard
    expect(page.locator("#panel")).to_be_visible()
    expect(page.locator("#panel")).not_to_have_attribute("role", "dialog")


def test_an_open_panel_frees_the_page_when_the_window_grows(keyboard):
    """There both stand next to each other."""
    keyboard.panel()
    keyboard.page.set_viewport_size({"width": 1280, "height": 800})
    expect(keyboard.page.locator("main:not([inert])")).to_have_count(1)
    text_of(keyboard).click()
    keyboard.type("thank ")
    expect(keyboard.slot("middle")).to_have_text("you")


def test_an_error_stands_in_its_own_card(keyboard):
    """Next to the list that refused the word."""
    keyboard.panel()
    for title in ("My dictionary", "Never suggested"):
        keyboard.page.get_by_label(f"Add a word: {title}").fill("New York")
        keyboard.press("Enter")
        card = keyboard.page.get_by_role("region", name=title)
        expect(card.locator(".note.error")).to_contain_text("New York")
    expect(keyboard.page.locator("#learnt-note")).to_be_empty()


BANANA = {"format": 1, "words": {"banana": 5}, "pairs": {}, "dictionary": ["McCoy"], "blocked": []}


@pytest.mark.parametrize("choice", ["Add", "Replace", "Cancel"])
def test_an_import_asks_before_it_replaces(keyboard, tmp_path, choice):
    """What is here and what the file has can both stay."""
    page = keyboard.page
    keyboard.type("zanquiti zanquiti zanquiti ")
    keyboard.panel()
    expect(page.locator("#learnt li", has_text="zanquiti")).to_have_count(1)
    path = tmp_path / "learnt.json"
    path.write_text(json.dumps(BANANA), "utf-8")
    page.set_input_files("#import-file", path)
    page.locator(".question").get_by_role("button", name=re.compile(f"^{choice}")).click()
    words = {"Add": ["banana", "zanquiti"], "Replace": ["banana"], "Cancel": ["zanquiti"]}[choice]
    expect(page.locator("#learnt li .word")).to_have_text([re.compile(f"^{word}") for word in words])
    expect(page.locator("#dictionary li")).to_have_count(0 if choice == "Cancel" else 1)
    expect(page.get_by_role("button", name=re.compile("^Replace"))).to_have_count(0)


# ---------------------------------------------------------------- what is counted


def facts(keyboard) -> str:
    return keyboard.page.locator(".facts")


def test_a_correction_saves_no_keys(keyboard):
    """Only what was picked or swiped does."""
    keyboard.reload()
    for word in ("mornin ", "everybdy "):
        keyboard.type(word)
    expect(text_of(keyboard)).to_have_value("morning everybody ")
    expect(facts(keyboard)).to_contain_text("0 of 16 (0 %)")
    keyboard.type("than")
    expect(keyboard.slot("middle")).to_have_text("thank")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("morning everybody thank ")
    expect(facts(keyboard)).to_contain_text("1 of 22 (5 %)")


def test_figures_stand_in_the_panel_only(keyboard):
    """The face of the page is for writing."""
    keyboard.type("thank ")
    expect(facts(keyboard)).to_contain_text("ms")
    face = keyboard.page.locator("main").inner_text()
    assert not re.search(r"\bms\b|p50|%|federated|round \d", face), face


@needs_node
def test_the_collector_is_asked_where_there_is_room_and_no_room_is_no_failure():
    """80 MiB are announced: Chromium begins at 64; where they cannot be had the page goes on."""
    assert answers([{"op": "collect"}]) == [[80 << 20, 0]]


def test_a_key_changes_no_layer(keyboard):
    """The bubble above a key comes and goes by its opacity alone: what is laid out and painted again is garbage."""
    popup = keyboard.page.locator(".popup")
    assert popup.evaluate("(popup) => getComputedStyle(popup).willChange") == "transform, opacity"
    box = keyboard.key("g").bounding_box()
    shown = "(popup) => [getComputedStyle(popup).visibility, getComputedStyle(popup).opacity, popup.ariaHidden]"
    assert popup.evaluate(shown) == ["visible", "0", "true"]
    keyboard.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    keyboard.page.mouse.down()
    assert popup.evaluate(shown) == ["visible", "1", "true"]
    keyboard.page.mouse.up()
