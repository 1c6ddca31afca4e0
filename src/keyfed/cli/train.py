"""`keyfed train` and `keyfed pretrain`: the command line of a run. torch is imported when it runs, not here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Concatenate, ParamSpec

import typer

from keyfed.cli.options import (
    NONE,
    ConfigOption,
    JsonOption,
    Keys,
    Named,
    RunArgument,
    SetOption,
    configure,
    follow_rank_0,
    print_json,
    say,
    sets,
    with_keys,
)
from keyfed.config.schema import CountsConfig
from keyfed.errors import ConfigError, RunError
from keyfed.system import leads

if TYPE_CHECKING:
    from keyfed.config.load import Config
    from keyfed.run.console import Listener, Narrator
    from keyfed.run.recipe import Setting

P = ParamSpec("P")
COUNTS = CountsConfig()
MinutesOption = Annotated[
    float | None,
    typer.Option(help="Train for about so long, in place of --rounds; their number is fixed after measuring."),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --out, or start it; more --rounds extend a finished one."),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, with sizes; do nothing.")]
FederationOption = Annotated[
    str | None,
    typer.Option(
        "--federation", metavar="ADDRESS", help="Train on the clients of a `keyfed server`: HOST:PORT, or its folder."
    ),
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="With --federation: without secure aggregation; the server sees every update.")
]
PrivacyOption = Annotated[
    str | None,
    typer.Option("--dp", metavar="BUDGET", help="Client-level differential privacy: epsilon=8, or noise=1."),
]
TensorboardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write the rounds as TensorBoard events to RUN/tensorboard.")
]


TEXT = ("data.name", "data.me", "data.author_column", "data.text_column", "data.dir")
WHAT = (*TEXT, "model.name", "data.vocab_file", "train.rounds")
START = ("train.seed", "train.until", "train.init", "vectors.file", "vectors.dim")


def default_out(config: Config, resume: bool, what: str | None = None) -> Path:
    from keyfed.run.folder import file_name, free_name

    base = Path("runs") / f"{what or config.method}-{file_name(Path(config.data.name).name)}-{config.model.name}"
    return base if resume else free_name(base)


def _refuse_flags(flags: Mapping[str, object]) -> None:
    """Refuse flags that do not go together."""
    from keyfed.run.compatible import Case, refuse

    refuse("command line", Case(flags=frozenset(flag for flag, given in flags.items() if given)))


def _secure(secure: bool, plain: bool, federation: str | None) -> bool | None:
    """Return what secure.on is set to: in a real federation on, unless plain is said; elsewhere as asked."""
    _refuse_flags({"--plain": plain, "--secure": secure, "--federation": federation is not None})
    return not plain if federation is not None else secure or None


def privacy_settings(dp: str | None, settings: list[str] | None = None) -> Named:
    """Return what --dp sets; clients are then called independently, unless they take turns.

    Example:
      >>> privacy_settings("epsilon=8")
      {'privacy.epsilon': '8', 'participation.sampling': 'poisson'}
    """
    if dp is None:
        return {}
    key, _, number = dp.partition("=")
    if key.strip() not in ("epsilon", "noise") or not number.strip():
        raise ConfigError(f'--dp is "{dp}"; expected epsilon=NUMBER or noise=NUMBER')
    found: Named = {f"privacy.{key.strip()}": number.strip()}
    if "privacy.mechanism=tree" not in (setting.replace(" ", "") for setting in settings or []):
        found["participation.sampling"] = "poisson"
    return found


def go_on(out: Path, federation: str | None = None, *, plain: bool = False) -> str:
    """Return the command that goes on with a run.

    Example:
      >>> go_on(Path("runs/a"), "127.0.0.1:9092", plain=True)
      'keyfed train --resume --out runs/a --federation 127.0.0.1:9092 --plain'
    """
    where = [] if federation is None else ["--federation", federation, *(["--plain"] if plain else [])]
    return shlex.join(["keyfed", "train", "--resume", "--out", str(out), *where])


@with_keys
def train(
    method: Annotated[
        str | None, typer.Argument(help="Method (`keyfed methods`); else the recipe: what fits the corpus.")
    ] = None,
    what: Annotated[Named, Keys(WHAT)] = NONE,
    minutes: MinutesOption = None,
    start: Annotated[Named, Keys(START)] = NONE,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/METHOD-DATA-MODEL by default.")] = None,
    dp: PrivacyOption = None,
    privacy: Annotated[Named, Keys(("privacy.population", "secure.on"))] = NONE,
    resume: ResumeOption = False,
    settings: SetOption = None,
    config: ConfigOption = None,
    dry_run: DryOption = False,
    tensorboard: TensorboardOption = False,
    curves: Annotated[Named, Keys(("train.curves",))] = NONE,
    federation: FederationOption = None,
    plain: PlainOption = False,
    counting: Annotated[Named, Keys(("counts.on",))] = NONE,
    as_json: JsonOption = False,
) -> None:
    """Train a model federatedly and report how it stands.

    Words of English start from the base model that comes along; --init none starts at random (docs/starting-smart.md).
    Without METHOD the recipe chooses method and settings from the corpus (docs/training.md), a short pilot settles the
    step, and --dry-run says what was chosen and why; what you set stays. METHOD is one of `keyfed methods`, with its
    own defaults. Without options it trains on the built-in corpus (chat of the channel #ubuntu, one client per
    author) and writes a run folder: report, metrics, checkpoints, model.

      keyfed train --data my-chats.csv --minutes 10

      keyfed train fedavg --data ptb --model gru --rounds 50 --set lr=0.002 --set train.cohort=10

    With --dp every upload is clipped and the sum noised; the noise fits the budget, which is printed every round and
    ends the run (docs/privacy.md):

      keyfed train fedavg --dp epsilon=8 --population 1000000

    With --federation and --counts the clients that take part in counts are counted after the last round, by secure sums
    (docs/counts.md):

      keyfed train fedavg --federation 127.0.0.1:9092 --vocab base --counts
    """
    named = {**what, **start, **privacy, **curves, **counting, **privacy_settings(dp, settings)}
    _train(
        method, named, settings, config, minutes=minutes, out=out, resume=resume, dry_run=dry_run, plain=plain,
        tensorboard=tensorboard, federation=federation, as_json=as_json,
    )  # fmt: skip


def _followed(task: Callable[Concatenate[Narrator, P], None]) -> Callable[P, None]:
    """Run a task under a narrator that has begun to speak; a process that is not rank 0 of several only follows."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if not leads():
            if not kwargs.get("dry_run"):
                follow_rank_0()
            return
        from keyfed.run.console import Narrator

        with Narrator() as narrator:
            narrator.wait("starting")  # PyTorch takes seconds to import, and the text is read after that
            task(narrator, *args, **kwargs)

    return run


