"""`keyfed train` without a method: chosen from the corpus, a pilot, minutes for rounds, six notes of one person."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path

import pytest

import keyfed as library
from keyfed.errors import ConfigError, RunError
from keyfed.run import checkpoint, pilot
from keyfed.run import loop as training
from keyfed.run.folder import read_run_toml
from keyfed.run.recipe import CENTRAL
from tests.listeners import Heard

from .conftest import write_corpus

SMALL = {
    "model_embed": 8, "model_hidden": 12, "data_window": 8, "train_valid_tokens": 300,
    "train_workers": 1, "train_baselines": False,
}  # fmt: skip


def flags(**settings):
    """The same as arguments of the command line."""
    return [part for key, value in settings.items() for part in ("--set", f"{key.replace('_', '.', 1)}={value}")]


FLAGS = flags(**SMALL)


class Stopping(Heard):
    """Presses Ctrl-C after so many rounds, counted over pilot and run."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def start(self, what, rounds, done):
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


@pytest.fixture
def short_pilot(monkeypatch):
    """A pilot of two rounds for runs of a few."""
    for name, value in {"PILOT_RUN": 2, "PILOT_LEAST": 2, "PILOT_MOST": 2}.items():
        monkeypatch.setattr(pilot, name, value)


def settings(corpus: Path, **more):
    return library.configure(data=str(corpus), rounds=4, **(SMALL | more))


def model(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_the_pilot_takes_the_better_step_and_says_what_it_cost(corpus, tmp_path, short_pilot, monkeypatch):
    monkeypatch.setattr(pilot, "steps_to_try", lambda lr: (1000.0, 2.0))
    heard = Heard()
    result = library.train(settings(corpus), tmp_path / "run", listener=heard)
    config, made = read_run_toml(tmp_path / "run")
    assert config.options["lr"] == 2.0
    assert config.method == "fednesterov"
    assert config.train.rounds == 4
    assert config.train.cohort == 7  # eight writers, one of them never trained on
    assert made["pilot_tokens"] > 0
    assert made["pilot"].startswith("1000: ")
    assert "2: perplexity" in made["pilot"]
    assert result["recipe"] == {key: made[key] for key in ("recipe", "pilot", "pilot_tokens")}
    assert any("the local step is 2" in line for line in heard.lines)
    assert any(line.startswith("recipe: train.cohort = 7: ") for line in heard.lines)
    assert not (tmp_path / "run" / "pilot").exists()
    text = (library.report(tmp_path / "run"), (tmp_path / "run" / "report.md").read_text("utf-8"))[1]
    assert "A pilot on validation text tried local steps: 1000" in text
    assert "chosen from the corpus" in text
    # The run itself begins from scratch: with the step given, it is the same, and no pilot is trained.
    library.train(settings(corpus, lr=2.0), tmp_path / "given")
    assert model(tmp_path / "given") == model(tmp_path / "run")
    assert "pilot" not in read_run_toml(tmp_path / "given")[1]


def test_it_repeats_bitwise_and_goes_on_bitwise_wherever_it_was_stopped(corpus, tmp_path, short_pilot, monkeypatch):
    monkeypatch.setattr(pilot, "steps_to_try", lambda lr: (lr, 2 * lr))
    library.train(settings(corpus), tmp_path / "whole")
    _, made = read_run_toml(tmp_path / "whole")
    for after in (2, 3):  # in the second trial of the pilot; when the run itself begins
        out = tmp_path / f"stopped-{after}"
        with pytest.raises(KeyboardInterrupt):
            library.train(settings(corpus), out, listener=Stopping(after))
        assert (out / "run.toml").exists() == (after == 3)
        library.train(settings(corpus), out, resume=True)
        assert model(out) == model(tmp_path / "whole")
        assert read_run_toml(out)[1]["pilot"] == made["pilot"]
    # A finished run that goes on settles nothing; what is said otherwise is refused.
    assert library.train(settings(corpus), tmp_path / "whole", resume=True)["recipe"]["pilot"] == made["pilot"]
    with pytest.raises(RunError, match=r"method\.lr: .* → 7\.0"):
        library.train(settings(corpus, lr=7.0), tmp_path / "whole", resume=True)


def test_a_diverged_trial_neither_ends_nor_wins_the_pilot(corpus, tmp_path, short_pilot, monkeypatch):
    monkeypatch.setattr(pilot, "steps_to_try", lambda lr: (1e30, 2.0, 1e30))
    library.train(settings(corpus, clip=None), tmp_path / "run")
    assert read_run_toml(tmp_path / "run")[0].options["lr"] == 2.0


def test_a_method_of_your_own_needs_no_name(corpus, tmp_path):
    own = {"data_window": 8, "train_cohort": 3, "train_baselines": False}
    config = library.configure(data=str(corpus), rounds=1, **own)
    result = library.train(config, tmp_path / "run", method=library.METHODS["fedavg"]())
    assert result["method"] == "fedavg"
    assert result["recipe"] is None


def test_ctrl_c_in_the_pilot_says_how_to_go_on(corpus, tmp_path, short_pilot, monkeypatch, keyfed):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pilot, "best_step", stop)
    given = ["train", "--data", corpus, "--rounds", 2, "--out", tmp_path / "run", *FLAGS]
    code, _, err = keyfed(*given)
    assert code != 0
    assert f"stopped; the pilot goes on with the same command, --resume and --out {tmp_path / 'run'}" in err
    monkeypatch.undo()
    for name in ("PILOT_RUN", "PILOT_LEAST", "PILOT_MOST"):
        monkeypatch.setattr(pilot, name, 2)
    monkeypatch.setattr(training, "run_round", stop)  # no trial is trained again, the run begins
    code, _, err = keyfed(*given, "--resume")
    assert "the local step is" in err
    assert (tmp_path / "run/run.toml").exists()


