"""Documents: Markdown, .docx, and the XML of Stack Exchange.

XML is parsed without a document type, so that it can define no entity, and in pieces that grow, so that a long value is
not read again and again. A .docx is a .zip; its text is taken out up to `MOST_DOCUMENT` bytes, and up to
`sources.MOST_RATIO` times the bytes that it takes packed.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO
from xml.parsers import expat

from keyfed.text.exports.messages import Messages, html_to_text, plain
from keyfed.text.records import Record
from keyfed.text.sources import MOST_RATIO, UNREADABLE, File, Unusable, open_bytes, why_unreadable

LEAST_PIECE, MOST_PIECE = 1 << 16, 1 << 26  # bytes of XML that are parsed at a time
LEAST_DOCUMENT = 1 << 18  # bytes that any .docx that is a file of its own may unpack to
MOST_DOCUMENT = 1 << 26  # and that none may exceed
DOCUMENT = "word/document.xml"


class _Forbidden(Exception):
    """XML with a document type."""


Start = Callable[[str, Mapping[str, str]], None]


def parse_xml(
    file: BinaryIO, start: Start, end: Callable[[str], None] | None = None, text: Callable[[str], None] | None = None
) -> str | None:
    """Parse XML and call back; return why it could be read no further, None where it was read to its end.

    Args:
      start: is called with the name of every element (behind its namespace and a blank) and its attributes.
    """
    seen = 0

    def begin(name: str, attributes: Any) -> None:
        nonlocal seen
        seen += 1
        start(name, attributes)

    def forbid(*_: object) -> None:
        raise _Forbidden

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler = begin
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = forbid
    if end is not None:
        parser.EndElementHandler = end
    if text is not None:
        parser.CharacterDataHandler = text
    size = LEAST_PIECE
    try:
        while piece := file.read(size):
            before = seen
            parser.Parse(piece, False)
            size = LEAST_PIECE if seen > before else min(2 * size, MOST_PIECE)
        parser.Parse(b"", True)
    except _Forbidden:
        return "a document type, which text has no need of"
    except expat.ExpatError as error:  # its own words may quote a name
        return f"not well-formed in line {error.lineno}, column {error.offset}"
    except UNREADABLE as error:
        return why_unreadable(error)
    return None


# Stack Exchange: Posts.xml and Comments.xml of a data dump

_POST_TYPES = ("1", "2")  # question, answer; the others are wikis and nominations
_COMMUNITY = "-1"  # the account of the site itself


def read_stack_exchange(file: File) -> Messages:
    """Read questions, answers and comments by owner; a paragraph is a line. Memory holds the text only."""
    records: list[Record] = []
    why: Counter[str] = Counter()

    def row(name: str, attributes: Mapping[str, str]) -> None:
        if name == "row":
            result = _post(attributes)
            if isinstance(result, Record):
                records.append(result)
            else:
                why[result] += 1

    try:
        with open_bytes(file) as opened:
            broken = parse_xml(opened, row)
    except UNREADABLE as error:
        broken = why_unreadable(error)
    if broken is not None:
        why[f"from a place that cannot be read ({broken})"] += 1
    return Messages("Stack Exchange", records, why)


def _post(row: Mapping[str, str]) -> Record | str:
    comment = "PostTypeId" not in row and "Text" in row
    if not comment and row.get("PostTypeId") not in _POST_TYPES:
        return "neither question, answer nor comment"
    owner = row.get("UserId" if comment else "OwnerUserId")
    if not owner or owner == _COMMUNITY:
        return "without an owner"
    text = row["Text"].strip() if comment else html_to_text(row.get("Body", ""))
    return Record(owner, text, row.get("CreationDate")) if text else "without text"


# Word


def docx_lines(data: bytes, packed: int | None = None) -> list[str]:
    """Return the paragraphs of a .docx, without what its revisions deleted.

    Args:
      packed: bytes that it takes where it is packed again: in an archive its own size may be padding.

    Raises:
      Unusable: it is none, or unpacks to far more than text does.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = archive.getinfo(DOCUMENT)
            most = max(LEAST_DOCUMENT, MOST_RATIO * min(info.compress_size, len(data)))
            if packed is not None:
                most = min(most, MOST_RATIO * packed)
            if info.file_size > min(most, MOST_DOCUMENT):
                raise Unusable("it unpacks to far more than text does")
            with archive.open(info) as opened:
                return _paragraphs(opened)  # type: ignore[arg-type]
    except Unusable:
        raise
    except (*UNREADABLE, KeyError, ValueError, NotImplementedError, RuntimeError, OverflowError):
        raise Unusable("no .docx, or a damaged one") from None


