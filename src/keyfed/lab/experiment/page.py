"""The page of a study in docs/results. Those on all studies together are in summary.py.

It is written from the cells' JSON files and the study's claims alone. `write_page` writes a study's page and its
plots; a test writes the texts again and compares.

A cause is a sentence of the study's file with numbers in braces, read from the cells:
`{mean.perplexity | data = PTB | method = positional unigram}`. First what, then the labels of the row. What is `mean`,
`spread` (mean ± standard deviation), `seeds` (every one), `range` (lowest to highest mean of several rows) or
`printed`, and the measure; `{verdict.NAME}` is the verdict on the claim of that name. `STUDY/` before it reads another
study. A sentence with a number that is not there yet, or of smoke scale only, is left out.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError, nearest
from keyfed.files import write_atomically
from keyfed.lab.experiment.claims import (
    CLOSE,
    FAR,
    FIXED,
    LEARNING,
    Comparison,
    compare_rows,
    said_verdict,
    searched,
    verdict_on,
)
from keyfed.lab.experiment.grid import Cell, Study, StudyClaim, cells_of, load_study, matches, study_folder, study_names
from keyfed.lab.experiment.plots import describe, draw_plots, drawn
from keyfed.lab.experiment.search import TRIAL, Draw, at_edge, reached
from keyfed.lab.experiment.store import (
    OPEN,
    Race,
    Row,
    Store,
    main_scale,
    races,
    rows_of,
    write_printed,
    write_row,
    write_seeds,
    write_value,
)
from keyfed.reports.document import NONE, Table, escape_markdown, markdown_table, show_duration, to_markdown

TEMPLATES = Path(__file__).with_name("templates")
PAGE, SEARCH_PAGE = "study.md", "search.md"
DIVERGED = "diverged"
Results = Mapping[str, Mapping[str, Any]]
BRACES = re.compile(r"\{([^{}]*)\}")
ONE_ROW: Mapping[str, Callable[[Row, str], str]] = {
    "mean": lambda row, measure: write_value(row.mean(measure), measure),
    "spread": write_row,
    "seeds": write_seeds,
}
WHAT = (*ONE_ROW, "range", "printed", "verdict")


@functools.cache
def templates() -> Any:
    """The pages' templates; `md` escapes a text for Markdown, `table` writes rows of text, the header first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(  # pages are Markdown, and every text goes through `md` or `table`
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    found.filters["md"] = escape_markdown
    found.filters["table"] = lambda rows, numbers=True: to_markdown([Table(rows, numbers)]).rstrip("\n")
    return found


def render(template: str, **values: Any) -> str:
    """Fill a page's template."""
    return str(templates().get_template(f"{template}.jinja").render(values))


def percent(change: float) -> str:
    """Write a change, given as a logarithm."""
    return f"{100 * math.expm1(change):+.1f} %"


def interval_of(c: Comparison) -> str:
    """Between what the difference lies, at the level at which Holm's rule decided it."""
    return NONE if c.interval is None else " to ".join(map(percent, c.interval))


COLUMNS = {
    "perplexity": "test perplexity", "top1": "top-1", "top3": "top-3", "top1_words": "top-1 without oov and eos",
    "top3_words": "top-3 without oov and eos",
    "nats": "nats", "honest_sentence_perplexity": "honest sentence perplexity", "train_nats": "training nats",
    "unseen_perplexity": "perplexity of unseen clients", "sentence_perplexity": "sentence perplexity",
    "sentence_top1": "top-1, line by line", "sentence_top1_words": "top-1 of words, line by line",
    "late_top1": "top-1, mean of the last 100 rounds' validations",
    "late_top1_words": "top-1 of words, mean of the last 100 rounds' validations",
    "sentence_top3_words": "top-3 of words, line by line", "honest_nats": "honest nats",
    "general_perplexity": "perplexity before personalisation", "personal_perplexity": "after personalisation",
    "personal_ratio": "after / before", "general_top1_words": "top-1 of words before",
    "personal_top1_words": "top-1 of words after", "gaining": "share of clients that gain",
    "accuracy": "accuracy at the start of the last round", "first_accuracy": "accuracy before training",
    "types": "different characters", "adaptive_rounds": "share of rounds weighed by attention",
    "effective_clients": "effective clients, mean of rounds and layers",
}  # fmt: skip
UNKNOWN = f"unknown, one seed; a ratio of more than {FAR:g} decides, and nothing else"
MORE_SEEDS = "Rows with more seeds have them from other runs of the same cells."
LEFT_OUT = "Rows that are the same as above are left out."
HEADS = {False: "What the paper says", True: "Our own goals and checks"}


