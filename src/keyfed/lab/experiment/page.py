"""A study's page of docs/results, written from the cells' JSON files alone: every number on it is generated.

`write_page` writes the page and its plots; a test writes the texts again and compares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.files import write_atomically
from keyfed.lab.experiment.causes import Results, causes
from keyfed.lab.experiment.claims import Claim
from keyfed.lab.experiment.front import GENERATED, STANDING
from keyfed.lab.experiment.grid import Study
from keyfed.lab.experiment.plots import describe, draw_plots, drawn
from keyfed.lab.experiment.runner import finished
from keyfed.lab.experiment.statistics import FIXED, spreads_of
from keyfed.lab.experiment.table import Row, main_scale, rows_of, write_printed, write_row, write_seeds, write_value
from keyfed.lab.experiment.verdicts import FAR, LEARNING, Comparison, compare_rows, said_verdict
from keyfed.reports.document import (
    NONE,
    Block,
    Heading,
    Links,
    Picture,
    Table,
    Text,
    facts_table,
    show_duration,
    to_markdown,
)

COLUMNS = {
    "perplexity": "test perplexity", "top1": "top-1", "top3": "top-3", "top1_words": "top-1 without oov and eos",
    "top3_words": "top-3 without oov and eos",
    "nats": "nats", "honest_sentence_perplexity": "honest sentence perplexity", "train_nats": "training nats",
    "unseen_perplexity": "perplexity of unseen clients", "sentence_perplexity": "sentence perplexity",
    "sentence_top1": "top-1, line by line", "sentence_top1_words": "top-1 of words, line by line",
    "sentence_top3_words": "top-3 of words, line by line", "honest_nats": "honest nats",
    "accuracy": "accuracy at the start of the last round", "first_accuracy": "accuracy before training",
}  # fmt: skip
MOST_LISTED = 30  # open cells that are named
UNKNOWN = f"unknown, one seed; a ratio of more than {FAR:g} is told and nothing else"
CLOSE = ("printed", "close")  # kinds of claims that have a tolerance
MORE_SEEDS = "Rows with more seeds have them from other runs of the same cells."
LEFT_OUT = "Rows that are the same as above are left out."
HEADS = {False: "What the paper says", True: "Our own goals and checks"}


def write_page(study: Study, results: Path) -> list[Path]:
    """Write a study's page and its plots; without matplotlib the plots that are there stay."""
    found = finished(results, study)
    results.mkdir(parents=True, exist_ok=True)
    page = results / f"{study.name}.md"
    write_atomically(page, page_text(study, found).encode())
    written = [page]
    scale = main_scale(study, found)
    try:
        plots = draw_plots(study, rows_of(study, scale, found), scale) if scale else {}
    except ImportError:
        plots = {}
    for name, image in plots.items():
        (results / "img").mkdir(exist_ok=True)
        written.append(results / picture(study, name))
        write_atomically(written[-1], image)
    return written


def picture(study: Study, plot: str) -> str:
    """Where a plot lies, seen from the pages."""
    return f"img/{study.name}-{plot}.png"


def page_text(study: Study, found: Results, folder: Path | None = None) -> str:
    """Return a study's page; `folder` holds the studies that a cause may read numbers of."""
    scale = main_scale(study, found)
    blocks: list[Block] = [Heading(study.title, 1), Text(study.about)]
    if scale is None:
        blocks.append(Text(f"Nothing has been run yet: keyfed study {study.name} --scale smoke", "verdict"))
        return GENERATED + to_markdown(blocks)
    rows = rows_of(study, scale, found)
    blocks += [Text(line, "verdict") for line in verdict_lines(study, rows, scale)]
    blocks += [
        Text(f"Scale {scale}: {study.scales[scale].why}.{_more_seeds(study, rows, scale)}"),
        Table(result_table(study, rows)),
        *pictures(study, rows, scale),
        *claim_blocks(study, rows, scale, found, folder),
        Heading("How to read it"),
        *(Text(note) for note in study.notes),
        *_exploration(rows),
        Heading("What made it"),
        facts_table(facts(study, rows)),
    ]
    blocks += _open(study, rows, scale)
    shown = {record["id"] for row in rows for record in row.records}
    for other in study.scales:
        there = [row for row in rows_of(study, other, found) if row.records]
        own = [row for row in there if {record["id"] for record in row.records} - shown]
        if other != scale and own:
            left_out = f" {LEFT_OUT}" if len(own) < len(there) else ""
            blocks += [
                Heading(f"At scale {other}"),
                Text(f"{study.scales[other].why}.{left_out}{_more_seeds(study, own, other)}"),
                Table(result_table(study, own)),
            ]
    return GENERATED + to_markdown(blocks)


