"""Taking part, message by message: what is said and sent again, when work ends. In node, under the test's clock."""

from __future__ import annotations

import pytest

from .node_cases import answers, needs_node

pytestmark = needs_node

LATE = "This page was too late for that round, which went on without it."


def asked(op, **given):
    return answers([{"op": op, **given}], script="rounds_cases.mjs")[0]


def test_a_tab_that_slept_says_so_and_is_not_said_to_have_a_server_that_is_away():
    found = asked("slept")
    assert found["trouble"][0] == "This tab slept; a round may have gone on without it."
    assert found["trouble"][1].startswith("The server is away (the server does not answer); tried again in 1 s")
    assert found["polls"] >= 3


def test_a_server_that_says_at_once_that_there_is_nothing_is_asked_once_a_second():
    assert 10 <= asked("pauses")["polls"] <= 11


@pytest.mark.parametrize(("working", "soon"), [(["late"], 2), ([], 1), (["away"] * 99, 1)])
def test_work_for_a_dead_round_ends(working, soon):
    """As soon as the server says so, else at the message's deadline; then the next message is answered."""
    found = asked("dead", working=working)
    assert found["soon"] == soon
    assert len(found["handled"]) == 2
    assert [one for one, _ in found["sent"]] == ["b"]
    assert found["trouble"] == [LATE]


def test_an_answer_that_broke_off_is_sent_again_and_not_made_again():
    found = asked("resent")
    assert found["handled"] == ["who", "who"]  # for a and for b
    assert found["sent"] == [["a", [1, 2, 3]], ["a", [1, 2, 3]], ["b", [1, 2, 3]]]


@pytest.mark.parametrize("how", ["hang", "away"])
def test_an_upload_of_a_text_that_has_changed_since_is_not_sent_again(how):
    found = asked("abandoned", answers=[how])
    assert [found["sent"][0][0], *found["sent"][1:]] == ["a", ["a", "stale"], ["b", "stale"]]
    assert "The upload was stopped: the text has changed." in found["said"]


def test_a_refusal_is_a_trouble_and_its_cause_is_handed_on():
    found = asked("refused", reason="strangers")
    assert found["refused"] == ["strangers"]
    assert found["trouble"] == ["Refused to answer (strangers: so it is)."]
    assert found["sent"] == [["a", "strangers"]]
    found = asked("forgotten")
    assert found["lost"] == 1
    assert found["trouble"][0].startswith("The server does not know this page any more.")


def test_an_upload_may_take_until_its_deadline():
    assert asked("patience", what="next", seconds=0) == 40
    assert asked("patience", what="answer", seconds=170) == 170
    assert asked("patience", what="answer", seconds=-5) == 1


def test_a_message_may_come_slowly_but_not_stand_still():
    assert asked("slow", pieces=9, every=30) == 9
    assert asked("slow", pieces=9, every=50) == "the server does not answer"
