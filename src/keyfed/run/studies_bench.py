"""Where the cells of a study run, and the configuration that a cell's settings make, defaults included."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from keyfed.config import PARTS, Config, check, set_value, to_document
from keyfed.errors import DataError
from keyfed.federated.methods import method_options
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.studies_plan import Settings
from keyfed.run.train import Listener

OWN = ("study.", "first.")  # settings that are not the run's
WITH_METHOD = ("train", "code-faithful")  # runners that train with a method


class Patient(Listener, Protocol):
    """A listener that can wait: the clock of a study."""

    def wait(self, why: str) -> None:
        """Say why, unless that was said already, and let a moment pass; raise if the time is up."""
        ...


@dataclass(slots=True)
class Bench:
    """Where cells run, and the text that was prepared last: cells of one data set share it.

    Attributes:
      data_dir: folder of the corpora known by name; None for KEYFED_DATA.
      work: folder for the runs while they train.
      precision: of products on a GPU, bf16 where it is None and the study has none.
    """

    work: Path
    device: str = "auto"
    data_dir: str | None = None
    precision: str | None = None
    _key: str = ""
    _prepared: Prepared | None = field(default=None, repr=False)

    def prepared(self, config: Config) -> Prepared:
        """The corpus for a configuration; the last one again where data, model and seed are the same."""
        parts = (config.data, config.model, config.train.seed, config.train.test_tokens)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        if key != self._key or self._prepared is None:
            self._prepared, self._key = None, ""  # the old one goes before the new one comes
            self._prepared, self._key = prepare(config), key
        return self._prepared

    def where(self) -> str:
        """The device that `auto` stands for."""
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def config_of(settings: Settings, seed: int, bench: Bench) -> Config:
    """Build a run's configuration; options of `method` that the cell's method does not have are others'."""
    method = str(settings.get("method.name", "fedavg"))
    options = method_options(method)
    config = Config(method=method)
    wanted = {key: value for key, value in settings.items() if not key.startswith(OWN) and key != "method.name"}
    for key in sorted(wanted, key=lambda key: (not key.endswith(".name"), key)):
        section, _, name = key.partition(".")
        if section != "method" or name in options:
            config = set_value(config, key, wanted[key])
    changed: dict[str, Any] = {"seed": seed, "device": bench.device}
    if "train.rollback" not in settings:
        changed["rollback"] = 0.0  # cells were measured without: one that diverges shows that it does
    if "train.baselines" not in settings:
        changed["baselines"] = False
    if bench.where() != "cpu" and "train.precision" not in settings:
        changed["precision"] = bench.precision or "bf16"
    config = replace(config, train=replace(config.train, **changed))
    if bench.data_dir is not None:
        config = replace(config, data=replace(config.data, dir=bench.data_dir))
    return check(_with_vectors(config, bench))


def options_of(runner: str, settings: Settings) -> dict[str, Any]:
    """Every option that a cell's method has, defaults too: they are no settings, and change what is computed.

    Those of an exchanged part are `mediator.…` and `server.…`, those of the run that this one starts from `first.…`;
    nothing for a runner without a method.
    """
    if runner not in WITH_METHOD or settings.get("study.positional"):
        return {}
    first = {k.removeprefix("first."): v for k, v in settings.items() if k.startswith("first.")}
    of_first = {f"first.{key}": value for key, value in _resolved(first).items()} if first else {}
    return {**_resolved(settings), **of_first}


def _resolved(settings: Settings) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key.split(".")[0] in ("method", "model", *PARTS)}
    return dict(_resolve(json.dumps(kept, sort_keys=True)))


@functools.cache  # the same few for hundreds of cells
def _resolve(settings: str) -> Mapping[str, Any]:
    document = to_document(config_of(json.loads(settings), 1, Bench(Path(), "cpu")))
    own = {key: value for key, value in document["method"].items() if key != "name"}
    return own | {f"{kind}.{key}": v for kind in PARTS for key, v in document.get(kind, {}).items()}


def _with_vectors(config: Config, bench: Bench) -> Config:
    """Look for a file of word vectors in the data folder, where the study names it relative to that."""
    import os

    given = config.vectors.file
    if given is None or Path(given).is_absolute():
        return config
    root = Path(bench.data_dir or os.environ.get("KEYFED_DATA") or "~/.cache/keyfed").expanduser()
    if not (root / given).exists():
        raise DataError(f"word vectors {given} are not in the data folder; put them there")
    return replace(config, vectors=replace(config.vectors, file=str(root / given)))
