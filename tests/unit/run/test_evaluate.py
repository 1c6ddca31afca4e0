"""Reading long streams in pieces gives what reading them in order gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import SpecReader, reader_of
from keyfed.model import language_model as lm
from keyfed.model.language_model import ModelSpec, Params
from keyfed.model.ngram import fit_kneser_ney, fit_unigram
from keyfed.model.output import Score
from keyfed.run import evaluate as evaluate_module
from keyfed.run.evaluate import (
    Piece,
    Side,
    by_line,
    cut,
    evaluate,
    evaluate_ngram,
    evaluate_ngram_sentences,
    evaluate_sentences,
    limit_streams,
    score_of,
    total,
)  # fmt: skip
from keyfed.text.vocab import BOS, EOS

VOCAB, WINDOW = 40, 16
SPECS = {
    "gru": ModelSpec("gru", "gru", VOCAB, embed=12, hidden=12, tied=True),
    "lstm": ModelSpec("lstm", "lstm", VOCAB, embed=8, hidden=12, layers=2),
    "cifg": ModelSpec("cifg", "cifg", VOCAB, embed=8, hidden=20, projection=8, tied=True, biases=1),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a hundred tokens rather than thousands."""
    monkeypatch.setattr(SpecReader, "span", WINDOW)
    monkeypatch.setattr(evaluate_module, "WARM_UP", 6 * WINDOW)
    monkeypatch.setattr(evaluate_module, "CPU", Side(rows=6, least=3 * WINDOW))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that were scored in each pass over pieces."""
    scored: list[int] = []
    settle = evaluate_module._settle

    def counted(reader, sheet, *args, **kwargs):
        before = len(sheet.found)
        settle(reader, sheet, *args, **kwargs)
        scored.append(sum(len(where) for where, _, _ in sheet.found[before:]))

    monkeypatch.setattr(evaluate_module, "_settle", counted)
    return scored


def params_of(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32) -> Params:
    """A state that matters to what is predicted, of which an eighth to a quarter is forgotten every step."""
    params = lm.init_params(spec, seed, dtype)
    params = {name: p if name.startswith("rnn") else p * 9 for name, p in params.items()}
    row, bias = {"gru": (1, 2.0), "lstm": (1, 1.0), "cifg": (0, -2.0)}[spec.cell]
    for layer in range(spec.layers):
        params[f"rnn.bias_ih_l{layer}"][row * spec.hidden : (row + 1) * spec.hidden] += bias
    return params


def stream_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def in_order(spec: ModelSpec, params: Params, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nats and ranks by the definition: one row, one chain of steps, the whole softmax."""
    stacked = lm.stack(params, 1)
    tokens = torch.from_numpy(stream.astype(np.int64))
    x, _ = lm.features(spec, stacked, tokens[None, None, :-1], lm.initial_state(spec, stacked, 1))
    weight, bias = lm.output_layer(spec, stacked)
    logp = torch.log_softmax((x[0, :, 0] @ weight[0].T + bias[0]).double(), -1)
    true = logp.gather(1, tokens[1:, None])
    return -true[:, 0].numpy(), (logp > true).sum(1).numpy()


def check(spec: ModelSpec, params: Params, streams: list[np.ndarray], rtol: float = 1e-6) -> None:
    every_nats, every_rank = evaluate_module.score_streams(reader_of(spec, params), streams, "cpu")
    ends = np.cumsum([max(0, len(s) - 1) for s in streams])
    assert len(every_nats) == len(every_rank) == ends[-1]
    split = zip(np.split(every_nats, ends)[:-1], np.split(every_rank, ends)[:-1], strict=True)
    for stream, (nats, ranks) in zip(streams, split, strict=True):
        if len(stream) < 2:
            assert len(nats) == len(ranks) == 0
            continue
        want_nats, want_ranks = in_order(spec, params, stream)
        assert nats.sum() == pytest.approx(want_nats.sum(), rel=rtol)
        np.testing.assert_allclose(nats, want_nats, rtol=0, atol=100 * rtol)
        assert (ranks == want_ranks).mean() > 0.995


@pytest.mark.parametrize("cell", SPECS)
def test_pieces_side_by_side_are_the_stream_in_order(cell, settled):
    spec = SPECS[cell]
    check(spec, params_of(spec, 1), [stream_of(997, 2)])
    assert settled[0] == 996  # all of it in the first pass, in pieces


