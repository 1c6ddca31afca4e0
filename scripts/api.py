"""Write docs/api.md from the public names of the package: `python scripts/api.py` (`make docs`)."""

from __future__ import annotations

import inspect
from pathlib import Path

import keyfed
from keyfed.cli.reference import HEAD

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"


def entry(name: str) -> str:
    """Return a name's part of the page: its signature and docstring; of a registry the names in it."""
    thing = getattr(keyfed, name)
    if not callable(thing):
        return f"\n## {name}\n\n{', '.join(f'`{one}`' for one in thing)}"
    error = inspect.isclass(thing) and issubclass(thing, Exception)
    head = name if error else f"{name}{inspect.signature(thing)}"
    return f"\n## {name}\n\n```text\n{head}\n\n{inspect.getdoc(thing)}\n```"


def page() -> str:
    """Return the whole page."""
    about = "All public names, with their docstrings. [python.md](python.md) shows how they are used."
    return "\n".join([f"{HEAD}# The Python interface\n", about, *map(entry, keyfed.__all__)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
