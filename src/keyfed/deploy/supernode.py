"""The processes of a client: its training process and its SuperNode, started in order, watched, started again.

`python -m keyfed.deploy.supernode HOME SERVER PORT PARENT` is the SuperNode. Flower would unpack a program that the
server sends and run it, in a new process for each message. Here the messages of its tasks go to the ClientApp of the
installed package instead: what comes from the server is data, never code, and no process is started. The node's own
port answers only to who knows the secret in the client's home.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keyfed.deploy.consent import need_consent
from keyfed.deploy.homes import REFUSED, ClientHome, unmet
from keyfed.deploy.processes import Processes, die_with, free_port, python, unreachable, wait_until
from keyfed.errors import DeployError
from keyfed.wire.flower.commands import environment, need_flower
from keyfed.wire.flower.patches import run_supernode
from keyfed.wire.frames import SOCKET

RESIDENT, NODE = "resident", "node"
READY_SECONDS = 120.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
TEND_SECONDS = 0.5
REACH_SECONDS = 15.0  # between looks for a server that was not reached yet
STEADY_SECONDS = 30.0  # a process that ran this long did not fail at its start
UNKNOWN_KEY = ("NODE_ACTIVATION_FAILED", "activate", "No SuperNode found", "could not be activated")


def resident_command(home: Path) -> list[str]:
    """Return the command of a home's training process."""
    return python("keyfed.deploy.trainer", str(home), str(os.getpid()))


@dataclass
class Client:
    """A client on this machine.

    Args:
      resident: the command of the training process.
    """

    processes: Processes
    home: ClientHome
    resident: Sequence[str] = ()
    tag: str = ""  # in front of the process names, where several clients share one `Processes`
    say: Callable[[str], None] = lambda line: None
    _pauses: dict[str, float] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)
    _said: str = ""
    _refused: str = ""
    _reached: bool = False
    _looked: float = -math.inf

    def start(self) -> None:
        """Start the training process, wait for its socket, start the node.

        Raises:
          DeployError: nobody has agreed, or the training process did not come up.
        """
        need_flower()
        need_consent(self.home)
        (self.home.path / REFUSED).unlink(missing_ok=True)
        self.start_resident()
        self.wait_resident()
        self.start_node()

    def start_resident(self) -> None:
        """Start the training process."""
        command = list(self.resident) or resident_command(self.home.path)
        (self.home.path / SOCKET).unlink(missing_ok=True)  # of one that was killed: its being there means "ready"
        self._launch(RESIDENT, command)

    def wait_resident(self) -> None:
        """Wait until the training process listens."""
        name = self.tag + RESIDENT
        there = self.home.path / SOCKET
        if not wait_until(there.exists, READY_SECONDS, lambda: self.processes.alive(name)):
            said = self.processes.log_tail(name, 600)
            raise DeployError(f"the training process of {self.home.path} did not start; the end of its log:\n{said}")

    def start_node(self) -> None:
        """Start the SuperNode."""
        server = self.home.settings().server
        command = python("keyfed.deploy.supernode", str(self.home.path), server, str(free_port()), str(os.getpid()))
        self._launch(NODE, command)

    def _launch(self, what: str, command: Sequence[str]) -> None:
        self._began[what] = time.monotonic()
        self._due.pop(what, None)
        self.processes.start(self.tag + what, command, environment(self.home.path))

    def tend(self) -> None:
        """Start again what has ended, after a pause that doubles with each failure up to 15 s; call it often."""
        now = time.monotonic()
        self._tell_refused()
        self._look_for_server(now)
        for what in (RESIDENT, NODE):
            if self.processes.alive(self.tag + what):
                if now - self._began[what] > STEADY_SECONDS:
                    self._pauses[what] = FIRST_PAUSE
                continue
            if what not in self._due:
                pause = self._pauses.get(what, FIRST_PAUSE)
                self._pauses[what] = min(2 * pause, LONGEST_PAUSE)
                self._due[what] = now + pause
                self._explain(what)
            elif now >= self._due[what]:
                self.start_resident() if what == RESIDENT else self.start_node()

    def tend_forever(self) -> None:
        """Tend the client until a signal ends it."""
        while True:
            self.tend()
            time.sleep(TEND_SECONDS)

    def _look_for_server(self, now: float) -> None:
        """Say, until the server was reached for the first time, that it cannot be."""
        if self._reached or now - self._looked < REACH_SECONDS:
            return
        first, self._looked = self._looked == -math.inf, now
        server = self.home.settings().server
        why = unreachable(server)
        self._reached = why is None
        if why is not None and first:
            self.say(f"cannot reach {server} ({why}): is the server running, and its port open? Trying again")
        elif why is None and not first:
            self.say(f"{server} can be reached now")

    def _tell_refused(self) -> None:
        """Say, once, why the client takes no part in a run."""
        try:
            line = (self.home.path / REFUSED).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return
        if line and line != self._refused:
            self._refused = line
            self.say(f"took no part: {line}")

    def _explain(self, what: str) -> None:
        said = self.processes.log_tail(self.tag + what, 2000)
        line = f"the {'training process' if what == RESIDENT else 'node'} ended; starting it again (logs/{what}.log)"
        if what == NODE and any(word in said for word in UNKNOWN_KEY):
            line = (
                f"the server does not take this client's key: it is not enrolled yet (`keyfed enroll` wants "
                f"enrol-{self.home.settings().name}.json), or its last connection broke off within the last minute; "
                "trying again"
            )
        elif what == NODE and ("CERTIFICATE_VERIFY_FAILED" in said or "certificate verify failed" in said):
            line = "the server's certificate is not from the authority in ca.crt, or has expired; trying again"
        if line != self._said:
            self._said = line
            self.say(line)


WORK = ("train", "count")  # what takes a device's time
BEGINNINGS = ("hello", *WORK)  # what has begun is finished: others wait for it


def refusal(home: ClientHome, kind: str) -> str | None:
    """Return why a client takes no part now: it is paused, or (for training) a condition of its owner's is not met."""
    if kind in BEGINNINGS and home.paused():
        return "the client's owner has paused it"
    if kind in WORK:
        missing = unmet(home.settings().when)
        if missing:
            return f"not {' and not '.join(missing)}"
    return None


def main() -> None:
    """Run the node of a home."""
    home, server, port = ClientHome(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    if int(sys.argv[4]):
        die_with(int(sys.argv[4]))
    need_consent(home)
    from keyfed.wire.flower.client import make_app

    address = f"127.0.0.1:{port}"
    app = make_app(home.path, lambda kind: refusal(home, kind))
    arguments = [
        "--superlink", server, "--root-certificates", str(home.ca),
        "--auth-supernode-private-key", str(home.node_key), "--isolation", "process", "--host", "127.0.0.1",
        "--port", str(port), "--superexec-auth-secret-file", str(home.secret),
    ]  # fmt: skip
    run_supernode(arguments, address, home.secret.read_bytes(), app)


if __name__ == "__main__":
    main()
