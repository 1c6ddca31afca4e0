"""The next-character report's first look at its text (figures 1 and 2), as a cell of a study."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keyfed.lab.experiment.grid import Settings
from keyfed.text.catalogue import load_corpus
from keyfed.text.explore import character_statistics, explore

ENTROPIES = ("unigram_entropy", "bigram_entropy", "unigram_accuracy", "bigram_accuracy")
BLANKS: dict[str, Callable[[Iterable[str]], Iterable[str]]] = {
    "runs as one": lambda lines: (re.sub(" +", " ", line) for line in lines),
    "stripped": lambda lines: (line.strip() for line in lines),
    "no blank lines": lambda lines: (line.strip() for line in lines if line.strip()),
    "collapsed": lambda lines: (" ".join(line.split()) for line in lines if line.strip()),
}


def explore_cell(settings: Settings, data_dir: str | None) -> dict[str, Any]:
    """Count the top words, word pairs and characters of `data.name`; `study.top` of each are kept."""
    began = time.monotonic()
    name, top = str(settings["data.name"]), int(settings.get("study.top", 20))
    corpus = load_corpus(name, data_dir=None if data_dir is None else Path(data_dir))
    if "study.blanks" in settings:  # other readings of the same text: the entropies alone
        lines = (line for author in corpus.authors for line in author.lines)
        counted: Any = character_statistics(BLANKS[str(settings["study.blanks"])](lines))
        return {
            "records": [], "measures": {key: counted[key] for key in ENTROPIES}, "data": name,
            "data_sha256": corpus.fingerprint(), "seconds": time.monotonic() - began,
        }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="keyfed-explore-") as plots:
        found: Any = explore(corpus, top=top, out=Path(plots))
    characters = found.get("characters", {})
    return {
        "records": [],
        "measures": {key: characters[key] for key in ENTROPIES if key in characters},
        "facts": {
            "unigrams": [[row["term"], row["count"]] for row in found["unigrams"]],
            "bigrams": [[row["term"], row["count"]] for row in found["bigrams"]],
            "lines": found["lines"], "tokens": found["tokens"], "types": found["types"],
        },
        "data": name, "data_sha256": corpus.fingerprint(), "seconds": time.monotonic() - began,
    }  # fmt: skip
