"""`keyfed data check`: numbers of a text, what may be wrong with it, and no word of it."""

from __future__ import annotations

import json
import os
import shlex

import pytest

from keyfed.errors import DataError
from keyfed.text.check import check_corpus, notices
from keyfed.text.corpus import Author, Corpus, pseudonym, read_corpus
from keyfed.text.language import language_of, unspaced

SECRET = "zebraquantum"
CHAT = "".join(
    f"12/03/2024, 21:{k:02} - {who}: {text}\n"
    for k, (who, text) in enumerate([("Anna", f"are you and the {SECRET} coming to that?"), ("Ben", "yes, I am")] * 20)
)


def corpus(*lines: str) -> Corpus:
    return Corpus("c", (Author("a", lines),))


def test_a_chat_is_counted_and_not_quoted(keyfed, tmp_path):
    path = tmp_path / "my chat.txt"
    path.write_text(CHAT + "12/03/2024, 22:00 - Ben: <Media omitted>\n")
    code, out, err = keyfed("data", "check", path)
    assert (code, err) == (0, "")
    rows = dict(line.split(":", 1) for line in out.splitlines())
    assert rows["read as"].strip() == "WhatsApp chat"
    assert rows["authors"].strip() == "2 named in the text (one by one with --me NAME)"
    assert rows["size"].strip() == "40 lines, 220 words, the longest line has 8"
    assert rows["language"].strip() == "English"
    assert rows["unknown words"].strip().startswith("9.1%"), "one word of eleven"
    assert "a notice in the place of a picture" in rows["left out"]
    assert "220 words teach a model little" in rows["notice"]
    assert shlex.split(rows["train"]) == ["keyfed", "train", "--data", str(path)]
    assert not any(word in out for word in (SECRET, "Anna", "Ben"))
    found = json.loads(keyfed("data", "check", path, "--me", "Anna", "--json")[1])
    assert (found["authors"], found["lines"]) == (1, 20)


def test_a_text_that_cannot_be_used_is_one_line(keyfed, tmp_path):
    (tmp_path / "a.xlsx").write_text(SECRET)
    for arguments in ([tmp_path / "a.xlsx"], [tmp_path / "nowhere.txt"], ["chat", "--me", "anna"]):
        code, out, err = keyfed("data", "check", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert SECRET not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2024-03-12 21:05 somebody wrote {}", "begin with a date or time"),
        ("1710277500 somebody wrote {}", "begin with a date or time"),
        ("2024. 3. 12. somebody wrote {}", "begin with a date or time"),
        ("Tue, 12 Mar 2024 21:05:01 +0000 Anna: wrote {}", "begin with a date or time"),
        ("Anna (12.03.2024 21:05): wrote {}", "begin with a date or time"),
        ("[지수] [오후 9:05] wrote {}", "begin with a date or time"),
        ("[12/03 9:00 PM] Anna Smith\nsomebody wrote {}", "begin with a date or time"),
        ("Anna: somebody wrote {}", "begin alike"),
        ("Anna Smith, [12 March 2024 at 9:05 PM] wrote {}", "begin alike"),
        ("<p>somebody wrote {}</p>", "hold markup"),
        ('{{"text": "wrote {}"}}', "hold markup"),
        ("see https://example.org/{}", "addresses of the web"),
        ("今天天气很好我们去公园玩吧{}", "without blanks between words: train a model of characters"),
    ],
)
def test_what_would_be_learnt_by_mistake_is_noticed(line, said):
    lines = [each for k in range(40) for each in line.format(k).split("\n")]
    (found,) = notices(corpus(*lines))
    assert said in found
    assert notices(corpus(*[f"somebody wrote {k} at 21:05 about a < b & c" for k in range(40)])) == ()
    assert said in check_corpus(corpus(*lines)).notices[0]


def test_prose_with_colons_and_times_is_not_noticed():
    lines = ["He said: come in", "See you at 21:05 then", "First Citizen:", "it was (as they say) over", "no more"]
    assert notices(corpus(*lines * 10)) == ()


