"""Are phrases that some clients write exposed in the counts of a federation, without and with noise?

    python benchmarks/counts_canaries.py [--data chat] [--each 3]

The audit's canaries (`keyfed.lab.audit.canaries`): five random words, written by 1, 4 or 16 clients, 1, 14 or 200 times
by each. They are planted in the training text, and counted without noise (k = 3) and with ε = 8 and ε = 2. The last is
as if there were a million clients. Each ending is ranked among 2^11 random ones after its first two words, by the count
model that was released. Phrases that were not planted are the controls: they have 1 bit in the median.

*Exposed* is above the bits that the largest of as many controls stays below nineteen times in twenty. The network has
one round: only the counts are looked at. Prints a table for docs/counts.md.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keyfed.config.load import Config, apply_settings
from keyfed.config.schema import PrivacyConfig
from keyfed.lab.audit.canaries import (
    COPIES,
    PREFIX,
    USERS,
    WORDS,
    Controls,
    draw_canaries,
    draw_phrases,
    exposure,
    judge_controls,
    plant,
    rank_of,
)
from keyfed.model.ngram import KneserNey
from keyfed.run.counts.command import Counting, count_run, read_counts
from keyfed.run.folder import load_model
from keyfed.run.loop import train
from keyfed.run.prepare import prepare
from keyfed.text.vocab import EOS

SEED, CANDIDATES, CONTROLS = 1, 2**11 - 1, 200
NOISED = {"order": 3, "most": 300, "cap": 1}
HOW = {
    "no noise": Counting(secure=False),
    "ε = 8, these clients": Counting(**NOISED, secure=False, privacy=PrivacyConfig(epsilon=8.0)),
    "ε = 2, as if a million": Counting(
        **NOISED, secure=False, privacy=PrivacyConfig(epsilon=2.0, population=1_000_000)
    ),
}  # fmt: skip


def ending_nats(model: KneserNey, prefix: Sequence[int], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the nats of endings [n, words] after a line's first words; each line is read from an end of line."""
    lines = np.empty((len(ends), 1 + WORDS), np.int32)
    lines[:, 0], lines[:, 1 : 1 + PREFIX], lines[:, 1 + PREFIX :] = EOS, list(prefix), ends
    nats = np.concatenate([[0.0], model.nats(lines.reshape(-1))]).reshape(lines.shape)
    return np.asarray(nats[:, 1 + PREFIX :].sum(1))


def exposures(model: KneserNey, phrases: NDArray[np.int64], vocab: int, purpose: str) -> list[float]:
    """Return the exposure in bits of every phrase, each among candidates of its own."""
    bits = []
    for number, phrase in enumerate(phrases):
        others = draw_phrases(vocab, CANDIDATES, SEED, f"{purpose} {number}")[:, PREFIX:]
        nats = ending_nats(model, phrase[:PREFIX].tolist(), np.concatenate([phrase[None, PREFIX:], others]))
        bits.append(exposure(rank_of(float(nats[0]), nats[1:]), CANDIDATES + 1))
    return bits


def row(name: str, thresholds: Sequence[float], bits: Sequence[float], users: Sequence[int], controls: Controls) -> str:
    """Return a line of the table: of the canaries of each number of clients how many are exposed, and their median."""
    cells = []
    for n in dict.fromkeys(users):
        own = [b for b, u in zip(bits, users, strict=True) if u == n]
        bound = math.log2(len(own) / 0.05)
        cells.append(f"{sum(b > bound for b in own)} of {len(own)} ({np.median(own):.1f})")
    least = ", ".join(f"{t:.1f}" for t in thresholds)
    return f"| {name} | {least} | {' | '.join(cells)} | {controls.median:.1f}, p = {controls.p:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="canaries in counts")
    parser.add_argument("--data", default="chat")
    parser.add_argument("--each", type=int, default=3)
    chosen = parser.parse_args(arguments)
    settings = [f"data.name={chosen.data}", "model.embed=8", "model.hidden=8", "train.cohort=5", "train.rounds=1",
                "train.test_tokens=1000", "train.baselines=false", f"train.seed={SEED}"]  # fmt: skip
    config = apply_settings(Config(), settings)
    prepared = prepare(config)
    vocab = len(prepared.vocab)
    canaries = draw_canaries(vocab, len(prepared.store), SEED, each=chosen.each, users=USERS, copies=COPIES)
    planted = replace(prepared, store=plant(prepared.store, canaries, SEED))
    print("| noise | thresholds, clients | " + " | ".join(f"{n} clients wrote it" for n in USERS) + " | controls |")
    print("|---|--:|" + "--:|" * (len(USERS) + 1))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(config, run, prepared=planted)
        for number, (name, how) in enumerate(HOW.items()):
            own = Path(folder) / str(number)
            shutil.copytree(run, own)
            trained = replace(load_model(run), folder=own)
            report = count_run(trained, planted, how)
            found = read_counts(trained)
            assert found is not None
            model = found[0].model
            bits = exposures(model, np.array([c.words for c in canaries]), vocab, "candidates")
            never = judge_controls(exposures(model, draw_phrases(vocab, CONTROLS, SEED, "controls"), vocab, "others"))
            thresholds = [level.threshold for level in report.levels]
            print(row(name, thresholds, bits, [len(c.clients) for c in canaries], never), flush=True)


if __name__ == "__main__":
    main()
