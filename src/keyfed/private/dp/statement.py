"""What a ledger promises and what it does not: the sentences of every report, and what covers each file of a run.

A file of a private run is covered by its ledger, public, or not covered and named in the statement. A file that would
be none of these is never written. `keyfed privacy audit` compares a run's folder with the table `RULES`: a file that
the table does not know, or that must never be there, fails the audit. docs/private-files.md and the tests are made from
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, NamedTuple

from keyfed.private.dp.accounting import COARSE, FINE, Release, Row, at_rate_one, epsilon, merge
from keyfed.private.dp.ledger import MOST_DELTA, Ledger, Terms
from keyfed.private.dp.noise import update_noise

UNIT = "one client with everything it holds"
NEIGHBOURS = "one client added or removed (removed: it always sends zeros)"
NOISE_OPTION = (
    "method.noise reproduces FedAtt's perturbation. Uploads are not clipped, so one client's influence has no bound "
    "and ε is ∞ whatever the noise; `keyfed train --dp` gives a guarantee."
)
SERVER = "Not against the server itself: it sees every upload, or with secure aggregation un-noised sums."
LEFT_OUT = (
    "N-grams without noise and written forms of clients' text would be releases that no ledger has: `keyfed export` "
    "leaves them out of a private run's keyboard. N-grams that `keyfed counts --dp` counted have an ε and a δ of their "
    "own, which add."
)
NOT_COVERED = (
    "Not covered: validation and test numbers and the choice of the best round, which read held-out text of the same "
    "corpus (metrics.jsonl, result.json, and the pages, plots and tables made from them). Nor perplexities of n-gram "
    "baselines and of the noiseless twin, nor the twin's folder: they read the clients' text without noise. Nor the "
    "folder clients/ of clients that keep state, nor an audit of the run, which attacks the clients' text. Nor "
    "checkpoints, the server's own files, nor the seed and the sum of the text in run.toml. None of these files is to "
    "be given away. Not covered either: the model and the word vectors that training starts from, unless no client's "
    "text was in them; the vocabulary, unless `keyfed vocab --dp` made it (then its own ε and δ add); the choice of "
    f"hyper-parameters; clients that do not follow the protocol; whatever a client keeps to itself. {LEFT_OUT}"
)
WITH_REAL_CLIENTS = (
    "Noise and cohorts come from the operating system's randomness; no seed of them is kept. The population is the "
    "clients enrolled when the run began. Clients score nothing: there is no validation, no test on their text, and "
    "the model is that of the last round."
)
NOT_COVERED_THERE = (
    "Not covered: the vocabulary, unless `keyfed vocab --dp` made it (then its own ε and δ add); other runs with the "
    "same clients (their ε and δ add); the choice of hyper-parameters; who was enrolled, connected or took part, and "
    "how long it took; a client that drops out of a secure sum because its own training is slow, where few enough "
    "stay that this closes the sum; clients that do not follow the protocol; whatever a client keeps to itself. The "
    "server's own files tell who took part: ledger.jsonl, metrics.jsonl, checkpoints, logs and its home are not to be "
    f"given away. {LEFT_OUT}"
)
TREE_KEPT = (
    "Until the run ends, its checkpoint holds the noise that is still in the model: it is the server's own, and not to "
    "be given away. How far apart a client took part is counted by the client, in the steps that the server tells it."
)
COHORT_KNOWS = (
    "Clients called into the same secure sum know each other's names: against them the ε without amplification holds."
)
VOTE_NOISE = "Noise comes from the operating system's randomness; no seed of it is kept."
VOTE_SERVER = "Not against the one who counts, who sees every client's words before the noise is added."
NOT_COVERED_VOTE = (
    "Not covered: other votes of the same clients and runs on their text (their ε and δ add); the choice of the "
    "vote's options; clients that do not follow the protocol."
)
GIVEN_VOCABULARY = "The vocabulary was given: what went into it is not in this ledger; its ε and δ, if any, add."
RAW_VOCABULARY = "The vocabulary was made from these clients' text without noise: no ε covers it."
FEW = 1_000  # clients below which a guarantee says little, and this is said
NO_LEDGER = "No ledger: nothing was clipped and noised, so nothing is promised. `keyfed train --dp` gives a guarantee."


def account(ledger: Ledger, *, fine: bool = False, delta: float | None = None, vote: bool = False) -> dict[str, Any]:
    """Return the verdict, ε by both accountants, the terms and the releases of a ledger.

    Args:
      fine: take the tighter and slower PLD whatever the budget says.
      delta: δ of all that is promised, where the ledger's is only a part of it; None for the ledger's.
      vote: the releases are counts of words, not rounds of training.
    """
    eps = ledger.epsilon(grid=FINE) if fine else ledger.spent()
    terms = ledger.terms
    return {
        "verdict": ledger.verdict(delta),
        "pld": _number(eps),
        "rdp": _number(ledger.epsilon("rdp")),
        "delta": terms.delta if delta is None else delta,
        "budget": terms.budget,
        "unit": UNIT,
        "adjacency": NEIGHBOURS,
        "mechanism": terms.mechanism,
        "noise": terms.z,
        "count_noise": terms.count_noise,
        "rate": terms.rate if terms.mechanism == "gaussian" else None,
        "separation": terms.gap,
        "population": terms.population,
        "cohort": terms.cohort,
        "clients": terms.clients,
        "called": terms.called,
        "randomness": terms.randomness,
        "releases": len(ledger.entries),
        "retried": sum(e.attempt > 0 or e.what in ("torn", "heard") for e in ledger.entries),
        "rows": len(ledger.hashes),
        "head": ledger.head,
        "statement": statement(ledger, eps, delta, vote=vote),
    }


def no_account(noise: float) -> dict[str, Any]:
    """Return the account of a run without a ledger; `noise` is its method's own."""
    return {"verdict": "NONE", "pld": None, "rdp": None, "statement": [NOISE_OPTION if noise else NO_LEDGER]}


