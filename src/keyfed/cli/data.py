"""`keyfed data` and `keyfed vocab`: which corpora there are, how they are split among clients, and their vocabulary."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from keyfed.cli.options import (
    NONE,
    ConfigOption,
    DirOption,
    JsonOption,
    Keys,
    Named,
    SetOption,
    configure,
    print_json,
    say,
    with_keys,
)
from keyfed.cli.train import TEXT, privacy_settings
from keyfed.errors import ConfigError, nearest

data_app = typer.Typer(name="data", help="Look at corpora: check, list, describe, get, explore.", no_args_is_help=True)


@data_app.command("list")
@with_keys
def data_list(folder: DirOption = NONE, as_json: JsonOption = False) -> None:
    """List the corpora known by name and whether they are at hand.

    keyfed data list

    keyfed data list --data-dir ~/corpora --json
    """
    from keyfed.cli.reference import describe_corpora

    data_dir = folder["data.dir"]
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise ConfigError(f"--data-dir is {data_dir}, which is not a folder; expected the one that holds the corpora")
    rows = describe_corpora(Path(data_dir) if data_dir else None)
    if as_json:
        print_json([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        return
    from keyfed.run.console import print_table

    print_table(rows)


@data_app.command("describe")
@with_keys
def data_describe(
    name: Annotated[str, typer.Argument(help="Corpus name or path.")] = "chat",
    what: Annotated[Named, Keys(("data.dir", "model.name"))] = NONE,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Partition a corpus and print its statistics: clients, tokens, vocabulary, unknown words.

    keyfed data describe chat

    keyfed data describe ~/messages --set data.vocab=5000
    """
    from keyfed.run.console import working

    with working(f"reading {name}", quiet=True):
        from keyfed.cli.reference import describe_data

        description = describe_data(configure(None, None, {"data.name": name, **what}, settings))
    print_json(description["statistics"]) if as_json else typer.echo(description["text"])


