"""The library in a handful of functions: the same as the command line, from Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from keyfed.config import Config, Value, check, set_value
from keyfed.engine.trial import MakeModule
from keyfed.federated.methods import method_options
from keyfed.federated.types import Method
from keyfed.run import results
from keyfed.run import suggest as suggestions
from keyfed.run import train as training
from keyfed.run.folder import Trained
from keyfed.run.folder import load_model as _load_model
from keyfed.run.train import Listener

PathLike = str | os.PathLike[str]


def configure(
    method: str = "fedavg",
    *,
    data: str = "sotu",
    model: str = "cifg",
    rounds: int = 20,
    seed: int = 1,
    **settings: Value,
) -> Config:
    """Describe a run. Other settings are written `section_key=value`, or the bare name of a method's option.

    Example:
      >>> config = configure("fedavg", rounds=3, lr=1.0, train_cohort=5, data_max_tokens=1000)
      >>> config.train.cohort, config.data.max_tokens, config.options["lr"]
      (5, 1000, 1.0)
    """
    options = method_options(method)
    config = Config(method=method)
    named: dict[str, Value] = {"data.name": data, "model.name": model, "train.rounds": rounds, "train.seed": seed}
    for key, value in settings.items():
        section, _, rest = key.partition("_")
        dotted = f"{section}.{rest}" if key not in options and section in ("data", "model", "train") and rest else key
        named[dotted] = value
    for key, value in named.items():
        config = set_value(config, key, value)
    return check(config)


def train(
    config: Config,
    out: PathLike,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    module: MakeModule | None = None,
    method: Method | None = None,
) -> dict[str, Any]:
    """Train a run in folder `out` and return its result; see `keyfed train`, and docs/extending.md for the last two.

    Args:
      resume: go on with the run in `out` from its last whole checkpoint.
      module: a function of the vocabulary's size that returns a new `torch.nn.Module`, to train in place of a preset.
      method: a method of your own, in place of one by name.
    """
    return training.train(config, Path(out), resume=resume, listener=listener, module=module, method=method)


def load_model(run: PathLike, *, module: MakeModule | None = None) -> Trained:
    """Load a finished run's model, vocabulary and configuration; a run of your own module needs the module again."""
    return _load_model(Path(run), module)


def suggest(model: Trained, text: str, k: int = 3) -> list[str]:
    """Return the k most probable next words after `text`."""
    return suggestions.suggest(model.spec, model.params, model.vocab, text, k)


def evaluate(run: PathLike, *, module: MakeModule | None = None) -> dict[str, Any]:
    """Test a run's model again on its held-out text; see `keyfed evaluate`."""
    return results.evaluate_run(Path(run), module)


def report(run: PathLike, *, module: MakeModule | None = None) -> str:
    """Write a run's report.md, report.html and plots; return the text the command line prints."""
    return results.report_run(Path(run), module)


def conformance(run: PathLike, *, module: MakeModule | None = None) -> list[dict[str, Any]]:
    """Run the conformance suite on a run's model; see `keyfed conformance`."""
    return results.check_run(Path(run), module)
