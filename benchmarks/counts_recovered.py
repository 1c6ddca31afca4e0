"""Which n-grams of irc does a count recover? Precision and recall by what a client sends.

    python benchmarks/counts_recovered.py --data-dir FOLDER [--write]

One sum over all clients of the cell `irc, streams` of studies/models.toml, k = 5, order 4, nothing clipped to M. The
truth is counted from the text: every n-gram of words of the vocabulary that five clients wrote. *Precision of the
sketch* is the share of the n-grams that it admits which five clients wrote. The recount has the last word: precision
and recall of what is released are the other columns. `--write` stores docs/results/data/counts-recovered.json and puts
the table into docs/counts.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import counts_page
import counts_study
import numpy as np
from numpy.typing import NDArray

from keyfed.lab.experiment.cell import Workspace
from keyfed.model.tables import GramTable, Texts, last_rows, written
from keyfed.reports.document import markdown_table
from keyfed.run.counts.gather import Gathering, groups_of
from keyfed.run.counts.levels import DEPTH, CountPlan, count_ngrams, sketches_of
from keyfed.run.prepare import prepare

K, ORDER, CAP = 5, 4, 1
MEGABYTES = (58.0, 28.0, 19.0, 9.0, 6.5)  # of sketches
NAMES = ("bigrams", "trigrams", "4-grams")


def true_tables(text: Texts, vocab: int) -> list[GramTable]:
    """Return the n-grams that at least k clients wrote, by counting them."""
    tables: list[GramTable] = []
    for _ in range(ORDER):
        found = written(text, tables, vocab)
        keys, clients = np.unique(found.key, return_counts=True)
        keys, clients = keys[clients >= K], clients[clients >= K]
        suffix = last_rows(keys, tables, vocab) if tables else np.zeros(keys.size, np.int64)
        tables.append(GramTable(keys, clients, clients, suffix))
    return tables


def words_of(tables: Sequence[GramTable], n: int, vocab: int) -> NDArray[np.int64]:
    """Return the n-grams of length n, each as one number made of its words."""
    keys = tables[n - 1].keys
    return keys if n == 1 else words_of(tables, n - 1, vocab)[keys // vocab] * vocab + keys % vocab


def measure(gathering: Gathering, truth: Sequence[GramTable], megabytes: float, vocab: int) -> dict[str, Any]:
    """Count with sketches of a size; return what was admitted and released."""
    plan = CountPlan(
        ORDER, K, CAP, 1 << 40, "", sketches_of(megabytes * 1e6, ORDER, gathering.members, vocab, 7, DEPTH)
    )
    tables, levels = count_ngrams(gathering, plan, vocab)
    sketch, right, released, wanted = [], 0, 0, 0
    for n, level in enumerate(levels, 1):
        own, real = words_of(tables, n, vocab), words_of(truth, n, vocab)
        both = np.intersect1d(own, real).size
        right, released, wanted = right + both, released + own.size, wanted + real.size
        if n > 1:
            sketch.append(both / level.admitted)
    sent = sum(gathering.moved().values()) / 1e6
    return {"megabytes": sent, "sketch": sketch, "precision": right / released, "recall": right / wanted,
            "released": released}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [["MB a client, all levels", *(f"sketch: {name}" for name in NAMES), "released: precision", "recall"]]
    for row in rows:
        precision = [f"{x:.4f}" for x in row["sketch"]]
        cells.append([f"{row['megabytes']:.1f}", *precision, f"{row['precision']:.4f}", f"{row['recall']:.4f}"])
    return [markdown_table(cells, numbers=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="recovered n-grams")
    parser.add_argument("--data-dir")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    _, config = next(counts_study.configs("irc", Workspace(Path("work/counts"), "cpu", chosen.data_dir)))
    prepared = prepare(config)
    store, vocab = prepared.store, len(prepared.vocab)
    streams = [store.stream(k) for k in range(len(store))]
    gathering = Gathering(groups_of(store.names, streams, None, len(store), K))
    truth = true_tables(gathering.groups[0].texts, vocab)
    rows = []
    for megabytes in MEGABYTES:
        began = time.monotonic()
        gathering.words.clear()
        rows.append(measure(gathering, truth, megabytes, vocab))
        print(f"{megabytes:g} MB of sketches: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    if chosen.write:
        about = {"data": prepared.corpus.name, "clients": len(store), "k": K, "order": ORDER}
        counts_page.keep("counts-recovered", {**about, "rows": rows})
        counts_page.write("counts-recovered", table(rows))


if __name__ == "__main__":
    main()
