"""What every plot shares: themes for light and dark pages, a figure as PNG bytes, axes of rounds and of perplexity.

matplotlib is imported when the first plot is drawn, without pyplot: no window, no global list of figures to
close. Labels are fixed words and numbers; names from files are never drawn (a `$` would be read as a formula).
Colours are Okabe and Ito's, told apart by colour-blind readers; line styles differ as well.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyfed.reports.document import finite

Record = Mapping[str, Any]
Draw = Callable[[Any, "Theme"], None]  # draws on axes
Paint = Callable[[Any, "Theme"], None]  # draws a whole figure
SIZE = (5.8, 3.8)  # inches at 150 dots each: small, so that labels stay readable on a phone

HIGHEST = 1e30  # a perplexity above it is off the scale: the model has diverged, and axes would overflow


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a plot on a light or a dark page."""

    page: str
    ink: str
    soft: str
    grid: str
    colours: tuple[str, ...]  # blue, orange, green, pink, yellow, sky, violet


LIGHT = Theme(
    "#ffffff", "#1c2430", "#5a6675", "#e3e7ec",
    ("#0072b2", "#d55e00", "#009e73", "#b0588c", "#b58900", "#3a9bd0", "#6a4fa3"),
)  # fmt: skip
DARK = Theme(
    "#1b2027", "#e4e8ee", "#9aa6b4", "#313944",
    ("#56b4e9", "#e69f00", "#3dbf94", "#e0a0c4", "#f0e442", "#8fd0f5", "#b79be8"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn plot: file name without ending, description, PNG for light and dark pages."""

    name: str
    alt: str
    light: bytes
    dark: bytes


def both_themes(name: str, alt: str, paint: Paint, size: tuple[float, float] = SIZE) -> Plot:
    """Draw a figure for light and for dark pages."""
    return Plot(name, alt, png(paint, LIGHT, size), png(paint, DARK, size))


def single(draw: Draw, columns: int = 2) -> Paint:
    """Return what paints a figure of one drawing with its legend below."""

    def paint(figure: Any, theme: Theme) -> None:
        draw(figure.add_subplot(), theme)
        figure.legend(loc="outside lower center", ncols=columns)

    return paint


def png(paint: Paint, theme: Theme, size: tuple[float, float] = SIZE) -> bytes:
    """Paint a figure and return it as PNG; the same numbers give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 11, "text.color": theme.ink, "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.soft, "axes.facecolor": theme.page, "axes.titlesize": 12, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.titlepad": 10, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.grid, "grid.linewidth": 0.8,
        "xtick.color": theme.soft, "ytick.color": theme.soft, "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink, "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 2.0,
        "figure.facecolor": theme.page, "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.1,
        "figure.constrained_layout.h_pad": 0.1,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, dpi=150)
        canvas = FigureCanvasAgg(figure)
        paint(figure, theme)
        out = io.BytesIO()
        canvas.print_png(out, metadata={"Software": None})
    return out.getvalue()


def validation(records: Iterable[Record], key: str) -> tuple[list[int], list[float]]:
    """Return rounds and values of one validation figure, where it was measured and finite."""
    pairs = [(int(r["round"]), finite((r.get("valid") or {}).get(key))) for r in records if "round" in r]
    points = [(at, value) for at, value in pairs if value is not None]
    return [at for at, _ in points], [value for _, value in points]


def rounds_axis(axes: Any, rounds: Sequence[float]) -> None:
    """Label the horizontal axis with whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if min(rounds) == max(rounds):
        axes.set_xlim(rounds[0] - 1, rounds[0] + 1)


def perplexity_axis(axes: Any, values: Sequence[float]) -> None:
    """Label the axis; logarithmic, with plain numbers, where values span more than a factor of four."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(values), max(values)
    axes.set_ylabel("perplexity")
    if low > 0 and high / low > 4:
        axes.set_yscale("log")
        axes.set_ylabel("perplexity (log scale)")
        subs = (1.0, 2.0, 5.0) if high / low < 1e4 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if 1 <= y < 1e6 else f"{y:g}"))


def percent_axis(axes: Any, top: float) -> None:
    """Label the vertical axis of a share of tokens whose highest is `top`."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylabel("tokens guessed right")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, 0 if top > 0.05 else None, " %"))
    axes.set_ylim(-0.02 * top, 1.08 * top)


def off_the_scale(points: int) -> str:
    """Return what a label adds where points cannot be drawn."""
    return f" ({points:,} off the scale)" if points > 0 else ""
