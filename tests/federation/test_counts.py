"""`keyfed up --counts`: a count over Flower, equal to the simulation's, byte for byte."""

from __future__ import annotations

import json

import pytest

from keyfed.model.counts import FILE
from keyfed.model.mixture import FILE as MIXTURE

from .test_up import SMALL, processes_of, run, write_texts

pytestmark = pytest.mark.federation

TERMS = {"order": 2, "megabytes": 0.05, "most": 200}


def test_a_count_over_flower_writes_what_the_simulation_writes(tmp_path):
    write_texts(tmp_path / "text")
    home, out = tmp_path / "home", tmp_path / "real"
    terms = [word for name, value in TERMS.items() for word in ("--set", f"counts.{name}={value}")]
    up = ["up", "fedavg", "--clients", 4, "--counts", "--data", tmp_path / "text", *SMALL, *terms, "--home", home]
    result = json.loads(run([*up, "--out", out, "--json"], tmp_path))
    assert {"counts", "mixture", "cache"} <= set(result["counts"])
    written = [(out / name).read_bytes() for name in (FILE, MIXTURE)]
    flags = [word for name, value in TERMS.items() for word in (f"--{name}", value)]
    simulated = json.loads(run(["counts", out, *flags, "--secure", "--json"], tmp_path))
    assert [(out / name).read_bytes() for name in (FILE, MIXTURE)] == written
    assert simulated["masked"]
    for name, split in simulated["test"].items():
        assert result["counts"][name]["test"]["perplexity"] == pytest.approx(split["test"]["perplexity"], rel=1e-5)
    assert "federated counts" in (out / "report.md").read_text("utf-8")
    assert processes_of(home) == []
