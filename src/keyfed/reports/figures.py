"""The curves of a run: plots as PNG bytes, and TensorBoard's event files (`--tensorboard`, RUN/tensorboard).

What every plot shares comes first: themes, dashes, axes of rounds, perplexity and shares. matplotlib is imported when
the first plot is drawn, without pyplot: no window, no global list of figures to close. Labels are fixed words and
numbers; words of a corpus are drawn with formulas switched off. Colours are Okabe and Ito's, which
colour-blind readers tell apart; line styles differ as well.

The event files say what metrics.jsonl says, and nothing else. When a run starts or goes on, the rounds in its log are
written again, and older events of the folder are declared void. So no round is missing or shown twice.
"""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keyfed.errors import ConfigError, RunError
from keyfed.files import BROKEN
from keyfed.model.output import Score
from keyfed.reports.document import Picture, finite, show
from keyfed.run.console import Listener, within
from keyfed.run.folder import read_metrics, strict
from keyfed.system import pip_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
Draw = Callable[[Any, "Theme"], None]  # draws on axes
Paint = Callable[[Any, "Theme"], None]  # draws a whole figure
SIZE = (5.8, 3.8)  # inches at 150 dots each: small, so that labels stay readable on a phone
TALL = (5.8, 5.6)  # two panels, one above the other
# Seven colours and four dashes: their pairs repeat only after 28 curves, and neighbours differ in both.
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
HIGHEST = 1e30  # a perplexity above it is off the scale: the model has diverged, and axes would overflow
MOST_TICKS = 8  # of an axis of rounds


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


def both_themes(name: str, alt: str, paint: Paint, size: tuple[float, float] = SIZE) -> Picture:
    """Draw a figure for light and for dark pages."""
    return Picture(f"plots/{name}.png", alt, png(paint, LIGHT, size), png(paint, DARK, size))


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

    with matplotlib.rc_context(_style(theme)):
        figure = Figure(figsize=size, dpi=150)
        canvas = FigureCanvasAgg(figure)
        paint(figure, theme)
        out = io.BytesIO()
        canvas.print_png(out, metadata={"Software": None})
    return out.getvalue()


def perplexity_figure(result: Record, records: Sequence[Record]) -> Figure:
    """Draw perplexity by round and return the figure, for notebooks.

    Raises:
      ConfigError: no round was validated.
    """
    drawing = _perplexity(result, records)
    if drawing is None:
        raise ConfigError("no round of this run was validated: there is no curve to draw")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style(LIGHT)):
        figure = Figure(figsize=SIZE, dpi=100)
        FigureCanvasAgg(figure)
        single(drawing[2])(figure, LIGHT)
    return figure


def _style(theme: Theme) -> dict[Any, Any]:
    """What matplotlib draws by on a page of a theme."""
    return {
        "font.family": "DejaVu Sans", "font.size": 11, "text.color": theme.ink, "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.soft, "axes.facecolor": theme.page, "axes.titlesize": 12, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.titlepad": 10, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.grid, "grid.linewidth": 0.8,
        "xtick.color": theme.soft, "ytick.color": theme.soft, "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink, "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 2.0,
        "figure.facecolor": theme.page, "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.1,
        "figure.constrained_layout.h_pad": 0.1,
    }  # fmt: skip


def validation(records: Iterable[Record], key: str) -> tuple[list[int], list[float]]:
    """Return rounds and values of one validation figure, where it was measured and finite."""
    pairs = [(int(r["round"]), finite((r.get("valid") or {}).get(key))) for r in records if "round" in r]
    points = [(at, value) for at, value in pairs if value is not None]
    return [at for at, _ in points], [value for _, value in points]


def rounds_axis(axes: Any, rounds: Sequence[float]) -> None:
    """Label the horizontal axis with rounds that have a point."""
    from matplotlib.ticker import FixedLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(FixedLocator(round_ticks(rounds)))
    if min(rounds) == max(rounds):
        axes.set_xlim(rounds[0] - 1, rounds[0] + 1)


def round_ticks(rounds: Sequence[float]) -> list[float]:
    """Return at most eight of the rounds: plain numbers if they are among them, else every second, fifth, … one.

    Example:
      >>> round_ticks([5, 10, 15]), round_ticks(range(1, 41)), round_ticks([1, 7, 14, 21])
      ([5, 10, 15], [5, 10, 15, 20, 25, 30, 35, 40], [1, 7, 14, 21])
    """
    there = sorted(set(rounds))
    if len(there) <= MOST_TICKS:
        return there
    for step in (m * 10**n for n in range(12) for m in (1, 2, 5)):
        plain = [at for at in there if at % step == 0]
        if 3 <= len(plain) <= MOST_TICKS:
            return plain
    step = next(m * 10**n for n in range(12) for m in (1, 2, 5) if len(there) <= m * 10**n * MOST_TICKS)
    return there[step - 1 :: step]


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


