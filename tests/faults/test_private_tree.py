"""Tree noise in a federation: clients that wait, blocks that are kept, trees that begin anew."""

from __future__ import annotations

import pytest
import torch

from keyfed.engine.network import init_params
from keyfed.private.dp.accounting import TreeRelease
from keyfed.private.dp.ledger import read_ledger
from keyfed.run import privacy as run_privacy
from keyfed.run.checkpoint import read_checkpoint
from keyfed.run.prepare import build_network
from keyfed.run.remote import private as deployed_private
from tests.listeners import Heard

from .deployed import last_model, session, vocabulary
from .private import Killed, counting, deploy, enrol, killed_before_checkpoint, tree_config


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_client_refuses_a_call_before_its_turn_whatever_the_server_says(tmp_path, monkeypatch, secure):
    everybody = [f"client-{k}" for k in range(6)]
    monkeypatch.setattr(deployed_private.DeployedPrivacy, "cohort", lambda self, there: everybody)
    config = tree_config(tmp_path, rounds=4, cohort=3 if secure else 2, secure=secure)
    transport, roster = enrol(tmp_path, 6)
    sent = counting(transport, "upload" if secure else "train")
    heard = Heard()
    deploy(tmp_path, config, transport, roster, listener=heard)
    assert sent == dict.fromkeys(everybody, 2)  # steps 0 and 3 of four; 0 and 2 where two groups take turns
    assert sum("too soon" in line for line in heard.lines) == 1


def test_a_client_remembers_its_last_step_when_it_is_restarted(tmp_path, monkeypatch):
    everybody = [f"client-{k}" for k in range(6)]
    monkeypatch.setattr(deployed_private.DeployedPrivacy, "cohort", lambda self, there: everybody)
    config = tree_config(tmp_path, rounds=3)
    transport, roster = enrol(tmp_path, 6)
    sent = counting(transport)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, listener=Heard(1))
    text = tmp_path / "texts" / "client-0.txt"
    transport.handlers["client-0"] = session(tmp_path / "clients", text)
    deploy(tmp_path, config, transport, roster, resume=True)
    assert sent == dict.fromkeys(everybody, 1)


def prefix_noise(run, number):
    """The blocks whose noise is in the model after a round, by layer."""
    found = {}
    for key, t in read_checkpoint(run / "checkpoint", number).state.server.items():
        if key.startswith(deployed_private.TREE) and key != deployed_private.PLACE:
            layer = key.split("/", 4)[4]
            found[layer] = found.get(layer, 0) + t
    return found


def test_the_noise_in_the_model_is_that_of_the_blocks_in_the_checkpoint(tmp_path, monkeypatch):
    """Also after a server was ended and went on: the tree goes on with it, and its blocks are gone in the end."""
    monkeypatch.setattr(run_privacy, "group_of", lambda client, groups, seed: -1)  # nobody's turn ever comes
    config = tree_config(tmp_path, rounds=7)
    transport, roster = enrol(tmp_path, 6)
    vocab, _ = vocabulary(tmp_path)
    started = init_params(build_network(config, len(vocab), None), config.train.seed)
    run = tmp_path / "deployed"
    for stop in (1, 3, 4, 6):
        with pytest.raises(KeyboardInterrupt):
            deploy(tmp_path, config, transport, roster, listener=Heard(stop), resume=stop > 1)
        blocks, model = prefix_noise(run, stop), last_model(run)
        assert set(blocks) == set(model)
        for name, p in model.items():
            noise = (p.double() - started[name].double()) * 2 / 5.0
            torch.testing.assert_close(noise, blocks[name], rtol=1e-4, atol=1e-4)
    result = deploy(tmp_path, config, transport, roster, resume=True)
    rows = [e.row for e in read_ledger(run).entries]
    assert rows == [TreeRelease(1.0, 3)] * 7
    assert result["privacy"]["verdict"] == "BOUND ONLY"
    assert prefix_noise(run, 7) == {}
    assert len(list((run / "checkpoint").glob("*.safetensors"))) == 1


def test_a_release_that_is_not_in_the_checkpoint_begins_another_tree(tmp_path, monkeypatch):
    killed_before_checkpoint(monkeypatch, 3)
    config = tree_config(tmp_path, rounds=4)
    transport, roster = enrol(tmp_path, 6)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    result = deploy(tmp_path, config, transport, roster, resume=True)
    rows = [e.row.tree for e in read_ledger(tmp_path / "deployed").entries]
    assert rows == [0, 0, 0, 1, 1]
    assert (result["rounds"], result["privacy"]["releases"]) == (4, 5)
    with_one = tree_config(tmp_path, rounds=5)
    deploy(tmp_path, with_one, *enrol(tmp_path, 6, "others"), "whole")
    assert read_ledger(tmp_path / "whole").epsilon() != read_ledger(tmp_path / "deployed").epsilon()


def test_a_torn_row_is_of_the_tree_in_progress(tmp_path, monkeypatch):
    killed_before_checkpoint(monkeypatch, 2)
    config = tree_config(tmp_path, rounds=4)
    transport, roster = enrol(tmp_path, 6)
    with pytest.raises(Killed):
        deploy(tmp_path, config, transport, roster)
    with pytest.raises(KeyboardInterrupt):
        deploy(tmp_path, config, transport, roster, resume=True, listener=Heard(3))
    run = tmp_path / "deployed"
    with (run / "ledger.jsonl").open("ab") as f:
        f.write(b'{"what": "upd')
    deploy(tmp_path, config, transport, roster, resume=True)
    found = [(e.what, e.row.tree) for e in read_ledger(run).entries]
    assert found == [("update", 0), ("update", 0), ("update", 1), ("update", 1), ("torn", 1), ("update", 2)]
