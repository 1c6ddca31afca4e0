"""docs/audit.md shows what benchmarks/privacy_canaries.py measured, and the statement follows from those numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
MEASURED = json.loads((DOCS / "results" / "data" / "privacy-canaries.json").read_text("utf-8"))


def row(run, unprotected):
    epsilon = "–" if run["epsilon"] is None else f"{run['epsilon']:.2f}"
    cost = f"{run['perplexity']:.1f} (× {run['perplexity'] / unprotected:.2f})"
    bits = ", ".join(f"{x:.1f}" for x in run["exposures"])
    name = {"plain": "none", "private": "clip and noise"}[run["run"]]
    return f"| {run['seed']} | {name} | {epsilon} | {cost} | {bits} | {run['controls_median']:.2f} |"


def test_the_page_has_every_run_that_was_measured():
    page = (DOCS / "audit.md").read_text("utf-8")
    for found in MEASURED["seeds"]:
        for run in found["rows"]:
            assert row(run, found["rows"][0]["perplexity"]) in page


def test_the_statement_follows_from_the_numbers():
    assert MEASURED["bound_bits"] == math.log2(MEASURED["canaries"] / 0.05)
    assert (MEASURED["users"], MEASURED["copies"]) == (4, 200)
    for found in MEASURED["seeds"]:
        plain, private = found["rows"]
        assert (plain["verdict"], private["verdict"]) == ("NONE", "SIMULATED")
        parts = [
            min(plain["exposures"]) > MEASURED["bound_bits"],
            max(private["exposures"]) < MEASURED["bound_bits"],
            private["perplexity"] < found["unigram"],
            private["perplexity"] <= 1.5 * plain["perplexity"],
            min(run["controls_p"] for run in found["rows"]) > 0.01,
        ]
        assert list(found["parts"].values()) == parts
        assert all(parts)
