"""The server's program of the tests: plays the exchanges listed in steps.json and tells what came back."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from flwr.serverapp import ServerApp

from keyfed.deploy.enrolment import names_by_key
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.server_app import emit, wait_for
from keyfed.wire.flower.server import FlowerTransport, GridMailbox
from keyfed.wire.roster import key_sum
from keyfed.wire.transport import Lost, Post

app = ServerApp()


@app.main()
def main(grid, context):
    """Play the steps."""
    home = ServerHome(Path(os.environ["KEYFED_SERVER_HOME"]))
    told = json.loads((Path(__file__).parent / "steps.json").read_text())
    transport = FlowerTransport(
        GridMailbox(grid), lambda key: names_by_key(home).get(key_sum(key)), str(context.run_id)
    )
    wait_for(transport.clients, told["clients"], 60.0, lambda line: None)
    found = []
    for step in told["steps"]:
        body = os.urandom(step["random"]) if "random" in step else step["body"].encode()
        emit("say", f"step {step['kind']}")
        began = time.monotonic()
        names = step.get("to") or transport.clients()
        answers = transport.exchange(
            {name: Post(step["kind"], body, max(len(body), 1 << 16)) for name in names}, step["seconds"]
        )
        seconds = time.monotonic() - began
        same = hashlib.sha256(body).digest()
        kinds = {
            name: [answer.reason, answer.detail]
            if isinstance(answer, Lost)
            else ("same" if hashlib.sha256(answer).digest() == same else "other")
            for name, answer in answers.items()
        }
        found.append({"answers": kinds, "seconds": seconds})
    emit("result", found)
