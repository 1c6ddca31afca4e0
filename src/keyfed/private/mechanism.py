r"""Which methods can carry a guarantee, and in which form: the table of combinations, and refusals by name.

In a private round a client's weight may depend on nobody else. So FedAvg's n_k/Σn becomes 1/m (or min(n_k/ŵ, 1) with a
public ŵ) over a *public* denominator, and attention becomes a ratio of two noisy sums: client k sends
u_k Δ_k and u_k = exp(min(s_k, c) − c) with a public cap c. Either way the sum moves by at most the clip S when one
client is added or removed. Server rules come after the noise and cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from keyfed.errors import PrivacyError
from keyfed.federated.mediate import separable, uniform
from keyfed.federated.participation import Participation
from keyfed.federated.types import Aggregate, Mediator, Method, MethodSpec, Params, Report, ServerRule, Share
from keyfed.private.noise import next_clip
from keyfed.sections import PrivacyConfig

CLIP = "privacy/clip"  # the clip of the next round, in the server rule's state


class Bounded(NamedTuple):
    """A method in its private form.

    Attributes:
      ratio: the sum is divided by its own noisy mass, not by a public number.
      sensitivity: what one client can do to the sum, in words.
    """

    method: Method
    ratio: bool
    sensitivity: str


FIXED = "Sensitivity: one client moves the sum of clipped uploads by at most the clip S; the denominator is public."
RATIO = (
    "Sensitivity: one client moves the sum of clipped [weight · upload, weight] by at most the clip S, its weight "
    "being exp(min(score, c) − c) with a public cap c; the noisy sum is divided by max(noisy mass, floor)."
)
JS_MOST = math.log(2)  # nats, the largest Jensen–Shannon divergence of two distributions


def bound(method: Method, p: PrivacyConfig) -> Bounded:
    """Return the private form of a method, or refuse it by name."""
    spec = method.spec
    if spec is None:
        raise PrivacyError(f'the method "{method.name}" is from outside the package and states no sensitivity: no --dp')
    if method.cohort == "pooled":
        raise PrivacyError(f"{spec.name} trains on everybody's text in one place: there is no client to protect")
    if method.noise is not None:
        raise PrivacyError(
            "method.noise is FedAtt's perturbation, whose ε is ∞ because nothing is clipped; leave it out, --dp adds "
            "calibrated noise"
        )
    if method.solver.start is not None and (spec.name != "fedadmm" or spec.options["server_step"] != "published"):
        raise PrivacyError(
            f"{spec.name}: a joining client sends all it stands for, w + y/ρ, which no useful clip bounds; take "
            "fedadmm with server_step=published, whose clients send (and book) clipped increments"
        )
    kind, options = _mediation(spec)
    if options.get("beta", 1.0) != 1.0:
        raise PrivacyError(
            f"{spec.name}: exact top-K lets one client push another out by its loss; set beta=1 with --dp"
        )
    switch = options["mediation"] if kind == "fedmed" else options.get("switch") is not None
    if switch:
        raise PrivacyError(
            f"{spec.name}: the switch between attention and tokens reads the clients' losses of the same round; set "
            + ("mediation=false" if kind == "fedmed" else "mediator.switch=none")
            + " with --dp"
        )
    if kind in ("attention", "divergence"):
        cap = _cap(spec, kind, options)
        made = replace(method, mediator=separable(_attention(float(options["temperature"]), cap)))  # type: ignore[arg-type]
        return Bounded(_adapting(made, p), True, RATIO.replace("cap c", f"cap c = {cap:.4g}"))
    if kind == "fixed":
        mediator = method.mediator
    else:
        mediator = uniform() if kind == "uniform" or p.weight_cap is None else _by_tokens(p.weight_cap)
    return Bounded(_adapting(replace(method, mediator=mediator), p), False, FIXED)


def _mediation(spec: MethodSpec) -> tuple[str, Mapping[str, object]]:
    """Return the kind of mediator of a specification, and the options that it reads."""
    if spec.mediator is not None:
        from keyfed.federated.parts import part_options

        usual = {key: p.default for key, p in part_options("mediator", spec.mediator.name).items()}
        return spec.mediator.name, {**usual, **spec.mediator.options}
    if spec.name == "fedatt":
        return "attention", spec.options
    if spec.name == "fedmed":
        if spec.options["mediation"]:
            return "fedmed", spec.options
        return ("divergence" if spec.options["adaptive"] else "tokens"), spec.options
    if spec.name == "fedadmm" or (spec.name == "fedprox" and not spec.options["by_tokens"]):
        return "uniform", {}
    return "tokens", {}


def _cap(spec: MethodSpec, kind: str, options: Mapping[str, object]) -> float:
    given, temperature = options["bound"], float(options["temperature"])  # type: ignore[arg-type]
    cap = math.inf if given is None else float(given)  # type: ignore[arg-type]
    if kind == "divergence":
        return min(cap, JS_MOST / temperature)
    if not math.isfinite(cap):
        where = "mediator.bound" if spec.mediator is not None else "method.bound"
        raise PrivacyError(
            f"{spec.name}: attention to distances has no bound of its own, and a client's score must be capped by a "
            f"public number; set {where}, say 5"
        )
    return cap


def _attention(temperature: float, cap: float) -> Callable[[Report, Sequence[str]], Share]:
    def share(report: Report, layers: Sequence[str]) -> Share:
        weights = {name: math.exp(min(report.distance[name] / temperature, cap) - cap) for name in layers}
        return Share(scale=weights, mass=weights)

    return share


def _by_tokens(cap: float) -> Mediator:
    def share(report: Report, layers: Sequence[str]) -> Share:
        weights = dict.fromkeys(layers, min(report.tokens / cap, 1.0))
        return Share(scale=weights, mass=weights)

    return separable(share)


def _adapting(method: Method, p: PrivacyConfig) -> Method:
    """Let the clip follow the noisy share of unclipped clients; it is part of the server's state."""
    inner = method.server
    quantile = p.quantile

    def init(params: Params) -> Params:
        return {**inner.init(params), CLIP: torch.tensor(p.clip, dtype=torch.float64)}

    def step(params: Params, aggregate: Aggregate, state: Params) -> tuple[Params, Params]:
        clip = state[CLIP]
        after, kept = inner.step(params, aggregate, {name: t for name, t in state.items() if name != CLIP})
        if quantile is not None:
            moved = next_clip(float(clip), aggregate.facts["within"][0], quantile, p.clip_rate)
            clip = torch.full_like(clip, moved)
        return after, {**kept, CLIP: clip}

    return replace(method, server=ServerRule(init, step))


def refuse_participation(p: Participation, mechanism: str, everybody: bool) -> None:
    """Refuse ways of taking part in which one client's presence decides about another's, by name."""
    if p.over_select:
        raise PrivacyError(
            f"participation.over_select is {p.over_select}: taking the first to finish lets one client push another "
            "out, which breaks the accounting; leave it out and set participation.deadline"
        )
    if p.minimum > 1:
        raise PrivacyError(
            f"participation.minimum is {p.minimum}: abandoning a round by who arrived tells who arrived; leave it out, "
            "a private round is always released and its denominator is public"
        )
    if mechanism == "gaussian" and not everybody and p.sampling != "poisson":
        raise PrivacyError(
            f"participation.sampling is {p.sampling}, and the accounting needs clients called independently of each "
            "other; set participation.sampling=poisson (or privacy.mechanism=tree)"
        )
    if mechanism == "tree" and p.sampling != "uniform":
        raise PrivacyError(
            f"participation.sampling is {p.sampling}, but with privacy.mechanism=tree clients take their turns; leave "
            "it out"
        )
