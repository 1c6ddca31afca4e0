"""Own text as people have it: a small export of each kind, in its real shape, has the right authors and lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest

from keyfed.errors import DataError
from keyfed.text.corpus import Corpus, pseudonym, read_corpus
from keyfed.text.exports.chats import head, is_chat
from keyfed.text.exports.mail import own_words
from keyfed.text.sources import MEDIA

LRM, NARROW = "\u200e", "\u202f"


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def dump(path: Path, content: object) -> Path:
    return put(path, json.dumps(content, ensure_ascii=False))


def zipped(path: Path, members: dict[str, str | bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def said(corpus: Corpus, *names: str) -> list[tuple[str, ...]]:
    """The lines of these authors; there are no others."""
    found = {author.name: author.lines for author in corpus.authors}
    assert set(found) == set(map(pseudonym, names))
    return [found[pseudonym(name)] for name in names]


def left_out(corpus: Corpus) -> dict[str, str]:
    return {skipped.why: skipped.what for skipped in corpus.skipped}


# WhatsApp


ANDROID = f"""12/03/2024, 21:04 - Messages and calls are end-to-end encrypted. Tap to learn more.
12/03/2024, 21:05 - Anna: are you coming?
we start at nine
12/03/2024, 21:06 - Ben Smith: <Media omitted>
12/03/2024, 21:06 - Ben Smith: yes, at 20:00 - promised
12/03/2024, 21:07 - +49 170 1234567: who is this {LRM}<This message was edited>
12/03/2024, 21:08 - Anna added Carla
12/03/2024, 21:09 - Anna: This message was deleted
12/03/2024, 21:09 - Ben Smith: {LRM}IMG-20240312-WA0001.jpg (file attached)
my new bike
12/03/2024, 21:10 - Anna: null
"""
IOS = f"""{LRM}[12.03.24, 21:04:01] The Club: {LRM}Messages and calls are end-to-end encrypted.
[12.03.24, 21:05:33] Anna: are you coming?
we start at nine
{LRM}[12.03.24, 21:06:02] Ben Smith: {LRM}image omitted
[12.03.24, 21:06:40] Ben Smith: yes, at 20:00 - promised
[12.03.24, 21:07:12] ~{NARROW}+49 170 1234567: who is this
{LRM}[12.03.24, 21:08:00] Anna: {LRM}Anna added Carla
{LRM}[12.03.24, 21:09:00] Ben Smith: {LRM}<attached: 00000012-PHOTO-2024-03-12.jpg>
my new bike
"""
LINES = [("are you coming?", "we start at nine"), ("yes, at 20:00 - promised", "my new bike"), ("who is this",)]


@pytest.mark.parametrize("text", [ANDROID, IOS], ids=["Android", "iOS"])
def test_whatsapp(tmp_path: Path, text: str) -> None:
    corpus = read_corpus(put(tmp_path / "WhatsApp Chat with The Club.txt", text))
    assert said(corpus, "Anna", "Ben Smith", "+49 170 1234567") == LINES
    assert corpus.natural
    assert corpus.formats == ("WhatsApp chat",)
    assert "a notice in the place of a picture, call or deleted message" in left_out(corpus)


def test_whatsapp_as_the_phone_packs_it(tmp_path: Path) -> None:
    members: dict[str, str | bytes] = {"_chat.txt": "\ufeff" + IOS.replace("\n", "\r\n")}
    members |= {f"0000001{k}-PHOTO.jpg": b"\xff\xd8" * 9_000_000 for k in range(2)}  # pictures are no text, nor a bomb
    corpus = read_corpus(zipped(tmp_path / "WhatsApp Chat - The Club.zip", members))
    assert said(corpus, "Anna", "Ben Smith", "+49 170 1234567") == LINES
    assert left_out(corpus)["not a text file (.jpg)"] == "2 files"
    assert ".jpg" in MEDIA


@pytest.mark.parametrize(
    "stamp",
    [
        "12/03/2024, 21:05 - ", "3/12/24, 9:05 PM - ", f"3/12/24, 9:05{NARROW}PM - ", "12.03.24, 21:05 - ",
        "2024-03-12, 21:05 - ", "2024/03/12 21:05 - ", "12-03-2024 21:05 - ", "12. 3. 2024, 21:05 - ",
        "12/3/2024, 9:05 p. m. - ", "12/03/24 21.05 - ", "12/03/2024 à 21:05 - ", "[12/03/24, 9:05:33 PM] ",
        f"{LRM}[2024-03-12, 21:05:33] ", "[12/03/2024 21:05:33] ", "٢٠٢٤/٠٣/١٢، 21:05 - ",
        "\u200f١٢/٠٣/٢٠٢٤، ٩:٠٥ م - ", "١٢\u200f/٠٣\u200f/٢٠٢٤، ٩:٠٥ م - ", "۱۴۰۲/۱۲/۲۲، ۲۱:۰۵ - ",
        "2024. 3. 12. 오후 9:05, ", "[2024. 3. 12. 오후 9:05:01] ",
        "2024년 3월 12일 오후 9:05, ", "2024년 3월 12일 오후 9:05 - ",
        "2024/3/12 下午9:05 - ", "[2024/3/12 下午9:05:01] ", "2024年3月12日 21:05 - ", "21:05, 12/3/2024 - ",
        "12.03.24 г., 21:05 - ", "12/3/24, 9:05 μ.μ. - ", "12.3.2024 klo 21.05 - ", "12/03/2024 9:05 PTG - ",
    ],
)  # fmt: skip
def test_forms_of_dates(stamp: str) -> None:
    assert head(f"{stamp}Anna: see you: at nine") == ("Anna", "see you: at nine")
    assert head(f"{stamp}Anna left") == ("", "")


def test_a_chat_of_a_korean_phone(tmp_path: Path) -> None:
    lines = ["2024. 3. 12. 오후 9:05, 지수 : 안녕 오늘 뭐해", "2024. 3. 12. 오후 9:06, 민준 : 집에 있어", "잘 지내?"]
    corpus = read_corpus(put(tmp_path / "KakaoTalkChats.txt", "\n".join(lines * 3)))
    assert said(corpus, "지수", "민준") == [("안녕 오늘 뭐해",) * 3, ("집에 있어", "잘 지내?") * 3]


def test_kakaotalk_on_a_computer(tmp_path: Path) -> None:
    lines = [
        "--------------- 2024년 3월 12일 화요일 ---------------",
        "[지수] [오후 9:05] 안녕 오늘 뭐해",
        "[민준] [오후 9:06] 집에",
        "있어",
    ]
    corpus = read_corpus(put(tmp_path / "KakaoTalk_20240312.txt", "\n".join(["지수 님과 카카오톡 대화", *lines * 3])))
    assert said(corpus, "지수", "민준") == [("안녕 오늘 뭐해",) * 3, ("집에", "있어") * 3]
    assert corpus.formats == ("KakaoTalk chat",)


def test_one_author_is_picked_and_prose_with_dates_is_prose(tmp_path: Path) -> None:
    path = put(tmp_path / "chat.txt", ANDROID)
    mine = read_corpus(path, me="Anna")
    assert [author.lines for author in mine.authors] == LINES[:1]
    assert not mine.natural, "one person is cut into alike clients"
    with pytest.raises(DataError, match="messages of 3 people, none of that --me") as caught:
        read_corpus(path, me="Zoe")
    assert "Anna" not in str(caught.value)
    diary = ["12/03/2024, 21:05 went home", *["and then there was a lot to write about"] * 20]
    assert not is_chat(diary)


# Telegram


TELEGRAM = {
    "name": "The Club", "type": "private_group", "id": 123,
    "messages": [
        {"id": 1, "type": "service", "date": "2024-03-12T21:00:00", "actor": "Anna",
         "action": "create_group", "text": ""},
        {"id": 2, "type": "message", "date": "2024-03-12T21:05:00", "from": "Anna", "from_id": "user1",
         "text": ["look at ", {"type": "link", "text": "https://example.org"}, " it is ",
                  {"type": "bold", "text": "great"}],
         "text_entities": []},
        {"id": 3, "type": "message", "date": "2024-03-12T21:06:00", "from": "Ben", "from_id": "user2",
         "text": "two\nlines", "text_entities": [{"type": "plain", "text": "two\nlines"}]},
        {"id": 4, "type": "message", "date": "2024-03-12T21:07:00", "from": "Ben", "from_id": "user2",
         "forwarded_from": "News", "text": "not mine", "text_entities": []},
        {"id": 5, "type": "message", "date": "2024-03-12T21:08:00", "from": None, "from_id": "user3",
         "text": "account deleted", "text_entities": []},
        {"id": 6, "type": "message", "date": "2024-03-12T21:09:00", "from": "Anna", "from_id": "user1",
         "photo": "a.jpg", "text": "", "text_entities": []},
    ],
}  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
def test_telegram(tmp_path: Path, whole: bool) -> None:
    account = {"about": "…", "personal_information": {"user_id": 1}, "chats": {"about": "…", "list": [TELEGRAM]}}
    corpus = read_corpus(dump(tmp_path / "result.json", account if whole else TELEGRAM))
    assert said(corpus, "Anna", "Ben", "user3") == [
        ("look at  it is great",), ("two", "lines"), ("account deleted",),
    ]  # fmt: skip
    assert set(left_out(corpus)) == {"a notice", "forwarded, or made by a bot", "without text"}


# Slack


SLACK: dict[str, object] = {
    "users.json": [
        {"id": "U01", "name": "anna", "real_name": "Anna A",
         "profile": {"display_name": "Anna", "real_name": "Anna A"}},
        {"id": "U02", "name": "ben", "profile": {"display_name": "", "real_name": "Ben B"}},
    ],
    "channels.json": [{"id": "C1", "name": "general", "members": ["U01", "U02"]}],
    "general/2024-03-12.json": [
        {"type": "message", "subtype": "channel_join", "user": "U01", "ts": "1710277500.0",
         "text": "<@U01> has joined"},
        {"type": "message", "user": "U01", "ts": "1710277501.000100",
         "text": "hi <@U02>, see <#C1|general> &amp; <https://example.org|the page> or <https://example.org>"},
        {"type": "message", "user": "U02", "ts": "1710277502.000100", "text": "ok"},
        {"type": "message", "subtype": "bot_message", "bot_id": "B1", "ts": "1710277503.0", "text": "build failed"},
    ],
    "random/2024-03-11.json": [{"type": "message", "user": "U01", "ts": "1710190000.0", "text": "a day before"}],
}  # fmt: skip


@pytest.mark.parametrize("form", ["folder", "zip", "zip with a folder"])
def test_slack(tmp_path: Path, form: str) -> None:
    if form == "folder":
        for name, content in SLACK.items():
            dump(tmp_path / "export" / name, content)
        place = tmp_path / "export"
    else:
        top = "Club Slack export/" if form == "zip with a folder" else ""
        place = zipped(tmp_path / "export.zip", {top + name: json.dumps(what) for name, what in SLACK.items()})
    corpus = read_corpus(place)
    assert said(corpus, "Anna", "Ben B") == [("a day before", "hi @Ben B, see general & the page or"), ("ok",)]
    assert corpus.formats == ("Slack",)


# Discord


DISCORD = {
    "guild": {"id": "1", "name": "Club"}, "channel": {"id": "2", "type": "GuildTextChat", "name": "general"},
    "messageCount": 4,
    "messages": [
        {"id": "3", "type": "GuildMemberJoin", "timestamp": "2024-03-12T21:04:00+00:00", "content": "Joined.",
         "author": {"id": "9", "name": "anna", "nickname": "Anna", "isBot": False}},
        {"id": "4", "type": "Default", "timestamp": "2024-03-12T21:06:00.123+00:00",
         "content": "later <:smile:123456> word",
         "author": {"id": "9", "name": "anna", "nickname": "Anna", "isBot": False}},
        {"id": "5", "type": "Reply", "timestamp": "2024-03-12T21:05:00.123+00:00", "content": "sooner",
         "author": {"id": "9", "name": "anna", "nickname": "Anna", "isBot": False}},
        {"id": "6", "type": "Default", "timestamp": "2024-03-12T21:07:00+00:00", "content": "beep",
         "author": {"id": "8", "name": "helper", "isBot": True}},
        {"id": "7", "type": "Default", "timestamp": "2024-03-12T21:08:00+00:00", "content": "fine",
         "author": {"id": "7", "name": "ben", "isBot": False}},
    ],
}  # fmt: skip


def test_discord_as_the_exporter_writes_it(tmp_path: Path) -> None:
    corpus = read_corpus(dump(tmp_path / "Club - general [2].json", DISCORD))
    assert said(corpus, "anna", "ben") == [("sooner", "later   word"), ("fine",)]


def test_discord_table_of_the_exporter(tmp_path: Path) -> None:
    table = 'AuthorID,Author,Date,Content,Attachments,Reactions\n9,anna,2024-03-12T21:05:00+00:00,"hi, all",,\n'
    table += "7,ben,2024-03-12T21:06:00+00:00,fine,,\n"
    assert said(read_corpus(put(tmp_path / "general.csv", table)), "anna", "ben") == [("hi, all",), ("fine",)]


@pytest.mark.parametrize("form", ["csv", "json"])
def test_discord_package(tmp_path: Path, form: str) -> None:
    rows = [("11", "2024-03-12 21:05:00", "see you <@123456>"), ("10", "2024-03-12 21:04:00", "hello, all")]
    file = io.StringIO()
    csv.writer(file).writerows([("ID", "Timestamp", "Contents", "Attachments"), *((*row, "") for row in rows)])
    objects = json.dumps([{"ID": int(k), "Timestamp": t, "Contents": c, "Attachments": ""} for k, t, c in rows])
    content = file.getvalue() if form == "csv" else objects
    put(tmp_path / "package" / "messages" / "c123" / f"messages.{form}", content)
    dump(tmp_path / "package" / "messages" / "c123" / "channel.json", {"id": "123", "type": 1})
    dump(tmp_path / "package" / "messages" / "index.json", {"123": "Direct Message with ben"})
    dump(tmp_path / "package" / "account" / "user.json", {"email": "anna@example.org"})
    corpus = read_corpus(tmp_path / "package")
    assert [sorted(author.lines) for author in corpus.authors] == [["hello, all", "see you"]]
    assert not corpus.natural, "the package is one person's"


# Messenger and Instagram


def test_meta(tmp_path: Path) -> None:
    data = {
        "participants": [{"name": "Zo\u00c3\u00ab"}, {"name": "Ben"}],
        "messages": [
            {"sender_name": "Ben", "timestamp_ms": 1710277502000, "content": "later caf\u00c3\u00a9"},
            {"sender_name": "Zo\u00c3\u00ab", "timestamp_ms": 1710277501000, "content": "sooner"},
            {"sender_name": "Ben", "timestamp_ms": 1710277500000, "photos": [{"uri": "a.jpg"}]},
        ],
    }
    assert said(read_corpus(dump(tmp_path / "message_1.json", data)), "Zoë", "Ben") == [("sooner",), ("later café",)]


# Mail


MBOX = b"""From 1@xxx Tue Mar 12 21:05:00 2024
From: =?utf-8?q?Anna_M=C3=BCller?= <Anna@example.org>
To: ben@example.org
Subject: lunch
Date: Tue, 12 Mar 2024 21:05:00 +0000
Content-Type: multipart/alternative; boundary="b1"

