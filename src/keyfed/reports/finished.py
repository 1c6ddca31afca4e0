"""A finished run measured again: its evaluation, copies tuned for each client, the conformance of its model.

Personalisation measures what a client gains by tuning the final model on its own text. Each client takes a copy of θ
and trains it on its own training text with the local solver, as in a round of FedAvg that is never uploaded. It is
tested on the text it held out. Clients are tuned one at a time and their copies dropped: memory is that of few models.
The stored model does not change.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.config.load import Value, coerce
from keyfed.engine.module import MakeModule
from keyfed.engine.network import predictor, shapes
from keyfed.engine.problem import solve_block
from keyfed.errors import ConfigError, DataError, RunError, nearest
from keyfed.federated.local import Optimiser
from keyfed.federated.methods import build_method, method_options
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Method, Params
from keyfed.files import write_atomically
from keyfed.model.conformance import Check, check_model, check_vocabulary
from keyfed.model.output import Score
from keyfed.reports.document import show
from keyfed.reports.figures import draw_gains
from keyfed.run.console import follow, plural, render_table
from keyfed.run.counts.command import Counting, CountReport, count_run, read_counts, score_counts
from keyfed.run.evaluate import headline, scorer_of, spread, total
from keyfed.run.folder import Trained, load_model, read_result, resume_command, strict
from keyfed.run.prepare import Prepared, make_problem, prepare
from keyfed.text.vocab import PAD, SPECIALS, words_of

CONFORMANCE_TOKENS = 20_000
GENTLER = 0.1  # a client alone takes smaller steps than the ones a cohort averages out


@dataclass(frozen=True, slots=True)
class Personalisation:
    """How a client tunes its copy; None is decided by the run: its optimiser and batch size, a tenth of its step."""

    epochs: int = 1
    lr: float | None = None
    optimiser: Optimiser | None = None
    batch_size: int | None = None


def parse_personal(text: str) -> Personalisation:
    """Read `epochs=2,lr=0.5`.

    Example:
      >>> parse_personal("epochs=2,lr=0.5")
      Personalisation(epochs=2, lr=0.5, optimiser=None, batch_size=None)
    """
    hints = typing.get_type_hints(Personalisation)
    values: dict[str, Any] = {}
    for pair in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (p.strip() for p in pair.partition("="))
        if not equals:
            raise ConfigError(f'--personalise got "{pair}"; expected key=value, e.g. epochs=1,lr=0.001')
        if key not in hints:
            raise ConfigError(
                f'"{key}" is not a setting of --personalise{nearest(key, hints)}. Settings: {", ".join(hints)}.'
            )
        if key in values:
            raise ConfigError(f'--personalise got {key} twice ("{text}"); give it once')
        values[key] = coerce(value, hints[key], f"--personalise {key}")
    return Personalisation(**values)


def resolve(personal: Personalisation, trained: Trained, prepared: Prepared) -> Personalisation:
    """Fill in what the run decides, and refuse what cannot be done.

    Raises:
      DataError: the clients have no held-out text of their own.
      ConfigError: a number makes no sense, or a step size cannot be derived from the run's.
    """
    if prepared.population.test is not None or not prepared.test:
        held = "one test text for all clients" if prepared.population.test is not None else "no held-out text"
        raise DataError(
            f"{prepared.corpus.name} ({prepared.population.partition}) has {held}; personalisation is tested on each "
            "client's own: train on a corpus of authors without published test file, data.partition=natural"
        )
    for name in ("epochs", "lr", "batch_size"):
        got = getattr(personal, name)
        if got is not None and got <= 0:
            raise ConfigError(f"--personalise {name} is {got}; expected > 0")
    run = _local_options(trained)
    optimiser = personal.optimiser or run["optimiser"]
    if personal.lr is None and optimiser != run["optimiser"]:
        raise ConfigError(
            f"--personalise optimiser={optimiser}: the run trained by {run['optimiser']}, whose step size says nothing "
            f"about {optimiser}; give lr too, e.g. lr={0.5 if optimiser == 'sgd' else 0.0003}"
        )
    return Personalisation(
        personal.epochs,
        GENTLER * run["lr"] if personal.lr is None else personal.lr,
        optimiser,
        personal.batch_size or run["batch_size"],
    )


def _local_options(trained: Trained) -> dict[str, Any]:
    """The run's local solver: its method's options where it has an optimiser (FedSGD has none), else FedAvg's."""
    spec = build_method(MethodSpec(trained.config.method, trained.config.options)).spec
    assert spec is not None
    names = ("optimiser", "lr", "momentum", "clip", "batch_size")
    own: Mapping[str, Value] = spec.options if "optimiser" in spec.options else {}
    return {name: own.get(name, method_options("fedavg")[name].default) for name in names}


def _solver_of(personal: Personalisation, trained: Trained) -> Method:
    """FedAvg with these numbers; momentum and clipping stay the run's."""
    run = _local_options(trained)
    options: dict[str, Value] = {f.name: getattr(personal, f.name) for f in fields(personal)}
    if personal.optimiser == run["optimiser"]:
        options["momentum"] = run["momentum"]
    return build_method(MethodSpec("fedavg", {**options, "clip": run["clip"]}))


