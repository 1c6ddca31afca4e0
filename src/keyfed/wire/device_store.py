"""What a client keeps on its own disk: keys, what it has learnt about others' keys, and what it remembers of a run.

    HOME/identity.key          the lasting key, 32 bytes, readable by its owner only
    HOME/serial                number of the next one-time keys
    HOME/keys/000012.key       one-time keys that were posted and not used yet; deleted when a secure sum starts
    HOME/pins.json             identities of other clients as first seen; a changed one is refused
    HOME/roster.json           the roster that the server last published, its hash, and marks of clients known from it
    HOME/runs/RUN/begin.json   what the server said when the run began
    HOME/runs/RUN/*.safetensors  the client's states (duals, …) of the rounds that may count
    HOME/runs/RUN/summed.json  which masked vectors were sent, so that none is sent twice
    HOME/runs/RUN/released.json  hashes of what a count of the run has released so far
    HOME/runs/RUN/counted.json   whose vectors were in the sums of a count, by text (`private.secagg.nested`)
    HOME/runs/RUN/step.json    step and clip of this client's last part of a private run; it takes part in none before
    HOME/runs/RUN/over         the run has ended; all else of it is deleted

Every file is whole or not there. Nothing of it ever leaves the device but public keys. What a server can make a client
keep is bounded (`wire.limits`): sizes, identities, runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from keyfed.errors import RunError
from keyfed.files import BROKEN, parse_json, write_atomically
from keyfed.private.secagg.keys import Identity, OneTime, SignedKeys, make_keys
from keyfed.private.secagg.nested import Chain
from keyfed.wire.limits import MOST_BEGIN, MOST_ENDED, MOST_PINS, MOST_ROSTER
from keyfed.wire.messages import Rejected, about_digest, read_json
from keyfed.wire.roster import mark_of, roster_hash

OVER = "over"
MOST_UNUSED = 8  # one-time keys kept; the server asks for one at a time
T = TypeVar("T")
_STATE = re.compile(r"round-(\d{6,})\.safetensors")


class LastPart(NamedTuple):
    """The step of a private run in which a client's last part left it, and the clip of that."""

    step: int
    clip: float


