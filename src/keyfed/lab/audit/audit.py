"""`keyfed privacy audit RUN`: attack a finished run as an outsider would, compare the result with its claim, and write
audit.md, audit.json and plots.

Attacks that need other text train the same configuration again under RUN/audit/: with canaries in the text and, where
noise is claimed, with canary clients in the sum. RUN's own model is only read.

Of a run with real clients only the claim and the run's own files are read. Attacks would need the clients' text, and a
replayed round its noise: both are elsewhere, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from keyfed.config.load import Config, check
from keyfed.files import write_atomically
from keyfed.lab.audit import canaries
from keyfed.lab.audit.inference import RECOVERED, infer_membership, measure_leaks
from keyfed.lab.audit.lint import Finding, PrivacyClaim, file_findings, lint, read_claim
from keyfed.lab.audit.retrain import FEW_CALLS, Subject, one_shot, open_subject, replay
from keyfed.reports.document import (
    Block,
    Heading,
    Picture,
    Table,
    Text,
    facts_table,
    show,
    show_count,
    show_percent,
    to_markdown,
)
from keyfed.reports.figures import Draw, Theme, both_themes, single
from keyfed.run.console import Listener, Silent
from keyfed.run.folder import OWN_TEXT, load_model, read_metrics, read_result, read_run_toml, strict
from keyfed.run.loop import train
from keyfed.run.metrics_line import sizes_of
from keyfed.run.plan import plan_of_round
from keyfed.run.prepare import Prepared, client_tokens, make_problem
from keyfed.run.privacy import members_in_turn
from keyfed.run.remote.device import run_method
from keyfed.run.remote.private import ENROLLED

Found = Mapping[str, Any]
UNLIKELY = 0.001  # chance, over all canaries, below which an exposure contradicts a guarantee


class Effort(NamedTuple):
    """How much an audit does; retraining costs what the run cost, whatever the effort."""

    each: int  # canaries in a cell of the grid
    candidates: int  # random phrases each is ranked among
    controls: int  # phrases that were not planted
    pieces: int  # pieces of text, or clients, on either side of membership inference


QUICK, WHOLE = Effort(1, 2**11 - 1, 200, 300), Effort(3, 2**14 - 1, 400, 2000)


def audit_run(run: Path, *, quick: bool = True, listener: Listener | None = None) -> dict[str, Any]:
    """Audit a finished run; write audit.md, audit.json and plots into its folder, and return what audit.json has.

    Args:
      quick: one canary a cell and 2^11 candidates instead of three and 2^14.

    Returns:
      verdict: "GUARANTEE", "BOUND ONLY", "SIMULATED" or "NONE"; contradicted: whether a claim does not hold, and the
      reasons in `contradictions`; findings of the configuration; canaries, one_shot, membership, leaks. Of a run that
      real clients trained only the claim and the findings.

    Raises:
      RunError: the folder holds no finished run, or one of a user's own module.
    """
    listen, effort = listener or Silent(), QUICK if quick else WHOLE
    result, records = read_result(run) or {}, read_metrics(run)
    if result.get("data") == OWN_TEXT:
        config, _ = read_run_toml(run)
        claim, path = read_claim(run, promised=config.privacy.on), run / ENROLLED
        clients = len(json.loads(path.read_text("utf-8"))) if path.exists() else int(result.get("clients") or 0)
        method = run_method(config, secure=config.secure.on)
        findings = [*lint(config, method, records, claim, clients, result), *file_findings(run, claim)]
        return _written(run, claim, findings, contradictions(claim, findings), {"attacked": False})
    subject = open_subject(run)
    claim, clients = subject.claim, len(subject.prepared.store)
    findings = [*lint(subject.config, subject.method, records, claim, clients, result), *file_findings(run, claim)]
    replayed = replay(subject, listen)
    listen.say("audit: membership inference on the model as it is")
    members = infer_membership(
        subject.trained, subject.prepared, subject.config.train.seed, most=effort.pieces, device=subject.choice.device
    )
    listen.say("audit: words of one client from its update")
    leaks = _leaks_of(subject)
    planted = _canaries_of(subject, effort, listen)
    estimate = one_shot(subject, len(records), listen)
    against = contradictions(claim, findings, planted, estimate, leaks, replayed)
    attacks = {
        "canaries": planted, "replay": replayed, "one_shot": estimate, "membership": members, "leaks": leaks,
        "quick": quick,
    }  # fmt: skip
    return _written(run, claim, findings, against, attacks)


def _written(
    run: Path, claim: PrivacyClaim, findings: Sequence[Finding], against: list[str], attacks: Found
) -> dict[str, Any]:
    """Write audit.json, audit.md and the plots; return what audit.json has."""
    found = {
        "run": str(run),
        "verdict": "NONE" if any(f.level == "broken" for f in findings) else claim.verdict,
        "contradicted": bool(against),
        "contradictions": against,
        "claim": asdict(claim),
        "findings": [f._asdict() for f in findings],
        **attacks,
    }
    found = dict(strict(found))
    write_atomically(run / "audit.json", json.dumps(found, indent=1, allow_nan=False).encode())
    blocks = document(found)
    write_atomically(run / "audit.md", to_markdown(blocks).encode("utf-8"))
    for block in blocks:
        if isinstance(block, Picture):
            (run / "plots").mkdir(exist_ok=True)
            write_atomically(run / block.path, block.light)
    return found


def again(config: Config) -> Config:
    """Return the configuration to train with once more: nothing that only measures, one checkpoint at the end."""
    fewer = replace(config.train, baselines=False, central=False, checkpoint_every=max(1, config.train.rounds))
    privacy = replace(config.privacy, twin=False) if config.privacy.on else config.privacy
    return check(replace(config, train=fewer, privacy=privacy))


def _canaries_of(subject: Subject, effort: Effort, listen: Listener) -> dict[str, Any]:
    """Train with canaries in the text, and look for them in the model that comes of it."""
    seed, prepared = subject.config.train.seed, subject.prepared
    drawn = canaries.draw_canaries(len(prepared.vocab), len(prepared.store), seed, each=effort.each)
    out = subject.folder(f"canaries-{effort.each}")
    listen.say(f"audit: training again with {len(drawn)} canaries in the text ({out})")
    planted = replace(prepared, store=canaries.plant(prepared.store, drawn, seed))
    result = train(again(subject.config), out, resume=True, listener=listen, prepared=planted)
    listen.say("audit: looking for the canaries")
    found = canaries.look_for_canaries(
        load_model(out), drawn, seed, candidates=effort.candidates, controls=effort.controls,
        device=subject.choice.device,
    )  # fmt: skip
    before = read_result(subject.trained.folder) or {}
    calls = canaries.times_called(drawn, _contributors(subject, planted, int(result["rounds"])))
    for row, times in zip(found["planted"], calls, strict=True):
        row["calls"] = times
    perplexity = {"with_canaries": result["test"]["perplexity"], "run": (before.get("test") or {}).get("perplexity")}
    return {**found, "cells": canaries.cells_of(found["planted"]), "perplexity": perplexity}


def _contributors(subject: Subject, prepared: Prepared, rounds: int) -> list[list[int]]:
    """Return the numbers of the clients whose uploads arrived in each round of an uninterrupted training."""
    config, method, private = subject.config, subject.method, subject.private
    if method.cohort == "pooled":
        return [list(range(len(prepared.store)))] * rounds
    groups = None if private is None or private[1].gap is None else round(len(prepared.store) / private[1].called)
    names, seed, found = prepared.store.names, config.train.seed, []
    sizes, tokens = sizes_of(method, subject.theta), client_tokens(prepared)
    for number in range(rounds):
        scheduled = None if groups is None else members_in_turn(names, number, groups, seed)
        plan = plan_of_round(config, method, prepared, number, tokens, sizes.down, sizes.up, scheduled)
        found.append([fate.client for fate in plan.fates if fate.lost is None])
    return found


def _leaks_of(subject: Subject) -> dict[str, Any] | None:
    """Look at what one client of the first round sends; central training sends nothing."""
    config, terms = subject.config, subject.claim.terms
    if subject.method.cohort == "pooled":
        return None
    clip = None if terms is None else config.privacy.clip
    noise = None if terms is None else terms.z * config.privacy.clip * terms.called / terms.cohort
    problem = make_problem(subject.prepared, config, subject.method, "cpu")
    return measure_leaks(problem, subject.method, subject.theta, config.train.seed, clip=clip, noise=noise)


def contradictions(
    claim: PrivacyClaim,
    findings: Sequence[Finding],
    planted: Found | None = None,
    estimate: Found | None = None,
    leaks: Found | None = None,
    replayed: Found | None = None,
) -> list[str]:
    """Say what contradicts the claim; a run that claims nothing cannot be contradicted."""
    against = [f"{f.check}: {f.text}" for f in findings if f.level == "broken"]
    if claim.epsilon is None or claim.delta is None:
        return against
    if estimate is not None and estimate["contradicted"]:
        against.append(
            f"one-shot: the model tells {estimate['canaries']} canary clients apart with ε ≥ {estimate['certain']:.3g} "
            f"(99.9 % confidence), and the ledger claims {claim.epsilon:.3g}"
        )
    if replayed is not None and replayed.get("contradicted"):
        against.append(
            f"replay: round {replayed['round']}, done again by the ledger's noise, ends {replayed['difference']:.3g} "
            "times what that noise does away from where the run's own checkpoint is"
        )
    if claim.verdict not in ("GUARANTEE", "BOUND ONLY"):
        return against
    rows = [] if planted is None else planted["planted"]
    for row in rows:
        chance = canaries.chance_under(row["exposure"], row["users"], claim.epsilon, claim.delta)
        if chance * len(rows) < UNLIKELY:
            against.append(
                f"canary of {row['users']} clients × {row['copies']}: {row['exposure']:.1f} bits of exposure have a "
                f"chance of {chance:.2g} under (ε, δ) = ({claim.epsilon:.3g}, {claim.delta:g})"
            )
    noised = None if leaks is None or leaks["demonstration"] else leaks["views"]["noised"]
    if noised is not None and noised["better_than_chance"] and noised["recovered"] > RECOVERED:
        against.append(f"leak: {noised['recovered']:.0%} of one client's words can be read from a noised sum")
    return against


# The page

MEANING = {
    "GUARANTEE": "The ledger carries a guarantee for the clients of this run.",
    "BOUND ONLY": "The ledger carries a bound for the clients of this run and no meaningful guarantee: δ is large.",
    "SIMULATED": "The ledger's ε is that of an imagined fleet; it is no guarantee of this run.",
    "DERIVED": "The ledger's ε is that of this run's own clients, but its noise derives from a seed that is written "
    "down; it is no guarantee of this run.",
    "NONE": "Nothing is guaranteed.",
}
VIEWS = {
    "raw": "one client's upload",
    "sum": "sum of several clients' uploads",
    "masked": "one client's upload, masked",
    "noised": "sum of clipped uploads, noised",
}
NOTES = {
    "canaries": "Exposure is log₂ of how far ahead of random phrases the planted one is: 1 bit is what a phrase that "
    "nobody planted has in the median, one in twenty reaches 4.3 by chance, and the largest possible value means that "
    "it comes before every random phrase. Whether the beam finds it says that it can be read out without guessing.",
    "one_shot": "ε̂ is an estimate from one attack on the final model, not a bound: a claim below its interval is "
    "contradicted, a claim above it is not proven.",
    "membership": "AUC is the chance that a text (or client) that was trained on scores above one that was not; 0.5 is "
    "a coin. Intervals are 95 %, by bootstrap. Held-out text of natural clients is later text, which may help the "
    "attack; a small gap is no proof of safety.",
    "leaks": "Recovered: the share of the client's distinct words among as many best guesses. A secure sum shows "
    "single clients only masked; its result is the row of the sum.",
}
NO_ATTACKS = (
    "None was made: the text is on the clients' devices. Audit a simulation with the same configuration on public text "
    "(`keyfed train`, then `keyfed privacy audit`) to see what the attacks find there."
)
NO_POWER = "no power: canaries were hardly ever called, so the attack could not have contradicted anything"


def document(found: Found) -> list[Block]:
    """Return the audit as blocks; without matplotlib there are no plots, and the page says so."""
    findings = [[f["check"], f["level"], f["text"]] for f in found["findings"]]
    blocks: list[Block] = [
        Heading("Privacy audit", 1),
        Text(f"{found['verdict']}. {_meaning(found)}{_contradicted(found)}", "verdict"),
        *(Text(f"Contradicted: {reason}") for reason in found["contradictions"]),
        Heading("Claim"),
        facts_table(_claim(found["claim"])),
        Heading("Configuration"),
        Table([["check", "", "what was found"], *findings], numbers=False),
    ]
    if found.get("attacked") is False:
        return [*blocks, Heading("Attacks"), Text(NO_ATTACKS)]
    try:
        plots = draw_audit(found)
    except ImportError:
        plots = []
        blocks.append(Text("No plots: matplotlib is not installed (pip install matplotlib).", "note"))
    blocks += [Heading("Canaries"), *_canaries(found["canaries"]), *plots[:2]]
    blocks += [Heading("One round done again"), _replay(found["replay"])]
    blocks += [Heading("One-shot estimate of ε"), *_one_shot(found["one_shot"])]
    blocks += [Heading("Membership inference"), *_membership(found["membership"])]
    return [*blocks, Heading("Words from one update"), *_leaks(found["leaks"]), *plots[2:]]


def _meaning(found: Found) -> str:
    terms = found["claim"]["terms"]
    own = terms is not None and (terms["population"], terms["cohort"]) == (terms["clients"], terms["called"])
    return MEANING["DERIVED" if found["verdict"] == "SIMULATED" and own else found["verdict"]]


def _contradicted(found: Found) -> str:
    if found["contradicted"]:
        return " A claim is contradicted by what was measured."
    if found["verdict"] == "NONE":
        return ""
    if found.get("attacked") is False:
        return " The run's own files agree with that; no attack was made."
    weak = found["one_shot"] is not None and not found["one_shot"]["power"]
    says_little = " The one-shot attack had no power, so that says little." if weak else ""
    return f" Nothing that was measured contradicts the claim.{says_little}"


def _claim(claim: Found) -> list[tuple[str, str]]:
    terms = claim["terms"]
    if terms is None:
        return [("ledger", claim["problem"] or "none: nothing is claimed")]
    return [
        ("ε, δ", f"{show(claim['epsilon'])}, {claim['delta']:g}"),
        ("mechanism", f"{terms['mechanism']}, noise multiplier z = {terms['z']:.4g}"),
        ("unit", "one client with everything it holds; neighbours differ by one client"),
        ("population, cohort as claimed", f"{terms['population']:,}, {terms['cohort']:,.6g}"),
        ("population, cohort in fact", f"{terms['clients']:,}, {terms['called']:,.6g}"),
        ("releases", show_count(claim["releases"])),
    ]


def _canaries(found: Found) -> Iterator[Block]:
    rows = [["clients", "copies each", "canaries", "times called", "exposure, median", "largest", "found by the beam"]]
    for cell in found["cells"]:
        users, copies, count, in_beam = (show_count(cell[k]) for k in ("users", "copies", "canaries", "in_beam"))
        calls = f"{cell['calls']:.1f}" + (": no power" if cell["calls"] < FEW_CALLS else "")
        rows.append([users, copies, count, calls, f"{cell['median']:.2f}", f"{cell['largest']:.2f}", in_beam])
    yield Table(rows)
    controls, perplexity = found["controls"], found["perplexity"]
    behave = "as they must" if controls["behave"] else "NOT as they must: the exposures above mean nothing"
    spread = f"median {controls['median']:.2f}, mean {controls['mean']:.2f} bits, p = {controls['p']:.3f}"
    yield facts_table(
        [
            ("largest possible exposure", f"{found['most_bits']:.2f} bits ({found['candidates']:,} phrases)"),
            (f"{controls['number']} controls that nobody planted", f"{spread}: {behave}"),
            ("test perplexity with canaries", show(perplexity["with_canaries"])),
            ("test perplexity of the run", show(perplexity["run"])),
        ]
    )
    yield Text(NOTES["canaries"], "note")


def _replay(found: Found | None) -> Text:
    if found is None:
        return Text("No noise is claimed, so there is none to look for.")
    if "skipped" in found:
        return Text(f"Not done: {found['skipped']}.")
    ends, exactly = ("away from where", "") if found["contradicted"] else ("where", ", to rounding")
    return Text(
        f"Round {found['round']} with the ledger's noise ends {ends} the run's own checkpoint is{exactly}. "
        f"The difference is {show(found['difference'])} of what the noise does; more than 0.1 contradicts the ledger. "
        "Only this one round is looked at."
    )


def _one_shot(found: Found | None) -> Iterator[Block]:
    if found is None:
        yield Text("Not measured: the run claims no noise on its sums.")
        return
    yield facts_table(
        [
            ("ε̂ (95 % interval)", f"{show(found['epsilon'])} ({show(found['low'])} to {show(found['high'])})"),
            ("claimed ε", show(found["claimed"])),
            ("of vectors that nobody sent", f"{show(found['floor'])}"),
            ("canary clients, parameters", f"{found['canaries']:,}, {found['dimensions']:,}"),
            ("times a canary was called, in the mean", f"{found['calls']:.2f}"),
            ("verdict", _verdict(found)),
        ]
    )
    yield Text(NOTES["one_shot"], "note")


def _verdict(found: Found) -> str:
    if found["contradicted"]:
        return "contradicts the claim"
    return "consistent with the claim" if found["power"] else NO_POWER


def _membership(found: Found) -> Iterator[Block]:
    if not found:
        yield Text("Not measured: there is too little held-out text, or there are too few held-out clients.")
        return
    rows = [["attack on", "members", "others", "AUC", "95 %", "TPR at 1 % FPR", "95 %"]]
    for what, got in found.items():
        of_auc = "{:.3f} to {:.3f}".format(*got["auc_interval"])
        of_tpr = "{:.1f} to {:.1f}".format(*(100 * x for x in got["tpr_interval"]))
        sides = [show_count(got["members"]), show_count(got["others"])]
        rows.append([what, *sides, f"{got['auc']:.3f}", of_auc, show_percent(got["tpr"]), of_tpr])
    yield Table(rows)
    yield Text(NOTES["membership"], "note")


def _leaks(found: Found | None) -> Iterator[Block]:
    if found is None:
        yield Text("Not measured: nothing is transmitted.")
        return
    columns = ("recovered", "chance", "precision", "recall", "frequent")
    rows = [["what is seen", *columns[:-1], "100 most frequent"]]
    rows += [[VIEWS[name], *(show_percent(got[k]) for k in columns)] for name, got in found["views"].items()]
    yield Table(rows)
    noise = f"clip {show(found['clip'])}, noise of standard deviation {show(found['noise'])} on the sum"
    whose = " (a demonstration: the run itself neither clips nor adds noise)" if found["demonstration"] else ""
    yield Text(
        f"One client with {found['client_words']:,} distinct words of {found['vocabulary']:,}, in its first round. "
        f"Attack: {found['attack']}. Sums of {found['clients_in_sum']} clients. Noised: {noise}{whose}."
    )
    yield Text(NOTES["leaks"], "note")


def draw_audit(found: Found) -> list[Picture]:
    """Draw exposure by cell, the controls, and the words recovered.

    Raises:
      ImportError: matplotlib is not installed.
    """
    drawings = [_draw_canaries(found["canaries"]), _draw_controls(found["canaries"])]
    if found["leaks"] is not None:
        drawings.append(_draw_leaks(found["leaks"]))
    return [both_themes(name, alt, single(draw)) for name, alt, draw in drawings]


def _draw_canaries(found: Found) -> tuple[str, str, Draw]:
    cells = [(cell["users"], cell["copies"]) for cell in found["cells"]]
    names = [f"{users} × {copies}" for users, copies in cells]

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Exposure of planted phrases")
        at = [cells.index((row["users"], row["copies"])) for row in found["planted"]]
        bits = [row["exposure"] for row in found["planted"]]
        axes.plot(at, bits, "o", color=theme.colours[0], label="a canary")
        axes.axhline(found["chance_bits"], color=theme.colours[1], ls="--", label="one in twenty by chance")
        axes.axhline(found["most_bits"], color=theme.soft, ls=":", label="likeliest of all")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set_xlabel("clients × copies")
        axes.set_ylabel("bits")
        axes.set_ylim(bottom=0)

    medians = (f"{name}: {cell['median']:.1f}" for name, cell in zip(names, found["cells"], strict=True))
    return "audit-canaries", f"Median exposure in bits by clients × copies: {', '.join(medians)}", draw


def _draw_controls(found: Found) -> tuple[str, str, Draw]:
    controls = found["controls"]
    bits = sorted(controls["exposures"])

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Phrases that nobody planted")
        share = [(len(bits) - n) / len(bits) for n in range(len(bits))]
        axes.step(bits, share, color=theme.colours[0], label="measured", where="pre")
        grid = [n / 10 for n in range(round(10 * max(bits)) + 1)]
        axes.plot(grid, [2.0**-x for x in grid], color=theme.colours[1], ls="--", label="by chance, 2 to the minus x")
        axes.set_xlabel("exposure x, bits")
        axes.set_ylabel("share with at least x")

    alt = f"Exposure of {controls['number']} controls: median {controls['median']:.2f} bits, p = {controls['p']:.3f}"
    return "audit-controls", alt, draw


def _draw_leaks(found: Found) -> tuple[str, str, Draw]:
    names, shares = list(found["views"]), [100 * got["recovered"] for got in found["views"].values()]
    chance = 100 * next(iter(found["views"].values()))["chance"]

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Words of one client recovered")
        bars = axes.bar(range(len(names)), shares, 0.6, color=theme.colours[0], label="recovered")
        axes.bar_label(bars, [f"{share:.0f} %" for share in shares], padding=2, fontsize=9)
        axes.axhline(chance, color=theme.colours[1], ls="--", label=f"by chance, {chance:.0f} %")
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("per cent of its words")
        axes.set_ylim(0, 112)

    recovered = ", ".join(f"{name} {share:.0f} %" for name, share in zip(names, shares, strict=True))
    return "audit-leaks", f"Words of one client recovered: {recovered}; by chance {chance:.0f} %", draw
