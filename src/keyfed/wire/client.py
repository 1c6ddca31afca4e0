"""A client's side of a real federation: it answers the server's messages, and refuses what it should not answer.

    who                                                               → its name
    hello     the run: configuration, vocabulary, method and its hash → proof of identity, one-time keys
    train     a model and, in a secure round, everybody's keys        → report and upload, or shares
    count     public numbers of a count and everybody's keys          → shares (`wire.counting`)
    upload    who is still there, and their shares                    → the masked vector
    unmask    whose vectors arrived                                   → shares that open their sum
    bye       the run is over                                         → what was kept of it is deleted

A secure round is train, upload, unmask; its `purpose` is to calibrate, to upload or to evaluate. A session lives as
long as its process. A session that was restarted has lost what it had trained in that round, and says so; everything
that must survive lies in the `DeviceStore`. Answers to train, upload and unmask carry the client's signature.

Under a private run a client sends its clipped upload and nothing else (`promise`). It takes part in every step once,
and steps only go up: a server that counts them anew, because its folder was put back from an older copy, is not
answered, and hears of it in the hello. What leaves the client is counted in its own ledger, over all runs; what its
owner's budget does not cover does not leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from keyfed.engine.client_state import StateDamaged, read_state, write_state
from keyfed.engine.simulate import refusal
from keyfed.engine.sums.codec import Vector, words_of
from keyfed.engine.sums.secure_round import (
    Purpose,
    calibration_vector_of,
    context_of,
    countable,
    evaluation_vector_of,
    length,
    vector_of,
)
from keyfed.engine.task import ClientTask, Finished, keeps_state, report_of
from keyfed.errors import PrivacyError, Refused, SecureSumError, SecureSumOverflow, described
from keyfed.federated.cohort import eased
from keyfed.federated.public.numbers import check_public
from keyfed.federated.public.rules import refuse_isolating
from keyfed.federated.soundness import MOST_HALVINGS
from keyfed.federated.types import Method, Params, Refusal, Share
from keyfed.files import make_durable
from keyfed.model.output import Score
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.dp.own_ledger import OwnLedger, Spend
from keyfed.private.secagg.keys import signed_answer
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.nested import Chain
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import PRIVATE_RATIO, Floors
from keyfed.wire.counting import CountRound, CountWriter, count_context, largest_of, noted_as, sizes_of, text_of
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.limits import Limits
from keyfed.wire.membership import join_sum, signed_packages
from keyfed.wire.messages import (
    BEGIN_HEAD,
    MEMBER_HEAD,
    Received,
    Rejected,
    Shapes,
    about_digest,
    check_protocol,
    control_head,
    digest_of,
    hello_text,
    most_bytes,
    pack,
    parted_packages,
    read_tensors,
    report_head,
    sum_context,
    text,
    text_digest,
    unpack,
    whole_number,
)
from keyfed.wire.promise import Asked, Promise

PURPOSES: tuple[Purpose, ...] = ("upload", "calibration", "evaluation")
COHORT_HEAD = control_head() + MEMBER_HEAD * MOST_MEMBERS  # bytes of a head that lists a cohort's keys or shares


class Learner(Protocol):
    """A client's own text under a run's model.

    Attributes:
      method: the run's method, built here from its specification.
      shapes: what a model of this run looks like.
      digest: hash of the method's specification as this package understands it.
      bound: largest norm of an upload; None for no bound.
      floor: the fewest clients of a secure sum that the run itself promises (`secure.floor`).
      promise: what a private run is held to; None for a run that promises nothing.
    """

    method: Method
    shapes: Shapes
    digest: str
    bound: float | None
    floor: int
    promise: Promise | None

    def solve(self, theta: Params, round: int, turn: ClientTask) -> Finished:
        """Train for a round."""
        ...

    def evaluate(self, theta: Params, part: str) -> Score:
        """Count nats and hits on held-out text, `valid` or `test`."""
        ...

    def counts(self) -> CountWriter:
        """Return what takes part in the run's count.

        Raises:
          Rejected: the run counts nothing, or its terms are not acceptable.
        """
        ...


@dataclass(slots=True)
class ClientRound:
    """What a session holds between the messages of a round.

    Attributes:
      asked: public numbers of a private round; None in any other.
      halvings: of the local step size, since the run diverged.
    """

    run: str
    round: int
    attempt: int
    learner: Learner
    purpose: Purpose
    theta: Params
    model: str
    public: dict[str, Any] | None
    members: int
    part: str | None
    secure: bool
    asked: Asked | None
    halvings: int
    done: Finished | None = None
    evaluated: Score | None = None
    member: Member | None = None
    sent: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """What every answer of the round says."""
        return {"run": self.run, "round": self.round, "attempt": self.attempt}


def _nothing(theta: Params) -> Finished:
    """What a client has that learnt nothing: zeros, of no token."""
    return Finished(0, {name: torch.zeros_like(p) for name, p in theta.items()}, 0.0, 0, 0, {})


class ClientSession:
    """Answers messages for one client.

    Args:
      home: the client's folder.
      name: the name it was enrolled under.
      learner: makes the client's text ready for a run, from what the server said in its hello.
      floors: the fewest clients it hides among; a run may promise more (`secure.floor`), never less.
      plain: whether it takes part in runs that show its upload to the server.
      counts: whether it takes part in counts of n-grams.
      limits: what it gives a run at most: size, work, runs, privacy.
      ready: says why the client does not want to work now (on battery, in use, paused); None: it does.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        learner: Callable[[Mapping[str, Any]], Learner],
        *,
        floors: Floors | None = None,
        plain: bool = False,
        counts: bool = False,
        limits: Limits | None = None,
        ready: Callable[[], str | None] | None = None,
    ) -> None:
        self.name = name
        self.store = DeviceStore(home)
        self._limits = limits or Limits()
        self._ledger = OwnLedger(home, self._limits.epsilon)
        self._make = learner
        self._floors = floors or Floors()
        self._plain, self._counts = plain, counts
        self._ready = ready or (lambda: None)
        self._learners: dict[str, Learner] = {}
        self._solved: tuple[tuple[object, ...], Finished] | None = None
        self._work: ClientRound | CountRound | None = None

    def handle(self, kind: str, body: bytes) -> bytes:
        """Answer one message.

        Raises:
          Rejected: the message must not be answered; the reason is typed.
          KeyfedError: something this client's owner can mend.
        """
        check_protocol(body, "client")
        if kind == "who":
            return pack({"name": self.name})
        if kind == "hello":
            return self._hello(unpack(body, 8 + BEGIN_HEAD).head)
        if kind == "bye":
            return self._bye(text(unpack(body, 8 + control_head()).head, "run"))
        if kind == "train":
            answer = self._train(body)
        elif kind == "count":
            answer = self._count(body)
        elif kind in ("upload", "unmask"):
            head = unpack(body, 8 + COHORT_HEAD, COHORT_HEAD).head
            work = self._work_of(head)
            answer = self._upload(work, head) if kind == "upload" else self._unmask(work, head)
        else:
            raise Rejected("malformed", f'a message of kind "{kind[:20]}"')
        return signed_answer(self.store.identity(), self.name, kind, answer)

    # hello

    def _hello(self, head: Mapping[str, Any]) -> bytes:
        run = text(head, "run")
        if head.get("secure") is not True and not self._plain:
            raise Rejected("not secure", "this client takes part in secure sums only; start it with --allow-plain")
        if head.get("secure") is True:
            self.store.meet(head.get("roster"), self._limits.roster)
        about = {key: value for key, value in head.items() if key != "roster"}
        self.store.begin(run, about, self._limits.runs)
        self._learners.pop(run, None)
        learner = self._learner(run)
        self._affords(run, learner.promise)
        if learner.digest != text(head, "method"):
            raise Rejected(
                "other method", "this package builds another method from the run's specification; update the client"
            )
        hide_among = self._hides_among(learner)
        proof = self.store.identity().sign(hello_text(self.name, run, text(head, "nonce"), hide_among))
        answer = {"proof": proof.hex(), "keys": self.store.new_keys(self.name).to_json(), "hide_among": hide_among}
        last = self.store.last_part(run)
        if self._takes_counts(learner):
            answer["counts"] = True
        return pack(answer if last is None else answer | {"step": last.step})

    def _hides_among(self, learner: Learner) -> int:
        return max(self._floors.cohort, learner.floor)

    def _bye(self, run: str) -> bytes:
        self._drop()
        self._learners.pop(run, None)
        self._solved = None
        self.store.forget(run)
        return pack({})

    def _learner(self, run: str) -> Learner:
        if run not in self._learners:
            self._learners.clear()  # one run at a time: text and model of the last one are let go
            self._learners[run] = self._make(self.store.begun(run))
        return self._learners[run]

    # what leaves the client, as its owner counts it

    def _affords(self, run: str, promise: Promise | None) -> None:
        """Refuse a run of which not even one upload fits into the owner's budget.

        Raises:
          Rejected: "over budget".
        """
        try:
            self._ledger.allow(_mark(run), _spend(promise))
        except PrivacyError as e:
            raise Rejected("over budget", str(e)) from None

    def _refuse_early(self, work: ClientRound) -> None:
        """Refuse a call that comes earlier after this client's last upload than the run promised, or a second time."""
        promise = work.learner.promise
        if work.asked is not None and promise is not None:
            self.store.refuse_early(work.run, work.asked.step, promise.separation or 1)
            self._affords(work.run, promise)

    def _book(self, work: ClientRound) -> None:
        """Note, before it is sent, that an upload leaves this client in this step of a private run."""
        self._refuse_early(work)
        if work.asked is not None:
            self._ledger.book(_mark(work.run), _spend(work.learner.promise))
            self.store.took_part(work.run, work.asked.step, work.asked.clip)

    # train

    def _begins(self, body: bytes) -> tuple[Received, str, dict[str, Any], Learner]:
        """Let go of the round before; return a message, its run, what the server said of that, and its learner."""
        self._drop()
        received = unpack(body, head=COHORT_HEAD)
        why = self._ready()
        if why is not None:
            raise Rejected("not now", why)
        run = text(received.head, "run")
        return received, run, self.store.begun(run), self._learner(run)

    def _train(self, body: bytes) -> bytes:
        received, run, begun, learner = self._begins(body)
        head = received.head
        most = most_bytes(learner.shapes, COHORT_HEAD)
        if len(body) > most:
            raise Rejected("too large", f"a model in {len(body):,} bytes; expected at most {most:,}")
        theta = read_tensors(received.tensors, learner.shapes)
        work = self._accept(run, learner, head, theta, secure=begun.get("secure") is True)
        self._refuse_early(work)
        if work.asked is None:  # noted before anything leaves: a run that promises nothing
            self._affords(run, None)
            self._ledger.book(_mark(run), None)
        if work.part is not None:
            work.evaluated = countable(learner.evaluate(theta, work.part))
        if work.purpose != "evaluation":
            counted, good = (None if head.get(key) is None else whole_number(head, key) for key in ("counted", "good"))
            found = self._solve(work, counted, good)
            if isinstance(found, Finished):
                work.done = found
            elif work.asked is None or not work.secure:
                raise Rejected(found.reason, "what this client trained is not sent")
            # In a masked private sum it sends zeros: were it lost, its text would decide about everybody's sum.
        if work.secure:
            work.member = self._join(work, head, about_digest(begun))
            return self._shared(work, work.member)
        self._work = work
        if work.asked is not None:
            assert work.done is not None, "a client that trained"
            assert learner.promise is not None, "a private run"
            layers, numbers = learner.promise.upload(work.done.upload, self._share(work, work.done), work.asked.clip)
            self._book(work)
            return pack(work.named | {"part": numbers}, layers)  # the report, of which nothing is noised, stays here
        answer = work.named | {"evaluated": None if work.evaluated is None else astuple(work.evaluated)}
        if work.done is None:
            return pack(answer)
        answer["report"] = report_head(work.done)
        return pack(answer, work.done.upload if head.get("send") is True else None)

    def _shared(self, work: ClientRound | CountRound, member: Member) -> bytes:
        parcels = {to: package.hex() for to, package in signed_packages(member, self.store.identity()).items()}
        self._work = work  # only now: a client that refused the terms has nothing to be asked for
        return pack(work.named | {"parcels": parcels, "keys": self.store.new_keys(self.name).to_json()})

    def _see(self, run: str, head: Mapping[str, Any], tensors: Params) -> tuple[int, int, str]:
        """Refuse what is old, or other tensors for the same round; return round, attempt and the tensors' hash."""
        round, attempt = whole_number(head, "round"), whole_number(head, "attempt")
        model = digest_of(tensors)
        if model != text(head, "model"):
            raise Rejected("other model", "the model is not the one that the message names")
        if not all(bool(torch.isfinite(p).all()) for p in tensors.values()):
            raise Rejected("non-finite model", "the model holds numbers that are not finite")
        before = self.store.seen(run)
        if (attempt, round) < before[:2]:
            raise Rejected("stale", f"round {round} of attempt {attempt} after round {before[1]} of {before[0]}")
        if (attempt, round) == before[:2] and model != before[2]:
            raise Rejected("other model", f"another model for round {round} than before")
        self.store.see(run, attempt, round, model)
        return round, attempt, model

    def _accept(
        self, run: str, learner: Learner, head: Mapping[str, Any], theta: Params, *, secure: bool
    ) -> ClientRound:
        """Check what a training message is about; refuse what is old, repeated, or another model for the same round."""
        purpose = text(head, "purpose")
        if purpose not in PURPOSES:
            raise Rejected("malformed", f'a purpose "{purpose[:20]}"')
        round, attempt, model = self._see(run, head, theta)
        public, part, promise = head.get("public"), head.get("evaluate"), learner.promise
        asked = None if promise is None else promise.check(public, round, part, purpose, self.store.last_part(run))
        if secure and purpose != "evaluation" and asked is None:
            try:
                check_public(public, list(theta))
            except ValueError as e:
                raise Rejected("malformed", f"public numbers that make no sense: {e}") from None
        if part not in ("valid", "test", None) or (purpose == "evaluation" and part is None):
            raise Rejected("malformed", f'an evaluation of "{str(part)[:20]}"')
        members = whole_number(head, "members", 1, MOST_MEMBERS) if secure else 0
        halvings = whole_number(head, "halvings", 0, MOST_HALVINGS) if "halvings" in head else 0
        numbers = public if isinstance(public, dict) else None
        return ClientRound(
            run, round, attempt, learner, purpose, theta, model, numbers, members, part, secure, asked, halvings
        )

    def _join(self, work: ClientRound, head: Mapping[str, Any], about: str) -> Member:
        """Join a secure sum on the server's terms, if they are acceptable."""
        learner, private = work.learner, work.asked is not None
        least = PRIVATE_RATIO if private else 1

        def make() -> tuple[bytes, int]:
            size = words_of(work.theta) if private else length(learner.method, work.theta, work.purpose)
            method = replace(learner.method, halvings=work.halvings)
            round_context = context_of(work.theta, method, work.public or {}, work.round, work.purpose)
            return sum_context(work.run, work.attempt, about, work.part, round_context), size

        def check(terms: SumTerms) -> None:
            if terms.ratio < least:
                threshold = terms.threshold
                raise Refused(f"{self.name} refuses the threshold {threshold} of a private sum: at least {least + 1}")
            refuse_isolating(learner.method, PRIVATE_RATIO if private else terms.ratio)

        floors = Floors(self._hides_among(learner))
        return join_sum(self.store, self.name, head, work.members, floors, make, check)

    def _solve(self, work: ClientRound, counted: int | None, good: int | None) -> Finished | Refusal:
        """Train, or take what was trained for the same model and round just before (the calibration's)."""
        learner = work.learner
        key = (work.run, work.round, work.model, counted, work.asked, work.halvings)
        if self._solved is not None and self._solved[0] == key:
            return self._solved[1]
        self._solved = None
        turn = ClientTask(0)._replace(work=eased(ClientTask(0).work, work.halvings))
        if keeps_state(learner.method):
            state = self.store.state(work.run, counted, good)
            clip = None if work.asked is None else work.asked.clip  # it books what it sent, which is clipped
            turn = turn._replace(state=state, propose=self.store.state_file(work.run, work.round), clip=clip)
        try:
            done = learner.solve(work.theta, work.round, turn)
        except StateDamaged:
            raise Rejected("state lost", "the state of this client is damaged") from None
        except Exception as e:
            if work.asked is None:
                raise
            line = "round %d: training failed (%s); nothing is added"
            logging.getLogger(__name__).error(line, work.round + 1, described(e))
            done = _nothing(work.theta)
        odd = refusal(self.name, done, work.theta, learner.bound)
        if odd is not None and turn.propose is not None:  # as if it had trained nothing
            begin = learner.method.solver.start
            assert begin is not None, "a method whose clients keep state, without compression"
            write_state(turn.propose, begin(work.theta) if turn.state is None else read_state(turn.state))
        if turn.propose is not None:
            make_durable(turn.propose)
        if odd is not None:
            return odd
        done = done._replace(upload={name: u.clone() for name, u in done.upload.items()})
        self._solved = (key, done)
        return done

    # count

    def _takes_counts(self, learner: Learner) -> bool:
        try:
            self._writer(learner)
        except Rejected:
            return False
        return True

    def _writer(self, learner: Learner) -> CountWriter:
        if not self._counts:
            raise Rejected("refused by client", "its owner takes no part in counts (keyfed client --counts)")
        return learner.counts()

    def _count(self, body: bytes) -> bytes:
        """Take part in one sum of a count: check it, write the vector, join."""
        received, run, begun, learner = self._begins(body)
        head, purpose = received.head, text(received.head, "purpose")
        if begun.get("secure") is not True:
            raise Rejected("not secure", "n-grams are counted in secure sums only")
        writer = self._writer(learner)
        expected = writer.expects(purpose, sizes_of(head))
        most = most_bytes(expected, COHORT_HEAD)
        if len(body) > most:
            raise Rejected("too large", f"public numbers in {len(body):,} bytes; expected at most {most:,}")
        numbers, largest = read_tensors(received.tensors, expected), largest_of(head)
        round, attempt, digest = self._see(run, head, numbers)
        self.store.refuse_second(run, *noted_as(purpose), leaves=False)
        vector = writer.vector(purpose, numbers, largest)  # looks at the numbers before anything is kept of them
        self.store.same_release(run, writer.released(numbers))
        self._affords(run, None)
        self._ledger.book(_mark(run), None)

        def make() -> tuple[bytes, int]:
            return count_context(run, attempt, about_digest(begun), purpose, largest, digest), len(vector)

        def joined(terms: SumTerms) -> Chain:
            return self.store.chain(run, text_of(purpose)).joined(terms.names, terms.threshold, floors.cohort)

        floors = Floors(max(self._hides_among(learner), writer.least))
        member = join_sum(self.store, self.name, head, whole_number(head, "members"), floors, make, joined)
        self.store.keep_chain(run, text_of(purpose), joined(member.terms))
        return self._shared(CountRound(run, round, attempt, purpose, vector, member, floors.cohort), member)

    # upload and unmask

    def _work_of(self, head: Mapping[str, Any]) -> ClientRound | CountRound:
        work = self._work
        asked = (text(head, "run"), whole_number(head, "round"), whole_number(head, "attempt"))
        if work is None:
            raise Rejected("restarted", "this client has nothing trained; it may have been restarted")
        if asked != (work.run, work.round, work.attempt):
            raise Rejected("stale", f"round {asked[1]}, and this client is in round {work.round}")
        return work

    def _upload(self, work: ClientRound | CountRound, head: Mapping[str, Any]) -> bytes:
        if isinstance(work, ClientRound) and not work.secure:
            if work.done is None or work.asked is not None:  # a private part was sent, once, with the training
                raise Rejected("malformed", "nothing was trained that could be uploaded")
            return pack(work.named, work.done.upload)
        alive, parcels = head.get("alive"), head.get("parcels")
        if work.member is None or not isinstance(alive, list) or not isinstance(parcels, dict):
            raise Rejected("malformed", "an upload without the others' shares")
        if work.sent:
            raise Rejected("stale", "this client has uploaded already")
        try:
            received, signatures = parted_packages(parcels)
            self.store.begun(work.run)  # refuses a run that has ended since it was trained
            # Noted before anything is computed: whether a vector fits its ranges must not be tried again and again.
            if isinstance(work, CountRound):
                self.store.refuse_second(work.run, *noted_as(work.purpose))
                vector = work.vector
            else:
                self.store.refuse_second(work.run, work.round, work.purpose, work.part)
                self._book(work)
                vector = self._vector(work, work.member.terms.ratio)
            masked = work.member.masked(vector, [str(name) for name in alive], received, signatures)
        except SecureSumOverflow as e:
            self._drop()
            raise Rejected(e.reason, e.public_text) from None  # by how much, and where, is this client's own affair
        except Refused as e:
            self._drop()
            if e.accused is None:
                raise Rejected("refused by client", str(e)) from None
            evidence = None if e.evidence is None else e.evidence.hex()
            return pack(work.named | {"accuses": e.accused, "evidence": evidence})
        except (SecureSumError, ValueError, TypeError) as e:
            self._drop()
            raise Rejected("refused by client", str(e)) from None
        work.sent = True
        return pack(work.named, {"masked": torch.from_numpy(masked.view(np.int32))})

    def _vector(self, work: ClientRound, ratio: int) -> Vector:
        """Return what this client adds to a masked sum; to a private one zeros where nothing was trained."""
        method, done = work.learner.method, work.done
        if work.asked is not None:
            assert work.learner.promise is not None, "a private run"
            share = None if done is None else self._share(work, done)
            return work.learner.promise.vector(work.theta if done is None else done.upload, share, work.asked.clip)
        if work.purpose == "evaluation":
            return evaluation_vector_of(work.evaluated or Score(), work.members)
        assert done is not None, "a client that trained"
        if work.purpose == "calibration":
            return calibration_vector_of(self.name, done, work.theta, method, work.members)
        try:
            public = work.public or {}
            return vector_of(self.name, done, work.theta, method, public, work.members, ratio, work.evaluated)
        except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, ValueError) as e:
            raise Rejected("malformed", f"public numbers that make no sense ({type(e).__name__})") from None

    def _share(self, work: ClientRound, done: Finished) -> Share:
        own = work.learner.method.mediator.share
        assert own is not None, "clients of a private run weigh themselves"
        return replace(own(report_of(self.name, done), list(work.theta)), clipped=done.clipped)

    def _unmask(self, work: ClientRound | CountRound, head: Mapping[str, Any]) -> bytes:
        survivors = head.get("survivors")
        if work.member is None or not isinstance(survivors, list):
            raise Rejected("malformed", "a request to open a sum that this client is not in")
        try:
            stayed = [str(name) for name in survivors]
            data = work.member.unmask(stayed)
            if isinstance(work, CountRound):
                chain = self.store.chain(work.run, text_of(work.purpose)).settled(stayed, work.apart)
                self.store.keep_chain(work.run, text_of(work.purpose), chain)  # before a share is shown
        except SecureSumError as e:
            raise Rejected("refused by client", str(e)) from None
        finally:
            self._drop()
        return pack(work.named | {"shares": data.hex()})

    def _drop(self) -> None:
        """Forget the round in progress and its secrets; what was trained stays for the next purpose."""
        if self._work is not None and self._work.member is not None:
            self._work.member.forget()
        self._work = None


def _mark(run: str) -> str:
    """A run's name as the ledger keeps it; it comes from outside and may be long."""
    return text_digest(run)[:16]


def _spend(promise: Promise | None) -> Spend | None:
    """What one upload of a run costs; None for a run that promises nothing."""
    return None if promise is None else Spend(promise.noise, promise.separation, promise.rounds)
