"""The plots of a comparison: perplexity by round, tokens and bytes, accuracy by round, attention of clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.lab.experiment.compare_rows import Cell, Record
from keyfed.reports.document import finite, show
from keyfed.reports.figures import (
    HIGHEST,
    SIZE,
    Draw,
    Plot,
    Theme,
    both_themes,
    off_the_scale,
    percent_axis,
    perplexity_axis,
    rounds_axis,
    single,
)

# Seven colours and four dashes: their pairs repeat only after 28 methods, and neighbours differ in both.
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
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


def draw_comparison(summary: Record, cells: Sequence[Cell]) -> list[Plot]:
    """Draw every plot for which the runs have numbers.

    Raises:
      ImportError: matplotlib is not installed.
    """
    by_method: dict[str, list[Cell]] = {}
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


def _curves(shown: Mapping[str, Sequence[Cell]], all_methods: Mapping[str, Any], axis: Axis, key: str) -> list[Curve]:
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


def _plot(name: str, alt: str, curves: Sequence[Curve], draw: Draw) -> Plot:
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


def _attention(cell: Cell) -> Plot | None:
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
