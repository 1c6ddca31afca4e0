"""Files of counts and mixtures: what is written is read back, and what was damaged is refused."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest

from keyfed.errors import RunError
from keyfed.model.counts import CountModel, CountTerms, counts_from_bytes, counts_to_bytes, terms_of
from keyfed.model.mixture import COUNTED, Contexts, Mixture, buckets, fit_weights, histogram, mixture_of, places_of
from keyfed.model.ngram import fit_kneser_ney

V = 7
STREAMS = [np.array([4, 5, 2, 4, 5, 6, 2, 4, 5, 2]), np.array([5, 6, 2, 4, 4, 5, 2])]
ABOUT = CountTerms(k=3, cap=4, most=100, clients=12, vocab_sha256="ab" * 32)


def model(order=3, least=3):
    """A count model of so many n-grams; numbers of clients are invented."""
    fitted = fit_kneser_ney(STREAMS, V, order)
    numbers = tuple(np.arange(len(level.keys)) % 4 + least for level in fitted.levels)
    return CountModel(fitted, numbers, tuple(3 * n for n in numbers), ABOUT)


def test_counts_are_read_back_as_they_were_written():
    written = model()
    read = counts_from_bytes(counts_to_bytes(written), V, "counts")
    assert read.about == ABOUT
    assert [a.tolist() for a in (*read.clients, *read.counts)] == [
        a.tolist() for a in (*written.clients, *written.counts)
    ]
    for context in ([], [4], [4, 5], [6, 6, 6]):
        np.testing.assert_allclose(read.model.next(np.array(context, int)), written.model.next(np.array(context, int)),
                                   rtol=1e-6)  # fmt: skip


def test_grams_are_the_words_of_the_rows():
    grams = model().grams(2).tolist()
    seen = sorted({(int(a), int(b)) for s in STREAMS for a, b in pairwise(s)})
    assert [tuple(g) for g in grams] == seen


def test_a_file_with_an_n_gram_of_too_few_clients_is_refused():
    with pytest.raises(RunError, match="has 2 clients, and k is 3"):
        counts_from_bytes(counts_to_bytes(model(least=2)), V, "counts")


@pytest.mark.parametrize("at", [0, 4, 60, 900, -1])
def test_a_damaged_file_is_one_line(at):
    data = bytearray(counts_to_bytes(model()))
    data = data[:-1] if at == -1 else data
    data[at] = 255
    with pytest.raises(RunError, match="counts is damaged"):
        counts_from_bytes(bytes(data), V, "counts")


def test_a_file_of_another_vocabulary_is_refused():
    with pytest.raises(RunError, match="the vocabulary has 5"):
        counts_from_bytes(counts_to_bytes(model()), 5, "counts")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": 2}, "k is 2, expected 3 or more"),
        ({"k": True}, "k is True"),
        ({"clients": 2}, "clients is 2"),
        ({"k": 3, "clients": 3.0}, "clients is 3.0"),
        ({"k": 13}, "it is of 12 clients, and k is 13"),
        ({"cap": 0}, "cap is 0"),
        ({"most": -1}, "most is -1"),
        ({"vocab_sha256": 5}, "vocab_sha256"),
        ({"verdict": "GUARANTEE"}, "'GUARANTEE' without epsilon"),
        ({"epsilon": 2.0, "verdict": "SIMULATED"}, "delta is None"),
        ({"delta": 1e-6}, "epsilon is None"),
        ({"epsilon": 0.0, "delta": 1e-6, "verdict": "SIMULATED"}, "epsilon is 0.0"),
        ({"epsilon": float("inf"), "delta": 1e-6, "verdict": "SIMULATED"}, "epsilon is inf"),
        ({"epsilon": float("nan"), "delta": 1e-6, "verdict": "SIMULATED"}, "epsilon is nan"),
        ({"epsilon": "2", "delta": 1e-6, "verdict": "SIMULATED"}, "epsilon is '2'"),
        ({"epsilon": 2.0, "delta": 1.0, "verdict": "SIMULATED"}, "delta is 1.0"),
        ({"epsilon": 2.0, "delta": 1e-6}, "its verdict is 'NONE', expected one of"),
        ({"epsilon": 2.0, "delta": 1e-6, "verdict": "proved"}, "its verdict is 'proved'"),
    ],
)
def test_terms_that_no_count_has_are_refused(changed, said):
    text = json.dumps({**asdict(ABOUT), **changed})
    with pytest.raises(ValueError, match=said):
        terms_of(text)


def test_terms_with_noise_are_read_back():
    noised = replace(ABOUT, epsilon=2.0, delta=1e-6, verdict="SIMULATED")
    assert terms_of(json.dumps(asdict(noised))) == noised


def test_the_place_of_a_context_is_its_longest_match_and_its_count_or_best_continuation():
    found = model(order=2)
    stream = np.array([4, 5, 1, 2])
    places = places_of(found, stream, Contexts("count", (1,)))
    assert places.tolist() == [3, 3, 1]  # after 4 and after 5 a word; 1 never occurs, so the empty context
    first, second = found.model.levels
    best = [second.prob[second.keys // found.model.vocab_size == first.find(np.array([w]))[0]].max() for w in (4, 5)]
    middle = sum(best) / 2
    assert min(best) < middle
    places = places_of(found, stream, Contexts("best", (middle,)))
    assert places.tolist() == [2 + int(best[0] > middle), 2 + int(best[1] > middle), int(first.prob.max() > middle)]


def test_a_mixture_of_format_1_is_one_by_counts():
    weights = np.linspace(0, 1, 2 * 4 * 6).reshape(2, 4, 6).tolist()
    edges = {"count_edges": [10, 100, 1000], "confidence_edges": [0.05, 0.1, 0.2, 0.4, 0.7]}
    old = json.dumps({"format": 1, "order": 2, **edges, "weights": weights})
    found = Mixture.from_json(old, "here")
    assert found == mixture_of(np.linspace(0, 1, 48), 2, COUNTED)
    assert found.contexts == COUNTED
    assert Mixture.from_json(found.to_json(), "here") == found
    with pytest.raises(RunError, match="told apart by 'length'"):
        Mixture.from_json(found.to_json().replace('"count"', '"length"'), "here")


def test_weights_are_those_of_the_two_distributions_that_the_tokens_came_from():
    """Of tokens drawn from λp + (1 − λ)q EM finds λ, bucket by bucket."""
    random = np.random.default_rng(3)
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.1, 0.3, 0.6])
    for share in (0.2, 0.8):
        drawn = random.choice(3, 40_000, p=share * p + (1 - share) * q)
        found = histogram(np.zeros(40_000, int), np.log2(p / q)[drawn], rows=1)
        assert fit_weights(found)[0] == pytest.approx(share, abs=0.03)


def test_a_bucket_with_few_tokens_has_the_weight_of_all_together():
    found = np.zeros((3, 256))
    found[0, 200], found[0, 60], found[1, 60] = 900, 100, 3
    weights = fit_weights(found)
    together = fit_weights(found.sum(0, keepdims=True))[0]
    assert weights[1] == weights[2] == together != weights[0]


def test_a_mixture_is_read_back_and_damage_is_refused():
    mixture = mixture_of(np.linspace(0, 1, 2 * 4 * 6), order=2)
    assert Mixture.from_json(mixture.to_json(), "here") == mixture
    where = buckets(np.array([0, 7]), np.array([0.01, 0.99]))
    np.testing.assert_array_equal(
        mixture.weight(np.array([0, 7]), np.array([0.01, 0.99])), np.linspace(0, 1, 48)[where]
    )
    fitted = replace(mixture, counts_sha256="ab" * 32)
    assert Mixture.from_json(fitted.to_json(), "here") == fitted
    with pytest.raises(RunError, match="counts_sha256 is 5"):
        Mixture.from_json(replace(mixture, counts_sha256=5).to_json(), "here")
    for text in ("", "[]", "[" * 100_000, mixture.to_json().replace("0.05", "5"), '{"format": 2}'):
        with pytest.raises(RunError, match="here is damaged"):
            Mixture.from_json(text, "here")
    with pytest.raises(RunError, match="expected"):
        Mixture.from_json(replace(mixture, order=3).to_json(), "here")


def test_weights_stay_within_0_and_1_whatever_the_noise():
    found = np.random.default_rng(1).normal(0, 40, (50, 256))
    found[:, 160:] = np.abs(found[:, 160:])
    found[:, :160] = 0
    weights = fit_weights(found)
    assert ((weights >= 0) & (weights <= 1)).all()
