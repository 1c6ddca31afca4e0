"""What the owner of a server sees of a run: its folder, read anew each time, and nothing of any single client.

Read are run.toml, metrics.jsonl, result.json, the ledger's terms, and of the newest checkpoint the line of the last
round, which waits there for its validation. Whatever is missing or damaged is left out. Names of clients are counted
and forgotten. A reason has a number of its own only where at least `LEAST` clients were refused for it. A round shows
its loss, validation and time only where at least as many stand behind them.

Nothing here needs tensors: a server that shows its runs stays small.
"""

from __future__ import annotations

import os
import re
import stat
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from keyfed.federated.reasons import Reason
from keyfed.files import parse_json
from keyfed.reports.document import finite

LEAST = 3  # clients behind a figure: as few as a client's secure sum hides among by default
MOST_BYTES = 64 << 20  # of metrics.jsonl; of a longer one its end
MOST_LINE = 8 << 20  # bytes of a line
MOST_FILE = 8 << 20  # bytes of any other file
HIGHEST = 1e30  # a figure beyond it is off the scale
MOST = 10**15  # a number that counts something is no larger
REASONS = frozenset(get_args(Reason))
MANIFEST = re.compile(r"round-\d{6,9}\.json")
WAYS = ("down", "up", "control")

State = Literal["running", "finished", "stopped", "missing"]


class Turnout(NamedTuple):
    """How many clients were called, reported, sent an upload that was taken, and were refused or lost."""

    called: int | None = None
    reported: int | None = None
    uploaded: int | None = None
    refused: int | None = None


UNKNOWN = Turnout()


class Point(NamedTuple):
    """Figures of a round: loss in training and on held-out text, nats per token; perplexity; ε up to it."""

    round: int
    loss: float | None = None
    valid: float | None = None
    perplexity: float | None = None
    epsilon: float | None = None