--b1
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

Dear Ben,

let us meet at the caf=E9 that we found last week when it rained so
hard.

>From here it is near.
--=20
Anna M=FCller
Head of lunch

--b1
Content-Type: text/html

<p>Dear Ben</p>
--b1--

From 2@xxx Tue Mar 12 21:06:00 2024
From: ben@example.org
Date: Tue, 12 Mar 2024 21:06:00 +0000

Fine!

On Tue, 12 Mar 2024 at 21:05, Anna wrote:
> let us meet
>> at noon
Sent from my phone

From 3@xxx Tue Mar 12 21:07:00 2024
From: ben@example.org
Date: Tue, 12 Mar 2024 21:07:00 +0000
Content-Type: text/html; charset=utf-8
Content-Transfer-Encoding: base64

PGhlYWQ+PHN0eWxlPnB7fTwvc3R5bGU+PC9oZWFkPjxwPk9uZSAmYW1wOyB0d288L3A+

From 4@xxx Tue Mar 12 21:08:00 2024
From: anna@example.org
Date: Tue, 12 Mar 2024 21:08:00 +0000

-----Original Message-----
quoted by Outlook
"""
MAIL_LINES = [
    ("Dear Ben,", "let us meet at the café that we found last week when it rained so hard.", "From here it is near."),
    ("Fine!", "One & two"),
]


@pytest.mark.parametrize("name", ["All mail.mbox", "INBOX"])
def test_mbox(tmp_path: Path, name: str) -> None:
    corpus = read_corpus(put(tmp_path / name, MBOX))
    assert said(corpus, "anna@example.org", "ben@example.org") == MAIL_LINES
    assert "nothing but quotations" in left_out(corpus)
    mine = read_corpus(tmp_path / name, me="ben@example.org")
    assert [author.lines for author in mine.authors] == [MAIL_LINES[1]]


def test_an_mbox_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name in ("All mail.mbox", "INBOX"):
        corpus = read_corpus(put(tmp_path / name, b"\xef\xbb\xbf" + MBOX))
        assert said(corpus, "anna@example.org", "ben@example.org") == MAIL_LINES


def test_single_mails_in_a_folder(tmp_path: Path) -> None:
    for k, message in enumerate(MBOX.split(b"\nFrom ")[:3]):
        put(tmp_path / "mail" / f"{k}.eml", message.partition(b"\n")[2])
    corpus = read_corpus(tmp_path / "mail")
    assert said(corpus, "anna@example.org", "ben@example.org")[1] == MAIL_LINES[1]


def test_own_words_of_a_reply_below_a_quotation() -> None:
    body = "On Tue, 12 Mar 2024 at 21:05, Anna with a rather long name of her own\nand a second line wrote:\n> lunch?\n"
    assert own_words(body) == []
    body += "\nNo.\n"
    assert own_words(body) == ["No."]


# Notes


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DOCUMENT = (
    f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?><w:document xmlns:w="{WORD}"><w:body>'
    "<w:p><w:r><w:t>A first </w:t></w:r><w:r><w:t>paragraph &amp; more.</w:t></w:r></w:p>"
    '<w:p><w:ins><w:r><w:t xml:space="preserve">kept </w:t></w:r></w:ins>'
    "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
    "<w:r><w:t>here</w:t><w:br/><w:t>and below</w:t></w:r></w:p>"
    "<w:tbl><w:tr><w:tc><w:p><w:r><w:instrText>PAGE</w:instrText><w:t>a cell</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
    "</w:body></w:document>"
)
DOCX_LINES = ("A first paragraph & more.", "kept here", "and below", "a cell")
NOTE = """---
tags: [home]
---
# Monday *plans*

