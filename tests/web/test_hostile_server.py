"""What a hostile server asks of a page, and why the page refuses: a test for every row of the table in docs/secure.md.

Two federations run, one of them private. In the last round of each, forks of one page get forged messages; the page
itself goes on, and the round counts it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from safetensors.torch import load

from keyfed.private.secagg.keys import SIGNATURE_BYTES, Identity, make_keys
from keyfed.run.plan import with_limits
from keyfed.run.remote import private as deployed_private
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import digest_of, pack, text_digest, unpack
from keyfed.wire.transport import deliver
from tests.faults.deployed import QUICK, federation, small_config, vocabulary, write_texts
from tests.faults.private import private_config, silence

from .hostile import Scene, changed, drop, put
from .node_cases import Browser, needs_node
from .test_session import SGD, with_pages

pytestmark = needs_node

PAGE = "client-3.txt"


def watched(folder, config, round):
    """Run a federation of five with one page and return its scene, its result and what the page refused."""
    files = write_texts(folder / "texts", 5)
    vocab, _ = vocabulary(folder)
    browser = Browser()
    scene = Scene(browser, PAGE)

    def fault(client, post, handler):
        if client != PAGE:
            return deliver(client, post, handler)
        return scene.watch(post, lambda: deliver(client, post, handler), round)

    transport, roster = federation(folder / "clients", files, fault=fault, named=lambda path: path.name)
    with_pages(browser, transport, roster, config, vocab, files, [PAGE], {})
    result = train_deployed(config, vocab, folder / "run", transport, roster, patience=QUICK)
    assert set(scene.posts) == {"hello", "before", "train", "upload", "unmask"}
    return scene, result, transport.handlers[PAGE].refused


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    _, path = vocabulary(folder)
    config = with_limits(small_config(folder / "texts", path, "fedavg", secure=True, rounds=2, cohort=5, **SGD))
    yield (found := watched(folder, config, 1))
    found[0].browser.close()


@pytest.fixture(scope="module")
def private_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile-private")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployed_private, "system", silence)
        moving = {"quantile": 0.9, "count_noise": 5.0, "clip": 0.5}
        config = private_config(folder, secure=True, rounds=3, privacy=moving, **SGD)
        found = watched(folder, config, 1)
    yield found
    found[0].browser.close()


# what the server may ask: fork of the page, messages, and what the page says


def forged(kind, *changes):
    return lambda scene, answers: scene.forged(kind, *changes)


def hello(*changes, fork="known"):
    """A hello; of a run that the page knows, or the first one, with the method's hash of what it says."""

    def consistent(head):
        private = any(head["config"]["privacy"][key] is not None for key in ("epsilon", "noise"))
        head["method"] = text_digest([head["page"]["spec"], not private])

    return fork, [forged("hello", *changes, *([consistent] if fork == "fresh" else []))]


def train(*changes):
    return "ready", [forged("train", *changes)]


def model(value):
    """Another model for the round, named rightly."""

    def step(scene, answers):
        tensors = unpack(scene.posts["train"]).tensors[:-4] + struct.pack("<f", value)
        digest = digest_of(load(tensors))
        return "train", changed(scene.posts["train"], put("model", to=digest), tensors=tensors)

    return step


def strangers(names):
    """Clients of the cohort whose keys are in order, and whose identities are new."""

    def change(head):
        for n, entry in enumerate(head["cohort"]):
            if entry["client"] in names:
                identity = Identity.make()
                signed = make_keys(identity, names[entry["client"]], entry["serial"])[1]
                del head["identities"][entry["client"]]
                head["cohort"][n] = json.loads(json.dumps(signed.to_json()))
                head["identities"][names[entry["client"]]] = identity.public.hex()

    return change


def own_keys(change):
    """The page's own entry of the cohort, changed."""
    return lambda head: [change(entry) for entry in head["cohort"] if entry["client"] == PAGE]


