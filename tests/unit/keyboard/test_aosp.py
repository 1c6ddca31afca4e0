"""Dictionaries for phones: an independent reader finds every word, frequency and pair; the text says the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.errors import DataError
from keyfed.keyboard.aosp import ATTRIBUTES, class_of, frequency_of, to_binary, to_combined, unfit, word_list
from tests.unit.keyboard.dict_reader import read_dictionary

ABOUT = dict(zip(ATTRIBUTES, ("1414726260", "keyfed:en", "Keyfed fedavg; k 3", "en", "12"), strict=True))
LETTERS = st.sampled_from("abAZ'é ßőюあ😀9-")  # one byte, two planes of three bytes, and what stands in no word
WORDS = st.lists(st.text(LETTERS, max_size=6), min_size=1, max_size=40, unique=True)


def four_bits(frequency: int, pair_frequency: int) -> int | None:
    """Return the class of a pair by the drawing in AOSP's comments: which step of 16.5 it lies in, by trying each.

    Class 0 is from half a step to one and a half above the word's own frequency, and so on; a step includes its lower
    bound, which is the next integer above.
    """
    step = (255 - frequency) / 16.5
    if pair_frequency <= frequency + step / 2:
        return None
    bounds = [frequency + 1 + step / 2 + c * step for c in range(16)]
    return max([0, *(c for c, low in enumerate(bounds) if pair_frequency >= low)])


@settings(max_examples=60, deadline=None)
@given(WORDS, st.data())
def test_every_word_and_pair_is_read_back(words, data):
    fits = [word for word in words if unfit(word) is None]
    probability = st.floats(1e-12, 1, allow_nan=False)
    p = data.draw(st.lists(probability, min_size=len(words), max_size=len(words)))
    place = st.integers(0, len(words) - 1)
    pairs = sorted(data.draw(st.sets(st.tuples(place, place), max_size=60)))
    pair_p = data.draw(st.lists(probability, min_size=len(pairs), max_size=len(pairs)))
    given_ = (ABOUT, words, np.array(p), np.array(pairs, np.int64).reshape(-1, 2), np.array(pair_p))
    if not fits:
        with pytest.raises(DataError, match=f"none of {len(words)} words"):
            word_list(*given_)
        return
    found, refused = word_list(*given_, offensive=["a", "ab"])
    read = read_dictionary(to_binary(found))
    frequency = dict(zip(words, frequency_of(np.array(p)).tolist(), strict=True))
    assert (read.version, read.attributes, sum(refused.values())) == (202, ABOUT, len(words) - len(fits))
    assert {word: entry.frequency for word, entry in read.entries.items()} == {word: frequency[word] for word in fits}
    assert {word for word, entry in read.entries.items() if entry.offends} == {
        word for word in fits if word.lower() in ("a", "ab")
    }
    wanted = {}
    for (i, j), each in zip(pairs, pair_p, strict=True):
        if words[i] in frequency and words[i] in fits and words[j] in fits:
            bits = four_bits(frequency[words[j]], int(frequency_of(np.array([each]))[0]))
            if bits is not None:
                wanted[words[i], words[j]] = bits
    assert read.bigrams() == wanted


def test_a_large_dictionary_has_distances_of_three_bytes_and_arrays_of_many_nodes():
    rng = np.random.default_rng(7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = sorted(
        {"".join(letters[row]) for row in rng.integers(26, size=(20_000, 6))} | {chr(0x4E00 + k) for k in range(300)}
    )
    p = 10.0 ** rng.uniform(-7, -2, len(words))
    pairs = np.unique(rng.integers(len(words), size=(30_000, 2)), axis=0)
    found, refused = word_list(ABOUT, words, p, pairs, np.minimum(1, p[pairs[:, 1]] * 50))
    data = to_binary(found)
    read = read_dictionary(data)
    assert (refused, len(data) > 1 << 17) == ({}, True)
    assert {word: entry.frequency for word, entry in read.entries.items()} == dict(
        zip(found.words, found.frequency.tolist(), strict=True)
    )
    classes = class_of(found.frequency[found.second], found.pair_frequency)
    assert read.bigrams() == {
        (found.words[i], found.words[j]): c
        for i, j, c in zip(found.first.tolist(), found.second.tolist(), classes.tolist(), strict=True)
    }


def test_the_text_says_what_the_binary_says():
    words = ["house", "London", "the", "i'm", "hoUse"]
    pairs = np.array([[2, 0], [2, 1], [0, 2]])
    found, _ = word_list(
        ABOUT, words, np.array([1e-3, 1e-4, 0.06, 1e-3, 1e-9]), pairs, np.array([0.1, 0.2, 0.0601]), ["house"]
    )
    assert to_combined(found).splitlines() == [
        "dictionary=keyfed:en,date=1414726260,description=Keyfed fedavg; k 3,locale=en,version=12",
        " word=the,f=220",
        "  bigram=London,f=235",
        "  bigram=house,f=226",  # that of `the` after `house` says nothing more than `the` itself
        " word=house,f=169,possibly_offensive=true",
        " word=i'm,f=169",
        " word=London,f=141",
        " word=hoUse,f=1,possibly_offensive=true",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"description": "one, two"}, "without a comma"),
        ({"description": "ε 2"}, "ASCII"),
        ({"description": "a\x1fb"}, "control character"),
        ({"description": "x" * 2048}, "1 to 2,047"),
        ({"locale": ""}, "locale is ''"),
    ],
)  # fmt: skip
def test_attributes_that_a_keyboard_reads_as_something_else_are_refused(change, said):
    with pytest.raises(DataError, match=said):
        word_list({**ABOUT, **change}, ["a"], np.array([0.1]), np.zeros((0, 2), np.int64), np.zeros(0))


def test_a_word_twice_and_too_many_first_letters_are_refused():
    none = np.zeros((0, 2), np.int64), np.zeros(0)
    with pytest.raises(DataError, match="'a' twice"):
        word_list(ABOUT, ["a", "a"], np.array([0.1, 0.2]), *none)
    many = [chr(c) for c in range(0x3400, 0x3400 + 0x8000) if chr(c).isalpha()]
    many += [chr(c) for c in range(0x20000, 0x20000 + 0x8000) if chr(c).isalpha()]
    found, _ = word_list(ABOUT, many, np.full(len(many), 1e-5), *none)
    with pytest.raises(DataError, match="holds at most 32,767"):
        to_binary(found)
