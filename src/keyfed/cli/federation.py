"""`keyfed up` and `keyfed client`: a federation on one machine, and one's own place in one of real machines."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyfed.cli.options import (
    NONE,
    ConfigOption,
    JsonOption,
    Keys,
    Named,
    SetOption,
    configure,
    print_json,
    say,
    sets,
    with_keys,
)
from keyfed.cli.train import WHAT, PrivacyOption, default_out, privacy_settings
from keyfed.errors import ConfigError, DeployError, KeyfedError

if TYPE_CHECKING:
    from keyfed.deploy.homes import ClientHome, Settings
    from keyfed.deploy.supernode import Client
    from keyfed.deploy.up import Pages

QUICK_TOKENS, QUICK_ROUNDS = 4_000, 5  # of a client and round, where nothing else is said


@with_keys
def up(
    method: Annotated[
        str | None, typer.Argument(help="Method (`keyfed methods`); else the recipe, without a pilot.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients, each with processes and keys of its own.", min=1)] = 3,
    web: Annotated[
        int, typer.Option(help="Browser pages that take part besides, with what you type in them.", min=0, max=20)
    ] = 0,
    plain: Annotated[
        bool, typer.Option("--plain/--secure", help="Without secure aggregation: the server sees every update.")
    ] = False,
    what: Annotated[Named, Keys((*WHAT, "train.seed", "train.init"))] = NONE,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/up-METHOD-DATA-MODEL by default.")] = None,
    home: Annotated[
        Path | None, typer.Option(help="Folder for keys, text and logs, which is kept; else a temporary one.")
    ] = None,
    dp: PrivacyOption = None,
    counting: Annotated[Named, Keys(("counts.on",))] = NONE,
    settings: SetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a real federation on this machine: server, clients, TLS, keys, one run; then stop it all.

    The text is split among the clients (the corpus's authors with most text, or shards), a file each. Everything that
    travels goes through Flower, as it would between machines. Secure aggregation is on unless --plain is given; it
    needs at least three clients. The run folder and the report are those of a simulation. On the built-in corpus it
    trains 5 rounds of at most 4,000 tokens a client, unless --rounds or --set data.max_tokens say otherwise.

      keyfed up fedatt --clients 4 --rounds 3

    With --dp clients clip what they send and the server adds noise: a guarantee for these few clients, to see how it
    goes (docs/privacy.md). Noise that hides one of four hides what they learn, too.

      keyfed up --clients 4 --dp epsilon=8

    With --web it also serves the keyboard's federated page and prints a link for each page. You open them in a browser
    on this machine, agree, type, and join; then the rounds begin (docs/browsers.md).

      keyfed up --clients 2 --web 2

    With --counts the clients' n-grams are counted after the last round, and mixed with the network (docs/counts.md):

      keyfed up --clients 4 --counts
    """
    from keyfed.deploy.processes import stop_at_signals, tail
    from keyfed.deploy.up import cost_of, cost_text
    from keyfed.deploy.up import up as run_up
    from keyfed.reports.run_page import report_run
    from keyfed.run.console import Narrator, plural
    from keyfed.run.pilot import choose_for_federation

    members, pages = clients + web, _pages(web) if web else None
    if web and plain:
        raise ConfigError("pages of a browser take part in secure sums only; leave out --plain, or --web")
    if not plain and members < 3:
        raise ConfigError(f"{plural(members, 'client')} cannot hide in each other's sum; take at least 3, or --plain")
    named = {**what, **counting, "train.cohort": members, "secure.on": not plain, **privacy_settings(dp, settings)}
    if what["data.name"] is None and config is None:  # enough to see it work
        quick = {"data.max_tokens": QUICK_TOKENS, "train.rounds": what["train.rounds"] or QUICK_ROUNDS}
        named |= {key: value for key, value in quick.items() if not any(s.startswith(key) for s in settings or [])}
    resolved, chosen = choose_for_federation(configure(method, config, named, settings, recipe=True), members)
    offered = what["train.init"] is None and not sets("train.init", settings, config)
    folder = out or default_out(resolved, False, f"up-{resolved.method}")
    with ExitStack() as stack:
        stack.enter_context(stop_at_signals())
        narrator = stack.enter_context(Narrator())
        if home is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keyfed-up-")))
        else:
            root = _empty(home)
        if plain:
            narrator.say("without secure aggregation: the server sees every client's update (--secure is the default)")
        try:
            result = run_up(
                resolved, clients, folder, root, narrator, plain=plain, chosen=chosen, offered=offered, pages=pages
            )
        except ConfigError:  # nothing was started
            raise
        except Exception:
            narrator.stop()
            for log in sorted((root / "logs").glob("*.log")):
                last = tail(log, 300).splitlines()[-1:]
                say(f"{log.name}: {''.join(last)}")
            raise
    report = report_run(folder)
    cost = cost_of(folder, members)
    if as_json:
        print_json({**result, "cost": cost})
    else:
        typer.echo(report)
        typer.echo(cost_text(cost))


