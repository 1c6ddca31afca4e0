"""The two pictures of the keyboard page in the documentation, on a model's own suggestions.

    python benchmarks/keyboard_screenshot.py [RUN] [--out docs/img]

RUN is a run, an exported keyboard, or `base` (the default). The first picture, keyboard.png, has phones in both
schemes, a swipe, and a desktop. The second, keyboard-pages.png, has emoji, a held key, the row of digits, the panel,
and a desktop in both schemes. Texts are typed; "|" takes the middle suggestion. The last word is half written or has
a slip, so that the strip shows what the model completes and corrects. Look at the strips before a picture is kept:
another model says other words. The trail of the swipe lasts longer than on the page, so that a slow machine draws it,
too. Emoji need a font that has them in colour, such as Noto Color Emoji.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyboard_browser import chromium, exported, open_page, site

PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}, "device_scale_factor": 1.5}
DARK = {"color_scheme": "dark"}
SLIP = "Thanks for your |, see you at the train staton"
TRAIL, LASTING = "const LIFE = 320;", "const LIFE = 5_000;"  # milliseconds
MESSAGE = "Did you get my mesage"
COMPLETION = "Thanks for your |. We are waiting in front of the restaur"
IDEA = "Sounds like a great ide"
TALL = 520  # pixels of a phone in a picture; a desktop is as tall or, in pairs, as wide as half of the picture

Act = Callable[[Any], None]


def write(page: Any, text: str) -> None:
    """Type slowly enough for every correction to be made, then wait for the strip."""
    for number, typed in enumerate(text.split("|")):
        if number:
            page.wait_for_timeout(800)
            page.keyboard.press("Alt+2")
            page.wait_for_timeout(400)
        page.keyboard.type(typed, delay=40)
    page.wait_for_timeout(1_000)


def middle_of(page: Any, key: str) -> tuple[float, float]:
    box = page.locator(f'.key[data-key="{key}"]').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def swiping(word: str) -> Act:
    """Move a finger over the keys of a word and leave it there, so that the trail is visible."""

    def act(page: Any) -> None:
        first, *others = (middle_of(page, letter) for letter in word)
        page.mouse.move(*first)
        page.mouse.down()
        for point in others:
            page.mouse.move(*point, steps=8)

    return act


def holding(key: str) -> Act:
    """Press a key until its other characters stand above it."""

    def act(page: Any) -> None:
        page.mouse.move(*middle_of(page, key))
        page.mouse.down()
        page.wait_for_timeout(1_000)

    return act


def pressing(selector: str) -> Act:
    def act(page: Any) -> None:
        page.click(selector)
        page.wait_for_timeout(600)

    return act


def numbered(page: Any) -> None:
    page.evaluate("document.querySelector('input[name=numbers]').click()")
    page.focus("#text")
    page.wait_for_timeout(400)


def lasting_trail(context: Any) -> None:
    """Let the trail stay until the picture is taken."""

    def changed(route: Any) -> None:
        response = route.fetch()
        whole = response.text()
        assert whole.count(TRAIL) == 1
        route.fulfill(response=response, body=whole.replace(TRAIL, LASTING))

    context.route("**/page/trail.mjs", changed)


def shot(browser: Any, address: str, text: str, act: Act | None = None, **options: Any) -> bytes:
    """Open the page, type, act; return the picture."""
    context = browser.new_context(**options)
    lasting_trail(context)
    page = open_page(context, address)
    write(page, text)
    if act:
        act(page)
    picture: bytes = page.screenshot()
    context.close()
    return picture


def montage(browser: Any, path: Path, rows: list[list[bytes]], heights: list[int]) -> None:
    """Lay pictures out in rows of these heights, and save one picture."""
    page = browser.new_page(viewport={"width": 2400, "height": 1000})
    lines = [
        "<div>" + "".join(f'<img height={height} src="data:image/png;base64,{encoded(one)}">' for one in row) + "</div>"
        for row, height in zip(rows, heights, strict=True)
    ]  # fmt: skip
    style = (
        "body{margin:0;width:max-content;padding:16px;background:#f2f3f7} div{display:flex;gap:16px}"
        "div+div{margin-top:16px} img{border-radius:12px;box-shadow:0 2px 8px #0003}"
    )
    page.set_content(f"<!doctype html><style>{style}</style>{''.join(lines)}")
    page.wait_for_function("() => [...document.images].every((image) => image.complete)")
    page.locator("body").screenshot(path=path)
    page.close()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("base"), help="a run, an exported keyboard, or base")
    parser.add_argument("--out", type=Path, default=Path("docs/img"), help="folder of the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = exported(options.run, Path(temporary))
        with site(folder) as address, chromium() as browser:

            def phone(text: str, act: Act | None = None, **more: Any) -> bytes:
                return shot(browser, address, text, act, **PHONE, **more)

            def desktop(text: str, **more: Any) -> bytes:
                return shot(browser, address, text, **DESKTOP, **more)

            both = [phone(SLIP), phone(MESSAGE, **DARK), phone("Good ", swiping("morning")), desktop(COMPLETION)]
            montage(browser, options.out / "keyboard.png", [both], [TALL])
            pages = [
                phone(IDEA, pressing('.key[data-key="page-emoji"]'), **DARK), phone(IDEA, holding(".")),
                phone(IDEA, numbered, **DARK), phone(COMPLETION, pressing("#open-panel")),
            ]  # fmt: skip
            wide = [desktop(SLIP), desktop(COMPLETION, **DARK)]
            montage(browser, options.out / "keyboard-pages.png", [pages, wide], [TALL, 340])


if __name__ == "__main__":
    main()
