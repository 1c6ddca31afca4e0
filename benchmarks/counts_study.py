"""What a federation's counts and their mixture are worth: irc as streams, and PTB with 100 clients.

    python benchmarks/counts_study.py --data-dir FOLDER [--only irc ptb] [--device cuda] [--work work/counts]
                                      [--out docs/results/data/counts.json]
    python benchmarks/counts_study.py --runs RUN ... [--out FILE]

Trains the cells `irc, streams | federated` of studies/models.toml and `0.1 | fresh` of studies/ptb-50.toml, or takes
finished runs. Each run is counted with k = 3 and tested on its whole test text. A row is a model: Kneser-Ney-5 and
counts of all text in one place, the network, federated counts, the mixture, and the mixture with each client's own
cache. Pooled counts are smoothed as the federation's are, with k = 1 and nothing clipped: they say what k and M cost.

Needs torch, numpy and safetensors only. The sums are added in the clear (`keyfed counts --clear`), to the integers that
masked sums have, for masks need a package of their own. Runs in the file already are not trained again. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.files import write_atomically
from keyfed.lab.experiment.cell import Workspace, config_of
from keyfed.lab.experiment.grid import cells_of, load_study
from keyfed.model.counts import CountModel, CountTerms
from keyfed.model.mixture import BEST
from keyfed.model.output import Score
from keyfed.model.tables import GramTable, Texts, last_rows, texts_of, written
from keyfed.reports.finished import with_data
from keyfed.run.console import followed
from keyfed.run.counts.command import Counting, count_run, read_counts, score_counts, sum_groups
from keyfed.run.counts.fit import MOST_TOKENS, fit_levels, opening
from keyfed.run.counts.mixing import Dense, laid_out, score_text
from keyfed.run.counts.release import longest
from keyfed.run.evaluate import headline, scorer_of, total
from keyfed.run.folder import Trained, strict
from keyfed.run.loop import train
from keyfed.run.prepare import Prepared
from keyfed.run.result import score_baselines
from keyfed.text.vocab import EOS

STUDIES = Path(__file__).parents[1] / "studies"
CELLS: Mapping[str, tuple[str, Mapping[str, str], tuple[int, ...]]] = {
    "irc": ("models", {"corpus": "irc, streams", "model": "federated"}, (31, 32, 33)),
    "ptb": ("ptb-50", {"C": "0.1", "recipe": "fresh"}, (21, 22, 23)),
}
ROWS = {
    "unigram": "unigram",
    "kneser_ney": "Kneser–Ney-5, pooled",
    "pooled": "counts, pooled",
    "network": "network",
    "counts": "counts, k = 3",
    "mixture": "mixture",
    "cache": "mixture + own cache",
}
ROWS_READ = 128  # positions whose distributions are held at a time
FIGURES = ("perplexity", "top1_words", "top3_words")


def configs(name: str, workspace: Workspace) -> Iterator[tuple[int, Any]]:
    """Yield a corpus's seeds and configurations, as its study has them."""
    study, labels, seeds = CELLS[name]
    for cell in cells_of(load_study(study, STUDIES), "standard", seeds):
        if dict(cell.labels) == dict(labels):
            yield cell.seed, config_of(cell.settings, cell.seed, workspace)


def pooled_tables(text: Texts, order: int, vocab: int) -> list[GramTable]:
    """Return every n-gram of a text, each use counted."""
    tables: list[GramTable] = []
    for _ in range(order):
        found = written(text, tables, vocab)
        keys, place = np.unique(found.key, return_inverse=True)
        if not keys.size:
            break
        counts = np.bincount(place, weights=found.count).astype(np.int64)
        suffix = last_rows(keys, tables, vocab) if tables else np.zeros(keys.size, np.int64)
        tables.append(GramTable(keys, np.bincount(place), counts, suffix))
    return tables


def pooled_counts(trained: Trained, prepared: Prepared, how: Counting) -> CountModel:
    """Return the count model of all text in one place, smoothed on the same validation text as the federation's."""
    store, vocab = prepared.store, len(trained.vocab)
    text = texts_of([store.stream(k) for k in range(len(store))], EOS if trained.reads_lines else None)
    published = prepared.population.valid is not None
    fitting = sum_groups(prepared, trained, how, opening(prepared.valid, None if published else MOST_TOKENS), published)
    most = longest(fitting) if published else MOST_TOKENS
    tables = pooled_tables(text, how.order, vocab)
    about = CountTerms(how.k, how.cap, how.most, len(store), "")
    model = fit_levels(fitting, tables, vocab, most=most)
    return CountModel(model, tuple(t.clients for t in tables), tuple(t.counts for t in tables), about)


