"""The figures of studies, comparisons and searches.

A study has bars with the printed values as marks, lines over a swept number, and curves of training. A comparison has
curves by round, tokens and bytes, and heat maps of attention. A search has its trials by an option's value.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.lab.experiment.compare import ComparedRun
from keyfed.lab.experiment.grid import BY, CURVE, PLACES, Study, matches
from keyfed.lab.experiment.store import Row, write_value
from keyfed.reports.document import Picture, finite, show
from keyfed.reports.figures import (
    HIGHEST,
    LIGHT,
    SIZE,
    Paint,
    Theme,
    both_themes,
    off_the_scale,
    percent_axis,
    perplexity_axis,
    png,
    rounds_axis,
    single,
)

Record = Mapping[str, Any]

NAMES = {"perplexity": "perplexity", "top1": "top-1 accuracy", "nats": "nats per token", "train_nats": "training nats",
         "train_top1": "training top-1 accuracy", "sentence_top1_words": "top-1 of words, line by line"}  # fmt: skip
WORDS = {"round": "round", "batch": "local batch", "epoch": "local epoch"}
STYLES = ("-", "--", ":", "-.")
MARKERS = "os^DvPX*h"  # nine, beside seven colours and four styles: all three come together again after 252 labels
HATCHES = ("", "//", "..", "xx")  # of bars, a further one each time the colours begin again
MARKS = 8  # of a line that make it differ from one that lies under it
LONGEST_LABEL = 60  # characters of a legend entry
TWO_COLUMNS = 32  # characters up to which two legend entries fit side by side
CROWD = 6  # curves from which a plot is taller
MOST_CLIENTS = 60  # rows of a heat map; more are thinner than a line
PANELS = 3  # layers side by side
SMOKE = "smoke: shows only that it runs"


def draw_plots(study: Study, rows: Sequence[Row], scale: str) -> dict[str, bytes]:
    """Draw a study's plots from its rows; one without a point is left out. Raises ImportError without matplotlib."""
    out = {}
    for plot in drawn(study, rows):
        panels = _panels(rows, plot)
        size = (max(5.8, 4.6 * len(panels)), 4.8)
        out[str(plot["name"])] = png(_paint(study, plot, panels, scale), LIGHT, size)
    return out


