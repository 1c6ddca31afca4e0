"""LEAF's Shakespeare on one GPU: two-layer LSTM on characters, ten roles a round, B = 4, E = 1, 1,200 rounds.

    python benchmarks/leaf_roles.py --data FOLDER --out RUN

A whole run as `keyfed train` makes it: validation every 100 rounds, checkpoints, a test of the model chosen by it.
FLUTE's figure for this task, 21 min 50 s, is of other hardware and another sampling of clients.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig
from keyfed.run.loop import train


class Talk:
    """Says what happens, with the time."""

    began = time.monotonic()

    def say(self, line: str) -> None:
        """A line of explanation."""
        print(f"{time.monotonic() - self.began:7.1f} s  {line}", flush=True)

    def start(self, what: str, rounds: int, done: int) -> None:
        """Rounds begin."""
        self.say(f"{what}: {rounds} rounds")

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""
        if "valid" in record:
            self.say(f"round {record['round'] + 1}: valid top-1 {record['valid']['top1']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that holds the named corpora")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--rounds", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=1.0, help="of the clients' SGD (Reddi et al.'s for FedAvg)")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    config = Config(
        DataConfig(name="shakespeare-roles", dir=asked.data),
        ModelConfig("leaf-char"),
        TrainConfig(
            rounds=asked.rounds, cohort=10, eval_every=100, checkpoint_every=100, baselines=False,
            device=asked.device, precision=asked.precision,
        ),
        method="fedavg",
        options={"optimiser": "sgd", "lr": asked.lr, "clip": None, "epochs": 1, "batch_size": 4},
    )  # fmt: skip
    result = train(config, asked.out, listener=Talk())
    shown = {key: result[key] for key in ("seconds", "evaluation_seconds", "best_round", "tokens_trained")}
    print(json.dumps({**shown, "rounds": result["rounds"], "test": result["test"], "unseen": result["unseen"]}))


if __name__ == "__main__":
    main()
