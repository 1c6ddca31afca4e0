"""The report of a finished run: report.md, report.html and plots/, made from run.toml, metrics.jsonl, result.json.

Sections for which a run has no numbers (baselines, unseen clients, suggestions, plots) are left out. The verdict says
in one sentence how the network compares with unigram, Kneser–Ney and central training.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, dump_toml, own_settings, to_document
from keyfed.engine.module import MakeModule
from keyfed.errors import RunError
from keyfed.private.dp.statement import no_account
from keyfed.reports.document import (
    NONE,
    Block,
    Code,
    Heading,
    Picture,
    Table,
    Text,
    facts_table,
    finite,
    show,
    show_count,
    show_duration,
    show_percent,
    write_document,
)
from keyfed.reports.figures import draw_plots, validation
from keyfed.reports.samples import examples_of, prompts_of
from keyfed.run.console import human_bytes, plural, render_table
from keyfed.run.folder import OWN_TEXT, Trained, load_model, read_metrics, read_result, read_run_toml, resume_command
from keyfed.run.metrics_line import diverged_warning, halved_notes
from keyfed.run.pilot import BETWEEN, SETTLED
from keyfed.run.secure import secure_facts
from keyfed.run.start import start_lines

Record = Mapping[str, Any]
Rows = list[list[str]]
TRIED = "i would like to"
LEVEL = 0.01  # perplexities this close, relative, count as level
WORDS = {"unigram": "plain word frequencies", "kneser_ney": "counts of word sequences"}  # what a baseline is


COUNTED = (
    ("counts", "federated counts"),
    ("mixture", "mixture"),
    ("cache", "mixture + own cache"),
)  # what `keyfed counts` adds to a run


def verdict(result: Record) -> str:
    """Say in one sentence how the network stands to unigram, Kneser–Ney and central training.

    Example:
      >>> scores = {"unigram": {"test": {"perplexity": 200.0}}}
      >>> verdict({"method": "fedavg", "rounds": 5, "test": {"perplexity": 250.0}, "baselines": scores})
      'This model does not beat plain word frequencies (unigram, 200.0). With a test perplexity of 250.0 after 5 \
rounds, fedavg is behind the unigram (perplexity 25 % higher).'
    """
    who = str(result.get("method") or "the network")
    value = (result.get("test") or {}).get("perplexity")
    own = finite(value)
    if (result.get("privacy") or {}).get("randomness") == "system":
        return f"{who} was not tested: clients of a private federation score nothing. Test it on public text."
    if (result.get("test") or {}).get("tokens") == 0:
        return f"There is no test text, so {who} was not tested: its clients have too few lines to cut."
    if own is None or own <= 0:
        return (
            f"There is no finite test perplexity of {who} (got {show(value)}): the training diverged or was not tested."
        )
    stands: dict[str, int] = {}
    clauses = []
    for key, label, found in baselines_of(result):
        other = finite((found.get("test") or {}).get("perplexity"))
        if other is not None and other > 0:
            stands[key], clause = _compare(
                own, other, "central training of the same model" if key == "central" else label
            )
            clauses.append(clause)
    rounds = finite(result.get("rounds"))
    after = "" if rounds is None else f" after {rounds:,.0f} round{'' if rounds == 1 else 's'}"
    start = f"With a test perplexity of {show(own)}{after}, {who} "
    if not clauses:
        counted = " `--counts` adds a baseline by sums (docs/counts.md)." if _could_count(result) else ""
        return f"{start}stands alone: the run has no baselines to compare it with.{counted}{mixed(result)}"
    listed = clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    first = not_beaten("This model does not beat", own, result.get("baselines") or {})
    if stands.get("unigram", 1) == 1 and stands.get("kneser_ney") == 1:
        listed += f": it predicts better than a count model of the {'same' if who == 'central' else 'pooled'} text"
    return f"{first}{start}is {listed}.{mixed(result)}"


def _could_count(result: Record) -> bool:
    """Whether the run is of real clients with secure sums, and its n-grams were not counted."""
    return result.get("data") == OWN_TEXT and bool(result.get("secure")) and not result.get("counts")


def mixed(result: Record) -> str:
    """Say how the mixture with federated counts stands to the network and to pooled counts; nothing without one.

    Example:
      >>> mixed({"test": {"perplexity": 110.0}, "counts": {"mixture": {"test": {"perplexity": 88.0}}}})
      ' Its mixture with federated counts has a test perplexity of 88.00: ahead of the network alone (perplexity 20 % \
lower).'
    """
    value = finite(((((result.get("counts") or {}).get("mixture") or {}).get("test")) or {}).get("perplexity"))
    if value is None or value <= 0:
        return ""
    pooled = [(label, found) for key, label, found in baselines_of(result) if key == "kneser_ney"]
    others = [("the network alone", result), *pooled]
    known = [(label, finite((found.get("test") or {}).get("perplexity"))) for label, found in others]
    listed = " and ".join(_compare(value, other, label)[1] for label, other in known if other)
    return f" Its mixture with federated counts has a test perplexity of {show(value)}" + (
        f": {listed}." if listed else "."
    )


def not_beaten(who: str, lowest: float, baselines: Mapping[str, Any]) -> str:
    """Say first, in a sentence of its own, that word frequencies or counts are not beaten; nothing where they are.

    Args:
      who: subject and verb, "No method beats".
      lowest: the lowest perplexity of the models.
      baselines: unigram and Kneser–Ney with their `test`.

    Example:
      >>> not_beaten("No method beats", 300.0, {"unigram": {"test": {"perplexity": 200.0}}})
      'No method beats plain word frequencies (unigram, 200.0). '
    """
    for key, label, found in baselines_of({"baselines": baselines}):
        other = finite((found.get("test") or {}).get("perplexity"))
        if key in WORDS and other is not None and other > 0 and lowest >= other * (1 - LEVEL):
            return f"{who} {WORDS[key]} ({label}, {show(other)}). "
    return ""


def baselines_of(result: Record) -> list[tuple[str, str, Record]]:
    """Return key, label and scores of the baselines a result has, weakest first."""
    baselines = result.get("baselines") or {}
    order = (baselines.get("kneser_ney") or {}).get("order")
    labels = {
        "unigram": "unigram",
        "kneser_ney": "Kneser–Ney" + (f"-{order}" if order else ""),
        "central": "central",
    }
    return [(key, label, baselines[key]) for key, label in labels.items() if baselines.get(key)]


def _compare(own: float, other: float, label: str) -> tuple[int, str]:
    """Return −1 (behind), 0 (level) or 1 (ahead) and the clause that says so."""
    ratio = own / other
    name = "the unigram" if label == "unigram" else label
    if abs(ratio - 1) <= LEVEL:
        return 0, f"level with {name} (within {LEVEL * 100:.0f} %)"
    percent = abs(ratio - 1) * 100
    amount = f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
    if ratio < 1:
        much = f"perplexity {amount} % lower" if ratio > 0.5 else f"perplexity × {ratio:.2g}"
        return 1, f"ahead of {name} ({much})"
    much = f"perplexity {amount} % higher" if ratio < 2 else f"perplexity × {ratio:.3g}"
    return -1, f"behind {name} ({much})"


def privacy_blocks(account: Mapping[str, Any]) -> list[Block]:
    """Return the section of a report; `account` is the result's, or that of a run without a ledger."""
    if account["pld"] is None:
        return [Heading("Privacy"), *(Text(f"NONE. {line}", marked=True) for line in account["statement"])]
    spent = f"{account['pld']:.4g} by PLD, {account['rdp']:.4g} by RDP"
    budget, counted = account.get("budget"), account.get("count_noise")
    facts = [
        ("verdict", str(account["verdict"])),
        ("epsilon", spent + ("" if budget is None else f", of a budget of {budget:g}")),
        ("delta", f"{account['delta']:.3g}"),
        ("noise multiplier z", f"{account['noise']:.4g}"),
        *([] if counted is None else [("noise of counts, in clients, within z", f"{counted:.4g}")]),
        ("noise of a mean update beside the clip, z·√d/m", show(account.get("noise_to_clip"))),
        ("releases in the ledger", f"{account['releases']:,} ({account['retried']:,} of rounds done again)"),
        ("ledger, last hash", str(account["head"])[:16]),
    ]
    cost = cost_line(account)
    if cost:
        facts.append(("cost", cost))
    return [Heading("Privacy"), facts_table(facts), *(Text(line, marked=True) for line in account["statement"])]