def _pages(count: int) -> Pages:
    """Return the pages of a demonstration, with the base model; what they need and lack is said first."""
    from keyfed.deploy.up import Pages
    from keyfed.keyboard.endpoint import MODULE, write_page
    from keyfed.keyboard.graph import need

    need("starlette", "uvicorn", "onnx", "onnxruntime")
    return Pages(count, MODULE, lambda home: write_page(Path("base"), home))


def _empty(home: Path) -> Path:
    from keyfed.deploy.processes import private_folder

    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise ConfigError(f"{home} is there and not an empty folder; choose another --home")
    return private_folder(home).absolute()


ClientHomeOption = Annotated[
    Path | None, typer.Option("--home", help="The client's folder; else KEYFED_CLIENT_HOME or ~/.keyfed/client.")
]
PREVIEW = 3  # lines


def client(
    data: Annotated[
        Path | None, typer.Option(help="Your text: a file or folder, read where it is and never sent.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="The server, HOST:PORT.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The federation's ca.crt, from the server's operator.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Your client's name, which the server sees; a random one by default.")
    ] = None,
    when: Annotated[
        str | None, typer.Option(help="Train only when: idle, power, unmetered (with commas), or always (the default).")
    ] = None,
    keep_days: Annotated[
        int | None, typer.Option(help="Days that text is trained on, and kept in the home; 0: no limit.", min=0)
    ] = None,
    allow_plain: Annotated[
        bool | None,
        typer.Option("--allow-plain/--secure-only", help="Also take part in runs without secure aggregation."),
    ] = None,
    counts: Annotated[
        bool | None,
        typer.Option("--counts/--no-counts", help="Also take part in counts of word sequences, by secure sums."),
    ] = None,
    me: Annotated[
        str | None,
        typer.Option(help="Your name among several authors of the text, as the file spells it; '' for none."),
    ] = None,
    author_column: Annotated[
        str | None, typer.Option(help="Author column of your table: a name, a number, or - for yours alone.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Text column of your table: a name or a number.")] = None,
    hide_among: Annotated[
        int | None, typer.Option(help="Fewest clients of a secure sum that you take part in, you included.  [3]", min=3)
    ] = None,
    epsilon_budget: Annotated[
        float | None,
        typer.Option(help="Own privacy budget over all runs; no run without --dp is taken part in. 0: none.", min=0.0),
    ] = None,
    most_parameters: Annotated[
        int | None, typer.Option(help="Largest model that is trained here.  [50,000,000]", min=1)
    ] = None,
    most_epochs: Annotated[int | None, typer.Option(help="Most passes over the text in a round.  [50]", min=1)] = None,
    most_minutes: Annotated[
        float | None, typer.Option(help="Most minutes of training in a round.  [10]", min=0.01)
    ] = None,
    trust_roster: Annotated[
        str | None, typer.Option(metavar="HASH", help="Accept the roster of this hash, though most of it is new.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="You agree to what is explained on the first start.")] = False,
    pause: Annotated[bool, typer.Option("--pause", help="Take no part until --resume.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take part again.")] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show the first lines that would be learnt from, on this terminal only.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Say how things stand.")] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="Leave for good: delete what is stored here; the server forgets the key.")
    ] = False,
    home: ClientHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take part in a federation with your own text until Ctrl-C. The text never leaves this machine.

    The first start explains what leaves it and asks; makes the client's keys; and writes enrol-NAME.json for the
    server's operator, who has to take it in once. Later starts need no options.

      keyfed client --data ~/notes --server fl.example.org:9092 --ca ca.crt --when power,unmetered

      keyfed client --status

      keyfed client --pause
    """
    from keyfed.deploy.homes import ClientHome, default_client_home, home_option

    place = ClientHome((home or default_client_home()).absolute())
    if sum((pause, resume, status, leave, preview)) > 1:
        raise ConfigError("give one of --pause, --resume, --status, --leave, --preview")
    if preview:
        _preview(place, data, me, {"author_column": author_column, "text_column": text_column})
        return
    if pause or resume:
        place.settings()  # said if it is no home
        place.pause(pause)
        on = f"keyfed client --resume{home_option(place.path)}"
        said = f"paused; go on with: {on}" if pause else "taking part again"
        print_json({"paused": pause}) if as_json else typer.echo(said)
    elif status:
        found = _status(place)
        print_json(found) if as_json else typer.echo("\n".join(f"{k}: {v}" for k, v in found.items()))
    elif leave:
        _leave(place, yes)
    else:
        options = {"server": server, "ca": ca, "data": data, "when": when, "keep_days": keep_days, "plain": allow_plain}
        options |= {
            "counts": counts,
            "hide_among": hide_among,
            "me": me,
            "author_column": author_column,
            "text_column": text_column,
        }
        caps = {
            "parameters": most_parameters, "epochs": most_epochs, "minutes": most_minutes, "epsilon": epsilon_budget,
            "roster": trust_roster,
        }  # fmt: skip
        limits = {key: value for key, value in caps.items() if value is not None}
        _take_part(place, name, options | {"limits": limits or None}, yes)


def _take_part(place: ClientHome, name: str | None, options: dict[str, Any], yes: bool) -> None:
    import secrets

    from keyfed.deploy import consent
    from keyfed.deploy.enrolment import write_enrolment
    from keyfed.deploy.homes import ClientRuns, open_home
    from keyfed.deploy.processes import Processes, stop_at_signals
    from keyfed.deploy.supernode import Client
    from keyfed.private.dp.accounting import rho_to_eps
    from keyfed.private.dp.own_ledger import DELTA
    from keyfed.wire.flower.commands import need_flower

    need_flower()
    if not place.exists() and name is None:
        name = f"client-{secrets.token_hex(4)}"
    read = sys.stdin.readline if sys.stdin.isatty() else None
    ask = consent.asking(place.path, yes=yes, read=read, say=say)

    def agree(settings: Settings) -> None:
        if settings.limits.epsilon is not None:
            rho_to_eps(1.0, DELTA)  # said now if the package that counts is missing
        _look(place, settings)
        ask(settings)

    place = open_home(place.path, name=name, agree=agree, **options)
    try:
        with place.alone(), stop_at_signals(), Processes(place.path) as processes:
            file = place.path / f"enrol-{place.settings().name}.json"
            if not file.exists():
                write_enrolment(place)
                say(f"send this file to the server's operator: {file} (public keys only)")
            one = Client(processes, place, say=say)
            one.start()
            _tell(place, one)
            one.tend_forever()
    except ClientRuns:
        if all(value is None for value in options.values()):
            raise
        typer.echo(
            "the settings are changed; a client runs there already and none was started. --when, --keep-days, --me and "
            "--data hold for it from the next run, the others from its next start",
            err=True,
        )


def _look(place: ClientHome, settings: Settings) -> None:
    """Read the text before the client says that it takes part; say how much there is, and quote nothing.

    Raises:
      DataError: it cannot be read, is too short, or several people wrote it.
    """
    from keyfed.deploy.homes import kept_files
    from keyfed.text.catalogue import own_text_at, size_of
    from keyfed.text.check import notices

    if not settings.data and not (place.text.is_dir() and kept_files(place.text, None)):
        say(f"no text yet in {place.text}: a keyboard may leave some there, or name yours with --data")
        return
    path = Path(settings.data) if settings.data else place.text
    corpus = own_text_at(path, settings.me or None, settings.reading())
    form = f", read as {'; '.join(corpus.formats)}" if corpus.formats else ""
    say(f"{path}: {size_of(corpus, path)}{form}")
    for line in notices(corpus):
        say(f"notice: {line}")


def _preview(place: ClientHome, data: Path | None, me: str | None, columns: dict[str, str | None]) -> None:
    """Show the owner's first lines on the owner's terminal, and nowhere else: a file or pipe would keep them."""
    from keyfed.text.catalogue import own_text_at, size_of

    if not _on_terminal():
        raise ConfigError("--preview shows lines of your text on a terminal only, and stdout is none")
    if place.exists():
        settings = place.settings()
        data, me = data or place.data(), me or settings.me or None
        columns = {key: columns[key] or value for key, value in settings.reading().items()}
    if data is None:
        raise ConfigError("--preview needs a text: name it with --data")
    corpus = own_text_at(data, me, columns)
    typer.echo(f"{data}: {size_of(corpus, data)}; the first lines are:")
    for line in corpus.authors[0].lines[:PREVIEW]:
        typer.echo(f"  {''.join(c if c.isprintable() else ' ' for c in line)[:200]}")


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _tell(place: ClientHome, one: Client) -> None:
    from keyfed.deploy.homes import home_option

    settings = place.settings()
    when = f", only when {' and '.join(settings.when)}" if settings.when else ""
    pause = f"keyfed client --pause{home_option(place.path)}"
    one.say(f"{settings.name} takes part at {settings.server}{when}; Ctrl-C ends it, {pause} pauses it")
    if place.paused():
        one.say(f"it is paused: keyfed client --resume{home_option(place.path)}")


def _status(place: ClientHome) -> dict[str, Any]:
    from keyfed.deploy.homes import describe
    from keyfed.deploy.processes import PIDS, running
    from keyfed.files import BROKEN, read_json

    settings = place.settings()
    try:
        pids = {str(what): int(pid) for what, pid in read_json(place.path / PIDS)["pids"].items()}
    except (OSError, *BROKEN):
        pids = {}
    try:
        agreed = str(read_json(place.path / "consent.json")["date"])
    except (OSError, *BROKEN):
        agreed = "not yet"
    return {
        "name": settings.name,
        "server": settings.server,
        "home": str(place.path),
        "running": ", ".join(f"{what} (pid {pid})" for what, pid in pids.items() if running(pid)) or "no",
        "paused": "yes" if place.paused() else "no",
        "agreed": agreed,
        "trains when": ", ".join(settings.when) or "always",
        **dict(describe()),
        "text": _text_of(place, settings),
        "text in the last run": _read(place.path / "found.txt") or "no run yet",
        "text is kept": f"{settings.keep_days} days" if settings.keep_days else "without limit",
        "runs without secure aggregation": "takes part" if settings.plain else "refused",
        "counts of word sequences": "takes part" if settings.counts else "refused",
        "hides among": f"{settings.hide_among} clients or more",
        "most of a run": f"{settings.limits.parameters:,} parameters, {settings.limits.epochs} epochs and "
        f"{settings.limits.minutes:g} minutes a round",
        "roster": _roster(place.path),
        "last refusal": _read(place.path / "refused.txt") or "none",
        "privacy spent": _spent(place),
    }


def _text_of(place: ClientHome, settings: Settings) -> str:
    """Say how much text a client has, or why it has none that can be trained on; quote nothing."""
    from keyfed.deploy.homes import kept_files
    from keyfed.run.console import plural
    from keyfed.text.catalogue import look_at

    count = len(kept_files(place.data(), settings.keep_days))
    if not count:
        return f"{place.data()}: nothing there yet"
    try:
        found = look_at(place.data(), settings.me or None, settings.reading())
        return f"{place.data()}: {plural(count, 'file')}, {found}"
    except KeyfedError as error:
        return str(error)


def _roster(home: Path) -> str:
    from keyfed.files import parse_json
    from keyfed.run.console import plural

    try:
        found = parse_json(_read(home / "roster.json") or "{}")
        return f"{found['hash']} ({plural(found['clients'], 'client')})"
    except (ValueError, KeyError, TypeError):
        return "none was published yet"


def _spent(place: ClientHome) -> str:
    from keyfed.private.dp.own_ledger import OwnLedger

    try:
        return OwnLedger(place.path, place.settings().limits.epsilon).said()
    except KeyfedError as e:
        return f"not known: {e}"


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _leave(place: ClientHome, yes: bool) -> None:
    from keyfed.deploy.enrolment import ask_to_be_forgotten

    settings = place.settings()
    if not yes:
        if not sys.stdin.isatty():
            raise DeployError("nobody can be asked here; leave with --leave --yes")
        typer.echo(f'{place.path} with its keys will be deleted. Type "yes" to leave:', err=True)
        if sys.stdin.readline().strip().lower() not in ("yes", "y"):
            raise DeployError("nothing was changed")
    with place.alone():  # a client that runs is stopped first
        why = ask_to_be_forgotten(place)
        place.delete()
    if why is None:
        typer.echo(f"left: {place.path} is deleted and the server forgets the key of {settings.name}")
    else:
        typer.echo(
            f"left: {place.path} is deleted. But {why}: ask its operator to run: keyfed enroll --forget {settings.name}"
        )
