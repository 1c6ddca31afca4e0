"""The page's training and its secure sums in Chromium itself: what the tests in node say holds in a browser."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import keyfed.keyboard
from keyfed.model.language_model import init_params
from keyfed.private.secagg.keys import Identity
from tests.golden import transcript
from tests.unit.private.conftest import counter

from .test_training import CUTS, RULES, SPECS, TASK, by_python, cut_of, text_of

WEB = Path(keyfed.keyboard.__file__).parent / "web"
CASES = Path(__file__).with_name("chromium_cases.mjs")
ORIGIN = "http://127.0.0.1:1"  # nothing listens there: every file is handed over by the test
ENTROPY = 1 << 13


@pytest.fixture(scope="module")
def page(browser):
    """An empty page of a secure context that can import the page's modules, and nothing else."""

    def hand_over(route):
        path = route.request.url.removeprefix(ORIGIN)
        if path == "/":
            return route.fulfill(body="<!doctype html>", content_type="text/html")
        found = CASES if path == "/cases.mjs" else WEB / path.lstrip("/")
        return route.fulfill(body=found.read_text("utf-8"), content_type="text/javascript")

    context = browser.new_context()
    context.route("**/*", hand_over)
    opened = context.new_page()
    opened.goto(f"{ORIGIN}/")
    yield opened
    context.close()


def called(page, name, case):
    return page.evaluate(f"(one) => import('/cases.mjs').then((cases) => cases.{name}(one))", case)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["float64", "float32"])
def test_a_local_epoch_in_chromium_is_pythons(page, dtype, most):
    spec, cut, rule, text = SPECS[0], CUTS[0], RULES[0], text_of(5, 120)
    params = {name: 3 * p for name, p in init_params(spec, 3, torch.float64).items()}
    seed, round, name = TASK
    weights = {n: base64.b64encode(p.to(dtype).numpy().tobytes()).decode() for n, p in params.items()}
    local = {**cut_of(cut), "epochs": 1, "lr": 0.5, "clip": rule.clip, "momentum": rule.momentum, "dropout": 0}
    found = called(
        page,
        "train",
        {
            "weights": weights, "type": str(dtype).removeprefix("torch."), "model": asdict(spec), "local": local,
            "stream": text.tolist(), "task": {"seed": str(seed), "round": round, "client": name},
        },
    )  # fmt: skip
    expected, solution = by_python(spec, params, text, cut, rule, 1, dtype)
    assert found["loss"] == pytest.approx(float(solution.loss[0]), rel=most)
    for layer, w in expected.items():
        mine = np.array(found["weights"][layer]).reshape(w.shape)
        assert np.abs(mine - w).max() <= most * np.abs(w).max(), layer
        assert np.abs(w - params[layer].numpy()).max() > 10 * most


@pytest.mark.parametrize("kind", ["ordinary", "private"])
def test_chromium_writes_the_transcript_byte_for_byte(page, kind):
    frozen, names = json.loads(transcript.TRANSCRIPT.read_text("utf-8"))[kind], transcript.NAMES
    identities = {name: Identity.make(counter(f"identity {name}")).private_bytes().hex() for name in names}
    found = called(
        page,
        "sum",
        {
            "names": names, "lost": transcript.LOST, "threshold": transcript.THRESHOLD, "serial": transcript.SERIAL,
            "context": kind.encode().hex(), "identities": identities, "vectors": frozen["vectors"],
            "keys": {name: counter(f"keys {kind} {name}")(ENTROPY).hex() for name in names},
            "shares": {name: counter(f"sum {kind} {name}")(ENTROPY).hex() for name in names},
        },
    )  # fmt: skip
    for what, value in found.items():
        assert value == frozen[what], what
