"""What surprised new users in runs that went well: each was a defect of a first impression, and is said now."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keyfed.cli.reference import plain
from keyfed.federated.methods import METHODS
from keyfed.reports import samples

SETTINGS = ("model.embed=6", "model.hidden=6", "data.window=4", "train.workers=1", "train.baselines=false")
TINY = [item for setting in SETTINGS for item in ("--set", setting)]
LINE = "der staat der republik ist gut und den leuten geht es heute wohl\n"


@pytest.fixture
def text(tmp_path, monkeypatch, losses_on_a_coarse_grid):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for k in range(5):
        (tmp_path / "text" / f"writer{k}.txt").write_text(LINE * 8, "utf-8")
    return "text"


def train(keyfed, text, *given):
    code, out, err = keyfed("train", "fedavg", "--data", text, "--rounds", 1, "--out", "run", *TINY, *given)
    assert code == 0, err
    return out, err


def test_a_private_run_says_that_few_clients_drown_and_that_it_trains_twice(keyfed, text):
    _, err = train(keyfed, text, "--dp", "epsilon=8", "--set", "train.cohort=4")
    warned, again = err.index("warning: 4 clients a round are few for this noise"), err.index("now the same rounds")
    assert "`keyfed privacy plan`" in err
    assert warned < again
    assert err.count("read as: ") == 2, "announced before the second training"
    assert err.index("round    1") < again < err.rindex("read as: ")


def test_prompts_are_words_of_the_model_where_english_ones_are_not(keyfed, text):
    out, err = train(keyfed, text, "--secure", "--set", "train.cohort=3")
    assert "secure: uploads are masked, and only sums of at least 3 clients are opened" in err
    shown = [line.strip().partition(" …")[0] for line in out.splitlines() if " …  " in line]
    assert len(shown) >= samples.ENOUGH
    assert set(" ".join(shown).split()) <= set(LINE.split())
    report = Path("run/report.md").read_text("utf-8")
    assert not any(prompt in report for prompt in samples.PROMPTS)


def test_no_rounds_train_nothing_and_it_is_said(keyfed, text):
    _, err = train(keyfed, text, "--rounds", 0, "--set", "train.cohort=3")
    assert "0 rounds train nothing: the model that is tested is the start as it is" in err
    assert "testing the model of round 0 (not trained: 0 rounds)" in err


def test_a_dry_run_shows_what_differs_and_what_will_be_read(keyfed, text):
    code, out, _ = keyfed("train", "fedavg", "--data", text, "--dry-run", "--set", "train.cohort=4", *TINY)
    assert code == 0
    lines = out.splitlines()
    assert "model.embed = 6" in lines
    assert not any(line.startswith("train.rounds = ") for line in lines), "it has its default"
    assert len(lines) < 30
    assert re.search(r"to be read: about [\d,]+ tokens in 20 rounds, \d+\.\d times the training text", out)


def test_a_vocabulary_is_not_written_over_another(keyfed, text):
    assert keyfed("vocab", "--data", text)[0] == keyfed("vocab", "--data", text)[0] == 0, "the same again"
    code, _, err = keyfed("vocab", "--data", text, "--size", 9)
    assert code == 2
    assert "vocab.json exists and is another file; choose another --out" in err


def test_a_search_says_which_trial_begins(keyfed, text):
    given = ("--rounds", 2, "--trials", 2, "--out", "search", "--set", "train.cohort=3", *TINY)
    code, _, err = keyfed("tune", "fedavg", "--data", text, *given)
    assert code == 0, err
    first, ended = err.index("trial 0 (lr=0.006), to round 2:"), err.index("trial 0 (lr=0.006): finished")
    assert first < err.index("round    1") < ended


def test_statistics_are_read_by_people(keyfed, text):
    code, out, err = keyfed("data", "describe", text)
    assert code == 0, err
    for label in ("training tokens of a client, lower quarter", "clients held out", "unknown words, unseen clients"):
        assert label in out
    assert not re.search(r"\de\+\d|tokens_per_client|\bq1\b|\boov\b", out)


FIRST = """
import os, sys
from keyfed.run.console import Narrator

def wait(self, what):
    print(what, sorted({"torch", "numpy"} & set(sys.modules)), flush=True)
    os._exit(0)

Narrator.wait = wait
from keyfed.cli.app import main
sys.argv = ["keyfed", "train", "--secure", "--dp", "epsilon=8"]
main()
"""


def test_a_run_says_that_it_starts_before_pytorch_is_imported(tmp_path):
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "starting []\n", done.stderr


def test_threads_of_a_command_do_not_spin_on_a_busy_machine(keyfed, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    keyfed("methods")
    assert os.environ["GOMP_SPINCOUNT"] == "7", "what the caller has set stays"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    keyfed("methods")
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_described_without_marks_of_other_programs(keyfed, name):
    code, out, _ = keyfed("methods", name)
    assert code == 0
    assert not re.search(r"\\|\.\. math|``|\*\w[\w ,]*\*", out)


def test_formulas_are_lines():
    shown = plain(r".. math::  w_k ← \mathrm{solve}(\frac{μ}{2}(w − θ)),\quad θ' = θ + \frac1m \sum_k w_k")
    assert shown.splitlines() == ["  w_k ← solve((μ / 2) (w − θ))", "  θ' = θ + 1/m Σ_k w_k"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("train", "fedavgg"), "ConfigError"),
        (("evaluate", "nowhere"), "RunError"),
        (("data", "check", "nowhere.txt"), "DataError"),
        (("train", "--no-such-option"), "usage"),
        (("vocab", "--data", "text", "--out", "x" * 300), "system"),
    ],
)
def test_an_error_under_json_is_one_object(keyfed, text, arguments, kind):
    code, out, err = keyfed(*arguments, "--json")
    found = json.loads(out)
    assert found.keys() == {"error"}
    assert (code, found["error"]["exit_code"], found["error"]["kind"]) == (2, 2, kind)
    assert err.splitlines()[-1] == f"error: {found['error']['message']}"


def test_a_stream_that_is_not_utf8_ends_no_command(text):
    program = "from keyfed.cli.options import say; import typer; typer.echo('ε ≤ 8'); say('ρ')"
    main = "import sys; from keyfed.cli import app; app._write_what_can_be_written();" + program
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", main], capture_output=True, env=environment)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, b"? ? 8", b"?")


def test_words_need_no_quotation_marks(keyfed):
    one = keyfed("suggest", "base", "see", "you", "at", "the", "--json")
    assert one == keyfed("suggest", "base", "see you at the", "--json")
    assert json.loads(one[1])["text"] == "see you at the"


def test_resume_without_a_folder_says_that_a_run_begins(keyfed, text):
    code, _, err = keyfed(
        "train", "fedavg", "--data", text, "--rounds", 1, "--resume", *TINY, "--set", "train.cohort=3"
    )
    assert code == 0, err
    assert "runs/fedavg-text-cifg holds no run yet: a new one starts there; --out says which run goes on" in err
