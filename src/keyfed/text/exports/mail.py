"""Mail: mbox files and single messages (.eml), by the address of the sender.

Of a message its own words are read: the first text of several forms, without what it quotes, the line that introduces
a quotation, forwarded messages and the signature. Lines that were broken at the margin are joined again. Only the
beginning of a message is parsed (`MOST_BYTES`, `MOST_LINES`): attachments come later. So that parsing stays linear,
headers are cut (`LONGEST_HEADER`), what is nested deeper than `MOST_LEVELS` stays closed, and a charset is one of
`CHARSETS`: idna and punycode take time quadratic in a text.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message
from email.parser import BytesParser
from email.policy import Compat32
from email.utils import parseaddr, parsedate_to_datetime
from encodings import normalize_encoding
from encodings.aliases import aliases

from keyfed.text.exports.messages import Messages, html_to_text, plain
from keyfed.text.records import Record, is_broken
from keyfed.text.sources import UNREADABLE, File, open_bytes, why_unreadable

MOST_BYTES, MOST_LINES = 1 << 18, 8_000  # of a message that are parsed
LONGEST_HEADER = 1_000  # characters of a header that are read
MOST_LEVELS = 20  # of multiparts and messages inside one another that are opened
CHARSETS = frozenset({
    "ascii", "utf_8", "utf_8_sig", "utf_7", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "latin_1", "koi8_r", "koi8_u",
    "mac_roman", "tis_620", "big5", "big5hkscs", "gb2312", "gbk", "gb18030", "hz", "euc_jp", "shift_jis", "cp932",
    "iso2022_jp", "iso2022_jp_1", "iso2022_jp_2", "iso2022_kr", "euc_kr", "cp949", "cp437", "cp850", "cp866", "cp874",
    *(f"cp{page}" for page in range(1250, 1259)), *(f"iso8859_{number}" for number in (*range(2, 12), *range(13, 17))),
})  # fmt: skip
LONGEST_INTRODUCTION = 200  # characters of a line that introduces a quotation
MARGIN = 60  # a longer line before another was broken at the margin
_FORWARDED = (
    "-----original message",
    "---------- forwarded",
    "-----ursprüngliche nachricht",
    "begin forwarded message",
)
_SENT_FROM = ("sent from my ", "von meinem ", "envoyé de mon ", "enviado desde mi ", "get outlook for ")


class _Short(Compat32):
    """The older rules for messages, with headers of a bounded length: their parameters are read in quadratic time."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        return name, value[:LONGEST_HEADER]


class _Shallow(Message):
    """A message that is not opened further below `MOST_LEVELS`: each line is compared with every boundary around it."""

    level = 0

    def attach(self, payload: Message) -> None:  # type: ignore[override]
        if isinstance(payload, _Shallow):
            payload.level = self.level + 1
        super().attach(payload)

    def get_content_type(self) -> str:
        kind = super().get_content_type()
        return kind if self.level < MOST_LEVELS or kind.startswith("text/") else "application/octet-stream"


def parse(raw: bytes) -> Message:
    """Parse a message within bounds."""
    return BytesParser(_Shallow, policy=_Short()).parsebytes(raw)


def codec(charset: str) -> str | None:
    """Return Python's name of a charset, None for one that mail is not read in.

    Example:
      >>> codec("UTF-8"), codec("windows-1252"), codec("ISO-8859-1"), codec("idna"), codec("x" * 9)
      ('utf_8', 'cp1252', 'latin_1', None, None)
    """
    name = normalize_encoding(charset[:LONGEST_HEADER]).lower()
    name = aliases.get(name, name)
    return name if name in CHARSETS else None


def is_mbox(start: bytes) -> bool:
    """Tell an mbox by its first line and the headers behind it.

    Example:
      >>> is_mbox(b"From ann Thu Jan  1 00:00:00 2024\\nFrom: ann@example.org\\n"), is_mbox(b"From here on\\n")
      (True, False)
    """
    start = start.removeprefix(codecs.BOM_UTF8)
    if not start.startswith(b"From "):
        return False
    heads = start.replace(b"\r\n", b"\n").split(b"\n\n")[0].lower().split(b"\n")[1:]
    return any(line.startswith(b"from:") for line in heads)


def read_mail(file: File, *, single: bool = False) -> Messages:
    """Read the messages of an mbox, or the single one of an .eml, by sender."""
    records: list[Record] = []
    why: Counter[str] = Counter()
    try:
        with open_bytes(file) as opened:
            for raw in [b"".join(_bounded(opened))] if single else messages(opened):
                found = _record(raw)
                if isinstance(found, Record):
                    records.append(found)
                else:
                    why[found] += 1
    except UNREADABLE as error:
        why[f"from a place that cannot be read ({why_unreadable(error)})"] += 1
    return Messages("mail", records, why)


