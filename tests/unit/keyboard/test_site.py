"""A site of files: whole, relative, replaced only where it is ours; of a private run only what its export may hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from keyfed.errors import ConfigError, KeyfedError, RunError
from keyfed.keyboard import bundle, serve, site
from keyfed.keyboard.export import export_run
from keyfed.private.dp.statement import rule_for
from tests.unit.keyboard.conftest import needs_onnx

MOST = 4_000_000  # bytes of a site of the base model as a host sends them


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_every_file_is_listed_with_its_sum_and_the_rest_is_known(exported, tmp_path):
    written = site.write_site(exported, tmp_path / "site")
    found = contents(tmp_path / "site")
    said = site.listed(found[site.WORKER].decode())
    assert found.keys() == said["files"].keys() | {site.WORKER, site.HEADER_FILE}
    assert len(found) == written.files
    for path, entry in said["files"].items():
        assert (entry["bytes"], entry["sha256"]) == (len(found[path]), bundle.sha256(found[path]))
        assert entry["type"] == serve.type_of(path)
    assert said["headers"] == serve.HEADERS
    assert {path for path in found if path.startswith("model/")} == {
        f"model/{name}" for name in [bundle.MANIFEST, *bundle.read_manifest(exported)["files"]]
        if name not in site.NOT_READ
    }  # fmt: skip
    assert site.files_of_site(tmp_path / "site") == found.keys()
    headers = found[site.HEADER_FILE].decode()
    assert all(f"  {name}: {value}\n" in headers for name, value in serve.HEADERS.items())


def test_the_index_has_the_policy_and_no_address_begins_at_the_root(exported, tmp_path):
    site.write_site(exported, tmp_path / "site")
    index = (tmp_path / "site" / site.INDEX).read_text("utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', index)
    rules = serve.POLICY.split("; ")
    assert policy.split("; ") == [rule for rule in rules if rule != "frame-ancestors 'none'"]
    assert f'<meta name="service-worker" content="{site.WORKER}">' in index
    assert index.index("Content-Security-Policy") < min(index.index("<link"), index.index("<script"))
    assert re.findall(r'(?:href|src)="(?:/|https?:)', index) == []
    manifest = json.loads((tmp_path / "site" / "manifest.webmanifest").read_text("utf-8"))
    assert manifest["start_url"] == manifest["scope"] == "./"
    assert "id" not in manifest  # it is of the whole host: two sites on one would be one app
    assert all((tmp_path / "site" / icon["src"]).is_file() for icon in manifest["icons"])


def test_the_same_files_are_the_same_version_and_any_other_file_another(exported, web, tmp_path):
    (web / "index.html").write_text(f"<!doctype html>\n<html><head>\n{site.START}</head></html>\n")
    (web / site.WORKER).write_text("const SITE = {};\n")
    first = site.write_site(exported, tmp_path / "one", web)
    assert site.write_site(exported, tmp_path / "two", web).version == first.version
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    (web / "page.mjs").write_text("export const one = 2;\n")
    second = site.write_site(exported, tmp_path / "one", web)
    (web / site.WORKER).write_text("const SITE = {};\nself.x = 1;\n")
    third = site.write_site(exported, tmp_path / "one", web)
    assert len({first.version, second.version, third.version}) == 3


def test_an_earlier_site_is_replaced_and_what_is_not_of_it_stays(exported, tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()  # an empty one is taken
    site.write_site(exported, folder)
    worker = folder / site.WORKER
    said = site.listed(worker.read_text("utf-8"))
    (folder / "old.mjs").write_text("of an earlier version")
    (tmp_path / "outside.txt").write_text("not of the site")
    said["files"] |= {"old.mjs": {}, "../outside.txt": {}, "/etc/hosts": {}, "model/../../outside.txt": {}}
    worker.write_text(f"const SITE = {json.dumps(said)};\n")
    for name in ("CNAME", "notes.html"):
        (folder / name).write_text("the host's")
    site.write_site(exported, folder)
    assert not (folder / "old.mjs").exists()
    assert all((folder / name).exists() for name in ("CNAME", "notes.html"))
    assert (tmp_path / "outside.txt").exists()


def test_another_folder_is_refused_and_left_as_it_is(exported, tmp_path):
    for name, text in {
        "a": "mine",
        "b": "const SITE = {",
        "c": "const SITE = [];\n",
        "d": 'const SITE = {"x": 1};\n',
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / (site.WORKER if name != "a" else "photo.txt")).write_text(text)
        before = contents(folder)
        with pytest.raises(ConfigError, match="neither empty nor a site of `keyfed export --site`"):
            site.write_site(exported, folder)
        assert contents(folder) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="neither empty"):
        site.write_site(exported, tmp_path / "file")


def test_a_damaged_export_and_a_full_disk_leave_nothing(exported, tmp_path, monkeypatch):
    good = (exported / bundle.WEIGHTS).read_bytes()
    (exported / bundle.WEIGHTS).write_bytes(good[:-1])
    with pytest.raises(RunError, match=r"weights\.safetensors is damaged"):
        site.write_site(exported, tmp_path / "site")
    assert not (tmp_path / "site").exists()
    (exported / bundle.WEIGHTS).write_bytes(good)
    written = []

    def full(path, data, *, durable):
        if len(written) == 5:
            raise RunError(f"{path}: could not be written (No space left on device)")
        written.append(path)
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(site, "write_atomically", full)
        with pytest.raises(KeyfedError, match="No space left"):
            site.write_site(exported, tmp_path / "site")
    assert not (tmp_path / "site").exists()
    site.write_site(exported, tmp_path / "site")  # so that it can be tried again


def test_a_private_run_gives_what_its_export_may_hold_and_says_what_is_not_covered(exported, tmp_path):
    path = exported / bundle.MANIFEST
    manifest = json.loads(path.read_text())
    assert site.notes_on(manifest) == ()
    path.write_text(json.dumps({**manifest, "privacy": {"epsilon": 8}}))
    written = site.write_site(exported, tmp_path / "site")
    assert "vocabulary" in written.notes[0]
    assert "vocabulary" in site.site_text(written)
    for name in contents(tmp_path / "site"):
        rule = rule_for(name, "site")
        assert rule is not None, name
        assert "never" not in (rule.real, rule.simulated), name
    assert rule_for("model/curves.jsonl", "site") is None  # what a run has and a site has not


@needs_onnx
def test_a_site_of_the_base_model_is_small(tmp_path):
    written = site.write_site(export_run(Path("base"), tmp_path / "export").out, tmp_path / "site")
    assert 1_000_000 < written.gzipped < MOST
    assert written.bytes == sum(map(len, contents(tmp_path / "site").values()))


def test_from_the_command_line(keyfed, exported, tmp_path):
    folder = tmp_path / "public"
    code, out, err = keyfed("export", exported, "--site", folder, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["version"] == site.listed((folder / site.WORKER).read_text())["version"]
    code, out, _ = keyfed("export", exported, "--site", folder)
    assert code == 0
    assert str(folder) in out
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "photo.txt").write_text("mine")
    for arguments, said in [
        ((exported, "--site"), "requires an argument"),
        (("--site", folder), "Missing argument 'RUN'"),
        ((tmp_path / "nowhere", "--site", tmp_path / "x"), "is not a run folder"),
        ((run, "--site", tmp_path / "x"), "is not a run folder"),
        ((run, "--site", run / "x"), "lies in"),
        ((exported, "--site", tmp_path / "taken"), "neither empty nor a site"),
        ((exported, "--site", folder, "--out", tmp_path / "x"), "leave --out out"),
        ((exported, "--site", folder, "--base"), "leave --base out"),
    ]:
        code, _, err = keyfed("export", *arguments)
        assert code == 2, arguments
        assert said in err, arguments
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()
