"""Consent: asked once, in plain words, before anything starts; recorded with its date and the words themselves."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from keyfed.deploy.client_home import ClientHome, Settings
from keyfed.errors import DeployError
from keyfed.files import BROKEN, read_json, write_atomically

FILE = "consent.json"

WORDS = """\
This computer will help to train the language model of a keyboard, together with other people's.

What stays here:
  - your text. It is read from {data} and never sent, in whole or in part.
  - your private keys, and everything kept between rounds of training.

What leaves this computer, to {server}:
  - changes to the model's numbers, learnt from your text. With secure aggregation (the default) they are hidden among
    those of the other people of a round: the server sees their sum only. A run without it says so (see below).
  - how well the model did and how much text there was, hidden in the same way.
  - your client's name ({name}), its public keys, its network address, and when it is switched on.

What you should know:
  - a sum over few people says something about each of them. Clients refuse to take part with fewer than three.
  - a model can learn rare phrases by heart. Secure aggregation does not prevent that; do not train on passwords.
  - the server decides what is trained; the program that runs here is the one installed here, never one it sends.
  - a run can promise differential privacy. Then this client shortens its changes to a public length before they leave,
    sends nothing about how well it did or how much text there is, and refuses to be asked for more. The noise that
    hides you in the model is added by the server; this client cannot check that.
  - without secure aggregation the server sees this client's own changes. This client {plain}.

You can pause it (keyfed client --pause) and leave for good (keyfed client --leave: what is stored is deleted and the
server forgets your key). What the model has already learnt cannot be taken back.
"""


def words(name: str, server: str, data: str, plain: bool) -> str:
    """Return what the owner is told."""
    allowed = "takes part in such runs too (--allow-plain)" if plain else "takes no part in such runs"
    return WORDS.format(name=name, server=server, data=data, plain=allowed)


def words_for(home: Path, told: Settings) -> str:
    """Return what the owner of a home is told about these settings."""
    return words(told.name, told.server, told.data or str(home / "text"), told.plain)


def given(home: Path, text: str | None = None) -> bool:
    """Whether consent is recorded in a home, to these words where they are given."""
    try:
        found = read_json(home / FILE)
        return bool(found["agreed"]) and (text is None or found["sha256"] == _sum(text))
    except (OSError, *BROKEN):
        return False


def ask(
    home: Path,
    text: str,
    *,
    yes: bool,
    read: Callable[[], str] | None,
    say: Callable[[str], None],
    now: datetime.datetime | None = None,
) -> None:
    """Say the words, wait for the answer and record it; consent to the very same words is not asked for again.

    Args:
      yes: the owner has agreed on the command line (for scripts).
      read: reads a line from the owner; None where nobody can be asked.

    Raises:
      DeployError: the owner did not agree; nothing was started.
    """
    if given(home, text):
        return
    say(text)
    if not yes:
        if read is None:
            raise DeployError("nobody can be asked here; read the words above and start with --yes if you agree")
        say('Type "yes" to take part:')
        if read().strip().lower() not in ("yes", "y"):
            raise DeployError("you did not agree; nothing was started and nothing was sent")
    record = {
        "agreed": True,
        "date": (now or datetime.datetime.now(datetime.UTC)).isoformat(timespec="seconds"),
        "how": "--yes" if yes else "typed",
        "sha256": _sum(text),
        "words": text,
    }
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(home / FILE, json.dumps(record, indent=1).encode())


def asking(
    home: Path, *, yes: bool, read: Callable[[], str] | None, say: Callable[[str], None]
) -> Callable[[Settings], None]:
    """Return what asks the owner of a home about settings before they are written."""
    return lambda told: ask(home, words_for(home, told), yes=yes, read=read, say=say)


def need_consent(home: ClientHome) -> None:
    """Raise DeployError where nobody has agreed to what the client is told now."""
    if not given(home.path, words_for(home.path, home.settings())):
        raise DeployError(f"{home.path}: no consent to its settings is recorded; `keyfed client` asks for it")


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
