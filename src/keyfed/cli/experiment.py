"""`keyfed compare`, `keyfed tune` and `keyfed study`: many runs, one table. torch is imported by the commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyfed.cli.options import (
    NONE,
    ConfigOption,
    DirOption,
    JsonOption,
    Keys,
    Named,
    SetOption,
    configure,
    print_json,
    say,
    sets,
    with_keys,
)
from keyfed.cli.train import TEXT, default_out
from keyfed.errors import ConfigError

if TYPE_CHECKING:
    from keyfed.config.load import Config


ResultsOption = Annotated[
    Path | None, typer.Option(help="Folder of pages and data; docs/results beside the studies by default.")
]
WorkOption = Annotated[Path, typer.Option(help="Folder for runs while they train.")]
WhereOption = Annotated[
    list[str] | None, typer.Option(help="AXIS=LABEL or AXIS=LABEL|LABEL: cells with these labels only.")
]


@with_keys
def study(
    name: Annotated[str, typer.Argument(help="A study, a TOML file, `list`, or `report`.", metavar="NAME")],
    which: Annotated[str | None, typer.Argument(help="After `report`: the study; all by default.")] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (minutes on a CPU), standard (20 minutes on a GPU) or paper (the full grid).")
    ] = "smoke",
    minutes: Annotated[
        float | None, typer.Option(help="Work so long on open cells, then stop; the same call goes on.", min=0)
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many (3: seeds 1 to 3) or which (1,4); the study's own by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    data_dir: DirOption = NONE,
    results: ResultsOption = None,
    work: WorkOption = Path("runs/studies"),
    where: WhereOption = None,
    html: Annotated[
        Path | None, typer.Option(help="With `report`: write all results as one page that can be cited.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a paper's table or figure again, several seeds, beside the printed numbers; write its page.

    A study is a TOML file of studies/: data, models, methods, seeds for each scale, printed values, claims. Every
    configuration with a seed is a cell, its result one small JSON file in RESULTS/data; finished cells are read,
    interrupted ones go on. Several processes may share RESULTS and WORK: each takes cells that no other works on. Cells
    are made with defaults that do not change, whatever those of `keyfed train` are. Exit code 1 if a cell failed.

      keyfed study list

      keyfed study fedatt-table2 --scale smoke

      keyfed study ptb-50 --scale standard --minutes 20 --device cuda

      keyfed study report fedatt-table2

      keyfed study report --html report.html
    """
    from keyfed.lab.experiment.grid import load_study, results_folder, study_folder

    folder = study_folder()
    results = results or results_folder(folder)
    if which is not None and name != "report":
        raise ConfigError(f'"{which}" stands behind "{name}"; one study at a time, or `study report {which}`')
    if html is not None and name != "report":
        raise ConfigError(f'--html goes with `study report`, not with "{name}"')
    if name == "list":
        _list(folder, results, as_json)
    elif name == "report":
        _report(folder, results, which, as_json, html)
    else:
        _run(
            load_study(name, folder),
            scale,
            minutes,
            seeds,
            device,
            data_dir["data.dir"],
            folder,
            results,
            work,
            where,
            as_json,
        )


