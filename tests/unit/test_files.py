"""Files that are whole or not there: what is on the disk before what, and what a failure leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keyfed.errors import RunError
from keyfed.files import locked, make_durable, write_atomically


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """What was waited for and renamed, in this order; a file as the name and the content that the disk then has."""
    seen: list[str] = []
    replace = Path.replace

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        seen.append(f"{path.name}: {path.read_text()}" if path.is_file() else f"folder {path.name}")

    def renamed(self: Path, target: Path) -> Path:
        seen.append(f"{self.name} -> {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", renamed)
    return seen


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="handles are looked up in /proc")


@needs_proc
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(asked, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_atomically(folder / "state", b"whole")
    assert asked == [".state.tmp: whole", ".state.tmp -> state", "folder run"]
    asked.clear()
    write_atomically(folder / "state", b"later", durable=False)
    assert asked == [".state.tmp -> state"]
    asked.clear()
    make_durable(folder / "state")
    assert asked == ["state: later"]


def test_a_disk_that_fails_leaves_the_old_file_and_no_other(monkeypatch, tmp_path):
    write_atomically(tmp_path / "state", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_atomically(tmp_path / "state", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"old"


def test_a_lock_keeps_others_out_until_it_is_left(tmp_path):
    with locked(tmp_path / "lock"), pytest.raises(BlockingIOError, match="held by another"), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock", wait=True):
        pass


def test_a_lock_in_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path / "none" / "lock"):
        pass
