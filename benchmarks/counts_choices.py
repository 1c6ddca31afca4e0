"""Cap and smoothing of counts: perplexity of the counts on validation text that they were not fitted on.

    python benchmarks/counts_choices.py [--only chat irc ptb] [--data-dir FOLDER] [--write]

k = 3, order 4, exact counts. Smoothing is fitted on every second client's validation text and measured on the others',
then the other half: each token is measured once. Of a published text (PTB), the halves are its two halves. No test text
is read. `--write` stores docs/results/data/counts-choices.json and puts the table into docs/counts.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import counts_page
import counts_study
import numpy as np

from keyfed.config.load import read_config
from keyfed.lab.experiment.cell import Workspace
from keyfed.model import smoothing
from keyfed.model.ngram import KneserNey
from keyfed.model.tables import GramTable
from keyfed.reports.document import markdown_table
from keyfed.run.counts import fit
from keyfed.run.counts.gather import Gathering, groups_of
from keyfed.run.counts.levels import DEPTH, CountPlan, count_ngrams, sketches_of
from keyfed.run.evaluate import evaluate_ngram, evaluate_ngram_sentences, total
from keyfed.run.prepare import Prepared, prepare
from keyfed.text.batches import reads_lines
from keyfed.text.vocab import EOS

FIRST = Path(__file__).parents[1] / "first.toml"
K, ORDER, MOST, BUDGET, AMONG = 3, 4, 20_000, 24e6, 1_000
CAP, THETA, SHARES = 1_000, 0.8, smoothing.SHARES
ROWS: Mapping[str, Mapping[str, Any]] = {
    **{f"cap {cap:,}": {"cap": cap} for cap in (1, 16, 64, 256, 1_000, 4_000)},
    **{f"θ = {theta}": {"theta": theta} for theta in (0.0, 0.3, 0.6, 0.8, 0.95)},
    "shares in quarters": {"shares": (0.25, 0.5, 0.75)},
    "one bucket of shares": {"shares": ()},
    "order 5": {"order": 5},
}


def corpora(only: Sequence[str], data_dir: str | None) -> Iterator[tuple[str, Prepared, bool]]:
    """Yield name, text and whether lines are read on their own."""
    for name in only:
        config = (
            read_config(FIRST)
            if name == "chat"
            else next(counts_study.configs(name, Workspace(Path("work/counts"), "cpu", data_dir)))[1]
        )
        yield name, prepare(config), name == "chat" or reads_lines(config.data.batching)


def halves(prepared: Prepared) -> list[dict[str, Any]]:
    """Cut validation text in two: clients, or the tokens of a published text."""
    if prepared.population.valid is not None:
        whole = fit.opening(prepared.valid, None)
        return [{name: s[: len(s) // 2] for name, s in whole.items()}, {n: s[len(s) // 2 :] for n, s in whole.items()}]
    some = fit.opening(prepared.valid)
    return [{name: some[name] for name in sorted(some)[at::2]} for at in (0, 1)]


def smoothed(prepared: Prepared, tables: Sequence[GramTable], line_end: int | None, text: dict[str, Any]) -> KneserNey:
    """Return the counts as smoothed on some validation text."""
    gathering = Gathering(groups_of(list(text), list(text.values()), line_end, AMONG, 1))
    return fit.fit_levels(gathering, tables, len(prepared.vocab), most=max(map(len, text.values())) + 1)


def perplexity(prepared: Prepared, tables: Sequence[GramTable], line_end: int | None) -> float:
    """Return the perplexity of validation text, each half with what was fitted on the other."""
    nats = tokens = 0.0
    both = halves(prepared)
    for fitted, measured in ((both[0], both[1]), (both[1], both[0])):
        model = smoothed(prepared, tables, line_end, fitted)

        def none(stream: Any, k: int) -> Any:
            return np.zeros((len(stream) - 1, k), np.int32)  # nothing is ranked

        if line_end is None:
            score = total(evaluate_ngram(model.nats, none, measured))
        else:
            score = evaluate_ngram_sentences(model.nats, none, measured)
        nats, tokens = nats + score.nats, tokens + score.tokens
    return math.exp(nats / tokens)


def measure(prepared: Prepared, lines: bool) -> dict[str, float]:
    """Return the perplexity of every row."""
    line_end = EOS if lines else None
    store, vocab = prepared.store, len(prepared.vocab)
    streams = [store.stream(k) for k in range(len(store))]
    gathering = Gathering(groups_of(store.names, streams, line_end, AMONG, K))
    counted: dict[tuple[int, int], list[GramTable]] = {}
    found = {}
    for label, row in ROWS.items():
        key = row.get("cap", CAP), row.get("order", ORDER)
        if key not in counted:
            sketches = sketches_of(BUDGET, key[1], gathering.members, vocab, 7, DEPTH)
            plan = CountPlan(key[1], K, key[0], MOST, "", sketches)
            counted[key] = count_ngrams(gathering, plan, vocab)[0]
        smoothing.THETA, smoothing.SHARES = row.get("theta", THETA), row.get("shares", SHARES)
        smoothing.BUCKETS = fit.BUCKETS = (len(smoothing.TOTALS) + 1) * (len(smoothing.SHARES) + 1)
        found[label] = round(perplexity(prepared, counted[key], line_end), 2)
        print(label, f"{found[label]:.2f}", file=sys.stderr, flush=True)
    return found


def table(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    cells = [["validation perplexity of the counts", *figures]]
    cells += [[label, *(f"{row[label]:.2f}" for row in figures.values())] for label in ROWS]
    return [markdown_table(cells, numbers=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="how cap and smoothing of counts were chosen")
    parser.add_argument("--only", nargs="+", choices=["chat", "irc", "ptb"], default=["chat", "irc", "ptb"])
    parser.add_argument("--data-dir")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    figures = counts_page.read("counts-choices")
    for name, prepared, lines in corpora(chosen.only, chosen.data_dir):
        print(name, file=sys.stderr)
        figures[name] = measure(prepared, lines)
    print("\n".join(table(figures)))
    if chosen.write:
        counts_page.keep("counts-choices", figures)
        counts_page.write("counts-choices", table(figures))


if __name__ == "__main__":
    main()
