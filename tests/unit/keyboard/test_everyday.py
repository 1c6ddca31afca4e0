"""The everyday sentences and words that the keyboard is judged on are kept: these, and the noise that they name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from keyfed.keyboard import measure
from keyfed.keyboard.keys import fold

FILE = Path(__file__).parents[3] / "benchmarks" / "keyboard_everyday.json"
KEPT = "d5f8233918fae4b241dd05c803143f7747cef7f841115b18b319b0b67868accb"


def everyday():
    return json.loads(FILE.read_text("utf-8"))


def test_the_sentences_and_words_are_those_that_were_written_before_a_model_was_chosen():
    found = everyday()
    judged = json.dumps([found[key] for key in ("contexts", "noise", "sentences", "trial", "words")], sort_keys=True)
    assert hashlib.sha256(judged.encode()).hexdigest() == KEPT


def test_there_are_a_hundred_sentences_five_hundred_words_and_forty_sentences_to_try():
    found = everyday()
    judged = [line for lines in found["sentences"].values() for line in lines]
    assert (len(judged), len(found["trial"]), len(found["words"])) == (100, 40, 500)
    assert len({fold(line) for line in (*judged, *found["trial"])}) == 140
    assert len({fold(word) for word in found["words"]}) == 500
    for word in found["words"]:
        assert [text for _, text in measure.words_in(word)] == [word]
    assert all(line == line.strip() and len(measure.words_in(line)) > 1 for line in judged)


def test_the_noise_is_that_of_the_measurement():
    noise = everyday()["noise"]
    assert noise["taps"]["spread"] == measure.TAP_SPREAD
    swipes = noise["swipes"]
    assert (swipes["spread"], swipes["tremor"], swipes["points"]) == (
        measure.SWIPE_SPREAD, measure.SWIPE_TREMOR, measure.POINTS_A_KEY,
    )  # fmt: skip
    assert noise["slips"]["shares"] == dict(zip(measure.SLIPS, measure.SHARES, strict=True))
