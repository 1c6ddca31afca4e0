"""What one client sends, and what a server makes of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from inspect import signature
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.cli import data
from keyfed.errors import ConfigError, DataError
from keyfed.run.vocabulary import ngrams
from keyfed.text.vocab import (
    MIN_CLIENTS,
    MOST_WORDS,
    SPECIALS,
    Vocab,
    ballot,
    elect,
    elect_privately,
    threshold,
)

WORDS = st.sampled_from(["a", "b", "c", "d", "e", "é", "B", "<unk>", "<eos>"])
CLIENTS = st.lists(st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=5), min_size=1, max_size=8)


def vote(*lines: str, **options) -> frozenset[str]:
    return ballot(lines, **{"kind": "word", "lower": False, "tokenised": True} | options)


def test_a_word_of_one_client_never_enters_however_often_it_is_used():
    ballots = [vote("secret " * 10_000 + "the"), vote("the"), vote("the")]
    assert elect(ballots, size=None).words == ("the",)
    assert elect(ballots, size=None, min_clients=2).words == ("the",)
    # Nor if that client reports it many times over.
    assert elect([["secret"] * 50 + ["the"], ["the"], ["the"]], size=None, min_clients=2).words == ("the",)


@given(clients=CLIENTS, data=st.data())
def test_neither_the_order_of_clients_nor_of_their_lines_matters(clients, data):
    options = {"size": data.draw(st.none() | st.integers(5, 9)), "min_clients": 1, "allow_single": True}
    if not any(vote(*lines) for lines in clients):
        with pytest.raises(DataError, match="empty"):
            elect([vote(*lines) for lines in clients], **options)
        return
    most = data.draw(st.integers(1, 4))
    first = elect([vote(*lines, most_words=most) for lines in clients], **options)
    shuffled = [data.draw(st.permutations(lines)) for lines in data.draw(st.permutations(clients))]
    assert elect((vote(*lines, most_words=most) for lines in shuffled), **options) == first


@given(clients=CLIENTS, min_clients=st.integers(2, 4), size=st.none() | st.integers(5, 8))
def test_an_election_is_a_recount(clients, min_clients, size):
    votes = Counter(word for lines in clients for word in {w for line in lines for w in line.split()})
    votes = Counter({word: n for word, n in votes.items() if word not in SPECIALS})
    enough = sorted((-n, word) for word, n in votes.items() if n >= min_clients)
    ballots = [vote(*lines) for lines in clients]
    if not enough:
        with pytest.raises(DataError):
            elect(ballots, size=size, min_clients=min_clients)
        return
    found = elect(ballots, size=size, min_clients=min_clients)
    kept = enough if size is None else enough[: size - 4]
    assert list(zip(found.votes, found.words, strict=True)) == [(-n, word) for n, word in kept]
    assert found.ballots == len(clients)
    assert found.types == len(votes)
    assert found.too_few == len(votes) - len(enough)
    assert found.no_room == len(enough) - len(kept)


def test_the_cap_keeps_the_most_frequent_words_and_ties_go_by_the_word():
    lines = ("d d d b b c c a", "e e")
    assert vote(*lines, most_words=1) == {"d"}
    assert vote(*lines, most_words=3) == {"d", "b", "c"}  # b, c and e are used twice
    assert vote(*lines, most_words=None) == {"a", "b", "c", "d", "e"}
    assert len(vote(" ".join(f"w{n}" for n in range(MOST_WORDS + 5)))) == MOST_WORDS


def test_known_words_are_not_sent_and_take_no_place():
    said = vote("the the the the b b b a a c", most_words=2, known={"the", "b"})
    assert said == {"a", "c"}
    assert vote("the", known={"the"}) == frozenset()


def test_a_vocabulary_keeps_its_numbers_and_the_new_words_come_behind():
    known = Vocab("word", (*SPECIALS, "the", "a"), lower=True, tokenised=True)
    wider = elect([{"x", "y"}, {"y"}, {"y", "x"}, {"y", "x"}], size=None).beyond(known)
    assert wider.words == (*SPECIALS, "the", "a", "y", "x")
    assert (wider.kind, wider.lower, wider.tokenised) == ("word", True, True)
    assert all(wider.index[word] == number for word, number in known.index.items())


def test_least_uses_counts_over_all_lines_of_the_client():
    assert vote("a b", "a c", "c a", least_uses=2) == {"a", "c"}
    assert vote("a b", "a c", "c a", least_uses=3) == {"a"}
    assert vote("a b", least_uses=2) == frozenset()


def test_ties_between_words_go_by_the_word_and_size_counts_the_specials():
    ballots = [{"b", "a", "c"}, {"c", "a", "b"}, {"z", "c"}, {"z"}]
    found = elect(ballots, size=6, min_clients=2)
    assert found.words == ("c", "a")
    assert (found.votes, found.no_room, found.too_few) == ((3, 2), 2, 0)
    assert len(found.vocab("word", lower=True, tokenised=True)) == 6


def test_an_elected_vocabulary_makes_the_round_trip_through_json():
    found = elect([{"the", "é", '"', "😀"}] * 3, size=None).vocab("word", lower=True, tokenised=False)
    assert Vocab.from_json(found.to_json()) == found
    assert found.words == (*SPECIALS, '"', "the", "é", "😀")


def test_lines_that_hold_nothing_or_oddities_make_no_words_of_their_own():
    odd = ["", "   ", "\t\n", "<unk> <pad> <bos> <eos>", "\x00", "a\nb", "\ud800", "\u00a0\u2028"]
    assert vote(*odd) == {"\x00", "a", "b", "\ud800"}
    assert not ballot(odd[:4], kind="word", lower=True, tokenised=False)
    found = elect([vote(*odd)] * 3, size=None).vocab("word", lower=False, tokenised=True)
    assert Vocab.from_json(found.to_json()) == found


def test_characters_are_elected_like_words():
    ballots = [ballot(lines, kind="char", lower=False, tokenised=False) for lines in (["ab\nc"], ["B a"], ["a c"])]
    assert elect(ballots, size=None).vocab("char", lower=False, tokenised=False).words[4:] == (" ", "a")


def test_specials_on_a_ballot_do_not_enter():
    assert elect([["<unk>", "a"]] * 3, size=None).words == ("a",)


def test_a_single_client_is_never_enough_unless_allowed():
    with pytest.raises(ConfigError, match="single person"):
        elect([{"a"}], size=None, min_clients=1)
    assert elect([{"a"}], size=None, min_clients=1, allow_single=True).words == ("a",)
    assert MIN_CLIENTS >= 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"size": 4}, "no room"), ({"min_clients": 0}, "at least 1"), ({"min_clients": -2}, "at least 1")],
)
def test_numbers_without_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        elect([{"a"}], **{"size": None, **wrong})


@pytest.mark.parametrize("wrong", [{"least_uses": 0}, {"most_words": 0}])
def test_ballots_without_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match="at least 1"):
        vote("a", **wrong)


def test_nothing_elected_is_an_error():
    with pytest.raises(DataError, match="empty"):
        elect([], size=None)
    with pytest.raises(DataError, match="3 or more of the 2 clients"):
        elect([{"a"}, {"a"}], size=None)


def test_ballots_are_read_one_at_a_time():
    alive = []

    def ballots():
        for k in range(5):
            alive.append(k)
            yield {"a", f"w{k}"}

    assert elect(ballots(), size=None).ballots == len(alive) == 5


def test_the_command_line_has_the_same_cap():
    assert signature(data.vocab).parameters["most_words"].default == MOST_WORDS


def gaussian(seed):
    draw = random.Random(seed)
    return lambda count: [draw.gauss(0, 1) for _ in range(count)]


def without_noise(count):
    return [0.0] * count


@pytest.mark.parametrize(("sigma", "delta", "words"), [(10.0, 1e-6, 100), (1.0, 1e-9, 1), (50.0, 1e-10, 4000)])
def test_a_lonely_clients_words_pass_with_chance_delta_at_most(sigma, delta, words):
    tau = threshold(sigma, delta, words)
    one_passes = NormalDist(1, sigma).cdf(2 - tau)  # P(1 + noise ≥ τ), by symmetry about 1
    assert words * one_passes <= delta / 2 * 1.001
    assert -math.expm1(words * math.log1p(-one_passes)) == pytest.approx(delta / 2, rel=1e-4)


def test_words_of_few_clients_never_pass_in_ten_thousand_votes():
    crowd = [{"the", "of"}] * 400
    for seed in range(200):
        lonely = {f"secret{k}" for k in range(50)}
        found = elect_privately([*crowd, lonely], size=None, most_words=50, sigma=20.0, delta=1e-6, draw=gaussian(seed))
        assert not set(found.words) & lonely  # 10,000 words of one client


def test_counts_are_those_of_clients_where_there_is_no_noise():
    found = elect_privately(
        [{"a", "b"}, {"a"}, {"a", "b", "c"}], size=None, most_words=3, sigma=1e-9, delta=1e-6, draw=without_noise,
        min_clients=2,
    )  # fmt: skip
    assert found.words == ("a", "b")
    assert found.votes == (3, 2)
    assert (found.ballots, found.types, found.too_few) == (0, 0, 0)  # not noised, not told


def test_the_noise_is_added_to_every_count():
    crowd = [{f"w{k}" for k in range(300)}] * 1_000
    found = elect_privately(crowd, size=None, most_words=300, sigma=30.0, delta=1e-6, draw=gaussian(1))
    spread = [v - 1_000 for v in found.votes]
    assert len(spread) == 300
    assert math.sqrt(sum(x * x for x in spread) / 300) == pytest.approx(30, rel=0.15)


def test_a_ballot_that_is_too_long_is_refused():
    with pytest.raises(DataError, match="agreed"):
        elect_privately([{"a", "b"}], size=None, most_words=1, sigma=1.0, delta=1e-6, draw=without_noise)


def test_too_few_clients_say_what_to_do():
    with pytest.raises(DataError, match="--most-words"):
        elect_privately([{"a"}] * 10, size=None, most_words=100, sigma=10.0, delta=1e-6, draw=without_noise)


def test_an_imagined_fleet_scales_noise_and_threshold():
    found = elect_privately(
        [{"a"}] * 10 + [{"b"}],
        size=6,
        most_words=1,
        sigma=10.0,
        delta=1e-6,
        draw=gaussian(2),
        scale=1e-4,
        min_clients=2,
    )
    assert found.words == ("a",)
    assert found.votes == (10,)


def test_pairs_of_words():
    said = ngrams(["the cat sat", "the cat ran"], 2, lower=True, tokenised=True, most=3)
    assert "the cat" in said
    assert len(said) == 3
    assert ngrams(["one"], 2, lower=True, tokenised=True, most=3) == frozenset()
