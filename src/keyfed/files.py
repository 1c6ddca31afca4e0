"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from keyfed.errors import RunError


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
        raise RunError(
            f"{path}: could not be written ({e.strerror or e}); what was there before is whole. "
            "Free some space; a run goes on with --resume"
        ) from e


def make_durable(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