@data_app.command("check")
@with_keys
def data_check(
    path: Annotated[str, typer.Argument(help="Your text: a file, folder or .zip.")],
    whose: Annotated[Named, Keys(("data.me", "data.author_column", "data.text_column"))] = NONE,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is understood of your text before anything is trained: format, authors, lines, language, what is lost.

    Numbers only: no line and no author is shown, but files that are left out are named. What a model would learn by
    mistake (times, markup) is noticed, with a remedy. docs/own-data.md has every form that is read.

      keyfed data check "WhatsApp Chat with Anna.txt"

      keyfed data check messages.csv --author-column 4 --text-column 6 --me anna
    """
    from dataclasses import asdict

    from keyfed.config.schema import read_options
    from keyfed.errors import RunError
    from keyfed.run.base import load_base
    from keyfed.run.console import working
    from keyfed.text.catalogue import load_corpus
    from keyfed.text.check import check_corpus, describe_check

    config = configure(None, None, {"data.name": path, **whose}, settings)
    folder = Path(config.data.dir) if config.data.dir else None
    with working(f"reading {path}", quiet=True):
        corpus = load_corpus(path, data_dir=folder, **read_options(config.data))
        try:
            known = load_base().trained.vocab.index
        except RunError:
            known = None
        found = check_corpus(corpus, known)
    if as_json:
        print_json(asdict(found))
        return
    flags = {"--me": whose["data.me"], "--author-column": whose["data.author_column"]}
    flags["--text-column"] = whose["data.text_column"]
    named = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    more = [word for setting in settings or [] for word in ("--set", setting)]
    typer.echo(describe_check(found, path, shlex.join(["keyfed", "train", "--data", path, *named, *more])))


@data_app.command("get")
@with_keys
def data_get(name: Annotated[str, typer.Argument(help="Corpus name.")], folder: DirOption = NONE) -> None:
    """Fetch a corpus (with its checksum) if it is not at hand, and say where it is."""
    from keyfed.run.console import plural
    from keyfed.text.catalogue import NAMED, folder_of, load_corpus

    if name not in NAMED:
        raise ConfigError(f'corpus "{name}" is not known{nearest(name, NAMED)}. Corpora: {", ".join(NAMED)}.')
    where = Path(folder["data.dir"]) if folder["data.dir"] else None
    corpus = load_corpus(name, data_dir=where)
    lines = sum(len(a.lines) for a in corpus.authors)
    size = f"{plural(len(corpus.authors), 'author')}, {plural(lines, 'line')}"
    typer.echo(f"{name}: in {folder_of(name, where)}, {size} ({corpus.about})")


@data_app.command("explore")
@with_keys
def data_explore(
    name: Annotated[str, typer.Argument(help="Corpus name or path.")] = "chat",
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("runs/explore"),
    top: Annotated[int, typer.Option(help="Entries of each table.", min=1)] = 20,
    folder: DirOption = NONE,
    as_json: JsonOption = False,
) -> None:
    """Top uni- and bigrams, TF-IDF, lengths and (for character corpora) entropies, with plots.

    keyfed data explore chat
    """
    from keyfed.reports.figures import draw_exploration
    from keyfed.run.console import working
    from keyfed.text.catalogue import load_corpus
    from keyfed.text.explore import explore

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: {e.strerror}; choose a folder that can be written to") from None
    with working(f"counting the words of {name}, and drawing", quiet=True):
        corpus = load_corpus(name, data_dir=Path(folder["data.dir"]) if folder["data.dir"] else None)
        result, lengths = explore(corpus, top=top)
        try:
            result["plots"] = draw_exploration(result, lengths, out / corpus.name)
        except ImportError:
            raise ConfigError("explore needs matplotlib: pip install matplotlib") from None
    if as_json:
        print_json(result)
        return
    from keyfed.cli.reference import exploration_text

    typer.echo(exploration_text(result))


@with_keys
def vocab(
    what: Annotated[Named, Keys((*TEXT, "model.name"))] = NONE,
    size: Annotated[
        int | None, typer.Option(help="Entries, four specials included.  [default: data.vocab]", min=5)
    ] = None,
    min_clients: Annotated[int | None, typer.Option(help="Clients a word needs.  [default: 3]")] = None,
    least_uses: Annotated[int, typer.Option(help="Uses from which on a client reports a word.")] = 1,
    most_words: Annotated[int, typer.Option(help="Words a client reports at most, its most frequent ones.")] = 4_000,
    allow_single: Annotated[
        bool, typer.Option("--allow-single", help="Take --min-clients 1: a single person's words reach everybody.")
    ] = False,
    dp: Annotated[
        str | None, typer.Option("--dp", metavar="BUDGET", help="Noisy counts with a guarantee: epsilon=8, or noise=1.")
    ] = None,
    population: Annotated[Named, Keys(("privacy.population",))] = NONE,
    seeded: Annotated[
        bool,
        typer.Option("--seeded", help="With --dp: noise derived from train.seed, so that the vote repeats: SIMULATED."),
    ] = False,
    phrases: Annotated[
        Path | None, typer.Option(help="With --dp: also count pairs of words under the same budget, into this file.")
    ] = None,
    beyond: Annotated[
        Path | None,
        typer.Option(
            metavar="VOCAB|RUN", help="Only new words: clients vote for what this vocabulary, or a run's, lacks."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("vocab.json"),
    settings: SetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build a vocabulary from what clients report, without their text: which words, not how often.

    Each client reports the words of its training text; a word enters by the number of clients that use it, and never
    if fewer than --min-clients do. Three by default: with two, somebody who guesses a word and reports it would see
    whether a single other person uses it.

      keyfed vocab --data sotu --size 5000 --out vocab.json

      keyfed train fedavg --vocab vocab.json

    With --dp the counts are noised, and a word needs as many clients as the noise asks for. The noise comes from the
    operating system. What was spent is in the file, in a ledger next to it, and in a register of all votes on this text
    (KEYFED_VOTES, else ~/.keyfed/votes), for the epsilon and the delta of several votes add:

      keyfed vocab --dp epsilon=2 --most-words 500 --population 1000000

    With --beyond clients vote only for words that a public vocabulary lacks. New words are written behind its own, so
    that a run can carry the old rows over (--init); --size then counts all entries, and without it all new words enter:

      keyfed vocab --beyond runs/first --dp epsilon=2 --population 1000000 --out larger.json
    """
    from keyfed.run.vocabulary import elect_vocabulary, vocabulary_text

    named = {
        **what,
        "data.vocab": None if beyond is not None else size,
        "data.min_clients": min_clients,
        **population,
        **privacy_settings(dp),
    }
    resolved = configure(None, config, named, settings)
    if resolved.data.min_clients == 1 and allow_single:
        say("warning: a word of a single client enters, and everybody who gets the model can read it")
    report = elect_vocabulary(
        resolved, out, least_uses=least_uses, most_words=most_words, allow_single=allow_single, phrases=phrases,
        beyond=beyond, entries=size if beyond is not None else None, seeded=seeded,
    )  # fmt: skip
    print_json(report) if as_json else typer.echo(vocabulary_text(report))
