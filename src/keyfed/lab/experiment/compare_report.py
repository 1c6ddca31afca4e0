"""The report of a comparison (report.md, report.html): one table, plots, what is the same, what differs, each seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, to_document
from keyfed.lab.experiment.compare_plan import OWN_SECTIONS, QUICK, START_KEYS, ComparedMethod, value_of
from keyfed.lab.experiment.method_rows import (
    SAVINGS,
    ComparedRun,
    Record,
    contenders,
    lead_of,
    savings_lines,
    savings_table,
    start_notes,
)
from keyfed.reports.document import (
    NONE,
    Block,
    Heading,
    Links,
    Picture,
    Table,
    Text,
    facts_table,
    finite,
    show,
    show_count,
    show_duration,
    show_percent,
    write_document,
)
from keyfed.reports.figures import (
    DASHES,
    HIGHEST,
    SIZE,
    Draw,
    Theme,
    both_themes,
    off_the_scale,
    percent_axis,
    perplexity_axis,
    rounds_axis,
    single,
)
from keyfed.reports.run_page import DEFINITIONS, not_beaten
from keyfed.run.console import human_bytes

LONGEST_LABEL = 60  # characters of a legend entry
TWO_COLUMNS = 32  # characters up to which two legend entries fit side by side
CROWD = 6  # curves from which a plot is taller and its lines thinner
MOST_CLIENTS = 60  # rows of a heat map; more are thinner than a line
PANELS = 3  # layers side by side


@dataclass(frozen=True, slots=True)
class Curve:
    """A method's mean over seeds with the lowest and highest seed; `lost` points were not finite."""

    label: str
    style: int
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """What a curve is drawn against: a number that grows from round to round."""

    name: str
    title: str
    unit: str
    step: Callable[[Record], float]
    scale: float = 1.0


def _moved(record: Record) -> float:
    traffic = record.get("traffic") or {}
    return float(sum(traffic.values()))


ROUNDS = Axis("rounds", "by round", "round", lambda record: 1.0)
TOKENS = Axis("tokens", "by tokens trained on", "tokens trained on", lambda record: float(record.get("worked") or 0))
BYTES = Axis("bytes", "by traffic", "MB down, up and control, all clients", _moved, 1e6)


def draw_comparison(summary: Record, cells: Sequence[ComparedRun]) -> list[Picture]:
    """Draw every plot for which the runs have numbers.

    Raises:
      ImportError: matplotlib is not installed.
    """
    by_method: dict[str, list[ComparedRun]] = {}
    for cell in cells:
        by_method.setdefault(cell.entry.label, []).append(cell)
    plots = []
    for axis in (ROUNDS, TOKENS, BYTES):
        # Text that lies in one place moves nothing: central training has no place on the axis of bytes.
        shown = {
            label: runs
            for label, runs in by_method.items()
            if axis is not BYTES or runs[0].entry.config.method != "central"
        }
        curves = _curves(shown, by_method, axis, "perplexity")
        if curves:
            alt = f"Validation perplexity {axis.title}, at the end: {_ends(curves, show)}"
            plots.append(_plot(f"perplexity-{axis.name}", alt, curves, _perplexity(curves, axis, summary)))
    accuracy = _curves(by_method, by_method, ROUNDS, "top1")
    if accuracy:
        alt = f"Top-1 accuracy by round, at the end: {_ends(accuracy, lambda value: f'{value:.1%}')}"
        plots.append(_plot("accuracy-rounds", alt, accuracy, _accuracy(accuracy, summary)))
    return plots + [plot for runs in by_method.values() if (plot := _attention(runs[0])) is not None]


def _curves(
    shown: Mapping[str, Sequence[ComparedRun]], all_methods: Mapping[str, Any], axis: Axis, key: str
) -> list[Curve]:
    """Return a curve for every method that has a finite point; a method keeps its colour in all plots."""
    styles = {label: place for place, label in enumerate(all_methods)}
    curves = [
        curve_of(label, styles[label], [cell.records for cell in runs], axis, key) for label, runs in shown.items()
    ]
    return [curve for curve in curves if curve.x]


