"""One lying client of ten: what it does to a model, with the limits and roll-backs that a federation has by default.

    python benchmarks/poisoning.py [--seeds 1 2 3 4 5] [--rounds 8] [--out benchmarks/poisoning.json] [--table]

Ten clients have the text of ten presidents and are called through the messages of a real federation, in this process.
The configuration is written down here (`PINNED`), so that rows stay comparable when defaults change; `--defaults` takes
those of the package instead, `--method` and `--set` change either. Validation and test are read in part. From round 3
on the client in the middle of the list lies about its upload or its tokens:

    x -1000, x -20    it sends its own update times this number
    at the bound      its update, negated and as long as the limit lets it be (by what it has seen of the model's steps)
    2^40 tokens       its own update, and says that it has 2^40 tokens (in a secure sum 2^32 - 1, the most that fit)
    bound and tokens  the last two at once
    at the threshold  plain sums only: three fifths of its update's numbers negated, as long as the limit lets it be. It
                      points against the others by a fifth of their agreement, where a quarter is left out

In secure sums the liar writes any words it likes, as large as the sum may be without being refused. Training is a
function of the model, the round and a client's text: what a client found from a model is used again by the next attack
with the same seed that comes by that model. Runs that are in the file already are not run again. `--unlimited` switches
limits and roll-back off, for what they are good for.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyfed.config.load import Config, apply_settings, check
from keyfed.config.schema import SUM_LIMIT, UploadConfig
from keyfed.deploy.up import parts_of, write_parts
from keyfed.engine.sums.codec import Vector
from keyfed.engine.task import ClientTask, Finished, kept
from keyfed.federated.soundness import WINDOW, finite, norm_of
from keyfed.federated.types import Params
from keyfed.files import write_atomically
from keyfed.private.secagg.threshold import Floors
from keyfed.run.checkpoint import load_checkpoint
from keyfed.run.folder import read_metrics
from keyfed.run.prepare import prepare
from keyfed.run.remote.device import own_text
from keyfed.run.remote.train import Patience, train_deployed
from keyfed.text.catalogue import load_corpus
from keyfed.text.vocab import Vocab
from keyfed.wire.client import ClientRound, ClientSession, Learner
from keyfed.wire.messages import digest_of
from keyfed.wire.roster import Enrolled, Roster
from keyfed.wire.transport import InProcess

CLIENTS, FIRST = 10, 2  # the first round of the attack, counted from 0
TEXT_SEED = 3  # of the split into training and held-out text and of the vocabulary, the same for all runs
ATTACKS = ("none", "x -1000", "x -20", "at the bound", "2^40 tokens", "bound and tokens")
PLAIN = (*ATTACKS, "at the threshold")  # where single uploads are seen
NEGATED = 0.6  # of the numbers of an upload at the threshold: cosine 0.4 - 0.6 with the honest one
PINNED = [
    "data.name=sotu", "data.vocab=10000", "data.lower=true", "data.batches=stream", "model.name=cifg",
    "model.dropout=0", "method.optimiser=adam", "method.lr=0.006", "method.momentum=0", "method.clip=1",
    "method.decay=1", "method.epochs=1", "method.batch_size=10", "train.schedule=constant", "train.warmup=0",
    "train.average=none",
]  # fmt: skip
SETTINGS = ["data.max_tokens=2000", "train.cohort=10", "train.valid_tokens=300", "train.test_tokens=1000"]
FACTORS = {"x -1000": -1000.0, "x -20": -20.0}
COUNTED = ("rolled_back", "unsound", "against", "honest_against")
QUICK = Patience(answer=600, quorum=1, look=0.01)


class Remembering:
    """A client's learner that does nothing twice: the same model in the same round gives the same upload.

    Args:
      found: what was found before, by clients of this seed.
    """

    def __init__(self, honest: Learner, name: str, found: dict[tuple[Any, ...], Any]) -> None:
        self._honest, self._name, self._found = honest, name, found
        self.method, self.shapes, self.digest = honest.method, honest.shapes, honest.digest
        self.bound, self.promise, self.floor = honest.bound, honest.promise, honest.floor

    def solve(self, theta: Params, round: int, turn: ClientTask) -> Finished:
        """Train, or copy what was trained before; a client that keeps state trains."""
        if turn.propose is not None:
            return self._honest.solve(theta, round, turn)
        key = (self._name, self.digest, digest_of(theta), round, turn.clip)
        if key not in self._found:
            self._found[key] = kept(self._honest.solve(theta, round, turn))
        return kept(self._found[key])

    def evaluate(self, theta: Params, part: str) -> Any:
        """Count, or return what was counted before."""
        key = (self._name, digest_of(theta), part)
        if key not in self._found:
            self._found[key] = self._honest.evaluate(theta, part)
        return self._found[key]


def remembering(name: str, text: Path, found: dict[tuple[Any, ...], Any]) -> Callable[[Mapping[str, Any]], Remembering]:
    """Return what makes a client's learner from what a run says of itself."""
    make = own_text(name, text)
    return lambda about: Remembering(make(about), name, found)


