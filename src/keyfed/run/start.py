"""Where a run's weights come from before its first round: drawn at random, carried over by word, word vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.config.load import BASE, Config
from keyfed.config.schema import VectorsConfig
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import Network, init_params
from keyfed.errors import ConfigError, RunError, ShapeMismatch
from keyfed.model.language_model import ModelSpec, Params
from keyfed.model.output import Score
from keyfed.run.base import (
    LEAST_KNOWN,
    Base,
    Fit,
    carry,
    describe_base,
    fit_of,
    known_share,
    knows_line,
    load_start,
    match_words,
    not_offered,
    offer,
    own_warning,
    refuse_other_architecture,
    report_match,
)
from keyfed.run.compatible import EMBEDDING, Case, refuse
from keyfed.run.evaluate import limit_streams, validator
from keyfed.run.folder import Trained, load_model
from keyfed.run.prepare import Prepared, prepare
from keyfed.text.vectors import load_vectors, pca, pp_pca_pp
from keyfed.text.vectors.files import Vectors
from keyfed.text.vocab import Vocab

CHUNK = 1 << 24  # tokens counted at once: those of a large corpus are mapped, not in memory


@dataclass(frozen=True, slots=True)
class StartModel:
    """The run that another starts from, or the base model.

    Attributes:
      sha256: of its weights file.
      base: the base model, None for a run.
    """

    trained: Trained
    sha256: str
    base: Base | None = None

    def made(self) -> dict[str, str]:
        """For run.toml, whose [train] has the folder."""
        return {"init_sha256": self.sha256}


def find_source(config: Config) -> StartModel | None:
    """Load the run, or the base model, that `train.init` names; None for a random start.

    Raises:
      RunError: it is not a finished run, or the base model is missing or damaged.
    """
    if config.train.init is None:
        return None
    if config.train.init == BASE:
        base = load_start()
        return StartModel(base.trained, base.sha256, base)
    folder = Path(config.train.init)
    if not (folder / "run.toml").exists():
        raise RunError(
            f"the start (--init, train.init) is {folder}, which has no run.toml; expected a run folder, base or none"
        )
    trained = load_model(folder)
    return StartModel(trained, hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from: nothing, another run, word vectors, or both (then the vectors replace its rows)."""

    source: StartModel | None = None
    vectors: Given | None = None

    def made(self) -> dict[str, str]:
        """For run.toml, which has the names."""
        given = {} if self.vectors is None else {"vectors_sha256": self.vectors.sha256}
        return given if self.source is None else {**self.source.made(), **given}


def refuse_other_start(folder: Path, made: Mapping[str, Any], start: Start) -> None:
    """Refuse to go on with a run whose starting model or word vectors have changed since."""
    now = start.made()
    for key, what in (("init_sha256", "another model"), ("vectors_sha256", "other word vectors")):
        if made.get(key) != now.get(key):
            raise RunError(
                f"{folder} was started from {what}: SHA-256 {str(made.get(key))[:12]} → {str(now.get(key))[:12]}; "
                "bring that back, or choose another --out"
            )


def initial_params(config: Config, prepared: Prepared, start: Start) -> Params:
    """Return θ before the first round, on the CPU."""
    if start.source is None:
        params = init_params(prepared.spec, config.train.seed)
    else:
        params = _carried(config, start.source, same_shape(start.source, prepared), prepared.vocab)
    if start.vectors is None:
        return params
    assert isinstance(prepared.spec, ModelSpec)  # `find_vectors` refuses a module
    return with_vectors(params, prepared.spec, start.vectors.matrix, start.vectors.matched)


def _carried(config: Config, source: StartModel, spec: ModelSpec, vocab: Vocab) -> Params:
    """Return the weights of another run by word: all, or its embedding in a random model (`train.carry`)."""
    trained, t = source.trained, config.train
    params = carry(trained.params, trained.vocab, spec, vocab, t.seed, t.unmatched).params
    if t.carry == "model":
        return params
    return {**init_params(spec, t.seed), EMBEDDING: params[EMBEDDING]}


