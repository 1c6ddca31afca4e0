"""The runner of studies, the papers' tables and figures run again cell by cell, and of comparisons of methods.

`python -m keyfed.lab.experiment.runner NAME --scale standard --minutes 20 --device cuda --data-dir DIR --results DIR`
needs torch, numpy and safetensors only and writes one JSON file a cell; `keyfed study` does the same and writes the
page.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, to_document
from keyfed.engine.module import MakeModule
from keyfed.errors import ConfigError, DataError, DownloadError, FolderInUse, KeyfedError, RunError, nearest
from keyfed.federated.types import Method
from keyfed.files import locked, write_atomically
from keyfed.lab.experiment.cell import CellListener, TimeIsUp, Workspace, run_cell, train_cell
from keyfed.lab.experiment.compare import (
    BUDGETS,
    ComparedMethod,
    ComparedRun,
    ComparePlan,
    Setting,
    parse_seeds,
    parse_target,
    resolve,
    with_budget,
)
from keyfed.lab.experiment.grid import (
    SCALES,
    Cell,
    Settings,
    Study,
    StudyCheck,
    cells_of,
    load_study,
    matches,
    study_folder,
    with_settings,
)
from keyfed.lab.experiment.report import document, verdict
from keyfed.lab.experiment.rows import (
    best_of,
    best_validation,
    common_target,
    fine_tuning,
    in_order,
    mean_baselines,
    row_of,
)
from keyfed.lab.experiment.search import TRIAL
from keyfed.lab.experiment.store import Store, make_folder, races, refuse_file
from keyfed.lab.experiment.tune import run_folder, run_trial, write_winners
from keyfed.model.language_model import preset
from keyfed.reports.document import write_document
from keyfed.reports.dry import refuse_start
from keyfed.reports.figures import EventWriter
from keyfed.run.console import Listener, Silent, plural
from keyfed.run.folder import file_name, refuse_changes, strict
from keyfed.run.plan import names, plan
from keyfed.run.prepare import Prepared, prepare, refuse_frozen
from keyfed.run.result import score_baselines
from keyfed.system import refuse_ranks

RESUMED = ("train", "code-faithful", TRIAL)  # runners whose cells go on from a checkpoint


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
        return {**asdict(self), "failed": dict(self.failed)}


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
    where: Mapping[str, Sequence[str]] | None = None,
    override: Settings | None = None,
    most: int | None = None,
    listener: Listener | None = None,
) -> Progress:
    """Work on a study's open cells; finished ones are read, interrupted ones go on where their checkpoint is.

    Args:
      store: the results, read and written.
      minutes: how long to work; the cell that runs then is left as at Ctrl-C.
      seeds: in place of the scale's.
      where: labels of the cells to work on; None for all.
      override: settings for every cell, which makes them other cells; for tests.
      most: cells to finish at most.
    """
    if minutes is not None and not (math.isfinite(minutes) and minutes >= 0):
        raise ConfigError(f"--minutes is {minutes:g}; expected a number of minutes, 0 or more")
    refuse_file(workspace.work, "--work")
    listen = listener or Silent()
    began = time.monotonic()
    clock = CellListener(listen, until=None if minutes is None else began + 60 * minutes)
    cells = [cell for cell in cells_of(study, scale, seeds) if not cell.absent and matches(cell.labels, where or {})]
    if override:
        cells = [with_settings(cell, override) for cell in cells]
    make_folder(store.results, store.folder(study.name))
    done: list[str] = []
    failed: dict[str, tuple[str, str]] = {}
    skipped: list[Cell] = []
    todo, before, still = _open(study, cells, store)
    listen.say(f"{study.name} at scale {scale}: {plural(before + still, 'cell')}, {before} finished")
    try:
        waiting = False
        while todo:
            skipped, worked = [], False
            say = _quiet if waiting else listen.say
            for number, cell in enumerate(todo, 1):
                if most is not None and len(done) >= most:
                    break
                clock.check()
                say(f"cell {number} of {len(todo)}: {cell.title}")
                try:
                    record = _finish(cell, study, store, workspace, clock)
                except FolderInUse:
                    say("skipped: another process works on it")
                    skipped.append(cell)
                    continue
                except (ConfigError, DataError, DownloadError, RunError) as e:
                    listen.say(f"failed: {e}")
                    failed[cell.id] = (cell.title, str(e))
                    continue
                worked = True
                if record is None:
                    listen.say("finished by another process")
                    continue
                done.append(cell.title)
                shown = {key: value for key, value in record["measures"].items() if isinstance(value, float)}
                listen.say("  ".join(f"{key} {value:.4g}" for key, value in list(shown.items())[:4]))
                if study.search is not None:
                    _clear(study, cells, store, workspace)
            if study.search is None or (most is not None and len(done) >= most):
                break
            waiting = not worked and bool(skipped)
            if waiting:  # who goes on is known when they are done
                clock.wait("other processes train the trials that are left")
            todo = [cell for cell in _open(study, cells, store)[0] if cell.id not in failed]
    except TimeIsUp:
        listen.say(f"stopped after {plural(minutes or 0, 'minute')}; the same call goes on with what is open")
    except KeyboardInterrupt:
        listen.say(f"stopped after {len(done)} of {still} open cells; the same call goes on")
        raise
    left, finished, _ = _open(study, cells, store)
    taken = [cell for cell in skipped if cell.id in {other.id for other in left}]
    return Progress(
        study.name, scale, tuple(done), finished - len(done), tuple(cell.title for cell in left),
        tuple(cell.title for cell in taken), tuple(failed.values()), time.monotonic() - began,
    )  # fmt: skip


def parse_where(study: Study, said: Iterable[str]) -> dict[str, list[str]]:
    """Read `axis=label|label` of the command line; an axis or label that the study does not have is refused."""
    pairs = (text.partition("=") for text in said)
    found = {axis.strip(): [label.strip() for label in labels.split("|")] for axis, _, labels in pairs}
    check = StudyCheck("--where")
    check.axes = {axis: labels for axis, labels in study.axes.items() if axis != TRIAL}  # a row has all its trials
    check.labels(found, study.name)
    return found


def _open(study: Study, cells: Sequence[Cell], store: Store) -> tuple[list[Cell], int, int]:
    """Return the cells to run now, and how many are finished and open; of a search every rung of a trial counts."""
    there = store.of(study)
    if study.search is None:
        todo = [cell for cell in cells if cell.id not in there]
        return todo, len(cells) - len(todo), len(todo)
    found = races(study, cells, there)
    return [cell for race in found for cell in race.due], sum(r.done for r in found), sum(r.left for r in found)


def _quiet(line: str) -> None:
    """Say nothing: it was said when the waiting began."""


def _clear(study: Study, cells: Sequence[Cell], store: Store, workspace: Workspace) -> None:
    """Remove the runs of trials that will not train on."""
    for race in races(study, cells, store.of(study)):
        for cell in race.out:
            shutil.rmtree(run_folder(cell, workspace), ignore_errors=True)


def _finish(cell: Cell, study: Study, store: Store, workspace: Workspace, clock: CellListener) -> dict[str, Any] | None:
    """Run a cell and write its result; None if another process has done so since the open cells were listed."""
    with held(workspace.work, cell):
        if store.has(cell):
            return None
        try:
            if cell.runner == TRIAL:
                record = run_trial(study, cell, workspace, clock)
            else:
                record = run_cell(cell, workspace, study.targets, clock, study.curves)
        except TimeIsUp:
            if cell.runner not in RESUMED:
                clock.say(f"{cell.title} has no checkpoint and will start anew; give more minutes than it takes")
            raise
        store.write(cell, record)
        return record


def default_out(config: Config) -> Path:
    """Return the folder of a comparison that names none."""
    return Path("runs") / f"compare-{file_name(Path(config.data.name).name)}-{config.model.name}"


def compare(
    methods: Sequence[str | Method],
    settings: Iterable[Setting] = (),
    *,
    seeds: Sequence[int] | None = None,
    budget: str = "rounds",
    target: str | None = None,
    full: bool = False,
    out: Path | None = None,
    listener: Listener | None = None,
    tensorboard: bool = False,
    module: MakeModule | None = None,
) -> dict[str, Any]:
    """Train every method with every seed, and say how they stand; see `keyfed compare`.

    Everything is checked before the first cell trains, on the first seed's preparation. A cell that fails afterwards is
    recorded and does not keep the others from training.

    Args:
      methods: names, or names with settings of their own (`fedatt:temperature=0.1,step=1.0`) or with a start
        (`fedadam+init+vectors`; `train.init` and `vectors.file` among the settings say which); or methods of the
        caller's own, as values.
      settings: (key, value) for all methods, see `resolve`.
      seeds: one run of each method a seed; None for train.seed alone.
      budget: "rounds" gives all methods the same rounds, "tokens" as many as the first method's tokens pay for.
      target: `perplexity=200` or `nats=2.0`; None for the highest of the methods' best.
      full: compare on the whole text instead of the quick preset.
      tensorboard: also write every run's rounds as TensorBoard events.
      module: makes the model that every method trains, in place of the configuration's preset.

    Returns:
      The object of OUT/compare.json, beside which report.md, report.html and plots/ are written.

    Raises:
      KeyfedError: something that is refused before anything trains.
      KeyboardInterrupt: everything done so far is kept; the same call goes on.
    """
    refuse_ranks("keyfed compare")
    listen = listener or Silent()
    if budget not in BUDGETS:
        raise ConfigError(f'--budget is "{budget}"{nearest(budget, BUDGETS)}; expected rounds or tokens')
    wanted = None if target is None else parse_target(target)
    planned = resolve(methods, settings, seeds=seeds, full=full)
    folder = out or default_out(planned.entries[0].config)
    for line in planned.lines():
        listen.say(line)
    done: list[ComparedRun] = []
    baselines: list[dict[str, Any]] = []
    entries, first = planned.entries, None
    for seed in planned.seeds:
        try:
            prepared = prepare(entries[0].cell(folder, seed).config, module)
        except KeyfedError as e:
            if first is None:
                raise
            done += [replace(entry.cell(folder, seed), error=str(e)) for entry in entries]
            continue
        if first is None:
            first = prepared
            entries = with_budget(entries, budget, prepared)
            _refuse_beforehand(entries, planned.seeds, folder, prepared)
        for line in prepared.describe(private=any(entry.config.privacy.on for entry in entries)):
            listen.say(line)
        for number, entry in enumerate(entries, 1):
            place = f"method {number} of {len(entries)}, seed {seed}"
            done.append(_run_compared(entry.cell(folder, seed), prepared, place, listen, tensorboard, module))
        if entries[0].config.train.baselines:
            baselines.append(_baselines(folder, entries[0], seed, prepared, listen.say))
    assert first is not None
    summary = summarise(replace(planned, entries=entries), done, baselines, first, wanted, budget, folder)
    write_atomically(folder / "compare.json", json.dumps(summary, indent=1, allow_nan=False).encode())
    write_document(folder, document(summary, done))
    return summary


def _refuse_beforehand(entries: Sequence[ComparedMethod], seeds: Sequence[int], out: Path, prepared: Prepared) -> None:
    """Refuse what cannot be trained, or would change runs that are there, before an hour is spent on the others."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; expected a folder for the comparison")
    for entry in entries:
        try:
            method, _ = plan(entry.config, prepared, entry.own)
            refuse_frozen(entry.config, prepared.spec, method)
            refuse_start(entry.config, prepared, seeds)
        except KeyfedError as e:
            raise type(e)(f"{entry.label}: {e}") from None
        for cell in (entry.cell(out, seed) for seed in seeds):
            if (cell.folder / "run.toml").exists():
                try:
                    refuse_changes(
                        cell.folder, cell.config, prepared.corpus.fingerprint(), names(prepared.spec, method)
                    )
                except RunError as e:
                    raise RunError(f"{e}; choose another --out to keep both") from None


