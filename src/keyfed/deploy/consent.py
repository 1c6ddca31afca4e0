"""Consent: asked once, in plain words, before anything starts; recorded with its date and the words themselves."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from keyfed.deploy.homes import ClientHome, Settings, home_option
from keyfed.errors import DeployError
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.wire.limits import Limits

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
  - a sum over few people says something about each of them. This client takes part in sums of {hide_among} people or
    more (--hide-among).
  - in a secure sum nobody is more than half of what is opened, and of many people nobody is more than a small part.
    This client sees to it, whatever the server asks for, and refuses what does not allow it.
  - the server says who the people of a sum are. It could invent some, and this program cannot tell a made-up person
    from a real one: if all the others were made up, the sum would be your changes alone. After the first list of
    people this client refuses one that is mostly new. Compare the list's hash (keyfed client --status) with others'.
  - a model can learn rare phrases by heart. Secure aggregation does not prevent that; do not train on passwords.
  - the server decides what is trained; the program that runs here is the one installed here, never one it sends.
    It trains models of at most {parameters:,} numbers, at most {epochs} passes over your text and {minutes:g} minutes a
    round, and keeps at most {runs} runs that have not ended.
  - a run can promise differential privacy. Then this client shortens its changes to a public length before they leave,
    sends nothing about how well it did or how much text there is, and refuses to be asked for more. The noise that
    hides you in the model is added by the server; this client cannot check that. It counts what left it over all such
    runs (keyfed client --status); {budget}.
  - without secure aggregation the server sees this client's own changes. This client {plain}.
{counts}
You can pause it (keyfed client --pause) and leave for good (keyfed client --leave: what is stored is deleted and the
server forgets your key). What the model has already learnt cannot be taken back.
"""


COUNTS = """\
  - a run can count word sequences, once, after its last round (--counts). This client then writes which words, and
    which sequences of up to 6 words, your text has and how often, hidden in sums over {hide_among} people or more. It
    also writes how well the counts predict text that it held out, hidden in the same way; 268 MB a sum at most.
    What 3 people or more wrote is released to everybody of the run. The server sees the sums: how many people of a sum
    wrote a word, fewer than 3 too, and it can look up a sequence that it guesses. No noise hides that.
"""


def words(
    name: str,
    server: str,
    data: str,
    plain: bool,
    *,
    counts: bool = False,
    hide_among: int = 3,
    me: str = "",
    limits: Limits | None = None,
) -> str:
    """Return what the owner is told."""
    caps = limits or Limits()
    allowed = "takes part in such runs too (--allow-plain)" if plain else "takes no part in such runs"
    budget = (
        "it has no budget for that (--epsilon-budget)"
        if caps.epsilon is None
        else f"it takes part up to ε = {caps.epsilon:g}, and in no run without differential privacy"
    )
    return WORDS.format(
        name=name, server=server, data=f"{data} (messages of {me} only)" if me else data, plain=allowed,
        hide_among=hide_among, parameters=caps.parameters, epochs=caps.epochs, minutes=caps.minutes, runs=caps.runs,
        budget=budget, counts=COUNTS.format(hide_among=hide_among) if counts else "",
    )  # fmt: skip


def words_for(home: Path, told: Settings) -> str:
    """Return what the owner of a home is told about these settings."""
    data = told.data or str(home / "text")
    return words(
        told.name, told.server, data, told.plain, counts=told.counts, hide_among=told.hide_among, me=told.me,
        limits=told.limits,
    )  # fmt: skip


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
    if more := home_option(home):  # not in the words: a home that is moved needs no new consent
        say(f"The commands above need the option{more}")
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