def again(scene, answers):
    """The same training once more, with the keys that the page posted last."""
    said = unpack(bytes.fromhex(answers[0]["value"])[:-SIGNATURE_BYTES]).head["keys"]
    return "train", changed(
        scene.posts["train"],
        put("cohort", to=lambda cohort: [said if entry["client"] == PAGE else entry for entry in cohort]),
    )


def second(scene, answers):
    head = unpack(scene.posts["upload"]).head
    return "upload", pack({**head, "parcels": {}})


def fewer(scene, answers):
    """Survivors of another set: all but one of the others."""
    head = unpack(scene.posts["unmask"]).head
    return "unmask", pack({**head, "survivors": [n for n in head["survivors"] if n != "client-0.txt"]})


def only(count):
    def change(head):
        head["survivors"] = [PAGE, *(n for n in head["survivors"] if n != PAGE)][:count]

    return change


MARKS = [os.urandom(16).hex() for _ in range(9)]
OTHERS = {f"client-{k}.txt": f"stranger-{k}" for k in range(3)}
PLAIN = {
    # terms of the run
    "uploads in the clear": (hello(put("secure", to=False)), "not secure"),
    "other epochs for this page": (hello(put("page", "spec", "options", "epochs", to=1)), "not that of the run"),
    "another method for all": (hello(put("method", to="0" * 64)), "not that of the run"),
    "nothing for pages": (hello(drop("page")), "no place for pages"),
    "another model of a known run": (hello(put("page", "model", "layers", to=2)), "began with another configuration"),
    "another window of a known run": (
        hello(put("page", "batches", "window", to=7)),
        "began with another configuration",
    ),
    "another vocabulary of a known run": (hello(put("vocab", to="{}")), "began with another configuration"),
    "a vocabulary of other words": (hello(put("page", "model", "vocab", to=5), fork="fresh"), "another vocabulary"),
    "a window only for this page": (
        hello(put("page", "batches", "window", to=7), fork="fresh"),
        "told data.window=7, and the run has 8",
    ),
    "one token only for this page": (
        hello(put("page", "batches", "max_tokens", to=1), fork="fresh"),
        "told data.max_tokens=1",
    ),
    "dropout only for this page": (
        hello(put("page", "model", "dropout", to=0.5), fork="fresh"),
        "told model.dropout=0.5",
    ),
    "a run that is over": (
        ("known", [lambda scene, answers: ("bye", pack({"run": unpack(scene.posts["hello"]).head["run"]})), "hello"]),
        "that run is over",
    ),
    "a promise only to this page": (hello(put("config", "privacy", "noise", to=1.0)), "not that of the run"),
    # what the device is to do
    "a giant model": (hello(put("page", "model", "vocab", to=10**6), fork="fresh"), "this page takes at most"),
    "a model of many layers": (hello(put("page", "model", "layers", to=9), fork="fresh"), "9 layers"),
    "epochs without end": (hello(put("page", "spec", "options", "epochs", to=10**6), fork="fresh"), "epochs a round"),
    "steps that need all memory": (
        hello(put("page", "spec", "options", "batch_size", to=10**8), fork="fresh"),
        "this page has no room for them",
    ),
    "halvings without end": (train(put("halvings", to=10**6)), '"halvings" is'),
    # how many it hides among
    "a floor of one": (hello(put("config", "secure", "floor", to=1), fork="fresh"), '"floor" is 1'),
    "a threshold below the floor": ((*train(put("threshold", to=3)), {"floor": 4}), "it takes part among 4 or more"),
    "a threshold of less than half": (train(put("threshold", to=2)), "more than half"),
    "a roster of strangers": (hello(put("roster", to=MARKS)), "strangers"),
    "a roster that is none": (hello(put("roster", to=["x"])), "not a list of marks"),
    "a cohort of strangers": (train(strangers(OTHERS)), "are on no roster"),
    "an identity that changed": (train(strangers({"client-0.txt": "client-0.txt"})), "identity changed"),
    "keys that nobody signed": (
        train(lambda head: head["cohort"][0].update(channel=head["cohort"][1]["channel"][::-1])),
        "not signed by its identity",
    ),
    "a cohort without the page's keys": (
        train(own_keys(lambda entry: entry.update(client="other"))),
        "no keys of this client",
    ),
    "other keys for the page": (
        train(own_keys(lambda entry: entry.update(mask=os.urandom(32).hex()))),
        "its own one-time keys",
    ),
    "keys that it never posted": (train(own_keys(lambda entry: entry.update(serial=999))), "used or gone"),
    "a cohort without keys": (train(drop("cohort")), "without its cohort's keys"),
    "more members than keys": (train(put("members", to=4000)), "without its cohort's keys"),
    # models and rounds
    "a model that is not the one named": (train(put("model", to="0" * 64)), "not the one that the message names"),
    "a model of numbers that are none": (("ready", [model(math.nan)]), "not finite"),
    "another model for the same round": (("ready", ["train", model(0.5)]), "another model for round 1"),
    "a round once more": (("over", ["before"]), "stale"),
    "an earlier attempt": (train(put("attempt", to=0)), "stale"),
    "a run that it does not know": (train(put("run", to="other")), "knows nothing of the run"),
    "a model cut short": (
        ("ready", [lambda scene, answers: ("train", scene.posts["train"][:-40])]),
        "tensors that cannot be read",
    ),
    "an old protocol": (
        ("ready", [lambda scene, answers: ("train", b"KFM1" + scene.posts["train"][4:])]),
        "other protocol",
    ),
    # weights and what is shown
    "weights that isolate": (train(put("public", "rule", "most", to=2.0**41)), "most of the rule is none"),
    "weights between powers of two": (train(put("public", "rule", "most", to=48.0)), "most of the rule is none"),
    "ranges out of bounds": (
        train(put("public", "ranges", to=lambda ranges: dict.fromkeys(ranges, 31))),
        "ranges: expected",
    ),
    "a public number of its own": (train(put("public", "more", to=1)), "public numbers that make no sense"),
    "a purpose of its own": (train(put("purpose", to="spy")), 'a purpose "spy"'),
    "a score of the text it trains on": (train(put("evaluate", to="train")), 'an evaluation of "train"'),
    # the masked sum
    "a second vector at once": (("ready", ["train", "upload", "upload"]), "uploaded already"),
    "a second vector for other keys": (("ready", ["train", "upload", again, second]), "summed before"),
    "a vector among too few": (
        ("ready", ["train", forged("upload", put("alive", to=lambda names: [PAGE, *names[:1]]))]),
        "2 alive: its floor and the threshold want",
    ),
    "a vector without the others' shares": (("ready", ["train", forged("upload", put("parcels", to={}))]), "missing"),
    "a second opening, of other survivors": (("ready", ["train", "upload", "unmask", fewer]), "nothing trained"),
    "an opening for too few survivors": (
        ("ready", ["train", "upload", forged("unmask", only(2))]),
        "floor and the threshold want",
    ),
    "an opening before the upload": (("ready", ["train", "unmask"]), "out of order"),
    "an opening of another round": (
        ("ready", ["train", "upload", forged("unmask", put("round", to=0))]),
        "this page is in round 1",
    ),
}
CLIP = 0.5


