"""A small corpus and the command line as a function."""

from __future__ import annotations

import base64
import functools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import typer

import keyfed as library
from keyfed.cli import app
from keyfed.reports import figures
from keyfed.text import catalogue
from keyfed.text.corpus import Corpus

SUBJECTS = ["the president", "a farmer", "the congress", "my sister", "the river", "an old friend"]
VERBS = ["sees", "helps", "follows", "remembers", "calls"]
OBJECTS = ["the people", "a letter", "the long road", "our house", "the union"]
ENDS = ["in the morning", "every day", "without fear", "again", "with good reason"]
DOT = base64.b64decode(  # a whole PNG file
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
TINY = [
    "model.embed=8", "model.hidden=12", "data.vocab=60", "train.cohort=3", "train.workers=1", "data.window=8",
    "optimiser=sgd", "lr=2", "train.valid_tokens=500",
]  # fmt: skip


class Bag(torch.nn.Module):
    """The smallest module: the token itself predicts."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(tokens)
        return found


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDS))


def write_corpus(folder: Path, lines: int = 15, more: int = 3) -> Path:
    """Write eight text files, one client each, in a small regular language.

    Args:
      lines: those of the first client; every other has `more` than the one before. The usual ones make two or three
        steps an epoch, too few where a fraction of a client's work is looked at, or how well a model learns.
    """
    folder.mkdir()
    for k in range(8):
        draw = random.Random(k)
        text = [sentence(draw) for _ in range(lines + more * k)]
        (folder / f"writer{k}.txt").write_text("\n".join(text) + "\n", "utf-8")
    return folder


@pytest.fixture(autouse=True, scope="module")
def pictures_are_painted_once_and_not_rendered():
    """Rendering is three quarters of a tiny run's time, painting for dark pages too half of the rest of a report.

    Both are looked at in tests/unit/run; here a dot stands for them. Of the whole file, because fixtures of a file
    train runs as well.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def in_light(paint: figures.Paint, theme: figures.Theme, size: tuple[float, float] = figures.SIZE) -> bytes:
        return DOT if theme is figures.DARK else painted(paint, theme, size)

    def dot(canvas: FigureCanvasAgg, out: BinaryIO | str, **options: object) -> None:
        if "draw" in vars(canvas.figure):  # replaced for the moment: only the size of things is asked for
            canvas.figure.draw(canvas.get_renderer())
        if isinstance(out, str):
            Path(out).write_bytes(DOT)
        else:
            out.write(DOT)

    painted = figures.png
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FigureCanvasAgg, "print_png", dot)
        patch.setattr(figures, "png", in_light)
        yield


@pytest.fixture(autouse=True, scope="module")
def the_command_line_is_built_once():
    """Typer reads all signatures for every `cli.app.main`: a process calls it once, these tests hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="module")
def budgets_are_counted_coarsely(losses_on_a_coarse_grid):
    """Every private run here asks what it has spent after every round."""


@pytest.fixture(scope="session")
def read_built_in():
    """Read a built-in corpus once for all tests of a process, and keep the beginning of it."""
    known = dict(catalogue.NAMED)

    @functools.cache
    def read(name: str) -> Corpus:
        corpus = known[name].read(catalogue.folder_of(name))
        return replace(corpus, authors=tuple(replace(a, lines=a.lines[:300]) for a in corpus.authors[:400]))

    return read


@pytest.fixture
def built_in_in_short(read_built_in, monkeypatch):
    """Of the built-in corpora 400 authors and 300 lines of each: to read all of it takes longer than to train on it.

    That all of it is read, and what is in it, is looked at in tests/unit/text.
    """
    named = dict(catalogue.NAMED)
    for name in ("chat", "sotu"):
        named[name] = replace(named[name], read=lambda folder, name=name: read_built_in(name))
    monkeypatch.setattr(catalogue, "NAMED", named)


def run_command(*arguments: object) -> None:
    """Run a command in this process, for fixtures that outlive a test; it must succeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["keyfed", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            app.main()
    assert not stop.value.code, arguments


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The small corpus, fresh for every test."""
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def train_quietly(corpus, tmp_path):
    """Train a tiny run from Python, without baselines and report; return its folder."""

    def call(method: str = "fedavg", *, rounds: int = 3, name: str = "run", data: Path = corpus, **extra: Any) -> Path:
        own: dict[str, Any] = {"model_embed": 8, "model_hidden": 12, "data_vocab": 60, "data_window": 8}
        own |= {"train_cohort": 3, "train_workers": 1, "train_valid_tokens": 500, "train_baselines": False}
        own |= {"lr": 2.0} if method == "fedsgd" else {"lr": 2.0, "optimiser": "sgd"}
        config = library.configure(method, data=str(data), rounds=rounds, **own | extra)
        library.train(config, tmp_path / name)
        return tmp_path / name

    return call


@pytest.fixture
def train_tiny(keyfed, corpus, tmp_path):
    """Train a tiny run and return (folder, result)."""

    def call(
        *extra: str, method: str = "fedavg", rounds: int = 3, name: str = "run", data: Path = corpus
    ) -> tuple[Path, dict]:
        out = tmp_path / name
        own = [s for s in TINY if method != "fedsgd" or not s.startswith("optimiser")]
        settings = [item for s in [*own, *extra] for item in ("--set", s)]
        code, stdout, stderr = keyfed(
            "train", method, "--data", data, "--rounds", rounds, "--out", out, "--json", *settings
        )
        assert code == 0, stderr
        return out, json.loads(stdout)

    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `base`, the `run` it was packed from, and its `corpus`, for tests of the base; none writes to it.

    While it is used, the small base stands for that of the package.
    """
    from keyfed.run import base
    from tests.base_model import make_base

    root = tmp_path_factory.mktemp("made")
    make_base(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "FOLDER", root / "base")
        yield root
