"""One step of a language model as an ONNX graph: token and states in, log-probabilities and states out.

The weights are graph inputs under the names they have in `model.safetensors`, so a new round is a new weights file and
not a new graph. The equations are those of `keyfed.model.cells`, node for node. Products are `Gemm` with `transB`: the
tied embedding is read as it is stored, by `Gather` on the way in and by `Gemm` on the way out.

`measure` compares the exported graph with the trained network: both read the same text, step by step. `make_vectors`
makes the test vectors of an export, by which a page checks itself. They hold no person's text: their tokens are drawn
by a fixed seed and their sentences are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import SpecReader
from keyfed.model.cells import has_memory
from keyfed.model.language_model import ModelSpec, output_layer, shapes, stack
from keyfed.run.evaluate import limit_streams
from keyfed.system import need_extra
from keyfed.text.batches import lines_of
from keyfed.text.vocab import BOS, EOS, SPECIALS, Vocab

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OPSET = 17
IR_VERSION = 8  # of opset 17's time: every runtime since reads it
AXIS = "n"  # name of the batch axis, which is as long as one likes

Floats = NDArray[np.float32]
Tokens = NDArray[np.int32]

MOST = 1e-4  # |Δ log p| that arithmetic in another order may make
ROWS, STEPS = 16, 256  # texts read side by side, tokens of each
LINE = 12  # tokens of a line, for models of lines
VECTOR_LENGTHS = (1, 2, 3, 5, 8, 13, 32)
TEXTS = (
    "",
    "the state of the",
    "Don’t panic: it's 1,234.5 well-being 😀!",
    "one line\nanother line\n",
    "  blanks\tand\u00a0more  ",
    "naïve cafe\u0301 Straße İstanbul ΣΟΦΟΣ",
    "שלום עולם 123 مرحبا",
    "नमस्ते दुनिया 👩‍👩‍👧 🇩🇪 ❤️",
    "<unk> <eos> a_b foo@bar.org http://x.y/z?q=1 ---",
    "control \x00\x07\x1b characters\x85and\u2028lines",
)


def need(*packages: str) -> None:
    """Raise ConfigError, with the command that mends it, unless the packages are installed.

    Example:
      >>> need("numpy")
    """
    need_extra("keyboard", "the keyboard", *packages)


def state_widths(spec: ModelSpec) -> dict[str, int]:
    """Return the states by name, in the graph's order: `h0`, `h1`, … and, where the cell has a memory, `c0`, `c1`, ….

    Example:
      >>> state_widths(ModelSpec("cifg", "cifg", vocab=9, embed=96, hidden=670, projection=96, tied=True))
      {'h0': 96, 'c0': 670}
    """
    widths: dict[str, int] = {}
    for layer in range(spec.layers):
        widths[f"h{layer}"] = spec.width
        if has_memory(spec.cell):
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
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT32, [AXIS])]
    inputs += [helper.make_tensor_value_info(name, real, [AXIS, width]) for name, width in states.items()]
    inputs += [helper.make_tensor_value_info(name, real, list(shape)) for name, shape in shapes(spec).items()]
    outputs = [helper.make_tensor_value_info("logp", real, [AXIS, spec.vocab])]
    outputs += [helper.make_tensor_value_info(f"{name}_next", real, [AXIS, width]) for name, width in states.items()]
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


def _gru_printed(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> str:
    """Write h' = (1 − z) ⊙ h + z ⊙ n, the reset gate acting inside the product."""
    inputs, recurrent = _projections(nodes, spec, layer, x)
    i_r, i_z, i_n = nodes.gates(inputs, 3)
    h_r, h_z, _ = nodes.gates(recurrent, 3)
    r = nodes.add("Sigmoid", nodes.add("Add", i_r, h_r))
    z = nodes.add("Sigmoid", nodes.add("Add", i_z, h_z))
    last = [
        nodes.split("Split", f"rnn.{of}_hh_l{layer}", names=[f"{of}_{layer}_{k}" for k in range(3)], axis=0)[2]
        for of in ("weight", "bias")[: spec.biases]
    ]
    n = nodes.add("Tanh", nodes.add("Add", i_n, nodes.gemm(nodes.add("Mul", r, f"h{layer}"), *last)))
    old = nodes.add("Mul", nodes.add("Sub", "one", z), f"h{layer}")
    return nodes.add("Add", old, nodes.add("Mul", z, n), name=f"h{layer}_next")