def _run_compared(
    cell: ComparedRun, prepared: Prepared, place: str, listen: Listener, tensorboard: bool, module: MakeModule | None
) -> ComparedRun:
    """Run a cell of a comparison; a failure is kept as its reason."""
    label = cell.entry.label
    listen.say(f"{label}: {place}")
    known = prepared.describe(private=cell.config.privacy.on)
    listener: Listener = CellListener(listen, f"{label} ({place})", known)
    with ExitStack() as stack:
        if tensorboard:
            listener = stack.enter_context(EventWriter(cell.folder, listener))
        try:
            own = cell.entry.own
            result, records = train_cell(cell.config, cell.folder, prepared, listener, module=module, method=own)
            return replace(cell, result=result, records=records)
        except KeyfedError as e:
            listen.say(f"{label}, seed {cell.seed} failed: {e}")
            return replace(cell, error=str(e))


def _baselines(
    out: Path, entry: ComparedMethod, seed: int, prepared: Prepared, say: Callable[[str], None]
) -> dict[str, Any]:
    """Score unigram and Kneser–Ney on the seed's text, or read the scores if the text and its cut are the same."""
    document = to_document(entry.config)
    made = {
        "data": document["data"],
        "data_sha256": prepared.corpus.fingerprint(),
        "characters": preset(entry.config.model.name).characters,
        "seed": seed,
        **{key: document["train"][key] for key in ("test_tokens", "ngram_order")},
    }
    path = out / "baselines" / f"seed-{seed}.json"
    try:
        saved = json.loads(path.read_text("utf-8"))
        if saved["made"] == made:
            return dict(saved["baselines"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not whole: they are counted again
    say("counting the baselines: unigram and Kneser–Ney")
    scores: dict[str, Any] = strict(score_baselines(prepared, entry.config.train.ngram_order))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"made": made, "baselines": scores}, indent=1, allow_nan=False).encode())
    return scores


