"""What can be asked of a finished run: its report, a new evaluation, the conformance of its model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.engine.network import predictor
from keyfed.engine.trial import MakeModule
from keyfed.errors import DataError, RunError
from keyfed.model.conformance import Check, check_model, check_vocabulary
from keyfed.reports.personalise import Personalisation, personalise, resolve
from keyfed.reports.privacy import privacy_lines
from keyfed.reports.run_page import result_table, write_report
from keyfed.reports.verdict import verdict
from keyfed.run.console import human_bytes, plural, render_table
from keyfed.run.evaluate import headline, scorer_of, spread, total
from keyfed.run.folder import Trained, load_model, read_result, resume_command
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.suggest import PROMPTS, suggest
from keyfed.text.vocab import PAD, SPECIALS, words_of

CONFORMANCE_TOKENS = 20_000


def as_text(rows: Sequence[Sequence[str]], *, narrow: bool = False) -> str:
    """Return a table, its header first, as the terminal shows it."""
    return render_table(rows, narrow=narrow)


def table_text(result: dict[str, Any]) -> str:
    """Return the result table and the verdict as text."""
    return f"{as_text(result_table(result))}{verdict(result)}"


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

    Of a private run's clients only totals are told, as in its result, and personal copies where they are asked for.
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
        result["personalised"] = personalise(personal, trained, prepared)
    return result


def personalise_run(folder: Path, personal: Personalisation, module: MakeModule | None = None) -> dict[str, Any]:
    """Tune a copy of a run's model for every client and return how each fares before and after."""
    trained, prepared = with_data(folder, module)
    return personalise(resolve(personal, trained, prepared), trained, prepared)


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
    """Judge a vocabulary that was given by file: what it was counted on is not in it, and a public list is no leak.

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
