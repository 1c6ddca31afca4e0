"""The base model that comes along: packed, checked, offered where it fits, named wherever a start is named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import keyfed as library
from keyfed.config.load import Config
from keyfed.errors import ConfigError, PrivacyError, RunError
from keyfed.keyboard import export
from keyfed.model.language_model import build_spec, widen
from keyfed.run import base as base_module
from keyfed.run import start as start_module
from keyfed.run.base import CARD, FILES, MANIFEST, MOST_BYTES, Base, Fit, load_base
from keyfed.run.folder import read_result, read_run_toml
from keyfed.run.prepare import prepare
from keyfed.run.remote.train import deployable, train_deployed
from keyfed.run.start import (
    find_source,
    initial_params,
    make_ready,
    offer_start,
    offer_start_by_words,
    start_without_text,
)
from keyfed.text.catalogue import load_corpus
from keyfed.text.vocab import SPECIALS, Vocab, words_of
from tests.base_model import GERMAN, LICENCE, NAME, SETTINGS, write_lines
from tests.end_to_end.test_extending import Heard
from tests.end_to_end.test_init import small_corpus
from tests.faults.deployed import QUICK as QUICK_ANSWERS
from tests.faults.deployed import federation, small_config, vocabulary, write_texts

QUICK = ["data.window=8", "optimiser=sgd", "lr=2", "train.cohort=2", "train.workers=1", "train.baselines=false",
         "train.valid_tokens=200"]  # fmt: skip
PACKAGED = base_module.FOLDER
OPTIONS = [part for setting in QUICK for part in ("--set", setting)]
OWN = {**SETTINGS, "data_batches": "stream"}
pytestmark = pytest.mark.usefixtures("made")  # a small base stands for that of the package


@pytest.fixture
def poems(tmp_path) -> Path:
    """A text that the base has not read and knows most words of."""
    return small_corpus(tmp_path / "poems")


def result_of(out: Path) -> dict:
    return json.loads((out / "result.json").read_text("utf-8"))


def test_the_package_has_one_that_is_whole_and_small_enough():
    base = load_base(PACKAGED)
    assert base.trained.spec == build_spec("cifg", 10_000)
    assert base.trained.vocab.kind == "word"
    assert sum(path.stat().st_size for path in PACKAGED.iterdir()) <= MOST_BYTES
    assert base.manifest["data"]["name"] == "chat"
    assert base.manifest["data"]["licence"] == "CC BY 4.0"
    assert (PACKAGED / CARD).read_text("utf-8") == export.card_text(base.manifest)
    chat = (words_of(line, tokenised=False, lower=True) for a in load_corpus("chat").authors for line in a.lines)
    assert base_module.shared_lines(base, chat) == 1
    for found in base.manifest["figures"].values():
        assert found["int8"]["perplexity"] <= 1.01 * found["fp32"]["perplexity"]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from((MANIFEST, *FILES)), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_seen(made, name, place, bit):
    folder = made.parent / "flipped"
    if not folder.exists():
        shutil.copytree(made / "base", folder)
    data = bytearray((made / "base" / name).read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (folder / name).write_bytes(data)
    try:
        with pytest.raises(RunError, match=r"; install keyfed again$"):
            load_base(folder)
    finally:
        shutil.copy(made / "base" / name, folder / name)
    assert load_base(folder).sha256 == load_base(made / "base").sha256


def test_without_the_sums_a_flipped_bit_would_be_taken(made, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(made / "base", tmp_path / "base"))
    data = bytearray((folder / "lines.bin").read_bytes())
    data[5] ^= 1
    (folder / "lines.bin").write_bytes(data)
    monkeypatch.setattr(base_module, "_checked", lambda path, said: path.read_bytes())
    assert load_base(folder).lines.tolist() != load_base(made / "base").lines.tolist()


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
@pytest.mark.parametrize("harm", ["missing", "empty", "short", "folder"])
def test_a_file_that_is_not_there_or_cut_is_said(made, tmp_path, name, harm):
    folder = Path(shutil.copytree(made / "base", tmp_path / "base"))
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if harm == "folder":
        (folder / name).mkdir()
    elif harm != "missing":
        (folder / name).write_bytes(data[: 0 if harm == "empty" else len(data) // 2])
    with pytest.raises(RunError, match=re.escape(name) + r".*; install keyfed again$"):
        load_base(folder)


@pytest.mark.parametrize("asked", [(), ("--init", "base")])
def test_a_damaged_base_stops_a_run_before_it_begins(keyfed, made, poems, tmp_path, monkeypatch, asked):
    folder = Path(shutil.copytree(made / "base", tmp_path / "base"))
    (folder / "vocab.json").write_bytes((folder / "vocab.json").read_bytes()[:-1] + b" ")
    monkeypatch.setattr(base_module, "FOLDER", folder)
    out = tmp_path / "out"
    code, _, err = keyfed("train", "fedavg", "--data", poems, "--out", out, *asked, *OPTIONS)
    assert code == 2
    assert "the base model is damaged" in err
    assert "--init none" in err
    assert len(err.strip().splitlines()) == 1
    assert not (out / "run.toml").exists()
    assert keyfed("train", "fedavg", "--data", poems, "--out", out, "--rounds", 0, "--init", "none", *OPTIONS)[0] == 0


def test_another_format_and_a_resealed_lie_are_refused(made, tmp_path):
    folder = Path(shutil.copytree(made / "base", tmp_path / "base"))
    found = json.loads((folder / MANIFEST).read_bytes())
    for change, said in (
        ({"format": 2}, "has format 2"),
        ({"model": {**found["model"], "vocab": 36}}, "do not go together"),
        ({"model": {**found["model"], "hidden": 13}}, "model"),
        ({"lines": {**found["lines"], "every": 0}}, "do not go together"),
        ({"settings": {"train": {"no_such": 1}}}, "no_such"),
        ({"files": {}}, "damaged"),
    ):
        (folder / MANIFEST).write_bytes(base_module.dump_manifest({**found, **change}))
        with pytest.raises(library.KeyfedError, match=said):
            load_base(folder)


def test_train_starts_from_it_and_says_so_everywhere(keyfed, made, poems, tmp_path):
    out, base = tmp_path / "out", load_base()
    code, _, err = keyfed("train", "fedavg", "--data", poems, "--rounds", 0, "--out", out, *OPTIONS)
    assert code == 0, err
    assert f"starts from the base model ({NAME}, {LICENCE}; SHA-256 {base.sha256[:12]})" in err
    config, about = read_run_toml(out)
    assert (config.train.init, about["init_sha256"]) == ("base", base.sha256)
    start = result_of(out)["start"]
    assert {key: start[key] for key in ("from", "sha256", "data", "licence", "is_own")} == {
        "from": "base", "sha256": base.sha256, "data": NAME, "licence": LICENCE, "is_own": False,
    }  # fmt: skip
    assert "the base model" in (out / "report.md").read_text("utf-8")
    there = json.loads((out / "vocab.json").read_text("utf-8"))["words"]
    new, old = load_file(out / "model.safetensors"), base.trained
    common = [word for word in there if word in old.vocab.words]
    assert len(SPECIALS) + 4 < len(common) < len(there)
    for word in common:
        assert torch.equal(new["embedding.weight"][there.index(word)],
                           old.params["embedding.weight"][old.vocab.words.index(word)]), word  # fmt: skip
    assert torch.equal(new["rnn.weight_hh_l0"], old.params["rnn.weight_hh_l0"])


@pytest.mark.parametrize("how", ["option", "setting", "file"])
def test_none_is_the_closed_track(keyfed, poems, tmp_path, monkeypatch, how):
    monkeypatch.setattr(base_module, "FOLDER", tmp_path / "nowhere")  # it is not even looked for
    out, file = tmp_path / "out", tmp_path / "none.toml"
    file.write_text('[train]\ninit = "none"\n', "utf-8")
    said = {"option": ("--init", "none"), "setting": ("--set", "train.init=none"), "file": ("--config", file)}[how]
    code, _, err = keyfed("train", "fedavg", "--data", poems, "--rounds", 0, "--out", out, *said, *OPTIONS)
    assert code == 0, err
    assert read_run_toml(out)[0].train.init is None
    assert result_of(out)["start"] == {"from": "random"}
    assert "starts from random weights" in (out / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--set", "model.hidden=13"),
            "starts from random weights, not from the base model: it has the shape of the preset cifg",
        ),
        (
            ("--model", "gru", "--set", "model.embed=8"),
            "starts from random weights, not from the base model: it has the shape of the preset cifg",
        ),
        (
            ("--model", "char-lstm", "--set", "model.hidden=8"),
            "starts from random weights, not from the base model: it reads words",
        ),
    ],
)
def test_another_shape_is_passed_over_with_a_line_and_refused_when_asked(keyfed, poems, tmp_path, given, said):
    code, out, err = keyfed("train", "fedavg", "--data", poems, "--dry-run", *OPTIONS, *given)
    assert code == 0, err
    assert said in out
    code, _, err = keyfed(
        "train", "fedavg", "--data", poems, "--init", "base", "--out", tmp_path / "o", *OPTIONS, *given
    )
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "o" / "run.toml").exists()


def test_another_language_is_passed_over_with_the_share_and_refused_when_asked(keyfed, tmp_path):
    german = write_lines(tmp_path / "german", [*GERMAN * 5, "the people , 1 2 3 ."])
    code, out, err = keyfed("train", "fedavg", "--data", german, "--dry-run", *OPTIONS)
    assert code == 0, err
    assert re.search(
        r"starts from random weights, not from the base model: .* knows \d+% of the words of this text, fewer than 60%",
        out,
    )
    code, _, err = keyfed("train", "fedavg", "--data", german, "--init", "base", "--out", tmp_path / "o", *OPTIONS)
    assert code == 2
    assert re.search(r"knows \d+% of the words", err)
    assert "--init none" in err
    assert len(err.strip().splitlines()) == 1


def test_its_own_text_is_passed_over_and_warned_of_when_asked(keyfed, made, tmp_path):
    code, out, err = keyfed("train", "fedavg", "--data", made / "corpus", "--dry-run", *OPTIONS)
    assert code == 0, err
    assert "100.0% of the lines of this corpus are in its own text; --init base takes it all the same" in out
    run = tmp_path / "run"
    given = ("--data", made / "corpus", "--rounds", 0, "--out", run, "--init", "base", *OPTIONS)
    code, _, err = keyfed("train", "fedavg", *given)
    assert code == 0, err
    assert "WARNING: 100.0% of the lines of this corpus are in the base model's own text" in err
    assert (result_of(run)["start"]["is_own"], result_of(run)["start"]["own"]) == (True, 1)
    assert "WARNING: 100.0%" in (run / "report.md").read_text("utf-8")


def test_pretraining_and_word_vectors_begin_at_random_without_a_line(monkeypatch):
    monkeypatch.setattr(base_module, "FOLDER", Path("nowhere"))
    for config in (library.configure("central"), library.configure("fedavg", vectors_file="/v/glove.txt")):
        assert offer_start(config) == (config, None, None)


def test_compare_tune_and_the_library_start_at_random_unless_asked(keyfed, made, poems, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(base_module, "FOLDER", tmp_path / "nowhere")
        given = ("--data", poems, "--rounds", 1, *OPTIONS)
        code, _, err = keyfed("compare", "fedavg", "fedprox", *given, "--out", tmp_path / "compared")
        assert code == 0, err
        code, _, err = keyfed("tune", "fedavg", *given, "--trials", 2, "--out", tmp_path / "tuned")
        assert code == 0, err
        library.train(library.configure("fedavg", data=str(poems), rounds=0, **OWN), tmp_path / "run")
    starts = [read_run_toml(path.parent)[0].train.init for path in tmp_path.rglob("run.toml")]
    assert len(starts) >= 4
    assert set(starts) == {None}
    code, stdout, err = keyfed(
        "compare", "fedavg", "fedavg+init", *given, "--init", "base", "--out", tmp_path / "asked", "--json"
    )
    assert code == 0, err
    found = {row["label"]: row["start"]["from"] for row in json.loads(stdout)["rows"]}
    assert found == {"fedavg": "random", "fedavg+init": "base"}


def test_only_train_and_up_offer_it():
    source = Path(library.__file__).parent
    read = {p.relative_to(source).as_posix(): p.read_text("utf-8") for p in source.rglob("*.py")}
    users = {p for p, text in read.items() if "offer_start" in text}
    assert users == {"run/start.py", "run/pilot.py", "deploy/up.py"}
    assert {p for p, text in read.items() if "offered=offered" in text} == {
        "cli/train.py",
        "cli/federation.py",
        "run/pilot.py",
        "run/loop.py",
        "reports/dry.py",
        "deploy/up.py",
    }


def resealed(folder: Path) -> None:
    """Make a base another one, whole in itself: a bit of the last layer's numbers, and the sums after it."""
    found = json.loads((folder / MANIFEST).read_bytes())
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(data)
    found["files"]["weights.safetensors"]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / MANIFEST).write_bytes(base_module.dump_manifest(found))


