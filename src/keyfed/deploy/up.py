"""A whole federation on this machine, with nothing left afterwards; and a run submitted to a server elsewhere."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfed.deploy import consent
from keyfed.deploy.certificates import make_certificates
from keyfed.deploy.enrolment import Enrolment, enrol, read_enrolment, write_enrolment
from keyfed.deploy.homes import ServerHome, check_name, check_server, default_server_home, home_option, open_home
from keyfed.deploy.links import link_of, make_links
from keyfed.deploy.processes import Processes, stop_at_signals, unreachable, wait_until
from keyfed.deploy.server_app import Unfinished, build_app, run_files, submit
from keyfed.deploy.superlink import answers, start_superlink
from keyfed.deploy.supernode import Client
from keyfed.deploy.web import start_web
from keyfed.errors import ConfigError, DeployError
from keyfed.files import write_atomically
from keyfed.text.corpus import Author, Corpus
from keyfed.wire.flower.commands import need_flower, write_connection
from keyfed.wire.joined import WEB_SOCKET, WebTransport, aside
from keyfed.wire.roster import Roster, mark_of, roster_hash

if TYPE_CHECKING:
    from keyfed.config.load import Config
    from keyfed.run.console import Listener
    from keyfed.run.recipe import Setting
    from keyfed.text.vocab import Vocab

CONNECT_SECONDS, WAIT_SECONDS = 120.0, 60.0
ATTEMPTS, RETURN_SECONDS, SETTLE_SECONDS = 5, 300.0, 8.0
JOIN_SECONDS, LINK_HOURS = 1800.0, 1.0
TEXT = "text"


@dataclass(frozen=True, slots=True)
class Pages:
    """Browser pages that take part in a federation on this machine, beside its other clients.

    Attributes:
      count: pages that are waited for.
      module: runs the endpoint (`deploy.web.start_web`).
      write: writes the page's files into a server's home; returns their folder.
      seconds: until all of them have joined.
    """

    count: int
    module: str
    write: Callable[[ServerHome], Path]
    seconds: float = JOIN_SECONDS


def client_name(text: str) -> str:
    """Return a name as a client may have it.

    Example:
      >>> client_name("William Howard Taft")
      'william-howard-taft'
    """
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._") else "-" for c in text.lower())
    return check_name((plain.strip("-._") or "client")[:48])


def parts_of(corpus: Corpus, clients: int) -> dict[str, tuple[str, ...]]:
    """Return lines by client: the authors with most text, or contiguous shards of a pool; in order of names.

    Raises:
      ConfigError: there are not so many authors, or lines.
    """
    authors = [a for a in corpus.authors if a.lines]
    if corpus.natural and len(authors) > 1:
        chosen = sorted(authors, key=lambda a: (-sum(map(len, a.lines)), a.name))[:clients]
    else:
        lines = [line for a in authors for line in a.lines]
        cuts = [len(lines) * k // clients for k in range(clients + 1)]
        chosen = [Author(f"part-{k + 1:03d}", tuple(lines[cuts[k] : cuts[k + 1]])) for k in range(clients)]
    found = [a for a in chosen if a.lines]
    if len(found) < clients:
        raise ConfigError(f"{corpus.name} has text for {len(found)} clients; asked for {clients}")
    named: dict[str, tuple[str, ...]] = {}
    for author in sorted(found, key=lambda a: a.name):
        name, number = client_name(author.name), 1
        while name in named:
            number += 1
            name = f"{client_name(author.name)}-{number}"
        named[name] = author.lines
    return dict(sorted(named.items()))


def write_parts(parts: dict[str, tuple[str, ...]], folder: Path) -> dict[str, Path]:
    """Write one file a client; the folder can be trained on in a simulation as it is."""
    folder.mkdir(parents=True)
    for name, lines in parts.items():
        write_atomically(folder / name, ("\n".join(lines) + "\n").encode(), durable=False)
    return {name: folder / name for name in parts}


def lay_out(config: Config, clients: int, root: Path) -> tuple[Config, dict[str, Path]]:
    """Write every client's text under `root` and return the run's configuration on it, and the files.

    A simulation on that folder is the same run: every client is trained on, none is held out whole.
    """
    from keyfed.config.schema import read_options
    from keyfed.text.catalogue import load_corpus

    data = config.data
    corpus = load_corpus(data.name, data_dir=Path(data.dir) if data.dir else None, **read_options(data))
    files = write_parts(parts_of(corpus, clients), root / TEXT)
    on_files = replace(
        data, name=str((root / TEXT).resolve()), dir=None, partition="natural", clients=None, unseen=0.0,
        author_column=None, text_column=None, max_words=None, me=None, folder="clients",
    )  # fmt: skip
    return replace(config, data=on_files), files


def start_clients(
    processes: Processes,
    server: ServerHome,
    address: str,
    homes: Mapping[str, Path],
    data: Mapping[str, Path],
    *,
    plain: bool,
    counts: bool = False,
    resident: Callable[[Path], Sequence[str]] | None = None,
) -> list[Client]:
    """Make the homes of clients, enrol them all and start them.

    Args:
      resident: the command of a training process, in place of the usual one.
    """
    made: list[Client] = []
    for name, path in homes.items():
        agree = consent.asking(path, yes=True, read=None, say=lambda line: None)
        home = open_home(path, name=name, server=address, ca=server.ca, data=data[name], plain=plain, counts=counts,
                         agree=agree)  # fmt: skip
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
    new = [mark_of(one.name, one.identity.hex()) for one in given]
    trusted = roster_hash([*Roster(server.roster).marks(), *new])
    for one in clients:
        settings = one.home.settings()
        one.home.write(replace(settings, limits=replace(settings.limits, roster=trusted)))


def page_hosts(count: int) -> list[str]:
    """Return a host of this machine for each page: browsers keep what belongs to one apart from the others.

    Example:
      >>> page_hosts(3)
      ['127.0.0.1', 'localhost', 'page-3.localhost']
    """
    return ["127.0.0.1", "localhost", *(f"page-{n}.localhost" for n in range(3, count + 1))][:count]


def open_pages(processes: Processes, server: ServerHome, pages: Pages, listener: Listener) -> list[str]:
    """Start the endpoint, say the link of every page, and return the pages' names."""
    address = start_web(processes, server, "127.0.0.1", 0, pages.module, pages.write(server), None)
    port = address.rpartition(":")[2]
    names = [f"page-{n + 1}" for n in range(pages.count)]
    for name, host in zip(names, page_hosts(pages.count), strict=True):
        (token,) = make_links(server, 1, LINK_HOURS, name)
        listener.say(f"{name}: {link_of(f'https://{host}:{port}', token)}")
    listener.say(
        "open each link in a window of its own that stays in sight, and go on past the browser's warning; agree in the "
        "panel, type ten lines or more, then join; rounds begin when every page has joined"
    )
    return names


