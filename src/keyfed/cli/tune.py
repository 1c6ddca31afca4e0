"""`keyfed tune`: the command line of a search. torch is imported when it runs, not here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyfed.cli.options import (
    ConfigOption,
    DataOption,
    DirOption,
    JsonOption,
    ModelOption,
    SetOption,
    configure,
    print_json,
    sets,
)

if TYPE_CHECKING:
    from keyfed.config.load import Config


def tune(
    method: Annotated[str | None, typer.Argument(help="Method (`keyfed methods`); fedavg by default.")] = None,
    data: DataOption = None,
    data_dir: DirOption = None,
    model: ModelOption = None,
    trials: Annotated[int | None, typer.Option(help="Configurations to try, the given one among them [10].")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a trial that goes all the way.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random derives from it.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of every trial, counted up from --seed [1].")] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(help="key=LOW..HIGH, key=LOW..HIGH:log or key=a,b,c; replaces the method's default ranges."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/tune-METHOD-DATA-MODEL by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in --out, or start it.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Let clients read all their text in every round.")] = False,
    settings: SetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search for a method's best numbers on validation text, with a fixed budget.

    The configuration as given is trial 0. The other trials train a third of the rounds, the best third of them go on.
    The test text is not read. The winner is printed, and written with all its settings to best.toml, for
    `keyfed train --config`.

      keyfed tune fedadam --rounds 15 --search server_lr=0.001..0.1:log --search lr=0.001,0.003
    """
    from keyfed.lab.experiment.search import parse_search
    from keyfed.lab.experiment.tune import SEEDS, TRIALS, Tuning, read_tuning, tune_text
    from keyfed.lab.experiment.tune import tune as run_search
    from keyfed.run.console import Narrator
    from keyfed.run.folder import file_name, free_name

    named = {
        "data.name": data, "data.dir": data_dir, "model.name": model, "train.rounds": rounds, "train.seed": seed,
    }  # fmt: skip
    before = read_tuning(out) if resume and out is not None and (out / "tune.json").exists() else None
    resolved = configure(method, config, named, settings, before.config if before else None)
    said = None
    if before is None and not full:
        resolved, said = _quick(resolved, settings, config)
    tuning = Tuning(
        resolved,
        before.space if before and not search else parse_search(resolved, search or []),
        trials if trials is not None else before.trials if before else TRIALS,
        seeds if seeds is not None else before.seeds if before else SEEDS,
    )
    base = Path("runs") / f"tune-{resolved.method}-{file_name(Path(resolved.data.name).name)}-{resolved.model.name}"
    folder = out or (base if resume else free_name(base))
    with Narrator() as narrator:
        if said:
            narrator.say(said)
        try:
            result = run_search(tuning, folder, resume=resume, listener=narrator)
        except KeyboardInterrupt:
            narrator.stop()
            typer.echo(f"stopped; go on with: keyfed tune --resume --out {shlex.quote(str(folder))}", err=True)
            raise
    print_json(result) if as_json else typer.echo(tune_text(result))


def _quick(config: Config, settings: list[str] | None, file: Path | None) -> tuple[Config, str | None]:
    """Reduce what a comparison reduces, but for the test text, which a search does not read; say so."""
    from keyfed.config.load import set_value
    from keyfed.lab.experiment.compare_plan import quick_values

    reduced = {
        key: value
        for key, value in quick_values(config.model.name).items()
        if key != "train.test_tokens" and not sets(key, settings, file)
    }
    for key, value in reduced.items():
        config = set_value(config, key, value)
    shown = ", ".join(f"{key}={value}" for key, value in reduced.items())
    return config, f"quick: {shown}; --full searches on the whole text" if reduced else None