- [ ] call [Anna](tel:123) about **the trip**
> a ~~bad~~ thought, see [[2024/Rome|Rome]] ![[map.png]]

```python
print("no prose")
```
| day | place |
|-----|-------|
| one | Rome  |
snake_case stays, `code` too<!-- not this -->
"""
NOTE_LINES = (
    "Monday plans", "call Anna about the trip", "a bad thought, see Rome", "day place", "one Rome",
    "snake_case stays, code too",
)  # fmt: skip


def test_a_folder_of_notes_is_one_person_unless_it_is_said(tmp_path: Path) -> None:
    notes = tmp_path / "vault"
    put(notes / "monday.md", NOTE)
    zipped(notes / "letters" / "one.docx", {"[Content_Types].xml": "<Types/>", "word/document.xml": DOCUMENT})
    put(notes / "letters" / "two.txt", "plain too\n")
    put(notes / ".obsidian" / "app.json", "{}")
    corpus = read_corpus(notes)
    assert [author.lines for author in corpus.authors] == [(*DOCX_LINES, "plain too", *NOTE_LINES)]
    assert not corpus.natural
    assert corpus.formats == ("Word", "text", "Markdown")
    clients = read_corpus(notes, folder="clients")
    assert {author.name for author in clients.authors} == {"monday.md", "letters/one.docx", "letters/two.txt"}
    assert clients.natural
    with pytest.raises(DataError, match="folder is"):
        read_corpus(notes, folder="people")


def test_one_document(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.docx", {"word/document.xml": DOCUMENT})
    assert read_corpus(path).authors[0].lines == DOCX_LINES


# Tables


ROWS = [("anna", "hello, you there"), ("ben", "who; me?"), ("anna", "yes you"), ("ben", "café is open")]


def table(mark: str, header: tuple[str, ...] = ("author", "text"), rows: object = ROWS) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=mark, lineterminator="\r\n").writerows([*([header] if header else []), *rows])  # type: ignore[misc]
    return file.getvalue()


EXPECTED = [("hello, you there", "yes you"), ("who; me?", "café is open")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_tables_as_spreadsheets_write_them(tmp_path: Path, mark: str, encoding: str) -> None:
    path = put(tmp_path / "chat.csv", table(mark).encode(encoding))
    assert said(read_corpus(path), "anna", "ben") == EXPECTED


def test_the_mark_that_excel_writes_in_front(tmp_path: Path) -> None:
    assert said(read_corpus(put(tmp_path / "a.csv", "sep=;\r\n" + table(";"))), "anna", "ben") == EXPECTED


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_without_names(tmp_path: Path, mark: str) -> None:
    path = put(tmp_path / ("a.tsv" if mark == "\t" else "a.csv"), table(mark, ()))
    corpus = read_corpus(path)
    assert said(corpus, "anna", "ben") == EXPECTED
    assert "author in column 1, text in column 2, as what is in them suggests" in corpus.formats[0]
    assert said(read_corpus(path, author_column="1", text_column="2"), "anna", "ben") == EXPECTED


def test_columns_by_number_and_one_persons_rows(tmp_path: Path) -> None:
    rows = [(str(k), "2024-03-12", "general", who, text) for k, (who, text) in enumerate(ROWS)]
    path = put(tmp_path / "a.csv", table(",", (), rows))
    assert said(read_corpus(path, author_column="4", text_column="5"), "anna", "ben") == EXPECTED
    (one,) = read_corpus(path, author_column="-", text_column="5").authors
    assert one.lines == tuple(text for _, text in ROWS)
    named = put(tmp_path / "b.csv", table(",", ("k", "day", "place", "who", "words"), rows))
    assert said(read_corpus(named, author_column="4", text_column="5"), "anna", "ben") == EXPECTED


def test_columns_that_cannot_be_told_are_asked_for_by_number(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "1,anna says hello to you,ben says hello to you\n2,who are you there,me again now\n")
    with pytest.raises(DataError, match=r"looks like data.*which of the 3 columns.*--author-column 1") as caught:
        read_corpus(path)
    assert "hello" not in str(caught.value)


def test_what_is_missing_is_named_alone(tmp_path: Path) -> None:
    """The advice of each message works when it is followed."""
    bare = put(tmp_path / "bare.csv", "see you at nine, then\n".replace(",", "") * 3 + "where are you now\n" * 3)
    with pytest.raises(DataError, match="--author-column - reads its one column as one person's text"):
        read_corpus(bare)
    assert len(read_corpus(bare, author_column="-").authors[0].lines) == 6
    table = put(tmp_path / "notes.csv", "id,note\n0,see you at nine\n1,where are you now\n")
    with pytest.raises(DataError, match=r"2 columns \(id, note\) .*or --author-column - if one person wrote all"):
        read_corpus(table)
    with pytest.raises(DataError, match=r"do not include text \(or body, …\); name it with --text-column NAME\)"):
        read_corpus(table, author_column="-")
    assert read_corpus(table, author_column="-", text_column="note").authors[0].lines[0] == "see you at nine"
    one = put(tmp_path / "one.csv", "text\nsee you at nine\nwhere are you now\n")
    with pytest.raises(DataError, match=r"its 1 column \(text\) does not include author"):
        read_corpus(one)
    assert len(read_corpus(one, author_column="-").authors[0].lines) == 2


def test_a_first_row_that_may_be_text_is_not_shown(tmp_path: Path) -> None:
    for first, shown in (("zebra,hello you", "its 2 columns do not"), ("zebra,note", r"its 2 columns \(…, note\) do")):
        with pytest.raises(DataError, match=shown) as caught:
            read_corpus(put(tmp_path / "a.csv", f"{first}\nben,how are you\n"))
        assert "zebra" not in str(caught.value)


def test_a_quotation_mark_that_is_never_closed_is_noticed(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", 'author,text\nanna,fine\nben,"open\n' + "anna,swallowed\n" * 30)
    corpus = read_corpus(path)
    assert said(corpus, "anna") == [("fine",)]
    assert corpus.skipped[0].what == "1 row of a.csv from line 3"
    assert "never closed" in corpus.skipped[0].why
    inch = put(tmp_path / "b.csv", 'author,text\nanna,a 5" pipe\nben,fine\n')
    assert said(read_corpus(inch), "anna", "ben") == [('a 5" pipe',), ("fine",)]


def test_tables_and_chats_of_a_folder_or_zip_share_their_authors(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    put(folder / "a.csv", table(","))
    put(folder / "deep" / "b.jsonl", '{"user": "anna", "body": "from a row"}\n')
    put(folder / "notes.txt", "my own note\n")
    members = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for place in (folder, zipped(tmp_path / "all.zip", dict(members))):
        corpus = read_corpus(place)
        found = {author.name: author.lines for author in corpus.authors}
        assert found == {
            pseudonym("anna"): (*EXPECTED[0], "from a row"), pseudonym("ben"): EXPECTED[1],
            "notes.txt": ("my own note",),
        }  # fmt: skip
        assert corpus.natural


@pytest.mark.parametrize("outer", [lambda rows: rows, lambda rows: {"count": 2, "comments": rows}])
def test_rows_in_one_json(tmp_path: Path, outer) -> None:
    rows = [{"user": "anna", "body": "one"}, {"user": "ben", "body": "two"}, {"user": "ben"}]
    corpus = read_corpus(dump(tmp_path / "a.json", outer(rows)))
    assert said(corpus, "anna", "ben") == [("one",), ("two",)]
    assert left_out(corpus) == {"missing text": "1 message of a.json"}
    named = [{"who": "anna", "what": "one"}, {"who": "ben", "what": "two"}]
    assert said(read_corpus(dump(tmp_path / "b.json", named), author_column="who", text_column="what"), "anna", "ben")


def test_texts_in_one_json(tmp_path: Path) -> None:
    corpus = read_corpus(dump(tmp_path / "a.json", ["first text", "second\ntext"]))
    assert corpus.authors[0].lines == ("first text", "second", "text")
    assert not corpus.natural


# Stack Exchange


POSTS = """<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" PostTypeId="1" OwnerUserId="7" CreationDate="2014-01-21T20:26:05.383"
    Body="&lt;p&gt;Malt &amp;amp; hops&lt;/p&gt;" />
  <row Id="2" PostTypeId="2" OwnerUserId="8" CreationDate="2014-01-21T20:27:05.383" Body="&lt;p&gt;Yes&lt;/p&gt;" />
  <row Id="3" PostTypeId="4" OwnerUserId="7" CreationDate="2014-01-21T20:28:05.383" Body="wiki" />