def statement(ledger: Ledger, eps: float, delta: float | None = None, *, vote: bool = False) -> list[str]:
    """Say what the ε is about: unit, neighbours, δ, amplification, randomness, and what is not covered.

    Args:
      delta, vote: see `account`.
    """
    t = ledger.terms
    promised = t.delta if delta is None else delta
    verdict = ledger.verdict(delta)
    lines = []
    if verdict == "NONE":
        return ["NONE: releases without noise are in the ledger, so ε is ∞."]
    if verdict == "SIMULATED":
        lines.append(
            f"SIMULATED guarantee for a population of {t.population:,} clients and a cohort of {t.cohort:,.9g}; not a "
            f"guarantee of this run, which has {t.clients:,} clients and calls {t.called:,.6g} a round"
            + (", and whose noise derives from its seed." if t.randomness == "derived" else ".")
        )
    elif verdict == "BOUND ONLY":
        lines.append(
            f"BOUND ONLY for the {t.clients:,} clients of this run, no meaningful guarantee: δ = {promised:.2g} is "
            f"above {MOST_DELTA:g}."
        )
    else:
        lines.append(f"GUARANTEE for the {t.clients:,} clients of this run.")
    lines += [
        f"(ε, δ) = ({eps:.4g}, {promised:g}) by privacy loss distributions, {ledger.epsilon('rdp'):.4g} by Rényi "
        f"divergences, over {len(ledger.entries):,} release{'' if len(ledger.entries) == 1 else 's'}.",
        f"Unit: {UNIT}. Neighbours: {NEIGHBOURS}. {t.sensitivity}",
        *_noise_of_counts(t),
    ]
    if t.mechanism == "gaussian":
        if t.rate < 1:
            alone = ledger_without_sampling(ledger)
            lines.append(
                f"Amplification: every client is called independently with chance {t.rate:.4g}. That helps against "
                "whoever sees the models and not who took part. Against somebody who knows who took part but sees only "
                f"models: ε = {alone:.4g}."
            )
        else:
            lines.append("Amplification: none; every client is called every round.")
        lines += _without_amplification(ledger)
    else:
        lines.append(
            f"Amplification: none is claimed. Noise is correlated over rounds (tree aggregation), and a client that "
            f"took part waits {t.gap:,} rounds."
        )
    if vote:
        from_system = [VOTE_NOISE] if t.randomness == "system" else []
        return [*lines, *from_system, *few_clients(t), VOTE_SERVER, NOT_COVERED_VOTE]
    if t.randomness == "derived":
        return [*lines, SERVER, NOT_COVERED]
    kept = [TREE_KEPT] if t.mechanism == "tree" else []
    known = [COHORT_KNOWS] if t.secure and t.mechanism == "gaussian" and t.rate < 1 else []
    raw = [RAW_VOCABULARY] if t.raw_vocabulary else []
    return [*lines, *known, WITH_REAL_CLIENTS, *raw, *few_clients(t), *kept, SERVER, NOT_COVERED_THERE]


def few_clients(t: Terms) -> list[str]:
    """Say what a guarantee is worth among few clients."""
    if t.clients >= FEW:
        return []
    return [
        f"{t.clients:,} clients are few: a delta of {t.delta:.2g} lets one of them be given away with that chance, and "
        "the noise is long beside what they learn; good for trying it out, not for people's text."
    ]


def _noise_of_counts(t: Terms) -> list[str]:
    """Say how z is shared between the sum and the counts next to it; nothing where nothing is counted."""
    if t.count_noise is None:
        return []
    return [
        f"Noise: {update_noise(t.z, t.count_noise):.4g} clips on the sum, {t.count_noise:.4g} clients on a count (√n "
        f"times that on each of n counts); together they cost what {t.z:.4g} clips on the sum alone would."
    ]


