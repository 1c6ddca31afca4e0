"""The plot of reduced word vectors: the variance of each component, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keyfed.reports.figures import Plot, Theme, both_themes

SIZE = (5.8, 5.6)  # inches: two panels, one above the other


def draw_explained(explained: Sequence[float], removed_before: Sequence[float] = ()) -> Plot:
    """Draw the share of the variance of each component, and of those kept added up; see `Reduced` for the numbers.

    Components removed before PCA are the first of the vectors as they were read; those that PCA keeps follow. So
    all shares are of the variance of the vectors as they were read.

    Raises:
      ImportError: matplotlib is not installed.
    """
    removed = np.asarray(removed_before, np.float64)
    kept = np.maximum(np.asarray(explained, np.float64), 0.0) * (1.0 - removed.sum())
    gone = np.arange(1, len(removed) + 1)
    places = np.arange(1, len(kept) + 1) + len(removed)

    def paint(figure: Any, theme: Theme) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        blue, orange, *_ = theme.colours
        each, together = figure.subplots(2, 1, sharex=True)
        mark = "o" if len(kept) < 60 else ""
        each.set_title("Variance of each component")
        each.plot(places, kept, f"{mark}-", color=blue, markersize=4, label=f"{len(kept)} kept: {kept.sum():.1%}")
        if len(removed):
            label = f"{len(removed)} removed: {removed.sum():.1%}"
            each.plot(gone, removed, "s:", color=orange, markersize=4, label=label)
        each.yaxis.set_major_formatter(PercentFormatter(1.0, None, " %"))
        together.set_title("Components kept, added up")
        together.plot(places, kept.cumsum(), f"{mark}-", color=blue, markersize=4)
        together.yaxis.set_major_formatter(PercentFormatter(1.0, 0, " %"))
        together.set_ylim(0, 1.03)
        together.set_xlabel("component")
        together.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        for axes in (each, together):
            axes.set_ylabel("share of variance")
        each.set_ylim(bottom=0)
        each.set_xlim(0, places[-1] + 1)
        figure.legend(loc="outside lower center", ncols=2)

    alt = f"Variance of word vectors by component: {len(kept)} kept with {kept.sum():.1%}, the first {kept[0]:.1%}"
    if len(removed):
        alt += f"; {len(removed)} removed with {removed.sum():.1%}"
    return both_themes("vectors", alt, paint, SIZE)