class Spent(NamedTuple):
    """What a ledger says: ε up to a round, δ, the budget, releases."""

    epsilon: float | None
    round: int
    delta: float | None
    budget: float | None
    releases: int


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as its owner sees it.

    Attributes:
      rounds: planned.
      done: the last round.
      present: clients that were connected when it began.
      last, all: the cohort of that round, and of all rounds added up.
      reasons: refusals by reason; `rare` those for which fewer than `LEAST` clients were refused.
      moved, moved_last: bytes by direction, of all rounds and of the last.
      tested: perplexity on test text, of a finished run.
      seconds: of the median round.
      abandoned, closed, rolled_back: rounds that taught nothing, whose secure sum stayed closed, that were undone.
      withheld: rounds with figures that too few clients stand behind.
      damaged: lines of metrics.jsonl that cannot be read.
      unread: bytes of metrics.jsonl before those that were read.
      changed: when the log or a checkpoint was last written, seconds since 1970.
    """

    folder: Path
    state: State
    method: str = ""
    model: str = ""
    secure: bool | None = None
    private: bool = False
    rounds: int | None = None
    done: int = 0
    present: int | None = None
    last: Turnout = UNKNOWN
    all: Turnout = UNKNOWN
    reasons: Mapping[str, int] = field(default_factory=dict)
    rare: int = 0
    shut_out: int = 0
    moved: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    moved_last: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    points: tuple[Point, ...] = ()
    tested: float | None = None
    seconds: float | None = None
    spent: Spent | None = None
    abandoned: int = 0
    closed: int = 0
    rolled_back: int = 0
    withheld: int = 0
    damaged: int = 0
    unread: int = 0
    changed: float | None = None


def read_run(folder: Path, works: bool) -> RunView:
    """Read a run's folder; it may be missing, half written or hostile.

    Args:
      works: whether the run's program works now.
    """
    if not os.path.isdir(folder):  # `Path.is_dir` raises where it may not look
        return RunView(folder, "running" if works else "missing")
    config, result = _toml(folder / "run.toml"), _object(folder / "result.json")
    model, train, secure = (config.get(name) for name in ("model", "train", "secure"))
    log = _Log()
    log.read(folder / "metrics.jsonl")
    waiting = _waiting(folder / "checkpoint", log.done)
    if waiting is not None:
        log.take(waiting)
    log.end()
    state: State = "running" if works else "finished" if result else "stopped"
    many = log.present is not None and log.present >= LEAST
    return RunView(
        folder, state, method=_name(config.get("method")), model=_name(model),
        secure=secure.get("on") is True if isinstance(secure, dict) else None,
        private=os.path.exists(folder / "ledger.jsonl"),
        rounds=whole(train.get("rounds")) if isinstance(train, dict) else None,
        done=log.done, present=log.present, last=log.last, all=log.cohorts(), reasons=log.named(), rare=log.rare(),
        shut_out=log.shut_out, moved=dict(log.moved), moved_last=dict(log.moved_last), points=tuple(log.points),
        tested=_inside(result, "test", "perplexity") if many else None,
        seconds=statistics.median_high(log.seconds) if log.seconds else None,
        spent=_spent(folder, log.points, result), abandoned=log.abandoned, closed=log.closed,
        rolled_back=log.rolled_back, withheld=log.withheld, damaged=log.damaged, unread=log.unread,
        changed=_changed(folder),
    )  # fmt: skip


def whole(value: Any) -> int | None:
    """Return a number that counts something; None for anything else.

    Example:
      >>> whole(3), whole(True), whole(-1), whole(2.5), whole("3"), whole(10**400)
      (3, None, None, None, None, None)
    """
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


class _Log:
    """The lines of metrics.jsonl, taken one after the other: sums, and no name of a client when it is read."""

    def __init__(self) -> None:
        self.done = self.shut_out = self.abandoned = self.closed = self.rolled_back = 0
        self.withheld = self.damaged = self.unread = 0
        self.present: int | None = None
        self.last, self.points = UNKNOWN, list[Point]()
        self.seconds, self.moved_last = list[float](), dict.fromkeys(WAYS, 0)
        self.moved = Counter(self.moved_last)
        self._sums, self._known = Counter[str](), set[str]()
        self._refusals, self._clients = Counter[str](), defaultdict[str, set[str]](set)
        self._before: Point | None = None  # its validation is of the clients of the round after it

    def read(self, path: Path) -> None:
        """Take the lines of a file; of a long one those at its end."""
        with _opened(path) as file:
            if file is None:
                return
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                file.seek(size - MOST_BYTES)
                file.readline(MOST_LINE)
                self.unread = file.tell()
            inside = False  # of a line that is too long
            while file.tell() < size and (line := file.readline(MOST_LINE)):
                ends = line.endswith(b"\n")
                if ends and not inside:
                    self._line(line)
                elif len(line) == MOST_LINE and not inside:  # a shorter one without an end is being written now
                    self.damaged += 1
                inside = not ends

    def _line(self, line: bytes) -> None:
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and whole(record.get("round")):
            self.take(record)
        else:
            self.damaged += 1

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the line of a round."""
        self.done = max(self.done, whole(record.get("round")) or 0)
        refused = [pair for key in ("refused", "lost") for pair in _pairs(record.get(key))]
        known = isinstance(record.get("refused"), dict) or isinstance(record.get("lost"), dict)
        contributors = record.get("contributors")
        uploaded = len(contributors) if isinstance(contributors, list) else None
        called, reported = whole(record.get("cohort")), whole(record.get("reported"))
        self.last = Turnout(called, reported, uploaded, len(refused) if known else None)
        for name, number in self.last._asdict().items():
            if number is not None:
                self._known.add(name)
                self._sums[name] += number
        for client, reason in refused:
            self._refusals[reason] += 1
            self._clients[reason].add(client)
        self.present = whole(record.get("present"))
        self.shut_out = len(_pairs(record.get("shut_out")))
        traffic = record.get("traffic")
        self.moved_last = {
            direction: whole(traffic.get(direction)) or 0 if isinstance(traffic, dict) else 0 for direction in WAYS
        }
        self.moved.update(self.moved_last)
        self.abandoned += record.get("abandoned") is True
        self.closed += record.get("secure_failed") is not None
        self.rolled_back += record.get("rolled_back") is not None
        self._figures(record, uploaded)

    def _figures(self, record: Mapping[str, Any], uploaded: int | None) -> None:
        """Take a round's figures where enough clients stand behind them."""
        self._settle(uploaded)
        many = uploaded is not None and uploaded >= LEAST
        loss, seconds = _inside(record, "loss"), _inside(record, "seconds")
        self.withheld += not many and (loss is not None or seconds is not None)
        if many and seconds is not None:
            self.seconds.append(seconds)
        self._before = Point(
            whole(record.get("round")) or 0,
            loss if many else None,
            _inside(record, "valid", "nats"),
            _inside(record, "valid", "perplexity"),
            _inside(record, "privacy", "epsilon"),
        )

    def _settle(self, validated: int | None) -> None:
        """Keep the round before; its validation where enough clients of this round stand behind it."""
        before, self._before = self._before, None
        if before is None:
            return
        if before.valid is not None and (validated is None or validated < LEAST):
            self.withheld += 1
            before = before._replace(valid=None, perplexity=None)
        self.points.append(before)

    def end(self) -> None:
        """Take no more lines: the last model is validated by everybody who was connected."""
        self._settle(self.present)

    def cohorts(self) -> Turnout:
        """Return the cohorts of all rounds, added up; None for what no round says."""
        return Turnout(**{name: self._sums[name] if name in self._known else None for name in Turnout._fields})

    def named(self) -> dict[str, int]:
        """Return refusals by reason, the most frequent first, where enough clients were refused for it."""
        many = {reason for reason, clients in self._clients.items() if len(clients) >= LEAST}
        return {reason: count for reason, count in self._refusals.most_common() if reason in many & REASONS}

    def rare(self) -> int:
        """Return how many refusals are counted under no reason."""
        return self._refusals.total() - sum(self.named().values())


