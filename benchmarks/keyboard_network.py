"""The page's network next to onnxruntime-web, in one page of Chromium: milliseconds a token, and how far they differ.

    python benchmarks/keyboard_network.py [PRESET …] [--tokens 300] [--runs 3] [--json]

Every preset has 10,000 words (or 90 characters), random weights in eight bits, and reads the same tokens from a zero
state, one at a time. The two take turns, token by token, on the main thread; both are warmed up first. A word of a
character model is a beam of twelve rows: its row "12 rows" is one step of it. Wanted are the CIFG not slower than
onnxruntime-web and the others at most 15 ms a token (medians), and at most 1e-4 nats between the two. onnxruntime-web
is fetched by npm from the lock file in benchmarks/onnxruntime, for this comparison only.
"""

from __future__ import annotations

import argparse
import json
import os
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

from keyfed.keyboard.graph import state_widths, step_graph
from keyfed.keyboard.serve import WEB
from keyfed.model.language_model import PRESETS, build_spec, init_params, parameter_count, quantise

WORDS, CHARACTERS = 10_000, 90
NPM = Path(__file__).parent / "onnxruntime"
DIST = NPM / "node_modules" / "onnxruntime-web" / "dist"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")

COMPARE = """async ({ name, tokens, rows, warm }) => {
  const [{ Network }, { readTensors, widened }, ort] = await Promise.all([
    import("/web/decoder/network.mjs"), import("/web/decoder/safetensors.mjs"), import("/ort/ort.wasm.min.mjs")]);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = "/ort/";
  const bytes = async (file) => new Uint8Array(await (await fetch(`/${name}/${file}`)).arrayBuffer());
  const manifest = await (await fetch(`/${name}/manifest.json`)).json();
  const stored = readTensors(await bytes("weights.safetensors"));
  const network = new Network(manifest, stored);
  const session = await ort.InferenceSession.create(await bytes("model.onnx"), { executionProviders: ["wasm"] });
  const weights = {};
  for (const [key, { shape, data }] of widened(stored)) weights[key] = new ort.Tensor("float32", data, shape);
  const start = () => manifest.states.map(({ width }) => new Float32Array(rows * width));
  const theirs = async (token, states) => {
    const feeds = { ...weights, token: new ort.Tensor("int32", new Int32Array(rows).fill(token), [rows]) };
    manifest.states.forEach(({ name, width }, i) => {
      feeds[name] = new ort.Tensor("float32", states[i], [rows, width]);
    });
    const out = await session.run(feeds);
    return { logp: out.logp.data, states: manifest.states.map(({ name }) => out[`${name}_next`].data) };
  };
  const times = { javascript: [], onnxruntime: [] };
  let own = start(), other = start(), most = 0;
  for (const [n, token] of tokens.entries()) {
    if (n === warm) [own, other] = [start(), start()];
    const began = performance.now();
    const mine = network.step(new Int32Array(rows).fill(token), own);
    const between = performance.now();
    const found = await theirs(token, other);
    const ended = performance.now();
    if (n >= warm) {
      times.javascript.push(between - began);
      times.onnxruntime.push(ended - between);
      for (let i = 0; i < found.logp.length; i++) most = Math.max(most, Math.abs(found.logp[i] - mine.logp[i]));
    }
    [own, other] = [mine.states, found.states];
  }
  return { times, most };
}"""


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


def write_model(name: str, folder: Path) -> int:
    """Write a preset's graph and random weights as an export has them; return the number of its parameters."""
    spec = build_spec(name, CHARACTERS if PRESETS[name].characters else WORDS)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(step_graph(spec).SerializeToString())
    weights = quantise({key: value.numpy() for key, value in init_params(spec, 1).items()})
    (folder / "weights.safetensors").write_bytes(save(weights))
    states = [{"name": state, "width": width} for state, width in state_widths(spec).items()]
    (folder / "manifest.json").write_text(json.dumps({"model": asdict(spec), "states": states, "reading": "stream"}))
    return parameter_count(spec)


class _Files(SimpleHTTPRequestHandler):
    def guess_type(self, path: Any) -> str:
        """JavaScript and WebAssembly, whatever this machine takes `.mjs` for."""
        own = {".mjs": "text/javascript", ".wasm": "application/wasm"}
        return own.get(Path(path).suffix) or super().guess_type(path)

    def log_message(self, *given: Any) -> None:
        """Say nothing."""


@contextmanager
def files(folder: Path) -> Iterator[str]:
    """Serve a folder without any policy as long as the block runs; give its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def compare(browser: Any, address: str, name: str, tokens: int, rows: int, runs: int) -> dict[str, Any]:
    """Read tokens with both, in pages of their own run; return the quantiles of all runs."""
    warm = max(2, tokens // 10)
    vocab = CHARACTERS if PRESETS[name].characters else WORDS
    times: dict[str, list[float]] = {"javascript": [], "onnxruntime": []}
    most = 0.0
    for run in range(runs):
        drawn = np.random.default_rng(run).integers(2, vocab, warm + tokens).tolist()
        page = browser.new_page()
        page.goto(address)
        found = page.evaluate(COMPARE, {"name": name, "tokens": drawn, "rows": rows, "warm": warm})
        page.close()
        most = max(most, found["most"])
        for side, values in found["times"].items():
            times[side] += values
    return {"preset": name, "rows": rows, "most_nats": most, **{side: quantiles(of) for side, of in times.items()}}


MOST_MS, MOST_NATS = 15.0, 1e-4


def missed(row: dict[str, Any]) -> list[str]:
    """What of the bars a row misses."""
    most = row["onnxruntime"]["p50"] if row["preset"] == "cifg" else MOST_MS
    found = [f"more than {most:.2f} ms"] if row["javascript"]["p50"] > most else []
    return found + ([f"more than {MOST_NATS:.0e} nats"] if row["most_nats"] > MOST_NATS else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help=f"of {', '.join(PRESETS)}; all by default")
    parser.add_argument("--tokens", type=int, default=300, help="timed in each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    fetch_runtime()
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "index.html").write_text("<!doctype html><title>network</title>")
        shutil.copytree(WEB, folder / "web")
        (folder / "ort").mkdir()
        for name in RUNTIME:
            shutil.copyfile(DIST / name, folder / "ort" / name)
        with files(folder) as address, chromium() as browser:
            version = browser.version
            for name in options.presets or PRESETS:
                parameters = write_model(name, folder / name)
                for rows in (1, 12) if PRESETS[name].characters else (1,):
                    row = compare(browser, address, name, options.tokens, rows, options.runs)
                    found.append({**row, "parameters": parameters})
                shutil.rmtree(folder / name)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if options.json:
        rows = [{**row, "missed": missed(row)} for row in found]
        print(json.dumps({"chromium": version, "load_per_core": load, "runs": options.runs, "rows": rows}, indent=1))
        return
    print(f"Chromium {version}; {options.runs} runs of {options.tokens} tokens; load {load:.1f} per core")
    print("preset             rows  parameters   JavaScript p50    p95   onnxruntime p50    p95   largest difference")
    for row in found:
        own, other = row["javascript"], row["onnxruntime"]
        print(
            f"{row['preset']:<18} {row['rows']:4d} {row['parameters']:11,} {own['p50']:16.2f} {own['p95']:6.2f}"
            f" {other['p50']:17.2f} {other['p95']:6.2f} {row['most_nats']:15.1e} nats"
            + "".join(f"  MISSED: {what}" for what in missed(row))
        )


if __name__ == "__main__":
    main()
