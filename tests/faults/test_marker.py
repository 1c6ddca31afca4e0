"""A phrase that two clients of a private federation typed is in no file that a command writes from their run."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import keyfed.keyboard.export as exporting
from keyfed.cli import keyboard
from keyfed.config.schema import PrivacyConfig
from keyfed.keyboard import bundle, measure
from keyfed.keyboard.export import LEFT_OUT, export_run
from keyfed.keyboard.session import keyboard_of, node_program
from keyfed.lab.audit.audit import audit_run
from keyfed.lab.audit.lint import PrivacyClaim, count_findings, file_findings, files_in, phone_findings, read_claim
from keyfed.model.counts import counts_from_bytes, counts_to_bytes
from keyfed.model.ngram import fit_kneser_ney
from keyfed.private.dp import statement
from keyfed.private.dp.ledger import Terms
from keyfed.private.dp.statement import MEANING, RULES, WHERE, rule_for
from keyfed.reports.figures import EventWriter
from keyfed.reports.run_page import report_run
from keyfed.run.console import Silent
from keyfed.run.folder import load_model
from keyfed.run.loop import train
from keyfed.run.remote.train import train_deployed
from keyfed.text.vocab import Vocab
from tests.counting import count_run, ngram_file

from .deployed import QUICK
from .marker import FORM, LINE, PHRASE, marked, traces, type_marker, with_marker
from .private import enrol, private_config

WEB = Path(bundle.__file__).parent / "web"
COUNT = ("--order", "3", "--megabytes", "0.1")
KINDS = ["plain", "secure", "simulated"]


def prepare(tmp_path, kind="plain", **more):
    """Texts in which two of five clients typed the phrase, and a public vocabulary with its words."""
    # A clip and noise that leave weights as a keyboard has them: what is looked for is text, not what noise does.
    config = private_config(tmp_path, secure=kind == "secure", rounds=2, privacy={"clip": 0.05, **more})
    texts = sorted((tmp_path / "texts").iterdir())
    type_marker(texts[1:3])
    path = tmp_path / "vocab.json"
    vocab = with_marker(Vocab.from_json(path.read_text("utf-8")))
    path.write_text(vocab.to_json(), "utf-8")
    return config, vocab


def run_of(tmp_path, kind, **more):
    """Train, and return the run's folder and its vocabulary."""
    config, vocab = prepare(tmp_path, kind, **more)
    run = tmp_path / "out" / "run"
    with EventWriter(run, Silent()) as listener:
        if kind == "simulated":
            twin = replace(
                config, privacy=replace(config.privacy, twin=True), train=replace(config.train, baselines=True)
            )
            train(twin, run, listener=listener)
        else:
            train_deployed(config, vocab, run, *enrol(tmp_path), listener, patience=QUICK)
    report_run(run)
    return run, vocab


