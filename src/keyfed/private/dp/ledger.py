r"""The ledger: every noisy release of a run, written and on the disk *before* it is made.

One JSON object a line, each with the hash of the line before it, the first with the terms (δ, population, …). Next to
the ledger lies its head, the number of rows and the last hash. So ε never under-counts:

- killed while a row is written: the torn line is counted as a release, though nothing was released yet;
- killed between row and release: the row stays, the round is done again under a row of its own;
- a changed, removed or reordered row, or an older copy of the file: the chain or the head does not fit, and nothing is
  printed. A person who can rewrite *both* files and the metrics can forge them all; a ledger is no proof against its
  owner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from keyfed.errors import PrivacyError
from keyfed.files import BROKEN, append_durably, make_durable, parse_json, read_json, write_atomically
from keyfed.private.dp.accounting import COARSE, FINE, Accountant, Release, Row, TreeRelease, check_delta, epsilon

LEDGER, HEAD = "ledger.jsonl", "ledger.head.json"
ORIGIN = "0" * 64  # the hash before the first line
Verdict = Literal["GUARANTEE", "BOUND ONLY", "SIMULATED", "NONE"]
MOST_DELTA = 1e-3  # above it (ε, δ) is a bound, and not what a person may rely on: δ is the chance that ε fails


@dataclass(frozen=True, slots=True)
class Terms:
    """What the ε of a ledger is about; its first line.

    Attributes:
      population: clients that the sampling rate and δ are meant for.
      clients: clients that there are in fact.
      cohort: clients called in a round, in expectation, as the noise has it; `called` those in fact.
      randomness: where noise and cohorts come from: the operating system, or the run's seed (a simulation).
      budget: ε not to be exceeded; None for none.
      secure: clients' parts are summed under masks.
      raw_vocabulary: the vocabulary was made from these clients' text, without noise.
      enrolled: SHA-256 of the names of the real clients that the ε is about; None in a simulation.
      count_noise: noise of counts (of unclipped clients, of losses), in clients, which z pays for; None where nothing
        is counted, and in ledgers that were begun before it was written down.
    """

    delta: float
    population: int
    clients: int
    cohort: float
    called: float
    z: float
    mechanism: Literal["gaussian", "tree"]
    sensitivity: str
    randomness: Literal["system", "derived"]
    budget: float | None = None
    gap: int | None = None
    secure: bool = False
    raw_vocabulary: bool = False
    enrolled: str | None = None
    count_noise: float | None = None

    @property
    def rate(self) -> float:
        """The chance q that a client is called."""
        return min(1.0, self.cohort / self.population)

    @property
    def simulated(self) -> bool:
        """Whether the ε is that of an imagined fleet, or of noise that the run's seed gives away."""
        return self.randomness == "derived" or self.population != self.clients or self.cohort != self.called


@dataclass(frozen=True, slots=True)
class Entry:
    """One release: what, for which round, at which attempt."""

    row: Row
    what: str
    round: int
    attempt: int


class Ledger:
    """An open ledger; `book` returns when the row is on the disk. Use `open_ledger` or `read_ledger`."""

    def __init__(self, folder: Path, terms: Terms, entries: list[Entry], hashes: list[str]) -> None:
        self._folder = folder
        self.terms = terms
        self.entries = entries
        self.hashes = hashes

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.hashes[-1]

    def attempts(self, round: int) -> int:
        """How often a round's release was booked already."""
        return sum(e.round == round and e.what == "update" for e in self.entries)

    def book(self, row: Row, what: str, round: int) -> Entry:
        """Write a release down, durably; only then may it be made."""
        entry = Entry(row, what, round, sum(e.round == round and e.what == what for e in self.entries))
        line, digest = _line(_plain(entry), self.head)
        _append(self._folder / LEDGER, line)
        self.entries.append(entry)
        self.hashes.append(digest)
        _write_head(self._folder, self.hashes)
        return entry

    def rows(self) -> list[Row]:
        """All releases, merged by kind in `epsilon`."""
        return [e.row for e in self.entries]

    def epsilon(self, kind: Accountant = "pld", *, more: Iterable[Row] = (), grid: float = COARSE) -> float:
        """ε of everything booked, and of `more` on top."""
        return epsilon([*self.rows(), *more], self.terms.delta, kind, population=self.terms.population, grid=grid)

    def spent(self, more: Iterable[Row] = ()) -> float:
        """ε by a coarse PLD, and by a fine one where the coarse one lies above the budget; both are valid."""
        more = list(more)
        coarse = self.epsilon(more=more)
        return (
            coarse if self.terms.budget is None or coarse <= self.terms.budget else self.epsilon(more=more, grid=FINE)
        )

    def allows(self, more: Iterable[Row]) -> bool:
        """Whether these releases still fit into the budget."""
        return self.terms.budget is None or self.spent(more) <= self.terms.budget

    def verdict(self, delta: float | None = None) -> Verdict:
        """Return what the ledger is worth, see `verdict_of`; NONE where a release had no noise."""
        if any(row.z == 0 for row in self.rows()):
            return "NONE"
        return verdict_of(self.terms, delta)


