"""A user's `nn.Module` against our models; stacked against one by one; two processes against one; resumed or not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import keyfed
from keyfed.engine.module import ModuleNetwork
from keyfed.engine.network import predictor, reader_of
from keyfed.engine.problem import Problem, solve_block
from keyfed.errors import ConfigError
from keyfed.model.language_model import Batch, ModelSpec, init_params
from keyfed.run.evaluate import evaluate, evaluate_sentences
from tests.listeners import Heard

from .oracle import Local
from .test_stacking import GRU, LSTM, PACKED, SENTENCES, SIZES, STREAM, VOCAB, method_of, problem_of, stream

HOW = Local(lr=0.5, momentum=0.5, clip=0.25, epochs=2)


class Copy(nn.Module):
    """One of our presets as anybody would write it, with the same names."""

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[spec.cell]
        self.embedding = nn.Embedding(spec.vocab, spec.embed)
        self.rnn = kind(spec.embed, spec.hidden, spec.layers, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.output = nn.Linear(spec.hidden, spec.vocab)
        if spec.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens, state=None):
        x, state = self.rnn(self.embedding(tokens), state)
        return self.output(self.drop(x)), state


class Cells(Copy):
    """The same GRU written cell by cell, which `vmap` can stack; its state is a dictionary, rows first."""

    def forward(self, tokens, state=None):
        x, r = self.embedding(tokens), self.rnn
        h = x.new_zeros(len(tokens), r.hidden_size) if state is None else state["h"]
        outputs = []
        for t in range(x.shape[1]):
            i = F.linear(x[:, t], r.weight_ih_l0, r.bias_ih_l0).chunk(3, 1)
            j = F.linear(h, r.weight_hh_l0, r.bias_hh_l0).chunk(3, 1)
            reset, update = torch.sigmoid(i[0] + j[0]), torch.sigmoid(i[1] + j[1])
            new = torch.tanh(i[2] + reset * j[2])
            h = new + update * (h - new)
            outputs.append(h)
        return self.output(torch.stack(outputs, 1)), {"h": h}


class Causal(nn.Module):
    """A transformer layer: no state, learnt positions for one window, a mask in a buffer, a frozen factor."""

    def __init__(self, vocab: int, window: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 8)
        self.place = nn.Parameter(torch.randn(window, 8))
        self.factor = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(window))

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.embedding(tokens) + self.factor * self.place[:n]
        return self.output(self.layer(x, src_mask=self.mask[:n, :n], is_causal=True))


class Forgetful(Copy):
    """Says it has a state, and throws it away."""

    def forward(self, tokens, state=None):
        return super().forward(tokens)


def with_module(problem: Problem, make) -> Problem:
    return replace(problem, spec=ModuleNetwork(make, VOCAB, problem.batching.window, 1))


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("batching", [STREAM, SENTENCES, PACKED], ids=["stream", "sentences", "packed"])
@pytest.mark.parametrize("spec", [GRU, replace(GRU, tied=False), LSTM], ids=["gru tied", "gru", "lstm 2"])
def test_a_module_trains_as_our_model_does(spec, batching, dtype, close):
    ours = problem_of(spec, batching)
    theirs = with_module(ours, lambda vocab: Copy(spec))
    theta = init_params(spec, seed=3, dtype=dtype)
    for client in range(len(SIZES)):
        a = solve_block(ours, theta, [client], method_of(HOW), round=2)
        b = solve_block(theirs, theta, [client], method_of(HOW), round=2)
        assert int(a.worked) == int(b.worked)
        assert float(a.loss) == pytest.approx(float(b.loss), abs=close)
        assert largest_difference(a.upload, b.upload) <= close


@pytest.mark.parametrize("batching", [STREAM, SENTENCES, PACKED], ids=["stream", "sentences", "packed"])
def test_stacked_clients_equal_clients_one_by_one(batching):
    problem = with_module(problem_of(GRU, batching), lambda vocab: Cells(GRU))
    assert problem.spec.unstackable("cpu") is None
    theta = problem.spec.init_params(5)
    stacked = solve_block(problem, theta, [0, 2, 3], method_of(HOW), round=1)
    for k, client in enumerate([0, 2, 3]):
        alone = solve_block(problem, theta, [client], method_of(HOW), round=1)
        assert largest_difference({n: u[k : k + 1] for n, u in stacked.upload.items()}, alone.upload) <= 1e-6
        assert float(stacked.loss[k]) == pytest.approx(float(alone.loss), abs=1e-6)


def test_the_state_is_carried_and_matters():
    problem, theta = problem_of(GRU, STREAM), init_params(GRU, seed=3)
    uploads = [
        solve_block(with_module(problem, make), theta, [0], method_of(HOW), round=0).upload
        for make in (lambda v: Copy(GRU), lambda v: Forgetful(GRU))
    ]
    assert largest_difference(*uploads) > 1e-4


def test_what_torch_cannot_stack_is_known():
    plain = ModuleNetwork(lambda v: Copy(GRU), VOCAB, 10, 1).unstackable("cpu")
    assert plain is not None
    assert "aten::gru" in plain
    drops = ModuleNetwork(lambda v: Copy(GRU, dropout=0.2), VOCAB, 10, 1)
    assert "draws random numbers" in str(drops.unstackable("cpu"))
    problem = replace(problem_of(GRU, STREAM), spec=drops)
    with pytest.raises(ConfigError, match=r"set train\.block=1"):
        solve_block(problem, init_params(GRU, 1), [0, 2], method_of(HOW), round=0)


def test_dropout_is_a_function_of_client_round_and_step():
    problem = with_module(problem_of(GRU, STREAM), lambda v: Copy(GRU, dropout=0.4))
    theta = init_params(GRU, seed=3)
    before = torch.get_rng_state()

    def upload(client: int, round: int) -> dict[str, Tensor]:
        return solve_block(problem, theta, [client], method_of(Local(lr=0.5)), round).upload

    first = upload(0, 1)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was moved"
    torch.rand(7)
    upload(2, 1)
    assert largest_difference(first, upload(0, 1)) == 0
    assert largest_difference(first, upload(0, 2)) > 0
    # Two steps of one client drop different units: with equal masks the second step of equal text would be the same.
    network = problem.spec
    one = {name: p[None] for name, p in theta.items()}
    tokens = torch.from_numpy(stream(20, 1).astype(np.int64)).view(1, 2, 10)
    batch = Batch(tokens, tokens, torch.ones(1, 2, 10))
    losses = [float(network.step(one, batch, None, torch.tensor([9]), torch.tensor([t]))[0]) for t in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]


def test_evaluation_equals_that_of_our_model():
    theta = init_params(LSTM, seed=4)
    streams = {f"s{k}": stream(n, k) for k, n in enumerate((90, 3, 40, 41, 2, 700))}
    for window in (7, 35):
        module = ModuleNetwork(lambda v: Copy(LSTM), VOCAB, window, 1)
        ours, theirs = evaluate(LSTM, theta, streams), evaluate(module, theta, streams)
        for name, score in ours.items():
            assert theirs[name].nats == pytest.approx(score.nats, rel=1e-5)
            assert replace(theirs[name], nats=0.0) == replace(score, nats=0.0)
        a, b = evaluate_sentences(LSTM, theta, streams), evaluate_sentences(module, theta, streams)
        assert b.perplexity == pytest.approx(a.perplexity, rel=1e-5)


def test_a_state_is_cut_by_rows_whatever_its_layout():
    for make in (Copy, Cells):
        network = ModuleNetwork(lambda v, make=make: make(GRU), VOCAB, 10, 1)
        reader = reader_of(network, network.init_params(2))
        tokens = torch.from_numpy(stream(60, 1).astype(np.int64)).view(4, 15)
        _, state = reader.read(tokens[:, :8], None)
        whole, _ = reader.after(tokens[:, 8:], state)
        some, _ = reader.after(tokens[[2, 0, 2], 8:], reader.keep(state, [2, 0, 2]))
        torch.testing.assert_close(some, whole[[2, 0, 2]], rtol=0, atol=1e-6)


def test_a_module_without_state_reads_its_last_window():
    network = ModuleNetwork(lambda v: Causal(v, 6), VOCAB, 6, 1)
    assert "factor" not in network.shapes
    assert "mask" not in network.shapes
    params = network.init_params(1)
    reader = reader_of(network, params)
    tokens = torch.from_numpy(stream(40, 2).astype(np.int64)).view(2, 20)
    at_once, _ = reader.after(tokens, None)
    logits, state = None, None
    for t in range(20):
        logits, state = reader.after(tokens[:, t : t + 1], state)
    torch.testing.assert_close(logits, at_once, rtol=0, atol=1e-6)
    assert not torch.allclose(at_once, predictor(network, params)(tokens)[:, -1]), "that one read two tokens only"


class Bad(Copy):
    """A module that does one thing wrong."""

    def __init__(self, what: str) -> None:
        super().__init__(GRU)
        self.what = what
        self.norm = nn.BatchNorm1d(GRU.hidden) if what == "buffer" else None
        if what == "half":
            self.half()
        if what == "frozen":
            self.requires_grad_(False)

    def forward(self, tokens, state=None):
        logits, after = super().forward(tokens, None if self.what == "rows twice" else state)
        if self.norm is not None:
            self.norm(self.embedding(tokens).transpose(1, 2))
        return {
            "swapped": (logits.transpose(0, 1), after),
            "last only": (logits[:, -1], after),
            "nan": (logits * torch.nan, after),
            "none": (logits, None),
            "number": (logits, (after, 3)),
            "three": (logits, after, 0),
            "text": "logits",
            "changing": (logits, after if state is None else (after,)),
            "rows twice": (logits, after.new_zeros(len(tokens), len(tokens))),
        }.get(self.what, (logits, after))


class Demanding(Copy):
    def forward(self, tokens, state):
        return super().forward(tokens, state)


WRONG = {
    "swapped": r"tokens \[6, 5\] gave logits \[5, 6, 23\], expected \[6, 5, 23\]: set batch_first",
    "last only": r"gave logits \[6, 23\], expected \[6, 5, 23\]: every token",
    "nan": "logits that are not finite before any training",
    "none": "a state of NoneType; expected tensors .*, or logits alone",
    "number": "a state of int; expected tensors",
    "three": "returned 3 values; expected logits, or a pair",
    "text": "gave str, expected logits",
    "changing": "a state of another form once it is given one",
    "rows twice": r"a state of \[6, 6\] became \[7, 7\] with one row more",
    "buffer": 'buffer "norm.running_mean" changes while training',
    "half": "is torch.float16, expected torch.float32",
    "frozen": "no parameter that wants a gradient",
}


@pytest.mark.parametrize(("what", "said"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_module_is_one_clear_line(what, said):
    with pytest.raises(ConfigError, match=said) as caught:
        ModuleNetwork(lambda v: Bad(what), VOCAB, 10, 1)
    assert "\n" not in str(caught.value)


def test_a_wrong_factory_is_one_clear_line():
    def failing(vocab):
        raise ValueError("no such width\nat all")

    for make, said in [
        (Copy(GRU), "module is a Copy; expected a function that takes the vocabulary's size"),
        (lambda v: "module", "returned a str; expected a torch.nn.Module"),
        (failing, "could not be made for a vocabulary of 23: ValueError: no such width$"),
        (lambda v: Demanding(GRU), "missing 1 required positional argument: 'state'; it is called module.tokens."),
    ]:
        with pytest.raises(ConfigError, match=said):
            ModuleNetwork(make, VOCAB, 10, 1)


WORDS = ["a", "dog", "sees", "the", "old", "house", "and", "runs", "home", "again"]

# Whole runs. The module stands in a file of its own, so that worker processes find it too.
FILE = """
from torch import nn

