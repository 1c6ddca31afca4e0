"""The page's network next to onnxruntime-web, in one page of Chromium: milliseconds a token, and how far they differ.

    python benchmarks/keyboard_network.py [PRESET …] [--tokens 300] [--runs 3] [--json | --write]

Every preset has 10,000 words (or 90 characters) and random weights in eight bits, four times as large as training
begins with, so that the text matters. Three columns read the same tokens from a zero state, one token at a time, each
first as often as last, on the main thread, and are warmed up before:

- **JavaScript**: the page's network.
- **ort, inputs**: onnxruntime-web on the graph of an export. Its weights are inputs of each run, which onnxruntime-web
  copies into its own memory every time: that is what an app has that reads `model.onnx` as it is.
- **ort, baked in**: the same graph with the weights as initializers, which are copied and laid out when the session is
  made. This is onnxruntime-web at its best, and what the page's network is compared with.

A row is one token. Presets of characters have a second row, **word**: the step after a typed character, and the whole
beam of the word's completion as the page's decoder runs it. Random weights would end a word after one character. So a
blank and the end of a line are made so rare that the beam is as long as that of a trained model. A count model of
characters on `chat` (order 6, 1.6 nats a character) has 36 rows in 5 steps (median; 60 in 9 at 95 %). The rows are
printed. The longest beam that the decoder can have is 24 steps of 12 rows.

Wanted are medians: the CIFG not slower than either column of onnxruntime-web, the others at most 15 ms a token and a
word. At most 1e-4 nats are wanted between the page's network and the two. npm fetches onnxruntime-web for this
comparison only, by the lock file in benchmarks/onnxruntime. `--write` keeps the figures in
docs/results/data/keyboard-network.json and writes their table into docs/keyboard.md: run it on idle cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from keyboard_browser import chromium, quantiles
from safetensors.numpy import save
from stored import Stored, about, about_text, load

from keyfed.errors import ConfigError
from keyfed.keyboard.graph import state_widths, step_graph
from keyfed.keyboard.serve import WEB
from keyfed.model.language_model import PRESETS, build_spec, init_params, parameter_count, preset, quantise, widen
from keyfed.reports.document import markdown_table
from keyfed.text.vocab import EOS, SPECIALS

WORDS, CHARACTERS = 10_000, 90
SCALE = 4.0  # of the weights, as in tests/web/test_network.py
LINE = 20  # tokens from a zero state to the next
ENDS, RARE = (EOS, len(SPECIALS)), -4.0  # what ends a word, and the bias of its output
WORD_SHARE = 10  # a word's completion is a tenth of the tokens
NPM = Path(__file__).parent / "onnxruntime"
DIST = NPM / "node_modules" / "onnxruntime-web" / "dist"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def fetch_runtime() -> None:
    """Install onnxruntime-web as the lock file has it, unless it is there."""
    if all((DIST / name).is_file() for name in RUNTIME):
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("error: npm is not installed; the comparison needs it to fetch onnxruntime-web")
    done = subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=NPM, check=False)
    if done.returncode:
        sys.exit("error: npm ci failed")


def baked(graph: Any, weights: dict[str, Any]) -> Any:
    """Return a copy of a step's graph whose weights are initializers and no inputs."""
    from onnx import ModelProto, numpy_helper

    made = ModelProto()
    made.CopyFrom(graph)
    free = [value for value in made.graph.input if value.name not in weights]
    del made.graph.input[:]
    made.graph.input.extend(free)
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return made


def write_model(name: str, folder: Path) -> int:
    """Write a preset's graphs and random weights as an export has them; return the number of its parameters."""
    spec = build_spec(name, CHARACTERS if PRESETS[name].characters else WORDS)
    folder.mkdir()
    graph = step_graph(spec)
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    params = {key: SCALE * value.numpy() for key, value in init_params(spec, 1).items()}
    if PRESETS[name].characters:
        params["output.bias"][list(ENDS)] = RARE
    weights = quantise(params)
    (folder / "baked.onnx").write_bytes(baked(graph, widen(weights)).SerializeToString())
    (folder / "weights.safetensors").write_bytes(save(weights))
    states = [{"name": state, "width": width} for state, width in state_widths(spec).items()]
    (folder / "manifest.json").write_text(json.dumps({"model": asdict(spec), "states": states, "reading": "stream"}))
    return parameter_count(spec)


class _Files(SimpleHTTPRequestHandler):
    def guess_type(self, path: Any) -> str:
        """JavaScript and WebAssembly, whatever this machine takes `.mjs` for."""
        own = {".mjs": "text/javascript", ".wasm": "application/wasm"}
        return own.get(Path(path).suffix) or super().guess_type(path)

    def end_headers(self) -> None:
        """A page of its own: its clock then counts in 5 µs, not in 100."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def files(folder: Path) -> Iterator[str]:
    """Serve a folder without any policy as long as the block runs; give its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def characters() -> list[str]:
    """A vocabulary of characters with one blank."""
    letters = [chr(0xC0 + n) for n in range(CHARACTERS - len(SPECIALS) - 1)]
    return [*SPECIALS, " ", *letters]


