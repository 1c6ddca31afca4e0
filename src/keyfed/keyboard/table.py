"""`keyfed evaluate RUN … --keyboard`: the comparison of the Gboard source on a run's own held-out messages.

Rows: Kneser–Ney of order 5 on all training text, the pruned n-gram model that is shipped with an export, each run, and
each federated run with what a client's device would have learnt from its own earlier text (training and validation).
All have the same vocabulary, decoder, messages and slips. Emoji are off: the three slots hold words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.engine.network import reader_of
from keyfed.errors import ConfigError, DataError
from keyfed.keyboard.bundle import fit_small, ngram_to_bytes
from keyfed.keyboard.context import previous_word
from keyfed.keyboard.export import written_forms
from keyfed.keyboard.layout import constants
from keyfed.keyboard.measure import Counts, KeystrokeClock, type_lines, words_in
from keyfed.keyboard.personal import PersonalWords
from keyfed.keyboard.predict import KeyboardSettings, Predictor
from keyfed.keyboard.session import Keyboard, NetworkSource, Source, ngram_source
from keyfed.model.language_model import ModelSpec, parameter_count, quantise
from keyfed.model.ngram import KneserNey, fit_kneser_ney
from keyfed.reports.document import markdown_table
from keyfed.reports.finished import with_data
from keyfed.run.console import render_table
from keyfed.run.folder import Trained
from keyfed.run.prepare import Prepared
from keyfed.text.partition import ClientText

WORDS = 2_000  # typed of each group
LINES = 5  # typed of a client, so that many clients are heard
ORDER = 5
LEAST_WORDS = 10  # of a client that counts in the spread over clients


@dataclass(frozen=True)
class Candidate:
    """A row: where its scores come from and what a device stores for it.

    Attributes:
      size: bytes by precision.
      personal: whether the device has learnt from the client's own training text.
    """

    name: str
    source: Source
    size: dict[str, int]
    personal: bool = False
    parameters: int | None = None


def evaluate_keyboard(
    folders: Sequence[Path], words: int = WORDS, seed: int = 1, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Type held-out messages of the first run's corpus on every row's keyboard.

    Raises:
      ConfigError: a model of characters.
      DataError: the runs have different corpora or vocabularies, or there is no held-out text.
    """
    runs, prepared = _load(folders)
    sampled = {name: list(_sample(clients, words, seed)) for name, clients in _groups(prepared).items()}
    groups = {name: clients for name, clients in sampled.items() if clients}
    if not groups:
        raise DataError(f"{prepared.corpus.name} has no held-out text to type")
    # The keyboard of a private run has no written forms (`export.LEFT_OUT`), and only totals of its clients are shown.
    private = any(run.config.privacy.on for run in runs)
    forms = {} if private else written_forms((c.train for c in prepared.population.trained), prepared.vocab)
    personal = PersonalWords()
    predictor = Predictor(prepared.vocab, personal, forms=forms, settings=KeyboardSettings(emoji=False))
    rows = []
    for row in _candidates(runs, prepared):
        say(f"typing on {row.name}")
        found: dict[str, Any] = {"name": row.name, "bytes": row.size, "parameters": row.parameters}
        keyboard, clock = Keyboard(row.source, predictor), KeystrokeClock()
        for group, clients in groups.items():
            if row.personal and not any(client.train for client in clients):
                continue  # no client's earlier text is known
            counts = _type(keyboard, clients, clock, seed, personal if row.personal else None)
            by_client = None if private else _spread(counts)
            found[group] = {**sum(counts, Counts()).summary(), "clients": len(counts), "by_client": by_client}
        if clock.words:
            rows.append({**found, "latency": clock.summary()})
    typed = {g: {"clients": len(c), "lines": sum(len(t.test) for t in c)} for g, c in groups.items()}
    return {
        "data": prepared.corpus.name,
        "vocabulary": len(prepared.vocab),
        "seed": seed,
        "typed": typed,
        "rows": rows,
    }


def _load(folders: Sequence[Path]) -> tuple[list[Trained], Prepared]:
    runs: list[Trained] = []
    prepared: Prepared | None = None
    for folder in folders:
        run, text = with_data(folder, None, text=prepared is None)
        if run.vocab.kind != "word":
            raise ConfigError(f"{folder} holds a model of characters; --keyboard types on models of words")
        if runs and run.vocab != runs[0].vocab:
            raise DataError(f"{folder} has another vocabulary than {folders[0]}; compare runs on the same text")
        if runs and _text_of(run) != _text_of(runs[0]):
            raise DataError(
                f"{folder} has other data settings or another seed than {folders[0]}: it may have learnt from what the "
                "other holds out; compare runs on the same text"
            )
        runs.append(run)
        prepared = prepared or text
    assert prepared is not None
    return runs, prepared


def _text_of(run: Trained) -> tuple[Any, ...]:
    """What decides which text a run learns from and which it holds out."""
    data = run.config.data
    return data.name, data.partition, data.clients, data.unseen, data.alpha, data.clients_part, run.config.train.seed


def _groups(prepared: Prepared) -> dict[str, Sequence[ClientText]]:
    population = prepared.population
    left_out = set(prepared.excluded)  # too little text to train on
    seen = [c for c in population.trained if c.test and c.name not in left_out]
    if population.test:  # published held-out text belongs to no client
        seen = [ClientText("test", (), (), population.test)]
    return {"seen": seen, "unseen": [c for c in population.unseen if c.test]}