def validate_start(config: Config, prepared: Prepared, start: Start, device: str) -> dict[str, Any]:
    """Return the validation of θ before the first round, on the tokens that every round's is taken on."""
    streams = limit_streams(prepared.valid, config.train.valid_tokens)
    params = {name: p.to(device) for name, p in initial_params(config, prepared, start).items()}
    score: Score = validator(prepared.batching.kind)(prepared.spec, params, streams, device)
    return score.summary()


def same_shape(source: StartModel, prepared: Prepared) -> ModelSpec:
    """Return the model to carry weights into; refuse one of another shape than the source's."""
    if isinstance(prepared.spec, ModuleNetwork):
        raise ConfigError(
            f"train.init carries weights by word into the layers of a preset, and nobody knows which layers of your "
            f"module {prepared.spec.name} those are; leave it out and load the weights in the module"
        )
    assert isinstance(source.trained.spec, ModelSpec)  # load_model refuses a run of a module without the module
    refuse_other_architecture(source.trained.spec, prepared.spec, str(source.trained.folder))
    return prepared.spec


def refuse_overlap(before: Trained, config: Config) -> None:
    """Parts of the same corpus are disjoint for one seed; under another the clients are others."""
    old, new = before.config, config
    parts = old.data.clients_part and new.data.clients_part
    if parts and old.data.name == new.data.name and old.train.seed != new.train.seed:
        raise ConfigError(
            f"{before.folder} trained on part {old.data.clients_part} of the clients, drawn by seed {old.train.seed}; "
            f"part {new.data.clients_part} of seed {new.train.seed} is not disjoint from it, use the same seed"
        )


def make_ready(
    config: Config, prepared: Prepared, source: StartModel | None, say: Callable[[str], None]
) -> tuple[Start, dict[str, Any]]:
    """Return what a run starts from, and the same for result.json; what does not fit is refused here.

    A private run does not say which share of the training tokens found a row: nothing noised that number.
    """
    if source is None and config.vectors.file is None:
        return Start(), {"from": "random"}
    counts = None if config.privacy.on else token_counts(prepared)
    about = {"from": "random"} if source is None else _describe_source(config, prepared, source, counts)
    vectors = find_vectors(config, prepared, counts, say)
    return Start(source, vectors), about if vectors is None else {**about, "vectors": vectors.about}


def _how_carried(config: Config) -> dict[str, str]:
    """What result.json says of how weights are carried."""
    alone = {} if config.train.carry == "model" else {"carried": config.train.carry}
    return {"unmatched": config.train.unmatched, **alone}


def _describe_source(
    config: Config, prepared: Prepared, source: StartModel, counts: NDArray[np.int64] | None
) -> dict[str, Any]:
    spec = same_shape(source, prepared)
    refuse_overlap(source.trained, config)
    rows = match_words(source.trained.vocab, prepared.vocab)
    matched = {**_how_carried(config), **report_match(rows, counts).as_dict()}
    if source.base is not None:
        fit = fit_of(source.base, prepared, counts)
        return describe_base(source.base, spec, prepared.vocab, fit, matched, private=config.privacy.on)
    return {"from": "run", "run": str(source.trained.folder), "sha256": source.sha256, **matched}


def offer_start(config: Config, prepared: Prepared | None = None) -> tuple[Config, Prepared | None, str | None]:
    """Return the configuration of a run that asks for no start: with the base model where it fits.

    Args:
      prepared: its corpus, if it was prepared with this configuration already.

    Returns:
      The configuration; its corpus, if that is at hand now; why it is not given the base, if that is worth a word.
    """
    why = not_offered(config)
    if why is None:
        prepared = prepared or prepare(config)
        config, why = offer(config, prepared, None if config.privacy.on else token_counts(prepared))
    return config, prepared, why or None


def offer_start_by_words(config: Config, vocab: Vocab) -> tuple[Config, str | None]:
    """Return a run with clients elsewhere that asks for no start: the base model is judged by the vocabulary alone."""
    why = not_offered(config)
    if why is None:
        fit = Fit(known_share(load_start(), vocab, None), None)
        if fit.known >= LEAST_KNOWN:
            return replace(config, train=replace(config.train, init=BASE)), None
        why = knows_line(fit, private=config.privacy.on)
    return config, why or None


