"""What comparisons and searches say: the verdict, the tables, report.md and report.html with their plots."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, dump_toml, to_document
from keyfed.lab.experiment.compare import (
    OWN_SECTIONS,
    QUICK,
    START_KEYS,
    ComparedMethod,
    ComparedRun,
    value_of,
)
from keyfed.lab.experiment.plots import draw_comparison, draw_option
from keyfed.lab.experiment.rows import contenders, lead_of
from keyfed.reports.document import (
    NONE,
    Block,
    Code,
    Heading,
    Links,
    Picture,
    Table,
    Text,
    facts_table,
    finite,
    show,
    show_count,
    show_duration,
    show_percent,
)
from keyfed.reports.run_page import DEFINITIONS, not_beaten
from keyfed.run.console import human_bytes, plural, render_table
from keyfed.run.start import start_lines

Record = Mapping[str, Any]
NOTES = Path(__file__).with_name("templates") / "notes.toml"
REFERENCES = (("kneser_ney", "Kneser–Ney"), ("unigram", "unigram"))


def explanations(*kinds: str) -> list[Block]:
    """What the figures of a report mean: "compared", "savings", "searched"."""
    found = tomllib.loads(NOTES.read_text("utf-8"))
    return [Text(line, "note") for kind in kinds for line in found[kind]]


def pictures(draw: Callable[[], Sequence[Picture]]) -> list[Block]:
    """The plots of a report; without matplotlib it says so."""
    try:
        return [*draw()]
    except ImportError:
        return [Text("No plots: matplotlib is not installed (pip install matplotlib).", "note")]


def document(summary: Record, cells: Sequence[ComparedRun]) -> list[Block]:
    """Return the report of a comparison as blocks."""
    entries = list({cell.entry.label: cell.entry for cell in cells}.values())
    saved = summary.get("fine_tuning") or ()
    savings: list[Block] = []
    if saved:
        savings = [Heading("What a start saves"), *map(Text, savings_lines(saved)), Table(savings_table(saved))]
    return [
        Heading(f"{len(entries)} methods on {summary['data']}, model {summary['model']}", 1),
        Text(str(summary["verdict"]), "verdict"),
        Table(comparison_table(summary)),
        *(Text(line, "note") for line in notes(summary)),
        *savings,
        Heading("Curves"),
        *pictures(lambda: draw_comparison(summary, cells)),
        Heading("The same for all methods"),
        facts_table(_same(summary, entries)),
        Heading("What differs"),
        Table([["method", "rounds", f"options that differ from {entries[0].label}'s"], *differing(entries)], False),
        Heading("Each seed"),
        Table(_seed_table(summary)),
        Links([(f"{c.entry.label}, seed {c.seed}", f"{c.entry.folder}/seed-{c.seed}/") for c in cells]),
        Heading("Definitions"),
        *explanations("compared", *(["savings"] if saved else [])),
        *(Text(line, "note") for line in DEFINITIONS),
    ]


def verdict(summary: Record) -> str:
    """Say who is best, or that this many seeds cannot tell; first of all, where no method beats the counts."""
    ranked, seeds = contenders(summary["rows"]), len(summary["seeds"])
    over = f" over {seeds} seeds" if seeds > 1 else ""
    if not ranked:
        return "No method has a finite test perplexity: every run failed or diverged."
    first = ranked[0]
    level = not_beaten("No method beats", first["test_mean"]["perplexity"], summary["baselines"])
    lowest = "a" if len(ranked) == 1 else "the lowest"
    start = f"{level}{first['label']} has {lowest} test perplexity of {_scored(first)}{over}"
    if len(ranked) == 1:
        return f"{start}; there is no other method with a result to compare it with."
    second, lead = ranked[1], lead_of(ranked)
    assert lead is not None
    behind = f"{start}; that of {second['label']} ({_scored(second)}) is {lead.in_words}"
    if summary["best"] is not None:
        return f"{behind}: {first['label']} is better."
    if seeds == 1:
        return (
            f"{start}, then {second['label']} ({_scored(second)}); one seed cannot tell whether that is the method or "
            "chance (--seeds 3)."
        )
    return f"{behind}: {seeds} seeds cannot tell them apart."


def notes(summary: Record) -> Iterable[str]:
    """Yield what a reader of the table has to know: target, budget, quick preset, failures."""
    target = summary["target"]
    if target is not None:
        behind = {row["method"] for row in summary["rows"]} > {"fedsgd"}
        why = "the highest of the methods' best, so that all reach it" + (" (but for FedSGD)" if behind else "")
        why = "as given" if target["given"] else why
        nats = f" ({target['nats']:.3f} nats)" if summary["characters"] else ""
        yield f"Target: validation perplexity {show(target['perplexity'])}{nats}, {why}."
    if summary["budget"] == "tokens":
        yield "Budget: every method trains as many rounds as fit the tokens of the first one's."
    else:
        yield "Budget: the same number of rounds for all; the tokens a method reads in them are in the table."
    yield from _privacy_notes(summary["rows"])
    yield from start_notes(summary["rows"])
    if summary["quick"]:
        reasons = {q.key: q.why for q in QUICK}
        reduced = "; ".join(f"{key} = {value:,} ({reasons[key]})" for key, value in summary["quick"].items())
        yield f"Quick: {reduced}. --full compares on the whole text."
    for row in summary["rows"]:
        for seed, reason in row["failed"].items():
            yield f"Failed: {row['label']}, seed {seed}: {reason}"


def _privacy_notes(rows: Iterable[Record]) -> Iterable[str]:
    """Say whose ε the column has; the first line of a run's own statement, once where all rows have the same."""
    accounts = [account for row in rows for account in _accounts(row)]
    if accounts:
        yield (
            "ε is that of one run of the row, the largest of its seeds, by privacy loss distributions. A comparison "
            "trains on the same clients many times: what all its runs give away together adds up."
        )
    yield from dict.fromkeys(str(account["statement"][0]) for account in accounts)


