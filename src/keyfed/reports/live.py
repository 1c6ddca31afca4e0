"""The live page of a server, for its owner: its runs, read from their folders for every request (`reports.seen`).

It answers on 127.0.0.1 alone, under an address that cannot be guessed. Other users of the machine can connect, and get
nothing without it. No cookie holds it: browsers send those to every port of 127.0.0.1. The page has no script.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs

from keyfed.errors import DeployError
from keyfed.reports.document import NONE, render, show, show_count, show_duration
from keyfed.reports.seen import LEAST, WAYS, Point, RunView, State, read_run
from keyfed.run.console import human_bytes, plural
from keyfed.wire.doors import HOST, Application, Guard, Receive, Scope, Send, answer, listen, local_server

TITLE = "Runs of this server"
SECONDS = 10  # between two reads of an open page
READY_SECONDS = 20.0
MOST_POINTS = 240  # of a curve
STYLE = "".join((Path(__file__).parent / "templates" / name).read_text("utf-8") for name in ("report.css", "live.css"))
POLICY = "; ".join(
    [
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class SubmittedRun(Protocol):
    """A run that was submitted to a server: its number, folder, when it began, whether its program works now."""

    @property
    def number(self) -> str: ...
    @property
    def out(self) -> Path: ...
    @property
    def began(self) -> float: ...
    @property
    def works(self) -> bool: ...


@contextmanager
def owner_page(runs: Callable[[], Sequence[SubmittedRun]], port: int) -> Iterator[str]:
    """Serve the page to this machine as long as this lasts; return its address.

    Args:
      runs: returns those that are there now, the newest first.
      port: 0 takes any that is free.

    Raises:
      ConfigError: the port is taken.
      DeployError: the page did not come up in time.
    """
    key = secrets.token_urlsafe(24)
    with listen(port, option="--page") as listening:
        taken = int(listening.getsockname()[1])
        hosts = {f"{name}:{taken}" for name in (HOST, "localhost")}
        server = local_server(Guard(keyed(key, lambda run, hold: live_page(runs(), run, hold)), hosts, HEADERS))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="page", daemon=True)
        thread.start()
        try:
            end = time.monotonic() + READY_SECONDS
            while not server.started and thread.is_alive() and time.monotonic() < end:
                time.sleep(0.02)
            if not server.started:
                raise DeployError(f"the page on port {taken} did not come up; --no-page starts the server without it")
            yield f"http://{HOST}:{taken}/{key}/"
        finally:
            server.should_exit = True
            thread.join(5.0)


def keyed(key: str, page: Callable[[str, bool], str]) -> Application:
    """Return an application that shows a page to who knows the key; one request at a time reads run folders.

    Args:
      page: from the number of a run, "" for the newest, and whether it holds still.
    """
    reading = asyncio.Lock()
    wanted = f"/{key}/".encode()

    async def show_page(scope: Scope, receive: Receive, send: Send) -> None:
        if not hmac.compare_digest(str(scope["path"]).encode("utf-8", "replace"), wanted):
            return await answer(send, 404, b"not found", (b"content-type", b"text/plain; charset=utf-8"))
        query = parse_qs(bytes(scope.get("query_string", b""))[:200].decode("latin-1"))
        async with reading:
            body = await asyncio.to_thread(page, query.get("run", [""])[0], "hold" in query)
        return await answer(send, 200, body.encode(), (b"content-type", b"text/html; charset=utf-8"))

    return show_page


def live_page(runs: Sequence[SubmittedRun], number: str = "", hold: bool = False) -> str:
    """Return the page as it is now.

    Args:
      runs: of the server, the newest first.
      number: of the run that is shown; another than those that are there shows the newest.
      hold: the page does not read itself again.
    """
    from markupsafe import Markup

    now = time.time()
    one = next((run for run in runs if run.number == number), runs[0] if runs else None)
    shown = None if one is None else _shown(one, read_run(one.out, one.works), now)
    title = TITLE if shown is None else f"{shown.name} · {TITLE}"
    others = [_Other(run.number, _named(run.out), _state(run), _when(run.began)) for run in runs]
    return render(
        "live.html", style=Markup(STYLE), title=title if len(title) < 120 else TITLE, run=shown,
        others=others if len(others) > 1 else [], now=_clock(now), seconds=None if hold else SECONDS,
    )  # fmt: skip


class _Tile(NamedTuple):
    """A number with its name and a note; `done` of `most` is drawn as a bar."""

    name: str
    value: str
    note: str = ""
    done: int = 0
    most: int = 0


class _Curve(NamedTuple):
    kind: str
    label: str
    path: str


class _Plot(NamedTuple):
    title: str
    alt: str
    high: str
    low: str
    first: str
    last: str
    curves: Sequence[_Curve]


class _Other(NamedTuple):
    number: str
    name: str
    state: State
    began: str


@dataclass(frozen=True, slots=True)
class _Shown:
    """A run in words."""

    number: str
    name: str
    state: State
    words: str
    place: str
    tiles: Sequence[_Tile]
    plots: Sequence[_Plot]
    tables: Sequence[tuple[str, Sequence[Sequence[str]]]]
    notes: Sequence[str]


def _shown(run: SubmittedRun, seen: RunView, now: float) -> _Shown:
    there = seen.state != "missing"
    plots = [_losses(seen.points), *([_epsilon(seen.points)] if seen.spent is not None else [])]
    tables = [("Clients", _clients(seen)), ("Refusals by reason", _reasons(seen)), ("Bytes", _bytes_table(seen))]
    return _Shown(
        number=run.number,
        name=_named(run.out),
        state=seen.state,
        words=_words(run, seen, now),
        place=str(seen.folder),
        tiles=_tiles(seen) if there else [],
        plots=[plot for plot in plots if plot is not None],
        tables=[(name, rows) for name, rows in tables if len(rows) > 1],
        notes=_notes(seen) if there else [],
    )


def _words(run: SubmittedRun, seen: RunView, now: float) -> str:
    """Say what the run is and when it last wrote anything."""
    sums = {True: "secure sums", False: "plain: the server sees every upload", None: ""}[seen.secure]
    what = [" on ".join(filter(None, (seen.method, seen.model))), sums, f"submitted {_when(run.began)}"]
    if seen.state == "missing":
        what.append("its folder is not there")
    elif seen.changed is None:
        what.append("nothing is written yet")
    else:
        ago = f"{show_duration(max(0.0, now - seen.changed))} ago"
        what.append(f"last written {ago if seen.state == 'running' else _when(seen.changed)}")
    return "; ".join(filter(None, what))


def _tiles(seen: RunView) -> list[_Tile]:
    most = seen.rounds or 0
    of = f"of {most:,}" if most else ""
    tiles = [_Tile("round", f"{seen.done:,} {of}".strip(), _wrong(seen), min(seen.done, most), most)]
    validated = [point for point in seen.points if point.perplexity is not None]
    if validated:
        last, best = validated[-1], min(validated, key=lambda point: point.perplexity or 0.0)
        least = "the least so far" if best is last else f"least {show(best.perplexity)} after {best.round:,}"
        test = "" if seen.tested is None else f"; test {show(seen.tested)}"
        note = f"validation after round {last.round:,}; {least}{test}"
        tiles.append(_Tile("perplexity", show(last.perplexity), note))
    trained = [point for point in seen.points if point.loss is not None]
    if trained:
        tiles.append(_Tile("training loss", f"{trained[-1].loss:.4g}", f"nats per token, round {trained[-1].round:,}"))
    if seen.last.called is not None:
        there = "" if seen.present is None else f"; {seen.present:,} connected"
        if seen.last.uploaded is None:
            tiles.append(_Tile("cohort", f"{seen.last.called:,}", "clients expected in a round"))
        else:
            uploaded = f"{seen.last.uploaded:,} of {seen.last.called:,}"
            tiles.append(_Tile("cohort", uploaded, f"uploads of the last round{there}"))
    if seen.spent is not None:
        budget = "no budget" if seen.spent.budget is None else f"of {seen.spent.budget:g}"
        delta = "" if seen.spent.delta is None else f", delta {seen.spent.delta:.2g}"
        epsilon = NONE if seen.spent.epsilon is None else f"{seen.spent.epsilon:.4g}"
        after = f"after round {seen.spent.round:,}; {plural(seen.spent.releases, 'release')}"
        tiles.append(_Tile("epsilon spent", epsilon, f"{budget}{delta}; {after}"))
    if seen.done:
        tiles.append(_Tile("moved", human_bytes(sum(seen.moved.values())), "bytes, both ways, all rounds"))
    if seen.seconds is not None:
        tiles.append(_Tile("time of a round", show_duration(seen.seconds), "median"))
    return tiles


def _wrong(seen: RunView) -> str:
    """Say how many rounds went wrong."""
    counts = {"abandoned": seen.abandoned, "with a closed sum": seen.closed, "rolled back": seen.rolled_back}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _clients(seen: RunView) -> list[list[str]]:
    words = {"called": "called", "reported": "reported", "uploaded": "uploaded", "refused": "refused or lost"}
    last, total = seen.last._asdict(), seen.all._asdict()
    rows = [[words[k], show_count(last[k]), show_count(total[k])] for k in words if total[k] is not None]
    if seen.shut_out:
        rows.append(["shut out", show_count(seen.shut_out), NONE])
    return [["", "last round", "all rounds"], *rows]


def _reasons(seen: RunView) -> list[list[str]]:
    rows = [[reason, show_count(count)] for reason, count in seen.reasons.items()]
    if seen.rare:
        rows.append([f"reasons of fewer than {LEAST} clients", show_count(seen.rare)])
    return [["reason", "refusals"], *rows]


def _bytes_table(seen: RunView) -> list[list[str]]:
    last, total = seen.moved_last, seen.moved
    rows = [[name, human_bytes(last[name]), human_bytes(total[name])] for name in WAYS]
    return [["", "last round", "all rounds"], *(rows if any(total.values()) else [])]


def _notes(seen: RunView) -> list[str]:
    lines = [
        "Nothing here is of a single client: counts are of all clients, a reason has a line of its own from "
        f"{LEAST} clients on, and so have loss, validation and time of a round. Bytes are of all clients together."
    ]
    if seen.private:
        lines.append("A private run tells neither who came nor what they scored; bytes are of its expected cohort.")
    if seen.withheld:
        lines.append(f"Left out, for too few clients: figures of {plural(seen.withheld, 'round')}.")
    if seen.damaged:
        lines.append(f"metrics.jsonl has {plural(seen.damaged, 'line')} that cannot be read; they are not counted.")
    if seen.unread:
        lines.append(f"metrics.jsonl is long: its first {human_bytes(seen.unread)} are not counted.")
    return lines


def _losses(points: Sequence[Point]) -> _Plot | None:
    trained = [(point.round, point.loss) for point in points if point.loss is not None]
    validated = [(point.round, point.valid) for point in points if point.valid is not None]
    return _plot("Loss by round, nats per token", {"training": trained, "validation": validated})


def _epsilon(points: Sequence[Point]) -> _Plot | None:
    spent = [(point.round, point.epsilon) for point in points if point.epsilon is not None]
    return _plot("Epsilon by round", {"epsilon spent": spent}, least=0.0)


def _plot(title: str, curves: Mapping[str, Sequence[tuple[int, float]]], least: float | None = None) -> _Plot | None:
    """Return curves in a square of 100 by 100; None where there is no point."""
    there = {name: points for name, points in curves.items() if points}
    if not there:
        return None
    rounds = [at for points in there.values() for at, _ in points]
    values = [value for points in there.values() for _, value in points]
    first, last = min(rounds), max(rounds)
    low, high = min(values) if least is None else min(least, *values), max(values)
    wide, tall = last - first or 1, high - low or 1.0
    kinds = dict(zip(curves, ("second", "first") if len(curves) > 1 else ("first",), strict=True))

    def path(points: Sequence[tuple[int, float]]) -> str:
        step = -(-len(points) // MOST_POINTS)
        kept = [*points[:-1:step], points[-1]]
        xy = [f"{100 * (at - first) / wide:.2f} {100 - 100 * (value - low) / tall:.2f}" for at, value in kept]
        return f"M{xy[0]}h.01" if len(xy) == 1 else "M" + "L".join(xy)

    drawn = [_Curve(kinds[name], f"{name} {points[-1][1]:.4g}", path(points)) for name, points in there.items()]
    alt = f"{title}: " + "; ".join(
        f"{name} from {points[0][1]:.4g} in round {points[0][0]} to {points[-1][1]:.4g} in round {points[-1][0]}"
        for name, points in there.items()
    )
    return _Plot(title, alt, f"{high:.3g}", f"{low:.3g}", f"round {first:,}", f"{last:,}", drawn)


def _state(run: SubmittedRun) -> State:
    """Return the state of a run that is listed, without reading its log."""
    if run.works:
        return "running"
    if os.path.exists(run.out / "result.json"):
        return "finished"
    return "stopped" if os.path.isdir(run.out) else "missing"


def _named(out: Path) -> str:
    return out.name[:80] or str(out)[:80]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
