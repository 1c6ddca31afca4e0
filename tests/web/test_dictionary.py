"""The dictionary in the decoder: what is known, corrected, written with capitals, split in two. All of it in node."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keyfed.keyboard.dictionary import Dictionary, Lists, english, to_bytes
from keyfed.keyboard.session import Decoder, TypedLine
from keyfed.text.vocab import SPECIALS, UNK, Vocab

from .node_cases import answers, needs_node, sent

pytestmark = needs_node
some = settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

DATA = Path(__file__).parents[2] / "src" / "keyfed" / "keyboard" / "web" / "data"
# A vocabulary as a model may have it: few words, of them slips that its writers made.
WORDS = """
i the to a and in you is it was go we for teh dont im ill i'll i'm well we'll its it's were we're let's lets
don't can't lot alot at home feel very think that will be of ubuntu government may
"""


def source(vocab):
    """A model with opinions: of "feel" and "very" it knows what follows; of the rest, falling frequency."""
    plain = np.log(1.0 / np.arange(1, len(vocab) + 1))

    def scores(tokens):
        logp = plain.copy()
        after = vocab.words[tokens[-1]]
        for word in {"feel": ["ill", "well"], "very": ["ill", "well"], "<eos>": ["i'll", "we'll", "i'm"]}.get(
            after, []
        ):
            logp[vocab.index[word]] += 8
        return logp - np.log(np.exp(logp).sum())

    return scores


@pytest.fixture(scope="module")
def keyboard():
    vocab = Vocab("word", (*SPECIALS, *WORDS.split()), lower=True, tokenised=False)
    lists = Lists(english()[0], doubted=("teh", "dont", "im", "alot"))
    forms = {"government": "Government", "may": "May", "ubuntu": "Ubuntu"}
    with Decoder(vocab, source(vocab), forms=forms, settings={"learn": False}, lists=lists) as one:
        yield one


def corrected(keyboard, text):
    return keyboard.suggest(text).correction


def typed(keyboard, text):
    line = TypedLine(keyboard)
    for c in text:
        line.type(c)
    return line.text


def test_listed_words_are_known_and_doubted_ones_are_not(keyboard):
    assert keyboard.knows(["pizza", "Hello", "London", "selfie", "don't", "ubuntu"]) == [True] * 6
    assert keyboard.knows(["teh", "dont", "im", "alot", "goverment"]) == [False] * 5


def test_the_page_reads_the_file_as_python_does():
    data, dictionary = english()
    (found,) = answers([{"op": "dictionary", "file": sent(data)}])
    assert found["words"] == list(dictionary.words)
    assert dict(found["forms"]) == dictionary.forms
    assert set(found["both"]) == dictionary.both
    np.testing.assert_allclose(np.exp(found["logs"]), list(dictionary.shares().values()))


def test_a_damaged_file_is_refused_with_a_line_that_says_why():
    data, _ = english()
    one = np.zeros(2, np.uint8)
    unsorted = to_bytes(Dictionary(("b", "a"), one, {}, frozenset()))
    forms = bytearray(to_bytes(Dictionary(("a", "b"), one, {"b": "BEE"}, frozenset())))
    forms[forms.rindex(b"BEE")] = 0xFF
    broken = [
        b"",
        data[:-3],
        data[:200],
        unsorted,
        bytes(forms),
        to_bytes(Dictionary(("a", "a"), one, {}, frozenset())),
    ]
    for found in answers([{"op": "dictionary", "file": sent(file)} for file in broken]):
        assert found["error"].startswith(("damaged dictionary: ", "damaged safetensors file: "))
        assert "\n" not in found["error"]


words = st.lists(
    st.text("abcd'", min_size=1, max_size=5).filter(lambda word: word.strip("'")), min_size=1, max_size=12, unique=True
)


@some
@given(st.lists(st.tuples(words, words, st.booleans(), st.integers(0, 2**31)), min_size=20, max_size=30))
def test_the_mass_of_unknown_words_goes_to_the_words_that_the_model_lacks(cases):
    mixtures = []
    for model, listed, tilted, seed in cases:
        rng = np.random.default_rng(seed)
        logp = rng.normal(0, 2, len(SPECIALS) + len(model))
        logs = [[word, float(rng.normal(-9, 3))] for word in sorted(listed)]
        tilt = rng.normal(0, 1, len(logp)).tolist() if tilted else None
        mixtures.append({
            "op": "mixed", "logp": (logp - np.log(np.exp(logp).sum())).tolist(), "previous": "", "words": model,
            "own": [], "held": None, "listed": logs, "tilt": tilt,
        })  # fmt: skip
    beta = json.loads((DATA / "constants.json").read_text("utf-8"))["tilt"]
    for case, found in zip(mixtures, answers(mixtures), strict=True):
        p = dict(zip(found["words"], found["model"], strict=True))
        missing = {word: math.exp(log) for word, log in case["listed"] if word not in case["words"]}
        assert sum(p.values()) == pytest.approx(1.0, abs=1e-9)
        weights = np.exp(np.array(case["logp"]) + beta * np.array(case["tilt"] or 0))
        weights[: UNK if missing else UNK + 1] = 0
        weights /= weights.sum()
        for word, share in zip(case["words"], weights[len(SPECIALS) :], strict=True):
            assert p[word] == pytest.approx(share, abs=1e-9)
        for word, share in missing.items():
            assert p[word] == pytest.approx(weights[UNK] * share / sum(missing.values()), abs=1e-9)


def test_slips_that_the_model_learnt_are_corrected(keyboard):
    assert typed(keyboard, "Teh ") == "The "
    assert typed(keyboard, "go to teh ") == "go to the "
    assert corrected(keyboard, "i dont") == "don't"
    assert corrected(keyboard, "and im") == "I'm"


def test_everyday_words_are_never_replaced(keyboard):
    for context in ("", "i think the "):
        for word in ("hey", "cat", "beach", "shirt", "shoes", "jeans", "butter", "lovely", "pizza", "from", "form"):
            assert corrected(keyboard, context + word) is None, word
    assert corrected(keyboard, "go to the cat's") is None
    assert corrected(keyboard, "go to the neighbours'") is None


def test_the_context_says_whether_a_contraction_was_meant(keyboard):
    assert corrected(keyboard, "ill") == "I'll"
    assert corrected(keyboard, "i feel ill") is None
    assert corrected(keyboard, "i feel well") is None
    assert corrected(keyboard, "well") == "we'll"
    assert corrected(keyboard, "and DONT") is None


def test_words_that_were_run_together_are_split(keyboard):
    assert corrected(keyboard, "and alot") == "a lot"
    assert corrected(keyboard, "it was inthe") == "in the"
    assert corrected(keyboard, "it was Inthe") == "In the"
    assert typed(keyboard, "go inthe ") == "go in the "
    assert corrected(keyboard, "and into") is None


def test_names_get_their_capitals_and_words_lose_none(keyboard):
    assert corrected(keyboard, "go to london") == "London"
    assert corrected(keyboard, "was it monday") == "Monday"
    assert corrected(keyboard, "i think emma") == "Emma"
    assert corrected(keyboard, "i think that goverment") == "government"
    shown = [slot.text for slot in keyboard.suggest("i think that gover").slots if slot]
    assert "government" in shown
    assert "Government" not in shown
    assert corrected(keyboard, "it was may") is None  # or May: what was typed stays


def test_a_name_stays_small_for_who_took_it_back():
    vocab = Vocab("word", (*SPECIALS, *WORDS.split()), lower=True, tokenised=False)
    with Decoder(vocab, source(vocab), lists=Lists(english()[0])) as one:
        line = TypedLine(one)
        for c in "to london ":
            line.type(c)
        assert line.text == "to London "
        line.backspace()
        assert line.text == "to london "
        assert one.suggest("to london").correction is None


def test_listed_words_are_completed_and_swiped(keyboard):
    shown = [slot.text for slot in keyboard.suggest("i think piz").slots if slot]
    assert "pizza" in shown


def test_offensive_words_of_the_dictionary_are_held_back(keyboard):
    offensive = json.loads((DATA / "offensive.json").read_text("utf-8"))["words"]
    listed: list[Any] = [word for word in offensive if keyboard.knows([word])[0]]
    assert len(listed) > 20
    for word in listed:
        for text in (word, word[:-1]):
            strip = keyboard.suggest(f"the {text}")
            assert word not in [slot.word for slot in strip.slots if slot and slot.kind != "literal"]
            assert strip.correction is None or word not in strip.correction.lower().split()