def verdict_of(terms: Terms, delta: float | None = None) -> Verdict:
    """Return GUARANTEE, BOUND ONLY where δ is above `MOST_DELTA`, SIMULATED, or NONE where nothing is promised.

    Args:
      delta: δ of all that is promised, where the terms have a part of it only; None for theirs.
    """
    if terms.z == 0:
        return "NONE"
    if terms.simulated:
        return "SIMULATED"
    return "GUARANTEE" if (terms.delta if delta is None else delta) <= MOST_DELTA else "BOUND ONLY"


def open_ledger(folder: Path, terms: Terms) -> Ledger:
    """Go on with the ledger of a folder, under the same terms, or begin one."""
    check_delta(terms.delta, terms.population)
    if not (folder / LEDGER).exists():
        if (folder / HEAD).exists():
            raise PrivacyError(f"{folder / LEDGER} is gone, but {HEAD} says that it was there; {REFUSED}")
        line, digest = _line({"terms": asdict(terms)}, ORIGIN)
        _append(folder / LEDGER, line)
        make_durable(folder)
        _write_head(folder, [digest])
        return Ledger(folder, terms, [], [digest])
    ledger, torn = _read(folder)
    if ledger is None:  # killed while the terms were written: nothing had been released
        (folder / LEDGER).unlink()
        return open_ledger(folder, terms)
    if ledger.terms != terms:
        changed = [f.name for f in fields(Terms) if getattr(terms, f.name) != getattr(ledger.terms, f.name)]
        raise PrivacyError(
            f"{folder / LEDGER} was begun under other terms ({', '.join(changed)}); one ε cannot speak of both. "
            "Start another run"
        )
    if torn is not None:
        with (folder / LEDGER).open("r+b") as f:
            f.truncate(torn)
        ledger.entries.pop()
        round = ledger.entries[-1].round if ledger.entries else 0
        ledger.book(_usual(terms, ledger.entries), "torn", round)
    elif not (folder / HEAD).exists() or _head(folder)["rows"] < len(ledger.hashes):
        _write_head(folder, ledger.hashes)
    return ledger


def begun_terms(folder: Path) -> Terms | None:
    """Return the terms that a folder's ledger was begun under; None where there is none, or no whole line of it."""
    ledger = _read(folder)[0] if (folder / LEDGER).exists() else None
    return None if ledger is None else ledger.terms


def read_ledger(folder: Path) -> Ledger:
    """Read a ledger without changing it; a torn last line counts as a release.

    Raises:
      PrivacyError: there is none, or it is not the one that was written.
    """
    if not (folder / LEDGER).exists():
        raise PrivacyError(
            f"{folder} has no {LEDGER}: nothing was trained there with differential privacy (`keyfed train --dp`)"
        )
    ledger, _ = _read(folder)
    if ledger is None:
        raise PrivacyError(f"{folder / LEDGER} has no whole line; nothing was released under it")
    return ledger


