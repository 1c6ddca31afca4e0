"""Both sides of a secure sum whose clients weigh themselves: what a client writes, and what the server reads.

The client weighs itself by public numbers (`federated.public.rules`) and writes upload, share and facts into one
vector; the server sees the sum of all vectors and nothing else. `vector_of` is where a client holds its scales within
[1/r, 1], so that it is never most of a sum. A simulation and a federation of real clients both call these functions
with the same integers, so their sums are the same bit for bit.

    calibration   histograms of everybody's scores, sizes and largest numbers, once, before the first upload
    upload        scale·upload, shares, counts and facts, every round
    evaluation    nats, tokens and hits on held-out text, without an upload

A client that joins a running mean sends everything it stands for. In a masked sum it sends the difference to θ, whose
numbers are small, and the server adds θ · Σ scale of those who joined.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, fields, replace
from typing import Literal

from torch import Tensor

from keyfed.engine.sums.codec import Read, SumLayout, Vector, must
from keyfed.engine.task import Finished, report_of
from keyfed.errors import DoesNotFit
from keyfed.federated.public.numbers import use_of_range
from keyfed.federated.public.rules import clamped, held, magnitude
from keyfed.federated.types import (
    Aggregate,
    ClientId,
    Facts,
    Method,
    Params,
    PrivateRule,
    Public,
    Refusal,
    Report,
    Share,
)
from keyfed.model.output import Score

Purpose = Literal["upload", "calibration", "evaluation"]


MOST_NATS = 2.0**31  # that are counted of one client
TRAINED = ("count", "tokens", "worked", "nats", "loss")
EVALUATED = ("evaluated/clients", *(f"evaluated/{f.name}" for f in fields(Score)))


def counts_of(done: Finished) -> dict[str, float]:
    """Return what is counted of a client's training, by the names of `TRAINED`.

    Of training that diverged `MOST_NATS` are counted at most: the client takes part, and the server sees what happened.
    """
    nats, loss = min(done.loss * done.tokens, MOST_NATS), min(done.loss, MOST_NATS)
    return {"count": 1.0, "tokens": done.tokens, "worked": done.worked, "nats": nats, "loss": loss}


def countable(evaluated: Score) -> Score:
    """Return counts that can be sent: of a model that exploded `MOST_NATS`, also where its nats are no number.

    Example:
      >>> countable(Score(7, float("nan"))).nats == countable(Score(7, float("inf"))).nats == MOST_NATS
      True
    """
    return evaluated if evaluated.nats < MOST_NATS else replace(evaluated, nats=MOST_NATS)


def vector_of(
    client: ClientId,
    done: Finished,
    theta: Params,
    method: Method,
    public: Public,
    members: int,
    ratio: float,
    evaluated: Score | None = None,
    *,
    silent: bool = False,
) -> Vector:
    """Write a client's vector of a round's sum.

    Args:
      theta: the model the client was given.
      public: the round's public numbers, calibrated.
      members: number of clients in the secure sum, whether or not all arrive.
      ratio: r of the sum's terms (`SumTerms.ratio`): no scale is below 1/r.
      evaluated: what the client counted on its held-out text; None without one.
      silent: clients may send zeros; for simulations of top-K only.

    Raises:
      SecureSumOverflow: a number is out of its public range; the client takes no part in this round. Only `reason` and
        `public_text` of it may leave the client.
    """
    share, facts = weighed(report_of(client, done), list(theta), method, public, ratio, silent=silent)
    changes = _changes(done, theta)
    for name, change in changes.items():
        largest = _largest(change) * share.scale[name]
        large, small = use_of_range(largest, public["ranges"][name])
        facts |= {f"large/{name}": [large], f"small/{name}": [small]}
    counts = counts_of(done) | _counted(evaluated)
    return _upload_layout(method, theta, public, members).encode(changes, share, facts, counts, done.joining)


def calibration_vector_of(client: ClientId, done: Finished, theta: Params, method: Method, members: int) -> Vector:
    """Write a client's vector of the calibration: histograms, from which the first public numbers are made."""
    facts = _rule(method).first(report_of(client, done), list(theta))
    facts |= {f"magnitude/{name}": magnitude(_largest(change)) for name, change in _changes(done, theta).items()}
    return _calibration_layout(method, theta, members).encode({}, Share({}, {}), facts, {})


def evaluation_vector_of(evaluated: Score, members: int) -> Vector:
    return _evaluation_layout(members).encode({}, Share({}, {}), {}, _counted(evaluated))


