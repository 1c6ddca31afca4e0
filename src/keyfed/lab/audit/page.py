"""audit.md and its plots, from what audit.json has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keyfed.files import write_atomically
from keyfed.lab.audit.one_shot import FEW_CALLS
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

Found = Mapping[str, Any]
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


def write_audit(run: Path, found: Found) -> list[Path]:
    """Write audit.md and plots/audit-*.png; without matplotlib there are no plots, and the page says so."""
    try:
        plots: list[Picture] | None = draw_audit(found)
    except ImportError:
        plots = None
    written = [run / "audit.md"]
    write_atomically(written[0], to_markdown(document(found, plots)).encode("utf-8"))
    for plot in plots or ():
        (run / "plots").mkdir(exist_ok=True)
        written.append(run / "plots" / f"{plot.name}.png")
        write_atomically(written[-1], plot.light)
    return written


def document(found: Found, plots: Sequence[Picture] | None = ()) -> list[Block]:
    """Return the audit as blocks; `plots` is None where matplotlib is missing."""
    drawn = {p.name: p for p in plots or ()}
    blocks = claim_blocks(found)
    if plots is None:
        blocks.append(Text("No plots: matplotlib is not installed (pip install matplotlib).", "note"))
    blocks += [Heading("Canaries"), *_canaries(found["canaries"])]
    blocks += [drawn[name] for name in ("audit-canaries", "audit-controls") if name in drawn]
    blocks += [Heading("One round done again"), *_replay(found["replay"])]
    blocks += [Heading("One-shot estimate of ε"), *_one_shot(found["one_shot"])]
    blocks += [Heading("Membership inference"), *_membership(found["membership"])]
    blocks += [Heading("Words from one update"), *_leaks(found["leaks"])]
    return [*blocks, *([drawn["audit-leaks"]] if "audit-leaks" in drawn else [])]


def claim_blocks(found: Found) -> list[Block]:
    """Return the verdict, what contradicts it, the claim, and what was found without an attack."""
    return [
        Heading("Privacy audit", 1),
        Text(f"{found['verdict']}. {_meaning(found)}{_contradicted(found)}", "verdict"),
        *(Text(f"Contradicted: {reason}") for reason in found["contradictions"]),
        Heading("Claim"),
        facts_table(_claim(found["claim"])),
        Heading("Configuration"),
        Table([["check", "", "what was found"], *([f["check"], f["level"], f["text"]] for f in found["findings"])],
              numbers=False),
    ]  # fmt: skip


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
    return " Nothing that was measured contradicts the claim." + (
        " The one-shot attack had no power, so that says little." if weak else ""
    )


def _claim(claim: Found) -> list[tuple[str, str]]:
    if claim["terms"] is None:
        return [("ledger", claim["problem"] or "none: nothing is claimed")]
    terms = claim["terms"]
    return [
        ("ε, δ", f"{show(claim['epsilon'])}, {claim['delta']:g}"),
        ("mechanism", f"{terms['mechanism']}, noise multiplier z = {terms['z']:.4g}"),
        ("unit", "one client with everything it holds; neighbours differ by one client"),
        ("population, cohort as claimed", f"{terms['population']:,}, {terms['cohort']:,.6g}"),
        ("population, cohort in fact", f"{terms['clients']:,}, {terms['called']:,.6g}"),
        ("releases", show_count(claim["releases"])),
    ]


def _replay(found: Found | None) -> Iterator[Block]:
    if found is None:
        yield Text("No noise is claimed, so there is none to look for.")
    elif "skipped" in found:
        yield Text(f"Not done: {found['skipped']}.")
    else:
        ends = "away from" if found["contradicted"] else "where"
        yield Text(
            f"Round {found['round']} with the ledger's noise ends {ends} the run's own checkpoint"
            + (" is. " if found["contradicted"] else " is, to rounding. ")
            + f"The difference is {show(found['difference'])} of what the noise does; more than 0.1 contradicts the "
            "ledger. Only this one round is looked at."
        )


def _canaries(found: Found) -> Iterator[Block]:
    rows = [["clients", "copies each", "canaries", "times called", "exposure, median", "largest", "found by the beam"]]
    for cell in found["cells"]:
        rows.append(
            [
                show_count(cell["users"]), show_count(cell["copies"]), show_count(cell["canaries"]), _calls(cell),
                f"{cell['median']:.2f}", f"{cell['largest']:.2f}", show_count(cell["in_beam"]),
            ]
        )  # fmt: skip
    controls, perplexity = found["controls"], found["perplexity"]
    yield Table(rows)
    behave = "as they must" if controls["behave"] else "NOT as they must: the exposures above mean nothing"
    yield facts_table(
        [
            ("largest possible exposure", f"{found['most_bits']:.2f} bits ({found['candidates']:,} phrases)"),
            (
                f"{controls['number']} controls that nobody planted",
                f"median {controls['median']:.2f}, mean {controls['mean']:.2f} bits, p = {controls['p']:.3f}: {behave}",
            ),
            ("test perplexity with canaries", show(perplexity["with_canaries"])),
            ("test perplexity of the run", show(perplexity["run"])),
        ]
    )
    yield Text(NOTES["canaries"], "note")


def _calls(cell: Found) -> str:
    """How often those who say a canary took part, in the mean; hardly ever means that nothing could be found."""
    return f"{cell['calls']:.1f}" + (": no power" if cell["calls"] < FEW_CALLS else "")


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
    if not found["power"]:
        return "no power: canaries were hardly ever called, so the attack could not have contradicted anything"
    return "consistent with the claim"


def _membership(found: Found) -> Iterator[Block]:
    if not found:
        yield Text("Not measured: there is too little held-out text, or there are too few held-out clients.")
        return
    rows = [["attack on", "members", "others", "AUC", "95 %", "TPR at 1 % FPR", "95 %"]]
    for what, got in found.items():
        rows.append(
            [
                what, show_count(got["members"]), show_count(got["others"]), f"{got['auc']:.3f}",
                _interval(got["auc_interval"], "{:.3f}"), show_percent(got["tpr"]),
                _interval([100 * x for x in got["tpr_interval"]], "{:.1f}"),
            ]
        )  # fmt: skip
    yield Table(rows)
    yield Text(NOTES["membership"], "note")


def _interval(pair: Sequence[float], form: str) -> str:
    return f"{form.format(pair[0])} to {form.format(pair[1])}"


def _leaks(found: Found | None) -> Iterator[Block]:
    if found is None:
        yield Text("Not measured: nothing is transmitted.")
        return
    rows = [["what is seen", "recovered", "chance", "precision", "recall", "100 most frequent"]]
    for name, got in found["views"].items():
        rows.append([VIEWS[name], *(show_percent(got[k]) for k in ("recovered", "chance", "precision", "recall"))])
        rows[-1].append(show_percent(got["frequent"]))
    yield Table(rows)
    noise = f"clip {show(found['clip'])}, noise of standard deviation {show(found['noise'])} on the sum"
    whose = " (a demonstration: the run itself neither clips nor adds noise)" if found["demonstration"] else ""
    yield Text(
        f"One client with {found['client_words']:,} distinct words of {found['vocabulary']:,}, in its first round. "
        f"Attack: {found['attack']}. Sums of {found['clients_in_sum']} clients. Noised: {noise}{whose}."
    )
    yield Text(NOTES["leaks"], "note")


# Plots


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
    cells = found["cells"]
    names = [f"{cell['users']} × {cell['copies']}" for cell in cells]

    def draw(axes: Any, theme: Theme) -> None:
        axes.set_title("Exposure of planted phrases")
        for n, cell in enumerate(cells):
            own = [r for r in found["planted"] if (r["users"], r["copies"]) == (cell["users"], cell["copies"])]
            bits = [r["exposure"] for r in own]
            axes.plot([n] * len(bits), bits, "o", color=theme.colours[0], label="a canary" if n == 0 else None)
        axes.axhline(found["chance_bits"], color=theme.colours[1], ls="--", label="one in twenty by chance")
        axes.axhline(found["most_bits"], color=theme.soft, ls=":", label="likeliest of all")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set_xlabel("clients × copies")
        axes.set_ylabel("bits")
        axes.set_ylim(bottom=0)

    told = ", ".join(f"{name}: {cell['median']:.1f}" for name, cell in zip(names, cells, strict=True))
    return "audit-canaries", f"Median exposure in bits by clients × copies: {told}", draw


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

    told = ", ".join(f"{name} {share:.0f} %" for name, share in zip(names, shares, strict=True))
    return "audit-leaks", f"Words of one client recovered: {told}; by chance {chance:.0f} %", draw
