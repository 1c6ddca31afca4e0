"""The runs that were submitted to a server, in its home: runs/NUMBER.json says where a run's folder is, and since when.

The program of a run holds runs/NUMBER.lock as long as it works, so that a run that was killed is not taken for one that
goes on. What a run has learnt is in its folder alone. page.txt says where the page is that shows them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from keyfed import files
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.processes import locked, private_folder
from keyfed.files import BROKEN, read_json, write_atomically

RUNS, PAGE = "runs", "page.txt"
NOTE = re.compile(r"(\d{1,20})\.json")
MOST_RUNS = 100  # the newest ones are listed
MOST_BYTES = 16_384  # of a note: a path and a time


class Begun(NamedTuple):
    """A run that was submitted.

    Attributes:
      number: Flower's, of this submission; a run that goes on has another one.
      out: its folder.
      began: seconds since 1970.
      works: whether its program works now.
    """

    number: str
    out: Path
    began: float
    works: bool


@contextmanager
def noted(home: ServerHome, number: str, out: Path) -> Iterator[None]:
    """Note where a run's folder is, and that its program works as long as this lasts."""
    folder = private_folder(home.path / RUNS)
    with locked(folder / f"{number}.lock"):
        note = {"out": str(out), "began": time.time()}
        write_atomically(folder / f"{number}.json", json.dumps(note).encode())
        yield


def begun_runs(home: ServerHome) -> list[Begun]:
    """Return the runs that were submitted, the newest first; of a folder that was submitted again its last one.

    Look from one thread at a time: two that look at once can take each other for a program that works.
    """
    notes = [found for path in (home.path / RUNS).glob("*.json") if (found := _read(path)) is not None]
    newest: dict[Path, Begun] = {}
    for one in sorted(notes, key=lambda note: note.began):
        newest.pop(one.out, None)
        newest[one.out] = one
    return list(newest.values())[: -MOST_RUNS - 1 : -1]


def note_page(home: ServerHome, address: str) -> None:
    """Write where the page of the runs is, for an owner who does not see what the server printed."""
    write_atomically(private_folder(home.path) / PAGE, f"{address}\n".encode())


def _read(path: Path) -> Begun | None:
    """Return what a note says; None for one that is damaged."""
    found = NOTE.fullmatch(path.name)
    try:
        if found is None or path.stat().st_size > MOST_BYTES:
            return None
        said = read_json(path)
        out, began = said["out"], float(said["began"])
        if not isinstance(out, str) or "\0" in out or not 0 <= began < 1e11:
            return None
    except (OSError, *BROKEN):
        return None
    return Begun(found[1], Path(out), began, _held(path.with_suffix(".lock")))


def _held(lock: Path) -> bool:
    """Whether a program holds a lock file."""
    try:
        if lock.exists():
            with files.locked(lock):
                pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