def curve_of(label: str, style: int, runs: Sequence[Sequence[Record]], axis: Axis, key: str) -> Curve:
    """Join the runs of all seeds, round by round: mean, lowest and highest value at the mean place on the axis."""
    at_round: dict[int, list[tuple[float, float]]] = {}
    lost = 0
    for records in runs:
        place = 0.0
        for record in records:
            place += axis.step(record)
            if not record.get("valid"):
                continue
            value = finite(record["valid"].get(key))
            if value is None or value >= HIGHEST:
                lost += 1
            else:
                at_round.setdefault(int(record["round"]), []).append((place / axis.scale, value))
    joined = [at_round[number] for number in sorted(at_round)]
    return Curve(
        label,
        style,
        [sum(x for x, _ in points) / len(points) for points in joined],
        [sum(y for _, y in points) / len(points) for points in joined],
        [min(y for _, y in points) for points in joined],
        [max(y for _, y in points) for points in joined],
        lost,
    )


def _ends(curves: Sequence[Curve], write: Callable[[float], str]) -> str:
    return ", ".join(f"{curve.label} {write(curve.mean[-1])}" for curve in curves)


def _plot(name: str, alt: str, curves: Sequence[Curve], draw: Draw) -> Picture:
    """Draw one plot, taller where the legend is long."""
    columns = 2 if max(len(curve.label) for curve in curves) <= TWO_COLUMNS else 1
    rows = math.ceil((len(curves) + 3) / columns)  # baselines and target have entries too
    height = SIZE[1] + (1.2 if len(curves) > CROWD else 0.0) + 0.19 * max(0, rows - 2)
    return both_themes(name, alt, single(draw, columns), (SIZE[0], height))


def _drawn(label: str) -> str:
    """A label as matplotlib draws it: not too long, and a dollar in an option's value does not begin a formula."""
    short = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
    return short.replace("$", r"\$")


def _draw_curves(axes: Any, theme: Theme, curves: Sequence[Curve]) -> None:
    for curve in curves:
        colour = theme.colours[curve.style % len(theme.colours)]
        label = _drawn(curve.label) + off_the_scale(curve.lost)
        if curve.low != curve.high:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        crowded = len(curves) > CROWD
        size = 0.0 if (crowded and len(curve.x) > 2) or len(curve.x) >= 40 else 3.5
        axes.plot(
            curve.x, curve.mean, linestyle=DASHES[curve.style % len(DASHES)], marker="o", markersize=size, color=colour,
            linewidth=1.5 if crowded else 2.0, label=label,
        )  # fmt: skip


def _perplexity(curves: Sequence[Curve], axis: Axis, summary: Record) -> Draw:
    levels = []
    for key, label in (("unigram", "unigram, test"), ("kneser_ney", "Kneser–Ney, test")):
        level = finite(((summary["baselines"].get(key) or {}).get("test") or {}).get("perplexity"))
        if level is not None and level < HIGHEST:
            levels.append((f"{label}: {show(level)}", level))
    target = finite((summary["target"] or {}).get("perplexity"))

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title(f"Validation perplexity {axis.title}")
        _draw_curves(axes, theme, curves)
        for (label, level), dashes in zip(levels, ((1, 2), (5, 3)), strict=False):
            axes.axhline(level, color=theme.soft, dashes=dashes, linewidth=1.3, label=label)
        shown = [value for curve in curves for value in (*curve.low, *curve.high)] + [level for _, level in levels]
        if target is not None:
            axes.axhline(target, color=theme.ink, linewidth=0.8, label=f"target: {show(target)}")
            shown.append(target)
        if axis is ROUNDS:
            rounds_axis(axes, [x for curve in curves for x in curve.x])
        else:
            _amount_axis(axes, axis)
        perplexity_axis(axes, shown)

    return draw


def _amount_axis(axes: Any, axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(axis.unit)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 10 or x == 0 else f"{x:g}"))


def _accuracy(curves: Sequence[Curve], summary: Record) -> Draw:
    """Learning curves; where there are variants, with the accuracy of the random start that they are to reach."""
    bests = {one["plain"]: finite(one["mean"]["best_top1"]) for one in summary.get("fine_tuning") or ()}

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Top-1 accuracy by round (validation)")
        _draw_curves(axes, theme, curves)
        for (label, best), dashes in zip(bests.items(), ((1, 2), (5, 3), (2, 1)), strict=False):
            if best is not None:
                axes.axhline(best, color=theme.soft, dashes=dashes, linewidth=1.3, label=f"best of {_drawn(label)}")
        percent_axis(axes, max(max(curve.high) for curve in curves) or 1.0)
        rounds_axis(axes, [x for curve in curves for x in curve.x])

    return draw


