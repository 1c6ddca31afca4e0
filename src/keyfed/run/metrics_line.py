"""A round as a line of metrics.jsonl: what it learnt and the bytes it moves; and what can be read from many of them.

`--curves` writes the learning curves of local training to RUN/curves.jsonl, one line a round. A line has, over the
clients whose report was taken:

- `batch`: lists by local step, epoch after epoch: the `epoch` it is of (from 1), `loss` (Σ nats / Σ tokens) and
  `accuracy` (Σ right first guesses / Σ tokens) over the `clients` that took this step, and their `tokens`. A client
  with fewer steps an epoch drops out of the later ones.
- `epoch`: the same by local epoch, over all its steps.
- `by_client`: each client's own loss, accuracy and tokens by epoch, in rounds of at most 100 clients.

Central training is one client; its epoch is what a round reads. The figures are those of the forward pass that a
step's gradient is taken from: before the step, with dropout. Counting right guesses costs one more product of the
output layer a step, on a GPU inside the captured step; no weight changes by a bit. Each step's figures stay on the
device until the clients are done.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Generator

from keyfed.config.load import TrainConfig, parse_target
from keyfed.engine.task import CohortCurves
from keyfed.errors import RunError
from keyfed.federated.cohort import Plan
from keyfed.federated.round import RoundSummary
from keyfed.federated.soundness import Good, same
from keyfed.federated.types import ClientId, Method, Params, State
from keyfed.run.folder import append_line

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
    if summary.adaptive is not None:
        record["adaptive"] = summary.adaptive
    if summary.report_free:
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


def attention_of(records: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return what a whole run's attention came to, over rounds that were not abandoned; nothing without attention.

    `adaptive_rounds` is the share of rounds that a switch (FedMed's) left to attention; the others were FedAvg's.
    `effective_clients` is the mean over rounds and layers, and `effective/LAYER` that of a layer over rounds.

    Example:
      >>> lines = [{"adaptive": a, "effective_by_layer": {"bias": e}} for a, e in ((True, 2.0), (False, 3.0))]
      >>> attention_of(lines)
      {'adaptive_rounds': 0.5, 'effective_clients': 2.5, 'effective/bias': 2.5}
    """
    taken = [record for record in records if not record.get("abandoned")]
    branches = [r["adaptive"] is True for r in taken if r.get("adaptive") is not None]
    out = {"adaptive_rounds": sum(branches) / len(branches)} if branches else {}
    layers: dict[str, list[float]] = {}
    for record in taken:
        effective = record.get("effective_by_layer")
        for layer, number in effective.items() if isinstance(effective, Mapping) else ():
            layers.setdefault(layer, []).append(number)
    means = {layer: sum(numbers) / len(numbers) for layer, numbers in layers.items()}
    if means:
        out["effective_clients"] = sum(means.values()) / len(means)
    return out | {f"effective/{layer}": mean for layer, mean in means.items()}


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


