r"""Methods put together by a user: other mediators and server rules by name, and methods from outside the package.

    [method]            [mediator]              [server]
    name = "fedprox"    name = "attention"      name = "adam"
                        temperature = 0.5       lr = 0.01

A component's keyword arguments are its options, as a method's are (`MethodFactory`). A method from outside is held to
the types of `types.py` (`guarded`): a slip is one line that names it, not wrong arithmetic.
"""

from __future__ import annotations

import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyfed.errors import ConfigError, nearest
from keyfed.federated import distance, server, weigh
from keyfed.federated.local import LocalOptions
from keyfed.federated.spec import Part, decay_rate
from keyfed.federated.types import (
    Aggregate,
    ClientId,
    Distance,
    Facts,
    Mediator,
    Memory,
    Method,
    Params,
    PrivateRule,
    Public,
    Report,
    ServerRule,
    Share,
)


@dataclass(eq=False)
class MethodFactory:
    """A method, and what the program knows of its options. Called with options, it returns the `Method`.

    Attributes:
      build: the method's function. An argument `local` stands for the options of local training.
      without: options of local training that the method does not have.
      mediator: options that only the method's own mediator reads; nothing reads them where another one is set.
      server: the same of its server rule.
      characters: defaults of character models where they differ, see `tuned_options`.
      options: every option with its default, in the order of the documentation.
    """

    build: Callable[..., Method]
    without: tuple[str, ...] = ()
    mediator: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    characters: Mapping[str, float] = field(default_factory=dict)
    options: dict[str, inspect.Parameter] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        hints, local = typing.get_type_hints(self.build), typing.get_type_hints(LocalOptions)
        for name, own in inspect.signature(self.build).parameters.items():
            if name != "local":
                self.options[name] = own.replace(annotation=hints[name])
                continue
            for key in (key for key in local if key not in self.without):
                default = getattr(own.default, key)
                self.options[key] = own.replace(name=key, default=default, annotation=local[key])
        doc, lines = self.build.__doc__ or "", (LocalOptions.__doc__ or "").splitlines()
        named = {line.strip().partition(":")[0]: line for line in lines}
        lacking = [named[key] for key in local if key in self.options and f"\n      {key}:" not in doc]
        self.__doc__ = doc.replace("      {local}", "\n".join(lacking))
        self.__signature__ = inspect.Signature(list(self.options.values()), return_annotation=Method)
        self.__annotations__ = {name: p.annotation for name, p in self.options.items()}

    def __call__(self, **options: Any) -> Method:
        self.__signature__.bind(**options)  # an option that the method does not have is a TypeError
        own = inspect.signature(self.build).parameters.get("local")
        if own is not None:
            chosen = {f.name: options.pop(f.name) for f in fields(LocalOptions) if f.name in options}
            options["local"] = replace(own.default, **chosen)
        return self.build(**options)


class Mediation(NamedTuple):
    """A mediator, the distance it asks of clients, and the share of clients it lets upload."""

    mediator: Mediator
    distance: Distance | None = None
    uploading: float = 1.0


def _under_top_k(beta: float, mediator: Mediator, measured: Distance | None = None) -> Mediation:
    return Mediation(mediator if beta == 1 else weigh.top_k(beta, mediator), measured, beta)


def tokens(*, beta: float = 1.0) -> Mediation:
    """Weigh by training tokens, n_k / Σn.

    Options:
      beta: share of the cohort, those of lowest loss, that uploads (top-K).
    """
    return _under_top_k(beta, weigh.by_tokens())


def uniform(*, beta: float = 1.0) -> Mediation:
    """Let every client count alike, 1/m.

    Options:
      beta: share of the cohort, those of lowest loss, that uploads (top-K).
    """
    return _under_top_k(beta, weigh.uniform())


def fixed(*, weights: str = "") -> Mediation:
    """Weigh by numbers given beforehand.

    Options:
      weights: "client=number, client=number, …"; who is not named weighs 1.
    """
    return Mediation(weigh.fixed(read_weights(weights)))


