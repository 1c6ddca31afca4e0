"""`keyfed export`, `keyfed keyboard` and `keyfed suggest`: typing on a run. torch is imported by the commands."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from keyfed.cli.options import JsonOption, RunArgument, print_json, say
from keyfed.errors import ConfigError, RunError
from keyfed.system import has_raw_terminal


def export(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="Folder to write.  [default: RUN/keyboard, or RUN/phone]")] = None,
    int8: Annotated[
        bool, typer.Option("--int8/--fp32", help="Weights in eight bits, or as trained: four times the download.")
    ] = True,
    site: Annotated[
        Path | None,
        typer.Option(help="Write a web site to this folder instead: the page with the model in it.", metavar="FOLDER"),
    ] = None,
    federated: Annotated[
        bool, typer.Option("--federated", help="With --site: the page that can take part in a federation.")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(help="With --federated: the server of another origin that it takes part with.", metavar="URL"),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Write the format of the base model that comes along (`make base`).")
    ] = False,
    phone: Annotated[
        bool, typer.Option("--phone", help="Write a dictionary of the run's counts for Android keyboards.")
    ] = False,
    locale: Annotated[str, typer.Option(help="Language of that dictionary, as en or en_GB.")] = "en",
    as_json: JsonOption = False,
) -> None:
    """Write a run's model for the keyboard page: ONNX graph, weights, vocabulary, test vectors, manifest.

    The graph is compared with the trained network on held-out text and refused if it differs. A new round changes the
    weights file only. The export of a run with --dp is compared on random tokens. It has no written forms, and n-grams
    only if they were counted with noise. N-grams are those that `keyfed counts` released.

      keyfed export runs/first

    With --site it writes the keyboard as a web site: page, model, and what a phone needs to install it and to use it
    without a network. Any host over HTTPS serves it, in a subfolder too. RUN may be `base`, or an export. The folder
    must be new, empty, or an earlier site, which is replaced.

      keyfed export base --site public

    With --site and --federated it writes another page. Its owner can let it train on what was typed, and let it take
    part in a federation, to which only masked sums leave. It speaks to the host that serves it, or to --server.

      keyfed export base --site public --federated --server https://192.0.2.7:8443

    With --base it writes what comes with the package instead: weights in eight bits, vocabulary, hashes of the
    lines of its text, manifest and card. The corpus must be at hand, and its licence must permit it.

      keyfed export runs/base --base --out src/keyfed/model/base

    With --phone it writes a dictionary that HeliBoard and FUTO Keyboard import, and the same as text: the words and
    pairs that `keyfed counts` released. RUN may be `base`.

      keyfed export base --phone --locale en --out phone
    """
    if site is not None and (base or phone or out is not None):
        other = "--base" if base else "--phone" if phone else "--out"
        raise ConfigError(f"--site writes a folder of its own; leave {other} out")
    if federated and site is None:
        raise ConfigError("--federated writes a web site; give its folder with --site")
    if server is not None and not federated:
        raise ConfigError("--server is of the page that takes part in a federation; add --federated, or leave it out")
    if base and phone:
        raise ConfigError("--base and --phone write different things; give one of them")
    if phone:
        from keyfed.keyboard.phone import export_phone, phone_text

        if not int8:
            raise ConfigError("--phone writes no weights; leave --fp32 out")
        written = export_phone(run, out, locale)
        print_json(written.to_json()) if as_json else typer.echo(phone_text(written))
        return
    if base:
        from keyfed.keyboard.export import pack_base, packed_text

        if out is None or not int8:
            raise ConfigError("--base is in eight bits and wants a folder: give --out, and leave --fp32 out")
        packed = pack_base(run, out)
        print_json({"out": str(out), **packed.manifest}) if as_json else typer.echo(packed_text(packed))
        return
    if site is not None:
        _export_site(run, site, int8, as_json, federated=federated, server=server)
        return
    from keyfed.run.console import working

    with working(f"exporting {run}", quiet=True):
        from keyfed.keyboard.export import export_run, export_text

        done = export_run(run, out, int8)
    whole = {"out": str(done.out), **done.manifest, "notes": done.notes}
    print_json(whole) if as_json else typer.echo(export_text(done))


def _export_site(run: Path, folder: Path, int8: bool, as_json: bool, *, federated: bool, server: str | None) -> None:
    from keyfed.keyboard import bundle
    from keyfed.keyboard.export import export_run
    from keyfed.keyboard.federated import federated_build
    from keyfed.keyboard.site import KEYBOARD, files_of_site, site_text, write_site
    from keyfed.run.base import is_base

    build = federated_build(server) if federated else KEYBOARD

    files_of_site(folder)  # what cannot be written to is said before anything long
    if not is_base(run) and folder.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"{folder} lies in {run}, whose files are not for everybody; choose a folder elsewhere")
    with TemporaryDirectory(prefix="keyfed-site-") as temporary:
        if bundle.is_bundle(run):
            done = write_site(run, folder, build=build)
        else:
            done = write_site(export_run(run, Path(temporary) / "export", int8).out, folder, build=build)
    print_json({**asdict(done), "folder": str(folder)}) if as_json else typer.echo(site_text(done))


def keyboard(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run folder, export folder, or base; runs/first or base by default.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any that is free.", min=0, max=65535)] = 8017,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    lan: Annotated[
        bool, typer.Option("--lan", help="Serve the page over HTTPS to phones in the same network, and show how.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="With --lan: this machine's IPv4 address to serve on, where it has several."),
    ] = None,
) -> None:
    """Type on a run's model in a browser. What is typed stays in the page: the server has no way to receive it.

    Serves the page on 127.0.0.1 until Ctrl-C. A run that was not exported, or has been trained since, is exported
    first. Without RUN it takes the run of `make run`, or the base model that comes with the package if there is none.

      keyfed keyboard runs/first

      keyfed keyboard base

    With --lan a phone in the same network can open it, over HTTPS on one address of this machine. The certificate is
    its own and is kept in ~/.keyfed/keyboard (KEYFED_KEYBOARD_HOME). Prints the address, a QR code, and how a phone
    comes to trust the certificate; until then the page works, but cannot be installed or used offline. Everybody in the
    network can open it.

      keyfed keyboard base --lan
    """
    from keyfed.keyboard.graph import need

    need("starlette", "uvicorn", "onnx", "onnxruntime", *(("cryptography", "segno") if lan else ()))
    from keyfed.keyboard import serve
    from keyfed.keyboard.export import export_run
    from keyfed.keyboard.lan import LanServer, chosen_address, kept_certificate
    from keyfed.run.base import is_base
    from keyfed.run.console import working

    if address is not None and not lan:
        raise ConfigError("--address is for --lan; without it the page is served on 127.0.0.1 alone")
    serve.page_files(serve.WEB)  # what is missing is said before anything long
    host = chosen_address(address) if lan else serve.HOST
    with serve.listen(port, host) as listening, TemporaryDirectory(prefix="keyfed-keyboard-") as temporary:
        certificate = kept_certificate(host) if lan else None
        chosen = run or _run_or_base()
        if is_base(chosen):
            with working("exporting the base model"):
                folder, name = export_run(chosen, Path(temporary) / "base").out, "the base model"
        else:
            folder = _exported(chosen)
            name = str(folder)
        taken = listening.getsockname()[1]
        if certificate is not None:
            server = LanServer(folder, Path(temporary) / "site", host, taken, certificate)
            notes = server.write().notes
            typer.echo(server.text(name, sys.stdout.encoding or "ascii", notes))
            server.make().run(sockets=[listening])
            return
        address = f"http://{serve.HOST}:{taken}/"
        app = serve.make_app(folder, taken)
        typer.echo(f"{address}  types on {name}; Ctrl-C ends it")
        if not no_open:
            serve.open_browser(address)
        serve.make_server(app).run(sockets=[listening])


def _exported(run: Path) -> Path:
    """Return the export to serve: the folder itself, or the run's, made (again) where it is not of the run's model."""
    from keyfed.keyboard import bundle
    from keyfed.keyboard.compact import counts_sum
    from keyfed.keyboard.export import export_run, export_text, model_sum
    from keyfed.run.console import working
    from keyfed.run.folder import read_run_toml

    if bundle.is_bundle(run):
        bundle.check_bundle(run)
        return run
    config, _ = read_run_toml(run)  # what is no run is said as such
    target, int8 = run / "keyboard", True
    if bundle.is_bundle(target):
        try:
            manifest = bundle.check_bundle(target)
            int8 = manifest["precision"] == "int8"
            raw = bundle.read_from_text(target) if config.privacy.on else []
            same = manifest["run"]["model_sha256"] == model_sum(run)
            counted = (manifest.get("counts") or {}).get("sha256")
            if same and counted == (None if config.privacy.on and counted is None else counts_sum(run)) and not raw:
                return target
            why = f"{run} has {'counted' if same else 'been trained'} since it was exported"
            if raw:
                why = f"{run} is private, and its export holds {', '.join(raw)}"
            say(f"{why}; exporting it again")
        except RunError as e:
            say(f"{e}: doing so")
    with working(f"exporting {run} to {target}"):
        done = export_run(run, target, int8)
    typer.echo(export_text(done), err=True)
    return target


def _run_or_base() -> Path:
    """Return the run of `make run`, or `base` where that is not there or not finished."""
    run = Path("runs/first")
    if (run / "model.safetensors").exists() and (run / "result.json").exists():
        return run
    say(f"no RUN was given and {run} is no finished run: this is the base model (`make run` trains)")
    return Path("base")


def suggest(
    run: RunArgument,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]", help="Whole words typed so far, for the next ones; without it, type and see."),
    ] = None,
    count: Annotated[int, typer.Option("-k", help="How many suggestions; without TEXT at most 3.", min=1)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Print the most probable next words after TEXT; without it, suggest while you type.

    Tab takes the middle suggestion, Alt+1, 2 or 3 one of the three, a blank the correction (backspace brings back what
    was typed), arrows move, Enter ends the line, Ctrl-D leaves. Words have the capitals of the run's text.

    Where the input is no terminal, every line of it is a field that is being typed in. Its last word is completed or
    corrected, unless a blank ends it, with three suggestions at most. TEXT is taken as whole words, and followed by
    next words. (A character model completes the last word of both.)

      keyfed suggest runs/first "i would like to" -k 5

      echo "the state o" | keyfed suggest runs/first

    RUN may be `base`, the model that comes with the package:

      keyfed suggest base "how do i"
    """
    from keyfed.keyboard.session import PlainLine, harmless, run_terminal, suggestions_of
    from keyfed.run.base import is_base, load_base, load_run
    from keyfed.run.evaluate import suggest as suggest_words

    trained = load_run(run)

    def words_after(before: str) -> list[str]:
        return suggest_words(trained.spec, trained.params, trained.vocab, before, count, lines=trained.reads_lines)

    if words:
        text = " ".join(words)
        found = words_after(text)
        print_json({"text": text, "suggestions": found}) if as_json else typer.echo("\n".join(map(harmless, found)))
        return
    if count > 3:
        raise ConfigError(f"-k {count}: the strip above a keyboard has three words; give a text for more")
    from keyfed.keyboard.compact import counts_for_page
    from keyfed.keyboard.export import spelling_of
    from keyfed.keyboard.session import TypedLine, keyboard_of
    from keyfed.system import node_program, pip_line

    keyboard = None
    if trained.vocab.kind == "word" and node_program() is not None:
        base = load_base() if is_base(run) else None
        private = trained.config.privacy.on
        counts = base.counts if base else counts_for_page(trained.folder, len(trained.vocab), private=private)[0]
        keyboard = keyboard_of(trained, *spelling_of(trained, base), counts)
    if keyboard is None and trained.vocab.kind == "word":
        say(f"node is not installed: next words only, no completion or correction ({pip_line('node')})")
    if sys.stdin.isatty() and has_raw_terminal():
        if as_json:
            raise ConfigError("--json has nothing to print while you type; give a text or a file of lines")
        line = PlainLine(words_after) if keyboard is None else TypedLine(keyboard)
        run_terminal(line, sys.stdin.fileno(), lambda shown: typer.echo(shown, nl=False))
        return
    for raw in sys.stdin.buffer:
        before = raw.decode("utf-8", "replace").rstrip("\r\n")
        found = (words_after(before) if keyboard is None else suggestions_of(keyboard.suggest(before)))[:count]
        one = json.dumps({"text": before, "suggestions": found}) if as_json else "\t".join(map(harmless, found))
        typer.echo(one)
