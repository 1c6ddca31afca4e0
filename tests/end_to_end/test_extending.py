"""The package is open: docs/extending.md runs, and what a caller brings along is taken in or refused in one line."""

from __future__ import annotations

import json
import math
import random
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import keyfed as api
from keyfed.errors import ConfigError, KeyfedError, RunError
from keyfed.federated.types import Mediator, Method, ServerRule, Share
from keyfed.federated.weigh import by_tokens, separable
from tests.listeners import Heard

from .conftest import Bag, sentence

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.S))


def config_for(corpus, **settings):
    tiny = {"rounds": 2, "model": "gru", "train_cohort": 3, "data_window": 8, "train_valid_tokens": 300}
    return api.configure(**{"method": "fedavg", "data": str(corpus), "train_baselines": False, **tiny, **settings})


def own_method(name: str = "mine", **parts) -> Method:
    return replace(api.METHODS["fedavg"](optimiser="sgd", lr=1.0), name=name, **parts)


def test_every_block_of_the_page_is_a_file():
    assert PAGE.count("```python") == len(BLOCKS) == 4


@pytest.mark.parametrize("name", ["my_mediator.py", "my_method.py"])
def test_a_method_of_your_own_takes_at_most_twenty_lines(name):
    lines = [line for line in BLOCKS[name].splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 20, lines


def test_the_page_runs(corpus, tmp_path, monkeypatch, capsys):
    for k, path in enumerate(sorted(corpus.iterdir())):  # the conformance suite wants more held-out text
        more = [sentence(random.Random(f"{k}/{n}")) for n in range(80)]
        path.write_text(path.read_text("utf-8") + "\n".join(more) + "\n", "utf-8")
    corpus.rename(tmp_path / "letters")
    for name, code in BLOCKS.items():
        (tmp_path / name).write_text(code, "utf-8")
    # In this process, because importing torch takes longer than the scripts; each runs as `python NAME` would.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = {}
    for name in BLOCKS:
        runpy.run_path(name, run_name="__main__")
        said[name] = capsys.readouterr().out.splitlines()
    del sys.modules["my_model"]
    first, suggestions, *checks = said["train_my_model.py"]
    assert first.startswith("my_model.make ")
    assert suggestions.count("'") == 6
    assert len(checks) == 7
    assert all(line.startswith("ok ") for line in checks), checks
    for name in ("my_mediator.py", "my_method.py"):
        assert 1 < float(said[name][-1]) < 200


def test_a_method_of_your_own_equals_ours_where_it_is_the_same(corpus, tmp_path):
    ours = api.train(config_for(corpus, model_embed=8, optimiser="sgd", lr=1.0), tmp_path / "ours")
    heard = Heard()
    config = config_for(corpus, model_embed=8, train_workers=2)
    own = api.train(config, tmp_path / "own", method=own_method(), listener=heard)
    assert (tmp_path / "own/model.safetensors").read_bytes() == (tmp_path / "ours/model.safetensors").read_bytes()
    assert own["test"] == ours["test"]
    assert (own["method"], ours["method"]) == ("mine", "fedavg")
    assert any("one process: the method mine is not in the package" in line for line in heard.lines)
    written = (tmp_path / "own/run.toml").read_text("utf-8")
    assert 'method = "mine"' in written
    assert "[method]" not in written
    assert api.evaluate(tmp_path / "own")["method"] == "mine"


def test_a_method_of_your_own_resumes_with_itself_only(corpus, tmp_path, keyfed):
    def weigh(memory, reports, layers):  # counts rounds, so that memory and server state matter
        weights = {c: dict.fromkeys(layers, float(r.tokens) ** (1 / (1 + memory))) for c, r in reports.items()}
        return memory + 1, {c: Share(w, w) for c, w in weights.items()}

    mine = own_method(mediator=Mediator(lambda: 0, weigh), server=api.METHODS["fedavgm"]().server)
    config = config_for(corpus, model_embed=8, rounds=3)
    api.train(config, tmp_path / "whole", method=mine)
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        api.train(config, cut, method=mine, listener=Heard(count=1))
    with pytest.raises(RunError, match="began with the method mine from outside the package, and was given other"):
        api.train(config, cut, resume=True, method=own_method("other"))
    with pytest.raises(RunError, match="given none; go on from Python"):
        api.train(config, cut, resume=True)
    code, _, err = keyfed("train", "--resume", "--out", cut)
    assert (code, err.count("\n")) == (2, 1)
    assert "method mine from outside the package" in err
    api.train(config, cut, resume=True, method=mine)
    assert (cut / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    ours = config_for(corpus, model_embed=8, rounds=1)
    api.train(ours, tmp_path / "ours")
    with pytest.raises(RunError, match="leave method out"):
        api.train(ours, tmp_path / "ours", resume=True, method=mine)


def test_a_method_of_your_own_resumes_with_a_model_of_characters_too(corpus, tmp_path):
    config = config_for(corpus, model="char-lstm", model_embed=4, model_hidden=6, rounds=3)
    api.train(config, tmp_path / "whole", method=own_method())
    with pytest.raises(KeyboardInterrupt):
        api.train(config, tmp_path / "cut", method=own_method(), listener=Heard(count=1))
    api.train(config, tmp_path / "cut", resume=True, method=own_method())
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_a_method_beside_a_named_one_is_refused(corpus, tmp_path):
    for config in (config_for(corpus, method="fedprox"), config_for(corpus, lr=0.1)):
        with pytest.raises(ConfigError, match="passed beside a configuration that has one"):
            api.train(config, tmp_path / "run", method=own_method())
    with pytest.raises(ConfigError, match=r"method is a str; expected a keyfed\.Method"):
        api.train(config_for(corpus), tmp_path / "other", method="fedavg")


def some(weight):
    return lambda report, layers: Share(dict.fromkeys(layers, weight), dict.fromkeys(layers, weight))


SERVER = api.METHODS["fedavg"]().server
SLIPS = {
    "no share": (
        {"mediator": Mediator(lambda: None, lambda m, r, ls: (m, None))},
        "weigh returned no shares",
    ),
    "a bare number": ({"mediator": separable(lambda report, layers: 1.0)}, r"gave a float; expected a Share"),
    "not a number": ({"mediator": separable(some(math.nan))}, r'scale of layer "embedding.weight" is nan'),
    "negative": ({"mediator": separable(some(-1.0))}, r'mass of layer "embedding.weight" is -1.0'),
    "a layer left out": (
        {"mediator": separable(lambda report, layers: some(1.0)(report, layers[1:]))},
        r'scale of layer "embedding.weight" is missing',
    ),
    "both ways": (
        {"mediator": Mediator(lambda: None, lambda m, r, ls: (m, {}), by_tokens().share)},
        "whose clients are in the sum already",
    ),
    "a stranger": (
        {"mediator": Mediator(lambda: None, lambda m, r, ls: (m, {"nobody": some(1.0)(None, ls)}))},
        "gave a share to nobody, which has not reported",
    ),
    "a memory of tuples": (
        {"mediator": Mediator(lambda: (1, 2), lambda m, r, ls: (m, {}))},
        "keeps a tuple that JSON does not give back",
    ),
    "no pair": ({"mediator": Mediator(lambda: None, lambda m, r, ls: {})}, r"expected a pair \(memory, shares\)"),
    "no state": ({"server": ServerRule(lambda p: None, SERVER.step)}, "expected a dictionary of named tensors"),
    "other shapes": (
        {"server": ServerRule(lambda p: {}, lambda p, a, s: ({n: t[:1] for n, t in p.items()}, s))},
        "other layers or shapes",
    ),
    "theta alone": ({"server": ServerRule(lambda p: {}, lambda p, a, s: p)}, r"expected a pair \(θ', state\)"),
}


@pytest.mark.parametrize(("parts", "said"), SLIPS.values(), ids=SLIPS.keys())
def test_a_slip_in_a_method_is_one_line_that_names_it(parts, said, corpus, tmp_path):
    config = config_for(corpus, model_embed=4, rounds=1)
    with pytest.raises(ConfigError, match=said) as caught:
        api.train(config, tmp_path / "run", method=own_method("slippery", **parts))
    assert "slippery" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_says_to_use_python_for_a_module(corpus, tmp_path, keyfed):
    out = tmp_path / "bag"
    result = api.train(config_for(corpus, model="cifg"), out, module=Bag)
    assert result["model"].endswith(".Bag")
    assert json.loads((out / "result.json").read_text("utf-8"))["parameters"] == result["vocabulary"] ** 2
    for verb in (("evaluate",), ("conformance",), ("suggest",)):
        code, _, err = keyfed(*verb, out, *(["the people"] if verb == ("suggest",) else []))
        assert (code, err.count("\n")) == (2, 1), err
        assert "Bag, which is not in the package; use it from Python" in err
    code, _, err = keyfed("train", "--resume", "--out", out)
    assert code == 2
    assert "began with the module" in err
    assert api.evaluate(out, module=Bag)["test"] == result["test"]
    assert "perplexity" in api.report(out, module=Bag)
    with pytest.raises(KeyfedError, match="is missing"):
        api.load_model(out, module=lambda v: torch.nn.Sequential(torch.nn.Embedding(v, v)))


def test_a_module_and_a_preset_are_not_mixed(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.dropout=0\.1, model\.hidden=12 would change a preset"):
        api.train(config_for(corpus, model_hidden=12, model_dropout=0.1), tmp_path / "run", module=Bag)
    api.train(config_for(corpus, model_embed=4, rounds=0), tmp_path / "ours")
    with pytest.raises(RunError, match='was trained with the preset "gru"; leave module out'):
        api.load_model(tmp_path / "ours", module=Bag)
    with pytest.raises(RunError, match="began with a module of the package"):
        api.train(config_for(corpus, rounds=0), tmp_path / "ours", resume=True, module=Bag)
