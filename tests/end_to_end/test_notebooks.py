"""The notebooks of examples/ run: all code cells in order, in one namespace and this process, at small scale.

A kernel is not started: it takes seconds, and what is looked at is our code. The last line of a cell is evaluated and
shown, as a notebook does.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import matplotlib
import pytest

import keyfed

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "model_embed": 8, "model_hidden": 12, "data_vocab": 60, "train_cohort": 3, "train_workers": 1,
    "train_valid_tokens": 200, "train_test_tokens": 200,
}  # fmt: skip
SCALES = {
    "compare-two-methods": {"AUTHORS": 8, "ROUNDS": 1, "SEEDS": 2, "SETTINGS": TINY},
    "train-privately": {"AUTHORS": 40, "ROUNDS": 2, "SETTINGS": {**TINY, "train_cohort": 8}},
    "own-keyboard": {"ROUNDS": 1, "SETTINGS": {}},
}


def cells(name: str) -> list[dict]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]


def run_cell(source: str, names: dict) -> object:
    """Run a cell and return the value of its last line, if that is an expression."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(last, "cell", "eval"), names)


def test_every_notebook_is_run_and_has_no_output():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SCALES)
    for name in SCALES:
        for cell in cells(name):
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None


@pytest.mark.usefixtures("built_in_in_short")
@pytest.mark.parametrize("name", SCALES)
def test_a_notebook_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    shown = []
    for cell in cells(name):
        if cell["cell_type"] == "code":
            shown.append(run_cell("".join(cell["source"]), names))
        if "parameters" in cell["metadata"].get("tags", ()):
            assert SCALES[name].keys() <= names.keys()
            names.update(SCALES[name])
    out = capsys.readouterr().out
    if name == "compare-two-methods":
        assert "fedadam" in out
        assert shown[3].shape[0] == 2
    else:
        assert any(isinstance(value, matplotlib.figure.Figure) for value in shown)
    if name == "train-privately":
        assert names["private"]["privacy"]["pld"] <= 8
        assert isinstance(names["plain"], keyfed.Result)
    if name == "own-keyboard":
        assert out.count("→") == 3
        assert (tmp_path / "runs/notes/keyboard/manifest.json").exists()