# Time


class Clock:
    """Stands still, but for two seconds whenever it is read; so it does not matter how fast the machine is."""

    def __init__(self):
        self.now, self.step = 0.0, 2.0

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (training, checkpoint, pilot):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=found.monotonic))
    return found


@pytest.mark.parametrize("method", [None, "fedavg"])
def test_minutes_fix_the_rounds_once(corpus, tmp_path, short_pilot, clock, method):
    options = {**SMALL, "lr": 2.0}
    config = library.configure(method, data=str(corpus), minutes=2, train_cohort=2, **options)
    heard = Heard()
    library.train(config, tmp_path / "timed", listener=heard)
    stored, made = read_run_toml(tmp_path / "timed")
    assert made["minutes"] == 2
    assert any("rounds fit into 2 minutes" in line for line in heard.lines)
    assert 0.9 * 120 <= clock.now <= 1.1 * 120  # the whole of it: measuring, training, validations
    # From then on it is an ordinary run: the number is stored, and goes on whatever the clock says.
    clock.now += 1_000
    again = library.train(config, tmp_path / "timed", resume=True)
    assert again["rounds"] == stored.train.rounds
    given = {"train_average": stored.train.average, "train_eval_every": stored.train.eval_every}
    same = library.configure(
        method, data=str(corpus), rounds=stored.train.rounds, train_cohort=2, **options, **given,
        data_max_tokens=stored.data.max_tokens, model_dropout=stored.model.dropout,
    )  # fmt: skip
    library.train(same, tmp_path / "counted")
    assert model(tmp_path / "counted") == model(tmp_path / "timed")


def test_a_pilot_is_part_of_the_time(corpus, tmp_path, monkeypatch, clock):
    clock.step = 1.0  # of two seconds it leaves hardly a round
    for name, value in {"PILOT_RUN": 2, "PILOT_LEAST": 4, "PILOT_MOST": 4}.items():
        monkeypatch.setattr(pilot, name, value)
    library.train(library.configure(data=str(corpus), minutes=2, train_cohort=2, **SMALL), tmp_path / "run")
    config, made = read_run_toml(tmp_path / "run")
    assert "perplexity" in made["pilot"]
    assert config.train.rounds > 5
    assert 0.9 * 120 <= clock.now <= 1.1 * 120


