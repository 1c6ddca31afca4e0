"""`keyfed server` and `keyfed enroll`: the server of a federation of real machines, and who belongs to it."""

from __future__ import annotations

import shlex
import sys
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyfed.cli.options import JsonOption, print_json, say
from keyfed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from keyfed.deploy.homes import ServerHome
    from keyfed.deploy.processes import Processes
    from keyfed.wire.roster import Roster

ServerHomeOption = Annotated[
    Path | None, typer.Option("--home", help="The server's folder; else KEYFED_SERVER_HOME or ~/.keyfed/server.")
]
PORT = 9092


def server(
    home: ServerHomeOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; open it in the firewall.", min=1, max=65535)] = PORT,
    make_certificates: Annotated[
        bool, typer.Option("--make-certificates", help="First make an authority (once) and a server certificate.")
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address that clients will use, for the certificate.  [repeatable]"),
    ] = None,
    web: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Also serve a page to browsers, over HTTPS, which can take part."),
    ] = None,
    web_page: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Model of that page: a run, an export, or base.  [base]")
    ] = None,
    web_origin: Annotated[
        str | None,
        typer.Option(metavar="ORIGIN", help="The other place, https://HOST, where the page is installed from --site."),
    ] = None,
    page: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port of your own live page, for this machine.  [any free]"
        ),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Show no live page.")] = False,
) -> None:
    """Run the server of a federation until Ctrl-C: clients connect to it, runs are submitted to it.

    Its folder holds the certificates, the roster of enrolled clients and a database, so that it can be stopped and
    started again. TLS and node keys are always on. Clients come in over the network; enrolling them and submitting
    runs is done on this machine only.

    Its live page shows you the runs: rounds, cohort, refusals, bytes, loss, epsilon, and nothing of a single client.
    The address is printed, and kept in page.txt of the folder. It answers on this machine only; keep it to yourself.

    With --web browsers take part as well: it serves the keyboard's federated page, whose text stays in the browser. A
    page joins by a one-time link (`keyfed enroll --link`), and is a member of the same secure sums as other clients.
    The hash of the page's code is printed; each page shows its own, wherever it is installed, so that people can
    compare them. docs/browsers.md says what is to be trusted.

      keyfed server --make-certificates --host 0.0.0.0 --name fl.example.org

      keyfed enroll enrol-anna.json

      keyfed train fedavg --federation 127.0.0.1:9092 --vocab base

      keyfed server --web 0.0.0.0:9443
    """
    from keyfed.wire.flower.commands import need_flower

    need_flower()
    from keyfed.deploy.certificates import make_certificates as make
    from keyfed.deploy.enrolment import act_on_wishes
    from keyfed.deploy.homes import ServerHome, default_server_home
    from keyfed.deploy.superlink import serve

    place = ServerHome((home or default_server_home()).absolute())
    if make_certificates:
        names = [*(name or []), *([host] if host not in ("0.0.0.0", "::") else [])]
        make(place.path, names)
        say(f"made an authority and a certificate in {place.path}; clients need {place.ca}")
    elif name:
        raise ConfigError("--name goes with --make-certificates: it is written into the certificate")
    if web is None and (web_page or web_origin):
        raise ConfigError(f"{'--web-page' if web_page else '--web-origin'} is of the page that --web serves; add --web")
    if no_page and page is not None:
        raise ConfigError("--page says where your page is, and --no-page that there is none; leave one of them out")
    more = None if web is None else _pages(place, web, web_page or Path("base"), web_origin)

    with _own_page(place, page, no_page) as own:
        serve(
            place,
            host,
            port,
            started=lambda address: _next_steps(place.path, address, host, port),
            tend=lambda: [f"{gone} has left; its key is forgotten" for gone in act_on_wishes(place)],
            say=say,
            more=lambda processes: chain(more(processes) if more else (), own()),
        )


@contextmanager
def _own_page(place: ServerHome, port: int | None, off: bool) -> Iterator[Callable[[], Iterable[str]]]:
    """Serve the owner's page unless that is off; what is yielded says where it is."""
    if off:
        yield lambda: ()
        return
    from keyfed.deploy.runs import begun_runs, note_page
    from keyfed.reports.live import owner_page

    with owner_page(lambda: begun_runs(place), port or 0) as address:

        def lines() -> Iterable[str]:
            note_page(place, address)
            yield f"your page, on this machine only: {address}"

        yield lines


def _pages(place: ServerHome, web: str, page: Path, origin: str | None) -> Callable[[Processes], Iterable[str]]:
    """Write the page into the server's home; return what starts the endpoint for pages and says what comes next."""
    from keyfed.deploy.certificates import fingerprint
    from keyfed.deploy.homes import home_option
    from keyfed.deploy.web import check_origin, check_web, shown_host, start_web
    from keyfed.keyboard.endpoint import MODULE, page_of, write_page
    from keyfed.keyboard.graph import need
    from keyfed.run.console import working

    need("starlette", "uvicorn", "onnx", "onnxruntime")
    host, port = check_web(web)
    elsewhere = None if origin is None else check_origin(origin)
    shown_host(place, host)  # what the certificate does not cover is said before anything long
    with working(f"writing the page with the model of {page}"):
        folder = write_page(page, place)

    def start(processes: Processes) -> Iterable[str]:
        address = start_web(processes, place, host, port, MODULE, folder, elsewhere)
        about = page_of(folder)
        yield f"pages: {elsewhere or address}, version {about.version}; a page of this code shows the hash {about.hash}"
        yield f"   browsers trust the server after ca.crt is installed ({address}/keyfed.crt), SHA-256:"
        yield f"   {fingerprint(place.ca)}"
        enroll = f"keyfed enroll --link{home_option(place.path)}"
        yield f"4. a browser joins by a one-time link, also drawn for a phone: {enroll}"

    return start