def aggregate_of(
    total: Vector,
    theta: Params,
    method: Method,
    public: Public,
    members: int,
    survivors: Sequence[ClientId],
    ratio: float,
    refused: Sequence[Refusal] = (),
    bound: float | None = None,
) -> Aggregate:
    """Read a round's sum; `facts` holds the sums of counts (one number each) and of the rule's facts.

    Args:
      ratio: r of the sum's terms: k clients have a weight of at least k/r.
      bound: largest norm that a client's change may have (`upload.bound`); None for any.

    Raises:
      SecureSumError: no honest clients can have this sum; nothing may be learnt from it.
    """
    layout = _upload_layout(method, theta, public, members)
    read = layout.decode(total, theta, len(survivors))
    _check(read, layout, method, public, len(survivors), ratio, bound)
    if any(read.joined.values()):  # these sent their difference to θ
        read = read._replace(total={n: t + theta[n] * read.joined[n] for n, t in read.total.items()})
    facts: Facts = {name: [number] for name, number in read.counts.items()} | read.facts
    return Aggregate(
        read.total, read.mass, read.weight, read.squares, tuple(survivors), tuple(refused),
        facts=facts | out_of_range(refused) | {"ratio": [float(ratio)]}, public=public,
    )  # fmt: skip


def weighed(
    report: Report, layers: Sequence[str], method: Method, public: Public, ratio: float, *, silent: bool = False
) -> tuple[Share, Facts]:
    """Weigh a client by its method's rule, no scale below 1/r; return its share and its facts.

    Raises:
      DoesNotFit: a scale is 0, or weights that are fixed beforehand differ by more than the ratio, where clamping
        would make another method of it.
    """
    rule = _rule(method)
    least = min(rule.least(layers, public).values(), default=1.0) if rule.least is not None else 1.0
    if least < 1 / ratio - 1e-9:
        raise DoesNotFit(
            f"fixed weights whose least is {least:.4g} of the largest, in a secure sum that allows 1/{ratio:g}; "
            "nothing was sent"
        )
    own, facts = rule.share(report, layers, public), rule.facts(report, layers, public)
    share = held(own, ratio, silent=silent)
    return share, facts | clamped(own, share, facts)


def _check(
    read: Read, layout: SumLayout, method: Method, public: Public, clients: int, ratio: float, bound: float | None
) -> None:
    r"""Fail closed unless k honest clients can have written this sum.

    .. math::  \mathrm{count} = k,\quad \sum_k \mathrm{scale}_k ≥ k/r,\quad
               ‖\mathrm{total}^l‖ ≤ \mathrm{bound} · \sum_k \mathrm{scale}_k^l

    The norm is bounded layer by layer: each layer's mean is convex, but weights may differ between layers. A rule that
    knows its least scale has that in the place of 1/r; under top-K, in simulations only, clients send zeros.
    """
    must(read.counts["count"] == clients, f"it counts other than {clients} clients")
    _check_evaluated(read.counts, clients)
    rule, layers, slack = _rule(method), list(read.total), clients * layout.unit
    known = dict.fromkeys(layers, 0.0 if method.uploading < 1 else 1 / ratio)
    least = known if rule.least is None else rule.least(layers, public)
    for name, total in read.total.items():
        weight, mass, joined = read.weight[name], read.mass[name], read.joined[name]
        must(weight >= clients * least[name] - slack / 2, f"the weight of layer {name} is below that of its clients")
        if method.spec is not None:  # our own rules divide by all they scale by, or by what joins
            must(mass in (weight, joined), f"the mass of layer {name} is not its weight")
        if bound is not None:
            divisor = mass if mass > 0 and joined == 0 else weight
            rounding = clients * layout.step(name) * math.sqrt(total.numel())
            norm = float(total.double().norm())
            must(norm <= bound * (divisor + slack) * (1 + 1e-5) + rounding, f"the mean of layer {name} is beyond bound")


def _check_evaluated(counts: Mapping[str, float], clients: int) -> None:
    """Fail closed unless so many clients can have counted this on their held-out text."""
    number, *rest = (counts[name] for name in EVALUATED)
    sums = Score(*rest)  # type: ignore[arg-type]
    must(number <= clients and number.is_integer(), f"other than 0 to {clients} clients evaluated")
    inside = sums.top1 <= sums.top3 <= sums.tokens and sums.words_top1 <= sums.words_top3 <= sums.words <= sums.tokens
    must(inside and sums.unknown <= sums.tokens, "more hits than tokens on held-out text")


def learn_from_calibration(
    method: Method,
    public: Public,
    total: Vector,
    theta: Params,
    members: int,
    ratio: float,
    survivors: int,
) -> Public:
    """Return the first public numbers from the calibration's sum of so many survivors.

    Args:
      ratio: r of the sum's terms, for which the public numbers are placed.

    Raises:
      SecureSumError: no honest clients can have this sum.
    """
    facts = _calibration_layout(method, theta, members).decode(total, {}, survivors).facts
    for name, histogram in facts.items():
        if method.spec is not None or name.startswith("magnitude/"):
            must(sum(histogram) == survivors, f"the histogram {name} is not of {survivors} clients")
    return _rule(method).start(public, facts | {"ratio": [float(ratio)]})


