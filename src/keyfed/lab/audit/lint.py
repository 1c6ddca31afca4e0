"""What a run claims by its ledger, and what its configuration, metrics and files say about that claim.

A finding is `ok`, a `note`, a `warning`, or `broken`: the claim does not hold as it stands. Every file in a run's
folder is compared with the table of `keyfed.private.dp.statement`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keyfed.config.load import Config
from keyfed.errors import KeyfedError
from keyfed.federated.types import Method
from keyfed.files import written_name
from keyfed.keyboard import bundle
from keyfed.model import counts, mixture
from keyfed.private.dp.accounting import FINE
from keyfed.private.dp.ledger import LEDGER, Terms, Verdict, check_against_metrics, read_ledger
from keyfed.private.dp.statement import MEANING, Cover, rule_for
from keyfed.run.counts.noise import FOLDER
from keyfed.run.folder import read_metrics

Level = Literal["ok", "note", "warning", "broken"]
Record = Mapping[str, Any]
# Fields of metrics.jsonl that are computed from clients' text or say who they are.
FROM_CLIENTS = ("loss", "tokens", "worked", "contributors", "refused", "lost", "attention", "effective_clients")
TIMES = ("seconds", "elapsed", "seconds_per_round")  # of both: how long real clients took tells how much text they have
HEADER = 4_096  # bytes of a dictionary in which its header ends
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
    updates = sum(e.what in ("update", "torn") for e in ledger.entries)
    terms = ledger.terms
    return PrivacyClaim(ledger.verdict(), ledger.epsilon(), terms.delta, len(ledger.entries), updates, terms)


def lint(
    config: Config,
    method: Method,
    records: Sequence[Record],
    claim: PrivacyClaim,
    clients: int,
    result: Record | None = None,
) -> list[Finding]:
    """Look at everything that can break a claim without a single attack; `result` is what result.json has."""
    findings = [*_own_noise(config, claim), *_noise_and_weights(method, claim)]
    findings += [_metrics(records, claim), _result(result or {}, claim)]
    if claim.problem is not None:
        findings.append(Finding("ledger", "broken", claim.problem))
    if claim.terms is not None:
        findings += [*_ledger(claim, claim.terms, records, clients), *_sampling(config, claim.terms)]
        findings += _vocabulary(config, claim.terms)
    return findings


def _own_noise(config: Config, claim: PrivacyClaim) -> Iterator[Finding]:
    beta = config.options.get("noise")
    if isinstance(beta, int | float) and beta != 0:
        yield Finding(
            "FedAtt's noise",
            "broken" if claim.verdict != "NONE" else "warning",
            f"method.noise is {beta}: FedAtt's perturbation. Uploads are not clipped for it, so one client's influence "
            "has no bound and ε is ∞ however large it is; it is no differential privacy.",
        )


def _noise_and_weights(method: Method, claim: PrivacyClaim) -> Iterator[Finding]:
    """Where the randomness comes from, and what bounds a client's weight."""
    if claim.terms is None:
        unbounded = (
            "Uploads are not clipped, and are divided by what arrived: nothing bounds one client's share."
            if method.distance is None
            else "Attention: what one client counts depends on everybody's uploads, unbounded."
        )
        yield Finding("randomness", "note", "No noise is claimed; the seed in run.toml repeats the run.")
        yield Finding("weights", "note", unbounded)
        return
    if claim.terms.randomness == "derived":
        yield Finding(
            "randomness",
            "warning",
            "Noise and cohorts derive from the seed in run.toml: whoever has the file can draw the noise again and "
            "take it away. Good for a simulation, never for people's text.",
        )
    else:
        yield Finding("randomness", "ok", "Noise comes from the operating system; no seed of it is written down.")
    yield Finding("weights", "ok", claim.terms.sensitivity)


def _metrics(records: Sequence[Record], claim: PrivacyClaim) -> Finding:
    shown = [(key, r.get(key)) for r in records for key in (*FROM_CLIENTS, *_times(claim))]
    return _in_clear("metrics", "metrics.jsonl", shown, "number that is computed from clients' text", claim)


