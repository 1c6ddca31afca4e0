"""What a caller brings along in place of ours: a module for the model, a method. Taken in, named and held to its word.

Neither can be written into run.toml, so a run notes their names and asks for them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, ModelConfig
from keyfed.engine.module import MakeModule, ModuleNetwork, qualified_name
from keyfed.engine.network import Network
from keyfed.errors import ConfigError, RunError
from keyfed.federated.components import exchange, guarded
from keyfed.federated.tuned import tuned_options
from keyfed.federated.types import Method
from keyfed.federated.upload import codec
from keyfed.model.language_model import build_spec, preset


def build_network(config: Config, vocab: int, module: MakeModule | None) -> Network:
    """Return the configuration's preset for a vocabulary, or the caller's module in its place."""
    m = config.model
    if module is not None:
        return ModuleNetwork(module, vocab, config.data.window or preset(m.name).window, config.train.seed)
    return build_spec(m.name, vocab, dropout=m.dropout, tied=m.tied, embed=m.embed, hidden=m.hidden, layers=m.layers)


def refuse_model_options(config: Config, module: MakeModule) -> None:
    """Refuse options of a preset beside a module, which knows nothing of them."""
    preset_of, default = asdict(config.model), asdict(ModelConfig())
    given = [f"model.{key}={value}" for key, value in preset_of.items() if key != "name" and value != default[key]]
    if given:
        raise ConfigError(
            f"{', '.join(given)} would change a preset, and the model is your module {qualified_name(module)}; leave "
            "it out here and say it there"
        )


def accept_method(method: Method, config: Config) -> Method:
    """Take in a method from outside; it is never built anew elsewhere, so it carries no specification."""
    if not isinstance(method, Method):
        raise ConfigError(f"method is a {type(method).__name__}; expected a keyfed.Method (or a name, in configure)")
    unsaid = tuned_options(config.method, {}, characters=preset(config.model.name).characters)
    if config.method != Config().method or config.options not in ({}, unsaid):
        named = ", ".join([config.method, *(f"{key}={value}" for key, value in config.options.items())])
        raise ConfigError(
            f"the method {method.name} was passed beside a configuration that has one ({named}); leave that out of "
            "configure(), a method of your own has its options inside"
        )
    exchanged = exchange(method, config.mediator, config.server)
    smaller = codec(config.upload.keep, config.upload.quantise)
    return guarded(replace(exchanged, spec=None, codec=smaller or method.codec))


def names(network: Network, method: Method) -> dict[str, str]:
    """Name what is from outside, for run.toml."""
    out = {"module": network.name} if isinstance(network, ModuleNetwork) else {}
    return out | ({"method": method.name} if method.spec is None else {})


def refuse_others(folder: Path, made: Mapping[str, Any], passed: Mapping[str, str]) -> None:
    """Refuse to go on with a run whose module or method is not the one it began with."""
    for what in ("module", "method"):
        began, now = made.get(what), passed.get(what)
        if began is None and now is not None:
            raise RunError(f"{folder} began with a {what} of the package, and was given {now}; leave {what} out")
        if began != now:
            raise RunError(
                f"{folder} began with the {what} {began} from outside the package, and was given {now or 'none'}; "
                f"go on from Python with the same one: keyfed.train(config, out, resume=True, {what}=…)"
            )
