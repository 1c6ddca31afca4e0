"""Samples: what a version of Keyfed left on the disk, one archive each, small, with keys made for these tests only.

`python tests/golden/samples.py VERSION` writes those of the code as it is to `samples/VERSION`. It refuses to replace
any: a sample stays what its version wrote. Where a format changes, add the samples of a new version beside the old.
"""

from __future__ import annotations

import datetime
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))

import keyfed  # noqa: E402
from keyfed.deploy.certificates import make_certificates  # noqa: E402
from keyfed.deploy.enrolment import enrol, read_enrolment, write_enrolment  # noqa: E402
from keyfed.deploy.homes import open_home  # noqa: E402
from keyfed.deploy.superlink import ServerHome  # noqa: E402
from keyfed.keyboard.export import export_run  # noqa: E402
from tests.faults.private import deploy, private_config  # noqa: E402
from tests.faults.private import enrol as enrolled  # noqa: E402
from tests.golden.runs import PRIVATE, SECURE, TINY, digest, one_thread, write_corpus  # noqa: E402
from tests.listeners import Heard  # noqa: E402

SAMPLES = HERE / "samples"
ROOT = HERE.parents[1]
STUDY = "next-character"  # whose cell is a sample
PLACE = "/golden/corpus"  # stands in run.toml and result.json for the folder of the corpus
SMALL = {**TINY, "model": "gru", "model_embed": 4, "model_hidden": 4, "train_eval_every": 1}
RUNS: dict[str, dict[str, Any]] = {
    "finished": {"train_baselines": True},
    "interrupted": {"method": "fednesterov", "upload_keep": 0.5, "train_average": 0.5},
    "interrupted-duals": {"method": "fedadmm"},
    "interrupted-private": {**PRIVATE, **SECURE},
}
ROUNDS, STOP_AFTER = 4, 2


class Stop:
    """A listener that stops the run after a round."""

    def say(self, line: str) -> None: ...

    def start(self, what: str, rounds: int, done: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] == STOP_AFTER:
            raise KeyboardInterrupt


def configure(name: str, corpus: Path) -> Any:
    """The configuration of a sample run."""
    given = {**SMALL, **RUNS[name]}
    method = given.pop("method", "fedavg")
    return keyfed.configure(method, data=str(corpus), rounds=ROUNDS, **given)


def unpack(version: str, name: str, out: Path, corpus: Path | None = None) -> Path:
    """Unpack a sample; run.toml then says where its corpus is."""
    with tarfile.open(SAMPLES / version / f"{name}.tar.xz") as archive:
        archive.extractall(out, filter="data")
    for path in (*out.rglob("run.toml"), *out.rglob("result.json")) if corpus is not None else ():
        path.write_text(path.read_text("utf-8").replace(PLACE, str(corpus)), "utf-8")
    return out / name


def _pack(folder: Path, out: Path, corpus: Path | None = None) -> None:
    """Pack a folder without names, times or places of this machine."""
    for path in (*folder.rglob("run.toml"), *folder.rglob("result.json")) if corpus is not None else ():
        text = path.read_text("utf-8").replace(str(corpus), PLACE)
        path.write_text(text.replace(str(corpus.parent), str(Path(PLACE).parent)), "utf-8")

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    out.parent.mkdir(parents=True, exist_ok=True)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz") as archive:
        archive.add(folder, arcname=out.name.removesuffix(".tar.xz"), filter=plain)
    out.write_bytes(made.getvalue())


def make(version: str, work: Path) -> None:
    """Write the samples of the code as it is."""
    out = SAMPLES / version
    if out.exists():
        raise SystemExit(f"{out} is there: a sample stays what its version wrote; name another version")
    corpus = write_corpus(work / "corpus")
    about: dict[str, Any] = {"keyfed": keyfed.__version__, "theta": {}}
    for name in RUNS:
        with one_thread():
            keyfed.train(configure(name, corpus), work / "whole" / name)
            if name != "finished":
                with pytest.raises(KeyboardInterrupt):
                    keyfed.train(configure(name, corpus), work / name, listener=Stop())
        whole = keyfed.load_model(work / "whole" / name)
        about["theta"][name] = digest(whole.params)
    about["suggested"] = keyfed.suggest(keyfed.load_model(work / "whole" / "finished"), "the old")
    exported = export_run(work / "whole" / "finished", work / "export", int8=False)
    about["exported"] = sorted(exported.manifest)
    shutil.move(work / "whole" / "finished", work / "finished")
    for name in RUNS:
        _pack(work / name, out / f"{name}.tar.xz", corpus)
    _pack(work / "export", out / "export.tar.xz")
    cell = min((ROOT / "docs" / "results" / "data" / STUDY).glob("*.json"))
    (out / STUDY).mkdir()
    shutil.copyfile(cell, out / STUDY / cell.name)
    about["homes"] = _homes(work / "federation", out)
    (out / "about.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _homes(work: Path, out: Path) -> dict[str, Any]:
    """Homes of a server and of an enrolled client that has taken part in a private run with masked sums."""
    config = private_config(work, clients=4, secure=True, rounds=2, privacy={"noise": 0.5})
    server = ServerHome(work / "server")
    make_certificates(server.path, [], now=datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))
    home = open_home(work / "clients" / "client-1", name="client-1", server="127.0.0.1:9092", ca=server.ca,
                     when="idle,power", keep_days=30, limits={"epsilon": 500.0})  # fmt: skip
    given = read_enrolment(write_enrolment(home).read_bytes())
    enrol(server, [given], lambda commands: [f"SuperNode {7001 + n} registered." for n, _ in enumerate(commands)])
    transport, roster = enrolled(work, 4)
    with pytest.raises(KeyboardInterrupt):  # clients keep what belongs to a run until it says goodbye
        deploy(work, config, transport, roster, listener=Heard(1))
    shutil.copytree(home.path, work / "client")
    _pack(work / "client", out / "client.tar.xz")
    _pack(server.path, out / "server.tar.xz")
    return {"identity": given.identity.hex(), "node_key": given.node_sum}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(sys.argv[1], Path(folder))
