"""A code-faithful cell that is stopped is kept, and goes on from there exactly as if it had not been."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyfed.errors import RunError
from keyfed.federated.types import Params, State
from keyfed.files import BROKEN, read_json, write_atomically
from keyfed.run.checkpoint import Best, Checkpoint, load_checkpoint, save_checkpoint
from keyfed.run.loop import Listener

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a cell needs to go on, whole after every round.

    Attributes:
      best: the model chosen on validation so far; that of round 0 before there was one.
      records: a line for each round.
    """

    state: State
    best: Best
    records: tuple[Record, ...] = ()
    seconds: float = 0.0


def keep(folder: Path, about: Mapping[str, Any], kept: Kept) -> None:
    """Write a cell that is stopped: what made it and its lines, then the checkpoint that makes them count."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": dict(about), "records": kept.records})
    write_atomically(folder / "kept.json", text.encode())
    save_checkpoint(folder / "checkpoint", Checkpoint(kept.state, kept.best, 0, kept.seconds))


def find_kept(folder: Path, about: Mapping[str, Any], params: Params, say: Callable[[str], None]) -> Kept | None:
    """Return the cell as it was stopped; None if it never was, or what made it has changed or is damaged.

    Args:
      params: layers in the model's order, in which sums over them round alike, and where they live.
    """
    if not (folder / "kept.json").exists():
        return None
    try:
        found = read_json(folder / "kept.json")
        saved = load_checkpoint(folder / "checkpoint", 0, say)
        same = found["about"] == json.loads(json.dumps(dict(about)))
        if same and saved is not None and saved.best is not None:
            say(f"going on after round {saved.state.round}")
            server = {name: t.to(next(iter(params.values())).device) for name, t in saved.state.server.items()}
            state = replace(saved.state, params=_like(params, saved.state.params), server=server)
            best = replace(saved.best, params=_like(params, saved.best.params))
            return Kept(state, best, tuple(found["records"][: state.round]), saved.seconds)
        why = "it has no checkpoint" if same else "text, settings or machine were others"
    except (OSError, *BROKEN, RunError) as e:
        why = f"it is damaged: {e}"
    say(f"what was begun of this cell cannot be gone on with ({why}); it starts anew")
    shutil.rmtree(folder)
    return None


def go_on(
    kept: Kept,
    rounds: int,
    turn: Callable[[Kept], Kept],
    listen: Listener,
    folder: Path | None,
    about: Mapping[str, Any],
) -> Kept:
    """Take turns up to so many rounds, telling each; a cell that is stopped is kept in its folder, if it has one."""
    try:
        while kept.state.round < rounds:
            kept = turn(kept)
            listen.round(kept.records[-1])
    except KeyboardInterrupt:
        if folder is not None and kept.records:
            keep(folder, about, kept)
        raise
    return kept


def _like(params: Params, saved: Params) -> Params:
    return {name: saved[name].to(tensor.device) for name, tensor in params.items()}
