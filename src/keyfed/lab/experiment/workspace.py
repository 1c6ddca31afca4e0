"""Where the cells of a study run, and the configuration that a cell's settings make, defaults included.

A cell's defaults are not the program's but those of `defaults.toml`, which do not change: a better default of
`keyfed train` neither opens a finished cell nor makes an open one compute something else beside finished ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from keyfed.config.load import PARTS, SECTIONS, Config, check, set_value, to_document
from keyfed.config.schema import coerce, hints_of
from keyfed.errors import DataError
from keyfed.federated.methods import METHODS, method_options
from keyfed.federated.parts import KINDS, READ_BY, part_options
from keyfed.federated.tuned import tuned_options
from keyfed.lab.experiment.grid import Settings
from keyfed.model.presets import PRESETS
from keyfed.run.loop import Listener
from keyfed.run.prepare import Prepared, prepare

OWN = ("study.", "first.")  # settings that are not the run's
WITH_METHOD = ("train", "code-faithful")  # runners that train with a method
DEFAULTS = Path(__file__).with_name("defaults.toml")
ASLEEP = ("vectors", "privacy", "secure")  # sections that nothing reads unless a cell sets something of them


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


@functools.cache
def pinned() -> Mapping[str, Mapping[str, Any]]:
    """The defaults that cells are made with, as their file has them."""
    return tomllib.loads(DEFAULTS.read_text("utf-8"))


def pinned_section(section: str) -> dict[str, Any]:
    """The pinned values of a section, of those options that the program has."""
    return {key: value for key, value in pinned().get(section, {}).items() if key in hints_of(SECTIONS[section])}


def pinned_options(settings: Settings) -> dict[str, Any]:
    """The pinned options of a cell's method, as `method.key`, and of the parts that it exchanges, as `mediator.key`."""
    method, model = str(settings.get("method.name", "fedavg")), str(settings.get("model.name", "cifg"))
    own = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("method.")}
    characters = model in PRESETS and PRESETS[model].characters
    tuned = tuned_options(method, own, characters=characters, table=pinned().get("characters", {}))
    options = {**pinned().get("method", {}).get(method, {}), **tuned}
    out = {f"method.{key}": value for key, value in options.items() if key in method_options(method)}
    for kind in PARTS:
        part = str(settings.get(f"{kind}.name"))
        if part in KINDS[kind]:
            given = pinned().get(kind, {}).get(part, {})
            out |= {f"{kind}.{key}": value for key, value in given.items() if key in part_options(kind, part)}
    return {**out, **{key: value for key, value in settings.items() if key in out}}


def _unread(settings: Settings) -> set[str]:
    """Options that an exchanged part reads in the method's place."""
    method = str(settings.get("method.name", "fedavg"))
    kinds = [kind for kind in PARTS if settings.get(f"{kind}.name") in KINDS[kind]]
    return {f"method.{key}" for kind in kinds for key in READ_BY[kind].get(method, ())} - settings.keys()


def config_of(settings: Settings, seed: int, bench: Bench) -> Config:
    """Build a run's configuration; options of `method` that the cell's method does not have are others'."""
    method = str(settings.get("method.name", "fedavg"))
    options = method_options(method)
    config = Config(method=method)
    wanted = {key: value for key, value in settings.items() if not key.startswith(OWN) and key != "method.name"}
    awake = [name for name in SECTIONS if name not in ASLEEP or any(key.startswith(f"{name}.") for key in wanted)]
    before = {f"{name}.{key}": value for name in awake for key, value in pinned_section(name).items()}
    if "train.init" not in wanted:
        before.pop("train.unmatched", None)
    unread = _unread(settings)
    before |= {key: value for key, value in pinned_options(settings).items() if key not in unread}
    wanted = {**before, **wanted}
    for key in sorted(wanted, key=lambda key: (not key.endswith(".name"), key)):
        section, _, name = key.partition(".")
        if section != "method" or name in options:
            config = set_value(config, key, wanted[key])
    changed: dict[str, Any] = {"seed": seed, "device": bench.device}
    if bench.where() != "cpu" and "train.precision" not in settings:
        changed["precision"] = bench.precision or "bf16"
    config = replace(config, train=replace(config.train, **changed))
    if "data.batches" not in settings:  # cells were measured with streams, of chat too
        config = replace(config, data=replace(config.data, batches="stream"))
    if bench.data_dir is not None:
        config = replace(config, data=replace(config.data, dir=bench.data_dir))
    return check(_with_vectors(config, bench))


def options_of(runner: str, settings: Settings) -> dict[str, Any]:
    """Every option that a cell's method has, defaults too: they are no settings, and change what is computed.

    An option that is newer than the pinned defaults is left out, unless a setting of the cell is about it. Options of
    an exchanged part are `mediator.…` and `server.…`, those of the run that this one starts from `first.…`; nothing for
    a runner without a method.
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
def _resolve(text: str) -> Mapping[str, Any]:
    settings = json.loads(text)
    document = to_document(config_of(settings, 1, Bench(Path(), "cpu")))
    own = {f"method.{key}": value for key, value in document["method"].items() if key != "name"}
    own |= {f"{kind}.{key}": v for kind in PARTS for key, v in document.get(kind, {}).items()}
    known, hints = pinned_options(settings), hints_of(METHODS[str(document["method"]["name"])])
    for key in _unread(settings) & known.keys():
        own[key] = coerce(known[key], hints[key.removeprefix("method.")], key)
    own = {key: value for key, value in own.items() if key in known or key in settings or not _is_newer(key, document)}
    return {key.removeprefix("method."): value for key, value in own.items()}


def _is_newer(key: str, document: Mapping[str, Any]) -> bool:
    """Tell whether an option was added to a method, or to a part, after its defaults were pinned."""
    kind, _, name = key.partition(".")
    return name != "name" and document[kind]["name"] in pinned().get(kind, {})


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