def _more_seeds(study: Study, rows: Sequence[Row], scale: str) -> str:
    """Where seeds come from that a scale does not ask for; empty where there are none."""
    asked = study.scales[scale].seeds_of
    return f" {MORE_SEEDS}" if any(row.seeds - set(asked(row.labels)) for row in rows) else ""


def verdict_lines(study: Study, rows: Sequence[Row], scale: str) -> list[str]:
    """One line a claim: what is said, and whether it holds."""
    return [f"{'Ours. ' if claim.ours else ''}{_said(study, rows, claim, scale)}" for claim in study.claims]


def _said(study: Study, rows: Sequence[Row], claim: Claim, scale: str) -> str:
    return f"{claim.says[0].upper()}{claim.says[1:]}: {said_verdict(study, rows, claim, scale)}."


def result_table(study: Study, rows: Sequence[Row]) -> list[list[str]]:
    """One row a configuration: labels, ours ± spread, the printed value."""
    axes = list(dict.fromkeys(axis for row in rows for axis in row.labels))
    printed = [m for m in study.measures if any(study.printed(row.labels, m) is not None for row in rows)]
    shown = [m for m in study.measures if any(m in r["measures"] for row in rows for r in row.records)]
    head = [*axes]
    for measure in shown:
        head.append(COLUMNS.get(measure, measure.replace("_", " ")))
        head += ["printed"] if measure in printed else []
    chosen, trained = any(row.chosen for row in rows), any(row.tokens for row in rows)
    table = [[*head, *(["chosen round"] if chosen else []), *(["local tokens"] if trained else []), "seeds"]]
    for row in rows:
        cells = [row.labels.get(axis, NONE) for axis in axes]
        for measure in shown:
            cells.append(write_row(row, measure))
            cells += [write_printed(study.printed(row.labels, measure), measure)] if measure in printed else []
        cells += [row.chosen or NONE] if chosen else []
        cells += [row.tokens or NONE] if trained else []
        table.append([*cells, str(len(row.records)) if row.records else NONE])
    return table


def pictures(study: Study, rows: Sequence[Row], scale: str) -> list[Block]:
    """The plots that `draw_plots` draws, as links."""
    return [
        Picture(picture(study, plot["name"]), describe(study, plot, rows, scale), b"", b"")
        for plot in drawn(study, rows)
    ]


def claim_blocks(
    study: Study, rows: Sequence[Row], scale: str, found: Results, folder: Path | None = None
) -> list[Block]:
    """Every comparison behind the verdicts, why it is so, and where the rule is: the paper's claims, then ours."""
    blocks: list[Block] = []
    for ours, head in HEADS.items():
        claims = [claim for claim in study.claims if claim.ours == ours]
        blocks += [Heading(head)] if claims else []
        for claim in claims:
            comparisons = compare_rows(study, rows, claim)
            blocks.append(Text(_said(study, rows, claim, scale)))
            if scale != "smoke" and (why := causes(claim, study, found, folder)):
                blocks.append(Text(" ".join(why)))
            if scale != "smoke" and any(c.verdict == LEARNING for c in comparisons):
                blocks.append(Text(_waits(comparisons)))
            if comparisons:
                table = [_head(claim), *(_cells(c, claim, scale) for c in comparisons)]
                blocks += [Text(_spreads(rows, comparisons, claim)), Table(table)]
    return [*blocks, Links([("How a verdict is told", STANDING)])] if blocks else []