def compare(browser: Any, address: str, name: str, words: list[str] | None, tokens: int, runs: int) -> dict[str, Any]:
    """Read tokens with all three, in a page of its own each run; return the quantiles of all runs.

    Args:
      words: the vocabulary of a model whose words are completed; None: tokens are read.
    """
    warm = max(3, tokens // 10)
    vocab = CHARACTERS if PRESETS[name].characters else WORDS
    found = []
    for run in range(runs):
        drawn = np.random.default_rng(run).integers(len(SPECIALS) + 1, vocab, warm + tokens).tolist()
        page = browser.new_page()
        page.goto(address)
        reading = {"name": name, "tokens": drawn, "warm": warm, "line": LINE, "words": words}
        found.append(page.evaluate("async (reading) => (await import('/network.mjs')).compare(reading)", reading))
        page.close()
    times = {side: quantiles([t for one in found for t in one["times"][side]]) for side in found[0]["times"]}
    return {
        "preset": name, "row": "word" if words else "token",
        "beam_rows": float(np.mean([one["rows"] for one in found])) if words else None,
        "most_nats": max(one["most"] for one in found),
        "range_nats": float(np.mean([one["range"] for one in found])), **times,
    }  # fmt: skip


MOST_MS, MOST_NATS = 15.0, 1e-4


def missed(row: dict[str, Any]) -> list[str]:
    """What of the bars a row misses."""
    most = min(row[side]["p50"] for side in ("inputs", "baked")) if row["preset"] == "cifg" else MOST_MS
    found = [f"more than {most:.2f} ms"] if row["javascript"]["p50"] > most else []
    return found + ([f"more than {MOST_NATS:.0e} nats"] if row["most_nats"] > MOST_NATS else [])


def tables(found: dict[str, Any]) -> str:
    """The rows for docs/keyboard.md."""
    head = ["preset", "parameters", "row", "JavaScript", "ort, inputs", "ort, baked in", "nats apart", "missed"]
    cells = [
        [
            row["preset"], f"{row['parameters']:,}", row_text(row),
            *(f"{row[side]['p50']:.2f} / {row[side]['p95']:.2f}" for side in ("javascript", "inputs", "baked")),
            f"{row['most_nats']:.0e}", "; ".join(missed(row)),
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return (
        f"Milliseconds, p50 / p95, of {found['runs']} runs of {found['tokens']} tokens, or of "
        f"{max(1, found['tokens'] // WORD_SHARE)} words. {about_text(found)}:\n\n"
        f"{markdown_table([head, *cells], numbers=True)}"
    )


def row_text(row: dict[str, Any]) -> str:
    return f"word, {row['beam_rows']:.0f} rows" if row["row"] == "word" else "token"


STORED = Stored("keyboard_network", "keyboard-network.json", "### The network of every preset", tables)


def line(row: dict[str, Any]) -> str:
    """A row for a person."""
    sides = (f"{row[side]['p50']:9.2f} {row[side]['p95']:7.2f}" for side in ("javascript", "inputs", "baked"))
    return (
        f"{row['preset']:<18} {row_text(row):<14} {row['parameters']:11,} {' '.join(sides)} {row['most_nats']:8.0e}"
        f" {row['range_nats']:6.1f}" + "".join(f"  MISSED: {what}" for what in missed(row))
    )


HEAD = (
    f"{'':<18} {'':<14} {'':>11} {'JavaScript':^17} {'ort, inputs':^17} {'ort, baked in':^17} {'':>8} {'range,':>6}\n"
    f"{'preset':<18} {'row':<14} {'parameters':>11} {'p50 ms     p95 ms ' * 3}{'nats':>7} {'nats':>6}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help=f"of {', '.join(PRESETS)}; all by default")
    parser.add_argument("--tokens", type=int, default=300, help="timed in each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON; the rows go to stderr as they come")
    parser.add_argument("--write", action="store_true", help="keep the figures and write docs/keyboard.md: all presets")
    options = parser.parse_args()
    try:
        chosen = {name: preset(name) for name in options.presets or PRESETS}
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if options.write and len(chosen) < len(PRESETS):
        print("error: --write keeps figures of all presets; leave the names out", file=sys.stderr)
        sys.exit(2)
    fetch_runtime()
    rows: list[dict[str, Any]] = []
    before, said = load(), sys.stderr if options.json else sys.stdout
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "index.html").write_text("<!doctype html><title>network</title>")
        shutil.copytree(WEB, folder / "web")
        shutil.copyfile(Path(__file__).with_suffix(".mjs"), folder / "network.mjs")
        (folder / "ort").mkdir()
        for name in RUNTIME:
            shutil.copyfile(DIST / name, folder / "ort" / name)
        with files(folder) as address, chromium() as browser:
            version = browser.version
            print(HEAD, file=said, flush=True)
            for name, one in chosen.items():
                parameters = write_model(name, folder / name)
                for words in (None, characters()) if one.characters else (None,):
                    tokens = max(1, options.tokens // WORD_SHARE) if words else options.tokens
                    row = compare(browser, address, name, words, tokens, options.runs) | {"parameters": parameters}
                    rows.append(row | {"missed": missed(row)})
                    print(line(row), file=said, flush=True)
                shutil.rmtree(folder / name)
    runtime = json.loads((NPM / "node_modules" / "onnxruntime-web" / "package.json").read_text("utf-8"))["version"]
    where = about(before, Chromium=version, **{"onnxruntime-web": runtime})
    found = {**where, "runs": options.runs, "tokens": options.tokens, "rows": rows}
    print(about_text(found), file=said)
    if options.json:
        print(json.dumps(found, indent=1))
    if options.write:
        STORED.write(found)


if __name__ == "__main__":
    main()
