"""`keyfed privacy audit RUN`: attack a finished run as an outsider would, and hold the result against its claim.

The attacks that need other text are made on runs of their own under RUN/audit/: the same configuration trained again
with canaries in the text, and, where noise is claimed, with canary clients in the sum. RUN's own model is only read.

Of a run with real clients the audit reads what it claims, and what its own files say about that. Attacks would need the
clients' text, which is not here: none is made, and the page says so. Nor can a round be done again, for its noise
cannot be drawn a second time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, check
from keyfed.engine.module import ModuleNetwork
from keyfed.errors import RunError
from keyfed.federated.types import Method
from keyfed.files import write_atomically
from keyfed.lab.audit import canaries as audit_canaries
from keyfed.lab.audit import leaks as audit_leaks
from keyfed.lab.audit import members as audit_members
from keyfed.lab.audit import one_shot as audit_one_shot
from keyfed.lab.audit import replay
from keyfed.lab.audit.canaries import chance_under
from keyfed.lab.audit.leaks import RECOVERED
from keyfed.lab.audit.lint import Finding, PrivacyClaim, file_findings, lint, read_claim
from keyfed.lab.audit.page import claim_blocks, write_audit
from keyfed.reports.document import Heading, Text, to_markdown
from keyfed.run.folder import Trained, load_model, read_metrics, read_result, read_run_toml, strict
from keyfed.run.loop import Listener, Silent, train
from keyfed.run.metrics_line import sizes_of
from keyfed.run.plan import Choice, members_of, plan, plan_of_round
from keyfed.run.prepare import Prepared, client_tokens, make_problem, prepare
from keyfed.run.privacy import make_private, members_in_turn
from keyfed.run.remote.device import run_method
from keyfed.run.remote.private import ENROLLED
from keyfed.run.remote.rounds import OWN_TEXT
from keyfed.run.start import find_source, initial_params, make_ready

UNLIKELY = 0.001  # chance, over all canaries, below which an exposure contradicts a guarantee


@dataclass(frozen=True, slots=True)
class Effort:
    """How much an audit does; retraining costs what the run cost, whatever the effort.

    Attributes:
      each: canaries in a cell of the grid.
      candidates: random phrases each is ranked among.
      controls: phrases that nobody planted.
      pieces: pieces of text, or clients, on either side of membership inference.
    """

    each: int
    candidates: int
    controls: int
    pieces: int


QUICK, WHOLE = Effort(1, 2**11 - 1, 200, 300), Effort(3, 2**14 - 1, 400, 2000)


@dataclass(frozen=True, slots=True)
class Subject:
    """The run under audit, made ready."""

    trained: Trained
    prepared: Prepared
    method: Method
    choice: Choice
    claim: PrivacyClaim

    @property
    def config(self) -> Config:
        return self.trained.config

    @property
    def home(self) -> Path:
        """Where the audit's own runs lie."""
        return self.trained.folder / "audit"


def audit_run(run: Path, *, quick: bool = True, listener: Listener | None = None) -> dict[str, Any]:
    """Audit a finished run; write audit.md, audit.json and plots into its folder, and return what audit.json has.

    Args:
      quick: one canary a cell and 2^11 candidates instead of three and 2^14.

    Returns:
      verdict: "GUARANTEE", "BOUND ONLY", "SIMULATED" or "NONE"; contradicted: whether a claim does not hold, and the
      reasons in `contradictions`; findings of the configuration; canaries, one_shot, membership, leaks.

    Raises:
      RunError: the folder holds no finished run, or one of a user's own module.
    """
    listen, effort = listener or Silent(), QUICK if quick else WHOLE
    if (read_result(run) or {}).get("data") == OWN_TEXT:
        return audit_deployed(run)
    subject = _open(run)
    seed, records = subject.config.train.seed, read_metrics(run)
    clients, result = len(subject.prepared.store), read_result(run)
    findings = lint(subject.config, subject.method, records, subject.claim, clients, result)
    findings += file_findings(run, subject.claim)
    replayed = _replayed(subject, listen)
    listen.say("audit: membership inference on the model as it is")
    members = audit_members.infer_membership(
        subject.trained, subject.prepared, seed, most=effort.pieces, device=subject.choice.device
    )
    listen.say("audit: words of one client from its update")
    leaks = _leaks(subject)
    canaries = _canaries(subject, effort, listen)
    one_shot = _one_shot(subject, len(records), listen)
    against = contradictions(subject.claim, findings, canaries, one_shot, leaks, replayed)
    found = {
        "run": str(run),
        "verdict": "NONE" if any(f.level == "broken" for f in findings) else subject.claim.verdict,
        "contradicted": bool(against),
        "contradictions": against,
        "claim": subject.claim.as_dict(),
        "findings": [f._asdict() for f in findings],
        "canaries": canaries,
        "replay": replayed,
        "one_shot": one_shot,
        "membership": members,
        "leaks": leaks,
        "quick": quick,
    }
    found = dict(strict(found))
    write_atomically(run / "audit.json", json.dumps(found, indent=1, allow_nan=False).encode())
    write_audit(run, found)
    return found


