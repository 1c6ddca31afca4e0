"""`python -m keyfed.deploy.superlink_process PARENT …`: Flower's SuperLink behind our gate; dies with its parent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from keyfed.deploy.gate import Gate
from keyfed.deploy.leaving import take_wish
from keyfed.deploy.processes import die_with
from keyfed.deploy.superlink import HOME_VARIABLE
from keyfed.errors import DeployError


def main() -> None:
    """Run `flower-superlink` with the arguments that follow the parent's pid."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    os.umask(0o077)  # database and logs are the operator's alone
    if int(sys.argv[1]):
        die_with(int(sys.argv[1]))
    if not hasattr(extensions, "get_middleware"):  # a private name: without it nobody would be kept out
        raise DeployError("this version of flwr has no place for our gate; install flwr==1.41.0")
    before = extensions.get_middleware
    home = Path(os.environ[HOME_VARIABLE])
    gate = Middleware(Gate, leave=lambda wish: take_wish(home, wish))
    extensions.get_middleware = lambda: (gate, *before())
    sys.argv = ["flower-superlink", *sys.argv[2:]]
    flower_superlink()


if __name__ == "__main__":
    main()
