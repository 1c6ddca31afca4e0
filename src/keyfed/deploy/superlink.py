"""The server's SuperLink: TLS, node keys, its database on the disk."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keyfed.deploy.certificates import CA_CERT, SERVER_CERT, SERVER_KEY, check_certificate
from keyfed.deploy.processes import (
    Processes,
    free_port,
    locked,
    private_folder,
    python,
    stop_at_signals,
    wait_until,
)
from keyfed.errors import DeployError
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.wire.flower.commands import environment, need_flower, write_connection

NAME = "superlink"
READY_SECONDS = 60.0
TEND_SECONDS, DAY_SECONDS = 0.5, 86_400.0
HOME_VARIABLE = "KEYFED_SERVER_HOME"
DATABASE = "state.sqlite"
ADDRESS = "address.json"


@dataclass(frozen=True, slots=True)
class ServerHome:
    """The folder of a server: certificates, roster, database, logs."""

    path: Path

    @property
    def ca(self) -> Path:
        """The certificate that clients get."""
        return self.path / CA_CERT

    @property
    def roster(self) -> Path:
        """Who is enrolled."""
        return self.path / "roster.json"

    def address(self) -> str:
        """Return where the SuperLink of this home listens, seen from this machine."""
        try:
            found = read_json(self.path / ADDRESS)
            return str(found["address"])
        except FileNotFoundError:
            raise DeployError(f"{self.path}: no server was started there yet; `keyfed server` does") from None
        except (OSError, *BROKEN) as e:
            raise DeployError(f"{self.path / ADDRESS} cannot be read: {e}") from None


def default_home() -> Path:
    """Return the server's home: KEYFED_SERVER_HOME, or ~/.keyfed/server."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".keyfed" / "server")


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
    port = port or free_port(host)
    here = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
    write_connection(home.path, address, home.ca)
    (home.path / ADDRESS).unlink(missing_ok=True)
    command = python(
        "keyfed.deploy.superlink_process", str(os.getpid()),
        "--host", host, "--port", str(port), "--ssl-ca-certfile", str(home.ca),
        "--ssl-certfile", str(home.path / SERVER_CERT), "--ssl-keyfile", str(home.path / SERVER_KEY),
        "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        "--database", str(home.path / DATABASE),
    )  # fmt: skip
    env = environment(home.path) | {HOME_VARIABLE: str(home.path.resolve())}
    processes.start(NAME, command, env)
    if not wait_until(lambda: answers(address, home.ca), READY_SECONDS, lambda: processes.alive(NAME)):
        said = processes.log_tail(NAME, 600)
        processes.stop(NAME)
        raise DeployError(f"the SuperLink did not come up on {address}; the end of logs/{NAME}.log:\n{said}")
    write_atomically(home.path / ADDRESS, json.dumps({"address": address}).encode())
    return address


def answers(address: str, ca: Path, seconds: float = 2.0) -> bool:
    """Whether a SuperLink answers at an address with a certificate of this authority."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(f"https://{address}/health", timeout=seconds) as reply:
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
) -> None:
    """Run the SuperLink of a home until a signal ends it; once a day, say how long its certificate still holds.

    Args:
      started: what to say once it answers, from its address.
      tend: called twice a second; what it returns is said.

    Raises:
      DeployError: the SuperLink did not start, or has ended by itself.
    """
    _say_certificate(home, say)
    with only_one(home.path), stop_at_signals(), Processes(home.path) as processes:
        for line in started(start_superlink(processes, home, host, port)):
            say(line)
        checked = time.monotonic()
        while processes.alive(NAME):
            for line in tend():
                say(line)
            if time.monotonic() - checked > DAY_SECONDS:
                checked = time.monotonic()
                _say_certificate(home, say)
            time.sleep(TEND_SECONDS)
        raise DeployError(f"the SuperLink has ended; the end of its log:\n{processes.log_tail(NAME, 600)}")


def _say_certificate(home: ServerHome, say: Callable[[str], None]) -> None:
    for line in check_certificate(home.path / SERVER_CERT):
        say(f"note: {line}")
