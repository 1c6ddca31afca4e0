"""The command line: every verb parses, calls one function and prints.

Exit codes: 0, 1 (a defect of ours, with its traceback), 2 (a mistake of the caller's: one line), 130 (Ctrl-C). torch is
imported by the verbs, not here: `keyfed --help` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.models import ArgumentInfo

from keyfed import __version__
from keyfed.cli.data import data_app, vocab
from keyfed.cli.doctor import doctor
from keyfed.cli.experiment import compare, study, tune
from keyfed.cli.federation import client, up
from keyfed.cli.keyboard import export, keyboard, suggest
from keyfed.cli.options import JsonOption, RunArgument, complain, explain, print_json, say
from keyfed.cli.privacy import privacy_app
from keyfed.cli.server import enroll, server
from keyfed.cli.train import counts, pretrain, train
from keyfed.errors import ConfigError, KeyfedError
from keyfed.files import space_advice
from keyfed.system import EXTRAS, leads, missing_of, pip_line, sleep_soon

# What a user can mend: a full or read-only disk, a folder that may not be entered, a name that cannot be one.
MENDABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR,
    errno.EISDIR,
}  # fmt: skip

app = typer.Typer(
    name="keyfed",
    help="Train the language model behind a keyboard across many people's devices without moving their text.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.add_typer(data_app)
app.add_typer(privacy_app)


app.command()(train)
app.command()(pretrain)
app.command()(counts)
app.command()(compare)


@app.command()
def evaluate(
    run: RunArgument,
    personalise: Annotated[
        str | None,
        typer.Option(
            help="Also tune a copy of the model on each client's own text and test it on that client's held-out text: "
            "epochs=1, with lr=, optimiser=, batch_size= after commas.",
        ),
    ] = None,
    keyboard: Annotated[
        bool,
        typer.Option(
            "--keyboard",
            help="Type held-out messages instead, and count: suggestions that were right, keystrokes saved, "
            "corrections, swipes, milliseconds; beside n-gram models of the same text.",
        ),
    ] = False,
    against: Annotated[
        list[Path] | None, typer.Option(help="With --keyboard: another run on the same text.  [repeatable]")
    ] = None,
    words: Annotated[
        int | None,
        typer.Option(help="With --keyboard: words typed of seen and of unseen clients.  [default: 2000]", min=1),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Test a run's model again: perplexity, accuracy, spread over clients, on seen and unseen clients.

    keyfed evaluate runs/mine --personalise epochs=1,lr=0.001

    keyfed evaluate runs/mine --keyboard --against runs/mine/central
    """
    if keyboard:
        if personalise is not None:
            raise ConfigError("--keyboard types with the model as it is; leave --personalise out")
        from keyfed.keyboard.measure import WORDS, evaluate_keyboard, keyboard_text

        typed = evaluate_keyboard([run, *(against or [])], words or WORDS, say=say)
        print_json(typed) if as_json else typer.echo(keyboard_text(typed))
        return
    if against or words:
        raise ConfigError("--against and --words go with --keyboard")
    from keyfed.run.console import working

    with working(f"testing the model of {run}", quiet=True):
        from keyfed.reports.finished import evaluate_run, parse_personal, personal_text
        from keyfed.reports.run_page import table_text

        result = evaluate_run(run, personal=parse_personal(personalise) if personalise is not None else None)
    if as_json:
        print_json(result)
        return
    typer.echo(table_text(result))
    if "personalised" in result:
        typer.echo(personal_text(result["personalised"]))


