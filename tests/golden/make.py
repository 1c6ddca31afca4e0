"""Freeze what the golden tests compare: `python tests/golden/make.py` from the root of the repository.

It prints what changed. Run it only where a change of results or formats is intended, and say in the commit why. The
samples of old versions (`samples/`) are not made again: they stay what that version wrote.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden import formats, runs, transcript


def main() -> None:
    """Write theta.json, formats.json and transcript.json; print the names of what is new, gone or different."""
    with tempfile.TemporaryDirectory() as folder:
        bench = runs.Bench.make(Path(folder) / "bench")
        found = {name: bench.outcome(name, settings) for name, settings in runs.cases().items()}
        found |= {name: bench.federated(name) for name in runs.federations()}
        personal = bench.personal()
    _write(runs.THETA, {runs.MACHINE: runs.machine(), runs.PERSONAL: personal, **found})
    with tempfile.TemporaryDirectory() as folder:
        _write(formats.FORMATS, formats.collect(Path(folder)))
    _write(transcript.TRANSCRIPT, transcript.make())


def _write(path: Path, found: dict[str, object]) -> None:
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name in dict.fromkeys([*before, *found]):
        if before.get(name) != found.get(name):
            what = "new" if name not in before else "gone" if name not in found else "changed"
            print(f"{path.name}: {what:7} {name}")
            if what == "changed":
                print(f"    was {str(before[name])[:100]}\n    is  {str(found[name])[:100]}")
    lines = [
        f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for name, v in found.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{path.name}: {len(found)} entries, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
