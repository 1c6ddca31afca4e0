"""The transcript of two secure sums is as frozen; tests/web/test_transcript.py holds the page to the same file."""

from __future__ import annotations

import json

import numpy as np

from . import transcript

FROZEN = json.loads(transcript.TRANSCRIPT.read_text("utf-8"))


def test_what_pythons_clients_write_is_as_frozen():
    found = transcript.make()
    assert found.keys() == FROZEN.keys()
    for kind in ("ordinary", "private"):
        for what, expected in FROZEN[kind].items():
            assert found[kind][what] == expected, f"{kind}: {what}; where it is meant to change: tests/golden/make.py"
    assert found == FROZEN


def test_the_total_is_the_sum_of_the_vectors_that_arrived():
    for kind in ("ordinary", "private"):
        frozen = FROZEN[kind]
        words = {name: np.frombuffer(bytes.fromhex(text), "<u4") for name, text in frozen["vectors"].items()}
        total = sum((words[name] for name in words if name != transcript.LOST), np.zeros(1, np.uint32))
        assert total.astype("<u4").tobytes().hex() == frozen["total"]
        clipped = {name: float(np.abs(w.view(np.int32)[:17].astype(float)).max()) for name, w in words.items()}
        assert min(clipped.values()) > 0
