"""Another Python process, in which some libraries cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

BEYOND_TRAINING = ("cryptography", "dp_accounting", "flwr", "matplotlib", "onnx", "onnxruntime", "rich", "scipy",
                   "sklearn", "starlette", "typer", "uvicorn")  # fmt: skip
"""What a machine with torch, numpy and safetensors alone does not have."""

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {libraries!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without(
    libraries: Iterable[str], program: str, *arguments: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has not these libraries; it must succeed."""
    command = [sys.executable, "-c", ABSENT.format(libraries=set(libraries)) + program, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done
