"""A population of a million clients: start-up seconds, seconds a round and peak memory, by size of the cohort.

Writes a synthetic corpus (one JSONL row a client), then trains a tiny model on it through the same `train` as every
run. Each measurement is a process of its own: first the start that encodes the corpus, then one run for every cohort,
which finds it encoded. Start-up is counted from before the first import to the first round, by the clock and in seconds
of all processors, which other work on the machine disturbs less.

    python benchmarks/million_clients.py --population 1000000 --folder million --json million.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
WORDS = 3000
LINES, WORDS_A_LINE = 10, 3  # with line ends 40 tokens a client
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def write_population(path: Path, population: int) -> None:
    """Write one row a client, words by a Zipf-like distribution; memory does not grow with the population."""
    import numpy as np

    rng = np.random.default_rng(0)
    words = np.array([f"w{n}" for n in range(WORDS)])
    weights = 1 / np.arange(1, WORDS + 1)
    weights /= weights.sum()
    temporary = path.with_suffix(".part")
    with temporary.open("w", encoding="utf-8") as file:
        for first in range(0, population, 10_000):
            count = min(10_000, population - first)
            drawn = words[rng.choice(WORDS, (count, LINES, WORDS_A_LINE), p=weights)]
            for k, lines in enumerate(drawn.tolist(), first):
                text = "\n".join(map(" ".join, lines))
                file.write(json.dumps({"author": f"author-{k}", "text": text}) + "\n")
    temporary.replace(path)


def measure(data: str, out: str, cohort: int, rounds: int, workers: int) -> dict[str, Any]:
    """Train in this process and return what it cost; `rounds` 0 only prepares."""
    from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig
    from keyfed.run.console import Silent
    from keyfed.run.loop import train

    marks: list[float] = []
    peaks: list[int] = []
    used: list[float] = []

    class Watch(Silent):
        def start(self, what: str, rounds: int, done: int) -> None:
            marks.append(time.perf_counter() - BEGAN)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT)
            times = os.times()
            used.append(times.user + times.system + times.children_user + times.children_system)

        def round(self, record: dict[str, Any]) -> None:
            marks.append(record["seconds"])

    config = Config(
        data=DataConfig(name=data, vocab=1000, window=10),
        model=ModelConfig(name="cifg", embed=8, hidden=12),
        train=TrainConfig(
            rounds=rounds, cohort=cohort, workers=workers, device="cpu", baselines=False, test_tokens=20_000
        ),
    )
    result = train(config, Path(out), listener=Watch())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * UNIT if workers > 1 else 0
    return {
        "cohort": cohort,
        "workers": workers,
        "clients": result["clients"],
        "start_up_seconds": marks[0],
        "start_up_cpu_seconds": used[0],
        "start_up_peak_bytes": peaks[0],
        "round_seconds": marks[1:],
        "parent_peak_bytes": peak,
        "worker_peak_bytes": worker,
        # Pages that processes share are counted in each: no less than what was used.
        "peak_bytes": peak + workers * worker,
        "perplexity": result["test"]["perplexity"],
    }


def in_own_process(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(asked)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measurement failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def main() -> None:
    """Read the command line, measure, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--population", type=int, default=1_000_000, help="clients")
    options.add_argument("--cohorts", default="10,100,1000", help="clients a round, one run for each")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--workers", type=int, default=1, help="worker processes")
    options.add_argument("--folder", type=Path, default=Path("million"), help="corpus, cache and runs; may be removed")
    options.add_argument("--json", type=Path, help="also write the numbers to this file")
    options.add_argument("--measure", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        sys.stdout.write(json.dumps(measure(**json.loads(given.measure))) + "\n")
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ["KEYFED_CACHE"] = str(given.folder / "cache")
    data = given.folder / f"clients-{given.population}.jsonl"
    if not data.exists():
        write_population(data, given.population)
    rows = []
    for name, cohort, rounds in [
        ("first start", 10, 0),
        *(("run", int(c), given.rounds) for c in given.cohorts.split(",")),
    ]:
        out = given.folder / f"run-{time.time_ns()}"
        asked = {"data": str(data), "out": str(out), "cohort": cohort, "rounds": rounds, "workers": given.workers}
        row = {"what": name, **in_own_process(asked)}
        rows.append(row)
        seconds = ", ".join(f"{s:.2f}" for s in row["round_seconds"])
        print(
            f"{name}: cohort {cohort}, start-up {row['start_up_seconds']:.1f} s ({row['start_up_cpu_seconds']:.1f} s "
            f"of all processors), peak {row['peak_bytes'] / 1e6:.0f} MB "
            f"(parent {row['parent_peak_bytes'] / 1e6:.0f}, a worker {row['worker_peak_bytes'] / 1e6:.0f}), "
            f"rounds {seconds or '–'} s",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"population": given.population, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
