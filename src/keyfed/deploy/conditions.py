"""When a client trains: on power, idle, on a network that is not metered; as far as the system tells.

Each question has three answers: True, False and None for "the system does not tell". Where it does not tell, the client
does not train under that condition, and `keyfed client --status` says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

POWER = Path("/sys/class/power_supply")
LOAD = Path("/proc/loadavg")
IDLE_LOAD = 0.5  # processes that want to run, per core
NMCLI = ("nmcli", "-t", "-f", "GENERAL.METERED,GENERAL.STATE", "device", "show")


def on_power(folder: Path = POWER) -> bool | None:
    """Whether the machine runs on mains: no battery is discharging, or a supply is online.

    A machine without a battery is on mains if the system lists its supplies at all.
    """
    if not folder.is_dir():
        return None
    mains, batteries = [], []
    for supply in sorted(folder.iterdir()):
        kind = _word(supply / "type")
        if kind == "Battery" and _word(supply / "scope") != "Device":  # a mouse has a battery too
            batteries.append(_word(supply / "status"))
        elif kind in ("Mains", "USB", "Wireless"):
            mains.append(_word(supply / "online"))
    if "1" in mains:
        return True
    if not batteries:
        return None if not mains else False
    known = [status for status in batteries if status not in ("", "Unknown")]
    return not any(status == "Discharging" for status in known) if known else None


def idle(path: Path = LOAD, cores: int | None = None) -> bool | None:
    """Whether at most half a process per core wanted to run over the last minute."""
    cores = cores or os.cpu_count() or 1
    try:
        load = float(path.read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return load <= IDLE_LOAD * cores


def parse_metered(text: str) -> bool | None:
    """Read `nmcli -t -f GENERAL.METERED,GENERAL.STATE device show`: whether a connected device is metered.

    Example:
      >>> parse_metered("GENERAL.METERED:no (guessed)\\nGENERAL.STATE:100 (connected)\\n")
      False
      >>> parse_metered("GENERAL.METERED:yes\\nGENERAL.STATE:100 (connected)\\n")
      True
      >>> parse_metered("GENERAL.METERED:unknown\\nGENERAL.STATE:100 (connected)\\n") is None
      True
    """
    answers: list[str] = []
    for block in text.strip().split("\n\n"):
        values = dict(line.partition(":")[::2] for line in block.splitlines())
        if values.get("GENERAL.STATE", "").startswith("100"):
            answers.append(values.get("GENERAL.METERED", "unknown").split(" ")[0])
    if "yes" in answers:
        return True
    return False if answers and set(answers) == {"no"} else None


def unmetered() -> bool | None:
    """Whether no connected network is metered, where NetworkManager tells."""
    if shutil.which(NMCLI[0]) is None:
        return None
    try:
        told = subprocess.run(NMCLI, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    metered = parse_metered(told.stdout) if told.returncode == 0 else None
    return None if metered is None else not metered


CONDITIONS: dict[str, tuple[str, Callable[[], bool | None]]] = {
    "idle": ("idle", idle),
    "power": ("on power", on_power),
    "unmetered": ("on an unmetered network", unmetered),
}


def unmet(names: Sequence[str]) -> list[str]:
    """Return, in words, the conditions that are not met or of which the system does not tell."""
    return [words for words, ask in (CONDITIONS[name] for name in names) if ask() is not True]


def describe() -> list[tuple[str, str]]:
    """Return each condition and what the system tells of it."""
    said = {True: "yes", False: "no", None: "the system does not tell"}
    return [(words, said[ask()]) for words, ask in CONDITIONS.values()]


def _word(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip()
    return ""
