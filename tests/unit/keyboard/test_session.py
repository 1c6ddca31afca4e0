"""A keyboard over a network and over n-grams; a line of text under a person's fingers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.load import Config, DataConfig
from keyfed.engine.network import reader_of
from keyfed.errors import ConfigError
from keyfed.keyboard.predict import Predictor
from keyfed.keyboard.session import Editor, Keyboard, NetworkSource, keyboard_of, ngram_source
from keyfed.model.language_model import ModelSpec, init_params
from keyfed.model.ngram import fit_kneser_ney
from keyfed.run.folder import Trained
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


def keyboard(source=None):
    return Keyboard(source or grams(), Predictor(VOCAB))


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


def test_one_more_word_is_one_step_and_a_keystroke_none():
    source = network()
    board = keyboard(source)
    before = "the cat sat "
    board.suggest(before)
    read = source.steps
    for part in ("o", "on", "on ", "on", "o", ""):
        board.suggest(before + part)
    assert source.steps == read + 1


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


def test_suggestions_depend_on_the_text_only_not_on_how_it_came_about():
    typed, pasted = keyboard(network()), keyboard(network())
    text = "the cat sat on a mat . " * 6
    for end in range(len(text)):
        typed.suggest(text[:end])
    for slow, fast in zip(typed.suggest(text).slots, pasted.suggest(text).slots, strict=True):
        assert slow == fast


def test_n_grams_predict_what_they_have_read():
    board = keyboard()
    assert board.suggest("the cat sat ").slots[1].text == "on"
    assert board.suggest("hello w").slots[1].text == "world"
    source = grams()
    assert np.exp(source([EOS])).sum() == pytest.approx(1.0)


def test_a_run_becomes_a_keyboard_and_one_of_characters_is_refused(tmp_path):
    trained = Trained(tmp_path, Config(), "fedavg", SPEC, PARAMS, VOCAB)
    assert keyboard_of(trained).suggest("the ").slots[1] is not None
    characters = Vocab("char", (*SPECIALS, "a", "b"), lower=True, tokenised=False)
    with pytest.raises(ConfigError, match="model of characters"):
        keyboard_of(Trained(tmp_path, Config(), "fedavg", SPEC, PARAMS, characters))


def test_a_swipe_is_decoded_in_its_context():
    board = keyboard()
    path = [board.predictor.layout.centre(c) for c in "cat"]
    assert board.gesture("the ", path)[0].text == "cat"


def typed(keys, board=None):
    editor = Editor(board or keyboard())
    for key in keys:
        editor.backspace() if key == "<" else editor.type(key)
    return editor


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


def test_an_undone_correction_is_not_made_again():
    board = keyboard()
    assert typed("the cta <cta ", board).text == "the cta cta "
    assert board.predictor.personal.knows("cta")
    assert "cat" not in board.predictor.personal.to_json()  # what was undone is not learnt


def test_words_are_learnt_by_separators_enter_and_picks_not_before():
    board = keyboard()
    editor = typed("zyx", board)
    assert board.predictor.personal.words == {}
    for key in " Zyx\nzy":
        editor.type(key)
    editor.pick(editor.strip().slots[1])
    assert editor.text == "zyx Zyx\nzy "
    assert board.predictor.personal.words == {"zyx": 2, "zy": 1}
    assert board.predictor.personal.pairs == {"": {"zyx": 1, "zy": 1}, "zyx": {"zyx": 1}}


def test_a_picked_word_replaces_the_typed_part_and_marks_close_up():
    editor = typed("hello wo")
    editor.pick(editor.strip().slots[1])
    assert editor.text == "hello world "
    editor.type(".")
    assert editor.text == "hello world. "
    editor.type("t")
    assert editor.text == "hello world. t"


def test_a_picked_emoji_stands_behind_the_word():
    editor = typed("pizza")
    editor.pick(editor.strip().slots[2])
    assert editor.text == "pizza 🍕 "


def test_enter_returns_the_finished_line():
    editor = typed("the cta")
    assert editor.enter() == "the cat"
    assert editor.text == "the cat\n"
    assert editor.strip().slots[1].text[0].isupper()


@settings(max_examples=60, deadline=None)
@given(st.text("thecat .!'<😀\nI", max_size=25))
def test_typing_never_fails_and_the_typed_word_stays_recoverable(keys):
    editor = Editor(keyboard())
    for key in keys:
        editor.backspace() if key == "<" else editor.type(key)
        strip = editor.strip()
        part = editor.keyboard.context(editor.text).typed
        assert not part or part in texts(strip)


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


def test_what_was_written_incognito_is_not_learnt_even_as_the_word_before():
    editor = Editor(keyboard())
    personal = editor.keyboard.predictor.personal
    personal.incognito = True
    for c in "quetzal quetz":
        editor.type(c)
    personal.incognito = False
    for c in "alish hello world ":
        editor.type(c)
    assert (personal.words, personal.pairs) == ({"hello": 1, "world": 1}, {"": {"hello": 1}, "hello": {"world": 1}})
