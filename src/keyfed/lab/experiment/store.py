"""The results of cells: one small JSON file each, and one row a configuration made of them.

A file is read back only if it is whole and still what its id says. A row has the mean and the spread over seeds,
written as the pages show it.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, RunError
from keyfed.files import write_atomically
from keyfed.lab.experiment.cell import options_of
from keyfed.lab.experiment.grid import BY, SCALES, Cell, Labels, Study, cells_of, target_measure
from keyfed.lab.experiment.search import TRIAL, Halving, halve_on, reached
from keyfed.reports.document import NONE, finite, show, show_count

NEEDED = {"id": str, "runner": str, "seed": int, "settings": dict, "measures": dict, "curve": list, "made": dict}
MADE = ("keyfed", "torch", "python", "hardware")


def _is_number(value: Any) -> bool:
    """A number that is finite as a float too: what JSON writes as 1e999 is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_points(value: Any, length: int) -> bool:
    """A list of points, each its number and what was measured there."""
    return isinstance(value, list) and all(
        isinstance(p, list) and len(p) == length and _is_number(p[0]) and all(map(_is_number_or_none, p)) for p in value
    )


def _are_counts(value: Any) -> bool:
    """A list of [term, count]."""
    return isinstance(value, list) and all(
        isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) and _is_number(p[1]) for p in value
    )


def _is_spread(value: Any) -> bool:
    """How far shuffled evaluations lie apart; one alone has no standard deviation."""
    return (
        isinstance(value, dict)
        and all(_is_number(value.get(key)) for key in ("count", "lowest", "highest"))
        and "sd" in value
        and _is_number_or_none(value["sd"])
    )


NUMBERS = ("clients", "cohort", "parameters", "vocabulary", "rounds", "best_round", "tokens_trained", "train_tokens",
           "first_tokens_trained", "first_best_round", "seconds", "whole")  # fmt: skip
TEXTS = ("data", "data_sha256", "vectors_sha256", "first_data_sha256", "init_sha256", "model")
SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # of what pages read, where a cell has it
    "measures": (lambda v: all(map(_is_number_or_none, v.values())), "a number or null for each"),
    "curve": (lambda v: _are_points(v, 4), "points of 4 numbers"),
    "training": (lambda v: isinstance(v, dict) and all(_are_points(v.get(by), 3) for by in BY), "points of 3 numbers"),
    "rungs": (lambda v: _are_points(v, 3), "tokens, rounds and validation perplexity of each"),
    "shuffles": (_is_spread, "count, sd, lowest and highest"),
    "facts": (lambda v: isinstance(v, dict) and all(_are_counts(v.get(k)) for k in ("unigrams", "bigrams")),
              "a table with unigrams and bigrams"),
    **dict.fromkeys(NUMBERS, (_is_number_or_none, "a number or null")),
    **dict.fromkeys(TEXTS, (lambda v: isinstance(v, str), "text")),
}  # fmt: skip
BESIDE = {"data_sha256": "data", "parameters": "model", "facts": "data"}  # what cannot be shown without another thing
BESIDE_SETTINGS = {"vectors_sha256": "vectors.file", "first_data_sha256": "first.data.name",
                   "init_sha256": "train.init"}  # fmt: skip