@_followed
def _train(
    narrator: Narrator,
    method: str | None,
    named: Named,
    settings: list[str] | None,
    config: Path | None,
    *,
    minutes: float | None,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    tensorboard: bool,
    as_json: bool,
    federation: str | None = None,
    plain: bool = False,
) -> None:
    """Resolve the configuration, train as it says, report; or only say what would be done."""
    from keyfed.run.folder import read_run_toml

    named["secure.on"] = _secure(bool(named.get("secure.on")), plain, federation)
    counted = named["train.rounds"] is not None or sets("train.rounds", settings, None)
    flags = {"--minutes": minutes is not None, "--rounds": counted}
    _refuse_flags({**flags, "--curves": named["train.curves"], "--federation": federation is not None})
    base = None
    if resume and out is not None and (out / "run.toml").exists():
        base = read_run_toml(out)[0]
    elif resume and out is not None and not out.exists():
        say(f"{out} holds no run yet: a new one starts there")
    elif out is not None and (out / "run.toml").exists() and not dry_run:  # said before a corpus is read
        raise RunError(f"{out} holds a run already; go on with it by --resume, or choose another --out")
    resolved = configure(method, config, named, settings, base, recipe=True, minutes=minutes)
    offered = named["train.init"] is None and not sets("train.init", settings, config)
    if offered and base is not None:  # a run goes on from the start that it had
        offered, resolved = False, replace(resolved, train=replace(resolved.train, init=base.train.init))
    chosen: Sequence[Setting] = ()
    if federation is not None:
        from keyfed.run.pilot import choose_for_federation

        resolved, chosen = choose_for_federation(resolved, None)
    if dry_run:
        from keyfed.reports.dry import describe_plan

        narrator.wait(f"reading {resolved.data.name}")
        resolved = resolved if federation is None else replace(resolved, counts=COUNTS)  # a plan is of rounds
        description = describe_plan(resolved, offered=offered)
        narrator.stop()
        print_json(description) if as_json else typer.echo(description["text"])
        return
    from keyfed.reports.run_page import report_run
    from keyfed.run.loop import train as run_training

    folder = out or default_out(resolved, resume)
    if resume and out is None and not folder.exists():
        say(f"{folder} holds no run yet: a new one starts there; --out says which run goes on")
    narrator.wait(f"reading {resolved.data.name}")
    with ExitStack() as stack:
        listener: Listener = narrator
        if tensorboard:
            from keyfed.reports.figures import EventWriter

            listener = stack.enter_context(EventWriter(folder, narrator))
        try:
            if federation is None:
                result = run_training(resolved, folder, resume=resume, listener=listener, offered=offered)
            else:
                from keyfed.deploy.up import train_in_federation

                result = train_in_federation(
                    resolved, federation, folder, listener, resume=resume, chosen=chosen, offered=offered,
                    later=go_on(folder, federation, plain=not resolved.secure.on),
                )  # fmt: skip
        except KeyboardInterrupt:
            narrator.stop()
            later = f"go on with: {go_on(folder, federation, plain=not resolved.secure.on)}"
            if federation is None and folder.exists() and not (folder / "run.toml").exists():
                later = f"the pilot goes on with the same command, --resume and --out {shlex.quote(str(folder))}"
            say(f"stopped; {later}")
            raise
    narrator.wait("writing the report")
    report = report_run(folder)
    narrator.stop()
    print_json(result) if as_json else typer.echo(report)


