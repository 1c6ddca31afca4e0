"""The base model's keyboard, as a terminal and the page have it: names, accents and contractions, in our phrases."""

from __future__ import annotations

import pytest

from keyfed.keyboard.dictionary import english
from keyfed.keyboard.export import spelling_of
from keyfed.keyboard.session import TypedLine, keyboard_of, press
from keyfed.run.base import load_base

from .node_cases import K, needs_node

pytestmark = needs_node


@pytest.fixture(scope="module")
def keyboard():
    base = load_base()
    with keyboard_of(base.trained, *spelling_of(base.trained, base), base.counts) as one:
        one._settings = {"learn": False}
        yield one


def typed(keyboard, text: str) -> str:
    line = TypedLine(keyboard)
    for _ in press(line, text):
        pass
    return line.text


@pytest.mark.parametrize(
    "text",
    ["we met Müller today ", "her name is José and ", "send my résumé to ", "how naïve you are ", "the façade is grey ",
     "a café and a cafe ", "crème brûlée please ", "Mr Özil plays ", "the Åland isles ", "Rødgrød is red ",
     "ask Chloe\u0308 "],
)  # fmt: skip
def test_an_accent_is_never_taken_away(keyboard, text):
    """Neither from a word that is known nor from one that looks like a known word without it."""
    assert typed(keyboard, text) == text


def test_a_word_with_an_accent_is_corrected_to_one_that_has_it(keyboard):
    assert typed(keyboard, "my fiancéee ") == "my fiancée "
    assert keyboard.knows(["résumé", "naïve", "façade", "café", "cafe", "fiancée"]) == [True] * 6


@pytest.mark.parametrize(
    ("text", "want"),
    [("lets go ", "let's go "), ("hey lets eat ", "hey let's eat "), ("and lets talk ", "and let's talk "),
     ("she lets ", None), ("my boss lets ", None), ("its raining ", "it's raining "),
     ("but its late ", "but it's late "), ("lost its ", None), ("at its ", None), ("my id ", None),
     ("id card ", None), ("bring your id card ", None), ("so id love ", "so I'd love "), ("see you on wed ", None),
     ("wed works ", None), ("i think wed ", "I think we'd "), ("feeling ill ", None), ("mum is ill ", None),
     ("it wont work ", "it won't work "), ("yall come ", "y'all come "), ("we were ", None)],
)  # fmt: skip
def test_contractions_are_mended_where_the_words_before_tell(keyboard, text, want):
    """Where they do not tell (id, wed and ill at the start of a sentence), what was typed stays."""
    assert typed(keyboard, text) == (text if want is None else want)


def test_every_contraction_is_of_words_that_are_known():
    """One that is not known would be left out, and the typed word corrected to another (yall to all)."""
    known = set(english()[1].words)
    assert [word for text in K.contractions.values() for word in text.split() if word not in known] == []
    assert set(K.margins) <= set(K.contractions)
    assert [word for word in K.second_names if word not in known] == []


@pytest.mark.parametrize(
    "text",
    ["we saw Isla and Mohammed ", "ask Li about it ", "yes Niamh came ", "ask Oisin and Saoirse ", "i'd ask Jaxon ",
     "met Uwe and Bilal ", "on Binance now ", "take an uber ", "send me an e-mail ", "bro come on ", "check your dms ",
     "lmao ok ", "from ChatGPT "],
)  # fmt: skip
def test_names_and_informal_words_stay(keyboard, text):
    assert typed(keyboard, text).lower() == text.lower()


def test_slips_with_a_capital_are_still_mended(keyboard):
    assert typed(keyboard, "we saw Germny and Francce ") == "we saw Germany and France "


@pytest.mark.parametrize(
    ("text", "want"),
    [("in new york ", "in new york "), ("in New york ", "in New York "), ("harry potter is on ", "Harry Potter is on "),
     ("went to south africa ", "went to south africa "), ("in york ", "in York "), ("in africa ", "in Africa "),
     ("the potter ", "the potter ")],
)  # fmt: skip
def test_of_a_name_of_two_words_both_have_capitals_or_neither(keyboard, text, want):
    assert typed(keyboard, text) == want
