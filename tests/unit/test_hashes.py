"""What pip fetched is compared with hashes.txt."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("check_hashes", ROOT / "check_hashes.py")
check_hashes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_hashes)
PINS = {"a-b": ("1.0", {"00", "ff"})}


def item(name, version, digest, **more):
    info = more or {"archive_info": {"hash": f"sha256={digest}", "hashes": {"sha256": digest}}}
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": "x", **info}}


@pytest.mark.parametrize(
    ("one", "wrong", "unknown"),
    [
        (item("A_b", "1.0", "ff"), 0, []),
        (item("a.b", "1.0", "fe"), 1, []),
        (item("a-b", "1.1", "ff"), 1, []),
        (item("a-b", "1.0", "", archive_info={}), 1, []),
        (item("a-b", "1.0", "", archive_info={"hash": "sha256=ff"}), 0, []),
        (item("keyfed", "0.1", "", dir_info={"editable": True}), 0, []),
        (item("torch", "2.13.0+cpu", "fe"), 0, []),
        (item("nvidia-x", "1", "fe"), 0, ["nvidia-x"]),
    ],
)
def test_a_sum_that_is_not_pinned_is_found(one, wrong, unknown):
    found = check_hashes.problems({"install": [one]}, PINS)
    assert (len(found[0]), found[1]) == (wrong, unknown)


def test_every_pin_has_its_sums_and_torch_alone_has_none():
    pins = check_hashes.read_pins((ROOT / "constraints.txt").read_text())
    sums = check_hashes.read_pins((ROOT / "hashes.txt").read_text())
    assert set(pins) - set(sums) == {"torch"}
    assert not set(sums) - set(pins)
    for name, (version, digests) in sums.items():
        assert version == pins[name][0], name
        assert digests, name
        assert all(len(digest) == 64 for digest in digests), name


def test_a_page_of_an_index_gives_the_sums_of_one_version():
    page = "".join(
        f'<a href="../{file}#sha256={digit * 64}" data-x="1">{file}</a>\n'
        for digit, file in zip(
            "1234567",
            (
                "a_b-1.0-py3-none-any.whl",
                "a-b-1.0.tar.gz",
                "a_b-1.0.1-py3-none-any.whl",
                "a_b-1.0-cp310-cp310-linux_x86_64.whl",
                "a_b-1.0-cp313-cp313-linux_x86_64.whl",
                "a_b_c-1.0.tar.gz",
                "a_b-1.0-cp310-abi3-linux_x86_64.whl",
            ),
            strict=True,
        )
    )
    assert check_hashes.sums_of(page, "a-b", "1.0") == ["1" * 64, "2" * 64, "5" * 64, "7" * 64]


def test_the_command_fails_in_one_line(tmp_path):
    report = tmp_path / "report.json"
    for digest, status in (("fe", 1), (None, 0)):
        report.write_text(json.dumps({"install": [] if digest is None else [item("numpy", "2.4.6", digest)]}))
        done = subprocess.run(
            [sys.executable, str(ROOT / "check_hashes.py"), str(report)], capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert len(done.stderr.splitlines()) == status
