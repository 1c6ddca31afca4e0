"""The server's SuperLink: TLS, node keys, its database on the disk.

`python -m keyfed.deploy.superlink PARENT …` is its process: Flower's SuperLink behind our gate.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from keyfed.deploy.certificates import CA_CERT, SERVER_CERT, SERVER_KEY, check_certificate
from keyfed.deploy.enrolment import KnownKeys, take_wish
from keyfed.deploy.homes import SERVER_ADDRESS, SERVER_VARIABLE, ServerHome
from keyfed.deploy.processes import (
    Processes,
    die_with,
    free_port,
    locked,
    opener,
    private_folder,
    python,
    refuse_taken,
    stop_at_signals,
    wait_until,
)
from keyfed.errors import DeployError
from keyfed.files import write_atomically
from keyfed.wire.doors import ConnectionLimits, Connections, most_connections
from keyfed.wire.doors import serve as serve_http
from keyfed.wire.flower.commands import environment, need_flower, write_connection
from keyfed.wire.flower.gate import Gate, node_proof
from keyfed.wire.flower.patches import run_superlink

NAME = "superlink"
READY_SECONDS = 60.0
TEND_SECONDS, DAY_SECONDS = 0.5, 86_400.0
DATABASE = "state.sqlite"


def start_superlink(processes: Processes, home: ServerHome, host: str, port: int) -> str:
    """Start the SuperLink of a home and return its address, as seen from this machine, once it answers.

    Args:
      port: 0 takes any that is free.

    Raises:
      DeployError: certificates are missing or expired, the port is taken, or it did not come up in time.
    """
    need_flower()
    for name in (CA_CERT, SERVER_CERT):
        check_certificate(home.path / name)
    refuse_taken(host, port)
    port = port or free_port(host)
    here = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
    write_connection(home.path, address, home.ca)
    (home.path / SERVER_ADDRESS).unlink(missing_ok=True)
    command = python(
        "keyfed.deploy.superlink", str(os.getpid()),
        "--host", host, "--port", str(port), "--ssl-ca-certfile", str(home.ca),
        "--ssl-certfile", str(home.path / SERVER_CERT), "--ssl-keyfile", str(home.path / SERVER_KEY),
        "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        "--database", str(home.path / DATABASE),
    )  # fmt: skip
    env = environment(home.path) | {SERVER_VARIABLE: str(home.path.resolve())}
    processes.start(NAME, command, env)
    if not wait_until(lambda: answers(address, home.ca), READY_SECONDS, lambda: processes.alive(NAME)):
        said = processes.log_tail(NAME, 600)
        processes.stop(NAME)
        raise DeployError(f"the SuperLink did not come up on {address}; the end of logs/{NAME}.log:\n{said}")
    write_atomically(home.path / SERVER_ADDRESS, json.dumps({"address": address}).encode())
    return address


def answers(address: str, ca: Path, seconds: float = 2.0) -> bool:
    """Whether a SuperLink answers at an address with a certificate of this authority."""
    try:
        with opener(ca).open(f"https://{address}/health", timeout=seconds) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Keep a second server out of a home."""
    taken = f"{home}: a server runs there already; stop it, or choose another --home"
    with locked(private_folder(home) / "server.lock", taken):
        yield


def serve(
    home: ServerHome,
    host: str,
    port: int,
    *,
    started: Callable[[str], Iterable[str]],
    tend: Callable[[], Iterable[str]],
    say: Callable[[str], None],
    more: Callable[[Processes], Iterable[str]] = lambda processes: (),
) -> None:
    """Run the SuperLink of a home until a signal ends it; once a day, say how long its certificate still holds.

    Args:
      started: what to say once it answers, from its address.
      more: starts what else belongs to the server; what it returns is said.
      tend: called twice a second; what it returns is said.

    Raises:
      DeployError: the SuperLink did not start, or has ended by itself.
    """
    _say_certificate(home, say)
    with only_one(home.path), stop_at_signals(), Processes(home.path) as processes:
        for line in started(start_superlink(processes, home, host, port)):
            say(line)
        for line in more(processes):
            say(line)
        checked = time.monotonic()
        while not (ended := processes.ended()):
            for line in tend():
                say(line)
            if time.monotonic() - checked > DAY_SECONDS:
                checked = time.monotonic()
                _say_certificate(home, say)
            time.sleep(TEND_SECONDS)
        what = "the SuperLink" if ended[0] == NAME else f'the server\'s process "{ended[0]}"'
        raise DeployError(f"{what} has ended; the end of its log:\n{processes.log_tail(ended[0], 600)}")


def _say_certificate(home: ServerHome, say: Callable[[str], None]) -> None:
    for line in check_certificate(home.path / SERVER_CERT):
        say(f"note: {line}")


def main() -> None:
    """Run `flower-superlink` behind our gate, with the arguments that follow the parent's pid; it dies with that."""
    os.umask(0o077)  # database and logs are the operator's alone
    if int(sys.argv[1]):
        die_with(int(sys.argv[1]))
    home = ServerHome(Path(os.environ[SERVER_VARIABLE]))
    known = KnownKeys(home)
    connections = Connections(replace(ConnectionLimits(), total=most_connections(ConnectionLimits().total)))
    run_superlink(
        sys.argv[2:],
        serve_http(connections),
        Gate,
        leave=lambda wish: take_wish(home, wish),
        proof=node_proof(lambda key: key in known()),
        proven=connections.proven,
    )


if __name__ == "__main__":
    main()
