"""Files that are whole or not there, locks, and reading files that may be damaged all the same."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyfed.errors import RunError

MOST_JSON = 1 << 28  # bytes of a JSON file of our own
DEEPEST = 64  # nesting of one
BROKEN = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
"""What reading values out of a damaged document may raise; for a typed error around just that."""


def read_json(path: Path) -> Any:
    """Read a JSON file of our own; OSError where it cannot be read, ValueError where it is damaged."""
    size = path.stat().st_size
    if size > MOST_JSON:
        raise ValueError(f"{size:,} bytes; at most {MOST_JSON:,} are read")
    return parse_json(path.read_bytes())


def parse_json(data: bytes | str) -> Any:
    """Parse JSON of our own; ValueError where it is none, or nested deeper than anything that we write.

    Example:
      >>> parse_json("[1, 2]")
      [1, 2]
      >>> parse_json("[" * 10**6)
      Traceback (most recent call last):
      ValueError: nested deeper than 64
    """
    deep = ValueError(f"nested deeper than {DEEPEST}")
    try:
        found = json.loads(data if isinstance(data, str) else data.decode("utf-8"))
    except RecursionError:
        raise deep from None
    level = [found]
    for _ in range(DEEPEST):
        level = [
            inner for outer in level if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]  # fmt: skip
        if not level:
            return found
    raise deep


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write under a temporary name, fsync, rename, fsync the folder; a failure leaves the old file alone.

    Args:
      durable: False leaves out the fsyncs, for files that `make_durable` is called on later or that may be lost.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            if durable:
                os.fsync(f.fileno())
        temporary.replace(path)
        if durable:
            make_durable(path.parent)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        of_run = any((folder / "run.toml").exists() for folder in (path.parent, path.parent.parent))
        advice = space_advice(e, of_run=of_run) or "; choose a place that can be written to"
        raise RunError(f"{path}: could not be written ({e.strerror or e}){advice}") from e


def append_durably(path: Path, line: bytes) -> int:
    """Append a line, fsync, and return the file's new length."""
    with path.open("ab") as f:
        f.write(line + b"\n")
        f.flush()
        os.fsync(f.fileno())
        return f.tell()


def written_name(name: str) -> str:
    """Return the name of the file that a temporary one was to become; any other name as it is.

    Example:
      >>> written_name(".result.json.tmp"), written_name("result.json")
      ('result.json', 'result.json')
    """
    temporary = len(name) > 5 and name.startswith(".") and name.endswith(".tmp")
    return name[1:-4] if temporary else name


def space_advice(error: OSError, *, of_run: bool = True) -> str:
    """Return what to do about a full disk, to stand behind a message; nothing for what space does not mend.

    Args:
      of_run: whether it was, or may have been, a run that was writing.

    Example:
      >>> space_advice(OSError(errno.ENOSPC, "No space left on device"), of_run=False)
      '; what was there before is whole. Free some space'
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return "; what was there before is whole. Free some space" + ("; a run goes on with --resume" if of_run else "")


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; the system frees it when the process ends, however that goes.

    Args:
      wait: until another process has left it.

    Raises:
      BlockingIOError: another process holds it.
      OSError: the file cannot be opened.
    """
    from filelock import FileLock, Timeout

    if not path.parent.is_dir():  # which filelock would make
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(f"{path} is held by another process") from None
    try:
        yield
    finally:
        lock.release()


def make_durable(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Windows has no such call for a folder."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
