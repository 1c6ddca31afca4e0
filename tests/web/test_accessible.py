"""The page under axe-core, the checker of accessibility that browsers' own tools are built on: nothing serious."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Visit

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.base", reason="axe-core is not installed (axe-playwright-python)")

SERIOUS = ("serious", "critical")
LEAST_CONTRAST = 4.5
EXPORTED = b'{"format": 1, "words": {}, "pairs": {}, "dictionary": [], "blocked": []}'
CHECKED = """(only) => axe.run(document, {resultTypes: ["violations"]}).then(({violations, passes}) => ({
  passes: passes.length,
  found: violations.filter(({impact}) => only.includes(impact)).flatMap(({id, help, nodes}) =>
    nodes.map(({target, any}) => `${id}: ${help}: ${target.join(" ")}: ${any.map(({message}) => message).join("; ")}`)),
}))"""
# A key's face is a pseudo element, which axe leaves to the eye: the contrast of every label on one.
ON_KEYS = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => parts(colour).slice(0, 3)
    .map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * c, 0);
  return [...document.querySelectorAll(".key .label, .key .hint")].filter((one) => one.textContent).map((one) => {
    const {color: ink, opacity} = getComputedStyle(one);
    const {backgroundColor: face} = getComputedStyle(one.closest(".key"), "::before");
    if ([ink, face].some((colour) => !colour.startsWith("rgb(")) || opacity !== "1") {
      return [one.textContent, `${ink} on ${face} cannot be measured`, 0];
    }
    const [dark, light] = [luminance(ink), luminance(face)].sort((a, b) => a - b);
    return [one.textContent, `${ink} on ${face}`, (light + 0.05) / (dark + 0.05)];
  });
}"""


@pytest.fixture(scope="module")
def page(browser, site):
    """One page for all states; axe is put into it by the debugger, past the page's policy."""
    one = Visit(browser, site).open()
    one.page.evaluate(axe.AXE_SCRIPT)
    yield one
    assert one.problems == []
    one.close()


def findings(page: Visit) -> list[str]:
    """What axe calls serious or critical, once nothing on the page is fading any more."""
    page.page.mouse.move(0, 0)  # a key under the mouse is paler
    for _ in range(200):
        if page.page.evaluate("document.getAnimations().length") == 0:
            break
        page.page.wait_for_timeout(20)
    done: dict[str, Any] = page.page.evaluate(CHECKED, SERIOUS)
    assert done["passes"] > 10, "axe checked next to nothing"
    labels: list[Any] = page.page.evaluate(ON_KEYS)
    assert len(labels) + page.page.locator(".picture").count() > 10, "there are no keys"
    return [*done["found"], *(f"key {text}: {what}, {c:.2f}" for text, what, c in labels if c < LEAST_CONTRAST)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_in_any_state(page, scheme):
    page.fresh()
    page.page.emulate_media(color_scheme=scheme)
    seen = {}
    page.type("good mor")
    seen["completions"] = findings(page)
    page.type("nnig")
    page.page.locator(".slot.will-correct").wait_for()
    seen["correction"] = findings(page)
    page.page.evaluate("document.querySelectorAll('.key').forEach((key) => key.classList.add('pressed'))")
    seen["pressed keys"] = findings(page)
    page.page.evaluate("document.querySelectorAll('.key').forEach((key) => key.classList.remove('pressed'))")
    pages = page.page.locator('.key[data-key^="page-"]').evaluate_all("(keys) => keys.map((key) => key.dataset.key)")
    for name in pages:  # of symbols, and whatever else the letters lead to
        page.key(name).click()
        seen[name] = findings(page)
        page.key("page-letters").first.click()
    assert seen.keys() >= {"page-symbols"}
    page.set("incognito", True)
    seen["incognito"] = findings(page)
    page.set("incognito", False)
    page.hold("middle")
    seen["menu"] = findings(page)
    page.page.get_by_text("Keep", exact=True).click()
    page.panel()
    seen["panel"] = findings(page)
    page.page.get_by_label("Add a word: My dictionary").fill("quetzal")
    page.press("Enter")
    page.page.locator("#dictionary li").wait_for()
    page.page.get_by_label("Add a word: Never suggested").fill("New York")
    page.press("Enter")
    page.page.locator("#blocked-note.error").wait_for()
    exported = {"name": "learnt.json", "mimeType": "application/json", "buffer": EXPORTED}
    page.page.set_input_files("#import-file", exported)
    page.page.locator(".question").wait_for()
    seen["error and question"] = findings(page)
    page.page.get_by_text("Cancel").click()
    page.close_panel()
    page.page.set_viewport_size({"width": 1280, "height": 800})
    page.page.evaluate(
        "() => { notice.hidden = false; notice.classList.add('error'); notice.textContent = 'No suggestions: why.'; }"
    )
    seen["a wide window with a notice"] = findings(page)
    page.page.evaluate("() => { notice.hidden = true; notice.classList.remove('error'); notice.textContent = ''; }")
    page.page.set_viewport_size({"width": 390, "height": 844})
    assert {state: found for state, found in seen.items() if found} == {}


def test_what_is_wrong_is_found(page):
    """The check is worth something: an image without a text and grey on grey are found."""
    page.page.evaluate(
        """() => {
          const image = document.createElement('img'), text = document.createElement('p');
          [text.textContent, text.className, image.src] = ['hardly there', 'wrong', 'favicon.svg'];
          text.style.cssText = 'position: fixed; top: 0; left: 0; z-index: 99; color: #999; background: #aaa';
          image.className = 'wrong';
          document.querySelector('main').append(image, text);
        }"""
    )
    found = findings(page)
    page.page.evaluate("document.querySelectorAll('.wrong').forEach((one) => one.remove())")
    assert [kind for kind in ("image-alt", "color-contrast") if not any(one.startswith(kind) for one in found)] == []
