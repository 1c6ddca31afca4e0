"""Three tabs of a browser and two Flower clients in one secure federation: `keyfed up --clients 2 --web 3`, live.

The tabs are driven as a person drives them. One looks at its uploads before they are sent, and is closed in the middle.
What came of it is compared with Python clients that have the tabs' text and vanish at the same message. Those are
compared with the simulation in tests/faults/test_equality.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from dataclasses import replace

import pytest

import keyfed
from keyfed.deploy.certificates import SERVER_CERT
from keyfed.run.folder import read_metrics, read_run_toml
from keyfed.run.loop import train
from keyfed.run.remote import device
from keyfed.run.remote.train import train_deployed
from keyfed.text.partition import ClientText
from keyfed.wire.messages import unpack
from keyfed.wire.transport import Lost, deliver
from tests.faults.deployed import QUICK, federation, last_model
from tests.vocabulary import build_vocab
from tests.web.conftest import LOADED, Visit, browser_path
from tests.web.test_federated_page import Said
from tests.web.test_site import key_sum

from .test_up import processes_of, start

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.federation

WORDS = "the a cat dog bird sat ran flew on under over mat tree house and then it was small big red .".split()  # noqa: SIM905
OWN = "heron"  # the owners of two tabs write it; nobody else does
TABS = ["page-1", "page-2", "page-3"]
CLOSED, CLOSED_IN = "page-2", 1  # in its second round, before its upload
SIZES = [
    "--model", "cifg", "--rounds", "3", "--set", "model.embed=8", "--set", "model.hidden=12", "--set", "data.window=8",
    "--set", "train.workers=1", "--set", "train.block=1", "--set", "train.baselines=false",
    "--set", "method.optimiser=sgd", "--set", "method.lr=0.5", "--set", "method.clip=1", "--set", "method.epochs=4",
    "--set", "method.batch_size=3",
]  # fmt: skip


def lines_of(who, count=40, owners=tuple(TABS[:2])):
    """Sentences of one person; those of the owners, which are two tabs, are of herons."""
    made = []
    for n in range(count):
        draw = hashlib.sha256(f"{who}/{n}".encode()).digest()
        words = [WORDS[b % len(WORDS)] for b in draw[: 5 + draw[-1] % 4]]
        if who in owners:
            words = ["the", OWN, *words[:2], "the", OWN]
        made.append(" ".join(words))
    return made


class Server:
    """What a visit needs to know of it."""

    def __init__(self, address):
        self.address = address


class Up:
    """`keyfed up`, and what it says; it is ended when its `with` is left."""

    def __init__(self, arguments, folder):
        self.process = start(arguments, folder)
        self.said, self._new = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stderr:
            with self._new:
                self.said.append(line)
                self._new.notify_all()

    def heard(self, pattern, seconds=120):
        """Wait for a line, and return the match."""
        with self._new:
            found = self._new.wait_for(lambda: re.search(pattern, "".join(self.said)), seconds)
        assert found, "".join(self.said)[-3000:]
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)
        self.process.stdout.close()
        self.process.stderr.close()

    def result(self, seconds=240):
        out = self.process.stdout.read()
        assert self.process.wait(seconds) == 0, "".join(self.said)[-3000:]
        return json.loads(out)


def take_part(tab, lines, is_asked):
    """Agree, type, and join, as a person does."""
    tab.panel()
    tab.page.locator("input[name=consent]").check()
    tab.close_panel()
    tab.page.keyboard.insert_text("\n".join(lines) + "\n")
    tab.panel()
    sync_api.expect(tab.page.locator("#panel-body dd").first).to_have_text(f"{len(lines)} lines of at most 4,000")
    tab.page.locator("input[name=out]").check()
    tab.page.locator("input[name=preview]").set_checked(is_asked)
    tab.page.click("#join")
    sync_api.expect(tab.page.locator("#rounds-note")).to_contain_text("waits for a round", timeout=LOADED)


def strip(tab, typed):
    """The strip after a text; the panel is closed."""
    tab.page.locator("#text").fill("")
    tab.press("Enter")
    tab.type(typed)
    tab.page.wait_for_timeout(500)
    return tab.shown()


def like_python(out, texts, vocab, folder, monkeypatch):
    """The same run among Python clients in this process, one of which vanishes where the tab did; its folder."""
    kept = {name: [line for n, line in enumerate(lines_of(name)) if (n + 1) % 8 != 7] for name in TABS}
    held = {name: [line for line in lines_of(name) if line not in kept[name]] for name in TABS}
    usual = device._person

    def person(config, name, vocab, me):
        if name not in TABS:
            return usual(config, name, vocab, me)
        one = ClientText(name, tuple(kept[name]), tuple(held[name]), tuple(held[name]))
        return one, replace(vocab, tokenised=False)

    monkeypatch.setattr(device, "_person", person)
    asked, gone = {}, []

    def fault(client, post, handler):
        if client != CLOSED:
            return deliver(client, post, handler)
        if post.kind == "train":
            asked.update(unpack(post.body).head)
        if gone or (post.kind == "upload" and (asked["round"], asked["purpose"]) == (CLOSED_IN, "upload")):
            gone.append(post.kind)
            return Lost("closed", "the tab was closed")
        return deliver(client, post, handler)

    for name in TABS:
        (folder / "texts").mkdir(parents=True, exist_ok=True)
        (folder / "texts" / name).write_text("\n".join(lines_of(name)) + "\n")
    files = [*texts, *(folder / "texts" / name for name in TABS)]
    transport, roster = federation(folder / "clients", files, fault=fault, named=lambda path: path.name)
    config, _ = read_run_toml(out)
    train_deployed(config, vocab, folder / "run", transport, roster, Said(), patience=QUICK)
    assert gone
    return folder / "run"


def without_the_owners(config, vocab, folder):
    """The model of the same run in simulation, where the tabs' owners write as all others do."""
    (folder / "texts").mkdir(parents=True)
    for who in (*TABS, "anna", "bert"):
        (folder / "texts" / who).write_text("\n".join(lines_of(who, owners=())) + "\n")
    data = replace(config.data, name=str(folder / "texts"))
    train(replace(config, data=data), folder / "run")
    return first_words(folder / "run")


