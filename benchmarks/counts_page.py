"""What measurements of counts share: figures in docs/results/data, and the tables in docs/counts.md made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
DATA, PAGE = DOCS / "results" / "data", DOCS / "counts.md"
END = "<!-- end -->"


def read(name: str) -> Any:
    """Return the stored figures of a measurement; an empty object where there are none."""
    path = DATA / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def keep(name: str, figures: Any) -> None:
    """Store figures as docs/results/data/NAME.json."""
    (DATA / f"{name}.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")


def begin(name: str) -> str:
    """Return the line before the tables of a measurement."""
    return f"<!-- made by benchmarks/{name.replace('-', '_')}.py --write; do not edit -->"


def between(page: str, name: str) -> str:
    """Return what a page has between the marks of a measurement."""
    _, mark, rest = page.partition(begin(name))
    if not mark:
        raise SystemExit(f"{PAGE} has no line {begin(name)}")
    return rest.partition(END)[0].strip("\n")


def write(name: str, lines: Sequence[str]) -> None:
    """Put tables into the page, between their marks."""
    page = PAGE.read_text("utf-8")
    between(page, name)
    head, _, rest = page.partition(begin(name))
    body = "\n".join(lines)
    PAGE.write_text(f"{head}{begin(name)}\n\n{body}\n\n{END}{rest.partition(END)[2]}", "utf-8")
