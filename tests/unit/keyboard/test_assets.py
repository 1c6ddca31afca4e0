"""The page's runtime: found only whole, fetched all or not at all, packed into the wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest

from keyfed.errors import ConfigError
from keyfed.keyboard import assets
from keyfed.text.published import packaged_chat

ROOT = Path(__file__).parents[3]
NPM = """#!{python}
import os, pathlib, sys
assert sys.argv[1:3] == ["ci", "--ignore-scripts"], sys.argv
assert pathlib.Path("package-lock.json").is_file()
if os.environ.get("FAIL"):
    sys.exit("npm error: the network is down")
dist = pathlib.Path("node_modules/onnxruntime-web/dist")
dist.mkdir(parents=True)
for name in {files}:
    (dist / name).write_text(name)
(dist / "ort.all.js").write_text("not wanted")
"""


def fake_npm(folder: Path, monkeypatch, files=assets.FILES) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(NPM.format(python=sys.executable, files=list(files)))
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_lock_file_pins_one_version_and_names_no_registry():
    package = json.loads((assets.WEB / "package.json").read_text())
    text = (assets.WEB / "package-lock.json").read_text()
    lock = json.loads(text)["packages"]
    assert package["dependencies"] == {"onnxruntime-web": "1.30.0"}
    assert lock["node_modules/onnxruntime-web"]["version"] == "1.30.0"
    assert "resolved" not in text
    assert "http" not in text
    assert all(entry["integrity"].startswith("sha512-") for name, entry in lock.items() if name)


def test_whole_files_are_found_and_what_is_wrong_is_one_line(web):
    assert assets.vendored(web) == web / "vendor"
    for name in (*assets.FILES, assets.LICENCE):
        path = web / "vendor" / name
        whole = path.read_bytes()
        path.write_bytes(whole + b" ")
        with pytest.raises(ConfigError, match=rf"{name} is damaged; get the page's runtime with `make assets`"):
            assets.vendored(web)
        path.unlink()
        with pytest.raises(ConfigError, match=rf"{name} is missing; .*make assets"):
            assets.vendored(web)
        path.write_bytes(whole)
    for text in ("", "[]", "{}"):
        (web / "vendor" / "MANIFEST.json").write_text(text)
        assert "MANIFEST.json is damaged" in (assets.problem(web) or "")


def test_another_version_in_the_lock_file_means_fetching_again(web):
    text = (web / "package-lock.json").read_text()
    (web / "package-lock.json").write_text(text.replace("9.9.9", "9.9.10"))
    assert assets.problem(web) == f"{web / 'vendor'} holds onnxruntime-web 9.9.9, the lock file says 9.9.10"


def test_fetching_copies_the_three_files_and_the_licence(web, tmp_path, monkeypatch):
    shutil.rmtree(web / "vendor")
    fake_npm(tmp_path / "bin", monkeypatch)
    assets.fetch(web)
    assert assets.problem(web) is None
    expected = sorted([*assets.FILES, "LICENSE.txt", "MANIFEST.json"])
    assert sorted(p.name for p in (web / "vendor").iterdir()) == expected
    assert "Copyright (c) Microsoft Corporation" in (web / "vendor" / "LICENSE.txt").read_text()
    assert not (web / "node_modules").exists()


def test_a_failure_leaves_what_was_there(web, tmp_path, monkeypatch):
    before = {p: p.read_bytes() for p in (web / "vendor").iterdir()}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(assets.AssetError, match="npm is not installed"):
        assets.fetch(web)
    fake_npm(tmp_path / "bin", monkeypatch, assets.FILES[:2])
    with pytest.raises(assets.AssetError, match=r"has no ort-wasm-simd-threaded\.wasm"):
        assets.fetch(web)
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(assets.AssetError, match=r"npm ci failed: npm error: the network is down"):
        assets.fetch(web)
    assert {p: p.read_bytes() for p in (web / "vendor").iterdir()} == before
    assert not [p for p in web.iterdir() if p.name.startswith(".")]


def test_what_make_assets_says(web, tmp_path, monkeypatch, capsys):
    assert assets.main(web) == 0
    assert capsys.readouterr().out.endswith("onnxruntime-web 9.9.9, at hand and verified\n")
    shutil.rmtree(web / "vendor")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert assets.main(web) == 2
    assert capsys.readouterr().err.startswith("error: npm is not installed")
    fake_npm(tmp_path / "bin", monkeypatch)
    assert assets.main(web) == 0
    assert capsys.readouterr().out.endswith("fetched\n")


@pytest.fixture
def project(tmp_path) -> Path:
    """What a build reads, with a package of next to nothing."""
    folder = tmp_path / "project"
    keyboard = folder / "src" / "keyfed" / "keyboard"
    (keyboard / "web").mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "first.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "studies", folder / "studies")
    (folder / "src" / "keyfed" / "model" / "base").mkdir(parents=True)
    (folder / "src" / "keyfed" / "model" / "base" / "manifest.json").write_text("{}")
    (folder / "src" / "keyfed" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    for path in (Path(assets.__file__), assets.TERMS):
        shutil.copy(path, keyboard / path.name)
    for name in assets.LOCKED:
        shutil.copy(assets.WEB / name, keyboard / "web" / name)
    shutil.copytree(packaged_chat(), folder / "src" / "keyfed" / "text" / "chat")
    return folder


def build(project: Path, what: str = "wheel") -> subprocess.CompletedProcess:
    code = f"import hatchling.build as b; print(b.build_{what}('dist'))"
    return subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)


def test_a_wheel_holds_the_runtime(project, tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    fake_npm(tmp_path / "bin", monkeypatch)
    done = build(project)
    assert done.returncode == 0, done.stderr
    (wheel,) = (project / "dist").glob("*.whl")
    names = ZipFile(wheel).namelist()
    vendor = [f"keyfed/keyboard/web/vendor/{name}" for name in (*assets.FILES, "LICENSE.txt", "MANIFEST.json")]
    assert {*vendor, "keyfed/model/base/manifest.json", "keyfed/keyboard/web/package-lock.json"} <= set(names)
    assert {f"keyfed/text/chat/{name}" for name in ("chat.tsv.gz", "LICENSE", "ATTRIBUTION.md")} <= set(names)
    studies = [path.relative_to(ROOT) for path in (ROOT / "studies").rglob("*.toml")]
    assert {f"keyfed/{path.as_posix()}" for path in studies} <= set(names)
    ZipFile(wheel).extractall(tmp_path / "installed")
    assert assets.problem(tmp_path / "installed" / "keyfed" / "keyboard" / "web") is None


def test_a_source_archive_holds_all_that_a_wheel_of_it_needs(project):
    pytest.importorskip("hatchling")
    done = build(project, "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    studies = {path.relative_to(ROOT).as_posix() for path in (ROOT / "studies").rglob("*.toml")}
    assert {*studies, "first.toml", "hatch_build.py", "pyproject.toml"} <= names


def test_no_wheel_without_npm(project, tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = build(project)
    assert done.returncode != 0
    assert "no wheel without the keyboard page's runtime: npm is not installed" in done.stderr
    assert not list(project.glob("dist/*.whl"))


def test_an_editable_install_goes_on_with_a_warning_and_never_runs_npm(project, tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    fake_npm(tmp_path / "bin", monkeypatch)
    spec = spec_from_file_location("hatch_build", project / "hatch_build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    said = []
    app = SimpleNamespace(display_warning=said.append)
    hook = module.CustomBuildHook(str(project), {}, None, None, "", "wheel", app)
    hook.initialize("editable", {})
    assert len(said) == 1
    assert "MANIFEST.json is missing: `keyfed keyboard` will ask for `make assets`" in said[0]
    assert not (project / "src" / "keyfed" / "keyboard" / "web" / "vendor").exists()
