"""Mistakes of newcomers: each is one line that says what to do, exit code 2, without a word of anybody's text."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

SECRET = "zebraquantum"
LINE = f"my {SECRET} door code"
Make = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Make:
    data = content if isinstance(content, bytes) else content.encode()

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return make


def archive(name: str, members: dict[str, str]) -> Make:
    def make(folder: Path) -> None:
        with zipfile.ZipFile(folder / name, "w") as file:
            for member, content in members.items():
                file.writestr(member, content)

    return make


CHAT = "".join(f"12/03/2024, 21:0{k} - {who}: {LINE}\n" for k in range(4) for who in ("Anna", "Ben"))
TABLE = f"k;who;said\n1;anna;{LINE}\n"
RESULT = json.dumps({"about": SECRET, "personal_information": {"name": SECRET}})

# What lies there, what is typed, what is said.
MISTAKES: dict[str, tuple[Make, list[str], str]] = {
    "a page": (write("a.html", f"<p>{LINE}</p>"), ["data", "check", "a.html"], "export the messages as JSON or text"),
    "a workbook": (write("a.xlsx", LINE), ["train", "--data", "a.xlsx"], "save the sheet as CSV"),
    "a backup": (write("m.db.crypt15", LINE), ["data", "check", "m.db.crypt15"], "export the chat from the app"),
    "a broken archive": (write("a.zip", LINE), ["data", "check", "a.zip"], "a damaged archive"),
    "an empty archive": (archive("a.zip", {}), ["data", "check", "a.zip"], "no usable text (nothing in it)"),
    "pictures only": (archive("a.zip", {"a.jpg": LINE}), ["data", "check", "a.zip"], "not a text file (.jpg)"),
    "a broken document": (write("a.docx", LINE), ["data", "check", "a.docx"], "no .docx, or a damaged one"),
    "a table of other columns": (write("a.csv", TABLE), ["data", "check", "a.csv"], "--author-column NAME"),
    "a column that is not there": (
        write("a.csv", TABLE),
        ["train", "--data", "a.csv", "--author-column", "whom", "--text-column", "said"],
        'do not include "whom"',
    ),
    "a number beyond the columns": (
        write("a.csv", TABLE),
        ["data", "check", "a.csv", "--author-column", "9", "--text-column", "3"],
        'do not include "9"',
    ),
    "somebody else": (write("c.txt", CHAT), ["train", "--data", "c.txt", "--me", "Zoe"], "none of that --me"),
    "me in a known corpus": (write("c.txt", CHAT), ["train", "--data", "chat", "--me", "anna"], "for text of your own"),
    "an account without chats": (
        write("result.json", RESULT),
        ["data", "check", "result.json"],
        "JSON of an unknown form; expected an export",
    ),
    "rows in lines called .json": (
        write("a.json", '{"a": 1}\n{"a": 2}\n'),
        ["data", "check", "a.json"],
        "objects in lines go in a .jsonl",
    ),
    "JSON cut short": (write("a.json", f'[{{"user": "{SECRET}'), ["data", "check", "a.json"], "broken JSON (line 1"),
    "other XML": (write("a.xml", f"<rss>{LINE}</rss>"), ["data", "check", "a.xml"], "expected Posts.xml"),
    "Cyrillic as Excel writes it": (
        write("a.txt", "привет как дела сегодня".encode("cp1251")),
        ["data", "check", "a.txt"],
        "save it as UTF-8",
    ),
    "a picture called .txt": (write("a.txt", b"\x89PNG\0\0" + LINE.encode()), ["data", "check", "a.txt"], "binary"),
    "a .gz that is none": (write("a.txt.gz", LINE), ["data", "check", "a.txt.gz"], "no gzip file"),
    "a .gz cut short": (
        write("a.txt.gz", gzip.compress(LINE.encode() * 90)[:-9]),
        ["data", "check", "a.txt.gz"],
        "unreadable",
    ),
    "an address of the web": (
        write("a", ""),
        ["train", "--data", "https://example.org/a.csv"],
        "addresses of the web are not read",
    ),
    "stdin": (write("a", ""), ["train", "--data", "-"], "not read from stdin"),
    "no name": (write("a", ""), ["train", "--data", ""], "not read from stdin"),
    "an empty file": (write("a.txt", ""), ["train", "--data", "a.txt"], "a.txt: empty"),
    "an empty folder": (write("a/.keep", ""), ["train", "--data", "a"], "nothing in it"),
    "one long line": (
        write("a.txt", "word " * 3000),
        ["train", "fedavg", "--data", "a.txt"],
        "put line ends between sentences",
    ),
    "whose the files are": (
        write("a/b.txt", LINE),
        ["train", "--data", "a", "--set", "data.folder=mine"],
        "expected one of clients, person",
    ),
    "a step of nan": (write("a", ""), ["train", "fedavg", "--set", "lr=nan"], "expected a finite number"),
    "half a round": (write("a", ""), ["train", "fedavg", "--set", "train.rounds=1.5"], "expected a whole number"),
    "a file for a run": (write("a.csv", TABLE), ["suggest", "a.csv", "hello"], "a.csv is a file; expected the folder"),
    "no run": (write("a", ""), ["suggest", "nowhere", "hello"], "there is nothing of that name"),
    "a folder that is no run": (write("a/b.txt", ""), ["evaluate", "a"], "it has no run.toml"),
    "a run that is there": (write("a/run.toml", ""), ["train", "--out", "a"], "a holds a run already"),
    "a preview into a file": (write("a.txt", LINE), ["client", "--preview", "--data", "a.txt"], "on a terminal only"),
    "two wishes": (write("a", ""), ["client", "--preview", "--status"], "give one of --pause"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(keyfed, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    make, arguments, said = MISTAKES[what]
    make(tmp_path)
    code, out, err = keyfed(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert said in err
    assert SECRET not in err


def test_resume_of_a_folder_that_is_not_there_says_that_it_begins(keyfed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words of a line\n" * 400)
    _, _, err = keyfed("train", "fedavg", "--data", "a.txt", "--resume", "--out", "typo", "--dry-run")
    assert "typo holds no run yet: a new one starts there" in err