def _waits(comparisons: Sequence[Comparison]) -> str:
    """Why rows do not count for a claim about what methods can reach."""
    reasons = dict.fromkeys(reason for c in comparisons for reason in c.waits.split("; ") if reason)
    return f"It is about what a method can reach. What keeps rows from being judged: {'; '.join(reasons)}."


def _spreads(rows: Sequence[Row], comparisons: Sequence[Comparison], claim: Claim) -> str:
    """The spread over seeds that the limits come from, and the tolerance."""
    runners = {row.runner for c in comparisons for row in (c.row, c.against) if row is not None}
    tolerance = f" Tolerance {100 * claim.within:g} %." if claim.kind in CLOSE else ""
    if claim.kind == "printed" and claim.measure == "perplexity" and any(c.row.evaluation() for c in comparisons):
        tolerance = f"{tolerance.removesuffix('.')} and two standard deviations of one evaluation."
    if runners <= set(FIXED):
        return f"Nothing here is random.{tolerance}"
    if claim.kind == "below" and any(len(c.row.records) > 1 for c in comparisons):
        seeds = "; ".join(f"{c.where}: {write_seeds(c.row, claim.measure)}" for c in comparisons if c.row.records)
        return f"Seeds of the row itself: {seeds}."
    told = [
        f"{runner}: s = {100 * spread.sd:.2f} %, ν = {spread.freedom}"
        for runner, spread in spreads_of([row for row in rows if row.records], claim.measure).items()
        if spread.sd is not None and runner in runners
    ]
    return f"Spread over seeds: {'; '.join(told) or UNKNOWN}.{tolerance}"


def _head(claim: Claim) -> list[str]:
    """The header of a claim's table, by what the rows are compared with."""
    labels = [claim.of.get(axis) for axis in claim.than]
    own = ", ".join(map(str, labels)) if labels and all(isinstance(label, str) for label in labels) else "ours"
    than = ", ".join(claim.than.values()) or ("bound" if claim.kind == "below" else "printed")
    limits = ["holds between", "does not hold beyond"] if claim.kind in CLOSE else ["cannot be told between"]
    return ["where", own, than, "difference", *limits, *(["printed difference"] if claim.than else []), "verdict"]


def _cells(c: Comparison, claim: Claim, scale: str) -> list[str]:
    def percent(change: float) -> str:
        return f"{100 * math.expm1(change):+.1f} %"

    write = write_value if claim.than else write_printed
    values = (write_value(c.ours, claim.measure), write(c.other, claim.measure))
    ours, other = (f"> {value}" if beyond else value for value, beyond in zip(values, c.beyond, strict=True))
    wanted = (c.limits, c.outer) if claim.kind in CLOSE else (c.limits,)
    limits = [NONE if pair is None else " to ".join(map(percent, pair)) for pair in wanted]
    printed = NONE if c.printed is None else percent(math.log(c.printed[0] / c.printed[1]))
    side = "> " if c.beyond[0] else "< " if c.beyond[1] else ""  # of a lower bound
    return [c.where, ours, other, NONE if c.change is None else f"{side}{percent(c.change)}", *limits,
            *([printed] if claim.than else []), NONE if scale == "smoke" else c.verdict]  # fmt: skip


def _exploration(rows: Sequence[Row]) -> list[Block]:
    """Tables of a first look at a corpus."""
    blocks: list[Block] = []
    for row in rows:
        for record in row.records:
            found = record.get("facts")
            if found:
                table = [["rank", "word", "count", "pair of words", "count"]]
                pairs = zip(found["unigrams"], found["bigrams"], strict=False)
                table += [[str(n), u[0], f"{u[1]:,}", b[0], f"{b[1]:,}"] for n, (u, b) in enumerate(pairs, 1)]
                blocks += [Heading(f"Most frequent in {record['data']}, stop words left out"), Table(table)]
    return blocks


