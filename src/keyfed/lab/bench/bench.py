"""`keyfed bench`: one FedAvg round by several systems, in the same run, interleaved; medians, ratios and their plot.

Machines are shared: trust the ratios, not the seconds. `python -m keyfed.lab.bench.bench '{"device": "cuda"}'` does the
same where the command line is not installed: it takes the arguments of `bench` as JSON and prints the result as JSON on
stdout, the table on stderr. With a contender's name before the JSON of a `Task` it measures that one round.
"""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from keyfed.errors import ConfigError, KeyfedError, nearest
from keyfed.lab.bench import contenders
from keyfed.lab.bench.contenders import BATCH, CONTENDERS, LR, MOMENTUM, SPECIALS, Contender, Round, Task, movement
from keyfed.model.language_model import PRESETS, Params, preset
from keyfed.reports.figures import LIGHT, Theme, png
from keyfed.run.console import plural
from keyfed.system import peak_memory

Cost = dict[str, Any]
Say = Callable[[str], object]  # gets a line of progress
AGREE = {"fp32": 1e-3, "bf16": 5e-2}  # largest relative difference of the movement from `plain`'s

# Title, key, width and format of the columns. A CPU that others use too gives honest CPU seconds, not wall seconds.
CPU_COLUMNS = (
    ("CPU s", "cpu_seconds", 9, ".2f"), ("wall s", "wall_seconds", 9, ".2f"),
    ("tokens/CPU s", "tokens_per_cpu_second", 14, ",.0f"), ("peak MB", "peak_bytes", 10, ",.0f"),
    ("CPU ×", "cpu_ratio", 8, ".2f"), ("memory ×", "memory_ratio", 10, ".2f"),
)  # fmt: skip
CUDA_COLUMNS = (
    ("wall s", "wall_seconds", 9, ".3f"), ("tokens/s", "tokens_per_second", 12, ",.0f"),
    ("peak MB", "peak_bytes", 10, ",.0f"), ("speed ×", "speedup", 9, ".2f"), ("memory ×", "memory_ratio", 10, ".2f"),
)  # fmt: skip


def bench(
    *,
    model: str = "gru",
    vocab: Sequence[int] = (10_000,),
    clients: Sequence[int] = (10,),
    tokens: int = 8_890,
    epochs: int = 1,
    repeats: int = 3,
    device: str = "cpu",
    only: Sequence[str] = (),
    say: Say | None = None,
) -> dict[str, Any]:
    """Measure every contender `repeats` times, interleaved, for each vocabulary and cohort.

    Args:
      only: contenders to measure; all that the device has if empty.
      say: gets a line for each measurement.
    """
    chosen = check(model, vocab, clients, tokens, epochs, repeats, device, only)
    tables = []
    for words in vocab:
        for cohort in clients:
            task = Task(model, words, cohort, tokens, epochs, device)
            tables.append(measure_table(task, chosen, repeats, say or (lambda line: None)))
    return {
        "model": model, "tokens": tokens, "epochs": epochs, "repeats": repeats, "device": device,
        "settings": {"optimiser": "sgd", "lr": LR, "momentum": MOMENTUM, "clip": None, "batch_size": BATCH,
                     "window": preset(model).window},
        "machine": machine(device),
        "tables": tables,
    }  # fmt: skip


def check(
    model: str, vocab: Sequence[int], clients: Sequence[int], tokens: int, epochs: int, repeats: int, device: str,
    only: Sequence[str],
) -> list[str]:  # fmt: skip
    """Return the contenders' names; raise ConfigError for what cannot be measured."""
    if not has_counterpart(model):
        able = ", ".join(name for name in PRESETS if has_counterpart(name))
        raise ConfigError(f'model "{model}" has no counterpart in torch.nn to compare with. Models: {able}.')
    if device not in ("cpu", "cuda"):
        raise ConfigError(f'device is "{device}"; expected cpu or cuda')
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU here; leave --device out, or install a CUDA build")
    least = {"vocab": 2 * SPECIALS, "clients": 1, "tokens": preset(model).window + 1, "epochs": 1, "repeats": 1}
    sizes = {"vocab": vocab, "clients": clients, "tokens": [tokens], "epochs": [epochs], "repeats": [repeats]}
    for name, numbers in sizes.items():
        for number in numbers:
            if number < least[name]:
                raise ConfigError(f"{name} is {number}; expected at least {least[name]}")
    known = CONTENDERS[device]
    for name in only:
        if name not in known:
            raise ConfigError(
                f'contender "{name}" is not known on {device}{nearest(name, known)}. Contenders: {", ".join(known)}.'
            )
    return [name for name in known if not only or name in only]


