"""A small document of headings, texts, tables and pictures, written as Markdown and as one HTML page.

The page asks nothing of a network and runs no script; every text is escaped, since names of corpora and
words of a vocabulary come from files that anybody may have written.
"""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from keyfed.files import write_atomically

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


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the header first; an empty header is not shown. `numbers`: columns after the first are numbers."""

    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot under `path`, relative to the document; its PNG for light and dark pages."""

    path: str
    alt: str
    light: bytes
    dark: bytes

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return PurePosixPath(self.path).stem


@dataclass(frozen=True, slots=True)
class Code:
    """Lines shown as they are."""

    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Links:
    """A list of files and folders of the document: text and path relative to it."""

    items: Sequence[tuple[str, str]]


Block = Heading | Text | Table | Picture | Code | Links


def finite(value: Any) -> float | None:
    """Return a number one can draw or print, or None for anything else.

    Example:
      >>> finite(2), finite(float("nan")), finite(None)
      (2.0, None, None)
    """
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
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


def escape_html(text: str) -> str:
    """Escape text for an element's content or a quoted attribute."""
    return html.escape(clean(text), quote=True)


def escape_markdown(text: str) -> str:
    r"""Escape all that Markdown, its tables and the HTML inside it would read as markup.

    Example:
      >>> print(escape_markdown("a|b <i> data_set _x_"))
      a\|b \<i\> data_set \_x\_
    """
    text = re.sub(r"([\\`*\[\]<>|#!~&$])", r"\\\1", clean(text))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def to_markdown(blocks: Sequence[Block]) -> str:
    """Write the document as GitHub-flavoured Markdown; pictures are links to their files."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + " " + escape_markdown(text)
        case Text(text, role):
            escaped = escape_markdown(text)
            return f"**{escaped}**" if role == "verdict" else escaped
        case Table(rows, numbers):
            rule = ["---", *["--:" if numbers else "---"] * (len(rows[0]) - 1)]
            lines = [[escape_markdown(cell) for cell in row] for row in rows]
            return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])
        case Picture(path, alt):
            return f"![{escape_markdown(alt)}]({path})"
        case Code(text, language):
            return f"```{language}\n{_lines(text)}\n```"
        case Links(items):
            return "\n".join(f"- [{escape_markdown(text)}]({quote(path)})" for text, path in items)


def _lines(text: str) -> str:
    """Lines of code, each cleaned; none can close the fence around them."""
    return "\n".join(clean(line).replace("```", "'''") for line in text.strip().splitlines())


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6675; --page: #f6f7f9; --card: #ffffff;
  --line: #dde2e8; --accent: #0072b2; --wash: #e8f2f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa6b4; --page: #12161b; --card: #1b2027;
  --line: #313944; --accent: #56b4e9; --wash: #172a38; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: clamp(1.4rem, 4.5vw, 2rem); line-height: 1.2; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .6rem 0; overflow-wrap: anywhere; }
.verdict { background: var(--wash); border-left: 4px solid var(--accent); border-radius: 4px;
  padding: .8rem 1rem; font-size: 1.05rem; }
a { color: var(--accent); }
li { overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .9rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .8rem; text-align: left; vertical-align: top; }
tr + tr > *, thead + tbody > tr:first-child > * { border-top: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; font-size: .82rem; vertical-align: bottom; }
tbody th { font-weight: 600; }
.numbers tr > * + * { text-align: right; }
.numbers td, .numbers tbody th { white-space: nowrap; }
.numbers tr > :first-child { position: sticky; left: 0; background: var(--card); }
.facts td { overflow-wrap: anywhere; }
.facts th { width: 14rem; max-width: 45vw; font-weight: 400; color: var(--soft); }
figure { margin: .8rem 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
img { display: block; width: 100%; max-width: 40rem; height: auto; margin: 0 auto; }
pre { margin: 0; padding: .8rem 1rem; font: .84rem/1.5 ui-monospace, monospace; }
@media print { body { background: none; } .card, figure { break-inside: avoid; } }
"""


def to_html(blocks: Sequence[Block]) -> str:
    """Write the document as one self-contained page for a phone, a desktop, by day and by night."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape_html(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(map(_html, blocks))
        + "\n</main>\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape_html(text)}</h{level}>"
        case Text(text, role):
            kind = f' class="{escape_html(role)}"' if role else ""
            return f"<p{kind}>{escape_html(text)}</p>"
        case Table():
            return _html_table(block)
        case Picture(_, alt, light, dark):
            return (
                f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
                f'<img src="{_data(light)}" alt="{escape_html(alt)}"></picture></figure>'
            )
        case Code(text):
            return f'<div class="card"><pre>{html.escape(_lines(text))}</pre></div>'
        case Links(items):
            lines = (f'<li><a href="{escape_html(quote(path))}">{escape_html(text)}</a></li>' for text, path in items)
            return f"<ul>{''.join(lines)}</ul>"


def _html_table(table: Table) -> str:
    head, *body = table.rows
    shown = any(head)
    kind = "numbers" if table.numbers else "" if shown else "facts"
    out = [f'<div class="card"><table class="{kind}">']
    if shown:
        cells = "".join(f'<th scope="col">{escape_html(cell)}</th>' for cell in head)
        out.append(f"<thead><tr>{cells}</tr></thead>")
    out.append("<tbody>")
    for first, *rest in body:
        cells = "".join(f"<td>{escape_html(cell)}</td>" for cell in rest)
        out.append(f'<tr><th scope="row">{escape_html(first)}</th>{cells}</tr>')
    return "\n".join([*out, "</tbody></table></div>"])


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