</posts>
"""


def test_stack_exchange(tmp_path: Path) -> None:
    path = put(tmp_path / "Posts.xml.gz", gzip.compress(POSTS.encode()))
    assert said(read_corpus(path), "7", "8") == [("Malt & hops",), ("Yes",)]
    comments = (
        '<comments><row Id="1" PostId="1" Text="nice &amp; short" CreationDate="2014-01-21" UserId="9" /></comments>'
    )
    assert said(read_corpus(put(tmp_path / "Comments.xml", comments)), "9") == [("nice & short",)]


# Folders and archives of any of these


META = {"participants": [{"name": "Ben"}], "messages": [{"sender_name": "Ben", "timestamp_ms": 1, "content": "later"}]}
SINGLE: dict[str, bytes] = {
    "WhatsApp Chat with The Club.txt": ANDROID.encode(),
    "_chat.txt": IOS.encode("utf-16"),
    "result.json": json.dumps(TELEGRAM).encode(),
    "Club - general [2].json": json.dumps(DISCORD).encode(),
    "message_1.json": json.dumps(META).encode(),
    "All mail.mbox": MBOX,
    "Posts.xml": POSTS.encode(),
    "named.csv": table(";").encode("cp1252"),
    "unnamed.tsv": table("\t", ()).encode("utf-16"),
    "rows.jsonl": b'{"user": "anna", "body": "one"}\n{"user": "ben", "body": "two"}\n',
    "rows.json": b'[{"user": "anna", "body": "one"}, {"user": "ben", "body": "two"}]',
    "note.md": NOTE.encode(),
}


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("name", SINGLE)
def test_what_is_read_alone_is_read_in_a_folder_and_in_a_zip(tmp_path: Path, name: str, packed: bool) -> None:
    alone = read_corpus(put(tmp_path / "alone" / name, SINGLE[name]))
    other = tmp_path / "all.zip" if packed else tmp_path / "all"
    if packed:
        zipped(other, {f"my export/{name}": SINGLE[name], "__MACOSX/._x": b"\0"})
    else:
        put(other / "deep" / name, SINGLE[name])
    found = read_corpus(other)
    assert [author.lines for author in found.authors] == [author.lines for author in alone.authors]
    assert found.formats == alone.formats
    if alone.natural:
        assert {author.name for author in found.authors} == {author.name for author in alone.authors}


def test_what_is_packed_twice_is_left_out_and_it_is_said(tmp_path: Path) -> None:
    inner = zipped(tmp_path / "inner.zip", {"_chat.txt": ANDROID}).read_bytes()
    twice: dict[str, str | bytes] = {"Posts.xml.gz": gzip.compress(POSTS.encode()), "deep/a.zip": inner, "b.txt": "own"}
    corpus = read_corpus(zipped(tmp_path / "all.zip", twice))
    assert [author.lines for author in corpus.authors] == [("own",)]
    assert left_out(corpus) == {
        "not a text file (.gz in a .zip); unpack the .zip, and name the folder": "Posts.xml.gz",
        "not a text file (.zip); an archive in a folder or archive; unpack it": "deep/a.zip",
    }
    put(tmp_path / "folder" / "Posts.xml.gz", gzip.compress(POSTS.encode()))
    assert len(read_corpus(tmp_path / "folder").authors) == 2


def test_kinds_that_are_not_read_say_what_to_do(tmp_path: Path) -> None:
    for name, advice in [
        ("a.xlsx", "save the sheet as CSV"),
        ("a.html", "export the messages as JSON"),
        ("a.7z", "unpack it"),
    ]:
        with pytest.raises(DataError, match=advice):
            read_corpus(put(tmp_path / name, "x"))
    with pytest.raises(DataError, match="addresses of the web are not read"):
        read_corpus(Path("https://example.org/a.csv"))
