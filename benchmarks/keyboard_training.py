"""Training in a tab: seconds, memory, and how quick a key is while it trains.

    python benchmarks/keyboard_training.py [RUN] [--tokens 2000] [--runs 3] [--picture FILE] [--json | --write]

RUN is a run, an exported keyboard, or `base` (the default). The page of a federation gets lines of that many tokens to
learn from, and its own button tunes the model to them.

- **epoch**: seconds from the start of the tuning, loading of the weights included, to the look at the result, over its
  epochs.
- **memory**: of the page's process after it (Linux), private and anonymous pages (see keyboard_browser.py); no bar.
- **keys**: from the input event to the strip's DOM written, in a page that trains on while one types. As shipped
  training waits for five seconds without a key; for this figure alone that is no second. Next to it: the same sentences
  in a page that does not train.

Every figure is the median over `--runs`. Run it on idle cores; the load is printed with it. `--write` keeps the base
model's figures in docs/results/data/keyboard-training.json and writes their table into docs/keyboard.md.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from keyboard_browser import (
    PHONE,
    SENTENCES,
    bar_markdown,
    bar_table,
    chromium,
    exported,
    memory,
    middle,
    quantiles,
    ready,
    refuse_other_models,
    site,
    type_sentences,
)
from stored import Stored, about, about_text, load

from keyfed.keyboard import serve
from keyfed.keyboard.federated import write_federated
from keyfed.keyboard.site import files_served

WORDS, HELD = 11, 8  # words of a line; one line in so many is held back
WIDE = {"width": 1280, "height": 1000}
PAUSE = 60  # milliseconds between two keys
QUIET = 6_000  # milliseconds without a key after which training begins
MOST_WAIT = 300_000
QUICK_IDLE = "const IDLE = 0;"
MARKS = """() => {
  const card = document.querySelector('[aria-label="The model"]');
  window.marks = {};
  new MutationObserver(() => {
    const text = card.textContent;
    if (/Tunes the model/.test(text)) window.marks.first ??= performance.now();
    if (/Looks at a model/.test(text)) window.marks.last ??= performance.now();
    if (/Your own model/.test(text)) window.marks.done ??= performance.now();
  }).observe(card, {childList: true, subtree: true, characterData: true});
}"""


STEPS = """() => /step [0-9]+ of/.test(document.querySelector('[aria-label="The model"]').textContent)"""


def own_lines(folder: Path, tokens: int) -> str:
    """Return lines of the model's own words, few of which are most of the text, with so many tokens to learn from."""
    words = json.loads((folder / "vocab.json").read_text("utf-8"))["words"]
    words, draw = [word for word in words if word.isalpha()], random.Random(1)
    lines = round(tokens / (WORDS + 1) * HELD / (HELD - 1))
    return "".join(
        " ".join(words[int(draw.random() ** 3 * len(words))] for _ in range(WORDS)) + "\n" for _ in range(lines)
    )


def opened(browser: Any, address: str, text: str, *, trains_on: bool, **options: Any) -> Any:
    """Return a page whose owner has agreed and has typed; it may train while keys are pressed."""
    page = browser.new_page(**options)
    if trains_on:

        def changed(route: Any) -> None:
            response = route.fetch()
            whole = response.text()
            assert whole.count("const IDLE = 5_000,") == 1
            route.fulfill(response=response, body=whole.replace("const IDLE = 5_000,", f"{QUICK_IDLE} const"))

        page.route("**/federated/page.mjs", changed)
    page.goto(address)
    ready(page)
    page.evaluate("document.querySelector('input[name=consent]').click()")
    page.wait_for_function("() => document.querySelector('#panel-body dd').textContent.startsWith('0 lines')")
    page.focus("#text")
    page.keyboard.insert_text(text)
    page.wait_for_function("() => !document.querySelector('#panel-body dd').textContent.startsWith('0 lines')")
    return page


def measure_epoch(browser: Any, address: str, text: str, epochs: int, picture: Path | None) -> dict[str, Any]:
    """Tune as shipped; return seconds an epoch and megabytes."""
    wide = {"viewport": WIDE} if picture else {"viewport": PHONE}
    page = opened(browser, address, text, trains_on=False, **wide)
    page.wait_for_timeout(QUIET)
    page.evaluate(MARKS)
    page.evaluate("document.querySelector('#tune').click()")
    page.wait_for_function("() => window.marks.done", timeout=MOST_WAIT)
    marks = page.evaluate("window.marks")
    used = memory(browser)
    if picture:
        page.focus("#text")
        page.keyboard.type("do you kno", delay=PAUSE)
        page.wait_for_timeout(1_000)
        page.screenshot(path=picture)
    page.close()
    return {"epoch_s": (marks["last"] - marks["first"]) / 1000 / epochs, "memory": used}