def draw_curve(axes: Any, x: Any, y: Any, style: str, **how: Any) -> None:
    """Draw a curve; its points are marked while they can be told apart."""
    axes.plot(x, y, style, markersize=4 if len(x) < 60 else 0, **how)


def off_the_scale(points: int) -> str:
    """Return what a label adds where points cannot be drawn."""
    return f" ({points:,} off the scale)" if points > 0 else ""


def draw_plots(result: Record, records: Sequence[Record]) -> list[Picture]:
    """Draw every plot for which the run has numbers; ImportError without matplotlib."""
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
    counted: list[tuple[str, float]] = []
    for key, label in (("mixture", "mixture with counts"), ("cache", "… and own cache")):
        found = finite((((result.get("counts") or {}).get(key) or {}).get("test") or {}).get("perplexity"))
        if best is not None and found is not None and found < HIGHEST:
            counted.append((f"{label}, test: {show(found)}", found))

    def draw(axes: Any, theme: Theme) -> None:
        blue, *others = theme.colours
        axes.set_title("Perplexity by round")
        draw_curve(axes, rounds, values, "o-", color=blue, label=curve)
        shown = [*values, *(level for _, level in lines)]
        if best is not None and tested is not None and tested < HIGHEST:
            axes.plot(
                [best], [tested], "D", color=blue, markersize=8, markeredgecolor=theme.ink, linestyle="none",
                label=f"this run, test (round {best:.0f}): {show(tested)}", zorder=4,
            )  # fmt: skip
            shown.append(tested)
        for (label, level), colour, dashes in zip(lines, others, DASHES[1:], strict=False):
            axes.axhline(level, color=colour, linestyle=dashes, linewidth=1.8, label=label)
        for (label, level), colour, marker in zip(counted, others[len(DASHES) - 1 :], "s^", strict=False):
            axes.plot(
                [best], [level], marker, color=colour, markersize=8, markeredgecolor=theme.ink, linestyle="none",
                label=label, zorder=4,
            )  # fmt: skip
            shown.append(level)
        rounds_axis(axes, rounds)
        perplexity_axis(axes, shown)

    alt = f"Perplexity by round: validation from {show(values[0])} in round {rounds[0]} to {show(values[-1])} in round "
    return "perplexity", alt + f"{rounds[-1]}" + "".join(f"; {label}" for label, _ in (*lines, *counted)), draw


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
            draw_curve(axes, rounds, values, style, color=theme.colours[colour], label=label)
        percent_axis(axes, max(max(values) for _, (_, values), _, _ in curves) or 1.0)
        rounds_axis(axes, curves[0][1][0])

    parts = [f"{label} {values[-1]:.1%}" for label, (_, values), _, _ in curves]
    return "accuracy", "Accuracy by round on validation text, at the end: " + ", ".join(parts), draw


def _clients(result: Record) -> tuple[str, str, Draw] | None:
    found = result.get("clients_perplexity") or {}
    groups: list[tuple[str, list[float], int]] = []
    for colour, key in enumerate(("seen", "unseen")):
        numbers = list(found.get(key) or ())
        values = sorted(v for v in map(finite, numbers) if v is not None and v < HIGHEST)
        label = f"{key} clients ({len(values):,})" + off_the_scale(len(numbers) - len(values))
        groups += [(label, values, colour)] if values else []
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


def draw_explained(explained: Sequence[float], removed_before: Sequence[float] = ()) -> Picture:
    """Draw the share of the variance of each component, and of those kept added up; see `Reduced` for the numbers.

    Components removed before PCA are the first of the vectors as they were read; those that PCA keeps follow. So
    all shares are of the variance of the vectors as they were read.
    """
    removed = np.asarray(removed_before, np.float64)
    kept = np.maximum(np.asarray(explained, np.float64), 0.0) * (1.0 - removed.sum())
    gone = np.arange(1, len(removed) + 1)
    places = np.arange(1, len(kept) + 1) + len(removed)

    def paint(figure: Any, theme: Theme) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        blue, orange, *_ = theme.colours
        each, together = figure.subplots(2, 1, sharex=True)
        each.set_title("Variance of each component")
        draw_curve(each, places, kept, "o-", color=blue, label=f"{len(kept)} kept: {kept.sum():.1%}")
        if len(removed):
            draw_curve(each, gone, removed, "s:", color=orange, label=f"{len(removed)} removed: {removed.sum():.1%}")
        each.yaxis.set_major_formatter(PercentFormatter(1.0, None, " %"))
        together.set_title("Components kept, added up")
        draw_curve(together, places, kept.cumsum(), "o-", color=blue)
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
    return both_themes("vectors", alt, paint, TALL)