def _sample(clients: Sequence[ClientText], words: int, seed: int) -> Iterator[ClientText]:
    """Draw clients and take each one's first lines until there are enough words; one alone gives all of them."""
    rng = np.random.default_rng([seed, len(clients)])
    left = words
    for at in rng.permutation(len(clients)):
        client = clients[int(at)]
        lines = []
        for line in client.test[: LINES if len(clients) > 1 else None]:
            count = len(words_in(line, constants()))
            if left > 0 and count:
                lines.append(line)
                left -= count
        if lines:
            yield ClientText(client.name, client.train, client.valid, tuple(lines))
        if left <= 0:
            return


def _candidates(runs: Sequence[Trained], prepared: Prepared) -> Iterator[Candidate]:
    streams = [prepared.store.stream(k) for k in range(len(prepared.store))]
    whole = fit_kneser_ney(streams, len(prepared.vocab), ORDER)
    yield Candidate(f"n-gram, order {ORDER}", ngram_source(whole), {"fp32": _stored(whole)})
    small, _ = fit_small(streams, len(prepared.vocab))
    yield Candidate("n-gram, as shipped", ngram_source(small), {"fp32": len(ngram_to_bytes(small))})
    for run in runs:
        numbers = {name: p.numpy() for name, p in run.params.items()}
        size = {
            "fp32": sum(v.nbytes for v in numbers.values()),
            "int8": sum(v.nbytes for v in quantise(numbers).values()),
        }
        count = parameter_count(run.spec) if isinstance(run.spec, ModelSpec) else None
        name = f"{run.spec.name}, {run.method}"
        yield Candidate(name, _network(run), size, parameters=count)
        if run.method != "central":
            yield Candidate(f"{name} + personal", _network(run), size, personal=True, parameters=count)


def _network(run: Trained) -> Source:
    return NetworkSource(reader_of(run.spec, run.params), lines=run.reads_lines)


def _stored(model: KneserNey) -> int:
    """Bytes of the tables a device would need: a word and a probability an n-gram, a weight and a start a context."""
    return sum(8 * level.keys.size + 8 * level.start.size for level in model.levels)


def _type(
    keyboard: Keyboard, clients: Sequence[ClientText], clock: KeystrokeClock, seed: int, personal: PersonalWords | None
) -> list[Counts]:
    """Type each client's messages; slips are drawn by (seed, client), the same for every row."""
    found = []
    for number, client in enumerate(clients):
        if personal is not None:
            for line in (*client.train, *client.valid):
                for start, word in words_in(line, personal.constants):
                    personal.learn(word, previous_word(line[:start]))
        rng = np.random.default_rng([seed, number])
        found.append(type_lines(keyboard, client.test, rng, clock))
        if personal is not None:
            personal.forget_all()
    return found


def _spread(counts: Sequence[Counts]) -> dict[str, Any] | None:
    """Top-3 recall over clients: percentiles of those with enough words."""
    shares = [c.top3 / c.words for c in counts if c.words >= LEAST_WORDS]
    if not shares:
        return None
    low, middle, high = np.percentile(shares, [10, 50, 90])
    return {"clients": len(shares), "top3_p10": float(low), "top3_median": float(middle), "top3_p90": float(high)}


COLUMNS = (
    ("top-1", "top1"),
    ("top-3", "top3"),
    ("strokes saved", "saved"),
    ("ideal", "saved_ideal"),
    ("wrong corr.", "wrong_corrections"),
    ("slips mended", "slips_mended"),
    ("made worse", "slips_made_worse"),
    ("taps right", "taps_right"),
    ("alone", "taps_right_without_correction"),
    ("spoilt", "taps_spoilt"),
    ("swipes top-1", "swipes_top1"),
    ("top-3", "swipes_top3"),
)


def tables(result: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return titles and rows: one table for each group of clients, one for size and time."""
    found = []
    for group, typed in result["typed"].items():
        rows = [r for r in result["rows"] if r.get(group)]
        if not rows:
            continue
        first = rows[0][group]
        title = (
            f"{group.capitalize()} clients: {first['words']:,} words in {typed['lines']:,} messages of "
            f"{typed['clients']:,}, {first['unknown_words']:.1%} outside the vocabulary of {result['vocabulary']:,}"
        )
        head = ["", *(name for name, _ in COLUMNS), "top-3 by client"]
        cells = [[r["name"], *(_percent(r[group][key]) for _, key in COLUMNS), _by_client(r[group])] for r in rows]
        found.append((title, [head, *cells]))
    head = ["", "MB", "int8 MB", "word p50/p95/p99 ms", "CPU ms", "keystroke p50/p95/p99 ms", "CPU ms"]
    return [*found, ("Size, and time in Python on one thread", [head, *(_cost(r) for r in result["rows"])])]


def keyboard_text(result: dict[str, Any]) -> str:
    """The tables for a terminal: models side by side, so that they fit."""
    turned = [(title, [list(column) for column in zip(*rows, strict=True)]) for title, rows in tables(result)]
    return "\n".join(f"{title}\n{render_table(rows)}" for title, rows in turned)


def keyboard_markdown(result: dict[str, Any]) -> str:
    """The tables for a page."""
    return "\n\n".join(f"{title}:\n\n{markdown_table(rows, numbers=True)}" for title, rows in tables(result))


def _cost(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], *(f"{row['bytes'][p] / 1e6:.2f}" if p in row["bytes"] else "" for p in ("fp32", "int8"))]
    for what in ("word", "keystroke"):
        t = row["latency"][what]
        cells += [f"{t['p50_ms']:.2f}/{t['p95_ms']:.2f}/{t['p99_ms']:.2f}", f"{t['cpu_ms']:.2f}"] if t else ["", ""]
    return cells


def _by_client(found: dict[str, Any]) -> str:
    """The lowest tenth, the middle and the highest tenth of the clients."""
    by = found["by_client"]
    return " – ".join(f"{100 * by[key]:.0f}" for key in ("top3_p10", "top3_median", "top3_p90")) + " %" if by else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
