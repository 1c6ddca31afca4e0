"""The first look at a text: readings of blanks, and the plots of its words (figures 1 and 2 of the report)."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfed.errors import ConfigError
from keyfed.lab.experiment.check import BLANKS
from keyfed.lab.experiment.grid import load_study
from keyfed.lab.experiment.plots import draw_plots, terms_of
from keyfed.lab.experiment.store import Store
from keyfed.lab.experiment.table import rows_of

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"


@pytest.mark.parametrize(
    ("reading", "read"),
    [
        ("runs as one", [" To be,", "", "or not "]),
        ("stripped", ["To  be,", "", "or not"]),
        ("no blank lines", ["To  be,", "or not"]),
        ("collapsed", ["To be,", "or not"]),
    ],
)
def test_readings_of_blanks(reading, read):
    assert list(BLANKS[reading](["   To  be,", "", "or not "])) == read


def test_words_and_pairs_are_drawn_in_the_order_of_their_counts():
    study = load_study("next-character-text", STUDIES)
    rows = rows_of(study, "paper", Store(RESULTS).of(study))
    words, pairs = study.plots
    for plot in (words, pairs):
        terms = next(filter(None, (terms_of(row, plot) for row in rows)))
        assert len(terms) == 20
        assert [count for _, count in terms] == sorted((count for _, count in terms), reverse=True)
        assert all(len(term.split()) == (1 if plot is words else 2) for term, _ in terms)
    drawn = draw_plots(study, rows, "paper")
    assert set(drawn) == {"words", "pairs"}
    assert all(image.startswith(b"\x89PNG") for image in drawn.values())
    assert drawn["words"] != drawn["pairs"]


def test_a_plot_of_terms_counts_words_or_pairs(tmp_path):
    text = (STUDIES / "next-character-text.toml").read_text("utf-8")
    (tmp_path / "odd.toml").write_text(text.replace('measure = "bigrams"', 'measure = "trigrams"'), "utf-8")
    with pytest.raises(ConfigError, match='measure of a plot of terms "trigrams" is not known'):
        load_study("odd", tmp_path)
