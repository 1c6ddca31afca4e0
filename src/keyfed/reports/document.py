"""A small document of headings, texts, tables and pictures, written as Markdown and as one HTML page.

The page needs no network and runs no script. Every text is escaped: names of corpora and words of a vocabulary come
from files that anybody may have written.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from keyfed.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

NONE = "–"  # where there is no number
JOINERS = "\u200c\u200d"  # invisible, yet they belong to the spelling of words and of emoji


@dataclass(frozen=True, slots=True)
class Heading:
    """A title; level 1 stands once, at the top."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `role` says how a page shows it."""

    text: str
    role: str = ""  # "verdict" or "note"
    marked: bool = False  # `so` is code; for texts of our own


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the header first; an empty header is not shown. `numbers`: columns after the first are numbers."""

    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot under `path`, relative to the document; its PNG for light pages, and for dark ones where there is one."""

    path: str
    alt: str
    light: bytes
    dark: bytes | None = None

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return PurePosixPath(self.path).stem


@dataclass(frozen=True, slots=True)
class Code:
    """Lines shown as they are."""

    text: str
    language: str = ""
    folded: str = ""  # what a reader clicks to see it; not folded without


@dataclass(frozen=True, slots=True)
class Links:
    """A list of files and folders of the document: text and path relative to it."""

    items: Sequence[tuple[str, str]]


Block = Heading | Text | Table | Picture | Code | Links


def finite(value: Any) -> float | None:
    """Return a number one can draw or print, or None for anything else.

    Example:
      >>> finite(2), finite(float("nan")), finite(10**400), finite(None)
      (2.0, None, None, None)
    """
    try:
        usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return None
    return float(value) if usable else None


def show(value: Any) -> str:
    """Write a perplexity: two decimals below 100, one above, powers of ten from a million; "–" if there is none.

    Example:
      >>> show(18.849), show(1234.56), show(2e9), show(float("inf")), show(None)
      ('18.85', '1,234.6', '2e+09', '∞', '–')
    """
    number = finite(value)
    if number is None:
        return "∞" if value == math.inf else NONE
    if number >= 1e6 or 0 < number < 0.01:
        return f"{number:.3g}"
    return f"{number:,.1f}" if number >= 100 else f"{number:.2f}"


def show_percent(value: Any, digits: int = 1) -> str:
    """Write a share of one as a percentage; "–" if there is none."""
    number = finite(value)
    return NONE if number is None else f"{number * 100:.{digits}f} %"


def show_count(value: Any) -> str:
    """Write a whole number with its thousands apart; "–" if there is none."""
    number = finite(value)
    return NONE if number is None else f"{number:,.0f}"


def show_duration(seconds: float) -> str:
    """Write a time for people.

    Example:
      >>> show_duration(3.21), show_duration(200), show_duration(7500)
      ('3.2 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return names and values as a table without a header."""
    return Table([["", ""], *([name, value] for name, value in rows)], numbers=False)


def clean(text: str) -> str:
    r"""Return one printable line: white space becomes blanks; control, direction and broken characters become �.

    Example:
      >>> clean("a\tb\x00")
      'a b�'
    """
    return "".join(
        " " if c.isspace() else c if c.isprintable() or c in JOINERS else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def escape_markdown(text: str) -> str:
    r"""Escape all that Markdown, its tables and the HTML inside it would read as markup.

    Example:
      >>> print(escape_markdown("a|b <i> data_set _x_"))
      a\|b \<i\> data_set \_x\_
    """
    text = re.sub(r"([\\`*\[\]<>|#!~&$])", r"\\\1", clean(text))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def markdown_table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Write rows of Markdown, the header first, as a table; with `numbers` all columns but the first lie to the right.

    Example:
      >>> print(markdown_table([["model", "top-1"], ["`cifg`", "15 %"]], numbers=True))
      | model | top-1 |
      | --- | --: |
      | `cifg` | 15 % |
    """
    rule = ["---", *["--:" if numbers else "---"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def to_markdown(blocks: Sequence[Block]) -> str:
    """Write the document as GitHub-flavoured Markdown; pictures are links to their files."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + " " + escape_markdown(text)
        case Text(text, role, marked):
            pieces = [(escape_markdown(piece), f"`{clean(piece)}`")[code] for piece, code in _pieces(text, marked)]
            escaped = "".join(pieces)
            return f"**{escaped}**" if role == "verdict" else escaped
        case Table(rows, numbers):
            return markdown_table([[escape_markdown(cell) for cell in row] for row in rows], numbers=numbers)
        case Picture(path, alt):
            return f"![{escape_markdown(alt)}]({path})"
        case Code(text, language, folded):
            fenced = f"```{language}\n{_lines(text)}\n```"
            summary = f"<details><summary>{escape_markdown(folded)}</summary>"
            return f"{summary}\n\n{fenced}\n\n</details>" if folded else fenced
        case Links(items):
            return "\n".join(f"- [{escape_markdown(text)}]({quote(path)})" for text, path in items)


def _pieces(text: str, marked: bool) -> list[tuple[str, bool]]:
    """Cut a text into what is prose and what is code; a backtick without another one is prose.

    Example:
      >>> _pieces("run `keyfed` now", True), _pieces("a`b", True)
      ([('run ', False), ('keyfed', True), (' now', False)], [('a`b', False)])
    """
    found = text.split("`") if marked else [text]
    if len(found) % 2 == 0:
        found[-2:] = ["`".join(found[-2:])]
    return [(piece, bool(n % 2)) for n, piece in enumerate(found) if piece]


def _lines(text: str) -> str:
    """Lines of code, each cleaned; none can close the fence around them."""
    return "\n".join(clean(line).replace("```", "'''") for line in text.strip().splitlines())


def to_html(blocks: Sequence[Block]) -> str:
    """Write the document as one self-contained page for a phone, a desktop, by day and by night."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    return render("report.html", title=title, blocks=[(type(block).__name__, block) for block in blocks])


def render(template: str, **values: Any) -> str:
    """Fill in a file of templates/. In HTML every value is cleaned and escaped, whatever it is."""
    return str(_templates().get_template(template).render(values))


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup, escape

    def cleaned(value: Any) -> Any:
        return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = Environment(
        loader=PackageLoader("keyfed.reports"),
        autoescape=select_autoescape(["html"], default=False),
        finalize=cleaned,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "number": "{:,}".format,
        "data_url": _data,
        "quoted": quote,
        "lines": lambda text: escape(_lines(text)),
        "pieces": lambda block: _pieces(block.text, block.marked),
    }
    return made


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def write_document(folder: Path, blocks: Sequence[Block]) -> list[Path]:
    """Write report.md, report.html and the light form of every picture into a folder; return the files."""
    written = [folder / "report.md", folder / "report.html"]
    for path, text in zip(written, (to_markdown(blocks), to_html(blocks)), strict=True):
        write_atomically(path, text.encode("utf-8"))
    for block in blocks:
        if isinstance(block, Picture):
            written.append(folder / block.path)
            written[-1].parent.mkdir(exist_ok=True)
            write_atomically(written[-1], block.light)
    return written