@pytest.mark.parametrize("cell", SPECS)
def test_streams_of_any_length_beside_a_long_one(cell, settled):
    spec = SPECS[cell]
    lengths = (1203, 0, 1, 2, WINDOW, WINDOW + 1, WINDOW + 2, 305)
    check(spec, params_of(spec, 3), [stream_of(n, n) for n in lengths])
    assert settled


def test_in_float64_the_states_agree_to_its_own_rounding(settled):
    spec = SPECS["lstm"]
    check(spec, params_of(spec, 1, torch.float64), [stream_of(997, 2)], rtol=1e-12)
    in_float64 = sum(settled)
    settled.clear()
    check(spec, params_of(spec, 1), [stream_of(997, 2)])
    assert in_float64 > sum(settled) >= 996  # forgetting to 1e-14 takes longer than to 1e-6


def remembers() -> tuple[ModelSpec, Params]:
    """An LSTM whose forget gate is one: its cells add up everything they were ever given."""
    spec = ModelSpec("lstm", "lstm", VOCAB, embed=8, hidden=12)
    params = params_of(spec, 1)
    params["rnn.bias_ih_l0"][12:24] = 80.0
    params["rnn.weight_ih_l0"] *= 0.1
    params["rnn.weight_hh_l0"] *= 0.1
    params["rnn.bias_ih_l0"][24:36] = params["rnn.bias_hh_l0"][24:36] = 0.0
    return spec, params


def test_a_network_that_never_forgets_is_read_in_order(settled):
    spec, params = remembers()
    stream = stream_of(997, 2)
    check(spec, params, [stream])
    assert settled == []
    # and it does remember: without the text's first half the second reads differently
    whole, _ = in_order(spec, params, stream)
    half, _ = in_order(spec, params, stream[498:])
    assert abs(whole[-100:] - half[-100:]).max() > 0.01


@pytest.mark.parametrize(("passes", "taken"), [(0, 1), (2, 3), (100, 7)])
def test_whatever_is_not_settled_is_read_again(monkeypatch, settled, passes, taken):
    monkeypatch.setattr(evaluate_module, "CPU", Side(rows=12, least=3 * WINDOW))  # seven pieces and four
    monkeypatch.setattr(evaluate_module, "FORGOTTEN", 1e9)  # believe that it forgets
    monkeypatch.setattr(evaluate_module, "PASSES", passes)
    spec, params = remembers()
    # 1e-5: cells that add up keep every difference of rounding
    check(spec, params, [stream_of(997, 2), stream_of(700, 3)], rtol=1e-5)
    assert len(settled) == taken  # a pass settles one more piece of each stream


def test_a_wrong_guess_is_corrected_and_only_as_far_as_it_matters(monkeypatch, settled):
    guess = evaluate_module._guess

    def wrong(*args):
        guessed = guess(*args)
        return torch.full_like(guessed, 0.7)

    monkeypatch.setattr(evaluate_module, "_guess", wrong)
    monkeypatch.setattr(evaluate_module, "CPU", Side(rows=3, least=3 * WINDOW))
    spec = SPECS["gru"]
    check(spec, params_of(spec, 1), [stream_of(2003, 2)])
    assert settled[0] == 2002
    assert 0 < sum(settled[1:]) < 1000


def test_results_do_not_depend_on_the_company():
    spec = SPECS["cifg"]
    params = params_of(spec, 5)
    streams = {str(n): stream_of(n, n) for n in (1500, 300, 90, 40, 3)}
    together = evaluate(spec, params, streams)
    assert list(together) == list(streams)
    for name, stream in streams.items():
        alone = evaluate(spec, params, {name: stream})[name]
        assert together[name].nats == pytest.approx(alone.nats, rel=1e-6)
        assert together[name].tokens == alone.tokens == len(stream) - 1
    again = evaluate(spec, params, streams)
    assert again == together


def test_a_model_that_ties_all_words_ranks_them_by_number():
    spec = SPECS["lstm"]
    params = params_of(spec, 1)
    params["output.weight"].zero_()
    stream = stream_of(800, 1)
    nats, ranks = evaluate_module.score_streams(reader_of(spec, params), [stream], "cpu")
    assert ranks.tolist() == stream[1:].tolist()
    np.testing.assert_allclose(nats, np.log(VOCAB), rtol=1e-6)


