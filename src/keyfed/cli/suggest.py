"""`keyfed suggest`: next words after a text, or the strip above a keyboard. torch is imported when it runs."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from keyfed.cli.options import JsonOption, RunArgument, print_json
from keyfed.errors import ConfigError


def suggest(
    run: RunArgument,
    text: Annotated[
        str | None, typer.Argument(help="Whole words typed so far, for the next ones; without it, type and see.")
    ] = None,
    count: Annotated[int, typer.Option("-k", help="How many suggestions; without TEXT at most 3.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Print the most probable next words after TEXT; without it, suggest while you type.

    Tab takes the middle suggestion, Alt+1, 2 or 3 one of the three, a blank the correction (backspace brings back what
    was typed), Enter ends the line, Ctrl-D leaves.

    Where the input is no terminal, every line of it is a field that is being typed in: its last word is completed or
    corrected, unless a blank ends it, with three suggestions at most. TEXT is taken as whole words, and followed by
    next words. (A character model completes the last word of both.)

      keyfed suggest runs/first "i would like to" -k 5

      echo "the state o" | keyfed suggest runs/first

    RUN may be `base`, the model that comes with the package:

      keyfed suggest base "how do i"
    """
    from keyfed.keyboard.terminal import PlainLine, harmless, run_terminal, suggestions_of
    from keyfed.run.start.base import load_run
    from keyfed.run.suggest import suggest as suggest_words

    trained = load_run(run)

    def words_after(before: str) -> list[str]:
        return suggest_words(trained.spec, trained.params, trained.vocab, before, count, lines=trained.reads_lines)

    if text is not None:
        words = words_after(text)
        print_json({"text": text, "suggestions": words}) if as_json else typer.echo("\n".join(map(harmless, words)))
        return
    if count > 3:
        raise ConfigError(f"-k {count}: the strip above a keyboard has three words; give a text for more")
    from keyfed.keyboard.session import Editor, keyboard_of

    keyboard = None if trained.vocab.kind == "char" else keyboard_of(trained)
    if sys.stdin.isatty():
        if as_json:
            raise ConfigError("--json has nothing to print while you type; give a text or a file of lines")
        line = PlainLine(words_after) if keyboard is None else Editor(keyboard)
        run_terminal(line, sys.stdin.fileno(), lambda shown: typer.echo(shown, nl=False))
        return
    for raw in sys.stdin.buffer:
        before = raw.decode("utf-8", "replace").rstrip("\r\n")
        words = (words_after(before) if keyboard is None else suggestions_of(keyboard.suggest(before)))[:count]
        one = json.dumps({"text": before, "suggestions": words}) if as_json else "\t".join(map(harmless, words))
        typer.echo(one)