def summarise(
    planned: ComparePlan,
    cells: Sequence[ComparedRun],
    baselines: Sequence[dict[str, Any]],
    prepared: Prepared,
    wanted: float | None,
    budget: str,
    out: Path,
) -> dict[str, Any]:
    """Return the comparison as one object: what `--json` prints and compare.json holds."""
    bests = ((cell.entry.method, best_validation(cell.records)) for cell in cells if cell.error is None)
    target = common_target(bests) if wanted is None else wanted
    rows = in_order(row_of(e, [cell for cell in cells if cell.entry.label == e.label], target) for e in planned.entries)
    summary = {
        "data": prepared.corpus.name,
        "model": prepared.spec.name,
        "characters": preset(planned.entries[0].config.model.name).characters,
        "budget": budget,
        "rounds": planned.entries[0].config.train.rounds,
        "seeds": list(planned.seeds),
        "target": target and {"perplexity": target, "nats": math.log(target), "given": wanted is not None},
        "quick": dict(planned.quick),
        "baselines": mean_baselines(baselines),
        "rows": rows,
        "best": best_of(rows),
        "fine_tuning": fine_tuning(cells),
        "failed": sum(len(row["failed"]) for row in rows),
        "out": str(out),
    }
    summary["verdict"] = verdict(summary)
    return dict(strict(summary))


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


