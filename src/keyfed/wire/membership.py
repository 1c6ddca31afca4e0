"""Joining a secure sum, for whatever is summed: a client looks at the server's terms and makes its shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keyfed.errors import ConfigError, Refused, SecureSumError
from keyfed.private.dp.accounting import MOST_MEMBERS
from keyfed.private.secagg.keys import Identity, SignedKeys
from keyfed.private.secagg.member import Member
from keyfed.private.secagg.terms import SumTerms
from keyfed.private.secagg.threshold import Floors
from keyfed.private.secagg.wire import package_text
from keyfed.wire.device_store import DeviceStore
from keyfed.wire.messages import Rejected, whole_number


def signed_packages(member: Member, identity: Identity) -> dict[str, bytes]:
    """Return a member's packages, each with its signature behind it: only what it signed can be held against it."""
    digest, me = member.terms.digest(), member.me
    return {
        to: package + identity.sign(package_text(digest, me, to, package)) for to, package in member.shares().items()
    }


def join_sum(
    store: DeviceStore,
    name: str,
    head: Mapping[str, Any],
    members: int,
    floors: Floors,
    make: Callable[[], tuple[bytes, int]],
    check: Callable[[SumTerms], object] = lambda terms: None,
) -> Member:
    """Join a secure sum on the server's terms, if they are acceptable.

    Args:
      members: clients of the sum, as the server said.
      make: returns the sum's context and the words of a vector.
      check: refuses terms for a reason of the caller's own.
    """
    listed, identities = head.get("cohort"), head.get("identities")
    if not isinstance(listed, list) or not isinstance(identities, dict) or len(listed) != members:
        raise Rejected("malformed", "a secure round without its cohort's keys")
    try:
        keys = {client: bytes.fromhex(key) for client, key in identities.items()}
        cohort = tuple(SignedKeys.from_json(entry) for entry in listed)
        own = next((k for k in cohort if k.client == name), None)
        if own is None or keys.get(name) != store.identity().public:
            raise Rejected("refused by client", "the cohort has no keys of this client, or others")
        context, size = make()
        terms = SumTerms(context, cohort, whole_number(head, "threshold", 1, MOST_MEMBERS), size)
        store.refuse_strangers({client: keys[client] for client in terms.names}, name)
        check(terms)
        member = Member(name, store.take_keys(own.serial), terms, keys, floors)
        store.pin({client: keys[client] for client in terms.names})  # whose signatures are in order
        return member
    except (Refused, ConfigError) as e:
        raise Rejected("refused by client", str(e)) from None
    except (SecureSumError, ValueError, TypeError, KeyError) as e:
        raise Rejected("malformed", f"terms of a secure sum that make no sense ({e})") from None
