"""The verb `keyfed study`: a paper's table or figure run again, cell by cell. torch is imported late."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from keyfed.cli.options import DirOption, JsonOption, print_json
from keyfed.errors import ConfigError


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
    data_dir: DirOption = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of pages and data; docs/results beside the studies by default.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder for runs while they train.")] = Path("runs/studies"),
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
    """
    from keyfed.lab.experiment.grid import load_study, results_folder, study_folder

    folder = study_folder()
    results = results or results_folder(folder)
    if which is not None and name != "report":
        raise ConfigError(f'"{which}" stands behind "{name}"; one study at a time, or `study report {which}`')
    if name == "list":
        _list(folder, results, as_json)
    elif name == "report":
        _report(folder, results, which, as_json)
    else:
        _run(load_study(name, folder), scale, minutes, seeds, device, data_dir, folder, results, work, as_json)


def _list(folder: Path, results: Path, as_json: bool) -> None:
    from keyfed.lab.experiment.grid import load_study, study_names
    from keyfed.lab.experiment.store import Store
    from keyfed.lab.experiment.table import counted

    rows = [["study", "what", "smoke", "standard", "paper"]]
    left_out: list[str] = []
    store = Store(results, left_out.append)
    for name in study_names(folder):
        study = load_study(name, folder)
        there = store.of(study)
        counts = []
        for scale in ("smoke", "standard", "paper"):
            done, left = counted(study, scale, there) if scale in study.scales else (0, 0)
            counts.append(f"{done} of {done + left}" if done + left else "–")
        rows.append([name, study.title, *counts])
    _say(left_out)
    if as_json:
        print_json([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        return
    from keyfed.run.console import print_table

    print_table(rows)


def _say(lines: Iterable[str]) -> None:
    """Write lines that are no result to stderr."""
    for line in lines:
        typer.echo(line, err=True)


def _report(folder: Path, results: Path, which: str | None, as_json: bool) -> None:
    from keyfed.lab.experiment.grid import load_study, study_names
    from keyfed.lab.experiment.page import verdict_lines, write_front, write_page
    from keyfed.lab.experiment.store import Store, make_folder
    from keyfed.lab.experiment.table import counted, main_scale, rows_of
    from keyfed.run.console import plural

    out: dict[str, Any] = {}
    left_out: list[str] = []
    store = Store(results, left_out.append)
    studies = [load_study(name, folder) for name in ([which] if which is not None else study_names(folder))]
    make_folder(results, results)
    for study in studies:
        there = store.of(study)
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
    _say(left_out)
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
    folder: Path, results: Path, work: Path, as_json: bool,
) -> None:  # fmt: skip
    from keyfed.lab.experiment.cell import Workspace
    from keyfed.lab.experiment.compare_plan import parse_seeds
    from keyfed.lab.experiment.page import result_table, verdict_lines, write_front, write_page
    from keyfed.lab.experiment.runner import Lines, run_study
    from keyfed.lab.experiment.store import Store
    from keyfed.lab.experiment.table import rows_of
    from keyfed.run.console import plural

    which = None if seeds is None else parse_seeds(seeds)
    listener = Lines()
    store = Store(results, listener.say)
    progress = run_study(
        study, scale, store=store, workspace=Workspace(work, device, data_dir), minutes=minutes, seeds=which,
        listener=listener,
    )  # fmt: skip
    page = write_page(study, store)[0]
    if (folder / f"{study.name}.toml").exists():
        write_front(folder, store)
    rows = rows_of(study, scale, store.of(study))
    verdicts = verdict_lines(study, rows, scale)
    if as_json:
        print_json({**progress.as_dict(), "verdicts": verdicts, "page": str(page)})
    else:
        from keyfed.reports.results import as_text

        typer.echo(as_text(result_table(study, rows), narrow=True))
        typer.echo("\n".join([*verdicts, f"{plural(len(progress.open), 'cell')} open; page: {page}"]))
    if progress.failed:
        raise typer.Exit(1)
