"""`keyfed counts RUN`: a count model of a run's clients and its mixture with the network, written next to the model.

What cannot work is said with its numbers before anything is summed (`refuse_counts`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keyfed.config.load import Config
from keyfed.config.schema import CountsConfig, PrivacyConfig
from keyfed.errors import ConfigError, DataError, PrivacyError, RunError
from keyfed.model.counts import FILE, CountModel, CountTerms, counts_from_bytes
from keyfed.model.mixture import FILE as MIXTURE
from keyfed.model.mixture import Mixture, read_mixture
from keyfed.model.output import Score
from keyfed.run.counts.fit import opening
from keyfed.run.counts.gather import Gathering, groups_of
from keyfed.run.counts.levels import DEPTH, DEPTH_NOISED, LevelFound
from keyfed.run.counts.mixing import score_models
from keyfed.run.counts.noise import FOLDER, CountNoise, check_booked, releases_of
from keyfed.run.counts.release import Made, NetworkReader, make_counts
from keyfed.run.counts.terms import plan_of, refuse_terms
from keyfed.run.encode import Streams
from keyfed.run.folder import Trained
from keyfed.run.prepare import Prepared
from keyfed.run.secure import settings_of
from keyfed.text.vocab import EOS


@dataclass(frozen=True, slots=True)
class Counting(CountsConfig):
    """What a person sets of a count, and how it is summed in a simulation.

    Attributes:
      secure: play the real protocol; None does as the run did.
      privacy: budget or noise of the sums (`--dp`); None counts without noise.
    """

    secure: bool | None = None
    privacy: PrivacyConfig | None = None


@dataclass(frozen=True, slots=True)
class CountReport:
    """What a count came to.

    Attributes:
      size: bytes of the file.
      sums: groups of clients, of up to `members`.
      sent: bytes that one client sent, by what was summed.
      closed: sums that were left out, and why; `note` of buckets without data.
      excluded: what the ε of the terms does not cover, a sentence; empty without noise.
    """

    file: str
    size: int
    terms: CountTerms
    sums: int
    members: int
    masked: bool
    levels: tuple[LevelFound, ...]
    sent: Mapping[str, int]
    closed: tuple[str, ...]
    note: str
    excluded: str
    seconds: float


def refuse_counts(trained: Trained, prepared: Prepared, how: Counting) -> None:
    """Raise ConfigError, DataError or PrivacyError where counting makes no sense, before anything is summed."""
    clients = len(prepared.store)
    if trained.config.privacy.on and how.privacy is None:
        raise ConfigError(
            f"{trained.folder} was trained with --dp, and counts without noise would void its epsilon: count with "
            "--dp, whose epsilon adds to that of the run"
        )
    if trained.vocab.kind == "char":
        raise ConfigError(
            f"{trained.folder} reads characters ({len(trained.vocab):,} of them), and counts are of words: train a "
            "model of words"
        )
    spent = releases_of(trained.folder)
    if spent and how.privacy is None:
        raise PrivacyError(
            f"{trained.folder / FOLDER} has {spent} releases: counts without noise in their place would void their "
            "epsilon. Count for another run"
        )
    if how.privacy is not None and not spent and (trained.folder / FILE).exists():
        raise PrivacyError(
            f"{trained.folder / FILE} has counts of these clients without noise: who has seen it knows more than an "
            "epsilon of counts in its place would say. Count for another run, or remove the file if it was shown to "
            "no one"
        )
    refuse_terms(how)
    if clients < how.k:
        raise DataError(f"{prepared.corpus.name} has {clients:,} clients, and an n-gram needs {how.k} (--k)")
    if how.privacy is not None and how.cap != 1:
        raise ConfigError(f"--cap is {how.cap}; with --dp an n-gram is counted by clients, --cap 1")
    least = least_of(trained, how)
    if how.among < least:
        raise ConfigError(f"--among is {how.among}; a sum hides a client among {least} or more")
    if clients < least:
        raise DataError(f"{prepared.corpus.name} has {clients:,} clients, and a sum hides a client among {least}")
    fitted = len(opening(prepared.valid))
    if fitted < least and prepared.population.valid is None:
        raise DataError(
            f"{fitted:,} clients of {prepared.corpus.name} have validation text, on which smoothing and weights are "
            f"fitted; a sum hides a client among {least} or more"
        )


def least_of(trained: Trained, how: Counting) -> int:
    """Return the fewest clients of a sum, secure or in the clear: an n-gram's k, and what the run asks."""
    return max(how.k, settings_of(trained.config).least_group)


