"""docs/own-data.md as it is printed: its commands give what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"


def test_the_page_shows_what_its_commands_print(keyfed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = 0
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        for step in block.split("$ ")[1:]:
            command, _, shown = step.partition("\n")
            if command.startswith("keyfed "):
                code, out, err = keyfed(*shlex.split(command)[1:])
                assert (code, err) == (0, "")
                assert out == shown
                ran += 1
            else:
                subprocess.run(command, shell=True, check=True)  # the page's own printf
    assert ran == 2
