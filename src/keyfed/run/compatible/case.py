"""A run as a rule sees it, and one rule: a combination of options that is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from keyfed.config.load import Config, ModelConfig, Open, apply_settings, method_spec
from keyfed.engine.sums.codec import MOST_MEMBERS
from keyfed.errors import ConfigError, nearest
from keyfed.federated.cohort import Participation
from keyfed.federated.components import read_weights
from keyfed.federated.methods import build_method, tuned_options
from keyfed.federated.types import Method
from keyfed.federated.weigh import kept
from keyfed.model.language_model import preset
from keyfed.private.dp.accounting import MOST_MEMBERS as MOST_PRIVATE
from keyfed.private.secagg.threshold import PRIVATE_RATIO

EMBEDDING = "embedding.weight"
UPLOAD_LIMITS = ("limit", "token_limit", "against", "trim")
BOUNDS = {"most": MOST_MEMBERS, "most_private": MOST_PRIVATE, "least_private": PRIVATE_RATIO + 1}
MODELLED = ("over_select", "drop_before", "drop_after", "deadline", "least_epochs", "least_work", "pace_spread")

Stage = Literal[
    "command line", "configuration", "own code", "plan", "device", "deadline", "secure sums", "masked weights",
    "frozen embedding", "word vectors", "differential privacy", "ranks", "federation",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A run as far as it is known at a stage; messages name its fields and properties.

    Attributes:
      built: its method; None for the one that the configuration names.
      members: uploads that a round wants.
      clients: of the corpus; `names` are theirs.
      moving: seconds to move the model down and up at the modelled links.
      layers: names of the model's parameter tensors; `model` is its own name.
      module: whether the model is a module of the caller's own.
      characters: whether it reads characters; `embed` is the width of its embedding.
      device: where it is trained, by so many `workers`.
      flags: of the command line.
    """

    config: Config = field(default_factory=Config)
    built: Method | None = None
    members: int = 0
    clients: int = 0
    names: Sequence[str] = ()
    corpus: str = "the corpus"
    moving: float = 0.0
    model: str = "the model"
    layers: Sequence[str] = (EMBEDDING,)
    module: bool = False
    characters: bool = False
    embed: int = 0
    device: str = "cpu"
    workers: int = 1
    ranks: int = 1
    flags: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> object:  # for `str.format_map`
        return BOUNDS[name] if name in BOUNDS else getattr(self, name)

    def has(self, flags: Sequence[str]) -> bool:
        """Whether all of these flags were given."""
        return self.flags.issuperset(flags)

    @property
    def method(self) -> Method:
        """The run's method."""
        return build_method(method_spec(self.config)) if self.built is None else self.built

    @property
    def federated(self) -> bool:
        """Whether clients train apart."""
        return self.method.cohort != "pooled"

    @property
    def uploads(self) -> int:
        """Uploads of a round, at most."""
        poisson = self.config.participation.sampling == "poisson"
        return kept(self.method.uploading, self.clients if poisson else self.members)

    @property
    def participations(self) -> float:
        """How often a client is in a round over the whole run, in expectation."""
        arrive = (1 - self.config.participation.drop_before) * (1 - self.config.participation.drop_after)
        return self.config.train.rounds * self.members / self.clients * arrive

    @property
    def majority(self) -> int:
        """Least threshold of a secure sum: clients refuse half and less."""
        return self.members // 2 + 1

    @property
    def layers_named(self) -> str:
        """The model's layers."""
        return ", ".join(self.layers)

    @property
    def stranger(self) -> str | None:
        """A client with a fixed weight that the corpus does not have."""
        part = self.config.mediator
        if part is None or part.name != "fixed":
            return None
        weights = read_weights(str(part.options.get("weights", "")))
        return next((client for client in weights if client not in self.names), None)

    @property
    def did_you_mean(self) -> str:
        """The client that the stranger may be."""
        return nearest(str(self.stranger), self.names)

    @property
    def modelled(self) -> str | None:
        """An option of modelled clients that is set."""
        usual, own = Participation(), self.config.participation
        return next((key for key in MODELLED if getattr(own, key) != getattr(usual, key)), None)

    @property
    def upload_limit(self) -> str | None:
        """A limit of uploads that is set."""
        return next((key for key in UPLOAD_LIMITS if getattr(self.config.upload, key)), None)

    @property
    def preset_options(self) -> str:
        """The settings that change a preset."""
        own, usual = asdict(self.config.model), asdict(ModelConfig())
        return ", ".join(f"model.{key}={own[key]}" for key in own if key != "name" and own[key] != usual[key])

    @property
    def configured(self) -> str:
        """The method that the configuration names, with its options; nothing for a configuration that names none."""
        method, options = self.config.method, self.config.options
        unsaid = tuned_options(method, {}, characters=preset(self.config.model.name).characters)
        if method == Config().method and options in ({}, unsaid):
            return ""
        return ", ".join([method, *(f"{key}={value}" for key, value in options.items())])


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One refusal.

    Attributes:
      name: the sides that do not go together.
      example: method, settings and flags of a run that it refuses; `facts` are what else is known of that run.
      when: whether it refuses a case; `message` is what it says then, with fields of the case in braces.
      lower: in place of both, a check of a lower room, which raises.
    """

    name: str
    example: str
    when: Callable[[Case], object] = bool
    message: str = ""
    lower: Callable[[Case], object] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def refuse(self, case: Case) -> None:
        """Raise what the rule says, if it refuses the case."""
        if self.lower is not None:
            self.lower(case)
        elif self.when(case):
            raise ConfigError(self.message.format_map(case))

    def case(self) -> Case:
        """Return the example, in a corpus of twenty clients and on two ranks unless it says otherwise."""
        method, *words = self.example.split()
        flags = frozenset(word for word in words if word.startswith("--"))
        config = apply_settings(Config(method=method), [word for word in words if word not in flags])
        config = replace(config, open=Open(minutes=5.0)) if "--minutes" in flags else config
        case = Case(
            config, members=min(config.train.cohort, 20), clients=20, names=("ann", "ben"), ranks=2, flags=flags
        )
        return replace(case, **self.facts)
