"""Count-based baselines on the same tokens: has the network earned its keep?"""

from __future__ import annotations

import time
from typing import Any

from keyfed.model.ngram import KneserNey, Unigram, fit_kneser_ney, fit_unigram
from keyfed.model.score import Score
from keyfed.run.encode import Streams
from keyfed.run.evaluate import by_line, evaluate_ngram, evaluate_ngram_sentences, total
from keyfed.run.prepare import Prepared


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
