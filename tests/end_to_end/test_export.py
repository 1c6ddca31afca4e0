"""From a trained run to an export and a running keyboard, by the command line."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import keyfed as library
from keyfed import system
from keyfed.cli import keyboard
from keyfed.keyboard import bundle, serve
from keyfed.keyboard.compact import unpack
from keyfed.run import base as base_module
from keyfed.run import loop as run_training
from keyfed.run.base import load_base
from tests.base_model import LICENCE, NAME, make_base
from tests.counting import count_run
from tests.end_to_end.test_extending import Bag, config_for


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page of one line in place of the real one."""
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>Keyboard</title>")
    monkeypatch.setattr(serve, "WEB", folder)
    monkeypatch.setattr(serve.make_app, "__defaults__", (folder,))
    return folder


@pytest.fixture
def served(monkeypatch):
    """Note what would be served instead of serving it for ever."""
    shown = []

    class Server:
        def __init__(self, app):
            self.app = app

        def run(self, sockets):
            shown.append(sockets[0].getsockname())

    monkeypatch.setattr(serve, "make_server", Server)
    return shown


def test_export_checks_real_text_and_ships_forms_and_ngrams(train_quietly, keyfed, corpus):
    for path in corpus.iterdir():
        path.write_text(path.read_text().replace("the union", "the Union"))
    only = corpus / "writer5.txt"  # who alone writes of the sea, and in a way of their own
    only.write_text(only.read_text().replace("our house", "our SeA"))
    run = train_quietly(rounds=1)
    code, stdout, stderr = keyfed("export", run, "--json")
    assert code == 0, stderr
    done = json.loads(stdout)
    assert (done["ngram"], "the run has no counts" in done["notes"][-1]) == (False, True)
    assert keyboard._exported(run) == run / "keyboard"
    count_run(run)
    assert keyboard._exported(run) == run / "keyboard"  # again, for there are counts now
    done = {**bundle.check_bundle(run / "keyboard"), "out": done["out"]}
    assert (done["counts"]["k"], done["counts"]["epsilon"], done["counts"]["mixture"]["order"]) == (3, None, 3)
    assert done["parity"]["text"] == "held-out text of corpus"
    assert done["parity"]["most"] <= 1e-4
    assert done["parity"]["top3_agreement"] == 1
    assert done["ngram"]
    out = Path(done["out"])
    assert bundle.check_bundle(out)["run"] == {**done["run"], "method": "fedavg", "data": "corpus", "rounds": 1}
    vocab, forms = bundle.load_vocab(out)
    assert forms == {"union": "Union"}
    table = unpack((out / "ngram.safetensors").read_bytes(), len(vocab), "file").model
    after = table.next(vocab.encode_context("the president"))
    assert vocab.words[int(np.argmax(after))] in ("sees", "helps", "follows", "remembers", "calls")
    everything = b"".join(p.read_bytes() for p in out.iterdir())
    assert str(corpus).encode() not in everything
    assert b"SeA" not in everything


def test_int8_is_smaller_and_says_how_alike(train_quietly, keyfed, tmp_path):
    run = train_quietly(rounds=1)
    code, _, _ = keyfed("export", run, "--fp32")
    assert code == 0
    code, stdout, _ = keyfed("export", run, "--out", tmp_path / "small")
    assert code == 0
    assert re.search(r"of the three words shown [\d.]+% are the same as in fp32", stdout)
    sizes = [(f / "weights.safetensors").stat().st_size for f in (run / "keyboard", tmp_path / "small")]
    assert sizes[1] < sizes[0]


def test_a_users_module_is_refused(corpus, tmp_path, keyfed):
    library.train(config_for(corpus), tmp_path / "run", module=Bag)
    code, _, stderr = keyfed("export", tmp_path / "run")
    assert code == 2
    assert "only the models of the package can be exported" in stderr


