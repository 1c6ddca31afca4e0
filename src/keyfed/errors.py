"""Every error Keyfed raises on purpose.

    KeyfedError                 one line on stderr, exit code 2
    ├── ConfigError             an option, method, model or command that does not exist or makes no sense
    ├── DataError               a corpus that is missing, empty, damaged or too small
    │   └── TooLittleText       no client has the tokens of one training window
    ├── ShapeMismatch           tensors that do not fit the model
    ├── RunError                a run folder: exists, locked, changed configuration, no valid checkpoint
    │   ├── FolderInUse         another process works in it
    │   └── NoMainGuard         a program that would start its run again in every worker process
    ├── PrivacyError            a privacy budget, guarantee or ledger that cannot be given or trusted
    ├── RankError               a process of a run on several that failed, is missing or fell silent
    ├── DeployError             a certificate, key, process or message of a real federation that is not as it must be
    ├── DownloadError           a corpus that could not be fetched, or whose checksum is wrong
    └── SecureSumError          a secure sum that cannot go on: a message that does not fit, a share that is wrong
        ├── BelowThreshold      too few clients are left: the sum stays hidden
        ├── Refused             a client that does not do what the server asks, to protect its own values
        ├── Lied                a client sent what no honest client sends: nothing is learnt from the sum
        └── SecureSumOverflow   a value outside the public range of the secure sum; nothing was sent
            └── DoesNotFit      a share, count or fact that no range of a layer could hold

A message says what was got, what was expected, where, and what to do. Anything that is not a
`KeyfedError` is a defect of ours and keeps its traceback (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal


class KeyfedError(Exception):
    """Base of all errors a user can cause and mend."""


class ConfigError(KeyfedError):
    """An option, method, model or value that does not exist or makes no sense."""


class DataError(KeyfedError):
    """A corpus that is missing, empty, damaged or too small."""


class TooLittleText(DataError):
    """No client has the tokens of one training window."""


class ShapeMismatch(KeyfedError):
    """Tensors that do not fit the model they are meant for."""


class RunError(KeyfedError):
    """A run folder that cannot be used as asked."""


class FolderInUse(RunError):
    """A run folder in which another process works."""


class NoMainGuard(RunError):
    """A program that worker processes import and that trains as soon as it is imported."""


class PrivacyError(KeyfedError):
    """A privacy budget, guarantee or ledger that cannot be given or trusted."""


class RankError(KeyfedError):
    """A process of a run on several that failed, is missing or fell silent."""


class DeployError(KeyfedError):
    """A certificate, key, process or message of a real federation that is not as it must be."""


class DownloadError(KeyfedError):
    """A corpus that could not be fetched, or whose checksum is wrong."""


class SecureSumError(KeyfedError):
    """A secure sum that cannot go on: a message that does not fit, or a share that is wrong."""


class BelowThreshold(SecureSumError):
    """Too few clients are left to open a secure sum: it stays hidden."""


class Refused(SecureSumError):
    """A client does not do what the server asks, to protect its own values.

    Attributes:
      accused: the client whose doing it is; None where that is the server's.
      evidence: what lets the server check the accusation (`private.secagg.accusation`); None where the accused did not
        sign what it is accused of.
    """

    def __init__(self, message: str, accused: str | None = None, evidence: bytes | None = None) -> None:
        super().__init__(message)
        self.accused, self.evidence = accused, evidence


class Lied(SecureSumError):
    """A client sent what no honest client sends; nothing is learnt from the sum.

    Attributes:
      by: clients of whom this is proved; empty where it is one of `among`, and nothing shows which.
      among: clients whose vectors are in the sum; empty where that is not known at this place.
    """

    def __init__(self, message: str, by: Iterable[str] = (), among: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.by, self.among = tuple(by), tuple(among)


class SecureSumOverflow(SecureSumError):
    """A number of a layer outside the public range of the secure sum; nothing was sent.

    The message has numbers of the client in it and stays with the client.

    Attributes:
      reason: why the client is left out, as the server may know.
      public_text: all that may leave the client; the same for every client, layer and number.
    """

    reason: Literal["out of range", "does not fit"] = "out of range"
    public_text = "a number is beyond the public ranges of this round; nothing was sent"


class DoesNotFit(SecureSumOverflow):
    """A share, count or fact that no range of a layer could hold: ranges do not move for it."""

    reason = "does not fit"
    public_text = "this client does not fit the public numbers of the run; nothing was sent"


def cut(text: str, most: int = 500) -> str:
    """Return the beginning of a text that may quote what somebody else sent."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def described(error: BaseException) -> str:
    """Return an error for a log: ours with its message, others with type and place, as their words may quote text.

    Example:
      >>> described(KeyfedError("no text")), described(KeyError("a word that somebody typed"))
      ('KeyfedError: no text', 'KeyError')
    """
    if isinstance(error, KeyfedError):
        return cut(f"{type(error).__name__}: {error}")
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" in {place.tb_frame.f_code.co_name}, line {place.tb_lineno}"
    return f"{type(error).__name__}{where}"


def nearest(got: str, known: Iterable[str]) -> str:
    """Return `" (did you mean X?)"` for the closest known name, or an empty string.

    Example:
      >>> nearest("fedvag", ["fedavg", "fedsgd"])
      ' (did you mean fedavg?)'
      >>> nearest("zzz", ["fedavg"])
      ''
    """
    close = difflib.get_close_matches(got, list(known), n=1, cutoff=0.55)
    return f" (did you mean {close[0]}?)" if close else ""
