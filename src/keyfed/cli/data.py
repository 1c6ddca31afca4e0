"""`keyfed data`: which corpora there are, what is in them, and how they are dealt to clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyfed.cli.options import DirOption, JsonOption, ModelOption, SetOption, configure, print_json
from keyfed.errors import ConfigError, nearest

data_app = typer.Typer(name="data", help="Look at corpora: list, describe, get, explore.", no_args_is_help=True)


@data_app.command("list")
def data_list(data_dir: DirOption = None, as_json: JsonOption = False) -> None:
    """List the corpora known by name and whether they are at hand."""
    from keyfed.reports.reference import describe_corpora

    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise ConfigError(f"--data-dir is {data_dir}, which is not a folder; expected the one that holds the corpora")
    rows = describe_corpora(Path(data_dir) if data_dir else None)
    if as_json:
        print_json([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
        return
    from keyfed.run.console import print_table

    print_table(rows)


@data_app.command("describe")
def data_describe(
    name: Annotated[str, typer.Argument(help="Corpus name or path.")] = "chat",
    data_dir: DirOption = None,
    model: ModelOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Partition a corpus and print its statistics: clients, tokens, vocabulary, unknown words."""
    from keyfed.reports.reference import describe_data

    config = configure(None, None, {"data.name": name, "data.dir": data_dir, "model.name": model}, settings)
    description = describe_data(config)
    print_json(description["statistics"]) if as_json else typer.echo(description["text"])


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="Corpus name.")], data_dir: DirOption = None) -> None:
    """Fetch a corpus (with its checksum) if it is not at hand, and say where it is."""
    from keyfed.run.console import plural
    from keyfed.text.catalogue import NAMED, folder_of, load_corpus

    if name not in NAMED:
        raise ConfigError(f'corpus "{name}" is not known{nearest(name, NAMED)}. Corpora: {", ".join(NAMED)}.')
    where = Path(data_dir) if data_dir else None
    corpus = load_corpus(name, data_dir=where)
    lines = sum(len(a.lines) for a in corpus.authors)
    size = f"{plural(len(corpus.authors), 'author')}, {plural(lines, 'line')}"
    typer.echo(f"{name}: in {folder_of(name, where)}, {size} ({corpus.about})")


@data_app.command("explore")
def data_explore(
    name: Annotated[str, typer.Argument(help="Corpus name or path.")] = "chat",
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("runs/explore"),
    top: Annotated[int, typer.Option(help="Entries of each table.", min=1)] = 20,
    data_dir: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Top uni- and bigrams, TF-IDF, lengths and (for character corpora) entropies, with plots."""
    from keyfed.text.catalogue import load_corpus
    from keyfed.text.explore import explore

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: {e.strerror}; choose a folder that can be written to") from None
    corpus = load_corpus(name, data_dir=Path(data_dir) if data_dir else None)
    result = explore(corpus, top=top, out=out / corpus.name)
    if as_json:
        print_json(result)
        return
    from keyfed.reports.reference import exploration_text

    typer.echo(exploration_text(result))
