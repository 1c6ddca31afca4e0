"""The table of what goes with what: every row refuses its example, and nothing else at its stage does before it."""

from __future__ import annotations

import re

import pytest

from keyfed.cli.reference import answer_to, compatible_page
from keyfed.config.load import Config, apply_settings
from keyfed.errors import ConfigError, KeyfedError
from keyfed.run.compatible import TABLE, Case, refuse

ROWS = [(stage, rule) for stage, (_, rules) in TABLE.items() for rule in rules]


@pytest.mark.parametrize(("stage", "rule"), ROWS, ids=[f"{stage}: {rule.name}" for stage, rule in ROWS])
def test_a_row_refuses_its_example_at_its_stage_with_words_of_its_own(stage, rule):
    answer = answer_to(rule)
    assert answer, "its example is not refused"
    assert re.search(r"\{|None", answer) is None  # every field has a value
    with pytest.raises(KeyfedError) as refused:
        refuse(stage, rule.case())
    assert str(refused.value) == answer  # no row before it hides it


@pytest.mark.parametrize(("stage", "rule"), ROWS, ids=[f"{stage}: {rule.name}" for stage, rule in ROWS])
def test_a_row_says_nothing_of_a_plain_run(stage, rule):
    rule.refuse(Case(Config(), members=10, clients=20, names=("ann", "ben"), embed=96))


def test_names_are_unique_and_every_row_is_on_the_page():
    names = [rule.name for _, rule in ROWS]
    assert len(set(names)) == len(names)
    page = compatible_page()
    assert all(rule.name in page for _, rule in ROWS)
    assert all(about in page for about, _ in TABLE.values())


def test_a_message_names_what_was_got():
    config = apply_settings(Config(), ["secure.on=true", "upload.keep=0.25"])
    with pytest.raises(ConfigError, match=re.escape("upload.keep=0.25 and upload.quantise=none")):
        refuse("secure sums", Case(config, members=10))


def test_all_of_a_private_run_goes_with_poisson_sampling():
    config = apply_settings(Config(), ["privacy.epsilon=8", "participation.sampling=poisson"])
    for stage in ("plan", "masked weights", "differential privacy"):
        refuse(stage, Case(config, members=10, clients=20))
