"""Where clients train: what is refused in one line."""

from __future__ import annotations

import pytest

from keyfed.config.load import TrainConfig
from keyfed.errors import ConfigError
from keyfed.model.language_model import build_spec
from keyfed.run.plan import choose

SPEC = build_spec("gru", 100)


@pytest.mark.parametrize("device", ["gpu", "cudafoo", "cuda:x", "cuda:", ""])
def test_a_device_that_is_none(device):
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:NUMBER"):
        choose(TrainConfig(device=device), SPEC, 1000, 10)


def test_bf16_is_for_gpus():
    with pytest.raises(ConfigError, match="is for GPUs"):
        choose(TrainConfig(device="cpu", precision="bf16"), SPEC, 1000, 10)


def test_no_more_workers_than_clients_of_a_round():
    choice = choose(TrainConfig(device="cpu", workers=1000), SPEC, 1000, 3)
    assert choice.workers == 3
    assert "1000 were set, and a round has 3 clients" in choice.reason