def write_page(study: Study, store: Store) -> list[Path]:
    """Write a study's page and its plots, remove those that it shows no more; without matplotlib the others stay."""
    results, found = store.results, store.of(study)
    results.mkdir(parents=True, exist_ok=True)
    page = results / f"{study.name}.md"
    write_atomically(page, page_text(study, found).encode())
    written = [page]
    scale = main_scale(study, found)
    rows = rows_of(study, scale, found) if scale else []
    shown = [plot["name"] for plot in drawn(study, rows)]
    for gone in (plot["name"] for plot in study.plots if plot["name"] not in shown):
        (results / picture(study, gone)).unlink(missing_ok=True)
    try:
        plots = draw_plots(study, rows, scale) if scale else {}
    except ImportError:
        plots = {}
    for name, image in plots.items():
        (results / "img").mkdir(exist_ok=True)
        written.append(results / picture(study, name))
        write_atomically(written[-1], image)
    return written


TUNED = "methods"  # the study whose table stands in the README
BEGIN, END = "<!-- methods: generated by `keyfed study report methods`; do not edit -->", "<!-- end of methods -->"


def methods_block(study: Study, found: Results) -> str:
    """Return the README's table of methods: test perplexity on every corpus, and what the search of each has cost."""
    rows = [row for row in rows_of(study, "standard", found) if row.records]
    if not rows:
        return (
            "The search of every method with equal budgets ([search](docs/results/search.md)) and its judgement "
            "([methods](docs/results/methods.md)) are open. Until they are there, [a table of one "
            "seed](docs/tour.md#methods-measured) stands in."
        )
    corpora = list(dict.fromkeys(row.labels["corpus"] for row in rows))
    table = [["method", *(f"{corpus}: test perplexity" for corpus in corpora), "trials", "tokens searched", "seeds"]]
    order = sorted(rows, key=lambda row: row.mean("perplexity") or math.inf)
    for method in dict.fromkeys(row.labels["method"] for row in order):
        own = {row.labels["corpus"]: row for row in rows if row.labels["method"] == method}
        budgets = [search for row in own.values() if (search := searched(study, row)) is not None]
        trials = sorted({search.trials for search in budgets})
        tokens = [search.tokens / 1e6 for search in budgets]
        seeds = sorted({len(row.records) for row in own.values()})
        table.append([
            f"`{method}`", *(write_row(own[c], "perplexity") if c in own else NONE for c in corpora),
            "–".join(map(str, trials)), f"{min(tokens):.0f}–{max(tokens):.0f} M" if tokens else NONE,
            "–".join(map(str, seeds)),
        ])  # fmt: skip
    text = markdown_table(table, numbers=True)
    pages = "[methods](docs/results/methods.md), [search](docs/results/search.md)"
    return f"{text}\n\nEvery cell, verdict and setting: {pages}."


