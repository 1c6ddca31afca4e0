"""The keyboard in a real browser: suggestions, corrections, any text, the keys on the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=15_000)  # a hang, not a speed


def text_of(keyboard) -> object:
    return keyboard.page.locator("#text")


HOLD = """() => {
  const [send, kept] = [Worker.prototype.postMessage, []];
  Worker.prototype.postMessage = function (...given) { kept.push([this, given]); };
  window.letGo = () => {
    Worker.prototype.postMessage = send;
    for (const [worker, given] of kept) send.apply(worker, given);
  };
}"""


@contextmanager
def slow_engine(keyboard) -> Iterator[None]:
    """What the page asks meanwhile reaches the engine at the end, all at once."""
    keyboard.page.evaluate(HOLD)
    yield
    keyboard.page.evaluate("() => window.letGo()")


def answered(keyboard, *, inside_word: bool) -> None:
    """Waits for the strip of a word being typed, or of the next one. An edit comes before the strip that follows it."""
    found = expect(keyboard.slot("middle"))
    (found.not_to_have_attribute if inside_word else found.to_have_attribute)("data-kind", "next")


def cursor(keyboard) -> int:
    return keyboard.page.evaluate("() => document.getElementById('text').selectionStart")


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
    keyboard.type("yuo")
    answered(keyboard, inside_word=True)
    keyboard.type(" ")
    answered(keyboard, inside_word=False)
    expect(text_of(keyboard)).to_have_value("thank yuo yuo ")


@pytest.mark.parametrize("separator", [",", ".", "!", "?"])
def test_punctuation_corrects_too(keyboard, separator):
    """A mark ends a word like a blank, and the undo survives it."""
    keyboard.type("thank yuo" + separator)
    expect(text_of(keyboard)).to_have_value("thank you" + separator)
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("thank yuo" + separator)


def test_enter_corrects_and_learns(keyboard):
    """A line end is the end of a word: it is corrected, and counted like one before a blank."""
    for word in ("thank yuo", "zanquiti", "zanquiti"):
        keyboard.type(word)
        keyboard.press("Enter")
    expect(text_of(keyboard)).to_have_value("thank you\nzanquiti\nzanquiti\n")
    keyboard.type("zanquiti")
    keyboard.press("Enter")
    keyboard.panel()
    expect(keyboard.page.locator("#learnt li", has_text="zanquiti")).to_contain_text("× 3")
    keyboard.close_panel()


def test_nothing_is_corrected_when_that_is_off(keyboard):
    """The switch is obeyed at once."""
    keyboard.set("autocorrect", False)
    keyboard.type("thank yuo")
    expect(keyboard.slot("middle")).to_have_text("you")
    answered(keyboard, inside_word=True)
    keyboard.type(" ")
    answered(keyboard, inside_word=False)
    expect(text_of(keyboard)).to_have_value("thank yuo ")


def test_very_fast_typing_is_corrected_all_the_same(keyboard):
    """No key is lost, and late corrections find their word although the text has gone on."""
    keyboard.type("thank yuo very mcuh see thme next weke ")
    expect(text_of(keyboard)).to_have_value("thank you very much see them next week ")
    keyboard.press("Enter")
    keyboard.type("thank yuo very ")
    expect(keyboard.slot("middle")).to_have_text("much")  # after “you very”, not after “yuo very”


# ---------------------------------------------------------------- faster than the engine


def test_letters_typed_right_after_a_pick_stay(keyboard):
    """The engine's answer replaces what was there when the suggestion was taken, no more."""
    keyboard.type("good mor")
    expect(keyboard.slot("middle")).to_have_text("morning")
    with slow_engine(keyboard):
        keyboard.slot("middle").click()
        keyboard.type("ev")
    expect(text_of(keyboard)).to_have_value("good morning ev")
    expect(keyboard.slot("middle")).to_have_text("everybody")