def _next_steps(home: Path, address: str, host: str, port: int) -> list[str]:
    from keyfed.deploy.homes import home_option

    shown = f"[{host}]" if ":" in host else host
    outside = "THIS-MACHINE" if host in ("0.0.0.0", "::") else shown
    where = home_option(home)
    federation = shlex.quote(str(home)) if where else address  # its certificate lies there
    return [
        f"listening on {shown}:{port}, TLS and node keys on; Ctrl-C ends it",
        f"1. give {home / 'ca.crt'} to your clients; each starts: "
        f"keyfed client --data TEXT --server {outside}:{port} --ca ca.crt",
        f"2. take in the enrol-NAME.json that each of them sends you: keyfed enroll enrol-NAME.json{where}",
        f"3. train: keyfed train fedavg --federation {federation} --vocab base",
    ]


def enroll(
    file: Annotated[Path | None, typer.Argument(help="A client's enrol-NAME.json; - reads it from stdin.")] = None,
    forget: Annotated[str | None, typer.Option(metavar="NAME", help="Send a client away: its key is revoked.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List who is enrolled.")] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Print a one-time link by which a browser joins, and draw it for a phone.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="With --link: the name of the page that joins.")] = None,
    count: Annotated[int, typer.Option(help="With --link: links to make, each for one browser.", min=1)] = 1,
    hours: Annotated[float, typer.Option(help="With --link: hours until a link expires.", min=0.01)] = 24.0,
    home: ServerHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a client into the federation, on the server's machine while the server runs.

    The file holds public keys only. Make sure that it comes from the person it names: an enrolled client takes part in
    every run. One key can be enrolled under one name.

    A browser joins by a link of --link instead (`keyfed server --web`). Each link is good for one browser. Give it to
    one person, as you would a key: the browser that opens it first is enrolled.

      keyfed enroll enrol-anna.json

      keyfed enroll --link --name anna

      keyfed enroll --list

      keyfed enroll --forget anna
    """
    from keyfed.wire.flower.commands import need_flower

    need_flower()
    from keyfed.deploy.enrolment import enrol, read_enrolment
    from keyfed.deploy.enrolment import forget as send_away
    from keyfed.deploy.homes import ServerHome, default_server_home
    from keyfed.wire.roster import Roster

    place = ServerHome((home or default_server_home()).absolute())
    if sum((file is not None, forget is not None, listing, link)) != 1:
        raise ConfigError("give one of: a client's enrol-NAME.json, --link, --forget NAME, --list")
    if not link and (name is not None or count != 1):
        raise ConfigError(f"{'--name' if name is not None else '--count'} is of --link; a file has its name in it")
    if link:
        _links(place, name, count, hours, as_json)
        return
    if file is not None:
        data = sys.stdin.buffer.read(1 << 20) if str(file) == "-" else _bytes(file)
        enrolment = read_enrolment(data, str(file))
        enrol(place.used(), [enrolment])
        said = {"enrolled": enrolment.name}
    elif forget is not None:
        send_away(place.used(), forget)
        said = {"forgotten": forget}
    else:
        _list(Roster(place.used().roster), as_json)
        return
    if as_json:
        print_json(said)
    else:
        typer.echo("; ".join(f"{what}: {who}" for what, who in said.items()))


def _links(place: ServerHome, name: str | None, count: int, hours: float, as_json: bool) -> None:
    from keyfed.deploy.links import link_of, make_links, web_address
    from keyfed.keyboard.lan import drawn

    pages = web_address(place)
    links = [link_of(pages.address, token, pages.origin) for token in make_links(place, count, hours, name)]
    if as_json:
        print_json({"links": links, "hours": hours})
        return
    for link in links:
        typer.echo(link)
        code = drawn(link, sys.stdout.encoding or "ascii") if sys.stdout.isatty() and count == 1 else ""
        if code:
            typer.echo(code)
    say(f"good for {'one browser' if count == 1 else 'one browser each'}, for {hours:g} hours")


def _list(roster: Roster, as_json: bool) -> None:
    from keyfed.run.console import plural, print_table
    from keyfed.wire.roster import is_page, roster_hash

    if as_json:
        print_json({name: asdict(entry) for name, entry in roster.entries.items()})
        return
    rows = [["name", "client", "enrolled", "identity", "state"]]
    for who, entry in sorted(roster.entries.items()):
        kind, state = "page" if is_page(entry) else "node", "revoked" if entry.revoked else "enrolled"
        rows.append([who, kind, entry.enrolled, entry.identity[:16], state])
    print_table(rows)
    marks = roster.marks()
    typer.echo(f"roster {roster_hash(marks)} ({plural(len(marks), 'client')}); clients see it with --status")


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as f:
            return f.read(1 << 20)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}; expected the enrol-NAME.json that a client wrote") from None
