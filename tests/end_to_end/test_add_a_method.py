"""docs/add-a-method.md runs: a registered method trains by its name, plain and masked, and has a private form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import keyfed as api
from keyfed.config.schema import PrivacyConfig
from keyfed.errors import ConfigError
from keyfed.federated.methods import METHODS, build_method, method_options
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Report
from keyfed.private.dp.private_method import make_private

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text("utf-8")
(CODE,) = re.findall(r"```python\n# add_a_method.py\n(.*?)```", PAGE, re.S)


@pytest.fixture
def registered(corpus, tmp_path, monkeypatch):
    """Run the page's code next to a corpus of the name that it uses."""
    corpus.rename(tmp_path / "letters")
    monkeypatch.chdir(tmp_path)
    try:
        yield lambda: exec(compile(CODE, "add_a_method.py", "exec"), {"__name__": "add_a_method"})
    finally:
        METHODS.pop("fedloss", None)


def test_the_page_trains_in_twenty_lines(registered, capsys):
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 20
    registered()
    assert 1 < float(capsys.readouterr().out) < 200
    assert list(method_options("fedloss"))[:3] == ["power", "optimiser", "lr"]
    assert "batch_size: rows B" in METHODS["fedloss"].__doc__
    with pytest.raises(ConfigError, match="power"):
        api.configure(method="fedloss", powre=1.0)
    config = api.configure(
        method="fedloss", data="letters", model="gru", rounds=1, train_cohort=4, secure_on=True, train_baselines=False
    )
    assert api.train(config, "runs/secure")["rounds"] == 1


def test_its_private_form_is_read_off_the_rule(registered):
    registered()
    method = build_method(MethodSpec("fedloss", {"power": 1.0}))
    report = Report("anna", 30, 2.0, 30)
    assert method.mediator.share(report, ["w"]).scale == {"w": 15.0}
    private = make_private(method, PrivacyConfig(noise=1.0, weight_cap=60.0)).method
    assert private.mediator.share(report, ["w"]).scale == {"w": 0.25}