def test_a_model_of_nan_is_read_and_guesses_nothing():
    spec = SPECS["gru"]
    params = {name: torch.full_like(p, float("nan")) for name, p in params_of(spec, 1).items()}
    score = evaluate(spec, params, {"a": stream_of(800, 1)})["a"]
    assert np.isnan(score.nats)
    assert (score.tokens, score.top3) == (799, 0)


def test_nothing_to_evaluate_is_nothing():
    assert evaluate(SPECS["gru"], params_of(SPECS["gru"], 1), {}) == {}
    assert evaluate_sentences(SPECS["gru"], params_of(SPECS["gru"], 1), {}).tokens == 0


def test_sentences_are_lines_from_a_zero_state():
    spec = SPECS["gru"]
    params = params_of(spec, 1)
    stream = stream_of(600, 1)
    stream[stream == EOS] = EOS + 1
    stream[50::50] = EOS
    stream[-1] = EOS
    score = evaluate_sentences(spec, params, {"a": stream})
    assert score.tokens == 600
    parts = np.split(stream, np.flatnonzero(stream == EOS) + 1)
    bos = np.array([BOS], np.int32)
    want = sum(in_order(spec, params, np.concatenate([bos, line]))[0].sum() for line in parts if len(line))
    assert score.nats == pytest.approx(want, rel=1e-6)


def test_pieces_cover_the_streams_in_whole_windows():
    pieces = cut([(0, 1000), (1001, 1021), (1022, 1022)], Side(rows=4, least=100), window=32)
    assert [p for p in pieces if p.home == 1001] == [Piece(1001, 1021, 1001, 1021)]
    long = [p for p in pieces if p.home == 0]
    assert [p.begin for p in long[1:]] == [p.end for p in long[:-1]]
    assert (long[0].begin, long[-1].end, long[0].opens) == (0, 1000, True)
    assert 2 <= len(long) <= 4
    assert all((p.end - p.begin) % 32 == 0 for p in long[:-1])
    assert all(p.close == 1000 for p in long)


def test_many_streams_or_short_ones_are_not_cut():
    many = [(i * 1000, i * 1000 + 900) for i in range(32)]
    assert len(cut(many, Side(rows=16, least=100), window=32)) == 32
    assert len(cut([(0, 199)], Side(rows=16, least=100), window=32)) == 1


