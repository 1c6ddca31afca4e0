"""The keyboard in a real browser: what people expect of one. Blanks, addresses, capitals, words that come back."""

from __future__ import annotations

import re

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def text_of(keyboard) -> object:
    return keyboard.page.locator("#text")


def morning(keyboard) -> None:
    """Pick a word, so that an automatic blank stands behind it."""
    keyboard.type("good mor")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("good morning ")


def settled(keyboard, text: str) -> None:
    """The text is this one and the strip says what comes next."""
    expect(text_of(keyboard)).to_have_value(text)
    expect(keyboard.slot("middle")).to_have_attribute("data-kind", "next")


# ---------------------------------------------------------------- blanks


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (" you ", " you "),
        (", you ", ", you "),
        (". you ", ". you "),
        ("'s ", "'s "),
        ("\n", "\n"),
        ("- you ", "- you "),
    ],
)
def test_no_blank_is_doubled_after_a_pick(keyboard, typed, text):
    """The automatic blank is the one that a person types, and it leaves the end of a line."""
    morning(keyboard)
    for key in typed:
        keyboard.type(key)
        keyboard.page.wait_for_timeout(30)  # slower than the engine: its edits come between two keys
    settled(keyboard, "good morning" + text)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("word", ["yuo.bar", "yuo.co.uk", "mcuh:80", "yuo=mcuh", "#yuo", "$mcuh"])
@pytest.mark.parametrize("pause", [0, 60])
def test_addresses_and_names_of_programs_stay_as_typed(keyboard, word, pause):
    """A mark inside a word ends none; whether it is inside shows with the next letter, before or after the edit."""
    keyboard.type("thank ")
    keyboard.type(word + " ", delay=pause)
    settled(keyboard, f"thank {word} ")


def test_a_correction_that_was_taken_back_for_an_address_is_not_learnt(keyboard):
    """Neither its word nor the typed one."""
    keyboard.type("yuo.", delay=60)
    expect(text_of(keyboard)).to_have_value("you.")
    keyboard.type("bar ", delay=60)
    settled(keyboard, "yuo.bar ")
    keyboard.type("thank ")
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('thank')")
    assert set(keyboard.stored()["keyfed.personal"]["words"]) == {"thank"}


# ---------------------------------------------------------------- what a blank mends


@pytest.mark.parametrize(
    ("typed", "text"),
    [("thank dont ", "thank don't "), ("im ", "I'm "), ("thank youre ", "thank you're "),
     ("see london and monday ", "see London and Monday "), ("in new york ", "in new york "),
     ("my sister zoë ", "my sister Zoë "),
     ("please open thewindow ", "please open the window "), ("see alot ", "see a lot "), ("thankyou ", "thank you ")],
)  # fmt: skip
def test_what_a_phone_types_without_marks_capitals_and_blanks(keyboard, typed, text):
    """Contractions, names, two words run together; backspace gives back what was typed."""
    keyboard.type(typed)
    settled(keyboard, text)
    if text != typed:
        keyboard.press("Backspace")
        expect(text_of(keyboard)).to_have_value(re.compile(f"{re.escape(typed.split()[-1])} $"))


# ---------------------------------------------------------------- capitals


def test_learnt_words_keep_their_capitals(keyboard):
    """As they were written most; one at the start of a sentence says nothing."""
    keyboard.type(
        "Zanquiti. we see Zanquiti and Zanquiti and QuTech or QuTech or QuTech. Quexzal quexzal quexzal to zan"
    )
    expect(keyboard.page.locator(".slot", has_text=re.compile("^Zanquiti$"))).to_have_count(1)
    keyboard.type(" qut")
    expect(keyboard.page.locator(".slot", has_text=re.compile("^QuTech$"))).to_have_count(1)
    keyboard.type(" quex")
    expect(keyboard.page.locator(".slot", has_text=re.compile("^quexzal$"))).to_have_count(1)
    keyboard.page.wait_for_function("() => localStorage['keyfed.personal']?.includes('QuTech')")
    keyboard.reload().type(" see zan")
    expect(keyboard.page.locator(".slot", has_text=re.compile("^Zanquiti$"))).to_have_count(1)


