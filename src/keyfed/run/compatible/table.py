"""What goes with what: every combination of options that a run refuses is a row here.

A row has a name, when it refuses, what it says (with what to do about it), and an example. `refuse` goes through the
rows of one stage in their order. docs/compatible.md is written from the table, and a test refuses every example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from keyfed.config.load import BASE, Config, check, method_spec
from keyfed.engine.sums.codec import MOST_MEMBERS
from keyfed.federated.methods import build_method
from keyfed.federated.public.rules import refuse_unequal
from keyfed.model.language_model import preset
from keyfed.private.dp.accounting import MOST_MEMBERS as MOST_PRIVATE
from keyfed.private.dp.private_method import make_private, refuse_absence, refuse_participation, refuse_sized_duals
from keyfed.private.secagg.threshold import PRIVATE_RATIO, most_ratio, usual_threshold
from keyfed.run.compatible.case import EMBEDDING, Case, Exclusion, Stage
from keyfed.run.counts.terms import refuse_remote_terms


def refuse(stage: Stage, case: Case) -> None:
    """Raise the first refusal of a stage, a KeyfedError that says what does not go together and what to do."""
    for rule in TABLE[stage][1]:
        rule.refuse(case)


def threshold_of(config: Config, members: int) -> int:
    """Clients of a secure sum that must stay until it is opened."""
    return usual_threshold(members) if config.secure.threshold is None else config.secure.threshold


def _refuse_configuration(case: Case) -> None:
    check(case.config)


def _refuse_unequal(case: Case) -> None:
    private = case.config.privacy.on
    refuse_unequal(case.method, PRIVATE_RATIO if private else most_ratio(threshold_of(case.config, case.members)))


def _refuse_count_terms(case: Case) -> None:
    if case.config.counts.on:
        refuse_remote_terms(case.config.counts)


def _refuse_sized_duals(case: Case) -> None:
    if case.config.privacy.on:
        refuse_sized_duals(case.method, case.config.privacy)


def _refuse_private(case: Case) -> None:
    p = case.config.privacy
    if p.on:
        everybody = case.method.cohort == "all" or case.members == case.clients
        refuse_participation(case.config.participation, p.mechanism, everybody)
        refuse_absence(make_private(case.method, p), case.members, case.clients)


FLAGS = (
    Exclusion(
        "--plain × --secure", "fedavg --plain --secure",
        lambda case: case.has(("--plain", "--secure")),
        "--plain is without secure aggregation, and goes not with --secure; leave one of the two out",
    ),
    Exclusion(
        "--plain × simulation", "fedavg --plain",
        lambda case: "--plain" in case.flags and "--federation" not in case.flags,
        "--plain goes with --federation, where secure aggregation is on by default; leave it out",
    ),
    *(
        Exclusion(f"{one} × {other}", f"fedavg {one} {other}", partial(Case.has, flags=(one, other)), message)
        for one, other, message in (
            ("--minutes", "--rounds", "--minutes and --rounds both say how long to train; leave one of the two out"),
            ("--curves", "--federation", "--curves works in simulation only; leave it out of a federation"),
            ("--minutes", "--federation",
             "--minutes is for a simulation: how long real clients take is not known; set --rounds"),
        )
    ),
)  # fmt: skip

CONFIGURATION = tuple(
    Exclusion(name, example, lower=_refuse_configuration)
    for name, example in {
        "train.final × constant step": "fedavg train.final=0.5",
        "--minutes × --dp": "fedavg --minutes privacy.epsilon=8",
        "upload.against × secure sums": "fedavg upload.against=0.5 secure.on=true",
        "upload.trim × secure sums": "fedavg upload.trim=0.2 secure.on=true",
        "upload.trim × --dp": "fedavg upload.trim=0.2 privacy.epsilon=8",
        "train.central × --dp": "fedavg train.central=true privacy.epsilon=8",
        "secure.clear × secure sums": "fedavg secure.clear=true secure.on=true",
        "train.curves × --dp": "fedavg train.curves=true privacy.epsilon=8",
        "train.curves × secure sums": "fedavg train.curves=true secure.on=true",
        "train.patience × --dp": "fedavg train.patience=3 privacy.epsilon=8",
        "train.unmatched × random start": "fedavg train.unmatched=mean",
        "train.carry × random start": "fedavg train.carry=embedding",
        "[vectors] × no file": "fedavg vectors.dim=50",
        "vectors.remove × PCA": "fedavg vectors.file=glove.txt vectors.remove=3",
        "[secure] × plain sums": "fedavg secure.floor=5",
        "[counts] × nothing counted": "fedavg counts.k=5",
        "method's own option × another component": "fedatt mediator.name=uniform temperature=2",
        "[privacy] × no budget": "fedavg privacy.clip=1",
        "privacy.cohort × real population": "fedavg privacy.epsilon=8 privacy.cohort=100",
        "tree × moving clip": "fedavg privacy.epsilon=8 privacy.mechanism=tree",
        "privacy.separation × gaussian": "fedavg privacy.epsilon=8 privacy.separation=3",
        "over-selection × poisson": "fedavg participation.over_select=0.3 participation.sampling=poisson",
    }.items()
)

OWN = (
    Exclusion(
        "module × options of a preset", "fedavg model.hidden=64",
        lambda case: case.module and case.preset_options,
        "{preset_options} would change a preset, and the model is your module {model}; leave it out here and say it "
        "there",
        facts={"module": True, "model": "my.Module"},
    ),
    Exclusion(
        "own method × configured method", "fedprox mu=0.1",
        lambda case: not case.module and case.configured,
        "the method {method.name} was passed beside a configuration that has one ({configured}); leave that out of "
        "configure(), a method of your own has its options inside",
        facts={"built": replace(build_method(method_spec(Config())), name="mine", spec=None)},
    ),
)  # fmt: skip

PLAN = (
    Exclusion(
        "counts.on × simulation", "fedavg counts.on=true",
        lambda case: case.config.counts.on,
        "counts.on (--counts) is for real clients; count the clients of a finished simulation: keyfed counts RUN",
    ),
    Exclusion(
        "weights by distance × one client", "fedatt train.cohort=1",
        lambda case: case.method.distance is not None and case.members < 2,
        "{method.name} weighs the clients of a round against each other, and a cohort of {members} has nothing to "
        "weigh; set train.cohort to at least 2, or use fedavg",
    ),
    Exclusion(
        "weights by distance × top-K of one", "fedmed beta=0.1 train.cohort=5 secure.on=true",
        lambda case: (case.config.secure.on or case.config.privacy.on) and case.method.distance and case.uploads < 2,
        "{method.name}: top-K leaves {uploads} upload of {members}, and a sum of one hides nothing; set beta higher",
    ),
    Exclusion(
        "least epochs × epochs", "fedavg epochs=2 participation.least_epochs=2",
        lambda case: case.federated and (case.config.participation.least_epochs or 0) >= case.method.epochs,
        "participation.least_epochs is {config.participation.least_epochs}, but {method.name} trains {method.epochs} "
        "local epochs: there is nothing to draw between; set method.epochs higher or least_epochs lower",
    ),
    Exclusion(
        "pace × fedsgd", "fedsgd participation.pace_spread=0.5",
        lambda case: case.config.participation.pace_spread and case.config.method == "fedsgd",
        "participation.pace_spread varies clients' step sizes, and fedsgd's clients take no step",
    ),
    Exclusion(
        "least uploads × cohort", "fedavg participation.minimum=11",
        # A private round is never abandoned.
        lambda case: case.federated and case.config.participation.minimum > case.uploads and not case.config.privacy.on,
        "participation.minimum is {config.participation.minimum}, but only {uploads} of a round's {members} clients "
        "upload: every round would be abandoned",
    ),
    Exclusion(
        "duals × few rounds", "fedadmm train.rounds=2",
        lambda case: case.federated and case.method.solver.start is not None and case.config.train.rounds > 0
        and case.participations <= 1,
        "{method.name} keeps a dual on every client, and in {config.train.rounds} rounds with {members} of {clients} "
        "clients each comes {participations:.2g} times: a dual is never used. Take more rounds, a larger train.cohort, "
        "or fedprox",
    ),
    Exclusion(
        "upload.trim × duals", "fedadmm upload.trim=0.2 train.rounds=100",
        lambda case: case.config.upload.trim and case.method.solver.start is not None,
        "upload.trim takes the mean of changes, and clients of {method.name} send what they stand for; leave it out",
    ),
    Exclusion(
        "fixed weights × clients", "fedavg mediator.name=fixed mediator.weights=anna=1,ben=2",
        lambda case: case.stranger is not None,
        'mediator.weights names "{stranger}", which is no client of {corpus}{did_you_mean}; `keyfed data describe` '
        "lists them",
    ),
)  # fmt: skip

DEVICE = (
    Exclusion(
        "precision × CPU", "fedavg train.precision=bf16",
        lambda case: case.device == "cpu" and case.config.train.precision != "fp32",
        "train.precision is {config.train.precision}, which is for GPUs; a CPU computes in fp32",
    ),
    Exclusion(
        "block × workers", "fedavg train.block=4",
        lambda case: case.device == "cpu" and (case.config.train.block or 1) > 1 and case.workers > 1,
        "train.block={config.train.block} stacks clients in one process; set train.workers=1 with it",
        facts={"workers": 2},
    ),
    Exclusion(
        "precision × module", "fedavg train.precision=bf16",
        lambda case: case.device != "cpu" and case.module and case.config.train.precision != "fp32",
        "train.precision={config.train.precision} is for our own models; a module chooses its types itself",
        facts={"device": "cuda", "module": True},
    ),
    Exclusion(
        "workers × GPU", "fedavg train.workers=2",
        lambda case: case.device != "cpu" and (case.config.train.workers or 1) > 1,
        "train.workers is for CPUs; on a GPU clients are stacked (train.block)",
        facts={"device": "cuda"},
    ),
)  # fmt: skip

DEADLINE = (
    Exclusion(
        "deadline × links", "fedavg participation.deadline=5",
        lambda case: (limit := case.config.participation.deadline) is not None and limit <= case.moving,
        "participation.deadline is {config.participation.deadline} seconds, and moving the model down and up takes "
        "{moving:.1f} at the modelled links: nobody could finish; set it higher, or down_mbit and up_mbit",
        facts={"moving": 9.0},
    ),
)  # fmt: skip

SECURE = (
    Exclusion(
        "secure sums × central training", "central secure.on=true",
        lambda case: not case.federated,
        "secure.on is set, but {method.name} trains one client that has all the text: there is no sum to hide; leave "
        "--secure out",
    ),
    Exclusion(
        "secure sums × compression", "fedavg secure.on=true upload.quantise=int8",
        lambda case: case.method.codec is not None,
        "secure.on is set beside upload.keep={config.upload.keep} and upload.quantise={config.upload.quantise}: masked "
        "numbers cannot be left out or made smaller, all are 32 bits; leave the compression out",
    ),
    Exclusion(
        "secure.floor × cohort", "fedavg secure.on=true train.cohort=2",
        lambda case: case.members < case.config.secure.floor,
        "secure.floor is {config.secure.floor}, and a round has {members} clients: each would refuse; set train.cohort "
        "higher",
    ),
    Exclusion(
        "secure sums × large cohort", "fedavg secure.on=true",
        lambda case: case.members > MOST_MEMBERS,
        "a secure sum of {members:,} clients, expected at most {most:,}; set train.cohort lower",
        facts={"members": MOST_MEMBERS + 1},
    ),
    Exclusion(
        "secure.threshold × cohort", "fedavg secure.on=true secure.threshold=5",
        # Clients refuse half and less.
        lambda case: (threshold := case.config.secure.threshold) is not None
        and not case.majority <= threshold <= case.members and case.config.participation.sampling != "poisson",
        "secure.threshold is {config.secure.threshold} in a round of {members} clients; expected {majority} to "
        "{members}, or none for more than two thirds",
    ),
)  # fmt: skip

MASKED = (
    Exclusion(
        "unequal weights × secure sums", "fedavg secure.on=true mediator.name=fixed mediator.weights=ann=1000,ben=1",
        lower=_refuse_unequal,
    ),
    Exclusion(
        "privacy.weight_cap × duals in secure sums", "admm secure.on=true privacy.epsilon=8 privacy.weight_cap=100",
        lower=_refuse_sized_duals,
    ),
    Exclusion(
        "secure sums × --dp × large cohort", "fedavg secure.on=true privacy.epsilon=8",
        lambda case: case.config.privacy.on and case.members > MOST_PRIVATE,
        "a secure sum of {members:,} clients with --dp, expected at most {most_private:,}; set train.cohort lower",
        facts={"members": MOST_PRIVATE + 1},
    ),
    Exclusion(
        "secure.threshold × --dp", "fedavg secure.on=true privacy.epsilon=8 secure.threshold=2",
        lambda case: case.config.privacy.on and (case.config.secure.threshold or PRIVATE_RATIO + 1) <= PRIVATE_RATIO,
        "secure.threshold is {config.secure.threshold} with --dp, and clients take part from {least_private} on",
    ),
)  # fmt: skip

FROZEN = (
    Exclusion(
        "frozen embedding × module", "fedavg train.frozen_rounds=3",
        lambda case: case.config.train.frozen_rounds and EMBEDDING not in case.layers,
        "train.frozen_rounds is {config.train.frozen_rounds}, but the model {model} has no layer embedding.weight: it "
        "has {layers_named}",
        facts={"layers": ("words.weight", "out.weight"), "model": "my.Module"},
    ),
    Exclusion(
        "frozen embedding × noise", "fedavg noise=0.1 train.frozen_rounds=3",
        lambda case: case.config.train.frozen_rounds and case.method.noise is not None,
        "train.frozen_rounds is {config.train.frozen_rounds}, but {method.name}'s noise moves every layer; set noise=0",
    ),
    Exclusion(
        "frozen embedding × duals", "admm train.frozen_rounds=3",
        lambda case: case.config.train.frozen_rounds and case.method.solver.start is not None,
        "train.frozen_rounds is {config.train.frozen_rounds}, but clients of {method.name} send all their layers when "
        "they join; use a method without duals, fedprox say",
    ),
)  # fmt: skip

VECTORS = (
    Exclusion(
        "word vectors × module", "fedavg vectors.file=glove.txt",
        lambda case: case.module,
        "vectors.file fills the embedding of a preset, and nobody knows which layer of your module {model} that is; "
        "leave it out and load the vectors in the module",
        facts={"module": True, "model": "my.Module"},
    ),
    Exclusion(
        "word vectors × characters", "fedavg model.name=char-lstm vectors.file=glove.txt",
        lambda case: case.characters,
        "vectors.file has vectors of words, and {model} reads characters; leave it out",
        facts={"characters": True, "model": "char-lstm"},
    ),
    Exclusion(
        "vectors.dim × embedding", "fedavg vectors.file=glove.txt vectors.dim=50",
        lambda case: case.config.vectors.dim not in (None, case.embed),
        "vectors.dim is {config.vectors.dim}, and the embedding of {model} is {embed} wide; set "
        "model.embed={config.vectors.dim} too, or leave vectors.dim out",
        facts={"embed": 96, "model": "cifg"},
    ),
)  # fmt: skip

PRIVATE = tuple(
    Exclusion(name, example, lower=_refuse_private)
    for name, example in {
        "--dp × over-selection": "fedavg privacy.epsilon=8 participation.over_select=0.3",
        "--dp × least uploads": "fedavg privacy.epsilon=8 participation.minimum=2",
        "--dp × drawn cohorts": "fedavg privacy.epsilon=8",
        "tree × poisson": "fedavg privacy.epsilon=8 privacy.mechanism=tree privacy.quantile=none "
        "participation.sampling=poisson",
        "--dp × running mean over some clients": "admm privacy.epsilon=8 participation.sampling=poisson",
    }.items()
)

RANKS = (
    Exclusion(
        "ranks × --dp", "fedavg privacy.epsilon=8",
        lambda case: case.config.privacy.on,
        "--dp forms one sum in one process; start it in one, not {ranks}",
    ),
    Exclusion(
        "ranks × --minutes", "fedavg --minutes",
        lambda case: case.config.open is not None and case.config.open.minutes is not None,
        "--minutes is measured in one process, and several ranks train; set --rounds instead",
    ),
    Exclusion(
        "ranks × central training", "central",
        lambda case: not case.federated,
        "{method.name} trains one client that has all the text; start it in one process, not {ranks}",
    ),
    Exclusion(
        "ranks × secure sums", "fedavg secure.on=true",
        lambda case: case.config.secure.on or case.config.secure.clear,
        "secure.on is set beside {ranks} ranks, which see each other's clients; start one process",
    ),
    Exclusion(
        "ranks × limits of uploads", "fedavg upload.limit=2",
        lambda case: case.upload_limit,
        "upload.{upload_limit} needs the uploads in one process, not in {ranks} ranks; leave it out",
    ),
    Exclusion(
        "ranks × workers", "fedavg train.workers=2",
        lambda case: (case.config.train.workers or 1) > 1,
        "train.workers is {config.train.workers} beside {ranks} ranks, and a rank is a worker; leave it out and start "
        "more ranks",
    ),
    Exclusion(
        "ranks × one GPU", "fedavg train.device=cuda:1",
        lambda case: case.device not in ("cpu", "cuda", "cuda:0"),
        "train.device is {device} beside {ranks} ranks, and each takes the GPU of its own number; set cuda",
        facts={"device": "cuda:1"},
    ),
)  # fmt: skip

FEDERATION = (
    Exclusion(
        "real clients × modelled clients", "fedavg participation.drop_before=0.1",
        lambda case: case.modelled,
        "participation.{modelled} models clients; real ones do as they do: leave it out",
    ),
    Exclusion(
        "real clients × draws by size", "fedavg participation.sampling=size",
        lambda case: case.config.participation.sampling == "size",
        "participation.sampling=size needs to know how much text clients have; take uniform",
    ),
    Exclusion(
        "real clients × central training", "central",
        lambda case: not case.federated,
        "central training needs everybody's text in one place; choose a federated method",
    ),
    Exclusion(
        "real clients × secure.floor", "fedavg secure.on=true train.cohort=2",
        lambda case: case.config.secure.on and case.config.participation.fraction is None
        and case.config.train.cohort < case.config.secure.floor,
        "train.cohort is {config.train.cohort}, and clients hide among {config.secure.floor} or more (secure.floor): "
        "each would refuse; set train.cohort higher",
    ),
    Exclusion(
        "real clients × secure.clear", "fedavg secure.clear=true",
        lambda case: case.config.secure.clear,
        "secure.clear weighs as secure sums do, in simulations only; set secure.on, or leave it out",
    ),
    Exclusion(
        "real clients × compression, the first model", "fedavg upload.keep=0.1",
        lambda case: case.method.codec is not None or case.method.solver.first,
        "upload.keep, upload.quantise, clients and server_step=published (not late) work in simulation only; leave out",
    ),
    Exclusion(
        "real clients × imagined fleet", "fedavg privacy.epsilon=8 privacy.population=1000000",
        lambda case: case.config.privacy.on and case.config.privacy.population is not None,
        "privacy.population is {config.privacy.population:,}: an imagined fleet, and this federation has real clients, "
        "whose guarantee is counted over those enrolled; leave it (--population) out",
    ),
    Exclusion(
        "real clients × --dp × train.until", "fedavg privacy.epsilon=8 train.until=nats=3",
        lambda case: case.config.privacy.on and case.config.train.until is not None,
        "train.until reads clients' scores, and a private federation asks for none; set train.rounds instead",
    ),
    Exclusion(
        "real clients × train.curves", "fedavg train.curves=true",
        lambda case: case.config.train.curves,
        "train.curves (--curves) works in simulation only; leave it out of a federation",
    ),
    Exclusion(
        "real clients × counts in plain sums", "fedavg counts.on=true",
        lambda case: case.config.counts.on and not case.config.secure.on,
        "counts.on (--counts) without secure sums would show the server which word sequences each client wrote; leave "
        "--plain or --counts out",
    ),
    Exclusion(
        "real clients × counts × --dp", "fedavg counts.on=true secure.on=true privacy.epsilon=8",
        lambda case: case.config.counts.on and case.config.privacy.on,
        "counts.on (--counts) adds no noise in a federation, and counts without noise would void the epsilon of --dp; "
        "leave one of the two out",
    ),
    Exclusion(
        "real clients × counts of characters", "fedavg counts.on=true secure.on=true model.name=char-lstm",
        lambda case: case.config.counts.on and preset(case.config.model.name).characters,
        "counts.on (--counts) counts words, and {config.model.name} reads characters; leave --counts out",
    ),
    Exclusion(
        "real clients × terms of counts", "fedavg counts.on=true secure.on=true counts.cap=5000",
        lower=_refuse_count_terms,
    ),
    Exclusion(
        "real clients × starts", "fedavg train.init=runs/mine",
        lambda case: case.config.train.init not in (None, BASE) or case.config.vectors.file is not None
        or case.config.train.frozen_rounds,
        "a federation starts from the base model or from random weights: set init to base or none, and leave out "
        "vectors and frozen_rounds",
    ),
)  # fmt: skip

TABLE: Mapping[Stage, tuple[str, Sequence[Exclusion]]] = {  # by the stage at which rows are looked at
    "command line": ("Flags of `keyfed train`, before a configuration is read.", FLAGS),
    "configuration": ("Sections of a configuration, when it is read; all mistakes are said at once.", CONFIGURATION),
    "own code": ("A module or a method of the caller's own (docs/extending.md).", OWN),
    "plan": ("The method, the cohort and the clients of a corpus.", PLAN),
    "device": ("Where and how clients are computed.", DEVICE),
    "deadline": ("The deadline of a round and the modelled links.", DEADLINE),
    "secure sums": ("What secure sums (`secure.on`, `--secure`) cannot hide.", SECURE),
    "masked weights": ("How much clients of a secure sum may differ in weight.", MASKED),
    "frozen embedding": ("Rounds in which the embedding is not trained (`train.frozen_rounds`).", FROZEN),
    "word vectors": ("Word vectors for the embedding (`vectors.file`).", VECTORS),
    "differential privacy": ("Who takes part in a run with `--dp`.", PRIVATE),
    "ranks": ("Runs on several ranks (`torchrun`).", RANKS),
    "federation": ("Runs with real clients (`--federation`, `keyfed up`).", FEDERATION),
}
