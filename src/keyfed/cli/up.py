"""`keyfed up`: a whole federation on this machine; and `keyfed train --federation`, which submits a run to a server."""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyfed.cli.options import (
    ConfigOption,
    DataOption,
    DirOption,
    JsonOption,
    ModelOption,
    SetOption,
    VocabOption,
    configure,
    print_json,
    sets,
)
from keyfed.cli.train import InitOption, PrivacyOption, privacy_settings
from keyfed.errors import ConfigError, DeployError

if TYPE_CHECKING:
    from keyfed.config.load import Config
    from keyfed.run.loop import Listener
    from keyfed.run.recipe.settings import Setting

WAIT_SECONDS = 60.0
QUICK_TOKENS, QUICK_ROUNDS = 4_000, 5  # of a client and round, where nothing else is said
ATTEMPTS, RETURN_SECONDS, SETTLE_SECONDS = 5, 300.0, 8.0


def up(
    method: Annotated[
        str | None, typer.Argument(help="Method (`keyfed methods`); else the recipe, without a pilot.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients, each with processes and keys of its own.", min=1)] = 3,
    plain: Annotated[
        bool, typer.Option("--plain/--secure", help="Without secure aggregation: the server sees every update.")
    ] = False,
    data: DataOption = None,
    data_dir: DirOption = None,
    model: ModelOption = None,
    vocab_file: VocabOption = None,
    rounds: Annotated[int | None, typer.Option(help="Federated rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random derives from it.")] = None,
    init: InitOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/up-METHOD-DATA-MODEL by default.")] = None,
    home: Annotated[
        Path | None, typer.Option(help="Folder for keys, text and logs, which is kept; else a temporary one.")
    ] = None,
    dp: PrivacyOption = None,
    settings: SetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a real federation on this machine: server, clients, TLS, keys, one run; then stop it all.

    The text is dealt out to the clients (the corpus's authors with most text, or shards), a file each. Everything that
    travels goes through Flower, as it would between machines. Secure aggregation is on unless --plain is given; it
    needs at least three clients. The run folder and the report are those of a simulation. On the built-in corpus it
    trains 5 rounds of at most 4,000 tokens a client, unless --rounds or --set data.max_tokens say otherwise.

      keyfed up fedatt --clients 4 --rounds 3

    With --dp clients clip what they send and the server adds noise: a guarantee for these few clients, to see how it
    goes (docs/privacy.md). Noise that hides one of four hides what they learn, too.

      keyfed up --clients 4 --dp epsilon=8
    """
    from keyfed.cli.train import _default_out
    from keyfed.deploy.processes import stop_at_signals, tail
    from keyfed.deploy.up import up as run_up
    from keyfed.reports.run_page import report_run
    from keyfed.run.console import Narrator, plural
    from keyfed.run.recipe.pilot import choose_for_federation

    if not plain and clients < 3:
        raise ConfigError(f"{plural(clients, 'client')} cannot hide in each other's sum; take at least 3, or --plain")
    named = {
        "data.name": data, "data.dir": data_dir, "model.name": model, "train.rounds": rounds, "train.seed": seed,
        "data.vocab_file": vocab_file, "train.cohort": clients, "secure.on": not plain, "train.init": init,
        **privacy_settings(dp, None, settings),
    }  # fmt: skip
    if data is None and config is None:  # enough to see it work
        quick = {"data.max_tokens": QUICK_TOKENS, "train.rounds": rounds or QUICK_ROUNDS}
        named |= {key: value for key, value in quick.items() if not any(s.startswith(key) for s in settings or [])}
    resolved, chosen = choose_for_federation(configure(method, config, named, settings, recipe=True), clients)
    offered = init is None and not sets("train.init", settings, config)
    folder = out or _default_out(resolved, False, f"up-{resolved.method}")
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
            result = run_up(resolved, clients, folder, root, narrator, plain=plain, chosen=chosen, offered=offered)
        except ConfigError:  # nothing was started
            raise
        except Exception:
            narrator.stop()
            for log in sorted((root / "logs").glob("*.log")):
                last = tail(log, 300).splitlines()[-1:]
                typer.echo(f"{log.name}: {''.join(last)}", err=True)
            raise
    report = report_run(folder)
    cost = cost_of(folder, clients)
    if as_json:
        print_json({**result, "cost": cost})
    else:
        typer.echo(report)
        typer.echo(cost_text(cost))


def _empty(home: Path) -> Path:
    from keyfed.deploy.processes import private_folder

    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise ConfigError(f"{home} is there and not an empty folder; choose another --home")
    return private_folder(home).absolute()


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
    chosen: Sequence[Setting] = (),
    offered: bool = False,
) -> Any:
    """Submit a run to a server, follow it, and return its result: what `keyfed train --federation ADDRESS` does.

    A server that goes away is waited for, and the run goes on from its last checkpoint. The vocabulary is that of
    data.vocab_file, or is made from the corpus of data.name, which must then be public.

    Args:
      address: HOST:PORT of the server, or its folder.
      chosen: what the recipe chose.
      offered: the run asks for no start, and takes the base model where that knows enough of the vocabulary.
    """
    from keyfed.deploy.client_home import check_server
    from keyfed.deploy.processes import stop_at_signals
    from keyfed.deploy.submit import Unfinished, build_app, submit
    from keyfed.deploy.superlink import ServerHome, default_home
    from keyfed.deploy.up import run_files
    from keyfed.run.recipe.pilot import with_carried_step
    from keyfed.run.remote.train import deployable
    from keyfed.run.start.weights import not_base, offer_start_by_words
    from keyfed.text.vocab import Vocab
    from keyfed.wire.flower.environment import need_flower, write_connection

    need_flower()
    deployable(config)
    later = go_on(out, address, plain=not config.secure.on)
    if Path(address).is_dir():
        server = ServerHome(Path(address).absolute())
        address = server.address()
    else:
        server = ServerHome(default_home())
        check_server(address)
    vocab, wanted = run_vocab(config, listener), config.train.cohort
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


def go_on(out: Path, federation: str | None = None, *, plain: bool = False) -> str:
    """Return the command that goes on with a run.

    Example:
      >>> go_on(Path("runs/a"), "127.0.0.1:9092", plain=True)
      'keyfed train --resume --out runs/a --federation 127.0.0.1:9092 --plain'
    """
    where = [] if federation is None else ["--federation", federation, *(["--plain"] if plain else [])]
    return shlex.join(["keyfed", "train", "--resume", "--out", str(out), *where])


def came_back(address: str, ca: Path) -> bool:
    """Wait until a server answers again and what it was doing has ended for good; False where it does not."""
    from keyfed.deploy.processes import wait_until
    from keyfed.deploy.superlink import answers

    found = wait_until(lambda: answers(address, ca), RETURN_SECONDS, lambda: True, 1.0)
    if found:
        time.sleep(SETTLE_SECONDS)  # its last program notices within seconds that its server has gone
    return found


def run_vocab(config: Config, listener: Listener) -> str:
    """Return the vocabulary that a run carries, as JSON."""
    if config.data.vocab_file is not None:
        try:
            return Path(config.data.vocab_file).read_text("utf-8")
        except (OSError, ValueError) as e:
            raise ConfigError(f"{config.data.vocab_file}: cannot be read as a vocabulary ({e})") from None
    from keyfed.run.prepare import prepare

    listener.say(
        f"the vocabulary is made from {config.data.name}, which everybody in the federation will see (--vocab)"
    )
    return prepare(config).vocab.to_json()
