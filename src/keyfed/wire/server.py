"""The server's side of a real federation: `Federation` over a transport, plain or by secure sums.

A plain round is one message (model down; report and upload up), two where the mediator must see all reports first. A
secure round is three: keys and model → shares; shares → masked vectors; survivors → shares that open the sum. The first
secure round calibrates before: three more. Clients post their next one-time keys with each answer, and hear with the
next model whether their last upload counted. The answers to a message are waited for until its deadline, and what has
arrived by then is fetched within five seconds more (`wire.flower.server`): a client that is silent, sends a part of its
answer, or sends it piece by piece costs itself the round and nobody else anything.

A client that spoils secure sums is looked for by splitting the cohort (`private.secagg.accusation`): the groups of a
round form a sum each, one after the other, and what opens is added up. A group that was spoilt costs the round its
clients only.

A private round moves clipped parts and nothing else, in one message or in the three of a secure sum; it is released
whoever came (`sums`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from keyfed.engine.problem import measure
from keyfed.engine.simulate import capped, limited, refusal
from keyfed.engine.sums.noised import NoisedSum
from keyfed.engine.sums.plain import sum_for
from keyfed.engine.sums.secure_round import (
    Purpose,
    aggregate_of,
    evaluated_in,
    evaluation_of,
    learn_from_calibration,
    nothing_summed,
    out_of_range,
)
from keyfed.engine.task import Finished, keeps_state, report_of
from keyfed.errors import Lied, SecureSumError
from keyfed.federated.cohort import Fate, derive_seed
from keyfed.federated.soundness import against_others
from keyfed.federated.types import (
    Aggregate,
    Caps,
    ClientId,
    LayerNumbers,
    Method,
    Params,
    Public,
    Refusal,
    Report,
    Share,
)
from keyfed.federated.upload import noised
from keyfed.model.output import Score
from keyfed.private.dp.noise import Noising
from keyfed.wire.messages import Rejected, finished_of, most_bytes, pack, read_tensors, report_head, shapes_of
from keyfed.wire.promise import Asked
from keyfed.wire.sums import Summed, masked_sum, plain_sum, secure_sum
from keyfed.wire.transport import Calls, with_model

_T = TypeVar("_T")


@dataclass(slots=True)
class _Round:
    params: Params
    cohort: tuple[ClientId, ...]
    method: Method
    number: int
    public: Public | None = None
    uploads: dict[ClientId, Params] = field(default_factory=dict)
    reports: dict[ClientId, Report] = field(default_factory=dict)
    norms: dict[ClientId, float] = field(default_factory=dict)
    shortened: list[ClientId] = field(default_factory=list)


class RemoteFederation:
    """A `Federation` of real clients.

    Attributes:
      asks_evaluation: whether the clients of the next round also evaluate the model they are given.
      evaluated: what the last round's clients counted on held-out text, and how many they were; None where not asked.
      typical: nats per token of the median of those clients; None where only their sum is seen.
      failed: why the last secure sum failed closed; None if it did not.
      beside: whether one client more or less would have decided about the last private one (`private.dp.accounting`).
    """

    compression_error: float | None = None

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.asks_evaluation = False
        self.evaluated: tuple[Score, int] | None = None
        self.typical: float | None = None
        self.failed: str | None = None
        self.beside = False
        self._caps: Caps | None = None  # of the uploads of a round; None in a run without limits
        self._round: _Round | None = None
        self._private: tuple[Noising, Asked] | None = None
        self._noised: NoisedSum | None = None

    def noise_by(self, noising: Noising, asked: Asked) -> None:
        """Say how the next round is clipped and noised, and what its clients are told of it."""
        self._private = noising, asked

    def limit(self, caps: Caps) -> None:
        """Say what uploads of the next round may be at most."""
        self._caps = caps

    def expect(self, fates: Mapping[ClientId, Fate]) -> None:
        """Real clients' fates are not known beforehand."""

    def train(
        self,
        params: Params,
        cohort: Sequence[ClientId],
        method: Method,
        round: int,
        public: Public | None = None,
    ) -> Mapping[ClientId, Report]:
        """Call the cohort. Where clients weigh themselves, their uploads come along."""
        self.calls.start_round()
        self.evaluated, self.typical, self.failed, self.beside = None, None, None, False
        self._round = now = _Round(params, tuple(cohort), method, round, public)
        if self._private is not None:
            self._noised = self._noised_sum(now, *self._private)
            return {}
        if method.report_free:
            return {}  # `collect` does all of a secure round
        send = method.mediator.share is not None
        heads = {c: self._head(now, c, "upload") | {"send": send} for c in cohort}
        counts: list[Score] = []

        def take(client: ClientId, answer: bytes) -> None:
            self._take_trained(now, client, answer, counts)

        self.calls.gather("train", with_model(heads, params), take, most=most_bytes(shapes_of(params)))
        if counts:
            self.evaluated, self.typical = (_added(counts), len(counts)), _typical(counts)
        return now.reports

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        """Return the sum, in cohort order: of what came along, of the uploads now asked for, or of a secure round."""
        assert self._round is not None, "collect() follows train()"
        now = self._round
        if self._noised is not None:
            summed, self._noised, self._private = self._noised, None, None  # every round is told its own noise
            return summed.aggregate(self.calls.refusals())
        if now.method.report_free:
            return self._with_noise(now, self._hidden(now))
        own = now.method.mediator.share
        if shares is not None:
            wanted = [client for client in now.reports if client in shares]
            body = pack(self.calls.named(now.number))
            most = most_bytes(shapes_of(now.params))
            self.calls.gather(
                "upload", dict.fromkeys(wanted, body), lambda c, a: self._take_upload(now, c, a), most=most
            )
        running = sum_for(now.params, self._caps)
        uploads = {c: now.uploads.pop(c) for c in now.cohort if c in now.uploads}
        for client in against_others(uploads, self._caps):
            del uploads[client]
            self.calls.leave_out(client, "against the others", "its upload points against those of the others")
        for client in list(uploads):
            share = (
                shares[client] if shares is not None else own(now.reports[client], list(now.params)) if own else None
            )
            assert share is not None, "an upload that came has a share"
            running.add(client, uploads.pop(client), share)
        aggregate = self._with_noise(now, running.aggregate(self.calls.refusals()))
        return replace(aggregate, norms=tuple(now.norms.values()), shortened=tuple(now.shortened))

    def _with_noise(self, now: _Round, aggregate: Aggregate) -> Aggregate:
        """Add the noise of a method whose server adds it."""
        seed = derive_seed(self.calls.run.seed, now.number, "server noise")
        return noised(aggregate, now.method.noise, torch.Generator().manual_seed(seed))

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        """Remember whose upload is in the model; they hear of it with the next model."""
        assert self._round is not None
        if keeps_state(self._round.method):
            self.calls.counted |= dict.fromkeys(contributors, self._round.number)

    def evaluate(self, params: Params, part: str, cohort: Sequence[ClientId], method: Method, round: int) -> Score:
        """Let clients count nats and hits of a model on held-out text; by a secure sum only the total is seen."""
        self.calls.start_round()
        self.typical = None
        now = _Round(params, tuple(cohort), method, round)
        if self.calls.run.secure is not None:
            return _added(self._over_groups(now, lambda group: self._evaluated(group, part)))
        heads = {c: self._head(now, c, "evaluation", part) for c in cohort}
        counts: list[Score] = []

        def take(client: ClientId, answer: bytes) -> None:
            counts.append(_evaluated(self.calls.current(round, answer).head.get("evaluated")))

        self.calls.gather("train", with_model(heads, params), take)
        self.typical = _typical(counts)
        return _added(counts)

    def part(self) -> None:
        """Tell everybody that the run is over."""
        body = pack({"run": self.calls.run.name})
        self.calls.gather("bye", dict.fromkeys(list(self.calls.keys), body), lambda client, answer: None)

    # a plain round

    def _take_trained(self, now: _Round, client: ClientId, answer: bytes, counts: list[Score]) -> None:
        expected, sent = shapes_of(now.params), now.method.mediator.share is not None
        received = self.calls.current(now.number, answer, most_bytes(expected), len(expected))
        upload = read_tensors(received.tensors, expected) if sent else {}
        done = capped(finished_of(received.head.get("report"), now.params, upload), self._caps)
        if done.joining and client in self.calls.counted:
            raise Rejected("malformed", "it joins a second time")
        if sent:
            # What an upload weighs by its size is measured here, not believed.
            stacked = {name: u[None] for name, u in upload.items()}
            done = done._replace(distance=measure(now.method, now.params, stacked, 1)[0])
            done = self._admit(client, now, done)
        elif done.tokens <= 0:
            raise Rejected("no text", "it predicted nothing")
        elif now.method.distance is not None and set(done.distance) != set(now.params):
            raise Rejected("malformed", "a report without the distances that the method asks for")
        counted = _evaluated(received.head.get("evaluated")) if self.asks_evaluation else None
        # Nothing is kept before everything has been looked at.
        now.reports[client] = report_of(client, done)
        if sent:
            now.uploads[client] = done.upload
        if counted is not None:
            counts.append(counted)

    def _take_upload(self, now: _Round, client: ClientId, answer: bytes) -> None:
        expected = shapes_of(now.params)
        received = self.calls.current(now.number, answer, most_bytes(expected), len(expected))
        upload = read_tensors(received.tensors, expected)
        done = self._admit(client, now, finished_of(report_head(now.reports[client]), now.params, upload))
        now.uploads[client] = done.upload

    def _admit(self, client: ClientId, now: _Round, done: Finished) -> Finished:
        """Return an upload within the limits of the run; refuse one that must not enter the sum."""
        odd = refusal(client, done, now.params, self.calls.run.bound)
        if odd is not None:
            raise Rejected(odd.reason, f"the upload of {client}")
        if self._caps is None:
            return done
        found = limited(client, done, now.params, now.method, self._caps)
        if isinstance(found, Refusal):
            raise Rejected(found.reason, f"the upload of {client} is longer than this run allows (upload.limit)")
        now.norms[client] = found.norm
        now.shortened += [client] * found.shortened
        return found.done

    # a private round

    def _noised_sum(self, now: _Round, noising: Noising, asked: Asked) -> NoisedSum:
        heads = {c: self._head(now, c, "upload") for c in now.cohort if c in self.calls.keys}
        if self.calls.run.secure is None:
            return plain_sum(self.calls, heads, now.params, now.number, noising, asked)
        found = masked_sum(self.calls, heads, now.params, now.method, now.number, noising, asked)
        self.failed, self.beside = found.failed, found.beside
        return found.summed

    # a secure round

    def _hidden(self, now: _Round) -> Aggregate:
        assert now.public is not None, "a hidden method has public numbers"
        aggregates = self._over_groups(now, self._uploads)
        aggregate = _together(now, aggregates, self.calls.refusals())
        if aggregates and self.asks_evaluation:
            self.evaluated = evaluated_in(aggregate.facts)
        return aggregate

    def _over_groups(self, now: _Round, work: Callable[[_Round], _T]) -> list[_T]:
        """Do what needs secure sums in every group of the cohort; return what came of those whose sums opened."""
        settings, run = self.calls.run.secure, self.calls.run
        assert settings is not None, "settings of secure sums"
        found = []
        draw = f"{run.name}/{run.attempt}/{now.number}"
        groups = self.calls.suspects.groups(now.cohort, settings.least_group, draw)
        if any(len(self.calls.able_to_hide(group)) < settings.least_group for group in groups):
            groups = [list(now.cohort)]  # its clients hide among more than a group has: there is no search
        for cohort in groups:
            group = replace(now, cohort=tuple(cohort))
            try:
                found.append(work(group))
            except SecureSumError as e:  # it stayed closed, or cannot be right: a client lied about what it sent
                self.failed = str(e)
            now.public = group.public
        return found

    def _uploads(self, group: _Round) -> Aggregate:
        """Return the sum of a group's uploads; the first group that can calibrates for all."""
        assert group.public is not None
        if not group.public["calibrated"]:
            public = group.public
            group.public = self._summed(
                group, "calibration", public, None,
                lambda found: learn_from_calibration(
                    group.method, public, found.total, group.params, found.members, found.ratio,
                    len(found.survivors),
                ),
            )  # fmt: skip
        public = group.public
        return self._summed(
            group, "upload", public, None,
            lambda found: aggregate_of(
                found.total, group.params, group.method, public, found.members, found.survivors, found.ratio,
                (), self.calls.run.bound,
            ),
        )  # fmt: skip

    def _evaluated(self, group: _Round, part: str) -> Score:
        return self._summed(
            group, "evaluation", {}, part,
            lambda found: evaluation_of(found.total, found.members, len(found.survivors))[0],
        )  # fmt: skip

    def _summed(
        self, group: _Round, purpose: Purpose, public: Public, part: str | None, read: Callable[[Summed], _T]
    ) -> _T:
        """Form one secure sum over those of a group who have keys, and read it.

        Raises:
          Lied: no honest clients can have this sum; those whose vectors are in it are suspects now.
          SecureSumError: it stayed closed.
        """
        part = part or self._validates(purpose)
        heads = {c: self._head(group, c, purpose, part) for c in group.cohort if c in self.calls.keys}
        among: tuple[ClientId, ...] = ()
        try:
            found = secure_sum(self.calls, heads, group.params, group.method, public, group.number, purpose, part)
            among = found.survivors
            return read(found)
        except Lied as e:
            if not e.by:
                self.calls.suspects.spoil(e.among or among)
            raise

    def _head(self, now: _Round, client: ClientId, purpose: Purpose, part: str | None = None) -> dict[str, Any]:
        evaluate = part or self._validates(purpose)
        counted = self.calls.counted.get(client)
        head = {"purpose": purpose, "counted": counted, "good": self.calls.good.get(client), "evaluate": evaluate}
        if now.method.halvings:  # a run that never diverged sends what it always did
            head["halvings"] = now.method.halvings
        return self.calls.named(now.number) | head

    def _validates(self, purpose: Purpose) -> str | None:
        """Which held-out text the clients of a round evaluate their model on, beside training from it."""
        return "valid" if self.asks_evaluation and purpose == "upload" else None