def with_block(text: str, block: str) -> str:
    """Put the table of methods between its marks; a text without them stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{block}\n{end}{after}" if end else text


def write_readme(folder: Path, store: Store) -> None:
    """Write the table of methods into the README next to the studies, where the results are those of the same tree."""
    readme = folder.parent / "README.md"
    if store.results.resolve() != (folder.parent / "docs" / "results").resolve() or not readme.is_file():
        return
    if TUNED in study_names(folder):
        study = load_study(TUNED, folder)
        text = readme.read_text("utf-8")
        write_atomically(readme, with_block(text, methods_block(study, store.of(study))).encode())


def picture(study: Study, plot: str) -> str:
    """Where a plot lies, seen from the pages."""
    return f"img/{study.name}-{plot}.png"


def page_text(study: Study, found: Results, folder: Path | None = None) -> str:
    """Return a study's page; `folder` holds the studies that a cause may read numbers of."""
    scale = main_scale(study, found)
    if study.search is not None:
        return search_text(study, scale or "standard", found)
    if scale is None:
        return render(PAGE, study=study, scale=None)
    rows = rows_of(study, scale, found)
    done = {record["id"] for row in rows for record in row.records}
    left = [cell for row in rows for cell in row.cells if cell.id not in done and not cell.absent]
    further = []
    for other in study.scales:
        there = [row for row in rows_of(study, other, found) if row.records]
        own = [row for row in there if {record["id"] for record in row.records} - done]
        if other != scale and own:
            left_out = f" {LEFT_OUT}" if len(own) < len(there) else ""
            words = f"{study.scales[other].why}.{left_out}{_more_seeds(study, own, other)}"
            further.append((other, words, result_table(study, own)))
    groups = {
        head: [_claim(study, rows, claim, scale, found, folder) for claim in study.claims if claim.ours == ours]
        for ours, head in HEADS.items()
    }
    return render(
        PAGE,
        study=study,
        scale=scale,
        verdicts=verdict_lines(study, rows, scale),
        more_seeds=_more_seeds(study, rows, scale),
        table=result_table(study, rows),
        pictures=[(picture(study, plot["name"]), describe(study, plot, rows, scale)) for plot in drawn(study, rows)],
        groups=[(head, claims) for head, claims in groups.items() if claims],
        explored=_exploration(rows),
        facts=[("", ""), *facts(rows)],
        absent=sorted({(", ".join(row.labels.values()), row.absent) for row in rows if row.absent}),
        open=[[", ".join(cell.labels.values()), str(cell.seed)] for cell in left],
        further=further,
    )


def search_text(study: Study, scale: str, found: Results) -> str:
    """Return the page of a search: the winner of every row, then every trial with what it reached at each rung."""
    assert study.search is not None
    rungs, every = study.search.rungs[scale], races(study, cells_of(study, scale), found)
    axes = list(dict.fromkeys(axis for race in every for axis in race.labels))
    trials = [[*axes, TRIAL, "settings", *(f"{100 * rung.share:g} %" for rung in rungs)]]
    for race in every:
        for cell in race.trials:
            scores = [DIVERGED if at[2] is None else write_value(at[2], "perplexity")
                      for at in reached(race.records.get(cell.id))]  # fmt: skip
            labels = [race.labels.get(axis, NONE) for axis in axes]
            scores += [NONE] * (len(rungs) - len(scores))
            trials.append([*labels, cell.labels[TRIAL], _drawn(study, cell), *scores])
    rows = [row for row in rows_of(study, scale, found) if row.records]
    whole = float(every[0].trials[0].settings["study.tokens"])
    each = study.search.tokens(scale) * whole / 1e6
    left = sum(race.left for race in every)
    return render(
        SEARCH_PAGE, study=study, scale=scale, rungs=[(rung.trials, f"{rung.share * whole:,.0f}") for rung in rungs],
        each=f"{each:,.1f}", whole=f"{each * len(every):,.0f}",
        wins=winner_table(study, every), trials=trials if rows else [], left=left,
        facts=[("", ""), *facts(rows)] if rows else [],
    )  # fmt: skip


def winners_in(study: Study, scale: str, store: Store) -> list[list[str]]:
    """The table of a search's winners by now."""
    return winner_table(study, races(study, cells_of(study, scale), store.of(study)))


