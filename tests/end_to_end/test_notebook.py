"""Keyfed from a notebook: text in memory, results that are looked at, functions that listen, code of one's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import keyfed as api
from keyfed.engine import workers
from keyfed.errors import ConfigError, RunError
from keyfed.federated.methods import METHODS, method
from keyfed.federated.types import Method
from keyfed.run import plan
from keyfed.run.folder import open_folder
from tests.end_to_end.conftest import Bag

TINY = {
    "model": "cifg", "model_embed": 8, "model_hidden": 12, "data_vocab": 60, "data_window": 8, "train_cohort": 3,
    "train_workers": 1, "train_valid_tokens": 300, "train_test_tokens": 300,
}  # fmt: skip


@pytest.fixture
def messages(corpus) -> dict[str, list[str]]:
    return {path.stem: path.read_text("utf-8").splitlines() for path in sorted(corpus.iterdir())}


def test_at_most_25_public_names_which_complete():
    assert len(api.__all__) <= 25
    assert set(api.__all__) <= set(dir(api))


def test_a_run_on_text_in_memory_and_what_a_notebook_does_with_it(messages, tmp_path, capfd):
    heard = []
    config = api.configure("fedavg", data=messages, rounds=2, lr=0.01, **TINY)
    result = api.train(config, tmp_path / "run", listener=heard.append)
    assert [record["round"] for record in heard] == [1, 2]
    assert "round    2" in capfd.readouterr().err  # progress, besides the function
    assert not any(line in text for text in map(str, tmp_path.rglob("*")) for line in messages["writer0"])

    assert result.perplexity == result["test"]["perplexity"]
    assert [one.round for one in result.history] == [1, 2]
    assert result.history[1].perplexity == heard[1]["valid"]["perplexity"]
    assert result.history[0].clients == 3
    assert json.loads(json.dumps(result)) == json.loads((tmp_path / "run/result.json").read_text("utf-8"))
    assert len(result.suggest("the president")) == 3
    assert repr(result).startswith("<fedavg on in-memory-")
    axes = result.plot().axes[0]
    assert list(axes.lines[0].get_xdata()) == [1, 2]
    assert "perplexity" in result.report()
    assert (tmp_path / "run/report.html").exists()
    pandas = pytest.importorskip("pandas")
    frame = result.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["perplexity"].tolist() == [one.perplexity for one in result.history]

    pairs = [(author, line) for author, lines in messages.items() for line in lines]
    again = api.configure("fedavg", data=pairs, rounds=3, lr=0.01, **TINY)
    longer = api.train(again, tmp_path / "run", resume=True, quiet=True)
    assert (longer["rounds"], capfd.readouterr().err) == (3, "")


def test_frames_are_optional(messages, tmp_path, monkeypatch):
    config = api.configure("fedavg", data=messages, rounds=1, train_baselines=False, **TINY)
    result = api.train(config, tmp_path / "run", quiet=True)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install pandas; `.history` has the same rows"):
        result.to_frame()


class Said:
    """Half a listener."""

    def __init__(self) -> None:
        self.lines = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_half_a_listener_listens_and_what_is_none_is_said(messages, tmp_path):
    said = Said()
    config = api.configure("fedavg", data=messages, rounds=1, train_baselines=False, **TINY)
    api.train(config, tmp_path / "run", quiet=True, listener=said)
    assert any("vocabulary" in line for line in said.lines)
    with pytest.raises(ConfigError, match=r"listener is a int; expected a function of a round's record"):
        api.train(config, tmp_path / "other", listener=3)
    with pytest.raises(ConfigError, match=r"config is a str; expected what keyfed.configure\(\) returns"):
        api.train("fedavg", tmp_path / "other")


def test_methods_and_modules_of_ones_own_are_compared_and_tuned(messages, tmp_path):
    ours = api.METHODS["fedavg"](lr=0.01)
    mine = Method("mine", ours.solver, ours.mediator, ours.server, ours.batch_size, ours.epochs)
    settings = {**TINY, "rounds": 1, "quiet": True, "lr": 0.01}
    found = api.compare(["fedavg", mine], data=messages, out=tmp_path / "compared", **settings)
    assert sorted(row["method"] for row in found.table) == ["fedavg", "mine"]
    assert found.table[0]["perplexity"] == found.table[1]["perplexity"]  # the same method by two names
    assert found.verdict
    assert (tmp_path / "compared/report.html").exists()
    assert list(found.to_frame().index) == [row["method"] for row in found.table]
    with pytest.raises(ConfigError, match='method "mine" is given twice'):
        api.compare([mine, mine], data=messages, **settings)
    with pytest.raises(ConfigError, match="a method to compare is a int"):
        api.compare([3], data=messages, **settings)
    with pytest.raises(ConfigError, match="methods is a str; expected a list"):
        api.compare("fedavg", data=messages, **settings)

    own = {key: value for key, value in settings.items() if key not in ("model", "model_embed", "model_hidden")}
    found = api.compare(["fedavg"], data=messages, module=Bag, out=tmp_path / "bags", **own)
    assert found["model"].endswith("Bag")
    own.pop("quiet")
    config = api.configure("fedavg", data=messages, **own)
    found = api.tune(config, tmp_path / "tuned", search=["lr=0.01,0.1"], trials=2, quiet=True, module=Bag)
    assert found["finished"]
    assert found["best"]


def test_a_method_that_was_written_in_a_notebook_trains_in_one_process(monkeypatch):
    try:

        @method()
        def noted(*, lr: float = 1.0) -> Method:
            """Note: a method."""
            return api.METHODS["fedavg"](lr=lr)

        assert plan._only_here("noted") is None
        monkeypatch.setattr(METHODS["noted"].build, "__module__", "__main__")
        monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
        assert plan._only_here("noted") == "noted"
        assert plan._only_here("fedavg") is None
    finally:
        METHODS.pop("noted", None)


def test_a_worker_that_would_train_ends_with_a_code_that_is_explained(messages, monkeypatch, tmp_path):
    monkeypatch.setattr(workers.mp.current_process(), "_inheriting", True, raising=False)
    for start in (lambda: api.train(None, "run"), lambda: api.compare([]), lambda: api.tune(None, "run")):
        with pytest.raises(SystemExit) as end:
            start()
        assert end.value.code == workers.UNGUARDED
    pool = workers.WorkerPool(None, 1)
    pool._pipes, pool._processes = ["pipe"], [SimpleNamespace(join=lambda timeout: None, exitcode=end.value.code)]
    died = pool._died("pipe")
    assert 'under `if __name__ == "__main__":`' in str(died)
    for fresh in (True, False):  # what was there before stays
        folder = tmp_path / "run"
        with pytest.raises(RunError, match="__main__"), open_folder(folder, resume=not fresh):
            raise _begun(folder, died)
        assert folder.exists() != fresh
        folder.mkdir(exist_ok=True)


def _begun(folder: Path, error: RunError) -> RunError:
    (folder / "run.toml").write_text("")
    return error


def test_what_is_given_for_another_thing_is_one_sentence():
    with pytest.raises(ConfigError, match="did you mean cifg"):
        api.configure(model="ciffg")
    with pytest.raises(ConfigError, match=r"keyfed\.load_model\(RUN\)"):
        api.suggest("runs/mine", "a")


@pytest.mark.slow
def test_a_program_without_a_guard_is_said_what_is_missing(corpus, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import keyfed\n"
        f"config = keyfed.configure('fedavg', data={str(corpus)!r}, rounds=1, train_baselines=False, "
        f"**{dict(TINY, train_workers=2)!r})\n"
        f"keyfed.train(config, {str(tmp_path / 'run')!r}, quiet=True)\n",
        "utf-8",
    )
    source = str(Path(api.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith(RunError.__module__ + ".RunError: a worker process imports the program")
    assert 'if __name__ == "__main__":' in last
    assert done.stderr.count("Traceback") == 1  # the program's own


def test_the_first_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n# first_run.py\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "first_run.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("'") == 6
