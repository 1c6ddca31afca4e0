"""The end of a run: the chosen model is tested once and written; count-based baselines score the same tokens."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, parse_target
from keyfed.engine.network import parameter_count, shapes
from keyfed.federated.types import Method, Params
from keyfed.model.ngram import KneserNey, Unigram, fit_kneser_ney, fit_unigram
from keyfed.model.output import Score
from keyfed.run.checkpoint import Best
from keyfed.run.console import Listener, within
from keyfed.run.encode import Streams
from keyfed.run.evaluate import (
    by_line,
    evaluate_ngram,
    evaluate_ngram_sentences,
    headline,
    scorer_of,
    spread,
    total,
)
from keyfed.run.folder import read_metrics, save_model
from keyfed.run.metrics_line import reached, soundness_counts
from keyfed.run.plan import Choice, members_of
from keyfed.run.prepare import Prepared
from keyfed.run.secure import clamped_result, secure_result, sizes_in

CHOSEN = {
    "perplexity": "chosen on validation", "accuracy": "chosen by validation accuracy", "last": "train.choose=last",
}  # fmt: skip


def finish(
    config: Config,
    out: Path,
    prepared: Prepared,
    method: Method,
    choice: Choice,
    best: Best,
    seconds: float,
    start: Mapping[str, Any],
    listen: Listener,
) -> dict[str, Any]:
    """Test the chosen model once, score the baselines on the same tokens, write the model."""
    chosen = CHOSEN[config.train.choose] if math.isfinite(best.cost) else "no validation was good"
    chosen = chosen if prepared.valid else "the last: there is no validation text"
    chosen = chosen if config.train.rounds else "not trained: 0 rounds"
    listen.say(f"testing the model of round {best.round} ({chosen})")
    params: Params = {name: best.params[name] for name in shapes(prepared.spec)}
    save_model(out, params, prepared.vocab)
    began = time.monotonic()
    within(listen, "testing")
    kind = prepared.batching.kind
    tested, test = headline(prepared.spec, params, prepared.test, kind, choice.device)
    unseen = scorer_of(kind)(prepared.spec, params, prepared.unseen, choice.device)
    evaluated = time.monotonic() - began
    began = time.monotonic()
    within(listen, "counting unigram and Kneser–Ney")
    baselines = score_baselines(prepared, config.train.ngram_order) if config.train.baselines else {}
    records, members = read_metrics(out), members_of(method, prepared, config)
    return {
        "run": str(out),
        "method": method.name,
        "model": prepared.spec.name,
        "data": prepared.corpus.name,
        "parameters": parameter_count(prepared.spec),
        "vocabulary": len(prepared.vocab),
        "clients": len(prepared.store),
        "cohort": members,
        "rounds": len(records),
        "seed": config.train.seed,
        "start": dict(start),
        "best_round": best.round,
        "test": test,
        "unseen": total(unseen).summary() if unseen else None,
        "spread": spread(tested),
        "unseen_spread": spread(unseen),
        "clients_perplexity": {
            "seen": sorted(s.perplexity for s in tested.values()),
            "unseen": sorted(s.perplexity for s in unseen.values()),
        },
        "baselines": baselines,
        "traffic": {k: sum(r["traffic"][k] for r in records) for k in ("down", "up", "control")},
        "bytes_per_client": asdict(sizes_in(config, method, params, members)),
        "secure": secure_result(records),
        "clamped": clamped_result(records),
        "reached": reached(records, parse_target(config.train.until, "train.until")),
        "modelled_seconds": sum(r.get("modelled_seconds", 0.0) for r in records),
        "refused": None if config.privacy.on else sum(len(r["refused"]) for r in records),
        "lost": dict(Counter(reason for r in records for reason in (r["lost"] or {}).values())),
        "abandoned": sum(r["abandoned"] for r in records),
        **soundness_counts(records),
        "compression_error": _mean([r["compression_error"] for r in records if "compression_error" in r]),
        "tokens_trained": sum(r["worked"] or 0 for r in records) or None,
        "oov_rate": prepared.oov,
        "seconds": seconds,
        "evaluation_seconds": evaluated,
        "baseline_seconds": time.monotonic() - began,
    }


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def score_baselines(prepared: Prepared, order: int) -> dict[str, Any]:
    """Fit a unigram and an interpolated modified Kneser–Ney model on all clients' training text and score both."""
    streams = [prepared.store.stream(k) for k in range(len(prepared.store))]
    size = len(prepared.vocab)
    out: dict[str, Any] = {}
    for name, fit in (
        ("unigram", lambda: fit_unigram(streams, size)),
        ("kneser_ney", lambda: fit_kneser_ney(streams, size, order)),
    ):
        began = time.monotonic()
        model = fit()
        lines = evaluate_ngram_sentences(model.nats, model.top, prepared.test)
        out[name] = {
            "test": {**_headline(model, prepared, prepared.test).summary(), **by_line(lines)},
            "unseen": _headline(model, prepared, prepared.unseen).summary() if prepared.unseen else None,
            "seconds": time.monotonic() - began,
        }
    out["kneser_ney"]["order"] = order
    return out


def _headline(model: Unigram | KneserNey, prepared: Prepared, streams: Streams) -> Score:
    """Score a count model on the tokens that the network's headline counts (`evaluate.scorer_of`)."""
    if prepared.batching.kind == "packed":
        return evaluate_ngram_sentences(model.nats, model.top, streams)
    return total(evaluate_ngram(model.nats, model.top, streams))
