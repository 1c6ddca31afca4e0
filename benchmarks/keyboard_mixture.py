"""Does the mixture save more keystrokes than each of its models? Held-out messages, typed on every keyboard.

    python benchmarks/keyboard_mixture.py RUN [--words 4000] [--write]

RUN has counts (`keyfed counts RUN`). The same messages of seen and of unseen clients are typed on the n-gram model of
everybody's text, the network, the counts, and the mixture; nothing is mistyped. The error of a share is that over
clients, for a ratio of sums; the gain of the mixture is compared client by client. So words of one client count as the
one opinion that they are. `--write` puts the figures into docs/results/data/keyboard-mixture.json, next to those of
other corpora, and their tables into docs/keyboard.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stored import Stored

from keyfed.keyboard import measure
from keyfed.keyboard.dictionary import lists_of
from keyfed.keyboard.export import written_forms
from keyfed.keyboard.session import Decoder
from keyfed.reports.document import markdown_table

WORDS, SEED = 4_000, 1
MIXTURE = "mixture"


def ratio(of: Sequence[float], all_: Sequence[float]) -> tuple[float, float]:
    """Return a ratio of two sums over clients and its standard error.

    Example:
      >>> ratio([1, 1], [10, 10]), ratio([0, 2], [10, 10])
      ((0.1, 0.0), (0.1, 0.1))
    """
    x, n = np.asarray(of, np.float64), np.asarray(all_, np.float64)
    found = x.sum() / n.sum()
    left = x - found * n
    return float(found), float(np.sqrt(np.square(left).sum() * n.size / max(n.size - 1, 1)) / n.sum())


def name_of(title: str) -> str:
    """Return a row's name: what it is, in every corpus alike."""
    if "+ counts" in title:
        return MIXTURE
    return title if title.startswith(("n-gram", "counts")) else "network"


def typed(run: Path, words: int) -> dict[str, Any]:
    """Type on every keyboard; return figures by group of clients and model."""
    runs, prepared = measure.load_runs([run])
    drawn = {name: list(measure.sampled(some, words, SEED)) for name, some in measure.held_out(prepared).items()}
    groups = {name: clients for name, clients in drawn.items() if clients}
    forms = written_forms((c.train for c in prepared.population.trained), prepared.vocab)
    lists = lists_of(prepared.vocab, prepared, None)
    rows: dict[str, dict[str, list[measure.Counts]]] = {}
    for row in measure.candidates(runs, prepared):
        if row.personal:
            continue
        print(f"typing on {row.name}", file=sys.stderr)
        clock = measure.KeystrokeClock()
        with Decoder(prepared.vocab, row.source, forms=forms, settings={"emoji": False}, lists=lists) as keyboard:
            rows[name_of(row.name)] = {
                group: measure.type_clients(keyboard, clients, clock, None, learns=False)
                for group, clients in groups.items()
            }
    if MIXTURE not in rows:
        raise SystemExit(f"{run} has no counts; count first: keyfed counts {run}")
    figures = {
        group: {name: figure(own[group], rows[MIXTURE][group]) for name, own in rows.items()} for group in groups
    }
    about = {"method": runs[0].method, "rounds": runs[0].config.train.rounds, "seed": runs[0].config.train.seed}
    return {"data": prepared.corpus.name, **about, "words": words, "groups": figures}


def figure(own: Sequence[measure.Counts], mixture: Sequence[measure.Counts]) -> dict[str, Any]:
    """Return a model's share of saved keystrokes, and how many more the mixture saves."""
    characters = [c.characters for c in own]
    saved = ratio([c.characters - c.strokes for c in own], characters)
    gain = ratio([a.strokes - b.strokes for a, b in zip(own, mixture, strict=True)], characters)
    top3 = ratio([c.top3 for c in own], [c.words for c in own])
    return {
        "clients": len(own), "words": sum(c.words for c in own), "characters": sum(characters),
        "saved": saved, "gain": gain, "top3": top3,
    }  # fmt: skip


def tables(measured: Mapping[str, Any]) -> str:
    """Return the tables of one corpus."""
    found = []
    for group, rows in measured["groups"].items():
        first = next(iter(rows.values()))
        cells = [["", "keystrokes saved", "the mixture saves more by", "next word among three"]]
        for name, row in rows.items():
            ahead = "" if name == MIXTURE else points(row["gain"])
            cells.append([name, points(row["saved"]), ahead, points(row["top3"])])
        title = (
            f"`{measured['data']}`, {group} clients: {first['words']:,} words of {first['clients']:,}; "
            f"{measured['method']}, {measured['rounds']:,} rounds, seed {measured['seed']}. Points ± one standard "
            "error:"
        )
        found.append(f"{title}\n\n{markdown_table(cells, numbers=True)}")
    return "\n\n".join(found)


def points(found: Sequence[float]) -> str:
    return f"{100 * found[0]:.2f} ± {100 * found[1]:.2f}"


STORED = Stored(
    "keyboard_mixture", "keyboard-mixture.json", "## What the mixture saves",
    lambda every: "\n\n".join(map(tables, every.values())),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="keystrokes that the mixture saves")
    parser.add_argument("run", type=Path)
    parser.add_argument("--words", type=int, default=WORDS, help="of each group of clients")
    parser.add_argument("--write", action="store_true", help="write the figures and docs/keyboard.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = typed(options.run, options.words)
    print(tables(found))
    if options.write:
        STORED.write({**(STORED.figures() or {}), found["data"]: found})


if __name__ == "__main__":
    main()
