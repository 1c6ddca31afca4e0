"""A wheel holds the page, the base model, the chat and the studies; a source archive all that a wheel of it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from keyfed.keyboard.serve import WEB
from keyfed.text.published import packaged_chat

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path) -> Path:
    """What a build reads, with a package of next to nothing."""
    folder = tmp_path / "project"
    keyboard = folder / "src" / "keyfed" / "keyboard"
    keyboard.mkdir(parents=True)
    shutil.copytree(WEB, keyboard / "web", ignore=shutil.ignore_patterns("vendor"))
    (keyboard / "web" / "vendor").mkdir()
    (keyboard / "web" / "vendor" / "ort.wasm").write_text("what an earlier version fetched")
    for name in ("pyproject.toml", "hatch_build.py", "first.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "studies", folder / "studies")
    (folder / "src" / "keyfed" / "model" / "base").mkdir(parents=True)
    (folder / "src" / "keyfed" / "model" / "base" / "manifest.json").write_text("{}")
    (folder / "src" / "keyfed" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    shutil.copytree(packaged_chat(), folder / "src" / "keyfed" / "text" / "chat")
    return folder


def build(project: Path, what: str = "wheel") -> subprocess.CompletedProcess:
    code = f"import hatchling.build as b; print(b.build_{what}('dist'))"
    return subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)


def test_a_wheel_holds_the_page_and_nothing_of_npm(project):
    pytest.importorskip("hatchling")
    done = build(project)
    assert done.returncode == 0, done.stderr
    (wheel,) = (project / "dist").glob("*.whl")
    names = ZipFile(wheel).namelist()
    page = [path.relative_to(WEB) for path in WEB.rglob("*") if path.is_file() and "vendor" not in path.parts]
    assert {f"keyfed/keyboard/web/{path.as_posix()}" for path in page} <= set(names)
    assert "keyfed/model/base/manifest.json" in names
    assert [name for name in names if "vendor" in name or "package" in name or name.endswith(".wasm")] == []
    assert {f"keyfed/text/chat/{name}" for name in ("chat.tsv.gz", "LICENSE", "ATTRIBUTION.md")} <= set(names)
    studies = [path.relative_to(ROOT) for path in (ROOT / "studies").rglob("*.toml")]
    assert {f"keyfed/{path.as_posix()}" for path in studies} <= set(names)


def test_a_source_archive_holds_all_that_a_wheel_of_it_needs(project):
    pytest.importorskip("hatchling")
    done = build(project, "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    studies = {path.relative_to(ROOT).as_posix() for path in (ROOT / "studies").rglob("*.toml")}
    assert {*studies, "first.toml", "hatch_build.py", "pyproject.toml"} <= names
