"""Weights go where their words go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from keyfed.errors import ConfigError, DataError, ShapeMismatch
from keyfed.model.conformance import predictor_of
from keyfed.model.language_model import ModelSpec, init_params, shapes
from keyfed.run.base import BY_WORD, carry, match_words, refuse_other_architecture
from keyfed.text.vocab import SPECIALS, Vocab

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran"]
SPECS = [
    ModelSpec("tied", "cifg", vocab=14, embed=6, hidden=9, projection=6, tied=True, biases=1),
    ModelSpec("untied", "lstm", vocab=14, embed=5, hidden=7, layers=2),
    ModelSpec("dense", "gru", vocab=14, embed=5, hidden=7, dense=4),
]


def words(*entries: str) -> Vocab:
    return Vocab("word", (*SPECIALS, *entries), lower=True, tokenised=True)


def trained(spec: ModelSpec):
    params = init_params(spec, 3)
    params["output.bias"].normal_(generator=torch.Generator().manual_seed(4))  # not the zeros of a random start
    return params


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("unmatched", ["uniform", "mean"])
def test_to_another_vocabulary_and_back_is_the_identity_on_common_words(spec, unmatched):
    here, there = words(*WORDS), words("bird", *reversed(WORDS[:7]), "flew", "away", "far", "off")
    params = trained(spec)
    away = carry(params, here, replace(spec, vocab=len(there)), there, 1, unmatched)
    back = carry(away.params, there, spec, here, 2, unmatched).params
    common = [here.words.index(w) for w in (*SPECIALS, *WORDS[:7])]
    lost = [here.words.index(w) for w in WORDS[7:]]
    for name, p in params.items():
        if name in BY_WORD:
            assert torch.equal(back[name][common], p[common]), name
            assert not torch.equal(back[name][lost], p[lost]), name
        else:
            assert torch.equal(back[name], p), name
    assert {n: tuple(p.shape) for n, p in away.params.items()} == shapes(replace(spec, vocab=len(there)))
    assert (away.report.rows, away.report.matched) == (16, 11)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_a_permuted_vocabulary_gives_identical_predictions(spec):
    here, there = words(*WORDS), words(*sorted(WORDS))
    params = trained(spec)
    moved = carry(params, here, spec, there, 1)
    tokens = torch.randint(0, len(here), (3, 11), generator=torch.Generator().manual_seed(5))
    number = torch.tensor([there.words.index(w) for w in here.words])  # of each word of `here`, in `there`
    before = predictor_of(spec, params)(tokens)
    after = predictor_of(spec, moved.params)(number[tokens])
    torch.testing.assert_close(after[..., number], before, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after, before)  # the words do stand elsewhere
    assert moved.report.matched == moved.report.rows == len(here)


def test_words_without_a_row_are_drawn_by_seed_and_layer_or_get_the_mean():
    spec, here, there = SPECS[1], words(*WORDS), words("the", "bird", "flew")
    small = replace(spec, vocab=len(there))
    params = trained(spec)
    drawn = [carry(params, here, small, there, seed).params for seed in (1, 1, 2)]
    for name in BY_WORD:
        one, again, other = (p[name][5:] for p in drawn)
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert one.abs().max() <= 0.05
        assert one.abs().min() > 0
        mean = carry(params, here, small, there, 1, "mean").params[name]
        torch.testing.assert_close(mean[5], params[name][4:].mean(0))
        assert torch.equal(mean[5], mean[6])
        assert torch.equal(mean[4], params[name][4])
    assert not torch.equal(drawn[0]["embedding.weight"][5, :5], drawn[0]["output.weight"][5, :5])


def test_the_source_is_left_alone():
    spec, vocab = SPECS[0], words(*WORDS)
    params = trained(spec)
    for p in carry(params, vocab, spec, vocab, 1).params.values():
        p.zero_()
    assert all(torch.equal(params[name], p) for name, p in trained(spec).items())


def test_the_report_counts_training_tokens():
    there = words("the", "bird")
    counts = np.array([0, 0, 10, 5, 80, 5])  # pad bos eos unk the bird
    report = carry(trained(SPECS[1]), words(*WORDS), replace(SPECS[1], vocab=6), there, 1, counts=counts).report
    assert (report.rows, report.matched, report.tokens) == (6, 5, 0.95)


def test_another_architecture_is_refused_with_both_shapes():
    old, new = SPECS[1], replace(SPECS[1], name="mine", hidden=8)
    with pytest.raises(ShapeMismatch, match=r"runs/old has the model untied \(.*hidden 7.*mine \(.*hidden 8"):
        refuse_other_architecture(old, new, "runs/old")
    # A GRU and a CIFG have the same three gates: no shape tells them apart.
    with pytest.raises(ShapeMismatch, match=r"cell gru.*cell cifg"):
        refuse_other_architecture(replace(old, cell="gru"), replace(old, cell="cifg"), "runs/old")
    refuse_other_architecture(old, replace(old, name="other", vocab=99, dropout=0.5), "runs/old")
    with pytest.raises(ShapeMismatch, match=r"rnn.weight_ih_l0.*\[28, 5\].*\[32, 5\]"):
        carry(trained(old), words(*WORDS), new, words(*WORDS), 1)
    with pytest.raises(ShapeMismatch, match=r"output\.weight"):
        carry(trained(replace(SPECS[0], tied=False)), words(*WORDS), SPECS[0], words(*WORDS), 1)


def test_words_and_characters_do_not_mix_and_nothing_in_common_is_an_error():
    letters = Vocab("char", (*SPECIALS, "a", "b"), lower=False, tokenised=False)
    with pytest.raises(ConfigError, match="reads words and this one chars"):
        match_words(words("a", "b"), letters)
    with pytest.raises(DataError, match=r"none of the 2 words.*among the 10"):
        match_words(words(*WORDS), words("der", "hund"))