def _open(run: Path) -> Subject:
    trained = load_model(run)
    if isinstance(trained.spec, ModuleNetwork) or trained.method != trained.config.method:
        raise RunError(f"{run} has a module or method from outside the package; an audit trains again, and cannot")
    prepared = prepare(trained.config)
    method, choice = plan(trained.config, prepared)
    return Subject(trained, prepared, method, choice, read_claim(run, promised=trained.config.privacy.on))


def again(config: Config) -> Config:
    """Return the configuration to train with once more: nothing that only measures, one checkpoint at the end."""
    fewer = replace(config.train, baselines=False, central=False, checkpoint_every=max(1, config.train.rounds))
    privacy = replace(config.privacy, twin=False) if config.privacy.on else config.privacy
    return check(replace(config, train=fewer, privacy=privacy))


def _canaries(subject: Subject, effort: Effort, listen: Listener) -> dict[str, Any]:
    """Train with canaries in the text, and look for them in the model that comes of it."""
    seed, prepared = subject.config.train.seed, subject.prepared
    canaries = audit_canaries.draw_canaries(len(prepared.vocab), len(prepared.store), seed, each=effort.each)
    out = subject.home / f"canaries-{effort.each}"
    listen.say(f"audit: training again with {len(canaries)} canaries in the text ({out})")
    planted = replace(prepared, store=audit_canaries.plant(prepared.store, canaries, seed))
    result = train(again(subject.config), out, resume=True, listener=listen, prepared=planted)
    listen.say("audit: looking for the canaries")
    found = audit_canaries.look_for_canaries(
        load_model(out), canaries, seed, candidates=effort.candidates, controls=effort.controls,
        device=subject.choice.device,
    )  # fmt: skip
    before = read_result(subject.trained.folder) or {}
    called = audit_canaries.times_called(canaries, _turns(subject, planted, int(result["rounds"])))
    for row, times in zip(found["planted"], called, strict=True):
        row["calls"] = times
    perplexity = {"with_canaries": result["test"]["perplexity"], "run": (before.get("test") or {}).get("perplexity")}
    cells = audit_canaries.cells_of(found["planted"])
    return {**found, "cells": cells, "perplexity": perplexity}


def _turns(subject: Subject, prepared: Prepared, rounds: int) -> list[list[int]]:
    """Return whose uploads arrived in each round of a training that was not interrupted, by their numbers."""
    config, method, theta = subject.config, subject.method, _initial(subject)
    if method.cohort == "pooled":
        return [list(range(len(prepared.store)))] * rounds
    private = make_private(config, method, len(prepared.store), _called(subject))
    groups = None if private is None or private[1].gap is None else round(len(prepared.store) / private[1].called)
    names, seed, found = prepared.store.names, config.train.seed, []
    sizes, tokens = sizes_of(method, theta), client_tokens(prepared)
    for number in range(rounds):
        turn = None if groups is None else members_in_turn(names, number, groups, seed)
        made = plan_of_round(config, method, prepared, number, tokens, sizes.down, sizes.up, turn)
        found.append([fate.client for fate in made.fates if fate.lost is None])
    return found


def _leaks(subject: Subject) -> dict[str, Any] | None:
    """Look at what one client of the first round sends; central training sends nothing."""
    if subject.method.cohort == "pooled":
        return None
    theta = _initial(subject)
    problem = make_problem(subject.prepared, subject.config, subject.method, "cpu")
    clip = noise = None
    terms = subject.claim.terms
    if terms is not None:
        clip = subject.config.privacy.clip
        noise = terms.z * clip * terms.called / terms.cohort
    return audit_leaks.measure_leaks(
        problem, subject.method, theta, subject.config.train.seed, clip=clip, noise=noise
    )  # fmt: skip


def _initial(subject: Subject) -> dict[str, Any]:
    config, prepared = subject.config, subject.prepared
    start, _ = make_ready(config, prepared, find_source(config), Silent().say)
    return initial_params(config, prepared, start)