def cost_line(account: Mapping[str, Any]) -> str | None:
    """Say what privacy cost in perplexity, where a run without clip and noise was trained too."""
    own = finite(account.get("perplexity"))
    plain = finite(((account.get("twin") or {}).get("test") or {}).get("perplexity"))
    if own is None or plain is None:
        return None
    return f"test perplexity {show(own)}, without clip and noise {show(plain)}: {own / plain:.2f} times as high"


def privacy_lines(account: Mapping[str, Any]) -> list[str]:
    """Return what the terminal shows after a private run."""
    if not account or account.get("pld") is None:
        return []
    cost = cost_line(account)
    return [
        f"{account['verdict']}: epsilon {account['pld']:.4g} (PLD), {account['rdp']:.4g} (RDP) at delta "
        f"{account['delta']:.2g}",
        str(account["statement"][0]),
        *([f"privacy cost: {cost}"] if cost else []),
    ]


def write_report(folder: Path, suggestions: Sequence[tuple[str, Sequence[str]]] = ()) -> list[Path]:
    """Write report.md, report.html and plots/*.png into the folder of a finished run.

    Args:
      suggestions: pairs of a text as typed so far and the words the model suggests next, best first.

    Returns:
      The files written, the reports first. Without matplotlib there are no plots, and the report says so.

    Raises:
      RunError: the folder holds no run, or one that is not finished.
    """
    config, made = read_run_toml(folder)
    result = read_result(folder)
    if result is None:
        raise RunError(f"{folder} has no result.json: the run is not finished; go on with `{resume_command(folder)}`")
    records = read_metrics(folder)
    try:
        plots: list[Picture] | None = draw_plots(result, records)
    except ImportError:
        plots = None
    return write_document(folder, document(result, records, config, made, suggestions, plots))


