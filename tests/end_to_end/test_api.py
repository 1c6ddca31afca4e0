"""The library as the README shows it, and its public names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import keyfed

ROOT = Path(__file__).parents[2]


def test_every_public_name_exists_and_is_documented():
    assert sorted(keyfed.__all__) == sorted(set(keyfed.__all__))
    for name in keyfed.__all__:
        thing = getattr(keyfed, name)
        assert thing.__doc__, name
    with pytest.raises(AttributeError, match="public names"):
        keyfed.no_such_name  # noqa: B018


def test_changelog_has_this_version():
    assert f"## [{keyfed.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.usefixtures("built_in_in_short")
def test_the_ten_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", readme, re.S)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 12
    monkeypatch.chdir(tmp_path)
    # Run as a script is, from names of its own; only the amount of training is cut.
    script = (
        code[1]
        .replace("rounds=5", "rounds=1")
        .replace(
            "data_max_tokens=4000",
            "data_max_tokens=200, data_vocab=300, model_hidden=16, train_valid_tokens=500, train_test_tokens=500, "
            "train_baselines=False, train_workers=1",
        )
    )
    assert script != code[1]
    exec(compile(script, "readme.py", "exec"), {"__name__": "__main__"})
    perplexity, suggestions = capsys.readouterr().out.splitlines()
    assert perplexity.startswith("test perplexity ")
    assert suggestions.count("'") == 6
    assert (tmp_path / "runs/mine/report.html").exists()


def test_settings_are_checked():
    config = keyfed.configure("fedavg", lr=1.5, train_cohort=4, data_max_tokens=100, model_dropout=0.1)
    assert (config.train.cohort, config.data.max_tokens, config.model.dropout) == (4, 100, 0.1)
    with pytest.raises(keyfed.KeyfedError, match="did you mean train"):
        keyfed.configure(cohort=3)
    with pytest.raises(keyfed.KeyfedError, match=r"train\.rounds"):
        keyfed.configure(rounds=-1)
