"""The verb `keyfed compare`: several methods on the same text, one table. torch is imported by the verb, not here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from keyfed.cli.options import ConfigOption, DataOption, DirOption, JsonOption, ModelOption, SetOption, print_json
from keyfed.cli.train import SecureOption, VectorsDimOption


def compare(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD...", help="Methods, each with settings or a start of its own if need be."),
    ],
    data: DataOption = None,
    data_dir: DirOption = None,
    model: ModelOption = None,
    rounds: Annotated[int | None, typer.Option(help="Federated rounds.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many (3: seeds 1 to 3) or which (1,4,7); train.seed alone by default.")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(help="rounds: the same for all methods; tokens: as many as the first method's tokens pay for."),
    ] = "rounds",
    target: Annotated[
        str | None, typer.Option(help="perplexity=200 or nats=2.0; by default what every method has reached.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="RUN", help="The run, or base, whose weights METHOD+init starts from.")
    ] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="FILE", help="Word vectors that METHOD+vectors starts from.")
    ] = None,
    vectors_dim: VectorsDimOption = None,
    secure: SecureOption = False,
    full: Annotated[bool, typer.Option("--full", help="Train and test on the whole text, not a part.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/compare-DATA-MODEL by default.")] = None,
    settings: SetOption = None,
    config: ConfigOption = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write every run's rounds as TensorBoard events.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train several methods on the same text, clients, cohorts and initial weights, and say how they stand.

    METHOD is one of `keyfed methods`, with settings of its own if need be: fedatt:temperature=0.1,step=1.0. --set
    section.key=value is for all methods, --set option=value for those that have the option.

    METHOD+init and METHOD+vectors are the same method from another start: the weights of --init RUN, the word vectors
    of --vectors FILE; METHOD+init+vectors has both. Beside METHOD itself, which starts at random, the report says what
    the start saves: rounds and bytes to the random start's best validation accuracy. --set train.frozen_rounds=N is
    then for the variants alone.

    Every method and seed is a run of its own under OUT/METHOD/seed-N; OUT/report.html has the table and the curves.
    The same command again reads finished runs and goes on with interrupted ones. Exit code 1 if a run failed.

      keyfed compare fedavg fedatt fedatt:temperature=0.1 --rounds 10 --seeds 3

      keyfed compare fedavg fedsgd --budget tokens --model char-lstm --target nats=2

      keyfed compare fedadam fedadam+vectors fedadam+init+vectors --vectors glove.txt.gz --init runs/public --seeds 3
    """
    from keyfed.lab.experiment.compare import compare as run_comparison
    from keyfed.lab.experiment.compare_plan import file_settings, parse_seeds, split_setting
    from keyfed.run.console import Narrator

    named = {
        "data.name": data, "data.dir": data_dir, "model.name": model, "train.rounds": rounds, "train.init": init,
        "vectors.file": vectors, "vectors.dim": vectors_dim, "secure.on": secure or None,
    }  # fmt: skip
    keys: list[tuple[str, Any]] = [
        *(file_settings(config) if config is not None else ()),
        *((key, value) for key, value in named.items() if value is not None),
        *map(split_setting, settings or ()),
    ]
    which = None if seeds is None else parse_seeds(seeds)
    with Narrator() as narrator:
        try:
            summary = run_comparison(
                methods, keys, seeds=which, budget=budget, target=target, full=full, out=out, listener=narrator,
                tensorboard=tensorboard,
            )  # fmt: skip
        except KeyboardInterrupt:
            narrator.stop()
            typer.echo(f"stopped; go on with: {shlex.join(['keyfed', *sys.argv[1:]])}", err=True)
            raise
    if as_json:
        print_json(summary)
    else:
        typer.echo(_text(summary))
    if summary["failed"]:
        raise typer.Exit(1)


def _text(summary: dict[str, Any]) -> str:
    """What the terminal shows: table, verdict, notes, what starts save, where the report is."""
    from keyfed.lab.experiment.compare_report import comparison_table, notes
    from keyfed.lab.experiment.method_rows import savings_lines, savings_table

    lines = [_narrow(comparison_table(summary)) + summary["verdict"], *notes(summary)]
    for one in summary["fine_tuning"]:  # its sentence names the variant, so that the table need not
        lines += [*savings_lines([one]), _narrow([row[1:] for row in savings_table([one])]).rstrip()]
    return "\n".join([*lines, f"report: {shlex.quote(str(Path(summary['out']) / 'report.html'))}"])


def _narrow(rows: list[list[str]]) -> str:
    """Ten columns are many for a terminal: no blanks inside numbers."""
    from keyfed.reports.results import as_text

    return as_text([[cell.replace(" ± ", "±").replace(" %", "%") for cell in row] for row in rows], narrow=True)
