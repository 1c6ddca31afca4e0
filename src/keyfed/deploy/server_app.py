"""The server's program in a SuperLink: reads what was submitted, trains, prints events.

Flower starts it in a process of its own for each run, in the folder of what was submitted. The roster is the server's,
from the home the SuperLink was started in: who submits a run cannot choose it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from keyfed.deploy.enrolment import KnownKeys
from keyfed.deploy.processes import die_with
from keyfed.deploy.submit import event_line
from keyfed.deploy.superlink import HOME_VARIABLE, ServerHome
from keyfed.errors import KeyfedError
from keyfed.run.console import plural
from keyfed.wire.flower.server import FlowerTransport, GridMailbox, Unanswered
from keyfed.wire.roster import key_sum

RUN, VOCAB = "run.json", "vocab.json"
LOOK_SECONDS = 0.5


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
    from keyfed.wire.roster import Roster

    home = ServerHome(Path(os.environ[HOME_VARIABLE]))
    told = json.loads((folder / RUN).read_text("utf-8"))
    vocab = Vocab.from_json((folder / VOCAB).read_text("utf-8"))
    known = KnownKeys(home)
    transport = FlowerTransport(GridMailbox(grid), lambda key: known().get(key_sum(key)), run)
    wanted = min(int(told["clients"]), len(known()))
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