def facts(study: Study, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Seeds, versions, hardware, data hashes, sizes, time."""
    records = [record for row in rows for record in row.records]
    made = [record["made"] for record in records]

    def several(values: Sequence[Any]) -> str:
        counts = Counter(str(value) for value in values if value is not None)
        return ", ".join(f"{value} ({n} cells)" if len(counts) > 1 else value for value, n in sorted(counts.items()))

    hashes = {(f"SHA-256 of {r['data']}", r["data_sha256"]) for r in records if r.get("data_sha256")}
    for key, of in (("vectors_sha256", "vectors.file"), ("first_data_sha256", "first.data.name")):
        hashes |= {(f"SHA-256 of {r['settings'][of]}", r[key]) for r in records if r.get(key)}
    starts = [r for r in records if r.get("init_sha256")]
    hashes |= {(f"SHA-256 of the starting weights, {r['settings']['train.init']}", r["init_sha256"]) for r in starts}
    out = [
        ("seeds", ", ".join(map(str, sorted({r["seed"] for r in records})))),
        ("hardware", several([m["hardware"] for m in made])),
        ("versions", f"keyfed {several([m['keyfed'] for m in made])}; torch {several([m['torch'] for m in made])}; "
                     f"Python {several([m['python'] for m in made])}"),
        ("precision", several([r.get("precision") for r in records]) or NONE),
        ("validation", several([_validation(r) for r in records]) or NONE),
        *sorted(hashes),
        ("tokens trained", f"{sum(r.get('tokens_trained') or 0 for r in records):,}"),
        ("time, summed over cells that may have run side by side",
         show_duration(sum(r.get("seconds") or 0.0 for r in records))),
    ]  # fmt: skip
    parameters = sorted({(r["model"], r["parameters"]) for r in records if r.get("parameters")})
    out += [("parameters", "; ".join(f"{model} {count:,}" for model, count in parameters))] if parameters else []
    out += sorted((f"options of {method}", told) for method, told in _options(records).items())
    shuffled = [(row, record["shuffles"]) for row in rows for record in row.records if record.get("shuffles")]
    for row, s in shuffled:
        spread = "" if s["sd"] is None else f", standard deviation {s['sd']:.2f}"
        where = ", ".join(row.labels.values())
        out.append((f"{where}: {s['count']} shuffles of the test", f"{s['lowest']:.2f} to {s['highest']:.2f}{spread}"))
    return out


def _options(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A method's options that all its cells have in common, defaults too; what differs is in the rows' settings."""
    shared: dict[str, dict[str, Any]] = {}
    for record in records:
        own = record.get("options") or {}
        before = shared.setdefault(str(record.get("method")), own)
        shared[str(record.get("method"))] = {k: v for k, v in before.items() if k in own and own[k] == v}
    return {
        method: ", ".join(f"{key} {'none' if value is None else value}" for key, value in options.items())
        for method, options in shared.items()
        if options
    }


def _validation(record: Mapping[str, Any]) -> str | None:
    """How much of the validation text a round's figure is of, where a cell's settings say it."""
    tokens = record.get("settings", {}).get("train.valid_tokens")
    return None if tokens is None else "all tokens" if tokens == "none" else f"{tokens:,} tokens"


def _open(study: Study, rows: Sequence[Row], scale: str) -> list[Block]:
    """What is still to run, and what nobody here can run."""
    done = {record["id"] for row in rows for record in row.records}
    left = [cell for row in rows for cell in row.cells if cell.id not in done and not cell.absent]
    absent = sorted({(", ".join(row.labels.values()), row.absent) for row in rows if row.absent})
    blocks: list[Block] = [Heading("Open")]
    blocks += [Text(f"Absent: {where}: {why}.") for where, why in absent]
    if not left:
        return [*blocks, Text(f"Every cell of scale {scale} is finished.")]
    blocks.append(Text(f"Open cells of scale {scale}: {len(left)}. keyfed study {study.name} --scale {scale}"))
    table = [["cell", "seed"], *([", ".join(c.labels.values()), str(c.seed)] for c in left[:MOST_LISTED])]
    if len(left) > MOST_LISTED:
        table.append([f"and {len(left) - MOST_LISTED} more", NONE])
    return [*blocks, Table(table)]
