"""What a person sees in the terminal: a progress bar with time left, one line a round, tables, on stderr or on
stdout. rich is imported by what draws, not here: a library call needs none of it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from keyfed.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status

T = TypeVar("T")


def human_bytes(count: float) -> str:
    """Write a number of bytes for people.

    Example:
      >>> human_bytes(14_208_404)
      '14.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def plural(count: float, what: str) -> str:
    """Write a number of things; all that are counted here take an s.

    Example:
      >>> plural(1, "round"), plural(0, "client"), plural(1200, "line"), plural(1.0, "minute")
      ('1 round', '0 clients', '1,200 lines', '1 minute')
    """
    return f"{count:{'g' if isinstance(count, float) else ','}} {what}{'' if count == 1 else 's'}"


def print_table(
    rows: Sequence[Sequence[str]], title: str | None = None, *, file: Any = None, narrow: bool = False
) -> None:
    """Print a table whose first row is the header; columns of numbers are set to the right.

    Args:
      narrow: for many columns: no lines between them, headers broken at blanks, numbers never.
    """
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    box, padding = (SIMPLE_HEAD, (0, 1, 0, 0)) if narrow else (HEAVY_HEAD, (0, 1))
    table = Table(title=title, title_justify="left", header_style="bold", box=box, padding=padding)
    for name, *cells in zip(*rows, strict=True):
        numbers = all(str(cell)[:1].isdigit() or str(cell) in "–-" for cell in cells)
        name = name.replace(" ", "\n") if narrow else name
        whole = narrow and numbers
        table.add_column(name, justify="right" if numbers else "left", overflow="fold", no_wrap=whole)
    for row in rows[1:]:
        table.add_row(*map(str, row))
    Console(file=file or sys.stdout, width=None if (file or sys.stdout).isatty() else 120).print(table)


def render_table(rows: Sequence[Sequence[str]], *, narrow: bool = False) -> str:
    """Return what `print_table` prints."""
    out = io.StringIO()
    print_table(rows, file=out, narrow=narrow)
    return out.getvalue()


def follow(items: Sequence[T], what: str) -> Iterable[T]:
    """Yield the items under a bar with the time left, on stderr; no bar where that is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bar(console, disable=not console.is_terminal) as bar:
        yield from bar.track(items, description=what)


def _bar(console: Console, *units: str, disable: bool = False) -> Progress:
    """Return a bar that shows what is done, how much of it, since when and how long it will take."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Left(ProgressColumn):
        """The time left; rich's own column needs two things that are done, and rounds can be long."""

        def render(self, task: Task) -> Text:
            done = task.completed - task.fields.get("before", 0)
            return Text(f"left {time_left(task.elapsed or 0.0, done, task.remaining or 0.0)}", "progress.remaining")

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, units),
        TimeElapsedColumn(), Left(), console=console, transient=True, disable=disable,
    )  # fmt: skip


def time_left(elapsed: float, done: float, remaining: float) -> str:
    """Write how long what remains will take, at the pace of what is done.

    Example:
      >>> time_left(3.0, 0, 5), time_left(3.0, 1, 5), time_left(100.0, 4, 400), time_left(9.0, 5, 0)
      ('-:--:--', '0:00:15', '2:46:40', '0:00:00')
    """
    if not done:
        return "-:--:--"
    seconds = round(elapsed * remaining / done)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class Listener(Protocol):
    """What follows a run: a progress bar, or a log."""

    def say(self, line: str) -> None:
        """A line of explanation."""

    def start(self, what: str, rounds: int, done: int) -> None:
        """Rounds begin; `done` of them lie in a checkpoint."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is over; `record` is its line of metrics.jsonl."""


def within(listener: object, what: str) -> None:
    """Say what a round is doing now, to a listener that shows it; most have no method for that."""
    shown = getattr(listener, "within", None)
    if shown is not None:
        shown(what)