def document(
    result: Record,
    records: Sequence[Record],
    config: Config,
    made: Record,
    suggestions: Sequence[tuple[str, Sequence[str]]] = (),
    plots: Sequence[Picture] | None = (),
) -> list[Block]:
    """Return the whole report as blocks; `plots` is None where matplotlib is missing."""
    drawn = {p.name: p for p in plots or ()}

    def pictures(*names: str) -> list[Block]:
        return [drawn[name] for name in names if name in drawn]

    words = f"{result.get('method') or config.method} on {result.get('data') or config.data.name}"
    blocks: list[Block] = [
        Heading(f"{words}, model {result.get('model') or config.model.name}", 1),
        Text(verdict(result), "verdict"),
        *_perplexity_in_words(result),
        Heading("Result"),
        Table(result_table(result)),
        *(Text(line, "note") for line in _cautions(result)),
        *pictures("perplexity", "accuracy"),
    ]
    if plots is None:
        blocks.append(Text("No plots: matplotlib is not installed (pip install matplotlib).", "note"))
    spread = _spread_table(result)
    if spread or "clients" in drawn:
        blocks += [Heading("Spread over clients"), *([Table(spread)] if spread else []), *pictures("clients")]
        blocks.append(Text(SPREAD_NOTE, "note"))
    if suggestions:
        rows = [[context, *[*words, NONE, NONE, NONE][:3]] for context, words in suggestions]
        blocks += [Heading("Suggestions"), Table([["typed so far", "first", "second", "third"], *rows], numbers=False)]
    blocks += [Heading("Training"), facts_table(_training(result, records)), *pictures("traffic")]
    noise = config.options.get("noise")
    own = float(noise) if isinstance(noise, int | float) else 0.0
    blocks += privacy_blocks(result.get("privacy") or no_account(own))
    begun = start_lines(result.get("start") or {})
    if begun:
        blocks += [Heading("Start"), *(Text(line) for line in begun), *pictures("vectors")]
    blocks += recipe_blocks(result.get("recipe") or {})
    blocks += [Heading("Data and vocabulary"), facts_table(_data(result, config))]
    blocks += [Heading("Configuration"), *_chosen(config)]
    blocks.append(Code(dump_toml(to_document(config)), "toml", folded="All settings, as in run.toml"))
    if made:
        facts = [(str(k), NONE if v is None else str(v)) for k, v in made.items() if k not in SETTLED]
        blocks += [Heading("Made by"), facts_table(facts)]
    return [*blocks, Heading("Definitions"), *(Text(line, "note") for line in DEFINITIONS)]


