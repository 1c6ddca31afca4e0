"""The order of the rooms and their size: which may import which, how many files, how long, one name for one class.

pyproject.toml has the order, for import-linter and for this test. `layers.toml` next to this file has what is left of
older debts. A debt that is not listed fails, and so does a listed one that is paid.
`python -m tests.contract.test_layers` drops the paid ones and adds none.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import keyfed

SOURCE = Path(keyfed.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
RULES = Path(__file__).with_name("layers.toml")
MOST_FILES, MOST_LINES, MOST_OF_A_PREFIX = 20, 600, 2

Tree = Mapping[str, str]  # text of every file, by its path below src/keyfed
Debts = dict[str, list[str]]


@functools.cache
def rules() -> dict[str, list]:
    """The debts of layers.toml, and from pyproject.toml the rooms from the bottom to the top and imports against it."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    order = [re.split(r" [|:] ", rooms) for rooms in reversed(contract["layers"])]
    return {
        "layers": [*order, ["keyfed", *contract["exhaustive_ignores"]]],
        "imports": [debt.replace("->", "→") for debt in contract["ignore_imports"] if debt != "keyfed -> keyfed.api"],
        **tomllib.loads(RULES.read_text("utf-8")),
    }


@functools.cache
def whole() -> Tree:
    return {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Every node of a file, wherever it stands: at the top, in a function, under TYPE_CHECKING."""
    return tuple(ast.walk(ast.parse(text)))


def module_of(path: str) -> str:
    parts = ["keyfed", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a module; the package itself is the room "keyfed"."""
    return ([*module.split("."), "keyfed"] if module == "keyfed" else module.split("."))[1]


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def imported(path: str, tree: Tree) -> Iterator[str]:
    """Every module of ours that a file imports, by statement or by `import_module("…")`."""
    known = set(map(module_of, tree))
    package = module_of(path).split(".")
    package = package if path.endswith("__init__.py") else package[:-1]
    for node in nodes(tree[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and named.value in known:
                yield str(named.value)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            whole = (f"{origin}.{alias.name}" for alias in node.names)
            found = {name if name in known else origin for name in whole if name != "keyfed.__version__"}
            yield from sorted(found & known)  # the version may be read by all


def against_the_order(tree: Tree) -> list[str]:
    """Imports of a room above one's own."""
    height = {room: at for at, rooms in enumerate(rules()["layers"]) for room in rooms}
    out = []
    for path in tree:
        here = module_of(path)
        for there in imported(path, tree):
            for room in (room_of(here), room_of(there)):
                assert room in height, f"{path}: the room {room} is not in the order of pyproject.toml"
            if height[room_of(there)] > height[room_of(here)]:
                out.append(f"{here} → {there}")
    return sorted(out)


def over_full(tree: Tree) -> list[str]:
    """Folders of more than 20 files, each file beyond the twentieth as a debt of its own."""
    counts = Counter(str(Path(path).parent) for path in tree)
    return [f"{folder} {n}" for folder, count in sorted(counts.items()) for n in range(MOST_FILES + 1, count + 1)]


def too_long(tree: Tree) -> list[str]:
    return sorted(path for path, text in tree.items() if len(text.splitlines()) > MOST_LINES)


def prefixed(tree: Tree) -> list[str]:
    """Files of one folder that share a `prefix_`, three or more: they are a package."""
    families = defaultdict(list)
    for path in tree:
        stem = Path(path).stem
        if "_" in stem.strip("_"):
            families[Path(path).parent / f"{stem.partition('_')[0]}_"].append(path)
    return sorted(path for files in families.values() if len(files) > MOST_OF_A_PREFIX for path in files)


def named_twice(tree: Tree) -> list[str]:
    """Names of classes that another class has, once for every class beyond the first."""
    found = Counter(node.name for text in tree.values() for node in nodes(text) if isinstance(node, ast.ClassDef))
    return sorted((found - Counter(set(found))).elements())


def callers_of_run_round(tree: Tree) -> list[str]:
    return sorted(
        module_of(path)
        for path, text in tree.items()
        for node in nodes(text)
        if isinstance(node, ast.Call) and called(node) == "run_round"
    )


CHECKS = {
    "imports": against_the_order, "over_full": over_full, "too_long": too_long, "prefixed": prefixed,
    "named_twice": named_twice, "run_round": callers_of_run_round,
}  # fmt: skip


def compared(what: str, tree: Tree) -> tuple[list[str], list[str]]:
    """Return the debts that are not listed, and the listed ones that are paid."""
    found, listed = Counter(CHECKS[what](tree)), Counter(rules()[what])
    return sorted((found - listed).elements()), sorted((listed - found).elements())


@pytest.mark.parametrize("what", CHECKS)
def test_no_debt_is_added(what):
    added, _ = compared(what, whole())
    assert not added, f"{what}: {added}"


@pytest.mark.parametrize("what", [what for what in CHECKS if what != "run_round"])  # callers may be fewer than listed
def test_what_is_paid_is_listed_no_more(what):
    _, paid = compared(what, whole())
    assert not paid, f"{what}: run `python -m tests.contract.test_layers`, which drops {paid}"


MUTANTS = [
    ("imports", "text/vocab.py", "from keyfed.run.folder import load_model", "keyfed.text.vocab → keyfed.run.folder"),
    ("imports", "text/vocab.py", "from keyfed.run import folder", "keyfed.text.vocab → keyfed.run.folder"),
    ("imports", "text/vocab.py", "from ..run import folder", "keyfed.text.vocab → keyfed.run.folder"),
    ("imports", "text/vocab.py", "import keyfed.run.folder as f", "keyfed.text.vocab → keyfed.run.folder"),
    ("imports", "text/vocab.py", "def f():\n    import keyfed.cli.app", "keyfed.text.vocab → keyfed.cli.app"),
    ("imports", "text/vocab.py", "if TYPE_CHECKING:\n    import keyfed.api", "keyfed.text.vocab → keyfed.api"),
    ("imports", "text/vocab.py", 'import_module("keyfed.api")', "keyfed.text.vocab → keyfed.api"),
    ("imports", "text/vocab.py", "from keyfed import train", "keyfed.text.vocab → keyfed"),
    ("imports", "run/folder.py", "from keyfed.lab.bench import bench", "keyfed.run.folder → keyfed.lab.bench.bench"),
    ("imports", "errors.py", "from keyfed.config.load import Config", "keyfed.errors → keyfed.config.load"),
    ("too_long", "text/vocab.py", "\n" * MOST_LINES, "text/vocab.py"),
    ("named_twice", "text/vocab.py", "class Config: ...", "Config"),
    ("run_round", "text/vocab.py", "run_round(1)", "keyfed.text.vocab"),
    ("run_round", "text/vocab.py", "def f():\n    x.run_round(1)", "keyfed.text.vocab"),
]


@pytest.mark.parametrize(("what", "path", "line", "debt"), MUTANTS, ids=[f"{m[1]}: {m[2].strip()}" for m in MUTANTS])
def test_a_line_that_breaks_a_rule_is_found(what, path, line, debt):
    others = whole() if what == "named_twice" else dict.fromkeys(whole(), "")  # what they say does not matter here
    added, _ = compared(what, {**others, path: f"{whole()[path]}\n{line}\n"})
    assert debt in added


def test_files_that_break_a_rule_are_found():
    many = {f"wire/flower/n{n}.py": "" for n in range(MOST_FILES)}
    added, _ = compared("over_full", {**whole(), **many})
    assert f"wire/flower {MOST_FILES + 1}" in added
    family = [f"model/new_{name}.py" for name in "abc"]
    assert compared("prefixed", {**whole(), **dict.fromkeys(family, "")})[0] == family
    assert compared("prefixed", {**whole(), **dict.fromkeys(family[:2], "")})[0] == []


def test_a_room_that_the_order_does_not_know_is_refused():
    with pytest.raises(AssertionError, match="room utils is not in the order"):
        against_the_order({**whole(), "utils/__init__.py": "", "utils/a.py": "import keyfed.errors"})


def test_the_version_may_be_read_and_lower_rooms_may_be_imported_anywhere():
    lines = "from keyfed import __version__\nfrom keyfed.errors import nearest\nfrom . import batches\n"
    tree = {**whole(), "text/vocab.py": whole()["text/vocab.py"] + lines}
    assert compared("imports", tree)[0] == compared("imports", whole())[0]


def test_a_debt_that_is_paid_has_to_leave_the_list():
    tree = {path: text for path, text in whole().items() if module_of(path) not in rules()["run_round"]}
    assert compared("run_round", tree)[1] == sorted(rules()["run_round"])


def drop_paid(text: str, tree: Tree) -> str:
    """Return the rules without the debts that are paid."""
    section, lines = "", []
    left = {what: Counter(check(tree)) for what, check in CHECKS.items()}
    for line in text.splitlines(keepends=True):
        begins, entry = re.match(r"(\w+) = \[", line), re.match(r'  "(.*)",', line)
        section = begins[1] if begins else section
        if entry and section in left:
            if not left[section][entry[1]]:
                continue
            left[section][entry[1]] -= 1
        lines.append(line)
    return "".join(lines)


def test_dropping_leaves_what_is_owed_and_adds_nothing():
    owed = tomllib.loads(drop_paid('run_round = [\n  "gone",\n  "keyfed.here",\n  "keyfed.here",\n]\n', {
        "here.py": "run_round()", "other.py": "run_round()",
    }))  # fmt: skip
    assert owed == {"run_round": ["keyfed.here"]}


if __name__ == "__main__":
    RULES.write_text(drop_paid(RULES.read_text("utf-8"), whole()), "utf-8")
