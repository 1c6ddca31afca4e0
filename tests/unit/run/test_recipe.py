"""The recipe: settings that follow from facts, each with a reason; what is given stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.cli.options import configure
from keyfed.config.load import Config, Open, check, open_config, set_value
from keyfed.errors import ConfigError
from keyfed.run import recipe as constants
from keyfed.run.pilot import (
    PILOT_LEAST,
    TrialPace,
    Tried,
    as_begun,
    best_step,
    choose_for_federation,
    given_values,
    is_over,
    pace_of,
    tried_of,
    with_carried_step,
)
from keyfed.run.recipe import Facts, Reading, recipe

sizes = st.lists(st.integers(1, 300_000), min_size=1, max_size=40).map(lambda found: tuple(sorted(found)))
some_facts = st.builds(
    lambda sizes, more, known, **flags: Facts(
        clients=len(sizes) * more,
        sizes=sizes if known else (),
        tokens=sum(sizes) * more if known else None,
        **flags,
    ),
    sizes, st.integers(1, 500), st.booleans(), messages=st.booleans(), characters=st.booleans(),
    carried=st.booleans(), own_model=st.booleans(), private=st.booleans(), gpu=st.booleans(),
    valid_tokens=st.integers(0, 20_000), budget=st.none() | st.integers(1, 10**9),
)  # fmt: skip
own = st.fixed_dictionaries(
    {},
    optional={
        "train.rounds": st.integers(0, 5_000), "train.cohort": st.integers(1, 60), "method.lr": st.floats(0.01, 50),
        "data.max_tokens": st.none() | st.integers(1, 9_000), "train.schedule": st.sampled_from(["constant", "linear"]),
        "method.optimiser": st.just("adam"), "model.dropout": st.floats(0, 0.9), "data.batches": st.just("sentences"),
    },
)  # fmt: skip


def chosen(facts: Facts, **given_values: object) -> dict[str, object]:
    return {s.key: s.value for s in recipe(facts, {k.replace("__", "."): v for k, v in given_values.items()})[0]}


@settings(deadline=None, max_examples=200)
@given(some_facts, own)
def test_whatever_the_facts_are_the_settings_can_be_trained_and_what_is_given_stays(facts, given):
    found, reading = recipe(facts, given)
    config = Config(method="fedavg" if facts.private else "fednesterov")
    if facts.private:
        given = {key: value for key, value in given.items() if key != "train.schedule"}
    for key, value in given.items():
        config = set_value(config, key, value)
    for setting in found:
        assert setting.key not in given
        assert setting.why
        assert "|" not in setting.line()  # what run.toml puts between two of them
        config = set_value(config, setting.key, setting.value)
    config = check(config)
    if "train.cohort" not in given:
        assert 1 <= config.train.cohort <= facts.clients
    if not facts.private and "train.rounds" not in given:
        assert config.train.rounds >= constants.ROUNDS_LEAST
    if config.train.average is not None:
        assert 1 / (1 - config.train.average) <= constants.AVERAGE_SHARE * config.train.rounds * 1.01
    assert (reading is None) == facts.private
    if reading is not None:
        assert reading.rounds == config.train.rounds
        assert reading.tokens >= 0
        assert reading.clients is None or 0 <= reading.clients <= 1


def test_one_of_a_kind_is_said_in_the_singular():
    assert Reading(1, 1, None, None).line() == "to be read: about 1 token in 1 round"
    assert Reading(2, 1_000, None, None).line() == "to be read: about 1,000 tokens in 2 rounds"
    assert Tried(5.0, 80.0, 1, 10).line() == "5: perplexity 80.0 after 1 round"


def test_the_corpora_that_were_measured():
    chat = Facts(9_443, (40, 60, 90, 200, 700, 22_000), 2_000_000, messages=True, gpu=True)
    found = chosen(chat, train__rounds=2_000)
    assert found["data.batches"] == "packed"
    assert (found["method.lr"], found["method.clip"], found["method.batch_size"]) == (*constants.WORDS[1:], 5)
    assert (found["method.beta"], found["method.server_lr"], found["train.average"]) == (0.7, 1.0, 0.99)
    assert found["train.cohort"] == 20  # much can be read: more clients, and still 1,000 rounds
    assert found["data.max_tokens"] < 22_000
    speeches = Facts(39, (1_000, 20_000, 40_000, 200_000), 1_700_000)
    found = chosen(speeches)
    assert found["train.cohort"] == 5
    assert (found["method.batch_size"], found["method.lr"], found["method.clip"]) == constants.WORDS
    assert (found["train.rounds"], found["data.max_tokens"], found["model.dropout"]) == (200, 1_000, 0.0)
    assert chosen(replace(speeches, gpu=True))["model.dropout"] == 0.2
    assert chosen(replace(speeches, carried=True))["method.lr"] == found["method.lr"] * constants.CARRIED


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 10, 11, 49, 5_000])
def test_the_cohort_follows_the_corpus(clients):
    found = chosen(Facts(clients, (100,), 100 * clients))
    assert found["train.cohort"] == min(clients, 10)


def test_little_text_is_read_often_and_dropped_often():
    found, reading = recipe(Facts(6, (60, 60, 60), 360))
    assert reading.passes == pytest.approx(constants.PASSES, rel=0.1)
    assert {s.key: s.value for s in found}["model.dropout"] == 0.2


def test_an_optimiser_of_your_own_has_a_step_of_its_own():
    found = chosen(Facts(50, (500,), 25_000), method__optimiser="adam")
    assert "method.lr" not in found  # 5 would be a catastrophe for Adam
    assert "method.clip" not in found
    assert "method.beta" not in chosen(Facts(50, (500,), 25_000), server__name="adam")


def test_under_privacy_the_method_and_its_numbers_stay():
    assert configure(None, None, {"privacy.epsilon": "8"}, None, recipe=True).method == "fedavg"
    assert chosen(Facts(1_000, private=True)) == {"train.cohort": 10}
    assert chosen(Facts(4, private=True)) == {"train.cohort": 4}
    config, lines = choose_for_federation(configure(None, None, {"privacy.noise": "1"}, None, recipe=True), 4)
    assert (config.method, config.train.cohort, config.open) == ("fedavg", 4, None)
    assert len(lines) == 1


def test_real_clients_get_documented_numbers():
    config, lines = choose_for_federation(configure(None, None, {"secure.on": True}, None, recipe=True), 3)
    assert (config.method, config.train.cohort, config.train.rounds) == ("fednesterov", 3, constants.UNKNOWN_ROUNDS)
    assert config.data.max_tokens == constants.UNKNOWN_CAP
    assert config.open is None
    assert any("not known" in setting.why for setting in lines)
    named = configure("fedavg", None, {}, None, recipe=True)
    assert choose_for_federation(named, 3) == (named, ())
    base = replace(config, train=replace(config.train, init="base"))
    lr = config.options["lr"]
    assert with_carried_step(config, lines, offered=True)[0] == config
    eased, said = with_carried_step(base, lines, offered=True)  # the base was taken after the recipe chose
    assert eased.options["lr"] == lr * constants.CARRIED
    assert any(f"method.lr = {lr * constants.CARRIED}" in line for line in said)
    assert with_carried_step(base, lines, offered=False)[0] == base  # the recipe knew
    with pytest.raises(ConfigError, match="--minutes is for a simulation"):
        choose_for_federation(configure(None, None, {}, None, recipe=True, minutes=3), 3)


# What is given


def test_a_named_method_keeps_its_settings(tmp_path):
    assert configure("fedavg", None, {}, None, recipe=True) == check(Config(method="fedavg"))
    file = tmp_path / "a.toml"
    file.write_text('[method]\nname = "fedprox"\n')
    assert configure(None, file, {}, None, recipe=True).open is None
    file.write_text("[train]\nrounds = 7\n[method]\nlr = 3\n")
    opened = configure(
        None, file, {"train.seed": 2, "train.until": None}, ["beta=0.5", "model.dropout=0.3"], recipe=True
    )
    assert given_values(opened) == {
        "train.rounds": 7, "method.lr": 3.0, "train.seed": 2, "method.beta": 0.5, "model.dropout": 0.3,
    }  # fmt: skip
    assert configure(None, file, {}, None).method == "fedavg"  # other verbs know no recipe


def test_what_a_run_began_with_stays_and_what_is_said_now_is_compared():
    begun = check(Config(method="fednesterov", options={"lr": 2.5}))
    now = set_value(open_config(["train.cohort"]), "train.cohort", 4)
    assert as_begun(now, begun, now.open) == set_value(begun, "train.cohort", 4)
    timed = Open(frozenset(["train.rounds"]), 5.0)
    assert as_begun(set_value(now, "train.rounds", 9), begun, timed).train.rounds == begun.train.rounds
    named = replace(Config(), open=Open(minutes=5.0))
    assert as_begun(named, replace(Config(), train=replace(Config().train, rounds=33)), named.open).train.rounds == 33


@pytest.mark.parametrize(
    ("minutes", "named", "message"),
    [
        (0, {}, "--minutes is 0; expected a number of minutes > 0"),
        (float("inf"), {}, "--minutes is inf; expected a number of minutes > 0"),
        (5, {"privacy.epsilon": "8"}, "calibrated to their number"),
    ],
)
def test_minutes_that_make_no_sense(minutes, named, message):
    for method in (None, "fedavg"):
        with pytest.raises(ConfigError, match=message):
            configure(method, None, named, None, recipe=True, minutes=minutes)


# The pilot's arithmetic


def test_the_recipes_own_step_stays_unless_another_is_better():
    def tried(*found):
        return [Tried(lr, perplexity, rounds, 1) for lr, perplexity, rounds in found]

    assert best_step(tried((10, 300.0, 8), (5, 299.0, 8), (20, 310.0, 8))) == 10
    assert best_step(tried((10, 300.0, 8), (5, 280.0, 8), (20, 290.0, 8))) == 5
    assert best_step(tried((10, None, 8), (5, 280.0, 8), (20, None, 4))) == 5
    assert best_step(tried((10, 300.0, 8), (5, 900.0, 4), (20, 100.0, 4))) == 10  # ended early: not compared
    assert best_step(tried((10, None, 8), (5, None, 8), (20, None, 8))) == 5  # all diverged: the smallest


def test_a_trial_ends_after_its_rounds_or_where_it_is_clearly_worse():
    lines = [{"round": 1}, {"round": 2, "valid": {"perplexity": 500.0}}]
    assert not is_over(lines, 4, None)
    assert not is_over(lines, 4, 400.0)
    assert is_over(lines, 4, 200.0)
    assert is_over([{"round": 2, "valid": {"perplexity": None}}], 4, 300.0)
    assert is_over(lines, 2, None)
    assert tried_of(3.0, [{"round": 1, "valid": {"perplexity": 90.0}, "worked": 7}], vocab=80).perplexity is None
    assert tried_of(3.0, [{"round": 1, "valid": {"perplexity": 70.0}, "worked": 7}], vocab=80).tokens == 7
    assert PILOT_LEAST >= 2  # a middle to be ended at


@settings(deadline=None)
@given(
    st.floats(0.01, 100), st.floats(0, 100), st.floats(0, 100), st.integers(2, 30), st.integers(1, 10),
    st.floats(1, 10_000),
)  # fmt: skip
def test_the_pace_of_a_trial_gives_the_rounds_that_fit(each, reading, once, rounds, every, seconds):
    lines, elapsed = [], once
    for t in range(1, rounds + 1):
        valid = {} if t % every == 0 or t == rounds else None
        elapsed += each + (reading if valid is not None else 0)
        lines.append({"elapsed": elapsed, "seconds": each + (once if t == 1 else 0), "valid": valid})
    pace = pace_of(lines)
    assert pace.round == pytest.approx(each)
    assert pace.once == pytest.approx(once, abs=1e-6 * elapsed)
    if rounds > every:
        assert pace.validation == pytest.approx(reading, abs=1e-6 * elapsed)
    fit = TrialPace(each, reading, once).rounds(seconds, every)
    assert once + fit * (each + reading / every) <= max(seconds, once) * (1 + 1e-9)
