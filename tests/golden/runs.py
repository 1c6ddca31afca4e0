"""The golden runs: every method and variant in four modes, on a tiny corpus, through the public interface only.

A run's outcome is θ after two rounds or the refusal. `theta.json` holds the outcomes; `make.py` writes that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyfed

HERE = Path(__file__).parent
THETA = HERE / "theta.json"
ROUNDS = 2
PROJECTIONS = 16
TOLERANCE = 1e-6  # of a projection, as a share of the norm of θ; of a score, as a share of the score
LANGUAGE = """
    the a cat dog bird fox sat ran flew hid on under over near mat tree house hill and then it was small big red old new
    sun rain wind we you they saw made kept lost found
"""
WORDS = LANGUAGE.split()
TINY: dict[str, Any] = {
    "model_embed": 8, "model_hidden": 8, "data_vocab": 40, "data_window": 8, "data_unseen": 0.0, "train_cohort": 4,
    "train_workers": 1, "train_block": 2, "train_device": "cpu", "train_baselines": False,
    "train_valid_tokens": 200, "train_test_tokens": 200,
}  # fmt: skip
SECURE = {"secure_on": True}
PRIVATE = {  # little noise: a small change of the sum must not drown in it
    "privacy_noise": 0.2, "privacy_clip": 0.5, "privacy_twin": False, "participation_sampling": "poisson",
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {"plain": {}, "secure": SECURE, "private": PRIVATE, "both": {**SECURE, **PRIVATE}}
MACHINE, PERSONAL = "machine", "personalise"  # entries of theta.json beside the runs
FEDERATED = "federation "  # begins the names of runs with clients behind messages
FEDERATIONS: dict[str, dict[str, Any]] = {  # method and its options, each in every mode
    "fedavg": {}, "fedatt": {"bound": 0.8}, "fedmed": {"beta": 0.5}, "fedadmm": {}, "fednesterov": {},
}  # fmt: skip
SOURCE = "source run"  # stands in `train_init` for a run of another corpus
SGD = {"optimiser": "sgd", "lr": 1.0}  # Adam's first step has ties of ±lr, and the largest entries are no fixed set
VECTORS = "vectors"  # stands in `vectors_file` for a file of word vectors

# Name to method and settings. What comes before the cohort is drawn does not depend on the mode: two of them do.
# fmt: off
PREPARED: dict[str, dict[str, Any]] = {
    # models
    "gru": {"model": "gru"},
    "gru-untied": {"model": "gru-untied"},
    "lstm": {"model": "lstm"},
    "nwp-small": {"model": "nwp-small"},
    "char-lstm": {"model": "char-lstm", "data_max_tokens": 150},
    "leaf-char": {"model": "leaf-char", "data_max_tokens": 150},
    "dropout": {"model_dropout": 0.2},
    "tied": {"model": "gru-untied", "model_tied": True, "model_layers": 2},
    # how the text is cut and whose it is
    "sentences": {"data_batches": "sentences"},
    "packed": {"data_batches": "packed"},
    "max-sentences": {"data_batches": "packed", "data_max_sentences": 5},
    "max-tokens": {"data_max_tokens": 30},
    "cased": {"data_lower": False},
    "iid": {"data_partition": "iid", "data_clients": 6},
    "contiguous": {"data_partition": "contiguous", "data_clients": 6},
    "quantity": {"data_partition": "quantity", "data_clients": 6},
    "dirichlet": {"data_partition": "dirichlet", "data_clients": 6},
    "unseen": {"data_unseen": 0.3},
    "half-of-clients": {"data_clients_part": "2/2", "train_cohort": 2, "seed": 2},
    # starts
    "seed": {"seed": 7},
    "init": {"train_init": SOURCE},
    "init-mean": {"train_init": SOURCE, "train_unmatched": "mean"},
    "vectors": {"vectors_file": VECTORS},
    "vectors-pp": {"vectors_file": VECTORS, "vectors_reduce": "pp-pca-pp", "vectors_remove": 1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    # who takes part, and how much each does
    "full-cohort": {"train_cohort": 6},
    "fraction": {"participation_fraction": 0.5},
    "poisson": {"participation_sampling": "poisson"},
    "by-size": {"participation_sampling": "size"},
    "over-select": {"participation_over_select": 0.5, "participation_speed_spread": 0.5},
    "drops": {"participation_drop_before": 0.08, "participation_drop_after": 0.08, "train_cohort": 6, "seed": 3},
    "deadline": {"participation_deadline": 1.05, "participation_speed_spread": 1.0},
    "deadline-whole": {"participation_deadline": 1.05, "participation_speed_spread": 1.0,
                       "participation_partial": False},
    "epochs": {"epochs": 3, "participation_least_epochs": 1},
    "work": {"participation_least_work": 0.3, "participation_pace_spread": 0.5},
    "abandoned": {"participation_minimum": 4, "participation_drop_before": 0.2},
    # uploads
    "keep": {"upload_keep": 0.1, **SGD},
    "fp16": {"upload_quantise": "fp16"},
    "int8": {"upload_quantise": "int8"},
    "keep-int8": {"upload_keep": 0.2, "upload_quantise": "int8", **SGD},
    "bound": {"upload_bound": 0.2},
    "limit": {"upload_limit": 1.0, "upload_token_limit": 1.0},
    "against": {"upload_against": 1.0, "train_cohort": 6},  # no upload here is left out: frozen is where it is refused
    "sent-noise": {"noise": 0.01},
    "server-noise": {"noise": 0.01, "noise_at": "server"},
    # over rounds
    "average": {"train_average": 0.5},
    "linear": {"train_schedule": "linear", "train_warmup": 0.5, "train_final": 0.1},
    "cosine": {"train_schedule": "cosine"},
    "frozen": {"train_frozen_rounds": 1},
    "frozen-always": {"train_frozen_rounds": 2},
    "rollback": {"train_rollback": 1.01, "train_eval_every": 1, "lr": 20.0, "optimiser": "sgd", "epochs": 2,
                 "rounds": 4},
    "curves": {"train_curves": True},
    # computation
    "block-of-one": {"train_block": 1},
    # local optimisers
    "sgd": {"optimiser": "sgd", "lr": 1.0, "momentum": 0.5, "decay": 0.9},
    "unclipped": {"clip": None, "batch_size": 3},
    # exchanged parts
    **{f"mediator-{name}": {"mediator_name": name} for name in ("tokens", "uniform", "attention", "divergence")},
    "mediator-fixed": {"mediator_name": "fixed", "mediator_weights": "writer1.txt=1.5, writer2.txt=0.75"},
    "mediator-bounded": {"mediator_name": "attention", "mediator_bound": 0.8, "mediator_norm": "frobenius"},
    "mediator-top-k": {"mediator_name": "uniform", "mediator_beta": 0.5},
    **{f"server-{name}": {"server_name": name, "server_lr": 0.05}
       for name in ("sgd", "momentum", "nesterov", "adam", "yogi", "adagrad")},
    # a method's own options
    "fedprox-tokens": {"method": "fedprox", "by_tokens": True, "mu": 0.5},
    "fedprox-attention": {"method": "fedprox", "mediator_name": "attention", "mediator_bound": 0.8},
    "fedatt-bound": {"method": "fedatt", "bound": 0.8},
    "fedatt-frobenius": {"method": "fedatt", "bound": 0.8, "norm": "frobenius", "temperature": 0.2},
    "fedatt-adam": {"method": "fedatt", "bound": 0.8, "server_name": "adam", "server_lr": 0.01},
    "fedatt-keep": {"method": "fedatt", "bound": 0.8, "upload_keep": 0.2, **SGD},
    "fedmed-top-k": {"method": "fedmed", "beta": 0.5},
    "fedmed-adaptive": {"method": "fedmed", "threshold": 0.0, "rounds": 4},
    "fedmed-settled": {"method": "fedmed", "threshold": 1e9, "rounds": 4},
    "fedmed-softmax": {"method": "fedmed", "mediation": False, "reading": "softmax"},
    "fedmed-histogram": {"method": "fedmed", "mediation": False, "reading": "histogram"},
    "fedmed-tokens": {"method": "fedmed", "mediation": False, "adaptive": False, "beta": 0.5},
    **{f"{method}-everybody": {"method": method, "train_cohort": 6} for method in ("admm", "liadmm", "fedadmm")},
    "admm-uniform": {"method": "admm", "weights": "uniform", "start_from": "model"},
    "fedadmm-published": {"method": "fedadmm", "server_step": "published", "server_lr": 0.5},
    "fedadmm-late": {"method": "fedadmm", "server_step": "late", "server_lr": 0.5},
    "fedadmm-epochs": {"method": "fedadmm", "epochs": 2, "participation_least_epochs": 1, "train_cohort": 6},
    "fedsgd-schedule": {"method": "fedsgd", "train_schedule": "linear"},
    # variants of the modes themselves; in another mode they are runs like any other, or refused
    "clear": {"method": "fedatt", "temperature": 0.01, "secure_clear": True},
    "threshold": {"secure_threshold": 3, "secure_floor": 2},
    "clip-fixed": {"privacy_quantile": None},
    "weight-cap": {"privacy_weight_cap": 40.0, "privacy_mean_weight": 0.8},
    "fleet": {"privacy_population": 10_000, "privacy_cohort": 100},
    "tree": {"privacy_mechanism": "tree", "privacy_quantile": None, "participation_sampling": "uniform",
             "train_cohort": 3},
    "fedmed-counts": {"method": "fedmed", "beta": 0.5, "privacy_count_noise": 0.5},
}
# fmt: on


def cases() -> dict[str, dict[str, Any]]:
    """All runs by name, `method/mode` or `variant/mode`."""
    everywhere = {method: {"method": method} for method in keyfed.METHODS} | VARIANTS
    pairs = [(name, own, mode) for name, own in everywhere.items() for mode in MODES]
    pairs += [(name, own, mode) for name, own in PREPARED.items() for mode in ("plain", "both")]
    # A variant's own settings come last: some of them replace those of the mode.
    return {f"{name}/{mode}": {**MODES[mode], **own} for name, own, mode in pairs}


def federations() -> list[str]:
    """Names of the runs with clients behind messages."""
    return [f"{FEDERATED}{method}/{mode}" for method in FEDERATIONS for mode in MODES]


def write_corpus(folder: Path, words: Sequence[str] = WORDS, clients: int = 6) -> Path:
    """Write one file a client; later clients have more lines, and each has its own favourite words."""
    folder.mkdir(parents=True)
    for k in range(clients):
        draw = random.Random(k)
        own = draw.sample(list(words), 12) + list(words)
        lines = [" ".join(draw.choice(own) for _ in range(draw.randint(3, 8))) for _ in range(10 + 2 * k)]
        (folder / f"writer{k}.txt").write_text("\n".join(line.capitalize() for line in lines) + "\n", "utf-8")
    return folder


def write_vectors(path: Path, words: Sequence[str] = WORDS, width: int = 10) -> Path:
    """Write vectors of most words in GloVe's format."""
    draw = random.Random(5)
    rows = [f"{word} {' '.join(f'{draw.uniform(-1, 1):.4f}' for _ in range(width))}" for word in words[3:]]
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with the corpus, a run to start from and word vectors."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Bench:
        write_corpus(folder / "corpus")
        write_vectors(folder / "vectors.txt")
        other = write_corpus(folder / "other", [*WORDS[10:], "moon", "star"], clients=3)
        with one_thread():
            keyfed.train(keyfed.configure("fedavg", data=str(other), rounds=1, **{**TINY, "train_cohort": 3}),
                         folder / "source")  # fmt: skip
        return cls(folder)

    def configure(self, settings: Mapping[str, Any]) -> Any:
        given = {**TINY, **settings}
        rounds = given.pop("rounds", ROUNDS)
        given["train_eval_every"] = settings.get("train_eval_every", rounds)  # else the best round's θ is kept
        method, model, seed = given.pop("method", "fedavg"), given.pop("model", "cifg"), given.pop("seed", 1)
        places = {SOURCE: self.folder / "source", VECTORS: self.folder / "vectors.txt"}
        for key in ("train_init", "vectors_file"):
            if key in given:
                given[key] = str(places[given[key]])
        return keyfed.configure(
            method, data=str(self.folder / "corpus"), model=model, rounds=rounds, seed=seed, **given
        )

    def outcome(self, name: str, settings: Mapping[str, Any], out: Path | None = None) -> dict[str, Any]:
        """Train; return what becomes of θ, or the refusal."""
        out = self.folder / "runs" / name.replace("/", "-") if out is None else out
        try:
            with one_thread():
                result = keyfed.train(self.configure(settings), out)
        except keyfed.KeyfedError as e:
            return {"refused": type(e).__name__, "says": first_words(str(e), self.folder)}
        return {**digest(keyfed.load_model(out).params), "nats": _nats(result)}

    def personal(self) -> dict[str, float]:
        """Tune a copy of a model for each client; return the numbers that say how well it does."""
        out = self.folder / "runs" / "personal"
        self.outcome(PERSONAL, {}, out)
        with one_thread():
            found = keyfed.personalise(out, epochs=1, lr=0.05)
        clients = {f"{name} {when}": found["by_client"][name][when]
                   for name in sorted(found["by_client"]) for when in ("before", "after")}  # fmt: skip
        numbers = {"before": found["before"]["nats"], "after": found["after"]["nats"], **clients}
        return {key: float(f"{value:.9g}") for key, value in numbers.items()}

    def federated(self, name: str) -> dict[str, Any]:
        """Train with clients behind the messages of a real federation, in this process; return what becomes of θ."""
        from tests.faults import private

        method, mode = name.removeprefix(FEDERATED).split("/")
        place = self.folder / "federations" / method / mode
        place.mkdir(parents=True)
        config = private.private_config(
            place, method, clients=4, secure=mode in ("secure", "both"), rounds=ROUNDS, privacy={"noise": 0.2},
            **FEDERATIONS[method],
        )  # fmt: skip
        if mode in ("plain", "secure"):
            settings = {"privacy": type(config.privacy)(), "participation": type(config.participation)()}
            config = replace(config, **settings)
        with one_thread(), pytest.MonkeyPatch.context() as patch:
            generator = torch.Generator().manual_seed(1)  # the noise of a real run is the operating system's

            def draw(layer: str, shape: torch.Size) -> torch.Tensor:
                return torch.randn(shape, dtype=torch.float64, generator=generator)

            patch.setattr(private.deployed_private, "system", lambda: draw)
            try:
                result = private.deploy(place, config, *private.enrol(place, 4))
            except keyfed.KeyfedError as e:
                return {"refused": type(e).__name__, "says": first_words(str(e), self.folder)}
        return {**digest(keyfed.load_model(place / "deployed").params), "nats": _nats(result)}


