"""`keyfed export` and `keyfed keyboard`: a run as files that a page types on. torch is imported by the verbs, not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyfed.cli_options import JsonOption, RunArgument, print_json


def export(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Folder to write.  [default: RUN/keyboard]")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Weights in eight bits: a quarter of the download.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's model for the keyboard page: ONNX graph, weights, vocabulary, test vectors, manifest.

    The graph is compared with the trained network on held-out text and refused if it differs. A new round changes the
    weights file only.

      keyfed export runs/first --int8
    """
    from keyfed.keyboard.export import export_run, export_text

    done = export_run(run, out, int8)
    whole = {"out": str(done.out), **done.manifest, "notes": done.notes}
    print_json(whole) if as_json else typer.echo(export_text(done))
