"""Cases for the keyboard's JavaScript, answered by node; shared by the tests beside it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from keyfed.model.ngram import KneserNey

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed: the JavaScript side is not compared")

Case = dict[str, Any]


def answers(cases: Sequence[Case], script: str = "decoder_cases.mjs", **shared: object) -> list[Any]:
    """Run cases in one node process."""
    asked = json.dumps({"cases": list(cases), "shared": shared})
    path = Path(__file__).with_name(script)
    done = subprocess.run([NODE or "node", path], input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(cases)
    return list(found)


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


def ngram_file(model: KneserNey) -> bytes:
    tensors = {}
    for n, level in enumerate(model.levels, 1):
        tensors[f"n{n}.start"] = level.start.astype(np.int32)
        tensors[f"n{n}.words"] = (level.keys % model.vocab_size).astype(np.int32)
        tensors[f"n{n}.prob"] = level.prob.astype(np.float32)
        tensors[f"n{n}.backoff"] = level.backoff[:-1].astype(np.float32)
    return bytes(save(tensors))
