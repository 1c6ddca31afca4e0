"""The results of cells on disk: one small JSON file each, read back only if it is whole and still what its id says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError
from keyfed.files import write_atomically
from keyfed.run.studies_cells import options_of
from keyfed.run.studies_plan import Cell

NEEDED = {"id": str, "runner": str, "seed": int, "settings": dict, "measures": dict, "curve": list, "made": dict}
MADE = ("keyfed", "torch", "python", "hardware")


def data_folder(results: Path, study: str) -> Path:
    """Where a study's cells lie."""
    return results / "data" / study


def finished(results: Path, study: str, say: Callable[[str], Any] = lambda line: None) -> dict[str, dict[str, Any]]:
    """Return the results of a study by cell id, in the order of their file names; then those of other studies.

    An id says what is computed: a cell that another study has finished need not be run again. A file that is damaged,
    or was made with other defaults of its method than today's, is left out: the cell is open.

    Args:
      say: gets a line for each file that is left out.
    """
    refuse_file(data_folder(results, study), "--results")
    found: dict[str, dict[str, Any]] = {}
    every = [*data_folder(results, study).glob("*.json")], [*(results / "data").glob("*/*.json")]
    for path in dict.fromkeys(path for paths in every for path in sorted(paths)):
        record = read_cell(path, say)
        if record is not None:
            found.setdefault(record["id"], record)
    return found


def is_finished(results: Path, cell: Cell) -> bool:
    """Tell whether a cell's result is there by now."""
    paths = (results / "data").glob(f"*/*-{cell.id}.json")
    return any(read_cell(path, lambda line: None) is not None for path in paths)


def read_cell(path: Path, say: Callable[[str], Any]) -> dict[str, Any] | None:
    """Read a cell's result; None, and a line to `say`, if it cannot be counted."""
    try:
        record = json.loads(path.read_text("utf-8"))
        wrong = _problem(record)
    except (OSError, ValueError) as e:
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
    return "" if isinstance(record.get("options", {}), dict) else f"options is {record['options']!r}"


def refuse_file(folder: Path, option: str) -> None:
    """Refuse a file where a folder is wanted, or is to be made."""
    wrong = next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), None)
    if wrong is not None:
        raise ConfigError(f"{option} {folder}: {wrong} is a file; expected a folder")


def write_cell(results: Path, cell: Cell, record: Mapping[str, Any]) -> Path:
    """Write a cell's result and return where."""
    folder = data_folder(results, cell.study)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(folder / cell.file, (compact(text) + "\n").encode())
    return folder / cell.file


def compact(text: str) -> str:
    """Put lists of numbers on one line: a point of a curve is one thing."""
    return re.sub(r"\[\s*([^\[\]{}\"]*?)\s*\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