def test_shift_counts_for_the_strip_and_for_swipes(keyboard):
    """A capital, all capitals, and none where the text would set one."""
    keyboard.type("good ")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.key("shift").click()
    expect(keyboard.slot("middle")).to_have_text("Morning")
    keyboard.swipe("morning")
    expect(text_of(keyboard)).to_have_value("good Morning ")
    expect(keyboard.page.locator("#keyboard")).to_have_attribute("data-shift", "off")
    keyboard.key("shift").dblclick()
    keyboard.swipe("everybody")
    expect(text_of(keyboard)).to_have_value("good Morning EVERYBODY ")
    keyboard.key("shift").click()
    keyboard.type("we. ")
    expect(keyboard.page.locator("#keyboard")).to_have_attribute("data-shift", "once")
    expect(keyboard.slot("middle")).to_have_text(re.compile("^[A-Z]"))
    keyboard.key("shift").click()
    expect(keyboard.slot("middle")).to_have_text(re.compile("^[a-z]"))
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value(re.compile(r"EVERYBODY we\. [a-z]+ $"))


# ---------------------------------------------------------------- words that were finished before


def test_a_cursor_inside_a_word_asks_about_all_of_it(keyboard):
    """What is shown takes the place of the whole word, and nothing is announced that a blank would not do."""
    keyboard.type("thank yuo")  # of which "yu" would be corrected
    expect(keyboard.page.locator(".slot.will-correct")).to_have_text("you")
    keyboard.press("ArrowLeft")
    expect(keyboard.page.locator(".slot.will-correct")).to_have_count(0)
    expect(keyboard.slot("left")).to_have_text("yuo")
    keyboard.press("Control+a")
    keyboard.type("please open")  # "o" alone would be another word
    expect(keyboard.slot("middle")).to_have_text("open")
    for _ in "pen":
        keyboard.press("ArrowLeft")
    keyboard.page.wait_for_timeout(300)
    expect(keyboard.slot("middle")).to_have_text("open")
    keyboard.press("Control+a")
    keyboard.type("good mornong everybody")
    for _ in range(len("nong everybody")):
        keyboard.press("ArrowLeft")
    expect(keyboard.slot("middle")).to_have_text("morning")
    expect(keyboard.page.locator(".slot.will-correct")).to_have_count(0)
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("good morning everybody")


def test_an_emoji_picked_inside_a_word_follows_it(keyboard):
    """The word is not cut in two."""
    keyboard.type("we feel happy")
    for _ in "py":
        keyboard.press("ArrowLeft")
    expect(keyboard.slot("right")).to_have_attribute("data-kind", "emoji")
    keyboard.slot("right").click()
    expect(text_of(keyboard)).to_have_value(re.compile("^we feel happy \\S+ $"))


def test_the_typed_word_can_be_got_back_later(keyboard):
    """After other keys, from the strip of the corrected word; then it is known."""
    keyboard.type("thank yuo ")
    settled(keyboard, "thank you ")
    keyboard.type("a")
    keyboard.press("Backspace")
    keyboard.press("Backspace")
    expect(keyboard.slot("left")).to_have_text("yuo")
    keyboard.slot("left").click()
    settled(keyboard, "thank yuo ")
    keyboard.type("yuo ")
    settled(keyboard, "thank yuo yuo ")


# ---------------------------------------------------------------- what people expect of keys