def public(**values):
    return put("public", to=lambda before: {**before, **values})


PRIVATE = {
    "no word of the noise": (
        hello(put("config", "privacy", "noise", to=None), put("config", "privacy", "epsilon", to=1.0), fork="fresh"),
        "how much noise",
    ),
    "no delta": (hello(put("config", "privacy", "delta", to=None), fork="fresh"), "for which delta"),
    "tree noise without a separation": (
        hello(
            put("config", "privacy", "mechanism", to="tree"),
            put("config", "privacy", "quantile", to=None),
            fork="fresh",
        ),
        '"separation" is',
    ),
    "tree noise over rounds without end": (
        hello(
            put("config", "privacy", "mechanism", to="tree"),
            put("config", "privacy", "quantile", to=None),
            put("config", "privacy", "separation", to=5),
            put("config", "train", "rounds", to=10**7),
            fork="fresh",
        ),
        "tree noise over 10000000 rounds",
    ),
    "no promise to this page alone": (hello(put("config", "privacy", "noise", to=None)), "not that of the run"),
    "less noise than the run began with": (
        hello(put("config", "privacy", "noise", to=0.1)),
        "began with another configuration",
    ),
    "a clip beyond the promise": (train(public(clip=CLIP * math.exp(0.19))), "a clip of"),
    "a clip far from the last one": (
        train(put("round", to=2), public(clip=CLIP * math.exp(0.3))),
        "in step 1 after 0.5 in 0",
    ),
    "a clip of nothing": (train(public(clip=0.0)), "a clip of 0"),
    "a clip that is no number": (train(public(clip="0.5")), "no number"),
    "a public number besides": (train(public(most=1.0)), "without its clip and step"),
    "a round beyond the promise": (train(put("round", to=3)), "round 4 of a run that promised 3"),
    "a score": (train(put("purpose", to="evaluation"), put("evaluate", to="test")), "never for a score"),
    "a score with the upload": (train(put("evaluate", to="valid")), "never for a score"),
    "a histogram": (train(put("purpose", to="calibration")), "never for a score"),
    "the same step again": (train(public(step=0)), "too soon"),
    "a threshold at which two open the sum": (train(put("threshold", to=2)), "of a private sum"),
    "more than the owner's budget": (("ready", ["train"], {"budget": 1e-3}), "over budget"),
    "a run beyond the owner's budget": (("fresh", ["hello"], {"budget": 1e-3}), "over budget"),
    "after the account was damaged": (
        ("ready", ["train"], {"spoil": {"spent": {"text": "{}", "sum": ""}}}),
        "damaged, missing or older",
    ),
    "after the account was taken away": (("ready", ["train"], {"spoil": {"spent": None}}), "damaged, missing or older"),
    "after an older account was put back": (
        ("ready", ["train"], {"spoil": {"spent head": {"number": 7, "sum": ""}}}),
        "damaged, missing or older",
    ),
}


