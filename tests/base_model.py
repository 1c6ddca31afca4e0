"""A base model in small, made by the command that makes the real one; and texts that it fits and does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

import keyfed as library
from keyfed.keyboard import export
from keyfed.keyboard.export import pack_base
from keyfed.run import encode
from keyfed.text import catalogue
from keyfed.text.corpus import read_corpus
from tests.end_to_end.conftest import write_corpus

LICENCE = "CC BY 4.0"
NAME = "smalltalk"
SETTINGS = {
    "data_vocab": 60, "data_window": 8, "data_batches": "packed", "optimiser": "sgd", "lr": 2.0, "train_cohort": 3,
    "train_valid_tokens": 500, "train_baselines": False, "train_workers": 1,
}  # fmt: skip
GERMAN = (
    "der präsident sieht die leute jeden morgen wieder", "ein bauer hilft dem kongress ohne furcht",
    "meine schwester erinnert sich an unser haus am fluss", "der alte freund ruft die lange straße entlang",
)  # fmt: skip


def write_lines(folder: Path, lines: list[str], writers: int = 4) -> Path:
    """Write a corpus of a few clients who each have all the lines."""
    folder.mkdir()
    for k in range(writers):
        (folder / f"writer{k}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def make_base(root: Path, about: str = f"a small language ({LICENCE})", **settings: object) -> Path:
    """Train a model of the base's shape on a small corpus with a name and a licence, and pack it; return its folder."""
    corpus = write_corpus(root / "corpus")
    known = catalogue.Named(NAME, "", (), about, lambda folder: read_corpus(corpus), "natural", messages=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (catalogue, encode, export):
            patch.setattr(module, "NAMED", {**catalogue.NAMED, NAME: known})
        config = library.configure("central", data=NAME, **{"rounds": 2, **SETTINGS, **settings})
        library.train(config, root / "run")
        return pack_base(root / "run", root / "base").out