def read_weights(text: str) -> dict[str, float]:
    """Read "client=number, client=number, …".

    Example:
      >>> read_weights("anna=3, ben=0.5")
      {'anna': 3.0, 'ben': 0.5}
    """
    weights = {}
    for pair in filter(None, (p.strip() for p in text.split(","))):
        client, equals, number = pair.rpartition("=")
        try:
            weights[client.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f'mediator.weights has "{pair}"; expected client=number, separated by commas')
    return weights


def attention(
    *, norm: distance.Norm = "spectral", temperature: float = 1.0, bound: float | None = None, beta: float = 1.0
) -> Mediation:
    """Weigh each layer by the softmax of how far it moved (FedAtt's rule).

    Options:
      norm: spectral or frobenius.
      temperature: T of the softmax.
      bound: largest score that counts.
      beta: share of the cohort, those of lowest loss, that uploads (top-K).
    """
    return _under_top_k(beta, weigh.softmax_of_distance(temperature, bound), distance.norm(norm))


def divergence(
    *,
    reading: distance.Reading = "absolute",
    temperature: float = 1.0,
    bound: float | None = None,
    switch: float | None = None,
    beta: float = 1.0,
) -> Mediation:
    """Weigh each layer by the softmax of its Jensen–Shannon divergence from θ (FedMed's rule).

    Options:
      reading: how weights become a distribution: absolute, softmax, histogram, or raw (they do not).
      temperature: T of the softmax.
      bound: largest score that counts.
      switch: ε of FedMed's mediation: by tokens while the mean loss changes by less; none always weighs by divergence.
      beta: share of the cohort, those of lowest loss, that uploads (top-K).
    """
    inner = weigh.softmax_of_distance(temperature, bound, distance.most_divergence(reading))
    if switch is not None:
        inner = weigh.switch_on_loss(inner, weigh.by_tokens(), switch)
    return _under_top_k(beta, inner, distance.jensen_shannon(reading))


MEDIATORS: dict[str, Callable[..., Mediation]] = {
    "tokens": tokens,
    "uniform": uniform,
    "fixed": fixed,
    "attention": attention,
    "divergence": divergence,
}
SERVERS: dict[str, Callable[..., ServerRule]] = {
    "sgd": server.sgd,
    "momentum": server.momentum,
    "nesterov": server.nesterov,
    "adam": server.adam,
    "yogi": server.yogi,
    "adagrad": server.adagrad,
}
KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {"mediator": MEDIATORS, "server": SERVERS}


