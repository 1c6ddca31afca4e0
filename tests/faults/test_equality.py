"""A federation by messages equals the simulation: bit for bit, plain and by secure sums."""

from __future__ import annotations

import pytest
import torch

from keyfed.run.deployed import train_deployed
from keyfed.run.planning import with_limits
from keyfed.run.train import train

from .deployed import QUICK, federation, last_model, small_config, vocabulary, write_texts


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("method", ["fedavg", "fedatt", "fedmed", "fedadam", "fedadmm", "fedprox", "fedsgd"])
def test_a_federation_equals_the_simulation_bit_for_bit(tmp_path, method, secure):
    texts = write_texts(tmp_path / "texts", 5)
    vocab, path = vocabulary(tmp_path)
    config = with_limits(small_config(tmp_path / "texts", path, method, secure=secure))  # as its run.toml will say
    train(config, tmp_path / "simulated")
    transport, roster = federation(tmp_path / "clients", texts)
    result = train_deployed(config, vocab, tmp_path / "deployed", transport, roster, patience=QUICK)
    simulated, deployed = last_model(tmp_path / "simulated"), last_model(tmp_path / "deployed")
    assert set(simulated) == set(deployed)
    for name, p in simulated.items():
        assert torch.equal(p, deployed[name]), name
    assert result["rounds"] == 3
    assert result["refused"] == 0
