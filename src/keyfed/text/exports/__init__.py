"""Own text in the forms in which people have it: one table of formats, each known by its content.

- WhatsApp, IRC: lines begin with a time and a sender.
- Telegram: JSON with chats, or messages with `from_id`.
- Slack: `users.json` and `CHANNEL/YYYY-MM-DD.json`; authors by their display name.
- Discord: JSON of DiscordChatExporter by author; the package that Discord sends is one person's.
- Messenger, Instagram: JSON with participants.
- mbox, .eml: mail, by address; what is quoted is left out.
- Stack Exchange: Posts.xml and Comments.xml, by user.
- JSON arrays: objects with an author and a text are rows of a table; texts are one person's.
- Markdown and .docx: one person's paragraphs.
- all other text: one person's lines.

Files come from a disk or out of a .zip (`keyfed.text.sources`). Whatever a file holds, parsing takes time linear in its
size, memory bounded by it, and no message quotes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from keyfed.text.exports import chats, documents, mail, messengers
from keyfed.text.exports.messages import OWNER, Messages
from keyfed.text.records import RefusedRows, records_of
from keyfed.text.sources import (
    File,
    Leaf,
    Unusable,
    beginning,
    packed_size,
    read_text,
    read_whole,
    suffix_of,
)

MOST_JSON = 1 << 28  # bytes of a file of JSON, which is parsed as a whole
NOTES = (".md", ".markdown", ".docx")
PLAIN = ("", ".txt", ".text", ".log")
MAIL = (".mbox", ".mbx", ".eml")
KINDS = (*PLAIN, *NOTES, ".json", *MAIL, ".xml")
REMEDIES: Mapping[str, str] = {
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), "save the sheet as CSV (UTF-8)"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".parquet"), "export its messages as .csv, .jsonl or .json"),
    **dict.fromkeys((".html", ".htm"), "export the messages as JSON or text, or save the page as text"),
    **dict.fromkeys((".pdf", ".rtf", ".odt", ".doc", ".pages", ".epub"), "save it as .docx or as text"),
    **dict.fromkeys((".rar", ".7z", ".tar", ".tgz", ".bz2", ".xz", ".zst"), "unpack it, or pack it as .zip"),
    ".zip": "an archive in a folder or archive; unpack it",
    **dict.fromkeys((".pst", ".msg", ".ost"), "export the mail as mbox"),
    **dict.fromkeys(
        (".crypt", ".crypt12", ".crypt14", ".crypt15"), "an encrypted backup; export the chat from the app"
    ),
}


@dataclass(frozen=True, slots=True)
class Format:
    """A format of a parsed JSON file, or of a folder.

    Attributes:
      suits: tells it by the parsed file, or by the names in the folder.
    """

    suits: Callable[[Any], bool]
    read: Callable[..., Messages]


JSON_FORMATS = (
    Format(messengers.is_meta, messengers.read_meta),
    Format(messengers.is_telegram, messengers.read_telegram),
    Format(messengers.is_discord, messengers.read_discord),
    Format(messengers.is_package, messengers.read_package),
    Format(messengers.is_slack, messengers.read_slack),
)
FOLDER_FORMATS = (
    Format(messengers.is_slack_folder, messengers.read_slack_folder),
    Format(messengers.is_package_folder, messengers.read_package_folder),
)


def read_export(file: File, columns: Mapping[str, Any]) -> Messages | list[str]:
    """Read one file: messages by author, or the lines of one person's prose.

    Args:
      columns: `author_column`, `text_column` and `max_words` of `records.records_of`, for rows in JSON.

    Raises:
      Unusable: it cannot be read, or is of a kind that is not read; the message says what to do.
    """
    suffix = suffix_of(file)
    if suffix in (".md", ".markdown"):
        return documents.markdown_lines(lines_of(file))
    if suffix == ".docx":
        return documents.docx_lines(read_whole(file), packed_size(file))
    if suffix == ".json":
        return read_json_export(load_json(file), columns)
    start = beginning(file, 1 << 14)
    if suffix == ".xml":
        if not re.search(rb"<(?:posts|comments)[\s>]", start):
            raise Unusable("XML of another kind; expected Posts.xml or Comments.xml of Stack Exchange")
        return documents.read_stack_exchange(file)
    if suffix == ".eml":
        return mail.read_single(file)
    if suffix in MAIL or mail.is_mbox(start):
        return mail.read_mail(file)
    if suffix not in PLAIN:
        remedy = REMEDIES.get(suffix)
        raise Unusable(f"not a text file ({suffix})" + (f"; {remedy}" if remedy else ""))
    lines = lines_of(file)
    return chats.read_chat(lines) if chats.is_chat(lines) else lines


def read_export_folder(leaves: list[Leaf]) -> Messages | None:
    """Read a folder that is one export; None where its files stand for themselves."""
    names = [leaf.name for leaf in leaves]
    found = next((form for form in FOLDER_FORMATS if form.suits(names)), None)
    return None if found is None else found.read(leaves, load_json)


def read_json_export(data: Any, columns: Mapping[str, Any]) -> Messages | list[str]:
    """Read a parsed JSON file: an export, rows with an author and a text, or texts."""
    for form in JSON_FORMATS:
        if form.suits(data):
            return form.read(data)
    if isinstance(data, dict):  # rows under one key
        lists = [value for value in data.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        if len(lists) != 1:
            raise Unusable(
                "JSON of an unknown form; expected an export of Telegram, Slack, Discord, Messenger or Instagram, or "
                "an array of objects with an author and a text"
            )
        data = lists[0]
    if isinstance(data, list) and data and all(isinstance(text, str) for text in data):
        return [line for text in data for line in re.split(r"\r\n?|\n", text)]
    if not isinstance(data, list) or not data:
        raise Unusable("JSON without messages; expected an array of objects with an author and a text")
    refused: dict[str, RefusedRows] = {}
    rows = ((k, row if isinstance(row, dict) else "not a JSON object") for k, row in enumerate(data, 1))
    records = list(records_of(rows, refused, **columns))
    return Messages("JSON array", records, Counter({row.why: row.rows for row in refused.values()}))


def load_json(file: File) -> Any:
    """Parse a file of JSON.

    Raises:
      Unusable: it is none, too large, or nested too deeply; its words are not quoted.
    """
    text = read_text(file)
    if len(text) > MOST_JSON:
        raise Unusable(f"more than {MOST_JSON >> 20} million characters of JSON; write one object a line (.jsonl)")
    try:
        return json.loads(text)
    except RecursionError:
        raise Unusable("JSON that is nested too deeply") from None
    except json.JSONDecodeError as error:
        rows = "; objects in lines go in a .jsonl" if error.msg == "Extra data" else ""
        raise Unusable(f"broken JSON (line {error.lineno}, column {error.colno}){rows}") from None
    except ValueError:
        raise Unusable("broken JSON") from None


def lines_of(file: File) -> list[str]:
    """Return every line of a text file as it is, blank ones too, without the line ends."""
    lines = re.split(r"\r\n?|\n", read_text(file))
    return lines if lines[-1] else lines[:-1]


def are_notes(names: Sequence[str]) -> bool:
    """Tell a folder of notes, which is one person's, from a folder in which a file is a person.

    Example:
      >>> are_notes(["a.md", "b/c.docx", "d.txt"]), are_notes(["ann.txt", "ben.txt", "README.md"])
      (True, False)
    """
    return 2 * sum(PurePosixPath(name).suffix.lower() in NOTES for name in names) > len(names)


__all__ = [
    "KINDS",
    "NOTES",
    "OWNER",
    "REMEDIES",
    "Messages",
    "are_notes",
    "lines_of",
    "read_export",
    "read_export_folder",
]