def messages(lines: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the beginning of every message of an mbox.

    Example:
      >>> list(messages([b"From a\n", b"A: 1\n", b"\n", b">From x\n", b"\n", b"From b\n", b"B: 2\n"]))
      [b'A: 1\n\nFrom x\n\n', b'B: 2\n']
    """
    kept: list[bytes] | None = None
    size, blank = 0, True
    for number, line in enumerate(lines):
        line = line if number else line.removeprefix(codecs.BOM_UTF8)
        if blank and line.startswith(b"From "):
            if kept is not None:
                yield b"".join(kept)
            kept, size, blank = [], 0, False
            continue
        blank = not line.strip(b"\r\n")
        if kept is not None and size <= MOST_BYTES and len(kept) < MOST_LINES:
            kept.append(line[1:] if line.startswith(b">From ") else line[:MOST_BYTES])
            size += len(line)
    if kept is not None:
        yield b"".join(kept)


def _bounded(lines: Iterable[bytes]) -> Iterator[bytes]:
    size = 0
    for number, line in enumerate(lines):
        size += len(line)
        if size > MOST_BYTES or number >= MOST_LINES:
            return
        yield line


def _record(raw: bytes) -> Record | str:
    try:
        message = parse(raw)
        author = parseaddr(_header(message, "From"))[1].strip().lower()
        time = _time(_header(message, "Date"))
        body = _body(message)
    except (ValueError, LookupError, TypeError, AttributeError, IndexError, RecursionError):
        return "a message that is damaged"
    if not author:
        return "missing author"
    if body is None:
        return "without text"
    text = "\n".join(own_words(body))
    if is_broken(text) or is_broken(author) or "\0" in text:
        return "not UTF-8"
    return Record(author, text, time) if text else "nothing but quotations"


def _header(message: Message, name: str) -> str:
    """Return a header decoded; one that cannot be, as it is."""
    found = str(message.get(name, ""))[:LONGEST_HEADER]
    pieces = []
    try:
        decoded = decode_header(found)
    except HeaderParseError:  # base64 that is none
        return found
    for piece, charset in decoded:
        pieces.append(piece if isinstance(piece, str) else piece.decode(codec(charset or "") or "latin_1", "replace"))
    return "".join(pieces)


def _time(date: str) -> str | None:
    try:
        return str(parsedate_to_datetime(date).timestamp())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _body(message: Message) -> str | None:
    """Return the plain text of a message, or that of its first page; None where it has neither."""
    pages: str | None = None
    for piece in message.walk():
        kind = piece.get_content_type()
        if piece.is_multipart() or piece.get_content_disposition() == "attachment":
            continue
        if kind not in ("text/plain", "text/html") or (kind == "text/html" and pages is not None):
            continue
        data = piece.get_payload(decode=True)
        text = _decoded(data if isinstance(data, bytes) else b"", piece.get_content_charset())
        if kind == "text/plain":
            return text
        pages = html_to_text(text)
    return pages


def _decoded(data: bytes, charset: str | None) -> str:
    for name in (codec(charset or "utf-8"), "cp1252"):
        try:
            if name is not None:
                return data.decode(name)
        except ValueError:
            continue
    return data.decode("latin-1")


def own_words(body: str) -> list[str]:
    r"""Return the paragraphs that the sender wrote.

    Example:
      >>> own_words("Yes,\nsee you.\n\nOn Monday Ann wrote:\n> lunch?\n\nNo rush.\n-- \nBen\nCEO")
      ['Yes,', 'see you.', 'No rush.']
    """
    lines = [line.rstrip("\r\n") for line in body.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    kept: list[str] = []
    for line in lines:
        if line in ("-- ", "--") or line.strip().lower().startswith(_FORWARDED):
            break
        if line.startswith(">"):
            _drop_introduction(kept)
            kept.append("")
        elif not line.strip().lower().startswith(_SENT_FROM):
            kept.append(line)
    found: list[str] = []
    joined = False
    for line in kept:
        text = plain(line).strip()
        if not text:
            joined = False
            continue
        if joined:
            found[-1] += f" {text}"
        else:
            found.append(text)
        joined = line.endswith(" ") or len(text) >= MARGIN  # a soft break, or the margin
    return found


def _drop_introduction(kept: list[str]) -> None:
    """Drop `On … Ann wrote:`, of one or two lines, from the end."""
    while kept and not kept[-1].strip():
        kept.pop()
    if not kept or not kept[-1].rstrip().endswith(":") or len(kept[-1]) > LONGEST_INTRODUCTION:
        return
    last = kept.pop()
    wrapped = kept and kept[-1].strip() and last.strip()[:1].islower() and len(kept[-1]) >= MARGIN
    if wrapped or (kept and kept[-1].lstrip().lower().startswith(("on ", "am ", "le ", "el ", "op "))):
        kept.pop()


def read_single(file: File) -> Messages:
    """Read an .eml."""
    return read_mail(file, single=True)
