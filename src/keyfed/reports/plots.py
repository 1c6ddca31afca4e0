"""The plots of a run as PNG bytes: perplexity and accuracy by round, spread over clients, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keyfed.reports.document import finite, show
from keyfed.reports.figures import (
    HIGHEST,
    Draw,
    Plot,
    Record,
    Theme,
    both_themes,
    off_the_scale,
    percent_axis,
    perplexity_axis,
    rounds_axis,
    single,
    validation,
)
from keyfed.reports.vectors_plot import draw_explained


def draw_plots(result: Record, records: Sequence[Record]) -> list[Plot]:
    """Draw every plot for which the run has numbers.

    Raises:
      ImportError: matplotlib is not installed.
    """
    drawings = (_perplexity(result, records), _accuracy(records), _clients(result), _traffic(result, records))
    plots = [both_themes(name, alt, single(draw)) for name, alt, draw in (d for d in drawings if d is not None)]
    vectors = (result.get("start") or {}).get("vectors") or {}
    if vectors.get("explained"):
        plots.append(draw_explained(vectors["explained"], vectors["removed"]))
    return plots


def _perplexity(result: Record, records: Sequence[Record]) -> tuple[str, str, Draw] | None:
    measured = sum(bool(r.get("valid")) for r in records)
    points = [p for p in zip(*validation(records, "perplexity"), strict=True) if p[1] < HIGHEST]
    if not points:
        return None
    rounds, values = [at for at, _ in points], [value for _, value in points]
    curve = "this run, validation" + off_the_scale(measured - len(points))
    baselines = result.get("baselines") or {}
    lines: list[tuple[str, float]] = []
    for key, label in (("unigram", "unigram"), ("kneser_ney", "Kneser–Ney"), ("central", "central")):
        level = finite(((baselines.get(key) or {}).get("test") or {}).get("perplexity"))
        if level is not None and level < HIGHEST:
            lines.append((f"{label}, test: {show(level)}", level))
    best = finite(result.get("best_round"))
    tested = finite((result.get("test") or {}).get("perplexity"))

    def draw(axes: Any, theme: Theme) -> None:
        blue, *others = theme.colours
        axes.set_title("Perplexity by round")
        axes.plot(rounds, values, "o-", color=blue, markersize=4 if len(rounds) < 60 else 0, label=curve)
        shown = [*values, *(level for _, level in lines)]
        if best is not None and tested is not None and tested < HIGHEST:
            axes.plot(
                [best], [tested], "D", color=blue, markersize=8, markeredgecolor=theme.ink, linestyle="none",
                label=f"this run, test (round {best:.0f}): {show(tested)}", zorder=4,
            )  # fmt: skip
            shown.append(tested)
        for (label, level), colour, dashes in zip(lines, others, ((6, 2), (2, 1.5), (6, 2, 1, 2)), strict=False):
            axes.axhline(level, color=colour, dashes=dashes, linewidth=1.8, label=label)
        rounds_axis(axes, rounds)
        perplexity_axis(axes, shown)

    alt = f"Perplexity by round: validation from {show(values[0])} in round {rounds[0]} to {show(values[-1])} in round "
    return "perplexity", alt + f"{rounds[-1]}" + "".join(f"; {label}" for label, _ in lines), draw


def _accuracy(records: Sequence[Record]) -> tuple[str, str, Draw] | None:
    curves = [
        (label, validation(records, key), colour, style)
        for key, label, colour, style in (
            ("top1", "top-1", 0, "o-"),
            ("top3", "top-3", 1, "o-"),
            ("top1_words", "top-1, words only", 0, "s:"),
            ("top3_words", "top-3, words only", 1, "s:"),
        )
    ]
    curves = [curve for curve in curves if curve[1][0]]
    if not curves:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Accuracy by round (validation)")
        for label, (rounds, values), colour, style in curves:
            size = 4 if len(rounds) < 60 else 0
            axes.plot(rounds, values, style, color=theme.colours[colour], markersize=size, label=label)
        percent_axis(axes, max(max(values) for _, (_, values), _, _ in curves) or 1.0)
        rounds_axis(axes, curves[0][1][0])

    parts = [f"{label} {values[-1]:.1%}" for label, (_, values), _, _ in curves]
    return "accuracy", "Accuracy by round on validation text, at the end: " + ", ".join(parts), draw


def _clients(result: Record) -> tuple[str, str, Draw] | None:
    given = result.get("clients_perplexity") or {}
    groups: list[tuple[str, list[float], int]] = []
    for colour, key in enumerate(("seen", "unseen")):
        numbers = list(given.get(key) or ())
        values = sorted(v for v in map(finite, numbers) if v is not None and v < HIGHEST)
        if values:
            groups.append(
                (f"{key} clients ({len(values):,})" + off_the_scale(len(numbers) - len(values)), values, colour)
            )
    if not groups:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        from matplotlib.ticker import PercentFormatter

        axes.set_title("Test perplexity of each client, best to worst")
        for (label, values, colour), marker in zip(groups, "o^", strict=False):
            # A client stands in the middle of its share of all clients, so that two groups lie side by side.
            places = [(k + 0.5) / len(values) for k in range(len(values))]
            size = 6 if len(values) < 60 else 4 if len(values) < 400 else 2.5
            axes.plot(
                places, values, marker, color=theme.colours[colour], markersize=size, markeredgewidth=0, label=label
            )
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, None, " %"))
        axes.set_xlabel("share of clients with at most this perplexity")
        perplexity_axis(axes, [v for _, values, _ in groups for v in values])

    parts = [f"{label} from {show(values[0])} to {show(values[-1])}" for label, values, _ in groups]
    return "clients", "Test perplexity of each client: " + ", ".join(parts), draw


def _traffic(result: Record, records: Sequence[Record]) -> tuple[str, str, Draw] | None:
    rounds: list[int] = [0]
    down, up = [0.0], [0.0]
    for record in records:
        moved = record.get("traffic")
        if moved and "round" in record:
            rounds.append(int(record["round"]))
            down.append(down[-1] + moved.get("down", 0) / 1e6)
            up.append(up[-1] + moved.get("up", 0) / 1e6)
    if result.get("method") == "central" or down[-1] + up[-1] == 0:
        return None  # text that lies in one place moves nothing

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Traffic of all clients, added up")
        both = [d + u for d, u in zip(down, up, strict=True)]
        for low, high, colour, label in (
            ([0.0] * len(rounds), down, theme.colours[0], f"down: {down[-1]:,.1f} MB"),
            (down, both, theme.colours[1], f"up: {up[-1]:,.1f} MB"),
        ):
            axes.fill_between(rounds, low, high, color=colour, alpha=0.35, linewidth=0, label=label)
            axes.plot(rounds, high, color=colour)
        axes.set_ylabel("MB (millions of bytes)")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, rounds[-1])
        rounds_axis(axes, rounds)

    return "traffic", f"Traffic added up over rounds: {down[-1]:,.1f} MB down, {up[-1]:,.1f} MB up", draw
