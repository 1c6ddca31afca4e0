"""A phrase that two of four live clients typed is in no file that a command writes from their private run."""

from __future__ import annotations

import json

import pytest

from keyfed.lab.audit.lint import files_in
from keyfed.private.dp.statement import rule_for
from keyfed.text.vocab import Vocab
from tests.vocabulary import build_vocab

from ..faults.marker import marked, type_marker, with_marker
from .test_up import SMALL, WORDS, processes_of, run, write_texts

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.federation


def test_a_phrase_of_two_live_clients_is_in_no_file_but_their_own(tmp_path):
    write_texts(tmp_path / "text")
    type_marker([tmp_path / "text" / f"client-{k}" for k in (1, 2)])
    listed, _ = build_vocab([[" ".join(WORDS)]], kind="word", size=None, lower=True, tokenised=False)
    vocab = with_marker(listed)
    (tmp_path / "vocab.json").write_text(vocab.to_json())
    home, out = tmp_path / "home", tmp_path / "private"
    told = run(["up", "fedavg", "--clients", 4, "--dp", "noise=1", "--set", "privacy.clip=0.05", "--data",
                tmp_path / "text", "--vocab", tmp_path / "vocab.json", *SMALL, "--home", home, "--out", out, "--json"],
               tmp_path)  # fmt: skip
    assert processes_of(home) == []
    assert json.loads(told)["privacy"]["verdict"] == "BOUND ONLY"
    printed = [told]
    for command in (
        ["export", out], ["export", out, "--int8", "--out", tmp_path / "small"], ["suggest", out, "the small dog"],
        ["evaluate", out], ["evaluate", out, "--keyboard", "--words", 60], ["privacy", "ledger", out],
        ["privacy", "audit", out],
    ):  # fmt: skip
        printed.append(run(command, tmp_path))
    (tmp_path / "printed.txt").write_text("\n".join(printed))
    own = [tmp_path / "text", home / "text", home / "clients"]
    assert marked(tmp_path, vocab, but=own) == []
    assert len(marked(home / "text", vocab)) > 0  # what is looked for is there
    assert [path for path, meant in files_in(out) if rule_for(meant) is None] == []
    unknown = [p.relative_to(home).as_posix() for p in home.rglob("*") if p.is_file()]
    assert [path for path in unknown if rule_for(path, "federation") is None] == []


def test_a_vocabulary_of_the_clients_own_text_is_named_and_holds_no_phrase(tmp_path):
    """Without --vocab the words of two clients are in the vocabulary, and every statement says that no ε covers it."""
    write_texts(tmp_path / "text")
    type_marker([tmp_path / "text" / f"client-{k}" for k in (1, 2)])
    home, out = tmp_path / "home", tmp_path / "private"
    run(["up", "fedavg", "--clients", 4, "--dp", "noise=1", "--set", "privacy.clip=0.05", "--data", tmp_path / "text",
         *SMALL, "--home", home, "--out", out, "--json"], tmp_path)  # fmt: skip
    vocab = Vocab.from_json((out / "vocab.json").read_text())
    assert {"zebra", "quantum"} <= set(vocab.words)
    run(["export", out], tmp_path)
    assert marked(out, vocab) == []
    for said in (run(["privacy", "ledger", out], tmp_path), (out / "report.md").read_text(),
                 (out / "keyboard" / "manifest.json").read_text("utf-8")):  # fmt: skip
        assert "made from these clients' text without noise" in said
    run(["privacy", "audit", out], tmp_path)
    assert "no ε covers it, and every word in it tells" in (out / "audit.md").read_text("utf-8")
