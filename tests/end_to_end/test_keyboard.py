"""A run judged as a keyboard, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyfed.keyboard import measure
from keyfed.keyboard.dictionary import Lists
from keyfed.keyboard.measure import keyboard_markdown, keyboard_text
from keyfed.keyboard.session import Decoder
from tests.counting import count_run
from tests.end_to_end.conftest import TINY, run_command, write_corpus

OWN = [
    *TINY,
    "data.batches=sentences",
    "data.window=12",
    "train.central=true",
    "train.cohort=6",
    "train.baselines=false",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The small corpus; no test here writes to it."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """A run and the central one beside it; evaluation writes nothing that another one reads."""
    out, settings = tmp_path_factory.mktemp("runs") / "run", [item for s in OWN for item in ("--set", s)]
    run_command("train", "fedavg", "--data", corpus, "--rounds", 3, "--out", out, *settings)
    return count_run(out)


def test_a_run_is_typed_on_beside_n_grams_and_another_run(keyfed, run):
    asked = ("evaluate", run, "--keyboard", "--against", run / "central", "--words", 12)
    code, stdout, stderr = keyfed(*asked, "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    names = [row["name"] for row in found["rows"]]
    assert names == [
        "n-gram, order 5", "cifg, fedavg", "cifg, fedavg + personal", "counts, k = 3", "cifg, fedavg + counts",
        "cifg, fedavg + counts + personal", "cifg, central",
    ]  # fmt: skip
    for row in found["rows"]:
        seen = row["seen"]
        assert seen["words"] >= 12
        assert 0 <= seen["top1"] <= seen["top3"] <= 1
        assert seen["saved"] <= seen["saved_ideal"] < 1
        assert seen["wrong_corrections"] < 0.2
        assert row["latency"]["keystroke"]["cpu_ms"] > 0
        assert row["bytes"]["fp32"] > row["bytes"].get("int8", 0)
    # The language is regular and the n-grams have seen all of it: they guess more than a tiny network of three rounds.
    guessed = {row["name"]: row["seen"]["top3"] for row in found["rows"]}
    assert min(guessed["n-gram, order 5"], guessed["counts, k = 3"]) > 0.5
    assert guessed["cifg, fedavg + counts"] > guessed["cifg, fedavg"]
    code, text, _ = keyfed(*asked)
    assert code == 0
    figures = keyboard_text(found).partition("Size, and time")[0]
    assert text.startswith(figures), "drawn by the seed"
    assert "strokes" in figures
    assert "cifg, central" in " ".join(figures.split())


def test_every_row_types_with_the_lists_that_an_export_has(run, monkeypatch):
    asked, typed = [], []
    lists = Lists(b"", ("teh",), None, True)

    def listed(*of):
        asked.append(of)
        return lists

    def noted(*of, lists, **more):
        typed.append(lists)
        return Decoder(*of, lists=lists, **more)

    monkeypatch.setattr(measure, "lists_of", listed)
    monkeypatch.setattr(measure, "Decoder", noted)
    found = measure.evaluate_keyboard([run], words=1)
    ((vocab, text, packaged),) = asked
    assert packaged is None
    assert text.vocab == vocab
    assert any(client.train for client in text.population.trained), "uses are counted on what clients trained on"
    assert typed == [lists] * len(found["rows"])


def test_clients_who_learnt_have_a_row_and_corpora_without_people_have_none(keyfed, run, train_tiny):
    code, stdout, _ = keyfed("evaluate", run, "--keyboard", "--words", 12, "--json")
    by_name = {row["name"]: row["seen"] for row in json.loads(stdout)["rows"]}
    assert code == 0
    assert by_name["cifg, fedavg"] != by_name["cifg, fedavg + personal"], "it learnt nothing"
    dealt, _ = train_tiny("data.partition=iid", "data.clients=4", rounds=1, name="dealt")
    code, text, stderr = keyfed("evaluate", dealt, "--keyboard", "--words", 4)
    assert code == 0, stderr
    assert "Unseen" not in text
    assert "personal" not in text


def test_what_cannot_be_typed_on_is_said(keyfed, train_tiny, run):
    characters, _ = train_tiny("model.name=char-lstm", "data.window=20", rounds=1, name="characters")
    other, _ = train_tiny("data.vocab=30", rounds=1, name="other")
    seed, _ = train_tiny("train.seed=2", "data.vocab_file=" + str(run / "vocab.json"), rounds=1, name="seed")
    for arguments, said in [
        ((characters, "--keyboard"), "a model of characters"),
        ((run, "--keyboard", "--against", other), "another vocabulary"),
        ((run, "--keyboard", "--against", seed), "another seed"),
        ((run, "--against", other), "go with --keyboard"),
        ((run, "--keyboard", "--personalise", "epochs=1"), "leave --personalise out"),
        ((run / "nowhere", "--keyboard"), "nowhere"),
    ]:
        code, _, stderr = keyfed("evaluate", *arguments)
        assert code == 2
        assert said in stderr
        assert len(stderr.strip().splitlines()) == 1


def test_the_verdict_on_what_an_n_gram_model_costs_is_that_of_the_measured_figures():
    """The slides: the n-gram model needs more time and CPU than the network. A ratio of more than 1.5 decides."""
    root = Path(__file__).parents[2]
    measured = json.loads((root / "docs" / "results" / "data" / "keyboard-irc.json").read_text("utf-8"))
    cost = {row["name"]: row["latency"] for row in measured["rows"]}
    counts, network = cost["n-gram, order 5"], cost["cifg, fednesterov"]
    ratios = {(of, key): network[of][key] / counts[of][key] for of in counts for key in ("p50_ms", "cpu_ms")}
    assert all(ratios["word", key] > 1.5 for key in ("p50_ms", "cpu_ms"))
    assert all(1 / 1.5 < ratios["keystroke", key] < 1.5 for key in ("p50_ms", "cpu_ms"))
    pairs = {of: [f"{t[of][key]:.2f}" for t in (counts, network) for key in ("p50_ms", "cpu_ms")] for of in counts}
    a, b, c, d = pairs["word"]
    times = " and ".join(f"{ratios['word', key]:.1f}" for key in ("p50_ms", "cpu_ms"))
    e, f, g, h = pairs["keystroke"]
    said = f"takes {a} ms (median) and {b} ms of CPU, the network {c} and {d}, {times} times as much."
    more = f"{e} and {f} ms against {g} and {h}, less than 1.5 times."
    for page in (root / "docs" / "keyboard.md", root / "docs" / "results" / "gboard.md"):
        text = " ".join(page.read_text("utf-8").split())
        assert said in text, page.name
        assert more in text, page.name
        assert "No energy was measured" in text, page.name


def test_the_page_shows_what_was_measured():
    docs = Path(__file__).parents[2] / "docs"
    measured = json.loads((docs / "results" / "data" / "keyboard-irc.json").read_text("utf-8"))
    page = (docs / "keyboard.md").read_text("utf-8")
    assert keyboard_markdown(measured) in page
