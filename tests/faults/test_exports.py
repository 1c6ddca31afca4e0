"""Exports that do harm when they are read: archives that unpack without end, XML with entities, deep JSON, names that
lead elsewhere, and damage anywhere. Each is left out with a reason, which quotes nothing.
"""

from __future__ import annotations

import json
import random
import zipfile

import pytest

from keyfed.errors import KeyfedError
from keyfed.text import sources
from keyfed.text.corpus import read_corpus
from keyfed.text.exports import chats, documents, mail, messages, read_json_export
from keyfed.text.exports.messages import html_to_text
from keyfed.text.sources import Unusable

SECRET = "zebraquantum"
LINE = f"my {SECRET} door code"
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def pack(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def document(text, before=""):
    return f'<?xml version="1.0"?>{before}<w:document xmlns:w="{WORD}"><w:p><w:t>{text}</w:t></w:p></w:document>'


def entities():
    rows = "".join(f'<!ENTITY l{k} "{f"&l{k - 1};" * 10}">' for k in range(1, 10))
    return f'<!DOCTYPE w [<!ENTITY l0 "{SECRET}">{rows}]>'


def why(path):
    """All that is said of a file."""
    try:
        return " ".join(f"{s.what}: {s.why}" for s in read_corpus(path).skipped)
    except KeyfedError as error:
        return str(error)


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LEAST_UNPACKED", 1 << 20)
    blank = b"x\n" * (1 << 20)
    many = pack(tmp_path / "many.zip", {f"{k}.txt": blank[: 1 << 18] for k in range(8)})
    assert "unpacks to more than" in why(many)
    one = pack(tmp_path / "one.zip", {"a.txt": blank})
    assert "unpacks to more than" in why(one)
    monkeypatch.setattr(sources, "MOST_RATIO", 10**9)  # the mutant reads it all
    assert len(read_corpus(one).authors[0].lines) == 1 << 20


def test_a_member_that_is_larger_than_its_archive_says_is_read_no_further(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.txt": b"good text\n" * 1000}, zipfile.ZIP_STORED)
    data = path.read_bytes().replace((10_000).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    path.write_bytes(data)
    said = why(path)
    assert "unreadable" in said or len(read_corpus(path).authors[0].lines) == 10


def test_too_many_members_and_archives_in_archives(tmp_path, monkeypatch):
    inner = pack(tmp_path / "inner.zip", {"a.txt": LINE})
    outer = pack(tmp_path / "outer.zip", {"inner.zip": inner.read_bytes(), "b.txt": "good text\n"})
    assert [author.lines for author in read_corpus(outer).authors] == [("good text",)]
    monkeypatch.setattr(sources, "MOST_MEMBERS", 10)
    assert "at most 10 are read" in why(pack(tmp_path / "many.zip", {f"{k}.txt": "x" for k in range(11)}))


def test_names_that_lead_elsewhere_are_only_names(tmp_path):
    (tmp_path / "secret.txt").write_text(LINE)
    members = {"../secret.txt": "one\n", "/etc/notes.txt": "two\n", "C:\\notes.txt": "three\n"}
    path = pack(tmp_path / "deep.zip", members)
    link = zipfile.ZipInfo("link.txt")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "../secret.txt")
    before = sorted(tmp_path.rglob("*"))
    lines = {line for author in read_corpus(path).authors for line in author.lines}
    assert lines <= {"one", "two", "three"}
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked to the disk"


def test_an_encrypted_archive_says_so(tmp_path):
    path = pack(tmp_path / "a.zip", {"a.txt": LINE})
    data = bytearray(path.read_bytes())
    data[6] |= 1  # of the file's own head, and of the archive's list
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    assert "encrypted" in why(path)


def test_a_document_that_unpacks_without_end_is_refused(tmp_path):
    path = pack(tmp_path / "a.docx", {"word/document.xml": document("x" * (64 << 20))})
    assert "unpacks to far more than text does" in why(path)


def test_padding_buys_a_document_no_room(tmp_path, monkeypatch):
    """A small archive holds a .docx, which is padded with what packs to nothing."""
    inner = pack(tmp_path / "a.docx", {"word/document.xml": document("x" * (1 << 23))}).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.docx", "a", zipfile.ZIP_STORED) as archive:
        archive.writestr("padding", bytes(1 << 21))
    assert "unpacks to far more than text does" in why(tmp_path / "a.docx")
    padded = (tmp_path / "a.docx").read_bytes()
    outer = pack(tmp_path / "outer.zip", {"a.docx": padded, "b.docx": inner})
    assert why(outer).count("unpacks to far more than text does") == 2
    monkeypatch.setattr(documents, "LEAST_DOCUMENT", 1 << 24)
    assert documents.docx_lines(padded) == ["x" * (1 << 23)]
    assert why(outer).count("unpacks to far more than text does") == 2  # by what it takes in the archive alone
    monkeypatch.setattr(documents, "MOST_DOCUMENT", 1 << 22)
    assert "unpacks to far more than text does" in why(tmp_path / "a.docx")
    honest = pack(tmp_path / "honest.docx", {"word/document.xml": document(LINE)}).read_bytes()
    assert read_corpus(pack(tmp_path / "notes.zip", {"a.docx": honest})).authors[0].lines == (LINE,)


@pytest.mark.parametrize("before", [entities(), '<!DOCTYPE w SYSTEM "file:///etc/passwd">'])
def test_xml_defines_no_entity(tmp_path, before):
    said = why(pack(tmp_path / "a.docx", {"word/document.xml": document("&l9;", before)}))
    assert "a document type" in said
    assert SECRET not in said
    (tmp_path / "Posts.xml").write_text(f'{before}<posts><row PostTypeId="1" OwnerUserId="1" Body="&l9;"/></posts>')
    said = why(tmp_path / "Posts.xml")
    assert "a document type" in said
    assert SECRET not in said


@pytest.mark.parametrize("text", ["[" * 100_000, '{"messages":' * 100_000, '{"users":[],"user_data":' + "[" * 100_000])
def test_deep_json_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert "nested too deeply" in why(tmp_path / "a.json")


def test_deep_mail_and_deep_xml_are_survived(tmp_path):
    heads = "".join(f'Content-Type: multipart/mixed; boundary="b{k}"\n\n--b{k}\n' for k in range(3_000))
    (tmp_path / "a.mbox").write_text(f"From a\nFrom: ann@example.org\n{heads}")
    assert SECRET not in why(tmp_path / "a.mbox")
    deep = f'<w:document xmlns:w="{WORD}">' + "<w:p>" * 5_000 + "</w:p>" * 5_000 + "</w:document>"
    pack(tmp_path / "a.docx", {"word/document.xml": deep})
    assert "empty" in why(tmp_path / "a.docx")


def depth(message):
    return 1 + max(map(depth, message.get_payload()), default=0) if message.is_multipart() else 0


@pytest.mark.parametrize("kind", ["multipart/mixed", "message/rfc822"])
def test_mail_is_opened_to_some_depth(kind):
    heads = [f"Content-Type: {kind}; boundary=b{k}\n\n" for k in range(400)]
    if kind == "multipart/mixed":
        heads = [f"{head}--b{k}\n" for k, head in enumerate(heads)]
    assert depth(mail.parse("".join(heads).encode())) == mail.MOST_LEVELS
    shallow = "".join(heads[: mail.MOST_LEVELS]).encode() + b"Content-Type: text/plain\n\n" + LINE.encode()
    assert mail._body(mail.parse(shallow)) == LINE


@pytest.mark.parametrize("charset", ["idna", "punycode", "unicode_escape", "raw-unicode-escape", "zlib", "x" * 500])
def test_mail_is_read_in_charsets_of_mail_alone(charset):
    r"""Of these codecs some take quadratic time, and others would make something else of the bytes."""
    for head in (f"charset={charset}", f'charset="{charset.upper()}"'):
        raw = f"From: =?{charset}?q?xn--caf-dma?= <ann@example.org>\nContent-Type: text/plain; {head}\n\n"
        found = mail._record(raw.encode() + b"xn--caf-dma caf-dma \\u0041")
        assert (found.author, found.text) == ("ann@example.org", "xn--caf-dma caf-dma \\u0041")


def test_a_header_that_cannot_be_decoded_is_read_as_it_is():
    """It must not end the reading of a mailbox: any stranger can send one."""
    found = mail._record(b"From: =?utf-8?b?a?= <ann@example.org>\nDate: =?utf-8?b?a?=\n\ngood text")
    assert (found.author, found.text, found.time) == ("ann@example.org", "good text", None)


def test_headers_of_mail_are_cut():
    """Their parameters are read in quadratic time."""
    raw = b"From: ann@example.org\nContent-Type: text/plain" + b";\n " * 5_000 + b";" * 200_000 + b"\n\ngood text"
    message = mail.parse(raw)
    assert len(message["Content-Type"]) == mail.LONGEST_HEADER
    assert mail._record(raw).text == "good text"


class Counted(str):
    """A text that counts how many characters `find` has looked at."""

    looked = 0

    def find(self, sub, start=0, end=None):
        at = super().find(sub, start, len(self) if end is None else end)
        Counted.looked += (at if at >= 0 else len(self)) - start + 1
        return at


@pytest.mark.parametrize("mark", ["<", "<a", "<!--", "<pre>", "<pre></pre>", "</", "<b>", "a<b ", '<a href=">"'])
def test_pages_are_read_in_linear_time(mark, monkeypatch):
    """By the characters looked at, no clock: twice the text, about twice of them."""
    looked = []
    for count in (2_000, 4_000):
        Counted.looked = 0
        monkeypatch.setattr(messages, "_LOWER", {})
        html_to_text(Counted(mark * count))
        looked.append(Counted.looked)
    assert looked[1] <= 2.5 * looked[0] + 100


ODD = [
    "[" * 4000,
    "(" * 4000,
    "[a](" * 1000,
    "![" * 2000,
    "[[" * 2000,
    "*" * 4000,
    "<!--" * 1000,
    "_" * 4000,
    "|" * 4000,
]
ODD += ["- " * 2000, "> " * 2000, "12/03/2024, 21:05 - " * 200, "<" * 4000, "[1/1/1, " * 500, ":" * 4000]


@pytest.mark.parametrize("text", ODD)
def test_odd_lines_are_read(text):
    documents.markdown_lines([text, "---", text])
    chats.read_chat([f"12/03/2024, 21:05 - Anna: {text}"] * 3 + [text])
    mail.own_words(text)
    html_to_text(text)


def valid_files(tmp_path):
    """A file of each format."""
    message = {
        "id": 1,
        "type": "message",
        "date": "2024",
        "from": "a",
        "from_id": "u",
        "text": [LINE],
        "text_entities": [],
    }
    discord = {"type": "Default", "timestamp": "2024", "content": LINE, "author": {"name": "a", "isBot": False}}
    files = {
        "chat.txt": "".join(f"12/03/2024, 21:0{k} - Anna: {LINE}\n" for k in range(4)),
        "telegram.json": json.dumps({"messages": [message] * 2}),
        "slack.json": json.dumps([{"type": "message", "user": "U", "ts": "1.0", "text": LINE}]),
        "discord.json": json.dumps({"channel": {}, "guild": {}, "messages": [discord]}),
        "meta.json": json.dumps({"participants": [], "messages": [{"sender_name": "a", "content": LINE}]}),
        "rows.json": json.dumps([{"user": "a", "text": LINE}]),
        "mail.mbox": f"From a\nFrom: a@example.org\nContent-Type: text/plain; charset=utf-8\n\n{LINE}\n> {LINE}\n",
        "Posts.xml": f'<posts><row PostTypeId="1" OwnerUserId="1" Body="&lt;p&gt;{LINE}"/></posts>',
        "note.md": f"---\n{LINE}\n---\n# {LINE}\n[{LINE}](x)\n",
        "table.csv": f"author;text\na;{LINE}\n",
    }
    paths = []
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        paths.append(tmp_path / name)
    paths.append(pack(tmp_path / "a.docx", {"word/document.xml": document(LINE)}))
    paths.append(pack(tmp_path / "a.zip", dict(files)))
    return paths


def test_damage_anywhere_is_a_reason_and_no_quotation(tmp_path):
    draw = random.Random(7)
    for path in valid_files(tmp_path):
        assert SECRET in str(read_corpus(path).authors), path
        whole = path.read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(data))
                cut = draw.choice([b"", b"\xff", b"\0", b'"', b"{", b"<", b"[", b"\n", b"9" * 30, b"null"])
                data[at : at + draw.choice([0, 1, 1, 7])] = cut
                data = data or bytearray(b"x")
            path.write_bytes(data)
            assert SECRET not in why(path)


@pytest.mark.parametrize(
    "kind", [None, 3, "text", [], [1], {"messages": 3}, {"messages": [3, None, {}]}, {"chats": {"list": [3]}}]
)
def test_json_of_other_types_is_no_traceback(tmp_path, kind):
    (tmp_path / "a.json").write_text(json.dumps(kind))
    assert why(tmp_path / "a.json")


@pytest.mark.parametrize("value", [None, 3, [], {}, [[]], {"text": 3}, True, "x" * 10, -1.5])
@pytest.mark.parametrize("name", ["telegram.json", "slack.json", "discord.json", "meta.json", "rows.json"])
def test_fields_of_other_types_are_no_traceback(tmp_path, name, value):
    valid_files(tmp_path)
    path = tmp_path / name

    def changed(what, key):
        rows = what if isinstance(what, list) else what["messages"]
        return [*rows, rows[0] | {key: value}, value]

    data = json.loads(path.read_text())
    first = (data if isinstance(data, list) else data["messages"])[0]
    for key in first:
        rows = changed(data, key)
        path.write_text(json.dumps(rows if isinstance(data, list) else data | {"messages": rows}))
        assert read_corpus(path).authors


EXPORTS = {
    "Telegram": {"messages": [{
        "id": 1, "type": "message", "date": "2024-01-01T00:00:00", "from": "Ann", "from_id": "u1",
        "forwarded_from": None, "text": ["good ", {"type": "bold", "text": "text"}], "text_entities": [],
    }]},
    "Slack": [{"type": "message", "ts": "1.2", "user": "U1", "text": "<@U2|ben> hi", "subtype": "me_message"}],
    "Discord": {"channel": {}, "guild": {}, "messages": [{
        "author": {"name": "Ann", "isBot": False, "id": "1"}, "type": "Default", "content": "hi", "timestamp": "2024",
    }]},
    "Discord's package": [{"Contents": "hi", "Timestamp": "2024"}],
    "Meta": {"participants": [], "messages": [{"sender_name": "Ann", "content": "hi", "timestamp_ms": 5}]},
    "rows": [{"author": "ann", "text": "hi", "date": "1"}, {"author": "ben", "text": "hi"}],
}  # fmt: skip
ODD = [[], {}, [[]], {"a": []}, [None], [{"type": []}], None, True, -1, 1e308, 10**30, "", "\ud800", "\0"]


def with_odd_values(value):
    """Yield a parsed file with one of its values after the other replaced by something that does not belong there."""
    yield from ODD
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in with_odd_values(value[key]):
            changed = value.copy()
            changed[key] = other
            yield changed


@pytest.mark.parametrize("form", EXPORTS)
def test_values_of_any_kind_in_an_export_are_survived(form):
    for data in with_odd_values(EXPORTS[form]):
        try:
            read_json_export(data, {})
        except Unusable:
            continue
