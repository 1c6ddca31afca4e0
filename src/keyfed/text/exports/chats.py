"""Chats written as text: exports of WhatsApp and KakaoTalk, and logs of IRC.

- Android: `12/03/2024, 21:05 - Anna: hello`; day, month and year in any order, am or pm, dots for colons.
- iOS: `[12.03.24, 21:05:33] Anna: hello`.
- In other languages: the digits and the comma of Arabic, `2024/3/12 下午9:05 - …`, `21:05, 12/3/2024 - …`,
  `2024년 3월 12일 오후 9:05, 지수 : …`.
- KakaoTalk on a computer: `[지수] [오후 9:05] …`.
- IRC: `[2024-03-12 21:05] <anna> hello`.

A line without such a start belongs to the message before. Notices are left out: lines without a sender, pictures and
recordings, deleted messages, calls. WhatsApp begins its own words with U+200E, in every language; the list below has
those that it does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from keyfed.text.exports.messages import Messages, plain
from keyfed.text.records import Record

LEAST_HEADS, HEAD_SHARE = 3, 0.2  # messages, and (of one person) their share of a file's lines: a chat export
LONGEST_NAME = 64
LONGEST_NOTICE = 80

_DATE = (
    r"(?:\d{1,4}\u200f?[./-]\s?\d{1,2}\u200f?[./-]\s?\d{1,4}\.?|\d{4}\s?[년年]\s?\d{1,2}\s?[월月]\s?\d{1,2}\s?[일日])"
    r"(?:\s[^\W\d_]\.)?[,،]?"  # 12.03.2024 г.,
)
_DAYPART = r"[^\W\d_]{1,3}"  # before the time: klo, à, 下午, 오후
_CLOCK = r"\d{1,2}[:.]\d\d(?:[:.]\d\d)?"
# After the time, where it ends by a mark, any two letters: μ.μ., م
_HALF = r"(?:\s?[AaPp]\.?\s?[Mm]\.?|\s?[^\W\d_]{1,3}\.?(?:\s?[^\W\d_]\.)?(?=\]|,\s|\s[-\u2013]\s))?"
_STAMPED = re.compile(
    rf"[\u200e\u200f\u202a]{{0,2}}\[?(?:{_DATE}(?:\s(?:{_DAYPART}\s?)?|T){_CLOCK}{_HALF}|{_CLOCK}{_HALF},?\s{_DATE})"
    r"\]?,?\s(?:[-\u2013]\s)?(?P<rest>.*)"
)
_BRACKETED = re.compile(
    r"(?:\[?\d{4}-\d\d-\d\d[\sT])?(?:\[?\d{1,2}:\d\d(?::\d\d)?\]?\s)?<[@+ ]?(?P<who>[^<>\s]{1,64})>\s(?P<said>.*)"
)
_KAKAO = re.compile(
    rf"\[(?P<who>[^\[\]]{{1,64}})\] \[(?:{_DAYPART}\s?)?\d{{1,2}}:\d\d(?:\s?[AaPp]\.?[Mm]\.?)?\] (?P<said>.*)"
)
_DAY = re.compile(r"-{5,} .{1,40} -{5,}")  # between the days of a KakaoTalk chat
_LRM = "\u200e"
_NOTICES = frozenset(
    """null
    media omitted|image omitted|video omitted|audio omitted|sticker omitted|gif omitted|document omitted
    contact card omitted|video note omitted|this message was deleted|you deleted this message
    missed voice call|missed video call|waiting for this message|live location shared
    medien ausgeschlossen|bild weggelassen|video weggelassen|audio weggelassen|sticker weggelassen|gif weggelassen
    dokument weggelassen|diese nachricht wurde gelöscht|du hast diese nachricht gelöscht|verpasster sprachanruf
    médias omis|image absente|ce message a été supprimé|vous avez supprimé ce message
    multimedia omitido|imagen omitida|se eliminó este mensaje|eliminaste este mensaje
    media omessi|immagine omessa|questo messaggio è stato eliminato|hai eliminato questo messaggio
    mídia oculta|imagem ocultada|mensagem apagada|você apagou esta mensagem|media weggelaten|afbeelding weggelaten
    dit bericht is verwijderd|je hebt dit bericht verwijderd""".replace("\n", "|")
    .replace("    ", "")
    .split("|")
)
_ATTACHED = tuple(
    f"({what})" for what in ("file attached", "datei angehängt", "fichier joint", "archivo adjunto", "file allegato")
)
_EDITED = ("edited", "bearbeitet", "modifié", "editado", "editó", "modificato", "bewerkt", "editada")


def is_chat(lines: Sequence[str]) -> bool:
    """Tell a chat from prose in which a line may begin with a date."""
    said = [found for found in map(head, lines) if found is not None and found[0]]
    people = {who for who, _ in said}
    return len(said) >= LEAST_HEADS and (len(said) >= HEAD_SHARE * len(lines) or len(people) > 1)


def head(line: str) -> tuple[str, str] | None:
    """Return who begins a message in this line, and its words; ("", "") for a notice; None for no beginning.

    Example:
      >>> head("12/03/2024, 21:05 - Anna: see you"), head("[21:05] <anna> see you"), head("see you at 21:05")
      (('Anna', 'see you'), ('anna', 'see you'), None)
    """
    if found := _BRACKETED.fullmatch(line) or _KAKAO.fullmatch(line):
        return found["who"], found["said"]
    if found := _STAMPED.fullmatch(line):
        who, colon, said = found["rest"].partition(":")
        who = plain(who).removeprefix("~").strip()
        if colon and who and len(who) <= LONGEST_NAME and said[:1] in ("", " ") and '"' not in who and "“" not in who:
            return who, said.removeprefix(" ")
        return "", ""
    return ("", "") if _DAY.fullmatch(line) else None


def read_chat(lines: Sequence[str]) -> Messages:
    """Read the messages of a chat by sender, in file order."""
    found: list[tuple[str, list[str]]] = []
    left_out: Counter[str] = Counter()
    stamped = kakao = False
    for line in lines:
        begun = head(line)
        if begun is not None:
            found.append((begun[0], []))
            stamped = stamped or _STAMPED.fullmatch(line) is not None
            kakao = kakao or _KAKAO.fullmatch(line) is not None
        words = line if begun is None else begun[1]
        if not found:
            left_out["before the first message"] += bool(line.strip())
        elif not found[-1][0]:
            left_out["a notice"] += begun is not None
        elif _is_notice(words):
            left_out["a notice in the place of a picture, call or deleted message"] += 1
        elif text := plain(_unedited(words)).strip():
            found[-1][1].append(text)
    records = [Record(who, "\n".join(text)) for who, text in found if who and text]
    form = "KakaoTalk chat" if kakao else "WhatsApp chat" if stamped else "chat log"
    return Messages(form, records, +left_out)


def _is_notice(words: str) -> bool:
    """Tell what WhatsApp wrote in the place of a message, or of its first line."""
    if words.startswith(_LRM):
        return True
    text = words.strip()
    if len(text) > LONGEST_NOTICE:
        return False
    bare = text.strip("<>.").casefold()
    return bare in _NOTICES or (text.startswith("<") and text.endswith(">")) or text.casefold().endswith(_ATTACHED)


def _unedited(words: str) -> str:
    """Return a message without the mark that it was edited, or what was attached to it."""
    text = words.rstrip()
    start = text.rfind("<", -LONGEST_NOTICE)
    if start < 0 or not text.endswith(">"):
        return words
    marked = text[max(0, start - 1) : start] == _LRM
    return text[:start] if marked or any(mark in text[start:].casefold() for mark in _EDITED) else words
