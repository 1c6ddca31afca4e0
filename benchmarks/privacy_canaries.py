"""Canaries with and without differential privacy: what clip and noise do to a planted phrase, and what they cost.

    python benchmarks/privacy_canaries.py --out FOLDER --seeds 3

Four random phrases are planted in the built-in corpus, 200 copies in each of four of 600 clients. The same text is
trained on without privacy, and with every sum clipped and noised as for a fleet of `--population` clients (SIMULATED:
no guarantee of these runs). For every seed the last lines say whether

- without privacy every phrase is exposed,
- with it none is, while the model beats the unigram and stays within 1.5 times the perplexity without it,
- phrases that nobody planted behave as they must: median 1 bit.

*Exposed* is above the bits that the largest of as many phrases that nobody planted stays below nineteen times in
twenty, log₂(4/0.05) = 6.3; a single one stays below 4.3. About three minutes of one core a run, two runs a seed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.config.load import Config, apply_settings, check
from keyfed.files import write_atomically
from keyfed.lab.audit.canaries import CHANCE_BITS, draw_canaries, look_for_canaries, plant
from keyfed.run.folder import load_model
from keyfed.run.loop import train
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.result import score_baselines

SETTINGS = [
    "data.vocab=3000", "data.partition=iid", "data.clients=600", "data.window=20", "data.max_tokens=3000",
    "model.name=gru", "model.embed=64", "model.hidden=64", "train.cohort=10", "train.rounds=100",
    "train.eval_every=20", "train.checkpoint_every=100", "train.test_tokens=20000", "train.baselines=false",
    "train.workers=1", "participation.sampling=poisson", "method.optimiser=sgd", "method.lr=1",
    "method.server_lr=2", "method.beta=0.5",
]  # fmt: skip
METHOD = "fedavgm"
CANARIES, USERS, COPIES = 4, 4, 200
BOUND = math.log2(CANARIES / 0.05)
COST = 1.5  # times the perplexity without privacy, at most


def measure(name: str, config: Config, out: Path, prepared: Prepared) -> dict[str, Any]:
    """Train with canaries in the text, look for them, and return what was found."""
    began = time.process_time()
    seed = config.train.seed
    canaries = draw_canaries(
        len(prepared.vocab), len(prepared.store), seed, users=(USERS,), copies=(COPIES,), each=CANARIES
    )
    shutil.rmtree(out, ignore_errors=True)
    planted = replace(prepared, store=plant(prepared.store, canaries, seed))
    result = train(config, out, prepared=planted)
    found = look_for_canaries(load_model(out), canaries, seed, candidates=2**12 - 1, controls=200)
    bits = [row["exposure"] for row in found["planted"]]
    private = result.get("privacy") or {}
    return {
        "run": name,
        "seed": seed,
        "verdict": private.get("verdict", "NONE"),
        "epsilon": private.get("pld"),
        "statement": (private.get("statement") or ["no privacy"])[0],
        "perplexity": result["test"]["perplexity"],
        "exposures": bits,
        "median_exposure": float(np.median(bits)),
        "most_bits": found["most_bits"],
        "above_chance": sum(x > CHANCE_BITS for x in bits),
        "in_beam": sum(row["in_beam"] for row in found["planted"]),
        "controls_median": found["controls"]["median"],
        "controls_p": found["controls"]["p"],
        "controls_behave": found["controls"]["behave"],
        "cpu_seconds": time.process_time() - began,
    }


def judge(unigram: float, plain: dict[str, Any], private: dict[str, Any]) -> dict[str, bool]:
    """Say which parts of the statement hold for a seed."""
    return {
        "exposed without privacy": min(plain["exposures"]) > BOUND,
        "not exposed with it": max(private["exposures"]) < BOUND,
        "beats the unigram": private["perplexity"] < unigram,
        f"within {COST} times the perplexity": private["perplexity"] <= COST * plain["perplexity"],
        "controls behave": plain["controls_behave"] and private["controls_behave"],
    }


def tell(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """One line of a run."""
    epsilon = "–" if row["epsilon"] is None else f"{row['epsilon']:.3g}"
    bits = ", ".join(f"{x:.1f}" for x in row["exposures"])
    return (
        f"seed {row['seed']}, {row['run']}: {row['verdict']}, ε {epsilon}, perplexity {row['perplexity']:.1f} "
        f"(× {row['perplexity'] / plain['perplexity']:.2f}), exposures {bits} of {row['most_bits']:.0f} bits, "
        f"{row['above_chance']} above {CHANCE_BITS:.1f}, {row['in_beam']} in the beam, controls' median "
        f"{row['controls_median']:.2f} (p {row['controls_p']:.2f}), {row['cpu_seconds']:.0f} CPU seconds"
    )


def main() -> None:
    """Train every seed with and without privacy, and say for which of them the statement holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and canaries.json")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=11, help="the first of them; 1 and 100 were tuned on")
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier z")
    parser.add_argument("--clip", type=float, default=0.3, help="clip S")
    parser.add_argument("--population", type=int, default=6_000, help="clients of the imagined fleet")
    parser.add_argument("--cohort", type=int, default=100, help="clients a round of the imagined fleet")
    parser.add_argument("--set", nargs="*", default=[], help="settings on top, section.key=value")
    options = parser.parse_args()
    private = [
        f"privacy.noise={options.noise}", f"privacy.clip={options.clip}", "privacy.quantile=none",
        f"privacy.population={options.population}", f"privacy.cohort={options.cohort}", "privacy.twin=false",
    ]  # fmt: skip
    report: dict[str, Any] = {"settings": [f"method={METHOD}", *SETTINGS, *options.set], "private": private}
    report |= {"canaries": CANARIES, "users": USERS, "copies": COPIES, "bound_bits": BOUND, "seeds": []}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        settings = [*SETTINGS, f"train.seed={seed}", *options.set]
        configs = {
            "plain": check(apply_settings(Config(method=METHOD), settings)),
            "private": check(apply_settings(Config(method=METHOD), [*settings, *private])),
        }
        prepared = prepare(configs["plain"])
        unigram = score_baselines(prepared, 1)["unigram"]["test"]["perplexity"]
        rows: dict[str, dict[str, Any]] = {}
        for name, config in configs.items():
            rows[name] = measure(name, config, options.out / f"{name}-{seed}", prepared)
            print(tell(rows[name], rows["plain"]), flush=True)
        print(rows["private"]["statement"], flush=True)
        parts = judge(unigram, rows["plain"], rows["private"])
        report["seeds"].append({"seed": seed, "unigram": unigram, "rows": list(rows.values()), "parts": parts})
        write_atomically(options.out / "canaries.json", json.dumps(report, indent=1, ensure_ascii=False).encode())
    for found in report["seeds"]:
        missing = [part for part, holds in found["parts"].items() if not holds]
        told = f"does NOT hold: not {', not '.join(missing)}" if missing else "holds"
        print(f"seed {found['seed']} (unigram {found['unigram']:.1f}): the statement {told}")


if __name__ == "__main__":
    main()
