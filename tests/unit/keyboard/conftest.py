"""A tiny finished run, and what a page's folder looks like."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from keyfed.config.load import Config
from keyfed.keyboard import assets
from keyfed.model.language_model import build_spec, init_params
from keyfed.run.folder import save_model, write_run_toml
from keyfed.text.vocab import SPECIALS, Vocab

WORDS = [f"w{chr(97 + k // 26)}{chr(97 + k % 26)}" for k in range(60)]


@pytest.fixture
def make_run(tmp_path):
    """Write a run whose corpus is not there; return its folder."""

    def call(name: str = "cifg", *, seed: int = 1, made: dict | None = None) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        config = Config()
        data = replace(config.data, name=str(tmp_path / "gone.txt"))
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
    """A page of one line with a runtime of a few bytes, verified by its own lock file."""
    folder = tmp_path / "web"
    (folder / "data").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Keyboard</title>")
    (folder / "page.mjs").write_text("export const one = 1;\n")
    (folder / "style.css").write_text("body { margin: 0 }\n")
    (folder / "favicon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folder / "data" / "constants.json").write_text("{}")
    (folder / "notes.txt").write_text("not for the page")
    give_runtime(folder)
    return folder


def give_runtime(folder: Path) -> None:
    entry = {"version": "9.9.9", "integrity": "sha512-none"}
    (folder / "package.json").write_text("{}")
    lock = {"packages": {f"node_modules/{assets.PACKAGE}": entry}}
    (folder / "package-lock.json").write_text(json.dumps(lock))
    vendor = folder / assets.VENDOR
    vendor.mkdir()
    sums = {}
    for name in (*assets.FILES, assets.LICENCE):
        (vendor / name).write_bytes(name.encode())
        sums[name] = hashlib.sha256(name.encode()).hexdigest()
    (vendor / assets.MANIFEST).write_text(json.dumps({"package": assets.PACKAGE, **entry, "files": sums}))