def _perplexity_in_words(result: Record) -> list[Block]:
    """Return one line for who reads of perplexity for the first time."""
    own = finite((result.get("test") or {}).get("perplexity"))
    if own is None or not 1 <= own < 1e6:
        return []
    what = "characters" if str(result.get("model")).startswith("char") else "words"
    sure = f"{own:,.0f}" if own >= 10 else f"{own:.1f}"
    line = (
        f"A perplexity of {sure} means: at every step the model is as unsure as between {sure} equally likely {what}."
    )
    return [Text(f"{line} Lower is better.", "note")]


def _chosen(config: Config) -> list[Block]:
    """Return the settings that are not the defaults."""
    rows = [(key, str(value)) for key, value in own_settings(config)]
    return [facts_table(rows)] if rows else [Text("Every setting has its default.")]


def recipe_blocks(settled: Record) -> list[Block]:
    """What was chosen when the run began: settings with their reasons, the steps that a pilot tried, the time."""
    blocks: list[Block] = []
    if settled.get("recipe"):
        rows = [line.partition(": ") for line in str(settled["recipe"]).split(BETWEEN)]
        blocks.append(Table([["chosen from the corpus", "why"], *([chosen, why] for chosen, _, why in rows)], False))
    if settled.get("pilot"):
        tried = str(settled["pilot"]).replace(BETWEEN, "; ")
        tokens = f" It read {plural(settled['pilot_tokens'], 'token')}." if settled.get("pilot_tokens") else ""
        blocks.append(Text(f"A pilot on validation text tried local steps: {tried}.{tokens}"))
    if settled.get("minutes"):
        blocks.append(
            Text(f"The number of rounds was fixed after measuring, for {plural(settled['minutes'], 'minute')}.")
        )
    return [Heading("Recipe"), *blocks] if blocks else []


DEFINITIONS = (Path(__file__).parent / "templates" / "definitions.txt").read_text("utf-8").strip().split("\n\n")
SPREAD_NOTE = (
    "Perplexity of single clients; p10, median and p90 are quantiles over clients, each counting once. The worst "
    "decile is the tenth of clients with the highest perplexity (at least one), its tokens added up."
)


def result_table(result: Record) -> Rows:
    """Return the result as rows of text, the header first: this run, central, Kneser–Ney, unigram, counts, mixture.

    Example:
      >>> rows = result_table({"method": "fedavg", "test": {"perplexity": 120.0, "top1": 0.15}})
      >>> rows[1][:4]
      ['fedavg (this run)', '120.0', '–', '15.0 %']
    """
    models = [(f"{result.get('method') or 'network'} (this run)", result)]
    models += [(label, found) for key, label, found in baselines_of(result)][::-1]
    models += [(label, result["counts"][key]) for key, label in COUNTED if (result.get("counts") or {}).get(key)]
    columns = [
        ("test", "perplexity", "test perplexity"),
        ("test", "nats", "nats"),
        ("test", "top1", "top-1"),
        ("test", "top3", "top-3"),
        ("test", "top1_words", "top-1 words"),
        ("test", "top3_words", "top-3 words"),
        ("unseen", "perplexity", "unseen perplexity"),
        ("unseen", "top1", "unseen top-1"),
    ]
    if not any(found.get("unseen") for _, found in models):
        columns = columns[:6]
    rows = [["model", *(title for _, _, title in columns)]]
    for label, found in models:
        rows.append([label, *(_cell(key, (found.get(split) or {}).get(key)) for split, key, _ in columns)])
    return rows