def _accounts(row: Record) -> list[Record]:
    return [seed["privacy"] for seed in row["seeds"] if seed.get("privacy")]


def _epsilon(row: Record) -> str:
    """A row's ε with the word of its verdict; a method without a ledger has neither."""
    accounts = _accounts(row)
    if not accounts:
        return "NONE"
    spent = [finite(account["pld"]) for account in accounts]
    known = [number for number in spent if number is not None]
    return f"{max(known):.3g}, {accounts[0]['verdict']}" if len(known) == len(spent) else "∞, NONE"


def comparison_table(summary: Record) -> list[list[str]]:
    """Return the comparison as rows of text, the header first, the baselines last."""
    rows = summary["rows"]
    columns: dict[str, tuple[bool, Callable[[Record], str]]] = {  # whether it is shown, and what it writes of a row
        "method": (True, lambda row: row["label"] + (" (best)" if row["label"] == summary["best"] else "")),
        "test perplexity": (True, _scored),
        "nats": (summary["characters"], _nats),
        "top-1": (True, lambda row: show_percent(_mean(row, "test_mean", "top1"))),
        "top-3": (True, lambda row: show_percent(_mean(row, "test_mean", "top3"))),
        "unseen perplexity": (
            any(_mean(row, "unseen_mean", "perplexity") is not None for row in rows),
            lambda row: show(_mean(row, "unseen_mean", "perplexity")),
        ),
        "ε": (any(map(_accounts, rows)), _epsilon),
        "rounds to target": (True, _rounds_to_target),
        "bytes to target": (True, _bytes_to_target),
        "modelled time to target": (
            any("modelled_seconds_to_target" in row for row in rows),
            lambda row: _number(row.get("modelled_seconds_to_target"), show_duration),
        ),
        "tokens": (True, lambda row: show_count(row["tokens"])),
        "seconds": (True, lambda row: _number(row["seconds"], "{:,.1f}".format)),
        "effective clients": (
            True,
            lambda row: NONE if row["method"] == "central" else _number(row["effective_clients"], "{:.2f}".format),
        ),
    }
    shown = {head: write for head, (is_shown, write) in columns.items() if is_shown}
    table = [list(shown), *([write(row) for write in shown.values()] for row in rows)]
    for key, name in REFERENCES:
        if found := summary["baselines"].get(key):
            order = f"-{found['order']}" if found.get("order") else ""
            row = {
                **found,
                "label": f"{name}{order} (reference)",
                "test_mean": found["test"],
                "unseen_mean": found.get("unseen"),
            }
            scored = list(shown)[: list(shown).index("rounds to target")]
            cells = [NONE if head == "ε" else shown[head](row) for head in scored]
            table.append(cells + [NONE] * (len(shown) - len(cells)))
    return table


