"""What is written, sent and hashed is as it was frozen in formats.json.

A run folder, a client's home, a message of another version and a study's finished cell must still be understood. Where
a change is intended: `python tests/golden/make.py`, and a sample of the old form in `samples/`.
"""

from __future__ import annotations

import json

import pytest

from . import formats

FROZEN = json.loads(formats.FORMATS.read_text("utf-8"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return formats.collect(tmp_path_factory.mktemp("formats"))


def test_nothing_is_new_and_nothing_is_gone(found):
    assert list(found) == list(FROZEN)


@pytest.mark.parametrize("name", FROZEN)
def test_the_format_is_as_frozen(found, name):
    assert found.get(name) == FROZEN[name], f"{name}; where it is meant to change: python tests/golden/make.py"


def test_a_purpose_is_found_wherever_it_is_written(tmp_path):
    """Directly, handed on by a function, by name, as one of many, and imported from another file."""
    (tmp_path / "one.py").write_text(
        "def direct(seed): return derive_seed(seed, 'a', 3)\n"
        "def handed(seed, purpose, *more): return sampling.derive_seed(seed, purpose, *more)\n"
        "handed(1, 'b', 'c')\n"
        "handed(1, purpose='d')\n"
        "def other(seed, purpose): return random(seed, purpose)\n"
        "other(1, 'no purpose')\n"
    )
    (tmp_path / "two.py").write_text("from one import handed\nhanded(1, 'e', k)\n")
    (tmp_path / "three.py").write_text("def handed(seed, x): ...\nhanded(1, 'of another function')\n")
    assert formats.purposes(tmp_path) == ["a/3", "b/c", "d", "e/·"]


def test_keys_are_found_at_any_depth_and_names_of_clients_are_none():
    assert formats.all_keys([{"a": [{"b": 1}], "writer3.txt": {"c": None}}, {"d": {}}]) == ["a[].b", "d", "·.c"]
