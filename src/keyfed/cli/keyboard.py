"""`keyfed export` and `keyfed keyboard`: a run as files that a page types on. torch is imported by the verbs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from keyfed.cli.options import JsonOption, RunArgument, print_json
from keyfed.errors import ConfigError


def export(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Folder to write.  [default: RUN/keyboard]")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Weights in eight bits: a quarter of the download.")] = False,
    base: Annotated[
        bool, typer.Option("--base", help="Write the format of the base model that comes along (`make base`).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's model for the keyboard page: ONNX graph, weights, vocabulary, test vectors, manifest.

    The graph is compared with the trained network on held-out text and refused if it differs. A new round changes the
    weights file only. The export of a run with --dp is compared on random tokens. It has no n-grams and no written
    forms: these are counted on clients' text without noise.

      keyfed export runs/first --int8

    With --base it writes what comes along with the package instead: weights in eight bits, vocabulary, hashes of the
    lines of its text, manifest and card. The corpus must be at hand, and its licence must permit it.

      keyfed export runs/base --base --out src/keyfed/model/base
    """
    if base:
        from keyfed.keyboard.base_pack import pack_base, packed_text

        if out is None or int8:
            raise ConfigError("--base is in eight bits and wants a folder: give --out, and leave --int8 out")
        packed = pack_base(run, out)
        print_json({"out": str(out), **packed.manifest}) if as_json else typer.echo(packed_text(packed))
        return
    from keyfed.keyboard.export import export_run, export_text

    done = export_run(run, out, int8)
    whole = {"out": str(done.out), **done.manifest, "notes": done.notes}
    print_json(whole) if as_json else typer.echo(export_text(done))


def keyboard(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run folder, export folder, or base; runs/first or base by default.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any that is free.", min=0, max=65535)] = 8017,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Type on a run's model in a browser. What is typed stays in the page: the server has no way to receive it.

    Serves the page on 127.0.0.1 until Ctrl-C. A run that was not exported, or has been trained since, is exported
    first. Without RUN it takes the run of `make run`, or the base model that comes with the package if there is none.

      keyfed keyboard runs/first

      keyfed keyboard base
    """
    from keyfed.keyboard.graph import need

    need("starlette", "uvicorn", "onnx", "onnxruntime")
    from keyfed.keyboard import serve
    from keyfed.keyboard.assets import WEB
    from keyfed.keyboard.export import export_run
    from keyfed.run.start.base import is_base

    serve.page_files(WEB)  # what is missing is said before anything long
    with serve.listen(port) as listening, TemporaryDirectory(prefix="keyfed-keyboard-") as temporary:
        chosen = run or _run_or_base()
        if is_base(chosen):
            folder, name = export_run(chosen, Path(temporary) / "base", int8=True).out, "the base model"
        else:
            folder = _exported(chosen)
            name = str(folder)
        taken = listening.getsockname()[1]
        address = f"http://{serve.HOST}:{taken}/"
        app = serve.make_app(folder, taken)
        typer.echo(f"{address}  types on {name}; Ctrl-C ends it")
        if not no_open:
            serve.open_browser(address)
        serve.make_server(app).run(sockets=[listening])


def _exported(run: Path) -> Path:
    """Return the export to serve: the folder itself, or the run's, made (again) where it is not of the run's model."""
    from keyfed.errors import RunError
    from keyfed.keyboard import bundle
    from keyfed.keyboard.export import export_run, export_text, model_sum
    from keyfed.run.folder import read_run_toml

    if bundle.is_bundle(run):
        bundle.check_bundle(run)
        return run
    config, _ = read_run_toml(run)  # what is no run is said as such
    target, int8 = run / "keyboard", False
    if bundle.is_bundle(target):
        try:
            manifest = bundle.check_bundle(target)
            int8 = manifest["precision"] == "int8"
            raw = bundle.read_from_text(target) if config.privacy.on else []
            if manifest["run"]["model_sha256"] == model_sum(run) and not raw:
                return target
            why = f"{run} has been trained since it was exported"
            if raw:
                why = f"{run} is private, and its export holds {', '.join(raw)}"
            typer.echo(f"{why}; exporting it again", err=True)
        except RunError as e:
            typer.echo(f"{e}: doing so", err=True)
    else:
        typer.echo(f"exporting {run} to {target}", err=True)
    typer.echo(export_text(export_run(run, target, int8)), err=True)
    return target


def _run_or_base() -> Path:
    """Return the run of `make run`, or `base` where that is not there or not finished."""
    run = Path("runs/first")
    if (run / "model.safetensors").exists() and (run / "result.json").exists():
        return run
    typer.echo(f"no RUN was given and {run} is no finished run: this is the base model (`make run` trains)", err=True)
    return Path("base")
