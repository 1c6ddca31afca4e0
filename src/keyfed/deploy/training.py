"""The session of a client's training process, and the first keys it enrols with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keyfed.deploy.client_home import ClientHome

if TYPE_CHECKING:
    from keyfed.engine.session import ClientSession


def first_keys(home: ClientHome) -> Sequence[Mapping[str, Any]]:
    raise NotImplementedError


def make_session(home: ClientHome) -> ClientSession:
    raise NotImplementedError