def test_keyboard_exports_what_is_missing_or_old_and_keeps_what_is_not(train_quietly, keyfed, page, served):
    run = train_quietly(rounds=1)
    code, stdout, stderr = keyfed("keyboard", run, "--port", 0, "--no-open")
    assert code == 0, stderr
    assert f"exporting {run}" in stderr
    assert stdout.startswith(f"http://127.0.0.1:{served[0][1]}/  types on {run / 'keyboard'}")
    stamp = (run / "keyboard" / "manifest.json").stat().st_mtime_ns
    assert keyfed("keyboard", run, "--port", 0)[0] == 0
    assert (run / "keyboard" / "manifest.json").stat().st_mtime_ns == stamp
    keyfed("export", run, "--fp32")
    other = train_quietly(rounds=2, name="other")
    (run / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    code, _, stderr = keyfed("keyboard", run, "--port", 0)
    assert (code, "trained since it was exported" in stderr) == (0, True)
    assert bundle.check_bundle(run / "keyboard")["precision"] == "fp32"  # as it was asked for before
    (run / "keyboard" / "vocab.json").write_text("{}")
    code, _, stderr = keyfed("keyboard", run, "--port", 0)
    assert (code, "vocab.json is damaged" in stderr) == (0, True)
    bundle.check_bundle(run / "keyboard")
    assert keyfed("keyboard", run / "keyboard", "--port", 0)[0] == 0  # an export is a keyboard by itself
    (run / "keyboard" / "vocab.json").write_text("{}")
    code, _, stderr = keyfed("keyboard", run / "keyboard", "--port", 0)
    assert code == 2
    assert stderr.startswith("error: ")
    assert "vocab.json is damaged" in stderr


@pytest.fixture(scope="module")
def small_base(tmp_path_factory):
    """A base model in small in place of the package's."""
    return make_base(tmp_path_factory.mktemp("made"))


def test_without_a_run_it_offers_the_base_model_at_once(
    train_quietly, keyfed, page, served, tmp_path, small_base, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_module, "FOLDER", small_base)
    monkeypatch.setattr(run_training, "train", lambda *given, **options: pytest.fail("trains"))
    shown = []
    monkeypatch.setattr(serve, "make_app", lambda folder, port: shown.append(bundle.check_bundle(folder)))
    for run in ((), ("base",)):
        code, stdout, stderr = keyfed("keyboard", *run, "--port", 0)
        assert code == 0, stderr
        assert "types on the base model" in stdout
        assert "exporting the base model" in stderr
    base = load_base(small_base)
    for manifest in shown:
        assert manifest["run"]["model_sha256"] == base.sha256
        assert (manifest["run"]["data"], manifest["precision"], manifest["reading"]) == (NAME, "int8", "lines")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    first = train_quietly(rounds=1, name="runs/first")
    monkeypatch.setattr(serve, "WEB", page)
    monkeypatch.setattr(serve, "page_files", lambda web: {})
    monkeypatch.setattr(serve, "make_app", lambda folder, port: shown.append(folder))
    monkeypatch.setattr(serve, "make_server", lambda app: SimpleNamespace(run=lambda sockets: None))
    assert keyfed("keyboard", "--port", 0)[0] == 0
    assert shown[-1] == first.relative_to(tmp_path) / "keyboard"


def test_the_base_model_is_exported_as_it_is(keyfed, tmp_path, small_base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base_module, "FOLDER", small_base)
    code, _, stderr = keyfed("export", "base")
    assert (code, "give --out" in stderr) == (2, True)
    base = load_base()
    for precision in ("fp32", "int8"):
        out = tmp_path / precision
        code, _, stderr = keyfed("export", "base", "--out", out, f"--{precision}")
        assert code == 0, stderr
        assert bundle.check_bundle(out)["run"]["start"] == {"from": "random"}
        assert bundle.load_vocab(out) == (base.trained.vocab, dict(base.forms))
        for name, value in bundle.load_weights(out).items():
            assert np.allclose(value, base.trained.params[name].numpy(), rtol=1e-6, atol=0), name


def test_an_export_says_which_start_its_run_had(train_quietly, keyfed, tmp_path, small_base, monkeypatch):
    monkeypatch.setattr(base_module, "FOLDER", small_base)
    own = {"model_embed": None, "model_hidden": None, "train_init": "base"}
    run = train_quietly(rounds=0, **own)
    code, stdout, stderr = keyfed("export", run, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["run"]["start"] == {
        "from": "base", "data": NAME, "licence": LICENCE, "sha256": load_base().sha256, "is_own": True,
    }  # fmt: skip
    second = train_quietly(rounds=0, name="second", model_embed=None, model_hidden=None, train_init=str(run))
    code, stdout, stderr = keyfed("export", second, "--json")
    assert code == 0, stderr
    start = json.loads(stdout)["run"]["start"]
    assert (start["from"], start["run"]) == ("run", "run")
    assert str(tmp_path) not in json.dumps(start)


def test_bad_input_is_one_line(keyfed, page, served, tmp_path, monkeypatch):
    def error(*arguments):
        code, _, stderr = keyfed(*arguments)
        assert code == 2
        assert len(stderr.splitlines()) == 1
        return stderr

    assert "is not a run folder" in error("keyboard", tmp_path / "nowhere", "--port", 0)
    assert "is not a run folder" in error("export", tmp_path / "nowhere")
    with serve.listen(0) as taken:
        assert "is taken; choose another with --port" in error("keyboard", tmp_path, "--port", taken.getsockname()[1])
    (page / "index.html").rename(page / "other.html")
    assert "install keyfed again" in error("keyboard", tmp_path)
    monkeypatch.setattr(system, "find_spec", lambda name: None)
    assert "pip install 'keyfed[keyboard]'" in error("keyboard", tmp_path)
    assert "pip install 'keyfed[keyboard]'" in error("export", tmp_path)


SERVE = """
import sys
from keyfed.cli import app as cli
from keyfed.keyboard import serve
from pathlib import Path
serve.WEB = Path(sys.argv.pop(1))
serve.make_app.__defaults__ = (serve.WEB,)
cli.main()
"""


def test_ctrl_c_ends_the_real_server(train_quietly, page):
    run = train_quietly(rounds=1)
    command = [sys.executable, "-c", SERVE, str(page), "keyboard", str(run), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/", line)[1])
        talk = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        talk.request("GET", "/model/manifest.json")
        assert json.loads(talk.getresponse().read())["format"] == 1
        talk.close()
        with pytest.raises(ConnectionRefusedError):  # any other address of this machine
            socket.create_connection(("127.0.0.2", port), timeout=5)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in stderr
    finally:
        process.kill()
        process.communicate()


def test_the_default_port_is_the_servers():
    from inspect import signature

    assert signature(keyboard.keyboard).parameters["port"].default == 8017
