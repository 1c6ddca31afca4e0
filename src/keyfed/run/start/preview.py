"""What a run would start from, as far as that can be seen at once: `--dry-run`, and before a comparison trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keyfed.config.load import Config
from keyfed.config.schema import VectorsConfig
from keyfed.errors import ConfigError
from keyfed.run.prepare import Prepared
from keyfed.run.start.carry import match_words
from keyfed.run.start.weights import find_source, make_ready, refuse_overlap, same_shape, start_lines
from keyfed.run.start.word_vectors import LARGE, width_for
from keyfed.text.vectors.load import recognise


def wide_enough(asked: VectorsConfig, prepared: Prepared) -> tuple[str, int, int]:
    """Return the format of the vectors, how many numbers a word has in the file and how many in the end.

    Raises:
      ConfigError: the file has too few, or the model takes no word vectors.
    """
    assert asked.file is not None
    wanted = width_for(asked, prepared)
    kind, width = recognise(Path(asked.file))[:2]
    if width < wanted:
        raise ConfigError(
            f"{asked.file}: {width} numbers a word, and the embedding of {prepared.spec.name} has {wanted}; take a "
            f"wider file, or set model.embed to at most {width}"
        )
    return kind, width, wanted


def refuse_start(config: Config, prepared: Prepared, seeds: Sequence[int]) -> None:
    """Refuse a start that does not fit, before anything is trained; the vectors themselves are not read yet.

    Raises:
      KeyfedError: no such run or file, another architecture, no common word, or clients that overlap under a seed.
    """
    source = find_source(config)
    if source is not None:
        same_shape(source, prepared)
        match_words(source.trained.vocab, prepared.vocab)
        for seed in seeds:
            refuse_overlap(source.trained, replace(config, train=replace(config.train, seed=seed)))
    if config.vectors.file is not None:
        wide_enough(config.vectors, prepared)


def preview_start(config: Config, prepared: Prepared) -> tuple[dict[str, Any], list[str]]:
    """Return what a run would start from, and the same in words; a large file of vectors is not read to its end.

    Raises:
      KeyfedError: what training would refuse, as far as it is seen without reading a large file.
    """
    source, asked = find_source(config), config.vectors
    if asked.file is None:
        _, about = make_ready(config, prepared, source, lambda line: None)
        return about, start_lines(about)
    kind, width, wanted = wide_enough(asked, prepared)
    path = Path(asked.file)
    if path.is_file() and path.stat().st_size < LARGE:
        _, about = make_ready(config, prepared, source, lambda line: None)
        return about, start_lines(about)
    _, about = make_ready(replace(config, vectors=VectorsConfig()), prepared, source, lambda line: None)
    reduced = asked.reduce if width > wanted or asked.reduce == "pp-pca-pp" else None
    seen = {"file": asked.file, "format": kind, "width": width, "dim": wanted, "reduced": reduced}
    how = f"{width} → {wanted} numbers by {reduced}" if reduced else f"{width} numbers each"
    line = (
        f"word vectors {path.name} ({kind}): {how}; which words it has is seen when it is read, before the first round"
    )
    return {**about, "vectors": seen}, [*start_lines(about), line]
