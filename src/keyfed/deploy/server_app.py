"""A run in a SuperLink: what is submitted, how it is followed, and the program that runs there.

What is submitted is a folder of a few files: the run's configuration, its vocabulary, and two lines that name the
program installed on the server. `flwr run --stream` carries it there and brings back what the program prints; its
lines that begin with `keyfed-event` are the run's rounds.

Flower starts the program in a process of its own for each run, in the folder of what was submitted. The roster is the
server's, from the home the SuperLink was started in: who submits a run cannot choose it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfed.deploy.enrolment import KnownKeys, flwr
from keyfed.deploy.homes import SERVER_VARIABLE, ServerHome, home_option
from keyfed.deploy.processes import die_with, unreachable
from keyfed.deploy.runs import noted
from keyfed.deploy.superlink import answers
from keyfed.errors import DeployError, KeyfedError
from keyfed.files import BROKEN, parse_json, write_atomically
from keyfed.run.console import plural
from keyfed.wire.flower.commands import CONNECTION, environment, need_flower
from keyfed.wire.joined import WEB_SOCKET, Joined, WebTransport
from keyfed.wire.roster import Roster, key_sum

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from keyfed.config.load import Config
    from keyfed.run.console import Listener

PREFIX = "keyfed-event "
PACKAGE = "keyfed_run"
APP_CAP = 9_500_000  # Flower takes 10 MB
SERVER = "from keyfed.deploy.server_app import make_app\n\napp = make_app(__file__)\n"
CLIENT = "from keyfed.wire.flower import client\n\napp = client.app\n"  # wanted; ours run their own
PROJECT = f"""\
[project]
name = "keyfed-run"
version = "1.0.0"
description = "A run of Keyfed"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "keyfed"

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server:app"
clientapp = "{PACKAGE}.client:app"

[tool.flwr.app.config]
"""
BOX = re.compile("[\u2500-\u257f]")  # frames that flwr draws around its errors
STARTED = re.compile(r"started run (\d+)")
RUN, VOCAB = "run.json", "vocab.json"
LOOK_SECONDS = 0.5


def run_files(
    config: Config,
    vocab: str,
    out: Path,
    *,
    clients: int,
    wait: float,
    resume: bool,
    raw_vocabulary: bool = False,
    own: float | None = None,
) -> dict[str, bytes]:
    """Return the files of a submission.

    Args:
      raw_vocabulary: the vocabulary was made from the clients' text.
      own: share of the clients' lines that are in the base model's own text, where it was measured.
    """
    from keyfed.config.load import to_document

    told = {
        "config": to_document(config), "out": str(out.resolve()), "resume": resume,
        "clients": clients, "wait": wait, "raw_vocabulary": raw_vocabulary, "own": own,
    }  # fmt: skip
    return {RUN: json.dumps(told).encode(), VOCAB: vocab.encode()}


def build_app(folder: Path, files: Mapping[str, bytes], server: str = SERVER) -> None:
    """Write the folder that is submitted.

    Args:
      files: what the server's program reads beside itself (`.json` or `.toml`).
      server: the program's few lines.
    """
    inside = folder / PACKAGE
    inside.mkdir(parents=True)
    for name, data in files.items():
        if Path(name).suffix not in (".json", ".toml"):
            raise DeployError(f"{name}: Flower carries .json and .toml files only")
        write_atomically(inside / name, data, durable=False)
    size = sum(len(data) for data in files.values())
    if size > APP_CAP:
        raise DeployError(f"configuration and vocabulary have {size:,} bytes; Flower carries {APP_CAP:,} at most")
    for name, text in (("__init__.py", ""), ("server.py", server), ("client.py", CLIENT)):
        write_atomically(inside / name, text.encode(), durable=False)
    write_atomically(folder / "pyproject.toml", PROJECT.encode(), durable=False)


def event_line(event: str, value: Any) -> str:
    """Return an event as the line that the server's program prints; numbers that JSON has not are null."""
    return f"{PREFIX}{json.dumps({'event': event, 'value': _finite(value)}, allow_nan=False)}\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def parse_line(line: str) -> tuple[str, Any] | None:
    """Return the event in a line of output, or None where there is none."""
    _, found, text = line.partition(PREFIX)
    if not found:
        return None
    try:
        event = parse_json(text)
        return str(event["event"]), event["value"]
    except BROKEN:
        return None


def follow(lines: Iterator[str], listener: Listener) -> Any:
    """Hand the events in lines of output to a listener and return the run's result.

    Raises:
      DeployError: the run failed, or its output ended without a result.
    """
    result, rest = None, ""
    for line in lines:
        found = parse_line(line)
        if found is None:
            rest = f"{rest} {' '.join(BOX.sub(' ', line).split())}"[-400:]
            continue
        event, value = found
        if event == "say":
            listener.say(str(value))
        elif event == "start":
            what, rounds, done = _shaped(event, value, [str, int, int])
            listener.start(what, rounds, done)
        elif event == "round":
            (record,) = _shaped(event, [value], [dict])
            loss = record.get("loss")
            listener.round({**record, "loss": math.nan if loss is None else _shaped(event, [loss], [int | float])[0]})
        elif event == "error":
            raise DeployError(str(value))
        elif event == "result":
            result = value
    if result is None:
        raise Unfinished(f"the run ended without a result; the end of its output: {rest.strip() or 'none'}")
    return result


