"""A SuperNode that does not send what it announced: `python hostile_node.py HOME SERVER PORT PARENT`.

HOME/mode says what it does to its answers to one kind of message: "mute train" announces them and sends nothing, "drip
train" sends one object every few seconds. All else is the real node.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from flwr.supernode import start_client_internal

from keyfed.deploy import supernode

DRIP_SECONDS = 6.0
mode: list[Path] = []  # the node has other arguments once it runs
last = [""]
honest_refusal, honest_push = supernode.refusal, start_client_internal.push_object_contents_from_iterable


def refusal(home, kind):
    """Note which kind of message is being answered."""
    last[0] = kind
    return honest_refusal(home, kind)


def push(contents, push_object_fn, **more):
    """Send the objects of a reply, or not."""
    how, _, kind = mode[0].read_text().strip().partition(" ")
    if kind != last[0] or how not in ("mute", "drip"):
        honest_push(contents, push_object_fn, **more)
    elif how == "drip":
        for name, content in contents:
            time.sleep(DRIP_SECONDS)
            push_object_fn(name, content)


if __name__ == "__main__":
    mode.append(Path(sys.argv[1]) / "mode")
    supernode.refusal = refusal
    start_client_internal.push_object_contents_from_iterable = push
    supernode.main()
