"""What a report says of privacy: the verdict, what it means, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyfed.reports.document import Block, Heading, Text, facts_table, finite, show


def privacy_blocks(account: Mapping[str, Any]) -> list[Block]:
    """Return the section of a report; `account` is the result's, or that of a run without a ledger."""
    if account["pld"] is None:
        return [Heading("Privacy"), *(Text(f"NONE. {line}") for line in account["statement"])]
    spent = f"{account['pld']:.4g} by PLD, {account['rdp']:.4g} by RDP"
    budget, counted = account.get("budget"), account.get("count_noise")
    facts = [
        ("verdict", str(account["verdict"])),
        ("epsilon", spent + ("" if budget is None else f", of a budget of {budget:g}")),
        ("delta", f"{account['delta']:.3g}"),
        ("noise multiplier z", f"{account['noise']:.4g}"),
        *([] if counted is None else [("noise of counts, in clients, within z", f"{counted:.4g}")]),
        ("noise of a mean update beside the clip, z·√d/m", show(account.get("noise_to_clip"))),
        ("releases in the ledger", f"{account['releases']:,} ({account['retried']:,} of rounds done again)"),
        ("ledger, last hash", str(account["head"])[:16]),
    ]
    cost = cost_line(account)
    if cost:
        facts.append(("cost", cost))
    return [Heading("Privacy"), facts_table(facts), *(Text(line) for line in account["statement"])]


def cost_line(account: Mapping[str, Any]) -> str | None:
    """Say what privacy cost in perplexity, where a run without clip and noise was trained beside it."""
    twin, own = account.get("twin"), finite(account.get("perplexity"))
    if not twin or own is None:
        return None
    plain = finite((twin.get("test") or {}).get("perplexity"))
    if plain is None:
        return None
    return f"test perplexity {show(own)}, without clip and noise {show(plain)}: {own / plain:.2f} times as high"


def privacy_lines(account: Mapping[str, Any]) -> list[str]:
    """Return what the terminal shows after a private run."""
    if not account or account.get("pld") is None:
        return []
    cost = cost_line(account)
    return [
        f"{account['verdict']}: epsilon {account['pld']:.4g} (PLD), {account['rdp']:.4g} (RDP) at delta "
        f"{account['delta']:.2g}",
        str(account["statement"][0]),
        *([f"privacy cost: {cost}"] if cost else []),
    ]