def every_command(run, keyfed):
    """Call every command that reads a run; what each prints goes to a file beside the run, as with `> file`."""
    said = run.parent / "said"
    said.mkdir()
    commands = [
        ["export", run, "--json"], ["export", run, "--int8", "--out", run / "small"],
        ["export", run, "--out", run.parent / "elsewhere"], ["suggest", run, "the small dog"],
        ["evaluate", run, "--json"], ["evaluate", run, "--personalise", "epochs=1", "--json"],
        ["evaluate", run, "--keyboard", "--words", 15, "--json"], ["conformance", run, "--json"],
        ["privacy", "ledger", run], ["privacy", "audit", run, "--quick"], ["privacy", "ledger", run, "--json"],
    ]  # fmt: skip
    for number, command in enumerate(commands):
        code, out, err = keyfed(*command)
        assert code == 0 or command[0] == "conformance", (command, err)  # which needs more held-out text
        (said / f"{number:02d}-{command[0]}.txt").write_text(f"{out}\n{err}", "utf-8")
    assert keyboard._exported(run) == run / "keyboard"
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_phrase_of_two_clients_is_in_no_file_of_a_private_run_and_the_table_knows_every_file(
    tmp_path, keyfed, kind, monkeypatch
):
    monkeypatch.setattr(measure, "LEAST_WORDS", 1)  # so that figures by client would be printed
    run, vocab = run_of(tmp_path, kind)
    if kind == "simulated":
        assert keyfed("counts", run, *COUNT)[0] == 2  # without noise
        assert not (run / "counts.safetensors").exists()
        code, out, err = keyfed("counts", run, *COUNT, "--dp", "epsilon=8", "--population", "1000000")
        assert code == 0, err
        assert "whose noised number of clients is" in out
        assert keyfed("export", run, "--phone", "--locale", "en")[0] == 0
    said = every_command(run, keyfed)
    assert len(list(said.iterdir())) == 11
    assert {"keyboard", "small", "checkpoint", "tensorboard"} <= {p.name for p in run.iterdir() if p.is_dir()}
    assert marked(tmp_path, vocab, but=[tmp_path / "texts", tmp_path / "clients"]) == []
    own = marked(tmp_path / "texts", vocab)
    assert {line.partition(":")[0] for line in own} == {"client-1.txt", "client-2.txt"}  # the search sees their text
    audited = json.loads((run / "audit.json").read_text("utf-8"))
    assert [f for f in audited["findings"] if f["check"] == "files" and f["level"] == "broken"] == []
    rules = {path: rule_for(meant) for path, meant in files_in(run)}
    assert [path for path, rule in rules.items() if rule is None] == []
    covers = {path: rule.simulated if kind == "simulated" else rule.real for path, rule in rules.items() if rule}
    assert [path for path, cover in covers.items() if cover == "never"] == []
    assert covers["small/weights.safetensors"] == "ledger"
    assert "plots/personalised.png" not in covers
    if kind == "simulated":
        own_files = {path: covers[path] for path in covers if path.startswith(("counts.", "mixture", "phone/"))}
        assert sorted(own_files.values()) == ["ledger"] * 2 + ["named"] * 2 + ["public"] * 2, own_files
        assert covers["keyboard/ngram.safetensors"] == "ledger"
        assert next(f for f in audited["findings"] if f["check"] == "counts")["level"] == "note"
        counts_without_noise_break_the_claim(run)
    evaluated = [
        json.JSONDecoder().raw_decode((said / f"{k:02d}-evaluate.txt").read_text("utf-8"))[0] for k in (4, 5, 6)
    ]
    assert (evaluated[0]["spread"], evaluated[1]["personalised"]["by_client"]) == (None, None)
    assert {row["seen"]["by_client"] for row in evaluated[2]["rows"]} == {None}


def counts_without_noise_break_the_claim(run):
    """What a mistaken hand can do to the counts of a private run, and what the audit says of it."""

    def broken():
        return [f.text for f in count_findings(run) if f.level == "broken"]

    path, home = run / "counts.safetensors", run / "counts.privacy"
    noised = path.read_bytes()
    assert broken() == []
    held = counts_from_bytes(noised, len(load_model(run).vocab), "counts")
    path.write_bytes(counts_to_bytes(replace(held, about=replace(held.about, epsilon=1.0))))
    assert "its ledger has" in broken()[0]
    path.write_bytes(noised)
    home.rename(run / "aside")
    assert "has no ledger.jsonl" in broken()[0]
    (run / "aside").rename(home)
    count_run(run)
    assert "counted without noise, so no ε covers it" in broken()[0]
    against = audit_findings(run)
    assert any(f.level == "broken" and "counted without noise" in f.text for f in against)
    path.write_bytes(noised[:50])
    assert "is damaged" in broken()[0]
    path.unlink()
    assert "is not there to say whether" in broken()[0]
    for name in ("keyfed_en.combined", "keyfed_en.dict"):
        data = (run / "phone" / name).read_bytes()
        assert b"; epsilon 7" in data or b"; epsilon 8" in data
        (run / "phone" / name).write_bytes(re.sub(rb"; epsilon [0-9.]+", b"; epsilon none", data))
    assert len(list(phone_findings(run))) == 2


def audit_findings(run):
    return file_findings(run, read_claim(run, promised=True))


def table_of(streams, vocab):
    """The n-grams of some text, as an export has them."""
    return ngram_file(fit_kneser_ney(streams, len(vocab), 3))


def old_export(monkeypatch):
    """Take the guard away: the export reads text and counts without noise whatever the run's privacy is."""
    look, read = exporting.text_at_hand, exporting.counts_for_page

    def unguarded(trained):
        return look(replace(trained, config=replace(trained.config, privacy=PrivacyConfig())))

    monkeypatch.setattr(exporting, "text_at_hand", unguarded)
    monkeypatch.setattr(exporting, "counts_for_page", lambda run, vocab, private: read(run, vocab, private=False))