class DeviceStore:
    """A client's files."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for folder in (home, home / "keys", home / "runs"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)

    def identity(self) -> Identity:
        """Return the lasting key, made on first use."""
        path = self.home / "identity.key"
        if not path.exists():
            _write_secret(path, Identity.make().private_bytes())
        return Identity.from_bytes(path.read_bytes())

    def new_keys(self, client: str) -> SignedKeys:
        """Make one-time keys, keep the private halves, return what is posted; no serial is ever given twice."""
        counter = self.home / "serial"
        serial = _own(counter, int, 0)
        write_atomically(counter, str(serial + 1).encode())
        private, signed = make_keys(self.identity(), client, serial)
        _write_secret(self._key(serial), private.to_bytes())
        for old in sorted((self.home / "keys").glob("*.key"))[:-MOST_UNUSED]:
            old.unlink()
        return signed

    def take_keys(self, serial: int) -> OneTime:
        """Return posted keys and delete them: they serve once, also if this process dies now."""
        path = self._key(serial)
        try:
            keys = OneTime.from_bytes(path.read_bytes())
        except OSError:
            raise Rejected("restarted", f"the one-time keys {serial} are used or gone") from None
        path.unlink()
        return keys

    def _key(self, serial: int) -> Path:
        return self.home / "keys" / f"{serial:08d}.key"

    def pin(self, identities: Mapping[str, bytes]) -> None:
        """Remember other clients' identities as first seen; refuse one that has changed."""
        known = self._pins()
        for name, key in identities.items():
            if known.get(name, key.hex()) != key.hex():
                raise Rejected("identity changed", f'the identity of "{name[:64]}" is not the one seen before')
        new = known | {name: key.hex() for name, key in identities.items()}
        if len(new) > MOST_PINS:
            raise Rejected("over limit", f"this client remembers {MOST_PINS:,} identities of others, and takes no more")
        if new != known:
            write_atomically(self.home / "pins.json", json.dumps(new, indent=0, sort_keys=True).encode())

    def _pins(self) -> dict[str, str]:
        return _own(self.home / "pins.json", _texts, {})

    def meet(self, listed: object, trusted: str = "") -> None:
        """Keep the roster that a server publishes; refuse one of which more than half is new, after a first one.

        A server can invent clients. It cannot replace most of a roster that this client knows without being noticed.

        Args:
          listed: marks of all enrolled clients (`roster.mark_of`); None where a server publishes none.
          trusted: hash of a roster that the owner trusts, however new.

        Raises:
          Rejected: the list is none, too long, or mostly of strangers.
        """
        if listed is None:
            return
        if not isinstance(listed, list) or not all(isinstance(mark, str) and len(mark) == 32 for mark in listed):
            raise Rejected("malformed", "a roster that is not a list of marks")
        if len(listed) > MOST_ROSTER:
            raise Rejected("over limit", f"a roster of {len(listed):,} clients; this client reads {MOST_ROSTER:,}")
        published, known = roster_hash(listed), self.known()
        new = set(listed) - known
        if known and 2 * len(new) > len(set(listed)) and published != trusted:
            raise Rejected(
                "strangers",
                f"{len(new)} of the {len(set(listed))} clients on the roster were never seen before; compare its hash "
                f"with other people's and the operator's, then start once with --trust-roster {published}",
            )
        kept = {"hash": published, "clients": len(set(listed)), "known": sorted(set(listed) | known)[:MOST_ROSTER]}
        if kept != self.roster():
            write_atomically(self.home / "roster.json", json.dumps(kept).encode())

    def roster(self) -> dict[str, Any]:
        """Return the roster that was last accepted: its hash, its clients, and marks of all known ones; {} for none."""
        path = self.home / "roster.json"
        return read_json(path.read_bytes()) if path.exists() else {}

    def known(self) -> set[str]:
        """Marks of all clients that this one has seen, on a roster or in a cohort."""
        pinned = {mark_of(name, key) for name, key in self._pins().items()}
        return pinned | {str(mark) for mark in self.roster().get("known", ())}

    def refuse_strangers(self, identities: Mapping[str, bytes], me: str) -> None:
        """Refuse a cohort of which more than half of the others were never seen before, once somebody was."""
        known = self.known() - {mark_of(me, identities[me].hex())}
        others = [mark_of(name, key.hex()) for name, key in identities.items() if name != me]
        new = sum(mark not in known for mark in others)
        if known and 2 * new > len(others):
            raise Rejected(
                "strangers", f"{new} of the {len(others)} others of this sum are on no roster that this client knows"
            )

    def begin(self, run: str, head: Mapping[str, Any], most: int = 20) -> None:
        """Keep what a run is about; what was said once cannot be changed.

        Args:
          most: runs that have not ended; beyond, the one that was not used for longest is ended.

        Raises:
          Rejected: the run is over, was about something else, or is too large to keep.
        """
        folder, written = self.run(run), json.dumps(head).encode()
        if len(written) > MOST_BEGIN:
            raise Rejected("over limit", f"a run of {len(written):,} bytes; this client keeps {MOST_BEGIN:,} at most")
        if (folder / OVER).exists():
            raise Rejected("stale", "that run is over")
        if (folder / "begin.json").exists() and about_digest(self.begun(run)) != about_digest(head):
            raise Rejected("other method", "that run began with another configuration or vocabulary")
        if not folder.exists():
            self._make_room(most)
        folder.mkdir(exist_ok=True)
        write_atomically(folder / "begin.json", written)

    def _make_room(self, most: int) -> None:
        """End the open runs, and let go the ended ones, that are too many for another; the oldest first."""

        def age(folder: Path) -> float:
            return max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)

        runs = sorted((folder for folder in (self.home / "runs").iterdir() if folder.is_dir()), key=age)
        open_ones = [folder for folder in runs if not (folder / OVER).exists()]
        ending = open_ones[: max(0, len(open_ones) + 1 - most)]
        for folder in ending:
            _end(folder)
        ended = [folder for folder in runs if folder not in open_ones] + ending
        for folder in ended[: max(0, len(ended) - MOST_ENDED)]:
            shutil.rmtree(folder, ignore_errors=True)

    def begun(self, run: str) -> dict[str, Any]:
        """Return what the server said when a run began."""
        try:
            return read_json((self.run(run) / "begin.json").read_bytes())
        except OSError:
            raise Rejected("unknown run", f"this client knows nothing of the run {run[:64]}") from None

    def run(self, run: str) -> Path:
        """Folder of a run; its name comes from outside and is hashed."""
        return self.home / "runs" / hashlib.blake2b(run.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()

    def state(self, run: str, counted: int | None, good: int | None = None) -> Path | None:
        """Return the state of the round that the server last counted, and delete all others; None where none did.

        Args:
          good: the round whose state counted in the server's last good model, which it may go back to: it is kept.

        Raises:
          Rejected: that state is not here. A client that began anew would count twice in a running mean.
        """
        folder = self.run(run)
        kept = None if counted is None else self.state_file(run, counted)
        also = None if good is None else self.state_file(run, good)
        for path in folder.glob("round-*.safetensors"):
            if path not in (kept, also) and _STATE.fullmatch(path.name):
                path.unlink()
        if kept is not None and not kept.exists():
            raise Rejected("state lost", f"the state of round {counted} is gone; this client cannot go on in this run")
        return kept

    def state_file(self, run: str, round: int) -> Path:
        """Where the state of a round lies."""
        return self.run(run) / f"round-{round:06d}.safetensors"

    def seen(self, run: str) -> tuple[int, int, str]:
        """Return (attempt, round, model) of the last training in a run; (0, -1, "") before the first."""

        def parse(found: Any) -> tuple[int, int, str]:
            attempt, round, model = found
            return int(attempt), int(round), str(model)

        return _own(self.run(run) / "seen.json", parse, (0, -1, ""))

    def see(self, run: str, attempt: int, round: int, model: str) -> None:
        """Remember the last training, so that an old message is known as such after a restart, too."""
        write_atomically(self.run(run) / "seen.json", json.dumps([attempt, round, model]).encode())

    def refuse_second(self, run: str, round: int, purpose: str, part: str | None, *, leaves: bool = True) -> None:
        """Note that a masked vector is about to be sent; a second one for the same is refused, whoever asks.

        Two sums over cohorts that differ by one client would show that client's vector by their difference. What was
        trained in a round is sent once, whatever is evaluated beside it; and a part of the held-out text is counted
        once a round, whatever the sum is for.

        Args:
          round: below 0 for what is sent once in a run.
          leaves: whether it is about to be sent; else nothing is noted yet.
        """
        path = self.run(run) / "summed.json"
        before: list[Any] = _own(path, _triples, [])
        now: list[Any] = [] if purpose == "evaluation" else [[round, purpose, None]]
        now += [] if part is None else [[round, "evaluation", part]]
        # Notes of an earlier version have what was evaluated in the place of None.
        if any(note in before or (note[2] is None and note[:2] in [b[:2] for b in before]) for note in now):
            what = f"round {round}" if round >= 0 else f"the sum {part}"
            raise Rejected("summed before", f"this client has sent its part of {what} already")
        if leaves:
            write_atomically(path, json.dumps([*before, *now]).encode())

    def same_release(self, run: str, released: Mapping[str, str]) -> None:
        """Note hashes of what a count has released, by length; refuse another release than that of an earlier sum."""
        path = self.run(run) / "released.json"
        known: dict[str, str] = _own(path, _texts, {})
        for length, digest in released.items():
            if known.get(length, digest) != digest:
                raise Rejected("other model", f"other n-grams of length {length} than in an earlier sum of this count")
        if not set(released) <= set(known):
            write_atomically(path, json.dumps(known | dict(released)).encode())

    def chain(self, run: str, text: str) -> Chain:
        """Return what is remembered of the sums of a text in a run's count."""
        return self._chains(run).get(text, Chain())

    def keep_chain(self, run: str, text: str, chain: Chain) -> None:
        """Remember it, before anything leaves that a later sum could be compared with."""
        chains = {name: one.to_json() for name, one in (self._chains(run) | {text: chain}).items()}
        write_atomically(self.run(run) / "counted.json", json.dumps(chains).encode())

    def _chains(self, run: str) -> dict[str, Chain]:
        def parse(found: Any) -> dict[str, Chain]:
            return {str(text): Chain.from_json(one) for text, one in found.items()}

        return _own(self.run(run) / "counted.json", parse, {})

    def last_part(self, run: str) -> LastPart | None:
        """Return when this client's last part of a private run left it; None before the first."""

        def parse(found: Any) -> LastPart:
            step, clip = found
            return LastPart(int(step), float(clip))

        return _own(self.run(run) / "step.json", parse, None)

    def refuse_early(self, run: str, step: int, separation: int) -> None:
        """Refuse a call that comes less than `separation` steps after this client's last part, whoever asks."""
        last = self.last_part(run)
        if last is not None and step < last.step + separation:
            raise Rejected(
                "too soon", f"step {step}; this client took part in step {last.step} and waits {separation} steps"
            )

    def took_part(self, run: str, step: int, clip: float) -> None:
        """Remember the step and the clip of a part, before it leaves."""
        write_atomically(self.run(run) / "step.json", json.dumps([step, clip]).encode())

    def forget(self, run: str) -> None:
        """Delete everything of a run but the fact that it is over: its name cannot be used again."""
        _end(self.run(run))


def _end(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / OVER, b"")


def _own(path: Path, parse: Callable[[Any], T], missing: T) -> T:
    """Read a JSON file of the client's; what it cannot remember any more, it cannot go on from.

    Raises:
      Rejected: the file is damaged. It is not passed over: it says what this client must not do again.
    """
    try:
        return parse(parse_json(path.read_bytes()))
    except FileNotFoundError:
        return missing
    except (OSError, *BROKEN) as e:
        raise Rejected("state lost", f"{path.name} in this client's home is damaged ({type(e).__name__})") from None


def _texts(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found.values()):
        raise ValueError("expected texts by name")
    return found


def _triples(found: Any) -> list[Any]:
    if not isinstance(found, list) or not all(isinstance(one, list) and len(one) == 3 for one in found):
        raise ValueError("expected a list of lists of three")
    return found


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; it is never there with other rights."""
    temporary = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        raise RunError(f"{path}: could not be written ({e.strerror or e})") from e
