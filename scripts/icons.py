"""Draw the icons of an installed page from its favicon, with Chromium: `python scripts/icons.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WEB = Path(__file__).parents[1] / "src" / "keyfed" / "keyboard" / "web"
ROUND = 'rx="8"'  # the corner of the square, which a system cuts by itself
# Name, side in pixels, whether the system cuts the corners, and the share of the side that the drawing takes.
COLOURS = 128
ICONS = (
    ("icon-192.png", 192, False, 1.0),
    ("icon-512.png", 512, False, 1.0),
    ("icon-maskable.png", 512, True, 0.8),
    ("icon-apple.png", 180, True, 1.0),
)


def drawing(favicon: str, cut: bool, share: float) -> str:
    """Return the favicon as it is to be drawn; one whose corners are cut is smaller, on a ground that fills all."""
    if not cut:
        return favicon
    whole = favicon.replace(ROUND, "")
    ground, _, keys = whole.partition("<g ")
    move = 16 * (1 - share)
    return f'{ground}<g transform="translate({move} {move}) scale({share})"><g {keys.replace("</svg>", "</g></svg>")}'


def main() -> None:
    """Write the icons next to the favicon."""
    favicon = (WEB / "favicon.svg").read_text("utf-8")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, side, cut, share in ICONS:
            page = browser.new_page(viewport={"width": side, "height": side})
            style = "<style>html, body { margin: 0 } svg { display: block; width: 100% }</style>"
            page.set_content(style + drawing(favicon, cut, share))
            page.screenshot(path=WEB / name, omit_background=True)
            page.close()
            with Image.open(WEB / name) as image:
                image.quantize(COLOURS, Image.Quantize.FASTOCTREE).save(WEB / name, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
