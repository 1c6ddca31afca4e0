"""Generated documentation says what the program says."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfed.cli.reference import PAGES, write_pages

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_matches_the_program(name):
    assert (DOCS / name).read_text("utf-8") == PAGES[name](), "run `make docs`"


def test_pages_are_written_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("keyfed.cli.reference.PAGES", {"a.md": lambda: "one\n"})
    assert write_pages(tmp_path / "docs") == [tmp_path / "docs" / "a.md"]
    assert (tmp_path / "docs" / "a.md").read_text("utf-8") == "one\n"
