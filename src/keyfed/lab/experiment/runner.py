"""Studies: the papers' tables and figures run again, cell by cell, as long as one has minutes.

`python -m keyfed.lab.experiment.runner NAME --scale standard --minutes 20 --device cuda --data-dir DIR --results DIR`
needs torch, numpy and safetensors only and writes one JSON file a cell; `keyfed study` does the same and writes the
page.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, DataError, DownloadError, FolderInUse, KeyfedError, RunError
from keyfed.files import locked
from keyfed.lab.experiment.cell import Workspace, run_cell
from keyfed.lab.experiment.compare_plan import parse_seeds
from keyfed.lab.experiment.grid import SCALES, Cell, Settings, Study, cells_of, load_study, study_folder, with_settings
from keyfed.lab.experiment.store import Store, make_folder, refuse_file
from keyfed.run.console import plural
from keyfed.run.loop import Listener, Silent

RESUMED = ("train", "code-faithful")  # runners whose cells go on from a checkpoint
MOMENT = 1.0  # seconds between two looks at what another process does


class TimeIsUp(KeyboardInterrupt):
    """The minutes are spent: a run ends as at Ctrl-C, with its checkpoint written."""


class DeadlineListener:
    """Passes a run's progress on and ends it when the time is up.

    After the last round nothing is stopped: what is left, the test, takes less than the rounds that would be lost
    where there is no checkpoint.

    Args:
      until: `time.monotonic()` at which to end; None for never.
    """

    def __init__(self, listener: Listener, until: float | None) -> None:
        self._listener, self._until, self._rounds, self._why = listener, until, 0, ""

    def say(self, line: str) -> None:
        """Pass a line on."""
        self._listener.say(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Pass a beginning on."""
        self._rounds = rounds
        self._listener.start(what, rounds, done)

    def round(self, record: dict[str, Any]) -> None:
        """Pass a round on; raise if another one is to come and the time is up."""
        self._listener.round(record)
        if record["round"] < self._rounds:
            self.check()

    def check(self) -> None:
        """Raise if the time is up."""
        if self._until is not None and time.monotonic() >= self._until:
            raise TimeIsUp

    def wait(self, why: str) -> None:
        """Say why, unless that was said last, and let a moment pass; raise if the time is up."""
        self.check()
        if why != self._why:
            self._why = why
            self.say(why)
        time.sleep(MOMENT)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a call of `run_study` did.

    Attributes:
      done: cells finished now; `before`: finished earlier, or by another process meanwhile; `open`: still to do, of
        which another process works on those that were `skipped`; `failed`: title and reason.
    """

    study: str
    scale: str
    done: tuple[str, ...]
    before: int
    open: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        lists = {key: list(getattr(self, key)) for key in ("done", "open", "skipped")}
        return {**asdict(self), **lists, "failed": dict(self.failed)}


@contextmanager
def held(work: Path, cell: Cell) -> Iterator[None]:
    """Keep other processes of this work folder from a cell.

    The file of the lock is removed where the cell ends well; a process that has it open then finds the result.

    Raises:
      FolderInUse: another process works on it.
    """
    path = work / "locks" / f"{cell.id}.lock"
    stack = ExitStack()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(path))
    except BlockingIOError:
        raise FolderInUse(f"another process works on {cell.title}") from None
    except OSError as e:
        raise RunError(f"--work {work}: {e.strerror or e}; choose a folder that can be written") from None
    with stack:
        yield
        with suppress(PermissionError):  # Windows removes no file that is open
            path.unlink(missing_ok=True)


def run_study(
    study: Study,
    scale: str,
    *,
    store: Store,
    workspace: Workspace,
    minutes: float | None = None,
    seeds: Sequence[int] | None = None,
    override: Settings | None = None,
    most: int | None = None,
    listener: Listener | None = None,
) -> Progress:
    """Work on a study's open cells; finished ones are read, interrupted ones go on where their checkpoint is.

    Args:
      store: the results, read and written.
      minutes: how long to work; the cell that runs then is left as at Ctrl-C.
      seeds: in place of the scale's.
      override: settings for every cell, which makes them other cells; for tests.
      most: cells to finish at most.
    """
    if minutes is not None and not (math.isfinite(minutes) and minutes >= 0):
        raise ConfigError(f"--minutes is {minutes:g}; expected a number of minutes, 0 or more")
    refuse_file(workspace.work, "--work")
    listen = listener or Silent()
    began = time.monotonic()
    clock = DeadlineListener(listen, None if minutes is None else began + 60 * minutes)
    cells = [cell for cell in cells_of(study, scale, seeds) if not cell.absent]
    if override:
        cells = [with_settings(cell, override) for cell in cells]
    make_folder(store.results, store.folder(study.name))
    there = store.of(study)
    todo = [cell for cell in cells if cell.id not in there]
    done: list[str] = []
    closed: set[str] = set()
    skipped: list[Cell] = []
    failed: list[tuple[str, str]] = []
    listen.say(f"{study.name} at scale {scale}: {plural(len(cells), 'cell')}, {len(cells) - len(todo)} finished")
    try:
        for number, cell in enumerate(todo, 1):
            if most is not None and len(done) >= most:
                break
            clock.check()
            listen.say(f"cell {number} of {len(todo)}: {cell.title}")
            try:
                record = _finish(cell, study, store, workspace, clock)
            except FolderInUse:
                listen.say("skipped: another process works on it")
                skipped.append(cell)
                continue
            except (ConfigError, DataError, DownloadError, RunError) as e:
                listen.say(f"failed: {e}")
                failed.append((cell.title, str(e)))
                continue
            closed.add(cell.id)
            if record is None:
                listen.say("finished by another process")
                continue
            done.append(cell.title)
            shown = {key: value for key, value in record["measures"].items() if isinstance(value, float)}
            listen.say("  ".join(f"{key} {value:.4g}" for key, value in list(shown.items())[:4]))
    except TimeIsUp:
        listen.say(f"stopped after {plural(minutes or 0, 'minute')}; the same call goes on with what is open")
    except KeyboardInterrupt:
        listen.say(f"stopped after {len(done)} of {len(todo)} open cells; the same call goes on")
        raise
    closed |= {cell.id for cell in skipped if store.has(cell, study.targets)}
    left = tuple(cell.title for cell in todo if cell.id not in closed)
    taken = tuple(cell.title for cell in skipped if cell.id not in closed)
    return Progress(
        study.name, scale, tuple(done), len(cells) - len(left) - len(done), left, taken, tuple(failed),
        time.monotonic() - began,
    )  # fmt: skip


def _finish(
    cell: Cell, study: Study, store: Store, workspace: Workspace, clock: DeadlineListener
) -> dict[str, Any] | None:
    """Run a cell and write its result; None if another process has done so since the open cells were listed."""
    with held(workspace.work, cell):
        if store.has(cell, study.targets):
            return None
        try:
            record = run_cell(cell, workspace, study.targets, clock, study.curves)
        except TimeIsUp:
            if cell.runner not in RESUMED:
                clock.say(f"{cell.title} has no checkpoint and will start anew; give more minutes than it takes")
            raise
        store.write(cell, record)
        return record


class Lines:
    """Follows on stderr in plain lines: no library is needed for that."""

    def __init__(self) -> None:
        self._rounds = 0

    def say(self, line: str) -> None:
        """Write a line."""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def start(self, what: str, rounds: int, done: int) -> None:
        """Write what begins."""
        self._rounds = rounds
        self.say(f"{what}: {plural(rounds, 'round')}" + (f", {done} done" if done else ""))

    def round(self, record: dict[str, Any]) -> None:
        """Write every tenth round."""
        number = record["round"]
        if number % max(1, self._rounds // 10) == 0 or number == 1:
            valid = (record.get("valid") or {}).get("perplexity")
            shown = "" if valid is None else f", valid perplexity {valid:.1f}"
            self.say(f"  round {number}: train {record['loss']:.3f} nats{shown}, {record['seconds']:.2f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line where nothing but torch is installed."""
    parser = argparse.ArgumentParser(prog="python -m keyfed.lab.experiment.runner", description=__doc__)
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
    options = parser.parse_args(arguments)
    try:
        study = load_study(options.name, options.studies or study_folder())
        workspace, listener = Workspace(options.work, options.device, options.data_dir, options.precision), Lines()
        progress = run_study(
            study,
            options.scale,
            store=Store(options.results, listener.say),
            workspace=workspace,
            minutes=options.minutes,
            seeds=None if options.seeds is None else parse_seeds(options.seeds),
            listener=listener,
        )
    except KeyfedError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(json.dumps(progress.as_dict(), indent=1) + "\n")
    return 1 if progress.failed else 0


if __name__ == "__main__":
    sys.exit(main())
