"""Variants of a method: how they are written, what each keeps of the starts that were given, what is refused."""

from __future__ import annotations

import pytest

from keyfed.errors import ConfigError
from keyfed.lab.experiment.compare_plan import folder_of, read_variant, resolve
from keyfed.lab.experiment.compare_report import _differing as differing

GIVEN = [("train.init", "/runs/public"), ("vectors.file", "/v/glove.txt"), ("vectors.dim", "96")]


@pytest.mark.parametrize(
    ("text", "label", "plain"),
    [
        ("fedadam", "fedadam", "fedadam"),
        ("fedadam+vectors", "fedadam+vectors", "fedadam"),
        ("fedadam+vectors+init", "fedadam+init+vectors", "fedadam"),
        ("fedadam + init", "fedadam+init", "fedadam"),
        (
            "fedatt+init:step=1e+0,temperature=2",
            "fedatt+init:step=1e+0,temperature=2",
            "fedatt:step=1e+0,temperature=2",
        ),
    ],
)
def test_a_variant_has_its_starts_in_one_order_and_a_plain_method(text, label, plain):
    variant = read_variant(text)
    assert (variant.label, variant.plain) == (label, plain)
    assert read_variant(label) == variant


def test_a_folder_is_called_as_its_variant_in_full():
    assert folder_of("fedadam+init+vectors") == "fedadam+init+vectors"
    assert folder_of("fedatt+init:step=1") == "fedatt+init-step=1"


def test_each_variant_keeps_its_own_start_and_nothing_else_differs():
    labels = ["fedadam", "fedadam+vectors", "fedadam+init", "fedadam+vectors+init"]
    settings = [*GIVEN, ("train.unmatched", "mean"), ("train.frozen_rounds", "3"), ("train.cohort", "7"), ("lr", "0.5")]
    plan = resolve(labels, settings)
    configs = [entry.config for entry in plan.entries]
    assert [entry.label for entry in plan.entries] == [*labels[:3], "fedadam+init+vectors"]
    assert {entry.plain for entry in plan.entries} == {"fedadam"}
    assert [c.vectors.file for c in configs] == [None, "/v/glove.txt", None, "/v/glove.txt"]
    assert [c.vectors.dim for c in configs] == [None, 96, None, 96]
    assert [c.train.init for c in configs] == [None, None, "/runs/public", "/runs/public"]
    assert [c.train.unmatched for c in configs] == ["uniform", "uniform", "mean", "mean"]
    assert [c.train.frozen_rounds for c in configs] == [0, 3, 3, 3]
    assert {c.train.cohort for c in configs} == {7}
    assert all(c.options == configs[0].options for c in configs)
    assert plan.frozen_line() == "frozen: train.frozen_rounds=3 is for what has a start, not for fedadam"
    told = {row[0]: row[2] for row in differing(plan.entries)}
    assert told["fedadam"] == "none"
    assert told["fedadam+vectors"] == "vectors.file=/v/glove.txt, vectors.dim=96, train.frozen_rounds=3"


def test_without_any_start_frozen_rounds_are_for_all_as_in_training():
    plan = resolve(["fedavg", "fedprox"], [("train.frozen_rounds", "3")])
    assert [entry.config.train.frozen_rounds for entry in plan.entries] == [3, 3]
    assert plan.frozen_line() == ""


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (["fedadam+vector"], GIVEN, r'"\+vector" is no start \(did you mean vectors\?\); expected \+init or \+vectors'),
        (["fedadam+int"], GIVEN, r"did you mean init\?"),
        (["fedadam+"], GIVEN, r"expected \+init or \+vectors"),
        (["fedavgg+init"], GIVEN, r'method "fedavgg" is not known \(did you mean fedavg\?\)'),
        (["fedadam+init+init"], GIVEN, r"names the start \+init twice"),
        (["fedadam:lr=1+vectors"], GIVEN, r"write fedadam\+vectors:lr=1"),
        (["fedadam+vectors+init", "fedadam+init+vectors"], GIVEN, "given twice"),
        (["fedadam", "fedadam+vectors"], [], r"fedadam\+vectors starts from word vectors.*add --vectors FILE"),
        (["fedadam+init"], GIVEN[1:], r"fedadam\+init starts from another run's weights.*add --init RUN"),
        (["fedadam", "fedadam+init"], GIVEN, r"vectors\.file, vectors\.dim is set \(--vectors FILE\), but no compared"),
        (["fedadam"], GIVEN[:1], r"train\.init is set \(--init RUN\), but no compared.*: fedadam\+init"),
        (["fedadam"], [("train.unmatched", "mean")], r"train\.unmatched is set"),
        (["fedadam"], [("vectors.dim", "50")], r"vectors\.dim is set"),
        (["fedadam+vectors"], [*GIVEN[1:], ("vectors.remove", "3")], r"fedadam\+vectors: vectors\.remove is 3"),
    ],
)
def test_what_makes_no_sense_is_refused(methods, settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(methods, settings)