@with_keys
def pretrain(
    what: Annotated[
        Named, Keys(WHAT, {"train.rounds": "Rounds, each as much text as a round of `train` reads."})
    ] = NONE,
    minutes: MinutesOption = None,
    start: Annotated[Named, Keys(START)] = NONE,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/pretrain-DATA-MODEL by default.")] = None,
    resume: ResumeOption = False,
    settings: SetOption = None,
    config: ConfigOption = None,
    dry_run: DryOption = False,
    tensorboard: TensorboardOption = False,
    curves: Annotated[Named, Keys(("train.curves",))] = NONE,
    as_json: JsonOption = False,
) -> None:
    """Train a model centrally on public text, as a start for federated training (`keyfed train --init`).

    The text is in one place, so take one that is public: wikitext-2, shakespeare, your own. The run folder is that of
    `keyfed train central`. Rows of the embedding and of the output layer are then carried over by word. So the two
    corpora may have different vocabularies; the model must have the same shape.

      keyfed pretrain --data wikitext-2 --model nwp-small --out runs/public

      keyfed train fedadam --data ptb --model nwp-small --init runs/public

    On the same corpus, with disjoint clients and the same held-out text:

      keyfed pretrain --data irc --set data.clients_part=1/2 --out runs/half

      keyfed train --data irc --set data.clients_part=2/2 --init runs/half
    """
    if out is None:
        named = {key: what[key] for key in ("data.name", "data.dir", "model.name")}
        out = default_out(configure("central", config, named, settings), resume, "pretrain")
    _train(
        "central", {**what, **start, **curves}, settings, config, minutes=minutes, out=out, resume=resume,
        dry_run=dry_run, tensorboard=tensorboard, as_json=as_json,
    )  # fmt: skip
    if leads() and not dry_run and not as_json:
        typer.echo(
            f"start:  keyfed train --init {shlex.quote(str(out))}, with this model and the corpus of your choice"
        )


def counts(
    run: RunArgument,
    order: Annotated[int, typer.Option(help="Longest n-gram.")] = COUNTS.order,
    k: Annotated[int, typer.Option("--k", help="Clients that an n-gram needs.")] = COUNTS.k,
    dp: PrivacyOption = None,
    population: Annotated[
        int | None,
        typer.Option(help="With --dp: clients of the imagined fleet: SIMULATED.", min=2),
    ] = None,
    megabytes: Annotated[
        float, typer.Option(help="What a client sends for sketches, in all.", min=0)
    ] = COUNTS.megabytes,
    most: Annotated[
        int | None,
        typer.Option(help="N-grams of one length that a client contributes at most.  [default: 20,000; --dp: 300]"),
    ] = None,
    cap: Annotated[
        int | None,
        typer.Option(help="How often a client's use of one n-gram counts at most.  [default: 1,000; --dp: 1]"),
    ] = None,
    among: Annotated[int, typer.Option(help="Clients of one sum at most.")] = COUNTS.among,
    secure: Annotated[
        bool | None,
        typer.Option("--secure/--clear", help="Play the secure sum, or add in the clear.  [default: as the run]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count n-grams over a run's clients without moving text, and mix the counts with the run's network.

    Level by level: the words of the vocabulary, then sketches of longer n-grams, which are read where the level below
    has released. Only n-grams of --k clients or more are released, and written to RUN/counts.safetensors. Smoothing
    and the mixture's weights are fitted on validation text, by sums too. `keyfed evaluate RUN` then has rows for
    counts, the mixture, and the mixture with each client's own cache (docs/counts.md).

      keyfed counts runs/first

      keyfed counts runs/first --k 5 --order 3 --secure

    With --dp every sum is noised, thresholds rise with the noise, and a ledger is kept in RUN/counts.privacy:

      keyfed counts runs/first --order 3 --dp epsilon=2 --population 1000000
    """
    from keyfed.reports.finished import count
    from keyfed.reports.run_page import report_run, table_text
    from keyfed.run.counts.command import Counting, counts_text
    from keyfed.run.folder import read_result

    privacy = None
    if dp is not None:
        named = {**privacy_settings(dp), "privacy.population": population}
        privacy = configure(None, None, named, None).privacy
    elif population is not None:
        raise ConfigError("--population is for the noise of --dp; add --dp epsilon=NUMBER")
    cap = cap if cap is not None else COUNTS.cap if dp is None else 1
    most = most if most is not None else COUNTS.most if dp is None else 300
    how = Counting(
        order=order, k=k, cap=cap, most=most, megabytes=megabytes, among=among, secure=secure, privacy=privacy
    )
    report = count(run, how, say)
    report_run(run)  # the pages have the new rows, too
    result = read_result(run) or {}
    if as_json:
        print_json({**asdict(report), "test": result["counts"]})
        return
    typer.echo(f"{counts_text(report)}\n\n{table_text(result)}")
