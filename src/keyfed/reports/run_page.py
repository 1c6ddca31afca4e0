"""The report of a finished run: report.md, report.html and plots/, made from run.toml, metrics.jsonl, result.json.

Parts for which a run has no numbers (baselines, unseen clients, suggestions, plots) are left out. Besides
the report: a new evaluation of a finished run and the conformance of its model.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.config.load import Config, dump_toml, to_document
from keyfed.engine.network import predictor
from keyfed.engine.trial import MakeModule
from keyfed.errors import DataError, RunError
from keyfed.files import write_atomically
from keyfed.model.conformance import Check, check_model, check_vocabulary
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
from keyfed.reports.figures import Plot, draw_gains, draw_plots, validation
from keyfed.reports.personalise import Personalisation, personalise, resolve
from keyfed.reports.verdict import baselines_of, verdict
from keyfed.run.console import human_bytes, plural, render_table
from keyfed.run.evaluate import headline, scorer_of, spread, total
from keyfed.run.folder import Trained, load_model, read_metrics, read_result, read_run_toml, resume_command
from keyfed.run.metrics_line import diverged_warning, halved_notes
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.recipe.pilot import BETWEEN, SETTLED
from keyfed.run.secure import secure_facts
from keyfed.run.start.weights import start_lines
from keyfed.run.suggest import PROMPTS, suggest
from keyfed.text.vocab import PAD, SPECIALS, words_of


def privacy_blocks(account: Mapping[str, Any]) -> list[Block]:
    """Return the section of a report; `account` is the result's, or that of a run without a ledger."""
    if account["pld"] is None:
        return [Heading("Privacy"), *(Text(f"NONE. {line}") for line in account["statement"])]
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
    return [Heading("Privacy"), facts_table(facts), *(Text(line) for line in account["statement"])]


def cost_line(account: Mapping[str, Any]) -> str | None:
    """Say what privacy cost in perplexity, where a run without clip and noise was trained too."""
    twin, own = account.get("twin"), finite(account.get("perplexity"))
    if not twin or own is None:
        return None
    plain = finite((twin.get("test") or {}).get("perplexity"))
    if plain is None:
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


Record = Mapping[str, Any]
Rows = list[list[str]]


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
        plots: list[Plot] | None = draw_plots(result, records)
    except ImportError:
        plots = None
    return write_document(folder, document(result, records, config, made, suggestions, plots))


