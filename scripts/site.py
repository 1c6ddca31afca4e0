"""Gather the pages of the site: `python scripts/site.py FOLDER` (`make site`).

Pages are read in the repository too, where a link may lead to a test, a study or CONTRIBUTING.md. The site has
copies of three such pages (PROJECT). A link to another file outside docs/, or to a folder, becomes its path.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")  # pages of the repository that are pages of the site
# A link, or code, in which nothing is a link; a link may have code in its text.
LINK = r"(?P<image>!?)\[(?P<shown>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)"
TOKEN = re.compile(rf"```.*?```|{LINK}|`[^`\n]*`", re.S)


def page(text: str, at: Path) -> str:
    """Return a page as the site has it.

    Args:
      at: the file, as it lies in the repository.
    """

    def link(found: re.Match[str]) -> str:
        image, shown, target = found.group("image", "shown", "target")
        if target is None:
            return found[0]
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        file = (at.parent / path).resolve()
        if file.is_relative_to(ROOT / "docs") and file.is_file():
            if at.parent == ROOT:  # a page of the repository's root lies next to the others
                return f"{image}[{shown}]({file.relative_to(ROOT / 'docs').as_posix()}{mark}{anchor})"
            return found[0]
        if file.parent == ROOT and file.name in PROJECT:
            up = "" if at.parent == ROOT else "../" * (len(at.relative_to(ROOT / "docs").parts) - 1)
            return f"[{shown}]({up}{file.name}{mark}{anchor})"
        inside = file.relative_to(ROOT).as_posix()
        return f"`{inside}`" if shown.strip("`") in (path, inside) else f"{shown} (`{inside}`)"

    return TOKEN.sub(link, text)


def gather(folder: Path) -> list[Path]:
    """Write the pages, and what they show, into FOLDER/docs; return the pages."""
    target = folder / "docs"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(ROOT / "zensical.toml", folder)
    written = []
    for file in sorted((ROOT / "docs").rglob("*")):
        new = target / file.relative_to(ROOT / "docs")
        if file.suffix == ".md":
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(page(file.read_text("utf-8"), file), "utf-8")
            written.append(new)
        elif file.suffix in (".png", ".svg", ".json", ".toml") and file.is_file():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, new)
    for name in PROJECT:
        (target / name).write_text(page((ROOT / name).read_text("utf-8"), ROOT / name), "utf-8")
        written.append(target / name)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/site.py FOLDER")
    gather(Path(sys.argv[1]))