def has_counterpart(model: str) -> bool:
    """Whether a preset can be written with nn.Embedding, nn.GRU or nn.LSTM, and nn.Linear."""
    chosen = preset(model)
    return chosen.cell in ("gru", "lstm") and chosen.dense is None and chosen.biases == 2


def measure_table(task: Task, chosen: Sequence[str], repeats: int, say: Say) -> dict[str, Any]:
    """Measure one vocabulary and cohort."""
    known = CONTENDERS[task.device]
    notes = {who: missing(known[who], task) for who in chosen}
    able = [who for who in chosen if notes[who] is None]
    runs: dict[str, list[Cost]]
    if task.device == "cpu":
        runs = {who: [] for who in able}
        for number in range(repeats):
            for who in able:
                if runs[who] and "note" in runs[who][-1]:
                    continue  # it failed
                runs[who].append(measure_apart(who, asdict(task)))
                spent = runs[who][-1].get("cpu_seconds")
                say(f"V = {task.vocab:,}, {plural(task.clients, 'client')}, run {number + 1} of {repeats}: {who} "
                    + (f"{spent:.2f} CPU s" if spent is not None else runs[who][-1]["note"]))  # fmt: skip
    else:
        runs = measure_cuda({who: replace(task, precision=known[who].precision) for who in able}, repeats, say)
    rows: dict[str, Cost] = {}
    for who in chosen:
        note = notes[who] or next((r["note"] for r in runs[who] if "note" in r), None)
        rows[who] = {"note": note} if note else median_row(runs[who], task.predicted)
        rows[who]["precision"] = known[who].precision
    compare(rows, [who for who in chosen if known[who].fedavg])
    return {"vocab": task.vocab, "clients": task.clients, "rows": rows, "runs": runs}


def median_row(runs: Sequence[Cost], predicted: int) -> Cost:
    """Return the median of every number of several runs, with the tokens predicted per second."""
    row: Cost = {}
    for key, value in runs[0].items():
        if isinstance(value, dict):
            row[key] = {name: statistics.median(r[key][name] for r in runs) for name in value}
        else:
            row[key] = statistics.median(r[key] for r in runs)
    row["tokens_per_cpu_second"] = predicted / row["cpu_seconds"]
    if "wall_seconds" in row:
        row["tokens_per_second"] = predicted / row["wall_seconds"]
    return row


def compare(rows: dict[str, Cost], fedavg: Sequence[str]) -> None:
    """Add each row's ratios to `plain`, and whether it did the same; two workers are compared with one as well."""
    base = rows.get("plain", {"note": "not measured"})
    for who, row in rows.items():
        if "note" in row or "note" in base:
            continue
        row["cpu_ratio"] = row["cpu_seconds"] / base["cpu_seconds"]
        if "wall_seconds" in row:
            row["speedup"] = base["wall_seconds"] / row["wall_seconds"]
            row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
        if who in fedavg:
            row["difference"] = abs(row["check"] - base["check"]) / base["check"]
            row["agrees"] = row["difference"] <= AGREE[row["precision"]]
    one, two = rows.get("keyfed", {}), rows.get("keyfed-2", {})
    if "wall_seconds" in one and "wall_seconds" in two:
        two["speedup_over_one_worker"] = one["wall_seconds"] / two["wall_seconds"]


