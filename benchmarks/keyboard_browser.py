"""The keyboard page in Chromium: what it loads, how soon it suggests, its memory, and how quick a key is.

    python benchmarks/keyboard_browser.py [RUN] [--runs 5] [--every-source] [--json | --write]

RUN is a run, an exported keyboard, or `base` (the default), the model that comes with the package.

- **loaded**: bytes that the server sends until the page is quiet, gzipped; for a reload, too.
- **first suggestion**: from the start of the navigation to the first word in the strip, in a new browser context (cold)
  and on a reload.
- **memory**: of the page's process after typing (Linux), in two forms that each have the bar. Private pages are
  Private_Clean and Private_Dirty of smaps_rollup; the 182 MB of 18 November 2026 were these. Anonymous pages are
  Anonymous there, what Chromium's task manager shows as the memory footprint; the 180 MB of the first measurement were
  these. They count what the process still shares with the browser's others, some 12 MB more. An empty page has 33 MB
  of private pages and 47 of anonymous ones.
- **keys**: from the input event to the strip's DOM written. Sentences are typed at a person's pace on a physical
  keyboard and on the keys of the screen, both with the main thread as it is and slowed four times. Also the time to the
  next painted frame, the engine's own time, and the CPU time of the page's process per key.

Every figure is the median over `--runs` of that figure, printed next to its bar: run it on idle cores (about a quarter
of an hour). The load is printed with it. `keyboard_network.py` has the network alone. `--write` keeps the base model's
figures in docs/results/data/keyboard-chromium.json and writes their table into docs/keyboard.md.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from stored import Stored, about, about_text, load

from keyfed.reports.document import markdown_table
from keyfed.run.base import is_base

SENTENCES = [
    "does anyone know how to install the latest version of this package",
    "thanks, that works now. i was looking at the wrong directory",
    "what happens if you start it again after the update?",
    "i think the problem is taht the server does not answer at all",
    "the goverment of the united states has a duty to its people",
    "you should try the other one first and tell us what it says",
]
SOURCES = ("ngram", "network", "federated", "personal")
DEFAULT = "personal"  # the source that a new visitor has
PHONE = {"width": 390, "height": 844}
SLOWER = 4  # how many times, for the row of a slow phone
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def exported(run: Path, folder: Path) -> Path:
    """Return the export to serve: RUN itself if it is one, else a fresh export of it in `folder`."""
    from keyfed.keyboard import bundle
    from keyfed.keyboard.export import export_run

    return run if bundle.is_bundle(run) else export_run(run, folder / "keyboard").out


SENT = [0]  # bytes of all bodies that `site` sent so far


@contextmanager
def site(folder: Path, make: Callable[[Path, int], Any] | None = None) -> Iterator[str]:
    """Serve the page on an export as long as the block runs; give its address.

    Args:
      make: another application, from the folder and the port.
    """
    import uvicorn

    from keyfed.keyboard import serve

    listening = serve.listen(0)
    port = listening.getsockname()[1]
    app = (make or serve.make_app)(folder, port)

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            SENT[0] += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, count)

    server = uvicorn.Server(uvicorn.Config(counted, log_level="error", lifespan="off", ws="none"))
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


# Notes when the strip has its first word, in milliseconds since the navigation began.
FIRST_WORD = """
const look = new MutationObserver(() => {
  if ([...document.querySelectorAll(".slot")].some((slot) => slot.textContent.trim())) {
    window.firstWord = performance.now();
    look.disconnect();
  }
});
look.observe(document, { childList: true, subtree: true, characterData: true });
"""


def first_visits(browser: Any, address: str, runs: int) -> dict[str, Any]:
    """Return bytes and milliseconds to the first suggestion, for new visitors and for their reloads."""
    found: dict[str, list[float]] = {"cold_ms": [], "reload_ms": [], "cold_bytes": [], "reload_bytes": []}
    for _ in range(runs):
        context = browser.new_context(viewport=PHONE)
        context.add_init_script(FIRST_WORD)
        page = context.new_page()
        for kind, visit in (("cold", lambda page=page: page.goto(address)), ("reload", page.reload)):
            before = SENT[0]
            visit()
            page.wait_for_function("() => window.firstWord", timeout=120_000)
            found[f"{kind}_ms"].append(page.evaluate("window.firstWord"))
            page.wait_for_load_state("networkidle")  # what comes after the first word counts as loaded, too
            found[f"{kind}_bytes"].append(SENT[0] - before)
        context.close()
    return {name: float(np.median(values)) for name, values in found.items()}


def memory(browser: Any) -> dict[str, float]:
    """Return megabytes of the largest page process: Chromium keeps a spare one."""
    sizes = []
    for process in processes(browser):
        try:
            rollup = Path(f"/proc/{process['id']}/smaps_rollup").read_text()
        except OSError:  # not Linux, or gone
            continue
        of = {line.split()[0][:-1]: int(line.split()[1]) / 1024 for line in rollup.splitlines()[1:]}
        private = of["Private_Clean"] + of["Private_Dirty"]
        sizes.append({"private_mb": private, "anonymous_mb": of["Anonymous"], "resident_mb": of["Rss"]})
    return max(sizes, key=lambda size: size["anonymous_mb"], default={})


def choose(page: Any, name: str, value: str) -> None:
    """Set one of the page's choices."""
    page.evaluate("([name, value]) => document.querySelector(`[name=${name}][value=${value}]`).click()", [name, value])
    page.focus("#text")