def part_options(kind: str, name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a part; an unknown name is an error that says the nearest."""
    known = KINDS[kind]
    if name not in known:
        raise ConfigError(f'{kind}.name is "{name}"{nearest(name, known)}; expected one of {", ".join(known)}')
    return dict(inspect.signature(known[name]).parameters)


def resolved_part(kind: str, part: Part | None) -> Part | None:
    """Return a part with every option, defaults too: the same part however it was written.

    Example:
      >>> resolved_part("server", Part("nesterov", {"lr": 1.0})).options
      {'lr': 1.0, 'beta': 0.9}
    """
    if part is None:
        return None
    defaults = {key: p.default for key, p in part_options(kind, part.name).items()}
    return Part(part.name, {**defaults, **part.options})


def build_part(kind: str, part: Part) -> Any:
    """Build a mediator or a server rule from its name and numbers."""
    options = part_options(kind, part.name)
    for key in part.options:
        if key not in options:
            raise ConfigError(
                f'{kind}.{key} is not an option of "{part.name}"{nearest(key, options)}. Options: {", ".join(options)}.'
            )
    missing = [k for k, p in options.items() if p.default is inspect.Parameter.empty and k not in part.options]
    if missing:
        raise ConfigError(
            f'{kind} "{part.name}" needs {", ".join(f"{kind}.{k}" for k in missing)}, e.g. {kind}.lr=0.01'
        )
    rate = part.options.get("lr", 1.0)
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ConfigError(f"{kind}.lr is {rate}; expected lr > 0")
    try:
        return KINDS[kind][part.name](**part.options)
    except ConfigError as e:  # the parts' own checks speak of the method they were written for
        raise ConfigError(str(e).replace("method.", f"{kind}.")) from None


def exchange(method: Method, mediator: Part | None, rule: Part | None) -> Method:
    """Give a method another mediator or server rule; None keeps its own."""
    if method.solver.start is not None and (mediator or rule):
        raise ConfigError(
            f"{method.name} is a running mean over all clients that joined: its mediator and server rule are part of "
            "the method and cannot be exchanged; take fedprox for a proximal term without duals"
        )
    if mediator is not None:
        made: Mediation = build_part("mediator", mediator)
        method = replace(method, mediator=made.mediator, distance=made.distance, uploading=made.uploading)
    if rule is not None:
        if method.noise is not None and method.noise.at == "server":
            raise ConfigError(
                f"{method.name} adds its noise to the step of its own server rule; with server.name={rule.name} set "
                "method.noise_at=client, or leave the noise out"
            )
        method = replace(method, server=build_part("server", rule))
    return method


AVERAGE, AVERAGED = "average/", "averaged"  # layers of the running average, and how many rounds are in it


def averaged(rule: ServerRule, weight: float) -> ServerRule:
    r"""Serve a running average of θ over rounds; training goes on from θ itself.

    .. math::  a_t = β a_{t−1} + (1 − β) θ_t,\quad \bar θ_t = \frac{a_t}{1 − β^t}
               \qquad⇔\qquad \bar θ_t = \bar θ_{t−1} + \frac{1 − β}{1 − β^t} (θ_t − \bar θ_{t−1})

    The second form is computed: it needs no division at the end and starts exactly at θ_1. θ_1 is the model after the
    first step; the random start is no part of the average. The average follows from models that were released
    already, so it costs nothing under differential privacy or secure sums.

    Args:
      weight: β, the weight of the past: about 1/(1 − β) rounds count.
    """
    decay_rate("average", weight)

    def init(params: Params) -> Params:
        average = {f"{AVERAGE}{name}": p.clone() for name, p in params.items()}
        return {**rule.init(params), **average, AVERAGED: torch.zeros((), dtype=torch.float64)}

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        own = {key: t for key, t in state.items() if key != AVERAGED and not key.startswith(AVERAGE)}
        after, kept = rule.step(params, aggregate, own)
        rounds = state[AVERAGED] + 1
        share = (1 - weight) / (1 - weight ** float(rounds))
        average = {
            f"{AVERAGE}{name}": torch.lerp(state[f"{AVERAGE}{name}"], p, share) if share < 1 else p.clone()
            for name, p in after.items()
        }
        return after, {**kept, **average, AVERAGED: rounds}

    def served(params: Params, state: Params) -> Params:
        return {name: state[f"{AVERAGE}{name}"] for name in params}

    return ServerRule(init, step, served)


def guarded(method: Method) -> Method:
    """Return the same method with its mediator's shares and its server's steps looked at as they come.

    Example:
      >>> from keyfed.federated.methods import fedavg
      >>> nothing = Mediator(init=lambda: None, weigh=lambda memory, reports, layers: (memory, {}), share=None)
      >>> method = guarded(replace(fedavg(), name="mine", mediator=nothing))
      >>> method.mediator.weigh(None, {}, ["bias"])
      (None, {})
    """
    return replace(
        method,
        mediator=_guarded_mediator(method.mediator, f"the mediator of {method.name}"),
        server=_guarded_server(method.server, f"the server rule of {method.name}"),
    )


def _guarded_mediator(mediator: Mediator, who: str) -> Mediator:
    own = mediator.share

    def init() -> Memory:
        return _storable(mediator.init(), who)

    def weigh(
        memory: Memory, reports: Mapping[ClientId, Report], layers: Sequence[str]
    ) -> tuple[Memory, Mapping[ClientId, Share] | None]:
        after, shares = _pair(mediator.weigh(memory, reports, layers), who, "weigh", "(memory, shares)")
        if (shares is None) != (own is not None):
            raise ConfigError(
                f"{who}: weigh returned shares beside a rule `share`, whose clients are in the sum already; return None"
                if own is not None
                else f"{who}: weigh returned no shares and there is no rule `share`; return a Share for every client"
            )
        for client, share in (shares or {}).items():
            if client not in reports:
                raise ConfigError(f"{who}: weigh gave a share to {client}, which has not reported")
            _whole_share(share, layers, who)
        return _storable(after, who), shares

    def share(report: Report, layers: Sequence[str]) -> Share:
        assert own is not None
        return _whole_share(own(report, layers), layers, who)

    private = None if mediator.private is None else _guarded_rule(mediator.private, f"the private rule of {who}")
    return mediator._replace(init=init, weigh=weigh, share=None if own is None else share, private=private)


def _guarded_rule(rule: PrivateRule, who: str) -> PrivateRule:
    def share(report: Report, layers: Sequence[str], public: Public) -> Share:
        own = _whole_share(rule.share(report, layers, public), layers, who)
        if own.log is not None:
            raise ConfigError(f"{who} gave a share with logarithms, which no sum of fixed point holds; leave log out")
        return own

    def within(facts: Facts, what: str) -> Facts:
        for name, numbers in facts.items():
            if not all(0 <= x <= 1 for x in numbers):
                raise ConfigError(f"{who}: {what} tells {name} = {numbers}; expected numbers within 0 and 1")
        return facts

    return PrivateRule(
        init=lambda: _storable(rule.init(), who),
        share=share,
        facts=lambda report, layers, public: within(rule.facts(report, layers, public), "facts"),
        first=lambda report, layers: within(rule.first(report, layers), "first"),
        start=lambda public, sums: _storable(rule.start(public, sums), who),
        learn=lambda public, sums, contributors: _storable(rule.learn(public, sums, contributors), who),
    )


def _guarded_server(server: ServerRule, who: str) -> ServerRule:
    def init(params: Params) -> Params:
        return _tensors(server.init(params), who, "init")

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        after, kept = _pair(server.step(params, aggregate, state), who, "step", "(θ', state)")
        _tensors(after, who, "step")
        if {n: p.shape for n, p in after.items()} != {n: p.shape for n, p in params.items()}:
            raise ConfigError(f"{who}: step returned other layers or shapes than it was given; return every layer of θ")
        return {name: after[name] for name in params}, _tensors(kept, who, "step")

    return server._replace(init=init, step=step)


def _pair(value: Any, who: str, what: str, expected: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ConfigError(f"{who}: {what} returned a {type(value).__name__}; expected a pair {expected}")
    return value


def _whole_share(share: Any, layers: Sequence[str], who: str) -> Share:
    """Refuse a share that misses a layer or holds what is no weight."""
    if not isinstance(share, Share):
        raise ConfigError(f"{who} gave a {type(share).__name__}; expected a Share(scale, mass)")
    parts = {"scale": share.scale, "mass": share.mass} | ({} if share.log is None else {"log": share.log})
    for part, numbers in parts.items():
        for layer in layers:
            got = numbers.get(layer)
            if got is None or not math.isfinite(got) or (part == "mass" and got < 0):
                least = " of at least 0" if part == "mass" else ""
                found = "missing" if got is None else got
                raise ConfigError(f'{who}: {part} of layer "{layer}" is {found}; expected a finite number{least}')
    return share


def _storable(memory: Any, who: str) -> Any:
    """Refuse a memory that a checkpoint would not give back as it was."""
    try:
        same = json.loads(json.dumps(memory)) == memory
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ConfigError(
            f"{who} keeps a {type(memory).__name__} that JSON does not give back; expected None, numbers, text, lists "
            "and dictionaries with text keys"
        )
    return memory


def _tensors(value: Any, who: str, what: str) -> Params:
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise ConfigError(f"{who}: {what} gave a {type(value).__name__}; expected a dictionary of named tensors")
    return value
