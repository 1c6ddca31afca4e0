"""What a run claims by its ledger, and what its configuration and its metrics say about that claim.

A finding is `ok`, a `note`, a `warning`, or `broken`: the claim does not hold as it stands.

Every file in a run's folder is held against the table of `keyfed.private.dp.statement`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keyfed.config.load import Config
from keyfed.errors import KeyfedError
from keyfed.federated.types import Method
from keyfed.files import written_name
from keyfed.keyboard import bundle
from keyfed.private.dp.ledger import LEDGER, Ledger, Terms, Verdict, check_against_metrics, read_ledger
from keyfed.private.dp.statement import MEANING, Cover, rule_for
from keyfed.run.folder import read_metrics

Level = Literal["ok", "note", "warning", "broken"]
Record = Mapping[str, Any]
# Fields of metrics.jsonl that are computed from clients' text or say who they are.
FROM_CLIENTS = ("loss", "tokens", "worked", "contributors", "refused", "lost", "attention", "effective_clients")

TIMES = ("seconds", "elapsed", "seconds_per_round")  # of both: how long real clients took tells how much text they have
OF_CLIENTS = ("clients_perplexity", "spread", "unseen_spread", "tokens_trained", "refused", "lost")  # of result.json


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class PrivacyClaim:
    """What a run claims.

    Attributes:
      epsilon, delta: None where there is no ledger, or one that cannot be read; ε may be infinite.
      updates: noisy sums of updates in the ledger.
      problem: why the ledger cannot be read.
    """

    verdict: Verdict
    epsilon: float | None = None
    delta: float | None = None
    releases: int = 0
    updates: int = 0
    terms: Terms | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For audit.json."""
        return {**asdict(self), "terms": None if self.terms is None else asdict(self.terms)}


def read_claim(run: Path, *, promised: bool) -> PrivacyClaim:
    """Read the ledger of a run; one that is missing, damaged or rolled back claims nothing and says why.

    Args:
      promised: the configuration asks for privacy, so there must be one.
    """
    if not (run / LEDGER).exists() and not promised:
        return PrivacyClaim("NONE")
    try:
        ledger = read_ledger(run)
        check_against_metrics(ledger, read_metrics(run))
    except KeyfedError as e:
        return PrivacyClaim("NONE", problem=str(e))
    return claim_of(ledger)


def claim_of(ledger: Ledger) -> PrivacyClaim:
    """Sum a ledger up."""
    updates = sum(e.what in ("update", "torn") for e in ledger.entries)
    return PrivacyClaim(
        ledger.verdict(), ledger.epsilon(), ledger.terms.delta, len(ledger.entries), updates, ledger.terms
    )  # fmt: skip


def lint(
    config: Config,
    method: Method,
    records: Sequence[Record],
    claim: PrivacyClaim,
    clients: int,
    result: Record | None = None,
) -> list[Finding]:
    """Look at everything that can break a claim without a single attack; `result` is what result.json has."""
    findings: list[Finding | None] = [
        _own_noise(config, claim),
        _seeds(claim),
        _weights(method, claim),
        _metrics(records, claim),
    ]
    findings.append(_result(result or {}, claim))
    if claim.problem is not None:
        findings.append(Finding("ledger", "broken", claim.problem))
    if claim.terms is not None:
        findings += [_ledger(claim, records), _delta(claim.terms), _population(claim.terms, clients)]
        findings += [_sampling(config, claim.terms), _vocabulary(config, claim.terms)]
    return [f for f in findings if f is not None]


def _own_noise(config: Config, claim: PrivacyClaim) -> Finding | None:
    beta = config.options.get("noise")
    if not isinstance(beta, int | float) or beta == 0:
        return None
    level: Level = "broken" if claim.verdict != "NONE" else "warning"
    return Finding(
        "FedAtt's noise",
        level,
        f"method.noise is {beta}: FedAtt's perturbation. Uploads are not clipped for it, so one client's influence has "
        "no bound and ε is ∞ however large it is; it is no differential privacy.",
    )


