"""Are phrases that some clients write exposed in the counts of a federation, without and with noise?

    python benchmarks/counts_canaries.py [--data chat] [--each 3] [--write]

The audit's canaries (`keyfed.lab.audit.canaries`): five random words, written by 1, 4 or 16 clients, 1, 14 or 200 times
by each. They are planted in the training text, and counted without noise (k = 3), with ε = 8, and with ε = 2 and a
million clients in two readings. Each ending is ranked among 2^11 random ones after its first two words, by the count
model that was released. Phrases that were not planted are the controls: they have 1 bit in the median.

*As if a million* is what `keyfed counts --population` does: the noise is scaled down to the clients that there are. So
a planted client stands for many, and 16 of them for thousands. *Of a million* keeps the canaries rare: every client is
summed as often as makes a million, and the clients with canaries once more. Then 16 clients of a million have one.

*Exposed* is above the bits that the largest of as many controls stays below nineteen times in twenty. The network has
one round: only the counts are looked at. `--write` stores docs/results/data/counts-canaries.json and puts the table
into docs/counts.md.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import counts_page
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
from keyfed.reports.document import markdown_table
from keyfed.run.counts.command import Counting, count_run, read_counts
from keyfed.run.counts.fit import fit_levels, opening
from keyfed.run.counts.gather import Gathering, Opened, PublicSum, Write, groups_of
from keyfed.run.counts.levels import DEPTH_NOISED, count_ngrams
from keyfed.run.counts.noise import TOKENS_NOISED, CountNoise
from keyfed.run.counts.terms import plan_of
from keyfed.run.folder import Trained, load_model
from keyfed.run.loop import train
from keyfed.run.prepare import Prepared, prepare
from keyfed.text.vocab import EOS

SEED, CANDIDATES, CONTROLS = 1, 2**11 - 1, 200
POPULATION = 1_000_000
NOISED = {"order": 3, "most": 300, "cap": 1}
HOW = {
    "none": Counting(secure=False),
    "none, cap 64": Counting(secure=False, cap=64),
    "ε = 8, these clients": Counting(**NOISED, secure=False, privacy=PrivacyConfig(epsilon=8.0)),
    "ε = 2, as if a million": Counting(
        **NOISED, secure=False, privacy=PrivacyConfig(epsilon=2.0, population=POPULATION)
    ),
    "ε = 2, of a million": Counting(**NOISED, secure=False, privacy=PrivacyConfig(epsilon=2.0)),
}  # fmt: skip
FLEET = "ε = 2, of a million"


class Fleet(Gathering):
    """Sums of a fleet: the first group stands for `times` such groups, the others for themselves."""

    times = 1

    @property
    def clients(self) -> int:
        own = [len(group.names) for group in self.groups]
        return own[0] * self.times + sum(own[1:])

    def sums(self, public: PublicSum, words: int, write: Write) -> Iterator[Opened]:
        self.words[public.purpose] = words
        for number, group in enumerate(self.groups):
            opened = self._sum(public, words, group, write)
            for _ in range(1 if number else self.times):
                yield opened


def fleet(plain: Mapping[str, Any], planted: Mapping[str, Any], times: int) -> Fleet:
    """Return the sums over clients, so many times each, and over those with canaries, once."""
    groups = [groups_of(list(some), list(some.values()), EOS, len(some), 1)[0] for some in (plain, planted)]
    found = Fleet(groups)
    found.times = times
    return found


def counted_of_a_million(
    trained: Trained, prepared: Prepared, planted: Prepared, how: Counting
) -> tuple[KneserNey, list[float]]:
    """Count a fleet in which as many clients have a canary as were planted; return the model and the thresholds."""
    assert how.privacy is not None
    vocab, store = len(prepared.vocab), prepared.store
    with_canary = {
        name: planted.store.stream(k)
        for k, name in enumerate(store.names)
        if len(planted.store.stream(k)) != len(store.stream(k))
    }
    times = POPULATION // len(store)
    counting = fleet({name: store.stream(k) for k, name in enumerate(store.names)}, with_canary, times)
    noise = CountNoise(
        how.privacy, trained.folder, counting.clients, 3 * how.order, how.most, SEED, secure=False, raw_vocabulary=True
    )
    plan = plan_of(how, "", counting.members, vocab, SEED, DEPTH_NOISED)
    tables, found = count_ngrams(counting, plan, vocab, noise.add)
    nothing = np.zeros(0, np.int32)
    some = opening(prepared.valid, TOKENS_NOISED)
    fitting = fleet(
        {name: some.get(name, nothing) for name in store.names},
        {name: some.get(name, nothing) for name in with_canary},
        times,
    )
    model = fit_levels(fitting, tables, vocab, noise.histogram, TOKENS_NOISED)
    return model, [level.threshold for level in found]


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


def figures(
    name: str, thresholds: Sequence[float], bits: Sequence[float], users: Sequence[int], controls: Controls
) -> dict[str, Any]:
    """Return a row: of the canaries of each number of clients how many are exposed, and their median."""
    groups = []
    for n in dict.fromkeys(users):
        own = [b for b, u in zip(bits, users, strict=True) if u == n]
        bound = math.log2(len(own) / 0.05)
        groups.append({"clients": n, "exposed": sum(b > bound for b in own), "median": float(np.median(own)),
                       "bits": own})  # fmt: skip
    return {"noise": name, "thresholds": list(thresholds), "groups": groups, "controls": controls._asdict()}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of some rows."""
    wrote = [f"{g['clients']} {'client' if g['clients'] == 1 else 'clients'} wrote it" for g in rows[0]["groups"]]
    cells = [["noise", "thresholds, clients", *wrote, "not planted: median, p"]]
    for row in rows:
        exposed = [f"{g['exposed']} of {len(g['bits'])} ({g['median']:.1f})" for g in row["groups"]]
        least = ", ".join(f"{t:.1f}".removesuffix(".0") for t in row["thresholds"])
        cells.append([row["noise"], least, *exposed, f"{row['controls']['median']:.1f}, {row['controls']['p']:.2f}"])
    return [markdown_table(cells, numbers=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="canaries in counts")
    parser.add_argument("--data", default="chat")
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    settings = [f"data.name={chosen.data}", "model.embed=8", "model.hidden=8", "train.cohort=5", "train.rounds=1",
                "train.test_tokens=1000", "train.baselines=false", f"train.seed={SEED}"]  # fmt: skip
    config = apply_settings(Config(), settings)
    prepared = prepare(config)
    vocab = len(prepared.vocab)
    canaries = draw_canaries(vocab, len(prepared.store), SEED, each=chosen.each, users=USERS, copies=COPIES)
    planted = replace(prepared, store=plant(prepared.store, canaries, SEED))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(config, run, prepared=planted)
        for number, (name, how) in enumerate(HOW.items()):
            own = Path(folder) / str(number)
            shutil.copytree(run, own)
            trained = replace(load_model(run), folder=own)
            if name == FLEET:
                model, thresholds = counted_of_a_million(trained, prepared, planted, how)
            else:
                report = count_run(trained, planted, how)
                found = read_counts(trained)
                assert found is not None
                model, thresholds = found[0].model, [level.threshold for level in report.levels]
            bits = exposures(model, np.array([c.words for c in canaries]), vocab, "candidates")
            never = judge_controls(exposures(model, draw_phrases(vocab, CONTROLS, SEED, "controls"), vocab, "others"))
            rows.append(figures(name, thresholds, bits, [len(c.clients) for c in canaries], never))
            print("\n".join(table(rows[-1:])), file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    if chosen.write:
        counts_page.keep("counts-canaries", {"data": prepared.corpus.name, "seed": SEED, "rows": rows})
        counts_page.write("counts-canaries", table(rows))


if __name__ == "__main__":
    main()
