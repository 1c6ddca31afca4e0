"""`python -m keyfed.deploy.flwr_commands`: runs the `flwr` commands listed on stdin, one after another, in one process.

Input: a JSON list of argument lists. Output, last line: a JSON list of what each has said. It stops at the first
failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys


def main() -> None:
    """Run the commands."""
    from flwr.cli.app import app
    from typer.main import get_command

    command, said = get_command(app), []
    for arguments in json.load(sys.stdin):
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
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