def first_words(run):
    """The first three words of a model after "the"."""
    return keyfed.suggest(keyfed.load_model(run), "the ", 3)


@pytest.mark.parametrize("method", ["fedavg", "fedatt"])
def test_three_tabs_and_two_flower_clients_learn_together(tmp_path, monkeypatch, method):
    vocab, _ = build_vocab([[" ".join([*WORDS, OWN])]], kind="word", size=None, lower=True, tokenised=False)
    (tmp_path / "vocab.json").write_text(vocab.to_json())
    (tmp_path / "text").mkdir()
    texts = [tmp_path / "text" / name for name in ("anna", "bert")]
    for path in texts:
        path.write_text("\n".join(lines_of(path.name)) + "\n")
    home, out = tmp_path / "home", tmp_path / "run"
    arguments = (
        ["up", method, "--clients", 2, "--web", 3, "--data", tmp_path / "text", "--vocab", tmp_path / "vocab.json",
         *SIZES, "--home", home, "--out", out, "--json"]
    )  # fmt: skip
    path = browser_path()
    if path is None:
        pytest.skip("no browser found")
    with sync_api.sync_playwright() as running, Up(arguments, tmp_path) as up:
        links = [up.heard(rf"{name}: (https://\S+)")[1] for name in TABS]
        trust = f"--ignore-certificate-errors-spki-list={key_sum(home / 'server' / SERVER_CERT)}"
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox", trust])
        tabs = {name: Visit(browser, Server(link)) for name, link in zip(TABS, links, strict=True)}
        for tab, link in zip(tabs.values(), links, strict=True):
            tab.page.goto(link)
            tab.wait("ready")
        third = tabs["page-3"]
        before = strip(third, "the ")
        third.page.locator("#text").fill("")
        for name, tab in tabs.items():
            take_part(tab, lines_of(name), name == CLOSED)
        closing = tabs.pop(CLOSED)
        for _ in range(8):  # calibration and upload of the first round, perhaps more sums before the second one
            closing.page.locator("#send").wait_for(timeout=LOADED)
            if f"round {CLOSED_IN + 1}, upload" in closing.page.text_content("#sent"):
                break
            closing.page.click("#send")
            sync_api.expect(closing.page.locator("#send")).to_be_hidden()
        closing.close()
        result = up.result()
        sync_api.expect(third.page.locator("#federated-note")).to_contain_text("its final model", timeout=LOADED)
        third.close_panel()
        after = strip(third, "the ")
        assert [tab.problems for tab in tabs.values()] == [[], []]
        browser.close()
    assert processes_of(home) == []
    assert (OWN in before, OWN in after) == (False, True), (before, after)
    assert (result["rounds"], result["abandoned"], result["secure"]) == (3, 0, True)
    config, _ = read_run_toml(out)
    control = without_the_owners(config, vocab, tmp_path / "control")
    assert (OWN in first_words(out), OWN in control) == (True, False), control
    python = like_python(out, texts, vocab, tmp_path / "python", monkeypatch)
    uploaded = [line["contributors"] for line in read_metrics(out)]
    assert uploaded == [line["contributors"] for line in read_metrics(python)]
    assert [CLOSED in names for names in uploaded] == [True, False, False]
    real = last_model(out)
    for name, p in last_model(python).items():
        assert float((p - real[name]).abs().max()) <= 1e-6, name
