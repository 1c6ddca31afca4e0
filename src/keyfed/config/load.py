"""Configuration: defaults, then a TOML file, then `--set section.key=value`. Unknown keys name the nearest known one.

One frozen dataclass per concept; a method's options are the keyword arguments of its function. `None` means off (or:
decided by the data), written `none` on the command line and in TOML.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from keyfed.config.schema import (
    CountsConfig,
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    SecureConfig,
    TrainConfig,
    UploadConfig,
    VectorsConfig,
    coerce,
    hints_of,
    out_of_bounds,
)
from keyfed.errors import ConfigError, nearest
from keyfed.federated.cohort import Participation
from keyfed.federated.spec import MethodSpec, Part, Schedule

__all__ = [
    "Config", "DataConfig", "ModelConfig", "Open", "Participation", "PrivacyConfig", "SecureConfig", "TrainConfig",
    "UploadConfig", "VectorsConfig", "coerce",
]  # fmt: skip

Value = str | int | float | bool | None
BASE = "base"  # as train.init and data.vocab_file: of the model that comes with the package


@dataclass(frozen=True, slots=True)
class Open:
    """What a run settles when it begins (`keyfed.run.pilot`); run.toml has what came of it.

    Attributes:
      given: `section.key` of what the caller has set; the recipe chooses the rest from the corpus. None: nothing is
        chosen, because a method was named.
      minutes: time for training, from which the number of rounds follows; None: rounds are counted, not timed.
    """

    given: frozenset[str] | None = None
    minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run, resolved.

    Attributes:
      mediator: a mediator in the place of the method's own, and `server` a server rule; None keeps the method's.
      open: what is settled when training begins; None where all is settled. It is no part of run.toml.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    participation: Participation = field(default_factory=Participation)
    upload: UploadConfig = field(default_factory=UploadConfig)
    vectors: VectorsConfig = field(default_factory=VectorsConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    secure: SecureConfig = field(default_factory=SecureConfig)
    counts: CountsConfig = field(default_factory=CountsConfig)
    method: str = "fedavg"
    options: Mapping[str, Value] = field(default_factory=dict)
    mediator: Part | None = None
    server: Part | None = None
    open: Open | None = None


SECTIONS: dict[str, Any] = {
    "data": DataConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "participation": Participation,
    "upload": UploadConfig,
    "vectors": VectorsConfig,
    "privacy": PrivacyConfig,
    "secure": SecureConfig,
    "counts": CountsConfig,
}
PARTS = ("mediator", "server")
RECIPE, RECIPE_PRIVATE = "fednesterov", "fedavg"  # methods of a run that names none


def open_config(given: Iterable[str], minutes: float | None = None) -> Config:
    """Return the configuration of a run that names no method: the recipe chooses what is not among the given keys.

    Under differential privacy the method stays federated averaging: the recipe was not measured under noise.
    """
    keys = frozenset(given)
    private = not keys.isdisjoint(("privacy.epsilon", "privacy.noise"))
    return Config(method=RECIPE_PRIVATE if private else RECIPE, open=Open(keys, minutes))


def method_spec(config: Config) -> MethodSpec:
    """Return the method as data: name, numbers, exchanged parts, compression."""
    t = config.train
    plain = t.schedule == "constant" and not t.warmup
    schedule = None if plain else Schedule(t.schedule, t.rounds, t.warmup, t.final)
    return MethodSpec(
        config.method, config.options, config.mediator, config.server, config.upload.keep, config.upload.quantise,
        schedule, t.average,
    )  # fmt: skip


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
        hint_of = hints_of(METHODS[config.method])[name]
        return replace(config, options={**config.options, name: coerce(value, hint_of, f"method.{name}")})
    if section in PARTS:
        changed: Any = _set_part(getattr(config, section), section, name, value)
        return replace(config, **{section: changed})
    if section not in SECTIONS:
        known = [*SECTIONS, "method", *PARTS]
        raise ConfigError(f'"{section}" is not a section{nearest(section, known)}. Sections: {", ".join(known)}.')
    hints = hints_of(SECTIONS[section])
    if name not in hints:
        raise ConfigError(f"{section}.{name} is not an option{nearest(name, hints)}. Options: {', '.join(hints)}.")
    changed = replace(getattr(config, section), **{name: coerce(value, hints[name], f"{section}.{name}")})
    return replace(config, **{section: changed})


def _set_part(part: Part | None, kind: str, name: str, value: Any) -> Part | None:
    """Return a mediator or server rule with its name or one option set; another name starts from its defaults."""
    from keyfed.federated.components import KINDS, part_options

    if name == "name":
        if value is None or str(value).lower() == "none":
            return None
        part_options(kind, str(value))  # an unknown name is said at once
        return part if part is not None and part.name == value else Part(str(value))
    if part is None:
        raise ConfigError(f"{kind}.{name} needs {kind}.name first, one of {', '.join(KINDS[kind])}")
    options = part_options(kind, part.name)
    if name not in options:
        raise ConfigError(
            f'{kind}.{name} is not an option of "{part.name}"{nearest(name, options)}. '
            f"Options: {', '.join(options) or 'none'}."
        )
    hint = hints_of(KINDS[kind][part.name])[name]
    return Part(part.name, {**part.options, name: coerce(value, hint, f"{kind}.{name}")})


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
    return config_from(read_document(path), str(path), method)


def read_document(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # Notepad begins a file with a byte-order mark
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}; expected a TOML file") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 (byte {e.start}); save it as UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None


def keys_of(document: Mapping[str, Any]) -> list[str]:
    """List the `section.key` that a parsed document sets.

    Example:
      >>> keys_of({"data": {"name": "sotu"}, "train": {"rounds": 5}})
      ['data.name', 'train.rounds']
    """
    return [f"{section}.{key}" for section, values in document.items() if isinstance(values, Mapping) for key in values]


def config_from(
    document: Mapping[str, Any], where: str, method: str | None = None, base: Config | None = None
) -> Config:
    """Build a configuration from a parsed document; sections that describe a run (`made`) are passed over.

    Args:
      base: what to start from, in place of the method's defaults.
    """
    table = document.get("method", {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: method is {table!r}; expected a section [method] with name and options")
    table = dict(table)
    config = base or Config(method=method or str(table.get("name", "fedavg")))
    table.pop("name", None)
    for section, values in {**document, "method": table}.items():
        if section == "made":
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: {section} is {values!r}; expected a section [{section}]")
        for key in sorted(values, key=lambda key: key != "name"):  # a part's name says which options it has
            try:
                config = set_value(config, f"{section}.{key}", values[key])
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
    return config


def check(config: Config) -> Config:
    """Refuse numbers that make no sense, all at once; write whole paths, and how the text is cut."""
    from keyfed.federated.methods import build_method, tuned_options
    from keyfed.model.language_model import PRESETS
    from keyfed.text.catalogue import is_path
    from keyfed.text.partition import parse_part

    config = _with_whole_paths(config, named=not is_path(config.data.name))
    config = replace(config, data=replace(config.data, batches=config.data.batching))  # a run's file says which it was
    t, m = config.train, config.model
    if m.name in PRESETS:  # an unknown one is said where the model is built
        tuned = tuned_options(config.method, config.options, characters=PRESETS[m.name].characters)
        config = replace(config, options=tuned)
    problems = [
        problem
        for section in SECTIONS
        if section not in ("participation", "privacy")
        for problem in out_of_bounds(section, getattr(config, section))
    ]
    for key in ("lr", "epochs", "batch_size", "clip"):
        got = config.options.get(key)
        if isinstance(got, int | float) and got <= 0:
            problems.append(f"method.{key} is {got}; expected > 0")
    momentum, decay = config.options.get("momentum"), config.options.get("decay")
    if isinstance(momentum, int | float) and not 0 <= momentum < 1:
        problems.append(f"method.momentum is {momentum}; expected 0 ≤ momentum < 1")
    if isinstance(decay, int | float) and not 0 < decay <= 1:
        problems.append(f"method.decay is {decay}; expected 0 < decay ≤ 1")
    if not 0 <= t.final <= 1:
        problems.append(f"train.final is {t.final}; expected 0 ≤ share of the step size ≤ 1")
    elif t.final and t.schedule == "constant":
        problems.append(f"train.final is {t.final}, and train.schedule=constant does not fall; set linear or cosine")
    minutes = None if config.open is None else config.open.minutes
    if minutes is not None and not (minutes > 0 and math.isfinite(minutes)):
        problems.append(f"--minutes is {minutes:g}; expected a number of minutes > 0")
    if minutes is not None and config.privacy.on:
        problems.append(
            "--minutes fixes the rounds after measuring, and the noise of --dp is calibrated to their number; set "
            "--rounds instead"
        )
    problems += _unread(config, characters=m.name in PRESETS and PRESETS[m.name].characters)
    for key in ("limit", "token_limit"):
        got = getattr(config.upload, key)
        if got is not None and got != 0 and not got >= 1:
            problems.append(f"upload.{key} is {got}; expected a multiple of the median of at least 1, or 0 for none")
    against = config.upload.against
    if against is not None and not 0 <= against <= 1:
        problems.append(f"upload.against is {against}; expected 0 < share of the agreement ≤ 1, or 0 for none")
    if against and config.secure.on:
        problems.append("upload.against compares single uploads, and secure.on (--secure) hides them; leave one out")
    trim = config.upload.trim
    if not 0 <= trim <= 0.5:
        problems.append(f"upload.trim is {trim}; expected 0 ≤ share of the uploads at either end ≤ 0.5")
    if trim and config.secure.on:
        problems.append("upload.trim sorts single uploads, and a masked sum (secure.on) opens none; leave one out")
    if trim and config.privacy.on:
        problems.append("upload.trim sorts single uploads, and the noise of --dp is that of a sum; leave one out")
    if t.rollback and not t.rollback > 1:
        problems.append(f"train.rollback is {t.rollback}; expected a factor above 1, or 0 for never")
    problems += config.participation.problems() + config.privacy.problems()
    if config.privacy.on and t.central:
        problems.append("train.central reads as many tokens as the clients did, which --dp does not tell; leave it out")
    if config.secure.clear and config.secure.on:
        problems.append("secure.clear is a plain run's, for comparison; leave it or secure.on (--secure) out")
    if t.curves and (config.privacy.on or config.secure.on):
        hiding = "--dp noises" if config.privacy.on else "--secure hides in sums"
        problems.append(f"train.curves (--curves) tells the clients' losses, which {hiding}; leave one of the two out")
    if t.patience is not None and config.privacy.on:
        problems.append("train.patience ends a run by its validation, which --dp does not noise; leave one of them out")
    if t.patience is not None and t.choose == "last":
        problems.append("train.patience waits for a better validation, and train.choose=last reads none; leave one out")
    try:
        if config.data.clients_part is not None:
            parse_part(config.data.clients_part)
        parse_target(t.until, "train.until")
        build_method(method_spec(config))
    except ConfigError as e:
        problems.append(str(e))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


PATHS = (("data", "name"), ("data", "dir"), ("data", "vocab_file"), ("vectors", "file"), ("train", "init"))


def _with_whole_paths(config: Config, *, named: bool) -> Config:
    """Write paths so that they hold in any folder; a corpus known by name and the base model have none."""
    for section, key in PATHS:
        values = getattr(config, section)
        path = getattr(values, key)
        base = key in ("init", "vocab_file") and path == BASE
        known = base or (named and (section, key) == ("data", "name"))
        if path is not None and not known:
            whole = str(Path(path).expanduser().resolve())
            config = replace(config, **{section: replace(values, **{key: whole})})
    return config


def parse_target(text: str | None, where: str) -> tuple[str, float] | None:
    """Read `perplexity=200` or `nats=2.0`; None for none.

    Example:
      >>> parse_target("perplexity=200", "--until")
      ('perplexity', 200.0)
    """
    if text is None:
        return None
    key, _, number = text.partition("=")
    try:
        value: float = coerce(number.strip(), float, where)
    except ConfigError:
        value = 0.0
    if key.strip() not in ("perplexity", "nats") or value <= 0:
        raise ConfigError(f'{where} is "{text}"; expected perplexity=NUMBER or nats=NUMBER, a number above 0')
    return key.strip(), value


def _unread(config: Config, *, characters: bool) -> list[str]:
    """Say which options are set although nothing reads them: an exchanged part's, or those of a start from a run."""
    from keyfed.federated.methods import METHODS, method_options, tuned_options, unread_options

    alone = []
    if config.train.init is None and config.train.carry != TrainConfig().carry:
        alone.append(f"train.carry is {config.train.carry}, but no weights are carried; set train.init too")
    if config.train.init is None and config.train.unmatched != TrainConfig().unmatched:
        alone.append(f"train.unmatched is {config.train.unmatched}, but no weights are carried; set train.init too")
    given = config.vectors
    if given.file is None and given != VectorsConfig():
        alone.append("[vectors] has options, but no file; set vectors.file too")
    if given.reduce == "pca" and given.remove != VectorsConfig().remove:
        alone.append(f"vectors.remove is {given.remove}, which pp-pca-pp reads; set vectors.reduce=pp-pca-pp")
    if not config.secure.on and not config.secure.clear and config.secure != SecureConfig():
        alone.append("[secure] has options, but secure aggregation is off; set secure.on=true (--secure) too")
    if not config.counts.on and config.counts != CountsConfig():
        alone.append("[counts] has options, but nothing is counted; set counts.on=true (--counts) too")
    if config.method not in METHODS:
        return alone
    usual = {key: p.default for key, p in method_options(config.method).items()}
    usual |= tuned_options(config.method, {}, characters=characters)
    return alone + [
        f"method.{key} is set to {config.options[key]}, but {config.method}'s own {kind} reads it and {kind}.name is "
        f"{getattr(config, kind).name}; leave it out"
        for kind in PARTS
        if getattr(config, kind) is not None
        for key in unread_options(config.method, kind)
        if key in config.options and config.options[key] != usual[key]
    ]


def to_document(config: Config) -> dict[str, dict[str, Value]]:
    """Return the configuration as nested plain values, method options resolved to all their values."""
    from keyfed.federated.components import resolved_part
    from keyfed.federated.methods import build_method

    spec = build_method(MethodSpec(config.method, config.options)).spec
    assert spec is not None
    document: dict[str, dict[str, Value]] = {
        name: {f.name: getattr(getattr(config, name), f.name) for f in fields(section)}
        for name, section in SECTIONS.items()
    }
    document["method"] = {"name": config.method, **spec.options}
    for kind in PARTS:
        part = resolved_part(kind, getattr(config, kind))
        if part is not None:
            document[kind] = {"name": part.name, **part.options}
    return document


def own_settings(config: Config) -> list[tuple[str, Value]]:
    """Return the settings that are not the defaults, by their keys."""
    plain = to_document(Config())
    return [
        (f"{section}.{name}", value)
        for section, settings in to_document(config).items()
        for name, value in settings.items()
        if value != plain.get(section, {}).get(name)
    ]


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
