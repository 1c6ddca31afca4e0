"""Options that several verbs share, and how a configuration is made from them. torch is not imported here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyfed.errors import RunError

if TYPE_CHECKING:
    from keyfed.config import Config

DataOption = Annotated[str | None, typer.Option("--data", help="Corpus name (`keyfed data list`) or a path.")]
DirOption = Annotated[str | None, typer.Option("--data-dir", help="Folder of the named corpora; else KEYFED_DATA.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model preset (`keyfed methods --models`).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value for any option; a bare key is the method's.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with [data] [model] [method] [train].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
RunArgument = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]


def configure(
    method: str | None,
    config: Path | None,
    named: dict[str, Any],
    settings: list[str] | None,
    base: Config | None = None,
) -> Config:
    """Defaults (or a run's own), then the TOML file, then named options, then --set."""
    from keyfed.config import Config, apply_settings, check, read_config, set_value
    from keyfed.federated.methods import method_options

    if method is not None:
        method_options(method)  # an unknown method is said first
    if config is not None:
        made = read_config(config, method)
    elif base is not None:
        if method is not None and method != base.method:
            raise RunError(f'this run was started with method "{base.method}", not "{method}"')
        made = base
    else:
        made = Config(method=method or "fedavg")
    for key, value in named.items():
        if value is not None:
            made = set_value(made, key, value)
    return check(apply_settings(made, settings or []))


def print_json(value: Any) -> None:
    from keyfed.run.folder import strict

    typer.echo(json.dumps(strict(value), indent=1, allow_nan=False))
