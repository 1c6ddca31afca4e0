"""A tiny finished run, and what a page's folder looks like."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from keyfed.config.load import Config
from keyfed.keyboard.export import export_run
from keyfed.model.language_model import build_spec, init_params
from keyfed.run.folder import save_model, write_run_toml
from keyfed.text.vocab import SPECIALS, Vocab

WORDS = [f"w{chr(97 + k // 26)}{chr(97 + k % 26)}" for k in range(60)]


needs_onnx = pytest.mark.skipif(
    find_spec("onnx") is None or find_spec("onnxruntime") is None, reason="needs keyfed[keyboard]"
)


@pytest.fixture
def make_run(tmp_path):
    """Write a run to export whose corpus is not there; return its folder."""
    return run_maker(tmp_path)


@pytest.fixture(scope="session")
def one_export(tmp_path_factory) -> Path:
    """The export of one run in eight bits, for tests that read it."""
    folder = tmp_path_factory.mktemp("one")
    return export_run(run_maker(folder)(), folder / "out", int8=True).out


@pytest.fixture
def exported(one_export, tmp_path) -> Path:
    """A copy of that export, to be damaged."""
    return Path(shutil.copytree(one_export, tmp_path / "out"))


def run_maker(root: Path) -> Callable[..., Path]:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package)

    def call(name: str = "cifg", *, seed: int = 1, made: dict | None = None) -> Path:
        folder = root / "run"
        folder.mkdir(exist_ok=True)
        config = Config()
        data = replace(config.data, name=str(root / "gone.txt"))
        model = replace(config.model, name=name, embed=8, hidden=8 if name == "gru" else 12)
        config = replace(config, data=data, model=model)
        characters = name.startswith("char")
        entries = tuple("abcdefgh .") if characters else tuple(WORDS)
        vocab = Vocab("char" if characters else "word", (*SPECIALS, *entries), lower=not characters, tokenised=False)
        write_run_toml(folder, config, {"keyfed": "0.1.0", **(made or {})})
        spec = build_spec(name, len(vocab), embed=8, hidden=model.hidden)
        save_model(folder, init_params(spec, seed), vocab)
        return folder

    return call


@pytest.fixture
def web(tmp_path) -> Path:
    """A page of one line."""
    folder = tmp_path / "web"
    for name in ("data", "decoder", "page", "client"):
        (folder / name).mkdir(parents=True)
    (folder / "decoder" / "engine.mjs").write_text("export const two = 2;\n")
    (folder / "client" / "store.mjs").write_text("export const three = 3;\n")
    (folder / "index.html").write_text("<!doctype html><title>Keyboard</title>")
    (folder / "page.mjs").write_text("export const one = 1;\n")
    (folder / "style.css").write_text("body { margin: 0 }\n")
    (folder / "favicon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folder / "data" / "constants.json").write_text("{}")
    (folder / "notes.txt").write_text("not for the page")
    return folder