def sum_groups(prepared: Prepared, trained: Trained, how: Counting, streams: Streams, published: bool) -> Gathering:
    """Return the sums over clients' streams; a published text is read by the server, in the clear."""
    secure = trained.config.secure.on if how.secure is None else how.secure
    line_end = EOS if trained.reads_lines else None
    least = least_of(trained, how)
    groups = groups_of(list(streams), list(streams.values()), line_end, how.among, least)
    settings = settings_of(trained.config)
    return Gathering(groups, settings if secure and not published else None, apart=max(how.k, settings.floor))


def validation_of(prepared: Prepared, tokens: int) -> Streams:
    """Return the first validation tokens of every client, none of some; of a published text, all of it."""
    if prepared.population.valid is not None:
        return opening(prepared.valid, None)
    some = opening(prepared.valid, tokens)
    nothing = np.zeros(0, np.int32)
    return {name: some.get(name, nothing) for name in prepared.store.names}


def count_run(
    trained: Trained, prepared: Prepared, how: Counting, say: Callable[[str], None] = lambda line: None
) -> CountReport:
    """Count, smooth and mix; write `counts.safetensors` and `mixture.json` into the run's folder; return a report.

    Raises:
      ConfigError, DataError: see `refuse_counts`.
      PrivacyError: the budget does not allow it, or counts under noise are there already.
      RunError: half of the clients of a sum are missing.
    """
    refuse_counts(trained, prepared, how)
    began = time.monotonic()
    store, vocab = prepared.store, len(trained.vocab)
    whole = {name: store.stream(k) for k, name in enumerate(store.names)}
    counting = sum_groups(prepared, trained, how, whole, published=False)
    seed, depth = trained.config.train.seed, DEPTH if how.privacy is None else DEPTH_NOISED
    name = hashlib.sha256((trained.folder / "vocab.json").read_bytes()).hexdigest()
    plan = plan_of(how, name, counting.members, vocab, seed, depth)
    noise = None
    if how.privacy is not None:  # recounts, sketches, smoothing of every length, and the mixture
        noise = CountNoise(
            how.privacy, trained.folder, counting.clients, 3 * how.order, how.most, seed,
            secure=counting.settings is not None, raw_vocabulary=trained.config.data.vocab_file is None,
        )  # fmt: skip
    published = prepared.population.valid is not None

    def validation(tokens: int) -> Gathering:
        return sum_groups(prepared, trained, how, validation_of(prepared, tokens), published)

    reader = NetworkReader(trained.spec, trained.params, trained.reads_lines)
    made = make_counts(reader, vocab, plan, counting, validation, noise, published, say)
    made.write(trained.folder)
    excluded = "" if noise is None else excluded_of(trained.config)
    return report_of(made, trained.folder, counting, excluded, began)


def report_of(made: Made, folder: Path, counting: Gathering, excluded: str, began: float) -> CountReport:
    """Return the report of a count that was written."""
    return CountReport(
        file=str(folder / FILE), size=len(made.data), terms=made.model.about, sums=len(counting.groups),
        members=counting.members, masked=counting.settings is not None, levels=tuple(made.levels),
        sent=made.sent, closed=tuple(made.closed), note=made.note, excluded=excluded,
        seconds=time.monotonic() - began,
    )  # fmt: skip