def _pairs(found: Any) -> list[tuple[str, str]]:
    """Return clients and reasons of a line; the length alone where reasons are not texts."""
    return [(str(who), str(why)) for who, why in found.items()] if isinstance(found, dict) else []


def _inside(found: Mapping[str, Any] | None, *names: str) -> float | None:
    """Return a number inside objects that can be drawn."""
    value: Any = found
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    number = finite(value)
    return None if number is None or abs(number) > HIGHEST else number


def _waiting(folder: Path, done: int) -> dict[str, Any] | None:
    """Return the line of the round after `done`, which waits in the newest checkpoint."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if MANIFEST.fullmatch(entry.name))
    except OSError:
        return None
    found = _object(folder / names[-1]).get("pending") if names else None
    return found if isinstance(found, dict) and (whole(found.get("round")) or 0) > done else None


def _spent(folder: Path, points: list[Point], result: Mapping[str, Any]) -> Spent | None:
    """Return what the ledger and the rounds say of ε; None without a ledger."""
    releases, terms = -1, dict[str, Any]()
    with _opened(folder / "ledger.jsonl") as file:
        if file is None:
            return None
        while file.tell() < MOST_BYTES and (line := file.readline(MOST_LINE)):
            if releases < 0:
                terms = _mapping(_parsed(line).get("terms"))
            releases += 1
    latest = next((point for point in reversed(points) if point.epsilon is not None), None)
    final = _inside(result, "privacy", "pld")
    at = max((point.round for point in points), default=0)
    epsilon, round = (
        (final, at) if final is not None else (None, 0) if latest is None else (latest.epsilon, latest.round)
    )
    return Spent(epsilon, round, _inside(terms, "delta"), _inside(terms, "budget"), max(0, releases))


def _changed(folder: Path) -> float | None:
    """Return when the run was last written to."""
    times = []
    for path in (folder / "metrics.jsonl", folder / "checkpoint", folder / "result.json", folder / "run.toml"):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _name(found: Any) -> str:
    """Return the name of a method or a model, as run.toml has it."""
    value = found.get("name") if isinstance(found, dict) else found
    return value[:64] if isinstance(value, str) else ""


def _mapping(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return _mapping(parse_json(data))
    except ValueError:
        return {}


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    return _parsed(_bytes(path))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError):  # of text that is no TOML, and of bytes that are no text
        return {}


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | None]:
    """Open a file to read; None where there is none, or a folder, pipe or device, which would keep its reader."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError:
        yield None
        return
    if stat.S_ISREG(os.fstat(handle).st_mode):
        with os.fdopen(handle, "rb") as file:
            yield file
    else:
        os.close(handle)
        yield None


def _bytes(path: Path) -> bytes:
    with _opened(path) as file:
        return b"" if file is None or os.fstat(file.fileno()).st_size > MOST_FILE else file.read(MOST_FILE)
