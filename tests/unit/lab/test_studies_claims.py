"""The claims of the studies' files are what the papers say, in words that are true of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from keyfed.lab.experiment.claims import LEARNING, verdict_on
from keyfed.lab.experiment.grid import cells_of, load_study, study_names
from keyfed.lab.experiment.page import page_text
from keyfed.lab.experiment.store import Store
from keyfed.lab.experiment.table import rows_of

ROOT = Path(__file__).parents[3]
STUDIES, RESULTS = ROOT / "studies", ROOT / "docs" / "results"


def claims_of(name):
    return load_study(name, STUDIES).claims


def test_next_characters_claims_are_the_reports():
    """§6.2 and §7: FedAvg does better than FedProx, all are close, central training is best."""
    study = load_study("next-character", STUDIES)
    values = {"central": 1.0, "FedAvg": 1.1, "FedProx, mu 0.5": 1.13, "FedProx, mu 0.0001": 1.13, "ADMM": 1.14,
              "FedADMM": 1.12, "LIADMM": 1.3}  # fmt: skip
    skew = {"LIADMM": 1.2}
    found = {
        cell.id: {"id": cell.id, "seed": cell.seed, "curve": [], "measures": dict.fromkeys(("nats", "train_nats"), (
            skew.get(cell.labels["method"], values[cell.labels["method"]] + 0.02)
            if cell.labels["split"] == "quantity skew" else values[cell.labels["method"]]) + cell.seed * 1e-4)}
        for cell in cells_of(study, "standard") if cell.labels["split"] != "roles" and cell.labels["method"] in values
    }  # fmt: skip
    rows = rows_of(study, "standard", found)
    told = {c.says: verdict_on(study, rows, c, "standard") for c in study.claims if not c.ours and c.kind != "printed"}
    assert len(told) >= 6
    assert {says: word for says, word in told.items() if not word.startswith("holds")} == {}


def test_pretrainings_and_fedmeds_claims_are_the_papers():
    small, large = claims_of("pretraining-table2")
    assert (small.kind, small.of["network"]) == ("close", "small")  # "little to no improvement"
    assert (large.kind, large.of["network"]) == ("higher", "large")
    bounds = {c.of["data"]: c.bound for c in claims_of("fedmed-fig5") if c.kind == "costs"}
    assert bounds == {"PTB": 0.0193, "WikiText-2": 0.0053, "Yelp (stand-in)": 0.0054}
    assert {c.kind for c in claims_of("fedatt-fig3") if "E" not in c.of or "B" not in c.of} == {"close"}
    order = {(c.of["model"], c.than["model"]) for c in claims_of("gboard")}
    assert ("server-trained CIFG", "5-gram") in order


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_every_claim_says_what_it_is_about(name):
    tables = tomllib.loads((STUDIES / f"{name}.toml").read_text("utf-8")).get("claims", [])
    assert [table["says"] for table in tables if "about" not in table] == []
    trained = {cell.runner for cell in cells_of(load_study(name, STUDIES), "paper")} != {"explore"}
    assert {table["about"] for table in tables} <= ({"budget", "reach"} if trained else {"text"})


def test_gboards_order_waits_until_doubled_runs_gain_nothing():
    """Of the recipe whose figures were there first nothing is told, and no page says that the order does not hold."""
    study = load_study("gboard", STUDIES)
    assert {claim.about for claim in study.claims} == {"reach"}
    first = {cell.id for cell in cells_of(study, "standard") if cell.labels.get("recipe") != "long recipe"}
    found = {cell: record for cell, record in Store(RESULTS).of(study).items() if cell in first}
    rows = rows_of(study, "standard", found)
    assert {row.labels["model"]: len(row.records) for row in rows if row.records}.keys() == study.axes["model"].keys()
    assert {verdict_on(study, rows, claim, "standard") for claim in study.claims} == {LEARNING}
    page = page_text(study, found)
    assert "does not hold" not in page
    assert "federated CIFG, first recipe has no run of twice the rounds" in page


@pytest.mark.parametrize("name", study_names(STUDIES))
def test_no_page_calls_the_codes_step_size_printed_or_shows_escaped_code(name):
    study = load_study(name, STUDIES)
    words = " ".join([study.about, *study.notes, *(claim.says for claim in study.claims)])
    assert "printed step size" not in words
    assert "printed SGD" not in words
    assert "\\`" not in page_text(study, Store(RESULTS).of(study))


BLAMES = ("n-gram model wins", "order does not hold", "which no federation can", "which no federation could",
          "no federation can", "not Gboard's order")  # fmt: skip


def test_no_sentence_blames_a_federation_for_a_step_size_or_denies_it_counts():
    """The count model was ahead of undertrained networks; and counts are sums, which a federation can have."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "LOG.md"]  # a log keeps what was thought
    pages += [ROOT / "README.md"]
    pages += [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.mjs"), *(ROOT / "src").rglob("*.html")]
    assert len(pages) > 200
    texts = {page: " ".join(page.read_text("utf-8").split()) for page in pages}
    found = [(page.name, words) for page, text in texts.items() for words in BLAMES if words in text]
    assert found == []