class Store:
    """The results of cells in a folder, for the length of a command: a file is read once, and again if it changed.

    Other processes may write results meanwhile; each question looks at what files there are by now.

    Args:
      results: folder whose data/STUDY holds the results of a study's cells.
      say: gets a line for each file that is left out, when it is read.
    """

    def __init__(self, results: Path, say: Callable[[str], Any] = lambda line: None) -> None:
        self.results, self._say = results, say
        self._read: dict[Path, tuple[tuple[int, ...], dict[str, Any] | None]] = {}

    def folder(self, study: str) -> Path:
        """Where a study's cells lie."""
        return self.results / "data" / study

    def of(self, study: Study) -> dict[str, dict[str, Any]]:
        """Return the results of a study by cell id, in the order of their file names; then those of other studies.

        An id says what is computed: a cell that another study has finished need not be run again. Its curve says when
        it reached the targets of this one (`with_targets`). Where two have the same id, the one that measured more
        counts. A file that is damaged, or was made with other defaults of its method than today's, is left out: the
        cell is open.
        """
        own = self.folder(study.name)
        refuse_file(own, "--results")
        found: dict[str, dict[str, Any]] = {}
        every = [*own.glob("*.json")], [*(self.results / "data").glob("*/*.json")]
        for path in dict.fromkeys(path for paths in every for path in sorted(paths)):
            record = self._record(path)
            if record is None:
                continue
            before = found.setdefault(record["id"], record)
            if len(record["measures"]) > len(before["measures"]):
                found[record["id"]] = record
        return {cell: with_targets(record, study.targets) for cell, record in found.items()}

    def has(self, cell: Cell) -> bool:
        """Tell whether a cell's result is there by now; a trial's up to its rung."""
        read = map(self._record, (self.results / "data").glob(f"*/*-{cell.id}.json"))
        return any(record is not None and has_rung(record, cell) for record in read)

    def write(self, cell: Cell, record: Mapping[str, Any]) -> Path:
        """Write a cell's result and return where."""
        folder = self.folder(cell.study)
        with writing(self.results):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
        write_atomically(folder / cell.file, (compact(text) + "\n").encode())
        return folder / cell.file

    def _record(self, path: Path) -> dict[str, Any] | None:
        """A file's result; None where it cannot be counted. A file that is replaced has another inode or time."""
        try:
            now = path.stat()
            stamp: tuple[int, ...] = (now.st_ino, now.st_mtime_ns, now.st_size)
        except OSError:
            stamp = ()  # reading it says what is wrong
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = (stamp, read_cell(path, self._say))
        return self._read[path][1]


def with_targets(record: Mapping[str, Any], targets: Sequence[float]) -> dict[str, Any]:
    """Return a result with the rounds to each target, interpolated on its curve; one without rounds has none to say."""
    measures, every = dict(record["measures"]), int(record["settings"].get("train.eval_every", 1))
    for target in targets if record["curve"] else ():
        name = target_measure(target)
        measures[name] = interpolated_rounds(record["curve"], target, measures.get(name), every)
    return {**record, "measures": measures}


def interpolated_rounds(
    curve: Sequence[Sequence[Any]], target: float, first: float | None = None, every: int = 1
) -> float | None:
    r"""Rounds until a validation perplexity of P, linear in its logarithm between the two points around it.

    .. math::  r = r_0 + (r_1 − r_0) \frac{\ln P_0 − \ln P}{\ln P_0 − \ln P_1},\qquad P_0 > P ≥ P_1

    Args:
      curve: a cell's points, at most 25 of its rounds.
      first: the first validated round that has the target, where the cell counted it on all its rounds: r lies in the
        `every` rounds that end there.

    Example:
      >>> interpolated_rounds([[2, 7.0, 400.0, 0.1], [4, 6.0, 225.0, 0.1]], 300.0)
      3.0
    """
    before: tuple[float, float] | None = None
    for number, _, perplexity, _ in curve:
        if perplexity is None:
            continue
        if perplexity <= target:
            break
        before = (number, perplexity)
    else:
        return first
    if before is None or not math.isfinite(before[1]):
        return float(number) if first is None else first
    share = math.log(before[1] / target) / math.log(before[1] / perplexity)
    found = before[0] + (number - before[0]) * share
    return float(found if first is None else min(max(found, first - every), first))


def has_rung(record: Mapping[str, Any], cell: Cell) -> bool:
    """Tell whether a trial has reached its rung; another cell has none."""
    return cell.runner != TRIAL or len(reached(record)) > cell.rung


