"""Counts, network and mixture without and with noise, in one table.

    python benchmarks/counts_noise.py RUN --two RUN --eight RUN [--write]

RUN is the run of `make run`. The others are trained with `--dp`: with ε = 2 as if a million clients, and with ε = 8 for
the real ones (docs/counts.md has the commands). Each is counted in a copy of its folder, and tested on the test text of
its clients. The composed ε is that of both ledgers together: every round of training and every sum of the count, at
their δ. `--write` stores docs/results/data/counts-noise.json and puts the table into docs/counts.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import counts_page

from keyfed.config.schema import PrivacyConfig
from keyfed.private.dp.accounting import FINE
from keyfed.private.dp.ledger import read_ledger
from keyfed.reports.document import markdown_table
from keyfed.reports.finished import with_data
from keyfed.run.counts.command import Counting, count_run, read_counts, score_counts
from keyfed.run.counts.noise import FOLDER
from keyfed.run.evaluate import headline

MILLION = 1_000_000
NOISED = {"order": 3, "most": 300, "cap": 1}
CLEAR = Counting(secure=False)
TWO = Counting(**NOISED, secure=False, privacy=PrivacyConfig(epsilon=2.0, population=MILLION))
EIGHT = Counting(**NOISED, secure=False, privacy=PrivacyConfig(epsilon=8.0))
FIGURES = ("perplexity", "top1_words")


def measure(run: Path, how: Counting) -> dict[str, Any]:
    """Count a copy of a run, and return the figures of all models on its test text."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "run"
        shutil.copytree(run, own, ignore=shutil.ignore_patterns("counts.*", "mixture.json"))  # counted or not
        trained, prepared = with_data(own, None)
        prepared = replace(prepared, unseen={})
        report = count_run(trained, prepared, how)
        found = read_counts(trained)
        assert found is not None
        rows = {name: split["test"] for name, split in score_counts(trained, prepared, *found).items()}
        figures = {name: score.summary() for name, score in rows.items() if score is not None}
        kind = trained.config.data.batching
        figures["network"] = headline(trained.spec, trained.params, prepared.test, kind)[1]
        privacy, epsilon = trained.config.privacy, report.terms.epsilon
        network = composed = None
        if privacy.on and epsilon is not None:
            ledger = read_ledger(own)
            network = ledger.epsilon(grid=FINE)
            composed = ledger.epsilon(more=read_ledger(own / FOLDER).rows(), grid=FINE)
        return {
            "counts_epsilon": epsilon, "delta": report.terms.delta, "network_epsilon": network, "composed": composed,
            "thresholds": [level.threshold for level in report.levels],
            "released": [level.released for level in report.levels],
            "rows": {name: {key: row[key] for key in FIGURES} for name, row in figures.items()},
        }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table, a line for each run and count."""
    cells = [["noise of the network; of the counts", "thresholds, clients", "released", "counts", "network", "mixture",
              "mixture + own cache", "ε of both"]]  # fmt: skip
    for row in rows:
        models = [row["rows"][name] for name in ("counts", "network", "mixture", "cache")]
        figures = [f"{model['perplexity']:,.1f} ({100 * model['top1_words']:.1f} %)" for model in models]
        least = ", ".join(f"{t:.1f}".removesuffix(".0") for t in row["thresholds"])
        both = "none" if row["composed"] is None else f"{row['composed']:.2f}"
        released = ", ".join(f"{n:,}" for n in row["released"])
        cells.append([row["name"], least, released, *figures, both])
    return [markdown_table(cells, numbers=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="counts, network and mixture under noise")
    parser.add_argument("run", type=Path)
    parser.add_argument("--two", type=Path, required=True)
    parser.add_argument("--eight", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    rows = []
    for name, run, how in (
        ("none; none (order 4)", chosen.run, CLEAR),
        ("none; ε = 2, as if a million clients", chosen.run, TWO),
        ("ε = 2; ε = 2, as if a million clients", chosen.two, TWO),
        ("none; ε = 8, the 6,872 clients", chosen.run, EIGHT),
        ("ε = 8; ε = 8, the 6,872 clients", chosen.eight, EIGHT),
    ):
        rows.append({"name": name, **measure(run, how)})
        print("\n".join(table(rows[-1:])), file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    if chosen.write:
        counts_page.keep("counts-noise", {"rows": rows})
        counts_page.write("counts-noise", table(rows))


if __name__ == "__main__":
    main()
