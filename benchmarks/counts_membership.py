"""How well a server tells from an opened sketch that one client wrote a bigram which no other client of the sum wrote.

    python benchmarks/counts_membership.py runs/first

The advantage of a test is the chance that it says yes where the client wrote it, less that where it did not. Two
servers are looked at. One knows nothing else of the clients: it looks at the canary's least cell, at its best
threshold. One knows all else that went into the sum, which is the most that any can know. With noise of σ = z√(Md) a
cell, no test of either has more than 2Φ(√d / 2σ) − 1, for the canary moves d cells by 1.

Prints a table for docs/counts.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np

from keyfed.engine.sums.tallies import added
from keyfed.model.counts import LEAST_K
from keyfed.model.tables import GramTable, written
from keyfed.private.dp.accounting import calibrate, delta_for
from keyfed.reports.finished import with_data
from keyfed.run.counts.gather import groups_of
from keyfed.run.counts.levels import sketches_of
from keyfed.text.vocab import EOS

CANARIES, MOST, SUMS = 20_000, 300, 9


def main(run: Path) -> None:
    trained, prepared = with_data(run, None)
    store, vocab = prepared.store, len(trained.vocab)
    streams = [store.stream(k) for k in range(len(store))]
    line_end = EOS if trained.reads_lines else None
    words = np.arange(vocab)
    known = [GramTable(words, np.ones(vocab, int), np.ones(vocab, int), np.zeros(vocab, int))]
    random = np.random.default_rng(1)
    reader = "a reader of the (noised) sketch, who knows nothing else"
    print(f"| clients of the sum | noise | {reader} | a reader who knows all else |")
    print("|--:|---|--:|--:|")
    for among in (100, 1_000):
        group = groups_of(store.names, streams, line_end, among, LEAST_K)[0]
        members = len(group.names)
        (sketch,) = sketches_of(8e6, 2, members, vocab, 7, 4)
        found = written(group.texts, known, vocab)
        fields = sketch.fields(members)
        total = added(fields.write([sketch.write(found.client, found.key)]), fields.words, np.ones(members, bool))
        cells = fields.read(total)[0]
        canaries = random.integers(0, vocab * vocab, CANARIES)
        canaries = canaries[~np.isin(canaries, found.key)]
        least = np.min([cells[sketch.cell(row, canaries)] for row in range(sketch.depth)], axis=0)
        alone = max(float((least + 1 >= t).mean() - (least >= t).mean()) for t in range(1, 20))
        print(f"| {members:,} | none | {alone:.4f} | 1 |")
    clients = len(store)
    for eps, population in ((8.0, clients), (2.0, 1_000_000)):
        z = calibrate(eps, delta_for(population), 1.0, SUMS)
        depth = 2
        most = 2 * NormalDist().cdf(np.sqrt(depth) / (2 * z * np.sqrt(MOST * depth))) - 1
        print(f"| any | ε = {eps:g}, {population:,} clients (z = {z:.1f}) | at most {most:.4f} | {most:.4f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