class Small(nn.Module):
    def __init__(self, vocab, dropout=0.3):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(vocab, 8), nn.GRU(8, 8, batch_first=True)
        self.drop, self.output = nn.Dropout(dropout), nn.Linear(8, vocab)

    def forward(self, tokens, state=None):
        x, state = self.rnn(self.embedding(tokens), state)
        return self.output(self.drop(x)), state
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A module with dropout from a file that other processes can import."""
    (tmp_path / "small_module.py").write_text(FILE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import small_module

    return small_module.Small


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for k in range(5):
        draw = random.Random(k)
        lines = [" ".join(draw.choices(WORDS, k=7)) for _ in range(50)]
        (folder / f"{k}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def configured(corpus: Path, **settings):
    tiny = {"rounds": 2, "model": "gru", "train_cohort": 3, "data_window": 8, "optimiser": "sgd", "lr": 1.0}
    return keyfed.configure(data=str(corpus), train_baselines=False, **(tiny | settings))


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def test_a_run_of_a_copy_is_a_run_of_the_preset(corpus, tmp_path):
    config = configured(corpus, model_embed=8)
    ours = keyfed.train(config, tmp_path / "ours")
    spec = keyfed.load_model(tmp_path / "ours").spec

    def make(vocab: int) -> nn.Module:
        module = Copy(replace(spec, vocab=vocab))
        module.load_state_dict(init_params(spec, config.train.seed), strict=False)
        return module

    theirs = keyfed.train(configured(corpus), tmp_path / "theirs", module=make)
    a, b = (load_file(tmp_path / run / "model.safetensors") for run in ("ours", "theirs"))
    assert largest_difference(a, b) <= 1e-5
    for part in ("test", "unseen"):
        assert (ours[part] is None) == (theirs[part] is None)
        if ours[part]:
            assert theirs[part]["perplexity"] == pytest.approx(ours[part]["perplexity"], rel=1e-5)
    assert theirs["parameters"] == ours["parameters"]
    models = keyfed.load_model(tmp_path / "ours"), keyfed.load_model(tmp_path / "theirs", module=make)
    assert keyfed.suggest(models[0], "the old") == keyfed.suggest(models[1], "the old")


@pytest.mark.usefixtures("workers_are_forked")
def test_workers_and_resume_change_nothing(small, corpus, tmp_path):
    config = configured(corpus, rounds=2, train_workers=2)
    keyfed.train(config, tmp_path / "two", module=small)
    keyfed.train(configured(corpus, rounds=2, train_workers=1), tmp_path / "one", module=small)
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    cut = tmp_path / "cut"
    alone = configured(corpus, rounds=2, train_workers=1)
    with pytest.raises(KeyboardInterrupt):
        keyfed.train(alone, cut, module=small, listener=Heard(count=1))
    keyfed.train(alone, cut, module=small, resume=True)
    assert weights(cut) == weights(tmp_path / "one")


def test_what_cannot_be_stacked_or_sent_trains_alike_and_says_so(small, corpus, tmp_path):
    keyfed.train(configured(corpus, rounds=1), tmp_path / "plain", module=small)
    for name, make, settings, said in [
        ("block", small, {"train_block": 3}, "one client at a time: small_module.Small draws random numbers"),
        ("lambda", lambda v: small(v), {"train_workers": 2}, "one process: other processes cannot make"),
    ]:
        heard = Heard()
        keyfed.train(configured(corpus, rounds=1, **settings), tmp_path / name, module=make, listener=heard)
        assert said in "\n".join(heard.lines)
        assert weights(tmp_path / name) == weights(tmp_path / "plain")


def test_a_character_module_completes_words(corpus, tmp_path):
    out = tmp_path / "characters"
    config = configured(corpus, model="char-lstm", rounds=1)
    keyfed.train(config, out, module=lambda v: Causal(v, 8))
    words = keyfed.suggest(keyfed.load_model(out, module=lambda v: Causal(v, 8)), "the do")
    assert len(words) == 3
    assert all(word.startswith("do") for word in words)
