"""The keyboard in a real browser: what is forgotten is forgotten everywhere, in the engine and in the other tabs."""

from __future__ import annotations

import json

import pytest

from .conftest import LOADED, Visit

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def forget_all(keyboard: Visit) -> None:
    keyboard.panel()
    keyboard.page.click("#forget-all")
    keyboard.page.click("#forget-all")
    expect(keyboard.page.locator("#learnt-note")).to_contain_text("forgotten")
    keyboard.close_panel()


def clear(keyboard: Visit) -> None:
    keyboard.press("Control+a")
    keyboard.press("Delete")
    expect(keyboard.page.locator("#text")).to_have_value("")


def offered_again(keyboard: Visit) -> list[str]:
    """The strip of the word that a slip was corrected to."""
    clear(keyboard)
    keyboard.type("thank you")
    expect(keyboard.slot("middle")).to_have_text("you")
    keyboard.page.wait_for_timeout(200)
    return keyboard.shown()


def slip(keyboard: Visit) -> None:
    clear(keyboard)
    keyboard.type("thank yuo ")
    expect(keyboard.page.locator("#text")).to_have_value("thank you ")


@pytest.mark.parametrize("how", ["incognito", "forgetting", "importing"])
def test_a_typed_word_is_not_offered_again_once_it_is_to_be_forgotten(keyboard, how, tmp_path):
    """The engine keeps what was typed in the place of each correction: not over incognito, forgetting or an import."""
    if how == "incognito":
        keyboard.set("incognito", True)
    slip(keyboard)
    assert "yuo" in offered_again(keyboard)
    if how == "incognito":
        keyboard.set("incognito", False)
    elif how == "forgetting":
        forget_all(keyboard)
    else:
        path = tmp_path / "learnt.json"
        path.write_text('{"format": 1, "words": {}, "pairs": {}, "dictionary": ["quetzal"], "blocked": []}')
        keyboard.panel()
        keyboard.page.set_input_files("#import-file", path)
        keyboard.page.get_by_text("Replace what is here").click()
        expect(keyboard.page.locator("#dictionary li")).to_have_text(["quetzal×"])
        keyboard.close_panel()
    assert "yuo" not in offered_again(keyboard)


def test_a_correction_of_the_sealed_text_is_not_offered_again(keyboard):
    """The word was typed incognito, the blank that corrects it after that."""
    keyboard.set("incognito", True)
    keyboard.type("thank yuo")
    keyboard.set("incognito", False)
    keyboard.press("End")
    keyboard.type(" ")
    expect(keyboard.page.locator("#text")).to_have_value("thank you ")
    assert "yuo" not in offered_again(keyboard)


class Second(Visit):
    """Another tab of the same browser."""

    def __init__(self, first: Visit) -> None:
        self.site, self.context, self.problems, self.requests = first.site, first.context, first.problems, []
        self.page = first.context.new_page()
        self.page.set_default_timeout(LOADED)
        self.page.on("console", self._console)


@pytest.fixture
def tabs(visit):
    """Two tabs that both have the text, the words and the emoji of a visit."""
    first = visit().open()
    first.type("thank quetzoli ")
    first.page.wait_for_function("() => localStorage['keyfed.text']?.includes('quetzoli ')")
    first.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('quetzoli')")
    first.page.evaluate("() => localStorage.setItem('keyfed.emoji', JSON.stringify(['🐶']))")
    first.reload()
    second = Second(first).open()
    expect(second.page.locator("#text")).to_have_value("thank quetzoli ")
    return first, second


def test_what_is_forgotten_in_one_tab_is_forgotten_in_all(tabs):
    """Text, words and emoji: the other tab has copies of its own, and writes none of them again."""
    first, second = tabs
    forget_all(first)
    expect(second.page.locator("#learnt li")).to_have_count(0)
    second.press("End")
    second.type("more ")
    second.page.locator("#text").blur()
    second.key("page-emoji").click()
    expect(second.page.locator(".picture-group").first).to_be_hidden()
    second.page.get_by_role("button", name="🍕").first.click()
    second.page.wait_for_timeout(600)
    assert second.stored().pop("keyfed.emoji") == ["🍕"]
    assert "quetzoli" not in json.dumps(second.stored())
    clear(second)
    second.type("hello ")
    second.page.wait_for_function("() => localStorage['keyfed.text']?.includes('hello')")


def test_settings_of_two_tabs_are_not_mixed_up(tabs):
    """Incognito is of all tabs; another setting that is changed in one leaves those of the other alone."""
    first, second = tabs
    first.set("autocorrect", False)
    first.set("incognito", True)
    expect(second.page.locator("#incognito-sign")).to_be_visible()
    assert second.page.locator('input[name="incognito"]').is_checked()
    clear(second)
    second.type("quetzoli hello ")
    second.page.wait_for_timeout(600)
    assert "hello" not in json.dumps(second.stored())
    second.set("theme", "dark")  # while incognito nothing else is written down …
    assert second.stored()["keyfed.settings"]["incognito"] is True
    assert "theme" not in second.stored()["keyfed.settings"]
    second.set("incognito", False)  # … until it ends
    expect(first.page.locator("#incognito-sign")).to_be_hidden()
    second.set("emoji", False)
    kept = second.stored()["keyfed.settings"]
    assert {key: kept[key] for key in ("autocorrect", "incognito", "theme", "emoji")} == {
        "autocorrect": False, "incognito": False, "theme": "dark", "emoji": False,
    }  # fmt: skip
    assert "hello" not in json.dumps(second.stored())
