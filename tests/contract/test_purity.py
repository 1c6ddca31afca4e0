"""What the parts of the package may know of each other and of the world, read from their imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import keyfed

SOURCE = Path(keyfed.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PURE = ("text", "model", "federated")
WORLDLY = ("pathlib", "os", "io", "shutil", "tempfile", "time", "datetime", "socket", "subprocess", "sys", "logging")
DECODER = ("keys", "session")
CRYPTOGRAPHY = (
    "masks", "shamir", "keys", "secure_sum", "member", "collector", "terms", "wire", "accusation", "suspects"
)  # fmt: skip # of keyfed.private.secagg
SECURE = (
    "sums/codec", "sums/secure_round", "sums/masked", "sums/noised", "task", "client",
    "counting", "device_store", "membership", "messages", "transport", "server", "sums", "promise", "pages",
)  # fmt: skip # the parts of keyfed.engine and keyfed.wire that know secure sums or noise
PICKLES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")


class Read(NamedTuple):
    """What a file's syntax tree says, as far as the rules below ask."""

    imports: tuple[str, ...]
    calls: tuple[tuple[str, int], ...]
    attributes: tuple[tuple[str, int], ...]


@functools.cache
def read(path: Path) -> Read:
    """Parse a file, once for all the tests that ask about it."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"), str(path))))
    calls = tuple((dotted(node.func), node.lineno) for node in nodes if isinstance(node, ast.Call))
    attributes = tuple((dotted(node), node.lineno) for node in nodes if isinstance(node, ast.Attribute))
    return Read(tuple(imports_among(nodes, path)), calls, attributes)


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_among(nodes: list[ast.AST], path: Path) -> Iterator[str]:
    package = module_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{whole}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> tuple[str, ...]:
    """Every module imported anywhere in a file, in full; names imported from one count as its parts."""
    return read(path).imports


def calls_of(path: Path) -> tuple[tuple[str, int], ...]:
    """The dotted name of everything called in a file, and the line."""
    return read(path).calls


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def within(folder: str) -> list[Path]:
    found = sorted((SOURCE / folder).rglob("*.py"))
    assert found, f"keyfed.{folder} is gone"
    return found


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", [p for folder in PURE for p in within(folder)], ids=name)
def test_text_model_and_federated_know_only_themselves_and_the_errors(path):
    own = f"keyfed.{path.relative_to(SOURCE).parts[0]}"
    for module in imports_of(path):
        if module == "keyfed" or module.startswith("keyfed."):
            known = module == own or module.startswith((f"{own}.", "keyfed.errors."))
            assert known, f"{path} imports {module}"


@pytest.mark.parametrize("path", [*within("engine"), *within("wire")], ids=name)
def test_the_engine_does_not_know_runs(path):
    inside = path.relative_to(SOURCE).with_suffix("").as_posix().partition("/")[2]
    for module in imports_of(path):
        outer = (
            "keyfed.run", "keyfed.reports", "keyfed.lab", "keyfed.cli", "keyfed.keyboard",
            *(() if path == SOURCE / "wire" / "flower" / "commands.py" else ("keyfed.config",)),
        )  # fmt: skip
        assert not module.startswith(outer), f"{path} imports {module}"
        assert inside in SECURE or not module.startswith("keyfed.private"), f"{path} imports {module}"


@pytest.mark.parametrize("path", [p for p in within("private/secagg") if p.stem in CRYPTOGRAPHY], ids=name)
def test_secure_sums_know_bytes_and_numpy_only_and_draw_from_the_system(path):
    worldly = tuple(module for module in WORLDLY if module != "os")
    for module in imports_of(path):
        top = module.split(".")[0]
        assert top not in (*worldly, "torch", "flwr", "random", "secrets"), f"{path} imports {module}"
        assert not module.startswith(("numpy.random", "os.")), f"{path} imports {module}"
        if top == "keyfed":
            assert module.startswith(("keyfed.private.", "keyfed.errors.")) or module == "keyfed.private", path
    for used, line in read(path).attributes:
        assert used not in ("np.random", "numpy.random"), f"{path}:{line}"
        if used.startswith("os."):
            assert used == "os.urandom", f"{path}:{line} uses {used}"
    for call, line in calls_of(path):
        assert call not in ("open", "print", "input", "exec", "eval", "__import__"), f"{path}:{line} calls {call}"


def test_the_files_of_the_decoder_are_there():
    assert set(DECODER) <= {path.stem for path in within("keyboard")}


@pytest.mark.parametrize("path", within("keyboard"), ids=name)
def test_the_keyboard_knows_no_federation_and_its_decoder_only_text_n_grams_and_runs(path):
    outer = ("keyfed.text.", "keyfed.model.ngram.", "keyfed.engine.network.", "keyfed.run.folder.")
    for module in imports_of(path):
        assert not module.startswith("keyfed.federated"), f"{path} imports {module}"
        if path.stem in DECODER and module.startswith("keyfed."):
            known = module.startswith((*outer, "keyfed.keyboard.", "keyfed.errors.", "keyfed.system."))
            assert known, f"{path} imports {module}"


@pytest.mark.parametrize("path", within("federated"), ids=name)
def test_methods_touch_nothing_outside_their_arguments(path):
    for module in imports_of(path):
        assert module.split(".")[0] not in WORLDLY, f"{path} imports {module}"
        assert not module.startswith("numpy.random"), f"{path} imports {module}"
        if module.split(".")[0] == "random":
            assert module in ("random", "random.Random"), f"{path} imports {module}"
    for call, line in calls_of(path):
        where = f"{path}:{line} calls {call}"
        assert call not in ("open", "print", "input", "exec", "eval", "__import__"), where
        if call.startswith("random."):
            assert call == "random.Random", where
        assert not call.startswith(("np.random.", "numpy.random.")), where
        assert "manual_seed" not in call, where
        assert call not in ("torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.save"), where


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_is_pickled_or_printed_and_no_global_seed_is_set(path):
    for module in imports_of(path):
        assert module.split(".")[0] not in PICKLES, f"{path} imports {module}"
        assert module not in ("torch.load", "torch.save"), f"{path} imports {module}"
    for call, line in calls_of(path):
        where = f"{path}:{line} calls {call}"
        assert call not in ("torch.load", "torch.save", "np.load", "numpy.load"), where
        assert call not in ("torch.manual_seed", "np.random.seed", "numpy.random.seed", "random.seed"), where
        if path != SOURCE / "engine" / "module.py":  # a user's module knows no other generator; it is put back
            assert not call.endswith(("default_generator.manual_seed", "cuda.manual_seed", "random.manual_seed")), where
        if path != SOURCE / "cli" / "app.py":
            assert call != "print", where


def test_no_global_numpy_or_python_generator_is_used_anywhere():
    allowed = ("random.Random", "np.random.default_rng", "np.random.Generator")
    for path in FILES:
        imported = {m.split(".")[0] for m in imports_of(path) if m == "random"}
        for call, line in calls_of(path):
            if call.startswith("np.random.") or (call.startswith("random.") and "random" in imported):
                assert call in allowed, f"{path}:{line} calls {call}"


def test_flower_is_known_to_its_own_files_and_deployment_to_the_command_line_only():
    for path in FILES:
        inside = path.relative_to(SOURCE)
        for module in imports_of(path):
            if module.split(".")[0] == "flwr":
                flower = inside.parts[0] == "deploy" or inside.parts[:2] == ("wire", "flower")
                own = flower or "contenders" in inside.name
                assert own, f"{path} imports {module}"
            if module.startswith("keyfed.deploy"):
                commands = ("cli/federation.py", "cli/server.py", "cli/train.py")
                pages = ("keyboard/lan.py", "keyboard/endpoint.py")  # a certificate of its own; the server of pages
                outer = inside.parts[0] == "deploy" or inside.as_posix() in (*commands, *pages, "wire/flower/gate.py")
                assert outer, f"{path} imports {module}"


def test_the_reader_of_imports_reads_them(tmp_path, monkeypatch):
    inside = tmp_path / "keyfed" / "text"
    inside.mkdir(parents=True)
    path = inside / "a.py"
    path.write_text(
        "import os.path as p\nfrom . import b\nfrom ..model import c\nfrom keyfed.errors import d\nx.y(z())\n"
    )
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path / "keyfed")
    assert list(imports_of(path)) == ["os.path", "keyfed.text.b", "keyfed.model.c", "keyfed.errors.d"]
    assert sorted(calls_of(path)) == [("x.y", 5), ("z", 5)]