def drawn(study: Study, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """The plots of a study that have something to show."""
    return [plot for plot in study.plots if _panels(rows, plot)]


def headline(plot: Mapping[str, Any], scale: str) -> str:
    """A plot's title, with a warning at smoke scale."""
    return f"{plot['title']} ({SMOKE})" if scale == "smoke" else str(plot["title"])


def describe(study: Study, plot: Mapping[str, Any], rows: Sequence[Row], scale: str) -> str:
    """What a plot shows, for those who cannot see it."""
    shown = [row for panel in _panels(rows, plot).values() for row in panel]
    printed = any(study.printed(row.labels, str(plot["measure"])) is not None for row in shown)
    marks = "; crosses are the printed values" if plot["kind"] != "curves" and printed else ""
    ends = error_words(shown, plot)
    return f"{headline(plot, scale)}{marks}{f'; error bars are {ends}' if ends else ''}"


def error_bar(row: Row, plot: Mapping[str, Any]) -> float | None:
    """Half of a row's error bar: of one evaluation where that depends on a shuffle, else the spread over seeds."""
    measure = plot["measure"]
    one = row.evaluation() if measure == "perplexity" else None
    if one is not None:
        return one[0]
    values = row.values(measure)
    return statistics.stdev(values) if len(values) > 1 else None


def error_words(rows: Sequence[Row], plot: Mapping[str, Any]) -> str:
    """What the error bars of a plot are; empty where it has none."""
    if plot["kind"] in ("curves", "terms") or all(error_bar(row, plot) is None for row in rows):
        return ""
    shuffles = plot["measure"] == "perplexity" and any(row.evaluation() for row in rows)
    return f"the standard deviation over seeds{', of one evaluation for code-faithful rows' if shuffles else ''}"


@dataclass(frozen=True, slots=True)
class Look:
    """How a series is drawn, the same in every plot of a study.

    Attributes:
      number: place of its labels among those that the study's plots have, in the order of the study's axes.
    """

    number: int

    def colour(self, theme: Theme) -> str:
        """Its colour on a page."""
        return theme.colours[self.number % len(theme.colours)]

    def hatch(self, theme: Theme) -> str:
        """What tells its bar from another one of that colour."""
        return HATCHES[self.number // len(theme.colours) % len(HATCHES)]

    @property
    def marker(self) -> str:
        """The mark of its points."""
        return MARKERS[self.number % len(MARKERS)]

    @property
    def style(self) -> str:
        """The style of its line."""
        return STYLES[self.number % len(STYLES)]


def looks(study: Study, series: Sequence[str]) -> dict[str, Look]:
    """How every series over these axes is drawn, by its name; the same in all plots that have such series."""
    places = {axis: {label: k for k, label in enumerate(study.axes[axis])} for axis in series}
    wheres = [plot.get("where", {}) for plot in study.plots if list(plot.get("series", ())) == list(series)]
    found = set()
    for where, grid in itertools.product(wheres, study.grids):
        wanted = {axis: label for axis, label in where.items() if axis in series}
        for labels in itertools.product(*(grid.get(axis, (None,)) for axis in series)):
            if matches(dict(zip(series, labels, strict=True)), wanted):
                found.add(labels)
    ordered = sorted(found, key=lambda labels: [places[a].get(v, -1) for a, v in zip(series, labels, strict=True)])
    return {_joined(zip(series, labels, strict=True)): Look(number) for number, labels in enumerate(ordered)}


def _panels(rows: Sequence[Row], plot: Mapping[str, Any]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.records and matches(row.labels, plot.get("where", {})) and _has_points(row, plot):
            panels.setdefault(_name(row, plot.get("panel", ())), []).append(row)
    return panels


def _has_points(row: Row, plot: Mapping[str, Any]) -> bool:
    if plot["kind"] == "curves":
        return bool(curves_of(row, plot))
    if plot["kind"] == "terms":
        return bool(terms_of(row, plot))
    return row.mean(plot["measure"]) is not None


def _name(row: Row, axes: Sequence[str]) -> str:
    return _joined((axis, row.labels.get(axis)) for axis in axes)


def _joined(parts: Iterable[tuple[str, str | None]]) -> str:
    return ", ".join(f"{a} = {v}" if v.replace(".", "").isdigit() else v for a, v in parts if v is not None)


def _paint(study: Study, plot: Mapping[str, Any], panels: Mapping[str, Sequence[Row]], scale: str) -> Paint:
    draw = {"bars": _bars, "lines": _lines, "curves": _curves, "terms": _terms}[plot["kind"]]
    every = [row for rows in panels.values() for row in rows]
    series = list(dict.fromkeys(_name(row, plot.get("series", ())) for row in every))

    def paint(figure: Any, theme: Theme) -> None:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
            draw(axes, theme, study, plot, rows, series)
            axes.set_title(title)
            if plot["kind"] != "terms":
                axes.set_ylabel(NAMES.get(plot["measure"], plot["measure"].replace("_", " ")))
        figure.suptitle("\n".join(textwrap.wrap(headline(plot, scale), 60 * len(panels))), x=0.02, ha="left", size=12)
        handles: dict[str, Any] = {}
        for axes in all_axes:
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        ends = error_words(every, plot)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=3, title_fontsize=8.5,
            title=f"Error bars: {ends}" if ends else None,
        )  # fmt: skip

    return paint


def _bars(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    places = list(dict.fromkeys(_name(row, plot["x"]) for row in rows))
    width, drawn_as = 0.8 / len(series), looks(study, plot.get("series", ()))
    for row in rows:
        number = series.index(_name(row, plot.get("series", ())))
        at = places.index(_name(row, plot["x"])) + (number - (len(series) - 1) / 2) * width
        mean, look = row.mean(plot["measure"]), drawn_as[series[number]]
        axes.bar(
            at, mean, width * 0.92, yerr=error_bar(row, plot), capsize=2, label=series[number] or "ours",
            color=look.colour(theme), hatch=look.hatch(theme), ecolor=theme.ink,
        )  # fmt: skip
        printed = study.printed(row.labels, plot["measure"])
        near = printed is not None and mean is not None and 0.8 * mean < printed < 1.3 * mean  # a cross is there
        top = (mean or 0.0) + (error_bar(row, plot) or 0.0)  # the number stands above what is drawn
        height = max(top, printed or 0.0) if near else top
        axes.annotate(
            write_value(mean, plot["measure"]), (at, height), (0, 5 if near else 1), textcoords="offset points",
            ha="center", va="bottom", fontsize=7,
        )  # fmt: skip
        if printed is not None:
            axes.plot(at, printed, "x", color=theme.ink, markersize=7, label="printed", zorder=5)
    heights = [row.mean(plot["measure"]) or 1.0 for row in rows]
    if min(heights) > 0 and max(heights) / min(heights) > 8:
        axes.set_yscale("log")
    turned = {"rotation": 30, "ha": "right"} if len(places) > 3 else {}
    axes.set_xticks(range(len(places)), places, fontsize=8.5, **turned)


def terms_of(row: Row, plot: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Words or pairs of words with their counts, most frequent first, where a first look at a text has them."""
    found: Mapping[str, Any] = next((record["facts"] for record in row.records if record.get("facts")), {})
    return [(str(term), int(count)) for term, count in found.get(plot["measure"], ())]


def _terms(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    terms = terms_of(rows[0], plot)
    bars = axes.barh(range(len(terms)), [count for _, count in terms], color=theme.colours[0], height=0.72)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=8)
    axes.set_yticks(range(len(terms)), [term for term, _ in terms], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.01)
    axes.grid(visible=False)
    axes.set_xticks([])


def _lines(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    axis, drawn_as = plot["x"][0], looks(study, plot.get("series", ()))
    for name in series:
        own = [row for row in rows if _name(row, plot.get("series", ())) == name and axis in row.labels]
        points = sorted((float(row.labels[axis]), row) for row in own if _number(row.labels[axis]))
        if not points:
            continue
        x = [at for at, _ in points]
        means = [row.mean(plot["measure"]) for _, row in points]
        spreads = [error_bar(row, plot) or 0.0 for _, row in points]
        look = drawn_as[name]
        axes.errorbar(
            x, means, spreads, fmt=f"{look.marker}{look.style}", capsize=2, color=look.colour(theme),
            label=name or "ours", markersize=4,
        )  # fmt: skip
        printed = [(at, study.printed(row.labels, plot["measure"])) for at, row in points]
        marks = [(at, value) for at, value in printed if value is not None]
        if marks:
            axes.plot(*zip(*marks, strict=True), "x", color=look.colour(theme), label=f"{name}, printed".lstrip(", "))
    axes.set_xlabel(axis)


def _number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Series:
    """A line of means over seeds, between the lowest and the highest seed.

    Attributes:
      points: every seed's value by the place on the axis.
      lost: points that were not finite.
    """

    label: str
    look: Look
    points: Mapping[float, Sequence[float]]
    lost: int = 0

    @property
    def means(self) -> list[float]:
        """The mean over seeds, point by point."""
        return [statistics.fmean(values) for values in self.points.values()]

    def draw(self, axes: Any, theme: Theme) -> None:
        """Draw the line, its marks and the band."""
        x, seeds, colour = list(self.points), list(self.points.values()), self.look.colour(theme)
        every = max(1, len(x) // MARKS)
        axes.plot(
            x, self.means, self.look.style, color=colour, label=_drawn(self.label) + off_the_scale(self.lost),
            linewidth=1.5,
            markersize=4, marker=self.look.marker, markevery=(self.look.number % every, every),
        )  # fmt: skip
        if max(map(len, seeds)) > 1:
            axes.fill_between(x, [min(v) for v in seeds], [max(v) for v in seeds], color=colour, alpha=0.2, lw=0)


def _curves(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    drawn_as = looks(study, plot.get("series", ()))
    lines = [
        Series(name or "ours", drawn_as[name], curves_of(row, plot))
        for name in series
        for row in rows
        if _name(row, plot.get("series", ())) == name
    ]
    for line in lines:
        line.draw(axes, theme)
    values = [value for line in lines for value in line.means]
    axes.set_xlabel(WORDS[plot.get("x", "round")])
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)  # half an epoch is none; numbers stay apart
    if values and min(values) > 0 and max(values) / min(values) > 8:
        axes.set_yscale("log")


def curves_of(row: Row, plot: Mapping[str, Any]) -> dict[float, list[float]]:
    """Every seed's value of a curve, of training by batch or epoch, else by round, where all seeds have one."""
    measure, by = plot["measure"], plot.get("x", "round")
    if by in BY:
        return seed_curves(row.records, by, measure)
    index = CURVE[measure]
    curves = [{p[0]: p[index] for p in r["curve"] if p[index] is not None and p[index] > 0} for r in row.records]
    rounds = sorted(set.intersection(*(set(c) for c in curves))) if curves else []
    return {at: [math.log(c[at]) if measure == "nats" else c[at] for c in curves] for at in rounds}


def seed_curves(records: Sequence[Mapping[str, Any]], by: str, measure: str) -> dict[float, list[float]]:
    """Every seed's value of a curve of training, point by point; cells that were run without curves have none."""
    curves = [record["training"][by] for record in records if record.get("training")]
    place = PLACES[measure]
    together = zip(*curves, strict=False)  # a seed may have a batch more than another
    return {
        statistics.fmean(p[0] for p in points): [p[place] for p in points]
        for points in together
        if all(p[place] is not None for p in points)
    }


@dataclass(frozen=True, slots=True)
class Axis:
    """What the curves of a comparison are drawn against: a number that grows by a step from round to round."""

    name: str
    title: str
    unit: str
    step: Callable[[Record], float]


ROUNDS = Axis("rounds", "by round", "round", lambda record: 1.0)
TOKENS = Axis("tokens", "by tokens trained on", "tokens trained on", lambda record: float(record.get("worked") or 0))
BYTES = Axis("bytes", "by traffic", "MB down, up and control, all clients", lambda record: _moved(record) / 1e6)


def _moved(record: Record) -> float:
    return float(sum((record.get("traffic") or {}).values()))


def draw_comparison(summary: Record, cells: Sequence[ComparedRun]) -> list[Picture]:
    """Draw every plot for which the runs of a comparison have numbers. Raises ImportError without matplotlib.

    Besides the curves there are levels: of the baselines and the target for perplexity, of the accuracy that variants
    are to reach.
    """
    by_method: dict[str, list[ComparedRun]] = {}
    for cell in cells:
        by_method.setdefault(cell.entry.label, []).append(cell)
    names = {"unigram": "unigram, test", "kneser_ney": "Kneser–Ney, test"}
    known = {label: ((summary["baselines"].get(key) or {}).get("test") or {}) for key, label in names.items()}
    values = {label: test.get("perplexity") for label, test in known.items()}
    values["target"] = (summary["target"] or {}).get("perplexity")
    levels = {
        f"{label}: {show(level)}": level
        for label, value in values.items()
        if (level := finite(value)) is not None and level < HIGHEST
    }
    bests = {
        f"best of {_drawn(one['plain'])}": one["mean"]["best_top1"]
        for one in summary.get("fine_tuning") or ()
        if finite(one["mean"]["best_top1"]) is not None
    }
    plots = []
    for axis, key in ((ROUNDS, "perplexity"), (TOKENS, "perplexity"), (BYTES, "perplexity"), (ROUNDS, "top1")):
        # Text that lies in one place moves nothing: central training has no place on the axis of bytes.
        found = [
            series_of(label, place, [cell.records for cell in runs], axis, key)
            for place, (label, runs) in enumerate(by_method.items())
            if axis is not BYTES or runs[0].entry.method != "central"
        ]
        if lines := [line for line in found if line.points]:
            plots.append(_plot(axis, key, lines, levels if key == "perplexity" else bests))
    return plots + [plot for runs in by_method.values() if (plot := _attention(runs[0])) is not None]


def series_of(label: str, number: int, runs: Sequence[Sequence[Record]], axis: Axis, key: str) -> Series:
    """Join the runs of all seeds, round by round, at the mean place on the axis; a method looks alike in all plots."""
    at_round: dict[int, list[tuple[float, float]]] = {}
    lost = 0
    for records in runs:
        place = 0.0
        for record in records:
            place += axis.step(record)
            value = finite((record.get("valid") or {}).get(key))
            if value is not None and value < HIGHEST:
                at_round.setdefault(int(record["round"]), []).append((place, value))
            elif record.get("valid"):
                lost += 1
    joined = (at_round[number] for number in sorted(at_round))
    points = {statistics.fmean(x for x, _ in found): [y for _, y in found] for found in joined}
    return Series(label, Look(number), points, lost)


def _plot(axis: Axis, key: str, lines: Sequence[Series], levels: Mapping[str, float]) -> Picture:
    """Draw one plot, taller where the legend is long."""
    what, write = ("Validation perplexity", show) if key == "perplexity" else ("Top-1 accuracy", "{:.1%}".format)
    columns = 2 if max(len(line.label) for line in lines) <= TWO_COLUMNS else 1
    entries = math.ceil((len(lines) + 3) / columns)  # levels have entries too
    height = SIZE[1] + (1.2 if len(lines) > CROWD else 0.0) + 0.19 * max(0, entries - 2)
    values = [value for line in lines for seeds in line.points.values() for value in seeds]

    def draw(axes: Any, theme: Theme) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes.set_title(f"{what} {axis.title}" + ("" if key == "perplexity" else " (validation)"))
        for line in lines:
            line.draw(axes, theme)
        for (label, level), dashes in zip(levels.items(), itertools.cycle(((1, 2), (5, 3), (2, 1))), strict=False):
            axes.axhline(level, color=theme.soft, dashes=dashes, linewidth=1.3, label=label)
        if axis is ROUNDS:
            rounds_axis(axes, [x for line in lines for x in line.points])
        else:
            axes.set_xlabel(axis.unit)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 10 or x == 0 else f"{x:g}"))
        if key == "perplexity":
            perplexity_axis(axes, [*values, *levels.values()])
        else:
            percent_axis(axes, max(values) or 1.0)

    alt = f"{what} {axis.title}, at the end: {', '.join(f'{line.label} {write(line.means[-1])}' for line in lines)}"
    name = f"{'perplexity' if key == 'perplexity' else 'accuracy'}-{axis.name}"
    return both_themes(name, alt, single(draw, columns), (SIZE[0], height))


def _drawn(label: str) -> str:
    """A label as matplotlib draws it: not too long, and a dollar in an option's value does not begin a formula."""
    short = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
    return short.replace("$", r"\$")


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


def draw_option(result: Record, key: str, space: Mapping[str, Any]) -> Picture | None:
    """Draw validation perplexity against one option's value; None where no trial has a number to draw.

    Args:
      space: the search's `Range` or `Listed` of each option.
    """
    one = space[key]
    listed = getattr(one, "values", None)
    trials = [t for t in result["trials"] if (finite(t["perplexity"]) or HIGHEST) < HIGHEST]
    if listed is None:  # an option that is off in the configuration as given has no place on the axis
        trials = [t for t in trials if t["values"][key] is not None]
    if not trials:
        return None
    ticks: list[str] = []
    if listed is None:
        places = [float(t["values"][key]) for t in trials]
    else:  # a list is drawn value by value, the given one beside it where it is not in the list
        known = list(dict.fromkeys([*listed, *(t["values"][key] for t in trials)]))
        ticks = ["none" if value is None else str(value) for value in known]
        places = [float(known.index(t["values"][key])) for t in trials]
    values = [t["perplexity"] for t in trials]
    missing = len(result["trials"]) - len(trials)
    best = result["best"]["trial"] if result["best"] else None
    groups: Sequence[tuple[str, str, int, Any]] = (
        (f"trained all {result['rounds']} rounds", "o", 0, lambda t: t["rounds"] >= result["rounds"]),
        ("fewer rounds", "s", 1, lambda t: t["rounds"] < result["rounds"]),
        ("as given", "D", 2, lambda t: t["trial"] == 0),
        ("best", "*", 3, lambda t: t["trial"] == best),
    )

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Validation perplexity by " + key)
        for label, marker, colour, belongs in groups:
            chosen = [i for i, t in enumerate(trials) if belongs(t)]
            if chosen:
                axes.plot(
                    [places[i] for i in chosen], [values[i] for i in chosen], marker, color=theme.colours[colour],
                    markersize=12 if marker == "*" else 7, fillstyle="none" if marker in "sD" else "full", label=label,
                )  # fmt: skip
        if missing:
            axes.plot([], [], linestyle="none", label=f"({missing} trials have no place here)")
        axes.set_xlabel(key)
        if ticks:
            axes.set_xticks(range(len(ticks)), ticks)
            axes.set_xlim(-0.5, len(ticks) - 0.5)
        else:
            if one.log and min(places) > 0:
                axes.set_xscale("log")
            axes.set_xlim(min(one.low, *places), max(one.high, *places))  # the whole range, tried or not
        perplexity_axis(axes, values)

    low = min(zip(values, (t["values"][key] for t in trials), strict=True), key=lambda pair: pair[0])
    alt = f"Validation perplexity of {len(trials)} trials by {key}; lowest {show(low[0])} at {low[1]}"
    return both_themes(f"search-{key}", alt, single(draw))