def test_letters_typed_right_after_a_pick_inside_a_word_stay(keyboard):
    """The rest of the replaced word goes although the letters stand before it."""
    keyboard.type("good mornong")
    for _ in "ong":
        keyboard.press("ArrowLeft")
    expect(keyboard.slot("middle")).to_have_text("morning")
    with slow_engine(keyboard):
        keyboard.slot("middle").click()
        keyboard.type("ev")
    expect(text_of(keyboard)).to_have_value("good morning ev")
    assert cursor(keyboard) == len("good morning ev")


def test_a_pick_takes_the_place_of_the_selection(keyboard):
    """As typing does; the cursor stands behind it."""
    keyboard.type("good world")
    for _ in "world":
        keyboard.press("Shift+ArrowLeft")
    expect(keyboard.slot("middle")).to_have_text("morning")
    keyboard.slot("middle").click()
    expect(text_of(keyboard)).to_have_value("good morning ")
    assert cursor(keyboard) == len("good morning ")


def test_a_key_after_a_swipe_does_not_lose_the_word(keyboard):
    """It is put in front of what was typed since, with one blank."""
    keyboard.type("good ")
    with slow_engine(keyboard):
        keyboard.swipe("morning")
        keyboard.type("ev")
    expect(text_of(keyboard)).to_have_value("good morning ev")
    expect(keyboard.slot("middle")).to_have_text("everybody")


def test_a_blank_after_a_swipe_is_the_blank_behind_it(keyboard):
    """Typed before the word is there."""
    keyboard.type("good ")
    with slow_engine(keyboard):
        keyboard.swipe("morning")
        keyboard.type(" ")
    expect(text_of(keyboard)).to_have_value("good morning ")


def test_swipes_one_right_after_the_other(keyboard):
    """All words come, in order, each read after the one before it; a word typed before is still corrected."""
    keyboard.type("thank yuo")
    with slow_engine(keyboard):
        keyboard.swipe("very")
        keyboard.swipe("much")
    expect(text_of(keyboard)).to_have_value("thank you very much ")
    assert cursor(keyboard) == len("thank you very much ")


def test_backspace_right_after_a_swipe_keeps_its_word_from_coming(keyboard):
    """The same as when the word is there already; the swipe before it stays."""
    keyboard.type("good ")
    with slow_engine(keyboard):
        keyboard.swipe("morning")
        keyboard.swipe("you")
        keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("good morning ")
    keyboard.type("e")
    expect(keyboard.slot("middle")).to_have_text("everybody")
    expect(text_of(keyboard)).to_have_value("good morning e")


def test_a_swipe_into_text_that_was_deleted_meanwhile(keyboard):
    """Its word comes where the place was."""
    keyboard.type("good ")
    with slow_engine(keyboard):
        keyboard.swipe("morning")
        keyboard.press("Control+a")
        keyboard.type("so")
    expect(text_of(keyboard)).to_have_value(re.compile("^([Mm]orning so|so [Mm]orning )$"))


def test_backspace_after_two_corrections_gives_the_last_word_back(keyboard):
    """The engine read the second word before the first was corrected in the text."""
    with slow_engine(keyboard):
        keyboard.type("thank yuo very mcuh ")
    expect(text_of(keyboard)).to_have_value("thank you very much ")
    keyboard.press("Backspace")
    expect(text_of(keyboard)).to_have_value("thank you very mcuh ")


def test_two_quick_backspaces_after_a_correction(keyboard):
    """The first gives the typed word back, the second deletes its blank."""
    keyboard.type("thank yuo ")
    expect(text_of(keyboard)).to_have_value("thank you ")
    answered(keyboard, inside_word=False)
    with slow_engine(keyboard):
        keyboard.press("Backspace")
        keyboard.press("Backspace")
    answered(keyboard, inside_word=True)
    expect(text_of(keyboard)).to_have_value("thank yuo")


