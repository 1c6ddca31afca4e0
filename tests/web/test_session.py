"""Pages as clients of a federation: the real server, by messages; the sum is that of Python's clients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keyfed.config.schema import CountsConfig
from keyfed.run.loop import train
from keyfed.run.plan import with_limits
from keyfed.run.remote.device import read_person
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import Rejected, unpack
from keyfed.wire.roster import Enrolled
from keyfed.wire.transport import Lost, Post, deliver
from tests.faults.deployed import QUICK, federation, last_model, small_config, vocabulary, write_texts

from .hostile import changed, put
from .node_cases import Browser, needs_node

pytestmark = needs_node

SGD = {"optimiser": "sgd", "lr": 0.5, "clip": 0.5, "epochs": 2, "batch_size": 3, "momentum": 0.3}


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


class Page:
    """A page that stands where a Python client stands (`transport.Handler`)."""

    def __init__(self, browser, name):
        self.browser, self.name, self.kinds, self.refused = browser, name, [], []

    def handle(self, kind, body):
        self.kinds.append(kind)
        answer = self.browser.ask("handle", name=self.name, kind=kind, body=body.hex())
        if "rejected" in answer:
            self.refused.append(answer["rejected"])
            raise Rejected(*answer["rejected"])
        assert "value" in answer, answer
        return bytes.fromhex(answer["value"])


def with_pages(browser, transport, roster, config, vocab, texts, pages, kept, **how):
    """Put pages in the place of some clients; each has the text of the client whose place it takes."""
    for path in texts:
        if path.name not in pages:
            continue
        own = replace(config, data=replace(config.data, name=str(path)))
        person, _ = read_person(own, path.name, vocab)
        text = {part: vocab.encode(getattr(person, part)).tolist() for part in ("train", "valid", "test")}
        identity = browser("open", name=path.name, text=text, floor=3, **how)
        kept[path.name] = text
        transport.handlers[path.name] = Page(browser, path.name)
        roster.write({path.name: Enrolled(identity, roster.entries[path.name].node_key, "2026-01-01T00:00:00+00:00")})
    return transport


def run(
    browser,
    tmp_path,
    method,
    pages,
    *,
    batches="stream",
    rounds=2,
    dropout=0.0,
    fault=None,
    how=None,
    texts=None,
    counts=None,
    **options,
):
    files = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, method, secure=True, rounds=rounds, cohort=5, **{**SGD, **options})
    config = replace(
        config,
        data=replace(config.data, batches=batches),
        model=replace(config.model, dropout=dropout),
        train=replace(config.train, schedule="cosine", final=0.2),
        counts=counts or config.counts,
    )
    config = with_limits(config)
    home, counting = tmp_path / "clients", counts is not None
    transport, roster = federation(home, files, fault=fault, counts=counting, named=lambda path: path.name)
    kept = {} if texts is None else texts
    with_pages(browser, transport, roster, config, vocab, files, pages, kept, **(how or {}))
    said = []
    result = train_deployed(config, vocab, tmp_path / "run", transport, roster, Said(said), patience=QUICK)
    return config, result, transport, said


class Said:
    """A listener that keeps what is said."""

    def __init__(self, lines):
        self.say = lines.append

    def start(self, *given): ...
    def round(self, *given): ...


@pytest.mark.parametrize(
    ("method", "batches", "options"),
    [
        ("fedavg", "packed", {"dropout": 0.3}),
        ("fedatt", "stream", {"temperature": 0.5}),
        ("fedprox", "stream", {"mu": 0.1}),
    ],
)
def test_a_federation_with_pages_learns_what_the_simulation_learns(browser, tmp_path, method, batches, options):
    config, result, transport, said = run(
        browser, tmp_path, method, ["client-1.txt", "client-2.txt", "client-4.txt"], batches=batches, **options
    )
    assert not [line for line in said if "left out" in line]
    assert transport.handlers["client-1.txt"].kinds.count("upload") >= 2
    expected = train(config, tmp_path / "simulated")
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "run")
    for name, p in simulated.items():
        assert float((p - deployed[name]).abs().max()) <= 1e-6, name
        assert float((p - deployed[name].new_zeros(p.shape)).abs().max()) > 0.01
    assert [result["rounds"], result["refused"], result["abandoned"]] == [2, 0, 0]
    for what in ("perplexity", "top1", "top3", "tokens"):  # of held-out text, most of it counted by pages
        assert result["test"][what] == pytest.approx(expected["test"][what], rel=1e-5), what


def test_pages_train_in_a_run_that_counts_and_are_in_no_sum_of_its_count(browser, tmp_path):
    pages, terms = ["client-1.txt", "client-2.txt"], CountsConfig(order=2, megabytes=0.01, on=True)
    _, result, transport, said = run(browser, tmp_path, "fedavg", pages, counts=terms)
    assert (result["lost"], result["refused"]) == ({}, 0)
    assert any("n-grams of 1 to 2 words of 3 clients" in line for line in said)
    assert result["counts"]["mixture"]["test"]["tokens"] > 0
    for page in pages:
        assert set(transport.handlers[page].kinds) == {"hello", "train", "upload", "unmask", "bye"}
        assert transport.handlers[page].refused == []


def test_a_page_that_vanishes_is_a_drop_out_like_any_other(browser, tmp_path):
    def fault(client, post, handler):
        gone = client == "client-2.txt" and post.kind == "upload"
        return Lost("no answer") if gone else deliver(client, post, handler)

    _, result, _, said = run(browser, tmp_path, "fedavg", ["client-1.txt", "client-2.txt"], fault=fault)
    assert [line for line in said if "client-2.txt is left out" in line]
    assert [result["rounds"], result["abandoned"]] == [2, 0]


@pytest.mark.parametrize(
    ("options", "how", "says"),
    [
        ({"optimiser": "adam", "momentum": 0.0}, {}, "local optimiser other than sgd"),
        ({"epochs": 3}, {"limits": {"epochs": 2}}, "3 epochs a round; this page takes at most 2"),
        ({}, {"limits": {"parameters": 100}}, "this page takes at most 100"),
        ({}, {"limits": {"minutes": 0}}, "the round took longer than this page's 0 minutes"),
        ({}, {"busy": "on battery"}, "on battery"),
    ],
)
def test_a_run_that_a_page_cannot_follow_goes_on_without_it(browser, tmp_path, options, how, says):
    _, result, transport, _ = run(browser, tmp_path, "fedavg", ["client-1.txt"], rounds=1, how=how, **options)
    refused = transport.handlers["client-1.txt"].refused
    assert refused
    assert all(says in detail for _, detail in refused), refused
    assert [result["rounds"], result["abandoned"]] == [1, 0]


def test_a_page_that_is_loaded_again_goes_on_with_what_it_kept(browser, tmp_path):
    """Between its hello and the end the page is reloaded before every message that begins something."""
    texts = {}

    def fault(client, post, handler):
        if isinstance(handler, Page) and post.kind in ("hello", "train"):
            browser("open", name=client, text=texts[client], floor=3, again=True)
        return deliver(client, post, handler)

    _, result, transport, said = run(browser, tmp_path, "fedavg", ["client-2.txt"], fault=fault, texts=texts)
    assert not transport.handlers["client-2.txt"].refused
    assert not [line for line in said if "left out" in line]
    assert result["abandoned"] == 0
    kept = browser("kept", name="client-2.txt")
    kinds = [key.partition(" ")[0] for key in kept]
    assert kinds == ["identity", "keys", "pins", "roster", "run", "runs", "serial", "spent", "spent"]


def test_messages_wait_for_each_other_and_old_runs_are_let_go(browser, tmp_path):
    found, said = {}, []

    def fault(client, post, handler):
        if isinstance(handler, Page) and post.kind == "hello" and not found:
            found["hello"], body = True, post.body.hex()
            browser("open", name="twice", text=texts[client], floor=3)
            browser("limit", name="twice", floor=9, budget=None)
            twice = browser("both", name="twice", kind="hello", bodies=[body, body])
            serials = [unpack(bytes.fromhex(one))[0]["keys"]["serial"] for one in twice]
            assert len(set(serials)) == 2
            assert {unpack(bytes.fromhex(one))[0]["hide_among"] for one in twice} == {9}
            browser("limit", name="twice", floor=3, budget=1.0)  # of a run without noise no ε is claimed
            (poor,) = browser("both", name="twice", kind="hello", bodies=[body])
            assert poor.startswith("over budget: this run has no differential privacy")
            browser("open", name="many", text=texts[client], floor=3)
            for n in range(25):
                browser("handle", name="many", kind="hello", body=changed(post.body, put("run", to=f"run {n}")).hex())
            for n, (what, begun) in enumerate({"run 0": False, "run 24": True}.items()):
                answer = browser.ask(
                    "handle", name="many", kind="hello", body=changed(post.body, put("run", to=what)).hex()
                )
                assert ("value" in answer) == begun, (n, answer)
        if isinstance(handler, Page) and post.kind == "train" and "train" not in found:
            found["train"] = True
            both = browser("both", name=client, kind="train", bodies=[post.body.hex(), post.body.hex()])
            said.extend(answer for answer in both if ":" in answer)
            return bytes.fromhex(both[0])
        return deliver(client, post, handler)

    texts = {}
    _, result, _, _ = run(browser, tmp_path, "fedavg", ["client-3.txt"], fault=fault, texts=texts)
    assert len(said) == 1, "the second of two trainings finds its keys used"
    assert "used or gone" in said[0]
    assert result["rounds"] == 2


@pytest.mark.parametrize("when", ["before its upload", "while it trains"])
def test_text_that_is_forgotten_in_a_round_is_trained_and_sent_no_more(browser, tmp_path, when):
    """What was made of it does not leave; from the next message on the page trains on what is left."""
    name, texts, changed = "client-3.txt", {}, []
    kind = "upload" if when == "before its upload" else "train"

    def fault(client, post, handler):
        if not changed and isinstance(handler, Page) and post.kind == kind:
            left = {**texts[name], "train": texts[name]["train"][: len(texts[name]["train"]) // 2]}
            browser("change", name=name, text=left, isLater=kind == "train")
            changed.append(kind)
        return deliver(client, post, handler)

    _, result, transport, _ = run(browser, tmp_path, "fedavg", [name], fault=fault, texts=texts, rounds=2)
    assert len(changed) == 1
    tokens = browser("trained", name=name)
    assert tokens[0] > 1.5 * tokens[-1]
    assert [result["rounds"], result["abandoned"]] == [2, 0]
    ((reason, detail),) = transport.handlers[name].refused
    assert (reason, detail) in [
        ("restarted", "this page has nothing trained; it may have been reloaded"),
        ("not now", "the page's owner has changed the text meanwhile"),
    ]


def test_an_upload_beyond_the_runs_bound_is_not_sent(browser, tmp_path):
    texts = {}

    def fault(client, post, handler):
        if isinstance(handler, Page) and post.kind == "hello":
            post = Post("hello", changed(post.body, put("config", "upload", "bound", to=1e-6)))
        return deliver(client, post, handler)

    _, _, transport, _ = run(browser, tmp_path, "fedavg", ["client-3.txt"], rounds=1, fault=fault, texts=texts)
    assert {reason for reason, _ in transport.handlers["client-3.txt"].refused} == {"exploding upload"}
