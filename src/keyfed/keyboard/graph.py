"""One step of a language model as an ONNX graph: token and states in, log-probabilities and states out.

The weights are graph inputs under the names they have in `model.safetensors`, so a new round is a new weights file and
not a new graph. The equations are those of `keyfed.model.cells`, node for node. Products are `Gemm` with `transB`: the
tied embedding is read as it is stored, by `Gather` on the way in and by `Gemm` on the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keyfed.keyboard.extra import need
from keyfed.model.language_model import ModelSpec, shapes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OPSET = 17
IR_VERSION = 8  # of opset 17's time: every runtime since reads it
ROWS = "n"  # name of the batch axis, which is as long as one likes


def state_widths(spec: ModelSpec) -> dict[str, int]:
    """Return the states by name, in the graph's order: `h0`, `h1`, … and, where the cell has a memory, `c0`, `c1`, ….

    Example:
      >>> state_widths(ModelSpec("cifg", "cifg", vocab=9, embed=96, hidden=670, projection=96, tied=True))
      {'h0': 96, 'c0': 670}
    """
    widths: dict[str, int] = {}
    for layer in range(spec.layers):
        widths[f"h{layer}"] = spec.width
        if spec.cell != "gru":
            widths[f"c{layer}"] = spec.hidden
    return widths


def step_graph(spec: ModelSpec) -> ModelProto:
    """Return the graph of one step: `token` [n] and states [n, width] → `logp` [n, V] and `h0_next`, … [n, width]."""
    need("onnx")
    from onnx import TensorProto, checker, helper

    real = TensorProto.FLOAT
    nodes = _Nodes()
    x = nodes.add("Gather", "embedding.weight", "token")
    for layer in range(spec.layers):
        x = _CELLS[spec.cell](nodes, spec, layer, x)
    if spec.dense:
        x = nodes.gemm(x, "dense.weight", "dense.bias")
    logits = nodes.gemm(x, "embedding.weight" if spec.tied else "output.weight", "output.bias")
    nodes.add("LogSoftmax", logits, name="logp", axis=-1)

    states = state_widths(spec)
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT32, [ROWS])]
    inputs += [helper.make_tensor_value_info(name, real, [ROWS, width]) for name, width in states.items()]
    inputs += [helper.make_tensor_value_info(name, real, list(shape)) for name, shape in shapes(spec).items()]
    outputs = [helper.make_tensor_value_info("logp", real, [ROWS, spec.vocab])]
    outputs += [helper.make_tensor_value_info(f"{name}_next", real, [ROWS, width]) for name, width in states.items()]
    constants = [helper.make_tensor("one", real, [], [1.0])] if spec.cell != "lstm" else []
    graph = helper.make_graph(nodes.made, "step", inputs, outputs, initializer=constants)
    model = helper.make_model(
        graph, producer_name="keyfed", opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    checker.check_model(model, full_check=True)
    return model


class _Nodes:
    """Nodes in order of computation; every output has a name of its own."""

    def __init__(self) -> None:
        self.made: list[NodeProto] = []

    def add(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        return self.split(kind, *inputs, names=[name or f"{kind.lower()}_{len(self.made)}"], **attributes)[0]

    def split(self, kind: str, *inputs: str, names: list[str], **attributes: Any) -> list[str]:
        from onnx import helper

        self.made.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def gemm(self, x: str, weight: str, bias: str | None = None) -> str:
        """x Wᵀ + b."""
        return self.add("Gemm", x, weight, *([] if bias is None else [bias]), transB=1)

    def gates(self, x: str, count: int) -> list[str]:
        """Cut [n, count·hidden] into the gates."""
        return self.split("Split", x, names=[f"split_{len(self.made)}_{k}" for k in range(count)], axis=1)


def _projections(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> tuple[str, str]:
    """W_ih x + b_ih and W_hh h + b_hh; a model of one bias has only b_ih."""
    inputs = nodes.gemm(x, f"rnn.weight_ih_l{layer}", f"rnn.bias_ih_l{layer}")
    second = f"rnn.bias_hh_l{layer}" if spec.biases == 2 else None
    return inputs, nodes.gemm(f"h{layer}", f"rnn.weight_hh_l{layer}", second)


def _gru(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> str:
    """Write h' = (1 − z) ⊙ n + z ⊙ h, the reset gate acting after the product."""
    inputs, recurrent = _projections(nodes, spec, layer, x)
    i_r, i_z, i_n = nodes.gates(inputs, 3)
    h_r, h_z, h_n = nodes.gates(recurrent, 3)
    r = nodes.add("Sigmoid", nodes.add("Add", i_r, h_r))
    z = nodes.add("Sigmoid", nodes.add("Add", i_z, h_z))
    n = nodes.add("Tanh", nodes.add("Add", i_n, nodes.add("Mul", r, h_n)))
    fresh = nodes.add("Mul", nodes.add("Sub", "one", z), n)
    return nodes.add("Add", fresh, nodes.add("Mul", z, f"h{layer}"), name=f"h{layer}_next")


def _lstm(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> str:
    """Write c' = f ⊙ c + i ⊙ g, h' = o ⊙ tanh(c')."""
    i, f, g, o = nodes.gates(nodes.add("Add", *_projections(nodes, spec, layer, x)), 4)
    kept = nodes.add("Mul", nodes.add("Sigmoid", f), f"c{layer}")
    fresh = nodes.add("Mul", nodes.add("Sigmoid", i), nodes.add("Tanh", g))
    c = nodes.add("Add", kept, fresh, name=f"c{layer}_next")
    return nodes.add("Mul", nodes.add("Sigmoid", o), nodes.add("Tanh", c), name=f"h{layer}_next")


def _cifg(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> str:
    """Write c' = (1 − i) ⊙ c + i ⊙ g, h' = W_hr (o ⊙ tanh(c')); without a projection W_hr is the identity."""
    i, g, o = nodes.gates(nodes.add("Add", *_projections(nodes, spec, layer, x)), 3)
    i = nodes.add("Sigmoid", i)
    kept = nodes.add("Mul", nodes.add("Sub", "one", i), f"c{layer}")
    c = nodes.add("Add", kept, nodes.add("Mul", i, nodes.add("Tanh", g)), name=f"c{layer}_next")
    gated = (nodes.add("Sigmoid", o), nodes.add("Tanh", c))
    if not spec.projection:
        return nodes.add("Mul", *gated, name=f"h{layer}_next")
    weight = f"rnn.weight_hr_l{layer}"
    return nodes.add("Gemm", nodes.add("Mul", *gated), weight, name=f"h{layer}_next", transB=1)


_CELLS = {"gru": _gru, "lstm": _lstm, "cifg": _cifg}
