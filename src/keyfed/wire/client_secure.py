"""A client in a secure sum: what it holds between the messages of a round, and on which terms it joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from keyfed.engine.sums.codec import words_of
from keyfed.engine.sums.secure_round import Purpose, context_of, length
from keyfed.engine.task import Finished
from keyfed.errors import ConfigError, Refused, SecureSumError
from keyfed.federated.public.rules import refuse_isolating
from keyfed.federated.types import Params
from keyfed.model.output import Score
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.secagg.keys import SIGNATURE_BYTES, Identity, SignedKeys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import PRIVATE_RATIO, Floors
from keyfed.private.secagg.wire import package_text
from keyfed.wire.answers import sum_context
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.learner import Learner
from keyfed.wire.messages import Rejected, whole_number
from keyfed.wire.private_part import Asked


@dataclass(slots=True)
class Work:
    """What a session holds between the messages of a round."""

    run: str
    round: int
    attempt: int
    purpose: Purpose
    theta: Params
    public: dict[str, Any] | None
    members: int
    done: Finished | None
    evaluated: Score | None
    part: str | None
    secure: bool
    asked: Asked | None = None  # of a private round
    member: Member | None = None
    sent: bool = False
    halvings: int = 0  # of the local step size, since the run diverged


def signed_packages(member: Member, identity: Identity) -> dict[str, bytes]:
    """Return a member's packages, each with its signature behind it: only what it signed can be held against it."""
    digest, me = member.terms.digest(), member.me
    return {
        to: package + identity.sign(package_text(digest, me, to, package)) for to, package in member.shares().items()
    }


def parted_packages(parcels: Mapping[str, str]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return packages and signatures by client, from what `signed_packages` gave in hexadecimal."""
    both = {str(name): bytes.fromhex(parcel) for name, parcel in parcels.items()}
    return (
        {name: parcel[:-SIGNATURE_BYTES] for name, parcel in both.items()},
        {name: parcel[-SIGNATURE_BYTES:] for name, parcel in both.items()},
    )


def join_sum(
    name: str, store: DeviceStore, floors: Floors, learner: Learner, work: Work, head: Mapping[str, Any], about: str
) -> Member:
    """Join a secure sum on the server's terms, if they are acceptable."""
    listed, identities = head.get("cohort"), head.get("identities")
    if not isinstance(listed, list) or not isinstance(identities, dict) or len(listed) != work.members:
        raise Rejected("malformed", "a secure round without its cohort's keys")
    try:
        keys = {client: bytes.fromhex(key) for client, key in identities.items()}
        cohort = tuple(SignedKeys.from_json(entry) for entry in listed)
        own = next((k for k in cohort if k.client == name), None)
        if own is None or keys.get(name) != store.identity().public:
            raise Rejected("refused by client", "the cohort has no keys of this client, or others")
        private = work.asked is not None
        size = words_of(work.theta) if private else length(learner.method, work.theta, work.purpose)
        method = replace(learner.method, halvings=work.halvings)
        round_context = context_of(work.theta, method, work.public or {}, work.round, work.purpose)
        context = sum_context(work.run, work.attempt, about, work.part, round_context)
        terms = SumTerms(context, cohort, whole_number(head, "threshold", 1, MOST_MEMBERS), size)
        store.refuse_strangers({client: keys[client] for client in terms.names}, name)
        least = PRIVATE_RATIO if private else terms.ratio
        if terms.ratio < least:
            raise Refused(f"{name} refuses the threshold {terms.threshold} of a private sum: at least {least + 1}")
        refuse_isolating(learner.method, least)
        member = Member(name, store.take_keys(own.serial), terms, keys, floors)
        store.pin({client: keys[client] for client in terms.names})  # whose signatures are in order
        return member
    except (Refused, ConfigError) as e:
        raise Rejected("refused by client", str(e)) from None
    except (SecureSumError, ValueError, TypeError, KeyError) as e:
        raise Rejected("malformed", f"terms of a secure sum that make no sense ({e})") from None
