"""What is to be compared: methods with their own settings and starts, what all share, the budget in rounds.

A variant, `fedadam+init+vectors`, differs from its method in the start alone. A method without a start draws its
weights at random, whatever the comparison was given for the others.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import PARTS, SECTIONS, Config, Value, check, method_spec, read_config, set_value
from keyfed.config.load import parse_target as parse_result
from keyfed.config.schema import TrainConfig, VectorsConfig
from keyfed.errors import ConfigError, nearest
from keyfed.federated.methods import build_method, method_options
from keyfed.federated.types import Method
from keyfed.model.language_model import preset
from keyfed.run.folder import file_name
from keyfed.run.plan import members_of
from keyfed.run.prepare import Prepared, round_tokens, usual_members


@dataclass(frozen=True, slots=True)
class StartKind:
    """A start that a variant may have: what it is, which option gives it, which keys belong to it."""

    what: str
    option: str
    keys: tuple[str, ...]  # section.key; nothing of it is given unless the first is


STARTS = {  # in the order in which a label names them
    "init": StartKind("another run's weights", "--init RUN", ("train.init", "train.unmatched", "train.carry")),
    "vectors": StartKind(
        "word vectors",
        "--vectors FILE",
        ("vectors.file", "vectors.dim", "vectors.reduce", "vectors.remove", "vectors.pieces"),
    ),
}
START_KEYS = (*(key for start in STARTS.values() for key in start.keys), "train.frozen_rounds")


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """One of the compared methods, or a variant of one: a METHOD argument, taken apart.

    Attributes:
      starts: what it starts from, of STARTS in their order; nothing for weights drawn at random.
      settings: what follows the colon; None without one.
      config: its configuration but for the seed, once it is resolved.
      own: the method itself, where it is the caller's own and no name stands for it.
    """

    method: str
    starts: tuple[str, ...] = ()
    settings: str | None = None
    config: Config = field(default_factory=Config, repr=False)
    own: Method | None = field(default=None, repr=False)

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

    @property
    def folder(self) -> str:
        """Name of its folder, a function of the label alone: another comparison finds the runs again."""
        return folder_of(self.label)

    def cell(self, out: Path, seed: int) -> ComparedRun:
        """The method with a seed, in its folder of the comparison in `out`."""
        return ComparedRun(self, seed, out / self.folder / f"seed-{seed}")


def read_variant(text: str) -> ComparedMethod:
    """Take METHOD, METHOD+START… or METHOD+START…:key=value,… apart.

    Raises:
      ConfigError: no such method or start, or a start given twice or after the settings.

    Example:
      >>> read_variant("fedadam+vectors+init:lr=0.1").label
      'fedadam+init+vectors:lr=0.1'
      >>> read_variant("fedatt:step=1")
      ComparedMethod(method='fedatt', starts=(), settings='step=1')
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
    return ComparedMethod(method, tuple(start for start in STARTS if start in named), rest if colon else None)


def variant_of(method: str | Method) -> ComparedMethod:
    """Return what is compared: a METHOD argument taken apart, or a method of the caller's own under its name."""
    if isinstance(method, Method):
        return ComparedMethod(method.name, own=method)
    if not isinstance(method, str):
        raise ConfigError(f"a method to compare is a {type(method).__name__}; expected a name, or a keyfed.Method")
    return read_variant(method.strip())