def winner_table(study: Study, every: Sequence[Race]) -> list[list[str]]:
    """One row a search: its trials and tokens, what the winner has reached and with which settings."""
    axes = list(dict.fromkeys(axis for race in every for axis in race.labels))
    table = [[*axes, "trials", "tokens", "validation perplexity", "winner", "at the edge of its range"]]
    for race in every:
        spent = sum(reached(record)[-1][0] for record in race.records.values() if reached(record))
        best, said, edges = OPEN if race.halving.open else f"all {DIVERGED}", NONE, NONE
        if race.winner is not None:
            best = write_value(reached(race.records[race.winner.id])[-1][2], "perplexity")
            said, edges = _drawn(study, race.winner), ", ".join(_edges(study, race.winner)) or "none"
        number = f"{len(race.records)} of {len(race.trials)}"
        labels = [race.labels.get(axis, NONE) for axis in axes]
        table.append([*labels, number, f"{spent / 1e6:,.1f} M" if spent else NONE, best, said, edges])
    return table


def _draw(study: Study, cell: Cell) -> Draw:
    assert study.search is not None
    draws = [draw for draw in study.search.draws if matches(cell.labels, draw.where)]
    return study.search.draw_of(int(cell.labels[TRIAL]), draws)[0]


def _drawn(study: Study, cell: Cell) -> str:
    """What a trial sets of its own, in words: `optimiser sgd, lr 20`."""
    draw = _draw(study, cell)
    return ", ".join(f"{key.partition('.')[2]} {cell.settings[key]}" for key in (*draw.settings, *draw.space))


def _edges(study: Study, cell: Cell) -> list[str]:
    """Drawn options whose value lies at the edge of its range: a better one may lie beyond."""
    space = _draw(study, cell).space
    known = {key: None if cell.settings[key] == "none" else cell.settings[key] for key in space}
    return [key.partition(".")[2] for key in at_edge(space, known)]


def _more_seeds(study: Study, rows: Sequence[Row], scale: str) -> str:
    """Where seeds come from that a scale does not ask for; empty where there are none."""
    planned = study.scales[scale].seeds_of
    return f" {MORE_SEEDS}" if any(row.seeds - set(planned(row.labels)) for row in rows) else ""


def verdict_lines(study: Study, rows: Sequence[Row], scale: str) -> list[str]:
    """One line a claim: what is said, and whether it holds."""
    return [f"{'Ours. ' if claim.ours else ''}{_said(study, rows, claim, scale)}" for claim in study.claims]


def _said(study: Study, rows: Sequence[Row], claim: StudyClaim, scale: str) -> str:
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


def _claim(
    study: Study, rows: Sequence[Row], claim: StudyClaim, scale: str, found: Results, folder: Path | None
) -> dict[str, Any]:
    """Every comparison behind a verdict, why it is so, and why rows do not count where it is about what is reached."""
    comparisons = compare_rows(study, rows, claim)
    waits = [reason for c in comparisons for reason in c.waits.split("; ") if c.verdict == LEARNING and reason]
    return {
        "said": _said(study, rows, claim, scale),
        "why": causes(claim, study, found, folder) if scale != "smoke" else [],
        "waits": list(dict.fromkeys(waits)) if scale != "smoke" else [],
        "spread": _spreads(comparisons, claim),
        "table": [_head(claim), *(_cells(c, claim, scale) for c in comparisons)] if comparisons else [],
    }