def machine(device: str) -> dict[str, Any]:
    """Say where and when the numbers were measured."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    here: dict[str, Any] = {"cpu": name, "torch": torch.__version__, "threads": 1}
    if device == "cuda":
        # What "fp32" means in the products: torch's own defaults, in which cuDNN may use TF32 for the recurrence.
        backends: Any = torch.backends
        fp32 = {"matmul": backends.cuda.matmul.fp32_precision, "rnn": backends.cudnn.rnn.fp32_precision}
        here |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "fp32": fp32}
    return {**here, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def bench_text(result: dict[str, Any]) -> str:
    """Write a benchmark for people."""
    here = result["machine"]
    where = f"{here['gpu']}, one process" if "gpu" in here else f"{here['cpu']}, one thread"
    head = (
        f"one FedAvg round of {result['model']}, {result['tokens']:,} tokens a client, E = {result['epochs']}, "
        f"B = {BATCH}, SGD {LR} with momentum {MOMENTUM}\n"
        f"median of {result['repeats']}, interleaved; {where}, torch {here['torch']}, {here['date']}"
    )
    return "\n\n".join([head, *(table_text(table, result["device"]) for table in result["tables"])])


def table_text(table: dict[str, Any], device: str) -> str:
    """Write one vocabulary and cohort."""
    lines = [f"V = {table['vocab']:,}, {plural(table['clients'], 'client')}"]
    cells = CPU_COLUMNS if device == "cpu" else CUDA_COLUMNS
    lines.append(f"{'':<18}" + "".join(f"{title:>{width}}" for title, _, width, _ in cells) + "   as plain")
    for who, row in table["rows"].items():
        if "note" in row:
            lines.append(f"{who:<18}  {row['note']}")
            continue
        shown = {**row, "peak_bytes": row["peak_bytes"] / 1e6 if "peak_bytes" in row else None}
        text = [f"{shown[key]:>{width}{form}}" if shown.get(key) is not None else f"{'–':>{width}}"
                for _, key, width, form in cells]  # fmt: skip
        lines.append(f"{who:<18}{''.join(text)}   {agreement(who, row)}".rstrip())
    return "\n".join(lines + remarks(table["rows"]))


def agreement(who: str, row: Cost) -> str:
    """Say whether a contender did what `plain` did."""
    if who == "plain" or "agrees" not in row:
        return ""
    return "yes" if row["agrees"] else f"NO: moved {row['difference']:.1e} differently"


def remarks(rows: dict[str, Cost]) -> list[str]:
    """Return what the columns do not say: two workers against one, and what the floor is made of."""
    lines = []
    if "speedup_over_one_worker" in rows.get("keyfed-2", {}):
        gain = rows["keyfed-2"]["speedup_over_one_worker"]
        lines.append(f"two workers: {gain:.2f} × the wall-clock throughput of one")
    floor = rows.get("floor", {})
    if "parts" in floor:
        products, others = (
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in floor[which].items())
            for which in ("parts", "beside")
        )
        lines.append(
            f"floor: {floor['gflops']:,.0f} GFLOP of matrix products at {floor['gflops_rate']:.0f} GFLOP/s "
            f"({products}); beside it, not in it: {others}"
        )
    return lines


HEIGHT, MARGIN, BAR = 4.4, 1.4, 0.46  # inches: height of the figure, margin of a panel, width of a bar with its label


def measured(table: dict[str, Any], device: str) -> dict[str, float]:
    """Return the speed of those who ran: tokens per second of a GPU's clock, tokens per second of CPU time."""
    key = "tokens_per_cpu_second" if device == "cpu" else "tokens_per_second"
    return {who: float(row[key]) for who, row in table["rows"].items() if key in row}