def value_of(config: Config, key: str) -> object:
    """Return the value of `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def refuse_idle_starts(config: Config, variants: Sequence[ComparedMethod]) -> None:
    """Refuse a variant whose start is not given, and a start that no variant uses.

    Args:
      config: with every start's keys as they were given.
    """
    for name, start in STARTS.items():
        users = [variant.label for variant in variants if name in variant.starts]
        if users and value_of(config, start.keys[0]) is None:
            raise ConfigError(f"{users[0]} starts from {start.what}, and none are given; add {start.option}")
        changed = [key for key in start.keys if value_of(config, key) != value_of(Config(), key)]
        if changed and not users:
            raise ConfigError(
                f"{', '.join(changed)} is set ({start.option}), but no compared method starts from {start.what}; name "
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
        config = replace(
            config, train=replace(config.train, init=usual.init, unmatched=usual.unmatched, carry=usual.carry)
        )
    if not starts and not alone:
        config = replace(config, train=replace(config.train, frozen_rounds=usual.frozen_rounds))
    return config


Setting = tuple[str, Any]  # (section.key or a method's option, value)
BUDGETS = ("rounds", "tokens")
MOST_SEEDS = 1000
OWN_SECTIONS = (*PARTS, "upload", "secure")  # beside its options, what one of the compared methods may have to itself
LONGEST_NAME = 60  # letters of a folder's name, of up to four bytes each; a label may be any length


@dataclass(frozen=True, slots=True)
class Quick:
    """A key that is reduced unless the user sets it or asks for everything, and why that is fair."""

    key: str
    words: int | None  # None: as it is
    characters: int | None
    why: str


QUICK = (
    Quick(
        "data.max_tokens",
        4_000,
        20_000,
        "a client reads a piece of its text a round, drawn anew each round and alike for all methods",
    ),
    Quick("data.window", None, 50, "shorter windows take more steps over the same text; the state is carried on"),
    Quick("train.valid_tokens", None, 10_000, "one long stream of characters is read one after the other"),
    Quick("train.test_tokens", 100_000, 50_000, "every method is tested on the same tokens, once a seed"),
)


def quick_values(model: str) -> dict[str, int]:
    """Return the keys that are reduced for a model preset, and to what."""
    characters = preset(model).characters
    chosen = {q.key: q.characters if characters else q.words for q in QUICK}
    return {key: value for key, value in chosen.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One method with one seed: a run folder, and once it was run its result or the reason why there is none."""

    entry: ComparedMethod
    seed: int
    folder: Path
    result: dict[str, Any] | None = None
    records: Sequence[Mapping[str, Any]] = ()
    error: str | None = None

    @property
    def config(self) -> Config:
        """Its configuration; baselines are the same for all methods and scored once a seed, not by the cells."""
        own = self.entry.config
        return replace(own, train=replace(own.train, seed=self.seed, baselines=False))


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """The compared methods, the seeds, and what the quick preset reduced."""

    entries: tuple[ComparedMethod, ...]
    seeds: tuple[int, ...]
    quick: Mapping[str, int]

    def lines(self) -> Iterable[str]:
        """What is said before anything is trained: what is reduced, and for whom rows are frozen."""
        if self.quick:
            reduced = ", ".join(f"{key}={value}" for key, value in self.quick.items())
            yield f"quick: {reduced}; --full compares on the whole text"
        frozen = {entry.label: entry.config.train.frozen_rounds for entry in self.entries}
        rounds = max(frozen.values())
        others = [label for label, its in frozen.items() if its < rounds]
        if others:
            yield f"frozen: train.frozen_rounds={rounds} is for what has a start, not for {', '.join(others)}"


