"""Search the settings of four methods with equal budgets, and how the step scales; validation text only.

    python benchmarks/recipe_search.py [--part methods scaling] [--device cuda] [--slots 5] [--seconds 580]
                                       [--data-dir FOLDER] [--out benchmarks/recipe_search.json] [--table]

`methods`: fednesterov, fedavg, fedadam and central, eight trials each, all of the same number of tokens, on the #ubuntu
chat by nick (`irc`) with packed lines, read line by line. `scaling`: fednesterov's local step at three cohorts, three
batch sizes and three sizes of a client (tokens a client and round), with three steps each. Every trial has a schedule
over its whole run (cosine to 2 %), seed 1 and the same validation text; test text is not scored. Trials in the file
already are not run again, so an interrupted search goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keyfed.files import write_atomically

TOKENS = {"methods": 2_000_000, "scaling": 1_000_000}  # of every trial
VALID = 40_000
DIVERGED = 1e6  # perplexity: a hundred times worse than a uniform guess of 10,000 words
SHARED: Mapping[str, Any] = {
    "data.name": "irc", "data.batches": "packed", "data.max_tokens": 1000, "model.name": "cifg", "model.dropout": 0.0,
    "train.cohort": 50, "train.schedule": "cosine", "train.final": 0.02, "train.average": 0.9,
    "train.valid_tokens": VALID, "train.test_tokens": 2, "train.baselines": False, "train.checkpoint_every": 100_000,
    "train.rollback": 0.0,
}  # fmt: skip
CLIPPED: Mapping[str, Any] = {"method.optimiser": "sgd", "method.clip": 0.25, "method.batch_size": 5}
STEPS = (5.0, 10.0, 20.0)


def _methods() -> Iterator[dict[str, Any]]:
    """Eight trials a method: step and server setting. The last two went on from the best of the first six."""
    momenta = ((5.0, 0.7), (10.0, 0.7), (20.0, 0.7), (10.0, 0.5), (20.0, 0.5), (10.0, 0.85), (30.0, 0.7), (20.0, 0.85))
    for lr, beta in momenta:
        yield {**CLIPPED, "method.name": "fednesterov", "method.server_lr": 1.0, "method.lr": lr, "method.beta": beta}
    for lr in (10.0, 20.0, 40.0, 80.0, 30.0, 60.0):
        yield {**CLIPPED, "method.name": "fedavg", "method.lr": lr}
    for lr in (0.001, 0.003):
        yield {"method.name": "fedavg", "method.optimiser": "adam", "method.batch_size": 5, "method.lr": lr}
    servers = (
        (10.0, 0.003),
        (10.0, 0.01),
        (10.0, 0.03),
        (1.0, 0.01),
        (1.0, 0.03),
        (20.0, 0.01),
        (20.0, 0.03),
        (10.0, 0.1),
    )
    for lr, server in servers:
        yield {**CLIPPED, "method.name": "fedadam", "method.lr": lr, "method.server_lr": server}
    for lr in (5.0, 10.0, 20.0, 40.0, 15.0, 30.0):
        yield {**CLIPPED, "method.name": "central", "method.batch_size": 20, "method.lr": lr}
    for lr in (0.001, 0.003):
        yield {"method.name": "central", "method.optimiser": "adam", "method.batch_size": 20, "method.lr": lr}


def _scaling() -> Iterator[dict[str, Any]]:
    """Three points of each of three sizes around one middle, three steps each."""
    middle = {**CLIPPED, "method.name": "fednesterov", "method.server_lr": 1.0, "method.beta": 0.7}
    points: list[dict[str, Any]] = [{}]
    points += [{"train.cohort": m} for m in (10, 200)]
    points += [{"method.batch_size": b} for b in (2, 10)]
    points += [{"data.max_tokens": n} for n in (100, 300)]
    for point in points:
        for lr in STEPS:
            yield {**middle, **point, "method.lr": lr}


PARTS = {"methods": _methods, "scaling": _scaling}


def name_of(part: str, trial: Mapping[str, Any]) -> str:
    """A trial's key in the file: its part and all that it sets."""
    return part + " " + " ".join(f"{key.split('.')[1]}={value}" for key, value in sorted(trial.items()))


