"""The report of a search: report.md, report.html and one plot for each option that was searched."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.config.load import dump_toml
from keyfed.files import write_atomically
from keyfed.lab.experiment.search import Range, Space
from keyfed.reports.document import Block, Code, Heading, Picture, Table, Text, finite, show, to_html, to_markdown
from keyfed.reports.figures import HIGHEST, Plot, Theme, both_themes, perplexity_axis, single
from keyfed.run.console import human_bytes, plural, render_table

Record = Mapping[str, Any]
NOTES = (
    "Trial 0 is the configuration as given. A stopped trial was among the worse after a third of the rounds; its "
    "perplexity is that of fewer rounds. Of those that trained all rounds the lowest validation perplexity wins, ties "
    "go to fewer bytes. A diverged trial never guessed better than ten times worse than evenly among all words, or had "
    "a round in which every client was refused; a refused trial has values the method does not take.",
    "Perplexity is that of the best validation round, over all seeds. No trial read the test text. The winner of many "
    "is flattered by the choice: its honest figure is the test perplexity of one run, keyfed train --config best.toml.",
)


def verdict(result: Record) -> str:
    """Say in one sentence what the search found and what it bought.

    Example:
      >>> row = {"trial": 2, "values": {"lr": 0.01}, "perplexity": 90.0}
      >>> verdict({"method": "fedavg", "rounds": 6, "trials": [row, {}], "best": row, "default": {"perplexity": 100.0}})
      'The best of 2 configurations of fedavg, lr=0.01, has a validation perplexity of 90.00 after 6 rounds, the one \
given 100.0: tuning bought 10.0 %.'
    """
    best, given = result["best"], result["default"]
    count = len(result["trials"])
    if best is None:
        return f"None of {count} configurations of {result['method']} trained to a finite validation perplexity."
    if best["trial"] == 0:
        return (
            f"The configuration as given is the best of {count} of {result['method']}, with a validation perplexity of "
            f"{show(best['perplexity'])} after {plural(result['rounds'], 'round')}: tuning bought nothing."
        )
    before = finite((given or {}).get("perplexity"))
    bought = f"tuning bought {1 - best['perplexity'] / before:.1%}".replace("%", " %") if before else "it had none"
    return (
        f"The best of {count} configurations of {result['method']}, {_shown(best['values'])}, has a validation "
        f"perplexity of {show(best['perplexity'])} after {plural(result['rounds'], 'round')}, the one given "
        f"{show(before)}: {bought}."
    )


def _shown(values: Record) -> str:
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in values.items())


def trial_table(result: Record) -> list[list[str]]:
    """Return the trials as rows of text, header first: lowest validation perplexity first, what went wrong last."""
    keys = list(result["settings"]["search"])
    rows = [["trial", *keys, "rounds", "valid perplexity", "top-1", "top-3", "traffic", "seconds", "outcome"]]
    for trial in result["trials"]:
        best = result["best"] is not None and trial["trial"] == result["best"]["trial"]
        name = f"{trial['trial']}" + (" (as given)" if trial["trial"] == 0 else "")
        outcome = ("best" if best else trial["status"]) + (f": {trial['note']}" if trial["note"] else "")
        values = ["none" if trial["values"][k] is None else f"{trial['values'][k]}" for k in keys]
        accuracy = ["–" if trial[k] is None else f"{trial[k]:.1%}" for k in ("top1", "top3")]
        moved, spent = human_bytes(trial["bytes"]), f"{trial['seconds']:.1f}"
        shown = show(trial["perplexity"])
        rows.append([name, *values, str(trial["rounds"]), shown, *accuracy, moved, spent, outcome])
    return rows


def tune_text(result: Record) -> str:
    """Return what the terminal shows of a finished search."""
    lines = [f"{render_table(trial_table(result))}{result['verdict']}", *result["edges"]]
    if result["toml"]:
        best = shlex.quote(f"{result['out']}/best.toml")
        lines += ["", result["toml"].rstrip(), "", f"train it:  keyfed train --config {best}"]
    report = shlex.quote(f"{result['out']}/report.html")
    return "\n".join([*lines, f"report:    {report}"])


def write_tune_report(out: Path, result: Record, space: Space) -> list[Path]:
    """Write report.md, report.html and plots/ of a search; without matplotlib there are no plots."""
    try:
        plots: list[Plot] | None = [p for p in (draw_option(result, key, space) for key in space) if p is not None]
    except ImportError:
        plots = None
    blocks: list[Block] = [
        Heading(f"Tuning {result['method']} on {result['data']}, model {result['model']}", 1),
        Text(result["verdict"], "verdict"),
        *(Text(line) for line in result["edges"]),
        Heading("Trials"),
        Table(trial_table(result)),
        *(Text(line, "note") for line in NOTES),
    ]
    if plots is None:
        blocks.append(Text("No plots: matplotlib is not installed (pip install matplotlib).", "note"))
    blocks += [Picture(f"plots/{p.name}.png", p.alt, p.light, p.dark) for p in plots or ()]
    if result["toml"]:
        blocks += [Heading("The winner as best.toml"), Code(result["toml"], "toml")]
    blocks += [Heading("Settings"), Code(dump_toml(result["settings"]), "toml")]
    written = [out / "report.md", out / "report.html"]
    for path, text in zip(written, (to_markdown(blocks), to_html(blocks)), strict=True):
        write_atomically(path, text.encode("utf-8"))
    for plot in plots or ():
        (out / "plots").mkdir(exist_ok=True)
        written.append(out / "plots" / f"{plot.name}.png")
        write_atomically(written[-1], plot.light)
    return written


def draw_option(result: Record, key: str, space: Space) -> Plot | None:
    """Draw validation perplexity against one option's value; None where no trial has a number to draw."""
    one = space[key]
    trials = [t for t in result["trials"] if (finite(t["perplexity"]) or HIGHEST) < HIGHEST]
    if isinstance(one, Range):  # an option that is off in the configuration as given has no place on the axis
        trials = [t for t in trials if t["values"][key] is not None]
    if not trials:
        return None
    ticks: list[str] = []
    if isinstance(one, Range):
        places = [float(t["values"][key]) for t in trials]
    else:  # a list is drawn value by value, the given one beside it where it is not in the list
        known = dict.fromkeys([*one.values, *(t["values"][key] for t in trials)])
        ticks = ["none" if value is None else str(value) for value in known]
        places = [float(list(known).index(t["values"][key])) for t in trials]
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
        elif isinstance(one, Range):
            if one.log and min(places) > 0:
                axes.set_xscale("log")
            axes.set_xlim(min(one.low, *places), max(one.high, *places))  # the whole range, tried or not
        perplexity_axis(axes, values)

    low = min(zip(values, (t["values"][key] for t in trials), strict=True), key=lambda pair: pair[0])
    alt = f"Validation perplexity of {len(trials)} trials by {key}; lowest {show(low[0])} at {low[1]}"
    return both_themes(f"search-{key}", alt, single(draw))