def wait_for_pages(names: Sequence[str], web: WebTransport, seconds: float, say: Callable[[str], None]) -> None:
    """Wait until the pages of these names have joined and are open; say each that comes.

    Raises:
      DeployError: some are missing after so many seconds.
    """
    there: set[str] = set()
    say(f"waiting up to {seconds / 60:.0f} minutes for {', '.join(names)}")

    def all_there() -> bool:
        now = set(names) & set(web.clients())
        for name in sorted(now - there):
            say(f"{name} has joined")
        there.clear()
        there.update(now)
        return len(now) == len(names)

    if not wait_until(all_there, seconds, lambda: True, 0.5):
        missing = ", ".join(name for name in names if name not in there)
        raise DeployError(
            f"{len(there)} of {len(names)} pages joined within {seconds / 60:.0f} minutes; {missing} did not: "
            f"open its link and join, or start again with fewer: --web {max(1, len(there))}"
        )


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
    pages: Pages | None = None,
) -> Any:
    """Run a federation of `clients` and `pages` on this machine under the folder `root`; return the run's result.

    All processes have ended when this returns or raises.

    Args:
      clients: processes with a text of their own.
      chosen: what the recipe chose.
      offered: the run asks for no start, and takes the base model where that fits the clients' text.
    """
    need_flower()
    from keyfed.run.console import plural
    from keyfed.run.pilot import with_carried_step
    from keyfed.run.prepare import prepare
    from keyfed.run.remote.private import terms_for
    from keyfed.run.remote.train import deployable
    from keyfed.run.start import find_source, make_ready, not_base, offer_start

    deployable(config)
    members = clients + (pages.count if pages else 0)
    if config.privacy.on:
        terms_for(config, members)  # what cannot be promised is said before anything starts
    config, files = lay_out(config, clients, root)
    server = ServerHome(root / "server")
    make_certificates(server.path, page_hosts(pages.count) if pages else [])
    with Processes(root) as processes:
        preparing = aside(lambda: prepare(config))  # while the server starts
        address = start_superlink(processes, server, "127.0.0.1", 0)
        listener.say(
            f"server on {address}: TLS, node keys; {plural(clients, 'client')}, each a process with its own text"
        )
        joining = open_pages(processes, server, pages, listener) if pages else []
        homes = {name: root / "clients" / name for name in files}
        start_clients(processes, server, address, homes, files, plain=plain, counts=config.counts.on)
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
            config, prepared.vocab.to_json(), out, clients=members, wait=CONNECT_SECONDS, resume=False,
            raw_vocabulary=config.data.vocab_file is None, own=start.get("own"),
        )  # fmt: skip
        build_app(root / "app", files_of_run)
        if pages:
            wait_for_pages(joining, WebTransport(server.path / WEB_SOCKET), pages.seconds, listener.say)
        return submit(server, root / "app", listener)