def _cautions(result: Record) -> Iterable[str]:
    """Yield what a reader of the table might overlook."""
    warning = diverged_warning(result)
    if warning is not None:
        yield warning
    test = result.get("test") or {}
    unknown = finite(test.get("oov_rate")) or 0.0
    if test.get("top1_words") == 0:
        yield "The first guess is never a word that comes next: top-1 rests on <unk> and line ends alone."
    elif unknown > 0.1:
        share = show_percent(unknown)
        yield f"{share} of the test tokens are <unk>, which is easy to guess: compare the columns on words."


def _spread_table(result: Record) -> Rows:
    found = [(label, result.get(key)) for key, label in (("spread", "seen"), ("unseen_spread", "unseen"))]
    rows = [["clients", "number", "best", "p10", "median", "p90", "worst", "worst decile", "worst decile top-1"]]
    for label, figures in found:
        if figures:
            worst = figures.get("worst_decile") or {}
            quantiles = [show(figures.get(key)) for key in rows[0][2:7]]
            tail = [show(worst.get("perplexity")), show_percent(worst.get("top1"))]
            rows.append([label, show_count(figures.get("clients")), *quantiles, *tail])
    return rows if len(rows) > 1 else []


def _training(result: Record, records: Sequence[Record]) -> list[tuple[str, str]]:
    rounds, values = validation(records, "perplexity")
    best = result.get("best_round")
    late = " (the last one: more rounds may still help)" if rounds and best == rounds[-1] and len(rounds) > 1 else ""
    facts = [
        ("rounds", show_count(result.get("rounds"))),
        ("clients in a round (cohort)", show_count(result.get("cohort"))),
        ("clients in all", show_count(result.get("clients"))),
        ("tokens trained on", show_count(result.get("tokens_trained"))),
        ("best validation round", show_count(best) + late),
    ]
    if values:
        facts.append(
            ("validation perplexity", f"{show(values[0])} first, {show(min(values))} best, {show(values[-1])} last")
        )
    effective = [e for e in (finite(r.get("effective_clients")) for r in records) if e is not None]
    if effective and result.get("method") != "central":
        facts.append(("effective clients in a round, mean", f"{sum(effective) / len(effective):.2f}"))
    times = {"training": "seconds", "evaluation": "evaluation_seconds", "baselines": "baseline_seconds"}
    facts += [
        (f"time, {label}", show_duration(result[key]))
        for label, key in times.items()
        if finite(result.get(key)) is not None
    ]
    traffic = result.get("traffic") or {}
    if traffic and result.get("method") != "central":
        moved = (f"{(finite(traffic.get(key)) or 0) / 1e6:,.2f} MB {key}" for key in ("down", "up", "control"))
        facts.append(("traffic", ", ".join(moved)))
    reasons = Counter(str(why) for r in records for why in (r.get("refused") or {}).values())
    why = "; ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common(5))
    if not result.get("privacy"):  # a private run does not tell
        facts.append(("refused clients", show_count(result.get("refused") or 0) + (f" ({why})" if why else "")))
    return facts + _participation(result) + secure_facts(result)


ROUND_EVENTS = (
    ("abandoned", "rounds abandoned, too few uploads"),
    ("rolled_back", "roll-backs to the last good model, validation exploded"),
)
UPLOAD_EVENTS = (
    ("shortened", "uploads shortened to the limit"),
    ("against", "uploads left out, against the others of their round"),
    ("unsound", "server steps not taken, not sound"),
)


