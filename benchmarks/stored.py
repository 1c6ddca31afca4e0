"""Figures that are kept in docs/results/data, and the tables that a page of the documentation has of them.

    python benchmarks/stored.py          # write every table again from its kept figures; measures nothing

A benchmark with `--write` measures, keeps its figures with the machine and the day, and writes its tables between two
marks of a page. A test compares the page with the kept figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfed.lab.bench.bench import machine

DOCS = Path(__file__).parent.parent / "docs"
HEADING = re.compile(r"^#{1,6} .*$", re.M)
BENCHMARKS = ("keyboard_mixture", "keyboard_everyday", "keyboard_browser", "keyboard_network", "keyboard_training")


@dataclass(frozen=True)
class Stored:
    """Where the figures of a benchmark are kept, and where their tables stand.

    Args:
      script: the benchmark's name.
      data: a file of docs/results/data.
      heading: of the section that has the tables.
      tables: from what the file holds to Markdown.
    """

    script: str
    data: str
    heading: str
    tables: Callable[[Any], str]
    docs: Path = DOCS

    @property
    def path(self) -> Path:
        return self.docs / "results" / "data" / self.data

    @property
    def page(self) -> Path:
        return self.docs / "keyboard.md"

    @property
    def marks(self) -> tuple[str, str]:
        name = f"benchmarks/{self.script}.py"
        return f"<!-- made by {name} --write; do not edit -->", f"<!-- end of {name} -->"

    def figures(self) -> Any:
        """Return what is kept; None before the first measurement."""
        return json.loads(self.path.read_text("utf-8")) if self.path.exists() else None

    def block(self) -> str:
        """Return the tables with their marks."""
        found = self.figures()
        body = "No figures are kept yet." if found is None else self.tables(found)
        return f"{self.marks[0]}\n\n{body}\n\n{self.marks[1]}"

    def placed(self, text: str) -> str:
        """Return a page's text with the tables of today.

        Raises:
          ValueError: each mark has to be there a single time, in order, in its section.
        """
        begin, end = self.marks
        before, _, rest = text.partition(begin)
        between, _, after = rest.partition(end)
        if (text.count(begin), text.count(end)) != (1, 1) or end in before or HEADING.search(between):
            raise ValueError(f"{self.page.name} has to have these marks a single time, in one section: {begin} {end}")
        heading = "".join(HEADING.findall(before)[-1:])
        if heading != self.heading:
            raise ValueError(f'{begin} stands below "{heading}" of {self.page.name}, not "{self.heading}"')
        return f"{before}{self.block()}{after}"

    def write_page(self) -> None:
        self.page.write_text(self.placed(self.page.read_text("utf-8")), "utf-8")

    def write(self, figures: Any) -> None:
        """Keep figures and write their tables; the page's marks are looked at first."""
        self.placed(self.page.read_text("utf-8"))
        self.path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")
        self.write_page()
        print(f"wrote {self.path} and {self.page}", file=sys.stderr)


def load() -> float:
    """Processes that run or wait, for each core: the mean of the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def about(load_before: float, **versions: str) -> dict[str, Any]:
    """Return where and when something was measured."""
    here = machine("cpu")
    return {
        "date": here["date"], "machine": f"{here['cpu']}, {os.cpu_count()} cores",
        "load_per_core": {"before": load_before, "after": load()},
        "versions": {"python": platform.python_version(), "torch": here["torch"], **versions},
    }  # fmt: skip


def about_text(found: dict[str, Any]) -> str:
    """Write it for people: the machine, its load before the measurement, versions but Python's, the day."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "python")
    return (
        f"{found['machine']}, load before {found['load_per_core']['before']:.1f} and after "
        f"{found['load_per_core']['after']:.1f} a core; {versions}; {found['date']}"
    )


def all_stored() -> list[Stored]:
    """Return what every benchmark keeps."""
    return [importlib.import_module(name).STORED for name in BENCHMARKS]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for one in all_stored():
        one.write_page()


if __name__ == "__main__":
    main()