def _without_amplification(ledger: Ledger) -> list[str]:
    """Say which releases are counted at rate 1 though clients are drawn, and why."""
    t = ledger.terms
    if t.rate == 1:
        return []
    lines = []
    plain = [e.row for e in ledger.entries if isinstance(e.row, Release)]
    if any(row.hinge for row in plain):
        mean = math.fsum(row.count * row.hinge for row in plain)
        lines.append(
            f"Secure sums of too few clients stay closed, so a round can open by a single client, whom sampling does "
            f"not hide then. A client meets {mean:.2g} such rounds in expectation; {_met(ledger):,} of "
            f"{len(ledger.entries):,} releases are counted at rate 1 for them, and a hundredth of δ for more."
        )
    near = sum(row.q == 1 for row in plain)
    if near:
        lines.append(
            f"{near:,} releases are booked at rate 1: of those called some did not stay, and one client more or less "
            "would have decided whether the sum opens."
        )
    return lines


def _met(ledger: Ledger) -> int:
    """Releases that the chance of a pivotal client puts at rate 1."""
    merged = merge(ledger.rows())
    counted, _ = at_rate_one(merged, ledger.terms.delta)

    def at_one(rows: Iterable[Row]) -> int:
        return sum(r.count for r in rows if isinstance(r, Release) and r.q == 1)

    return at_one(counted) - at_one(merged)


def ledger_without_sampling(ledger: Ledger) -> float:
    """ε against somebody who knows who took part in every round: the same releases at a rate of 1.

    A bound for a client that is called every time; who is called less often has less.
    """
    rows: list[Row] = [Release(r.z, 1.0, r.count) if isinstance(r, Release) else r for r in merge(ledger.rows())]
    return epsilon(rows, ledger.terms.delta, grid=COARSE)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


Cover = Literal["ledger", "public", "named", "never"]
Place = Literal["run", "comparison", "search", "vote", "federation", "site"]
MEANING: dict[Cover, str] = {
    "ledger": "made from releases with noise alone: the run's (ε, δ) covers it, that of `counts.privacy` added for "
    "n-grams",
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
    "site": "The folder of `keyfed export --site`",
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
    Rule("run.toml", "public", "named",
         "the configuration; of a simulation also the seed, a sum of the text and the hash of a name (`--me`)",
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
    Rule("counts.safetensors", "never", "ledger", "n-grams of clients' text; refused where they have no noise"),
    Rule("mixture.json", "never", "ledger", "weights of network and n-grams, fitted on noised sums"),
    Rule("counts.privacy/ledger.jsonl", "never", "public", "the ledger of the n-grams"),
    Rule("counts.privacy/ledger.head.json", "never", "public", "the last row of that ledger"),
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
    Rule("keyboard/dictionary.safetensors", "public", "public", "words of published lists"),
    Rule("keyboard/ngram.safetensors", "never", "ledger", "n-grams of clients' text; refused where they have no noise"),
    Rule("phone/keyfed_*.combined", "never", "named", "a dictionary of noised counts; its words are the vocabulary's",
         "the vocabulary"),
    Rule("phone/keyfed_*.dict", "never", "named", "the same as keyboards import it", "the vocabulary"),
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
    Rule("model/manifest.json", "ledger", "ledger", "what the model is of; compared on random tokens", "", "site"),
    Rule("model/weights.safetensors", "ledger", "ledger", "the model that was released", "", "site"),
    Rule("model/vocab.json", "named", "named", "the run's vocabulary, without written forms", "the vocabulary", "site"),
    Rule("model/ngram.safetensors", "ledger", "ledger", "n-grams that were counted with noise", "", "site"),
    Rule("model/dictionary.safetensors", "public", "public", "words of published lists", "", "site"),
    Rule("data/*.json", "public", "public", "the page: tables", "", "site"),
    Rule("decoder/*.mjs", "public", "public", "the page: what ranks and spells", "", "site"),
    Rule("page/*.mjs", "public", "public", "the page: what one sees", "", "site"),
    Rule("client/*.mjs", "public", "public", "a federation's page: what answers a server", "", "site"),
    Rule("federated/*.mjs", "public", "public", "a federation's page: what keeps, trains and takes part", "", "site"),
    Rule("secure/*.mjs", "public", "public", "a federation's page: secure sums", "", "site"),
    Rule("training/*.mjs", "public", "public", "a federation's page: local training", "", "site"),
    Rule("page.json", "ledger", "ledger", "version, the hash of the code, and the server", "", "site"),
    Rule("service-worker.js", "ledger", "ledger", "the sums of all files", "", "site"),
    Rule("*", "public", "public", "the page", "", "site"),
)  # fmt: skip


def rule_for(path: str, place: Place = "run") -> Rule | None:
    """Return the rule of a file by its path in a place, with `/` between names; None for one that the table lacks."""
    return next((r for r in RULES if r.place == place and _form(r.pattern).fullmatch(path)), None)


@cache
def _form(pattern: str) -> re.Pattern[str]:
    wild = {"**": ".+", "*": "[^/]*"}
    return re.compile("".join(wild.get(name, re.escape(name)) for name in re.split(r"(\*\*|\*)", pattern)), re.DOTALL)
