"""Votes under a budget: counts of words and of pairs have the noise and the threshold that their ledger speaks of."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from keyfed.config import Config, apply_settings
from keyfed.errors import ConfigError, PrivacyError
from keyfed.private.budget import read_ledger
from keyfed.run.private_vocabulary import PrivateElection
from keyfed.text.clients import ClientText
from keyfed.text.private_ballots import ngrams, threshold

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
    election = PrivateElection(voting(seed), path / f"{seed}.json", CLIENTS, K, 2)
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
