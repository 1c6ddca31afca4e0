"""What comparisons and searches say: the verdict, the tables, report.md and report.html with their plots."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
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
REFERENCES = (("kneser_ney", "Kneser–Ney"), ("unigram", "unigram"))
COMPARED = (
    "A method's perplexity is the mean over seeds, ± the sample standard deviation over seeds (not over clients). A "
    "seed draws the cut of the text, the cohorts and the initial weights, so the spread holds all of these. The best "
    "method is marked only if the second's is higher by more than m = t(ν) · s / √n, as in the studies. The difference "
    "is the mean over n seeds of ln(second / first), seed by seed. s is the standard deviation over seeds of the "
    "methods' logarithms over the first one's, pooled over this table, ν its degrees of freedom, and t Student's "
    "97.5 % quantile.",
    "Rounds to target: the first round whose validation perplexity is at most the target. Bytes to target: uploads and "
    "downloads of all clients until then; where the target was not reached, those of all rounds. Rounds, bytes, tokens "
    "and seconds of several seeds are means.",
    "Effective clients: (Σ mass)² / Σ mass², the number of clients that would have the same weight in the sum if all "
    "counted alike; mean over rounds and layers.",
)
SAVINGS = (
    "What a start saves: the target is the random start's best validation accuracy (top-1) of the same seed, and the "
    "round in which it first had it. Reached: the variant's first round with at least that accuracy. Saved: the "
    "difference, in rounds and in bytes (downloads, uploads and reports of all clients); negative where the variant "
    "took more. Where the random start's best is its last round it was still improving: more rounds would move the "
    "target. Test scores are written random start → variant; a mean over seeds is given where all of them have a "
    "value.",
)
SEARCHED = (
    "Trial 0 is the configuration as given. A stopped trial was among the worse after a third of the rounds; its "
    "perplexity is that of fewer rounds. Of those that trained all rounds the lowest validation perplexity wins, ties "
    "go to fewer bytes. A diverged trial never guessed better than ten times worse than evenly among all words, or had "
    "a round in which every client was refused; a refused trial has values the method does not take.",
    "Perplexity is that of the best validation round, over all seeds. No trial read the test text. The winner of many "
    "is flattered by the choice: its honest figure is the test perplexity of one run, keyfed train --config best.toml.",
)


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
        *(Text(line, "note") for line in (*COMPARED, *(SAVINGS if saved else ()), *DEFINITIONS)),
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
    accounts = [(row["label"], account) for row in rows for account in _accounts(row)]
    if not accounts:
        return
    yield (
        "ε is that of one run of the row, the largest of its seeds, by privacy loss distributions. A comparison trains "
        "on the same clients many times: what all its runs give away together adds up."
    )
    yield from dict.fromkeys(str(account["statement"][0]) for _, account in accounts)


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
    rows, references = summary["rows"], summary["baselines"]
    unseen = any(_mean(row, "unseen_mean", "perplexity") is not None for row in rows)
    modelled = any("modelled_seconds_to_target" in row for row in rows)
    head = ["method", "test perplexity", *(["nats"] if summary["characters"] else []), "top-1", "top-3"]
    private = any(_accounts(row) for row in rows)
    head += ["unseen perplexity"] if unseen else []
    head += ["ε"] if private else []
    head += ["rounds to target", "bytes to target", *(["modelled time to target"] if modelled else [])]
    table = [[*head, "tokens", "seconds", "effective clients"]]
    for row in rows:
        pooled = row["method"] == "central"  # text that lies in one place moves nothing and weighs nobody
        cells = [row["label"] + (" (best)" if row["label"] == summary["best"] else ""), _scored(row)]
        cells += [_nats(row)] if summary["characters"] else []
        cells += [show_percent(_mean(row, "test_mean", key)) for key in ("top1", "top3")]
        cells += [show(_mean(row, "unseen_mean", "perplexity"))] if unseen else []
        cells += [_epsilon(row)] if private else []
        cells += [_rounds_to_target(row), NONE if pooled else _bytes_to_target(row)]
        if modelled:
            seconds = finite(row.get("modelled_seconds_to_target"))
            cells.append(NONE if seconds is None else show_duration(seconds))
        effective = None if pooled else finite(row["effective_clients"])
        cells += [
            show_count(row["tokens"]),
            _seconds(row["seconds"]),
            NONE if effective is None else f"{effective:.2f}",
        ]
        table.append(cells)
    for key, name in REFERENCES:
        if references.get(key):
            found = {"test_mean": references[key]["test"], **references[key]}
            order = found.get("order")
            cells = [f"{name}{f'-{order}' if order else ''} (reference)", _scored(found)]
            cells += [_nats(found)] if summary["characters"] else []
            cells += [show_percent(found["test"].get(key)) for key in ("top1", "top3")]
            cells += [show(_mean(found, "unseen", "perplexity"))] if unseen else []
            table.append(cells + [NONE] * (len(table[0]) - len(cells)))
    return table


def _mean(row: Record, part: str, key: str) -> float | None:
    return finite((row.get(part) or {}).get(key))


def _scored(row: Record) -> str:
    """A perplexity with its spread, where there is one."""
    mean, spread = _mean(row, "test_mean", "perplexity"), _mean(row, "test_spread", "perplexity")
    done = sum(seed["error"] is None for seed in row.get("seeds", ()))
    if mean is None:
        return "failed" if row.get("failed") and not done else "not finite"
    partly = f" ({done} of {len(row['seeds'])} seeds)" if row.get("failed") else ""
    if spread is None:
        return show(mean) + partly
    return f"{show(mean)} ± {f'{spread:.{1 if mean >= 100 else 2}f}' if mean < 1e6 else show(spread)}{partly}"


def _nats(row: Record) -> str:
    mean, spread = _mean(row, "test_mean", "nats"), _mean(row, "test_spread", "nats")
    return NONE if mean is None else f"{mean:.3f}" + (f" ± {spread:.3f}" if spread is not None else "")


def _rounds_to_target(row: Record) -> str:
    rounds, done = finite(row["rounds_to_target"]), sum(seed["error"] is None for seed in row["seeds"])
    if rounds is not None:
        return f"{rounds:.1f}".removesuffix(".0")
    if not done:
        return NONE
    return f"{row['reached']} of {done} seeds" if row["reached"] else "not reached"


def _bytes_to_target(row: Record) -> str:
    needed, spent = finite(row["bytes_to_target"]), finite(row["bytes"])
    if needed is not None:
        return human_bytes(needed)
    return NONE if spent is None else f"not reached ({human_bytes(spent)})"


def _seconds(value: Any) -> str:
    number = finite(value)
    return NONE if number is None else f"{number:,.1f}"


def _seed_table(summary: Record) -> list[list[str]]:
    table = [["method", "seed", "test perplexity", "nats", "top-1", "top-3", "unseen perplexity", "best round",
              "rounds to target", "bytes to target", "seconds"]]  # fmt: skip
    for row in summary["rows"]:
        for seed in row["seeds"]:
            start = [row["label"], str(seed["seed"])]
            if seed["error"] is not None:
                table.append([*start, "failed", *[NONE] * 8])
                continue
            test, unseen = seed["test"], seed["unseen"] or {}
            nats = finite(test.get("nats"))
            reached = seed["rounds_to_target"]
            table.append([
                *start, show(test.get("perplexity")), NONE if nats is None else f"{nats:.3f}",
                show_percent(test.get("top1")), show_percent(test.get("top3")), show(unseen.get("perplexity")),
                show_count(seed["best_round"]), "not reached" if reached is None else str(reached),
                _bytes_to_target(seed) if row["method"] != "central" else NONE, _seconds(seed["seconds"]),
            ])  # fmt: skip
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
    """Return the report as rows of text, the header first: every seed of every variant, then all seeds together."""
    table = [["variant", "seed", "random start's best top-1", "in round", "reached in round", "rounds saved",
              "bytes saved", "test perplexity", "test top-1"]]  # fmt: skip
    for one in found:
        for seed in one["seeds"]:
            table.append([one["variant"], str(seed["seed"]), *_cells(one, seed, {})])
        if len(one["seeds"]) > 1:
            table.append([one["variant"], "mean", *_cells(one, one["mean"], one["spread"])])
    return table


def _cells(one: Record, values: Record, spread: Record) -> list[str]:
    if values.get("error") is not None:
        return ["failed", *[NONE] * 6]
    return [
        _with(show_percent(values["best_top1"], 2), _points(spread.get("best_top1"))),
        _rounds(values, spread, "best_round"),
        _reached(one, values, spread),
        _rounds(values, spread, "rounds_saved"),
        _with(show_bytes(values["bytes_saved"]), show_bytes(spread.get("bytes_saved"))),
        " → ".join(_with(show(values[key]), show(spread.get(key))) for key in ("plain_perplexity", "perplexity")),
        " → ".join(
            _with(show_percent(values[key], 2), _points(spread.get(key))) for key in ("plain_top1", "top1")
        ),
    ]  # fmt: skip


def _with(value: str, spread: str) -> str:
    return value if NONE in (value, spread) else f"{value} ± {spread}"


def _points(spread: Any) -> str:
    number = finite(spread)
    return NONE if number is None else f"{number * 100:.2f}"


def _rounds(values: Record, spread: Record, key: str) -> str:
    number, around = finite(values[key]), finite(spread.get(key))
    if number is None:
        return NONE
    return f"{number:.1f} ± {around:.1f}" if around is not None else f"{number:.1f}".removesuffix(".0")


def _reached(one: Record, values: Record, spread: Record) -> str:
    """The round, or in how many rounds it was not reached; over seeds: by how many."""
    if finite(values["reached_round"]) is not None:
        return _rounds(values, spread, "reached_round")
    if finite(values["best_top1"]) is None:
        return NONE
    if values is one["mean"] and one["reached"]:
        return f"{one['reached']} of {one['compared']} seeds"
    return f"not reached in {one['rounds']} rounds"


def show_bytes(value: Any) -> str:
    """Write a number of bytes that may be negative.

    Example:
      >>> show_bytes(-2500), show_bytes(2.5e6), show_bytes(None)
      ('-2.5 kB', '2.5 MB', '–')
    """
    number = finite(value)
    return NONE if number is None else ("-" if number < 0 else "") + human_bytes(abs(number))


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
        *(Text(line, "note") for line in SEARCHED),
        *pictures(draw),
        *([Heading("The winner as best.toml"), Code(result["toml"], "toml")] if result["toml"] else ()),
        Heading("Settings"),
        Code(dump_toml(result["settings"]), "toml"),
    ]