def test_resume_keeps_the_start_and_refuses_another_base(keyfed, made, poems, tmp_path, monkeypatch):
    out, file = tmp_path / "out", tmp_path / "run.toml"
    file.write_text("".join(f"{line}\n" for line in ("[data]", f'name = "{poems}"', "window = 8", "[train]",
                    "rounds = 1", "cohort = 2", "workers = 1", "baselines = false")), "utf-8")  # fmt: skip
    given = ("train", "fedavg", "--config", file, "--out", out, "--resume", "--set", "lr=2", "--set", "optimiser=sgd")
    assert keyfed(*given)[0] == 0
    before = result_of(out)["start"]
    assert before["from"] == "base"
    (out / "result.json").unlink()
    code, _, err = keyfed(*given)  # the file says nothing of a start: the run's own is kept
    assert code == 0, err
    assert result_of(out)["start"] == before
    (out / "result.json").unlink()
    folder = Path(shutil.copytree(made / "base", tmp_path / "base"))
    resealed(folder)
    monkeypatch.setattr(base_module, "FOLDER", folder)
    code, _, err = keyfed(*given)
    assert code == 2
    assert "was started from another model: SHA-256" in err


WORD = st.sampled_from(("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "house", "and", "then"))
LINE = st.lists(WORD, min_size=1, max_size=9).map(tuple)


def base_of(lines: list[tuple[str, ...]], every: int) -> Base:
    """A base of which only its own lines are known."""
    kept = base_module.kept_hashes(base_module.line_hashes(lines), every)
    return Base(None, "", {"lines": {"every": every}}, {}, (), kept)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(own=st.sets(LINE, max_size=40), other=st.sets(LINE, max_size=40), every=st.sampled_from([1, 2, 4]),
       copies=st.integers(1, 3), taken=st.integers(0, 40))  # fmt: skip
def test_the_share_of_own_lines_is_that_of_different_long_lines(own, other, every, copies, taken):
    mixed = [*other, *sorted(own)[:taken]]
    base = base_of(list(own), every)
    picked = {line for line in mixed if (h := base_module.line_hash(line)) is not None and h % every == 0}
    share = len(picked & own) / len(picked) if picked else 0.0
    written = [[w.upper() if k % 2 else w for w in line] for line in mixed for k in range(copies)]
    assert base_module.shared_lines(base, written) == pytest.approx(share)
    assert Fit(1.0, share).is_own == (share >= 0.01)
    assert not any(len(line) < base_module.LEAST_WORDS for line in picked)


@pytest.mark.parametrize(("shared", "taken"), [(0, True), (5, True), (20, False), (400, False)])
def test_a_corpus_gets_it_up_to_one_line_in_a_hundred(made, tmp_path, shared, taken):
    own = [line for path in sorted((made / "corpus").iterdir()) for line in path.read_text("utf-8").splitlines()]
    fresh = [
        f"the people {a} remembers our house {b} every day {c} again"
        for a in "abcdefgh"
        for b in "ijklmnop"
        for c in "qrstuvwx"
    ]
    mine = sorted({*own})[: shared * len(fresh) // 1000]
    corpus = write_lines(tmp_path / "mixed", [*fresh, *mine], writers=2)
    config = library.configure("fedavg", data=str(corpus), data_unseen=0.0)
    found, prepared, line = offer_start(config)
    assert prepared is not None
    assert (found.train.init == "base", line is None) == (taken, taken)
    if not taken:
        assert re.search(r"^\d+\.\d% of the lines", line)


def test_lines_are_read_from_tokens_where_there_is_no_text(made):
    config = library.configure("fedavg", data=str(made / "corpus"), data_unseen=0.0, data_min_clients=1)
    prepared = prepare(config)
    bare = replace(prepared, population=replace(prepared.population, clients=(), unseen=(), valid=None, test=None))
    assert base_module.shared_lines(load_base(), base_module.lines_of(prepared)) == 1
    assert base_module.shared_lines(load_base(), base_module.lines_of(bare)) == 1
    assert len(list(base_module.lines_of(bare))) > 50
    assert len(list(base_module.lines_of(prepared, most=10))) <= 10


def test_what_is_known_is_words_and_not_marks_or_numbers():
    base = SimpleNamespace(
        trained=SimpleNamespace(vocab=Vocab("word", (*SPECIALS, "the", "cat", ".", "1"), True, False))
    )
    vocab = Vocab("word", (*SPECIALS, ".", "the", "dog", "1"), True, False)
    counts = np.array([0, 0, 50, 50, 100, 3, 1, 100])
    assert base_module.known_share(base, vocab, counts) == pytest.approx(3 / 4)
    assert base_module.known_share(base, vocab, None) == pytest.approx((1 / 6) / (1 / 6 + 1 / 7))
    assert base_module.known_share(base, Vocab("word", (*SPECIALS, "."), True, False), None) == 0


def test_a_private_run_names_its_public_start_and_no_share(keyfed, made, poems, tmp_path):
    out = tmp_path / "out"
    given = ("--data", poems, "--rounds", 1, "--out", out, "--dp", "noise=1", "--set", "privacy.twin=false")
    code, _, err = keyfed("train", "fedavg", *given, *OPTIONS)
    assert code == 0, err
    sha256 = load_base().sha256
    statement = " ".join(read_result(out)["privacy"]["statement"])
    assert f"Public start, not covered: the base model that comes with keyfed, SHA-256 {sha256}" in statement
    assert "Public start, not covered" in keyfed("privacy", "ledger", out)[1]
    start = result_of(out)["start"]
    assert (start["from"], start["known"], start["own"], start["tokens"]) == ("base", None, None, None)


@pytest.mark.parametrize("asked", [(), ("--init", "base")])
def test_a_private_run_on_its_own_text_is_refused(keyfed, made, tmp_path, asked):
    given = ("--data", made / "corpus", "--dp", "noise=1", *OPTIONS)
    code, _, err = keyfed("train", "fedavg", *given, *asked, "--out", tmp_path / "o")
    assert code == 2
    assert "no ε would hold for their writers" in err
    code, _, err = keyfed("train", "fedavg", *given, "--init", "none", "--dry-run")
    assert code == 0, err


def test_no_line_of_a_private_run_decides_its_start(made, poems, monkeypatch):
    """A choice by lines would be an un-noised function of every client's text: the corpus's name and words decide."""
    monkeypatch.setattr(base_module, "shared_lines", lambda *given: pytest.fail("clients' lines are compared"))
    plain = library.configure("fedavg", data=str(poems), data_unseen=0.0)
    private = replace(plain, privacy=replace(plain.privacy, noise=1.0))
    found, prepared, line = offer_start(private)
    assert (found.train.init, line) == ("base", None)
    monkeypatch.setattr(base_module, "SAME_SOURCE", {NAME: (str(poems),)})
    assert offer_start(private, prepared)[0].train.init is None


def test_numbers_that_are_not_finite_are_refused(made, tmp_path, monkeypatch):
    monkeypatch.setattr(base_module, "widen", lambda stored: {k: v * np.nan for k, v in widen(stored).items()})
    with pytest.raises(RunError, match="not finite"):
        load_base()


def test_a_server_and_a_simulation_begin_alike(made, poems):
    config = replace(library.configure("fedavg", data=str(poems), **OWN))
    config = replace(config, train=replace(config.train, init="base"))
    prepared, source = prepare(config), find_source(config)
    start, about = make_ready(config, prepared, source, lambda line: None)
    params, begun, said = start_without_text(config, prepared.spec, prepared.vocab, 0.5)
    for name, value in initial_params(config, prepared, start).items():
        assert torch.equal(params[name], value), name
    assert begun.made() == start.made() == {"init_sha256": load_base().sha256}
    assert (said["own"], said["is_own"], about["is_own"]) == (0.5, True, False)
    assert start_without_text(replace(config, train=replace(config.train, init=None)), prepared.spec, prepared.vocab,
                              None)[2] == {"from": "random"}  # fmt: skip


def test_a_submitted_run_is_judged_by_its_vocabulary(made):
    known = load_base().trained.vocab
    other = Vocab("word", (*SPECIALS, *{word for line in GERMAN for word in line.split()}), lower=True, tokenised=False)
    config = library.configure("fedavg")
    assert offer_start_by_words(config, known)[0].train.init == "base"
    found, line = offer_start_by_words(config, other)
    assert found.train.init is None
    assert re.search(r"knows \d+% of the words", line)
    assert offer_start_by_words(library.configure("fedavg", model="gru"), known)[0].train.init is None


def submitted(config: Config, root: Path, monkeypatch, *, offered: bool) -> tuple[dict, list[str]]:
    """Return what `keyfed up` submits for a run, and what it says; nothing is started."""
    from keyfed.deploy import up

    files, said = {}, []
    for name in ("need_flower", "make_certificates", "start_superlink", "start_clients", "submit"):
        monkeypatch.setattr(up, name, lambda *given, **options: "127.0.0.1:1")
    monkeypatch.setattr(up, "build_app", lambda folder, given: files.update(given))
    monkeypatch.setattr(up, "Processes", lambda folder: nullcontext())
    root.mkdir()
    up.up(config, 3, root / "out", root, SimpleNamespace(say=said.append), plain=True, offered=offered)
    return json.loads(files["run.json"]), said


def test_up_submits_the_base_where_it_fits_and_its_share_where_it_was_asked_for(made, poems, tmp_path, monkeypatch):
    fits = library.configure("fedavg", data=str(poems), **OWN)
    told, _ = submitted(fits, tmp_path / "a", monkeypatch, offered=True)
    assert (told["config"]["train"]["init"], told["own"]) == ("base", 0)
    told, _ = submitted(fits, tmp_path / "b", monkeypatch, offered=False)
    assert told["config"]["train"]["init"] is None
    own = library.configure("fedavg", data=str(made / "corpus"), **OWN)
    told, said = submitted(own, tmp_path / "c", monkeypatch, offered=True)
    assert told["config"]["train"]["init"] is None
    assert any("100.0% of the lines of this corpus are in its own text" in line for line in said)
    asked = replace(own, train=replace(own.train, init="base"))
    told, _ = submitted(asked, tmp_path / "d", monkeypatch, offered=False)
    assert (told["config"]["train"]["init"], told["own"]) == ("base", 1)


def test_a_federation_starts_from_it_says_so_and_goes_on_from_it(made, tmp_path, monkeypatch):
    transport, roster = federation(tmp_path, write_texts(tmp_path / "t", 3))
    vocab, path = vocabulary(tmp_path)
    with pytest.raises(ConfigError, match="set init to base or none"):
        deployable(Config(train=replace(Config().train, init=str(made / "run"))))
    config = small_config(tmp_path / "t", path, cohort=3, rounds=1, lr=1.0, optimiser="sgd")
    config = replace(config, model=replace(config.model, embed=None, hidden=None))
    monkeypatch.setattr(start_module, "known_share", lambda base, vocab, counts: 0.9)  # the words are others
    said = Heard()
    asked = replace(config, train=replace(config.train, init="base"))
    given = (asked, vocab, tmp_path / "run", transport, roster)
    result = train_deployed(*given, said, patience=QUICK_ANSWERS, own=0.3)
    base = load_base()
    assert (result["start"]["from"], result["start"]["sha256"]) == ("base", base.sha256)
    assert result["start"]["own"] == 0.3
    assert any(line.startswith("starts from the base model") for line in said.lines)
    assert any(line.startswith("WARNING: 30.0% of the lines") for line in said.lines)
    assert read_run_toml(tmp_path / "run")[1]["init_sha256"] == base.sha256
    assert "the base model" in library.report(tmp_path / "run") + (tmp_path / "run" / "report.md").read_text("utf-8")
    folder = Path(shutil.copytree(made / "base", tmp_path / "base"))
    resealed(folder)
    monkeypatch.setattr(base_module, "FOLDER", folder)
    with pytest.raises(RunError, match="was started from another model"):
        train_deployed(*given, patience=QUICK_ANSWERS, resume=True)


def test_its_shape_is_that_of_the_preset():
    spec = build_spec("cifg", 37)
    assert load_base().trained.spec == spec
    with pytest.raises(ConfigError, match="knows"):
        base_module.describe_base(load_base(), spec, load_base().trained.vocab, Fit(0.5, None), {}, private=False)
    with pytest.raises(PrivacyError):
        base_module.describe_base(load_base(), spec, load_base().trained.vocab, Fit(1.0, 0.5), {}, private=True)


def test_a_damaged_base_is_said_with_what_the_command_can_do(keyfed, poems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_module, "FOLDER", tmp_path / "nowhere")
    code, _, err = keyfed("suggest", "base", "the president")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert err.strip().endswith("; install keyfed again")
    assert "--init" not in err  # suggest has no such option


def test_a_start_that_is_nothing_says_what_there_is(keyfed, poems, tmp_path):
    out = tmp_path / "out"
    code, _, err = keyfed("train", "fedavg", "--data", poems, "--init", "nonsense", "--out", out, *OPTIONS)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "nonsense, which has no run.toml; expected a run folder, base or none" in err
    assert not (out / "run.toml").exists()


def test_suggest_types_on_it_where_no_run_has_that_name(keyfed, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = keyfed("suggest", "base", "the president", "-k", 2)
    assert code == 0, err
    assert len(out.split()) == 2
    assert set(out.split()) <= set(load_base().trained.vocab.words)
    shutil.copytree(made / "run", tmp_path / "base")
    monkeypatch.setattr(base_module, "FOLDER", tmp_path / "nowhere")
    assert keyfed("suggest", "base", "the president")[0] == 0  # the run
    assert Config().train.init is None  # a study's cells are what they were