app.command()(tune)
app.command()(study)
app.command()(vocab)
app.command()(export)
app.command()(keyboard)
app.command()(up)
app.command()(server)
app.command()(enroll)
app.command()(client)
app.command()(suggest)
app.command()(doctor)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, for its equation and options.")] = None,
    models: Annotated[bool, typer.Option("--models", help="List the model presets instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods, or print one's equation, options and reference.

    keyfed methods

    keyfed methods fedatt
    """
    from keyfed.cli.reference import describe_methods, describe_models, method_page

    if name is not None and models:
        raise ConfigError(f"got method {name} and --models, which lists the model presets; leave one of the two out")
    if name is not None:
        page = method_page(name)
        print_json(page) if as_json else typer.echo(page["text"])
        return
    rows = describe_models() if models else describe_methods()
    if as_json:
        print_json([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        return
    from keyfed.run.console import print_table

    print_table(rows)


@app.command()
def conformance(run: RunArgument, as_json: JsonOption = False) -> None:
    """Check a model for the defects that falsify numbers: context used, causal, rows independent, padding neutral, …

    Exit code 1 if a check fails.

      keyfed conformance runs/mine
    """
    from keyfed.run.console import working

    with working(f"checking the model of {run}", quiet=True):
        from keyfed.reports.finished import check_run

        checks = check_run(run)
    if as_json:
        print_json({"passed": all(c["passed"] for c in checks), "checks": checks})
    else:
        for c in checks:
            typer.echo(f"{'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}")
    if not all(c["passed"] for c in checks):
        raise typer.Exit(1)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="Model preset with a counterpart in torch.nn: gru, lstm, …")] = "gru",
    vocab: Annotated[list[int] | None, typer.Option(help="Vocabulary size; repeatable.  [default: 10000]")] = None,
    clients: Annotated[list[int] | None, typer.Option(help="Clients of the round; repeatable.  [default: 10]")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each client.")] = 8_890,
    epochs: Annotated[int, typer.Option(help="Local passes over the text.")] = 1,
    repeats: Annotated[int, typer.Option(help="Runs of each, interleaved; medians are printed.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Contender to measure; repeatable. All by default.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the speeds into this PNG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure one FedAvg round: our engine beside a plain PyTorch loop, central training and, where installed, others.

    FedAtt's settings: SGD 0.01 with momentum 0.5, B = 10, text as streams. On a CPU every run is a process of its own
    with one thread; on a GPU all run in one process after a warm-up. pfl and Flower are measured where installed (CPU).

      keyfed bench --vocab 10000 --vocab 33278 --repeats 7 --plot bench.png
    """
    from keyfed.lab.bench.bench import bench as measure
    from keyfed.lab.bench.bench import bench_text, check_file, plot_bench

    if plot is not None:
        check_file(plot)
    result = measure(
        model=model, vocab=vocab or [10_000], clients=clients or [10], tokens=tokens, epochs=epochs, repeats=repeats,
        device=device, only=only or (), say=say,
    )  # fmt: skip
    print_json(result) if as_json else typer.echo(bench_text(result))
    if plot is not None:  # last: what was measured is said by then
        plot_bench(result, plot)


def version_text() -> str:
    """Return the version, those of Python and PyTorch, and which extras are installed; torch is not imported."""
    lines = [f"keyfed {__version__}", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    try:
        lines.append(f"PyTorch {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        lines.append(f"PyTorch is not installed: {sys.executable} -m pip install torch")
    for extra, (purpose, _) in EXTRAS.items():
        lines.append(f"  {extra:<12} {'missing' if missing_of(extra) else 'installed':<10} {purpose}")
    if any(map(missing_of, EXTRAS)):
        lines.append(f"A missing extra is installed by: {pip_line('NAME')}")
    return "\n".join(lines)


def _version(show: bool) -> None:
    if show:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version, and which extras are installed."
        ),
    ] = False,
) -> None:
    del version  # acted on by its callback


def main() -> None:
    """Entry point: errors of the caller are one line and exit code 2."""
    import click

    command = plainly(typer.main.get_command(app))
    _write_what_can_be_written()
    sleep_soon()
    if not leads():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open as long as the process
        # Read when torch is imported: that rank 0 went first is no news, and would be a page of C++ frames.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        code = command.main(standalone_mode=False)
    except KeyfedError as e:
        code = complain(str(e), type(e).__name__)
    except click.exceptions.NoArgsIsHelpError as e:
        typer.echo(e.format_message())
        code = 2
    except click.ClickException as e:
        code = complain(explain(e))
    except OSError as e:
        if e.errno not in MENDABLE:
            raise
        where = f"{e.filename}: " if e.filename else ""
        code = complain(f"{where}{e.strerror}{space_advice(e)}", "system")
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        code = complain(f"PyTorch is not installed; {sys.executable} -m pip install torch", "system")
    except (click.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code or 0)


def _write_what_can_be_written() -> None:
    """Let a stream that is not UTF-8 (redirected on Windows) print ? for what it cannot hold, and end no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


class PlainFormatter(click.HelpFormatter):
    """Writes `[default: 3]` where Typer hands over `\\[default: 3]`, escaped for a markup that is not used here.

    Attributes:
      arguments: help of arguments that have none of their own, by the name they are listed under.
    """

    arguments: Mapping[str, str] = {}

    def write_text(self, text: str) -> None:
        """Write paragraphs; the examples stand out."""
        super().write_text(_examples_indented(text))

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


def _examples_indented(text: str) -> str:
    r"""Indent examples by two where all lines but the first were indented alike, which `cleandoc` takes away.

    Example:
      >>> _examples_indented("Do it.\n\nkeyfed do"), _examples_indented("Do it.\n\n  keyfed do")
      ('Do it.\n\n  keyfed do', 'Do it.\n\n  keyfed do')
    """
    return re.sub(r"(?<=\n\n)(?=keyfed [a-z])", "  ", text)


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