def _result(result: Record, claim: PrivacyClaim) -> Finding:
    start = result.get("start") or {}
    shown = [
        *((key, result.get(key)) for key in (*OF_CLIENTS, *_times(claim))),
        ("oov_rate.train", (result.get("oov_rate") or {}).get("train")),
        ("start.tokens", start.get("tokens")),
        ("start.vectors.tokens", (start.get("vectors") or {}).get("tokens")),
    ]
    return _in_clear("result", "result.json", shown, "figure of a single client or of training text", claim)


def _in_clear(check: str, file: str, shown: Iterable[tuple[str, Any]], what: str, claim: PrivacyClaim) -> Finding:
    """Whether a file has figures of clients that nothing noised: what a run without a claim may have."""
    listed = ", ".join(sorted({key for key, value in shown if _says_something(value)}))
    if not listed:
        return Finding(check, "ok", f"{file} has no {what} in clear.")
    if claim.terms is None:
        return Finding(check, "note", f"{file} has figures of clients in clear: {listed}.")
    unknown = "that the ledger does not know of; they are releases, too."
    return Finding(check, "broken", f"{file} has figures of clients in clear ({listed}) {unknown}")


def _times(claim: PrivacyClaim) -> tuple[str, ...]:
    """The fields that show the work of real clients; a simulation's seconds are this machine's."""
    return TIMES if claim.terms is not None and claim.terms.randomness == "system" else ()