class Silent:
    """A listener that does not listen."""

    def say(self, line: str) -> None: ...

    def start(self, what: str, rounds: int, done: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None: ...


class Observer:
    """Follows a run for a function of a round's record, or an object with some of a listener's methods.

    Args:
      first: what also follows the run, and gets everything before it; progress, as a rule.
    """

    def __init__(self, heard: object, first: Listener) -> None:
        names = [name for name in ("say", "start", "round") if callable(getattr(heard, name, None))]
        found = {name: getattr(heard, name) for name in names} or ({"round": heard} if callable(heard) else {})
        if not found:
            raise ConfigError(
                f"listener is a {type(heard).__name__}; expected a function of a round's record, or an object with "
                "some of the methods say(line), start(what, rounds, done) and round(record)"
            )
        self._first, self._found = first, found

    def say(self, line: str) -> None:
        """Pass a line on."""
        self._first.say(line)
        self._found.get("say", _nothing)(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Pass a beginning on."""
        self._first.start(what, rounds, done)
        self._found.get("start", _nothing)(what, rounds, done)

    def within(self, what: str) -> None:
        """Pass on what a round is doing."""
        within(self._first, what)

    def round(self, record: dict[str, Any]) -> None:
        """Pass a round on."""
        self._first.round(record)
        self._found.get("round", _nothing)(record)


def _nothing(*heard: object) -> None: ...


@contextmanager
def followed(listener: object = None, *, quiet: bool = False) -> Iterator[Listener]:
    """Yield what follows a run from Python: progress on stderr, and the caller's function or object.

    A whole listener (say, start and round) takes the place of progress.
    """
    if all(callable(getattr(listener, name, None)) for name in ("say", "start", "round")):
        yield cast(Listener, listener)
        return
    narrator = None if quiet else _narrator()
    if narrator is None:
        yield Silent() if listener is None else Observer(listener, Silent())
        return
    with narrator:
        yield narrator if listener is None else Observer(listener, narrator)


def _narrator() -> Narrator | None:
    """Return what shows progress; None where only what training needs is installed."""
    try:
        return Narrator()
    except ImportError:
        return None


def _privacy_of(account: Mapping[str, Any]) -> str:
    """What a private round says in the place of a training loss, which would tell of the clients."""
    return f"epsilon {account['epsilon']:.3f} {account['verdict']}  clip {account['clip']:.3g}"


class Narrator:
    """Follows a run on stderr: explanations, a bar with the time left, one line a round."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._what = ""
        self._waiting: Status | None = None

    @property
    def is_watched(self) -> bool:
        """Whether a person looks on."""
        return self._console.is_terminal

    def wait(self, what: str) -> None:
        """Show that something is being done, until lines or a bar say more; nothing where no person looks."""
        if self.is_watched and self._bar is None:
            if self._waiting is None:
                self._waiting = self._console.status(what)
                self._waiting.start()
            self._waiting.update(what)

    def say(self, line: str) -> None:
        """Print a line of explanation."""
        (self._bar.console if self._bar else self._console).print(line, markup=False)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Begin a bar over the rounds."""
        self.stop()
        self._what = what
        self._bar = _bar(self._console, "rounds")
        if self._console.is_terminal:
            self._bar.start()
        self._task = self._bar.add_task(what, total=rounds, completed=done, before=done)

    def within(self, what: str) -> None:
        """Show what the round is doing, next to its bar; after the last round, next to a spinner."""
        if self._bar is None:
            self.wait(what)
        else:
            self._bar.update(self._task, description=f"{self._what}: {what}")

    def round(self, record: dict[str, Any]) -> None:
        """Print the round's line and move the bar."""
        valid = record.get("valid")
        private = record.get("privacy")
        line = f"round {record['round']:>4}  "
        line += f"train {record['loss']:.3f} nats" if not private else _privacy_of(private)
        if valid and valid.get("tokens") == 0:
            line += "  valid perplexity –  top-1 –  top-3 –"
        elif valid:
            line += (
                f"  valid perplexity {valid['perplexity']:8.1f}  top-1 {valid['top1']:.1%}  top-3 {valid['top3']:.1%}"
            )
        came = "" if private else f"  {len(record['contributors'])}/{record['cohort']} clients"
        line += came + ("" if record["seconds"] is None else f"  {record['seconds']:.1f} s")
        if record.get("abandoned"):
            line += "  abandoned"
        if "rolled_back" in record:
            line += f"  rolled back to round {record['rolled_back']}"
        if "halved" in record:
            line += f"  step halved: {plural(record['halved'][0], 'time')} so far, the server's {record['halved'][1]}"
        if record["refused"]:
            reasons = sorted(set(record["refused"].values()))
            line += f"  refused {len(record['refused'])}: {', '.join(reasons)}"
        self.say(line)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=self._what)

    def stop(self) -> None:
        """Take the bar away, or the spinner."""
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None
        if self._bar is not None:
            if self._console.is_terminal:  # elsewhere it was not started, and stopping would print an empty line
                self._bar.stop()
            self._bar = None

    def __enter__(self) -> Narrator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show that something long is being done: a spinner on a terminal, a line elsewhere.

    Args:
      quiet: no line elsewhere.
    """
    with Narrator() as narrator:
        if narrator.is_watched or quiet:
            narrator.wait(what)
        else:
            narrator.say(what)
        yield
