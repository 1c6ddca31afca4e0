"""What pip has installed, against the SHA-256 sums in hashes.txt.

    python check_hashes.py REPORT          check the report that `pip install --report REPORT` wrote; `make setup` does
    python check_hashes.py --write INDEX   write hashes.txt from constraints.txt and the /simple pages of an index

pip's own `--require-hashes` takes neither an editable install nor a build of torch from elsewhere (its CPU builds have
other sums than those on the index). So pip installs by constraints.txt and says what it fetched, and this compares.
Only the standard library is used: it runs before anything else is trusted.
"""

from __future__ import annotations

import html
import json
import re
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
# Builds for a CPU and for each CUDA have sums of their own, and come from other places than the index.
NOT_CHECKED = {"torch"}
OLD = re.compile(r"-(cp2\d*|cp3[0-9]|cp310|pp\d+|py2|graalpy\w*)-(?!abi3-)")  # Keyfed needs Python 3.11


def name_of(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, tuple[str, set[str]]]:
    """Return version and sums of each package in constraints.txt or hashes.txt.

    Example:
      >>> read_pins("A_b==1.0 --hash=sha256:00ff")
      {'a-b': ('1.0', {'00ff'})}
    """
    found: dict[str, tuple[str, set[str]]] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if "==" in line and not line.startswith("#"):
            pin, *sums = line.split()
            name, _, version = pin.partition("==")
            found[name_of(name)] = version, {s.removeprefix("--hash=sha256:") for s in sums}
    return found


def problems(report: dict[str, object], pins: dict[str, tuple[str, set[str]]]) -> tuple[list[str], list[str]]:
    """Return what is not as it was pinned, and the names of packages that are not pinned at all."""
    wrong, unknown = [], []
    for item in report["install"]:  # type: ignore[attr-defined]
        name, version = name_of(item["metadata"]["name"]), item["metadata"]["version"]
        archive = item["download_info"].get("archive_info")
        if archive is None or name in NOT_CHECKED:  # a folder: Keyfed itself
            continue
        got = (archive.get("hashes") or {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
        if name not in pins:
            unknown.append(name)
        elif version != pins[name][0] or got not in pins[name][1]:
            wrong.append(f"{name} {version} has the SHA-256 {got or 'of nothing'}, which is not in hashes.txt")
    return wrong, unknown


def sums_of(page: str, name: str, version: str) -> list[str]:
    """Return the sums of a version's files on a /simple page, those for older Pythons left out."""
    found = []
    for target, file in re.findall(r'<a[^>]*href="([^"]*)"[^>]*>([^<]*)</a>', page):
        file = html.unescape(file).strip()
        wheel = file.split("-")[:2] if file.endswith(".whl") else None
        its = wheel or re.sub(r"\.(tar\.gz|zip)$", "", file).rsplit("-", 1)
        digest = re.search(r"#sha256=([0-9a-f]{64})", target)
        if digest and [name_of(its[0]), *its[1:]] == [name, version] and not OLD.search(file):
            found.append(digest[1])
    return sorted(set(found))


def write(index: str) -> None:
    """Write hashes.txt."""
    lines = ["# Written by check_hashes.py from constraints.txt: the files of each version for Python 3.11 and later."]
    for name, (version, _) in sorted(read_pins((HERE / "constraints.txt").read_text()).items()):
        if name in NOT_CHECKED:
            continue
        with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as reply:
            sums = sums_of(reply.read().decode(), name, version)
        if not sums:
            raise SystemExit(f"{name} {version}: the index has no file of it")
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{s}" for s in sums)]))
    (HERE / "hashes.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Check a report, or write hashes.txt."""
    if sys.argv[1] == "--write":
        write(sys.argv[2])
        return
    pins = read_pins((HERE / "hashes.txt").read_text())
    wrong, unknown = problems(json.loads(Path(sys.argv[1]).read_text()), pins)
    if unknown:
        print(f"not in hashes.txt, and not checked: {', '.join(sorted(unknown))}")
    if wrong:
        raise SystemExit(
            "; ".join(wrong) + "; look at where pip gets its files from. An index that builds files itself has other "
            "sums: `make setup HASHES=no` leaves this check out"
        )


if __name__ == "__main__":
    main()
