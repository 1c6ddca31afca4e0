"""Dealing out by numbers: many authors at once as one by one."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfed.errors import ConfigError, DataError
from keyfed.text import partition as partition_module
from keyfed.text.corpus import Author, Corpus
from keyfed.text.partition import (
    PARTITIONS,
    QUANTITIES,
    TENTHS,
    LineIndex,
    Population,
    _owners,
    _three_parts,
    in_part,
    parse_part,
    partition,
    statistics,
)
from keyfed.text.ragged import bounds_of
from tests.vocabulary import build_vocab

DATA = Path(os.environ.get("KEYFED_DATA", Path(__file__).parents[4] / "shared" / "data"))
POOLED = PARTITIONS[1:]


def corpus_of(*authors: Author, **options: object) -> Corpus:
    defaults: dict[str, object] = {"valid": None, "test": None, "tokenised": True, "natural": True}
    defaults |= {"characters": False, "skipped": (), "about": ""}
    return Corpus("toy", authors, **(defaults | options))


def author(name: str, lines: int, topic: str | None = None, words: int = 3) -> Author:
    return Author(name, tuple(f"{name}{i} " + "w " * (words - 1) for i in range(lines)), topic)


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """Two to twelve authors; every line is unique and has a length of its own."""
    topics = draw(st.booleans())
    authors = []
    for a in range(draw(st.integers(2, 12))):
        lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=25))
        lines = tuple(f"{a}.{i}" + " w" * n for i, n in enumerate(lengths))
        authors.append(Author(f"author{a}", lines, f"topic{a % 3}" if topics else None))
    published = ("published", "lines") if draw(st.booleans()) else None
    test = ("published test",) if draw(st.booleans()) else None
    return corpus_of(*authors, valid=published, test=test, characters=draw(st.booleans()))


def lines_of(population: Population) -> list[str]:
    people = [*population.clients, *population.unseen]
    return [line for p in people for line in (*p.train, *p.valid, *p.test)]


@given(corpora(), st.sampled_from(PARTITIONS), st.integers(0, 3), st.integers(1, 6), st.floats(0.001, 100))
def test_no_line_is_lost_repeated_or_changed(corpus: Corpus, kind: str, seed: int, clients: int, alpha: float) -> None:
    asked = None if kind == "natural" else clients
    lines = [line for a in corpus.authors for line in a.lines]
    trained = partition(corpus, "contiguous", clients=1, seed=seed).clients[0].train
    if kind != "natural" and clients > len(trained):
        with pytest.raises(ConfigError, match="training lines"):
            partition(corpus, kind, clients=clients, seed=seed)
        return
    population = partition(corpus, kind, clients=asked, seed=seed, alpha=alpha)
    found = lines_of(population)
    if corpus.valid is None:
        found += population.valid or ()
    else:
        assert population.valid == corpus.valid
    if corpus.test is None:
        found += population.test or ()
    else:
        assert population.test == corpus.test
    assert Counter(found) == Counter(lines)
    assert population == partition(corpus, kind, clients=asked, seed=seed, alpha=alpha)
    assert all(client.train for client in population.clients)
    assert population.partition == kind
    if kind != "natural":
        assert len(population.clients) == clients
        assert len({client.name for client in population.clients}) == clients


@given(corpora(), st.sampled_from(PARTITIONS), st.integers(0, 3))
def test_training_text_precedes_held_out_text(corpus: Corpus, kind: str, seed: int) -> None:
    population = partition(replace(corpus, valid=None, test=None), kind, clients=1, seed=seed)
    train = {line for client in population.clients for line in client.train}
    valid = {line for client in population.clients for line in client.valid} | {*(population.valid or ())}
    test = {line for client in population.clients for line in client.test} | {*(population.test or ())}
    unseen = {line for client in population.unseen for line in client.test}
    assert not train & (valid | test | unseen)
    assert not valid & test
    for a in corpus.authors:
        if not unseen & {*a.lines}:
            parts = [(line in valid) + 2 * (line in test) for line in a.lines]
            if kind != "natural" or train & {*a.lines}:
                assert parts == sorted(parts)


@given(corpora(), st.sampled_from(["contiguous", "quantity", "dirichlet", "natural"]), st.integers(0, 3))
def test_lines_of_a_client_stay_in_order(corpus: Corpus, kind: str, seed: int) -> None:
    place = {line: i for i, line in enumerate(chain.from_iterable(a.lines for a in corpus.authors))}
    for client in partition(corpus, kind, clients=1, seed=seed).clients:
        places = [place[line] for line in (*client.train, *client.valid, *client.test)]
        assert places == sorted(places)


def test_natural_client_is_cut_in_tenths_by_order() -> None:
    corpus = corpus_of(author("a", 100), author("b", 50))
    a, b = partition(corpus, "natural", clients=None, seed=0, unseen=0).clients
    assert (a.train, a.valid, a.test) == (
        a.train[:80],
        corpus.authors[0].lines[80:90],
        corpus.authors[0].lines[90:],
    )
    assert [len(part) for part in (b.train, b.valid, b.test)] == [40, 5, 5]


def test_tenths_are_counted_in_words_or_in_characters() -> None:
    # 6 words (with ends: 9) after 9 x 9 words; 400 characters in the last line alone.
    lines = (*("w " * 8 for _ in range(9)), "w " * 8 + "x" * 400)
    by_words, by_characters = (
        partition(
            corpus_of(Author("a", lines), characters=characters), "natural", clients=None, seed=0, unseen=0
        ).clients[0]
        for characters in (False, True)
    )
    assert [len(by_words.train), len(by_words.valid), len(by_words.test)] == [8, 1, 1]
    assert len(by_characters.train) == 10


def test_published_split_leaves_whole_text_to_train() -> None:
    corpus = corpus_of(*(author(str(i), 30) for i in range(4)), valid=("v",), test=("t",))
    population = partition(corpus, "natural", clients=None, seed=0, unseen=0)
    assert [c.train for c in population.clients] == [a.lines for a in corpus.authors]
    assert not any(c.valid or c.test for c in population.clients)
    assert (population.valid, population.test) == (("v",), ("t",))


def test_held_out_authors() -> None:
    big, small = [author(f"big{i}", 40) for i in range(20)], [author(f"small{i}", 1) for i in range(20)]
    corpus = corpus_of(*big, *small)

    def names(**options: object) -> list[str]:
        asked: dict[str, object] = {"clients": None, "seed": 0} | options
        return [c.name for c in partition(corpus, "natural", **asked).unseen]

    assert [len(names(unseen=u)) for u in (0.01, 0.1, 0.5)] == [1, 2, 10]
    assert all(name.startswith("big") for seed in range(9) for name in names(seed=seed))
    assert names(clients=3) == names(clients=30) == names()
    assert names() != names(seed=1)
    assert {*names(unseen=0.05)} < {*names()}
    assert names(unseen=0) == []
    population = partition(corpus, "natural", clients=None, seed=0)
    assert all(not c.train and not c.valid and len(c.test) == 40 for c in population.unseen)
    assert not {c.name for c in population.unseen} & {c.name for c in population.clients}


def test_at_least_one_author_of_five_is_held_out_and_never_all() -> None:
    def held(authors: int, unseen: float) -> int:
        corpus = corpus_of(*(author(str(i), 2) for i in range(authors)))
        return len(partition(corpus, "natural", clients=None, seed=0, unseen=unseen).unseen)

    assert [held(n, 0.01) for n in (1, 4, 5, 6)] == [0, 0, 1, 1]
    assert [held(n, 0.99) for n in (1, 2, 5)] == [0, 1, 4]


def test_asking_for_fewer_natural_clients_takes_nested_subsets() -> None:
    corpus = corpus_of(*(author(str(i), 20) for i in range(20)))
    few, more = ({c.name for c in partition(corpus, "natural", clients=n, seed=5).clients} for n in (4, 9))
    assert len(few) == 4
    assert few < more
    with pytest.raises(ConfigError, match="18 authors"):
        partition(corpus, "natural", clients=19, seed=5)


@given(st.integers(1, 12), st.lists(st.integers(1, 40), min_size=14, max_size=14), st.integers(0, 9))
def test_the_natural_clients_with_most_text_are_those_that_sorting_finds(wanted: int, lines: list[int], seed: int):
    corpus = corpus_of(*(author(str(i), n) for i, n in enumerate(lines)))
    everybody = partition(corpus, "natural", clients=None, seed=seed, unseen=0.1)
    found = partition(corpus, "natural", clients=wanted, seed=seed, unseen=0.1, clients_by="text")
    size = {a.name: sum(len(line.split()) + 1 for line in a.lines) for a in corpus.authors}
    by_text = sorted(everybody.clients, key=lambda c: -size[c.name])  # stable: the first of two that are alike
    assert {c.name for c in found.clients} == {c.name for c in by_text[:wanted]}
    assert set(found.clients) <= set(everybody.clients)  # each with the text it has among all
    assert found.unseen == everybody.unseen


@given(st.integers(1, 30), st.integers(30, 90), st.integers(0, 9))
def test_iid_shards_have_equal_line_counts(clients: int, lines: int, seed: int) -> None:
    corpus = corpus_of(author("a", lines), valid=(), test=(), natural=False)
    counts = [len(c.train) for c in partition(corpus, "iid", clients=clients, seed=seed).clients]
    assert max(counts) - min(counts) <= 1


def test_iid_shuffles_lines_by_the_seed_and_has_a_hundred_clients() -> None:
    corpus = corpus_of(author("a", 500), natural=False)
    zero, one = (partition(corpus, "iid", clients=None, seed=seed) for seed in (0, 1))
    assert len(zero.clients) == 100
    assert zero.clients != one.clients
    assert (zero.valid, zero.test) == (one.valid, one.test)
    assert [len(zero.valid or ()), len(zero.test or ())] == [50, 50]
    assert list(zero.clients[0].train) != sorted(zero.clients[0].train, key=corpus.authors[0].lines.index)


def test_contiguous_pieces_are_equal() -> None:
    corpus = corpus_of(author("a", 40), valid=(), test=(), natural=False)
    population = partition(corpus, "contiguous", clients=4, seed=0)
    assert tuple(chain.from_iterable(c.train for c in population.clients)) == corpus.authors[0].lines
    assert [len(c.train) for c in population.clients] == [10] * 4


def test_every_contiguous_client_gets_a_line() -> None:
    long = Author("a", ("w " * 100, *"bcdef"))
    corpus = corpus_of(long, valid=(), test=(), natural=False)
    assert [c.train for c in partition(corpus, "contiguous", clients=6, seed=0).clients] == [
        (line,) for line in long.lines
    ]


def test_quantity_skew_is_the_published_one() -> None:
    assert sum(QUANTITIES) == 120
    corpus = corpus_of(author("a", 240), valid=(), test=(), natural=False)
    ten = partition(corpus, "quantity", clients=None, seed=0)
    assert [len(c.train) for c in ten.clients] == [20, 30, 10, 40, 50, 20, 10, 30, 10, 20]
    twelve = partition(corpus_of(author("a", 145), valid=(), test=()), "quantity", clients=12, seed=0)
    assert [len(c.train) for c in twelve.clients] == [*QUANTITIES, 10, 15]


def test_dirichlet_mixes_topics_the_less_the_smaller_alpha() -> None:
    corpus = corpus_of(*(author(f"{t}{i}", 50, topic=t) for t in "xyz" for i in range(4)))

    def purity(alpha: float) -> float:
        clients = partition(corpus, "dirichlet", clients=10, seed=0, alpha=alpha).clients
        tops = [max(Counter(line[0] for line in c.train).values()) for c in clients]
        return sum(tops) / sum(len(c.train) for c in clients)

    assert purity(0.05) > 0.85
    assert purity(1000) < 0.42


def test_dirichlet_uses_authors_where_there_are_no_topics() -> None:
    corpus = corpus_of(*(author(f"{a}", 50) for a in "abcdef"))
    clients = partition(corpus, "dirichlet", clients=6, seed=3, alpha=0.01).clients
    assert sum(len({line[0] for line in c.train}) for c in clients) < 20
    with pytest.raises(ConfigError, match="has one"):
        partition(corpus_of(author("a", 50)), "dirichlet", clients=5, seed=0)


def test_every_dirichlet_client_gets_a_line() -> None:
    corpus = corpus_of(author("a", 6), author("b", 6), valid=(), test=())
    for seed in range(20):
        for alpha in (1e-9, 0.1, 10.0):
            clients = partition(corpus, "dirichlet", clients=8, seed=seed, alpha=alpha).clients
            assert all(client.train for client in clients)
            assert sum(len(client.train) for client in clients) == 12


@pytest.mark.parametrize("kind", POOLED)
def test_pooled_held_out_text_is_every_authors_tail(kind: str) -> None:
    corpus = corpus_of(author("a", 10), author("b", 20))
    population = partition(corpus, kind, clients=3, seed=0)
    a, b = (x.lines for x in corpus.authors)
    assert population.valid == (*a[8:9], *b[16:18])
    assert population.test == (*a[9:], *b[18:])
    assert not population.unseen
    assert not population.natural


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("iidd", {}, "did you mean iid"),
        ("iid", {"clients": 0}, "at least 1"),
        ("iid", {"clients": 25}, "24 training lines, and 25 clients"),
        ("quantity", {"clients": 25}, "24 training lines"),
        ("iid", {"seed": -1}, "seed"),
        ("natural", {"unseen": 1.0}, "unseen"),
        ("dirichlet", {"alpha": 0.0}, "alpha"),
        ("dirichlet", {"alpha": float("nan")}, "alpha"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        partition(corpus_of(author("a", 30)), kind, **({"clients": None, "seed": 0} | options))


def test_a_pool_has_no_natural_clients() -> None:
    with pytest.raises(ConfigError, match="iid, contiguous, quantity or dirichlet"):
        partition(corpus_of(author("a", 30), natural=False), "natural", clients=None, seed=0)


def test_corpora_without_text_or_with_twins_are_refused() -> None:
    for authors in ((), (Author("a", ()),)):
        with pytest.raises(DataError, match="no text"):
            partition(corpus_of(*authors), "iid", clients=1, seed=0)
    with pytest.raises(DataError, match="2 times"):
        partition(corpus_of(author("a", 3), author("a", 4)), "natural", clients=None, seed=0)
    silent = partition(corpus_of(author("a", 3), Author("b", ())), "natural", clients=None, seed=0)
    assert [c.name for c in silent.clients] == ["a"]


def test_statistics() -> None:
    corpus = corpus_of(author("a", 100), author("b", 10))
    population = partition(corpus, "natural", clients=None, seed=0, unseen=0)
    train = [c.train for c in population.clients]
    vocab, _ = build_vocab(train, kind="word", size=None, lower=False, tokenised=True)
    found = statistics(population, vocab)
    assert found["lines"] == {"train": 88, "valid": 11, "test": 11, "unseen": 0}
    assert found["tokens"] == {"train": 352, "valid": 44, "test": 44, "unseen": 0}
    assert found["tokens_per_client"] == {"min": 32, "q1": 104, "median": 176, "q3": 248, "max": 320}
    assert found["oov"] == {"train": 0.0, "valid": 0.25, "test": 0.25, "unseen": None}
    assert found["gini"] == pytest.approx((320 - 32) / (2 * 352))
    assert (found["clients"], found["unseen"], found["natural"]) == (2, 0, True)


def test_penn_treebank_in_shards() -> None:
    folder = DATA / "ptb"
    if not folder.is_dir():
        pytest.skip(f"no Penn Treebank under {folder}")
    train, valid, test = (
        tuple((folder / f"ptb.{part}.txt").read_text().splitlines()) for part in ("train", "valid", "test")
    )
    corpus = corpus_of(Author("ptb", train), valid=valid, test=test, natural=False)
    population = partition(corpus, "iid", clients=None, seed=1)
    vocab, _ = build_vocab([c.train for c in population.clients], kind="word", size=None, lower=False, tokenised=True)
    found = statistics(population, vocab)
    assert found["clients"] == 100
    assert found["tokens"] == {"train": 929_589, "valid": 73_760, "test": 82_430, "unseen": 0}
    assert {len(c.train) for c in population.clients} == {420, 421}
    assert found["gini"] < 0.03


@given(st.lists(st.text(min_size=1), min_size=1, unique=True, max_size=40), st.integers(1, 5), st.integers(0, 3))
def test_parts_are_disjoint_cover_everybody_and_do_not_depend_on_order(names: list[str], parts: int, seed: int) -> None:
    def members(listed: list[str]) -> list[set[str]]:
        found = []
        for k in range(1, parts + 1):
            try:
                mine = in_part(listed, f"{k}/{parts}", seed)
            except DataError:  # few clients, many parts: some are empty
                mine = [False] * len(listed)
            found.append({name for name, here in zip(listed, mine, strict=True) if here})
        return found

    found = members(names)
    assert sum(map(len, found)) == len(names)
    assert set().union(*found) == set(names)
    assert members(names[::-1]) == found
    assert [part & set(names[1:]) for part in found] == members(names[1:] or names) or len(names) == 1


def test_parts_are_about_equal_and_drawn_by_the_seed() -> None:
    names = [f"client{k}" for k in range(1000)]
    one, two, other = (in_part(names, part, seed) for part, seed in (("1/2", 1), ("2/2", 1), ("1/2", 2)))
    assert 440 < one.sum() < 560  # 500 ± 3.8 standard deviations
    assert (one ^ two).all()
    assert 400 < (one == other).sum() < 600


@pytest.mark.parametrize("kind", ["natural", "iid"])
def test_a_part_trains_on_its_clients_and_is_judged_on_everybody(kind: str) -> None:
    corpus = corpus_of(*(author(f"a{k}", 20) for k in range(12)))
    everybody, first, second = (
        partition(corpus, kind, clients=None if kind == "natural" else 12, seed=1, part=part)
        for part in (None, "1/2", "2/2")
    )
    assert everybody.trained == everybody.clients
    for part in (first, second):
        assert [(c.name, c.valid, c.test) for c in part.clients] == [
            (c.name, c.valid, c.test) for c in everybody.clients
        ]
        assert (part.unseen, part.valid, part.test) == (everybody.unseen, everybody.valid, everybody.test)
        assert all(c.train for c in part.trained)
        assert not any(c.train for c in part.clients if c.name in part.others)
        assert 0 < len(part.trained) < len(everybody.clients)
    assert sorted(c.name for c in (*first.trained, *second.trained)) == sorted(c.name for c in everybody.clients)
    vocab = build_vocab([c.train for c in first.trained], kind="word", size=None, lower=False, tokenised=True)[0]
    assert statistics(first, vocab)["clients"] == len(first.trained)


@pytest.mark.parametrize("text", ["half", "0/2", "3/2", "1/0", "1/", "-1/2", "1.5/2", "1/2/3"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a part of how many, 1/2 or 2/2"):
        parse_part(text)


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_all_authors_are_cut_at_once_as_each_would_be_alone(monkeypatch, block):
    monkeypatch.setattr(partition_module, "BLOCK", block)
    rng = np.random.default_rng(3)
    sizes = [rng.integers(1, 30, rng.integers(1, 60)) for _ in range(300)]
    first = bounds_of(np.array([len(s) for s in sizes]))
    index = LineIndex("toy", [str(k) for k in range(300)], first, np.concatenate(sizes), True)
    for shares in (TENTHS, (0.9, 0.1, 0.0), (0.9, 0.0, 0.1)):
        alone = [np.bincount(_owners(s, shares), minlength=3).tolist() for s in sizes]
        assert _three_parts(index, shares).tolist() == alone


# Equal and unequal lengths of one text


@given(corpora(), st.integers(1, 12), st.integers(0, 3))
def test_equal_and_unequal_pieces_are_the_same_text_in_the_same_order(corpus: Corpus, clients: int, seed: int) -> None:
    whole = partition(corpus, "contiguous", clients=1, seed=seed).clients[0].train
    for kind in ("contiguous", "quantity"):
        population = partition(corpus, kind, clients=min(clients, len(whole)), seed=seed)
        assert tuple(chain.from_iterable(client.train for client in population.clients)) == whole


@given(corpora(), st.sampled_from(PARTITIONS), st.floats(0.01, 1), st.integers(0, 3))
def test_a_share_is_the_first_training_lines_of_every_author(
    corpus: Corpus, kind: str, share: float, seed: int
) -> None:
    whole = partition(corpus, kind, clients=1, seed=seed)
    less = partition(corpus, kind, clients=1, seed=seed, share=share)
    assert (less.valid, less.test, less.unseen) == (whole.valid, whole.test, whole.unseen)
    assert [(c.valid, c.test) for c in less.clients] == [(c.valid, c.test) for c in whole.clients]
    of_all, of_less = ({*chain.from_iterable(c.train for c in found.clients)} for found in (whole, less))
    for written in corpus.authors:
        trained = [line for line in written.lines if line in of_all]
        assert [line for line in trained if line in of_less] == trained[: math.ceil(share * len(trained))]


def test_a_share_of_nothing_or_of_more_than_all_is_refused() -> None:
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="share must be above 0"):
            partition(corpus_of(author("ann", 5)), "contiguous", clients=1, seed=1, share=share)
