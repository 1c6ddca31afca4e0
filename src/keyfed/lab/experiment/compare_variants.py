"""Variants of a method in a comparison: the same method from another start, `fedadam+init+vectors`.

A variant differs from its method in the start alone; a method without a start draws its weights at random, whatever
the comparison was given for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keyfed.config.load import Config
from keyfed.config.schema import TrainConfig, VectorsConfig
from keyfed.errors import ConfigError, nearest
from keyfed.federated.methods import method_options


@dataclass(frozen=True, slots=True)
class StartKind:
    """A start that a variant may have: what it is, which option gives it, which keys belong to it."""

    what: str
    option: str
    keys: tuple[str, ...]  # section.key; nothing of it is given unless the first is


STARTS = {  # in the order in which a label names them
    "init": StartKind("another run's weights", "--init RUN", ("train.init", "train.unmatched")),
    "vectors": StartKind(
        "word vectors",
        "--vectors FILE",
        ("vectors.file", "vectors.dim", "vectors.reduce", "vectors.remove", "vectors.pieces"),
    ),
}
START_KEYS = (*(key for start in STARTS.values() for key in start.keys), "train.frozen_rounds")


@dataclass(frozen=True, slots=True)
class Variant:
    """A METHOD argument, taken apart.

    Attributes:
      starts: of STARTS, in their order; nothing for a random start.
      settings: what follows the colon; None without one.
    """

    method: str
    starts: tuple[str, ...] = ()
    settings: str | None = None

    @property
    def label(self) -> str:
        """The argument as it is shown everywhere, starts in their order."""
        return self.method + "".join(f"+{start}" for start in self.starts) + self._rest

    @property
    def plain(self) -> str:
        """The label of the same method, with the same settings, from a random start."""
        return self.method + self._rest

    @property
    def _rest(self) -> str:
        return "" if self.settings is None else f":{self.settings}"


def read_variant(text: str) -> Variant:
    """Take METHOD, METHOD+START… or METHOD+START…:key=value,… apart.

    Raises:
      ConfigError: no such method or start, or a start given twice or after the settings.

    Example:
      >>> read_variant("fedadam+vectors+init:lr=0.1").label
      'fedadam+init+vectors:lr=0.1'
      >>> read_variant("fedatt:step=1")
      Variant(method='fedatt', starts=(), settings='step=1')
    """
    head, colon, rest = text.partition(":")
    method, *named = (part.strip() for part in head.split("+"))
    method_options(method)  # an unknown method is said first, with the nearest
    for start in named:
        if start not in STARTS:
            raise ConfigError(
                f'"{text}": "+{start}" is no start{nearest(start, STARTS)}; expected +{" or +".join(STARTS)}'
            )
        if named.count(start) > 1:
            raise ConfigError(f'"{text}" names the start +{start} twice')
    for start in STARTS:
        if rest.endswith(f"+{start}"):
            rest = rest.removesuffix(f"+{start}")
            raise ConfigError(f'"{text}" has a start after its settings; write {head}+{start}:{rest}')
    return Variant(method, tuple(start for start in STARTS if start in named), rest if colon else None)


def value_of(config: Config, key: str) -> object:
    """Return the value of `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def refuse_idle_starts(config: Config, variants: Sequence[Variant]) -> None:
    """Refuse a variant whose start is not given, and a start that no variant uses.

    Args:
      config: with every start's keys as they were given.
    """
    for name, start in STARTS.items():
        users = [variant.label for variant in variants if name in variant.starts]
        if users and value_of(config, start.keys[0]) is None:
            raise ConfigError(f"{users[0]} starts from {start.what}, and none are given; add {start.option}")
        given = [key for key in start.keys if value_of(config, key) != value_of(Config(), key)]
        if given and not users:
            raise ConfigError(
                f"{', '.join(given)} is set ({start.option}), but no compared method starts from {start.what}; name "
                f"one that does: {variants[0].method}+{name}"
            )


def with_starts(config: Config, starts: Iterable[str], *, alone: bool) -> Config:
    """Return the configuration of a variant: of what all starts were given, it keeps its own.

    Args:
      alone: no compared method has a start. Otherwise `train.frozen_rounds` is for those that have one: an embedding
        that nobody has trained yet is not worth keeping.
    """
    starts, usual = tuple(starts), TrainConfig()
    if "vectors" not in starts:
        config = replace(config, vectors=VectorsConfig())
    if "init" not in starts:
        config = replace(config, train=replace(config.train, init=usual.init, unmatched=usual.unmatched))
    if not starts and not alone:
        config = replace(config, train=replace(config.train, frozen_rounds=usual.frozen_rounds))
    return config
