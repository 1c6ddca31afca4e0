"""Options of the command line that are configuration keys: declared in the schema, handed to a command by key."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import click
import pytest
import typer
from typer.testing import CliRunner

from keyfed.cli.app import app
from keyfed.cli.options import NONE, Keys, Named, with_keys
from keyfed.config.load import SECTIONS
from keyfed.config.schema import hints_of

FLAGS = {
    f"{section}.{f.name}": f.metadata["flag"]
    for section, declared in SECTIONS.items()
    for f in fields(declared)
    if f.metadata.get("flag")
}


def got_by(*arguments: str) -> dict[str, Any]:
    """What a command that takes every flag of the schema gets."""
    found: dict[str, Any] = {}
    small = typer.Typer(rich_markup_mode=None)

    @small.command()
    @with_keys
    def command(
        word: str,
        named: Annotated[Named, Keys(tuple(FLAGS))] = NONE,
        times: Annotated[int, typer.Option()] = 2,
    ) -> None:
        found.update(named=named, word=word, times=times)

    result = CliRunner().invoke(small, ["a", *arguments])
    assert result.exit_code == 0, result.output
    return found


def test_what_is_not_given_is_none_and_zero_is_zero():
    assert got_by() == {"named": dict.fromkeys(FLAGS), "word": "a", "times": 2}
    got = got_by("--rounds", "0", "--times", "3")
    assert got["named"] == {**dict.fromkeys(FLAGS), "train.rounds": 0}
    assert got["times"] == 3


@pytest.mark.parametrize("key", FLAGS)
def test_a_flag_sets_its_own_key_with_the_type_of_the_schema(key):
    section, _, name = key.partition(".")
    hint = hints_of(SECTIONS[section])[name]
    value = True if hint is bool else 7 if hint in (int, int | None) else "7"
    arguments = [FLAGS[key]] if hint is bool else [FLAGS[key], "7"]
    assert got_by(*arguments)["named"] == {**dict.fromkeys(FLAGS), key: value}


def test_flags_are_of_one_key_each_and_some_command_has_them():
    assert len(set(FLAGS.values())) == len(FLAGS)
    train = typer.main.get_command(app).commands["train"]
    assert set(FLAGS.values()) <= {flag for p in train.params if isinstance(p, click.Option) for flag in p.opts}


def test_a_command_may_say_in_its_own_words_what_a_key_means_there():
    commands = typer.main.get_command(app).commands
    texts = {name: {p.opts[0]: p.help for p in commands[name].params} for name in ("train", "pretrain", "compare")}
    assert texts["train"]["--rounds"] == "Federated rounds."
    assert texts["pretrain"]["--rounds"] == "Rounds, each as much text as a round of `train` reads."
    assert texts["compare"]["--init"] != texts["train"]["--init"]


@pytest.mark.parametrize(
    "verb",
    [
        "evaluate", "methods", "conformance", "data list", "data describe", "data explore", "privacy ledger",
        "privacy audit", "privacy calibrate",
    ],
)  # fmt: skip
def test_help_has_examples_and_all_are_indented_alike(keyfed, verb):
    _, said, _ = keyfed(*verb.split(), "--help")
    shown = [line for line in said.splitlines() if line.strip().startswith("keyfed ")]
    assert shown
    assert all(line.startswith(f"    keyfed {verb}") for line in shown)
