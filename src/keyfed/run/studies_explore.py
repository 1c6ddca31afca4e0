"""The next-character report's first look at its text (figures 1 and 2), as a cell of a study."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from keyfed.run.studies_plan import Settings
from keyfed.text.explore import explore
from keyfed.text.named import load_corpus


def explore_cell(settings: Settings, data_dir: str | None) -> dict[str, Any]:
    """Count the top words, word pairs and characters of `data.name`; `study.top` of each are kept."""
    began = time.monotonic()
    name, top = str(settings["data.name"]), int(settings.get("study.top", 20))
    corpus = load_corpus(name, data_dir=None if data_dir is None else Path(data_dir))
    with tempfile.TemporaryDirectory(prefix="keyfed-explore-") as plots:
        found: Any = explore(corpus, top=top, out=Path(plots))
    characters = found.get("characters", {})
    entropies = ("unigram_entropy", "bigram_entropy", "unigram_accuracy", "bigram_accuracy")
    return {
        "records": [],
        "measures": {key: characters[key] for key in entropies if key in characters},
        "facts": {
            "unigrams": [[row["term"], row["count"]] for row in found["unigrams"]],
            "bigrams": [[row["term"], row["count"]] for row in found["bigrams"]],
            "lines": found["lines"], "tokens": found["tokens"], "types": found["types"],
        },
        "data": name, "data_sha256": corpus.fingerprint(), "seconds": time.monotonic() - began,
    }  # fmt: skip