def split_setting(text: str, where: str = "--set") -> Setting:
    """Split `key=value`.

    Example:
      >>> split_setting("train.cohort=5")
      ('train.cohort', '5')
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f'{where} got "{text}"; expected key=value, e.g. lr=0.005 or train.cohort=5')
    return key.strip(), value.strip()


def file_settings(path: Path) -> list[Setting]:
    """Return the keys of a TOML file in order, but for the method's name: the comparison names its methods itself.

    Options under `[method]` with a name are that method's alone (`NAME:option`): what was tuned for one method is not
    another's.
    """
    read_config(path)  # says what is wrong with the file
    document = tomllib.loads(path.read_text("utf-8"))
    name = document.get("method", {}).get("name")
    return [
        (f"{name}:{key}" if section == "method" and name is not None else f"{section}.{key}", value)
        for section, table in document.items()
        if section != "made"
        for key, value in sorted(table.items(), key=lambda item: item[0] != "name")  # a part's name says its options
        if (section, key) != ("method", "name")
    ]


def own_settings(variant: ComparedMethod) -> list[Setting]:
    """Return the settings that a METHOD argument has to itself.

    Example:
      >>> own_settings(read_variant("fedatt:temperature=0.1,step=1.0"))
      [('method.temperature', '0.1'), ('method.step', '1.0')]
      >>> own_settings(read_variant("fedprox:server.name=adam,server.lr=0.01"))
      [('server.name', 'adam'), ('server.lr', '0.01')]
    """
    own = []
    for part in variant.settings.split(",") if variant.settings is not None else ():
        key, value = split_setting(part, f'"{variant.label}"')
        section, _, option = key.rpartition(".")
        if section not in ("", "method", *OWN_SECTIONS):
            raise ConfigError(f'"{variant.label}" sets {key}, which all methods share; give it as --set {key}={value}')
        own.append((f"{section or 'method'}.{option}", value))
    return own


def folder_of(label: str) -> str:
    """Return a label's folder name; where characters had to go, a hash keeps labels apart.

    Example:
      >>> folder_of("fedatt:temperature=0.1,step=1")
      'fedatt-temperature=0.1,step=1'
      >>> folder_of("fedatt:step= 1")
      'fedatt-step=-1-e6a5b65f'
    """
    wanted = label.replace(":", "-", 1)
    safe = file_name(wanted, "=.,+")[:LONGEST_NAME]
    return safe if safe == wanted else f"{safe}-{hashlib.sha256(label.encode('utf-8', 'replace')).hexdigest()[:8]}"


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read `3` (seeds 1 to 3) or `4,7,` (those).

    Example:
      >>> parse_seeds("3"), parse_seeds("4,7"), parse_seeds("4,")
      ((1, 2, 3), (4, 7), (4,))
    """
    parts = [part.strip() for part in text.split(",")]
    listed = [part for part in parts if part]
    if not listed or not all(part.isdecimal() and len(part) < 19 for part in listed):
        raise ConfigError(f'--seeds got "{text}"; expected a number of seeds (3) or a list of seeds (1,2,3)')
    return check_seeds(list(map(int, listed)) if len(parts) > 1 else range(1, int(listed[0]) + 1))


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Refuse no seed at all, more than anybody means, and one that is given twice."""
    if not 1 <= len(seeds) <= MOST_SEEDS:
        raise ConfigError(f"--seeds asks for {len(seeds)} seeds; expected 1 to {MOST_SEEDS} (one seed 7 is --seeds 7,)")
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise ConfigError(f"--seeds names {twice[0]} twice; a seed repeated is the same run")
    return tuple(seeds)


def parse_target(text: str) -> float:
    """Read `perplexity=200` or `nats=2.0` as a perplexity.

    Example:
      >>> parse_target("perplexity=200"), round(parse_target("nats=2.0"), 3)
      (200.0, 7.389)
    """
    parsed = parse_result(text, "--target")
    assert parsed is not None
    kind, number = parsed
    if number >= 700 if kind == "nats" else number < 1:
        raise ConfigError(f'--target got "{text}"; expected perplexity=200 (at least 1) or nats=2.0 (above 0)')
    return math.exp(number) if kind == "nats" else number


def resolve(
    methods: Sequence[str | Method],
    settings: Iterable[Setting] = (),
    *,
    seeds: Sequence[int] | None = None,
    full: bool = False,
) -> ComparePlan:
    """Make every method's configuration and check it; nothing is read or trained.

    A `section.key` is for all methods (but for what makes a start, which is for the variants that have it), an option
    for every method that has it, `NAME:option` for the method of that name; what a METHOD argument sets itself comes
    last.

    Raises:
      ConfigError: a method, key or value that does not exist or makes no sense, or a label given twice.
    """
    if not methods:
        raise ConfigError("no method to compare; name some, e.g. keyfed compare fedavg fedatt (`keyfed methods`)")
    variants = [variant_of(method) for method in methods]
    owns = [own_settings(variant) if variant.own is None else [] for variant in variants]
    for at, variant in enumerate(variants):
        if variant.folder in (other.folder for other in variants[:at]):
            method = variant.label.split(":")[0]
            raise ConfigError(f'method "{variant.label}" is given twice; give it other settings ({method}:key=value)')
    settings = list(settings)
    base, options = Config(), []
    for key, value in settings:
        if ":" in key:
            continue
        if key.rpartition(".")[0] in ("", "method"):
            options.append((key.rpartition(".")[2], value))
        else:
            base = set_value(base, key, value)
    keys = {key for key, _ in settings}
    if seeds is not None and "train.seed" in keys:
        raise ConfigError("train.seed and --seeds are both given; --seeds 1,2,3 alone says which seeds to run")
    if base.train.central:
        raise ConfigError(
            "train.central trains it beside every method again; compare it once: name central as a method"
        )
    if base.train.rounds < 1:
        raise ConfigError(f"train.rounds is {base.train.rounds}; a comparison needs at least 1")
    quick = {} if full else {k: v for k, v in quick_values(base.model.name).items() if k not in keys}
    for key, reduced in quick.items():
        base = set_value(base, key, reduced)
    _refuse_unknown_options(options, [variant.method for variant in variants if variant.own is None])
    refuse_idle_starts(base, variants)
    entries, alone = [], not any(variant.starts for variant in variants)
    for variant, own in zip(variants, owns, strict=True):
        name = variant.method
        config = with_starts(base, variant.starts, alone=alone)
        if variant.own is not None:  # its options are inside; the configuration's method is not trained
            entries.append(replace(variant, config=check(config)))
            continue
        config = replace(config, method=name)
        try:
            its = [(k.removeprefix(f"{name}:"), v) for k, v in settings if k.startswith(f"{name}:")]
            for key, value in its + [(k, v) for k, v in options if k in method_options(name)] + own:
                config = set_value(config, key, value)
            entries.append(replace(variant, config=check(config)))
        except ConfigError as e:
            raise ConfigError(f"{variant.label}: {e}") from None
    return ComparePlan(tuple(entries), check_seeds(seeds if seeds is not None else (base.train.seed,)), quick)


def _refuse_unknown_options(options: Iterable[tuple[str, Value]], names: Sequence[str]) -> None:
    """Refuse an option that none of the compared methods has."""
    known = {option: None for name in names for option in method_options(name)}
    for option, _ in options:
        if option not in known:
            elsewhere = [f"{s}.{option}" for s, c in SECTIONS.items() if option in {f.name for f in fields(c)}]
            hint = f" (did you mean {elsewhere[0]}?)" if elsewhere else nearest(option, known)
            raise ConfigError(
                f"method.{option} is an option of none of {', '.join(dict.fromkeys(names))}{hint}. "
                f"Options: {', '.join(known)}."
            )


def tokens_a_round(config: Config, prepared: Prepared, own: Method | None = None) -> int:
    """Tokens one round of a method predicts in expectation; a central round reads what a cohort would, once."""
    method = build_method(method_spec(config)) if own is None else own
    if method.cohort == "pooled":
        return round_tokens(prepared, usual_members(config, len(prepared.store)), 1)
    return round_tokens(prepared, members_of(method, prepared, config), method.epochs)


def rounds_within(rounds: int, costs: Sequence[int]) -> list[int]:
    """Return the rounds of each method that fit into the tokens of the first one's `rounds`, at least one.

    Example:
      >>> rounds_within(20, [1000, 1000, 4300, 50_000])
      [20, 20, 4, 1]
    """
    return [max(1, rounds * costs[0] // cost) for cost in costs]


def with_budget(entries: Sequence[ComparedMethod], budget: str, prepared: Prepared) -> tuple[ComparedMethod, ...]:
    """Give every method its rounds: the same number, or as many as fit the first method's tokens."""
    if budget == "rounds":
        return tuple(entries)
    rounds = rounds_within(entries[0].config.train.rounds, [tokens_a_round(e.config, prepared, e.own) for e in entries])
    return tuple(
        replace(e, config=replace(e.config, train=replace(e.config.train, rounds=n)))
        for e, n in zip(entries, rounds, strict=True)
    )