def read_cell(path: Path, say: Callable[[str], Any]) -> dict[str, Any] | None:
    """Read a cell's result; None, and a line to `say`, if it cannot be counted."""
    try:
        record = json.loads(path.read_text("utf-8"))
        wrong = _problem(record)
    except (OSError, ValueError, RecursionError) as e:
        wrong = str(e)
    if wrong:
        say(f"{path} is left out: it is damaged ({wrong}); its cell is open")
        return None
    if "options" not in record:  # made before they were kept, or by a runner that has none
        return dict(record)
    try:
        now: dict[str, Any] = options_of(record["runner"], record["settings"])
    except ConfigError as e:
        say(f"{path} is left out: its settings are none any more ({e}); its cell is open")
        return None
    then = record["options"]
    set_by_cell = {key.rpartition(".")[2] for key in record["settings"]}
    # The table's value of an option that is newer than the cell computes what was computed without it.
    newer = {key for key in now if key not in then and key.rpartition(".")[2] not in set_by_cell}
    keys = sorted(key for key in {*then, *now} - newer if then.get(key) != now.get(key))
    changed = [f"{key} {then.get(key)} → {now.get(key)}" for key in keys]
    if changed:
        say(f"{path} is left out: it was made with other defaults ({', '.join(changed)}); its cell is open")
        return None
    return dict(record)


def _problem(record: Any) -> str:
    """What keeps a cell's result from being read; empty if nothing does."""
    if not isinstance(record, dict):
        return "it is no object"
    for key, kind in NEEDED.items():
        if not isinstance(record.get(key), kind) or isinstance(record[key], bool):
            return f"{key} is {record[key]!r:.60}" if key in record else f"{key} is missing"
    lost = [key for key in MADE if not isinstance(record["made"].get(key), str)]
    if lost:
        return f"made.{lost[0]} is missing"
    if not isinstance(record.get("options", {}), dict):
        return f"options is {record['options']!r:.60}"
    for key, (fits, expected) in SHAPES.items():
        if key in record and not fits(record[key]):
            return f"{key} is {record[key]!r:.60}; expected {expected}"
    lost = [other for key, other in BESIDE.items() if key in record and other not in record]
    named = record["settings"]
    lost += [f"setting {other}" for key, other in BESIDE_SETTINGS.items() if key in record and other not in named]
    if lost:
        return f"{lost[0]} is missing"
    fitting = Cell("", record["runner"], {}, named, record["seed"], "").id
    return "" if record["id"] == fitting else f"id is {record['id']!r:.60}; runner, settings and seed make {fitting}"


def refuse_file(folder: Path, option: str) -> None:
    """Refuse a file where a folder is wanted, or is to be made."""
    wrong = next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), None)
    if wrong is not None:
        raise ConfigError(f"{option} {folder}: {wrong} is a file; expected a folder")


@contextmanager
def writing(results: Path) -> Iterator[None]:
    """Make what keeps results from being written one line."""
    try:
        yield
    except OSError as e:
        raise RunError(f"--results {results}: {e.strerror or e}; choose a folder that can be written") from None