def draw_gains(clients: Iterable[Mapping[str, float]]) -> Picture | None:
    """Draw each client's perplexity after personalisation against before; None without matplotlib or clients.

    Args:
      clients: nats per token `before` and `after`, a client each (`by_client` of `personalise`).
    """
    pairs = [tuple(Score(1, client[key]).perplexity for key in ("before", "after")) for client in clients]
    points = [(x, y) for x, y in pairs if max(x, y) < HIGHEST]
    if not points:
        return None
    gain = sum(y < x for x, y in points)
    missing = len(pairs) - len(points)
    label = f"a client ({len(points):,}" + (f", {missing:,} off the scale)" if missing else ")")

    def draw(axes: Any, theme: Theme) -> None:
        low, high = min(map(min, points)), max(map(max, points))
        axes.set_title("Test perplexity of each client")
        axes.plot([low, high], [low, high], color=theme.soft, dashes=(6, 2), linewidth=1.4, label="no change")
        colour = theme.colours[0]
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=5, markeredgewidth=0, label=label)
        if high / low > 4:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel("before")
        axes.set_ylabel("after tuning on its own text")

    alt = f"Test perplexity of each client before and after personalisation: {gain} of {len(points)} gain"
    try:
        return both_themes("personalised", alt, single(draw))
    except ImportError:
        return None


def draw_exploration(found: Mapping[str, Any], lengths: NDArray[np.int64], folder: Path) -> list[str]:
    """Draw every table of `keyfed.text.explore` that has rows, and the words of each line; return the files."""
    left_out = ", stop words left out" if found["stop_words"] else ""
    tables = [
        ("unigrams", f"Most frequent words{left_out}", found["unigrams"], "count"),
        ("bigrams", f"Most frequent pairs of words{left_out}", found["bigrams"], "count"),
        ("tfidf", f"Most telling words (TF-IDF over {found['documents']:,} documents)", found["tfidf"], "score"),
    ]
    if "characters" in found:
        tables.append(("characters", "Most frequent characters", found["characters"]["frequencies"], "count"))
    drawings: list[tuple[str, str, float, Draw]] = [
        (stem, title, 1.2 + 0.28 * len(rows), partial(_bars, rows=rows, value=value))
        for stem, title, rows, value in tables
        if rows
    ]
    bag = found["bag_of_words"]
    if bag["terms"]:
        drawings.append(("bag_of_words", "Bag of words", 1.8 + 0.28 * len(bag["terms"]), partial(_heat, bag=bag)))
    drawings.append(("line_lengths", "Words per line", 4.0, partial(_histogram, lengths=lengths)))
    folder.mkdir(parents=True, exist_ok=True)
    for stem, title, height, draw in drawings:

        def paint(figure: Any, theme: Theme, title: str = title, draw: Draw = draw) -> None:
            axes = figure.add_subplot()
            axes.set_title(f"{found['corpus']}: {title}", parse_math=False)
            axes.grid(False)
            draw(axes, theme)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # emoji and scripts we have no font for
            (folder / f"{stem}.png").write_bytes(png(paint, LIGHT, (8, height)))
    return [str(folder / f"{stem}.png") for stem, *_ in drawings]


def _bars(axes: Any, theme: Theme, rows: Sequence[Mapping[str, Any]], value: str) -> None:
    """Draw horizontal bars, the first row on top."""
    visible = {" ": "space", "\n": "line end", "\t": "tab"}
    bars = axes.barh(range(len(rows)), [row[value] for row in rows], color=theme.colours[0], height=0.72)
    axes.bar_label(bars, fmt="{:,.0f}" if value == "count" else "{:.3f}", padding=4, fontsize=9, color=theme.soft)
    axes.set_yticks(range(len(rows)), [visible.get(row["term"], row["term"]) for row in rows], parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])


def _heat(axes: Any, theme: Theme, bag: Mapping[str, Any]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    counts = np.array(bag["counts"]).T  # [term, document]
    shades = LinearSegmentedColormap.from_list("shades", [theme.grid, theme.colours[0]])
    image = axes.imshow(counts, cmap=shades, aspect="auto")
    axes.set_yticks(range(len(bag["terms"])), bag["terms"], parse_math=False)
    axes.set_xticks(range(counts.shape[1]), [str(d + 1) for d in range(counts.shape[1])])
    axes.set_xlabel(f"the {counts.shape[1]} largest of {bag['shape'][0]:,} documents, by size")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, label="occurrences").outline.set_visible(False)