def check_against_metrics(ledger: Ledger, records: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a ledger that is older than the metrics next to it: every round names the head it was booked under."""
    for record in records:
        try:
            noted = record["privacy"]["ledger"]
            rows, head = int(noted["rows"]), str(noted["head"])
        except BROKEN:
            raise PrivacyError(
                f"round {record.get('round')} of metrics.jsonl names no row of the ledger; {REFUSED}"
            ) from None
        if not 1 <= rows <= len(ledger.hashes) or ledger.hashes[rows - 1] != head:
            raise PrivacyError(
                f"round {record.get('round')} was released under row {rows} of the ledger, which is missing or not the "
                f"one it was; {REFUSED}"
            )


REFUSED = "ε is not printed for a ledger that was changed or rolled back"


def _usual(terms: Terms, before: Iterable[Entry]) -> Row:
    """The release that a torn line is counted as: one like those before it, of the same tree."""
    if terms.mechanism == "tree":
        assert terms.gap is not None
        trees = [e.row.tree for e in before if isinstance(e.row, TreeRelease)]
        return TreeRelease(terms.z, terms.gap, tree=max(trees, default=0))
    return Release(terms.z, terms.rate)


def _plain(entry: Entry) -> dict[str, Any]:
    kind = "tree" if isinstance(entry.row, TreeRelease) else "gaussian"
    return {
        "what": entry.what, "round": entry.round, "attempt": entry.attempt, "mechanism": kind, **asdict(entry.row),
    }  # fmt: skip


def _entry(plain: Mapping[str, Any]) -> Entry:
    kind: type[Row] = TreeRelease if plain["mechanism"] == "tree" else Release
    row = kind(**{f.name: plain[f.name] for f in fields(kind) if f.name in plain})
    return Entry(row, plain["what"], plain["round"], plain["attempt"])


def _line(plain: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """A row as a line, with its hash: SHA-256 of everything in it, the hash before it included."""
    content = {**plain, "before": before}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "hash": digest}).encode(), digest


def _append(path: Path, line: bytes) -> None:
    try:
        append_durably(path, line)
    except OSError as e:
        raise PrivacyError(
            f"{path}: could not be written ({e.strerror or e}), so nothing was released; mend it and go on with "
            "--resume"
        ) from e


def _write_head(folder: Path, hashes: list[str]) -> None:
    write_atomically(folder / HEAD, json.dumps({"rows": len(hashes), "hash": hashes[-1]}).encode())


def _head(folder: Path) -> dict[str, Any]:
    try:
        head = read_json(folder / HEAD)
        return {"rows": int(head["rows"]), "hash": str(head["hash"])}
    except (OSError, *BROKEN) as e:
        raise PrivacyError(f"{folder / HEAD} cannot be read ({e}); {REFUSED}") from None


def _read(folder: Path) -> tuple[Ledger | None, int | None]:
    """Return the ledger, a torn last line counted as an entry, and where that line begins (None: no torn line).

    The first may be None: then not even the terms were written whole.
    """
    path = folder / LEDGER
    try:
        data = path.read_bytes()
    except OSError as e:
        raise PrivacyError(f"{path}: {e.strerror or e}") from None
    whole, _, rest = data.rpartition(b"\n")
    torn = len(data) - len(rest) if rest else None
    hashes: list[str] = []
    entries: list[Entry] = []
    terms: Terms | None = None
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            plain = parse_json(line)
            digest, before = plain.pop("hash"), plain.pop("before")
            fits = before == (hashes[-1] if hashes else ORIGIN) and _line(plain, before)[1] == digest
            if fits and number == 1:
                terms = Terms(**plain["terms"])
            elif fits:
                entries.append(_entry(plain))
        except BROKEN:
            fits = False
        if not fits:
            raise PrivacyError(f"{path}, line {number}, is not what was written there; {REFUSED}")
        hashes.append(digest)
    if (folder / HEAD).exists():
        head = _head(folder)
        if not 1 <= head["rows"] <= len(hashes) or hashes[head["rows"] - 1] != head["hash"]:
            raise PrivacyError(
                f"{path} has {len(hashes)} whole rows, and {HEAD} knows of {head['rows']} that end otherwise; {REFUSED}"
            )
        if len(hashes) + (torn is not None) > head["rows"] + 1:
            raise PrivacyError(f"{path} has more rows than {HEAD} can have missed; {REFUSED}")
    elif len(hashes) > 1:
        raise PrivacyError(f"{folder / HEAD} is gone; {REFUSED}")
    if terms is None:
        return None, torn
    if torn is not None:
        entries.append(Entry(_usual(terms, entries), "torn", entries[-1].round if entries else 0, 0))
    return Ledger(folder, terms, entries, hashes), torn
