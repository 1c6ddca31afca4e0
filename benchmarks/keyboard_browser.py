"""Keystroke latency of the keyboard page in Chromium: from the input event to the strip's DOM written.

    python benchmarks/keyboard_browser.py [RUN] [--json]

RUN is a run or an exported keyboard. Without one a CIFG of Gboard's size with 10,000 words is trained for one round on
the built-in corpus: its suggestions are poor, its arithmetic is that of a good one. Sentences are typed at a person's
pace on a physical keyboard and on the keys of the screen, with each source of suggestions. Beside the latency stand
the time to the next painted frame, the engine's own time (network and ranking), and the CPU time of the page's process
per keystroke (typing, engine, layout and painting together).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SENTENCES = [
    "does anyone know how to install the latest version of this package",
    "thanks, that works now. i was looking at the wrong directory",
    "what happens if you start it again after the update?",
    "i think the problem is taht the server does not answer at all",
    "the goverment of the united states has a duty to its people",
    "you should try the other one first and tell us what it says",
]
SOURCES = ("ngram", "federated", "personal")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def untrained(folder: Path) -> Path:
    """Train Gboard's CIFG for one round on little text; return the run."""
    import keyfed as library

    config = library.configure(
        "fedavg", data="sotu", rounds=1, model_name="cifg", data_vocab=10_000, data_max_tokens=500, train_cohort=2,
        train_workers=1, train_valid_tokens=500, train_test_tokens=500, train_baselines=False,
    )  # fmt: skip
    library.train(config, folder / "run")
    return folder / "run"


def exported(run: Path, folder: Path) -> Path:
    """Return the export to serve: RUN itself if it is one, else a fresh export of it in `folder`."""
    from keyfed.keyboard import bundle
    from keyfed.keyboard.export import export_run

    return run if bundle.is_bundle(run) else export_run(run, folder / "keyboard").out


@contextmanager
def site(folder: Path) -> Iterator[str]:
    """Serve the page on an export as long as the block runs; give its address."""
    import uvicorn

    from keyfed.keyboard import serve

    listening = serve.listen(0)
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(serve.make_app(folder, port), log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("KEYFED_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit(f"error: no browser found (looked for {', '.join(BROWSERS)})")
    with sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield started
        started.close()


def open_page(browser: Any, address: str, **options: Any) -> Any:
    """Return a loaded page with the cursor in the text."""
    page = browser.new_page(**options)
    page.goto(address)
    ready(page)
    return page


def ready(page: Any) -> None:
    """Wait until the model is loaded; put the cursor into the text."""
    page.locator("html[data-state]").wait_for(state="attached", timeout=120_000)
    if page.locator("html").get_attribute("data-state") != "ready":
        sys.exit(f"error: {page.text_content('#notice')}")
    page.focus("#text")


def choose(page: Any, name: str, value: str) -> None:
    """Set one of the page's choices."""
    page.evaluate("([name, value]) => document.querySelector(`[name=${name}][value=${value}]`).click()", [name, value])
    page.focus("#text")


def type_sentences(page: Any, sentences: list[str], pause: float, on_screen: bool) -> int:
    """Type at a steady pace; return the number of keys."""
    draw = random.Random(1)
    keys = 0
    for sentence in sentences:
        for character in sentence + "\n":
            key = page.locator(f'.key[data-key="{character}"]') if on_screen and character != "\n" else None
            if key is not None and key.count():
                box = key.bounding_box()
                middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
                page.mouse.click(*(m + draw.gauss(0, 0.12) * box["width"] for m in middle), delay=40)  # a finger rests
            elif character == "\n":
                page.keyboard.press("Enter")
            else:
                page.keyboard.type(character)
            page.wait_for_timeout(pause)
            keys += 1
    return keys


def renderer_seconds(browser: Any) -> float:
    """CPU time of all page processes so far, all threads."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return sum(process["cpuTime"] for process in processes if process["type"] == "renderer")


def measure(
    browser: Any, address: str, source: str, on_screen: bool, sentences: list[str], pause: float
) -> dict[str, Any]:
    """Type everything on a fresh page; return quantiles in milliseconds."""
    page = open_page(browser, address, viewport={"width": 390, "height": 844})
    choose(page, "source", source)
    page.wait_for_timeout(500)
    before, known = renderer_seconds(browser), page.evaluate("window.keyfedStats.written.length")
    keys = type_sentences(page, sentences, pause, on_screen)
    page.wait_for_timeout(300)
    cpu = renderer_seconds(browser) - before
    stats = page.evaluate("window.keyfedStats")
    page.close()
    row: dict[str, Any] = {"source": source, "keys": "screen" if on_screen else "physical", "typed": keys}
    for name in ("written", "painted", "model", "rank"):
        row[name] = quantiles(stats[name][known:])
    return row | {"superseded": stats["superseded"], "cpu_ms_per_key": 1000 * cpu / keys}


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p95, p99 and the largest."""
    if not values:
        return {}
    p50, p95, p99, most = np.quantile(values, [0.5, 0.95, 0.99, 1])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(most)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a person."""
    lines = [
        "source     keys      to the strip: p50    p95    p99   painted: p50    p95   network p50  ranking p50"
        "  CPU/key  late",
    ]
    for row in rows:
        written, painted = row["written"], row["painted"]
        lines.append(
            f"{row['source']:<10} {row['keys']:<10} {written['p50']:16.1f} {written['p95']:6.1f} {written['p99']:6.1f}"
            f" {painted['p50']:14.1f} {painted['p95']:6.1f} {row['model']['p50']:13.2f} {row['rank']['p50']:12.2f}"
            f" {row['cpu_ms_per_key']:8.1f} {row['superseded']:5d}"
        )
    return "\n".join([*lines, "(milliseconds; late: strips that newer input overtook)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a run or an exported keyboard")
    parser.add_argument("--text", type=Path, help="sentences to type, one a line")
    parser.add_argument("--pause", type=float, default=60, help="milliseconds between two keys")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    sentences = options.text.read_text("utf-8").splitlines() if options.text else SENTENCES
    with tempfile.TemporaryDirectory() as temporary:
        folder = exported(options.run or untrained(Path(temporary)), Path(temporary))
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        with site(folder) as address, chromium() as browser:
            version = browser.version
            rows = [
                measure(browser, address, source, on_screen, sentences, options.pause)
                for source in SOURCES
                if source != "ngram" or manifest["ngram"]
                for on_screen in (False, True)
            ]
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    about = {"model": manifest["model"], "precision": manifest["precision"], "chromium": version, "load_per_core": load}
    if options.json:
        print(json.dumps({**about, "rows": rows}, indent=1))
    else:
        size = f"{manifest['model']['parameters']:,} parameters, {manifest['model']['vocab']:,} words"
        print(f"{manifest['model']['name']}, {size}; Chromium {version}; load {load:.1f} per core\n{table(rows)}")


if __name__ == "__main__":
    main()