def evaluation_of(total: Vector, members: int, survivors: int) -> tuple[Score, int]:
    """Read a sum over held-out text of so many survivors: counts, and of how many clients.

    Raises:
      SecureSumError: no honest clients can have this sum.
    """
    read = _evaluation_layout(members).decode(total, {}, survivors)
    _check_evaluated(read.counts, survivors)
    return evaluated_in({name: [x] for name, x in read.counts.items()})


def evaluated_in(facts: Mapping[str, Sequence[float]]) -> tuple[Score, int]:
    """Return what clients counted on their held-out text in a round's facts, and how many did."""
    clients, tokens, nats, *hits = (facts[name][0] for name in EVALUATED)
    return Score(int(tokens), nats, *(int(h) for h in hits)), int(clients)


def nothing_summed(theta: Params, public: Public, refused: Sequence[Refusal] = ()) -> Aggregate:
    """Return the aggregate of a secure sum that failed closed: no client contributes."""
    zero = dict.fromkeys(theta, 0.0)
    empty = {name: p.new_zeros(p.shape) for name, p in theta.items()}
    return Aggregate(empty, zero, zero, zero, (), tuple(refused), facts=out_of_range(refused), public=public)


def out_of_range(refused: Sequence[Refusal]) -> Facts:
    """Count the clients with a layer out of range, for which ranges may grow; a share that does not fit is none."""
    return {"out of range": [float(sum(r.reason == "out of range" for r in refused))]}


def length(method: Method, theta: Params, purpose: Purpose = "upload") -> int:
    """Return how many 32-bit numbers a client's vector has; members and public numbers do not change it."""
    if purpose == "evaluation":
        return _evaluation_layout(1).length
    if purpose == "calibration":
        return _calibration_layout(method, theta, 1).length
    return _upload_layout(method, theta, _rule(method).init(), 1).length


def context_of(theta: Params, method: Method, public: Public, round: int, purpose: Purpose) -> bytes:
    """Return 32 bytes that say which model, method, step size, public numbers, round and purpose a sum is for.

    Masks are bound to them: if a server gives two clients different models, their masks do not cancel.
    """
    digest = hashlib.sha256()
    spec = method.spec
    agreed = {
        "purpose": purpose, "round": round, "method": method.name, "spec": None if spec is None else asdict(spec),
        "public": public, "layers": {name: [list(p.shape), str(p.dtype)] for name, p in theta.items()},
    }  # fmt: skip
    if method.halvings:  # else a server could still all clients but one, and read that one's upload off the sum
        agreed["halvings"] = method.halvings
    digest.update(json.dumps(agreed, sort_keys=True).encode())
    for p in theta.values():
        digest.update(p.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _rule(method: Method) -> PrivateRule:
    rule = method.mediator.private
    assert rule is not None, "a secure sum is of a hidden method, see `privately`"
    return rule


def _changes(done: Finished, theta: Params) -> Params:
    """Return the upload, as its difference to θ where it is everything a joining client stands for."""
    if not done.joining:
        return done.upload
    return {name: u - theta[name].to(u) for name, u in done.upload.items()}


def _largest(change: Tensor) -> float:
    return float(change.abs().amax()) if change.numel() else 0.0


def _counted(evaluated: Score | None) -> dict[str, float]:
    numbers = (0, *astuple(Score())) if evaluated is None else (1, *astuple(evaluated))
    return dict(zip(EVALUATED, numbers, strict=True))


def _example(layers: Sequence[str]) -> Report:
    """A report, to see how many facts a rule tells."""
    return Report("", 1, 0.0, 1, dict.fromkeys(layers, 0.0), 1.0)


def _upload_layout(method: Method, theta: Params, public: Public, members: int) -> SumLayout:
    layers, rule = list(theta), _rule(method)
    shown = rule.facts(_example(layers), layers, rule.init())
    facts = {name: len(numbers) for name, numbers in shown.items()}
    facts |= {f"{use}/{name}": 1 for name in layers for use in ("large", "small")} | {"clamped": 1}
    return SumLayout.of(theta, (*TRAINED, *EVALUATED), facts, members, public["ranges"])


def _calibration_layout(method: Method, theta: Params, members: int) -> SumLayout:
    layers = list(theta)
    facts = {name: len(numbers) for name, numbers in _rule(method).first(_example(layers), layers).items()}
    facts |= {f"magnitude/{name}": len(magnitude(0.0)) for name in layers}
    return SumLayout.of({}, (), facts, members, {})


def _evaluation_layout(members: int) -> SumLayout:
    return SumLayout.of({}, EVALUATED, {}, members, {})
