"""The keyboard in a terminal: keys, what is drawn, and nothing dangerous in it."""

from __future__ import annotations

import json
import os
import pty
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from keyfed.cli.app import app
from keyfed.config.load import Config, ModelConfig
from keyfed.engine.network import init_params
from keyfed.keyboard.predict import Slot, Strip
from keyfed.keyboard.session import (
    PlainLine,
    converse,
    harmless,
    press,
    render,
    run_terminal,
    strip_line,
    suggestions_of,
    tail,
    width_of,
)
from keyfed.run.folder import save_model, write_run_toml
from keyfed.run.prepare import build_network
from keyfed.text.vocab import SPECIALS, Vocab

OWN = re.compile(r"\x1b\[(?:[0-9]*[mJAC])|[\r\n]")  # the sequences that the prompt itself writes


def line_of(*words):
    return PlainLine(lambda text: list(words))


def typed(keys, *words):
    line = line_of(*words)
    finished = list(press(line, keys))
    return line.text, finished


def spoken(line, *chunks):
    out = []
    converse(line, chunks, out.append, lambda: 80)
    return "".join(out)


def test_keys_write_pick_and_end_lines():
    assert typed("ab", "x") == ("ab", [])
    assert typed("ab\x7fc", "x") == ("ac", [])
    assert typed("say he\t", "hello", "help") == ("say hello ", [])
    assert typed("a \x1b1", "best", "second", "third") == ("a second ", [])
    assert typed("a \x1b2", "best", "second", "third") == ("a best ", [])
    assert typed("a \x1b3", "best", "second", "third") == ("a third ", [])
    assert typed("a \x1b3", "best") == ("a ", [])
    assert typed("at 12", "best", "second", "third") == ("at 12", [])
    assert typed("a\t\t") == ("a", [])
    assert typed("one\rtwo\r") == ("one\ntwo\n", ["one", "two"])


@pytest.mark.parametrize("keys", ["\x1b[A", "\x1b[1;5C", "\x1bOP", "\x1bx", "\x1b", "\x00\x01\x07"])
def test_arrows_function_keys_and_control_characters_write_nothing(keys):
    assert typed(f"a{keys}b" if keys != "\x1b" else "ab\x1b") == ("ab", [])


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_ctrl_c_and_ctrl_d_leave(key):
    line = line_of()
    assert "never" not in spoken(line, b"ab", key.encode() + b"never", b"never")
    assert line.text == "ab"


def test_the_strip_follows_every_keystroke_and_finished_lines_stay():
    out = spoken(PlainLine(lambda text: [text.upper()]), b"a", b"b", b"\r", b"c")
    assert [out.index(f"1m{shown}") for shown in ("A\x1b", "AB")] == sorted(
        out.index(f"1m{s}") for s in ("A\x1b", "AB")
    )
    assert "> ab\r\n" in out


def test_a_character_in_two_reads_is_one():
    line = line_of()
    spoken(line, "é".encode()[:1], "é".encode()[1:], b"\xff")
    assert line.text == "é\ufffd"


@given(st.text(max_size=30))
def test_no_control_character_of_a_text_reaches_the_terminal(text):
    line = PlainLine(lambda _: [text, text + "b", "c" + text])
    line.text = text
    left = OWN.sub("", render(line, 80))
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in left)
    assert not set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068") & set(left)


def test_a_hostile_vocabulary_is_spelt_out():
    assert harmless("\x1b]0;owned\x07") == r"\x1b]0;owned\x07"
    shown = strip_line(Strip((None, Slot("\x1b[2J", "x", "next"), None)), 80)
    assert "\x1b[2J" not in shown
    assert r"\x1b[2J" in shown


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=60), st.integers(4, 40))
def test_a_long_line_shows_its_end_within_the_columns(text, columns):
    shown = tail(text, columns)
    assert shown == text or (shown[0] == "…" and text.endswith(shown[1:]))
    assert width_of(shown) <= columns


def test_the_correction_is_marked_and_the_middle_is_bold():
    slots = (Slot("teh", "teh", "literal"), Slot("the", "the", "correction"), None)
    assert strip_line(Strip(slots, "the"), 80) == "\x1b[2m1\x1b[0m teh\x1b[0m   \x1b[2m2\x1b[0m →\x1b[1mthe\x1b[0m"
    assert suggestions_of(Strip(slots, "the")) == ["the", "teh"]


def test_a_real_terminal_is_raw_while_it_lasts_and_as_it_was_afterwards():
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    line, keys = line_of("hello"), [b"\x04", b"\t", b"he"]  # a key comes when the strip of the one before stands

    def write(shown):
        assert "> " in shown or not keys
        if keys:
            os.write(ours, keys.pop())

    run_terminal(line, theirs, write)
    assert line.text == "hello "
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def a_run(folder, kind="word", words=("the", "cat", "sat")):
    config = Config(model=ModelConfig("char-lstm" if kind == "char" else "cifg", embed=6, hidden=8))
    vocab = Vocab(kind, (*SPECIALS, *words), lower=True, tokenised=False)
    write_run_toml(folder, config, {})
    save_model(folder, init_params(build_network(config, len(vocab), None), 1), vocab)
    return str(folder)


def suggest(*arguments, given=None):
    done = CliRunner().invoke(app, ["suggest", *arguments], input=given)
    return done.output if done.exit_code == 0 else done.exception


def test_without_a_terminal_every_line_gets_its_suggestions(tmp_path):
    run = a_run(tmp_path)
    out = suggest(run, given="the ca\n\nthe cta\r\n\xff 😀 \x1b[A")
    first, start, third, odd = out.splitlines()
    assert first.split("\t")[0] == "cat"
    assert {w.lower() for w in start.split("\t")} == {"the", "cat", "sat"}
    assert third.split("\t")[:2] == ["cat", "cta"]
    assert odd
    assert len(suggest(run, "-k", "1", given="the ca\n").split("\t")) == 1
    one, two = map(json.loads, suggest(run, "--json", given="the ca\nthe").splitlines())
    assert (one["text"], one["suggestions"][0], two["text"]) == ("the ca", "cat", "the")
    assert suggest(run, given="") == ""


def test_a_given_text_is_answered_as_before(tmp_path):
    run = a_run(tmp_path, words=("the", "cat", "s\x1b[31mt"))
    assert sorted(suggest(run, "the").split()) == ["cat", r"s\x1b[31mt", "the"]
    assert json.loads(suggest(run, "the", "--json", "-k", "1"))["text"] == "the"


def test_characters_are_completed_line_by_line_too(tmp_path):
    run = a_run(tmp_path, kind="char", words=("a", "b", " "))
    assert all(word.startswith("ab") for word in suggest(run, given="b ab\n").rstrip("\n").split("\t"))


def test_more_words_than_the_strip_has_are_refused_without_a_text(tmp_path):
    assert "has three words" in str(suggest(a_run(tmp_path), "-k", "4", given="the\n"))