def test_too_few_minutes_are_refused_after_one_round(corpus, tmp_path, clock, keyfed):
    for method in (None, "fedavg"):
        config = library.configure(method, data=str(corpus), minutes=0.01, train_cohort=2, **SMALL)
        with pytest.raises(ConfigError, match=r"a round takes .* too few for two rounds"):
            library.train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    code, out, err = keyfed("train", "--data", corpus, "--minutes", "0.01", "--out", tmp_path / "run", *FLAGS)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: --minutes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "3", "--rounds", "3"], "leave one of the two out"),
        (["--minutes", "3", "--set", "train.rounds=3"], "leave one of the two out"),
        (["--minutes", "-1"], "expected a number of minutes > 0"),
        (["--minutes", "3", "--dp", "epsilon=8"], "calibrated to their number"),
        (["--minutes", "3", "--federation", "127.0.0.1:1"], "--minutes is for a simulation"),
    ],
)
def test_minutes_that_cannot_be_kept(keyfed, corpus, tmp_path, arguments, message):
    code, out, err = keyfed("train", "--data", corpus, "--out", tmp_path / "run", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "run").exists()


def test_pretraining_takes_a_time_too(corpus, tmp_path, clock, keyfed):
    given = ["--data", corpus, "--minutes", "2", "--set", "train.cohort=2", "--out", tmp_path / "run", *FLAGS]
    code, _, err = keyfed("pretrain", *given)
    assert code == 0, err
    assert read_run_toml(tmp_path / "run")[1]["minutes"] == 2


# What is said before


def test_a_dry_run_says_what_was_chosen_why_and_how_much_is_read(keyfed, corpus, tmp_path):
    given = ["train", "--data", corpus, "--dry-run", "--set", "train.cohort=3", "--set", "train.rounds=100", *FLAGS]
    code, out, err = keyfed(*given)
    assert code == 0, err
    said = [line for line in out.splitlines() if line.startswith("recipe: ")]
    assert all(line.count(": ") >= 2 for line in said)  # a reason each
    assert not any("train.cohort" in line or "train.rounds" in line for line in said)  # they were given
    assert "pilot: local steps 10, 5, 20, 6 rounds each" in out
    assert "tokens in 100 rounds" in out
    assert "times the training text; about 100% of the clients are called at least once" in out
    code, out, _ = keyfed(*given, "--json")
    assert any("fednesterov" in line for line in json.loads(out)["recipe"])
    code, out, _ = keyfed("train", "fedavg", *given[1:])
    assert "recipe: " not in out


def test_a_dry_run_counts_one_client_in_the_singular(keyfed, corpus):
    code, out, err = keyfed("train", "fedavg", "--data", corpus, "--dry-run", "--set", "train.cohort=1", *FLAGS)
    assert code == 0, err
    assert "a round: 1 client called, " in out


def test_a_dry_run_of_a_private_run_does_not_say_what_it_reads(keyfed, corpus):
    """The recipe does not choose its rounds and reads nothing off its text: a number would be made up."""
    code, out, err = keyfed("train", "--data", corpus, "--dp", "epsilon=8", "--dry-run", *FLAGS)
    assert code == 0, err
    assert "recipe: train.cohort = " in out
    assert "to be read" not in out
    assert " 0 rounds" not in out


# Central training for comparison


def central_settings(out: Path) -> tuple[dict[str, object], str, float]:
    config, _ = read_run_toml(out / "central")
    return dict(config.options), config.train.schedule, config.train.final


def test_central_training_for_comparison_has_the_recipes_kind_of_optimiser(corpus, tmp_path):
    out = tmp_path / "run"
    config = settings(corpus, train_central=True)
    library.train(config, out)
    options, *over_rounds = central_settings(out)
    assert CENTRAL.items() <= options.items()
    assert over_rounds == ["cosine", 0.02]
    (out / "result.json").unlink()  # the same where the choice is read from run.toml
    shutil.rmtree(out / "central")
    library.train(config, out, resume=True)
    assert central_settings(out) == (options, *over_rounds)


@pytest.mark.parametrize("given", [{"optimiser": "adam"}, {"method": "fedavg", "train_cohort": 3}])
def test_with_settings_of_your_own_central_training_keeps_its_defaults(corpus, tmp_path, given):
    library.train(settings(corpus, train_central=True, **given), tmp_path / "run")
    options, *_ = central_settings(tmp_path / "run")
    assert (options["optimiser"], options["lr"], options["clip"]) == ("adam", 0.002, 1.0)


