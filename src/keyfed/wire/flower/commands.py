"""`python -m keyfed.wire.flower.commands`: runs the `flwr` commands listed on stdin, one after another, in one process.

Input: a JSON list of argument lists. Output, last line: a JSON list of what each has said. It stops at the first
failure. One command is our own: `keyfed-nodes CONNECTION` says which node has which key, which `flwr` does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys

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
