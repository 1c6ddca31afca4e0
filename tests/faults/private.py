"""Small private federations in this process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keyfed.config.load import Config
from keyfed.config.schema import PrivacyConfig
from keyfed.federated.types import Params
from keyfed.private.dp.noise import Draw
from keyfed.private.secagg.keys import SIGNATURE_BYTES
from keyfed.run import privacy
from keyfed.run.checkpoint import read_checkpoint
from keyfed.run.remote import private as deployed_private
from keyfed.run.remote import rounds
from keyfed.run.remote.train import train_deployed
from keyfed.wire.messages import unpack
from keyfed.wire.roster import Roster
from keyfed.wire.transport import InProcess

from .deployed import QUICK, federation, small_config, vocabulary, write_texts

VICTIM = "client-2"


def private_config(folder: Path, method: str = "fedavg", *, clients: int = 5, **more: Any) -> Config:
    """A private run over texts in `folder`, everybody called in every round unless said otherwise."""
    given = {"noise": 1.0, "clip": 5.0, "quantile": None, "twin": False, **more.pop("privacy", {})}
    write_texts(folder / "texts", clients)
    _, path = vocabulary(folder)
    config = small_config(folder / "texts", path, method, **{"cohort": clients, **more})
    sampling = "uniform" if given.get("mechanism") == "tree" else "poisson"
    participation = replace(config.participation, sampling=sampling)
    return replace(config, privacy=PrivacyConfig(**given), participation=participation)


def enrol(folder: Path, clients: int = 5, name: str = "clients", **more: Any) -> tuple[InProcess, Roster]:
    """Sessions for the texts of `private_config`."""
    return federation(folder / name, sorted((folder / "texts").iterdir())[:clients], **more)


def deploy(
    folder: Path, config: Config, transport: InProcess, roster: Roster, name: str = "deployed", **more: Any
) -> dict[str, Any]:
    """Train; return the result."""
    vocab, _ = vocabulary(folder)
    return train_deployed(config, vocab, folder / name, transport, roster, patience=QUICK, **more)


def models_of(run: Path, rounds: int) -> list[Params]:
    """The models after the last rounds, as checkpoints have them."""
    return [read_checkpoint(run / "checkpoint", number + 1).state.params for number in range(rounds)]


def silence(*ignored: object) -> Draw:
    """Noise of zeros."""
    del ignored
    return lambda name, shape: torch.zeros(shape, dtype=torch.float64)


def without_noise(monkeypatch: Any) -> None:
    """Let all noise be zero, the operating system's and the simulation's: what is left is what clients sent."""
    monkeypatch.setattr(deployed_private, "system", silence)
    monkeypatch.setattr(privacy, "derived", silence)
    monkeypatch.setattr(privacy, "derived_tree", silence)


def recorded(monkeypatch: Any, before: Callable[[int], None] = lambda number: None) -> list[torch.Tensor]:
    """Return the list that every round's noise of the first layer is noted in, as it is drawn.

    Args:
      before: called with the number of the release before its noise is drawn; it may raise.
    """
    drawn: list[torch.Tensor] = []
    fresh = deployed_private.system
    made = [0]

    def noting() -> Draw:
        made[0] += 1
        before(made[0])
        draw, first = fresh(), [True]

        def note(name: str, shape: torch.Size) -> torch.Tensor:
            noise = draw(name, shape)
            if first.pop() if first else False:
                drawn.append(noise.clone())
            return noise

        return note

    monkeypatch.setattr(deployed_private, "system", noting)
    return drawn


class Killed(Exception):
    """Somebody pulled the plug."""


def once(number):
    """Raise `Killed` at the call of this number, and never again."""
    numbers = itertools.count(1)

    def maybe(*ignored):
        if next(numbers) == number:
            raise Killed

    return maybe


def tree_config(folder, **more):
    """Three groups of clients, one after the other, or as many as their size makes."""
    return private_config(
        folder, clients=6, privacy={"mechanism": "tree", **more.pop("privacy", {})}, **{"cohort": 2, **more}
    )  # fmt: skip


def counting(transport, kind="train"):
    """Count the parts that leave each client, with its answers to messages of a kind."""
    sent, inner = Counter(), transport.fault

    def watch(client, post, handler):
        answer = inner(client, post, handler)
        if post.kind == kind and isinstance(answer, bytes) and unpack(answer[:-SIGNATURE_BYTES]).tensors:
            sent[client] += 1
        return answer

    transport.fault = watch
    return sent


def killed_before_checkpoint(monkeypatch: Any, number: int) -> None:
    """Kill the server once, after the release of a round and before its checkpoint is written."""
    save, kill = rounds.save_checkpoint, once(number)

    def saves(*given: Any) -> None:
        kill()
        save(*given)

    monkeypatch.setattr(rounds, "save_checkpoint", saves)
