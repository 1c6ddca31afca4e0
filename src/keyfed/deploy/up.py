"""A whole federation on this machine: server, clients, a run, and nothing left afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from keyfed.deploy import consent
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.client_home import open_home
from keyfed.deploy.enrolment import Enrolment, enrol, read_enrolment, read_roster, write_enrolment
from keyfed.deploy.parts import parts_of, write_parts
from keyfed.deploy.processes import Processes
from keyfed.deploy.submit import Listener, build_app, submit
from keyfed.deploy.superlink import ServerHome, start_superlink
from keyfed.deploy.supernode import Client
from keyfed.wire.flower.environment import need_flower
from keyfed.wire.roster import mark_of, roster_hash

if TYPE_CHECKING:
    from keyfed.config.load import Config
    from keyfed.run.recipe.settings import Setting

T = TypeVar("T")
CONNECT_SECONDS = 120.0
TEXT = "text"


def lay_out(config: Config, clients: int, root: Path) -> tuple[Config, dict[str, Path]]:
    """Write every client's text under `root` and return the run's configuration on it, and the files.

    A simulation on that folder is the same run: every client is trained on, none is held out whole.
    """
    from keyfed.text.catalogue import load_corpus

    data = config.data
    corpus = load_corpus(
        data.name, data_dir=Path(data.dir) if data.dir else None, author_column=data.author_column,
        text_column=data.text_column,
    )  # fmt: skip
    files = write_parts(parts_of(corpus, clients), root / TEXT)
    on_files = replace(
        data, name=str((root / TEXT).resolve()), dir=None, partition="natural", clients=None, unseen=0.0,
        author_column=None, text_column=None,
    )  # fmt: skip
    return replace(config, data=on_files), files


def run_files(
    config: Config,
    vocab: str,
    out: Path,
    *,
    clients: int,
    wait: float,
    resume: bool,
    raw_vocabulary: bool = False,
    own: float | None = None,
) -> dict[str, bytes]:
    """Return the files of a submission.

    Args:
      raw_vocabulary: the vocabulary was made from the clients' text.
      own: share of the clients' lines that are in the base model's own text, where it was measured.
    """
    from keyfed.config.load import to_document
    from keyfed.deploy.server_app import RUN, VOCAB

    told = {
        "config": to_document(config), "out": str(out.resolve()), "resume": resume,
        "clients": clients, "wait": wait, "raw_vocabulary": raw_vocabulary, "own": own,
    }  # fmt: skip
    return {RUN: json.dumps(told).encode(), VOCAB: vocab.encode()}


def start_clients(
    processes: Processes,
    server: ServerHome,
    address: str,
    homes: Mapping[str, Path],
    data: Mapping[str, Path],
    *,
    plain: bool,
    resident: Callable[[Path], Sequence[str]] | None = None,
) -> list[Client]:
    """Make the homes of clients, enrol them all and start them.

    Args:
      resident: the command of a training process, in place of the usual one.
    """
    made: list[Client] = []
    for name, path in homes.items():
        agree = consent.asking(path, yes=True, read=None, say=lambda line: None)
        home = open_home(path, name=name, server=address, ca=server.ca, data=data[name], plain=plain, agree=agree)
        command = tuple(resident(path)) if resident is not None else ()
        made.append(Client(processes, home, resident=command, tag=f"{name}-"))
    given = [read_enrolment(write_enrolment(one.home).read_bytes()) for one in made]
    _trust(server, given, made)
    for one in made:
        one.start_resident()
    enrol(server, given)
    for one in made:
        one.wait_resident()
        one.start_node()
    return made


def _trust(server: ServerHome, given: Sequence[Enrolment], clients: Sequence[Client]) -> None:
    """Let clients of this machine trust the roster that they are about to be on, however many of them are new."""
    there = {name: str(entry["identity"]) for name, entry in read_roster(server).items() if not entry["revoked"]}
    there |= {one.name: one.identity.hex() for one in given}
    trusted = roster_hash(mark_of(name, identity) for name, identity in there.items())
    for one in clients:
        settings = one.home.settings()
        one.home.write(replace(settings, limits=replace(settings.limits, roster=trusted)))


def aside(work: Callable[[], T]) -> Future[T]:
    """Do something beside; Ctrl-C does not wait for it, as it would for an executor's thread."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=do, name="aside", daemon=True).start()
    return future


def up(
    config: Config,
    clients: int,
    out: Path,
    root: Path,
    listener: Listener,
    *,
    plain: bool,
    chosen: Sequence[Setting] = (),
    offered: bool = False,
) -> Any:
    """Run a federation of `clients` on this machine under the folder `root` and return the run's result.

    All processes have ended when this returns or raises.

    Args:
      chosen: what the recipe chose.
      offered: the run asks for no start, and takes the base model where that fits the clients' text.
    """
    need_flower()
    from keyfed.run.console import plural
    from keyfed.run.prepare import prepare
    from keyfed.run.recipe.pilot import with_carried_step
    from keyfed.run.remote.terms import terms_for
    from keyfed.run.remote.train import deployable
    from keyfed.run.start.weights import find_source, make_ready, not_base, offer_start

    deployable(config)
    if config.privacy.on:
        terms_for(config, clients)  # what cannot be promised is said before anything starts
    config, files = lay_out(config, clients, root)
    server = ServerHome(root / "server")
    make_certificates(server.path, [])
    with Processes(root) as processes:
        preparing = aside(lambda: prepare(config))  # while the server starts
        address = start_superlink(processes, server, "127.0.0.1", 0)
        listener.say(
            f"server on {address}: TLS, node keys; {plural(clients, 'client')}, each a process with its own text"
        )
        homes = {name: root / "clients" / name for name in files}
        start_clients(processes, server, address, homes, files, plain=plain)
        prepared = preparing.result()
        if offered:
            config, _, why_not = offer_start(config, prepared)
            if why_not:
                listener.say(not_base(why_not))
        config, lines = with_carried_step(config, chosen, offered=offered)
        for line in lines:
            listener.say(line)
        _, start = make_ready(config, prepared, find_source(config), listener.say)
        files_of_run = run_files(
            config, prepared.vocab.to_json(), out, clients=clients, wait=CONNECT_SECONDS, resume=False,
            raw_vocabulary=config.data.vocab_file is None, own=start.get("own"),
        )  # fmt: skip
        build_app(root / "app", files_of_run)
        return submit(server, root / "app", listener)
