"""The conformance suite passes correct models and fails each broken one on exactly the checks it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keyfed.errors import DataError, ShapeMismatch
from keyfed.model import language_model as lm
from keyfed.model.conformance import (
    FEWEST_WINDOWS,
    WINDOW,
    Check,
    check_model,
    check_vocabulary,
    masked_mean_nats,
    passed,
    predictor_of,
)
from keyfed.model.output import output_gradients

VOCAB, PAD, FIRST = 12, 0, 4  # ids 4…11 occur in the text

CONTEXT, CAUSAL, ROWS = "context is used", "causal", "rows independent"
PADDING, PROBABILITIES, REPEATS = "padding neutral", "probabilities", "evaluation repeats"
ALL = {CONTEXT, CAUSAL, ROWS, PADDING, PROBABILITIES, REPEATS}


def markov(tokens: int, seed: int) -> np.ndarray:
    """Return a stream in which two tokens fix the next in 9 of 10 cases, and one token says little."""
    n = VOCAB - FIRST
    table = np.random.default_rng(0).permuted(np.tile(np.arange(n), (n, 1)), axis=1)
    rng = np.random.default_rng(seed)
    noise, chance = rng.random(tokens) < 0.1, rng.integers(0, n, tokens)
    out = [0, 1]
    for t in range(2, tokens):
        out.append(int(chance[t] if noise[t] else table[out[-2], out[-1]]))
    return np.array(out, np.int32) + FIRST


TRAIN, HELD_OUT = markov(20_000, seed=1), markov(6_000, seed=2)


def batches(steps: int, rows: int = 64, time: int = 10) -> list[Tensor]:
    starts = np.random.default_rng(3).integers(0, len(TRAIN) - time - 1, (steps, rows))
    return [torch.from_numpy(TRAIN[s[:, None] + np.arange(time + 1)].astype(np.int64)) for s in starts]


class Model(nn.Module):
    """A correct model: embedding, recurrence over time, output layer."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"batch_first": True} | options
        self.embedding = nn.Embedding(VOCAB, 16)
        self.rnn = kind(16, 32, **options)
        self.output = nn.Linear(64 if options.get("bidirectional") else 32, VOCAB)

    def forward(self, tokens: Tensor) -> Any:
        return self.output(self.rnn(self.embedding(tokens))[0])


def fit(model: nn.Module, steps: int = 150) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for window in batches(steps):
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small lose more by sharing a step between threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(one_thread: None) -> dict[str, Tensor]:
    """Weights of the correct GRU; broken models take them over, so that only the defect differs."""
    return fit(Model()).state_dict()


def failures(model: Any, **options: Any) -> dict[str, str]:
    checks = check_model(model, HELD_OUT, vocab_size=VOCAB, pad=PAD, **options)
    assert {check.name for check in checks} == ALL
    return {check.name: check.detail for check in checks if not check.passed}


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_correct_module_passes(kind: type[nn.RNNBase]) -> None:
    checks = check_model(fit(Model(kind)), torch.from_numpy(HELD_OUT), vocab_size=VOCAB)
    assert passed(checks), checks


@pytest.mark.parametrize(
    "spec",
    [
        lm.ModelSpec("gru", "gru", VOCAB, embed=24, hidden=24, tied=True),
        lm.ModelSpec("lstm", "lstm", VOCAB, embed=16, hidden=32, layers=2, dropout=0.5),
        lm.ModelSpec("cifg", "cifg", VOCAB, embed=24, hidden=48, projection=24, tied=True, biases=1),
    ],
    ids=lambda spec: spec.name,
)
def test_our_models_pass(spec: lm.ModelSpec) -> None:
    params = {name: p.requires_grad_() for name, p in lm.init_params(spec, seed=0).items()}
    optimiser = torch.optim.Adam(params.values(), lr=0.02)
    for window in batches(220, time=6):
        loss = masked_mean_nats(predictor_of(spec, params)(window[:, :-1]), window[:, 1:], torch.ones(len(window), 6))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert failures(predictor_of(spec, params)) == {}


def test_predictor_of_scores_as_the_output_layer_does() -> None:
    spec = lm.ModelSpec("small", "lstm", VOCAB, embed=6, hidden=8, layers=2, dense=5)
    params = lm.init_params(spec, seed=1, dtype=torch.float64)
    inputs, targets = batches(1)[0][None, :4, :-1], batches(1)[0][None, :4, 1:]
    mask = (torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0)) < 0.7).double()
    stacked = lm.stack(params, 1)
    state = lm.initial_state(spec, stacked, 4)
    x, _ = lm.features(spec, stacked, inputs, state)
    _, scale, flat = lm.loss_weights(lm.Batch(inputs, targets, mask), x.dtype)
    want = output_gradients(x.reshape(1, -1, x.shape[-1]), *lm.output_layer(spec, stacked), flat, scale, {}).loss
    got = masked_mean_nats(predictor_of(spec, params)(inputs[0]), targets[0], mask[0])
    torch.testing.assert_close(got, want[0])
    with pytest.raises(ShapeMismatch, match=r"output\.bias"):
        predictor_of(spec, params | {"output.bias": torch.zeros(3)})


