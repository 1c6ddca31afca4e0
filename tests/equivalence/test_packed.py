"""Packed lines: a row of several lines is what `torch.nn` makes of each of them alone, from a zero state.

The same text goes through every path that takes resets: the definition and the hand-written step in float64, a user's
module, a track (on a GPU: captured, with Triton's kernels; see also test_triton.py), a run that is resumed, a client of
a federation, and the evaluation line by line that such models are judged by.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfed.config.load import Config, DataConfig, ModelConfig, TrainConfig, to_document
from keyfed.engine.kernels import step
from keyfed.engine.kernels.step import KERNELS, LAYERS
from keyfed.engine.module import ModuleNetwork, line_pieces
from keyfed.engine.network import predictor
from keyfed.engine.problem import Problem, make_store, solve_block, stack_steps
from keyfed.engine.task import ClientTask
from keyfed.errors import ConfigError
from keyfed.federated.methods import build_method
from keyfed.federated.spec import MethodSpec
from keyfed.keyboard.export import export_run
from keyfed.model import language_model as lm
from keyfed.model.cells import CELLS
from keyfed.model.conformance import check_model
from keyfed.model.language_model import init_params
from keyfed.model.output import output_gradients
from keyfed.reports.finished import Personalisation, evaluate_run, personalise_run
from keyfed.run.evaluate import evaluate_lines, evaluate_sentences, limit_streams, scorer_of, suggest, total, validator
from keyfed.run.folder import load_model, read_metrics, read_result
from keyfed.run.loop import train
from keyfed.run.prepare import make_problem, prepare
from keyfed.run.remote.device import own_text
from keyfed.text.batches import Batching, line_starts, lines_of, packed_steps
from keyfed.text.vocab import BOS, EOS
from tests.listeners import Heard

from .oracle import Local, Oracle
from .test_cells import CASES, make, weights_of
from .test_modules import Causal, Cells, Copy, largest_difference, with_module
from .test_stacking import CIFG, GRU, LSTM, NWP, PACKED, SIZES, VOCAB, method_of, problem_of, stream

SPECS = {
    "gru tied": GRU,
    "gru 2 layers, one bias": replace(GRU, layers=2, tied=False, biases=1),
    "lstm 2 layers": LSTM,
    "cifg projected, tied": CIFG,
    "cifg 2 layers, two biases": replace(CIFG, layers=2, biases=2, tied=False),
    "nwp": NWP,
}


def one_step(text: np.ndarray, rows: int, window: int) -> lm.Batch:
    """The first window of a text's packed rows, as the engine stacks it."""
    first = packed_steps(text, rows, window, seed=1)[0]
    batch, _ = stack_steps([first], len(first.inputs), "cpu")
    return batch._replace(starts=line_starts(batch.inputs))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_loss_and_gradient_of_packed_rows_are_those_of_torch_nn_line_by_line(spec):
    text = stream(90, seed=5)
    theta = init_params(spec, seed=2, dtype=torch.float64)
    batch = one_step(text, rows=3, window=30)
    inside = one_step(text, rows=3, window=10**6)  # one row, whole
    for packed in (batch._replace(mask=batch.mask.double()), inside._replace(mask=inside.mask.double())):
        model = Oracle(spec, theta)
        nats, tokens, lines = torch.zeros((), dtype=torch.float64), 0, 0
        for row in range(packed.inputs.shape[1]):
            real = packed.mask[0, row] > 0
            targets = packed.targets[0, row][real]
            begins = torch.nonzero(packed.inputs[0, row][real] == BOS)[:, 0].tolist()
            for begin, end in zip(begins, [*begins[1:], len(targets)], strict=True):
                line = targets[begin:end]
                given = torch.cat([torch.tensor([BOS]), line[:-1]])
                logits, _ = model(given[None], None)
                nats = nats + F.cross_entropy(logits[0], line, reduction="sum")
                tokens, lines = tokens + len(line), lines + 1
        assert lines > packed.inputs.shape[1], "no row holds several lines"
        wanted = dict(zip(model.named(), torch.autograd.grad(nats / tokens, list(model.named().values())), strict=True))
        nats, stacked = nats.detach(), lm.stack(theta, 1)
        zero = lm.initial_state(spec, stacked, packed.inputs.shape[1])
        got, _ = step.gradient(spec, stacked, packed, zero, None, {})
        assert int(got.tokens) == tokens
        assert float(got.nats[0]) == pytest.approx(float(nats), abs=1e-10)
        for name, want in wanted.items():
            assert float((got.grads[name][0] - want).abs().max()) <= 1e-10, name
        x, _ = lm.features(spec, stacked, packed.inputs, zero, starts=packed.starts)
        _, scale, flat = lm.loss_weights(packed, x.dtype)
        mean = output_gradients(x.reshape(1, -1, x.shape[-1]), *lm.output_layer(spec, stacked), flat, scale, {}).loss
        assert float(mean[0]) * tokens == pytest.approx(float(nats), abs=1e-10)
        forgotten, _ = step.gradient(spec, stacked, packed._replace(starts=None), zero, None, {})
        assert abs(float(forgotten.nats[0] - nats)) > 1e-4, "the resets make no difference: the test sees nothing"


