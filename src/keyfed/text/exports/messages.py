"""What every reader of an export returns: who wrote what, and how much was left out for which reason."""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import dataclass, field

from keyfed.text.records import Record

OWNER = ""  # the author of what has no name on it: the owner of the file

# Marks of writing direction and the like, which no keyboard types.
_INVISIBLE: dict[int, str | None] = dict.fromkeys(
    map(ord, "\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")
)
_INVISIBLE |= dict.fromkeys(map(ord, "\u00a0\u202f\u2028\u2029"), " ")
_DROPPED = ("pre", "script", "style", "head", "title")  # elements whose text is no prose
_LOWER = {capital: capital + 32 for capital in range(65, 91)}  # of ASCII only, so that lengths stay
_BLOCK = re.compile(r"p|br|li|ul|ol|h[1-6r]|blockquote|div|tr|table|pre|d[td]")


@dataclass(frozen=True, slots=True)
class Messages:
    """An export as it was understood.

    Attributes:
      format: what it was taken for.
      records: in file order; the author is `OWNER` where the export is one person's.
      left_out: how many messages, by reason.
    """

    format: str
    records: list[Record]
    left_out: Counter[str] = field(default_factory=Counter)


def plain(text: str) -> str:
    r"""Return a text without marks that are not seen; blanks of another width become blanks.

    Example:
      >>> plain("\u200eat 9:05\u202fPM")
      'at 9:05 PM'
    """
    return text if text.isascii() else text.translate(_INVISIBLE)


def html_to_text(markup: str) -> str:
    r"""Return the text of a page or post, a paragraph a line, without code blocks. Takes time linear in its length.

    Example:
      >>> html_to_text("<p>Malt &amp;\nhops</p><pre>rm -rf</pre><ul><li>One <b>two</b></li></ul>")
      'Malt & hops\nOne two'
    """
    parts: list[str] = []
    lower = markup.translate(_LOWER)
    at = 0
    while (start := markup.find("<", at)) >= 0:
        following = markup[start + 1 : start + 2]
        if not (following.isascii() and following.isalpha()) and following not in ("/", "!", "?"):
            parts.append(_prose(markup[at : start + 1]))  # a < that opens nothing
            at = start + 1
            continue
        parts.append(_prose(markup[at:start]))
        mark = "-->" if markup.startswith("<!--", start) else ">"
        end = markup.find(mark, start)
        if end < 0:
            at = len(markup)
            break
        at = end + len(mark)
        name = markup[start + 1 : min(end, start + 13)].strip("/").split(maxsplit=1)[:1]
        tag = name[0].rstrip("/").lower() if name else ""
        if _BLOCK.fullmatch(tag):
            parts.append("\n")
        if tag in _DROPPED and following != "/" and markup[end - 1] != "/":
            end = lower.find(f"</{tag}", at)
            at = end if end >= 0 else len(markup)
    parts.append(_prose(markup[at:]))
    return "\n".join(line for piece in "".join(parts).split("\n") if (line := piece.strip()))


def _prose(text: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(text))
