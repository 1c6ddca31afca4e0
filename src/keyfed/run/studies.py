"""Studies: the papers' tables and figures run again, cell by cell, as long as one has minutes.

`python -m keyfed.run.studies NAME --scale standard --minutes 20 --device cuda --data-dir DIR --results DIR` needs
torch, numpy and safetensors only and writes one JSON file a cell; `keyfed study` does the same and writes the page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, DataError, DownloadError, KeyfedError, RunError
from keyfed.files import write_atomically
from keyfed.run.studies_cells import Bench, run_cell
from keyfed.run.studies_plan import SCALES, Cell, Settings, Study, cells_of, load_study, study_folder, with_settings
from keyfed.run.train import Listener, Silent


class TimeIsUp(KeyboardInterrupt):
    """The minutes are spent: a run ends as at Ctrl-C, with its checkpoint written."""


class Clock:
    """Passes a run's progress on and ends it when the time is up; says little: one line a cell and every tenth round.

    Args:
      until: `time.monotonic()` at which to end; None for never.
    """

    def __init__(self, listener: Listener, until: float | None) -> None:
        self._listener, self._until = listener, until

    def say(self, line: str) -> None:
        """Pass a line on."""
        self._listener.say(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Pass a beginning on."""
        self._listener.start(what, rounds, done)

    def round(self, record: dict[str, Any]) -> None:
        """Pass a round on, unless it was the last there was time for."""
        self._listener.round(record)
        self.check()

    def check(self) -> None:
        """Raise if the time is up."""
        if self._until is not None and time.monotonic() >= self._until:
            raise TimeIsUp


@dataclass(frozen=True, slots=True)
class Progress:
    """What a call of `run_study` did.

    Attributes:
      done: cells finished now; `before`: finished earlier; `open`: still to do; `failed`: title and reason.
    """

    study: str
    scale: str
    done: tuple[str, ...]
    before: int
    open: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "study": self.study, "scale": self.scale, "done": list(self.done), "before": self.before,
            "open": list(self.open), "failed": dict(self.failed), "seconds": self.seconds,
        }  # fmt: skip


def data_folder(results: Path, study: str) -> Path:
    """Where a study's cells lie."""
    return results / "data" / study


def finished(results: Path, study: str) -> dict[str, dict[str, Any]]:
    """Return the results of a study by cell id, in the order of their file names; then those of other studies.

    An id says what is computed: a cell that another study has finished need not be run again.
    """
    own = data_folder(results, study)
    found: dict[str, dict[str, Any]] = {}
    for path in [*sorted(own.glob("*.json")), *sorted(data_folder(results, "").glob("*/*.json"))]:
        try:
            record = json.loads(path.read_text("utf-8"))
            found.setdefault(str(record["id"]), dict(record))
        except (ValueError, KeyError, TypeError) as e:
            raise RunError(f"{path} is damaged ({e}); delete it, and the cell is run again") from None
    return found


def run_study(
    study: Study,
    scale: str,
    *,
    results: Path,
    bench: Bench,
    minutes: float | None = None,
    seeds: Sequence[int] | None = None,
    override: Settings | None = None,
    most: int | None = None,
    listener: Listener | None = None,
) -> Progress:
    """Work on a study's open cells; finished ones are read, interrupted ones go on where their checkpoint is.

    Args:
      results: folder whose data/STUDY holds the cells' results.
      minutes: how long to work; the cell that runs then is left as at Ctrl-C.
      seeds: in place of the scale's.
      override: settings for every cell, which makes them other cells; for tests.
      most: cells to finish at most.
    """
    listen = listener or Silent()
    began = time.monotonic()
    clock = Clock(listen, None if minutes is None else began + 60 * minutes)
    cells = [cell for cell in cells_of(study, scale, seeds) if not cell.absent]
    if override:
        cells = [with_settings(cell, override) for cell in cells]
    there = finished(results, study.name)
    todo = [cell for cell in cells if cell.id not in there]
    folder = data_folder(results, study.name)
    done: list[Cell] = []
    failed: list[tuple[str, str]] = []
    listen.say(f"{study.name} at scale {scale}: {len(cells)} cells, {len(cells) - len(todo)} finished")
    try:
        for number, cell in enumerate(todo, 1):
            if most is not None and len(done) >= most:
                break
            clock.check()
            listen.say(f"cell {number} of {len(todo)}: {cell.title}")
            try:
                record = run_cell(cell, bench, study.targets, clock, study.curves)
            except (ConfigError, DataError, DownloadError, RunError) as e:
                listen.say(f"failed: {e}")
                failed.append((cell.title, str(e)))
                continue
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
            write_atomically(folder / cell.file, (compact(text) + "\n").encode())
            done.append(cell)
            shown = {key: value for key, value in record["measures"].items() if isinstance(value, float)}
            listen.say("  ".join(f"{key} {value:.4g}" for key, value in list(shown.items())[:4]))
    except TimeIsUp:
        listen.say(f"{minutes:g} minutes are spent; the same call goes on with what is open")
    finally:
        ids = {cell.id for cell in done}
        left = [cell.title for cell in todo if cell.id not in ids]
    return Progress(
        study.name, scale, tuple(c.title for c in done), len(cells) - len(todo), tuple(left), tuple(failed),
        time.monotonic() - began,
    )  # fmt: skip


def compact(text: str) -> str:
    """Put lists of numbers on one line: a point of a curve is one thing."""
    return re.sub(r"\[\s*([^\[\]{}\"]*?)\s*\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)


class Lines:
    """Follows on stderr in plain lines: no library is needed for that."""

    def __init__(self, write: Callable[[str], Any] = sys.stderr.write) -> None:
        self._write, self._rounds = write, 0

    def say(self, line: str) -> None:
        """Write a line."""
        self._write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def start(self, what: str, rounds: int, done: int) -> None:
        """Write what begins."""
        self._rounds = rounds
        self.say(f"{what}: {rounds} rounds" + (f", {done} done" if done else ""))

    def round(self, record: dict[str, Any]) -> None:
        """Write every tenth round."""
        number = record["round"]
        if number % max(1, self._rounds // 10) == 0 or number == 1:
            valid = (record.get("valid") or {}).get("perplexity")
            shown = "" if valid is None else f", valid perplexity {valid:.1f}"
            self.say(f"  round {number}: train {record['loss']:.3f} nats{shown}, {record['seconds']:.2f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line where nothing but torch is installed."""
    parser = argparse.ArgumentParser(prog="python -m keyfed.run.studies", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--scale", default="standard", choices=SCALES)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seeds", help="3 (seeds 1 to 3) or 1,4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="on a GPU; bf16 by default")
    parser.add_argument("--data-dir")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--studies", type=Path, default=None)
    given = parser.parse_args(arguments)
    from keyfed.run.compare_plan import parse_seeds

    try:
        study = load_study(given.name, given.studies or study_folder())
        bench = Bench(given.work, given.device, given.data_dir, given.precision)
        progress = run_study(
            study, given.scale, results=given.results, bench=bench, minutes=given.minutes,
            seeds=None if given.seeds is None else parse_seeds(given.seeds), listener=Lines(),
        )  # fmt: skip
    except KeyfedError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(json.dumps(progress.as_dict(), indent=1) + "\n")
    return 1 if progress.failed else 0


if __name__ == "__main__":
    sys.exit(main())
