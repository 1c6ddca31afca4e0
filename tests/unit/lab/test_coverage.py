"""The page of the papers' elements, whose tests and cells must be there; and the report of all studies as one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyfed.cli.experiment import _report
from keyfed.errors import ConfigError
from keyfed.lab.experiment import summary
from keyfed.lab.experiment.grid import cells_of, load_study, study_names
from keyfed.lab.experiment.store import Store, main_scale, rows_of
from keyfed.lab.experiment.summary import (
    COVERAGE,
    coverage_text,
    judged_claims,
    load_source,
    named_tests,
    paper_blocks,
    repeat_lines,
    write_paper,
)
from keyfed.reports.document import Code, Heading, Picture, Table, Text

from .test_page import DOCUMENT, RESULTS, STUDIES, VALUES, results_of, study_of

PAPERS = {"FedAtt": 25, "FedMed": 25, "Gboard": 17, "Next-character": 21, "Pretraining": 29}
ELEMENTS = """
paper = "P"
title = "A paper"
[[element]]
number = 1
what = "An equation"
status = "works"
tests = ["tests/test_a.py::test_one"]
cells = ["example | data = PTB | method = FedAvg"]
[[element]]
number = 2
what = "A | table"
status = "partial"
want = "data"
reason = "Half of it."
tests = ["tests/test_a.py::TestB::test_two"]
"""
TESTS = "def test_one(): ...\nclass TestB:\n    def test_two(self): ...\ndef helper(): ...\n"


@pytest.fixture
def root(tmp_path):
    """A tree with one study, of which the rows of PTB are finished, one paper and one file of tests."""
    files = {"studies/example.toml": DOCUMENT, "studies/coverage/paper.toml": ELEMENTS, "tests/test_a.py": TESTS}
    for number, record in enumerate(results_of(study_of(), {key: VALUES[key] for key in VALUES}).values()):
        files[f"docs/results/data/example/{number}.json"] = json.dumps(record)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def text_of(root: Path, elements: str = ELEMENTS) -> str:
    (root / "studies/coverage/paper.toml").write_text(elements, "utf-8")
    return coverage_text(root / "studies", Store(root / "docs/results"))


def test_the_page_counts_and_links_what_shows_each_element(root):
    text = text_of(root)
    assert "| P | 2 | 1 | 1 | 0 | 0 |\n| all | 2 | 1 | 1 | 0 | 0 |" in text
    shown = "[test_one](../../tests/test_a.py), [example](example.md) (PTB, FedAvg)"
    assert f"| 1 | An equation | works | {shown} | – |" in text
    assert "| **partial** | [TestB::test_two](../../tests/test_a.py) | For want of data: Half of it. |" in text
    assert "A \\| table" in text
    assert "1 for want of data, 0 for want of a phone, 0 for want of a detail" in text


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "test_a.py::test_one",
            "test_a.py::test_on",
            'element 1: test "tests/test_a.py::test_on": ',
        ),
        ("test_a.py::test_one", "test_a.py::helper", "has no such test"),
        ("test_a.py::test_one", "test_a.py", "has no such test"),
        ("test_a.py::TestB::test_two", "test_a.py::test_two", "element 2: test"),
        ("tests/test_a.py::test_one", "tests/test_b.py::test_one", "tests/test_b.py is no file of tests/"),
        ("tests/test_a.py::test_one", "studies/../tests/test_a.py::test_one", "is no file of tests/"),
        ("example | data", "exampel | data", 'element 1: study "exampel" is not known (did you mean example?)'),
        ("data = PTB", "data = PTP", 'has "data = PTP" (did you mean PTB?)'),
        ("data = PTB", "data = plays, all", "is not finished: 2 of 2 are open at standard scale"),
        ("data = PTB | ", "", "is not finished: 2 of 4 are open at standard scale"),
        ('"works"', '"word"', 'status of element 1 "word" is not known (did you mean works?)'),
        ('want = "data"', 'want = "time"', 'want of element 2 "time" is not known'),
        ("number = 2", "number = 3", "element 3 stands in place 2"),
        ('reason = "Half of it."\n', "", "element 2 is partial without a reason"),
        ('"partial"', '"works"', "element 2 works and wants data"),
        ("tests =", "test =", 'key of element 1 "test" is not known'),
    ],
    ids=str,
)
def test_what_is_not_there_is_one_line_that_names_it(root, right, wrong, said):
    assert right in ELEMENTS
    with pytest.raises(ConfigError) as e:
        text_of(root, ELEMENTS.replace(right, wrong, 1))
    assert said in str(e.value)
    assert str(e.value).startswith("coverage/paper.toml: ")
    assert "\n" not in str(e.value)


def test_an_element_that_works_needs_something_that_shows_it(root):
    bare = '"works"\ntests = ["tests/test_a.py::test_one"]\ncells = ["example | data = PTB | method = FedAvg"]'
    with pytest.raises(ConfigError, match="element 1 works, but nothing shows it"):
        text_of(root, ELEMENTS.replace(bare, '"works"'))


def test_a_cell_that_is_opened_again_is_noticed(root):
    text_of(root)
    (root / "docs/results/data/example/0.json").unlink()
    with pytest.raises(ConfigError, match="1 of 2 are open at standard scale"):
        text_of(root)


def test_the_report_writes_the_page_where_tests_lie_beside_the_studies(root, capsys):
    text_of(root)
    _report(root / "studies", root / "docs/results", "example", as_json=True)
    assert (root / "docs/results" / COVERAGE).read_text("utf-8") == text_of(root)
    _report(root / "studies", root / "elsewhere", "example", as_json=True)  # another folder's cells are others
    assert not (root / "elsewhere" / COVERAGE).exists()
    capsys.readouterr()


def test_tests_are_found_without_running_them(root):
    assert named_tests(root / "tests/test_a.py") == {"test_one", "TestB::test_two"}


def test_every_element_of_the_five_papers_has_a_row():
    sources = [load_source(path) for path in (STUDIES / "coverage").glob("*.toml")]
    assert {source.paper: len(source.elements) for source in sources} == PAPERS
    assert sum(PAPERS.values()) == 117


def test_the_page_matches_its_data_and_every_test_and_cell_is_there():
    assert (RESULTS / COVERAGE).read_text("utf-8") == coverage_text(STUDIES, Store(RESULTS)), (
        "run `keyfed study report`"
    )


WORDS = """
title = "All of it"
question = ["Which?"]
method = ["So."]
limits = ["Some."]
[paper.P]
about = [
  "FedAvg has {example/mean.perplexity | data = PTB | method = FedAvg}.",
  "Plays {example/mean.perplexity | data = plays, all | method = FedAvg}.",
]
"""


def test_the_report_reads_its_numbers_from_cells_and_leaves_out_what_has_none(root, monkeypatch):
    (root / "words.toml").write_text(WORDS, "utf-8")
    monkeypatch.setattr("keyfed.lab.experiment.summary.WORDS", root / "words.toml")
    (root / "docs/results/img").mkdir()
    (root / "docs/results/img/example-rounds.png").write_bytes(b"PNG")
    pages = []
    for factor in (1, 2):
        for path in (root / "docs/results/data/example").glob("*.json"):
            record = json.loads(path.read_text("utf-8"))
            record["measures"]["perplexity"] *= factor
            path.write_text(json.dumps(record), "utf-8")
        blocks = paper_blocks(root / "studies", Store(root / "docs/results"))
        pages.append([block.text for block in blocks if isinstance(block, Text)])
    assert "FedAvg has 101.0." in pages[0]
    assert "FedAvg has 202.0." in pages[1]
    assert not [text for page in pages for text in page if text.startswith("Plays")]
    assert "Of 1 claims of 1 papers that a study can judge, 1 hold, 0 hold in some comparisons" in pages[0][1]
    assert "Of 2 elements of the papers 1 work, as a test or a finished cell shows." in pages[0]
    assert [block.light for block in blocks if isinstance(block, Picture)] == [b"PNG"]
    (table,) = (block for block in blocks if isinstance(block, Table) and block.rows[0][0] == "claim")
    assert table.rows[1][:2] == ["FedAtt is better", "holds"]
    assert Code("keyfed study example --scale standard --results again") in blocks


def test_the_report_has_every_claim_and_needs_nothing_beside_it(tmp_path, monkeypatch):
    blocks = paper_blocks(STUDIES, Store(RESULTS))
    monkeypatch.setattr(summary, "paper_blocks", lambda folder, store: blocks)  # drawing them takes seconds
    page = write_paper(STUDIES, Store(RESULTS), tmp_path / "report.html").read_text("utf-8")
    said = {
        row[0] for block in blocks if isinstance(block, Table) and block.rows[0][0] == "claim" for row in block.rows
    }
    heads = [block.text for block in blocks if isinstance(block, Heading)]
    studies = {name: load_study(name, STUDIES) for name in study_names(STUDIES)}
    for claim in judged_claims(STUDIES, Store(RESULTS)):
        judged = claim.study not in studies or main_scale(studies[claim.study], Store(RESULTS).of(studies[claim.study]))
        if claim.who != "Ours" and judged not in (None, "smoke"):
            assert f"{claim.says[0].upper()}{claim.says[1:]}" in said
    for head in ("Question", "Method", "Data and networks", *(f"Results: {paper}" for paper in PAPERS), "Limits"):
        assert head in heads
    assert page.count("data:image/png;base64,") == sum(isinstance(block, Picture) for block in blocks) > 10
    assert not [out for out in ('src="http', 'href="http', "<script", "{mean.") if out in page]
    assert len(page) < 3_000_000


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_the_lines_of_a_study_compute_every_number_of_its_rows(name):
    study = load_study(name, STUDIES)
    found = Store(RESULTS).of(study)
    scale = main_scale(study, found) or "smoke"
    rows = rows_of(study, scale, found)
    computed = set()
    for line in repeat_lines(study, rows, scale):
        said, _, seeds = line.partition(" --seeds ")
        assert said == f"keyfed study {name} --scale {scale} --results again"
        computed |= {c.id for c in cells_of(study, scale, [int(seed) for seed in seeds.split(",")] if seeds else None)}
    assert {record["id"] for row in rows for record in row.records} <= computed