# Broken models


class Bidirectional(Model):
    """Trained forward weights, and a backward layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.backward_rnn = nn.GRU(16, 32, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.output(self.rnn(x)[0] + 0.1 * self.backward_rnn(x.flip(1))[0].flip(1))


class DropoutLeftOn(Model):
    def train(self, mode: bool = True) -> DropoutLeftOn:
        return super().train(True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(F.dropout(self.rnn(self.embedding(tokens))[0], 0.1, self.training))


class StateKept(Model):
    state: Tensor | None = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.state is not None and self.state.shape[1] != len(tokens):
            self.state = None
        x, self.state = self.rnn(self.embedding(tokens), self.state)
        return self.output(x), self.state


class StateShared(Model):
    """Every row starts from the state in which the row above ended."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows, state = [], None
        for row in tokens:
            x, state = self.rnn(self.embedding(row[None]), state)
            rows.append(self.output(x))
        return torch.cat(rows)


class BatchStatistics(Model):
    """Normalisation over the rows at every place, as a layer left in training mode does it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.output(self.rnn(x - 0.3 * x.mean(0, keepdim=True))[0])


class PadsAtTheLeft(Model):
    """Moves the padding of a row in front of its text."""

    def forward(self, tokens: Tensor) -> Tensor:
        order = torch.argsort((tokens != PAD).long(), dim=1, stable=True)
        return super().forward(tokens.gather(1, order))


class CountsFromTheEnd(Model):
    """Positions relative to the end of the row: a longer batch shifts them all, a changed token does not."""

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1]).flip(0)[:, None]
        return self.output(self.rnn(self.embedding(tokens) + 0.1 * torch.cos(place))[0])


class Bigram(Model):
    """Forgets its state at every token."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)[:, None]
        return self.output(self.rnn(x)[0]).view(*tokens.shape, VOCAB)


class Probabilities(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).softmax(-1)