def personalise(personal: Personalisation, trained: Trained, prepared: Prepared) -> dict[str, Any]:
    """Tune and test a copy for every client with training and held-out text.

    Args:
      personal: resolved by `resolve`.

    Returns:
      Scores of the same tokens before and after (tokens of all clients added up), the share of clients that gain, the
      worst decile, and each client's nats per token. Of a private run only totals. No plot is drawn here.
    """
    spec, config = trained.spec, trained.config
    method = _solver_of(personal, trained)
    problem = make_problem(prepared, config, method, "cpu")
    params: Params = {name: trained.params[name] for name in shapes(spec)}
    places = {name: k for k, name in enumerate(prepared.store.names) if name in prepared.test}
    test = scorer_of(config.data.batching)
    before = test(spec, params, {name: prepared.test[name] for name in places})
    after: dict[str, Score] = {}
    worked = 0
    for name in follow(list(places), "personalising clients"):
        # As in the round after the last: text and dropout are drawn as that round would draw them.
        solution = solve_block(problem, params, [places[name]], method, config.train.rounds)
        own = {layer: params[layer] + solution.upload[layer][0] for layer in params}
        after |= test(spec, own, {name: prepared.test[name]})
        worked += int(solution.worked.sum())
    block = summarise(before, after)
    block = {
        **{f.name: getattr(personal, f.name) for f in fields(personal)},
        "max_tokens": config.data.max_tokens,
        "tokens_trained": worked,
        **block,
        "left_out": {
            "no_training_text": sum(name not in places for name in prepared.test),
            "no_held_out_text": len(prepared.store) - len(places),
            "unseen": len(prepared.unseen),
        },
        "plot": None,
    }
    if config.privacy.on:  # as in the run's result: totals, and no figure of a single client
        block |= {"by_client": None, "worst_decile": {"before": None, "after": None}}
    return block


def summarise(before: Mapping[str, Score], after: Mapping[str, Score]) -> dict[str, Any]:
    """Compare two scores of each client: counts are added up over clients before anything is divided."""
    gaining = sum(after[name].mean_nats < before[name].mean_nats for name in before)
    return {
        "clients": len(before),
        "before": total(before).summary(),
        "after": total(after).summary(),
        "gaining": gaining / len(before) if before else None,
        "worst_decile": {
            "before": spread(before).get("worst_decile"),
            "after": spread(after).get("worst_decile"),
        },
        "by_client": {
            name: {"tokens": score.tokens, "before": score.mean_nats, "after": after[name].mean_nats}
            for name, score in before.items()
        },
    }


def personal_figures(folder: Path, how: str | None, prepared: Prepared) -> dict[str, float]:
    """Return the totals of a run's personalisation as measures of a study's cell; none where it is not asked for.

    Args:
      how: as for `parse_personal`.
    """
    if how is None:
        return {}
    trained = load_model(folder)
    block = personalise(resolve(parse_personal(how), trained, prepared), trained, prepared)
    before, after = block["before"], block["after"]
    return {
        "general_perplexity": before["perplexity"],
        "personal_perplexity": after["perplexity"],
        "personal_ratio": after["perplexity"] / before["perplexity"],
        "general_top1_words": before["top1_words"],
        "personal_top1_words": after["top1_words"],
        "gaining": block["gaining"],
    }


def with_data(folder: Path, module: MakeModule | None, *, text: bool = False) -> tuple[Trained, Prepared]:
    """Load a run's model and its corpus, and refuse if the vocabulary has changed."""
    trained = load_model(folder, module)
    prepared = corpus_of(trained, module, text=text)
    if prepared.vocab != trained.vocab:
        raise DataError(
            f"{folder}: the corpus {prepared.corpus.name} gives another vocabulary than the run was trained with; "
            "its text has changed"
        )
    return trained, prepared


def corpus_of(trained: Trained, module: MakeModule | None = None, *, text: bool = False) -> Prepared:
    """Prepare a run's corpus again; a vocabulary from a file, which may be gone, is the run's own copy."""
    config = trained.config
    if config.data.vocab_file is not None:
        config = replace(config, data=replace(config.data, vocab_file=str(trained.folder / "vocab.json")))
    return prepare(config, module, text=text)


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
    found = read_counts(trained)
    if found is not None:
        result["counts"] = _summaries(score_counts(trained, prepared, *found))
    if personal is not None:
        result["personalised"] = _personalised(personal, trained, prepared)
    return result


def count(folder: Path, how: Counting, say: Callable[[str], None]) -> CountReport:
    """Count n-grams over a run's clients, write counts and mixture into its folder, and what they come to on its test.

    Raises:
      RunError: the run is not finished.
    """
    trained, prepared = with_data(folder, None)
    result = read_result(folder)
    if result is None:
        raise RunError(f"{folder} has no result yet; go on with `{resume_command(folder)}`")
    report = count_run(trained, prepared, how, say)
    found = read_counts(trained)
    assert found is not None, "counts were written"
    say("testing counts, the mixture, and the mixture with every client's own cache")
    result["counts"] = _summaries(score_counts(trained, prepared, *found))
    write_atomically(folder / "result.json", json.dumps(strict(result), indent=1, allow_nan=False).encode())
    return report


def _summaries(scores: Mapping[str, Mapping[str, Score | None]]) -> dict[str, Any]:
    return {
        name: {split: None if score is None else score.summary() for split, score in splits.items()}
        for name, splits in scores.items()
    }


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
            checks.append(_check_vocabulary_file(trained, train, test))
    return [asdict(c) for c in checks]


def _check_vocabulary_file(trained: Trained, train: set[str], test: set[str]) -> Check:
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