def document(
    result: Record,
    records: Sequence[Record],
    config: Config,
    made: Record,
    suggestions: Sequence[tuple[str, Sequence[str]]] = (),
    plots: Sequence[Plot] | None = (),
) -> list[Block]:
    """Return the whole report as blocks; `plots` is None where matplotlib is missing."""
    drawn = {p.name: Picture(f"plots/{p.name}.png", p.alt, p.light, p.dark) for p in plots or ()}

    def pictures(*names: str) -> list[Block]:
        return [drawn[name] for name in names if name in drawn]

    words = f"{result.get('method') or config.method} on {result.get('data') or config.data.name}"
    blocks: list[Block] = [
        Heading(f"{words}, model {result.get('model') or config.model.name}", 1),
        Text(verdict(result), "verdict"),
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
        blocks += [Heading("Suggestions"), Table(_suggestion_table(suggestions), numbers=False)]
    blocks += [Heading("Training"), facts_table(_training(result, records)), *pictures("traffic")]
    noise = config.options.get("noise")
    own = float(noise) if isinstance(noise, int | float) else 0.0
    blocks += privacy_blocks(result.get("privacy") or no_account(own))
    begun = start_lines(result.get("start") or {})
    if begun:
        blocks += [Heading("Start"), *(Text(line) for line in begun), *pictures("vectors")]
    blocks += recipe_blocks(result.get("recipe") or {})
    blocks += [Heading("Data and vocabulary"), facts_table(_data(result, config))]
    blocks += [Heading("Configuration"), Code(dump_toml(to_document(config)), "toml")]
    if made:
        facts = [(str(k), NONE if v is None else str(v)) for k, v in made.items() if k not in SETTLED]
        blocks += [Heading("Made by"), facts_table(facts)]
    return [*blocks, Heading("Definitions"), *(Text(line, "note") for line in DEFINITIONS)]


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


DEFINITIONS = (
    "Perplexity is exp(mean nats per predicted token). Each client's held-out text is read in order as one stream: "
    "the state is zero at its start and carried on, every token after the first is predicted, line ends are counted "
    "as tokens, unknown words as <unk>. Tokens of all clients are added before the mean is taken, so a client counts "
    "by its text.",
    "Top-1 and top-3 are the shares of predicted tokens that are the first, or among the first three, guesses. On "
    "words: only targets that are neither <unk> nor a line end, which is what a keyboard is asked for.",
    "The model of the best validation round is tested, once. Unseen clients took no part in training. Kneser–Ney "
    "and unigram are counted on the pooled training text of all clients and scored on the same tokens; central is "
    "the same network trained on the pooled text with the same number of tokens.",
    "Traffic is the size of the serialised model times the clients that received it (down) or sent an upload (up), "
    "and the clients' reports (control). MB are millions of bytes.",
)
SPREAD_NOTE = (
    "Perplexity of single clients; p10, median and p90 are quantiles over clients, each counting once. The worst "
    "decile is the tenth of clients with the highest perplexity (at least one), its tokens added up."
)


def result_table(result: Record) -> Rows:
    """Return the result as rows of text, the header first: this run, central, Kneser–Ney, unigram.

    Example:
      >>> rows = result_table({"method": "fedavg", "test": {"perplexity": 120.0, "top1": 0.15}})
      >>> rows[1][:4]
      ['fedavg (this run)', '120.0', '–', '15.0 %']
    """
    models = [(f"{result.get('method') or 'network'} (this run)", result)]
    models += [(label, found) for key, label, found in baselines_of(result)][::-1]
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


def _suggestion_table(suggestions: Sequence[tuple[str, Sequence[str]]]) -> Rows:
    rows = [["typed so far", "first", "second", "third"]]
    return rows + [[context, *[*words, NONE, NONE, NONE][:3]] for context, words in suggestions]


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
    for key, label in (
        ("seconds", "training"),
        ("evaluation_seconds", "evaluation"),
        ("baseline_seconds", "baselines"),
    ):
        if finite(result.get(key)) is not None:
            facts.append((f"time, {label}", show_duration(result[key])))
    traffic = result.get("traffic") or {}
    if traffic and result.get("method") != "central":
        moved = (f"{(finite(traffic.get(key)) or 0) / 1e6:,.2f} MB {key}" for key in ("down", "up", "control"))
        facts.append(("traffic", ", ".join(moved)))
    reasons = Counter(str(why) for r in records for why in (r.get("refused") or {}).values())
    why = "; ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common(5))
    if not result.get("privacy"):  # a private run does not tell
        facts.append(("refused clients", show_count(result.get("refused") or 0) + (f" ({why})" if why else "")))
    return facts + _participation(result) + secure_facts(result)


def _participation(result: Record) -> list[tuple[str, str]]:
    """What became of clients and uploads, where anything did."""
    facts = []
    seconds = finite(result.get("modelled_seconds"))
    if seconds and result.get("method") != "central":
        facts.append(("modelled time (links and speeds of [participation])", show_duration(seconds)))
    lost = result.get("lost") or {}
    if lost:
        facts.append(("clients called in vain", "; ".join(f"{why}: {n:,}" for why, n in sorted(lost.items()))))
    if result.get("abandoned"):
        facts.append(("rounds abandoned, too few uploads", show_count(result["abandoned"])))
    if result.get("rolled_back"):
        facts.append(("roll-backs to the last good model, validation exploded", show_count(result["rolled_back"])))
    facts += [(f"{name} step size halved, training diverged", note) for name, note in halved_notes(result)]
    if result.get("shortened"):
        facts.append(("uploads shortened to the limit", show_count(result["shortened"])))
    if result.get("against"):
        facts.append(("uploads left out, against the others of their round", show_count(result["against"])))
    if result.get("unsound"):
        facts.append(("server steps not taken, not sound", show_count(result["unsound"])))
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


CONFORMANCE_TOKENS = 20_000


def table_text(result: dict[str, Any]) -> str:
    """Return the result table and the verdict as text."""
    return f"{render_table(result_table(result))}{verdict(result)}"


def report_run(folder: Path, module: MakeModule | None = None) -> str:
    """Write report.md, report.html and plots of a finished run; return what the terminal shows."""
    result = read_result(folder)
    if result is None:
        raise RunError(f"{folder} has no result yet; go on with `{resume_command(folder)}`")
    trained = load_model(folder, module)
    examples = [
        (p, suggest(trained.spec, trained.params, trained.vocab, p, lines=trained.reads_lines)) for p in PROMPTS
    ]
    written = write_report(folder, examples)
    lines = [table_text(result), *privacy_lines(result.get("privacy") or {}), ""]
    lines += [f"  {prompt} …  {' | '.join(words)}" for prompt, words in examples]
    traffic, tokens = result["traffic"], result["tokens_trained"]
    trained_on = "" if tokens is None else f", {tokens:,} tokens"
    took = "" if result["seconds"] is None else f" in {result['seconds']:.0f} s"
    lines += [
        "",
        f"{plural(result['rounds'], 'round')}{took}{trained_on}; "
        f"down {human_bytes(traffic['down'])}, up {human_bytes(traffic['up'])}",
        f"report: {shlex.quote(str(next((p for p in written if p.suffix == '.html'), folder)))}",
        f'try:    keyfed suggest {shlex.quote(str(folder))} "i would like to"',
    ]
    return "\n".join(lines)


def with_data(folder: Path, module: MakeModule | None, *, text: bool = False) -> tuple[Trained, Prepared]:
    """Load a run's model and its corpus, and refuse if the vocabulary has changed."""
    trained = load_model(folder, module)
    config = trained.config
    if config.data.vocab_file is not None:  # which may be gone by now; the run has its own copy
        config = replace(config, data=replace(config.data, vocab_file=str(folder / "vocab.json")))
    prepared = prepare(config, module, text=text)
    if prepared.vocab != trained.vocab:
        raise DataError(
            f"{folder}: the corpus {prepared.corpus.name} gives another vocabulary than the run was trained with; "
            "its text has changed"
        )
    return trained, prepared


def evaluate_run(
    folder: Path, module: MakeModule | None = None, personal: Personalisation | None = None
) -> dict[str, Any]:
    """Evaluate a run's model anew on its held-out text; with `personal`, also a copy tuned for every client.

    Of a private run's clients only totals are returned, as in its result, and personal copies if `personal` is given.
    """
    trained, prepared = with_data(folder, module)
    private = trained.config.privacy.on
    if personal is not None:
        personal = resolve(personal, trained, prepared)  # what cannot be done is said before the long evaluation
    kind = trained.config.data.batching
    tested, test = headline(trained.spec, trained.params, prepared.test, kind)
    unseen = scorer_of(kind)(trained.spec, trained.params, prepared.unseen)
    result = {
        "run": str(folder),
        "method": trained.method,
        "model": trained.spec.name,
        "data": prepared.corpus.name,
        "test": test,
        "unseen": total(unseen).summary() if unseen else None,
        "spread": None if private else spread(tested),
        "unseen_spread": None if private else spread(unseen),
        "baselines": (read_result(folder) or {}).get("baselines", {}),
    }
    if personal is not None:
        result["personalised"] = _personalised(personal, trained, prepared)
    return result


def personalise_run(folder: Path, personal: Personalisation, module: MakeModule | None = None) -> dict[str, Any]:
    """Tune a copy of a run's model for every client and return how each fares before and after."""
    trained, prepared = with_data(folder, module)
    return _personalised(resolve(personal, trained, prepared), trained, prepared)


def _personalised(personal: Personalisation, trained: Trained, prepared: Prepared) -> dict[str, Any]:
    """Personalise and draw RUN/plots/personalised.png; of a private run no plot, since a point is a client."""
    block = personalise(personal, trained, prepared)
    drawn = draw_gains(block["by_client"].values()) if block["by_client"] else None
    if drawn is None:
        return block
    path = trained.folder / "plots" / f"{drawn.name}.png"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, drawn.light)
    return {**block, "plot": str(path)}