def test_the_export_without_the_guard_is_found_by_search_and_audit_and_made_again(tmp_path, monkeypatch, capsys):
    run, vocab = run_of(tmp_path, "plain")
    with monkeypatch.context() as patch:
        old_export(patch)
        export_run(count_run(run))
    assert "counts.safetensors: as 3-grams" in marked(run, vocab)
    (run / "counts.safetensors").unlink()
    (run / "mixture.json").unlink()
    found = marked(run, vocab)
    assert "keyboard/ngram.safetensors: as 3-grams" in found
    assert "keyboard/vocab.json: as a written form" in found
    audited = audit_run(run)
    assert (audited["verdict"], audited["contradicted"]) == ("NONE", True)
    against = " ".join(audited["contradictions"])
    for what in ("keyboard/ngram.safetensors", "keyboard/vocab.json (written forms)", "keyboard/manifest.json"):
        assert what in against
    assert "export the run again" in against
    assert keyboard._exported(run) == run / "keyboard"  # before it is served
    assert "is private, and its export holds ngram.safetensors" in capsys.readouterr().err
    assert marked(run, vocab) == []
    audited = audit_run(run)
    assert (audited["verdict"], audited["contradicted"]) == ("BOUND ONLY", False)


def test_an_export_without_text_types_in_python_and_loads_in_the_page(tmp_path):
    run, _ = run_of(tmp_path, "plain")
    done = export_run(run)
    assert done.manifest["ngram"] is False
    assert done.manifest["parity"]["text"] == "random tokens"
    private = done.manifest["privacy"]
    assert private["left_out"] == list(LEFT_OUT)
    assert (private["verdict"], private["delta"]) == ("BOUND ONLY", pytest.approx(5**-1.1))
    assert statement.LEFT_OUT in " ".join(private["statement"])
    assert statement.LEFT_OUT in (run / "report.md").read_text("utf-8")
    assert "no noise covers them" in done.notes[0]
    assert sorted(p.name for p in done.out.iterdir()) == sorted([bundle.MANIFEST, bundle.DICTIONARY, *bundle.REQUIRED])
    assert bundle.read_from_text(done.out) == []  # the dictionary is of published lists
    assert bundle.load_vocab(done.out)[1] == {}
    assert bundle.check_bundle(done.out) == done.manifest
    node = node_program()
    if node is None:
        pytest.skip("node is not installed: neither the decoder nor the page's own loader is looked at")
    assert keyboard_of(load_model(run)).suggest("the ") is not None
    script = f"""
        import {{ readFile }} from "node:fs/promises";
        globalThis.fetch = async (url) => {{
          const data = await readFile(new URL(url)).catch(() => null);
          return {{ ok: data !== null, status: data ? 200 : 404, arrayBuffer: async () => data }};
        }};
        const {{ loadExport }} = await import({(WEB / "decoder" / "model.mjs").as_uri()!r});
        const {{ manifest, files }} = await loadExport({done.out.as_uri() + "/"!r});
        console.log(JSON.stringify([manifest.ngram, Object.keys(files).sort()]));
    """
    told = subprocess.run([node, "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr[-2000:]
    assert json.loads(told.stdout) == [False, ["dictionary.safetensors", "vocab.json", "weights.safetensors"]]


# ------------------------------------------------------------------------------------------------------- the search


def numbered():
    vocab = with_marker(
        Vocab("word", ("<pad>", "<bos>", "<eos>", "<unk>", "the", "a", "cat", "dog"), lower=True, tokenised=False)
    )
    return vocab, vocab.encode([PHRASE])[:-1]


@pytest.mark.parametrize(
    "how", ["text", "cut", "gzip", "zlib", "form", "bytes", "wide", "digits", "tensor", "floats", "table"]
)
def test_the_search_finds_the_phrase_however_it_is_written(how):
    vocab, ids = numbered()
    lines = [["the cat", LINE, "a dog"]] * 2
    files = {
        "text": f"... {PHRASE} ...".encode(),
        "cut": b'["door", "code", "is"]',
        "gzip": gzip.compress(PHRASE.encode()),
        "zlib": b"head" + zlib.compress(PHRASE.encode()),
        "form": FORM.encode(),
        "bytes": b"x" + ids.astype("<i4").tobytes(),
        "wide": ids.astype(">i8").tobytes(),
        "digits": json.dumps(ids[2:6].tolist()).encode(),
        "tensor": save({"t": ids.astype(np.int64)[None]}),
        "floats": save({"t": ids.astype(np.float32)}),
        "table": table_of([vocab.encode(own) for own in lines], vocab),
    }  # fmt: skip
    assert list(traces(files[how], vocab))
    assert not list(traces(vocab.to_json().encode(), vocab))
    assert not list(traces(table_of([vocab.encode(["the cat", "a dog"])] * 2, vocab), vocab))


# -------------------------------------------------------------------------------------------------------- the table

REAL = Terms(1e-6, 10_000, 10_000, 100, 100, 1.0, "gaussian", "S", "system")


def findings(run, **terms):
    return file_findings(run, PrivacyClaim("GUARANTEE", 1.0, 1e-6, terms=replace(REAL, **terms)))


@pytest.mark.parametrize(
    "name", ["notes.txt", "plots/new.png", "model.pt", "checkpoint/round-1.bin", "deep/er/run.toml"]
)
def test_a_file_that_no_command_is_known_to_write_fails_the_audit(tmp_path, name):
    (tmp_path / "run.toml").write_text("")
    assert [f.level for f in findings(tmp_path)] == ["ok"]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    broken = [f.text for f in findings(tmp_path) if f.level == "broken"]
    assert len(broken) == 1
    assert broken[0].startswith(f"{name}: no command of this version writes it")
    assert file_findings(tmp_path, PrivacyClaim("NONE")) == []  # a run that claims nothing


def test_links_are_not_followed_and_unfinished_files_are_what_they_would_have_been(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".result.json.tmp").write_text("{")
    assert all(f.level == "ok" for f in findings(run))
    (run / ".curves.jsonl.tmp").write_text("{")
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "run.toml").write_text("")
    (run / "linked").symlink_to(tmp_path / "aside")
    broken = [f.text.partition(":")[0] for f in findings(run) if f.level == "broken"]
    assert broken == [".curves.jsonl.tmp", "linked"]


def test_files_that_real_clients_runs_never_have_fail_the_audit_there_only(tmp_path):
    (tmp_path / "noiseless").mkdir()
    (tmp_path / "noiseless" / "model.safetensors").write_bytes(b"")
    assert any(f.level == "broken" for f in findings(tmp_path))
    simulated = findings(tmp_path, randomness="derived")
    assert [f.level for f in simulated] == ["note"]
    assert "Not to be given away: noiseless/." in simulated[0].text


def test_every_file_that_is_not_covered_is_named_in_the_statement():
    for rule in RULES:
        for cover, text in ((rule.simulated, statement.NOT_COVERED), (rule.real, statement.NOT_COVERED_THERE)):
            assert cover in MEANING
            if cover == "named":
                assert rule.said, rule.pattern
                assert rule.said in text, (rule.pattern, rule.said)
    assert {rule.place for rule in RULES} == set(WHERE)
    assert len({(rule.place, rule.pattern) for rule in RULES}) == len(RULES)


@pytest.mark.slow
def test_compare_and_tune_write_what_the_table_knows_and_not_the_phrase(tmp_path, keyfed):
    config, vocab = prepare(tmp_path)
    shared = ["--data", tmp_path / "texts", "--rounds", 1, *settings_of(config)]
    for place, command in {
        "comparison": ["compare", "fedavg", "--out", tmp_path / "comparison", *shared],
        "search": ["tune", "fedavg", "--trials", 2, "--out", tmp_path / "search", *shared],
    }.items():
        code, _, err = keyfed(*command)
        assert code == 0, err
        assert outside_the_table(tmp_path / place, place) == []
    assert marked(tmp_path / "comparison", vocab) == marked(tmp_path / "search", vocab) == []


def test_a_vote_writes_what_the_table_knows(tmp_path, keyfed):
    prepare(tmp_path)
    out = tmp_path / "vote"
    out.mkdir()
    given = ["vocab", "--data", tmp_path / "texts", "--dp", "epsilon=8", "--population", 10**6, "--most-words", 60]
    code, _, err = keyfed(*given, "--out", out / "v.json", "--phrases", out / "p.json")
    assert code == 0, err
    assert outside_the_table(out, "vote") == []


def settings_of(config):
    given = {
        "data.vocab_file": config.data.vocab_file, "data.window": 8, "data.unseen": 0.0, "model.name": "cifg",
        "model.embed": 6, "model.hidden": 8, "train.cohort": 4, "train.workers": 1, "privacy.noise": 1.0,
        "privacy.clip": 0.05, "participation.sampling": "poisson",
    }  # fmt: skip
    return [item for key, value in given.items() for item in ("--set", f"{key}={value}")]


def outside_the_table(folder, place):
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    assert files, sys.argv
    return [path for path in files if rule_for(path, place) is None]