def _paragraphs(file: BinaryIO) -> list[str]:
    lines: list[str] = []
    parts: list[str] = []
    inside = 0

    def start(name: str, _: Mapping[str, str]) -> None:
        nonlocal inside
        tag = name.rpartition(" ")[2]
        inside += tag == "t"
        if tag in ("tab", "br", "cr"):
            parts.append(" " if tag == "tab" else "\n")

    def end(name: str) -> None:
        nonlocal inside
        tag = name.rpartition(" ")[2]
        inside -= tag == "t"
        if tag == "p":
            lines.extend(line for piece in "".join(parts).split("\n") if (line := plain(piece).strip()))
            parts.clear()

    def text(piece: str) -> None:
        if inside:
            parts.append(piece)

    broken = parse_xml(file, start, end, text)
    if broken is not None:
        raise Unusable(f"no .docx, or a damaged one ({broken})")
    return lines


# Markdown

_IMAGE = re.compile(r"!\[([^\[\]]{0,500})\]\([^()\n]{0,2000}\)|!\[\[[^\[\]]{0,500}\]\]")
_LINK = re.compile(r"\[([^\[\]]{1,500})\]\([^()\n]{0,2000}\)")
_WIKI = re.compile(r"\[\[(?:[^\[\]|]{1,500}\|)?([^\[\]|]{1,500})\]\]")
_MARKER = re.compile(r"(?:#{1,6}\s|[-*+]\s|\d{1,9}[.)]\s|>\s?|\[[ xX]\]\s)\s*")
_RULE = re.compile(r"[-*_=|:+\s]{3,}")
_EMPHASIS = re.compile(r"\*{1,3}|_{2,3}|~~|==|`+|(?<!\w)_|_(?!\w)")
_COMMENT = re.compile(r"<!--[^<>]{0,2000}-->|</?[a-zA-Z][^<>]{0,500}>")


def markdown_lines(lines: list[str]) -> list[str]:
    """Return the prose of a Markdown file: no front matter, code, pictures or marks; of links their words.

    Example:
      >>> note = ["---", "tags: x", "---", "# A *day*", "- [ ] call [Ann](tel:1)", "```", "rm", "```", "[[b|bees]]"]
      >>> markdown_lines(note)
      ['A day', 'call Ann', 'bees']
    """
    if lines and lines[0].strip() == "---":
        ends = [k for k, line in enumerate(lines[1:], 1) if line.strip() in ("---", "...")]
        lines = lines[ends[0] + 1 :] if ends else lines
    found, fence = [], ""
    for line in map(str.strip, lines):
        mark = line[:3]
        if fence:
            fence = "" if mark == fence else fence
        elif mark in ("```", "~~~"):
            fence = mark
        elif line and not _RULE.fullmatch(line) and (text := _unmarked(line)):
            found.append(text)
    return found


def _unmarked(line: str) -> str:
    for _ in range(8):  # a list in a quotation, say
        if (marker := _MARKER.match(line)) is None:
            break
        line = line[marker.end() :]
    if line.startswith("|") and line.endswith("|"):
        line = " ".join(cell for piece in line.split("|") if (cell := piece.strip()))
    for pattern in (_COMMENT, _IMAGE):
        line = pattern.sub("", line)
    for pattern in (_WIKI, _LINK):
        line = pattern.sub(r"\1", line)
    return plain(_EMPHASIS.sub("", line)).strip()
