"""The session of a client's training process: its text, its keys, its limits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyfed.deploy.client_home import ClientHome, kept_files, strays
from keyfed.files import write_atomically
from keyfed.private.secagg.threshold import Floors
from keyfed.run.remote.device import own_text
from keyfed.wire.client import ClientSession, Learner

KEPT = "kept"
FOUND = "found.txt"  # how much text the last run found; counts only


def make_session(home: ClientHome) -> ClientSession:
    """Return the session of a client, as its owner has set it up."""
    told = home.settings()

    def say(line: str) -> None:
        write_atomically(home.path / FOUND, line.encode(), durable=False)

    def learner(about: Mapping[str, Any]) -> Learner:
        now = home.settings()  # text and its author are looked for anew with every run
        make = own_text(told.name, text_to_read(home), limits=told.limits, me=now.me or None, say=say)
        return make(about)

    floors = Floors(told.hide_among)
    return ClientSession(home.path, told.name, learner, floors=floors, plain=told.plain, limits=told.limits)


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
