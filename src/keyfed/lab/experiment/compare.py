"""Comparing methods on the same text: same clients, cohorts and initial weights; every cell is an ordinary run.

A cell is one method with one seed, trained in OUT/METHOD/seed-N. Cells that are finished are read, interrupted ones go
on: the same call made again only does what is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, to_document
from keyfed.engine.launch import refuse_ranks
from keyfed.errors import KeyfedError, RunError
from keyfed.files import write_atomically
from keyfed.lab.experiment.compare_plan import (
    ComparedMethod,
    ComparePlan,
    Setting,
    check_budget,
    parse_target,
    resolve,
    with_budget,
)
from keyfed.lab.experiment.compare_report import verdict, write_comparison
from keyfed.lab.experiment.method_rows import (
    ComparedRun,
    best_of,
    best_validation,
    common_target,
    fine_tuning,
    in_order,
    mean_baselines,
    row_of,
)
from keyfed.model.language_model import preset
from keyfed.reports.figures import EventWriter
from keyfed.run.folder import file_name, read_metrics, refuse_changes, strict
from keyfed.run.loop import Listener, Silent, train
from keyfed.run.plan import plan
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.result import score_baselines
from keyfed.run.start.freeze import refuse_frozen
from keyfed.run.start.preview import refuse_start


class CellListener:
    """Passes a cell's progress on: names the cell, and does not say again what is the same for all methods."""

    def __init__(self, listener: Listener, title: str, known: Iterable[str]) -> None:
        self._listener, self._title, self._known = listener, title, frozenset(known)

    def say(self, line: str) -> None:
        """Pass a line on unless it was said for the seed as a whole."""
        if line not in self._known:
            self._listener.say(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Rounds begin, under the cell's own title."""
        self._listener.start(self._title, rounds, done)

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""
        self._listener.round(record)


def default_out(config: Config) -> Path:
    """Return the folder of a comparison that names none."""
    return Path("runs") / f"compare-{file_name(Path(config.data.name).name)}-{config.model.name}"


def compare(
    methods: Sequence[str],
    settings: Iterable[Setting] = (),
    *,
    seeds: Sequence[int] | None = None,
    budget: str = "rounds",
    target: str | None = None,
    full: bool = False,
    out: Path | None = None,
    listener: Listener | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Train every method with every seed, and say how they stand; see `keyfed compare`.

    Everything is checked before the first cell trains, on the first seed's preparation. A cell that fails afterwards is
    recorded and does not keep the others from training.

    Args:
      methods: names, or names with settings of their own (`fedatt:temperature=0.1,step=1.0`) or with a start
        (`fedadam+init+vectors`; `train.init` and `vectors.file` among the settings say which).
      settings: (key, value) for all methods, see `resolve`.
      seeds: one run of each method a seed; None for train.seed alone.
      budget: "rounds" gives all methods the same rounds, "tokens" as many as the first method's tokens pay for.
      target: `perplexity=200` or `nats=2.0`; None for the highest of the methods' best.
      full: compare on the whole text instead of the quick preset.
      tensorboard: also write every run's rounds as TensorBoard events.

    Returns:
      The object of OUT/compare.json, beside which report.md, report.html and plots/ are written.

    Raises:
      KeyfedError: something that is refused before anything trains.
      KeyboardInterrupt: everything done so far is kept; the same call goes on.
    """
    refuse_ranks("keyfed compare")
    listen = listener or Silent()
    check_budget(budget)
    wanted = None if target is None else parse_target(target)
    planned = resolve(methods, settings, seeds=seeds, full=full)
    folder = out or default_out(planned.entries[0].config)
    for line in planned.lines():
        listen.say(line)
    cells: list[ComparedRun] = []
    baselines: list[dict[str, Any]] = []
    entries, first = planned.entries, None
    for seed in planned.seeds:
        try:
            prepared = prepare(_seeded(entries[0], seed))
        except KeyfedError as e:
            if first is None:
                raise
            cells += [
                ComparedRun(entry, seed, _cell_folder(folder, entry, seed), None, error=str(e)) for entry in entries
            ]
            continue
        if first is None:
            first = prepared
            entries = with_budget(entries, budget, prepared)
            _refuse_beforehand(entries, planned.seeds, folder, prepared)
        private = any(entry.config.privacy.on for entry in entries)
        for line in prepared.describe(private=private):
            listen.say(line)
        for number, entry in enumerate(entries, 1):
            place = f"method {number} of {len(entries)}, seed {seed}"
            place_of = _cell_folder(folder, entry, seed)
            cells.append(_run_cell(entry, seed, place_of, prepared, place, listen, tensorboard))
        if entries[0].config.train.baselines:
            baselines.append(_baselines(folder, entries[0], seed, prepared, listen.say))
    assert first is not None
    summary = summarise(replace(planned, entries=entries), cells, baselines, first, wanted, budget, folder)
    write_atomically(folder / "compare.json", json.dumps(summary, indent=1, allow_nan=False).encode())
    write_comparison(folder, summary, cells)
    return summary


def _seeded(entry: ComparedMethod, seed: int) -> Config:
    """The configuration of a cell; baselines are the same for all methods and scored once a seed, not by the cells."""
    return replace(entry.config, train=replace(entry.config.train, seed=seed, baselines=False))


def _cell_folder(out: Path, entry: ComparedMethod, seed: int) -> Path:
    return out / entry.folder / f"seed-{seed}"


def _refuse_beforehand(entries: Sequence[ComparedMethod], seeds: Sequence[int], out: Path, prepared: Prepared) -> None:
    """Refuse what cannot be trained, or would change runs that are there, before an hour is spent on the others."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; expected a folder for the comparison")
    fingerprint = prepared.corpus.fingerprint()
    for entry in entries:
        try:
            method, _ = plan(entry.config, prepared)
            refuse_frozen(entry.config, prepared.spec, method)
            refuse_start(entry.config, prepared, seeds)
        except KeyfedError as e:
            raise type(e)(f"{entry.label}: {e}") from None
        for seed in seeds:
            folder = _cell_folder(out, entry, seed)
            if (folder / "run.toml").exists():
                try:
                    refuse_changes(folder, _seeded(entry, seed), fingerprint)
                except RunError as e:
                    raise RunError(f"{e}; choose another --out to keep both") from None


def _run_cell(
    entry: ComparedMethod, seed: int, folder: Path, prepared: Prepared, place: str, listen: Listener, events: bool
) -> ComparedRun:
    """Train a cell, or go on with it, or read it if it is finished; a failure is kept as its reason."""
    listen.say(f"{entry.label}: {place}")
    listener: Listener = CellListener(
        listen, f"{entry.label} ({place})", prepared.describe(private=entry.config.privacy.on)
    )
    with ExitStack() as stack:
        if events:
            listener = stack.enter_context(EventWriter(folder, listener))
        try:
            result = train(_seeded(entry, seed), folder, resume=True, listener=listener, prepared=prepared)
            return ComparedRun(entry, seed, folder, result, read_metrics(folder))
        except KeyfedError as e:
            listen.say(f"{entry.label}, seed {seed} failed: {e}")
            return ComparedRun(entry, seed, folder, None, error=str(e))


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
    bests = ((cell.entry.config.method, best_validation(cell.records)) for cell in cells if cell.error is None)
    target = common_target(bests) if wanted is None else wanted
    rows = in_order(row_of(e, [cell for cell in cells if cell.entry.label == e.label], target) for e in planned.entries)
    summary = {
        "data": prepared.corpus.name,
        "model": prepared.spec.name,
        "characters": preset(planned.entries[0].config.model.name).characters,
        "budget": budget,
        "rounds": planned.entries[0].config.train.rounds,
        "seeds": list(planned.seeds),
        "target": None
        if target is None
        else {"perplexity": target, "nats": math.log(target), "given": wanted is not None},
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