def _run(part: str, trial: Mapping[str, Any], device: str, data_dir: str | None, work: Path) -> dict[str, Any]:
    """Train one trial; return its validation figures and tokens."""
    import gc

    import torch

    from keyfed.lab.experiment.cell import Workspace, config_of
    from keyfed.run.folder import read_metrics
    from keyfed.run.loop import train
    from keyfed.run.prepare import client_tokens

    settings = {**SHARED, **trial, **({"train.workers": 1} if device == "cpu" else {})}  # slots are processes already
    workspace = Workspace(work, device, data_dir, "bf16" if device == "cuda" else "fp32")
    prepared = workspace.prepared(config_of(settings, 1, workspace))
    sizes = [min(int(n), settings["data.max_tokens"]) for n in client_tokens(prepared)]
    a_round = settings["train.cohort"] * sum(sizes) / len(sizes)
    rounds = max(2, round(TOKENS[part] / a_round))
    settings |= {"train.rounds": rounds, "train.eval_every": max(1, rounds // 10)}
    config = config_of(settings, 1, workspace)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "run"
        result = train(
            config, out, prepared=prepared, budget=int(a_round) if settings["method.name"] == "central" else None
        )
        seen = [(m["round"], m["valid"]["perplexity"]) for m in read_metrics(out) if m.get("valid")]
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return {
        "part": part, "settings": dict(trial), "rounds": rounds, "tokens": result["tokens_trained"],
        "last": seen[-1][1], "best": min(p for _, p in seen), "curve": seen, "seconds": time.monotonic() - began,
    }  # fmt: skip


def _worker(tasks: Any, found: Any, device: str, data_dir: str | None, work: str) -> None:
    """Take trials until there are none."""
    while True:
        try:
            part, trial = tasks.get(timeout=1)
        except queue.Empty:
            return
        try:
            found.put((name_of(part, trial), _run(part, trial, device, data_dir, Path(work))))
        except Exception as e:  # one trial that fails must not end the search; it is said and stays open
            found.put((name_of(part, trial), {"error": f"{type(e).__name__}: {e}"}))


def search(parts: list[str], out: Path, device: str, slots: int, seconds: float, data_dir: str | None) -> None:
    """Run the open trials, `slots` side by side, for at most so many seconds; write each as it ends."""
    done: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {}
    context = multiprocessing.get_context("spawn")
    tasks, found = context.Queue(), context.Queue()
    waiting = [(part, trial) for part in parts for trial in PARTS[part]() if name_of(part, trial) not in done]
    for task in waiting:
        tasks.put(task)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as work:
        crew = [
            context.Process(target=_worker, args=(tasks, found, device, data_dir, work), daemon=True)
            for _ in range(min(slots, len(waiting)))
        ]
        for process in crew:
            process.start()
        left = len(waiting)
        while left and time.monotonic() < end and any(p.is_alive() for p in crew):
            try:
                name, result = found.get(timeout=1)
            except queue.Empty:
                continue
            left -= 1
            if "error" in result:
                print(f"{name}: {result['error']}", flush=True)
                continue
            done[name] = result
            write_atomically(out, (json.dumps(done, indent=1, sort_keys=True) + "\n").encode())
            print(f"{name}: {result['last']:.1f} ({result['tokens']:,} tokens, {result['seconds']:.0f} s)", flush=True)
        for process in crew:
            process.terminate()
            process.join(10)
    print(f"{left} trials left" if left else "all trials are there")


def table(out: Path) -> str:
    """The trials as a Markdown table, best first in each group."""
    done = json.loads(out.read_text("utf-8"))
    lines = ["| part | trial | rounds | tokens | validation perplexity, last (best) |", "|---|---|--:|--:|--:|"]
    key = lambda item: (item[1]["part"], item[1]["settings"]["method.name"], item[1]["last"])  # noqa: E731
    for _, r in sorted(done.items(), key=key):
        said = ", ".join(
            f"{k.split('.')[1]} {v}" for k, v in r["settings"].items() if k not in ("method.name", "method.server_lr")
            or (k == "method.server_lr" and r["settings"]["method.name"] == "fedadam")
        )  # fmt: skip
        method = r["settings"]["method.name"]
        figures = f"{r['last']:.1f} ({r['best']:.1f})" if r["last"] < DIVERGED else "diverged"
        lines.append(f"| {r['part']} | {method}: {said} | {r['rounds']:,} | {r['tokens']:,} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--slots", type=int, default=1, help="trials side by side")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="stop after so many")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/recipe_search.json"))
    parser.add_argument("--table", action="store_true", help="print the table of the file, and train nothing")
    given = parser.parse_args()
    if not given.table:
        search(given.part, given.out, given.device, given.slots, given.seconds, given.data_dir)
    print(table(given.out))


if __name__ == "__main__":
    main()