def _shaped(event: str, values: Any, kinds: Sequence[Any]) -> Any:
    """Return the values of an event if they are of these kinds."""
    if not isinstance(values, list) or len(values) != len(kinds) or not all(map(isinstance, values, kinds)):
        raise DeployError(f'the run printed a damaged event "{event}"; look at the server\'s logs')
    return values


class Unfinished(DeployError):
    """A run whose output ended before its result: the server was stopped, or its program died."""


def submit(
    home: ServerHome, folder: Path, listener: Listener, address: str | None = None, connection: Path | None = None
) -> Any:
    """Submit a folder, follow the run and return its result; Ctrl-C stops the run on the server too.

    Args:
      connection: folder that `write_connection` has written to; the server's own by default.

    Raises:
      DeployError: the server does not answer, or the run failed.
      Unfinished: the server went away; the run goes on from its checkpoint when it is submitted again to resume.
    """
    need_flower()
    address = address or home.address()
    if not answers(address, home.ca, 10.0):
        if unreachable(address) is None:
            raise DeployError(
                f"something listens at {address}, but it is not the server of {home.path}; name the folder of the one "
                "that runs: --federation FOLDER (its --home)"
            )
        raise DeployError(f"no server answers at {address}; start it: keyfed server{home_option(home.path)}")
    place = home if connection is None else ServerHome(connection)
    command = ["flwr", "run", str(folder), CONNECTION, "--stream"]
    run: list[str] = []
    process = subprocess.Popen(
        command, env={**environment(place.path), "PYTHONUNBUFFERED": "1", "COLUMNS": "1000"}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        errors="replace",
    )  # fmt: skip
    try:
        return follow(_lines(process, run), listener)
    except KeyboardInterrupt:
        if run:
            with contextlib.suppress(DeployError):  # it was asked; that it could not be is not why we end
                flwr(place)([["stop", run[0], CONNECTION]])
        raise
    finally:
        _end(process)


def _lines(process: subprocess.Popen[str], run: list[str]) -> Iterator[str]:
    """Yield the lines of a process as they come and note the number of the run; end it when nobody reads on."""
    box: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            box.put(line)
        box.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                line = box.get(timeout=1.0)
            except queue.Empty:
                continue  # so that Ctrl-C is noticed
            if line is None:
                return
            found = STARTED.search(line)
            if found and not run:
                run.append(found[1])
            yield line
    finally:
        _end(process)
        reader.join(5.0)
        if process.stdout is not None:
            process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)


class Printer:
    """A listener that prints events for whoever submitted the run."""

    def say(self, line: str) -> None:
        """A line of explanation."""
        emit("say", line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Rounds begin."""
        emit("start", [what, rounds, done])

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""
        emit("round", record)


def emit(event: str, value: Any) -> None:
    """Print one event, in one piece."""
    sys.stdout.write(event_line(event, value))
    sys.stdout.flush()


def make_app(file: str) -> ServerApp:
    """Return the ServerApp of what was submitted beside `file`."""
    from flwr.serverapp import ServerApp

    from keyfed.wire.flower.server import Unanswered

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        # A SuperLink that was killed comes back while this process still tries to reach it, and holds the run's folder.
        die_with(os.getppid())
        try:
            emit("result", train_submitted(Path(file).parent, grid, str(context.run_id), Printer()))
        except Unanswered:
            raise  # no "error", which is final: the run is unfinished, and can be submitted again
        except KeyfedError as e:
            emit("error", str(e))

    return app


def train_submitted(folder: Path, grid: Grid, run: str, listener: Printer) -> Any:
    """Train what was submitted and return its result."""
    from keyfed.config.load import config_from
    from keyfed.run.remote.train import train_deployed
    from keyfed.text.vocab import Vocab
    from keyfed.wire.flower.server import FlowerTransport, GridMailbox

    home = ServerHome(Path(os.environ[SERVER_VARIABLE]))
    told = json.loads((folder / RUN).read_text("utf-8"))
    vocab = Vocab.from_json((folder / VOCAB).read_text("utf-8"))
    known = KnownKeys(home)
    nodes = FlowerTransport(GridMailbox(grid), lambda key: known().get(key_sum(key)), run)
    transport = Joined(nodes, WebTransport(home.path / WEB_SOCKET), lambda name: known.page(name) is not None)
    wanted = min(int(told["clients"]), len(known()))
    with noted(home, run, Path(told["out"])):
        wait_for(transport.clients, wanted, float(told["wait"]), listener.say)
        config = config_from(told["config"], RUN)
        return train_deployed(
            config, vocab, Path(told["out"]), transport, Roster(home.roster), listener,
            resume=bool(told["resume"]), raw_vocabulary=told.get("raw_vocabulary") is True, own=_share(told.get("own")),
        )  # fmt: skip


def _share(found: Any) -> float | None:
    """Return a share between 0 and 1 of a submission, None where it has none."""
    return float(found) if isinstance(found, int | float) and 0 <= found <= 1 else None


def wait_for(
    clients: Callable[[], Any], count: int, seconds: float, say: Callable[[str], None], look: float = LOOK_SECONDS
) -> int:
    """Wait until `count` clients are connected, at most so long; return how many are."""
    end, found, said = time.monotonic() + seconds, len(clients()), -1
    while found < count and time.monotonic() < end:
        if found != said:
            say(f"{found} of {count} clients are connected; waiting up to {seconds:.0f} s for the others")
            said = found
        time.sleep(look)
        found = len(clients())
    say(f"{plural(found, 'client')} {'is' if found == 1 else 'are'} connected")
    return found
