"""Personalisation: what a client gains by tuning the final model on its own text, measured on its own held-out text.

The federation ends with one θ for everybody. Here each client k takes a copy, trains it on its own training text with
the local solver (as in a round of FedAvg that is never uploaded) and is tested on the text it held out. Clients are
tuned one at a time and their copies dropped: memory is that of a few models whatever the number of clients. The stored
model does not change.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from keyfed.config.load import Value, coerce
from keyfed.engine.network import shapes
from keyfed.engine.problem import solve_block
from keyfed.errors import ConfigError, DataError, nearest
from keyfed.federated.methods import build_method, method_options
from keyfed.federated.options import Optimiser
from keyfed.federated.types import Method, MethodSpec, Params
from keyfed.model.output import Score
from keyfed.run.console import follow
from keyfed.run.evaluate import scorer_of, spread, total
from keyfed.run.folder import Trained
from keyfed.run.prepare import Prepared, make_problem

GENTLER = 0.1  # a client alone takes smaller steps than the ones a cohort averages out


@dataclass(frozen=True, slots=True)
class Personalisation:
    """How a client tunes its copy; None is decided by the run: its optimiser and batch size, a tenth of its step."""

    epochs: int = 1
    lr: float | None = None
    optimiser: Optimiser | None = None
    batch_size: int | None = None


def parse_personal(text: str) -> Personalisation:
    """Read `epochs=2,lr=0.5`.

    Example:
      >>> parse_personal("epochs=2,lr=0.5")
      Personalisation(epochs=2, lr=0.5, optimiser=None, batch_size=None)
    """
    hints = typing.get_type_hints(Personalisation)
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals:
            raise ConfigError(f'--personalise got "{part}"; expected key=value, e.g. epochs=1,lr=0.001')
        if key not in hints:
            raise ConfigError(
                f'"{key}" is not a setting of --personalise{nearest(key, hints)}. Settings: {", ".join(hints)}.'
            )
        if key in values:
            raise ConfigError(f'--personalise got {key} twice ("{text}"); give it once')
        values[key] = coerce(value, hints[key], f"--personalise {key}")
    return Personalisation(**values)


def resolve(personal: Personalisation, trained: Trained, prepared: Prepared) -> Personalisation:
    """Fill in what the run decides, and refuse what cannot be done.

    Raises:
      DataError: the clients have no held-out text of their own.
      ConfigError: a number makes no sense, or a step size cannot be derived from the run's.
    """
    if prepared.population.test is not None or not prepared.test:
        held = "one test text for all clients" if prepared.population.test is not None else "no held-out text"
        raise DataError(
            f"{prepared.corpus.name} ({prepared.population.partition}) has {held}; personalisation is tested on each "
            "client's own: train on a corpus of authors without published test file, data.partition=natural"
        )
    for name in ("epochs", "lr", "batch_size"):
        got = getattr(personal, name)
        if got is not None and got <= 0:
            raise ConfigError(f"--personalise {name} is {got}; expected > 0")
    run = _local_options(trained)
    optimiser = personal.optimiser or run["optimiser"]
    if personal.lr is None and optimiser != run["optimiser"]:
        raise ConfigError(
            f"--personalise optimiser={optimiser}: the run trained by {run['optimiser']}, whose step size says nothing "
            f"about {optimiser}; give lr too, e.g. lr={0.5 if optimiser == 'sgd' else 0.0003}"
        )
    return Personalisation(
        personal.epochs,
        GENTLER * run["lr"] if personal.lr is None else personal.lr,
        optimiser,
        personal.batch_size or run["batch_size"],
    )


def _local_options(trained: Trained) -> dict[str, Any]:
    """The run's local solver: its method's options where it has an optimiser (FedSGD has none), else FedAvg's."""
    spec = build_method(MethodSpec(trained.config.method, trained.config.options)).spec
    assert spec is not None
    names = ("optimiser", "lr", "momentum", "clip", "batch_size")
    own: Mapping[str, Value] = spec.options if "optimiser" in spec.options else {}
    return {name: own.get(name, method_options("fedavg")[name].default) for name in names}


def _solver_of(personal: Personalisation, trained: Trained) -> Method:
    """FedAvg with these numbers; momentum and clipping stay the run's."""
    run = _local_options(trained)
    options: dict[str, Value] = {f.name: getattr(personal, f.name) for f in fields(personal)}
    if personal.optimiser == run["optimiser"]:
        options["momentum"] = run["momentum"]
    return build_method(MethodSpec("fedavg", {**options, "clip": run["clip"]}))


def personalise(personal: Personalisation, trained: Trained, prepared: Prepared) -> dict[str, Any]:
    """Tune and test a copy for every client with training and held-out text.

    Args:
      personal: resolved by `resolve`.

    Returns:
      Scores of the same tokens before and after (tokens of all clients added up), the share of clients that gain, the
      worst decile, and each client's nats per token. Of a private run only totals. No plot is drawn here.
    """
    spec, config = trained.spec, trained.config
    method = _solver_of(personal, trained)
    problem = make_problem(prepared, config, method, "cpu")
    params: Params = {name: trained.params[name] for name in shapes(spec)}
    places = {name: k for k, name in enumerate(prepared.store.names) if name in prepared.test}
    test = scorer_of(config.data.batching)
    before = test(spec, params, {name: prepared.test[name] for name in places})
    after: dict[str, Score] = {}
    worked = 0
    for name in follow(list(places), "personalising clients"):
        # As in the round after the last: text and dropout are drawn as that round would draw them.
        solution = solve_block(problem, params, [places[name]], method, config.train.rounds)
        own = {layer: params[layer] + solution.upload[layer][0] for layer in params}
        after |= test(spec, own, {name: prepared.test[name]})
        worked += int(solution.worked.sum())
    block = summarise(before, after)
    block = {
        **{f.name: getattr(personal, f.name) for f in fields(personal)},
        "max_tokens": config.data.max_tokens,
        "tokens_trained": worked,
        **block,
        "left_out": {
            "no_training_text": sum(name not in places for name in prepared.test),
            "no_held_out_text": len(prepared.store) - len(places),
            "unseen": len(prepared.unseen),
        },
        "plot": None,
    }
    if config.privacy.on:  # as in the run's result: totals, and no figure of a single client
        block |= {"by_client": None, "worst_decile": {"before": None, "after": None}}
    return block


def summarise(before: Mapping[str, Score], after: Mapping[str, Score]) -> dict[str, Any]:
    """Compare two scores of each client: counts are added up over clients before anything is divided."""
    gaining = sum(after[name].mean_nats < before[name].mean_nats for name in before)
    return {
        "clients": len(before),
        "before": total(before).summary(),
        "after": total(after).summary(),
        "gaining": gaining / len(before) if before else None,
        "worst_decile": {
            "before": spread(before).get("worst_decile"),
            "after": spread(after).get("worst_decile"),
        },
        "by_client": {
            name: {"tokens": score.tokens, "before": score.mean_nats, "after": after[name].mean_nats}
            for name, score in before.items()
        },
    }