def personal_text(block: Mapping[str, Any]) -> str:
    """Return the comparison as a table and sentences for the terminal."""
    rows = [["personalised", "test perplexity", "top-1", "top-3", "worst decile's perplexity"]]
    for key in ("before", "after"):
        score, worst = block[key], block["worst_decile"][key]
        accuracy = [f"{score[k]:.1%}" for k in ("top1", "top3")]
        rows.append([key, show(score["perplexity"]), *accuracy, show(worst["perplexity"]) if worst else "–"])
    gaining = round((block["gaining"] or 0) * block["clients"])
    most = f", at most {block['max_tokens']:,} of each by data.max_tokens" if block["max_tokens"] else ""
    lines = [
        f"{gaining} of {block['clients']} clients gain by {block['epochs']} "
        f"epoch{'' if block['epochs'] == 1 else 's'} of {block['optimiser']} with lr {block['lr']:g} on their own "
        f"training text ({block['tokens_trained']:,} tokens{most})",
    ]
    left = block["left_out"]
    for count, why in (
        (left["no_training_text"], "with too little training text"),
        (left["no_held_out_text"], "without held-out text"),
        (left["unseen"], "never trained on, all of whose text is held out"),
    ):
        if count:
            lines.append(f"left out: {plural(count, 'client')} {why}")
    if block["plot"]:
        lines.append(f"plot: {block['plot']}")
    return render_table(rows) + "\n".join(lines)


