"""The library in a handful of functions: the same as the command line, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keyfed.config.load import (
    PARTS,
    RECIPE,
    RECIPE_PRIVATE,
    SECTIONS,
    Config,
    Open,
    Value,
    check,
    open_config,
    set_value,
)
from keyfed.engine.module import MakeModule
from keyfed.engine.workers import refuse_unguarded
from keyfed.errors import ConfigError
from keyfed.federated.local import Optimiser
from keyfed.federated.methods import METHODS, method_options
from keyfed.federated.types import Method
from keyfed.lab.experiment import runner as comparing
from keyfed.lab.experiment import tune as tuning
from keyfed.lab.experiment.tune import parse_search
from keyfed.model.language_model import preset
from keyfed.reports import finished, run_page
from keyfed.reports.finished import Personalisation
from keyfed.reports.notebook import Compared as Compared
from keyfed.reports.notebook import Result as Result
from keyfed.reports.notebook import Round as Round
from keyfed.run import evaluate as suggestions
from keyfed.run import loop as training
from keyfed.run import vocabulary as vocabularies
from keyfed.run.console import Listener, followed
from keyfed.run.folder import Trained
from keyfed.run.folder import load_model as _load_model
from keyfed.text.memory import hold

SECTION_NAMES = (*SECTIONS, *PARTS)
PathLike = str | os.PathLike[str]
Hears = Listener | Callable[[dict[str, Any]], object]  # a listener, or a function of a round's record


def configure(
    method: str | None = None,
    *,
    data: object = "chat",
    model: str = "cifg",
    rounds: int | None = None,
    minutes: float | None = None,
    seed: int = 1,
    **settings: Value,
) -> Config:
    """Describe a run. Other settings are written `section_key=value`, or the bare name of a method's option.

    Args:
      method: one by name, with its own defaults; None for the recipe, which chooses from the corpus what is not set
        here when training begins (docs/training.md).
      data: a corpus by name, a path, or text that you hold. That is a dictionary of author and texts, pairs (author,
        text), lines, or a frame with an author and a text column; it stays in memory (docs/python.md).
      rounds: None for 20 of a named method, and for as many as the recipe finds fit.
      minutes: about how long to train, in place of `rounds`.

    Example:
      >>> config = configure("fedavg", rounds=3, lr=1.0, train_cohort=5, data_max_tokens=1000)
      >>> config.train.cohort, config.data.max_tokens, config.options["lr"]
      (5, 1000, 1.0)
      >>> configure("fedavg", server_lr=0.1, server_name="adam", upload_quantise="int8").server.options
      {'lr': 0.1}
      >>> configure(data={"ann": ["good morning", "see you"]}).data.name
      'in-memory-28c0de93c56d'
      >>> configure("fedadam", model="nwp-small", vectors_file="/v/glove.txt", train_frozen_rounds=5).vectors.file
      '/v/glove.txt'
    """
    if minutes is not None and (rounds is not None or settings.get("train_rounds") is not None):
        raise ConfigError("minutes and rounds both say how long to train; leave one of the two out")
    private = {"privacy_epsilon", "privacy_noise"} & {key for key, value in settings.items() if value is not None}
    options = method_options(method or (RECIPE_PRIVATE if private else RECIPE))
    preset(model)  # an unknown one is said here, not where training begins
    name, settings = _named(data, settings)
    named: dict[str, Value] = {"data.name": name, "model.name": model, "train.seed": seed}
    named |= {} if rounds is None else {"train.rounds": rounds}
    for key, value in settings.items():
        dotted = _dotted(key, options)
        named[f"method.{key}" if dotted == key else dotted] = value
    config = open_config(named, minutes) if method is None else Config(method=method)
    if method is not None and minutes is not None:
        config = replace(config, open=Open(minutes=minutes))
    for key in sorted(named, key=lambda key: not key.endswith(".name")):  # a part's name says which options it has
        config = set_value(config, key, named[key])
    return check(config)


def _named(data: object, settings: Mapping[str, Value]) -> tuple[str, dict[str, Value]]:
    """Return the name of a corpus and the settings that are left; text that the caller holds is kept under a name."""
    if isinstance(data, os.PathLike):
        return os.fspath(data), dict(settings)
    if isinstance(data, str):
        return data, dict(settings)
    columns = [settings.get(f"data_{what}_column") for what in ("author", "text")]
    author, text = (None if column is None else str(column) for column in columns)
    left = {key: value for key, value in settings.items() if key not in ("data_author_column", "data_text_column")}
    return hold(data, author, text), left


def _configured(config: object) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"config is a {type(config).__name__}; expected what keyfed.configure() returns")


def train(
    config: Config,
    out: PathLike,
    *,
    resume: bool = False,
    listener: Hears | None = None,
    quiet: bool = False,
    module: MakeModule | None = None,
    method: Method | None = None,
) -> Result:
    """Train a run in folder `out` and return its result; see `keyfed train`, and docs/extending.md for the last two.

    Args:
      resume: go on with the run in `out` from its last whole checkpoint. More `train.rounds` than it has extend it,
        finished or not.
      listener: a function, called with every round's record (a line of metrics.jsonl), or an object with some of the
        methods say(line), start(what, rounds, done) and round(record). One with all three takes the place of progress.
      quiet: show no progress.
      module: a function of the vocabulary's size that returns a new `torch.nn.Module`, to train in place of a preset.
      method: a method of your own, in place of one by name.
    """
    refuse_unguarded()
    _configured(config)
    folder = Path(out)
    with followed(listener, quiet=quiet) as follower:
        found = training.train(config, folder, resume=resume, listener=follower, module=module, method=method)
    return Result(found, folder, module)


def pretrain(
    config: Config,
    out: PathLike,
    *,
    resume: bool = False,
    listener: Hears | None = None,
    quiet: bool = False,
) -> Result:
    """Train centrally on public text, as a start for federated training; see `keyfed pretrain`.

    Args:
      config: `configure("central", …)`. The run then is the start of another: `configure(…, train_init=out)`.
    """
    _configured(config)
    if config.method != "central":
        raise ConfigError(
            f'pretraining is central, and the configuration has the method "{config.method}"; use configure("central", '
            "…), or train(), whose runs are starts as well"
        )
    return train(config, out, resume=resume, listener=listener, quiet=quiet)


def vocab(
    config: Config,
    out: PathLike,
    *,
    least_uses: int = 1,
    most_words: int | None = 4_000,
    allow_single: bool = False,
    seeded: bool = False,
) -> dict[str, Any]:
    """Let the clients of a corpus elect a vocabulary, write it to `out` and return a report; see `keyfed vocab`.

    Args:
      config: its corpus, model (words or characters), `data_vocab` entries and `data_min_clients`; a run takes the file
        by `configure(…, data_vocab_file=out)`.
      least_uses: uses from which on a client reports a word.
      most_words: words a client reports at most, its most frequent ones.
      allow_single: take `data_min_clients=1`: a single person's words reach everybody.
      seeded: with `privacy_epsilon`, derive the noise from the seed: the vote repeats, and is SIMULATED.
    """
    return vocabularies.elect_vocabulary(
        config, Path(out), least_uses=least_uses, most_words=most_words, allow_single=allow_single, seeded=seeded
    )


def _dotted(key: str, options: Container[str]) -> str:
    """Write a keyword as a configuration key, `section.key`; an option of a method stays as it is."""
    section, _, rest = key.partition("_")
    return f"{section}.{rest}" if key not in options and section in SECTION_NAMES and rest else key


def _options_of(method: str) -> Iterable[str]:
    """The options of a compared method; an unknown one has none, and is refused where the comparison is planned."""
    name = method.partition(":")[0].partition("+")[0].strip()
    return method_options(name) if name in METHODS else ()


def compare(
    methods: Sequence[str | Method],
    *,
    data: object = "chat",
    model: str = "cifg",
    rounds: int = 20,
    seeds: int | Sequence[int] = 1,
    budget: str = "rounds",
    target: str | None = None,
    full: bool = False,
    out: PathLike | None = None,
    listener: Hears | None = None,
    quiet: bool = False,
    module: MakeModule | None = None,
    **settings: Value,
) -> Compared:
    """Train several methods on the same text and say how they stand; see `keyfed compare`.

    A method is a name, or a name with settings of its own, `fedatt:temperature=0.1`, or with a start,
    `fedadam+vectors`, `fedadam+init` (`vectors_file`, `train_init` say which). A `keyfed.Method` of your own is taken
    as it is. All train the preset `model`, or your `module`. A client reads at most 4,000 tokens a round unless
    `full=True`. `data`, `listener` and `quiet` are those of `configure` and `train`. `seeds` is how many (1, 2, …) or
    which. Other settings are written as in `configure`; an option is for every method that has it. Runs that are
    finished in `out` are not trained again; a run that failed has its reason in the row's "failed". What a start saves
    is in "fine_tuning".
    """
    refuse_unguarded()
    if isinstance(methods, str | Method):
        raise ConfigError(f'methods is a {type(methods).__name__}; expected a list, such as ["fedavg", "fedadam"]')
    name, left = _named(data, settings)
    named: list[tuple[str, Value]] = [("data.name", name), ("model.name", model), ("train.rounds", rounds)]
    options = {option for text in methods if isinstance(text, str) for option in _options_of(text)}
    named += [(_dotted(key, options), value) for key, value in left.items()]
    with followed(listener, quiet=quiet) as follower:
        found = comparing.compare(
            methods,
            named,
            seeds=range(1, seeds + 1) if isinstance(seeds, int) else seeds,
            budget=budget,
            target=target,
            full=full,
            out=None if out is None else Path(out),
            listener=follower,
            module=module,
        )
    return Compared(found, Path(found["out"]))


def load_model(run: PathLike, *, module: MakeModule | None = None) -> Trained:
    """Load a finished run's model, vocabulary and configuration; a run of your own module needs the module again."""
    return _load_model(Path(run), module)


