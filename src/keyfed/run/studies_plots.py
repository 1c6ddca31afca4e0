"""The plots of a study: bars with the printed values as marks, lines over a swept number, curves of training."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from keyfed.run.drawing import LIGHT, Paint, Theme, png
from keyfed.run.studies_curves import BY, seed_curves
from keyfed.run.studies_plan import CURVE, Study, matches
from keyfed.run.studies_table import Row, write_value

NAMES = {"perplexity": "perplexity", "top1": "top-1 accuracy", "nats": "nats per token", "train_nats": "training nats",
         "train_top1": "training top-1 accuracy"}  # fmt: skip
WORDS = {"round": "round", "batch": "local batch", "epoch": "local epoch"}
STYLES = ("-", "--", ":", "-.")
MARKERS = "os^DvPX"
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
    return f"{headline(plot, scale)}{marks}"


def _panels(rows: Sequence[Row], plot: Mapping[str, Any]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.records and matches(row.labels, plot.get("where", {})) and _has_points(row, plot):
            panels.setdefault(_name(row, plot.get("panel", ())), []).append(row)
    return panels


def _has_points(row: Row, plot: Mapping[str, Any]) -> bool:
    if plot["kind"] == "curves":
        return bool(curves_of(row, plot))
    return row.mean(plot["measure"]) is not None


def _name(row: Row, axes: Sequence[str]) -> str:
    parts = [(axis, row.labels.get(axis)) for axis in axes]
    return ", ".join(f"{a} = {v}" if v.replace(".", "").isdigit() else v for a, v in parts if v is not None)


def _paint(study: Study, plot: Mapping[str, Any], panels: Mapping[str, Sequence[Row]], scale: str) -> Paint:
    draw = {"bars": _bars, "lines": _lines, "curves": _curves}[plot["kind"]]
    every = [row for rows in panels.values() for row in rows]
    series = list(dict.fromkeys(_name(row, plot.get("series", ())) for row in every))

    def paint(figure: Any, theme: Theme) -> None:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
            draw(axes, theme, study, plot, rows, series)
            axes.set_title(title)
            axes.set_ylabel(NAMES.get(plot["measure"], plot["measure"].replace("_", " ")))
        figure.suptitle("\n".join(textwrap.wrap(headline(plot, scale), 60 * len(panels))), x=0.02, ha="left", size=12)
        handles: dict[str, Any] = {}
        for axes in all_axes:
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)

    return paint


def _bars(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    places = list(dict.fromkeys(_name(row, plot["x"]) for row in rows))
    width = 0.8 / len(series)
    for row in rows:
        number = series.index(_name(row, plot.get("series", ())))
        at = places.index(_name(row, plot["x"])) + (number - (len(series) - 1) / 2) * width
        values, mean = row.values(plot["measure"]), row.mean(plot["measure"])
        error = statistics.stdev(values) if len(values) > 1 else None
        axes.bar(
            at, mean, width * 0.92, yerr=error, capsize=2, label=series[number] or "ours",
            color=theme.colours[number % len(theme.colours)], ecolor=theme.ink,
        )  # fmt: skip
        printed = study.printed(row.labels, plot["measure"])
        near = printed is not None and mean is not None and 0.8 * mean < printed < 1.3 * mean  # a cross is there
        height = max(mean or 0.0, printed or 0.0) if near else mean
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


def _lines(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    axis = plot["x"][0]
    for number, name in enumerate(series):
        own = [row for row in rows if _name(row, plot.get("series", ())) == name and axis in row.labels]
        points = sorted((float(row.labels[axis]), row) for row in own if _number(row.labels[axis]))
        if not points:
            continue
        x = [at for at, _ in points]
        means = [row.mean(plot["measure"]) for _, row in points]
        spreads = [statistics.stdev(v) if len(v := row.values(plot["measure"])) > 1 else 0.0 for _, row in points]
        colour, style = theme.colours[number % len(theme.colours)], STYLES[number % len(STYLES)]
        axes.errorbar(
            x, means, spreads, fmt=f"{MARKERS[number % len(MARKERS)]}{style}", capsize=2, color=colour,
            label=name or "ours", markersize=4,
        )  # fmt: skip
        printed = [(at, study.printed(row.labels, plot["measure"])) for at, row in points]
        marks = [(at, value) for at, value in printed if value is not None]
        if marks:
            axes.plot(*zip(*marks, strict=True), "x", color=colour, label=f"{name}, printed".lstrip(", "))
    axes.set_xlabel(axis)


def _number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


def _curves(
    axes: Any, theme: Theme, study: Study, plot: Mapping[str, Any], rows: Sequence[Row], series: Sequence[str]
) -> None:
    del study  # curves of the papers are pictures: there is nothing printed to draw
    values: list[float] = []
    for number, name in enumerate(series):
        for row in (row for row in rows if _name(row, plot.get("series", ())) == name):
            points = curves_of(row, plot)
            x, seeds = list(points), list(points.values())
            y = [statistics.fmean(found) for found in seeds]
            colour = theme.colours[number % len(theme.colours)]
            every = max(1, len(x) // MARKS)
            axes.plot(
                x, y, STYLES[number % len(STYLES)], color=colour, label=name or "ours", linewidth=1.5, markersize=4,
                marker=MARKERS[number % len(MARKERS)], markevery=(number % every, every),
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