def test_central_training_that_has_begun_goes_on_with_its_own_options(corpus, tmp_path, monkeypatch):
    out, config = tmp_path / "run", settings(corpus, train_central=True)
    with monkeypatch.context() as before:  # a version that knew no such options
        before.setattr(pilot, "CENTRAL", {})
        began = library.train(config, out)
    for finished in (out, out / "central"):
        (finished / "result.json").unlink()
    result = library.train(config, out, resume=True)
    assert result["baselines"]["central"]["test"] == began["baselines"]["central"]["test"]
    assert central_settings(out)[0]["optimiser"] == "adam"


# Six notes of one person


@pytest.mark.parametrize("words", [5, 40, 300])
def test_six_notes_of_one_person_train(keyfed, tmp_path, words):
    text = ["milk", "and", "bread", "two", "lemons", "call", "my", "sister", "the", "garden", "before", "it", "rains"]
    folder = tmp_path / "notes"
    folder.mkdir()
    for k in range(6):
        lines = [" ".join(text[(k + n) % 7 :][: 4 + n % 5]) for n in range(words // 5)]
        (folder / f"note{k}.txt").write_text("\n".join(lines), "utf-8")
    arguments = flags(**{key: value for key, value in SMALL.items() if key != "data_window"})
    code, _, err = keyfed("train", "--data", folder, "--rounds", 2, "--out", tmp_path / "run", *arguments)
    if words == 5:  # thirty words in all: it is said what is missing, in one line
        assert code == 2
        assert "Traceback" not in err
        assert "give more text" in err
        return
    assert code == 0, err
    assert (tmp_path / "run/model.safetensors").exists()
    (tmp_path / "all.txt").write_text("\n".join(path.read_text("utf-8") for path in folder.iterdir()), "utf-8")
    code, _, err = keyfed("train", "--data", tmp_path / "all.txt", "--rounds", 2, "--out", tmp_path / "one", *arguments)
    assert code == 0, err
    assert read_run_toml(tmp_path / "one")[0].data.clients in (1, None, 0)


def test_an_extended_run_gives_the_new_reason_for_its_rounds(tmp_path):
    out, corpus = tmp_path / "run", write_corpus(tmp_path / "little", lines=6, more=1)
    few = SMALL | {"train_cohort": 3, "lr": 2.0}  # with a step given, no pilot
    library.train(library.configure(data=str(corpus), **few), out)
    config, made = read_run_toml(out)
    has = config.train.rounds
    chosen = dict(line.partition(" = ")[::2] for line in made["recipe"].split(pilot.BETWEEN))
    assert chosen["train.rounds"].startswith(f"{has}: the text is read ")
    result = library.train(library.configure(data=str(corpus), rounds=has + 2, **few), out, resume=True)
    extended = f"{has + 2}: extended from {has} rounds by --rounds"
    for said in (read_run_toml(out)[1]["recipe"], result["recipe"]["recipe"]):
        now = dict(line.partition(" = ")[::2] for line in said.split(pilot.BETWEEN))
        assert now == chosen | {"train.rounds": extended}  # and the others stay
    again = library.train(library.configure(data=str(corpus), rounds=has + 2, **few), out, resume=True)
    assert again["recipe"] == result["recipe"]


@pytest.mark.parametrize("named", [[], ["fedavg"]])
def test_the_same_command_goes_on_with_its_run(keyfed, corpus, tmp_path, monkeypatch, short_pilot, named):
    """As `make run` does: settings from a file and `--resume`, from the first time on."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.settings.toml"
    file.write_text("[train]\nrounds = 4\ncohort = 3\n")
    command = ["train", *named, "--data", corpus, "--config", file, "--resume", *FLAGS]
    for where in ([], ["--out", tmp_path / "other"]):
        for again in range(2):
            code, _, err = keyfed(*command, *where)
            assert code == 0, err
            assert ("is finished; nothing to do" in err) == bool(again)
    runs = [tmp_path / "other", *(tmp_path / "runs").iterdir()]
    assert len(runs) == 2
    for run in runs:
        result = json.loads((run / "result.json").read_text())
        assert (result["recipe"] is None) == bool(named)
    code, _, err = keyfed(*command, "--out", tmp_path / "other", "--rounds", 6)
    assert code == 0, err
    found = json.loads((tmp_path / "other" / "result.json").read_text())
    assert found["rounds"] == 6
    assert (found["recipe"] is None) == bool(named)