def check(run, case):
    (fork, steps, *how), says = case
    answer = run[0].answer(fork, steps, **(how[0] if how else {}))
    assert says in ": ".join(answer.get("rejected", [])), answer


@pytest.mark.parametrize("what", PLAIN)
def test_a_page_refuses(plain_run, what):
    check(plain_run, PLAIN[what])


@pytest.mark.parametrize("what", PRIVATE)
def test_a_page_in_a_private_run_refuses(private_run, what):
    check(private_run, PRIVATE[what])


@pytest.mark.parametrize("name", ["plain_run", "private_run"])
def test_what_is_genuine_is_answered_and_the_round_counts_the_page(request, name):
    scene, result, refused = request.getfixturevalue(name)
    assert not refused
    assert result["rounds"] == (2 if name == "plain_run" else 3)
    assert "value" in scene.answer("ready", ["train", "upload", "unmask"])  # a fork answers as the page did


def test_a_page_that_ended_between_the_two_writes_of_its_account_goes_on(private_run):
    """The head is one state behind: the upload of round 0 is written down, its number is not."""
    behind = {"spent head": {"number": 0, "sum": ""}}
    assert "value" in private_run[0].answer("ready", ["train", "upload", "unmask"], spoil=behind)


def test_every_refusal_is_in_the_table_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "secure.md").read_text("utf-8")
    missing = [what for what in (*PLAIN, *PRIVATE) if f"| {what} |" not in text]
    assert not missing
