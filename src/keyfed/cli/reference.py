"""The generated pages of docs/: methods from their docstrings, the command line from its help, options from the config.

`python -m keyfed.cli.reference docs` writes them; a test fails when a page and the program disagree.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from keyfed.cli.app import PlainContext, plainly
from keyfed.private.dp.statement import MEANING, RULES, WHERE
from keyfed.reports.reference import HEAD, markdown_table, methods_page, options_page


def _help_of(command: Any, path: str) -> list[str]:
    context = PlainContext(command, info_name=path, terminal_width=100, max_content_width=100)
    parts = [f"## {path}\n", "```text", command.get_help(context).rstrip(), "```", ""]
    for name, child in getattr(command, "commands", {}).items():
        parts += _help_of(child, f"{path} {name}")
    return parts


def cli_page() -> str:
    """The help of every command."""
    from keyfed.cli.app import app

    return "\n".join([HEAD + "# The command line\n", *_help_of(plainly(typer.main.get_command(app)), "keyfed")])


def files_page() -> str:
    """Every file that a command writes from a private run, and what answers for it."""
    parts = [
        HEAD + "# Files of a private run\n",
        "Every file that a command writes from a run with `--dp`, and what answers for it ([privacy.md](privacy.md)). "
        "`keyfed privacy audit RUN` holds the run's folder against this table. An unknown file fails the audit.\n",
        *(f"- **{cover}**: {meaning}." for cover, meaning in MEANING.items()),
    ]
    for place, name in WHERE.items():
        rows = [["file", "with real clients", "in a simulation", "what it holds"]]
        rows += [[f"`{r.pattern}`", r.real, r.simulated, r.why] for r in RULES if r.place == place]
        parts += [f"\n## {name}\n", markdown_table(rows)]
    return "\n".join(parts) + "\n"


PAGES = {"methods.md": methods_page, "options.md": options_page, "cli.md": cli_page, "private-files.md": files_page}


def write_pages(folder: Path) -> list[Path]:
    """Write all generated pages."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in PAGES.items():
        (folder / name).write_text(make(), "utf-8")
        written.append(folder / name)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m keyfed.cli.reference FOLDER")
    write_pages(Path(sys.argv[1]))