def _histogram(axes: Any, theme: Theme, lengths: NDArray[np.int64]) -> None:
    """Draw lengths up to the 99th percentile, whole words to a bin."""
    limit = max(1, int(np.quantile(lengths, 0.99)))
    step, median = -(-(limit + 1) // 50), float(np.median(lengths))
    bins = (np.arange(0, limit + step + 1, step) - 0.5).tolist()
    axes.hist(lengths, bins=bins, color=theme.colours[0], rwidth=0.9)
    axes.axvline(median, color=theme.colours[1], linewidth=1.5)
    where = {"transform": axes.get_xaxis_transform(), "va": "top"}
    axes.text(median, 1.0, f"  median {median:.0f}", color=theme.colours[1], **where)
    axes.set_xlabel("words (the longest 1 % of lines are not shown)")
    axes.set_ylabel("lines")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def scalars(record: Mapping[str, Any], moved: Mapping[str, float]) -> dict[str, float]:
    """Return what TensorBoard shows of a round; `moved` are all bytes up to and including it.

    A number that metrics.jsonl cannot hold (NaN, ∞) is null there and NaN here, which TensorBoard marks on the curve.
    """
    found: dict[str, Any] = {"train/loss": record["loss"]}
    for key in ("nats", "perplexity", "top1", "top3"):
        if record.get("valid"):
            found[f"valid/{key}"] = record["valid"][key]
    if record.get("privacy"):  # a private run tells neither its training loss nor who came
        found = {tag: value for tag, value in found.items() if tag != "train/loss"}
        found["privacy/epsilon"] = record["privacy"]["epsilon"]
    else:
        found["clients/effective"] = record["effective_clients"]
    found |= {f"bytes/{direction}": total for direction, total in moved.items()}
    if record["seconds"] is not None:  # a private federation does not tell how long its clients took
        found["time/seconds"] = record["seconds"]
    return {tag: math.nan if value is None else float(value) for tag, value in found.items()}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds in a run's log, of which TensorBoard shows all that it can."""
    records = read_metrics(folder)
    try:
        for record in records:
            scalars(record, {d: float(record["traffic"][d]) for d in ("down", "up")})
            float(record["elapsed"] or 0.0)
    except BROKEN as e:
        raise RunError(f"{folder / 'metrics.jsonl'} is damaged: a round's line has no {e}") from None
    return records


class EventWriter:
    """A listener that writes event files and hands everything on to another listener.

    A run that trains another one (`train.central`) starts a second time: that one is shown as a run of its
    own, RUN/tensorboard/central.
    """

    def __init__(self, run: Path, inner: Listener) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise ConfigError(
                f"--tensorboard needs the package tensorboard ({e}); install it with: {pip_line('tensorboard')}"
            ) from None
        self._open = SummaryWriter
        self._run = run
        self._inner = inner
        self._writer: Any = None
        self._moved = {"down": 0.0, "up": 0.0}
        self._began = 0.0
        self._starts = 0

    def say(self, line: str) -> None:
        """Hand a line of explanation on."""
        self._inner.say(line)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Open the event file and write what the log holds already."""
        # Only now: before its first round a run refuses a folder that is not empty.
        self.close()
        folder = "central" if self._starts else ""
        self._starts += 1
        logged = read_log(self._run / folder)[:done]
        self._moved = {"down": 0.0, "up": 0.0}
        # The time axis is the time trained, whatever lay between two sittings.
        self._began = time.time() - ((logged[-1]["elapsed"] or 0.0) if logged else 0.0)
        self._writer = self._open(str(self._run / "tensorboard" / folder), purge_step=1)
        for record in logged:
            self._write(record)
        self._writer.flush()
        self._inner.start(what, rounds, done)

    def within(self, what: str) -> None:
        """Hand on what a round is doing."""
        within(self._inner, what)

    def round(self, record: dict[str, Any]) -> None:
        """Write a round's scalars, at once on the disk."""
        self._write(strict(record))
        self._writer.flush()
        self._inner.round(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        for direction in self._moved:
            self._moved[direction] += record["traffic"][direction]
        for tag, value in scalars(record, self._moved).items():
            self._writer.add_scalar(tag, value, record["round"], walltime=self._began + (record["elapsed"] or 0.0))

    def close(self) -> None:
        """Close the event file; what was written stays."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
