"""The session of a client's training process: its text, its keys, its limits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyfed.deploy.client_home import ClientHome, kept_files, strays
from keyfed.engine.learner import Learner
from keyfed.engine.session import ClientSession
from keyfed.run.on_device import own_text

KEPT = "kept"


def make_session(home: ClientHome) -> ClientSession:
    """Return the session of a client, as its owner has set it up."""
    told = home.settings()

    def learner(about: Mapping[str, Any]) -> Learner:
        return own_text(told.name, text_to_read(home))(about)  # looked for anew with every run

    return ClientSession(home.path, told.name, learner, plain=told.plain)


def text_to_read(home: ClientHome) -> Path:
    """Return the file or folder to train on: the owner's, or links to those of its files that may be trained on."""
    data, days = home.data(), home.settings().keep_days
    files = kept_files(data, days)
    if files == [data] or (days is None and not strays(data)):
        return data
    links = home.path / KEPT
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(links)
    links.mkdir()
    for number, path in enumerate(files):
        (links / f"{number:06d}-{path.name[-100:].lstrip('.')}").symlink_to(path.resolve())
    return links
