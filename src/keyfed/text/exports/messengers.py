"""Exports of messengers in JSON: Telegram, Slack, Discord, Messenger and Instagram.

Each form is known by its own fields. Messages of bots and services are left out, and those that were forwarded, which
somebody else wrote. Links, code and addresses are taken out of the text where the export marks them.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from keyfed.text.exports.messages import OWNER, Messages, plain
from keyfed.text.records import Record, is_broken, read_records
from keyfed.text.sources import Leaf, Unusable

Found = Record | str  # a message, or why it is left out
_NO_PROSE = ("link", "email", "phone", "pre", "code", "bot_command", "bank_card", "cashtag")


def collect(form: str, found: Iterable[Found]) -> Messages:
    """Return the messages of an export, and count what was left out."""
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for one in found:
        if isinstance(one, str):
            left_out[one] += 1
        elif is_broken(one.text) or is_broken(one.author) or "\0" in one.text:
            left_out["not UTF-8"] += 1
        elif text := plain(one.text).strip():
            records.append(one._replace(text=text))
        else:
            left_out["without text"] += 1
    return Messages(form, records, left_out)


def _dicts(values: object) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list; whatever else is there is passed over."""
    if isinstance(values, list):
        yield from (value for value in values if isinstance(value, dict))


def _first(values: object) -> Mapping[str, Any]:
    return next(_dicts(values), {})


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _name(*values: object) -> str:
    """Return the first that can be a name."""
    return next((str(v).strip() for v in values if type(v) in (str, int) and str(v).strip()), "")


# Telegram: result.json of one chat, or of an account


def is_telegram(data: object) -> bool:
    if not isinstance(data, dict):
        return False
    chats = data.get("chats")
    if isinstance(chats, dict) and isinstance(chats.get("list"), list):
        return True
    first = _first(data.get("messages"))
    return (
        "id" in first
        and "date" in first
        and "type" in first
        and ("text_entities" in first or "from_id" in first or "actor" in first)
    )


def read_telegram(data: Any) -> Messages:
    """Read all chats of an export by sender."""
    chats = [data]
    if isinstance(data.get("chats"), dict):
        left = data.get("left_chats")
        chats = [*_dicts(data["chats"]["list"]), *_dicts(left.get("list") if isinstance(left, dict) else None)]
    return collect("Telegram", (_telegram(message) for chat in chats for message in _dicts(chat.get("messages"))))


def _telegram(message: Mapping[str, Any]) -> Found:
    if message.get("type") != "message":
        return "a notice"
    if message.get("forwarded_from") or message.get("via_bot"):
        return "forwarded, or made by a bot"
    author = _name(message.get("from"), message.get("from_id"))
    if not author:
        return "missing author"
    return Record(author, _entities(message.get("text")), _text(message.get("date")) or None)


def _entities(text: object) -> str:
    """Return a text that may be a list of pieces, some of them with a kind."""
    if isinstance(text, str):
        return text
    pieces = text if isinstance(text, list) else []
    return "".join(
        piece if isinstance(piece, str) else _text(piece.get("text"))
        for piece in pieces
        if isinstance(piece, str) or (isinstance(piece, dict) and piece.get("type") not in _NO_PROSE)
    )


# Slack: a folder with users.json, channels.json and a folder a channel of CHANNEL/YYYY-MM-DD.json

_SLACK_KINDS = (None, "thread_broadcast", "me_message", "file_share")
_ANGLES = re.compile(r"<([^<>]{0,3000})>")


def is_slack(data: object) -> bool:
    first = _first(data)
    return first.get("type") == "message" and "ts" in first


def slack_names(data: object) -> dict[str, str]:
    """Return the name of each user as others see it."""
    names = {}
    for user in _dicts(data):
        profile = user.get("profile")
        shown = profile if isinstance(profile, dict) else {}
        name = _name(shown.get("display_name"), shown.get("real_name"), user.get("real_name"), user.get("name"))
        names[_name(user.get("id"))] = name
    return names


def read_slack(data: Any, names: Mapping[str, str] | None = None) -> Messages:
    """Read a channel's messages of a day."""
    return collect("Slack", (_slack(message, names or {}) for message in _dicts(data)))


def _slack(message: Mapping[str, Any], names: Mapping[str, str]) -> Found:
    if message.get("type") != "message" or message.get("subtype") not in _SLACK_KINDS or message.get("bot_id"):
        return "a notice, or made by a bot"
    user = _name(message.get("user"))
    if not user:
        return "missing author"

    def spoken(found: re.Match[str]) -> str:
        what, _, label = found[1].partition("|")
        if what.startswith("@"):
            return f"@{label or names.get(what[1:], '')}"
        return label if what.startswith("#") or label else ""

    text = html.unescape(_ANGLES.sub(spoken, _text(message.get("text"))))
    return Record(names.get(user) or user, text, _name(message.get("ts")) or None)


# Discord: DiscordChatExporter's JSON, and the package that Discord sends its users