def _together(now: _Round, groups: Sequence[Aggregate], refused: Sequence[Refusal]) -> Aggregate:
    """Add up the sums of a round's groups; nothing where none opened."""
    assert now.public is not None
    if not groups:
        return nothing_summed(now.params, now.public, refused)
    first, *rest = groups
    for other in rest:
        first = replace(
            first,
            total={name: t + other.total[name] for name, t in first.total.items()},
            mass=_sums(first.mass, other.mass),
            weight=_sums(first.weight, other.weight),
            squares=_sums(first.squares, other.squares),
            contributors=(*first.contributors, *other.contributors),
            facts={
                name: [a + b for a, b in zip(numbers, other.facts[name], strict=True)]
                for name, numbers in first.facts.items()
            }
            | {"ratio": [min(first.facts["ratio"][0], other.facts["ratio"][0])]},
        )
    return replace(
        first,
        contributors=tuple(sorted(first.contributors)),
        refused=tuple(refused),
        facts={**first.facts, **out_of_range(refused)},
        public=now.public,
    )


def _sums(one: LayerNumbers, other: LayerNumbers) -> LayerNumbers:
    return {name: number + other[name] for name, number in one.items()}


def _added(counts: Sequence[Score]) -> Score:
    return Score(*map(sum, zip(*map(astuple, counts), strict=True)))


def _typical(counts: Sequence[Score]) -> float | None:
    """Return the median client's nats per token: a claim of one client moves it to a neighbour's at most."""
    means = [c.nats / c.tokens for c in counts if c.tokens > 0]
    return statistics.median(means) if means else None


def _evaluated(numbers: Any) -> Score:
    """Read counts that came from outside."""
    if not isinstance(numbers, list) or len(numbers) != len(fields(Score)):
        raise Rejected("malformed", "counts of an evaluation that are none")
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < 2**40 for n in numbers):
        raise Rejected("non-finite report", "counts of an evaluation that are no numbers")
    tokens, nats, *hits = numbers
    return Score(int(tokens), float(nats), *map(int, hits))