@pytest.mark.parametrize(("cell", "biases", "projected"), CASES)
@settings(max_examples=15, deadline=None)
@given(m=st.integers(1, 3), batch=st.integers(1, 3), time=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_hand_written_backward_equals_autograd_with_resets(cell, biases, projected, m, batch, time, seed):
    x, w, state = make(cell, biases, projected, m, batch, time, width=4, hidden=5, seed=seed)
    g = torch.Generator().manual_seed(seed)
    keep = (torch.rand(m, time, batch, 1, generator=g) > 0.4).double()
    out, last = CELLS[cell](x, w, tuple(s.detach() for s in state), keep)
    leaves = [x, *[t for t in w if t is not None]]
    slow = [out, *last, *torch.autograd.grad((out * weights_of(out)).sum(), leaves)]
    with torch.no_grad():
        made, ends, saved = LAYERS[cell].forward(x, w, state, keep)
        d_x, d_w = LAYERS[cell].backward(saved, weights_of(made), True)
        fast = [made, *ends, d_x, *[t for t in d_w if t is not None]]
        read, _ = KERNELS[cell](x, w, state, keep)
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(read, out, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cell", ["gru", "gru-printed", "lstm", "cifg"])
def test_nothing_of_a_line_reaches_the_next(cell):
    x, w, state = make(cell, 2, False, m=2, batch=3, time=7, width=4, hidden=5, seed=3)
    keep = torch.ones(2, 7, 3, 1, dtype=torch.float64)
    keep[:, 4] = 0
    before, _ = CELLS[cell](x, w, tuple(s.detach() for s in state), keep)
    (d_x,) = torch.autograd.grad(before[:, 4:].sum(), [x])
    assert float(d_x[:, :4].abs().max()) == 0
    assert float(d_x[:, 4:].abs().max()) > 0
    zero = tuple(torch.zeros_like(s) for s in state)
    alone, _ = CELLS[cell](x[:, 4:], w, zero)
    torch.testing.assert_close(before[:, 4:], alone, rtol=0, atol=1e-14)


# One client, a block, the order in it


def test_the_order_in_a_block_does_not_matter():
    problem = problem_of(CIFG, PACKED)
    theta = init_params(CIFG, seed=3, dtype=torch.float64)
    method = method_of(Local(lr=0.5, clip=0.25, momentum=0.9, rows=3))
    there = solve_block(problem, theta, [0, 1, 2, 3], method, round=0)
    back = solve_block(problem, theta, [3, 2, 1, 0], method, round=0)
    for name, upload in there.upload.items():
        torch.testing.assert_close(upload, back.upload[name].flip(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [GRU, replace(CIFG, layers=2)], ids=["gru", "cifg 2 layers"])
def test_a_model_is_trained_on_lines_as_it_is_judged_on_them(spec):
    """With a step of zero the loss of a packed epoch is that of the evaluation line by line, token for token."""
    theta = init_params(spec, seed=3)
    theta["output.bias"].uniform_(-1, 1, generator=torch.Generator().manual_seed(4))
    problem = problem_of(spec, PACKED)
    found = solve_block(problem, theta, range(len(SIZES)), method_of(Local(lr=0.0, rows=3)), round=0)
    streams = {str(k): problem.store.stream(k) for k in range(len(SIZES))}
    judged = evaluate_lines(spec, theta, streams)
    for k in range(len(SIZES)):
        assert int(found.tokens[k]) == judged[str(k)].tokens == len(streams[str(k)])
        assert float(found.loss[k]) == pytest.approx(judged[str(k)].mean_nats, rel=1e-5)


def test_scores_by_stream_add_up_to_the_score_of_all_lines():
    theta = init_params(LSTM, seed=3)
    streams = {f"s{k}": stream(n, k) for k, n in enumerate((90, 3, 40, 1, 700))}
    by_stream, together = evaluate_lines(LSTM, theta, streams), evaluate_sentences(LSTM, theta, streams)
    added = total(by_stream)
    assert added.nats == pytest.approx(together.nats, rel=1e-12)
    assert replace(added, nats=0.0) == replace(together, nats=0.0)
    for name, score in by_stream.items():
        alone = evaluate_sentences(LSTM, theta, {name: streams[name]})
        assert score.nats == pytest.approx(alone.nats, rel=1e-6)
        assert replace(score, nats=0.0) == replace(alone, nats=0.0)
    assert evaluate_lines(LSTM, theta, {}) == {}
    assert scorer_of("packed") is evaluate_lines
    assert validator("packed") is evaluate_sentences


# A user's module


def test_packed_rows_are_cut_where_lines_begin():
    starts = torch.zeros(4, 6, dtype=torch.bool)
    starts[0, [0, 2]] = starts[1, 4] = starts[3, 5] = True  # the third row goes on through the whole window
    groups = line_pieces(starts)
    assert groups == [[(1, 0, 4), (2, 0, 6), (3, 0, 5)], [(0, 0, 2)], [(3, 5, 6)], [(1, 4, 6)], [(0, 2, 6)]]
    covered = torch.zeros(4, 6)
    for row, begin, end in (piece for group in groups for piece in group):
        covered[row, begin:end] += 1
    assert bool((covered == 1).all())


def test_a_module_without_state_reads_every_line_alone():
    text = np.array([5, 6, 7, EOS, 8, 9, EOS, EOS, 10, 11, 12, 13, EOS], np.int32)
    network = ModuleNetwork(lambda vocab: Causal(vocab, 20), VOCAB, 20, 1)
    problem = Problem(network, make_store([text], ["a"]), Batching("packed", 1, 20), 3)
    theta = network.init_params(3)
    found = solve_block(problem, theta, [0], method_of(Local(lr=0.0, rows=1)), round=0)
    nats = 0.0
    for line in lines_of(text):
        given, wanted = torch.tensor([[BOS, *line[:-1]]]), torch.tensor(line.astype(np.int64))
        logits, _ = network.call(theta, given, None, training=True)
        nats += float(F.cross_entropy(logits[0], wanted, reduction="sum"))
    assert float(found.loss[0]) * len(text) == pytest.approx(nats, rel=1e-5)


class Counting(Cells):
    """Its state has a number that all rows share."""

    def forward(self, tokens, state=None):
        logits, after = super().forward(tokens, state)
        return logits, {**after, "calls": torch.zeros(1) if state is None else state["calls"] + 1}


def test_a_module_whose_rows_share_a_state_is_refused_before_training(corpus):
    with pytest.raises(ConfigError, match=r"data\.batches=packed: .*counting keeps a state that all rows share"):
        prepare(replace(tiny(corpus), model=ModelConfig()), counting)
    assert ModuleNetwork(lambda v: Cells(GRU), VOCAB, 10, 1).unpackable() is None
    assert ModuleNetwork(lambda v: Causal(v, 10), VOCAB, 10, 1).unpackable() is None


def counting(vocab: int) -> Counting:
    return Counting(replace(GRU, vocab=vocab))


def test_a_module_with_dropout_draws_by_client_round_and_step():
    problem = with_module(problem_of(GRU, PACKED), lambda v: Copy(GRU, dropout=0.4))
    theta = init_params(GRU, seed=3)
    method = method_of(Local(lr=0.5, rows=3))
    first = solve_block(problem, theta, [0], method, 1).upload
    torch.rand(7)
    assert largest_difference(first, solve_block(problem, theta, [0], method, 1).upload) == 0
    assert largest_difference(first, solve_block(problem, theta, [0], method, 2).upload) > 0
    with pytest.raises(ConfigError, match=r"set train\.block=1"):  # what it draws hangs on how far rows are padded
        solve_block(problem, theta, [0, 2], method, 1)


# Runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Five authors of lines that follow simple rules; some are longer than a window."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    folder.mkdir()
    rng = random.Random(7)
    words = [f"{a}{b}" for a in "bdfgk" for b in ("a", "e", "i", "o", "u", "an")]
    for k in range(5):
        lines = []
        for _ in range(50 + 5 * k):
            start = rng.randrange(len(words))
            count = rng.choice((1, 3, 5, 8, 14))
            lines.append(" ".join(words[(start + i * (1 + k % 3)) % len(words)] for i in range(count)))
        (folder / f"author{k}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def tiny(corpus, **more) -> Config:
    return Config(
        data=DataConfig(name=str(corpus), vocab=60, window=6, batches="packed", unseen=0.2),
        model=ModelConfig(name="cifg", embed=8, hidden=12, dropout=0.2),
        train=TrainConfig(rounds=4, cohort=3, seed=3, workers=1, device="cpu", valid_tokens=300, **more),
        options={"optimiser": "sgd", "lr": 1.0, "batch_size": 3, "epochs": 2},
    )


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run that nothing interrupted, with its central one."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny(corpus, central=True, ngram_order=3), out)
    return out


def test_a_run_is_resumed_bit_for_bit_whatever_the_block(corpus, whole, tmp_path):
    config = tiny(corpus, central=True, ngram_order=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", listener=Heard(2))
    train(config, tmp_path / "broken", resume=True)
    for file in ("model.safetensors", "central/model.safetensors"):
        assert (whole / file).read_bytes() == (tmp_path / "broken" / file).read_bytes()
    stacked = train(replace(config, train=replace(config.train, block=3, central=False)), tmp_path / "stacked")
    assert stacked["test"]["nats"] == pytest.approx(read_result(whole)["test"]["nats"], rel=1e-4)


def test_a_run_is_judged_line_by_line(corpus, whole):
    prepared, trained, result = prepare(tiny(corpus)), load_model(whole), read_result(whole)
    assert trained.reads_lines
    by_line = evaluate_sentences(trained.spec, trained.params, prepared.test)
    tokens = sum(map(len, prepared.test.values()))  # the first token of a line is predicted, too
    for scores in (result, evaluate_run(whole), *result["baselines"].values()):
        test = scores["test"]
        assert test["tokens"] == tokens
        assert test["perplexity"] == pytest.approx(test["sentence_perplexity"], rel=1e-9)
        assert scores["unseen"]["tokens"] == sum(map(len, prepared.unseen.values()))
    assert result["test"]["perplexity"] == pytest.approx(by_line.perplexity, rel=1e-6)
    assert set(result["baselines"]) == {"unigram", "kneser_ney", "central"}
    valid = limit_streams(prepared.valid, 300)
    chosen = evaluate_sentences(trained.spec, trained.params, valid).mean_nats
    assert chosen == pytest.approx(min(r["valid"]["nats"] for r in read_metrics(whole)), rel=1e-5)
    assert any("packed lines" in line for line in prepared.describe())


def test_personal_copies_conformance_and_keyboard_take_packed_models(corpus, whole):
    found = personalise_run(whole, Personalisation(lr=0.1))
    prepared, trained = prepare(tiny(corpus)), load_model(whole)
    own = {name: s for name, s in prepared.test.items() if name in prepared.store.names}
    assert found["before"]["tokens"] == sum(map(len, own.values()))
    before = evaluate_sentences(trained.spec, trained.params, own)
    assert found["before"]["perplexity"] == pytest.approx(before.perplexity, rel=1e-6)
    text = np.concatenate([prepared.store.stream(k) for k in range(len(prepared.store))])
    checks = check_model(predictor(trained.spec, trained.params), text, vocab_size=len(trained.vocab), pad=0, seed=0)
    # The rule by which this text goes on needs one word of context only, which that check cannot tell from none.
    assert {check.name for check in checks if not check.passed} <= {"context is used"}
    one, two = (suggest(trained.spec, trained.params, trained.vocab, text, lines=True) for text in ("ba", "di do\nba"))
    assert one == two, "what stands on the line before is read"
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert export_run(whole).manifest["reading"] == "lines"


def test_a_client_of_a_federation_trains_and_scores_as_in_the_simulation(corpus):
    config = tiny(corpus)
    prepared = prepare(config)
    method = build_method(MethodSpec(config.method, config.options))
    name = next(n for n in prepared.store.names if n in prepared.test)
    about = {"config": to_document(config), "vocab": prepared.vocab.to_json()}
    learner = own_text(name, corpus / name)(about)
    theta = init_params(prepared.spec, 1)
    there = learner.solve(theta, 2, ClientTask(0))
    here = solve_block(
        make_problem(prepared, config, method, "cpu"), theta, [list(prepared.store.names).index(name)], method, 2
    )
    assert int(here.worked) == there.worked
    for layer, upload in there.upload.items():
        assert torch.equal(upload, here.upload[layer][0]), layer
    judged = evaluate_sentences(prepared.spec, theta, {name: prepared.test[name]})
    assert learner.evaluate(theta, "test").tokens == judged.tokens == len(prepared.test[name])
    assert learner.evaluate(theta, "test").nats == pytest.approx(judged.nats, rel=1e-9)