def _number(value: Any, write: Callable[[float], str]) -> str:
    number = finite(value)
    return NONE if number is None else write(number)


def _mean(row: Record, part: str, key: str) -> float | None:
    return finite((row.get(part) or {}).get(key))


def _scored(row: Record) -> str:
    """A perplexity with its spread, where there is one."""
    mean, spread = _mean(row, "test_mean", "perplexity"), _mean(row, "test_spread", "perplexity")
    done = sum(seed["error"] is None for seed in row.get("seeds", ()))
    if mean is None:
        return "failed" if row.get("failed") and not done else "not finite"
    partly = f" ({done} of {len(row['seeds'])} seeds)" if row.get("failed") else ""
    digits = "{:.1f}".format if 100 <= mean < 1e6 else "{:.2f}".format if mean < 100 else show
    return _with(show(mean), _number(spread, digits)) + partly


def _nats(row: Record) -> str:
    return _with(*(_number(_mean(row, f"test_{part}", "nats"), "{:.3f}".format) for part in ("mean", "spread")))


def _rounds_to_target(row: Record) -> str:
    done = sum(seed["error"] is None for seed in row["seeds"])
    if not done or finite(row["rounds_to_target"]) is not None:
        return _number(row["rounds_to_target"], lambda rounds: f"{rounds:.1f}".removesuffix(".0"))
    return f"{row['reached']} of {done} seeds" if row["reached"] else "not reached"


def _bytes_to_target(row: Record) -> str:
    if row["method"] == "central":  # text that lies in one place moves nothing and weighs nobody
        return NONE
    needed = _number(row["bytes_to_target"], human_bytes)
    return needed if needed != NONE else _number(row["bytes"], lambda spent: f"not reached ({human_bytes(spent)})")


def _seed_table(summary: Record) -> list[list[str]]:
    columns: dict[str, Callable[[Record], str]] = {
        "test perplexity": lambda seed: show(seed["test"].get("perplexity")),
        "nats": lambda seed: _number(seed["test"].get("nats"), "{:.3f}".format),
        "top-1": lambda seed: show_percent(seed["test"].get("top1")),
        "top-3": lambda seed: show_percent(seed["test"].get("top3")),
        "unseen perplexity": lambda seed: show(_mean(seed, "unseen", "perplexity")),
        "best round": lambda seed: show_count(seed["best_round"]),
        "rounds to target": lambda seed: str(seed["rounds_to_target"] or "not reached"),
        "bytes to target": _bytes_to_target,
        "seconds": lambda seed: _number(seed["seconds"], "{:,.1f}".format),
    }
    table = [["method", "seed", *columns]]
    for row in summary["rows"]:
        for seed in row["seeds"]:
            one = {**seed, "method": row["method"]}
            failed = ["failed", *[NONE] * (len(columns) - 1)]
            cells = [write(one) for write in columns.values()] if seed["error"] is None else failed
            table.append([row["label"], str(seed["seed"]), *cells])
    return table


def _same(summary: Record, entries: Sequence[ComparedMethod]) -> list[tuple[str, str]]:
    """Facts that hold for every row."""
    known: Record = next((row for row in summary["rows"] if row.get("clients")), {})
    config = entries[0].config
    started = ", but for what a start brings" if any(entry.starts for entry in entries) else ""
    return [
        ("corpus", str(summary["data"])),
        ("partition", config.data.partition or "the corpus's own"),
        ("clients", show_count(known.get("clients"))),
        ("cohort", f"{_cohort(config)}, drawn by seed and round: the same for all that draw one"),
        ("vocabulary", show_count(known.get("vocabulary"))),
        ("model", f"{summary['model']}, {show_count(known.get('parameters'))} parameters"),
        ("initial weights", "drawn by the seed: the same for all methods of a seed" + started),
        ("tokens of a client in a round", "all" if config.data.max_tokens is None else f"{config.data.max_tokens:,}"),
        ("test tokens", show_count((known.get("test") or {}).get("tokens"))),
        ("validation tokens", "all" if config.train.valid_tokens is None else f"{config.train.valid_tokens:,}"),
        ("seeds", ", ".join(map(str, summary["seeds"]))),
    ]


