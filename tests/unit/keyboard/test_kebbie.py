"""The page of the public benchmark is that of the measured figures, and its questions are answered as kebbie counts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from keyfed.keyboard.session import Slot, Strip

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "kebbie_bench.py"


def benchmark():
    spec = importlib.util.spec_from_file_location("kebbie_bench", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look there
    spec.loader.exec_module(found)
    return found


class Keys:
    """A keyboard that corrects `teh`, and notes what it learns."""

    def __init__(self):
        self.learnt = []

    def suggest(self, before, taps=()):
        word = before.rpartition(" ")[2]
        typed = Slot(word, word, "literal") if word else None
        return Strip((typed, Slot("The", "the", "completion"), None), "the" if word == "teh" else None)

    def forget_all(self):
        self.learnt.clear()

    def learn(self, words):
        self.learnt += words


def test_the_page_is_that_of_the_measured_figures():
    kebbie = benchmark()
    assert kebbie.PAGE.read_text("utf-8") == kebbie.page(json.loads(kebbie.DATA.read_text("utf-8")))


def test_questions_are_answered_and_a_message_begins_with_its_writers_own_words():
    kebbie = benchmark()
    keys = Keys()
    messages = [kebbie.Message("the dog", ("old cat",)), kebbie.Message("a", ("new sun",))]
    typist = kebbie.Typist(keys, messages, learns=True)
    centres = [[10.0 * kebbie.layout_of("qwerty").centre(c)[0] + 3, 20.0 * kebbie.layout_of("qwerty").centre(c)[1]]
               for c in "qpz"]  # fmt: skip
    typist.answer("layout", "", centres, "qpz")
    assert [round(v, 6) for v in typist.place([13.0, 20.0])] == [1, 1]
    assert typist.answer("complete", "", [None], "t") == ["the"]
    assert typist.answer("correct", "", [None], "teh") == ["the", "teh"]
    assert keys.learnt == [("old", ""), ("cat", "old ")]
    assert typist.answer("next", "the ", [], "") == ["the"]
    assert typist.answer("correct", "the ", [None], "dog") == ["dog", "the"]
    with pytest.raises(SystemExit, match="typed 1 messages of 2"):
        typist.finished()
    assert typist.answer("correct", "", [None], "a") == ["a", "the"]
    typist.finished()
    assert keys.learnt == [("new", ""), ("sun", "new ")]
