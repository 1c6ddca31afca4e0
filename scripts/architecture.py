"""Draw the rooms of the package and who imports whom, from the import graph.

    python scripts/architecture.py        # writes docs/architecture.md and docs/img/architecture.svg

Rooms stand in the order that import-linter keeps (pyproject.toml), the top room first. An arc goes from a room down to
a room that it imports; its width grows with the number of pairs of files. What a room is for is read from the map in
CONTRIBUTING.md, so that each sentence is written once.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from html import escape
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "keyfed"
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "img" / "architecture.svg"
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")


class Room(NamedTuple):
    """A room: its name, what it is for, its files and lines."""

    name: str
    purpose: str
    files: int
    lines: int


def order() -> list[list[str]]:
    """Return the rooms from the top to the bottom, those of one layer together."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    return [re.split(r" [|:] ", layer) for layer in contract["layers"]]


def purposes() -> dict[str, str]:
    """Return what each room is for, by the names in the first column of CONTRIBUTING.md's map."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", text, re.MULTILINE)
    return {name: purpose for names, purpose in rows for name in re.findall(r"`(\w+)`", names)}


def rooms() -> list[Room]:
    """Return one room a layer, the top one first."""
    said = purposes()
    found = []
    for names in order():
        paths = [path for name in names for path in [*SOURCE.glob(f"{name}.py"), *(SOURCE / name).rglob("*.py")]]
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in paths)
        found.append(Room(", ".join(names), said[names[0]], len(paths), lines))
    return found


def imports() -> Counter[tuple[str, str]]:
    """Count the pairs of files between every two rooms, function-local and type-only imports included."""
    layer = {name: ", ".join(names) for names in order() for name in names}
    graph = grimp.build_graph("keyfed", cache_dir=None)
    pairs: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            ends = [layer.get([*name.split("."), ""][1]) for name in (module, other)]
            if all(ends) and ends[0] != ends[1]:
                pairs[ends[0], ends[1]] += 1
    return pairs


def drawn(found: list[Room], pairs: Counter[tuple[str, str]]) -> str:
    """Return the picture: a box a room, arcs to what it imports on the right."""
    width, height, left = 330, 34, 12
    top = {room.name: 14 + at * (height + 10) for at, room in enumerate(found)}
    reach = 26 + 24 * len(found)
    total = 28 + len(found) * (height + 10)
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
        f'viewBox="0 0 {left + width + reach} {total}">',
        f'<rect width="{left + width + reach}" height="{total}" fill="white"/>',
    ]
    for (above, below), count in sorted(pairs.items()):
        if above not in top or below not in top:
            continue
        begins, ends = top[above] + height * 0.65, top[below] + height * 0.35
        bend = left + width + abs(ends - begins) / (height + 10) * 24 + 14
        colour = COLOURS[list(top).index(above) % len(COLOURS)]
        out.append(
            f'<path d="M{left + width} {begins:.1f} '
            f'C{bend:.1f} {begins:.1f} {bend:.1f} {ends:.1f} {left + width} {ends:.1f}" '
            f'fill="none" stroke="{colour}" stroke-width="{0.6 + math.log2(1 + count) / 2:.2f}" stroke-opacity="0.65">'
            f"<title>{escape(above)} imports {escape(below)}: {count} pairs of files</title></path>"
        )
    for room in found:
        at = top[room.name]
        out += [
            f'<rect x="{left}" y="{at}" width="{width}" height="{height}" rx="6" fill="#f4f6fb" stroke="#334"/>',
            f'<text x="{left + 12}" y="{at + 22}" font-size="15" font-weight="bold" fill="#112">'
            f"{escape(room.name)}</text>",
            f'<text x="{left + width - 12}" y="{at + 22}" font-size="12" text-anchor="end" fill="#445">'
            f"{room.files} files, {room.lines:,} lines</text>",
        ]
    return "\n".join([*out, "</svg>", ""])


def page(found: list[Room], pairs: Counter[tuple[str, str]]) -> str:
    """Return the page with the picture and the same as a table."""
    rows = []
    for room in found:
        below = [f"{other} {count}" for (above, other), count in sorted(pairs.items()) if above == room.name]
        rows.append(f"| {room.name} | {room.purpose} | {room.files} | {room.lines:,} | {', '.join(below)} |")
    return "\n".join([
        "# Architecture",
        "",
        "This page and its picture are written by `python scripts/architecture.py` from the import graph.",
        "",
        "A room imports the rooms below it, never one above; import-linter checks that in `make lint`. Arcs go from a",
        "room down to a room that it imports. Their width grows with the number of pairs of files (last column).",
        "The path of one token through these rooms is in [CONTRIBUTING.md](../CONTRIBUTING.md).",
        "",
        "![The rooms and what they import](img/architecture.svg)",
        "",
        "| room | what is there | files | lines | imports (pairs of files) |",
        "|---|---|--:|--:|---|",
        *rows,
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    found, pairs = rooms(), imports()
    PICTURE.write_text(drawn(found, pairs), "utf-8")
    PAGE.write_text(page(found, pairs), "utf-8")
