"""A method from outside, held to the types of `types.py`: a slip is one line that names it, not wrong arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from keyfed.errors import ConfigError
from keyfed.federated.types import (
    Aggregate,
    ClientId,
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

    def told(facts: Facts, what: str) -> Facts:
        for name, numbers in facts.items():
            if not all(0 <= x <= 1 for x in numbers):
                raise ConfigError(f"{who}: {what} tells {name} = {numbers}; expected numbers within 0 and 1")
        return facts

    return PrivateRule(
        init=lambda: _storable(rule.init(), who),
        share=share,
        facts=lambda report, layers, public: told(rule.facts(report, layers, public), "facts"),
        first=lambda report, layers: told(rule.first(report, layers), "first"),
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
    for field, numbers in parts.items():
        for layer in layers:
            got = numbers.get(layer)
            if got is None or not math.isfinite(got) or (field == "mass" and got < 0):
                least = " of at least 0" if field == "mass" else ""
                found = "missing" if got is None else got
                raise ConfigError(f'{who}: {field} of layer "{layer}" is {found}; expected a finite number{least}')
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
