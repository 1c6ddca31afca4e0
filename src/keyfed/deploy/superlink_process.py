"""`python -m keyfed.deploy.superlink_process PARENT …`: Flower's SuperLink behind our gate; dies with its parent."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from keyfed.deploy.enrolment import KnownKeys
from keyfed.deploy.leaving import take_wish
from keyfed.deploy.processes import die_with
from keyfed.deploy.superlink import HOME_VARIABLE, ServerHome
from keyfed.errors import DeployError
from keyfed.wire.flower.gate import ConnectionLimits, Connections, Gate, most_connections, node_proof, serve


def main() -> None:
    """Run `flower-superlink` with the arguments that follow the parent's pid."""
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    flower_superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    os.umask(0o077)  # database and logs are the operator's alone
    if int(sys.argv[1]):
        die_with(int(sys.argv[1]))
    # Private names: without them no stranger would be kept out.
    if not hasattr(extensions, "get_middleware") or not hasattr(flower_superlink, "uvicorn"):
        raise DeployError("this version of flwr has no place for our gate; install flwr==1.41.0")
    before = extensions.get_middleware
    home = Path(os.environ[HOME_VARIABLE])
    known = KnownKeys(ServerHome(home))
    connections = Connections(replace(ConnectionLimits(), total=most_connections(ConnectionLimits().total)))
    gate = Middleware(
        Gate, leave=lambda wish: take_wish(home, wish), proof=node_proof(lambda key: key in known()),
        proven=connections.proven,
    )  # fmt: skip
    extensions.get_middleware = lambda: (gate, *before())
    sys.argv = ["flower-superlink", *sys.argv[2:]]
    vars(flower_superlink)["uvicorn"] = SimpleNamespace(run=serve(connections))
    flower_superlink.flower_superlink()


if __name__ == "__main__":
    main()
