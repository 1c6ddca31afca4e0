"""Canaries with and without differential privacy: what noise does to a planted phrase, and what it costs in perplexity.

    python benchmarks/privacy_canaries.py --out FOLDER [--noise Z …] [--set KEY=VALUE …]

The built-in corpus in 200 shards, ten of them a round, and a small GRU. Some random phrases are planted, 200 copies in
each of four clients. The same text is trained on without privacy, and with the sum clipped and noised as for a fleet of
a million clients (SIMULATED: no guarantee of these runs). Exposures are medians over the phrases; a phrase that nobody
planted has 1 bit, and one in twenty reaches 4.3. About two minutes of one core a run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keyfed.config import Config, apply_settings, check
from keyfed.run.audit_canaries import draw_canaries, look_for_canaries, plant
from keyfed.run.baselines import score_baselines
from keyfed.run.folder import load_model
from keyfed.run.prepare import Prepared, prepare
from keyfed.run.train import train

SETTINGS = [
    "data.vocab=3000", "data.partition=iid", "data.clients=200", "data.window=20", "data.max_tokens=4000",
    "model.name=gru", "model.embed=64", "model.hidden=64", "train.cohort=10", "train.rounds=40",
    "train.eval_every=40", "train.checkpoint_every=40", "train.test_tokens=20000", "train.baselines=false",
    "train.workers=1", "participation.sampling=poisson", "method.optimiser=sgd", "method.lr=4",
]  # fmt: skip
PRIVATE = [
    "privacy.quantile=none", "privacy.population=1000000", "privacy.delta=1e-7", "privacy.twin=false",
]  # fmt: skip
CANARIES, USERS, COPIES = 4, 4, 200


def measure(name: str, config: Config, out: Path, prepared: Prepared) -> dict[str, Any]:
    """Train with canaries in the text, look for them, and return what was found."""
    began = time.process_time()
    seed = config.train.seed
    canaries = draw_canaries(
        len(prepared.vocab), len(prepared.store), seed, users=(USERS,), copies=(COPIES,), each=CANARIES
    )
    shutil.rmtree(out / name, ignore_errors=True)
    planted = replace(prepared, store=plant(prepared.store, canaries, seed))
    result = train(config, out / name, prepared=planted)
    found = look_for_canaries(load_model(out / name), canaries, seed, candidates=2**12 - 1, controls=200)
    bits = [row["exposure"] for row in found["planted"]]
    private = result.get("privacy") or {}
    return {
        "run": name,
        "verdict": private.get("verdict", "NONE"),
        "epsilon": private.get("pld"),
        "perplexity": result["test"]["perplexity"],
        "exposures": bits,
        "median_exposure": float(np.median(bits)),
        "most_bits": found["most_bits"],
        "in_beam": sum(row["in_beam"] for row in found["planted"]),
        "controls_median": found["controls"]["median"],
        "controls_p": found["controls"]["p"],
        "cpu_seconds": time.process_time() - began,
    }


def main() -> None:
    """Train without privacy and at each noise level, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and canaries.json")
    parser.add_argument("--noise", type=float, nargs="*", default=[2.0], help="noise multipliers z")
    parser.add_argument("--clip", type=float, default=1.3, help="clip S")
    parser.add_argument("--cohort", type=int, default=260, help="clients a round of the imagined fleet")
    parser.add_argument("--set", nargs="*", default=[], help="settings on top, section.key=value")
    options = parser.parse_args()
    plain = check(apply_settings(Config(), [*SETTINGS, *options.set]))
    prepared = prepare(plain)
    unigram = score_baselines(prepared, 1)["unigram"]["test"]["perplexity"]
    print(f"unigram: test perplexity {unigram:.1f}", flush=True)
    configs = {"plain": plain}
    for z in options.noise:
        extra = [f"privacy.noise={z}", f"privacy.clip={options.clip}", f"privacy.cohort={options.cohort}"]
        configs[f"noise-{z:g}"] = check(apply_settings(Config(), [*SETTINGS, *PRIVATE, *extra, *options.set]))
    rows = []
    for name, config in configs.items():
        rows.append(measure(name, config, options.out, prepared))
        r = rows[-1]
        ratio = r["perplexity"] / rows[0]["perplexity"]
        epsilon = "–" if r["epsilon"] is None else f"{r['epsilon']:.3g}"
        bits = ", ".join(f"{x:.1f}" for x in r["exposures"])
        print(
            f"{name}: {r['verdict']}, ε {epsilon}, perplexity {r['perplexity']:.1f} (× {ratio:.2f}), exposures {bits} "
            f"of {r['most_bits']:.0f} bits, {r['in_beam']} in the beam, controls' median {r['controls_median']:.2f} "
            f"(p {r['controls_p']:.2f}), {r['cpu_seconds']:.0f} CPU seconds",
            flush=True,
        )
    (options.out / "canaries.json").write_text(json.dumps({"unigram": unigram, "rows": rows}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
