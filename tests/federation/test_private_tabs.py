"""Two tabs of a browser and two Flower clients in one private federation: `keyfed up --web 2 --dp`, live."""

from __future__ import annotations

import re

import pytest

from keyfed.deploy.certificates import SERVER_CERT
from keyfed.private.dp.accounting import rho_to_eps
from keyfed.private.dp.ledger import read_ledger
from keyfed.private.dp.own_ledger import DELTA, OwnLedger
from keyfed.run.folder import read_metrics, read_run_toml
from keyfed.run.remote.train import train_deployed
from tests.faults.deployed import QUICK, federation
from tests.vocabulary import build_vocab
from tests.web.conftest import LOADED, Visit, browser_path
from tests.web.test_federated_page import Said
from tests.web.test_site import key_sum

from .test_tabs import OWN, SIZES, WORDS, Server, Up, lines_of, sync_api, take_part
from .test_up import processes_of

pytestmark = pytest.mark.federation

NOISE, ROUNDS = 0.8, 2
TABS, CLIENTS = ["page-1", "page-2"], ["anna", "bert"]


def own_epsilon(tab):
    """What the panel says of the owner's account: ε, uploads."""
    tab.panel()
    said = tab.page.get_by_label("Federation", exact=True).text_content()
    tab.close_panel()
    found = re.search(r"([0-9.]+) \(δ = ([0-9.e-]+)\) for ([0-9]+) uploads to 1 private run", said)
    assert found, said
    assert float(found[2]) == DELTA
    return float(found[1]), int(found[3])


def test_a_private_run_of_tabs_is_booked_as_one_of_python_clients(tmp_path):
    vocab, _ = build_vocab([[" ".join([*WORDS, OWN])]], kind="word", size=None, lower=True, tokenised=False)
    (tmp_path / "vocab.json").write_text(vocab.to_json())
    (tmp_path / "text").mkdir()
    texts = [tmp_path / "text" / name for name in CLIENTS]
    for text in texts:
        text.write_text("\n".join(lines_of(text.name)) + "\n")
    home, out = tmp_path / "home", tmp_path / "run"
    arguments = (
        ["up", "fedavg", "--clients", 2, "--web", 2, "--dp", f"noise={NOISE}", "--data", tmp_path / "text", "--vocab",
         tmp_path / "vocab.json", *SIZES, "--rounds", ROUNDS, "--home", home, "--out", out, "--json"]
    )  # fmt: skip
    path = browser_path()
    if path is None:
        pytest.skip("no browser found")
    with sync_api.sync_playwright() as running, Up(arguments, tmp_path) as up:
        links = [up.heard(rf"{name}: (https://\S+)")[1] for name in TABS]
        trust = f"--ignore-certificate-errors-spki-list={key_sum(home / 'server' / SERVER_CERT)}"
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox", trust])
        tabs = [Visit(browser, Server(link)) for link in links]
        for tab, link, name in zip(tabs, links, TABS, strict=True):
            tab.page.goto(link)
            tab.wait("ready")
            take_part(tab, lines_of(name), False)
        result = up.result()
        for tab in tabs:
            note = tab.page.locator("#federated-note")
            sync_api.expect(note).to_contain_text("The strip is of the federation's model now", timeout=LOADED)
            tab.close_panel()
        own = [own_epsilon(tab) for tab in tabs]
        assert [tab.problems for tab in tabs] == [[], []]
        browser.close()
    assert processes_of(home) == []

    private = result["privacy"]
    assert [result["rounds"], result["abandoned"], result["secure"]] == [ROUNDS, 0, True]
    assert (private["verdict"], private["releases"], private["population"]) == ("BOUND ONLY", ROUNDS, 4)
    assert [line["privacy"]["verdict"] for line in read_metrics(out)] == ["BOUND ONLY"] * ROUNDS
    written = (out / "metrics.jsonl").read_text() + (out / "result.json").read_text()
    assert [name for name in (*TABS, *CLIENTS) if name in written] == []

    # The owners' ε: that of the Flower clients of the same run, and by the formula.
    accounts = [OwnLedger(home / "clients" / name).read() for name in CLIENTS]
    uploads = [sum(account.parts.values()) for account in accounts]
    assert [count for _, count in own] == uploads
    for epsilon, count in own:
        assert epsilon == float(f"{rho_to_eps(count / (2 * NOISE**2), DELTA):.3g}")
        assert epsilon == float(f"{accounts[0].epsilon():.3g}")

    # The same terms among four Python clients: the same statement and the same rows, whatever was drawn.
    config, _ = read_run_toml(out)
    (tmp_path / "texts").mkdir()
    files = [*texts, *(tmp_path / "texts" / name for name in TABS)]
    for file in files[2:]:
        file.write_text("\n".join(lines_of(file.name)) + "\n")
    transport, roster = federation(tmp_path / "python", files, named=lambda file: file.name)
    python = train_deployed(config, vocab, tmp_path / "python-run", transport, roster, Said(), patience=QUICK)
    same = {key: value for key, value in python["privacy"].items() if key in private}
    assert same["statement"] == private["statement"]
    assert same == private
    booked, alike = read_ledger(out), read_ledger(tmp_path / "python-run")
    assert (booked.terms, booked.entries) == (alike.terms, alike.entries)
    assert len(booked.entries) == ROUNDS