def _one_shot(subject: Subject, rounds: int, listen: Listener) -> dict[str, Any] | None:
    """Train with canary clients in the sum, where a noisy sum is claimed; None elsewhere."""
    claim, config = subject.claim, subject.config
    private = make_private(config, subject.method, len(subject.prepared.store), _called(subject))
    if private is None or claim.terms is None or claim.delta is None:
        return None
    theta = _initial(subject)
    layers = audit_one_shot.trained_layers(config, theta)
    count = audit_one_shot.how_many(sum(p.numel() for p in layers.values()), claim.terms.rate, rounds)
    listen.say(f"audit: training again with {count} canary clients in the sums")
    seeds = audit_one_shot.canary_seeds(config.train.seed, count)
    out = subject.home / "one-shot"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    after, calls = audit_one_shot.train_with_canaries(
        config, subject.prepared, private[0], private[1], subject.choice, theta, out, seeds[:count], rounds
    )
    return audit_one_shot.judge(layers, after, seeds, claim.delta, claim.epsilon, calls)


def _replayed(subject: Subject, listen: Listener) -> dict[str, Any] | None:
    """Do one of the run's own rounds again, where a noisy sum is claimed; None elsewhere."""
    config, folder = subject.config, subject.trained.folder
    private = make_private(config, subject.method, len(subject.prepared.store), _called(subject))
    if private is None or subject.claim.terms is None:
        return None
    listen.say("audit: doing one of the run's own rounds again")
    return replay.replay(
        folder, subject.home / "replay", config, subject.prepared, private[0], subject.choice, _initial(subject)
    )


def _called(subject: Subject) -> int:
    return members_of(subject.method, subject.prepared, subject.config)


def contradictions(
    claim: PrivacyClaim,
    findings: Sequence[Finding],
    canaries: dict[str, Any],
    one_shot: dict[str, Any] | None,
    leaks: dict[str, Any] | None,
    replayed: dict[str, Any] | None = None,
) -> list[str]:
    """Say what contradicts the claim; a run that claims nothing cannot be contradicted."""
    against = [f"{f.check}: {f.text}" for f in findings if f.level == "broken"]
    if claim.epsilon is None or claim.delta is None:
        return against
    if one_shot is not None and one_shot["contradicted"]:
        against.append(
            f"one-shot: the model tells {one_shot['canaries']} canary clients apart with ε ≥ {one_shot['certain']:.3g} "
            f"(99.9 % confidence), and the ledger claims {claim.epsilon:.3g}"
        )
    if replayed is not None and replayed.get("contradicted"):
        against.append(
            f"replay: round {replayed['round']}, done again by the ledger's noise, ends {replayed['difference']:.3g} "
            "times what that noise does away from where the run's own checkpoint is"
        )
    if claim.verdict not in ("GUARANTEE", "BOUND ONLY"):
        return against
    for row in canaries["planted"]:
        chance = chance_under(row["exposure"], row["users"], claim.epsilon, claim.delta)
        if chance * len(canaries["planted"]) < UNLIKELY:
            against.append(
                f"canary of {row['users']} clients × {row['copies']}: {row['exposure']:.1f} bits of exposure have a "
                f"chance of {chance:.2g} under (ε, δ) = ({claim.epsilon:.3g}, {claim.delta:g})"
            )
    noised = None if leaks is None or leaks["demonstration"] else leaks["views"]["noised"]
    if noised is not None and noised["better_than_chance"] and noised["recovered"] > RECOVERED:
        against.append(f"leak: {noised['recovered']:.0%} of one client's words can be read from a noised sum")
    return against


NO_ATTACKS = (
    "None was made: the text is on the clients' devices. Audit a simulation with the same configuration on public text "
    "(`keyfed train`, then `keyfed privacy audit`) to see what the attacks find there."
)


def audit_deployed(run: Path) -> dict[str, Any]:
    """Audit a run that was trained by real clients; write audit.md and audit.json, and return what audit.json has."""
    config, _ = read_run_toml(run)
    claim, result = read_claim(run, promised=config.privacy.on), read_result(run) or {}
    path = run / ENROLLED
    clients = len(json.loads(path.read_text("utf-8"))) if path.exists() else int(result.get("clients") or 0)
    method = run_method(config, secure=config.secure.on)
    findings = [*lint(config, method, read_metrics(run), claim, clients, result), *file_findings(run, claim)]
    against = [f"{f.check}: {f.text}" for f in findings if f.level == "broken"]
    found = {
        "run": str(run),
        "verdict": "NONE" if against else claim.verdict,
        "contradicted": bool(against),
        "contradictions": against,
        "claim": claim.as_dict(),
        "findings": [f._asdict() for f in findings],
        "attacked": False,
    }
    found = dict(strict(found))
    write_atomically(run / "audit.json", json.dumps(found, indent=1, allow_nan=False).encode())
    page = to_markdown([*claim_blocks(found), Heading("Attacks"), Text(NO_ATTACKS)])
    write_atomically(run / "audit.md", page.encode("utf-8"))
    return found
