"""What only some operating systems have, and what is done where it is missing.

Nothing else in the package imports `fcntl`, `resource`, `termios` or `tty`; commands start on Windows as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keyfed.errors import DeployError

if TYPE_CHECKING:
    import socket

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a process to end."""


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
