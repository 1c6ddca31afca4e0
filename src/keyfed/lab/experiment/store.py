"""The results of cells on disk: one small JSON file each, read back only if it is whole and still what its id says."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, RunError
from keyfed.files import write_atomically
from keyfed.lab.experiment.cell import options_of
from keyfed.lab.experiment.check import BY, target_measure
from keyfed.lab.experiment.grid import Cell, Study

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
           "seconds")  # fmt: skip
TEXTS = ("data", "data_sha256", "vectors_sha256", "first_data_sha256", "init_sha256", "model")
SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # of what pages read, where a cell has it
    "measures": (lambda v: all(map(_is_number_or_none, v.values())), "a number or null for each"),
    "curve": (lambda v: _are_points(v, 4), "points of 4 numbers"),
    "training": (lambda v: isinstance(v, dict) and all(_are_points(v.get(by), 3) for by in BY), "points of 3 numbers"),
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

        An id says what is computed: a cell that another study has finished need not be run again, unless that study did
        not look for the targets of this one. Where two have the same id, the one that measured more counts. A file that
        is damaged, or was made with other defaults of its method than today's, is left out: the cell is open.
        """
        own = self.folder(study.name)
        refuse_file(own, "--results")
        found: dict[str, dict[str, Any]] = {}
        every = [*own.glob("*.json")], [*(self.results / "data").glob("*/*.json")]
        for path in dict.fromkeys(path for paths in every for path in sorted(paths)):
            record = self._record(path)
            if record is None or not has_targets(record, study.targets):
                continue
            before = found.setdefault(record["id"], record)
            if len(record["measures"]) > len(before["measures"]):
                found[record["id"]] = record
        return found

    def has(self, cell: Cell, targets: Sequence[float]) -> bool:
        """Tell whether a cell's result, with the rounds to these targets, is there by now."""
        read = map(self._record, (self.results / "data").glob(f"*/*-{cell.id}.json"))
        return any(record is not None and has_targets(record, targets) for record in read)

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


def has_targets(record: Mapping[str, Any], targets: Sequence[float]) -> bool:
    """Tell whether a result says when each target was reached; one without rounds has nothing to say."""
    return not record["curve"] or all(target_measure(target) in record["measures"] for target in targets)


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
    keys = sorted(key for key in {*then, *now} if then.get(key) != now.get(key))
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
