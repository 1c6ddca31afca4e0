"""What clients keep between rounds: one file a client and round, and a note of which round's file counts.

A client that trains proposes a new state; it counts only once the server has acknowledged the upload that belongs to
it. Until then, and for ever if the upload was lost, the client goes on from the state acknowledged before. Files are
never changed, so a checkpoint only has to note the rounds (and sums) of the files that counted at its moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save

from keyfed.errors import RunError
from keyfed.federated.types import ClientId, Params
from keyfed.files import make_durable, write_atomically

FIRST = "first.state"  # no client's: from here all start that have not joined


class StateDamaged(RunError):
    """A client's state that is there and cannot be read."""


@dataclass(frozen=True, slots=True)
class Version:
    """A state file that counts: the round it was made in, and its SHA-256."""

    round: int
    sha256: str


def state_file(folder: Path, client: ClientId, round: int) -> Path:
    """Where a client's state of a round lies; ids are hashed, since they may hold any character."""
    name = hashlib.blake2b(client.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
    return folder / f"{name}-{round:06d}.safetensors"


def write_state(path: Path, state: Params) -> None:
    """Write one client's state; it reaches the disk for good when a checkpoint names it."""
    write_atomically(path, save({name: t.detach().cpu().contiguous() for name, t in state.items()}), durable=False)


def read_state(path: Path, device: str = "cpu") -> Params:
    try:
        return {name: t.to(torch.device(device)) for name, t in parse_tensors(path.read_bytes()).items()}
    except OSError as e:
        raise RunError(f"{path}: {e.strerror or e}; a client's state is missing, go on with --resume") from e
    except ValueError as e:
        raise StateDamaged(f"{path}: {e}; a client's state is damaged, go on with --resume") from None


def parse_tensors(data: bytes) -> Params:
    """Read tensors of our own; ValueError where they are damaged."""
    try:
        return load(data)
    except Exception as e:  # safetensors has an error class of its own, and raises others too
        raise ValueError(f"damaged tensors: {str(e)[:200]}") from None


class ClientStates:
    """The states of all clients of a run.

    Attributes:
      rounds: for every client that has joined, the round of the state that counts.
    """

    def __init__(self, folder: Path, versions: Mapping[ClientId, Version] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rounds: dict[ClientId, int] = {client: v.round for client, v in (versions or {}).items()}
        self._sums: dict[Path, str] = {self._file(c): v.sha256 for c, v in (versions or {}).items()}
        self._held: set[Path] = set(self._sums)  # named by a checkpoint: not to be removed
        self._good: set[Path] = set()  # what counted with the last good model: not to be removed either

    def _file(self, client: ClientId) -> Path:
        return state_file(self.folder, client, self.rounds[client])

    def acknowledged(self, client: ClientId) -> Path | None:
        """Return the file a client goes on from; None for one that has not joined."""
        return self._file(client) if client in self.rounds else None

    @property
    def first(self) -> Path | None:
        """The file that a client which has not joined goes on from, where the method starts all from the first θ."""
        path = self.folder / FIRST
        return path if path.exists() else None

    def begin_from(self, state: Params) -> None:
        """Write what clients start from whenever they join; it stays as it was written first."""
        if self.first is None:
            write_state(self.folder / FIRST, state)

    def proposed(self, client: ClientId, round: int) -> Path:
        return state_file(self.folder, client, round)

    def acknowledge(self, round: int, trained: Iterable[ClientId], contributors: Iterable[ClientId]) -> None:
        """Let the proposals of contributors count and drop those of all others who trained."""
        counted = set(contributors)
        for client in trained:
            before = self.acknowledged(client)
            if client in counted:
                self.rounds[client] = round
                self._forget(before)
            else:
                self._forget(self.proposed(client, round))

    def _forget(self, path: Path | None) -> None:
        if path is not None and path not in self._held and path not in self._good:
            path.unlink(missing_ok=True)
            self._sums.pop(path, None)

    def keep_good(self, rounds: Mapping[ClientId, int]) -> None:
        """Keep the files of these rounds, which a run may go back to, until it names others."""
        before, self._good = self._good, {state_file(self.folder, c, round) for c, round in rounds.items()}
        for path in before - self._good - {self._file(client) for client in self.rounds}:
            self._forget(path)

    def go_back(self, rounds: Mapping[ClientId, int]) -> None:
        """Let the states of these rounds count again, which `keep_good` kept; clients that joined since have none."""
        before = {self._file(client) for client in self.rounds}
        self.rounds = dict(rounds)
        for path in before - {self._file(client) for client in self.rounds}:
            self._forget(path)

    def versions(self, rounds: Mapping[ClientId, int] | None = None) -> dict[ClientId, Version]:
        """Return what counts now, or did in these rounds, every file on the disk for good: for a checkpoint."""
        out = {}
        counting = self.rounds if rounds is None else rounds
        for client in sorted(counting):
            path = state_file(self.folder, client, counting[client])
            if path not in self._sums:
                make_durable(path)
                self._sums[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            out[client] = Version(counting[client], self._sums[path])
        make_durable(self.folder)
        return out

    def hold(self, checkpoints: Iterable[Mapping[ClientId, Version]]) -> None:
        """Keep exactly the files that these checkpoints name, and those that count now."""
        self._held = {state_file(self.folder, c, v.round) for versions in checkpoints for c, v in versions.items()}
        current = {self._file(client) for client in self.rounds}
        for path in self.folder.glob("*.safetensors"):
            if path not in current:
                self._forget(path)


def check_versions(folder: Path, versions: Mapping[ClientId, Version]) -> None:
    """Raise RunError unless every file that a checkpoint names is there and whole."""
    for client, version in versions.items():
        path = state_file(folder, client, version.round)
        try:
            data = path.read_bytes()
        except OSError as e:
            raise RunError(f"the state of client {client} cannot be read: {e.strerror or e}") from e
        if hashlib.sha256(data).hexdigest() != version.sha256:
            raise RunError(f"the state of client {client} is damaged")
