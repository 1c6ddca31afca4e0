"""Pretrained word vectors of a run: read for its vocabulary, reduced to the embedding's width, and described."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyfed.config.load import Config
from keyfed.config.schema import VectorsConfig
from keyfed.engine.module import ModuleNetwork
from keyfed.errors import ConfigError
from keyfed.run.prepare import Prepared
from keyfed.text.vectors.load import Vectors, load_vectors
from keyfed.text.vectors.reduce import pca, pp_pca_pp

LARGE = 50 << 20  # bytes of a file, from which on its reading is reported as it goes
PROBLEMS = ("duplicates", "broken", "wrong_dimension", "not_finite", "undecodable")


@dataclass(frozen=True, slots=True)
class Given:
    """Vectors that fit a run's embedding.

    Attributes:
      matrix: float32 [vocabulary, width]; `matched` says which rows count.
      sha256: of what was read; resuming with another file is refused.
      about: for result.json.
    """

    matrix: NDArray[np.float32]
    matched: NDArray[np.bool_]
    sha256: str
    about: dict[str, Any]


def find_vectors(
    config: Config, prepared: Prepared, counts: NDArray[np.int64] | None, say: Callable[[str], None]
) -> Given | None:
    """Read and reduce the vectors that the configuration names; None without any.

    Args:
      counts: training tokens of each entry of the vocabulary; None where they must not be told (a private run).

    Raises:
      ConfigError: they cannot be as wide as the embedding.
      DataError: the file cannot be read, or none of our words is in it.
    """
    asked = config.vectors
    if asked.file is None:
        return None
    width = width_for(asked, prepared)
    path = Path(asked.file)
    found = load_vectors(
        path, prepared.vocab.words, dim=width, pieces=asked.pieces, progress=_progress(path, say)
    )  # fmt: skip
    matrix, reduced = _reduce(asked, found, width)
    report = found.report
    about = {
        "file": asked.file,
        "format": found.source.format,
        "rows": len(prepared.vocab),
        "matched": int(found.matched.sum()),
        "tokens": None if counts is None else float(counts[found.matched].sum() / max(1, counts.sum())),
        "width": found.dim,
        "dim": width,
        **reduced,
        "problems": {name: getattr(report, name) for name in PROBLEMS if getattr(report, name)},
    }
    return Given(matrix, found.matched, _fingerprint(path), about)


def width_for(asked: VectorsConfig, prepared: Prepared) -> int:
    """Return how many numbers a word has in the end: as many as the embedding is wide.

    Raises:
      ConfigError: the model has no embedding of words, or one of another width than was asked for.
    """
    if isinstance(prepared.spec, ModuleNetwork):
        raise ConfigError(
            f"vectors.file fills the embedding of a preset, and nobody knows which layer of your module "
            f"{prepared.spec.name} that is; leave it out and load the vectors in the module"
        )
    if prepared.vocab.kind != "word":
        raise ConfigError(f"vectors.file has vectors of words, and {prepared.spec.name} reads characters; leave it out")
    width = prepared.spec.embed
    if asked.dim is not None and asked.dim != width:
        raise ConfigError(
            f"vectors.dim is {asked.dim}, and the embedding of {prepared.spec.name} is {width} wide; set "
            f"model.embed={asked.dim} too, or leave vectors.dim out"
        )
    return width


def _reduce(asked: VectorsConfig, found: Vectors, width: int) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """Bring vectors down to a width; those of that width stay as they are, unless pp-pca-pp was asked for."""
    if asked.reduce == "pp-pca-pp":
        reduced = pp_pca_pp(found.matrix, found.matched, width, asked.remove)
    elif found.dim > width:
        reduced = pca(found.matrix, found.matched, width)
    else:
        return found.matrix, {"reduced": None}
    return reduced.matrix, {
        "reduced": asked.reduce,
        "explained": reduced.explained.tolist(),
        "removed": reduced.removed_before.tolist(),
    }


def _progress(path: Path, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Say every tenth of a large file."""
    told = 0

    def progress(read: int, total: int) -> None:
        nonlocal told
        tenth = 10 * read // max(1, total)
        if total >= LARGE and tenth > told:
            told = tenth
            say(f"word vectors {path.name}: {tenth * 10} % of {total / 1e6:,.0f} MB read")

    return progress


def _fingerprint(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names."""
    whole = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            whole.update(f"{file.name}\0{hashlib.file_digest(opened, 'sha256').hexdigest()}\0".encode())
    return whole.hexdigest()


def matched_share(about: Mapping[str, Any]) -> str:
    """Say how many rows have their word, and of how many training tokens where that may be told."""
    told = f"{about['matched']:,} of {about['rows']:,} rows matched by word"
    return told if about["tokens"] is None else f"{told}, {about['tokens']:.2%} of the training tokens"


def vectors_line(about: dict[str, Any]) -> str:
    """Say which words have a vector, how they were reduced, and what was wrong with the file."""
    line = f"word vectors {Path(about['file']).name} ({about['format']}): {matched_share(about)}; "
    if about["reduced"] is None:
        line += f"{about['width']} numbers each"
    else:
        kept = sum(about["explained"])
        name = {"pca": "PCA", "pp-pca-pp": "PP-PCA-PP"}[about["reduced"]]
        line += f"{about['width']} → {about['dim']} numbers by {name}, which keeps {kept:.1%} of the variance"
        if about["removed"]:
            line += f" (after removing {len(about['removed'])} components with {sum(about['removed']):.1%})"
    if about["problems"]:
        wrong = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in about["problems"].items())
        line += f"; skipped: {wrong}"
    return line
