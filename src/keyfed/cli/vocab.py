"""The verb `keyfed vocab`: clients elect a vocabulary. torch is imported by the verb, not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyfed.cli.options import (
    ConfigOption,
    DataOption,
    DirOption,
    JsonOption,
    ModelOption,
    SetOption,
    configure,
    print_json,
)
from keyfed.cli.train import privacy_settings


def vocab(
    data: DataOption = None,
    data_dir: DirOption = None,
    model: ModelOption = None,
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
    population: Annotated[
        int | None, typer.Option(help="With --dp: clients of an imagined fleet, for a SIMULATED guarantee.")
    ] = None,
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
        "data.name": data, "data.dir": data_dir, "model.name": model,
        "data.vocab": None if beyond is not None else size,
        "data.min_clients": min_clients,
        **privacy_settings(dp, population, None),
    }  # fmt: skip
    resolved = configure(None, config, named, settings)
    if resolved.data.min_clients == 1 and allow_single:
        typer.echo("warning: a word of a single client enters, and everybody who gets the model can read it", err=True)
    report = elect_vocabulary(
        resolved, out, least_uses=least_uses, most_words=most_words, allow_single=allow_single, phrases=phrases,
        beyond=beyond, entries=size if beyond is not None else None, seeded=seeded,
    )  # fmt: skip
    print_json(report) if as_json else typer.echo(vocabulary_text(report))