def _nats(result: Mapping[str, Any]) -> float:
    """The test's nats; a federation whose server has no text has none."""
    return float(f"{(result.get('test') or {}).get('nats') or 0.0:.10g}")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order: one thread, also where a run wants more."""
    before, change = torch.get_num_threads(), torch.set_num_threads
    change(1)
    torch.set_num_threads = lambda threads: None
    try:
        yield
    finally:
        torch.set_num_threads = change
        change(before)


def first_words(text: str, folder: Path, count: int = 8) -> str:
    """The first words of a message, without the folder of this machine."""
    return " ".join(text.replace(str(folder), "…").split()[:count])


def digest(params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the hash of θ, its norm, and 16 projections on vectors of ±1/√n that are drawn by the layers' names."""
    total = hashlib.sha256()
    sums, size, square = np.zeros(PROJECTIONS), 0, 0.0
    for name in sorted(params):
        values = params[name].detach().cpu().contiguous().numpy()
        total.update(f"{name}|{values.shape}|{values.dtype.str}|".encode() + values.tobytes())
        flat = values.astype(np.float64).reshape(-1)
        bits = np.frombuffer(hashlib.shake_128(name.encode()).digest(flat.size * PROJECTIONS // 8), dtype=np.uint8)
        signs = np.unpackbits(bits).reshape(PROJECTIONS, flat.size) * 2.0 - 1.0
        sums += signs @ flat
        size, square = size + flat.size, square + float(flat @ flat)
    return {
        "sha256": total.hexdigest(),
        "norm": float(f"{square**0.5:.10g}"),
        "along": [float(f"{value:.9g}") for value in sums / size**0.5],
    }


def machine() -> dict[str, str]:
    """What bits depend on: torch, its kernels, and the processor that the matrix library chooses its own by."""
    about = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "torch": torch.__version__,
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": f"{platform.machine()} {about.get('vendor_id', '')} family {about.get('cpu family', '')}",
    }


def differences(now: Mapping[str, Any], frozen: Mapping[str, Any], *, bits: bool) -> list[str]:
    """Say what of an outcome is not as it was frozen.

    Args:
      bits: compare hashes; else norm, projections and score within the tolerance.
    """
    if "refused" in now or "refused" in frozen:
        return [] if now == frozen else [f"was {_short(frozen)}, is {_short(now)}"]
    if now["sha256"] == frozen["sha256"]:
        near = abs(now["nats"] - frozen["nats"]) <= TOLERANCE * abs(frozen["nats"])
        return [] if near else [f"θ is the same, and the test's nats were {frozen['nats']} and are {now['nats']}"]
    far = max(abs(a - b) for a, b in zip(now["along"], frozen["along"], strict=True))
    far = max(far, abs(now["norm"] - frozen["norm"])) / frozen["norm"]
    said = f"θ differs: {far:.1e} of its norm along {PROJECTIONS} fixed directions"
    if bits:
        return [said]
    nats = abs(now["nats"] - frozen["nats"]) / (abs(frozen["nats"]) or 1.0)
    return [f"{said}, nats by {nats:.1e}"] if max(far, nats) > TOLERANCE else []


def _short(outcome: Mapping[str, Any]) -> str:
    return f"{outcome['refused']}: {outcome['says']}" if "refused" in outcome else f"θ {outcome['sha256'][:12]}"


def read_theta() -> dict[str, Any]:
    """Read the frozen outcomes."""
    return dict(json.loads(THETA.read_text("utf-8")))
