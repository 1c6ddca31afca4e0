"""Small private federations in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from keyfed.config import Config
from keyfed.engine.roster import Roster
from keyfed.engine.transport import InProcess
from keyfed.run import deployed_private
from keyfed.run.deployed import train_deployed
from keyfed.sections import PrivacyConfig

from .deployed import QUICK, federation, small_config, vocabulary, write_texts

SMALL_NOISE = 1e-9  # too little to move a float32


def private_config(folder: Path, method: str = "fedavg", *, clients: int = 5, **more: Any) -> Config:
    """A private run over texts in `folder`, everybody called in every round unless said otherwise."""
    privacy = {"noise": 1.0, "clip": 5.0, "quantile": None, "twin": False, **more.pop("privacy", {})}
    write_texts(folder / "texts", clients)
    _, path = vocabulary(folder)
    config = small_config(folder / "texts", path, method, **{"cohort": clients, **more})
    sampling = "uniform" if privacy.get("mechanism") == "tree" else "poisson"
    participation = replace(config.participation, sampling=sampling)
    return replace(config, privacy=PrivacyConfig(**privacy), participation=participation)


def enrol(folder: Path, clients: int = 5, name: str = "clients", **more: Any) -> tuple[InProcess, Roster]:
    """Sessions for the texts of `private_config`."""
    return federation(folder / name, sorted((folder / "texts").iterdir())[:clients], **more)


def deploy(folder: Path, config: Config, transport: InProcess, roster: Roster, name: str = "deployed", **more: Any):
    """Train; return the result."""
    vocab, _ = vocabulary(folder)
    return train_deployed(config, vocab, folder / name, transport, roster, patience=QUICK, **more)


def without_noise(monkeypatch: Any) -> None:
    """Let the operating system's noise be zero: what is left is what the clients sent."""
    import torch

    zero = lambda: lambda name, shape: torch.zeros(shape, dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr(deployed_private, "system", zero)