def _cohort(config: Config) -> str:
    """How many clients a round calls, in words."""
    p = config.participation
    many = f"{config.train.cohort} clients" if p.fraction is None else f"{p.fraction:.0%} of all clients"
    return many if p.sampling == "uniform" else f"{many} by {p.sampling} sampling"


def _own_settings(entry: ComparedMethod) -> dict[str, Any]:
    """A method's options by name, those of its parts, uploads and start with their section."""
    document = to_document(entry.config)
    parts = {f"{s}.{key}": value for s in OWN_SECTIONS for key, value in document.get(s, {}).items()}
    return {**document["method"], **parts, **{key: value_of(entry.config, key) for key in START_KEYS}}


def differing(entries: Sequence[ComparedMethod]) -> list[list[str]]:
    """One row a method: its rounds and the options that the first method does not have, or has otherwise."""
    first = _own_settings(entries[0])
    rows = []
    for entry in entries:
        own = _own_settings(entry)
        changed = [f"{key}={'none' if value is None else value}" for key, value in own.items()
                   if key != "name" and (key not in first or first[key] != value)]  # fmt: skip
        dropped = [f"no {key}" for key in first if key not in own]
        rows.append([entry.label, str(entry.config.train.rounds), ", ".join(changed + dropped) or "none"])
    return rows


def savings_table(found: Sequence[Record]) -> list[list[str]]:
    """Return what starts save as rows of text: every seed of every variant, then all seeds together."""
    table = [["variant", "seed", "random start's best top-1", "in round", "reached in round", "rounds saved",
              "bytes saved", "test perplexity", "test top-1"]]  # fmt: skip
    for one in found:
        for seed in one["seeds"]:
            table.append([one["variant"], str(seed["seed"]), *_savings(one, seed, {})])
        if len(one["seeds"]) > 1:
            table.append([one["variant"], "mean", *_savings(one, one["mean"], one["spread"])])
    return table


def _savings(one: Record, values: Record, spread: Record) -> list[str]:
    if values.get("error") is not None:
        return ["failed", *[NONE] * 6]

    def share(key: str) -> str:
        return _with(show_percent(values[key], 2), _number(spread.get(key), lambda sd: f"{100 * sd:.2f}"))

    perplexity = (_with(show(values[key]), show(spread.get(key))) for key in ("plain_perplexity", "perplexity"))
    return [
        share("best_top1"),
        _rounds(values, spread, "best_round"),
        _reached(one, values, spread),
        _rounds(values, spread, "rounds_saved"),
        _with(show_bytes(values["bytes_saved"]), show_bytes(spread.get("bytes_saved"))),
        " → ".join(perplexity),
        f"{share('plain_top1')} → {share('top1')}",
    ]


def _with(value: str, spread: str) -> str:
    return value if NONE in (value, spread) else f"{value} ± {spread}"


def _rounds(values: Record, spread: Record, key: str) -> str:
    around = _number(spread.get(key), "{:.1f}".format)
    whole = "" if around != NONE else ".0"
    return _with(_number(values[key], lambda number: f"{number:.1f}".removesuffix(whole)), around)


def _reached(one: Record, values: Record, spread: Record) -> str:
    """The round, or in how many rounds it was not reached; over seeds: by how many."""
    if finite(values["reached_round"]) is not None or finite(values["best_top1"]) is None:
        return _rounds(values, spread, "reached_round")
    if values is one["mean"] and one["reached"]:
        return f"{one['reached']} of {one['compared']} seeds"
    return f"not reached in {one['rounds']} rounds"