def test_two_blanks_make_a_full_stop(keyboard):
    """The second one right after the first, behind a word; backspace takes it back, a setting switches it off."""
    keyboard.type("thank you")
    keyboard.type("  ", delay=30)
    settled(keyboard, "thank you. ")
    expect(keyboard.slot("middle")).to_have_text(re.compile("^[A-Z]"))
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("thank you  ")
    keyboard.press("Control+a")
    morning(keyboard)
    keyboard.type("   ", delay=30)  # the first one is the automatic blank, the third one is there already
    settled(keyboard, "good morning. ")
    keyboard.press("Control+a")
    keyboard.type("thank you. ", delay=30)
    keyboard.type(" ", delay=30)
    settled(keyboard, "thank you.  ")
    keyboard.set("fullstop", False)
    keyboard.press("Control+a")
    keyboard.type("thank you  ", delay=30)
    settled(keyboard, "thank you  ")


def test_capitals_on_a_physical_keyboard_are_an_option(keyboard):
    """At the start of a sentence only."""
    keyboard.set("capitals", True)
    keyboard.type("thank you. see them")
    expect(text_of(keyboard)).to_have_value("Thank you. See them")
    keyboard.set("capitals", False)
    keyboard.press("Control+a")
    keyboard.type("thank")
    expect(text_of(keyboard)).to_have_value("thank")


def drag(keyboard, key: str, *moves: tuple[float, float]) -> None:
    """Put a finger on a key and move it, in key widths."""
    mouse, box = keyboard.page.mouse, keyboard.key(key).bounding_box()
    unit = keyboard.key("q").bounding_box()["width"]
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse.move(x, y)
    mouse.down()
    for dx, dy in moves:
        mouse.move(x + dx * unit, y + dy * unit, steps=8)
    mouse.up()


def test_sliding_on_the_space_bar_moves_the_cursor(keyboard):
    """To the left and back to the right, over an emoji in one step; no blank is written."""
    keyboard.type("thank you")
    drag(keyboard, " ", (-1.8, 0), (-0.9, 0))
    at = keyboard.page.evaluate("() => document.getElementById('text').selectionStart")
    assert 2 < at < len("thank you")
    expect(text_of(keyboard)).to_have_value("thank you")
    expect(keyboard.slot("middle")).not_to_have_attribute("data-kind", "next")  # the cursor is inside a word
    drag(keyboard, " ", (3, 0))
    keyboard.type("!")
    expect(text_of(keyboard)).to_have_value("thank you!")
    keyboard.key(" ").click()
    expect(text_of(keyboard)).to_have_value("thank you! ")


def test_the_apostrophe_is_within_reach(keyboard):
    """Held, the full stop offers it first, and what is chosen at first stands above the finger."""
    keyboard.type("don")
    for name, first in ((".", "'"), ("p", "0"), ("e", "3")):
        box = keyboard.key(name).bounding_box()
        middle = box["x"] + box["width"] / 2
        keyboard.page.mouse.move(middle, box["y"] + box["height"] / 2)
        keyboard.page.mouse.down()
        chosen = keyboard.page.locator(".bubble.chosen:not(:only-child), .popup:has(.bubble:only-child) .bubble.chosen")
        expect(chosen).to_have_text(first)
        bubble = chosen.bounding_box()
        assert abs(bubble["x"] + bubble["width"] / 2 - middle) < bubble["width"] / 2
        assert keyboard.page.locator(".popup").bounding_box()["x"] >= 0
        keyboard.page.mouse.up()
        keyboard.press("Backspace") if name != "." else None
    keyboard.type("t")
    expect(text_of(keyboard)).to_have_value("don't")