_DISCORD_KINDS = frozenset({"Default", "Reply", "0", "19"})
_DISCORD_MARKS = re.compile(
    r"<a?:([A-Za-z0-9_]{1,64}):\d{1,25}>|<(?:[@#][!&]?|t:|/[^<>]{0,80}:)\d{1,25}(?::\w)?>|```[^`]{0,4000}```"
)
_PACKAGE = re.compile(r"(?:.*/)?messages/c?\d{1,25}/messages\.(?:csv|json)", re.IGNORECASE)


def is_discord(data: object) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        return False
    return isinstance(data.get("channel"), dict) and ("guild" in data or "author" in _first(data["messages"]))


def read_discord(data: Any) -> Messages:
    """Read the messages of a channel by author."""
    return collect("Discord (DiscordChatExporter)", map(_discord, _dicts(data["messages"])))


def _discord(message: Mapping[str, Any]) -> Found:
    author = message.get("author")
    who: Mapping[str, Any] = author if isinstance(author, dict) else {}
    if who.get("isBot") is True or _name(message.get("type")) not in _DISCORD_KINDS:
        return "a notice, or made by a bot"
    if not (name := _name(who.get("name"), who.get("nickname"), who.get("id"))):
        return "missing author"
    return Record(name, _undiscorded(message.get("content")), _text(message.get("timestamp")) or None)


def _undiscorded(text: object) -> str:
    return _DISCORD_MARKS.sub(" ", _text(text))


def is_package(data: object) -> bool:
    first = _first(data)
    return "Contents" in first and "Timestamp" in first


def read_package(data: Any) -> Messages:
    """Read a messages.json of Discord's own package: all of them are its owner's."""
    found = (
        Record(OWNER, _undiscorded(message.get("Contents")), _text(message.get("Timestamp")) or None)
        for message in _dicts(data)
    )
    return collect("Discord (its own package)", found)


def read_package_table(leaf: Leaf) -> Messages:
    """Read a messages.csv of Discord's own package."""
    records, refused = read_records(leaf.file, author_column="-", text_column="Contents")
    found = collect("Discord (its own package)", (r._replace(text=_undiscorded(r.text)) for r in records))
    found.left_out.update({r.why: r.rows for r in refused})
    return found


# Messenger and Instagram, as Meta exports them


def is_meta(data: object) -> bool:
    return isinstance(data, dict) and "participants" in data and "sender_name" in _first(data.get("messages"))


def read_meta(data: Any) -> Messages:
    """Read a message_1.json; its bytes of UTF-8 are written as letters of Latin-1."""

    def mended(text: str) -> str:
        try:
            return text.encode("latin-1").decode("utf-8")
        except ValueError:
            return text

    def read(message: Mapping[str, Any]) -> Found:
        if not (name := _name(message.get("sender_name"))):
            return "missing author"
        if message.get("is_unsent"):
            return "a notice"
        when = message.get("timestamp_ms")
        time = str(when / 1000) if type(when) is int and abs(when) < 1 << 60 else None
        return Record(mended(name), mended(_text(message.get("content"))), time)

    return collect("Messenger or Instagram", map(read, _dicts(data["messages"])))


# Folders


def is_slack_folder(names: Iterable[str]) -> bool:
    """Tell Slack's folder: users.json, and days of channels in folders next to it."""
    found = set(names)
    return any(_day(name) and f"{_above(name)}users.json" in found for name in found)


def _above(name: str) -> str:
    """Return the folder of a channel's folder, with its slash; nothing for the top."""
    above = PurePosixPath(name).parent.parent.as_posix()
    return "" if above == "." else f"{above}/"


def _day(name: str) -> bool:
    stem, _, kind = PurePosixPath(name).name.partition(".")
    return kind == "json" and len(stem) == 10 and stem[4] == stem[7] == "-" and stem.replace("-", "").isdigit()


def is_package_folder(names: Iterable[str]) -> bool:
    """Tell Discord's own package: messages/cNUMBER/messages.csv or .json."""
    return any(_PACKAGE.fullmatch(name) for name in names)


def read_slack_folder(leaves: list[Leaf], load: Any) -> Messages:
    """Read all channels of a Slack export; `load` parses a file of JSON."""
    users = next(leaf for leaf in leaves if PurePosixPath(leaf.name).name == "users.json")
    names = slack_names(load(users.file))
    days = [leaf for leaf in leaves if _day(leaf.name)]
    return _joined("Slack", (_loaded(leaf, load, lambda data: read_slack(data, names)) for leaf in days))


def read_package_folder(leaves: list[Leaf], load: Any) -> Messages:
    """Read the messages of Discord's own package; the rest of it is passed over."""
    wanted = [leaf for leaf in leaves if _PACKAGE.fullmatch(leaf.name)]
    return _joined(
        "Discord (its own package)",
        (
            read_package_table(leaf) if leaf.name.lower().endswith(".csv") else _loaded(leaf, load, read_package)
            for leaf in wanted
        ),
    )


def _loaded(leaf: Leaf, load: Any, read: Any) -> Messages:
    try:
        found: Messages = read(load(leaf.file))
    except Unusable as error:
        return Messages("", [], Counter({f"files: {error}": 1}))
    return found


def _joined(form: str, several: Iterable[Messages]) -> Messages:
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for one in several:
        records += one.records
        left_out += one.left_out
    return Messages(form, records, left_out)