def excluded_of(config: Config) -> str:
    """Say what has no noise of a count, and which ε the network and the vocabulary have."""
    raw = [
        *(["the vocabulary"] if config.data.vocab_file is None else []),
        *([] if config.privacy.on else ["the network"]),
        "the test rows",
    ]
    own = "; the network's own epsilon adds to it" if config.privacy.on else ""
    return f"{', '.join(raw)} and each client's own cache have no noise: this epsilon excludes them{own}"


def read_counts(trained: Trained) -> tuple[CountModel, Mixture] | None:
    """Read the counts and the mixture of a run; None where it has none.

    Raises:
      RunError: a file is damaged, not of this run's vocabulary, or not of the other file.
      PrivacyError: the run is private, or the counts claim an ε, and they are not those of their ledger.
    """
    path, other = trained.folder / FILE, trained.folder / MIXTURE
    if not path.exists() or not other.exists():
        return None
    data = path.read_bytes()
    model = counts_from_bytes(data, len(trained.vocab), str(path))
    name = hashlib.sha256((trained.folder / "vocab.json").read_bytes()).hexdigest()
    if model.about.vocab_sha256 != name:
        raise RunError(f"{path} was counted with another vocabulary; count again: keyfed counts {trained.folder}")
    if trained.config.privacy.on or model.about.epsilon is not None:
        check_booked(trained.folder, model.about)
    mixture = read_mixture(other, data)
    if mixture.order != model.model.order:
        raise RunError(f"{other} is of order {mixture.order}, {path} of {model.model.order}; count again")
    return model, mixture


def score_counts(
    trained: Trained, prepared: Prepared, model: CountModel, mixture: Mixture, device: str = "cpu"
) -> dict[str, dict[str, Score | None]]:
    """Test counts, mixture, and mixture with each client's cache on the run's test text, by model and split."""
    line_end = EOS if trained.reads_lines else None
    own = {name: k for k, name in enumerate(prepared.store.names)}
    out: dict[str, dict[str, Score | None]] = {
        name: {"test": None, "unseen": None} for name in ("counts", "mixture", "cache")
    }
    for split, streams in (("test", prepared.test), ("unseen", prepared.unseen)):
        if not streams:
            continue
        nothing = np.zeros(0, np.int32)
        texts = [
            (np.concatenate([prepared.store.stream(own[name]), prepared.valid.get(name, nothing)])
             if name in own and split == "test" else nothing, stream)
            for name, stream in streams.items()
        ]  # fmt: skip
        for name, score in score_models(trained.spec, trained.params, model, mixture, texts, line_end, device).items():
            out[name][split] = score
    return out


def counts_text(report: CountReport) -> str:
    """Write the report for a person."""
    terms = report.terms
    grams = ", ".join(f"{level.released:,}" for level in report.levels)
    masked = "masked" if report.masked else "in the clear; --secure masks them, to the same sums"
    noised = terms.epsilon is not None and terms.delta is not None
    least = ", ".join(f"{level.threshold:,.1f}" for level in report.levels)
    enough = f"whose noised number of clients is {least} or more, of" if noised else f"each written by {terms.k} of"
    lines = [
        f"released: {grams} n-grams of 1, 2, … words, {enough} {terms.clients:,} clients{'' if noised else ' or more'}",
        f"{report.sums:,} sums of up to {report.members:,} clients each, {masked}; a client sends "
        f"{sum(report.sent.values()) / 1e6:,.1f} MB in all",
        *(
            [f"{terms.verdict}: epsilon {terms.epsilon:.4g} at delta {terms.delta:.2g}", report.excluded]
            if terms.epsilon is not None and terms.delta is not None
            else []
        ),
        *([f"{len(report.closed)} sums stayed closed: {report.closed[0]}"] if report.closed else []),
        f"written: {report.file} ({report.size / 1e6:,.1f} MB), in {report.seconds:,.0f} s",
    ]
    return "\n".join(lines)