def show_bytes(value: Any) -> str:
    """Write a number of bytes that may be negative.

    Example:
      >>> show_bytes(-2500), show_bytes(2.5e6), show_bytes(None)
      ('-2.5 kB', '2.5 MB', '–')
    """
    return _number(value, lambda number: ("-" if number < 0 else "") + human_bytes(abs(number)))


def savings_lines(found: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a sentence for each variant."""
    for one in found:
        mean, spread, seeds = one["mean"], one["spread"], one["compared"]
        if finite(mean["best_top1"]) is None:
            yield f"{one['variant']}: no validation accuracy to compare with {one['plain']}'s."
            continue
        over = f" (means of {seeds} seeds)" if seeds > 1 else ""
        best = (
            f"{one['plain']}'s best validation accuracy, {show_percent(mean['best_top1'], 2)} in round "
            f"{_rounds(mean, {}, 'best_round')}"
        )
        if one["reached"] < seeds:
            often = f"reached it in {one['reached']} of {seeds} seeds" if one["reached"] else "never reached it"
            yield f"{best}{over}: {one['variant']} {often} within {one['rounds']} rounds."
            continue
        saved, moved = _rounds(mean, spread, "rounds_saved"), show_bytes(mean["bytes_saved"])
        moved = "" if moved == NONE else f" and {_with(moved, show_bytes(spread['bytes_saved']))}"
        yield (
            f"{one['variant']} reached {best}, in round {_rounds(mean, {}, 'reached_round')}{over}: saved {saved} "
            f"rounds{moved}{', that is, it took more' if mean['rounds_saved'] < 0 else ''}."
        )


def start_notes(rows: Sequence[Record]) -> Iterable[str]:
    """Yield what each variant starts from, what is frozen for whom, and which random start is missing."""
    labels = {row["label"] for row in rows}
    for row in rows:
        start = {key: value for key, value in (row.get("start") or {}).items() if (key, value) != ("from", "random")}
        for line in start_lines(start) if row.get("starts") else ():
            yield f"{row['label']}: {line}."
        if row.get("starts") and row["plain"] not in labels:
            yield f"{row['label']} has no random start beside it: compare {row['plain']} too to see what it saves."
    frozen = [row for row in rows if row.get("frozen_rounds")]
    others = [row["label"] for row in rows if not row.get("frozen_rounds")]
    if frozen and others:
        yield (
            f"train.frozen_rounds = {frozen[0]['frozen_rounds']} is for what has a start; not frozen: "
            f"{', '.join(others)}."
        )


def search_verdict(result: Record) -> str:
    """Say in one sentence what the search found and what it bought.

    Example:
      >>> row = {"trial": 2, "values": {"lr": 0.01}, "perplexity": 90.0}
      >>> found = {"method": "fedavg", "rounds": 6, "trials": [row, {}], "best": row}
      >>> search_verdict({**found, "default": {"perplexity": 100.0}})
      'The best of 2 configurations of fedavg, lr=0.01, has a validation perplexity of 90.00 after 6 rounds, the one \
given 100.0: tuning bought 10.0 %.'
    """
    best, default = result["best"], result["default"]
    count = len(result["trials"])
    if best is None:
        return f"None of {count} configurations of {result['method']} trained to a finite validation perplexity."
    if best["trial"] == 0:
        return (
            f"The configuration as given is the best of {count} of {result['method']}, with a validation perplexity of "
            f"{show(best['perplexity'])} after {plural(result['rounds'], 'round')}: tuning bought nothing."
        )
    before = finite((default or {}).get("perplexity"))
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


def search_document(result: Record, space: Mapping[str, Any]) -> list[Block]:
    """Return the report of a search as blocks."""

    def draw() -> list[Picture]:
        return [plot for key in space if (plot := draw_option(result, key, space)) is not None]

    return [
        Heading(f"Tuning {result['method']} on {result['data']}, model {result['model']}", 1),
        Text(result["verdict"], "verdict"),
        *map(Text, result["edges"]),
        Heading("Trials"),
        Table(trial_table(result)),
        *explanations("searched"),
        *pictures(draw),
        *([Heading("The winner as best.toml"), Code(result["toml"], "toml")] if result["toml"] else ()),
        Heading("Settings"),
        Code(dump_toml(result["settings"]), "toml"),
    ]