def _lstm(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> str:
    """Write c' = f ⊙ c + i ⊙ g, h' = W_hr (o ⊙ tanh(c'))."""
    i, f, g, o = nodes.gates(nodes.add("Add", *_projections(nodes, spec, layer, x)), 4)
    kept = nodes.add("Mul", nodes.add("Sigmoid", f), f"c{layer}")
    fresh = nodes.add("Mul", nodes.add("Sigmoid", i), nodes.add("Tanh", g))
    return _output(nodes, spec, layer, o, nodes.add("Add", kept, fresh, name=f"c{layer}_next"))


def _cifg(nodes: _Nodes, spec: ModelSpec, layer: int, x: str) -> str:
    """Write c' = (1 − i) ⊙ c + i ⊙ g, h' = W_hr (o ⊙ tanh(c'))."""
    i, g, o = nodes.gates(nodes.add("Add", *_projections(nodes, spec, layer, x)), 3)
    i = nodes.add("Sigmoid", i)
    kept = nodes.add("Mul", nodes.add("Sub", "one", i), f"c{layer}")
    c = nodes.add("Add", kept, nodes.add("Mul", i, nodes.add("Tanh", g)), name=f"c{layer}_next")
    return _output(nodes, spec, layer, o, c)


def _output(nodes: _Nodes, spec: ModelSpec, layer: int, o: str, c: str) -> str:
    """Write h' = W_hr (o ⊙ tanh(c')); without a projection W_hr is the identity."""
    gated = (nodes.add("Sigmoid", o), nodes.add("Tanh", c))
    if not spec.projection:
        return nodes.add("Mul", *gated, name=f"h{layer}_next")
    weight = f"rnn.weight_hr_l{layer}"
    return nodes.add("Gemm", nodes.add("Mul", *gated), weight, name=f"h{layer}_next", transB=1)


_CELLS = {"gru": _gru, "gru-printed": _gru_printed, "lstm": _lstm, "cifg": _cifg}


class StepRunner:
    """The exported graph with its weights, in onnxruntime on one thread."""

    def __init__(self, graph: bytes, weights: Mapping[str, Floats], spec: ModelSpec) -> None:
        need("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._weights = dict(weights)
        self._widths = state_widths(spec)

    def start(self, rows: int) -> dict[str, Floats]:
        """The state before the first token."""
        return {name: np.zeros((rows, width), np.float32) for name, width in self._widths.items()}

    def step(self, token: Tokens, state: Mapping[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
        """Read one token a row: log-probabilities [rows, V] and the state after it."""
        logp, *after = self._session.run(None, {"token": token.astype(np.int32), **state, **self._weights})
        return logp, dict(zip(self._widths, after, strict=True))


def torch_steps(spec: ModelSpec, weights: Mapping[str, Floats], tokens: Tokens) -> Iterator[Floats]:
    """Yield the log-probabilities [rows, V] after each column of tokens [rows, time], by our torch network."""
    params = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    read, _ = SpecReader(spec, params).read(torch.from_numpy(tokens.astype(np.int64)), None)
    weight, bias = (one[0] for one in output_layer(spec, stack(params, 1)))
    for t in range(tokens.shape[1]):
        yield torch.addmm(bias, read[:, t], weight.T).log_softmax(-1).numpy()


@dataclass(frozen=True, slots=True)
class Parity:
    """What was measured. In fp32, which ships the trained weights, both shares are 1."""

    text: str  # what was read
    positions: int
    most: float  # largest |Δ log p| between the graph and torch, with the weights that are shipped
    top3_agreement: float  # share of the three best words of the trained weights among the three best of those shipped
    top3_same: float  # share of places with the same three


def sample_tokens(streams: Mapping[str, NDArray[Any]], vocab: int, *, lines: bool = False) -> tuple[Tokens, bool]:
    """Return tokens [rows, time] of the streams as the model reads them, and whether there were enough.

    Args:
      lines: whether it reads single lines: the beginnings of lines behind <bos>, else running text. Where there is too
        little, the tokens are random.
    """
    most = ROWS * STEPS
    if lines:
        some = limit_streams(streams, 8 * most).values()
        long = [line[:LINE] for stream in some for line in lines_of(stream) if len(line) >= LINE][: most // (LINE + 1)]
        found = np.array([[BOS, *line] for line in long], np.int32).reshape(len(long), LINE + 1)
    else:
        text = np.concatenate([np.zeros(0, np.int32), *limit_streams(streams, most).values()])
        steps = min(STEPS, len(text) // ROWS)
        found = text[: ROWS * steps].reshape(ROWS, steps).astype(np.int32)
    if len(found) and found.shape[1] >= 2:
        return found, True
    return np.random.default_rng(0).integers(EOS, vocab, (ROWS, 32), dtype=np.int32), False


def measure(
    spec: ModelSpec,
    graph: bytes,
    shipped: Mapping[str, Floats],
    trained: Mapping[str, Floats],
    tokens: Tokens,
    text: str,
) -> Parity:
    """Read tokens [rows, time] with the graph and with torch.

    Args:
      shipped: weights as the page has them, widened; `trained` as the run has them.
    """
    runner = StepRunner(graph, shipped, spec)
    state = runner.start(len(tokens))
    most, common, same = 0.0, 0, 0
    shown = min(3, spec.vocab - len(SPECIALS))
    before = torch_steps(spec, trained, tokens)
    for t, expected in enumerate(torch_steps(spec, shipped, tokens)):
        logp, state = runner.step(tokens[:, t], state)
        gap = float(np.abs(logp - expected).max())
        most = max(most, gap) if np.isfinite(gap) else np.inf
        hits = (_top3(logp)[:, :, None] == _top3(next(before))[:, None, :]).sum((1, 2))
        common, same = common + int(hits.sum()), same + int((hits == shown).sum())
    return Parity(text, tokens.size, most, common / max(1, tokens.size * shown), same / max(1, tokens.size))


def _top3(logp: Floats) -> NDArray[np.int64]:
    """The words a strip would show: the three best, specials left out, [rows, 3]."""
    words = logp[:, len(SPECIALS) :]
    return np.argsort(-words, axis=1, kind="stable")[:, :3]


def make_vectors(spec: ModelSpec, shipped: Mapping[str, Floats], vocab: Vocab) -> dict[str, Any]:
    """Return vectors.json: what the network says after some tokens, and how some texts are cut and numbered."""
    draw = np.random.default_rng(1)
    steps = []
    for length in VECTOR_LENGTHS:
        tokens = np.concatenate([[EOS], draw.integers(EOS, spec.vocab, length - 1)]).astype(np.int32)
        logp = list(torch_steps(spec, shipped, tokens[None]))[-1][0]
        top = np.argsort(-logp, kind="stable")[:3]
        ids = np.unique(np.concatenate([top, draw.integers(0, spec.vocab, 64)]))
        others = draw.permutation(ids[~np.isin(ids, top)])[: 16 - len(top)]
        chosen = [*top.tolist(), *others.tolist()]
        steps.append({"tokens": tokens.tolist(), "top": top.tolist(), "ids": chosen, "logp": logp[chosen].tolist()})
    return {"steps": steps, "encode": [{"text": t, "ids": vocab.encode_context(t).tolist()} for t in TEXTS]}
