"""Checkpoints come back bitwise, and damage costs a round, not the run."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from keyfed.errors import RunError
from keyfed.federated.types import State
from keyfed.files import write_atomically
from keyfed.run.checkpoint import KEEP, Best, Checkpoint, load_checkpoint, save_checkpoint


def params(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    odd = torch.tensor([0.0, -0.0, float("inf"), 1e-45, torch.finfo(torch.float32).max])
    return {
        "embedding.weight": torch.randn(7, 3, generator=g),
        "rnn.weight_ih_l0": torch.randn(3, 4, generator=g).mT,  # not contiguous
        "output.bias": odd,
        "double": torch.randn(2, generator=g, dtype=torch.float64),
    }


def checkpoint(round: int, best: int | None = 1) -> Checkpoint:
    server = {"velocity": params(round + 1000)["double"]}
    state = State(params(round), {"mean": 0.1 + 0.2, "seen": ["a", "b"]}, server, round)
    chosen = None if best is None else Best(best, 1.25, params(best))
    return Checkpoint(state, chosen, metrics_length=100 * round, seconds=1 / 3)


ENOUGH = 10**9  # bytes of metrics.jsonl


def no_warning(line: str) -> None:
    raise AssertionError(line)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().numpy().tobytes() for name, t in sorted(tensors.items())}


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert bits(a.state.params) == bits(b.state.params)
    assert bits(a.state.server) == bits(b.state.server)
    for name, t in a.state.params.items():
        assert b.state.params[name].shape == t.shape
        assert b.state.params[name].dtype == t.dtype
    assert (a.state.mediator, a.state.round) == (b.state.mediator, b.state.round)
    assert (a.metrics_length, a.seconds) == (b.metrics_length, b.seconds)
    assert (a.best is None) == (b.best is None)
    if a.best is not None and b.best is not None:
        assert (a.best.round, a.best.cost) == (b.best.round, b.best.cost)
        assert bits(a.best.params) == bits(b.best.params)


@pytest.mark.parametrize("best", [None, 1, 4])
def test_round_trip_is_bitwise(tmp_path, best):
    saved = checkpoint(4, best)
    save_checkpoint(tmp_path / "checkpoint", saved)
    found = load_checkpoint(tmp_path / "checkpoint", ENOUGH, no_warning)
    assert found is not None
    assert_same(saved, found)


def test_the_best_model_may_be_the_current_one(tmp_path):
    state = State(params(3), None, {}, 3)
    saved = Checkpoint(state, Best(3, 2.0, state.params), 0, 0.0)
    save_checkpoint(tmp_path, saved)
    found = load_checkpoint(tmp_path, ENOUGH, no_warning)
    assert found is not None
    assert_same(saved, found)


def test_a_loss_that_is_no_number_survives(tmp_path):
    save_checkpoint(tmp_path, Checkpoint(State(params(1), None, {}, 1), Best(1, float("nan"), params(1)), 0, 0.0))
    found = load_checkpoint(tmp_path, ENOUGH, no_warning)
    assert found is not None
    assert found.best is not None
    assert found.best.cost != found.best.cost


def test_nothing_there_is_nothing(tmp_path):
    assert load_checkpoint(tmp_path / "none", ENOUGH, no_warning) is None
    (tmp_path / "round-000001.safetensors").write_bytes(b"tensors without a manifest: a save cut off")
    (tmp_path / "round-x.json").write_text("{}")
    (tmp_path / ".round-000001.json.tmp").write_text("{}")
    assert load_checkpoint(tmp_path, ENOUGH, no_warning) is None


def test_the_last_three_are_kept(tmp_path):
    for round in (1, 2, 5, 9, 10, 11):
        save_checkpoint(tmp_path, checkpoint(round))
    assert KEEP == 3
    names = {f"round-{round:06d}.{kind}" for round in (9, 10, 11) for kind in ("json", "safetensors")}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_rounds_beyond_six_digits_are_found_again(tmp_path):
    for round in (999_999, 1_000_000):
        save_checkpoint(tmp_path, checkpoint(round))
    found = load_checkpoint(tmp_path, ENOUGH, no_warning)
    assert found is not None
    assert found.state.round == 1_000_000


def truncate(tensors, manifest):
    tensors.write_bytes(tensors.read_bytes()[:-5])


def empty(tensors, manifest):
    tensors.write_bytes(b"")


def flip(tensors, manifest):
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(bytes(data))


def remove(tensors, manifest):
    tensors.unlink()


def fewer_tensors(tensors, manifest):
    """Replace the file by a whole one of another checkpoint with fewer tensors."""
    save_checkpoint(tensors.parent / "other", Checkpoint(State({"a": torch.zeros(1)}, None, {}, 1), None, 0, 0.0))
    tensors.write_bytes((tensors.parent / "other" / "round-000001.safetensors").read_bytes())


def manifest_of(text):
    def damage(tensors, manifest):
        manifest.write_bytes(text)

    return damage


def without(key):
    def damage(tensors, manifest):
        content = json.loads(manifest.read_text())
        del content[key]
        manifest.write_text(json.dumps(content))

    return damage


def wrong(key, value):
    def damage(tensors, manifest):
        content = json.loads(manifest.read_text())
        content[key] = value
        manifest.write_text(json.dumps(content))

    return damage


DAMAGE = {
    "truncated": truncate,
    "empty": empty,
    "flipped bit": flip,
    "no tensors": remove,
    "fewer tensors": fewer_tensors,
    "empty manifest": manifest_of(b""),
    "cut manifest": manifest_of(b'{"round": 3, "sha2'),
    "binary manifest": manifest_of(b"\xff\xfe\x00garbage"),
    "manifest that is a list": manifest_of(b"[]"),
    "manifest that is null": manifest_of(b"null"),
    "manifest that is a number": manifest_of(b"3"),
    "manifest of nothing": manifest_of(b"{}"),
    "no sum": without("sha256"),
    "no best": without("best"),
    "no length": without("metrics_length"),
    "wrong sum": wrong("sha256", "0" * 64),
    "wrong length": wrong("metrics_length", None),
    "wrong best": wrong("best", 5),
    "wrong round": wrong("round", [3]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, damage):
    folder = tmp_path / "checkpoint"
    for round in (1, 2, 3):
        save_checkpoint(folder, checkpoint(round))
    damage(folder / "round-000003.safetensors", folder / "round-000003.json")
    said: list[str] = []
    found = load_checkpoint(folder, ENOUGH, said.append)
    assert found is not None
    assert_same(found, checkpoint(2))
    assert len(said) == 1
    assert "round 3 is damaged" in said[0]


def test_two_damaged_ones_lead_to_the_third(tmp_path):
    for round in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(round))
    truncate(tmp_path / "round-000003.safetensors", None)
    flip(tmp_path / "round-000002.safetensors", None)
    said: list[str] = []
    found = load_checkpoint(tmp_path, ENOUGH, said.append)
    assert found is not None
    assert found.state.round == 1
    assert [line.split(" is")[0] for line in said] == ["checkpoint of round 3", "checkpoint of round 2"]


def test_all_damaged_is_an_error_that_says_so(tmp_path):
    for round in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(round))
        truncate(tmp_path / f"round-{round:06d}.safetensors", None)
    said: list[str] = []
    with pytest.raises(RunError, match="none of the 3 checkpoints is whole"):
        load_checkpoint(tmp_path, ENOUGH, said.append)
    assert len(said) == 3


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch, fails_at, code):
    """fsync is called for the tensors, their folder, the manifest and its folder; each may fail."""
    save_checkpoint(tmp_path, checkpoint(1))
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > fails_at:
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=os.strerror(code)):
            save_checkpoint(tmp_path, checkpoint(2))
    found = load_checkpoint(tmp_path, ENOUGH, no_warning)
    assert found is not None
    assert found.state.round == (2 if fails_at == 3 else 1)  # the manifest was in place before its folder failed
    assert not list(tmp_path.glob(".*.tmp"))
    save_checkpoint(tmp_path, checkpoint(2))  # there is room again
    found = load_checkpoint(tmp_path, ENOUGH, no_warning)
    assert found is not None
    assert found.state.round == 2


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    (tmp_path / "run.toml").touch()
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"result\.json: could not be written .*--resume"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result.json", "run.toml"]


def test_a_checkpoint_that_knows_of_more_metrics_than_there_are_is_passed_over(tmp_path):
    for round in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(round))
    said: list[str] = []
    found = load_checkpoint(tmp_path, 250, said.append)
    assert found is not None
    assert found.state.round == 2
    assert "metrics.jsonl has 250 bytes" in said[0]


def test_a_changed_number_in_the_manifest_is_noticed(tmp_path):
    for round in (1, 2):
        save_checkpoint(tmp_path, checkpoint(round))
    manifest = tmp_path / "round-000002.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"metrics_length": 200', '"metrics_length": 100'), "utf-8")
    said: list[str] = []
    found = load_checkpoint(tmp_path, ENOUGH, said.append)
    assert found is not None
    assert found.state.round == 1
    assert "manifest was changed" in said[0]
