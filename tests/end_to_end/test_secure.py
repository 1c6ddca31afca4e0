"""`keyfed train --secure`: the same model as without, sums only in the log, what cannot be masked refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from keyfed.config.load import Participation, PrivacyConfig, SecureConfig, TrainConfig, UploadConfig, check
from keyfed.errors import ConfigError, PrivacyError
from keyfed.federated.methods import fedavg
from keyfed.federated.spec import Part
from keyfed.federated.types import Mediator
from keyfed.run import plan as planning
from keyfed.run import ranks
from keyfed.run.folder import load_model, read_metrics
from keyfed.run.loop import train
from keyfed.run.prepare import prepare
from keyfed.run.secure import secure_facts
from tests.listeners import Heard

from .conftest import TINY
from .test_methods import with_method
from .test_participation import dual
from .test_resume import checkpoints, tiny, without_times


def secured(config, **options):
    return replace(config, secure=SecureConfig(on=True, **options))


def distance(one, other) -> float:
    """‖difference‖ / ‖weights‖ of two models."""
    wrong = sum(float((one[name] - p).double().square().sum()) for name, p in other.items())
    return (wrong / sum(float(p.double().square().sum()) for p in other.values())) ** 0.5


def test_train_secure_learns_the_same_and_logs_sums_only(keyfed, corpus, tmp_path):
    settings = [item for s in [*TINY, "train.cohort=5", "train.baselines=false"] for item in ("--set", s)]
    lossy = ("--set", "participation.drop_after=0.1")
    common = ("--data", corpus, "--rounds", 3, *settings, *lossy)
    plan = keyfed("train", "fedatt", "--secure", "--dry-run", *common)
    assert plan[0] == 0, plan[2]
    assert "4 of 5 clients must stay" in plan[1]
    code, stdout, stderr = keyfed("train", "fedatt", "--secure", "--json", "--out", tmp_path / "masked", *common)
    assert code == 0, stderr
    result = json.loads(stdout)
    code, _, stderr = keyfed("train", "fedatt", "--out", tmp_path / "plain", *common)
    assert code == 0, stderr
    masked, plain = (load_model(tmp_path / name).params for name in ("masked", "plain"))
    assert distance(masked, plain) < 1e-6
    records, others = read_metrics(tmp_path / "masked"), read_metrics(tmp_path / "plain")
    assert any(r["lost"] for r in records)
    for record, other in zip(records, others, strict=True):
        assert "attention" in other
        assert "attention" not in record
        assert sorted(record["contributors"]) == sorted(other["contributors"])
        assert record["effective_clients"] == pytest.approx(other["effective_clients"], rel=1e-4)
        cost = record["secure"]
        assert cost["failed"] is None
        assert cost["members"] == 5
        assert cost["survivors"] == len(record["contributors"])
        assert record["traffic"]["up"] == cost["bytes"]["masked"]
        assert record["traffic"]["control"] == sum(n for what, n in cost["bytes"].items() if what != "masked")
        names = {name for key in ("contributors", "lost", "refused") for name in record[key]}
        rest = {key: value for key, value in record.items() if key not in ("contributors", "lost", "refused")}
        assert not any(name in json.dumps(rest) for name in names), "no number of a single client"
    # a later round is one sum: 4 bytes a number, as --dry-run says
    words = result["bytes_per_client"]["up"]
    assert f"{words:,} bytes up a client and round" in plan[1]
    assert records[-1]["traffic"]["up"] == words * len(records[-1]["contributors"])
    assert records[0]["traffic"]["up"] > words * len(records[0]["contributors"]), "the calibration comes before"
    assert result["secure"]["rounds"] == 3
    report = (tmp_path / "masked" / "report.md").read_text("utf-8")
    assert "secure aggregation" in report
    assert "secure aggregation" not in (tmp_path / "plain" / "report.md").read_text("utf-8")


def test_a_run_in_the_clear_clamps_as_a_secure_one_and_says_how_many(corpus, tmp_path):
    config = with_method(tiny(corpus, rounds=2, cohort=5), "fedatt", temperature=0.001)
    masked = train(secured(config), tmp_path / "masked")
    clear = train(replace(config, secure=SecureConfig(clear=True)), tmp_path / "clear")
    plain = train(config, tmp_path / "plain")
    one, two, other = (load_model(tmp_path / name).params for name in ("masked", "clear", "plain"))
    assert distance(one, two) < 1e-6
    assert distance(one, other) > 1e-4, "attention without the clamp is another method"
    assert masked["clamped"] == clear["clamped"]
    assert masked["clamped"]["of"] == 10
    assert 0 < masked["clamped"]["clients"] == sum(r["clamped"] for r in read_metrics(tmp_path / "masked")) <= 10
    assert plain["clamped"] is None
    assert not clear["secure"]
    for result, said in ((masked, True), (clear, True), (plain, False)):
        assert ("clamped weights, clients of all rounds" in dict(secure_facts(result))) == said


def test_dual_methods_say_that_they_weigh_alike_in_secure_runs(corpus):
    config = dual(tiny(corpus), "fedadmm", rho=0.01, lr=0.5)
    for changed, said in ((secured(config), True), (config, False)):
        made = check(changed)
        method, _ = planning.plan(made, prepare(made))
        lines = planning.cautions(made, method, 3, 5)
        assert any("in secure sums all clients weigh alike" in line for line in lines) == said


@pytest.mark.parametrize("method", ["fedmed", "fedadmm"])
def test_a_secure_run_goes_on_where_it_was(corpus, tmp_path, method):
    base = tiny(corpus, rounds=4, cohort=5)
    if method == "fedmed":
        config = secured(with_method(base, method, beta=0.5, threshold=0.05))
    else:
        config = secured(dual(base, method, rho=0.01, lr=0.5))
    config = replace(config, participation=Participation(drop_after=0.1))
    whole = train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again", listener=Heard(2))
    again = train(config, tmp_path / "again", resume=True)
    assert whole["test"] == again["test"]

    def timeless(run):
        rows = without_times(read_metrics(tmp_path / run))
        return [{**r, "secure": {k: v for k, v in r["secure"].items() if k != "seconds"}} for r in rows]

    assert timeless("whole") == timeless("again")
    ends = [checkpoints(tmp_path / run)["round-000004"] for run in ("whole", "again")]
    assert ends[0] == ends[1]


def test_rounds_that_stay_closed_are_counted(corpus, tmp_path):
    config = replace(
        secured(tiny(corpus, rounds=3, cohort=5), threshold=5), participation=Participation(drop_after=0.1)
    )
    result = train(config, tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    closed = [r for r in records if r["lost"]]
    assert 0 < len(closed) < 3
    assert result["abandoned"] == result["secure"]["failed"] == len(closed)
    for record in records:
        assert record["abandoned"] == bool(record["lost"])
        if record["abandoned"]:
            assert "at the threshold 5: the sum stays hidden" in record["secure"]["failed"]
            assert record["contributors"] == []


REFUSED = {
    "central": ({"method": "central", "options": {}}, "central trains one client that has all the text"),
    "upload.keep": ({"upload": UploadConfig(keep=0.5)}, r"upload\.keep=0\.5 and upload\.quantise=none: masked numbers"),
    "upload.quantise": ({"upload": UploadConfig(quantise="int8")}, r"upload\.quantise=int8: masked numbers"),
    "floor": ({"secure": SecureConfig(True, floor=4)}, r"secure\.floor is 4, and a round has 3 clients"),
    "threshold, high": ({"secure": SecureConfig(True, 4)}, r"secure\.threshold is 4 in a round of 3 .* 2 to 3"),
    "floor of one": ({"secure": SecureConfig(True, floor=1)}, r"secure\.floor is 1; at least 2"),
    "clear and secure": ({"secure": SecureConfig(True, clear=True)}, r"secure\.clear is a plain run's"),
    "private, threshold": (
        {"secure": SecureConfig(True, 2), "privacy": PrivacyConfig(noise=1.0)},
        r"secure\.threshold is 2 with --dp, and clients take part from 3 on",
    ),
    "private, duals": (
        {
            "method": "fedadmm",
            "options": {},
            "secure": SecureConfig(True),
            "privacy": PrivacyConfig(noise=1.0, weight_cap=50.0),
            "train": TrainConfig(rounds=9, cohort=3),
        },
        r"privacy\.weight_cap is 50, and in secure sums the clients of fedadmm weigh alike",
    ),
    "off": ({"secure": SecureConfig(threshold=3)}, r"\[secure\] has options, but secure aggregation is off"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_masked_is_refused_by_name(corpus, case):
    changes, message = REFUSED[case]
    config = replace(secured(tiny(corpus)), **changes)
    with pytest.raises((ConfigError, PrivacyError), match=message):
        planning.plan(check(config), prepare(config))


def test_fixed_weights_are_refused_where_the_threshold_does_not_allow_them(corpus):
    config = secured(tiny(corpus, cohort=5))
    prepared = prepare(config)
    one, other = prepared.store.names[:2]
    for weights, message in (
        (f"{one}=3", None), (f"{one}=0", "a weight of 0"), (f"{one}=2, {other}=0.5", "4 times the least"),
    ):  # fmt: skip
        made = check(replace(config, mediator=Part("fixed", {"weights": weights})))
        if message is None:
            planning.plan(made, prepared)  # five clients, threshold 4, so up to three times
            continue
        with pytest.raises(ConfigError, match=rf"fixed weights \(fedavg\): .*{message}.* allows 3 times"):
            planning.plan(made, prepared)
        planning.plan(replace(made, secure=SecureConfig()), prepared)


def test_several_ranks_and_a_method_without_a_private_rule_are_refused(corpus):
    config = check(secured(tiny(corpus)))
    prepared = prepare(config)
    method, choice = planning.plan(config, prepared)
    with pytest.raises(ConfigError, match=r"secure\.on is set beside 2 ranks"):
        ranks.among(2, config, method, choice)
    own = Mediator(init=lambda: None, weigh=lambda memory, reports, layers: (memory, {}))
    mine = replace(fedavg(), name="mine", mediator=own)
    bare = check(replace(config, options={}))
    with pytest.raises(ConfigError, match="the mediator of mine has no rule by which clients weigh themselves"):
        planning.plan(bare, prepared, mine)
    planning.plan(replace(bare, secure=SecureConfig()), prepared, mine)


def test_an_exchanged_mediator_and_poisson_sampling_are_masked_too(corpus, tmp_path):
    config = secured(with_method(tiny(corpus, rounds=4, cohort=5), "fedprox"))
    config = replace(config, mediator=Part("attention"), participation=Participation(sampling="poisson"))
    train(config, tmp_path / "run")
    members = [r["secure"]["members"] for r in read_metrics(tmp_path / "run")]
    assert len(set(members)) > 1