def check_run(folder: Path, module: MakeModule | None = None) -> list[dict[str, Any]]:
    """Run the conformance suite on a run's model and vocabulary."""
    trained, prepared = with_data(folder, module, text=True)
    held_out_text = [*prepared.test.values(), *prepared.unseen.values()]
    if not held_out_text:
        raise DataError(f"{prepared.corpus.name} has no held-out text to check the model on; its clients are too short")
    text = np.concatenate(held_out_text)[:CONFORMANCE_TOKENS]
    predict = predictor(trained.spec, trained.params)
    checks = check_model(predict, text, vocab_size=len(trained.vocab), pad=PAD, seed=0)
    if trained.vocab.kind == "word":
        population, vocab = prepared.population, trained.vocab

        def words(lines: Any) -> set[str]:
            return {w for line in lines for w in words_of(line, tokenised=vocab.tokenised, lower=vocab.lower)}

        train = words(line for c in population.clients for line in c.train)
        held_out = [line for c in (*population.clients, *population.unseen) for line in (*c.valid, *c.test)]
        test = words([*held_out, *(population.valid or ()), *(population.test or ())])
        if trained.config.data.vocab_file is None:
            checks.append(check_vocabulary(vocab.words, train, test, SPECIALS))
        else:
            checks.append(_given_vocabulary(trained, train, test))
    return [asdict(c) for c in checks]


def _given_vocabulary(trained: Trained, train: set[str], test: set[str]) -> Check:
    """Judge a vocabulary from a file: what it was counted on is not in it, and a public list is no leak.

    No alarm is right for a word list or another corpus. A vocabulary elected on this corpus with another seed or cut
    has read some of what is held out here, so the words it could have from there are named.
    """
    assert trained.config.data.vocab_file is not None
    words = set(trained.vocab.words) - set(SPECIALS)
    only = sorted(words & (test - train))
    detail = f"{Path(trained.config.data.vocab_file).name} was given, not counted here; "
    detail += f"{len(only):,} of {len(words):,} words occur in the test text and not in training"
    if only:
        some = f" ({', '.join(only[:5])}{', …' if len(only) > 5 else ''})"
        detail += "" if trained.config.privacy.on else some  # words of few clients' held-out text
        detail += ": no leak if it comes from elsewhere, one if it was elected on this corpus with another seed or cut"
    return Check("vocabulary as given", True, detail)
