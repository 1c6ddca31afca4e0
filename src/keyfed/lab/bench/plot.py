"""The plot of `keyfed bench`: speed by contender, one panel per vocabulary, bars grouped by cohort."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from keyfed.errors import ConfigError
from keyfed.reports.figures import LIGHT, Theme, png

HEIGHT, MARGIN, BAR = 4.4, 1.4, 0.46  # inches: of the figure, beside the bars of a panel, and of a bar with its label


def measured(table: dict[str, Any], device: str) -> dict[str, float]:
    """Return the speed of those who ran: tokens per second of a GPU's clock, tokens per second of CPU time."""
    key = "tokens_per_cpu_second" if device == "cpu" else "tokens_per_second"
    return {who: float(row[key]) for who, row in table["rows"].items() if key in row}


def draw_vocabulary(axes: Any, theme: Theme, tables: list[dict[str, Any]], device: str) -> None:
    """Draw one vocabulary: a group of bars for every contender, a bar for every cohort, its value above."""
    speeds = [measured(table, device) for table in tables]
    names = list(dict.fromkeys(who for table in speeds for who in table))
    width = 0.8 / len(tables)
    for number, (table, speed) in enumerate(zip(tables, speeds, strict=True)):
        places = [names.index(who) + (number - (len(tables) - 1) / 2) * width for who in speed]
        label = f"{table['clients']:,} clients"
        bars = axes.bar(places, list(speed.values()), 0.92 * width, color=theme.colours[number % 7], label=label)
        axes.bar_label(bars, [short(v) for v in speed.values()], padding=2, fontsize=7.5)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_title(f"V = {tables[0]['vocab']:,}")
    axes.set_ylabel("tokens per CPU second" if device == "cpu" else "tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)


def short(number: float) -> str:
    """Write a speed in three figures.

    Example:
      >>> [short(n) for n in (0, 87.2, 4_210, 23_456, 117_000, 1_620_000)]
      ['0', '87', '4.21k', '23.5k', '117k', '1.62M']
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def plot_bench(result: dict[str, Any], file: Path) -> None:
    """Write the plot of a benchmark as PNG."""
    check_file(file)
    vocabularies = list(dict.fromkeys(table["vocab"] for table in result["tables"]))

    def paint(figure: Any, theme: Theme) -> None:
        for number, vocab in enumerate(vocabularies):
            axes = figure.add_subplot(1, len(vocabularies), number + 1)
            draw_vocabulary(axes, theme, [t for t in result["tables"] if t["vocab"] == vocab], result["device"])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))

    bars = sum(max(4, len(measured(table, result["device"]))) for table in result["tables"])
    file.write_bytes(png(paint, LIGHT, (MARGIN * len(vocabularies) + BAR * bars, HEIGHT)))


def check_file(file: Path) -> None:
    """Raise ConfigError unless a plot can be written there; asked before minutes are spent measuring."""
    if file.suffix.lower() != ".png":
        raise ConfigError(f"{file} is no name of a plot; expected one that ends in .png")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: folder {file.parent} does not exist")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ConfigError(f"{file} cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib, which is not installed; leave --plot out")
