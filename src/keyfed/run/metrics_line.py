"""A round as a line of metrics.jsonl, and what can be read from many of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keyfed.federated.cohort import Plan
from keyfed.federated.round import RoundSummary
from keyfed.federated.soundness import Good, same
from keyfed.federated.types import ClientId, Method, State
from keyfed.run.traffic import Sizes, round_traffic

MOST_DRAWN = 100  # clients of a round whose attention is written down one by one


def record_of(
    method: Method, summary: RoundSummary, sizes: Sizes, plan: Plan | None, lost: Mapping[ClientId, str]
) -> dict[str, Any]:
    """Return the line of a round, without what was measured afterwards (validation, seconds).

    Args:
      plan: who was called and how long it takes by the model of time; None for central training.
      lost: clients called whose upload never arrived, with the reason.
    """
    effective = summary.effective_clients
    called = 1 if plan is None else len(plan.fates)
    record: dict[str, Any] = {
        "round": summary.round + 1,
        "loss": summary.loss,
        "tokens": summary.tokens,
        "worked": summary.worked,
        "cohort": called,
        "reported": summary.reported,
        "contributors": list(summary.contributors),
        "refused": {r.client: r.reason for r in summary.refused},
        "lost": dict(lost),
        "abandoned": summary.abandoned,
        "effective_clients": sum(effective.values()) / max(1, len(effective)),
        "traffic": round_traffic(sizes, called, summary),
    }
    if summary.hidden:
        record["clamped"] = summary.clamped
    if summary.shortened:
        record["shortened"] = list(summary.shortened)
    if plan is not None:
        record["modelled_seconds"] = plan.seconds
    if method.distance is not None:
        record["effective_by_layer"] = dict(effective)
        if summary.weights is not None and len(summary.weights) <= MOST_DRAWN:
            record["attention"] = {
                client: {layer: round(w, 6) for layer, w in weights.items()}
                for client, weights in summary.weights.items()
            }
    return record


def judge_attention(summary: RoundSummary) -> tuple[str, str] | None:
    """Say when attention does too much (one client is nearly everything) or nothing: what, and a line about it."""
    effective, clients = summary.effective_clients, len(summary.contributors)
    if clients < 3:
        return None
    layer = min(effective, key=lambda name: effective[name])
    if effective[layer] < 2:
        return "sharp", (
            f"round {summary.round + 1}: attention counts {effective[layer]:.2f} of {clients} clients in {layer}; "
            "a higher temperature spreads it"
        )
    if effective[layer] > clients * (1 - 1e-3):
        return "flat", (
            f"round {summary.round + 1}: attention is a uniform mean of {clients} clients to 1e-3; "
            "a lower temperature sharpens it"
        )
    return None


def judged_line(perplexity: float, good: Good, after: State) -> str:
    """Say that a model has exploded, and how the run goes on.

    Args:
      after: the state that it goes on from.
    """
    least = f"the least so far is {math.exp(good.nats):.4g}" if good.state.round else "and it is the first"
    return (
        f"ROLL-BACK after round {after.round}: validation perplexity {perplexity:.4g}, {least}; going on from the last "
        f"good model, of round {good.state.round}, with {step_of(after)}"
    )


def unsound_line(summary: RoundSummary, before: State, after: State, good: Good) -> str:
    """Say why a round's step was not taken, and how the run goes on where training diverged.

    Args:
      after: the state that the run goes on from; `good` is the last good model.
    """
    if not summary.diverged:
        return f"round {summary.round + 1} is abandoned: {summary.unsound}"
    stays = same(before.params, after.params)
    where = "from the model before" if stays else f"from the last good model, of round {good.state.round}"
    return f"DIVERGED in round {summary.round + 1}: {summary.unsound}; going on {where}, with {step_of(after)}"


def step_of(state: State) -> str:
    """Say what is left of the step sizes of a run that has diverged.

    Example:
      >>> step_of(State({}, None, {}, 3, halvings=3, server_halvings=1))
      "1/8 of the local step size and 1/2 of the server's"
      >>> step_of(State({}, None, {}, 3))
      'the same step sizes'
    """
    parts = []
    if not state.halvings and not state.server_halvings:
        return "the same step sizes"
    if state.halvings:
        parts.append(f"1/{2**state.halvings} of the local step size")
    if state.server_halvings:
        parts.append(f"1/{2**state.server_halvings} of the server's" + " step size" * (not parts))
    return " and ".join(parts)


def stopped_line(good: Good, state: State) -> str:
    """Say that a run ends early."""
    if not good.exhausted:
        return (
            f"{state.failed} rounds in a row diverged, and the last with {step_of(state)}: the run ends with the last "
            "good model. Look at the text and at the method's options"
        )
    return (
        f"{good.returns} roll-backs to the model of round {good.state.round}, and no better one since: the run ends "
        "with the last good model. A step size that is too large does this, or a client that lies"
    )


def soundness_counts(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count roll-backs, server steps that were not taken, and uploads that were shortened or left out by direction.

    `halved` says after which rounds step sizes were halved, and how often: [round, the clients', the server's].
    """
    return {
        "rolled_back": sum("rolled_back" in r for r in records),
        "unsound": sum("unsound" in r for r in records),
        "shortened": sum(len(r.get("shortened", ())) for r in records),
        "against": sum(why == "against the others" for r in records for why in (r.get("refused") or {}).values()),
        "halved": [[r["round"], *r["halved"]] for r in records if "halved" in r],
    }


