"""Uploads of a block of clients are looked at together: with the same outcome as one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyfed.config.load import to_document
from keyfed.config.schema import AGAINST, UploadConfig
from keyfed.engine.task import _largest
from keyfed.run.folder import read_metrics
from keyfed.run.loop import train
from keyfed.run.remote.device import told

from .deployed import small_config, vocabulary, write_texts


@pytest.mark.parametrize("noise", [0.0, 1e12])
def test_noise_that_explodes_an_upload_is_seen_in_any_block(tmp_path, noise):
    """What was looked at must be what is sent: noise comes after the look at the block."""
    write_texts(tmp_path / "texts", 4)
    _, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path, "fedatt", rounds=1, noise=noise)
    refused = []
    for block in (1, 4):
        out = tmp_path / f"block-{block}"
        train(replace(config, train=replace(config.train, block=block)), out)
        refused.append(read_metrics(out)[0].get("refused") or {})
    assert refused[0] == refused[1]
    assert (len(refused[0]) == 4) == (noise > 0)


def test_the_largest_magnitude_is_that_of_every_layer():
    uploads = {"matrix": torch.tensor([[[1.0, -3.0]], [[0.5, 0.0]]]), "scalar": torch.tensor([2.0, -7.0])}
    assert _largest(uploads) == [3.0, 7.0]
    bad = {"matrix": torch.tensor([[1.0], [float("nan")]]), "scalar": torch.tensor([float("inf"), 0.0])}
    found = torch.tensor(_largest(bad))
    assert not found.isfinite().any()


def test_clients_are_not_sent_what_only_the_server_does(tmp_path):
    """A run that began before the option existed is about the same as one that leaves it open, or sets it."""
    write_texts(tmp_path / "texts", 4)
    _, path = vocabulary(tmp_path)
    config = small_config(tmp_path / "texts", path)
    compared = replace(config, upload=UploadConfig(against=AGAINST))
    assert told(to_document(config)) == told(to_document(compared))
