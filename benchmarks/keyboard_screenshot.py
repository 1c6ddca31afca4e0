"""Pictures of the keyboard page on a run's model: phone (light, dark, settings) and desktop.

    python benchmarks/keyboard_screenshot.py RUN --out docs/images

RUN is a run or an exported keyboard. The text is typed, where it says "|" the middle suggestion is taken, and the last
word is half written, so that the pictures show what the model really suggests.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from keyboard_browser import chromium, exported, open_page, site

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 860}
TEXT = "thanks, that works now. do you kno|how to inst|the lates|ver"


def write(page: Any, text: str) -> None:
    """Type slowly enough for every correction to be made, then wait for the strip."""
    for number, part in enumerate(text.split("|")):
        if number:
            page.wait_for_timeout(400)
            page.keyboard.press("Alt+2")
            page.wait_for_timeout(400)
        page.keyboard.type(part, delay=40)
    page.wait_for_timeout(600)


def shot(
    browser: Any, address: str, path: Path, text: str, *, swipe: str = "", panel: bool = False, **options: Any
) -> None:
    """Open, type and save one picture."""
    page = open_page(browser, address, **options)
    write(page, text)
    if swipe:
        draw_swipe(page, swipe)
    if panel:
        page.click("#open-panel")
        page.wait_for_timeout(400)
    page.screenshot(path=path)
    if swipe:
        page.mouse.up()
    page.close()
    print(path)


def draw_swipe(page: Any, word: str) -> None:
    """Move a finger over the keys of a word and leave it there, so that the trail is visible."""
    boxes = [page.locator(f'.key[data-key="{letter}"]').bounding_box() for letter in word]
    points = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run or an exported keyboard")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parser.add_argument("--text", default=TEXT, help="what is typed")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = exported(options.run, Path(temporary))
        with site(folder) as address, chromium() as browser:
            phone: dict[str, Any] = {"viewport": PHONE, "device_scale_factor": 2}
            shot(browser, address, options.out / "keyboard-mobile.png", options.text, **phone)
            shot(browser, address, options.out / "keyboard-mobile-dark.png", options.text, color_scheme="dark", **phone)
            shot(browser, address, options.out / "keyboard-settings.png", options.text, panel=True, **phone)
            shot(browser, address, options.out / "keyboard-swipe.png", "i would like to ", swipe="thank", **phone)
            wide: dict[str, Any] = {"viewport": DESKTOP, "device_scale_factor": 1.5}
            shot(browser, address, options.out / "keyboard-desktop.png", options.text, **wide)


if __name__ == "__main__":
    main()
