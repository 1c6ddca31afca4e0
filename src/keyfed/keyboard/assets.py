"""The page's runtime, three files of onnxruntime-web: fetched with npm by its lock file, verified, found again.

They are not in the repository. `make assets` and the wheel build put them into `web/vendor`, with the licence and a
manifest of their sums. Only the standard library is imported: `hatch_build.py` loads this file by its path, before the
package is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent / "web"
VENDOR = "vendor"
PACKAGE = "onnxruntime-web"
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
LICENCE, MANIFEST = "LICENSE.txt", "MANIFEST.json"
TERMS = Path(__file__).parent / "onnxruntime.LICENSE"  # the npm package lacks it
LOCKED = ("package.json", "package-lock.json")
NPM = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
MOST_SECONDS = 600


class AssetError(Exception):
    """The files could not be fetched: one line."""


def problem(web: Path = WEB) -> str | None:
    """Say what is wrong with the vendored files; None if they are those of the lock file, every byte of them."""
    folder = web / VENDOR
    try:
        said = json.loads((folder / MANIFEST).read_text("utf-8"))
        locked = _locked(web)
        if {key: said[key] for key in locked} != locked:
            return f"{folder} holds {PACKAGE} {said['version']}, the lock file says {locked['version']}"
        for name in (*FILES, LICENCE):
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != said["files"][name]:
                return f"{folder / name} is damaged"
    except FileNotFoundError as e:
        return f"{e.filename} is missing"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{folder / MANIFEST} is damaged ({type(e).__name__})"
    return None


def vendored(web: Path = WEB) -> Path:
    """Return the folder of the verified files.

    Raises:
      ConfigError: a file is missing or changed; says how to get it.
    """
    from keyfed.errors import ConfigError

    wrong = problem(web)
    if wrong:
        raise ConfigError(f"{wrong}; get the page's runtime with `make assets` (it needs npm), or install a wheel")
    return web / VENDOR


def fetch(web: Path = WEB) -> Path:
    """Install what the lock file says in a temporary folder and copy the three files; they appear all or not at all.

    Raises:
      AssetError: npm is not there or failed, or the package lacks a file.
    """
    npm = shutil.which(NPM[0])
    if npm is None:
        raise AssetError(f"npm is not installed, and the page's runtime ({PACKAGE}) is fetched with it")
    piped: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for name in LOCKED:
            shutil.copy(web / name, work / name)
        try:
            done = subprocess.run([npm, *NPM[1:]], cwd=work, timeout=MOST_SECONDS, check=False, **piped)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise AssetError(f"npm ci did not finish: {e}") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise AssetError(f"npm ci failed: {' · '.join(said[-3:]) or f'exit code {done.returncode}'}")
        return _take(work / "node_modules" / PACKAGE / "dist", web)


def _take(dist: Path, web: Path) -> Path:
    """Copy the files into `web/vendor` from a temporary folder next to it."""
    missing = [name for name in FILES if not (dist / name).is_file()]
    if missing:
        raise AssetError(f"{PACKAGE} has no {', '.join(missing)}; the page would not work")
    target, temporary = web / VENDOR, web / f".{VENDOR}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name in FILES:
            shutil.copyfile(dist / name, temporary / name)
        shutil.copyfile(TERMS, temporary / LICENCE)
        sums = {name: hashlib.sha256((temporary / name).read_bytes()).hexdigest() for name in (*FILES, LICENCE)}
        (temporary / MANIFEST).write_text(json.dumps({**_locked(web), "files": sums}, indent=1) + "\n", "utf-8")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _locked(web: Path) -> dict[str, Any]:
    """What the lock file says of the package: npm verifies what it fetches against the integrity."""
    lock = json.loads((web / "package-lock.json").read_text("utf-8"))
    entry = lock["packages"][f"node_modules/{PACKAGE}"]
    return {"package": PACKAGE, "version": entry["version"], "integrity": entry["integrity"]}


def main(web: Path = WEB) -> int:
    """Fetch the files unless they are there; what `make assets` runs. Return the exit code."""
    done = "at hand and verified"
    try:
        if problem(web) is not None:
            fetch(web)
            done = "fetched"
    except (AssetError, OSError) as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    sys.stdout.write(f"{web / VENDOR}: {PACKAGE} {_locked(web)['version']}, {done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
