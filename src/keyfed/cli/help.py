"""Help as plain text, mended where Typer 0.20 spoils it: brackets keep their backslashes, arguments lose their help."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click
from typer.models import ArgumentInfo


class PlainFormatter(click.HelpFormatter):
    """Writes `[default: 3]` where Typer hands over `\\[default: 3]`, escaped for a markup that is not used here.

    Attributes:
      arguments: help of arguments that have none of their own, by the name they are listed under.
    """

    arguments: Mapping[str, str] = {}

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of terms with their explanations."""
        plain = ((term, text.replace("\\[", "[")) for term, text in rows)
        whole = [(term, "  ".join(filter(None, (self.arguments.get(term), text)))) for term, text in plain]
        super().write_dl(whole, col_max, col_spacing)


class PlainContext(click.Context):
    """A context whose help is plain and whole."""

    formatter_class = PlainFormatter

    def make_formatter(self) -> click.HelpFormatter:
        """Return what help is written with."""
        formatter = super().make_formatter()
        assert isinstance(formatter, PlainFormatter)
        formatter.arguments = _lost_help(self)
        return formatter


def plainly(command: Any) -> Any:
    """Return a command that, with all commands below it, writes its help plainly."""
    for one in _all(command):
        one.context_class = PlainContext
    return command


def _all(command: Any) -> Iterator[Any]:
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from _all(child)


def _lost_help(context: click.Context) -> dict[str, str]:
    """Return the help in the annotations of arguments that have none: click 8.5 takes it from those Typer makes."""
    command = context.command
    missing = [p for p in command.params if isinstance(p, click.Argument) and not getattr(p, "help", None)]
    if not missing or command.callback is None:
        return {}
    hints = typing.get_type_hints(command.callback, include_extras=True)
    return {
        argument.make_metavar(context): note.help
        for argument in missing
        for note in getattr(hints.get(argument.name or ""), "__metadata__", ())
        if isinstance(note, ArgumentInfo) and note.help
    }