def _seeds(claim: PrivacyClaim) -> Finding:
    if claim.terms is None:
        return Finding("randomness", "note", "No noise is claimed; the seed in run.toml repeats the run.")
    if claim.terms.randomness == "derived":
        return Finding(
            "randomness",
            "warning",
            "Noise and cohorts derive from the seed in run.toml: whoever has the file can draw the noise again and "
            "take it away. Good for a simulation, never for people's text.",
        )
    return Finding("randomness", "ok", "Noise comes from the operating system; no seed of it is written down.")


def _weights(method: Method, claim: PrivacyClaim) -> Finding:
    if claim.terms is not None:
        return Finding("weights", "ok", claim.terms.sensitivity)
    if method.distance is not None:
        return Finding(
            "weights", "note", "Attention: what one client counts depends on everybody's uploads, unbounded."
        )
    return Finding(
        "weights",
        "note",
        "Uploads are not clipped, and are divided by what arrived: nothing bounds one client's share.",
    )


def _metrics(records: Sequence[Record], claim: PrivacyClaim) -> Finding:
    shown = {key for r in records for key in (*FROM_CLIENTS, *_times(claim)) if _says_something(r.get(key))}
    return _in_clear("metrics", "metrics.jsonl", shown, "number that is computed from clients' text", claim)


def _result(result: Record, claim: PrivacyClaim) -> Finding:
    start = result.get("start") or {}
    train_text = {
        "oov_rate.train": (result.get("oov_rate") or {}).get("train"),
        "start.tokens": start.get("tokens"),
        "start.vectors.tokens": (start.get("vectors") or {}).get("tokens"),
    }
    found = {**{key: result.get(key) for key in (*OF_CLIENTS, *_times(claim))}, **train_text}
    shown = {key for key, value in found.items() if _says_something(value)}
    return _in_clear("result", "result.json", shown, "figure of a single client or of training text", claim)


def _in_clear(check: str, file: str, shown: Collection[str], what: str, claim: PrivacyClaim) -> Finding:
    """Whether a file has figures of clients that nothing noised: what a run without a claim may have."""
    if not shown:
        return Finding(check, "ok", f"{file} has no {what} in clear.")
    listed = ", ".join(sorted(shown))
    if claim.terms is None:
        return Finding(check, "note", f"{file} has figures of clients in clear: {listed}.")
    return Finding(
        check,
        "broken",
        f"{file} has figures of clients in clear ({listed}) that the ledger does not know of; they are releases, too.",
    )


def _times(claim: PrivacyClaim) -> tuple[str, ...]:
    """The fields that real clients' work is seen in; a simulation's seconds are this machine's."""
    return TIMES if claim.terms is not None and claim.terms.randomness == "system" else ()


