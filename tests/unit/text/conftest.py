"""Where the published corpora lie, if they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """KEYFED_DATA, else ../shared/data beside the repository; the test is skipped where there is neither."""
    root = Path(__file__).resolve().parents[3]
    path = Path(os.environ.get("KEYFED_DATA") or root.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no published corpora at {path} (set KEYFED_DATA)")
    return path
