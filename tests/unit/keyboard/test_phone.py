"""From a run's counts to a dictionary: what is released, how it is written, what is refused."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from keyfed.config.load import dump_toml
from keyfed.errors import ConfigError, PrivacyError, RunError
from keyfed.keyboard import phone
from keyfed.keyboard.aosp import class_of
from keyfed.keyboard.phone import export_phone
from keyfed.model.counts import FILE, CountModel, CountTerms, counts_to_bytes
from keyfed.model.ngram import fit_kneser_ney
from keyfed.private.dp.accounting import Release
from keyfed.private.dp.ledger import Terms, open_ledger
from keyfed.run import base
from keyfed.run.folder import load_model
from tests.unit.keyboard.conftest import WORDS
from tests.unit.keyboard.dict_reader import read_dictionary

TERMS = CountTerms(k=3, cap=4, most=100, clients=12, vocab_sha256="ab" * 32)


def counts_of(vocab: int, terms: CountTerms = TERMS) -> CountModel:
    """Counts of a text in which one word follows another, with marks for the ends of lines."""
    rng = np.random.default_rng(3)
    stream = np.concatenate([[2, 4 + k, 4 + (k + 1) % 20] for k in rng.integers(30, size=400)])
    fitted = fit_kneser_ney([stream], vocab, 3)
    numbers = tuple(np.full(len(level.keys), terms.k) for level in fitted.levels)
    return CountModel(fitted, numbers, numbers, terms)


def with_counts(run, terms: CountTerms = TERMS):
    (run / FILE).write_bytes(counts_to_bytes(counts_of(len(load_model(run).vocab), terms)))
    return run


def test_the_dictionary_has_the_words_and_pairs_that_were_released(make_run):
    run = with_counts(make_run())
    done = export_phone(run, locale="en_GB")
    assert [path.relative_to(run).as_posix() for path in done.files] == [
        "phone/keyfed_en_GB.combined", "phone/keyfed_en_GB.dict",
    ]  # fmt: skip
    read = read_dictionary(done.files[1].read_bytes())
    assert read.attributes["description"].endswith("12 clients; k 3; epsilon none")
    assert (read.attributes["locale"], read.attributes["dictionary"]) == ("en_GB", "keyfed:en_gb")
    assert set(read.entries) == set(WORDS[:30])  # no <eos>, and no word that nobody wrote
    first = read.bigrams()
    assert {b for a, b in first if a == WORDS[0]} == {WORDS[1]}
    text = done.files[0].read_text("utf-8")
    assert text.count(" word=") == len(read.entries)
    assert text.count(" bigram=") == len(first) == done.to_json()["bigrams"]


def test_noise_is_said_and_its_lack_refused_where_a_run_is_private(make_run):
    pytest.importorskip("dp_accounting")
    run = with_counts(make_run(), replace(TERMS, epsilon=2.0, delta=1e-6, verdict="SIMULATED"))
    document = tomllib.loads((run / "run.toml").read_text("utf-8"))
    document["privacy"] = {**document.get("privacy", {}), "epsilon": 2.0}
    (run / "run.toml").write_text(dump_toml(document))
    with pytest.raises(PrivacyError, match="the noise is not booked"):
        export_phone(run)
    (run / "counts.privacy").mkdir()
    terms = Terms(1e-6, 1_000, 12, 1_000, 12, 9.0, "gaussian", "1", "derived")
    open_ledger(run / "counts.privacy", terms).book(Release(9.0, 1.0), "counts recount 1", 0)
    done = export_phone(run)
    assert done.words.about["description"].endswith("epsilon 2 SIMULATED")
    assert "no written forms" in done.notes[0]
    with_counts(run)
    with pytest.raises(PrivacyError, match="its counts have no noise"):
        export_phone(run)


@pytest.mark.parametrize("raw", [False, True])
def test_a_dictionary_that_claims_an_epsilon_has_nothing_of_the_text_but_counts(make_run, monkeypatch, raw):
    """The run itself is not private, so its text is at hand: how words are written in it has no noise."""
    pytest.importorskip("dp_accounting")
    run, lines = make_run(), [f"{WORDS[1]} {WORDS[0].title()} {WORDS[2]}"]
    text = SimpleNamespace(population=SimpleNamespace(trained=[SimpleNamespace(train=lines)] * 3))
    monkeypatch.setattr(phone, "text_at_hand", lambda trained: (text, []))
    with_counts(run)
    assert WORDS[0].title() in export_phone(run).words.words
    with_counts(run, replace(TERMS, epsilon=2.0, delta=1e-6, verdict="SIMULATED"))
    (run / "counts.privacy").mkdir()
    terms = Terms(1e-6, 1_000, 12, 1_000, 12, 9.0, "gaussian", "1", "derived", raw_vocabulary=raw)
    open_ledger(run / "counts.privacy", terms).book(Release(9.0, 1.0), "counts recount 1", 0)
    done = export_phone(run)
    assert all(word == word.lower() for word in done.words.words)
    assert "no written forms" in done.notes[0]
    ends = "epsilon 2 SIMULATED; vocabulary without noise" if raw else "epsilon 2 SIMULATED"
    assert done.words.about["description"].endswith(ends)


def test_one_round_is_one_round(make_run):
    run = with_counts(make_run())
    for rounds, said in ((1, "1 round"), (2, "2 rounds")):
        (run / "result.json").write_text(json.dumps({"best_round": rounds}))
        assert export_phone(run).words.about["description"].split("; ")[1] == said


def test_what_has_no_counts_no_words_or_no_locale_is_refused(make_run, monkeypatch):
    run = make_run()
    with pytest.raises(RunError, match="has no counts"):
        export_phone(run)
    with pytest.raises(ConfigError, match="--locale english"):
        export_phone(run, locale="english")
    with pytest.raises(ConfigError, match="give --out"):
        export_phone(base.Path("base"))
    with_counts(run)
    (run / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        export_phone(run, run / "file")
    with pytest.raises(RunError, match="a model of characters"):
        export_phone(make_run("char-lstm"))


def test_the_base_model_has_a_dictionary(tmp_path):
    done = export_phone(base.Path("base"), tmp_path, "en_US")
    read = read_dictionary(done.files[1].read_bytes())
    listed = done.words
    assert {word: entry.frequency for word, entry in read.entries.items()} == dict(
        zip(listed.words, listed.frequency.tolist(), strict=True)
    )
    classes = class_of(listed.frequency[listed.second], listed.pair_frequency).tolist()
    pairs = zip(listed.first.tolist(), listed.second.tolist(), classes, strict=True)
    assert read.bigrams() == {(listed.words[i], listed.words[j]): c for i, j, c in pairs}
    assert len(read.entries) > 8_000
    assert read.bigrams()["thank", "you"] > 10
    assert "k 3; epsilon none" in read.attributes["description"]
