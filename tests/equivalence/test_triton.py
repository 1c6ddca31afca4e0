"""Triton kernels against the plain ones: on a GPU as they are, elsewhere in Triton's interpreter.

There one program runs after the other, so a client's slices must fit one program: few hidden units.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed")

from keyfed.engine.kernels import triton_launch as triton_kernels  # noqa: E402
from keyfed.engine.kernels.step import (  # noqa: E402  # noqa: E402
    LAYERS,
    PLAIN,
    PaddedLayer,
    fill_copies,
    gradient,
)
from keyfed.engine.kernels.step import add_rows as plain_add_rows  # noqa: E402
from keyfed.engine.kernels.triton_launch import TRITON  # noqa: E402
from keyfed.federated import descent as descents  # noqa: E402
from keyfed.federated.descent import AdamRule, ClientBatch, SgdRule, Tally  # noqa: E402
from keyfed.federated.types import Gradient  # noqa: E402
from keyfed.model import language_model as lm  # noqa: E402
from keyfed.model.cells import CellWeights, gates_of, has_memory  # noqa: E402
from keyfed.model.language_model import Batch, ModelSpec  # noqa: E402
from keyfed.model.output import output_gradients  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
if not GPU:  # the interpreter does not multiply bf16: the persistent kernels are held to account in float32
    triton_kernels.PERSISTENT = (torch.float32,)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
ON_A_GPU = pytest.mark.skipif(not GPU, reason="a further shape of the same kernels: on a GPU")
CASES = [("gru", 2, None), ("gru", 1, None), ("gru-printed", 1, None), ("lstm", 2, None), ("lstm", 1, None),
         ("lstm", 1, 12), ("cifg", 1, 12), ("cifg", 2, None)]  # fmt: skip


def draw(seed: int, *shape: int, scale: float = 0.5) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def a_layer(cell, biases, projection, m, batch, time, inputs, hidden):
    rows, width = gates_of(cell) * hidden, projection or hidden
    w = CellWeights(
        draw(1, m, rows, inputs),
        draw(2, m, rows, width),
        draw(3, m, rows),
        draw(4, m, rows) if biases == 2 else None,
        draw(5, m, projection, hidden) if projection else None,
    )
    state = (draw(6, m, batch, width), *([draw(7, m, batch, hidden)] if has_memory(cell) else []))
    return draw(8, m, time, batch, inputs), w, state


def some_starts(m: int, time: int, batch: int) -> torch.Tensor:
    """Zeros where lines begin, [m, time, batch, 1]: in the first, in the last and in other places of a window."""
    keep = (torch.rand(m, time, batch, 1, generator=torch.Generator().manual_seed(11)) > 0.3).float()
    keep[0, 0, 0], keep[0, -1, 1], keep[-1, :, -1] = 0, 0, 1
    return keep.to(DEVICE)


def both_ways(layer, x, w, state, keep=None):
    out, last, saved = layer.forward(x, w, tuple(s.clone() for s in state), keep)
    d_x, d_w = layer.backward(saved, draw(9, *out.shape), True)
    return [out.float(), *last, d_x, *[t for t in d_w if t is not None]]


# In the interpreter two shapes of each cell: a stream and packed, one bias and two, with a projection and without.
HERE = [("gru", 2, None, False), ("gru", 1, None, True), ("gru-printed", 1, None, True),
        ("lstm", 2, None, False), ("lstm", 1, None, True), ("lstm", 1, 12, True),
        ("cifg", 1, 12, True), ("cifg", 2, None, False)]  # fmt: skip
ALL = [(*case, packed) for case in CASES for packed in (False, True)]


@pytest.mark.parametrize(
    ("cell", "biases", "projection", "packed"),
    [case if case in HERE else pytest.param(*case, marks=ON_A_GPU) for case in ALL],
)
def test_persistent_recurrences_equal_the_plain_ones(cell, biases, projection, packed):
    x, w, state = a_layer(cell, biases, projection, m=3, batch=5, time=4, inputs=7, hidden=20)
    keep = some_starts(3, 4, 5) if packed else None
    fast, slow = (both_ways(kernels[cell], x, w, state, keep) for kernels in (TRITON.layers, LAYERS))
    for got, want in zip(fast, slow, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.skipif(not GPU, reason="Triton's interpreter does not multiply bf16")
@pytest.mark.parametrize("packed", [False, True], ids=["stream", "packed"])
@pytest.mark.parametrize("hidden", [20, 304])
@pytest.mark.parametrize(("cell", "biases", "projection"), [*CASES, ("cifg", 1, 96), ("lstm", 1, 96)])
def test_persistent_recurrences_in_bf16_are_near(cell, biases, projection, hidden, packed):
    x, w, state = a_layer(cell, biases, projection, m=12, batch=10, time=35, inputs=6, hidden=hidden)
    w = w._replace(hh=w.hh / w.hh.shape[-1] ** 0.5, hr=None if w.hr is None else w.hr / hidden**0.5)  # no chaos
    half = CellWeights(*(t if t is None or t.dim() < 3 else t.bfloat16() for t in w))
    keep = some_starts(12, 35, 10) if packed else None
    near = both_ways(TRITON.layers[cell], x.bfloat16(), half, state, keep)
    for got, want in zip(near, both_ways(LAYERS[cell], x, w, state, keep), strict=True):
        assert float((got - want).norm() / want.norm()) < 2e-2


@pytest.mark.parametrize("vocab", [37, 5000])
def test_softmax_and_its_gradient(vocab):
    features, weight, bias = draw(1, 2, 9, 8), draw(2, 2, vocab, 8), draw(3, 2, vocab)
    targets = torch.randint(0, vocab, (2, 9), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    scale = torch.full((2, 9), 1 / 7, device=DEVICE)
    scale[:, 7:] = 0
    want = output_gradients(features, weight, bias, targets, scale, {})
    for got, expected in zip(TRITON.output(features, weight, bias, targets, scale, {}), want, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_rows_of_a_word_that_occurs_often_are_added_once_each():
    tokens = torch.tensor([[5, 7, 5, 5, 0, 9, 7], [1, 1, 1, 1, 1, 1, 1]], device=DEVICE)
    rows = draw(1, 2, 7, 6)
    rows[0, 4] = 0  # padding
    table, plain = draw(2, 2, 11, 6), draw(2, 2, 11, 6)
    TRITON.add_rows(table, tokens, rows)
    plain_add_rows(plain, tokens, rows)
    torch.testing.assert_close(table, plain, **CLOSE)


RULES = [
    descents.sgd(SgdRule(0.5, None, 0.0, 0.0), lambda r: 0.1, 1),
    descents.sgd(SgdRule(0.0, 0.3, 0.01, 0.2), lambda r: 0.1, 1),
    descents.adam(AdamRule(0.9, 0.999, 1e-8, None, 0.0), lambda r: 0.1, 1),
    descents.adam(AdamRule(0.9, 0.99, 1e-6, 0.3, 0.2), lambda r: 0.1, 1),
]


@pytest.mark.parametrize("number", range(len(RULES)))
@pytest.mark.parametrize(("dual", "copied"), [(False, False), (True, True), (False, True)])
def test_moves_equal_the_definition_and_leave_idle_clients_alone(number, dual, copied):
    rule = RULES[number]

    def a_way() -> ClientBatch:
        local = {"a": draw(1, 3, 40, 6), "b": draw(2, 3, 6)}
        theta = {"a": draw(3, 40, 6), "b": draw(4, 6)}
        price = {"a": draw(5, 3, 40, 6), "b": draw(6, 3, 6)} if dual else None
        return ClientBatch(
            local, theta, price, rule.begin(local), torch.tensor([0.1, 0.2, 0.3], device=DEVICE), Tally(3, DEVICE)
        )

    fast, slow = a_way(), a_way()
    places = {"a": PaddedLayer(2, 20, 6, 24, 8), "b": PaddedLayer(2, 3, 1, 8, 1)} if copied else None
    copies = {"a": torch.zeros(3, 48, 8, dtype=torch.bfloat16, device=DEVICE), "b": torch.zeros(3, 16, device=DEVICE)}
    products = copies if copied else fast.local
    for step in range(3):
        tokens = torch.tensor([4.0, 0.0, 2.0], device=DEVICE)
        grads = {"a": draw(10 + step, 3, 40, 6), "b": draw(20 + step, 3, 6)}
        for g in grads.values():
            g[1] = 0  # who has no text has no gradient
        given = {name: g.clone() for name, g in grads.items()}
        if places is not None:
            given = {name: torch.zeros_like(copies[name], dtype=torch.float32) for name in grads}
            fill_copies(places, given, grads)
        TRITON.move(rule, fast, Gradient(tokens, tokens, given), products, places)
        rule.move(slow, Gradient(tokens, tokens, grads))
    for name, w in slow.local.items():
        torch.testing.assert_close(fast.local[name], w, **CLOSE)
    for name, kept in slow.memory.items():
        torch.testing.assert_close(fast.memory[name], kept, **CLOSE)
    for name, place in (places or {}).items():
        copy = place.real(copies[name]).float().reshape(slow.local[name].shape)
        torch.testing.assert_close(copy[[0, 2]], fast.local[name][[0, 2]], rtol=2**-7, atol=0)  # bf16 has 8 bits
        assert int(copies[name].count_nonzero()) == int(copy[[0, 2]].count_nonzero())  # nothing but them was written


STEPS = [(cell, dense, tied, packed) for cell, dense in (("gru", None), ("lstm", 12), ("cifg", None))
         for tied, packed in ((False, False), (True, False), (True, True))]  # fmt: skip
STEPS_HERE = [("gru", None, True, False), ("lstm", 12, True, True), ("cifg", None, False, False)]


@pytest.mark.parametrize(
    ("cell", "dense", "tied", "packed"),
    [case if case in STEPS_HERE else pytest.param(*case, marks=ON_A_GPU) for case in STEPS],
)
def test_a_whole_step_equals_the_plain_one(cell, dense, tied, packed):
    embed = dense or 20
    spec = ModelSpec("s", cell, vocab=50, embed=embed, hidden=20, layers=2, dense=dense, tied=tied, dropout=0.0)
    params = {name: w.to(DEVICE) for name, w in lm.stack(lm.init_params(spec, 1), 3).items()}
    tokens = torch.randint(1, 50, (2, 3, 4, 3), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = torch.ones(3, 4, 3, device=DEVICE)
    mask[0, :, 2:] = 0
    mask[2] = 0
    starts = some_starts(3, 3, 4)[..., 0].transpose(1, 2) == 0 if packed else None
    batch = Batch(tokens[0] * mask.long(), tokens[1] * mask.long(), mask, starts)
    state = lm.initial_state(spec, params, 4)
    fast, _ = gradient(spec, params, batch, lm.initial_state(spec, params, 4), None, {}, TRITON)
    slow, _ = gradient(spec, params, batch, state, None, {}, PLAIN)
    torch.testing.assert_close(fast.nats, slow.nats, **CLOSE)
    for name, g in slow.grads.items():
        torch.testing.assert_close(fast.grads[name], g, **CLOSE)


@pytest.mark.parametrize(("batch", "expected"), [(5, 128), (16, 128), (20, 32), (64, None)])
def test_a_slice_leaves_room_for_what_its_projection_reads(batch, expected):
    """50 clients of the CIFG with batches of 20: slices of 128 units asked for 245,760 bytes of 232,448."""
    hidden, width = 670, 96
    weight = torch.empty(50, 3 * hidden, width, dtype=torch.bfloat16)
    beside = triton_kernels._rows(batch) * sum(triton_kernels._pieces(hidden)) * 6
    held = partial(triton_kernels._held, hidden, width, 3, True)
    assert triton_kernels._units(50, hidden, held, weight, beside) == expected
    assert held(128) * 2 + 32 * 768 * 6 == 245_760