def test_a_row_of_digits(keyboard):
    """Above the letters, which are decoded where they are now; all pages are as high."""
    keyboard.set("numbers", True)
    keyboard.tap("2")
    keyboard.key(" ").click()
    expect(text_of(keyboard)).to_have_value("2 ")
    keyboard.press("Control+a")
    keyboard.type("good ")
    keyboard.swipe("morning")
    expect(text_of(keyboard)).to_have_value("good morning ")
    high = keyboard.page.locator("#keyboard").bounding_box()["height"]
    for page in ("symbols", "more", "symbols", "letters", "emoji"):
        keyboard.key(f"page-{page}").click()
        assert keyboard.page.locator("#keyboard").bounding_box()["height"] == pytest.approx(high)
    keyboard.key("page-letters").click()
    for size in [(320, 568), (844, 390)]:
        keyboard.page.set_viewport_size({"width": size[0], "height": size[1]})
        low = keyboard.key(" ").bounding_box()
        assert low["y"] + low["height"] <= size[1]
        assert keyboard.page.locator("#text").bounding_box()["height"] >= 40
    keyboard.page.set_viewport_size({"width": 390, "height": 844})
    keyboard.set("numbers", False)
    expect(keyboard.key("2")).to_have_count(0)


def test_the_page_of_emoji(keyboard):
    """Groups, what was used last, arrows; an emoji ends a word as a mark does, and the keys come back."""
    page = keyboard.page
    keyboard.type("thank yuo")
    keyboard.key("page-emoji").click()
    page.get_by_role("button", name="🐶").click()
    expect(text_of(keyboard)).to_have_value("thank you🐶")
    page.locator(".picture", has_text="😀").first.click()
    keyboard.key("backspace").click()
    expect(text_of(keyboard)).to_have_value("thank you🐶")
    expect(text_of(keyboard)).to_be_focused()
    page.get_by_role("button", name="Flags").click()
    expect(page.locator(".picture-tab.current")).to_have_attribute("aria-label", "Flags")
    keyboard.key("page-letters").click()
    expect(keyboard.key("q")).to_be_visible()
    keyboard.set("incognito", True)
    keyboard.key("page-emoji").click()
    page.get_by_role("button", name="🍕").first.click()
    keyboard.set("incognito", False)
    page.get_by_role("button", name="😀").first.click()
    expect(text_of(keyboard)).to_have_value("thank you🐶🍕😀")
    assert keyboard.stored()["keyfed.emoji"] == ["😀", "🐶"]
    keyboard.key("page-letters").click()
    keyboard.reload()
    keyboard.key("page-emoji").click()
    expect(page.locator(".picture-group").first.locator(".picture")).to_have_text(["😀", "🐶"])
    page.locator(".picture").first.focus()
    keyboard.press("ArrowRight")
    keyboard.press("ArrowDown")
    assert page.evaluate("() => document.activeElement.className") == "picture"
    assert page.locator('.pictures [tabindex="0"]').count() == 1
    keyboard.panel()
    page.click("#forget-all")
    page.click("#forget-all")
    keyboard.close_panel()
    expect(page.locator(".picture-group").first).to_be_hidden()
    assert "🐶" not in str(keyboard.stored())
    keyboard.key("page-letters").click()


def test_copy_and_share(keyboard):
    """The whole text, or what is selected; sharing where the browser can."""
    page = keyboard.page
    keyboard.context.grant_permissions(["clipboard-read", "clipboard-write"])
    keyboard.type("thank you")
    page.click("#copy")
    expect(page.locator("#live")).to_have_text("Copied")
    page.focus("#text")
    keyboard.press("Control+a")
    keyboard.press("Delete")
    page.click("#copy")
    expect(page.locator("#live")).to_have_text("Nothing to copy")
    assert page.evaluate("() => navigator.clipboard.readText()") == "thank you"
    page.focus("#text")
    keyboard.type("thank you")
    assert page.evaluate("() => navigator.clipboard.readText()") == "thank you"
    page.evaluate("() => { navigator.share = async (what) => { window.shared = what; }; }")
    page.evaluate("async () => { (await import('/page/handover.mjs')).handOver({area: text, copy, share, say() {}}); }")
    page.click("#share")
    assert page.evaluate("() => window.shared") == {"text": "thank you"}
    keyboard.reload()
    expect(page.locator("#share")).to_be_hidden()  # this Chromium has nothing to share with