class LyingLearner:
    """A client's learner whose reports and uploads are lies from a round on; held-out text is counted as it is."""

    def __init__(self, honest: Learner, attack: str, liar: Liar) -> None:
        self._honest, self._attack, self._liar = honest, attack, liar
        self.method, self.shapes, self.digest = honest.method, honest.shapes, honest.digest
        self.bound, self.promise, self.floor = honest.bound, honest.promise, honest.floor

    def solve(self, theta: Params, round: int, turn: ClientTask) -> Finished:
        """Train, and lie about it. In a secure sum the words are changed instead, where no range of ours is checked."""
        done = self._honest.solve(theta, round, turn)
        self._liar.watch(theta)
        if round < FIRST:
            return done
        if "tokens" in self._attack:
            done = done._replace(tokens=(1 << 32) - 1 if self.method.report_free else 1 << 40)
        if not self.method.report_free:
            factor = self._liar.factor(self._attack, norm_of(done.upload), 1)
            upload = mixed(done.upload, round) if self._attack == "at the threshold" else done.upload
            done = done._replace(upload={name: u * factor for name, u in upload.items()})
        return done

    def evaluate(self, theta: Params, part: str) -> Any:
        """Count as an honest client does."""
        return self._honest.evaluate(theta, part)


def mixed(upload: Params, round: int) -> Params:
    """Negate `NEGATED` of an upload's numbers, drawn anew each round."""
    draw = torch.Generator().manual_seed(round)
    signs = {name: torch.rand(u.shape, generator=draw) < NEGATED for name, u in upload.items()}
    return {name: torch.where(signs[name], -u, u) for name, u in upload.items()}


class Liar(ClientSession):
    """A client that writes into masked vectors what it likes."""

    def __init__(
        self, home: Path, name: str, text: Path, attack: str, found: dict[tuple[Any, ...], Any] | None = None
    ) -> None:
        make = remembering(name, text, {} if found is None else found)
        learner: Callable[[Mapping[str, Any]], Any] = lambda about: LyingLearner(make(about), attack, self)  # noqa: E731
        super().__init__(home, name, learner, plain=True, floors=Floors(3))
        self._attack, self._before, self._steps = attack, None, []

    def watch(self, theta: Params) -> None:
        """Remember how far the model has moved, which every client sees."""
        if self._before is not None:
            moved = norm_of({n: p - self._before[n] for n, p in theta.items()})
            if moved > 0:
                self._steps.append(moved)
        self._before = {n: p.clone() for n, p in theta.items()}

    def factor(self, attack: str, own: float, members: int) -> float:
        """Return what to multiply an update of this norm by."""
        if attack == "at the threshold":
            return 100.0
        if "bound" not in attack:
            return FACTORS.get(attack, 1.0)
        if members == 1:  # plain: far beyond the limit, so that it is shortened to it
            return -100.0
        most = 0.9 * SUM_LIMIT * statistics.median(self._steps[-WINDOW:]) if self._steps else own
        return -most * members / max(own, 1e-12)

    def _vector(self, work: ClientRound, ratio: int) -> Vector:
        honest = super()._vector(work, ratio)
        if work.purpose != "upload" or work.round < FIRST or work.done is None:
            return honest
        numbers = sum(p.numel() for p in work.theta.values())
        factor = self.factor(self._attack, norm_of(work.done.upload), work.members)
        room = (work.members - 2) * (2.0 ** (31 - (work.members - 1).bit_length()) - 1)  # the others take some of it
        words = np.clip(np.rint(honest[:numbers].view(np.int32) * factor), -room, room).astype(np.int64)
        return np.concatenate([words.astype(np.uint32), honest[numbers:]])


def configured(secure: bool, rounds: int, seed: int, unlimited: bool, base: Config, more: Sequence[str] = ()) -> Config:
    """The settings of a federation of ten clients."""
    config = apply_settings(base, [*SETTINGS, f"train.rounds={rounds}", f"train.seed={seed}", *more])
    config = replace(config, secure=replace(config.secure, on=secure))
    if unlimited:
        off = UploadConfig(limit=0.0, token_limit=0.0, against=0.0)
        config = replace(config, upload=off, train=replace(config.train, rollback=0.0))
    return check(config)


