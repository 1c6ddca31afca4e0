"""Flower's processes: the environment they are started with, and `flwr` commands run in one process.

`python -m keyfed.wire.flower.commands` runs the commands listed on stdin, one after another. Input: a JSON list of
argument lists. Output, last line: a JSON list of what each has said. It stops at the first failure. One command is our
own: `keyfed-nodes CONNECTION` says which node has which key, which `flwr` does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from keyfed.config.load import dump_toml
from keyfed.files import write_atomically
from keyfed.system import need_extra

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
    need_extra("federation", "a real federation")


def write_connection(home: Path, address: str, ca: Path) -> None:
    """Write the file in which `flwr` finds our SuperLink (and no other)."""
    folder = home / "flwr"
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "superlink": {"default": CONNECTION},
        f"superlink.{CONNECTION}": {"address": address, "root-certificates": str(ca.resolve())},
    }
    write_atomically(folder / "config.toml", dump_toml(document).encode())


NODES = "keyfed-nodes"


def nodes(connection: str) -> dict[str, int]:
    """Return the number of every registered node by the SHA-256 of its public key."""
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest

    client = init_http_client_from_connection(read_superlink_connection(connection))
    try:
        found = client.ListNodes(ListNodesRequest()).nodes_info
        return {hashlib.sha256(n.public_key).hexdigest(): n.node_id for n in found if n.status != "unregistered"}
    finally:
        client.close()


def main() -> None:
    """Run the commands."""
    from flwr.cli.app import app
    from typer.main import get_command

    command, said = get_command(app), []
    for arguments in json.load(sys.stdin):
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                if arguments[0] == NODES:
                    out = io.StringIO(json.dumps(nodes(arguments[1])))  # and nothing that flwr says beside
                else:
                    command.main(list(arguments), prog_name="flwr", standalone_mode=False)
        except SystemExit as e:
            if e.code:
                _fail(out.getvalue())
        except Exception as e:
            _fail(f"{out.getvalue()} {getattr(e, 'message', None) or e}")
        said.append(out.getvalue())
    sys.stdout.write(json.dumps(said) + "\n")


def _fail(text: str) -> None:
    sys.stderr.write(text)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
