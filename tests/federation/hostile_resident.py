"""A training process whose answer is a bomb where HOME/mode says "bomb KIND": `python hostile_resident.py HOME PARENT`.

The bomb is 120 kB of escaped quotes in a string that never ends: a regular expression that looks for whole strings
reads it again from every quote. "bomblet KIND" is 30 kB of the same, short enough to be read at all. All else is the
real training process.
"""

from __future__ import annotations

import signal
import struct
import sys
from pathlib import Path

from keyfed.deploy import trainer
from keyfed.deploy.homes import ClientHome
from keyfed.deploy.processes import die_with
from keyfed.deploy.trainer import make_session
from keyfed.private.secagg.keys import signed_answer
from keyfed.wire.messages import MAGIC

BOMBS = {"bomb": b'{"' + b'\\"' * 60_000, "bomblet": b'{"' + b'\\"' * 15_000}

if __name__ == "__main__":
    home = ClientHome(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, trainer._leave)
    die_with(int(sys.argv[2]))
    session = make_session(home)

    def handle(kind: str, body: bytes) -> bytes:
        """Answer, or send the bomb."""
        answer = session.handle(kind, body)
        how, _, wanted = (home.path / "mode").read_text().strip().partition(" ")
        if how not in BOMBS or kind != wanted:
            return answer
        bomb = MAGIC + struct.pack("<I", len(BOMBS[how])) + BOMBS[how]
        return signed_answer(session.store.identity(), session.name, kind, bomb)

    trainer.serve(home.path, handle)