def test_numbers_are_noticed_and_counted_in_the_singular(keyfed, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{k}, {k * k} {k / 7:.3f}\n" for k in range(300)))
    assert "0% of the words have letters" in keyfed("data", "check", path)[1]
    path.write_text("hello\n")
    assert "1 line, 1 word, the longest line has 1" in keyfed("data", "check", path)[1]


def test_me_names_somebody_only_where_the_text_does(keyfed, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some words of a line\n" * 30)
    out = keyfed("data", "check", path, "--me", "Anna")[1]
    assert "named in the text" not in out
    assert "one person's" in out
    assert "--me Anna" in out, "the command that is shown works"
    assert "--me" not in keyfed("data", "check", "chat")[1], "a known corpus takes none"


def test_a_run_keeps_the_name_of_me_as_a_hash(keyfed, tmp_path):
    path = tmp_path / "chat.txt"
    path.write_text(CHAT * 20)
    out = tmp_path / "run"
    small = [word for key in ("train.rounds=2", "data.clients=4", "train.cohort=2", "model.embed=4", "model.hidden=4",
                              "data.window=5") for word in ("--set", key)]  # fmt: skip
    run = ("train", "fedavg", "--data", path, "--me", "Anna", "--out", out, *small)
    code, _, err = keyfed(*run)
    assert code == 0, err
    files = [file for file in out.rglob("*") if file.suffix in (".toml", ".md", ".html", ".json", ".jsonl")]
    assert files
    assert not [file.name for file in files if "Anna" in file.read_text("utf-8").replace(str(tmp_path), "")]
    assert f'me = "{pseudonym("Anna")}"' in (out / "run.toml").read_text()
    settings = (out / "run.toml").read_text().replace(pseudonym("Anna"), "Anna")
    (out / "run.toml").write_text(settings)  # as versions of before wrote it
    code, _, err = keyfed(*run, "--resume")
    assert code == 0, err
    assert keyfed("evaluate", out)[0] == 0


def test_folders_that_may_not_be_read_are_named(keyfed, tmp_path, monkeypatch):
    """The tests may run as root, who may read everything."""
    (tmp_path / "notes" / "sub").mkdir(parents=True)
    (tmp_path / "notes" / "a.txt").write_text("some words of a line\n" * 30)
    real = os.walk

    def walk(top, onerror=None, **options):
        for place in (top, os.path.join(top, "sub")):
            if os.path.basename(place) in ("sub", "closed"):
                onerror(PermissionError(13, "Permission denied", str(place)))
        yield from (found for found in real(top, onerror=onerror, **options) if "closed" not in str(top))

    monkeypatch.setattr(os, "walk", walk)
    code, out, err = keyfed("data", "check", tmp_path / "notes")
    assert (code, err) == (0, "")
    assert "left out:      sub: Permission denied" in out
    (tmp_path / "closed").mkdir()
    code, out, err = keyfed("data", "check", tmp_path / "closed")
    assert (code, out) == (2, "")
    assert "closed: Permission denied" in err


def test_a_path_behind_a_closed_folder_is_one_line(keyfed, tmp_path, monkeypatch):
    def stat(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "a.txt"
    monkeypatch.setattr(type(path), "exists", stat)
    with pytest.raises(DataError, match="Permission denied; expected text that you may read"):
        read_corpus(path)


@pytest.mark.parametrize("method", [(), ("fedavg",)])
def test_a_long_line_asks_for_line_ends_and_not_for_clients(keyfed, tmp_path, method):
    path = tmp_path / "huge.txt"
    path.write_text(" ".join(f"word{k % 50}" for k in range(200_000)) + "\n")
    _, out, err = keyfed("train", *method, "--data", path, "--dry-run")
    assert "put line ends" in out + err
    assert "100 clients need" not in err


def notes(folder, number=8):
    """Notes of one person: words of their own in each."""
    folder.mkdir()
    for k in range(number):
        words = [f"word{chr(97 + k)}{chr(97 + j % 26)}{chr(97 + j // 26)}" for j in range(60)]
        lines = [" ".join([*words[j : j + 6], "and the note"]) for j in range(0, 60, 6)]
        (folder / f"n{k}.txt").write_text("\n".join(lines * 4))
    return folder


def test_files_that_may_be_one_persons_are_noticed(keyfed, tmp_path):
    folder = notes(tmp_path / "notes")
    code, out, err = keyfed("data", "check", folder)
    assert (code, err) == (0, "")
    assert "8 files count as 8 people" in out
    assert "--set data.folder=person" in out
    one_person = keyfed("data", "check", folder, "--set", "data.folder=person")[1]
    assert "one person's" in one_person
    assert "count as" not in one_person
    assert "count as" not in keyfed("data", "check", folder, "--set", "data.folder=clients")[1]


def test_a_run_notices_files_and_dropped_words(keyfed, tmp_path):
    folder = notes(tmp_path / "notes")
    run = ("train", "fedavg", "--data", folder, "--dry-run", "--set", "train.cohort=2", "--set", "data.window=5")
    code, out, err = keyfed(*run)
    assert code == 0, err
    assert "notice: 8 files count as 8 people" in out
    assert "of the training tokens are not in the vocabulary and would not be learnt" in out
    assert "--set data.min_clients=1" in out
    code, out, err = keyfed(*run, "--set", "data.folder=person", "--set", "data.clients=4")
    assert code == 0, err
    assert "notice: 8 files" not in out
    assert "not in the vocabulary" not in out


def test_a_run_says_it_too(keyfed, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("".join(f"2024-03-12 21:{k % 60:02} somebody wrote some words about it\n" for k in range(400)))
    code, out, err = keyfed("train", "fedavg", "--data", path, "--dry-run", "--set", "data.clients=4",
                            "--set", "train.cohort=4")  # fmt: skip
    assert code == 0, err
    assert "read as: text" in out
    assert "notice: 100% of the lines begin with a date or time" in out


def test_words_without_blanks_are_refused_for_a_word_model(keyfed, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("今天天气很好我们去公园玩吧\n明天也会是一个很好的日子\n" * 200, "utf-8")
    code, out, err = keyfed("train", "fedavg", "--data", path, "--dry-run")
    assert (code, out) == (2, "")
    assert "Chinese or Japanese is written without blanks" in err
    assert "--model char-lstm" in err
    code, _, err = keyfed("train", "fedavg", "--data", path, "--dry-run", "--model", "char-lstm", "--set",
                          "data.clients=4", "--set", "train.cohort=4")  # fmt: skip
    assert code == 0, err


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("und ich war nicht so müde wie du", "German"), ("je ne sais pas que les autres sont dans la ville", "French"),
        ("no es lo que te dije pero está muy bien", "Spanish"), ("и я не знаю что это", "Russian"),
        ("오늘 날씨가 정말 좋네요", "in Hangul letters"), ("שלום מה שלומך היום", "in Hebrew letters"),
        ("नमस्ते आप कैसे हैं", "in Devanagari letters"), ("สวัสดีครับวันนี้อากาศดี", "Thai"), ("12 :) 34", "not known"),
    ],
)  # fmt: skip
def test_languages(text, language):
    assert language_of(dict.fromkeys(text.split(), 1)) == language
    assert (unspaced(text.split()) is None) == (language != "Thai")
