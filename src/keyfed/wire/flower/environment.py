"""What every process of Flower's is started with: nothing goes to its makers, nothing is installed, one own folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from keyfed.config.load import dump_toml
from keyfed.errors import DeployError
from keyfed.files import write_atomically

CONNECTION = "keyfed"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def environment(home: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of Flower's processes: no telemetry, no update check, no installation, its folder in ours.

    Flower starts its helpers by name, so the folder of this Python's commands comes first on the path. Proxies are left
    out: everything these processes speak to is our own server. So is FORWARDED_ALLOW_IPS, with which uvicorn would take
    a caller's word for where it calls from.
    """
    given = base if base is not None else os.environ
    env = {k: v for k, v in given.items() if not k.upper().endswith("_PROXY") and k != "FORWARDED_ALLOW_IPS"}
    here = str(Path(sys.executable).parent)
    return {**env, **QUIET, "FLWR_HOME": str(home / "flwr"), "PATH": f"{here}{os.pathsep}{env.get('PATH', '')}"}


def need_flower() -> None:
    """Raise a clear error where Flower is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("flwr", "cryptography") if find_spec(name) is None]
    if missing:
        raise DeployError(
            f"{' and '.join(missing)} not installed; a real federation needs: pip install 'keyfed[federation]'"
        )


def write_connection(home: Path, address: str, ca: Path) -> None:
    """Write the file in which `flwr` finds our SuperLink (and no other)."""
    folder = home / "flwr"
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "superlink": {"default": CONNECTION},
        f"superlink.{CONNECTION}": {"address": address, "root-certificates": str(ca.resolve())},
    }
    write_atomically(folder / "config.toml", dump_toml(document).encode())