def start_without_text(
    config: Config, spec: Network, vocab: Vocab, own: float | None
) -> tuple[Params, Start, dict[str, Any]]:
    """Return θ before the first round where clients have the text: drawn at random, or the base model's by word.

    Args:
      own: share of the clients' lines that are in the base's own text, if somebody has compared them.

    Returns:
      The parameters, what they come from, and the same for result.json.
    """
    source = find_source(config)
    if source is None:
        return init_params(spec, config.train.seed), Start(), {"from": "random"}
    assert source.base is not None, "a federation starts from no run (`run.compatible`)"
    assert isinstance(spec, ModelSpec)
    matched = report_match(match_words(source.trained.vocab, vocab)).as_dict()
    fit = Fit(known_share(source.base, vocab, None), own)
    about = {**_how_carried(config), **matched}
    begun = describe_base(source.base, spec, vocab, fit, about, private=config.privacy.on)
    return _carried(config, source, spec, vocab), Start(source), begun


def start_lines(start: Mapping[str, Any]) -> list[str]:
    """Say where the weights come from."""
    lines = []
    if start.get("from") == "random":
        lines.append("starts from random weights" + (f", {not_base(start['why'])}" if start.get("why") else ""))
    elif start.get("from") in ("run", "base"):
        rest = {"uniform": "drawn anew", "mean": "the mean vector"}[start["unmatched"]]
        alone = ", the embedding alone" if start.get("carried") == "embedding" else ""
        lines.append(f"starts from {start_name(start)}{alone}: {matched_share(start)}; the others are {rest}")
    if start.get("is_own"):
        lines.append(own_warning(start["own"]))
    if start.get("vectors"):
        lines.append(vectors_line(start["vectors"]))
    return lines


def not_base(why: str) -> str:
    """Say that a run is not given the base model."""
    return f"not from the base model: {why}"


def start_name(start: Mapping[str, Any]) -> str:
    """Name the run or the base model that a result says it started from."""
    if start["from"] == "base":
        return f"the base model ({start['data']}, {start['licence']}; SHA-256 {start['sha256'][:12]})"
    return str(start["run"])


def token_counts(prepared: Prepared) -> NDArray[np.int64]:
    """Return the training tokens of each entry of the vocabulary."""
    flat, counts = prepared.store.flat, np.zeros(len(prepared.vocab), np.int64)
    for first in range(0, len(flat), CHUNK):
        counts += np.bincount(flat[first : first + CHUNK].numpy(), minlength=len(counts))
    return counts


def with_vectors(params: Params, spec: ModelSpec, matrix: NDArray[np.float32], matched: NDArray[np.bool_]) -> Params:
    """Return the parameters with word vectors in the embedding; words without one keep their rows.

    Args:
      matrix: a vector for each entry of the vocabulary, [vocabulary, width]; rows that are not matched are not read.
      matched: which entries have one.

    Raises:
      ShapeMismatch: the vectors are not as wide as the embedding, or not as many as the vocabulary.
    """
    if matrix.ndim != 2 or matrix.shape[1] != spec.embed:
        raise ShapeMismatch(
            f'word vectors {list(matrix.shape)} do not fit the embedding of model "{spec.name}", which is '
            f"{spec.embed} wide; reduce them to {spec.embed}, or set model.embed={matrix.shape[-1]}"
        )
    if len(matrix) != spec.vocab or len(matched) != spec.vocab:
        raise ShapeMismatch(
            f"word vectors {list(matrix.shape)} with {len(matched):,} marks, and a vocabulary of {spec.vocab:,}; "
            "give a row and a mark for each entry"
        )
    table: Tensor = params["embedding.weight"].clone()
    table[torch.from_numpy(matched)] = torch.from_numpy(matrix[matched]).to(table)
    return {**params, "embedding.weight": table}


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
    spec = prepared.spec
    module = isinstance(spec, ModuleNetwork)
    width = 0 if isinstance(spec, ModuleNetwork) else spec.embed
    characters = prepared.vocab.kind != "word"
    named = Config(vectors=asked)
    refuse("word vectors", Case(named, model=spec.name, module=module, characters=characters, embed=width))
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