def _participation(result: Record) -> list[tuple[str, str]]:
    """What became of clients and uploads, where anything did."""
    facts = []
    seconds = finite(result.get("modelled_seconds"))
    if seconds and result.get("method") != "central":
        facts.append(("modelled time (links and speeds of [participation])", show_duration(seconds)))
    lost = result.get("lost") or {}
    if lost:
        facts.append(("clients called in vain", "; ".join(f"{why}: {n:,}" for why, n in sorted(lost.items()))))
    facts += [(label, show_count(result[key])) for key, label in ROUND_EVENTS if result.get(key)]
    facts += [(f"{name} step size halved, training diverged", note) for name, note in halved_notes(result)]
    facts += [(label, show_count(result[key])) for key, label in UPLOAD_EVENTS if result.get(key)]
    error = finite(result.get("compression_error"))
    if error is not None:
        size = result.get("bytes_per_client") or {}
        ratio = (finite(size.get("up")) or 0) / max(1.0, finite(size.get("down")) or 0)
        facts.append(
            ("compressed uploads", f"{show_percent(ratio)} of the size, relative error {show_percent(error)} a round")
        )
    met = result.get("reached")
    if met:
        (key, value), *_ = met["target"].items()
        facts.append(
            (
                f"target: validation {key} of {show(value)}",
                f"reached after {met['round']} rounds, {met['bytes'] / 1e6:,.1f} MB, "
                + (f"{met['tokens']:,} tokens, " if met["tokens"] else "")  # a private run does not tell
                + f"{show_duration(met['modelled_seconds'])} of modelled time",
            )
        )
    return facts


def _data(result: Record, config: Config) -> list[tuple[str, str]]:
    test, unseen = result.get("test") or {}, result.get("unseen") or {}
    people = (result.get("unseen_spread") or {}).get("clients")
    oov = result.get("oov_rate") or {}
    facts = [
        ("corpus", str(result.get("data") or config.data.name)),
        ("partition", config.data.partition or "the corpus's own"),
        ("clients", show_count(result.get("clients"))),
        ("test tokens", show_count(test.get("tokens"))),
    ]
    if unseen:
        of = f" of {people:,} clients" if people else ""
        facts.append(("test tokens, unseen clients", show_count(unseen.get("tokens")) + of))
    facts.append(("vocabulary", show_count(result.get("vocabulary"))))
    facts += [(f"unknown tokens, {split}", show_percent(rate, 2)) for split, rate in oov.items()]
    if unseen:
        facts.append(("unknown tokens, unseen clients", show_percent(unseen.get("oov_rate"), 2)))
    if config.data.batching == "packed":
        facts.append(("test text is read", "line by line, the state reset at every line"))
    elif finite(test.get("sentence_perplexity")) is not None:
        facts.append(
            ("test perplexity line by line", f"{show(test['sentence_perplexity'])} (state reset at every line)")
        )
    return [*facts, ("parameters of the model", show_count(result.get("parameters")))]


def _cell(key: str, value: Any) -> str:
    if key == "perplexity":
        return show(value)
    if key == "nats":
        number = finite(value)
        return NONE if number is None else f"{number:.3f}"
    return show_percent(value)


def table_text(result: dict[str, Any]) -> str:
    """Return the result table and the verdict as text."""
    return f"{render_table(result_table(result))}{verdict(result)}"


def _first_prompt(trained: Trained) -> str:
    """Return a text to try the model on; quotes and the like would need care in a shell."""
    prompts = [text for text in prompts_of(trained) if text.replace(" ", "").isalpha()]
    return next((text for text in prompts if text == TRIED), next(iter(prompts), TRIED))


def report_run(folder: Path, module: MakeModule | None = None) -> str:
    """Write report.md, report.html and plots of a finished run; return what the terminal shows."""
    result = read_result(folder)
    if result is None:
        raise RunError(f"{folder} has no result yet; go on with `{resume_command(folder)}`")
    trained = load_model(folder, module)
    examples = examples_of(trained)
    written = write_report(folder, examples)
    lines = [table_text(result), *privacy_lines(result.get("privacy") or {}), ""]
    lines += [f"  {prompt}  {' | '.join(words)}" for prompt, words in examples]
    traffic, tokens = result["traffic"], result["tokens_trained"]
    trained_on = "" if tokens is None else f", {tokens:,} tokens"
    took = "" if result["seconds"] is None else f" in {result['seconds']:.0f} s"
    lines += [
        "",
        f"{plural(result['rounds'], 'round')}{took}{trained_on}; "
        f"down {human_bytes(traffic['down'])}, up {human_bytes(traffic['up'])}",
        f"report: {shlex.quote(str(next((p for p in written if p.suffix == '.html'), folder)))}",
        f'try:    keyfed suggest {shlex.quote(str(folder))} "{_first_prompt(trained)}"',
    ]
    return "\n".join(lines)