def left(minutes: float | None, began: float) -> float | None:
    """Return what is left of the minutes since a moment, at least 0; None where there is no limit."""
    return None if minutes is None else max(minutes - (time.monotonic() - began) / 60, 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line where nothing but torch is installed."""
    parser = argparse.ArgumentParser(prog="python -m keyfed.lab.experiment.runner", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a study; of several, one after the other")
    parser.add_argument("--scale", default="standard", choices=SCALES)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seeds", help="3 (seeds 1 to 3) or 1,4")
    parser.add_argument("--where", action="append", help="axis=label|label: cells with these labels only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="on a GPU; bf16 by default")
    parser.add_argument("--data-dir")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--studies", type=Path, default=None)
    options = parser.parse_args(arguments)
    try:
        folder = options.studies or study_folder()
        workspace, listener = Workspace(options.work, options.device, options.data_dir, options.precision), Lines()
        store = Store(options.results, listener.say)
        began = time.monotonic()
        done: list[Progress] = []
        for study in [load_study(name, folder) for name in options.names]:
            progress = run_study(
                study,
                options.scale,
                store=store,
                workspace=workspace,
                minutes=left(options.minutes, began) if done else options.minutes,
                seeds=None if options.seeds is None else parse_seeds(options.seeds),
                where=parse_where(study, options.where or ()),
                listener=listener,
            )
            done.append(progress)
            if options.scale == "standard":
                write_winners(study, store, folder)
    except KeyfedError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    made = [progress.as_dict() for progress in done]
    sys.stdout.write(json.dumps(made if len(made) > 1 else made[0], indent=1) + "\n")
    return 1 if any(progress.failed for progress in done) else 0


if __name__ == "__main__":
    sys.exit(main())
