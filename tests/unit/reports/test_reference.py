"""Generated documentation says what the program says."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfed.cli.reference import PAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_matches_the_program(name):
    assert (DOCS / name).read_text("utf-8") == PAGES[name](), "run `make docs`"