def _spreads(comparisons: Sequence[Comparison], claim: StudyClaim) -> str:
    """The spread over seeds that the intervals come from, and the tolerance."""
    runners = {row.runner for c in comparisons for row in (c.row, c.against) if row is not None}
    tolerance = f" Tolerance {100 * claim.within:g} %." if claim.kind in CLOSE else ""
    if claim.kind == "printed" and claim.measure == "perplexity" and any(c.row.evaluation() for c in comparisons):
        tolerance = f"{tolerance.removesuffix('.')} and two standard deviations of one evaluation."
    if runners <= set(FIXED):
        return f"Nothing here is random.{tolerance}"
    if claim.kind == "below" and any(len(c.row.records) > 1 for c in comparisons):
        seeds = "; ".join(f"{c.where}: {write_seeds(c.row, claim.measure)}" for c in comparisons if c.row.records)
        return f"Seeds of the row itself: {seeds}."
    sides = {
        " and ".join(dict.fromkeys(row.runner for row in (c.row, c.against) if row is not None)): c.spread
        for c in comparisons
        if c.spread.sd is not None
    }
    known = [f"{name}: s = {100 * s.sd:.2f} %, ν = {s.freedom:.3g}" for name, s in sides.items() if s.sd is not None]
    what = "the differences by seed" if claim.than else "our figures"
    return f"Spread of {what}: {'; '.join(known) or UNKNOWN}.{tolerance}"


def _head(claim: StudyClaim) -> list[str]:
    """The header of a claim's table, by what the rows are compared with."""
    labels = [claim.of.get(axis) for axis in claim.than]
    own = ", ".join(map(str, labels)) if labels and all(isinstance(label, str) for label in labels) else "ours"
    than = ", ".join(claim.than.values()) or ("bound" if claim.kind == "below" else "printed")
    return ["where", own, than, *(["printed difference"] if claim.than else []), "difference", "interval", "verdict"]


def _cells(c: Comparison, claim: StudyClaim, scale: str) -> list[str]:
    write = write_value if claim.than else write_printed
    values = (write_value(c.ours, claim.measure), write(c.other, claim.measure))
    ours, other = (f"> {value}" if beyond else value for value, beyond in zip(values, c.beyond, strict=True))
    printed = NONE if c.printed is None else percent(math.log(c.printed[0] / c.printed[1]))
    side = "> " if c.beyond[0] else "< " if c.beyond[1] else ""  # of a lower bound
    return [c.where, ours, other, *([printed] if claim.than else []),
            NONE if c.change is None else f"{side}{percent(c.change)}", interval_of(c),
            NONE if scale == "smoke" else c.verdict]  # fmt: skip


def _exploration(rows: Sequence[Row]) -> list[tuple[str, list[list[str]]]]:
    """Tables of a first look at a corpus, by its name."""
    tables = []
    for record in (record for row in rows for record in row.records if record.get("facts")):
        table = [["rank", "word", "count", "pair of words", "count"]]
        pairs = zip(record["facts"]["unigrams"], record["facts"]["bigrams"], strict=False)
        table += [[str(n), u[0], f"{u[1]:,}", b[0], f"{b[1]:,}"] for n, (u, b) in enumerate(pairs, 1)]
        tables.append((record["data"], table))
    return tables


def facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
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
        *_first(records),
        ("time, summed over cells that may have run side by side",
         show_duration(sum(r.get("seconds") or 0.0 for r in records))),
    ]  # fmt: skip
    parameters = sorted({(r["model"], r["parameters"]) for r in records if r.get("parameters")})
    out += [("parameters", "; ".join(f"{model} {count:,}" for model, count in parameters))] if parameters else []
    out += sorted((f"options of {method}", options) for method, options in _options(records).items())
    shuffled = [(row, record["shuffles"]) for row in rows for record in row.records if record.get("shuffles")]
    for row, s in shuffled:
        spread = "" if s["sd"] is None else f", standard deviation {s['sd']:.2f}"
        where = ", ".join(row.labels.values())
        out.append((f"{where}: {s['count']} shuffles of the test", f"{s['lowest']:.2f} to {s['highest']:.2f}{spread}"))
    return out