def draw_vocabulary(axes: Any, theme: Theme, tables: list[dict[str, Any]], device: str) -> None:
    """Draw one vocabulary: a group of bars for every contender, a bar for every cohort, its value above."""
    speeds = [measured(table, device) for table in tables]
    names = list(dict.fromkeys(who for table in speeds for who in table))
    width = 0.8 / len(tables)
    for number, (table, speed) in enumerate(zip(tables, speeds, strict=True)):
        places = [names.index(who) + (number - (len(tables) - 1) / 2) * width for who in speed]
        label = f"{table['clients']:,} clients"
        bars = axes.bar(places, list(speed.values()), 0.92 * width, color=theme.colours[number % 7], label=label)
        axes.bar_label(bars, [short(v) for v in speed.values()], padding=2, fontsize=7.5)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_title(f"V = {tables[0]['vocab']:,}")
    axes.set_ylabel("tokens per CPU second" if device == "cpu" else "tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)


def short(number: float) -> str:
    """Write a speed in three figures.

    Example:
      >>> [short(n) for n in (0, 87.2, 4_210, 23_456, 117_000, 1_620_000)]
      ['0', '87', '4.21k', '23.5k', '117k', '1.62M']
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def plot_bench(result: dict[str, Any], file: Path) -> None:
    """Write the plot of a benchmark as PNG."""
    check_file(file)
    vocabularies = list(dict.fromkeys(table["vocab"] for table in result["tables"]))

    def paint(figure: Any, theme: Theme) -> None:
        for number, vocab in enumerate(vocabularies):
            axes = figure.add_subplot(1, len(vocabularies), number + 1)
            draw_vocabulary(axes, theme, [t for t in result["tables"] if t["vocab"] == vocab], result["device"])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))

    bars = sum(max(4, len(measured(table, result["device"]))) for table in result["tables"])
    file.write_bytes(png(paint, LIGHT, (MARGIN * len(vocabularies) + BAR * bars, HEIGHT)))


def check_file(file: Path) -> None:
    """Raise ConfigError unless a plot can be written there; called before minutes are spent measuring."""
    if file.suffix.lower() != ".png":
        raise ConfigError(f"{file} is no name of a plot; expected one that ends in .png")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: folder {file.parent} does not exist")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ConfigError(f"{file} cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib, which is not installed; leave --plot out")


# Measuring: on a CPU each contender in a process of its own, on a GPU all of them in this one


def missing(contender: Contender, task: Task) -> str | None:
    """Say why a contender cannot run here, or None."""
    if contender.needs is not None:
        wanted = [contender.needs, *(["ray"] if contender.needs == "flwr" else [])]
        if any(importlib.util.find_spec(name) is None for name in wanted):
            return "not installed"
    needed = task.clients * sum(4 * p.numel() for p in task.params.values())
    if contender.hoards and needed > 0.5 * free_bytes(task.device):
        return f"left out: keeps {needed / 1e9:.1f} GB of client weights, more than half of the free memory"
    return None


def free_bytes(device: str) -> float:
    """Memory that is free on a device; unlimited where the system does not say."""
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
    # Not ru_maxrss: a process inherits that from its parent.
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
        return contenders.measure_floor(task)
    meter = Meter()
    if who == "flower":
        result = contenders.flower_round(task, meter)
    else:
        opener = CONTENDERS["cpu"][who].open
        assert opener is not None
        with opener(task) as round:
            round(task.warm_up)
            with meter:
                result = round(task.cohort)
    return {**meter.cost, "check": movement(task, result)}


def measure_apart(who: str, settings: dict[str, Any]) -> Cost:
    """Measure one round in a process of its own; one that is not ours may fail, which is then its row's note."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "keyfed.lab.bench.bench", who, json.dumps(settings)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode == 0:
        return dict(json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))))
    if CONTENDERS["cpu"][who].needs is None:
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
    opener = CONTENDERS["cuda"][who].open
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


def main(arguments: Sequence[str]) -> int:
    """Run `bench` with arguments given as JSON; result as JSON on stdout, the table on stderr."""
    *who, text = arguments or ["{}"]
    if who:
        sys.stdout.write("\n" + json.dumps(measure_here(who[0], Task(**json.loads(text)))) + "\n")
        return 0
    try:
        result = bench(**parse(text), say=lambda line: sys.stderr.write(line + "\n"))
    except KeyfedError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stderr.write(bench_text(result) + "\n")
    return 0


def parse(text: str) -> dict[str, Any]:
    """Read arguments of `bench` from JSON: the names and kinds it has, or ConfigError."""
    try:
        settings = dict(json.loads(text))
    except (ValueError, TypeError) as e:
        raise ConfigError(f"the argument is no JSON object: {e}") from None
    known = inspect.signature(bench).parameters
    for name, value in settings.items():
        if name not in known or name == "say":
            raise ConfigError(f'"{name}" is no argument of the benchmark{nearest(name, known)}')
        kind = type(known[name].default)
        if not isinstance(value, list if kind is tuple else kind):
            raise ConfigError(f"{name} is {json.dumps(value)}; expected {'a list' if kind is tuple else kind.__name__}")
        each = str if name == "only" else int
        if kind is tuple and not all(type(v) is each for v in value):
            raise ConfigError(f"{name} is {json.dumps(value)}; expected a list of {each.__name__}")
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
