"""`keyfed data check`: numbers of a text, what may be wrong with it, and no word of it."""

from __future__ import annotations

import json
import shlex

import pytest

from keyfed.text.check import check_corpus, notices
from keyfed.text.corpus import Author, Corpus
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
        ("<p>somebody wrote {}</p>", "hold markup"),
        ('{{"text": "wrote {}"}}', "hold markup"),
        ("see https://example.org/{}", "addresses of the web"),
        ("今天天气很好我们去公园玩吧{}", "without blanks between words: train a model of characters"),
    ],
)
def test_what_would_be_learnt_by_mistake_is_noticed(line, said):
    lines = [line.format(k) for k in range(40)]
    (found,) = notices(corpus(*lines))
    assert said in found
    assert notices(corpus(*[f"somebody wrote {k} at 21:05 about a < b & c" for k in range(40)])) == ()
    assert said in check_corpus(corpus(*lines)).notices[0]


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
