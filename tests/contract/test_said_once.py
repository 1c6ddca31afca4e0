"""One of each, said once and typed: locks, tables, pages, figures, names of methods, values that cross rooms.

`said_once.toml` next to this file lists what is left of older debts, as `layers.toml` does for test_layers.py: a debt
that is not listed fails, and so does a listed one that is paid. `python -m tests.contract.test_said_once` writes the
list without the paid ones and adds none.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keyfed.federated.methods import METHODS
from tests.contract.test_layers import Tree, imported, module_of, nodes, room_of, whole

LISTED = Path(__file__).with_name("said_once.toml")


def imports_of(text: str, *libraries: str) -> bool:
    """Whether a file imports one of these libraries, wherever the statement stands."""
    named = [
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in nodes(text)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    return any(name == library or name.startswith(f"{library}.") for name in named for library in libraries)


@functools.cache
def strings(text: str) -> tuple[str, ...]:
    """Every string of a file that is no docstring."""
    documented = {
        id(node.body[0].value)
        for node in nodes(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return tuple(
        node.value
        for node in nodes(text)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
    )


def importing(*libraries: str) -> Callable[[Tree], list[str]]:
    return lambda tree: [module_of(path) for path, text in tree.items() if imports_of(text, *libraries)]


def saying(*parts: str) -> Callable[[Tree], list[str]]:
    return lambda tree: [
        module_of(path) for path, text in tree.items() if any(part in said for said in strings(text) for part in parts)
    ]


def methods_named(tree: Tree) -> list[str]:
    """Names of methods in code; they belong to the modules that define methods, and to files of studies and tests."""
    return [
        f"{module_of(path)} {said}"
        for path, text in tree.items()
        if room_of(module_of(path)) != "federated" or "private" in path
        for said in sorted(set(strings(text)) & set(METHODS))
    ]


def untyped(tree: Tree) -> list[str]:
    """Functions that take or return a `dict[str, Any]` and are imported by another room."""
    shared: dict[str, set[str]] = {}
    for path, text in tree.items():
        for node in nodes(text):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    shared.setdefault(f"{node.module}.{alias.name}", set()).add(room_of(module_of(path)))
    return [
        f"{module_of(path)}.{name}"
        for path, text in tree.items()
        for name in _untyped_functions(text)
        if shared.get(f"{module_of(path)}.{name}", set()) - {room_of(module_of(path))}
    ]


def _untyped_functions(text: str) -> Iterator[str]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            said = [ast.unparse(hint) for hint in [*(a.annotation for a in arguments), node.returns] if hint]
            if any("[str, Any]" in hint for hint in said):
                yield node.name


CHECKS: dict[str, Callable[[Tree], list[str]]] = {
    "locks": importing("fcntl", "msvcrt", "filelock"),  # one lock
    "pages": saying("<html", "<!doctype", "<!DOCTYPE"),  # one writer of pages
    "tables": saying("| ---", "|---", "<table"),  # one writer of tables
    "terminal_tables": importing("rich.table"),  # one printer of tables
    "figures": importing("matplotlib"),  # one set of figures
    "methods": methods_named,
    "untyped": untyped,
}


@functools.cache
def listed() -> dict[str, list[str]]:
    return tomllib.loads(LISTED.read_text("utf-8"))


def compared(what: str, tree: Tree) -> tuple[list[str], list[str]]:
    """Return what is not listed, and what is listed and no more there."""
    found, known = Counter(CHECKS[what](tree)), Counter(listed()[what])
    return sorted((found - known).elements()), sorted((known - found).elements())


@pytest.mark.parametrize("what", CHECKS)
def test_nothing_is_said_in_one_more_place(what):
    added, paid = compared(what, whole())
    assert not added, f"{what}: {added}"
    assert not paid, f"{what}: run `python -m tests.contract.test_said_once`, which drops {paid}"


MUTANTS = [
    ("locks", "def f():\n    import fcntl", "keyfed.text.vocab"),
    ("pages", "PAGE = '<!doctype html>'", "keyfed.text.vocab"),
    ("tables", "LINE = '| --- | --: |'", "keyfed.text.vocab"),
    ("terminal_tables", "from rich.table import Table", "keyfed.text.vocab"),
    ("figures", "import matplotlib.pyplot as plt", "keyfed.text.vocab"),
    ("methods", "if name == 'fedatt': ...", "keyfed.text.vocab fedatt"),
    ("untyped", "def new(a: dict[str, Any]) -> int: ...", "keyfed.text.vocab.new"),
]


@pytest.mark.parametrize(("what", "line", "debt"), MUTANTS, ids=[mutant[0] for mutant in MUTANTS])
def test_a_line_that_says_it_again_is_found(what, line, debt):
    tree = {**whole(), "text/vocab.py": f"{whole()['text/vocab.py']}\n{line}\n"}
    tree["run/new.py"] = "from keyfed.text.vocab import new\n"
    assert debt in compared(what, tree)[0]
    assert "keyfed.text.vocab" in set(imported("run/new.py", tree))


def write(tree: Tree) -> str:
    """Return the list without what is paid; a check that has no list yet gets all that is found."""
    known = listed() if LISTED.exists() else {}
    lines = ["# Where it is said today: one place where a rule is kept, else debts. Lists may only become shorter.\n"]
    for what, check in CHECKS.items():
        found = Counter(check(tree))
        left = sorted((found & Counter(known[what])).elements() if what in known else found.elements())
        lines.append(f"\n{what} = [\n" + "".join(f'  "{entry}",\n' for entry in left) + "]\n")
    return "".join(lines)


if __name__ == "__main__":
    LISTED.write_text(write(whole()), "utf-8")
