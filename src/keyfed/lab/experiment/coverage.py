"""Which elements of the five sources work: docs/results/coverage.md, written from studies/coverage/*.toml.

A row names what shows it: tests by path and name, cells by study and labels. Both are looked up whenever the page is
written. A test that is not there, or a cell that is not finished at standard scale, is an error that names the row.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keyfed.errors import ConfigError
from keyfed.files import write_atomically
from keyfed.lab.experiment.grid import StudyCheck, cells_of, load_study, matches
from keyfed.lab.experiment.page import label_of, render
from keyfed.lab.experiment.store import Store
from keyfed.reports.document import NONE, escape_markdown, markdown_table

PAGE = "coverage.md"
STATUSES = ("works", "partial", "missing", "wrong")
WANTS = ("data", "phone", "detail")
SOURCE = {"paper": str, "title": str, "element": [dict]}
ELEMENT = {"number": int, "what": str, "status": str, "reason": str, "want": str, "tests": [str], "cells": [str]}


@dataclass(frozen=True, slots=True)
class Element:
    """One thing that a source has: an equation, a setting, a table, a claim.

    Attributes:
      status: "works"; "partial": some of it, or with a stand-in; "missing"; "wrong": ours is not the source's.
      reason: what is left to do, or a remark on what works.
      want: "data", "phone" or "detail" where nobody here can do more for want of it; a detail is one not printed.
      tests: `path::name` of tests that show it, `cells`: `STUDY | AXIS = LABEL` of finished cells that do.
    """

    number: int
    what: str
    status: str
    reason: str = ""
    want: str = ""
    tests: Sequence[str] = ()
    cells: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A paper and its elements."""

    paper: str
    title: str
    elements: tuple[Element, ...]


def load_source(path: Path) -> Source:
    """Read a paper's elements; a mistake is one line that names the file and the element."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path}: no list of elements: {e}") from None
    check = StudyCheck(f"coverage/{path.name}")
    check.table(document, SOURCE, 3, "the file")
    for number, entry in enumerate(document["element"], 1):
        what = f"element {entry.get('number', number)}"
        check.table(entry, ELEMENT, 3, what)
        check.known([entry["status"]], STATUSES, f"status of {what}")
        check.known([entry["want"]] if "want" in entry else [], WANTS, f"want of {what}")
        if entry["number"] != number:
            check.refuse(f"{what} stands in place {number}; expected numbers from 1 on without a gap")
        if entry["status"] == "works":
            if not entry.get("tests") and not entry.get("cells"):
                check.refuse(f"{what} works, but nothing shows it; name tests or cells")
            if "want" in entry:
                check.refuse(f"{what} works and wants {entry['want']}; leave one out")
        elif not entry.get("reason"):
            check.refuse(f"{what} is {entry['status']} without a reason; say what is left to do")
    return Source(document["paper"], document["title"], tuple(Element(**entry) for entry in document["element"]))


@functools.cache
def named_tests(path: Path) -> frozenset[str]:
    """Names of the tests of a file, `Class::name` for those of a class; found without running it."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        within = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + n.name for n in within if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def check_test(test: str, root: Path) -> None:
    """Refuse a test that is not there."""
    path, _, name = test.partition("::")
    file = root / path
    if not path.startswith("tests/") or not file.is_file():
        raise ConfigError(f'test "{test}": {path} is no file of tests/')
    if name not in named_tests(file):
        raise ConfigError(f'test "{test}": {path} has no such test; expected path::name of a function of it')


def check_cells(said: str, folder: Path, store: Store) -> None:
    """Refuse cells that a study does not have at standard scale, or that are not finished there."""
    name, *conditions = (part.strip() for part in said.split("|"))
    study = load_study(name, folder)
    where = dict(label_of(condition, study, said) for condition in conditions)
    cells = [cell for cell in cells_of(study, "standard") if matches(cell.labels, where) and not cell.absent]
    if not cells:
        raise ConfigError(f'cell "{said}": no row of {name} has these labels at standard scale')
    found = store.of(study)
    left = sum(cell.id not in found for cell in cells)
    if left:
        raise ConfigError(f'cell "{said}" is not finished: {left} of {len(cells)} are open at standard scale')


def coverage_text(folder: Path, store: Store) -> str:
    """Return the page of the elements of every paper, each with what shows it.

    Args:
      folder: of the studies; the tests lie beside it.
    """
    sources = {path: load_source(path) for path in sorted((folder / "coverage").glob("*.toml"))}
    for path, source in sources.items():
        for element in source.elements:
            try:
                for test in element.tests:
                    check_test(test, folder.parent)
                for said in element.cells:
                    check_cells(said, folder, store)
            except ConfigError as e:
                raise ConfigError(f"coverage/{path.name}: element {element.number}: {e}") from None
    every = [element for source in sources.values() for element in source.elements]
    counts = [["paper", "elements", *STATUSES], *(_counts(s.paper, s.elements) for s in sources.values())]
    return render(
        PAGE,
        counts=[*counts, _counts("all", every)],
        wanting={want: sum(element.want == want for element in every) for want in WANTS},
        sources=[(source, _table(source)) for source in sources.values()],
    )


def _counts(name: str, elements: Sequence[Element]) -> list[str]:
    found: Mapping[str, int] = Counter(element.status for element in elements)
    return [name, str(len(elements)), *(str(found[status]) for status in STATUSES)]


def _table(source: Source) -> str:
    """A paper's elements in Markdown, with links to what shows them."""
    rows = [["#", "element", "status", "shown by", "what is left, or a remark"]]
    for element in source.elements:
        tests = [f"[{test.partition('::')[2]}](../../{test.partition('::')[0]})" for test in element.tests]
        cells = [_cell(said) for said in element.cells]
        reason = escape_markdown(element.reason) or NONE
        wants = f"For want of {'a phone' if element.want == 'phone' else element.want}: " if element.want else ""
        status = element.status if element.status == "works" else f"**{element.status}**"
        shown = ", ".join([*tests, *cells]) or NONE
        rows.append([str(element.number), escape_markdown(element.what), status, shown, wants + reason])
    return markdown_table(rows)


def _cell(said: str) -> str:
    name, *conditions = (part.strip() for part in said.split("|"))
    labels = ", ".join(condition.partition("=")[2].strip() for condition in conditions)
    return f"[{name}]({name}.md){f' ({escape_markdown(labels)})' if labels else ''}"


def write_coverage(folder: Path, store: Store) -> Path:
    """Write docs/results/coverage.md."""
    write_atomically(store.results / PAGE, coverage_text(folder, store).encode())
    return store.results / PAGE
