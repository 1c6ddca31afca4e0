"""The walk of one token in CONTRIBUTING.md: a run calls its functions in that order, in at most 20 files."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import keyfed

SOURCE = Path(keyfed.__file__).parent
MOST_FILES = 20
Step = tuple[str, str]  # a file below src/keyfed, a function in it


def written() -> list[Step]:
    """Return the steps of the table in CONTRIBUTING.md."""
    text = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    return re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.<>]+)` \|", text, re.MULTILINE)


def problems(walk: list[Step], called: list[Step]) -> list[str]:
    """Return the steps that are not called, and those that are first called before the step above them."""
    first = {step: at for at, step in reversed(list(enumerate(called)))}
    out = [f"{file}: {name} is not called" for file, name in walk if (file, name) not in first]
    known = [step for step in walk if step in first]
    return out + [f"{b} is called before {a}" for a, b in pairwise(known) if first[b] < first[a]]


@pytest.fixture(scope="module")
def called(tmp_path_factory) -> list[Step]:
    """Every function of the package in the order of its first call, while a small run trains in this process."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "text").mkdir()
    for k in range(4):
        (folder / "text" / f"writer{k}.txt").write_text(f"writer {k} sees the long road\n" * 20, "utf-8")
    own = {"model_embed": 8, "model_hidden": 12, "data_vocab": 40, "data_window": 8, "train_cohort": 2}
    own |= {"train_workers": 1, "train_valid_tokens": 100, "train_baselines": False}
    config = keyfed.configure("fedavg", data=str(folder / "text"), rounds=1, **own)
    order: dict[Step, None] = {}

    def seen(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)):
            order.setdefault((Path(path).relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        keyfed.train(config, folder / "run")
    finally:
        sys.setprofile(before)
    return list(order)


def test_a_run_takes_the_walk(called):
    assert problems(written(), called) == []


def test_the_walk_is_short():
    assert len(written()) > 20
    assert len({file for file, _ in written()}) <= MOST_FILES


def test_another_order_or_a_function_that_is_gone_is_found(called):
    walk = written()
    assert problems([walk[1], walk[0], *walk[2:]], called)
    assert problems([*walk, ("run/loop.py", "gone")], called)