def _says_something(value: Any) -> bool:
    """Whether a field of metrics.jsonl tells anything: an empty one, or a number that is none, does not."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    return bool(value) if isinstance(value, list | dict | str) else True


def _ledger(claim: PrivacyClaim, records: Sequence[Record]) -> Finding:
    if claim.updates < len(records):
        return Finding(
            "ledger",
            "broken",
            f"The ledger has {claim.updates} releases of updates, and {len(records)} rounds were trained: "
            f"{len(records) - claim.updates} are missing, so the true ε is higher.",
        )
    return Finding(
        "ledger", "ok", f"{claim.updates} releases of updates for {len(records)} rounds; the chain is whole."
    )


def _delta(terms: Terms) -> Finding:
    if terms.delta >= 1 / terms.population:
        return Finding(
            "delta",
            "broken",
            f"δ = {terms.delta:g} is not below 1/population = {1 / terms.population:.3g}: publishing one client's text "
            "outright would satisfy it.",
        )
    return Finding("delta", "ok", f"δ = {terms.delta:g} is below 1/population = {1 / terms.population:.3g}.")


def _vocabulary(config: Config, terms: Terms) -> Finding | None:
    counted = terms.randomness == "derived" and config.data.vocab_file is None  # on the text of a simulation
    if not terms.raw_vocabulary and not counted:
        return None
    return Finding(
        "vocabulary",
        "warning",
        "The vocabulary was made from these clients' text without noise: no ε covers it, and every word in it tells "
        "that somebody wrote it. Give one from public text, or from `keyfed vocab --dp` (--vocab).",
    )


def _population(terms: Terms, clients: int) -> Finding:
    if terms.clients != clients:
        return Finding(
            "population", "broken", f"The ledger speaks of {terms.clients:,} clients, and the run has {clients:,}."
        )
    if terms.population != terms.clients or terms.cohort != terms.called:
        return Finding(
            "population",
            "note",
            f"ε is that of an imagined fleet of {terms.population:,} clients, {terms.cohort:,.6g} in a round; this run "
            f"has {terms.clients:,} and calls {terms.called:,.6g}.",
        )
    return Finding("population", "ok", f"ε is that of the {clients:,} clients of this run.")


def _sampling(config: Config, terms: Terms) -> Finding:
    if terms.mechanism == "tree" or terms.rate >= 1:
        return Finding("sampling", "ok", "No amplification by sampling is claimed.")
    if config.participation.sampling != "poisson":
        return Finding(
            "sampling",
            "broken",
            f"ε counts on every client being called independently, and participation.sampling is "
            f'"{config.participation.sampling}".',
        )
    if config.participation.over_select:
        return Finding("sampling", "broken", "Over-selection makes one client's presence depend on others'.")
    return Finding("sampling", "ok", f"Every client is called independently with chance {terms.rate:.4g}.")


def files_in(run: Path) -> Iterator[tuple[str, str]]:
    """Yield every file of a run's folder: its path, and the path that the table has for it.

    An export may have any name: its files are those of `keyboard/`. A file that was being written when a process was
    killed is what it would have been. Links are not followed.
    """
    for folder, folders, names in os.walk(run):
        here = Path(folder)
        folders.sort()
        exported = here != run and (here / bundle.MANIFEST).is_file()
        links = [name for name in folders if (here / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = (here / name).relative_to(run).as_posix()
            meant = (Path("keyboard") if exported else here.relative_to(run)) / written_name(name)
            yield path, meant.as_posix()


def file_findings(run: Path, claim: PrivacyClaim) -> list[Finding]:
    """Hold every file in the folder of a private run against the table; nothing for a run that claims nothing.

    A file that no rule knows breaks the claim, as does one that must never be there, or an export that was counted on
    text: such files are releases that the ledger lacks.
    """
    if claim.terms is None:
        return []
    real = claim.terms.randomness == "system"
    broken: list[str] = []
    by_cover: dict[Cover, list[str]] = {cover: [] for cover in MEANING}
    for path, meant in files_in(run):
        rule = rule_for(meant)
        if rule is None:
            broken.append(f"{path}: no command of this version writes it, so nobody knows what it tells; move it away")
            continue
        cover = rule.real if real else rule.simulated
        by_cover[cover].append(path)
        if cover == "never":
            broken.append(f"{path}: {rule.why}, which the ledger does not cover; delete it{_again(meant)}")
    for folder in sorted(
        {run / Path(path).parent for path, meant in files_in(run) if meant == "keyboard/manifest.json"}
    ):
        where = folder.relative_to(run).as_posix()
        raw = [what for what in bundle.read_from_text(folder) if what != bundle.NGRAM]  # which has a rule of its own
        broken += [f"{where}/{what}: read from clients' text without noise{_again('keyboard/')}" for what in raw]
    found = [Finding("files", "broken", text) for text in broken]
    counted = "; ".join(
        f"{len(paths)} {MEANING[cover].partition(':')[0]}" for cover, paths in by_cover.items() if paths
    )
    found.append(Finding("files", "note" if by_cover["named"] else "ok", f"{counted}.{_named(by_cover['named'])}"))
    return found


def _again(meant: str) -> str:
    return "; export the run again (`keyfed export`)" if meant.startswith("keyboard/") else ""


def _named(paths: Iterable[str]) -> str:
    """List what must not be given away, folders in one word."""
    short = dict.fromkeys(path.partition("/")[0] + ("/" if "/" in path else "") for path in paths)
    return f" Not to be given away: {', '.join(short)}." if short else ""
