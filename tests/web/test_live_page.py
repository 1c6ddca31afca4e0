"""The owner's page of a server in a browser: within its policy, accessible, and no wider than a phone."""

from __future__ import annotations

import json
import math

import pytest

from keyfed.deploy.homes import ServerHome
from keyfed.deploy.runs import begun_runs, noted
from keyfed.reports import live
from keyfed.reports.live import owner_page

from .test_accessible import CHECKED, SERIOUS, axe

ROUNDS = 40


def a_line(round):
    refused = {f"c{k}": "no answer" if k % 2 else "hides among more" for k in range(8)}
    nats = 4 + 2 * math.exp(-round / 9)
    return {
        "round": round, "loss": nats - 0.2, "cohort": 40, "present": 300, "reported": 40, "seconds": 4000.0,
        "contributors": [f"c{k}" for k in range(32)], "refused": refused, "lost": {}, "abandoned": False,
        "traffic": {"down": 224_000_000, "up": 224_000_000, "control": 0}, "privacy": {"epsilon": round / 7},
        "valid": {"nats": nats, "perplexity": math.exp(nats)}, "rolled_back": 3,
    }  # fmt: skip


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "SECONDS", 1)
    home, out = ServerHome(tmp_path / "home"), tmp_path / ("long-name-of-a-run-" * 5)
    home.path.mkdir()
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(a_line(n)) + "\n" for n in range(1, ROUNDS + 1)))
    (out / "ledger.jsonl").write_text('{"terms": {"delta": 1e-6, "budget": 8.0}}\n' + "{}\n" * ROUNDS)
    (out / "run.toml").write_text('method = "fedavg"\n[train]\nrounds = 60\n[secure]\non = true\n')
    with noted(home, "1", tmp_path / "gone"), noted(home, "2", out), owner_page(lambda: begun_runs(home), 0) as found:
        yield found, out


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1200])
def test_it_shows_all_within_its_width(browser, address, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.goto(f"{address[0]}?hold=1")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.querySelectorAll('.card')].every((one) => one.scrollWidth <= one.clientWidth)")
    assert page.locator("figure svg[role=img] path:not(.grid)").count() == 3  # training, validation, epsilon
    height = page.locator("figure svg[role=img] path.first").first.evaluate(
        "(one) => one.getBoundingClientRect().height"
    )
    assert height > 50, "a curve is drawn"
    assert page.evaluate("getComputedStyle(document.querySelector('.tiles')).display") == "grid", "the style is taken"
    page.evaluate(axe.AXE_SCRIPT)
    done = page.evaluate(CHECKED, SERIOUS)
    assert done["passes"] > 10
    assert done["found"] == []
    assert [one for one in problems if "favicon" not in one and "404" not in one] == []
    context.close()


def test_it_reads_itself_again(browser, address):
    found, out = address
    context = browser.new_context()
    page = context.new_page()
    page.goto(found)
    page.get_by_text(f"{ROUNDS} of 60").wait_for()
    with (out / "metrics.jsonl").open("a") as f:
        f.write(json.dumps(a_line(ROUNDS + 1)) + "\n")
    page.get_by_text(f"{ROUNDS + 1} of 60").wait_for(timeout=20_000)
    page.get_by_role("link", name="gone").click()
    page.get_by_text("nothing is written yet").wait_for()
    context.close()
