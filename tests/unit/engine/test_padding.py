"""The wider copies of a model are the same function with the same gradients."""

from __future__ import annotations

import pytest
import torch

from keyfed.engine.kernels.step import fill_copies, gradient, layouts, make_copies, own_gradients, widened
from keyfed.model import language_model as lm
from keyfed.model.language_model import Batch, Dropout, ModelSpec, shapes

SPECS = [
    ModelSpec("a", "gru", vocab=29, embed=10, hidden=10, tied=True),
    ModelSpec("b", "lstm", vocab=29, embed=9, hidden=12, layers=2, dense=9, tied=True, biases=1),
    ModelSpec("c", "lstm", vocab=32, embed=9, hidden=13),
    ModelSpec("d", "cifg", vocab=29, embed=7, hidden=19, projection=7, tied=True, biases=1),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_copies_are_the_same_function_with_the_same_gradients(spec, rate):
    # Weights that bf16 can hold, so that copies lose nothing.
    local = {name: w.bfloat16().float() for name, w in lm.stack(lm.init_params(spec, 1), 3).items()}
    wide, places = widened(spec), layouts(spec)
    copies = make_copies(spec, local)
    fill_copies(places, copies, local)
    assert {name: tuple(c.shape[1:]) for name, c in copies.items()} == shapes(wide)
    assert all(side % 8 == 0 for name in copies for side in copies[name].shape[1:])
    tokens = torch.randint(1, spec.vocab, (2, 3, 4, 6), generator=torch.Generator().manual_seed(2))
    batch = Batch(tokens[0], tokens[1], torch.ones(3, 4, 6))
    seeds, taken = torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    drop = Dropout(rate, seeds, taken)
    slow, last = gradient(spec, local, batch, lm.initial_state(spec, local, 4), drop, {})
    full = {name: c.float() for name, c in copies.items()}
    wider = drop._replace(widths=(spec.embed, *[spec.width] * spec.layers))
    fast, wide_last = gradient(wide, full, batch, lm.initial_state(wide, full, 4), wider, {})
    torch.testing.assert_close(fast.nats, slow.nats, rtol=1e-6, atol=1e-6)
    mine = own_gradients(places, fast.grads, local)
    for name, g in slow.grads.items():
        torch.testing.assert_close(mine[name], g, rtol=1e-5, atol=1e-7)
        # What was added has no gradient: a norm over the copies is that of the model.
        torch.testing.assert_close(fast.grads[name].norm(), g.norm(), rtol=1e-5, atol=1e-7)
    for layer, wide_layer in zip(last, wide_last, strict=True):
        for s, ws in zip(layer, wide_layer, strict=True):
            torch.testing.assert_close(ws[..., : s.shape[-1]], s, rtol=1e-5, atol=1e-6)
            assert float(ws[..., s.shape[-1] :].abs().sum()) == 0
