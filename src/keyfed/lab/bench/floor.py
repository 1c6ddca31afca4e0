"""The roofline of a CPU: what a round's matrix products cost at the rate this machine multiplies such shapes.

Nothing exact can be faster than its products; what a contender takes beyond them is softmax, gates and updates.
Products are measured alone, into memory that exists already, with the shapes and layouts of a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keyfed.lab.bench.contenders import BATCH, LR, MOMENTUM, Task
from keyfed.model.cells import gates_of
from keyfed.model.language_model import ModelSpec, parameter_count
from keyfed.text.batches import stream_steps

SECONDS = 0.2  # each shape is repeated for at least so long


class Product(NamedTuple):
    """[rows, inner] × [inner, columns], `times` in a step.

    Attributes:
      pass_: which pass it belongs to; decides how the operands lie in memory.
    """

    part: str
    pass_: Literal["forward", "to input", "to weight"]
    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of a step's products of this shape."""
        return 2 * self.rows * self.inner * self.columns * self.times


def three_passes(part: str, tokens: int, width: int, columns: int) -> list[Product]:
    """Products of x W^T, of its gradient by x and of its gradient by W."""
    return [
        Product(part, "forward", tokens, width, columns),
        Product(part, "to input", tokens, columns, width),
        Product(part, "to weight", columns, tokens, width),
    ]


def products(spec: ModelSpec, rows: int, window: int) -> list[Product]:
    """Return the products of one training step."""
    tokens, gates, out = rows * window, gates_of(spec.cell) * spec.hidden, []
    for layer in range(spec.layers):
        out += three_passes("input", tokens, spec.embed if layer == 0 else spec.width, gates)
        # One product a token each way; the weight's gradient is one product over all tokens.
        out += [p._replace(times=window) for p in three_passes("recurrent", rows, spec.width, gates)[:2]]
        out.append(Product("recurrent", "to weight", gates, tokens, spec.width))
    return out + three_passes("output", tokens, spec.output_width, spec.vocab)


def seconds_of(work: Callable[[], object], least: float) -> float:
    """CPU seconds of one call: the mean over at least `least` seconds, after a first call that is not counted."""
    work()
    calls, began = 0, time.process_time()
    while True:
        work()
        calls += 1
        spent = time.process_time() - began
        if spent >= least:
            return spent / calls


def measure_product(product: Product, least: float) -> float:
    """CPU seconds of a step's products of this shape, operands laid out as the step has them."""
    rows, inner, columns = product.rows, product.inner, product.columns
    left = torch.rand(inner, rows).T if product.pass_ == "to weight" else torch.rand(rows, inner)
    right = torch.rand(columns, inner).T if product.pass_ == "forward" else torch.rand(inner, columns)
    out = torch.empty(rows, columns)
    return product.times * seconds_of(lambda: torch.mm(left, right, out=out), least)


def passes(spec: ModelSpec, tokens: int) -> dict[str, Callable[[], object]]:
    """Return what no exact method does without beside the products: softmax in place, the update with momentum."""
    logits = torch.rand(tokens, spec.vocab)
    w, v, g = (torch.zeros(parameter_count(spec)) for _ in range(3))

    def update() -> Tensor:
        return w.add_(v.mul_(MOMENTUM).add_(g), alpha=-LR)

    return {"softmax": lambda: torch.softmax(logits, 1, out=logits), "update": update}


def measure_floor(task: Task, least: float = SECONDS) -> dict[str, object]:
    """Return the CPU seconds of the round's products, by part, and of the passes beside them (not in the floor)."""
    steps = stream_steps(task.texts[0], BATCH, task.window)
    count = task.epochs * task.clients * sum(s.inputs.shape[1] for s in steps) / task.window
    rows = steps[0].inputs.shape[0]
    shapes: Sequence[Product] = products(task.spec, rows, task.window)
    parts: dict[str, float] = {}
    for product in shapes:
        parts[product.part] = parts.get(product.part, 0.0) + count * measure_product(product, least)
    total = sum(parts.values())
    beside = {name: count * seconds_of(work, least) for name, work in passes(task.spec, rows * task.window).items()}
    flops = count * sum(p.flops for p in shapes)
    return {
        "cpu_seconds": total,
        "parts": parts,
        "beside": beside,
        "gflops": flops / 1e9,
        "gflops_rate": flops / 1e9 / total,
    }