def early_end(records: Sequence[Mapping[str, Any]], train: TrainConfig, best: int | None) -> str | None:
    """Say why validation ends a run before its rounds are over: `train.until`, `train.patience`; None: it does not.

    Args:
      records: lines of metrics.jsonl, the last round's at least.
      best: the round of the model that is chosen so far.
    """
    met = reached(records, parse_target(train.until, "train.until"))
    if met is not None:
        return f"the target {train.until} is reached after round {met['round']}"
    validated = [record["round"] for record in records if record.get("valid")]
    if train.patience is None or best is None or not validated or validated[-1] - best < train.patience:
        return None
    return (
        f"no validation was better than that of round {best} (train.patience={train.patience}): the rounds "
        f"end after {validated[-1]}"
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what one client receives (down), uploads (up) and reports (control) in a round."""

    down: int
    up: int
    control: int


def model_bytes(params: Params) -> int:
    """Size of a model (or an upload) as it is sent: safetensors, header included."""
    return len(save(params))


def upload_bytes(method: Method, params: Params) -> int:
    """Size of an upload as the method sends it; compressed, it depends on shapes alone."""
    if method.codec is None:
        return model_bytes(params)
    packed = method.codec.pack({name: p.detach().clone() for name, p in params.items()}, Generator())
    return model_bytes({name: t.contiguous() for name, t in packed.items()})


def report_bytes(layers: Sequence[str] = (), *, joining: bool = False) -> int:
    """Size of a client's report: the scalars of `Report` as JSON at full length, a distance for each layer.

    Args:
      joining: the clients keep state, and say whether they join and with which weight.
    """
    report: dict[str, object] = {"tokens": 10**9, "loss": -1 / 3, "worked": 10**9}
    if layers:
        report["distance"] = dict.fromkeys(layers, 1 / 3)
    if joining:
        report |= {"weight": 10**9, "joining": False}
    return len(json.dumps(report).encode())


def sizes_of(method: Method, params: Params, frozen: Collection[str] = ()) -> Sizes:
    """Return the bytes one client moves in a round of a method.

    Args:
      frozen: layers that are not trained: they go down with the model, and neither they nor their distance come up.
    """
    sent = {name: p for name, p in params.items() if name not in frozen}
    layers = list(sent) if method.distance is not None else ()
    control = report_bytes(layers, joining=method.solver.start is not None)
    return Sizes(model_bytes(params), upload_bytes(method, sent), control)


def round_traffic(sizes: Sizes, called: int, summary: RoundSummary) -> dict[str, int]:
    """Return the bytes of a round.

    Down: the model to everyone called. Up: the uploads that arrived, refused ones too; who was not asked to upload
    (top-K) or vanished sent none. Control: every report, whether or not an upload followed.
    """
    arrived = len(summary.contributors) + len(summary.refused)
    return {"down": sizes.down * called, "up": sizes.up * arrived, "control": sizes.control * summary.reported}


CURVES = "curves.jsonl"
CURVES_LINE = "curves: loss and accuracy of every local batch go to curves.jsonl, for one more output product a step"


def append_curves(folder: Path, round: int, curves: CohortCurves | None) -> None:
    """Write a round's line; a round in which nobody trained has an empty one."""
    append_line(folder / CURVES, {"round": round, **(curves or CohortCurves()).line()})


def cut_curves(folder: Path, rounds: int) -> None:
    """Keep the lines of the first rounds; those written after the checkpoint will be written again."""
    path = folder / CURVES
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if len(lines) < rounds:  # each was on the disk before its checkpoint was
        raise RunError(
            f"{path} has {len(lines)} lines, and the checkpoint is of round {rounds}; start again with another --out"
        )
    if path.exists():
        os.truncate(path, sum(map(len, lines[:rounds])))


def read_curves(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of curves.jsonl; none where the run was not asked for them."""
    path = folder / CURVES
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    except ValueError as e:
        raise RunError(f"{path} is damaged: {e}") from None


STRETCHES = 40  # points of a curve of training that are kept
CurveLine = Mapping[str, Mapping[str, Sequence[float | None]]]  # what is read of a line of curves.jsonl


def training_curves(lines: Sequence[CurveLine], passes: int = 1) -> dict[str, list[list[float]]]:
    """Return {"batch": points, "epoch": points} of a run, a point being [number, nats per token, accuracy].

    Batches and epochs are counted on from round to round. A point is the mean per token over a stretch of them and
    stands at the last one; stretches are equally long, but the first point is the very first batch or epoch.

    Args:
      lines: those of curves.jsonl.
      passes: equal parts that a round's batches are cut into, for central training whose round reads as much as that
        many epochs of a cohort; its epochs are these parts.
    """
    batches: list[tuple[float, float, float]] = []
    epochs: list[tuple[float, float, float]] = []
    for line in lines:
        rows = _rows(line["batch"])
        batches += rows
        if passes > 1:
            cuts = [round(k * len(rows) / passes) for k in range(passes + 1)]
            epochs += [_mean(rows[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
        else:
            epochs += _rows(line["epoch"])
    return {"batch": stretches(batches), "epoch": stretches(epochs)}


def _rows(lists: Mapping[str, Sequence[float | None]]) -> list[tuple[float, float, float]]:
    """(loss, accuracy, tokens) of every batch or epoch whose loss is a number."""
    rows = zip(lists["loss"], lists["accuracy"], lists["tokens"], strict=True)
    return [(loss, right or 0.0, tokens or 0.0) for loss, right, tokens in rows if loss is not None]


def stretches(rows: Sequence[Sequence[float]], most: int = STRETCHES) -> list[list[float]]:
    """Return at most so many points of (loss, accuracy, tokens) rows, as [number of the last row, loss, accuracy].

    Example:
      >>> stretches([(4.0, 0.1, 10), (3.0, 0.2, 10), (1.0, 0.4, 10), (2.0, 0.3, 30), (2.0, 0.3, 10)], 3)
      [[1, 4.0, 0.1], [3, 2.0, 0.3], [5, 2.0, 0.3]]
    """
    if not rows:
        return []
    count = min(most, len(rows))
    cuts = [0, *(1 + round(k * (len(rows) - 1) / max(1, count - 1)) for k in range(count))]
    means = [(end, _mean(rows[start:end])) for start, end in itertools.pairwise(cuts)]
    return [[end, float(f"{loss:.5g}"), float(f"{accuracy:.5g}")] for end, (loss, accuracy, _) in means]


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The mean of (loss, accuracy, tokens) rows per token."""
    tokens = sum(row[2] for row in rows)
    return sum(row[0] * row[2] for row in rows) / tokens, sum(row[1] * row[2] for row in rows) / tokens, tokens
