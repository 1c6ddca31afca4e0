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


# ---------------------------------------------------------------- capitals


def test_learnt_words_keep_their_capitals(keyboard):
    """As they were written most; one at the start of a sentence says nothing."""
    keyboard.type(
        "Zanquiti. we see Zanquiti and Zanquiti and QuTech or QuTech or QuTech. Quetzal quetzal quetzal to zan"
    )
    expect(keyboard.page.locator(".slot", has_text=re.compile("^Zanquiti$"))).to_have_count(1)
    keyboard.type(" qut")
    expect(keyboard.page.locator(".slot", has_text=re.compile("^QuTech$"))).to_have_count(1)
    keyboard.type(" quet")
    expect(keyboard.page.locator(".slot", has_text=re.compile("^quetzal$"))).to_have_count(1)
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
    keyboard.type("how was school")
    for _ in "chool":
        keyboard.press("ArrowLeft")
    expect(keyboard.slot("middle")).to_have_text("school")
    expect(keyboard.page.locator(".slot.will-correct")).to_have_count(0)
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
