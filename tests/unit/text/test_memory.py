"""Text that a program holds: the shapes it may have, what is left out, and what is said about the rest."""

from __future__ import annotations

import re

import pytest

from keyfed.errors import DataError
from keyfed.text.catalogue import load_corpus
from keyfed.text.corpus import read_corpus
from keyfed.text.memory import corpus_of, hold

PAIRS = [("ann", "good morning\n\nhow are you"), ("ben", "fine"), ("ann", "see you")]


class Frame(dict):
    """What this package knows of a frame: columns by name."""

    @property
    def columns(self):
        return list(self)


SHAPES = {
    "pairs": PAIRS,
    "a generator of pairs": (list(pair) for pair in PAIRS),
    "a dictionary": {"ann": ["good morning\nhow are you", "see you"], "ben": "fine"},
    "a frame": Frame(author=["ann", "ben", "ann"], text=[text for _, text in PAIRS]),
    "a frame in order of time": Frame(
        when=["x"] * 3, text=["see you", "fine", "good morning\nhow are you"], User=["ann", "ben", "ann"],
        date=["2024-03-03", "2024-03-02", "2024-03-01"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("data", SHAPES.values(), ids=SHAPES)
def test_all_shapes_are_the_same_corpus(data, tmp_path):
    rows = "".join(f'{author},"{text}"\n' for author, text in PAIRS)
    (tmp_path / "chat.csv").write_text("author,text\n" + rows, "utf-8")
    found = corpus_of(data)
    assert {a.name: a.lines for a in found.authors} == {
        a.name: a.lines for a in read_corpus(tmp_path / "chat.csv").authors
    }
    assert found.natural


def test_real_frames_are_read_with_their_empty_cells(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"who": ["ann", None, "ben", "ben"], "said": ["good day", "x", None, "well"], "n": 1})
    with pytest.raises(DataError, match=r"no author column .* data_author_column=…, one of who, said, n"):
        corpus_of(frame)
    found = corpus_of(frame, "who", "said")
    assert [a.lines for a in found.authors] == [("good day",), ("well",)]
    assert [(s.what, s.why) for s in found.skipped] == [("1 texts", "no author"), ("1 texts", "no text")]
    with pytest.raises(DataError, match=r"no column 'whom' \(did you mean who\?\); there are: who, said, n"):
        corpus_of(frame, "whom", "said")


def test_lines_alone_are_one_pool():
    found = corpus_of(["good morning", "", "see you"])
    assert (found.natural, [a.lines for a in found.authors]) == (False, [("good morning", "see you")])
    assert corpus_of(found) is found


def test_a_name_stands_for_the_text():
    name = hold(PAIRS)
    assert hold(list(PAIRS)) == name != hold(PAIRS[:2])
    assert load_corpus(name).name == name
    with pytest.raises(DataError, match=r"held, and it is not here any more; .*configure\(data=…\)"):
        load_corpus("in-memory-0123456789ab")


SECRET = "my secret"
MISTAKES = {
    "nothing": ([], "no usable text (nothing in it)"),
    "a number": (3, "of type int"),
    "bytes": (SECRET.encode(), "data is bytes"),
    "blank texts": ([("ann", " "), ("ben", None)], "1 texts: no text"),
    "triples": ([("ann", SECRET, 1)], "item 0 is a tuple; expected pairs"),
    "lines, then pairs": ([SECRET, ("ann", SECRET)], "item 1 is a tuple; expected text like"),
    "numbers as text": ([("ann", 3)], "pair 0 has a text of type int"),
    "numbers in a dictionary": ({SECRET: 3}, "author 0 has a int"),
    "a broken character": ([("ann", f"{SECRET} \ud800")], "1 texts: not UTF-8"),
}


@pytest.mark.parametrize(("data", "said"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_without_the_text(data, said):
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        corpus_of(data)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="leave them out"):
        corpus_of(PAIRS, author_column="author")
