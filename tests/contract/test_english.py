"""`scripts/english.py` finds what it should, and strict files have no offender."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "english.py"
spec = importlib.util.spec_from_file_location("english", SCRIPT)
english = importlib.util.module_from_spec(spec)
spec.loader.exec_module(english)

MOST_OFFENDERS = 508  # outside the strict files; it may only fall
LONG = " ".join(["word"] * 31) + "."
SHORT = " ".join(["word"] * 30) + "."


@pytest.fixture
def found(tmp_path):
    def read(text: str, name: str = "page.md") -> list[str]:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return [offence.what for offence in english.offences(path)]

    return read


def test_a_page_is_read_without_code_and_tables(found):
    assert found(f"{SHORT}\n") == []
    assert len(found(f"# Title\n\n{LONG}\n")) == 1
    assert len(found(f"- {LONG}\n- {SHORT}\n")) == 1
    assert found(f"```\n{LONG} whom\n```\n\n    {LONG} whom\n\n| a |\n|---|\n| {LONG} whom |\n") == []


def test_a_sentence_ends_at_its_full_stop_and_an_abbreviation_ends_none(found):
    half = " ".join(["word"] * 20)
    assert found(f"Short {half}. Another {half}.") == []
    assert len(found(f"Short {half}, e.g. A {half}.")) == 1
    assert found(f"{' '.join(['word'] * 28)} `one two three four` end.") == []


@pytest.mark.parametrize("text", ["Those whom we call.", "Set `hidden` first.", "Each client's turn.", "Beside it."])
def test_a_banned_word_of_a_page_is_found(found, text):
    assert len(found(text)) == 1


@pytest.mark.parametrize("text", ["Units in the hidden layer.", "It takes part.", "Go one way.", "Once a round."])
def test_ordinary_senses_are_no_offence(found, text):
    assert found(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "hidden = 1",
        "def take_turn(): ...",
        "class Turn: ...",
        "def f(given): ...",
        "self.walk = 1",
        '"""Whoever."""',
        "# told",
    ],
)
def test_a_banned_word_of_the_package_is_found(found, line):
    assert len(found(f"{line}\n", "a.py")) == 1


def test_a_banned_word_may_be_excused_with_a_reason(found):
    assert found("# english: hidden – the width of a recurrent state\nhidden = 1\n", "a.py") == []
    assert len(found("# english: hidden\nhidden = 1\n", "a.py")) == 1


def test_doctests_formulas_and_references_are_no_prose(found):
    docstring = (
        f'"""Short.\n\n.. math::\n\n   {LONG}\n\nReferences:\n  {LONG}\n\nExample:\n  >>> 1  # {LONG}\n  1\n"""\n'
    )
    assert found(docstring, "a.py") == []
    assert len(found(f'"""Short.\n\n{LONG}\n"""\n', "a.py")) == 1


def test_strict_files_have_no_offender_and_the_others_not_more_than_before():
    counts = english.counts()
    assert {path: counts[path] for path in english.STRICT if path in counts} == {}
    assert sum(counts.values()) <= MOST_OFFENDERS, "`python scripts/english.py` lists the files"