def measure_keys(browser: Any, address: str, text: str) -> dict[str, Any]:
    """Type with nothing in training, then while it trains; return quantiles in milliseconds."""
    found: dict[str, Any] = {}
    page = opened(browser, address, text, trains_on=True, viewport=PHONE)
    for name in ("quiet", "training"):
        if name == "training":
            page.evaluate("document.querySelector('#tune').click()")
            page.wait_for_function(STEPS, timeout=MOST_WAIT)
            page.focus("#text")
        known = page.evaluate("window.keyfedStats.written.length")
        type_sentences(page, SENTENCES[:3], PAUSE, False)
        found[name] = quantiles(page.evaluate("window.keyfedStats.written")[known:])
    found["trained_on"] = float(not page.locator("#looked").text_content())  # 1: it trained until the last key
    page.close()
    return found


def bars(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what has to hold."""
    figures = [
        ("key to strip while it trains, physical, p95, ms", row["training"].get("p95", np.nan), 30.0),
        ("seconds of an epoch", row["epoch_s"], 60.0),
    ]
    return [{"what": what, "figure": is_, "most": most, "holds": is_ <= most} for what, is_, most in figures]


def tables(found: dict[str, Any]) -> str:
    """The bars for docs/keyboard.md, and what has none."""
    quiet, busy, used = found["quiet"], found["training"], found["memory"]
    return (
        f"{found['tokens']:,} tokens to learn from, medians of {found['runs']} runs; {about_text(found)}:\n\n"
        f"{bar_markdown(found['bars'])}\n\n"
        f"Key to strip, p50 and p95: {quiet['p50']:.1f} and {quiet['p95']:.1f} ms; while it trains {busy['p50']:.1f} "
        f"and {busy['p95']:.1f} ms. Memory after training: {used.get('private_mb', np.nan):.0f} MB of private pages, "
        f"{used.get('anonymous_mb', np.nan):.0f} of anonymous ones."
    )


STORED = Stored("keyboard_training", "keyboard-training.json", "### Training in a tab", tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("base"), help="a run, an exported keyboard, or base")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens to learn from")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of the page's tuning (federated/models.mjs)")
    parser.add_argument("--runs", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--picture", type=Path, help="save a picture of the page after tuning")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="keep the base model's figures; write docs/keyboard.md")
    options = parser.parse_args()
    refuse_other_models(options.run, options.write)
    before = load()
    with tempfile.TemporaryDirectory() as temporary:
        export = exported(options.run, Path(temporary))
        text, folder = own_lines(export, options.tokens), Path(temporary) / "site"
        write_federated(export, folder)

        def app(folder: Path, port: int) -> Any:
            return serve.app_of(files_served(folder), (serve.HOST,), port, 80)

        with site(folder, app) as address, chromium() as browser:
            rows = [
                measure_epoch(browser, address, text, options.epochs, options.picture)
                | measure_keys(browser, address, text)
                for _ in range(options.runs)
            ]
            version = browser.version
    row = middle(rows)
    found = {
        **about(before, Chromium=version), "tokens": options.tokens, "epochs": options.epochs, "runs": options.runs,
        "bars": bars(row), **row,
    }  # fmt: skip
    if options.write:
        STORED.write(found)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    quiet, busy, used = row["quiet"], row["training"], row["memory"]
    private, anonymous = (used.get(name, np.nan) for name in ("private_mb", "anonymous_mb"))
    print(
        f"{options.tokens} tokens; medians of {options.runs}; {about_text(found)}\n"
        f"epoch {row['epoch_s']:.1f} s; memory {private:.0f} MB of private pages, {anonymous:.0f} of anonymous ones\n"
        f"key to strip, p50 and p95: {quiet['p50']:.1f} and {quiet['p95']:.1f} ms; while it trains "
        f"{busy['p50']:.1f} and {busy['p95']:.1f} ms\n\n{bar_table(found['bars'])}"
    )


if __name__ == "__main__":
    main()