def attention_grid(records: Sequence[Record]) -> tuple[list[int], dict[str, list[list[float]]]]:
    """Return the rounds and for each layer the weight of client i (by first appearance) in round j; NaN: not there.

    Example:
      >>> attention_grid([{"round": 1, "attention": {"ann": {"out": 0.7}, "bob": {"out": 0.3}}}])
      ([1], {'out': [[0.7], [0.3]]})
    """
    rounds = [record.get("attention") or {} for record in records]
    clients = list({name: None for attention in rounds for name in attention})[:MOST_CLIENTS]
    layers = {layer: None for attention in rounds for weights in attention.values() for layer in weights}
    return [int(record["round"]) for record in records], {
        layer: [[_weight(attention.get(name, {}).get(layer)) for attention in rounds] for name in clients]
        for layer in layers
    }


def _weight(value: Any) -> float:
    number = finite(value)
    return math.nan if number is None else number


def _attention(cell: ComparedRun) -> Picture | None:
    """A heat map of the first seed's attention: a row for each client, numbered and never named, a column a round."""
    rounds, layers = attention_grid(cell.records)
    if not layers:
        return None
    panels = min(PANELS, len(layers))
    height = math.ceil(len(layers) / panels)
    most = max((w for grid in layers.values() for row in grid for w in row if not math.isnan(w)), default=1.0)
    clients = len(next(iter(layers.values())))

    def paint(figure: Any, theme: Theme) -> None:
        import matplotlib
        from matplotlib.ticker import MaxNLocator

        colours = matplotlib.colormaps["viridis"].with_extremes(bad=theme.page)
        grid = figure.subplots(height, panels, squeeze=False, sharey=True)
        for axes in grid.flat[len(layers) :]:
            axes.set_axis_off()
        for axes, (layer, weights) in zip(grid.flat, layers.items(), strict=False):
            image = axes.imshow(
                weights, cmap=colours, vmin=0, vmax=most, aspect="auto", interpolation="nearest",
                extent=(rounds[0] - 0.5, rounds[-1] + 0.5, clients + 0.5, 0.5),
            )  # fmt: skip
            axes.set_title(layer, fontsize=8, fontweight="normal", pad=3)
            axes.grid(visible=False)
            axes.tick_params(labelsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        figure.suptitle(f"Attention of {_drawn(cell.entry.label)}", fontsize=12, fontweight="bold", x=0.02, ha="left")
        figure.supxlabel("round", fontsize=9)
        figure.supylabel("client, numbered", fontsize=9)
        figure.colorbar(image, ax=list(grid.flat), shrink=0.8).ax.tick_params(labelsize=8)

    alt = f"Attention of {cell.entry.label} in {len(rounds)} rounds: {clients} clients in {len(layers)} layers"
    return both_themes(f"attention-{cell.entry.folder}", alt, paint, (SIZE[0], 1.2 + 1.4 * height))


REFERENCES = (("kneser_ney", "Kneser–Ney"), ("unigram", "unigram"))


def write_comparison(out: Path, summary: Record, cells: Sequence[ComparedRun]) -> list[Path]:
    """Write report.md, report.html and plots/*.png of a comparison; without matplotlib the report says so."""
    try:
        plots: list[Picture] | None = draw_comparison(summary, cells)
    except ImportError:
        plots = None
    return write_document(out, document(summary, cells, plots))


def document(summary: Record, cells: Sequence[ComparedRun], plots: Sequence[Picture] | None = ()) -> list[Block]:
    """Return the report as blocks; `plots` is None where matplotlib is missing."""
    entries = list({cell.entry.label: cell.entry for cell in cells}.values())
    blocks: list[Block] = [
        Heading(f"{len(entries)} methods on {summary['data']}, model {summary['model']}", 1),
        Text(str(summary["verdict"]), "verdict"),
        Table(comparison_table(summary)),
        *(Text(line, "note") for line in notes(summary)),
        *_saved(summary),
        Heading("Curves"),
        *(plots or ()),
    ]
    if plots is None:
        blocks.append(Text("No plots: matplotlib is not installed (pip install matplotlib).", "note"))
    blocks += [
        Heading("The same for all methods"),
        facts_table(_same(summary, entries)),
        Heading("What differs"),
        Table([["method", "rounds", f"options that differ from {entries[0].label}'s"], *_differing(entries)], False),
        Heading("Each seed"),
        Table(_seed_table(summary)),
        Links([(f"{c.entry.label}, seed {c.seed}", f"{c.entry.folder}/seed-{c.seed}/") for c in cells]),
        Heading("Definitions"),
    ]
    lines = (*COMPARED, *(SAVINGS if summary.get("fine_tuning") else ()), *DEFINITIONS)
    return [*blocks, *(Text(line, "note") for line in lines)]


def _saved(summary: Record) -> list[Block]:
    """What each start saves; nothing where no variant was compared with its random start."""
    found = summary.get("fine_tuning") or ()
    if not found:
        return []
    return [
        Heading("What a start saves"),
        *(Text(line) for line in savings_lines(found)),
        Table(savings_table(found)),
    ]


COMPARED = (
    "A method's perplexity is the mean over seeds, ± the sample standard deviation over seeds (not over clients). A "
    "seed draws the cut of the text, the cohorts and the initial weights, so the spread holds all of these. The best "
    "method is marked only if its mean is lower than the second's by more than m = t(ν) · s · √(2/n), as in the "
    "studies: of logarithms, with s the standard deviation over seeds, pooled over the methods of this table, ν its "
    "degrees of freedom, t Student's 97.5 % quantile and n seeds.",
    "Rounds to target: the first round whose validation perplexity is at most the target. Bytes to target: uploads and "
    "downloads of all clients until then; where the target was not reached, those of all rounds. Rounds, bytes, tokens "
    "and seconds of several seeds are means.",
    "Effective clients: (Σ mass)² / Σ mass², the number of clients that would have the same weight in the sum if all "
    "counted alike; mean over rounds and layers.",
)


def verdict(summary: Record) -> str:
    """Say who is best, or that this many seeds cannot tell; first of all, where no method beats the counts."""
    ranked, seeds = contenders(summary["rows"]), len(summary["seeds"])
    over = f" over {seeds} seeds" if seeds > 1 else ""
    if not ranked:
        return "No method has a finite test perplexity: every run failed or diverged."
    first = ranked[0]
    level = not_beaten("No method beats", first["test_mean"]["perplexity"], summary["baselines"])
    lowest = "a" if len(ranked) == 1 else "the lowest"
    start = f"{level}{first['label']} has {lowest} test perplexity of {_scored(first)}{over}"
    if len(ranked) == 1:
        return f"{start}; there is no other method with a result to compare it with."
    second, lead = ranked[1], lead_of(ranked)
    assert lead is not None
    behind = f"{start}; that of {second['label']} ({_scored(second)}) is {lead.in_words}"
    if summary["best"] is not None:
        return f"{behind}: {first['label']} is better."
    if seeds == 1:
        return (
            f"{start}, then {second['label']} ({_scored(second)}); one seed cannot tell whether that is the method or "
            "chance (--seeds 3)."
        )
    return f"{behind}: {seeds} seeds cannot tell them apart."


def notes(summary: Record) -> Iterable[str]:
    """Yield what a reader of the table has to know: target, budget, quick preset, failures."""
    target = summary["target"]
    if target is not None:
        behind = {row["method"] for row in summary["rows"]} > {"fedsgd"}
        why = "the highest of the methods' best, so that all reach it" + (" (but for FedSGD)" if behind else "")
        why = "as given" if target["given"] else why
        nats = f" ({target['nats']:.3f} nats)" if summary["characters"] else ""
        yield f"Target: validation perplexity {show(target['perplexity'])}{nats}, {why}."
    if summary["budget"] == "tokens":
        yield "Budget: every method trains as many rounds as fit the tokens of the first one's."
    else:
        yield "Budget: the same number of rounds for all; the tokens a method reads in them are in the table."
    yield from _privacy_notes(summary["rows"])
    yield from start_notes(summary["rows"])
    if summary["quick"]:
        reasons = {q.key: q.why for q in QUICK}
        reduced = "; ".join(f"{key} = {value:,} ({reasons[key]})" for key, value in summary["quick"].items())
        yield f"Quick: {reduced}. --full compares on the whole text."
    for row in summary["rows"]:
        for seed, reason in row["failed"].items():
            yield f"Failed: {row['label']}, seed {seed}: {reason}"


def _privacy_notes(rows: Iterable[Record]) -> Iterable[str]:
    """Say whose ε the column has; the first line of a run's own statement, once where all rows have the same."""
    accounts = [(row["label"], account) for row in rows for account in _accounts(row)]
    if not accounts:
        return
    yield (
        "ε is that of one run of the row, the largest of its seeds, by privacy loss distributions. A comparison trains "
        "on the same clients many times: what all its runs give away together adds up."
    )
    yield from dict.fromkeys(str(account["statement"][0]) for _, account in accounts)


def _accounts(row: Record) -> list[Record]:
    return [seed["privacy"] for seed in row["seeds"] if seed.get("privacy")]


def _epsilon(row: Record) -> str:
    """A row's ε with the word of its verdict; a method without a ledger has neither."""
    accounts = _accounts(row)
    if not accounts:
        return "NONE"
    spent = [finite(account["pld"]) for account in accounts]
    known = [number for number in spent if number is not None]
    return f"{max(known):.3g}, {accounts[0]['verdict']}" if len(known) == len(spent) else "∞, NONE"


def comparison_table(summary: Record) -> list[list[str]]:
    """Return the comparison as rows of text, the header first, the baselines last."""
    rows, references = summary["rows"], summary["baselines"]
    unseen = any(_mean(row, "unseen_mean", "perplexity") is not None for row in rows)
    modelled = any("modelled_seconds_to_target" in row for row in rows)
    head = ["method", "test perplexity", *(["nats"] if summary["characters"] else []), "top-1", "top-3"]
    private = any(_accounts(row) for row in rows)
    head += ["unseen perplexity"] if unseen else []
    head += ["ε"] if private else []
    head += ["rounds to target", "bytes to target", *(["modelled time to target"] if modelled else [])]
    table = [[*head, "tokens", "seconds", "effective clients"]]
    for row in rows:
        pooled = row["method"] == "central"  # text that lies in one place moves nothing and weighs nobody
        cells = [row["label"] + (" (best)" if row["label"] == summary["best"] else ""), _scored(row)]
        cells += [_nats(row)] if summary["characters"] else []
        cells += [show_percent(_mean(row, "test_mean", key)) for key in ("top1", "top3")]
        cells += [show(_mean(row, "unseen_mean", "perplexity"))] if unseen else []
        cells += [_epsilon(row)] if private else []
        cells += [_rounds_to_target(row), NONE if pooled else _bytes_to_target(row)]
        if modelled:
            seconds = finite(row.get("modelled_seconds_to_target"))
            cells.append(NONE if seconds is None else show_duration(seconds))
        effective = None if pooled else finite(row["effective_clients"])
        cells += [
            show_count(row["tokens"]),
            _seconds(row["seconds"]),
            NONE if effective is None else f"{effective:.2f}",
        ]
        table.append(cells)
    for key, name in REFERENCES:
        if references.get(key):
            found = {"test_mean": references[key]["test"], **references[key]}
            order = found.get("order")
            cells = [f"{name}{f'-{order}' if order else ''} (reference)", _scored(found)]
            cells += [_nats(found)] if summary["characters"] else []
            cells += [show_percent(found["test"].get(key)) for key in ("top1", "top3")]
            cells += [show(_mean(found, "unseen", "perplexity"))] if unseen else []
            table.append(cells + [NONE] * (len(table[0]) - len(cells)))
    return table


def _mean(row: Record, part: str, key: str) -> float | None:
    return finite((row.get(part) or {}).get(key))


def _scored(row: Record) -> str:
    """A perplexity with its spread, where there is one."""
    mean, spread = _mean(row, "test_mean", "perplexity"), _mean(row, "test_spread", "perplexity")
    done = sum(seed["error"] is None for seed in row.get("seeds", ()))
    if mean is None:
        return "failed" if row.get("failed") and not done else "not finite"
    partly = f" ({done} of {len(row['seeds'])} seeds)" if row.get("failed") else ""
    if spread is None:
        return show(mean) + partly
    return f"{show(mean)} ± {f'{spread:.{1 if mean >= 100 else 2}f}' if mean < 1e6 else show(spread)}{partly}"


def _nats(row: Record) -> str:
    mean, spread = _mean(row, "test_mean", "nats"), _mean(row, "test_spread", "nats")
    return NONE if mean is None else f"{mean:.3f}" + (f" ± {spread:.3f}" if spread is not None else "")


def _rounds_to_target(row: Record) -> str:
    rounds, done = finite(row["rounds_to_target"]), sum(seed["error"] is None for seed in row["seeds"])
    if rounds is not None:
        return f"{rounds:.1f}".removesuffix(".0")
    if not done:
        return NONE
    return f"{row['reached']} of {done} seeds" if row["reached"] else "not reached"


def _bytes_to_target(row: Record) -> str:
    needed, spent = finite(row["bytes_to_target"]), finite(row["bytes"])
    if needed is not None:
        return human_bytes(needed)
    return NONE if spent is None else f"not reached ({human_bytes(spent)})"


def _seconds(value: Any) -> str:
    number = finite(value)
    return NONE if number is None else f"{number:,.1f}"


def _seed_table(summary: Record) -> list[list[str]]:
    table = [["method", "seed", "test perplexity", "nats", "top-1", "top-3", "unseen perplexity", "best round",
              "rounds to target", "bytes to target", "seconds"]]  # fmt: skip
    for row in summary["rows"]:
        for seed in row["seeds"]:
            start = [row["label"], str(seed["seed"])]
            if seed["error"] is not None:
                table.append([*start, "failed", *[NONE] * 8])
                continue
            test, unseen = seed["test"], seed["unseen"] or {}
            nats = finite(test.get("nats"))
            reached = seed["rounds_to_target"]
            table.append([
                *start, show(test.get("perplexity")), NONE if nats is None else f"{nats:.3f}",
                show_percent(test.get("top1")), show_percent(test.get("top3")), show(unseen.get("perplexity")),
                show_count(seed["best_round"]), "not reached" if reached is None else str(reached),
                _bytes_to_target(seed) if row["method"] != "central" else NONE, _seconds(seed["seconds"]),
            ])  # fmt: skip
    return table


def _same(summary: Record, entries: Sequence[ComparedMethod]) -> list[tuple[str, str]]:
    """Facts that hold for every row."""
    known: Record = next((row for row in summary["rows"] if row.get("clients")), {})
    config = entries[0].config
    started = ", but for what a start brings" if any(entry.starts for entry in entries) else ""
    return [
        ("corpus", str(summary["data"])),
        ("partition", config.data.partition or "the corpus's own"),
        ("clients", show_count(known.get("clients"))),
        ("cohort", f"{_cohort(config)}, drawn by seed and round: the same for all that draw one"),
        ("vocabulary", show_count(known.get("vocabulary"))),
        ("model", f"{summary['model']}, {show_count(known.get('parameters'))} parameters"),
        ("initial weights", "drawn by the seed: the same for all methods of a seed" + started),
        ("tokens of a client in a round", "all" if config.data.max_tokens is None else f"{config.data.max_tokens:,}"),
        ("test tokens", show_count((known.get("test") or {}).get("tokens"))),
        ("validation tokens", "all" if config.train.valid_tokens is None else f"{config.train.valid_tokens:,}"),
        ("seeds", ", ".join(map(str, summary["seeds"]))),
    ]


def _cohort(config: Config) -> str:
    """How many clients a round calls, in words."""
    p = config.participation
    many = f"{config.train.cohort} clients" if p.fraction is None else f"{p.fraction:.0%} of all clients"
    return many if p.sampling == "uniform" else f"{many} by {p.sampling} sampling"


def _own_settings(entry: ComparedMethod) -> dict[str, Any]:
    """A method's options by name, those of its parts, uploads and start with their section."""
    document = to_document(entry.config)
    parts = {f"{s}.{key}": value for s in OWN_SECTIONS for key, value in document.get(s, {}).items()}
    return {**document["method"], **parts, **{key: value_of(entry.config, key) for key in START_KEYS}}


def _differing(entries: Sequence[ComparedMethod]) -> list[list[str]]:
    """One row a method: its rounds and the options that the first method does not have, or has otherwise."""
    first = _own_settings(entries[0])
    rows = []
    for entry in entries:
        own = _own_settings(entry)
        changed = [f"{key}={'none' if value is None else value}" for key, value in own.items()
                   if key != "name" and (key not in first or first[key] != value)]  # fmt: skip
        dropped = [f"no {key}" for key in first if key not in own]
        rows.append([entry.label, str(entry.config.train.rounds), ", ".join(changed + dropped) or "none"])
    return rows
