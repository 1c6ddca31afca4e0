"""The dictionary of the package, its file, and what it says of a vocabulary."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import RunError
from keyfed.keyboard import bundle
from keyfed.keyboard.dictionary import (
    FILE,
    LEAST_CLIENTS,
    MOST_TILT,
    NO_LISTS,
    Dictionary,
    Uses,
    count_uses,
    doubted,
    english,
    from_bytes,
    is_english,
    lists_for,
    tilt,
    to_bytes,
)
from keyfed.keyboard.export import export_run
from keyfed.keyboard.keys import fold
from keyfed.text.vocab import SPECIALS, UNK, Vocab

from .conftest import needs_onnx

LETTERS = st.text("abcdez'-éß", min_size=1, max_size=9)


def vocab_of(*words, lower=True):
    return Vocab("word", (*SPECIALS, *words), lower=lower, tokenised=False)


def made(spelt):
    """A dictionary of {word: (frequency, how it is written)}."""
    words = tuple(sorted(spelt))
    forms = {word: spelt[word][1] for word in words if spelt[word][1] not in (word, None)}
    both = frozenset(word for word in words if spelt[word][1] is None)
    return Dictionary(words, np.array([spelt[word][0] for word in words], np.uint8), forms, both)


def test_a_spelling_list_says_what_is_a_word():
    listed = frozenset(english()[1].words)
    assert len(listed) > 50_000
    assert not listed & {"teh", "alot", "dont", "im", "goverment", "recieve", "inthe", "hte", "adn", "seperate"}
    assert listed >= {"pizza", "hello", "monday", "london", "emma", "don't", "i'm", "okay", "café", "colour", "color"}
    assert FILE.stat().st_size < 400_000
    assert (FILE.parent / "LICENCE.txt").read_text("utf-8").count("Copyright") > 3


def test_names_have_their_capitals_and_words_do_not():
    forms, both = english()[1].forms, english()[1].both
    assert [forms[word] for word in ("monday", "london", "emma", "i'm", "tv", "youtube")] == [
        "Monday", "London", "Emma", "I'm", "TV", "YouTube",
    ]  # fmt: skip
    assert not {"government", "army", "hello"} & (set(forms) | both)
    assert {"may", "will", "mark"} <= both


def test_frequencies_are_shares_of_all_words():
    shares = english()[1].shares()
    assert 0.7 < sum(shares.values()) < 1.0
    assert shares["the"] > shares["pizza"] > shares["aardvark"] >= 1e-7


@given(
    st.dictionaries(
        LETTERS, st.tuples(st.integers(0, 255), st.sampled_from(["lower", "capital", "both", "all"])), max_size=30
    )
)
def test_a_dictionary_is_read_as_it_was_written(drawn):
    def written(word, kind):
        form = {"lower": word, "capital": word.capitalize(), "both": None, "all": word.upper()}[kind]
        return form if form is None or fold(form) == word else word

    before = made({fold(word): (n, written(fold(word), kind)) for word, (n, kind) in drawn.items()})
    after = from_bytes(to_bytes(before), "file")
    assert (after.words, after.forms, after.both) == (before.words, before.forms, before.both)
    np.testing.assert_array_equal(after.frequency, before.frequency)


def test_a_damaged_file_is_one_line_that_says_so():
    data, _ = english()
    for broken in (b"", data[:-1], data[: len(data) // 2], data[:400] + b"\xff" * 40 + data[440:]):
        with pytest.raises(RunError, match=r"^file is damaged: ") as caught:
            from_bytes(broken, "file")
        assert "\n" not in str(caught.value)
    cat_and_dog = made({"cat": (80, "cat"), "dog": (81, "Dog")})
    twice = Dictionary(("cat", "cat"), cat_and_dog.frequency, {}, frozenset())
    other = Dictionary(("cat", "dog"), cat_and_dog.frequency, {"dog": "HOUND"}, frozenset())
    for wrong, why in ((twice, "does not follow"), (other, "is not how")):
        with pytest.raises(RunError, match=why):
            from_bytes(to_bytes(wrong), "file")


def test_only_a_vocabulary_of_english_words_gets_the_dictionary():
    assert is_english(vocab_of("the", "to", "ubuntu", "zsh", "apt-get", "dog"))
    assert not is_english(vocab_of("der", "und", "nicht", "ist", "hallo", "straße"))
    assert not is_english(vocab_of("1", "2", "."))
    assert not is_english(Vocab("char", (*SPECIALS, "a", "i"), lower=False, tokenised=False))
    assert lists_for(vocab_of("der", "und", "nicht"), None, 3, tilted=True) is NO_LISTS


def test_a_word_that_no_list_has_must_be_used_by_many_and_not_look_like_a_slip():
    clients = 4000
    uses = {
        "the": 3000, "teh": 40, "a": 2900, "lot": 600, "alot": 90, "don't": 800, "dont": 900, "separate": 200,
        "seperate": 20, "kubuntu": 300, "gnomish": 3, "zzyx": int(LEAST_CLIENTS * clients) - 1, "w2k": 1, ".": 3900,
    }  # fmt: skip
    vocab = vocab_of(*uses)
    found = doubted(vocab, [0] * len(SPECIALS) + list(uses.values()), clients)
    assert found == ["teh", "alot", "dont", "seperate", "gnomish", "zzyx"]
    # Where nothing may be counted the rank in the vocabulary says which of two words is the slip.
    assert doubted(
        vocab_of("the", "kubuntu", *(f"w{c}{d}xy" for c in "bcdfgj" for d in "bcdfgjkl"), "teh", "dont"), None, 0
    ) == ["teh", "dont"]


def test_a_tilt_is_the_quotient_of_everyday_and_own_frequency_within_bounds():
    vocab, shares = vocab_of("the", "pizza", "ubuntu", "."), english()[1].shares()
    uses = dict(zip(vocab.words, [0, 0, 0, 100, 500, 0, 400, 50], strict=True))
    found = dict(zip(vocab.words, tilt(vocab, list(uses.values())), strict=True))
    assert found["the"] == pytest.approx(math.log(shares["the"] / (500 / 1000)), abs=0.01)
    assert (found["ubuntu"], found["."], found["<bos>"]) == (-MOST_TILT, 0.0, 0.0)
    missing = sum(share for word, share in shares.items() if word not in ("the", "pizza"))
    assert found["<unk>"] == pytest.approx(math.log(missing / (100 / 1000)), abs=0.01)
    assert len(found) == len(vocab)


def test_uses_are_tokens_and_clients_of_every_entry():
    vocab = vocab_of("the", "cat")
    found = count_uses([["The cat, the dog"], ["the"], []], vocab)
    assert found[len(SPECIALS) :] == [Uses(3, 2), Uses(1, 1)]
    assert found[UNK] == Uses(2, 1)


@needs_onnx
def test_the_base_model_is_exported_with_the_dictionary_and_its_licences(tmp_path):
    from pathlib import Path

    done = export_run(Path("base"), tmp_path / "out")
    lists = bundle.load_lists(done.out)
    assert lists.dictionary == english()[0] == gzip.decompress(FILE.read_bytes())
    assert {"teh", "dont", "alot"} <= set(lists.doubted)
    assert not {"ubuntu", "lol", "the"} & set(lists.doubted)
    assert lists.tilt is not None
    assert "CC BY-SA 4.0" in json.dumps(done.manifest["dictionary"])
    assert bundle.check_bundle(done.out)["files"].keys() >= {bundle.DICTIONARY}
    (done.out / bundle.DICTIONARY).write_bytes(lists.dictionary[:-1])
    with pytest.raises(RunError, match=r"dictionary\.safetensors"):
        bundle.check_bundle(done.out)


def test_the_export_of_other_words_has_no_dictionary(one_export):
    assert bundle.load_lists(one_export) == NO_LISTS
    assert not (one_export / bundle.DICTIONARY).exists()
