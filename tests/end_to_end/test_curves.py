"""`--curves`: the file, the run it must not change, what goes on after an interruption, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from keyfed.config.load import PrivacyConfig, SecureConfig, check
from keyfed.errors import ConfigError, RunError
from keyfed.run.folder import read_metrics
from keyfed.run.loop import train
from keyfed.run.metrics_line import read_curves
from tests.listeners import Heard

from .conftest import TINY
from .test_resume import tiny, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def with_curves(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "curves"
    train(tiny(corpus, rounds=4, curves=True), out)
    return out


def test_a_run_with_curves_has_the_same_model(corpus, with_curves, tmp_path):
    train(tiny(corpus, rounds=4), tmp_path / "plain")
    assert not (tmp_path / "plain" / "curves.jsonl").exists()
    for file in ("model.safetensors", "checkpoint/round-000004.safetensors"):
        assert (with_curves / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_every_round_has_a_line_whose_last_epoch_is_the_round_of_the_log(with_curves):
    lines, records = read_curves(with_curves), read_metrics(with_curves)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    for line, record in zip(lines, records, strict=True):
        assert line["epoch"]["loss"][-1] == pytest.approx(record["loss"], rel=1e-12)
        assert sum(line["batch"]["tokens"]) == record["worked"]
        assert list(line["by_client"]) == record["contributors"]
    assert lines[-1]["epoch"]["accuracy"][-1] > lines[0]["batch"]["accuracy"][0]


@pytest.mark.parametrize("every", [1, 2])
def test_an_interrupted_run_ends_with_the_same_file(corpus, with_curves, tmp_path, every):
    config = tiny(corpus, rounds=4, curves=True, checkpoint_every=every)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", listener=Heard(3))
    path = tmp_path / "run" / "curves.jsonl"
    with path.open("ab") as f:
        f.write(b'{"round": 4, "clien')  # killed while it wrote
    train(config, tmp_path / "run", resume=True)
    assert path.read_bytes() == (with_curves / "curves.jsonl").read_bytes()


def test_a_file_with_too_few_lines_is_not_gone_on_with(corpus, tmp_path):
    config = tiny(corpus, rounds=4, curves=True)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", listener=Heard(2))
    (tmp_path / "run" / "curves.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match=r"curves.jsonl has 0 lines, and the checkpoint is of round 2"):
        train(config, tmp_path / "run", resume=True)


def test_central_training_has_curves_of_its_one_client(keyfed, corpus, tmp_path):
    out = tmp_path / "central"
    settings = [part for setting in TINY for part in ("--set", setting) if "cohort" not in setting]
    code, _, err = keyfed(
        "train", "central", "--data", str(corpus), "--rounds", "2", "--out", str(out), "--curves", *settings
    )
    assert code == 0
    assert "go to curves.jsonl" in err
    for line, record in zip(read_curves(out), read_metrics(out), strict=True):
        assert line["clients"] == 1
        assert set(line["batch"]["clients"]) == {1}
        assert line["epoch"]["loss"] == pytest.approx([record["loss"]], rel=1e-12)
        assert len(line["batch"]["loss"]) > 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--dp", "epsilon=8"), "train.curves (--curves) tells the clients' losses, which --dp noises; leave one of"),
        (("--secure",), "train.curves (--curves) tells the clients' losses, which --secure hides in sums; leave one"),
        (("--federation", "127.0.0.1:1"), "--curves works in simulation only; leave it out of a federation"),
        (("--federation", "127.0.0.1:1", "--plain"), "--curves works in simulation only; leave it out of a federation"),
    ],
    ids=["dp", "secure", "federation", "plain federation"],
)
def test_where_clients_hide_their_losses_curves_are_refused(keyfed, tmp_path, more, says):
    code, _, err = keyfed("train", "fedavg", "--curves", "--out", str(tmp_path / "run"), *more)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_configuration_is_refused_like_the_options(corpus):
    config = tiny(corpus, curves=True)
    with pytest.raises(ConfigError, match="--dp noises"):
        check(replace(config, privacy=PrivacyConfig(epsilon=8.0)))
    with pytest.raises(ConfigError, match="--secure hides"):
        check(replace(config, secure=SecureConfig(on=True)))


def test_a_federation_refuses_curves_from_a_file(corpus):
    from keyfed.run.compatible import Case, refuse

    config = tiny(corpus, curves=True)
    with pytest.raises(ConfigError, match="works in simulation only"):
        refuse("federation", Case(config))


def test_lines_are_strict_json_of_lists(with_curves):
    for text in (with_curves / "curves.jsonl").read_text("utf-8").splitlines():
        line = json.loads(text, parse_constant=pytest.fail)
        lengths = {len(values) for values in line["batch"].values()}
        assert len(lengths) == 1
