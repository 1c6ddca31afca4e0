"""Posts.xml of a Stack Exchange data dump, read as a stream."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from keyfed.text.records import UNREADABLE, Record, open_bytes, why_unreadable

_POST_TYPES = ("1", "2")  # question, answer; the others are wikis and nominations
_COMMUNITY = "-1"  # the account of the site itself
_BLOCK = re.compile(r"p|br|li|ul|ol|h[1-6r]|blockquote|div|tr|table|pre|d[td]")


def read_posts(path: Path) -> tuple[list[Record], Counter[str]]:
    """Read the questions and answers, and count what was left out by reason.

    Memory holds the text only: every element is dropped once read.
    """
    records: list[Record] = []
    why: Counter[str] = Counter()
    try:
        with open_bytes(path) as file:
            events = ElementTree.iterparse(file, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                if event == "end" and element.tag == "row":
                    result = _record(element.attrib)
                    if isinstance(result, Record):
                        records.append(result)
                    else:
                        why[result] += 1
                    root.clear()
    except ElementTree.ParseError as error:  # its own words may quote an entity's name
        why["from a place that cannot be read (not well-formed in line {}, column {})".format(*error.position)] += 1
    except StopIteration:
        why["from a place that cannot be read"] += 1
    except UNREADABLE as error:
        why[f"from a place that cannot be read ({why_unreadable(error)})"] += 1
    return records, why


def html_to_text(html: str) -> str:
    r"""Return the text of a post, a paragraph a line, without code blocks.

    Example:
      >>> html_to_text("<p>Malt &amp;\nhops</p><pre>rm -rf</pre><ul><li>One <b>two</b></li></ul>")
      'Malt & hops\nOne two'
    """
    parser = _Text()
    parser.feed(html)
    parser.close()
    return "\n".join(line for piece in "".join(parser.parts).split("\n") if (line := piece.strip()))


def _record(row: dict[str, str]) -> Record | str:
    if row.get("PostTypeId") not in _POST_TYPES:
        return "neither question nor answer"
    owner = row.get("OwnerUserId")
    if not owner or owner == _COMMUNITY:
        return "without an owner"
    text = html_to_text(row.get("Body", ""))
    return Record(owner, text, row.get("CreationDate")) if text else "without text"


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._code += tag == "pre"
        if _BLOCK.fullmatch(tag):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._code = max(self._code - (tag == "pre"), 0)
        if _BLOCK.fullmatch(tag):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.parts.append(re.sub(r"\s+", " ", data))
