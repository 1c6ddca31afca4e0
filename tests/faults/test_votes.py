"""Votes for a vocabulary: noise that nobody can draw again, and an account of every vote on the same people."""

from __future__ import annotations

import json

import pytest

from keyfed.config.load import Config, apply_settings
from keyfed.private.dp.ledger import read_ledger
from keyfed.private.dp.noise import system
from keyfed.run import vocabulary
from keyfed.run.vocabulary import PrivateElection
from keyfed.text.partition import ClientText

CLIENTS = 200
BALLOTS = [["the", "a", f"w{k % 7}"] for k in range(CLIENTS)]
PEOPLE = [ClientText(f"c{k}", ("the cat sat",), (), ()) for k in range(CLIENTS)]


def vote(path, *, seeded=False):
    """Hold a vote on words and on pairs; return the noisy counts that it writes, and its account."""
    config = apply_settings(Config(), ["privacy.noise=2", "privacy.delta=1e-5"])
    election = PrivateElection(config, path / "vocab.json", CLIENTS, 3, 2, seeded=seeded)
    election.elect(BALLOTS, "words", None, 3)
    election.write_phrases(path / "pairs.json", PEOPLE, lower=True, tokenised=True)
    return json.loads((path / "pairs.json").read_text("utf-8")), election.account()


def test_two_votes_have_noise_of_their_own(tmp_path, monkeypatch, record_property):
    (first, account), (second, _) = vote(tmp_path / "one"), vote(tmp_path / "two")
    assert first.keys() == second.keys()
    assert first != second
    assert account["verdict"] != "SIMULATED"
    # The mutant: noise by the seed of the run is the same twice, and says so where it is asked for.
    (first, account), (second, _) = vote(tmp_path / "three", seeded=True), vote(tmp_path / "four", seeded=True)
    assert first == second
    assert account["verdict"] == "SIMULATED"
    record_property("fault", "keyfed vocab --dp twice: noise that follows from the seed")
    record_property("outcome", "noise of the operating system; seeded votes repeat and are SIMULATED")


def test_the_noise_of_a_vote_is_the_systems(tmp_path, monkeypatch):
    drawn = []

    def counted(*given):
        drawn.append(given)
        return system(*given)

    monkeypatch.setattr(vocabulary, "system", counted)
    vote(tmp_path / "one")
    assert drawn
    drawn.clear()
    vote(tmp_path / "two", seeded=True)
    assert not drawn


@pytest.mark.parametrize("seeded", [False, True])
def test_every_count_of_a_vote_is_in_its_ledger_and_every_vote_in_the_register(tmp_path, seeded):
    vote(tmp_path / "one", seeded=seeded)
    assert [e.what for e in read_ledger(tmp_path / "one" / "vocab.privacy").entries] == ["words", "pairs"]
    _, account = vote(tmp_path / "two", seeded=seeded)
    assert account["vote"]["votes"] == 2
    assert account["vote"]["all_delta"] > account["delta"]