def make_folder(results: Path, folder: Path) -> None:
    """Make a folder of the results and try that it can be written: before hours of work, not after."""
    refuse_file(folder, "--results")
    with writing(results):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def compact(text: str) -> str:
    """Put lists of numbers on one line: a point of a curve is one thing."""
    return re.sub(r"\[\s*([^\[\]{}\"]*?)\s*\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)


OPEN = "open"
ENOUGH = 0.25  # share of a scale's cells that makes a page of them
UNTRAINED, DIVERGED = 0.98, 1.5  # perplexities from these shares of the vocabulary's size on


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration of a study at a scale: its cells, and the results of those that are finished."""

    labels: Labels
    runner: str
    cells: tuple[Cell, ...]
    records: tuple[Mapping[str, Any], ...]

    @property
    def absent(self) -> str:
        """Why it is not run here; empty where it is."""
        return self.cells[0].absent

    def values(self, measure: str) -> list[float]:
        """The finite values of a measure, one a seed."""
        return [value for value in self._found(measure) if value is not None]

    def _found(self, measure: str) -> list[float | None]:
        return [finite(record["measures"][measure]) for record in self.known(measure).records]

    def mean(self, measure: str) -> float | None:
        """Mean over the finished seeds (`known`); None if there is none, or one of them has no finite value."""
        return mean_of(self._found(measure))

    def known(self, measure: str) -> Row:
        """The row of those seeds that a measure was taken of; one without a value has it too: it diverged or missed.

        A cell that another study has run has no rounds to targets which that study does not have.
        """
        return replace(self, records=tuple(record for record in self.records if measure in record["measures"]))

    def of_seeds(self, seeds: Container[int]) -> Row:
        """The row of some of its seeds."""
        return replace(self, records=tuple(record for record in self.records if record["seed"] in seeds))

    @property
    def seeds(self) -> set[int]:
        """Seeds that are finished."""
        return {int(record["seed"]) for record in self.records}

    def by_seed(self, measure: str) -> dict[int, float | None]:
        """Every seed's value of a measure; rounds to a target that was missed are all that were run."""
        missed = "rounds" if measure.startswith("rounds_to") else ""
        return {
            int(r["seed"]): finite(r["measures"][measure] if r["measures"][measure] is not None else r.get(missed))
            for r in self.known(measure).records
        }

    def logs(self, measure: str) -> dict[int, float]:
        """The logarithms of what seeds have above 0."""
        return {
            seed: math.log(value) for seed, value in self.by_seed(measure).items() if value is not None and value > 0
        }

    def at_least(self, measure: str) -> tuple[float | None, bool]:
        """The mean, and whether it is only a lower bound: rounds to a target that was not reached are more than all."""
        bound = measure.startswith("rounds_to") and any(value is None for value in self._found(measure))
        return mean_of([*self.by_seed(measure).values()]), bound

    @property
    def failure(self) -> str:
        """ "diverged" or "untrained" by the worst seed; else empty."""
        return failure_of((r["measures"].get("perplexity"), r.get("vocabulary")) for r in self.records)

    @property
    def tokens(self) -> str:
        """Tokens that the clients trained on in all rounds, the mean over seeds; empty where nothing was trained."""
        found = [int(r["tokens_trained"]) for r in self.records if r.get("tokens_trained")]
        mean = statistics.fmean(found) if found else 0.0
        return "" if not found else f"{mean / 1e6:,.1f} M" if mean >= 1e6 else f"{mean:,.0f}"

    @property
    def chosen(self) -> str:
        """The rounds whose models were chosen on validation: `8`, or `8–12`; empty where there is none."""
        found = sorted(int(r["best_round"]) for r in self.records if r.get("best_round"))
        return "" if not found else "–".join(map(str, dict.fromkeys((found[0], found[-1]))))

    @property
    def eval_every(self) -> int:
        """Rounds between two validations, the most of all seeds."""
        return max((int(r.get("settings", {}).get("train.eval_every", 1)) for r in self.records), default=1)

    @property
    def shuffle_keys(self) -> set[tuple[Any, ...]]:
        """What the shuffles of the test hang on, seed by seed; empty where a seed has none."""
        keys = {
            (r["seed"], r.get("data_sha256"), r.get("settings", {}).get("study.share"), r["shuffles"]["count"])
            for r in self.records
            if r.get("shuffles")
        }
        return keys if len(keys) == len(self.records) else set()

    def evaluation(self) -> tuple[float, int] | None:
        """Standard deviation of one evaluation and its degrees of freedom, where it depends on a shuffle."""
        shuffles = [record["shuffles"] for record in self.records if record.get("shuffles")]
        freedom = sum(int(s["count"]) - 1 for s in shuffles if s["sd"] is not None)
        if not freedom:
            return None
        squares = sum((int(s["count"]) - 1) * float(s["sd"]) ** 2 for s in shuffles if s["sd"] is not None)
        return math.sqrt(squares / freedom), freedom


def mean_of(values: Sequence[Any]) -> float | None:
    """Return the mean, or None where there is no value or one is not finite: half a mean would flatter."""
    numbers = [finite(value) for value in values]
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known and len(known) == len(numbers) else None


def spread_of(values: Sequence[Any]) -> float | None:
    """Return the sample standard deviation of at least two finite values.

    Example:
      >>> spread_of([1.0, 3.0]), spread_of([1.0]), spread_of([1.0, None])
      (1.4142135623730951, None, None)
    """
    return statistics.stdev(values) if len(values) > 1 and mean_of(values) is not None else None


def failure_of(runs: Iterable[tuple[Any, Any]]) -> str:
    """ "diverged" far above the perplexity of guessing all words alike, "untrained" about there; else empty.

    Args:
      runs: perplexity and size of the vocabulary of each; one without both says nothing.

    Example:
      >>> failure_of([(120.0, 10_000), (9_990.0, 10_000)]), failure_of([(120.0, 10_000), (None, 10_000)])
      ('untrained', '')
    """
    found = [(finite(value), finite(size)) for value, size in runs]
    worst = max((value / size for value, size in found if value is not None and size), default=0.0)
    return "diverged" if worst > DIVERGED else "untrained" if worst > UNTRAINED else ""


def rows_of(study: Study, scale: str, results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Group a study's cells by configuration, in the order of the grid; seeds beyond the scale's count too."""
    planned = cells_of(study, scale)
    more = sorted({int(r["seed"]) for r in results.values()} - {cell.seed for cell in planned})
    extra = cells_of(study, scale, more) if more else []
    grouped: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in planned:
        grouped.setdefault((cell.runner, *cell.labels.items()), []).append(cell)
    for cell in extra:
        if cell.id in results:
            grouped[cell.runner, *cell.labels.items()].append(cell)
    return [
        Row(cells[0].labels, cells[0].runner, tuple(cells), tuple(results[c.id] for c in cells if c.id in results))
        for cells in grouped.values()
    ]


def main_scale(study: Study, results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The scale that a page is about; None if nothing is finished.

    Of those above `smoke`, at which nothing is judged, the one with the largest share of its cells finished, unless
    that is less than `ENOUGH`; then the one with most finished cells.
    """
    counts = {scale: counted(study, scale, results) for scale in study.scales}
    found = {scale: (done, left) for scale, (done, left) in counts.items() if done}
    shares = {s: done / (done + left) for s, (done, left) in found.items() if s != "smoke"}
    enough = {s: share for s, share in shares.items() if share >= ENOUGH}
    if enough:
        return max(enough, key=lambda s: (enough[s], SCALES.index(s)))
    return max(found, key=lambda s: (found[s][0], -found[s][1], SCALES.index(s))) if found else None


def counted(study: Study, scale: str, results: Mapping[str, Any]) -> tuple[int, int]:
    """Count the finished and the open cells of a scale; seeds beyond its own are neither.

    Of a search every rung of a trial counts.
    """
    if study.search is not None:
        found = races(study, cells_of(study, scale), results)
        return sum(race.done for race in found), sum(race.left for race in found)
    cells = [cell for cell in cells_of(study, scale) if not cell.absent]
    done = sum(cell.id in results for cell in cells)
    return done, len(cells) - done


@dataclass(frozen=True, slots=True)
class Race:
    """The trials of a row of a search, in their order, and where they stand."""

    labels: Labels
    trials: tuple[Cell, ...]
    records: Mapping[str, Mapping[str, Any]]
    halving: Halving
    steps: int

    @property
    def done(self) -> int:
        """Rungs that trials have reached."""
        return sum(len(reached(self.records.get(cell.id))) for cell in self.trials)

    @property
    def left(self) -> int:
        """Rungs to be reached; none when the search is over, of trials that diverged too."""
        return max(len(self.halving.open), self.steps - self.done) if self.halving.open else 0

    @property
    def due(self) -> list[Cell]:
        """Trials that are to train on now, each up to its rung."""
        return [replace(c, rung=self.halving.rung) for c in self.trials if c.id in self.halving.open]

    @property
    def out(self) -> list[Cell]:
        """Trials that will not train on."""
        return [cell for cell in self.trials if cell.id not in self.halving.going]

    @property
    def winner(self) -> Cell | None:
        """The trial that won, once the search is over."""
        return next((cell for cell in self.trials if cell.id == self.halving.winner), None)


def races(study: Study, cells: Iterable[Cell], results: Mapping[str, Mapping[str, Any]]) -> list[Race]:
    """Return the rows of a search: the trials of each, by all labels but their number."""
    assert study.search is not None
    grouped: dict[tuple[tuple[str, str], ...], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(tuple((k, v) for k, v in cell.labels.items() if k != TRIAL), []).append(cell)
    found = []
    for labels, trials in grouped.items():
        rungs = study.search.rungs[trials[0].scale]
        records = {cell.id: results[cell.id] for cell in trials if cell.id in results}
        place = halve_on(rungs, [cell.id for cell in trials], records)
        found.append(Race(dict(labels), tuple(trials), records, place, sum(rung.trials for rung in rungs)))
    return found


def place(row: Row, without: Iterable[str] = ()) -> str:
    """A row in words."""
    left_out = set(without)
    return ", ".join(
        label if not label.replace(".", "").isdigit() else f"{axis} = {label}"
        for axis, label in row.labels.items()
        if axis not in left_out
    )


COUNTS = ("characters", "types", "lines")  # measures that are whole numbers


def write_value(value: float | None, measure: str) -> str:
    """Write a measure: perplexities as everywhere, shares as percentages, nats with three decimals, counts whole."""
    if value is None:
        return NONE
    if measure in COUNTS:
        return show_count(value)
    plain = re.sub("^(sentence|late|general|personal)_", "", measure)
    if plain.startswith(("top", "accuracy", "oov", "gaining", "adaptive")) or measure.endswith(("_accuracy", "_ratio")):
        return f"{100 * value:.2f} %"
    if measure.endswith(("nats", "_entropy")):
        return f"{value:.3f}"
    if measure.startswith("rounds_to"):
        return f"{value:.1f}".removesuffix(".0")
    return show(value)


def write_printed(value: float | None, measure: str) -> str:
    """Write a printed figure with all its digits, up to six, or four of a percentage; zeros at the end are lost.

    Example:
      >>> write_printed(115.43, "perplexity"), write_printed(123.00, "perplexity"), write_printed(0.1640, "top1")
      ('115.43', '123', '16.4 %')
    """
    if value is None or measure in COUNTS:
        return show_count(value)
    return f"{100 * value:.4g} %" if write_value(value, measure).endswith("%") else f"{value:.6g}"


def write_seeds(row: Row, measure: str) -> str:
    """Write every seed's value."""
    return ", ".join(write_value(value, measure) for value in row.values(measure))


def write_row(row: Row, measure: str) -> str:
    """Write mean ± standard deviation over seeds (number of seeds)."""
    if row.absent:
        return "absent"
    if not row.records:
        return OPEN
    row = row.known(measure)
    if not row.records:
        return NONE
    mean, values = row.mean(measure), row.values(measure)
    one = row.evaluation() if measure == "perplexity" and mean is not None else None
    after = "" if one is None else f"; one evaluation ± {one[0]:.1f}"
    after += f"; {row.failure}" if measure == "perplexity" and row.failure else ""
    if mean is None:
        missing = len(row.records) - len(values)
        if measure.startswith("rounds_to"):
            return "not reached" if not values else f"not reached by {missing} of {len(row.records)} seeds"
        return "diverged" if not values else f"diverged with {missing} of {len(row.records)} seeds"
    if len(values) == 1:
        return write_value(mean, measure) + after
    scale = 100 if write_value(mean, measure).endswith("%") else 1
    digits = {"nats": 3, "train_nats": 3}.get(measure, 1 if mean >= 100 else 2)
    return f"{write_value(mean, measure).removesuffix(' %')} ± {scale * statistics.stdev(values):.{digits}f}" + (
        " %" if scale == 100 else after
    )