# Where the keys of the letters' page are, by character: looking for each would cost the page what is measured.
BOXES = """
() => Object.fromEntries([...document.querySelectorAll(".key[data-key]")].map((key) =>
  [key.dataset.key, key.getBoundingClientRect().toJSON()]))
"""


def type_sentences(page: Any, sentences: list[str], pause: float, on_screen: bool) -> int:
    """Type at a steady pace; return the number of keys."""
    draw = random.Random(1)
    boxes: dict[str, Any] = page.evaluate(BOXES) if on_screen else {}
    keys = 0
    for sentence in sentences:
        for character in sentence + "\n":
            box = boxes.get(character)
            if box is not None:
                middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
                page.mouse.click(*(m + draw.gauss(0, 0.12) * box["width"] for m in middle), delay=40)  # a finger rests
            elif character == "\n":
                page.keyboard.press("Enter")
            else:
                page.keyboard.type(character)
            page.wait_for_timeout(pause)
            keys += 1
    return keys


def processes(browser: Any) -> list[dict[str, Any]]:
    """The page processes."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return [process for process in found if process["type"] == "renderer"]


def renderer_seconds(browser: Any) -> float:
    """CPU time of all page processes so far, all threads."""
    return sum(process["cpuTime"] for process in processes(browser))


def measure(
    browser: Any, address: str, source: str, on_screen: bool, sentences: list[str], pause: float, slower: int = 1
) -> dict[str, Any]:
    """Type everything on a fresh page; return quantiles in milliseconds.

    Args:
      slower: how many times slower the page's main thread is made; the worker is not.
    """
    page = open_page(browser, address, viewport=PHONE)
    if slower > 1:
        page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": slower})
    choose(page, "source", source)
    page.wait_for_timeout(500)
    before, known = renderer_seconds(browser), page.evaluate("window.keyfedStats.written.length")
    keys = type_sentences(page, sentences, pause, on_screen)
    page.wait_for_timeout(300)
    cpu = renderer_seconds(browser) - before
    stats = page.evaluate("window.keyfedStats")
    used = memory(browser)
    page.close()
    row: dict[str, Any] = {"source": source, "keys": "screen" if on_screen else "physical", "typed": keys}
    row |= {"slower": slower, "memory": used}
    for name in ("written", "painted", "model", "rank"):
        row[name] = quantiles(stats[name][known:])
    return row | {"superseded": stats["superseded"], "cpu_ms_per_key": 1000 * cpu / keys}


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p95, p99 and the largest."""
    if not values:
        return {}
    p50, p95, p99, most = np.quantile(values, [0.5, 0.95, 0.99, 1])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(most)}


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every number over the runs of one row."""
    first = rows[0]
    return {
        key: middle([row[key] for row in rows]) if isinstance(value, dict)
        else value if isinstance(value, str) else float(np.median([row[key] for row in rows]))
        for key, value in first.items()
    }  # fmt: skip


def bars(visits: dict[str, float], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what has to hold of the page as a new visitor has it: figures, and the most that each may be."""

    def key(keys: str, slower: int, quantile: str) -> float:
        (row,) = (r for r in rows if (r["source"], r["keys"], r["slower"]) == (DEFAULT, keys, slower))
        return float(row["written"].get(quantile, np.nan))

    def most_memory(kind: str) -> float:
        used = [r["memory"].get(kind, np.nan) for r in rows if r["source"] == DEFAULT and r["slower"] == 1]
        return float(np.max(used))

    slow = f"main thread slowed {SLOWER} times, p95, ms"
    found = [
        ("page and model, compressed, MB", visits["cold_bytes"] / 1e6, 4.0),
        ("first suggestion, cold, ms", visits["cold_ms"], 1000.0),
        ("first suggestion, on a reload, ms", visits["reload_ms"], 500.0),
        ("memory of the page's process, private pages, MB", most_memory("private_mb"), 100.0),
        ("the same, anonymous pages (task manager), MB", most_memory("anonymous_mb"), 100.0),
        ("key to strip, physical, p50, ms", key("physical", 1, "p50"), 8.0),
        ("key to strip, physical, p95, ms", key("physical", 1, "p95"), 16.0),
        ("key to strip, on the screen, p95, ms", key("screen", 1, "p95"), 20.0),
        (f"key to strip, physical, {slow}", key("physical", SLOWER, "p95"), 60.0),
        (f"key to strip, on the screen, {slow}", key("screen", SLOWER, "p95"), 60.0),
    ]
    return [{"what": what, "figure": is_, "most": most, "holds": is_ <= most} for what, is_, most in found]


