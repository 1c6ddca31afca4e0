"""How well a server tells from an opened sketch that one client wrote a bigram which no other client of the sum wrote.

    python benchmarks/counts_membership.py runs/first [--write]

The advantage of a test is the chance that it says yes where the client wrote it, less that where it did not. Two
servers are looked at. One knows nothing else of the clients: it looks at the canary's least cell, at its best
threshold. One knows all else that went into the sum, which is the most that any can know. With noise of σ = z√(Md) a
cell, no test of either has more than 2Φ(√d / 2σ) − 1, for the canary moves d cells by 1.

`--write` stores docs/results/data/counts-membership.json and puts the table into docs/counts.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import NormalDist
from typing import Any

import counts_page
import numpy as np

from keyfed.engine.sums.tallies import added
from keyfed.model.counts import LEAST_K
from keyfed.model.tables import GramTable, written
from keyfed.private.dp.accounting import calibrate, delta_for
from keyfed.reports.document import markdown_table
from keyfed.reports.finished import with_data
from keyfed.run.counts.gather import groups_of
from keyfed.run.counts.levels import sketches_of
from keyfed.text.vocab import EOS

CANARIES, MOST, SUMS = 20_000, 300, 9


def measured(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the table: advantages of a reader who knows nothing else, and of one who knows all else."""
    trained, prepared = with_data(run, None)
    store, vocab = prepared.store, len(trained.vocab)
    streams = [store.stream(k) for k in range(len(store))]
    line_end = EOS if trained.reads_lines else None
    words = np.arange(vocab)
    known = [GramTable(words, np.ones(vocab, int), np.ones(vocab, int), np.zeros(vocab, int))]
    random = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
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
        rows.append({"clients": members, "epsilon": None, "alone": alone, "all": 1.0})
    clients = len(store)
    for eps, population in ((8.0, clients), (2.0, 1_000_000)):
        z = calibrate(eps, delta_for(population), 1.0, SUMS)
        depth = 2
        most = 2 * NormalDist().cdf(np.sqrt(depth) / (2 * z * np.sqrt(MOST * depth))) - 1
        rows.append({"clients": None, "epsilon": eps, "population": population, "z": z, "alone": most, "all": most})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    reader = "a reader of the (noised) sketch, who knows nothing else"
    cells = [["clients of the sum", "noise", reader, "a reader who knows all else"]]
    for row in rows:
        if row["epsilon"] is None:
            cells.append([f"{row['clients']:,}", "none", f"{row['alone']:.4f}", f"{row['all']:g}"])
            continue
        noise = f"ε = {row['epsilon']:g}, {row['population']:,} clients (z = {row['z']:.1f})"
        cells.append(["any", noise, f"at most {row['alone']:.4f}", f"{row['all']:.4f}"])
    return [markdown_table(cells, numbers=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="who wrote a bigram, by an opened sketch")
    parser.add_argument("run", type=Path)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    rows = measured(chosen.run)
    print("\n".join(table(rows)))
    if chosen.write:
        counts_page.keep("counts-membership", rows)
        counts_page.write("counts-membership", table(rows))


if __name__ == "__main__":
    main()