def _says_something(value: Any) -> bool:
    """Whether a field has content: an empty one, or a number that is none, has not."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    return bool(value) if isinstance(value, list | dict | str) else True


def _ledger(claim: PrivacyClaim, terms: Terms, records: Sequence[Record], clients: int) -> Iterator[Finding]:
    rounds = len(records)
    if claim.updates < rounds:
        missing = f"{rounds - claim.updates} are missing, so the true ε is higher."
        booked = f"The ledger has {claim.updates} releases of updates, and {rounds} rounds were trained"
        yield Finding("ledger", "broken", f"{booked}: {missing}")
    else:
        yield Finding("ledger", "ok", f"{claim.updates} releases of updates for {rounds} rounds; the chain is whole.")
    least = f"1/population = {1 / terms.population:.3g}"
    if terms.delta >= 1 / terms.population:
        outright = "publishing one client's text outright would satisfy it."
        yield Finding("delta", "broken", f"δ = {terms.delta:g} is not below {least}: {outright}")
    else:
        yield Finding("delta", "ok", f"δ = {terms.delta:g} is below {least}.")
    if terms.clients != clients:
        speaks = f"The ledger speaks of {terms.clients:,} clients, and the run has {clients:,}."
        yield Finding("population", "broken", speaks)
    elif terms.population != terms.clients or terms.cohort != terms.called:
        yield Finding(
            "population",
            "note",
            f"ε is that of an imagined fleet of {terms.population:,} clients, {terms.cohort:,.6g} in a round; this run "
            f"has {terms.clients:,} and calls {terms.called:,.6g}.",
        )
    else:
        yield Finding("population", "ok", f"ε is that of the {clients:,} clients of this run.")


def _sampling(config: Config, terms: Terms) -> Iterator[Finding]:
    drawn = config.participation.sampling
    if terms.mechanism == "tree" or terms.rate >= 1:
        yield Finding("sampling", "ok", "No amplification by sampling is claimed.")
    elif drawn != "poisson":
        counts = "ε counts on every client being called independently"
        yield Finding("sampling", "broken", f'{counts}, and participation.sampling is "{drawn}".')
    elif config.participation.over_select:
        yield Finding("sampling", "broken", "Over-selection makes one client's presence depend on others'.")
    else:
        yield Finding("sampling", "ok", f"Every client is called independently with chance {terms.rate:.4g}.")


def _vocabulary(config: Config, terms: Terms) -> Iterator[Finding]:
    counted = terms.randomness == "derived" and config.data.vocab_file is None  # on the text of a simulation
    if terms.raw_vocabulary or counted:
        yield Finding(
            "vocabulary",
            "warning",
            "The vocabulary was made from these clients' text without noise: no ε covers it, and every word in it "
            "tells that somebody wrote it. Give one from public text, or from `keyfed vocab --dp` (--vocab).",
        )


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
    """Compare every file in the folder of a private run with the table; nothing for a run that claims nothing.

    A file that no rule knows breaks the claim, as does one that must never be there, or an export that was counted on
    text: such files are releases that the ledger lacks.
    """
    if claim.terms is None:
        return []
    real = claim.terms.randomness == "system"
    export_again = "; export the run again (`keyfed export`)"
    broken: list[str] = []
    by_cover: dict[Cover, list[str]] = {cover: [] for cover in MEANING}
    exports = set()
    for path, meant in files_in(run):
        if meant == "keyboard/manifest.json":
            exports.add(run / Path(path).parent)
        rule = rule_for(meant)
        if rule is None:
            broken.append(f"{path}: no command of this version writes it, so nobody knows what it tells; move it away")
            continue
        cover = rule.real if real else rule.simulated
        by_cover[cover].append(path)
        if cover == "never":
            again = export_again if meant.startswith("keyboard/") else ""
            broken.append(f"{path}: {rule.why}, which the ledger does not cover; delete it{again}")
    for folder in sorted(exports):
        where = folder.relative_to(run).as_posix()
        raw = bundle.read_from_text(folder)
        broken += [f"{where}/{what}: read from clients' text without noise{export_again}" for what in raw]
    covered = [f"{len(paths)} {MEANING[cover].partition(':')[0]}" for cover, paths in by_cover.items() if paths]
    # Folders in one word.
    named = dict.fromkeys(path.partition("/")[0] + ("/" if "/" in path else "") for path in by_cover["named"])
    text = f"{'; '.join(covered)}." + (f" Not to be given away: {', '.join(named)}." if named else "")
    of_counts = [] if real else [*count_findings(run), *phone_findings(run)]
    files = [*(Finding("files", "broken", why) for why in broken), Finding("files", "note" if named else "ok", text)]
    return [*of_counts, *files]


def count_findings(run: Path) -> list[Finding]:
    """Say what covers the n-grams that a private run has counted: their own ledger, or nothing.

    Weights of a mixture say of themselves how they were fitted in no place, so they go by the counts next to them.
    """
    path, home = run / counts.FILE, run / FOLDER
    again = f"delete it with {mixture.FILE}, and count again: keyfed counts {run} --dp"
    if not path.exists():
        alone = f"{mixture.FILE}: {counts.FILE} is not there to say whether its sums had noise; delete it"
        return [Finding("counts", "broken", alone)] if (run / mixture.FILE).exists() else []
    try:
        terms = counts.terms_of(counts.metadata_of(path.read_bytes())["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return [Finding("counts", "broken", f"{counts.FILE} is damaged ({e}); {again}")]
    if terms.epsilon is None or terms.delta is None:
        return [Finding("counts", "broken", f"{counts.FILE}: counted without noise, so no ε covers it; {again}")]
    try:
        ledger = read_ledger(home)
    except KeyfedError as e:
        return [Finding("counts", "broken", f"{counts.FILE} says ε = {terms.epsilon:.4g}, but {e}")]
    spent = ledger.epsilon(grid=FINE)
    if ledger.verdict() == "NONE" or spent > terms.epsilon * (1 + 1e-9) or ledger.terms.delta != terms.delta:
        said = f"{counts.FILE} says (ε, δ) = ({terms.epsilon:.4g}, {terms.delta:g})"
        booked = f"its ledger has ({spent:.4g}, {ledger.terms.delta:g}), {ledger.verdict()}"
        return [Finding("counts", "broken", f"{said}, and {booked}; {again}")]
    adds = f"{terms.verdict}: (ε, δ) = ({terms.epsilon:.4g}, {terms.delta:g}) of the n-grams adds to that of the model."
    return [Finding("counts", "note", adds)]


def phone_findings(run: Path) -> Iterator[Finding]:
    """Look into the headers of a private run's dictionaries for phones: they say whether their counts had noise."""
    for path in sorted((run / "phone").glob("keyfed_*")):
        if b"; epsilon none" in path.read_bytes()[:HEADER]:
            yield Finding("counts", "broken", f"phone/{path.name}: of counts without noise; delete it")