def run(
    config: Config,
    attack: str,
    vocab: Vocab,
    texts: Mapping[str, Path],
    folder: Path,
    found: dict[tuple[Any, ...], Any] | None = None,
) -> dict[str, Any]:
    """Train once and return what became of the model.

    Args:
      found: what clients found in other runs with this configuration; this run adds to it.
    """
    found = {} if found is None else found
    roster, sessions = Roster(folder / "roster.json"), {}
    names = sorted(texts)
    liar = names[len(names) // 2]
    for name in names:
        home = folder / "clients" / name
        if name == liar and attack != "none":
            sessions[name] = Liar(home, name, texts[name], attack, found)
        else:
            make = remembering(name, texts[name], found)
            sessions[name] = ClientSession(home, name, make, plain=True, floors=Floors(3))
        key = sessions[name].store.identity().public.hex()
        node = hashlib.sha256(name.encode()).hexdigest()
        roster.write({name: Enrolled(key, node, datetime.now(UTC).isoformat())})
    result = train_deployed(config, vocab, folder / "run", InProcess(sessions), roster, patience=QUICK)
    lines = read_metrics(folder / "run")
    saved = load_checkpoint(folder / "run" / "checkpoint", 1 << 40, lambda line: None)
    assert saved is not None, "a run that has ended has a checkpoint"
    return {
        "perplexity": result["test"]["perplexity"],
        "best_round": result["best_round"],
        "rounds": result["rounds"],
        "valid": [(line.get("valid") or {}).get("perplexity") for line in lines],
        "rolled_back": result["rolled_back"],
        "unsound": result["unsound"],
        "shortened": result["shortened"],
        "against": result["against"],
        "honest_against": sum(
            why == "against the others" and (name != liar or attack == "none")
            for line in lines
            for name, why in line["refused"].items()
        ),
        "refused": result["refused"],
        "abandoned": result["abandoned"],
        "finite": finite(saved.state.params),
    }


def table(rows: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> str:
    """Return the measured runs as a Markdown table: mean ± standard deviation over seeds, ratios to the clean run."""
    out = [
        "| sums | attack | seeds | test perplexity | of the clean run's, worst seed | roll-backs a run | "
        "steps not taken a run | uploads left out a run, honest ones | θ finite |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for kind in ("plain", "secure"):
        for attack in PLAIN:
            pairs = [
                (rows[key], rows[clean])
                for seed in seeds
                if (key := f"{kind}/{attack}/{seed}") in rows and (clean := f"{kind}/none/{seed}") in rows
            ]
            if not pairs:
                continue
            found = [row["perplexity"] for row, _ in pairs]
            spread = statistics.stdev(found) if len(found) > 1 else math.nan
            worst = max(row["perplexity"] / clean["perplexity"] for row, clean in pairs)
            mean = {key: statistics.mean(row.get(key, 0) for row, _ in pairs) for key in COUNTED}
            whole = "yes" if all(row["finite"] for row, _ in pairs) else "NO"
            out.append(
                f"| {kind} | {attack} | {len(pairs)} | {statistics.mean(found):.1f} ± {spread:.1f} | {worst:.3f} | "
                f"{mean['rolled_back']:.1f} | {mean['unsound']:.1f} | "
                f"{mean['against']:.1f}, {mean['honest_against']:.1f} | {whole} |"
            )
    return "\n".join(out)


def main() -> None:
    """Run what is not in the file yet, and print the table."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sums", nargs="+", choices=("plain", "secure"), default=["plain", "secure"])
    parser.add_argument("--attacks", nargs="+", choices=PLAIN, default=list(PLAIN))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/poisoning.json"))
    parser.add_argument("--defaults", action="store_true", help="the defaults of the package, not those written here")
    parser.add_argument("--method", default="fedavg", help="with its defaults, where it is not fedavg")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.key=value")
    parser.add_argument("--unlimited", action="store_true", help="without limits and roll-back")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    given = parser.parse_args()
    rows: dict[str, Any] = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
    grid = itertools.product(given.seeds, given.sums, given.attacks)
    todo = [] if given.table else [(s, k, a) for s, k, a in grid if k == "plain" or a in ATTACKS]
    pinned = [] if given.defaults else [p for p in PINNED if given.method == "fedavg" or not p.startswith("method.")]
    base = apply_settings(Config(method=given.method), pinned)
    if todo:
        first = configured(False, given.rounds, TEXT_SEED, given.unlimited, base, given.settings)
        vocab = prepare(first).vocab
    with tempfile.TemporaryDirectory(prefix="keyfed-poisoning-") as folder:
        texts = write_parts(parts_of(load_corpus(first.data.name), CLIENTS), Path(folder) / "texts") if todo else {}
        found: dict[tuple[Any, ...], Any] = {}
        before = None
        for seed, kind, attack in todo:
            if (seed, kind) != before:
                before, found = (seed, kind), {}
            key = f"{kind}/{attack}/{seed}"
            if key in rows:
                continue
            config = configured(kind == "secure", given.rounds, seed, given.unlimited, base, given.settings)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                rows[key] = run(config, attack, vocab, texts, Path(own), found)
            print(key, json.dumps(rows[key]), flush=True)
            write_atomically(given.out, json.dumps(rows, indent=1, sort_keys=True).encode())
    print(table(rows, given.seeds))


if __name__ == "__main__":
    main()
