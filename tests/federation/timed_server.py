"""The server's program of the tests of deadlines: trains as the real one does, with less patience, and keeps times."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from flwr.serverapp import ServerApp

from keyfed.config.load import config_from
from keyfed.deploy.enrolment import names_by_key
from keyfed.deploy.homes import ServerHome
from keyfed.deploy.server_app import RUN, VOCAB, Printer, emit, wait_for
from keyfed.run.folder import read_metrics
from keyfed.run.remote.train import Patience, train_deployed
from keyfed.text.vocab import Vocab
from keyfed.wire.flower.server import FlowerTransport, GridMailbox
from keyfed.wire.roster import Roster, key_sum
from keyfed.wire.transport import Lost

ANSWER_SECONDS = 20.0
app = ServerApp()


class Timed(FlowerTransport):
    """Remembers how long each exchange took, and who was lost in it."""

    def exchange(self, posts, seconds):
        began = time.monotonic()
        answers = super().exchange(posts, seconds)
        took = time.monotonic() - began
        lost = {name: [a.reason, a.detail] for name, a in answers.items() if isinstance(a, Lost)}
        kind = next((post.kind for post in posts.values()), "none")
        self.log.append({"kind": kind, "seconds": seconds, "took": took, "called": sorted(posts), "lost": lost})
        return answers


@app.main()
def main(grid, context):
    """Train what was submitted."""
    folder, home = Path(__file__).parent, ServerHome(Path(os.environ["KEYFED_SERVER_HOME"]))
    told = json.loads((folder / RUN).read_text())
    transport = Timed(GridMailbox(grid), lambda key: names_by_key(home).get(key_sum(key)), str(context.run_id))
    transport.log = []
    wait_for(transport.clients, told["clients"], told["wait"], lambda line: None)
    train_deployed(
        config_from(told["config"], RUN), Vocab.from_json((folder / VOCAB).read_text()), Path(told["out"]), transport,
        Roster(home.roster), Printer(), patience=Patience(ANSWER_SECONDS, 60.0, 0.5),
    )  # fmt: skip
    emit("result", {"exchanges": transport.log, "rounds": read_metrics(Path(told["out"]))})
