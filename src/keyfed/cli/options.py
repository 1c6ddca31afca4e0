"""Options that several verbs share, and how a configuration is made from them. torch is not imported here."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyfed.config.load import SECTIONS
from keyfed.config.schema import hints_of
from keyfed.errors import ConfigError, RunError, nearest
from keyfed.system import leads, place

if TYPE_CHECKING:
    from keyfed.config.load import Config

SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value for any option; a bare key is the method's.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with [data] [model] [method] [train].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
RunArgument = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]
Named = dict[str, Any]  # values of configuration keys; None where the caller gave none
NONE: Named = {}


@dataclass(frozen=True)
class Keys:
    """Marks a parameter of a command: the options of these configuration keys stand in its place (`with_keys`).

    Attributes:
      help: of a key, where a command needs another text than the schema's.
    """

    keys: Sequence[str]
    help: Mapping[str, str] = field(default_factory=dict)


DirOption = Annotated[Named, Keys(("data.dir",))]


def with_keys(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its `Keys`, with the schema's types and texts; it gets them as dictionaries."""
    parameters: list[inspect.Parameter] = []
    places: dict[str, dict[str, str]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        marks = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, Keys)]
        if not marks:
            parameters.append(parameter)
        for key in marks[0].keys if marks else ():
            made = _flag(key, marks[0].help.get(key))
            places.setdefault(parameter.name, {})[made.name] = key
            parameters.append(made)

    @functools.wraps(command)
    def called(**values: Any) -> None:
        for group, keys in places.items():
            found = {key: values.pop(name, None) for name, key in keys.items()}
            values[group] = {key: None if value is False else value for key, value in found.items()}
        command(**values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _flag(key: str, help: str | None) -> inspect.Parameter:
    """Return the option of a configuration key as the parameter that Typer reads."""
    section, _, name = key.partition(".")
    declared = {f.name: f.metadata for f in fields(SECTIONS[section])}[name]
    kind = hints_of(SECTIONS[section])[name]
    text = help or declared["short"] or f"{declared['help'][0].upper()}{declared['help'][1:]}."
    shown = typer.Option(declared["flag"], metavar=declared["metavar"], help=text)
    return inspect.Parameter(
        declared["flag"].strip("-").replace("-", "_"),
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=False if kind is bool else None,
        annotation=Annotated[bool if kind is bool else kind | None, shown],
    )


def configure(
    method: str | None,
    config: Path | None,
    named: Named,
    settings: list[str] | None,
    base: Config | None = None,
    *,
    recipe: bool = False,
    minutes: float | None = None,
) -> Config:
    """Defaults (or a run's own), then the TOML file, then named options, then --set.

    Args:
      recipe: where no method is named, leave what is not set to the recipe (`keyfed.run.recipe`).
      minutes: let the number of rounds follow from this time.
    """
    from keyfed.config.load import (
        Config,
        Open,
        apply_settings,
        check,
        config_from,
        keys_of,
        open_config,
        read_config,
        read_document,
        set_value,
    )
    from keyfed.federated.methods import method_options

    if method is not None:
        _refuse_text(method)
        method_options(method)  # an unknown method is said first
    document = read_document(config) if config is not None else {}
    if recipe and method is None and (config is not None or base is None) and not _names_method(document):
        keys = [key for key, value in named.items() if value is not None] + keys_of(document)
        keys += [whole_key(setting.partition("=")[0].strip()) for setting in settings or []]
        made = config_from(document, str(config), base=open_config(keys))
    elif config is not None:
        made = read_config(config, method)
    elif base is not None:
        if method is not None and method != base.method:
            raise RunError(f'this run was started with method "{base.method}", not "{method}"')
        made = base
    else:
        made = Config(method=method or "fedavg")
    if minutes is not None:
        if "train.rounds" in keys_of(document):
            raise ConfigError(f"{config} sets train.rounds, and --minutes is given: leave one of the two out")
        made = replace(made, open=replace(made.open or Open(), minutes=minutes))
    for key, value in named.items():
        if value is not None:
            made = set_value(made, key, value)
    return check(apply_settings(made, settings or []))


def _refuse_text(method: str) -> None:
    """Refuse a corpus or a path that stands where a method is expected."""
    from keyfed.federated.methods import METHODS
    from keyfed.text.catalogue import NAMED

    if method not in METHODS and (method in NAMED or Path(method).expanduser().exists()):
        raise ConfigError(f"{method} is no method but text to train on; did you mean --data {shlex.quote(method)}?")


def whole_key(key: str) -> str:
    """Write an option's key with its section; a bare one is the method's."""
    return key if "." in key else f"method.{key}"


def _names_method(document: Mapping[str, Any]) -> bool:
    table = document.get("method", {})
    return not isinstance(table, Mapping) or "name" in table  # what is no section is said where it is read


def sets(key: str, settings: list[str] | None, config: Path | None) -> bool:
    """Whether the caller set a key, by --set or in the file (`configure` has read it: it exists and is TOML)."""
    section, _, name = key.partition(".")
    from keyfed.config.load import read_document

    in_file = config is not None and name in read_document(config).get(section, {})
    return in_file or any(setting.partition("=")[0].strip() == key for setting in settings or [])


def print_json(value: Any) -> None:
    from keyfed.run.folder import strict

    typer.echo(json.dumps(strict(value), indent=1, allow_nan=False))


def say(line: str) -> None:
    """Write a line that is no result to stderr."""
    typer.echo(line, err=True)


def complain(message: str, kind: str = "usage", code: int = 2) -> int:
    """Print an error of the caller's and return the exit code; of several ranks only the first speaks and fails.

    With --json stdout has one object all the same: `{"error": {"kind": …, "message": …, "exit_code": …}}`.

    Args:
      kind: the class of `keyfed.errors`; usage for options and arguments, system for files and disks.
    """
    if not leads():
        return 0  # torchrun would end rank 0 at another code before it has said why
    if "--json" in sys.argv[1:]:
        typer.echo(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}, indent=1))
    say(f"error: {message}")
    return code


def follow_rank_0() -> None:
    """Train as rank 0 says, whatever this rank's own options: only rank 0 sees the run folder."""
    from keyfed.run.ranks import follow, together

    together(place(), follow)


def explain(error: Any) -> str:
    """One line for a usage error, with the nearest command or option."""
    message = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands and message.startswith("No such command"):
        got = message.split("'")[1]
        return f'command "{got}" is not known{nearest(got, commands)}. Commands: {", ".join(commands)}.'
    where = getattr(context, "command_path", "keyfed")
    asked = str(getattr(error, "option_name", ""))
    if message.startswith("No such option"):
        key = _set_key(context, asked.strip("-").replace("-", "_"))
        if key is not None:
            return f"{asked} is no option of its own; write --set {key}=VALUE. See `{where} --help`."
        message = message.partition(". Did you mean '--help'")[0]
    return f"{message}. See `{where} --help`."


def _set_key(context: Any, name: str) -> str | None:
    """Return what the `--set` of a command calls an option; None if it has none, or a flag of its own for it."""
    flags = {flag for one in getattr(getattr(context, "command", None), "params", ()) for flag in one.opts}
    if "--set" not in flags or f"--{name.replace('_', '-')}" in flags:
        return None
    from keyfed.federated.methods import METHODS

    if any(name in method.options for method in METHODS.values()):
        return name
    return next((f"{section}.{name}" for section, kind in SECTIONS.items() if name in hints_of(kind)), None)
