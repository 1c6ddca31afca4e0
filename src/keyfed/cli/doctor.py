"""`keyfed doctor`: what this machine has, what would fail without it, and how to mend it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from keyfed.cli.options import JsonOption, print_json
from keyfed.system import EXTRAS, missing_of, node_program, pip_line, usable_cores

LEAST_MEMORY, LEAST_DISK = 2 << 30, 1 << 30  # bytes that the built-in examples fit into
KEYBOARD_PORT, SERVER_PORT = 8017, 9092
RELEASED = 1_700_000_000  # seconds since 1970; a clock before that refuses certificates

State = Literal["ok", "missing", "fails"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """What was found of one thing.

    Attributes:
      state: ok; missing: something optional is not there; fails: what everybody needs does not work.
      remedy: what to do; "" where nothing is to be done.
    """

    what: str
    state: State
    found: str
    remedy: str = ""


def examine() -> Iterator[Symptom]:
    """Look at the machine, one thing after another; nothing is changed and nothing leaves it."""
    yield _cores()
    yield _memory()
    yield from map(_disk, _places())
    yield _gpu()
    yield _node()
    yield _browser()
    yield _port(KEYBOARD_PORT, "keyfed keyboard --port 0 takes any that is free")
    yield _port(SERVER_PORT, "end what listens there, or keyfed server --port ANOTHER")
    yield _clock(time.time())
    for extra, (purpose, _) in EXTRAS.items():
        gone = missing_of(extra)
        state: State = "missing" if gone else "ok"
        remedy = f"{pip_line(extra)} ({purpose})" if gone else ""
        yield Symptom(f"extra {extra}", state, f"without {', '.join(gone)}" if gone else "installed", remedy)


def _cores() -> Symptom:
    cores = usable_cores()
    return Symptom("cores", "ok", f"{cores} usable", "" if cores > 1 else "training takes one core; more are faster")


def memory_of(text: str) -> int | None:
    """Return the bytes that /proc/meminfo says are available.

    Example:
      >>> memory_of("MemTotal: 8 kB\\nMemAvailable:   2048 kB\\n"), memory_of("")
      (2097152, None)
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split() and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return None


def _memory() -> Symptom:
    free = None
    with suppress(OSError):
        free = memory_of(Path("/proc/meminfo").read_text("ascii"))
    if free is None:
        return Symptom("memory", "ok", "the system does not say how much is free")
    short = free < LEAST_MEMORY
    remedy = "end other programs, or set train.workers=1 and a smaller data.max_tokens" if short else ""
    return Symptom("memory", "fails" if short else "ok", f"{free / 2**30:.1f} GiB free", remedy)


def _places() -> list[Path | None]:
    """Where runs, keys and encoded text are written: this folder, None if it was deleted, and the home."""
    here = None
    with suppress(OSError):
        here = Path.cwd()
    return list(dict.fromkeys((here, Path.home())))


def _disk(place: Path | None) -> Symptom:
    if place is None:
        return Symptom("disk of this folder", "fails", "the folder is not there any more", "go to one that exists")
    what = f"disk of {place}"
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Symptom(what, "fails", str(error.strerror or error), "work in a folder that exists")
    if not os.access(place, os.W_OK):
        return Symptom(what, "fails", "not writable", "work in another folder; KEYFED_CACHE names one for encoded text")
    short = free < LEAST_DISK
    return Symptom(what, "fails" if short else "ok", f"{free / 2**30:.1f} GiB free", "free some space" if short else "")


def _gpu() -> Symptom:
    try:
        import torch
    except ImportError:
        return Symptom("PyTorch", "fails", "not installed", f"{sys.executable} -m pip install torch")
    except OSError as error:  # a library of its that cannot be loaded
        return Symptom(
            "PyTorch", "fails", f"damaged ({error})", f"{sys.executable} -m pip install --force-reinstall torch"
        )
    if torch.cuda.is_available():
        return Symptom("GPU", "ok", torch.cuda.get_device_name(0))
    driver = shutil.which("nvidia-smi")
    remedy = "install a PyTorch that was built for CUDA" if driver else "none is needed: training runs on the CPU"
    return Symptom("GPU", "missing", "a driver, which PyTorch does not use" if driver else "none", remedy)


def _node() -> Symptom:
    found = node_program()
    remedy = f"install Node.js, or {pip_line('node')}: suggest and evaluate --keyboard correct words with it"
    return Symptom("node", "ok", found) if found else Symptom("node", "missing", "not installed", remedy)


def _browser() -> Symptom:
    try:
        name = getattr(webbrowser.get(), "name", "") or "the system's"
    except webbrowser.Error:
        remedy = "open the address that keyfed keyboard prints in any browser (--no-open)"
        return Symptom("browser", "missing", "none to open", remedy)
    return Symptom("browser", "ok", str(name))


def _port(port: int, remedy: str) -> Symptom:
    with socket.socket() as tried:
        if os.name != "nt":  # there it would take a port that somebody listens on
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            taken = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
            return Symptom(f"port {port}", "missing", taken, remedy)
    return Symptom(f"port {port}", "ok", "free")


def _clock(now: float) -> Symptom:
    if now < RELEASED:
        found = time.strftime("%Y-%m-%d", time.gmtime(now))
        return Symptom(
            "clock", "fails", f"{found} is before this program was made", "set the clock: certificates need it"
        )
    return Symptom("clock", "ok", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)))


def doctor(as_json: JsonOption = False) -> None:
    """Look at this machine: cores, memory, disk, GPU, node, browser, ports, clock and extras, each with its remedy.

    Exit code 1 where something fails that every run needs; what is optional is only named. Nothing is changed.

      keyfed doctor
    """
    findings = list(examine())
    if as_json:
        print_json([asdict(one) for one in findings])
    else:
        for one in findings:
            line = f"{one.state:<8} {one.what + ':':<18} {one.found}"
            typer.echo(f"{line}; {one.remedy}" if one.remedy else line)
    if any(one.state == "fails" for one in findings):
        sys.exit(1)