def halvings_of(before: State, after: State) -> list[int] | None:
    """Return how often a round has halved the clients' step size and the server's; None where it halved none."""
    times = [after.halvings - before.halvings, after.server_halvings - before.server_halvings]
    return times if any(times) else None


def halved_notes(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say after which rounds step sizes were halved; nothing for a run in which they never were.

    Example:
      >>> halved_notes({"halved": [[1, 1, 0], [2, 2, 0], [9, 0, 1]]})
      [('local', '3 times, after rounds 1, 2; 1/8 is left'), ("server's", 'once, after round 9; 1/2 is left')]
    """
    notes = []
    for column, name in enumerate(("local", "server's"), 1):
        found = [(int(row[0]), int(row[column])) for row in result.get("halved") or () if row[column]]
        total = sum(times for _, times in found)
        if found:
            rounds = f"round{'s' * (len(found) > 1)} {', '.join(str(number) for number, _ in found)}"
            notes.append((name, f"{'once' if total == 1 else f'{total} times'}, after {rounds}; 1/{2**total} is left"))
    return notes


def diverged_warning(result: Mapping[str, Any]) -> str | None:
    """Say at the end of a run that it has diverged, and what to do; None for one that has not."""
    notes = halved_notes(result)
    if not notes:
        return None
    said = "; ".join(f"the {name} step size was halved {note}" for name, note in notes)
    return f"WARNING: training diverged: {said}. Begin the next run with a smaller one (method.lr, method.server_lr)"


def reached(records: Iterable[Mapping[str, Any]], target: tuple[str, float] | None) -> dict[str, Any] | None:
    """Return round, bytes, tokens and modelled seconds up to the first round whose validation meets the target.

    Example:
      >>> traffic = {"down": 10, "up": 5, "control": 1}
      >>> rows = [{"round": n, "valid": {"perplexity": 300.0 / n}, "traffic": traffic, "worked": 7} for n in (1, 2, 3)]
      >>> found = reached(rows, ("perplexity", 200.0))
      >>> found["round"], found["bytes"], found["tokens"]
      (2, 32, 14)
    """
    if target is None:
        return None
    key, most = target
    moved, tokens, seconds = 0, 0, 0.0
    for record in records:
        moved += sum(record["traffic"].values())
        tokens += record["worked"] or 0  # not told in a private run
        seconds += record.get("modelled_seconds") or 0.0
        value = (record.get("valid") or {}).get(key)
        if value is not None and value <= most:
            return {
                "target": {key: most}, "round": record["round"], "bytes": moved, "tokens": tokens,
                "modelled_seconds": seconds,
            }  # fmt: skip
    return None
