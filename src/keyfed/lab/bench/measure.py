"""How `keyfed bench` measures: on a CPU each contender in a process of its own, on a GPU all of them in this one.

`python -m keyfed.lab.bench.measure '{"who": "plain", …}'` is such a process: it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keyfed.errors import ConfigError, KeyfedError
from keyfed.lab.bench.contenders import Open, Round, Task, central, keyfed, movement, plain
from keyfed.lab.bench.floor import measure_floor
from keyfed.model.language_model import Params
from keyfed.system import peak_memory

Cost = dict[str, Any]
Say = Callable[[str], None]  # is told how far it is


class Contender(NamedTuple):
    """One row of the table.

    Attributes:
      open: makes it ready; None for those that are measured their own way.
      fedavg: does what `plain` does, so that the results must agree.
      needs: package it takes, if it is not ours.
      hoards: keeps every client's weights until the end of the round.
    """

    open: Open | None
    precision: str = "fp32"
    fedavg: bool = True
    needs: str | None = None
    hoards: bool = False


def _plain_graph(task: Task) -> Any:
    from keyfed.lab.bench.contenders import plain_graph

    return plain_graph(task)


def _pfl(task: Task) -> Any:
    from keyfed.lab.bench.contenders import pfl

    return pfl(task)


ON_CPU: dict[str, Contender] = {
    "plain": Contender(plain, hoards=True),
    "keyfed": Contender(keyfed),
    "keyfed-2": Contender(partial(keyfed, workers=2)),
    "pfl": Contender(_pfl, needs="pfl"),
    "flower": Contender(None, needs="flwr", hoards=True),
    "central": Contender(central, fedavg=False),
    "floor": Contender(None, fedavg=False),
}
ON_CUDA: dict[str, Contender] = {
    "plain": Contender(plain, hoards=True),
    "plain-graph": Contender(_plain_graph, hoards=True),
    "plain-graph-bf16": Contender(_plain_graph, "bf16", hoards=True),
    "keyfed": Contender(keyfed),
    "keyfed-bf16": Contender(keyfed, "bf16"),
    "central": Contender(central, fedavg=False),
    "central-bf16": Contender(central, "bf16", fedavg=False),
}


def contenders_of(device: str) -> dict[str, Contender]:
    """Return the contenders of a device by name."""
    return ON_CPU if device == "cpu" else ON_CUDA


def missing(contender: Contender, task: Task) -> str | None:
    """Say why a contender cannot run here, or None."""
    if contender.needs is not None:
        wanted = [contender.needs, *(["ray"] if contender.needs == "flwr" else [])]
        if any(find_spec(name) is None for name in wanted):
            return "not installed"
    needed = task.clients * sum(4 * p.numel() for p in task.params.values())
    if contender.hoards and needed > 0.5 * free_bytes(task.device):
        return f"left out: keeps {needed / 1e9:.1f} GB of client weights, more than half of the free memory"
    return None


def free_bytes(device: str) -> float:
    """Memory that is free on a device; unlimited where nobody says."""
    if device != "cpu":
        return float(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), float("inf"))


def descendants(root: int) -> list[int]:
    """Process ids of all children, grandchildren, … of a process (Linux; none elsewhere)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
    found, level = [], [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def peak_of(pid: int) -> int:
    """Largest resident memory of a process so far, in bytes; that of this process alone where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        if pid != os.getpid() or Path("/proc/self").exists():
            return 0
        return peak_memory()
    # Not ru_maxrss: a process inherits that from whoever started it.
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


class Meter:
    """CPU and wall seconds of a block of code and the peak memory up to its end, over this process and its children.

    Memory that processes share is counted in each of them.
    """

    def __init__(self) -> None:
        self.cost: Cost = {}

    def __enter__(self) -> Meter:
        self._children = {pid: cpu_of(pid) for pid in descendants(os.getpid())}
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        spent, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        children = descendants(os.getpid())
        spent += sum(cpu_of(pid) - self._children.get(pid, 0.0) for pid in children)
        peak = sum(peak_of(pid) for pid in [os.getpid(), *children])
        self.cost = {"cpu_seconds": spent, "wall_seconds": wall, "peak_bytes": peak, "processes": 1 + len(children)}


def measure_here(who: str, task: Task) -> Cost:
    """Measure one round in this process, on one thread."""
    torch.set_num_threads(1)
    if who == "floor":
        return dict(measure_floor(task))
    meter = Meter()
    if who == "flower":
        from keyfed.lab.bench.contenders import flower_round

        result = flower_round(task, meter)
    else:
        opener = ON_CPU[who].open
        assert opener is not None
        with opener(task) as round:
            round(task.warm_up)
            with meter:
                result = round(task.cohort)
    return {**meter.cost, "check": movement(task, result)}


def measure_apart(who: str, asked: dict[str, Any]) -> Cost:
    """Measure one round in a process of its own; one that is not ours may fail, which is then its row's note."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "keyfed.lab.bench.measure", json.dumps({"who": who, **asked})],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode == 0:
        return dict(json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))))
    if ON_CPU[who].needs is None:
        raise RuntimeError(f'benchmark process "{who}" failed:\n{done.stderr}')
    return {"note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}


def measure_cuda(tasks: dict[str, Task], repeats: int, say: Say, warm_ups: int = 2) -> dict[str, list[Cost]]:
    """Measure rounds on a GPU, interleaved in this process, every contender made ready and warmed up before.

    Memory is the peak of what a contender allocates while it is made ready and warmed up, others' not counted: a graph
    that is replayed allocates nothing any more. One that cannot be made ready has that as its row's note.
    """
    runs: dict[str, list[Cost]] = {who: [] for who in tasks}
    with ExitStack() as stack:
        rounds: dict[str, Round] = {}
        fixed: dict[str, Cost] = {}
        for who, task in tasks.items():
            began = time.perf_counter()
            try:
                rounds[who], fixed[who] = make_ready(who, task, stack, warm_ups)
            except Exception as e:
                if not isinstance(e, KeyfedError):
                    traceback.print_exc()  # a defect, but minutes of a GPU are not to be lost for it
                runs[who] = [{"note": str(e) if isinstance(e, KeyfedError) else f"failed: {type(e).__name__}"}]
            say(f"{who}: ready after {time.perf_counter() - began:.1f} s")
        for _ in range(repeats):
            for who, round in rounds.items():
                torch.cuda.synchronize()
                wall, spent = time.perf_counter(), time.process_time()
                round(tasks[who].cohort)
                torch.cuda.synchronize()
                wall, spent = time.perf_counter() - wall, time.process_time() - spent
                runs[who].append({"wall_seconds": wall, "cpu_seconds": spent, **fixed[who]})
    return runs


def make_ready(who: str, task: Task, stack: ExitStack, warm_ups: int) -> tuple[Round, Cost]:
    """Open a contender on a GPU and run it `warm_ups` times; return its round, its peak memory and what it computed."""
    opener = ON_CUDA[who].open
    assert opener is not None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    round = stack.enter_context(opener(task))
    result: Params = {}
    for _ in range(warm_ups):
        result = round(task.cohort)
    peak = torch.cuda.max_memory_allocated() - before
    return round, {"peak_bytes": peak, "check": movement(task, result)}


def main(arguments: Sequence[str]) -> None:
    """Measure what the JSON argument says and print what it cost."""
    asked = json.loads(arguments[0])
    who = asked.pop("who")
    if who not in ON_CPU:
        raise ConfigError(f'contender "{who}" is not known')
    sys.stdout.write("\n" + json.dumps(measure_here(who, Task(**asked))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