def suggest(model: Trained, text: str, k: int = 3) -> list[str]:
    """Return the k most probable next words after `text`."""
    if not isinstance(model, Trained):
        raise ConfigError(f"model is a {type(model).__name__}; expected what keyfed.load_model(RUN) returns")
    return suggestions.suggest(model.spec, model.params, model.vocab, text, k, lines=model.reads_lines)


def evaluate(run: PathLike, *, module: MakeModule | None = None) -> dict[str, Any]:
    """Test a run's model again on its held-out text; see `keyfed evaluate`."""
    return finished.evaluate_run(Path(run), module)


def personalise(
    run: PathLike,
    *,
    epochs: int = 1,
    lr: float | None = None,
    optimiser: Optimiser | None = None,
    batch_size: int | None = None,
    module: MakeModule | None = None,
) -> dict[str, Any]:
    """Tune a copy of a run's model on each client's text, test it before and after; see `evaluate --personalise`."""
    return finished.personalise_run(Path(run), Personalisation(epochs, lr, optimiser, batch_size), module)


def tune(
    config: Config,
    out: PathLike,
    *,
    search: Iterable[str] = (),
    trials: int = tuning.TRIALS,
    seeds: int = tuning.SEEDS,
    resume: bool = False,
    listener: Hears | None = None,
    quiet: bool = False,
    module: MakeModule | None = None,
) -> dict[str, Any]:
    """Search for the best numbers of a method on validation text; see `keyfed tune`.

    Args:
      config: the configuration to start from, as it is: nothing is reduced as the command line does without --full.
        A method of your own is searched under the name it is registered by (docs/add-a-method.md).
      search: "lr=0.001..0.1:log", "epochs=1,2,5", …; nothing for the method's default ranges.
      module: a function of the vocabulary's size that returns a new `torch.nn.Module`, as in `train`.
    """
    refuse_unguarded()
    _configured(config)
    given = tuning.Tuning(config, parse_search(config, search), trials, seeds)
    with followed(listener, quiet=quiet) as follower:
        return tuning.tune(given, Path(out), resume=resume, listener=follower, module=module)


def report(run: PathLike, *, module: MakeModule | None = None) -> str:
    """Write a run's report.md, report.html and plots; return the text the command line prints."""
    return run_page.report_run(Path(run), module)


def export(run: PathLike, out: PathLike | None = None, *, int8: bool = True) -> Path:
    """Write a run's keyboard, a folder that `keyfed keyboard FOLDER` serves, and return it; see `keyfed export`.

    Args:
      out: RUN/keyboard by default.
      int8: weights of eight bits; False for those as trained.
    """
    from keyfed.keyboard.export import export_run

    return export_run(Path(run), None if out is None else Path(out), int8).out


def conformance(run: PathLike, *, module: MakeModule | None = None) -> list[dict[str, Any]]:
    """Run the conformance suite on a run's model; see `keyfed conformance`."""
    return finished.check_run(Path(run), module)
