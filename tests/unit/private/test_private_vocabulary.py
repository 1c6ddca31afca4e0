"""Votes under a budget: counts of words and of pairs have the noise and the threshold that their ledger speaks of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from keyfed.config.load import Config, apply_settings
from keyfed.errors import ConfigError, DataError, PrivacyError
from keyfed.private.dp.ledger import read_ledger
from keyfed.private.dp.noise import system
from keyfed.run import vocabulary
from keyfed.run.vocabulary import PrivateElection, ngrams, read_votes, register_of
from keyfed.text.partition import ClientText
from keyfed.text.vocab import SPECIALS, Vocab, Vote, threshold

K, CLIENTS, Z = 36, 3_000, 2.0
COMMON = [f"w{k}" for k in range(K + 1)]  # whose pairs are K: the ballot of everybody who says them in order


def voting(seed=1, *settings):
    given = [f"privacy.noise={Z}", "privacy.delta=1e-5", f"train.seed={seed}", *settings]
    return apply_settings(Config(), given)


def person(name, line):
    return ClientText(name, (line,), (), ())


CROWD = [person(f"c{k}", " ".join(COMMON)) for k in range(CLIENTS)]


def pairs(path, clients, seed=1):
    """What is written of the pairs of some clients, after a vote on words under the same budget."""
    election = PrivateElection(voting(seed), path / f"{seed}.json", CLIENTS, K, 2, seeded=True)
    election.elect([["w"]] * CLIENTS, "words", None, 3)
    election.write_phrases(path / f"{seed}.pairs", clients, lower=True, tokenised=True)
    return json.loads((path / f"{seed}.pairs").read_text("utf-8")), election


def test_counts_of_pairs_have_the_noise_of_their_row_in_the_ledger(tmp_path):
    found = [v - CLIENTS for seed in range(6) for v in pairs(tmp_path, CROWD, seed)[0].values()]
    assert len(found) == 6 * K
    assert math.sqrt(sum(x * x for x in found) / len(found)) == pytest.approx(Z * math.sqrt(K), rel=0.15)
    assert abs(sum(found) / len(found)) < 4 * Z * math.sqrt(K) / math.sqrt(len(found))
    rows = read_ledger(tmp_path / "0.privacy").entries
    assert [(e.what, e.row.z, e.row.q) for e in rows] == [("words", Z, 1.0), ("pairs", Z, 1.0)]
    assert pairs(tmp_path / "again", CROWD, 1)[0] == json.loads((tmp_path / "1.pairs").read_text("utf-8"))


def test_pairs_of_one_client_stay_below_a_threshold_that_has_its_part_of_delta(tmp_path):
    lonely = person("lonely", " ".join(f"secret{k}" for k in range(K + 1)))
    for seed in range(20):
        found, election = pairs(tmp_path, [*CROWD[:500], lonely], seed)
        assert len(found) == K
        assert not any("secret" in pair for pair in found)
    tau = election.account()["threshold"]
    assert tau == pytest.approx(threshold(Z * math.sqrt(K), election.delta / 2, K))  # two votes share the half of δ
    assert tau > threshold(Z * math.sqrt(K), election.delta, K)
    assert read_ledger(tmp_path / "0.privacy").terms.delta == election.delta / 2


def test_a_client_moves_the_counts_of_as_many_pairs_as_agreed_and_each_by_one():
    said = ngrams([" ".join(COMMON * 3), "a b a b a b a"], 2, lower=True, tokenised=True, most=5)
    assert len(said) == 5
    assert {"a b", "b a"} <= said  # the most frequent ones, however long the text
    assert ngrams([" ".join(COMMON)], 2, lower=True, tokenised=True, most=K) == {
        f"{a} {b}" for a, b in pairwise(COMMON)
    }


def test_what_makes_no_vote_under_a_budget_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--most-words"):
        PrivateElection(voting(), tmp_path / "v.json", CLIENTS, None, 1)
    with pytest.raises(ConfigError, match="a vote has one"):
        PrivateElection(voting(1, "privacy.mechanism=tree"), tmp_path / "v.json", CLIENTS, K, 1)
    PrivateElection(voting(), tmp_path / "v.json", CLIENTS, K, 1).elect([["w"]] * CLIENTS, "words", None, 3)
    with pytest.raises(PrivacyError, match="a vote is not repeated"):  # the file was never written; the row was
        PrivateElection(voting(), tmp_path / "v.json", CLIENTS, K, 1)


def vote(path, *settings, **more):
    """A vote on words alone; the files of all of them lie in folders of their own."""
    path.mkdir()
    election = PrivateElection(voting(1, *settings), path / "v.json", CLIENTS, K, 1, **more)
    found = election.elect([COMMON[:K]] * CLIENTS, "words", None, 3)
    return election, dict(zip(found.words, found.votes, strict=True))


def test_two_votes_have_noise_of_their_own_and_seeded_ones_repeat_and_are_simulated(tmp_path):
    (one, a), (two, b) = vote(tmp_path / "a"), vote(tmp_path / "b")
    assert a.keys() == b.keys()
    assert sum(a[word] != b[word] for word in a) > K / 2
    assert one.vote.verdict == one.account()["verdict"] == "GUARANTEE"
    assert one.vote.id != two.vote.id
    (three, c), (_, d) = vote(tmp_path / "c", seeded=True), vote(tmp_path / "d", seeded=True)
    assert c == d
    assert three.vote.verdict == three.account()["verdict"] == "SIMULATED"
    assert "derives from its seed" in three.account()["statement"][0]


def test_votes_on_one_corpus_add_up_wherever_their_files_lie(tmp_path):
    first, _ = vote(tmp_path / "a")
    assert (first.vote.votes, first.vote.all_epsilon) == (1, pytest.approx(first.account()["pld"]))
    assert not any("earlier" in line for line in first.account()["statement"])
    second, _ = vote(tmp_path / "b", "privacy.noise=4", "privacy.delta=1e-6")
    v = second.vote
    assert v.votes == 2
    assert v.all_epsilon == pytest.approx(first.vote.epsilon + v.epsilon)
    assert v.all_delta == pytest.approx(1e-5 + 1e-6)
    assert f"With 1 earlier vote of these clients: (ε, δ) = ({v.all_epsilon:.4g}, 1.1e-05)" in second.account()[
        "statement"
    ][-1]  # fmt: skip
    other, _ = vote(tmp_path / "c", "data.name=wikitext-2")
    assert other.vote.votes == 1
    unseeded = [vote(tmp_path / name, seeded=True)[0] for name in ("d", "e")][1]
    assert "1 of the earlier ones are SIMULATED" in unseeded.account()["statement"][-1]


def test_a_vote_is_in_the_register_before_its_noise_is_drawn(tmp_path, monkeypatch):
    register = register_of(voting().data)
    seen = []
    monkeypatch.setattr(vocabulary, "system", lambda: seen.append(read_votes(register)) or system())
    vote(tmp_path / "a")
    assert [len(votes) for votes in seen] == [1]
    register.write_bytes(register.read_bytes() + b'{"torn')  # killed while a vote was booked: nothing was released
    election, _ = vote(tmp_path / "b")
    assert election.vote.votes == 2
    assert len(read_votes(register)) == 2
    register.write_bytes(b"{}\n")
    with pytest.raises(PrivacyError, match="what was spent is not known"):
        vote(tmp_path / "c")


def test_words_behind_an_elected_vocabulary_add_its_vote_where_the_register_lacks_it(tmp_path):
    elsewhere = Vote("elsewhere", "GUARANTEE", 1.0, 1e-7, 2, 3.0, 2e-7)
    election, _ = vote(tmp_path / "a", known=elsewhere)
    assert (election.vote.votes, election.vote.all_epsilon) == (3, pytest.approx(3 + election.vote.epsilon))
    again, _ = vote(tmp_path / "b", known=election.vote)  # which the register has
    assert again.vote.votes == 2


def test_a_vocabularys_file_carries_its_vote_and_damage_is_said():
    vocab = Vocab("word", (*SPECIALS, "a"), lower=True, tokenised=True)
    elected = replace(vocab, privacy=Vote("id", "GUARANTEE", 1.5, 1e-6, 1, 1.5, 1e-6))
    assert "privacy" not in vocab.to_json()  # files and their sums stay as they were
    assert Vocab.from_json(elected.to_json()).privacy == elected.privacy
    for key, value in (("epsilon", -1), ("epsilon", "2"), ("delta", None), ("verdict", "SAFE"), ("id", 7), ("x", 1)):
        broken = json.loads(elected.to_json())
        broken["privacy"][key] = value
        with pytest.raises(DataError, match="'privacy' should hold"):
            Vocab.from_json(json.dumps(broken))
    for value in (None, [], "GUARANTEE"):
        with pytest.raises(DataError, match="'privacy' should hold"):
            Vocab.from_json(json.dumps({**json.loads(vocab.to_json()), "privacy": value}))


def test_a_few_clients_get_a_bound_and_no_guarantee(tmp_path):
    """The whole δ is judged, of which the ledger has half."""
    election, _ = vote(tmp_path / "a", "privacy.delta=1.5e-3", "privacy.population=600")
    assert election.vote.verdict == "SIMULATED"
    few = PrivateElection(voting(1, "privacy.delta=1.5e-3"), tmp_path / "few.json", 600, K, 1)
    assert few.vote.verdict == few.account()["verdict"] == "BOUND ONLY"
    assert "no meaningful guarantee: δ = 0.0015 is above 0.001" in few.account()["statement"][0]
