"""Every file that a command writes from a private run, and what answers for it: one table.

A file of a private run is covered by its ledger, public, or not covered and named in the statement. What would be none
of these is never written. `keyfed privacy audit` holds a run's folder against the table: a file that the table does not
know, or that must never be there, fails the audit. docs/private-files.md and the tests are made from the table.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

Cover = Literal["ledger", "public", "named", "never"]
Place = Literal["run", "comparison", "search", "vote", "federation"]
MEANING: dict[Cover, str] = {
    "ledger": "made from released models and noisy counts alone: the run's (ε, δ) covers it",
    "public": "tells nothing of any client's text",
    "named": "not covered, and named in the statement: not to be given away",
    "never": "not written: it would be a release without noise",
}
WHERE: dict[Place, str] = {
    "run": "The folder of a run",
    "comparison": "The folder of `keyfed compare`",
    "search": "The folder of `keyfed tune`",
    "vote": "Beside `keyfed vocab --dp --out`",
    "federation": "The folder of `keyfed up --home`",
}


class Rule(NamedTuple):
    """What answers for the files of a pattern.

    Attributes:
      pattern: a path in the place; `*` stands for a part of one name, `**` for any path.
      real, simulated: in a run with real clients, and in a simulation.
      why: what the file holds.
      said: words by which the statement names the file, where it is not covered.
    """

    pattern: str
    real: Cover
    simulated: Cover
    why: str
    said: str = ""
    place: Place = "run"


_SCORES = "validation and test numbers"
_OWN = "server's own files"
_TWIN = "noiseless twin"
_AUDIT = "an audit"
_DEVICE = "a client keeps to itself"
RULES = (
    Rule("run.toml", "public", "named", "the configuration; of a simulation also the seed and a sum of the text",
         "the seed and the sum of the text in run.toml"),
    Rule("run.lock", "public", "public", "empty"),
    Rule("run.id", "public", "public", "the run's random name"),
    Rule("attempt", "public", "public", "how often the server was started"),
    Rule("enrolled.json", "named", "never", "who was enrolled when the run began", "who was enrolled"),
    Rule("ledger.jsonl", "named", "public", "all releases; of secure sums also which rounds lost clients", _OWN),
    Rule("ledger.head.json", "named", "public", "the last row of the ledger", _OWN),
    Rule("metrics.jsonl", "named", "named", "ε, clip and public sizes of every round; in a simulation also validation",
         "metrics.jsonl"),
    Rule("result.json", "ledger", "named", "the result; in a simulation also validation and test", _SCORES),
    Rule("model.safetensors", "ledger", "ledger", "the model that was released"),
    Rule("vocab.json", "named", "named", "the vocabulary: the giver's word, a vote with its own ε, or clients' text",
         "the vocabulary"),
    Rule("checkpoint/round-*.json", "named", "named", "what a server needs to go on; of some methods who came", _OWN),
    Rule("checkpoint/round-*.safetensors", "named", "named", "released models; with a tree also its noise", _OWN),
    Rule("clients/**", "never", "named", "what clients keep on their devices, without clip and noise",
         "the folder clients/"),
    Rule("noiseless/**", "never", "named", "the twin, trained without clip and noise", _TWIN),
    Rule("central/**", "never", "never", "a model of the pooled text"),
    Rule("curves.jsonl", "never", "never", "losses of single clients"),
    Rule("report.md", "ledger", "named", "the result as a page", _SCORES),
    Rule("report.html", "ledger", "named", "the result as a page", _SCORES),
    Rule("plots/perplexity.png", "ledger", "named", "validation by round", _SCORES),
    Rule("plots/accuracy.png", "ledger", "named", "validation by round", _SCORES),
    Rule("plots/traffic.png", "ledger", "named", "validation by bytes", _SCORES),
    Rule("plots/vectors.png", "never", "named", "how the word vectors that a run starts from were reduced",
         "the word vectors that training starts from"),
    Rule("plots/clients.png", "never", "never", "a figure of every client"),
    Rule("plots/personalised.png", "never", "never", "a figure of every client"),
    Rule("plots/audit-*.png", "never", "named", "attacks on clients' text", _AUDIT),
    Rule("audit.md", "public", "named", "the audit; of a simulation attacks on clients' text", _AUDIT),
    Rule("audit.json", "public", "named", "the audit; of a simulation attacks on clients' text", _AUDIT),
    Rule("audit/**", "never", "named", "runs of the audit, with canaries in clients' text", _AUDIT),
    Rule("tensorboard/events.*", "named", "named", "metrics.jsonl as events", "metrics.jsonl"),
    Rule("tensorboard/central/events.*", "never", "named", "the rounds of the twin", _TWIN),
    Rule("keyboard/manifest.json", "ledger", "ledger", "what the export is of; compared on random tokens"),
    Rule("keyboard/model.onnx", "public", "public", "the graph of the network, without weights"),
    Rule("keyboard/weights.safetensors", "ledger", "ledger", "the model that was released"),
    Rule("keyboard/vectors.json", "ledger", "ledger", "what the model says after random tokens"),
    Rule("keyboard/vocab.json", "named", "named", "the run's vocabulary, without written forms", "the vocabulary"),
    Rule("keyboard/ngram.safetensors", "never", "never", "n-grams of clients' text"),
    Rule("*/seed-*/**", "never", "named", "runs, each with a folder and a ledger of its own", _SCORES, "comparison"),
    Rule("baselines/seed-*.json", "never", "named", "perplexities of n-gram models of clients' text",
         "perplexities of n-gram baselines", "comparison"),
    Rule("compare.json", "never", "named", "results of the runs", _SCORES, "comparison"),
    Rule("report.*", "never", "named", "results of the runs as a page", _SCORES, "comparison"),
    Rule("plots/*.png", "never", "named", "results of the runs as plots", _SCORES, "comparison"),
    Rule("trial-*/**", "never", "named", "runs, each with a folder and a ledger of its own", _SCORES, "search"),
    Rule("tune.json", "never", "named", "results of the trials", _SCORES, "search"),
    Rule("best.toml", "never", "named", "the configuration that was best on validation", "hyper-parameters", "search"),
    Rule("report.*", "never", "named", "results of the trials as a page", _SCORES, "search"),
    Rule("plots/*.png", "never", "named", "results of the trials as plots", _SCORES, "search"),
    Rule("run.lock", "public", "public", "empty", "", "search"),
    Rule("*.json", "ledger", "named", "the vocabulary with its own (ε, δ), or pairs of words with noisy counts",
         "the vocabulary", "vote"),
    Rule("*.privacy/ledger.jsonl", "public", "public", "the ledger of the vote", "", "vote"),
    Rule("*.privacy/ledger.head.json", "public", "public", "the last row of that ledger", "", "vote"),
    Rule("text/**", "named", "never", "each client's own text, as `keyfed up` deals it out", _DEVICE, "federation"),
    Rule("clients/**", "named", "never", "homes of clients: keys, and what they note of runs", _DEVICE, "federation"),
    Rule("server/**", "named", "never", "keys, roster, and what Flower keeps of messages", _OWN, "federation"),
    Rule("app/**", "named", "never", "the run as it was submitted, with its vocabulary", _OWN, "federation"),
    Rule("logs/*.log", "named", "never", "what the processes print", _OWN, "federation"),
)  # fmt: skip


def rule_for(path: str, place: Place = "run") -> Rule | None:
    """Return the rule of a file by its path in a place, with `/` between names; None for one that the table lacks."""
    return next((r for r in RULES if r.place == place and _form(r.pattern).fullmatch(path)), None)


@cache
def _form(pattern: str) -> re.Pattern[str]:
    parts = {"**": ".+", "*": "[^/]*"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)), re.DOTALL)