def score_alone(model: CountModel, streams: Mapping[str, Any], lines: bool) -> Score:
    """Test counts alone, ranked by whole distributions: `KneserNey.top` is not exact where counts back off."""
    text = texts_of(list(streams.values()), EOS if lines else None)
    laid, dense = laid_out(model, text, BEST, lines), Dense(model)
    nats, rank = np.zeros(text.tokens.size), np.zeros(text.tokens.size, np.int64)
    room = np.empty((ROWS_READ, dense.vocab), np.float32)
    chosen = np.flatnonzero(text.predicted)
    for at in range(0, chosen.size, ROWS_READ):
        places = chosen[at : at + ROWS_READ]
        p = room[: places.size]
        dense.write(laid.contexts, places, p)
        own = np.take_along_axis(p, text.tokens[places][:, None], 1)
        nats[places], rank[places] = -np.log(own[:, 0]), (p > own).sum(1)
    return score_text(text, nats, rank)


def measure(run: Path, how: Counting, device: str, order: int = 5) -> dict[str, Any]:
    """Count and mix a finished run; return the figures of all models on its test text and on unseen clients' text."""
    trained, prepared = with_data(run, None)
    report = count_run(trained, prepared, how, say)
    found = read_counts(trained)
    assert found is not None
    pooled = pooled_counts(trained, prepared, how)
    kind = trained.config.data.batching
    rows: dict[str, Any] = score_baselines(prepared, order)
    for name, split in score_counts(trained, prepared, *found, device).items():
        rows[name] = {key: score and score.summary() for key, score in split.items()}
    rows["network"] = {
        "test": headline(trained.spec, trained.params, prepared.test, kind)[1],
        "unseen": total(scorer_of(kind)(trained.spec, trained.params, prepared.unseen)).summary()
        if prepared.unseen else None,
    }  # fmt: skip
    rows["pooled"] = {
        split: score_alone(pooled, streams, trained.reads_lines).summary() if streams else None
        for split, streams in (("test", prepared.test), ("unseen", prepared.unseen))
    }
    return {
        "data": prepared.corpus.name,
        "seed": trained.config.train.seed,
        "rounds": trained.config.train.rounds,
        "clients": len(prepared.store),
        "k": how.k,
        "order": how.order,
        "released": [level.released for level in report.levels],
        "megabytes": sum(report.sent.values()) / 1e6,
        "rows": {
            name: {split: figures and {key: figures[key] for key in FIGURES} for split, figures in (
                ("test", rows[name]["test"]), ("unseen", rows[name]["unseen"]))}
            for name in ROWS
        },
    }  # fmt: skip


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table, one for each corpus and model: mean and standard deviation over seeds."""
    lines = [
        "| corpus, seeds | model | perplexity | against the network | top-1 of words | top-3 of words |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for data in dict.fromkeys(run["data"] for run in runs):
        own = [run for run in runs if run["data"] == data]
        seeds = ", ".join(str(run["seed"]) for run in own)
        for name, label in ROWS.items():
            figures = [[run["rows"][name]["test"][key] for run in own] for key in FIGURES]
            gain = [
                run["rows"][name]["test"]["perplexity"] / run["rows"]["network"]["test"]["perplexity"] - 1
                for run in own
            ]
            perplexity, top1, top3 = figures
            lines.append(
                f"| {data}, {seeds} | {label} | {_spread(perplexity, '.1f')} | {100 * statistics.fmean(gain):+.1f} % | "
                f"{_spread([100 * x for x in top1], '.2f')} % | {_spread([100 * x for x in top3], '.2f')} % |"
            )
    return lines


def _spread(values: Sequence[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {format(statistics.stdev(values), form)}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="counts and mixture of a federation, measured")
    parser.add_argument("--runs", nargs="+", type=Path, help="finished runs to count, in place of training")
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("work/counts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/data/counts.json"))
    chosen = parser.parse_args(arguments)
    workspace = Workspace(chosen.work, chosen.device, chosen.data_dir)
    how = Counting(secure=False)
    done = json.loads(chosen.out.read_text("utf-8"))["runs"] if chosen.out.exists() else []
    for run in _runs(chosen.runs, chosen.only, workspace, {(row["name"], row["seed"]) for row in done}):
        done.append({"name": run.name, **measure(run, how, workspace.where())})
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(chosen.out, json.dumps(strict({"runs": done}), indent=1, allow_nan=False).encode())
    print("\n".join(table(done)))


def _runs(
    finished: Sequence[Path] | None, only: Sequence[str], workspace: Workspace, known: set[tuple[str, int]]
) -> Iterator[Path]:
    """Yield the folders of finished runs that are not measured yet, trained here where none were named."""
    if finished:
        yield from finished
        return
    for name in only:
        for seed, config in configs(name, workspace):
            folder = workspace.work / f"{name}-{seed}"
            if (folder.name, seed) in known:
                continue
            bare = replace(config, train=replace(config.train, baselines=False))
            with followed() as listener:
                train(bare, folder, resume=folder.exists(), listener=listener)
            yield folder


if __name__ == "__main__":
    main()