class Infinite(Model):
    """Masks the padding's logit: a correct distribution, not a finite one."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).index_fill(-1, torch.tensor([PAD]), -torch.inf)


@pytest.mark.parametrize(
    ("broken", "expected", "word"),
    [
        (Bidirectional, {CAUSAL, PADDING}, "bidirectional"),
        (DropoutLeftOn, {CAUSAL, ROWS, PADDING, REPEATS}, "ropout"),
        (StateKept, {CAUSAL, ROWS, PADDING, REPEATS}, "state kept"),
        (StateShared, {CAUSAL, ROWS, PADDING}, "shared by all rows"),
        (BatchStatistics, {ROWS, PADDING}, "normalisation"),
        (PadsAtTheLeft, {PADDING}, "at the left"),
        (CountsFromTheEnd, {PADDING}, "from the end"),
        (Bigram, {CONTEXT}, "only the last token is used"),
        (Probabilities, {PROBABILITIES}, "softmax"),
        (Infinite, {PROBABILITIES}, "finite"),
    ],
)
def test_broken_model_fails(
    broken: Callable[[], Model], expected: set[str], word: str, trained: dict[str, Tensor]
) -> None:
    model = broken()
    model.load_state_dict(trained, strict=False)
    failed = failures(model)
    assert set(failed) == expected, failed
    assert any(word in detail for detail in failed.values()), failed


def test_recurrence_over_the_batch_axis() -> None:
    """The defect behind two published tables: trained like this, the model is a bigram and looks healthy."""
    model = fit(Model(nn.LSTM, batch_first=False))
    failed = failures(model)
    assert set(failed) == {CONTEXT, ROWS, PADDING}, failed
    assert "batch_first" in failed[CONTEXT]
    assert "+0.0000 ± 0.0000" in failed[CONTEXT]  # exactly nothing, not nothing within the error


def test_bidirectional_layer_trained_on_its_targets() -> None:
    """A model that could copy its targets in training also knows little when there is nothing to copy."""
    failed = failures(fit(Model(nn.LSTM, bidirectional=True)))
    assert {CAUSAL, PADDING} <= set(failed) <= {CAUSAL, PADDING, CONTEXT}, failed


def test_unigram_uses_no_context() -> None:
    counts = torch.from_numpy(np.bincount(TRAIN, minlength=VOCAB) + 1.0).log()
    failed = failures(lambda tokens: counts.expand(*tokens.shape, VOCAB))
    assert set(failed) == {CONTEXT}
    assert "no context is used" in failed[CONTEXT]


def test_loss_that_counts_padding(trained: dict[str, Tensor]) -> None:
    model = Model()
    model.load_state_dict(trained)

    def everything(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def mean_of_means(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        nats = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * mask
        return (nats.sum(1) / mask.sum(1).clamp(min=1)).mean()

    def ignored(logits: Tensor, targets: Tensor, mask: Tensor) -> float:
        return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD))

    for loss in (everything, mean_of_means):
        failed = failures(model, loss=loss)
        assert set(failed) == {PADDING}
        assert "padding is counted in the loss" in failed[PADDING]
    assert failures(model, loss=ignored) == {}


# The suite itself


def test_exception_is_a_failed_check_and_the_rest_run(trained: dict[str, Tensor]) -> None:
    class FixedBatch(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            if len(tokens) == 1:
                raise ValueError("no batch of one, please")
            return super().forward(tokens)

    model = FixedBatch()
    model.load_state_dict(trained)
    failed = failures(model)
    assert set(failed) == {ROWS}
    assert failed[ROWS] == "raised ValueError: no batch of one, please"


def test_wrong_shape_is_said() -> None:
    class TimeFirst(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).transpose(0, 1)

    failed = failures(TimeFirst())
    assert set(failed) == ALL
    assert f"tokens [6, {WINDOW}] gave logits [{WINDOW}, 6, {VOCAB}]" in failed[PROBABILITIES]
    assert "batch_first" in failed[PROBABILITIES]
    assert "every token read" in failures(lambda t: torch.zeros(len(t), VOCAB))[PROBABILITIES]


def test_not_a_number_never_passes_as_unchanged(trained: dict[str, Tensor]) -> None:
    model = Model()
    model.load_state_dict(trained)
    model.output.bias.data[5] = torch.nan
    assert set(failures(model)) == ALL


def test_modes_are_restored(trained: dict[str, Tensor]) -> None:
    class WithDropout(Model):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.drop = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.output(self.frozen(self.drop(self.rnn(self.embedding(tokens))[0])))

    model = WithDropout()
    model.load_state_dict(trained)
    model.train()
    model.frozen.eval()
    assert failures(model) == {}
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert all(p.grad is None for p in model.parameters())


def test_half_precision_is_judged_by_its_own_rounding(trained: dict[str, Tensor]) -> None:
    model = Model()
    model.load_state_dict(trained)
    assert failures(model.to(torch.bfloat16)) == {}


def test_same_seed_same_result(trained: dict[str, Tensor]) -> None:
    model = Model()
    model.load_state_dict(trained)
    before = torch.get_rng_state()
    one, two, three = (check_model(model, HELD_OUT, vocab_size=VOCAB, seed=seed) for seed in (0, 0, 1))
    assert one == two
    assert one[0].detail != three[0].detail
    assert torch.equal(torch.get_rng_state(), before)


def test_text_that_cannot_be_used() -> None:
    need = FEWEST_WINDOWS * (WINDOW + 1)
    model = Model()
    assert len(check_model(model, HELD_OUT[:need], vocab_size=VOCAB)) == len(ALL)
    with pytest.raises(DataError, match=f"{need - 1} tokens.*at least {need}"):
        check_model(model, HELD_OUT[: need - 1], vocab_size=VOCAB)
    with pytest.raises(DataError, match="from 4 to 11 in a vocabulary of 11"):
        check_model(model, HELD_OUT, vocab_size=11)
    with pytest.raises(DataError, match=r"\[tokens\]"):
        check_model(model, HELD_OUT.reshape(2, -1), vocab_size=VOCAB)
    with pytest.raises(DataError, match="float64"):
        check_model(model, HELD_OUT.astype(float), vocab_size=VOCAB)


def test_vocabulary_from_the_test_file() -> None:
    specials = ["<pad>", "<unk>"]
    vocabulary = [*specials, "the", "cat", "glove"]
    good = check_vocabulary(vocabulary, ["the", "cat", "sat"], ["the", "dog", "<unk>"], specials)
    assert good.passed, good
    bad = check_vocabulary([*vocabulary, "dog"], ["the", "cat"], ["the", "dog"], specials)
    assert not bad.passed
    assert "1 of 6 words" in bad.detail
    assert "(dog)" in bad.detail
    many = check_vocabulary(list("abcdefg"), [], set("abcdefg"), [])
    assert "(a, b, c, d, e, …)" in many.detail


def test_passed() -> None:
    good, bad = Check("a", True, ""), Check("b", False, "")
    assert passed([good, good])
    assert not passed([good, bad])
    assert not passed([])