def bar_table(found: list[dict[str, Any]]) -> str:
    """The bars for a person."""
    width = max(len(bar["what"]) for bar in found)
    lines = [f"{'':<{width}} {'measured':>9} {'at most':>8}"]
    for bar in found:
        said = "" if bar["holds"] else "  MISSED"
        lines.append(f"{bar['what']:<{width}} {bar['figure']:9.2f} {bar['most']:8.1f}{said}")
    return "\n".join(lines)


def bar_markdown(found: list[dict[str, Any]]) -> str:
    """The bars for docs/keyboard.md; a figure of None was not measured."""
    rows = [
        [bar["what"], "not measured" if bar["figure"] is None else digits(bar["figure"]), f"≤ {bar['most']:,g}",
         "" if bar["holds"] or bar["figure"] is None else "missed"]
        for bar in found
    ]  # fmt: skip
    return markdown_table([["", "measured", "wanted", ""], *rows], numbers=True)


def digits(value: float) -> str:
    """Three digits, or all before the point.

    Example:
      >>> digits(2.386), digits(15.82), digits(813.4), digits(1234.5)
      ('2.39', '15.8', '813', '1,234')
    """
    return f"{value:,.{max(0, 2 - int(np.log10(max(abs(value), 1))))}f}"


def tables(found: dict[str, Any]) -> str:
    """The bars of the base model's page for docs/keyboard.md."""
    where = found.get("note") or f"medians of {found['runs']} runs; {about_text(found)}"
    return f"{where[0].upper()}{where[1:]}:\n\n{bar_markdown(found['bars'])}"


STORED = Stored("keyboard_browser", "keyboard-chromium.json", "### The page", tables)


def refuse_other_models(run: Path, write: bool) -> None:
    """End with one line where figures would be kept that are not the base model's."""
    if write and not is_base(run):
        print("error: --write keeps figures of the base model; leave RUN out", file=sys.stderr)
        sys.exit(2)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a person."""
    lines = [
        "source     keys         to the strip: p50    p95    p99   painted: p50    p95   ranking p50  CPU/key  late"
        "  private MB  footprint",
    ]
    for row in rows:
        written, painted = row["written"], row["painted"]
        keys = row["keys"] + (f" 1/{row['slower']:.0f}" if row["slower"] > 1 else "")
        private, footprint = (row["memory"].get(name, float("nan")) for name in ("private_mb", "anonymous_mb"))
        lines.append(
            f"{row['source']:<10} {keys:<13} {written['p50']:16.1f} {written['p95']:6.1f} {written['p99']:6.1f}"
            f" {painted['p50']:14.1f} {painted['p95']:6.1f} {row['rank']['p50']:13.2f}"
            f" {row['cpu_ms_per_key']:8.1f} {row['superseded']:5.0f} {private:11.0f} {footprint:10.0f}"
        )
    return "\n".join([*lines, "(milliseconds; late: strips that newer input overtook)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("base"), help="a run, an exported keyboard, or base")
    parser.add_argument("--text", type=Path, help="sentences to type, one a line")
    parser.add_argument("--pause", type=float, default=60, help="milliseconds between two keys")
    parser.add_argument("--runs", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--every-source", action="store_true", help="type with every source of suggestions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="keep the base model's figures; write docs/keyboard.md")
    options = parser.parse_args()
    refuse_other_models(options.run, options.write)
    before = load()
    sentences = options.text.read_text("utf-8").splitlines() if options.text else SENTENCES
    with tempfile.TemporaryDirectory() as temporary:
        folder = exported(options.run, Path(temporary))
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        sources = [source for source in SOURCES if source not in ("ngram", "network") or manifest["ngram"]]
        chosen = [source for source in sources if options.every_source or source == DEFAULT]
        plan = [(source, on_screen, 1) for source in chosen for on_screen in (False, True)]
        plan += [(DEFAULT, on_screen, SLOWER) for on_screen in (False, True)]
        with site(folder) as address, chromium() as browser:
            version = browser.version
            visits = first_visits(browser, address, options.runs)
            runs = [
                [measure(browser, address, source, screen, sentences, options.pause, slower)
                 for source, screen, slower in plan]
                for _ in range(options.runs)
            ]  # fmt: skip
    rows = [middle(list(of)) for of in zip(*runs, strict=True)]
    checked = bars(visits, rows)
    found = {
        **about(before, Chromium=version), "model": manifest["model"], "precision": manifest["precision"],
        "runs": options.runs, "bars": checked, "first": visits, "rows": rows,
    }  # fmt: skip
    if options.write:
        STORED.write(found)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    size = f"{manifest['model']['parameters']:,} parameters, {manifest['model']['vocab']:,} words"
    print(
        f"{manifest['model']['name']}, {size}, {manifest['precision']}; medians of {options.runs}; "
        f"{about_text(found)}\nloaded {visits['cold_bytes'] / 1e6:.2f} MB, on a reload "
        f"{visits['reload_bytes'] / 1e3:.1f} kB; first suggestion {visits['cold_ms']:.0f} ms, on a reload "
        f"{visits['reload_ms']:.0f} ms\n{table(rows)}\n\n{bar_table(checked)}"
    )


if __name__ == "__main__":
    main()