def test_a_suggestion_is_the_one_that_was_pressed(keyboard):
    """Not the one that came into its place before the finger left."""
    keyboard.type("good mor")
    expect(keyboard.slot("middle")).to_have_text("morning")
    press = "(one) => ['pointerdown', 'pointerup'].forEach((name) => one.dispatchEvent(new PointerEvent(name)))"
    keyboard.slot("middle").evaluate(press)  # the click of a touch comes some time after both
    keyboard.type("y" * 120)  # longer than any word: there are no suggestions
    expect(keyboard.slot("middle")).to_be_empty()
    keyboard.slot("middle").dispatch_event("click", {"detail": 1})
    expect(text_of(keyboard)).to_have_value("good morning ")
    expect(keyboard.slot("middle")).to_have_text("everybody")


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


def test_a_correction_waits_for_the_input_method(keyboard):
    """It comes when the input method is done, at its own place."""
    methods = keyboard.context.new_cdp_session(keyboard.page)
    keyboard.type("thank")
    answered(keyboard, inside_word=True)
    with slow_engine(keyboard):
        keyboard.type(" yuo ")
        methods.send("Input.imeSetComposition", {"text": "ver", "selectionStart": 3, "selectionEnd": 3})
    answered(keyboard, inside_word=False)
    assert text_of(keyboard).input_value() == "thank yuo ver"
    methods.send("Input.insertText", {"text": "very"})
    expect(text_of(keyboard)).to_have_value("thank you very")
    assert cursor(keyboard) == len("thank you very")


def test_a_word_of_emoji_is_deleted_without_leaving_half_of_one(keyboard):
    """The held backspace looks back a limited way, which may end inside a character."""
    paste(keyboard, ("😀" * 7 + "b") * 200)
    keyboard.page.evaluate("""() => {
      window.halves = 0;
      const write = text.setRangeText; // `text` is the field, by its id
      text.setRangeText = (...given) => {
        write.apply(text, given);
        window.halves += /[\\uD800-\\uDFFF]/u.test(text.value);
      };
      document.execCommand = () => false; // Chromium's own would widen the range to whole characters
    }""")
    keyboard.key("backspace").hover()
    keyboard.page.mouse.down()
    expect(text_of(keyboard)).to_have_value("")
    keyboard.page.mouse.up()
    halves = "() => { delete document.execCommand; delete text.setRangeText; return window.halves; }"
    assert keyboard.page.evaluate(halves) == 0


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
    expect(keyboard.key("a")).to_be_focused()  # or each letter would be a walk from the start
    keyboard.press("Enter")
    expect(text_of(keyboard)).to_have_value("Aa")
    keyboard.press("ContextMenu")
    expect(keyboard.page.locator(".bubble.chosen")).to_have_text("à")
    expect(keyboard.page.locator("#live")).to_contain_text("à, ")
    keyboard.press("ArrowRight")
    keyboard.press("Enter")
    expect(text_of(keyboard)).to_have_value("Aaá")
    keyboard.press("Shift+F10")
    keyboard.press("Escape")
    keyboard.press("Space")
    expect(text_of(keyboard)).to_have_value("Aaáa")
    keyboard.key("page-symbols").focus()
    keyboard.press("Enter")
    keyboard.key(" ").focus()
    keyboard.press("Enter")
    expect(keyboard.key(" ")).to_be_focused()
    expect(keyboard.key("q")).to_be_visible()
    assert keyboard.page.locator('.key[tabindex="0"]').count() == 1


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
    expect(keyboard.page.locator(".facts")).to_contain_text("4 of 13 (31 %)")
    expect(keyboard.page.locator(".facts")).to_contain_text(" ms, median")
    stats = keyboard.page.evaluate("() => { window.keyfedStats.written.length = 0; return window.keyfedStats; }")
    assert len(stats["written"]) > 0
    assert stats["keys"] == 9
    assert stats["chars"] == len("good morning ") == 13
