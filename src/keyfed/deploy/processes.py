"""Processes that are started here: recorded, and stopped whatever happens.

Each gets a process group of its own: Ctrl-C reaches only us, and we stop them in order. Its output goes to a file. A
mark in its environment is inherited by all its descendants, so that even those that have left the group are found
(Linux).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from keyfed import files, system
from keyfed.errors import DeployError, cut
from keyfed.files import write_atomically

CONNECT_SECONDS = 3.0
MARK = "KEYFED_PROCESSES"
PIDS = "processes.json"
PATIENCE = 8.0  # seconds between asking a process to end and ending it
LOG_TAIL = 4000
MOST_LOG = 1 << 20  # bytes of a log that a new process goes on with
MOST_LINES, LONGEST_LINE = 1_000, 2_000  # of a log that strangers could add to


class Processes:
    """The processes of a home; use it in a `with`: they are gone when it is left."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._mark = secrets.token_hex(8)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process; its output goes to logs/NAME.log, and a long one of before becomes logs/NAME.old.log."""
        logs = self._home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"{name}.log"
        if path.exists() and path.stat().st_size > MOST_LOG:
            path.replace(logs / f"{name}.old.log")
        with path.open("ab") as log:
            try:
                process = subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env={**(env if env is not None else os.environ), MARK: self._mark}, start_new_session=True,
                )  # fmt: skip
            except OSError as e:
                raise DeployError(f"{command[0]}: cannot be started ({e.strerror or e})") from None
        self._running[name] = process
        self._record()
        return process

    def alive(self, name: str) -> bool:
        """Whether a process that was started here still runs."""
        return name in self._running and self._running[name].poll() is None

    def ended(self) -> list[str]:
        """Return the processes that were started here and have ended by themselves."""
        return [name for name in self._running if not self.alive(name)]

    def log_tail(self, name: str, size: int = LOG_TAIL) -> str:
        """Return the end of what a process wrote."""
        return tail(self._home / "logs" / f"{name}.log", size)

    def stop(self, name: str, patience: float = PATIENCE) -> None:
        """End one process: SIGTERM, a bounded wait, SIGKILL; its descendants too."""
        process = self._running.pop(name, None)
        if process is not None:
            _end(process, patience)
        self._record()

    def stop_all(self, patience: float = PATIENCE) -> None:
        """End all processes, the last started first, then whatever they have left behind."""
        for name in list(reversed(self._running)):
            system.end_group(self._running[name].pid)
        for name in list(reversed(self._running)):
            self.stop(name, patience)
        for pid in marked(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, system.KILL)
        (self._home / PIDS).unlink(missing_ok=True)

    def _record(self) -> None:
        if self._home.is_dir():
            pids = {name: process.pid for name, process in self._running.items()}
            write_atomically(self._home / PIDS, json.dumps({"mark": self._mark, "pids": pids}).encode(), durable=False)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        with unbroken():
            self.stop_all()


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    family = descendants(process.pid)
    system.end_group(process.pid)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        system.end_group(process.pid, force=True)
        process.wait(patience)
    end = time.monotonic() + min(patience, 3.0)
    while (left := [pid for pid in family if running(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, system.KILL)


def parents(proc: Path = Path("/proc")) -> dict[int, int]:
    """Return the parent of every process (where the system has /proc; elsewhere none)."""
    found: dict[int, int] = {}
    for entry in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold blanks and parentheses itself.
            found[int(entry.parent.name)] = int(entry.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    return found


def descendants(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the children of a process, and theirs."""
    tree, found, new = parents(proc), [], [pid]
    while new:
        new = [child for child, parent in tree.items() if parent in new and child not in found]
        found += new
    return found


def marked(mark: str, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes whose environment carries a mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in proc.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0") and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return [pid for pid in found if running(pid, proc)]


def running(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process is there and is not a zombie."""
    try:
        if proc.is_dir():
            return (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
        os.kill(pid, 0)
    except (OSError, IndexError):
        return False
    return True


def tail(path: Path, size: int = LOG_TAIL) -> str:
    """Return the end of a file as text."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - size))
            return f.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


class BoundedLog(logging.StreamHandler[TextIO]):
    """Writes so many records of a process to stderr, each cut, then one line that says so, and nothing more."""

    def __init__(self, lines: int = MOST_LINES, longest: int = LONGEST_LINE) -> None:
        super().__init__()
        self._left, self._longest = lines, longest

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, while there are some left."""
        self._left -= 1
        if self._left >= 0:
            super().emit(record)
        elif self._left == -1:
            self.stream.write("no more lines are logged until the next start\n")
            self.flush()

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as it is written."""
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {cut(super().format(record), self._longest)}"


def bound_log() -> None:
    """Let this process log a bounded number of records, whichever library they are of: strangers may cause them."""
    logging.basicConfig(handlers=[BoundedLog()], level=logging.WARNING, force=True)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def refuse_taken(host: str, port: int) -> None:
    """Say in one line that a port cannot be had, before a program is started that says it in twenty."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as s:
            if os.name != "nt":  # there it would take a port that somebody listens on
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((host, port))
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise DeployError(f"port {port} of {host} is taken; choose another with --port") from None
        raise DeployError(f"port {port} of {host} cannot be had ({e.strerror or e}); see --host and --port") from None


def opener(ca: Path) -> urllib.request.OpenerDirector:
    """Return what opens addresses of a server whose certificate is of this authority; through no proxy."""
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(ca)))
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)


def wait_until(ready: Callable[[], bool], seconds: float, alive: Callable[[], bool], interval: float = 0.1) -> bool:
    """Return whether something became ready in time; gives up at once when what it waits for has died."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ready():
            return True
        if not alive():
            return False
        time.sleep(interval)
    return ready()


def die_with(parent: int, interval: float = 1.0, leave: Callable[[int], object] = os._exit) -> threading.Thread:
    """End this process soon after its parent has gone, however that went."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5.0)
        leave(1)

    thread = threading.Thread(target=watch, name="parent", daemon=True)
    thread.start()
    return thread


@contextmanager
def stop_at_signals() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and (also where a shell had it ignored) SIGINT into KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def unbroken() -> Iterator[None]:
    """Keep a second Ctrl-C from breaking off the tidying up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def _handled(how: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Handle the signals that end a process in another way for a while."""
    before = {number: signal.signal(number, how) for number in system.ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(path: Path, taken: str | None = None) -> Iterator[None]:
    """Hold a lock file; the system frees it when the process ends, however that goes.

    Args:
      taken: what to say where somebody else holds it; None waits instead.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(path, wait=taken is None))
        except BlockingIOError:
            raise DeployError(str(taken)) from None
        yield


def private_folder(path: Path) -> Path:
    """Make a folder, or take the one that is there, and keep everybody but its owner out."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules with this Python."""
    return [sys.executable, "-m", module, *arguments]


def unreachable(server: str) -> str | None:
    """Return why nothing can be reached at HOST:PORT; None where something listens."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error).lower()
    return None
