"""Calling real clients: how messages reach them, who is there, who was lost and why.

A transport knows nothing of training. It carries bytes to named clients and brings back bytes, or why there are none:
Flower in a deployment, plain calls in a test. `Calls` checks every answer before anything is made of it. A client that
does not answer in time, refuses, or sends what cannot be right is a drop-out with a typed reason, never an exception.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from keyfed.errors import KeyfedError, SecureSumError
from keyfed.federated.types import ClientId, Params, Reason, Refusal
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.secagg.accusation import Suspects, is_usable
from keyfed.private.secagg.keys import SignedKeys, check_answer, is_possessed, is_signature, verify
from keyfed.private.secagg.threshold import SecureSettings
from keyfed.wire.messages import (
    NOT_OURS,
    PROTOCOL,
    TOO_OLD,
    Kind,
    Received,
    Rejected,
    control_head,
    digest_of,
    hello_text,
    mismatch,
    pack,
    unpack,
    whole_number,
)
from keyfed.wire.roster import Roster


class Post(NamedTuple):
    """A message to one client; its answer may have `most` bytes, and is not even fetched where it has more."""

    kind: Kind
    body: bytes
    most: int = control_head()


class Lost(NamedTuple):
    """Why no answer came; `detail` is for a person."""

    reason: Reason
    detail: str = ""


Answer = bytes | Lost


class Transport(Protocol):
    """Carries messages to clients."""

    def clients(self) -> Sequence[ClientId]:
        """Names of the clients that can be reached now, in order."""
        ...

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Send each client its message and wait at most so long; everybody in `posts` is in the answer."""
        ...


class Handler(Protocol):
    """A client's side of a transport."""

    def handle(self, kind: str, body: bytes) -> bytes:
        """Answer a message; what is wrong with it is a `KeyfedError`."""
        ...


Fault = Callable[[ClientId, Post, Handler], Answer]


class InProcess:
    """Clients in this process, called one after the other: what tests and `--secure` comparisons run on.

    Args:
      fault: stands between transport and clients; it may lose, delay, repeat or change messages. None: nothing does.
    """

    def __init__(self, handlers: Mapping[ClientId, Handler], fault: Fault | None = None) -> None:
        self.handlers = dict(handlers)
        self.fault = fault or deliver
        self.sent = 0
        self.received = 0

    def clients(self) -> Sequence[ClientId]:
        """Everybody, in order."""
        return sorted(self.handlers)

    def exchange(self, posts: Mapping[ClientId, Post], seconds: float) -> Mapping[ClientId, Answer]:
        """Call every client in turn; nobody is ever late."""
        del seconds
        out: dict[ClientId, Answer] = {}
        for client, post in posts.items():
            self.sent += len(post.body)
            handler = self.handlers.get(client)
            answer = Lost("no answer") if handler is None else self.fault(client, post, handler)
            if isinstance(answer, bytes):
                self.received += len(answer)
            out[client] = answer
        return out


def deliver(client: ClientId, post: Post, handler: Handler) -> Answer:
    """Hand a message over; a client's own error is its answer."""
    del client
    try:
        return handler.handle(post.kind, post.body)
    except Rejected as e:
        return Lost(e.reason, e.detail)
    except KeyfedError as e:
        return Lost("client error", str(e))


HELLO_SECONDS, SILENCE_SECONDS = 60.0, 300.0  # who leaves a hello unanswered is not called for a while
NOTICE_SECONDS = 1.0  # for telling clients of protocol 1 that they are too old
MOST_UNDELIVERED = 2  # answers that a client announced and did not send, after which it is called no more in this run

# Answers that carry a signature; a hello has its own proof.
SIGNED: tuple[Kind, ...] = ("train", "count", "upload", "unmask")


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """What the clients of a run are told at its beginning, and how long they are waited for.

    Attributes:
      name: the run's id, the same after a restart.
      about: configuration, vocabulary and the method's hash, see `wire.client`.
      attempt: how often the server has been started for this run; old messages are known by it.
      seconds: how long the answers to one message are waited for.
      secure: settings of secure sums; None for a plain run.
      bound: largest norm of a plain upload; None for no bound.
      seed: the run's seed.
    """

    name: str
    about: Mapping[str, Any]
    attempt: int
    seconds: float
    secure: SecureSettings | None = None
    bound: float | None = None
    seed: int = 1