def _list(folder: Path, results: Path, as_json: bool) -> None:
    from keyfed.lab.experiment.grid import load_study, study_names
    from keyfed.lab.experiment.store import Store, counted

    rows = [["study", "what", "smoke", "standard", "paper"]]
    store = Store(results, say)
    for name in study_names(folder):
        study = load_study(name, folder)
        there = store.of(study)
        counts = []
        for scale in ("smoke", "standard", "paper"):
            done, left = counted(study, scale, there) if scale in study.scales else (0, 0)
            counts.append(f"{done} of {done + left}" if done + left else "–")
        rows.append([name, study.title, *counts])
    if as_json:
        print_json([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        return
    from keyfed.run.console import print_table

    print_table(rows)


def _report(folder: Path, results: Path, which: str | None, as_json: bool, html: Path | None = None) -> None:
    from keyfed.lab.experiment.grid import load_study, results_folder, study_names
    from keyfed.lab.experiment.page import verdict_lines, write_page
    from keyfed.lab.experiment.store import Store, counted, main_scale, make_folder, rows_of
    from keyfed.lab.experiment.summary import write_coverage, write_front, write_paper
    from keyfed.lab.experiment.tune import write_winners
    from keyfed.run.console import plural

    out: dict[str, Any] = {}
    store = Store(results, say)
    studies = [load_study(name, folder) for name in ([which] if which is not None else study_names(folder))]
    make_folder(results, results)
    for study in studies:
        there = store.of(study)
        if (folder / f"{study.name}.toml").exists():
            write_winners(study, store, folder)
        scale = main_scale(study, there)
        rows = rows_of(study, scale, there) if scale else []
        done, left = counted(study, scale or "smoke", there)
        out[study.name] = {
            "scale": scale,
            "finished": done,
            "open": left,
            "verdicts": verdict_lines(study, rows, scale) if scale else [],
            "page": str(write_page(study, store)[0]),
        }
    write_front(folder, store)
    beside = all((folder.parent / part).is_dir() for part in ("studies/coverage", "tests"))
    if beside and results.resolve() == results_folder(folder).resolve():
        write_coverage(folder, store)
    if html is not None:
        write_paper(folder, store, html)
    if as_json:
        print_json(out)
        return
    for name, found in out.items():
        where = f"scale {found['scale'] or 'smoke'}"
        typer.echo(
            f"{name}: {where}, {plural(found['finished'], 'cell')} finished, {found['open']} open; {found['page']}"
        )
        for line in found["verdicts"]:
            typer.echo(f"  {line}")


def _run(
    study: Any, scale: str, minutes: float | None, seeds: str | None, device: str, data_dir: str | None,
    folder: Path, results: Path, work: Path, where: list[str] | None, as_json: bool,
) -> None:  # fmt: skip
    from keyfed.lab.experiment.cell import Workspace
    from keyfed.lab.experiment.compare import parse_seeds
    from keyfed.lab.experiment.page import result_table, verdict_lines, winners_in, write_page
    from keyfed.lab.experiment.runner import Lines, parse_where, run_study
    from keyfed.lab.experiment.store import Store, rows_of
    from keyfed.lab.experiment.summary import write_front
    from keyfed.lab.experiment.tune import write_winners
    from keyfed.run.console import plural

    which = None if seeds is None else parse_seeds(seeds)
    listener = Lines()
    store = Store(results, listener.say)
    progress = run_study(
        study, scale, store=store, workspace=Workspace(work, device, data_dir), minutes=minutes, seeds=which,
        where=parse_where(study, where or ()), listener=listener,
    )  # fmt: skip
    page = write_page(study, store)[0]
    if (folder / f"{study.name}.toml").exists():
        write_front(folder, store)
        write_winners(study, store, folder)
    rows = rows_of(study, scale, store.of(study))
    verdicts = verdict_lines(study, rows, scale)
    if as_json:
        print_json({**progress.as_dict(), "verdicts": verdicts, "page": str(page)})
    else:
        from keyfed.run.console import render_table

        table = result_table(study, rows) if study.search is None else winners_in(study, scale, store)
        typer.echo(render_table(table, narrow=True))
        typer.echo("\n".join([*verdicts, f"{plural(len(progress.open), 'cell')} open; page: {page}"]))
    if progress.failed:
        raise typer.Exit(1)


STARTS = {
    "train.init": "The run, or base, whose weights METHOD+init starts from.",
    "vectors.file": "Word vectors that METHOD+vectors starts from.",
}


@with_keys
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD...", help="Methods, each with settings or a start of its own if need be."),
    ],
    what: Annotated[Named, Keys((*TEXT, "model.name", "train.rounds"))] = NONE,
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
    start: Annotated[Named, Keys(("train.init", "vectors.file", "vectors.dim", "secure.on"), STARTS)] = NONE,
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
    from keyfed.lab.experiment.compare import file_settings, parse_seeds, split_setting
    from keyfed.lab.experiment.runner import compare as run_comparison
    from keyfed.run.console import Narrator

    keys: list[tuple[str, Any]] = [
        *(file_settings(config) if config is not None else ()),
        *((key, value) for key, value in {**what, **start}.items() if value is not None),
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
            say(f"stopped; go on with: {shlex.join(['keyfed', *sys.argv[1:]])}")
            raise
    if as_json:
        print_json(summary)
    else:
        typer.echo(_text(summary))
    if summary["failed"]:
        raise typer.Exit(1)


def _text(summary: dict[str, Any]) -> str:
    """What the terminal shows: table, verdict, notes, what starts save, where the report is."""
    from keyfed.lab.experiment.report import comparison_table, notes, savings_lines, savings_table

    lines = [_narrow(comparison_table(summary)) + summary["verdict"], *notes(summary)]
    for one in summary["fine_tuning"]:  # its sentence names the variant, so that the table need not
        lines += [*savings_lines([one]), _narrow([row[1:] for row in savings_table([one])]).rstrip()]
    return "\n".join([*lines, f"report: {shlex.quote(str(Path(summary['out']) / 'report.html'))}"])


def _narrow(rows: list[list[str]]) -> str:
    """Ten columns are many for a terminal: no blanks inside numbers."""
    from keyfed.run.console import render_table

    return render_table([[cell.replace(" ± ", "±").replace(" %", "%") for cell in row] for row in rows], narrow=True)


@with_keys
def tune(
    method: Annotated[str | None, typer.Argument(help="Method (`keyfed methods`); fedavg by default.")] = None,
    what: Annotated[Named, Keys((*TEXT, "model.name"))] = NONE,
    trials: Annotated[int | None, typer.Option(help="Configurations to try, the given one among them [10].")] = None,
    rounds: Annotated[
        Named, Keys(("train.rounds",), {"train.rounds": "Rounds of a trial that goes all the way."})
    ] = NONE,
    seed: Annotated[Named, Keys(("train.seed",))] = NONE,
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
    plan: Annotated[
        str | None, typer.Option(help="A study with a search: every method in one command (`search`).", metavar="NAME")
    ] = None,
    scale: Annotated[str, typer.Option(help="With --plan: smoke, standard or paper.")] = "smoke",
    minutes: Annotated[float | None, typer.Option(help="With --plan: work so long, then stop.", min=0)] = None,
    device: Annotated[str, typer.Option(help="With --plan: cpu, cuda or auto.")] = "auto",
    results: ResultsOption = None,
    work: WorkOption = Path("runs/studies"),
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search for a method's best numbers on validation text, with a fixed budget.

    The configuration as given is trial 0. The other trials train a third of the rounds, the best third of them go on.
    The test text is not read. The winner is printed, and written with all its settings to best.toml, for
    `keyfed train --config`.

    With --plan the rows of a study's search, every method and corpus, are searched with the same trials and tokens.
    Each trial is a small JSON file in RESULTS/data; several processes may share RESULTS and WORK, and the same call
    goes on with what is open.

      keyfed tune fedadam --rounds 15 --search server_lr=0.001..0.1:log --search lr=0.001,0.003

      keyfed tune --plan search --scale standard --device cuda --minutes 9
    """
    if plan is not None:
        others = [
            method,
            trials,
            seeds,
            search,
            out,
            settings,
            config,
            *(v for k, v in what.items() if k != "data.dir"),
        ]
        if any(value is not None for value in (*others, *rounds.values(), *seed.values())) or resume or full:
            raise ConfigError("--plan has its own methods and settings; leave all out but --scale, --minutes, "
                              "--device, --data-dir, --results, --work, --where and --json")  # fmt: skip
        _plan(plan, scale, minutes, device, what["data.dir"], results, work, where, as_json)
        return
    from keyfed.lab.experiment.report import tune_text
    from keyfed.lab.experiment.tune import SEEDS, TRIALS, Tuning, parse_search, read_tuning
    from keyfed.lab.experiment.tune import tune as run_search
    from keyfed.run.console import Narrator

    before = read_tuning(out) if resume and out is not None and (out / "tune.json").exists() else None
    resolved = configure(method, config, {**what, **rounds, **seed}, settings, before.config if before else None)
    said = None
    if before is None and not full:
        resolved, said = _quick(resolved, settings, config)
    tuning = Tuning(
        resolved,
        before.space if before and not search else parse_search(resolved, search or []),
        trials if trials is not None else before.trials if before else TRIALS,
        seeds if seeds is not None else before.seeds if before else SEEDS,
    )
    folder = out or default_out(resolved, resume, f"tune-{resolved.method}")
    with Narrator() as narrator:
        if said:
            narrator.say(said)
        try:
            result = run_search(tuning, folder, resume=resume, listener=narrator)
        except KeyboardInterrupt:
            narrator.stop()
            say(f"stopped; go on with: keyfed tune --resume --out {shlex.quote(str(folder))}")
            raise
    print_json(result) if as_json else typer.echo(tune_text(result))


def _plan(
    name: str, scale: str, minutes: float | None, device: str, data_dir: str | None, results: Path | None,
    work: Path, where: list[str] | None, as_json: bool,
) -> None:  # fmt: skip
    """Run the search of a study: the same as `keyfed study`."""
    from keyfed.lab.experiment.grid import load_study, results_folder, study_folder

    folder = study_folder()
    found = load_study(name, folder)
    if found.search is None:
        raise ConfigError(f"--plan {name}: the study has no table [search]; run it by `keyfed study {name}`")
    _run(found, scale, minutes, None, device, data_dir, folder, results or results_folder(folder), work, where, as_json)


def _quick(config: Config, settings: list[str] | None, file: Path | None) -> tuple[Config, str | None]:
    """Reduce what a comparison reduces, but for the test text, which a search does not read; say so."""
    from keyfed.config.load import set_value
    from keyfed.lab.experiment.compare import quick_values

    reduced = {
        key: value
        for key, value in quick_values(config.model.name).items()
        if key != "train.test_tokens" and not sets(key, settings, file)
    }
    for key, value in reduced.items():
        config = set_value(config, key, value)
    shown = ", ".join(f"{key}={value}" for key, value in reduced.items())
    return config, f"quick: {shown}; --full searches on the whole text" if reduced else None
