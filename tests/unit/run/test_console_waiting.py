"""What a person at a terminal sees while nothing is said: that the program starts, and what a round is doing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from keyfed.run import console
from keyfed.run.console import Narrator, followed, within


def narrator(terminal: bool) -> tuple[Narrator, io.StringIO]:
    made, out = Narrator(), io.StringIO()
    made._console = Console(file=out, force_terminal=terminal, width=100, highlight=False)
    return made, out


def test_a_terminal_shows_what_is_being_done():
    made, out = narrator(terminal=True)
    with made:
        made.wait("starting")
        made.say("a line")
        made.start("fedavg", 2, 0)
        within(made, "client 1 of 3")
        made._bar.refresh()
        made.round({"round": 1, "loss": 1.0, "contributors": [], "cohort": 3, "seconds": 1.0, "refused": {}})
        made.stop()
        within(made, "testing")
    text = out.getvalue()
    for said in ("starting", "a line", "fedavg: client 1 of 3", "round    1", "testing"):
        assert said in text


def test_the_time_left_is_shown_from_the_first_round_on_and_counts_this_process_alone():
    made, out = narrator(terminal=True)
    with made:
        made.start("fedavg", 100, 90)  # after a resume
        assert made._bar is not None
        made._bar.tasks[0].start_time -= 7.0
        made._bar.refresh()
        assert "left -:--:--" in out.getvalue()
        made.round({"round": 91, "loss": 1.0, "contributors": [], "cohort": 3, "seconds": 1.0, "refused": {}})
        made._bar.refresh()
    assert "left 0:01:03" in out.getvalue()


def test_a_pipe_gets_lines_alone():
    made, out = narrator(terminal=False)
    with made:
        made.wait("starting")
        made.start("fedavg", 2, 0)
        within(made, "client 1 of 3")
        made.say("a line")
        made.stop()
        within(made, "testing")
    assert out.getvalue() == "a line\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_has_a_spinner_or_a_line(terminal, monkeypatch):
    made, out = narrator(terminal)
    monkeypatch.setattr(console, "Narrator", lambda: made)
    with console.working("exporting"):
        assert (made._waiting is not None) == terminal
        assert terminal or out.getvalue()  # before it is done
    assert made._waiting is None
    assert "exporting" in out.getvalue()
    assert terminal or out.getvalue() == "exporting\n"


def test_a_listener_of_three_methods_takes_the_place_of_progress():
    class Whole:
        def say(self, line: str) -> None: ...

        def start(self, what: str, rounds: int, done: int) -> None: ...

        def round(self, record: dict) -> None: ...

    whole = Whole()
    with followed(whole) as listener:
        assert listener is whole
        within(listener, "client 1 of 3")  # has no method for it
