"""The plots of a study: bars with the printed values as marks, lines over a swept number, curves of training."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.lab.experiment.grid import BY, CURVE, PLACES, Study, matches
from keyfed.lab.experiment.store import Row, write_value
from keyfed.reports.figures import LIGHT, Paint, Theme, png

NAMES = {"perplexity": "perplexity", "top1": "top-1 accuracy", "nats": "nats per token", "train_nats": "training nats",
         "train_top1": "training top-1 accuracy", "sentence_top1_words": "top-1 of words, line by line"}  # fmt: skip
WORDS = {"round": "round", "batch": "local batch", "epoch": "local epoch"}
STYLES = ("-", "--", ":", "-.")
MARKERS = "os^DvPX*h"  # nine, beside seven colours and four styles: all three come together again after 252 labels
HATCHES = ("", "//", "..", "xx")  # of bars, a further one each time the colours begin again
MARKS = 8  # of a line by which it is told from one that lies under it
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


def _curves(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    values: list[float] = []
    drawn_as = looks(study, plot.get("series", ()))
    for name in series:
        look = drawn_as[name]
        for row in (row for row in rows if _name(row, plot.get("series", ())) == name):
            points = curves_of(row, plot)
            x, seeds = list(points), list(points.values())
            y = [statistics.fmean(found) for found in seeds]
            colour = look.colour(theme)
            every = max(1, len(x) // MARKS)
            axes.plot(
                x, y, look.style, color=colour, label=name or "ours", linewidth=1.5, markersize=4, marker=look.marker,
                markevery=(look.number % every, every),
            )  # fmt: skip
            if len(row.records) > 1:  # from the lowest seed to the highest
                axes.fill_between(x, [min(v) for v in seeds], [max(v) for v in seeds], color=colour, alpha=0.2, lw=0)
            values += y
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
