"""A training process that trains nothing: `python echo_resident.py HOME PARENT` answers through the client's socket."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from keyfed.deploy import trainer
from keyfed.deploy.processes import die_with
from keyfed.wire.messages import Rejected


def handle(kind: str, body: bytes) -> bytes:
    """Return what came, or do as told."""
    if kind == "train":  # stands for work: the body says how many seconds
        time.sleep(float(body))
    if kind == "unmask":
        raise Rejected("refused by client", "not twice")
    return body


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, trainer._leave)
    die_with(int(sys.argv[2]))
    trainer.serve(Path(sys.argv[1]), handle)