def _first(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """How much the runs that cells start from have read, and which of their rounds was chosen."""
    by_text: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record.get("first_tokens_trained"):
            by_text.setdefault(str(record["settings"]["first.data.name"]), []).append(record)
    out = []
    for name, found in sorted(by_text.items()):
        tokens, chosen = (sorted({int(r[f"first_{key}"]) for r in found}) for key in ("tokens_trained", "best_round"))
        rounds = sorted({int(r["settings"]["first.train.rounds"]) for r in found})
        said = ("–".join(f"{n:,}" for n in dict.fromkeys((v[0], v[-1]))) for v in (tokens, chosen, rounds))
        out.append((f"pretraining on {name}", "{} tokens; round {} of {} chosen".format(*said)))
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


def causes(claim: StudyClaim, study: Study, found: Results, folder: Path | None = None) -> list[str]:
    """Return a claim's sentences with their numbers; those that lack one are left out."""
    filled = (fill(sentence, study, found, folder) for sentence in claim.cause)
    return [sentence for sentence in filled if sentence is not None]


def fill(sentence: str, study: Study, found: Results, folder: Path | None = None) -> str | None:
    """Put the numbers into a sentence; None if one of them is not there."""
    numbers = [_number(inside, study, found, folder) for inside in BRACES.findall(sentence)]
    if any(number is None for number in numbers):
        return None
    filled = iter(numbers)
    return BRACES.sub(lambda _: str(next(filled)), sentence)


def _number(inside: str, study: Study, found: Results, folder: Path | None) -> str | None:
    head, *conditions = (part.strip() for part in inside.split("|"))
    name, _, wanted = head.rpartition("/")
    if name:
        study = load_study(name, folder or study_folder())
    what, _, measure = wanted.partition(".")
    where = dict(label_of(condition, study, inside) for condition in conditions)
    if what not in WHAT:
        raise ConfigError(
            f"{study.name}: {{{inside}}} begins with {what}{nearest(what, WHAT)}; one of {', '.join(WHAT)}"
        )
    if what == "verdict":
        return _verdict(measure, study, found, inside)
    if measure not in study.measures:
        raise ConfigError(f"{study.name}: {{{inside}}} asks for {measure}; expected one of {', '.join(study.measures)}")
    scale = main_scale(study, found)
    rows = [row for row in rows_of(study, scale or "paper", found) if matches(row.labels, where) and not row.absent]
    if what == "range":
        return _range(rows, measure) if scale not in (None, "smoke") else None
    if len(rows) > 1:
        raise ConfigError(f"{study.name}: {{{inside}}} fits {len(rows)} rows; expected one, add labels")
    if what == "printed":
        return write_printed(study.printed(rows[0].labels if rows else where, measure), measure)
    if scale in (None, "smoke") or not rows or rows[0].mean(measure) is None:
        return None
    return ONE_ROW[what](rows[0], measure)


def label_of(condition: str, study: Study, inside: str) -> tuple[str, str]:
    """Axis and label of `AXIS = LABEL`, refused where a study does not have them."""
    axis, _, label = (part.strip() for part in condition.partition("="))
    if axis not in study.axes or label not in study.axes[axis]:
        known = study.axes.get(axis, study.axes)
        raise ConfigError(
            f'{study.name}: {{{inside}}} has "{condition}"{nearest(label or axis, known)}; expected AXIS = LABEL of it'
        )
    return axis, label


def _range(rows: Sequence[Row], measure: str) -> str | None:
    means = [mean for row in rows if (mean := row.mean(measure)) is not None]
    if not means:
        return None
    ends = dict.fromkeys(write_value(value, measure) for value in (min(means), max(means)))
    return " to ".join(ends)


def _verdict(name: str, study: Study, found: Results, inside: str) -> str | None:
    claims = [claim for claim in study.claims if claim.name == name]
    if not claims:
        raise ConfigError(f"{study.name}: {{{inside}}} names no claim; give one name = {name!r}")
    scale = main_scale(study, found)
    if scale in (None, "smoke"):
        return None
    verdict = verdict_on(study, rows_of(study, scale, found), claims[0], scale)
    return None if verdict == OPEN else verdict
