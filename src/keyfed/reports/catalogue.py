"""Lists and pages for people: methods, models, corpora, one corpus's statistics."""

from __future__ import annotations

import inspect
import io
import typing
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from keyfed.config.load import Config
from keyfed.federated.methods import METHODS, method_options
from keyfed.federated.tuned import CHARACTERS
from keyfed.model.language_model import parameter_count
from keyfed.model.presets import PRESETS, build_spec
from keyfed.run.console import print_table
from keyfed.run.prepare import prepare
from keyfed.text.catalogue import NAMED, at_hand
from keyfed.text.partition import statistics

REFERENCE_VOCAB = 10_000
REFERENCE_CHARACTERS = 91


def describe_methods() -> list[list[str]]:
    """Return a table of methods and their one-line descriptions."""
    return [["method", "what it does"], *[[name, _first_line(build)] for name, build in METHODS.items()]]


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def method_page(name: str) -> dict[str, Any]:
    """Return a method's documentation and options with their defaults."""
    options = method_options(name)
    hints = typing.get_type_hints(METHODS[name])
    doc = inspect.getdoc(METHODS[name]) or ""
    characters = CHARACTERS.get(name, {})
    rows = [["option", "default", "for characters", "type"]]
    rows += [
        [key, _show(p.default), _show(characters.get(key, p.default)), _type_name(hints[key])]
        for key, p in options.items()
    ]
    with redirect_stdout(io.StringIO()) as table:
        print_table(rows)
    return {
        "name": name,
        "documentation": doc,
        "options": {key: p.default for key, p in options.items()},
        "options_for_characters": {key: characters.get(key, p.default) for key, p in options.items()},
        "text": f"{name}\n\n{doc}\n\n{table.getvalue()}\nSet one with --set NAME=VALUE, e.g. "
        f"keyfed train {name} --set {next(iter(options))}={_show(next(iter(options.values())).default)}",
    }


def _show(value: object) -> str:
    return "none" if value is None else str(value)


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return "none or float" if "None" in str(hint) else getattr(hint, "__name__", str(hint))


def describe_models() -> list[list[str]]:
    """Return a table of model presets with their parameter counts."""
    rows = [["model", "reads", "cell", "parameters", "window", "source"]]
    for name, p in PRESETS.items():
        vocab = REFERENCE_CHARACTERS if p.characters else REFERENCE_VOCAB
        count = parameter_count(build_spec(name, vocab))
        reads = "characters" if p.characters else "words"
        rows.append([name, reads, p.cell, f"{count:,} (V = {vocab:,})", str(p.window), p.about])
    return rows


def describe_corpora(data_dir: Path | None) -> list[list[str]]:
    """Return a table of named corpora and whether they are at hand."""
    rows = [["corpus", "clients", "lines are", "at hand", "about"]]
    for name, known in NAMED.items():
        shards = f"{known.clients} shards" if known.partition == "iid" and known.clients else known.partition
        lines = "messages" if known.messages else "running text"
        rows.append([name, shards, lines, "yes" if at_hand(name, data_dir) else "no", known.about])
    return rows


def describe_data(config: Config) -> dict[str, Any]:
    """Prepare a corpus and describe it: a text for people and the statistics as data."""
    prepared = prepare(config, text=True)
    numbers = statistics(prepared.population, prepared.vocab)
    rows = [["statistic", "value"]]
    for key, value in numbers.items():
        if isinstance(value, dict):
            rows += [[f"{key}: {k}", _number(v)] for k, v in value.items()]
        else:
            rows.append([key, _number(value)])
    with redirect_stdout(io.StringIO()) as table:
        print_table(rows)
    return {"statistics": numbers, "text": "\n".join([*prepared.describe(), "", table.getvalue()])}


def _number(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(value, "–") if isinstance(value, bool) else "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return str(value)


def exploration_text(result: dict[str, Any]) -> str:
    """Write the tables of `explore` side by side with where the plots are."""
    lines: list[str] = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{key}: " + ", ".join(" ".join(map(_number, row.values())) for row in value))
        elif isinstance(value, list):
            lines.append(f"{key}: " + ", ".join(map(str, value)))
        elif isinstance(value, dict):
            lines.append(
                f"{key}: " + ", ".join(f"{k} {_number(v)}" for k, v in value.items() if not isinstance(v, list))
            )
        else:
            lines.append(f"{key}: {_number(value)}")
    return "\n".join(lines)