def cost_of(folder: Path, clients: int) -> dict[str, Any]:
    """Return what a round cost: median seconds, and mean bytes of a client."""
    from keyfed.run.folder import read_metrics

    records = read_metrics(folder)
    times = [r["seconds"] for r in records if r["seconds"] is not None]
    return {
        "rounds": len(records),
        "seconds_per_round": statistics.median(times) if times else None,
        "bytes_per_client_and_round": {
            way: sum(r["traffic"][way] for r in records) / max(1, len(records) * clients)
            for way in ("down", "up", "control")
        },
    }


def cost_text(cost: dict[str, Any]) -> str:
    """Return the cost in a line."""
    from keyfed.run.console import human_bytes

    moved = ", ".join(f"{human_bytes(n)} {way}" for way, n in cost["bytes_per_client_and_round"].items())
    seconds = cost["seconds_per_round"]
    took = "" if seconds is None else f"{seconds:.1f} s a round (median of {cost['rounds']}); "
    return f"{took}a client and round: {moved}"


def train_in_federation(
    config: Config,
    address: str,
    out: Path,
    listener: Listener,
    *,
    resume: bool,
    later: str,
    chosen: Sequence[Setting] = (),
    offered: bool = False,
) -> Any:
    """Submit a run to a server, follow it, and return its result: what `keyfed train --federation ADDRESS` does.

    A server that goes away is waited for, and the run goes on from its last checkpoint. The vocabulary is that of
    data.vocab_file, or is made from the corpus of data.name, which must then be public.

    Args:
      address: HOST:PORT of the server, or its folder.
      later: the command that goes on with the run, for the error where no server answers.
      chosen: what the recipe chose.
      offered: the run asks for no start, and takes the base model where that knows enough of the vocabulary.
    """
    from keyfed.run.encode import vocab_from_file
    from keyfed.run.pilot import with_carried_step
    from keyfed.run.remote.train import deployable
    from keyfed.run.start import not_base, offer_start_by_words
    from keyfed.text.vocab import Vocab

    need_flower()
    deployable(config)
    if Path(address).is_dir():
        server = ServerHome(Path(address).absolute())
        address = server.address()
    else:
        server = ServerHome(default_server_home())
        check_server(address)
    known = vocab_from_file(config)
    if unreachable(address) is not None:  # said before a vocabulary is made
        raise DeployError(f"no server answers at {address}; start it: keyfed server{home_option(server.path)}")
    vocab, wanted = run_vocab(config, known, listener), config.train.cohort
    if offered:
        config, why_not = offer_start_by_words(config, Vocab.from_json(vocab))
        if why_not:
            listener.say(not_base(why_not))
    config, lines = with_carried_step(config, chosen, offered=offered)
    for line in lines:
        listener.say(line)
    with stop_at_signals():  # whatever ends us: the run on the server is stopped, nothing of ours is left
        for attempt in range(ATTEMPTS):
            with tempfile.TemporaryDirectory(prefix="keyfed-run-") as temporary:
                app, goes_on = Path(temporary) / "app", resume or attempt > 0
                write_connection(Path(temporary), address, server.ca)  # the server's own file is for the server
                files = run_files(config, vocab, out, clients=wanted, wait=WAIT_SECONDS, resume=goes_on)
                build_app(app, files)
                try:
                    return submit(server, app, listener, address, Path(temporary))
                except Unfinished as e:
                    if attempt == ATTEMPTS - 1 or not (out / "run.toml").exists():
                        raise
                    listener.say(f"{e}; waiting for the server, to go on from the last checkpoint")
            if not came_back(address, server.ca):
                raise DeployError(f"no server answers at {address}; go on later with: {later}")
    raise AssertionError


def came_back(address: str, ca: Path) -> bool:
    """Wait until a server answers again and what it was doing has ended for good; False where it does not."""
    found = wait_until(lambda: answers(address, ca), RETURN_SECONDS, lambda: True, 1.0)
    if found:
        time.sleep(SETTLE_SECONDS)  # its last program notices within seconds that its server has gone
    return found


def run_vocab(config: Config, known: Vocab | None, listener: Listener) -> str:
    """Return the vocabulary that a run carries, as JSON."""
    from keyfed.run.prepare import prepare

    if known is not None:
        return known.to_json()
    listener.say(
        f"the vocabulary is made from {config.data.name}, which everybody in the federation will see; --vocab FILE "
        "takes another, and --vocab base that of the base model"
    )
    return prepare(config).vocab.to_json()
