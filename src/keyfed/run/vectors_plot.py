"""The plot of reduced word vectors: how much of their variance the kept components explain."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyfed.run.drawing import Plot, Theme, both_themes, single
from keyfed.text.reduction import Reduced


def draw_explained(reduced: Reduced) -> Plot:
    """Draw the share of the variance by component and added up, and the components removed before.

    Raises:
      ImportError: matplotlib is not installed.
    """
    each = np.clip(reduced.explained, 0.0, 1.0)
    together = np.minimum(each.cumsum(), 1.0)
    removed = np.clip(reduced.removed_before, 0.0, 1.0)
    places = np.arange(1, len(each) + 1)

    def draw(axes: Any, theme: Theme) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        blue, orange, green, *_ = theme.colours
        marker = "o" if len(each) < 60 else ""
        axes.set_title("Variance explained by components")
        axes.plot(places, together, f"{marker}-", color=blue, markersize=4, label=f"added up: {together[-1]:.1%}")
        axes.plot(places, each, f"{marker}--", color=orange, markersize=4, label=f"each: first {each[0]:.1%}")
        if len(removed):
            label = f"removed before: {removed.sum():.1%} of all"
            axes.plot(np.arange(1, len(removed) + 1), removed, "s:", color=green, markersize=4, label=label)
        axes.set_xlabel("component")
        axes.set_ylabel("share of the variance")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, 0, " %"))
        axes.set_ylim(0, 1.03)

    alt = f"Variance explained by {len(each)} components: {together[-1]:.1%} together, the first {each[0]:.1%}"
    if len(removed):
        alt += f"; {len(removed)} components with {removed.sum():.1%} were removed before"
    return both_themes("vectors", alt, single(draw))