class Calls:
    """Messages to the clients of a run and what came of them.

    Attributes:
      keys: of clients that have said hello, the one-time keys to use next.
      counted: for every client whose upload is in the model, the round of the last one; part of a checkpoint.
      good: the same of the last good model, which the run may go back to: clients keep those states, too.
      lost: clients of the round in progress that were lost, and why; `details` for a person.
      moved: bytes down and up so far.
      steps: of a private run, the step in which each client last took part, as it said in its hello.
      suspects: who lied, proved or found by splitting cohorts; part of a checkpoint.
      hide_among: the fewest clients of a secure sum that each client takes part in, as it signed in its hello.
      counting: clients that take part in the run's count, as they said in their hello.
      strained: sums, one after the other, that stayed closed below a threshold which a client's own number had raised.
    """

    def __init__(
        self,
        transport: Transport,
        roster: Roster,
        run: RemoteRun,
        counted: Mapping[ClientId, int] | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self.roster, self.run = roster, run
        self.keys: dict[ClientId, SignedKeys] = {}
        self.counted: dict[ClientId, int] = dict(counted or {})
        self.good: dict[ClientId, int] = {}
        self.lost: dict[ClientId, Reason] = {}
        self.details: dict[ClientId, str] = {}
        self.moved = {"down": 0, "up": 0}
        self.steps: dict[ClientId, int] = {}
        self.suspects = Suspects() if suspects is None else suspects
        self.hide_among: dict[ClientId, int] = {}
        self.counting: set[ClientId] = set()
        self.strained = 0
        self._transport = transport
        self._shut_out: set[ClientId] = set()  # cannot go on in this run
        self._silent: dict[ClientId, float] = {}  # left a hello unanswered: not asked again before this moment
        self._undelivered: Counter[ClientId] = Counter()  # answers that were announced and not sent
        self._owners: dict[bytes, ClientId] = {}  # who posted a public key first; nobody else may

    def start_round(self) -> None:
        """Forget who was lost before."""
        self.lost, self.details = {}, {}

    def reachable(self) -> Sequence[ClientId]:
        """Return whoever is enrolled and connected; nobody is asked anything."""
        self.roster.reread()
        enrolled = set(self.roster.names())
        return [client for client in self._transport.clients() if client in enrolled]

    def greet(self) -> Sequence[ClientId]:
        """Say hello to whoever is reachable, enrolled and new; return all who can be called, in order."""
        reachable = self.reachable()
        liars = set(self.suspects.shut_out())
        for gone in set(self.keys) - (set(reachable) - liars):
            del self.keys[gone]
        now = time.monotonic()
        shut = self._shut_out | liars | {client for client, until in self._silent.items() if until > now}
        new = [client for client in reachable if client not in self.keys and client not in shut]
        if new:
            nonce = os.urandom(16).hex()
            head = {**self.run.about, "run": self.run.name, "nonce": nonce, "secure": self.run.secure is not None}
            head |= {"roster": self.roster.marks()}

            def welcome(client: ClientId, answer: bytes) -> None:
                told = unpack(answer, control_head()).head
                self.keys[client] = self._proved(client, told, nonce)
                if told.get("step") is not None:
                    self.steps[client] = whole_number(told, "step")
                if told.get("counts") is True:
                    self.counting.add(client)

            self.gather("hello", dict.fromkeys(new, pack(head)), welcome, min(HELLO_SECONDS, self.run.seconds))
            # Whoever is in `keys` has just answered, whatever it was lost for in the round before.
            silent = [
                c
                for c in new
                if c not in self.keys and self.lost.get(c) in ("no answer", "not delivered", "other protocol")
            ]
            self._silent |= dict.fromkeys(silent, time.monotonic() + SILENCE_SECONDS)
            self._notify([c for c in silent if self.details.get(c) == mismatch(1, PROTOCOL)])
        return sorted(self.keys)

    def _notify(self, old: Sequence[ClientId]) -> None:
        """Let clients of protocol 1 know that they are too old; they read nothing but the kind of a message."""
        if old:
            self._transport.exchange(dict.fromkeys(old, Post(TOO_OLD, b"")), NOTICE_SECONDS)

    def _proved(self, client: ClientId, head: Mapping[str, Any], nonce: str) -> SignedKeys:
        """Return a client's first one-time keys, if it proves with its lasting key who it is and what it wants."""
        identity, least = self.identity(client), whole_number(head, "hide_among", 2, MOST_MEMBERS)
        try:
            proof, keys = bytes.fromhex(head["proof"]), self.signed_keys(client, head["keys"])
        except (KeyError, TypeError, ValueError) as e:
            raise Rejected("malformed", f"a hello without proof or keys ({e})") from None
        if not is_signature(proof, hello_text(client, self.run.name, nonce, least), identity):
            raise Rejected("not enrolled", f"{client} does not prove that it is {client}")
        self.hide_among[client] = least
        return keys

    def able_to_hide(self, clients: Iterable[ClientId]) -> list[ClientId]:
        """Return the most of these clients who, among each other, are as many as each of them wants to hide among.

        Those who want to hide among the most are left out first.
        """
        left = sorted(clients, key=lambda client: self.hide_among.get(client, 0))
        while left and self.hide_among.get(left[-1], 0) > len(left):
            left.pop()
        return sorted(left)

    def leave_out(self, client: ClientId, reason: Reason, detail: str) -> None:
        """Note that a client is in no sum of this round and stays in the run; its one-time keys stay unused."""
        self.lost[client], self.details[client] = reason, detail

    def signed_keys(self, client: ClientId, data: object) -> SignedKeys:
        """Read one-time keys that must be signed by this client."""
        try:
            keys = SignedKeys.from_json(data)
            verify(keys, self.identity(client))
        except SecureSumError as e:
            raise Rejected("not enrolled", f"one-time keys that are not {client}'s ({e})") from None
        if keys.client != client:
            raise Rejected("not enrolled", f"{client} sent one-time keys of another client")
        if keys.mask == keys.channel or any(
            self._owners.setdefault(k, client) != client for k in (keys.mask, keys.channel)
        ):
            raise Rejected("malformed", f"{client} sent a public key twice, or another client's")
        if not (is_usable(keys.mask) and is_usable(keys.channel)):
            raise Rejected("malformed", f"{client} sent a public key that no private key has")
        if not is_possessed(keys):
            raise Rejected("malformed", f"{client} does not prove that its channel key is its own")
        return keys

    def identity(self, client: ClientId) -> bytes:
        """Return a client's lasting public key."""
        entry = self.roster.get(client)
        if entry is None or entry.revoked:
            raise Rejected("not enrolled", f"{client} is not on the roster")
        return bytes.fromhex(entry.identity)

    def gather(
        self,
        kind: Kind,
        bodies: Mapping[ClientId, bytes],
        take: Callable[[ClientId, bytes], None],
        seconds: float | None = None,
        most: int | None = None,
    ) -> None:
        """Send everybody its message, wait, and take the answers in the order asked; who is lost is noted.

        Args:
          take: uses an answer, or raises `Rejected`.
          seconds: how long to wait; None for the run's patience.
          most: bytes that an answer may have; None for a short one.
        """
        if not bodies:
            return
        self.moved["down"] += sum(map(len, bodies.values()))
        most = control_head() if most is None else most
        answers = self._transport.exchange(
            {c: Post(kind, body, most) for c, body in bodies.items()}, seconds or self.run.seconds
        )
        for client in bodies:
            answer = answers.get(client, Lost("no answer"))
            if isinstance(answer, Lost):
                legacy = answer.reason == "malformed" and answer.detail == NOT_OURS
                answer = Lost("other protocol", mismatch(1, PROTOCOL)) if legacy else answer
                self._lose(client, answer.reason, answer.detail)
                continue
            self.moved["up"] += len(answer)
            try:
                take(client, self._signed(client, kind, answer) if kind in SIGNED else answer)
            except Rejected as e:
                self._lose(client, e.reason, e.detail)
            except Exception as e:  # whatever an answer does to us, it is its client's loss and nobody else's
                self._lose(client, "malformed", type(e).__name__)

    def _signed(self, client: ClientId, kind: Kind, answer: bytes) -> bytes:
        """Return an answer without its signature, which must be this client's."""
        try:
            return check_answer(self.identity(client), client, kind, answer)
        except SecureSumError as e:
            raise Rejected("not signed", str(e)) from None

    def shut_out(self, client: ClientId, how: str) -> None:
        """Call a client no more in this run, of which a lie is proved."""
        self._lose(client, "lied", how)

    def _lose(self, client: ClientId, reason: Reason, detail: str) -> None:
        detail = "".join(c if c.isprintable() else " " for c in detail)[:300]  # it may be a client's text
        if reason == "lied":
            self.suspects.prove(client, detail)
        self.lost[client], self.details[client] = reason, detail
        self.keys.pop(client, None)  # it says hello again before it is called again
        if reason == "state lost" and client in self.counted:
            self._shut_out.add(client)  # it would count twice in a running mean if it began anew
        if reason == "not delivered":
            self._undelivered[client] += 1
            if self._undelivered[client] >= MOST_UNDELIVERED:
                self._shut_out.add(client)  # everybody else waits for the deadline each time

    def refusals(self) -> list[Refusal]:
        """Return who was lost, as an aggregate wants it."""
        return [Refusal(client, reason) for client, reason in self.lost.items()]

    def named(self, round: int) -> dict[str, Any]:
        """Return what every message of a round says."""
        return {"run": self.run.name, "round": round, "attempt": self.run.attempt}

    def current(self, round: int, answer: bytes, most: int | None = None, entries: int = 0) -> Received:
        """Read an answer that must be for this round of this run.

        Args:
          most: bytes that it may have; None for what its head may have.
          entries: members or layers that its head lists.
        """
        received = unpack(answer, 8 + control_head(entries) if most is None else most, control_head(entries))
        got = {key: received.head.get(key) for key in ("run", "round", "attempt")}
        if got != self.named(round):
            raise Rejected("wrong round", f"an answer for {str(got)[:100]}; this is round {round}")
        return received


def with_model(heads: Mapping[ClientId, dict[str, Any]], params: Params) -> dict[ClientId, bytes]:
    """Add a model to everybody's head; clients that are told the same share the same bytes."""
    model = digest_of(params)
    tensors = unpack(pack({}, params)).tensors
    texts = {client: pack(head | {"model": model}) for client, head in heads.items()}
    bodies = {text: text + tensors for text in set(texts.values())}
    return {client: bodies[text] for client, text in texts.items()}