class Counting(nn.Module):
    """A module whose state is of its own kind."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, tokens: Tensor, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        seen = self.table(tokens).cumsum(1)
        before = seen.new_zeros(tokens.shape[0], seen.shape[-1]) if state is None else state["sum"]
        seen = before[:, None] + seen
        return seen * 0.1, {"sum": seen[:, -1]}


def test_a_users_module_is_read_in_order(settled):
    network = ModuleNetwork(Counting, VOCAB, WINDOW, seed=1)
    params = network.init_params(1)
    stream = stream_of(900, 1)
    score = evaluate(network, params, {"a": stream, "b": stream[:77]})
    tokens = torch.from_numpy(stream.astype(np.int64))
    logits = 0.1 * params["table.weight"][tokens[:-1]].cumsum(0)
    nats = nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    assert score["a"].nats == pytest.approx(float(nats.sum()), rel=1e-5)
    assert score["b"].nats == pytest.approx(float(nats[:76].sum()), rel=1e-5)
    assert settled == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cell", SPECS)
def test_a_gpu_finds_the_same_wherever_the_parameters_lie(cell, monkeypatch, settled):
    monkeypatch.setattr(evaluate_module, "GPU", evaluate_module.CPU)
    spec = SPECS[cell]
    params = params_of(spec, 1)
    streams = {str(n): stream_of(n, n) for n in (1500, 300, 2)}
    want = total(evaluate(spec, params, streams))
    there = {name: p.cuda() for name, p in params.items()}
    for given, device in ((params, "cuda"), (there, "cuda"), (there, "cpu")):
        got = total(evaluate(spec, given, streams, device))
        assert got.nats == pytest.approx(want.nats, rel=1e-4)
        assert abs(got.top3 - want.top3) <= 2
    assert settled


def test_counting_streams_together_is_counting_them_one_by_one():
    spec = SPECS["gru"]
    params = params_of(spec, 1)
    streams = [stream_of(n, n) for n in (90, 2, 1, 33, 0, 7)]
    reader = reader_of(spec, params)
    together = evaluate_module._score_group(reader, streams, "cpu")
    for stream, score in zip(streams, together, strict=True):
        nats, rank = evaluate_module.score_streams(reader, [stream], "cpu")
        alone = score_of(stream[1:], nats, rank)
        assert score.nats == pytest.approx(alone.nats, rel=1e-6)
        assert (score.tokens, score.words, score.unknown) == (alone.tokens, alone.words, alone.unknown)
        assert (score.top1, score.top3) == (alone.top1, alone.top3)


def test_one_stream_that_is_not_a_number_leaves_the_others_alone(monkeypatch):
    nats = np.array([1.0, 2.0, np.nan, 4.0])
    monkeypatch.setattr(evaluate_module, "score_streams", lambda *_: (nats, np.zeros(4, np.int64)))
    streams = [np.array([5, 6, 7], np.int32), np.array([5, 6], np.int32), np.array([5, 6], np.int32)]
    first, second, third = evaluate_module._score_group(None, streams, "cpu")
    assert (first.nats, third.nats) == (3.0, 4.0)
    assert np.isnan(second.nats)


def test_all_streams_together_are_the_sum_of_each():
    spec = SPECS["lstm"]
    params = params_of(spec, 1)
    streams = {str(n): stream_of(n, n) for n in (90, 2, 1, 33, 0, 7, 700)}
    every, together = total(evaluate(spec, params, streams)), evaluate_module.evaluate_together(spec, params, streams)
    assert together.nats == pytest.approx(every.nats, rel=1e-9)
    assert replace(together, nats=0.0) == replace(every, nats=0.0)


@pytest.mark.parametrize("most", [1, 100, 500, 5_000, 49_999])
def test_few_tokens_of_many_clients_are_pieces_of_some_not_crumbs_of_all(most):
    streams = {f"client {n}": np.arange(40 + n % 21) for n in range(1000)}
    kept = limit_streams(streams, most)
    tokens = sum(map(len, kept.values()))
    assert abs(tokens - most) <= max(64, 0.05 * most)
    assert all(len(s) == len(streams[name]) for name, s in kept.items())  # all are shorter than 64
    places = np.array([int(name.split()[1]) for name in kept])
    assert (np.diff(places) <= 2 * 1000 / len(kept)).all()  # from all over


def test_a_few_long_streams_are_all_read_in_part():
    streams = {"long": np.arange(30_000), "short": np.arange(10_000)}
    assert {name: len(s) for name, s in limit_streams(streams, 4_000).items()} == {"long": 3_000, "short": 1_000}
    assert limit_streams(streams, None).keys() == limit_streams(streams, 10**6).keys() == streams.keys()


@pytest.mark.parametrize("order", [1, 2, 5])
def test_a_count_model_reads_every_line_on_its_own(order):
    rng = np.random.default_rng(5)
    text = rng.choice([EOS, *range(4, 14)], 4000, p=[0.15, *[0.85 / 10] * 10]).astype(np.int32)
    model = fit_unigram([text], VOCAB) if order == 1 else fit_kneser_ney([text], VOCAB, order)
    streams = {"a": text[:300], "b": text[700:950], "none": text[:0]}
    lines = [line for s in streams.values() for line in np.split(s, np.flatnonzero(s == EOS) + 1) if len(line)]
    alone = {str(k): np.concatenate([[EOS], line]).astype(np.int32) for k, line in enumerate(lines)}
    expected, found = total(evaluate_ngram(model.nats, model.top, alone)), evaluate_ngram_sentences(
        model.nats, model.top, streams
    )  # fmt: skip
    assert replace(found, nats=0.0) == replace(expected, nats=0.0)
    assert found.nats == pytest.approx(expected.nats, rel=1e-12)
    assert found.tokens == 550
    if order == 5:  # a line that follows another is predicted from it, unless it is read alone
        assert total(evaluate_ngram(model.nats, model.top, streams)).nats != pytest.approx(found.nats, rel=1e-3)
    assert evaluate_ngram_sentences(model.nats, model.top, {}) == Score()


def test_figures_by_line():
    found = by_line(Score(tokens=10, nats=10.0, top1=6, top3=8, words=4, words_top1=1, words_top3=2, unknown=1))
    assert found == {
        "sentence_perplexity": pytest.approx(np.e), "sentence_top1": 0.6, "sentence_top1_words": 0.25,
        "sentence_top3_words": 0.5,
    }  # fmt: skip
