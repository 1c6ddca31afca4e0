"""Cases for the keyboard's JavaScript, answered by one node process a script; shared by the tests of this folder."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest

from keyfed.keyboard.keys import table

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed: the keyboard's decoder cannot run")

Case = dict[str, Any]
K = SimpleNamespace(**table("constants"))  # the decoder's numbers


class Node:
    """A process that takes lists of cases, a line each, for as long as the tests run."""

    def __init__(self, script: str) -> None:
        self.said = TemporaryFile()  # noqa: SIM115 – open for as long as the process runs
        path, pipe = Path(__file__).with_name(script), subprocess.PIPE
        self.process = subprocess.Popen([NODE or "node", path], stdin=pipe, stdout=pipe, stderr=self.said)
        weakref.finalize(self, self.process.kill)

    def answers(self, asked: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            node.cache_clear()  # the next case gets another process
            self.said.seek(0)
            raise AssertionError(self.said.read().decode()[-2000:])
        return json.loads(line)


@cache
def node(script: str) -> Node:
    return Node(script)


def answers(cases: Sequence[Case], script: str = "decoder_cases.mjs", **shared: object) -> list[Any]:
    """Answer cases by a script of this folder; those of one call share what is given by name."""
    found = node(script).answers({"cases": list(cases), "shared": shared})
    assert len(found) == len(cases)
    return list(found)


def called(name: str, *arguments: Any) -> Any:
    """Return what an exported function of a module says, `module.function`; the decoder's numbers are its last one."""
    return called_all(name, [arguments])[0]


def called_all(name: str, every: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what the function says to each of several arguments."""
    module, function = name.split(".")
    return answers([{"op": "call", "module": module, "name": function, "given": list(one)} for one in every])


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Browser:
    """Clients of secure sums in JavaScript (`secure_cases.mjs`), in one node process."""

    def __init__(self):
        script = Path(__file__).with_name("secure_cases.mjs")
        started = [NODE or "node", str(script)]
        self._node = subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, op, **given):
        self._node.stdin.write(json.dumps({"op": op, **given}) + "\n")
        self._node.stdin.flush()
        return json.loads(self._node.stdout.readline())

    def __call__(self, op, **given):
        answer = self.ask(op, **given)
        assert "value" in answer, answer
        return answer["value"]

    def close(self):
        self._node.communicate(timeout=30)
