"""Does the exported graph say what the trained network says? Both read the same text, step by step.

Also the test vectors that travel with an export, so that a page can ask the same of itself. They hold no person's text:
their tokens are drawn by a fixed seed and their sentences are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keyfed.engine.network import SpecReader
from keyfed.errors import RunError
from keyfed.keyboard.extra import need
from keyfed.keyboard.graph import state_widths
from keyfed.model.language_model import ModelSpec, output_layer, stack
from keyfed.run.evaluate import limit_streams
from keyfed.text.batches import lines_of
from keyfed.text.vocab import BOS, EOS, SPECIALS, Vocab

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
    weight, bias = (part[0] for part in output_layer(spec, stack(params, 1)))
    for t in range(tokens.shape[1]):
        yield torch.addmm(bias, read[:, t], weight.T).log_softmax(-1).numpy()


@dataclass(frozen=True, slots=True)
class Parity:
    """What was measured.

    Attributes:
      text: what was read.
      most: largest |Δ log p| between the graph and torch, with the weights that are shipped.
      top3_agreement: share of the three best words of the trained weights that are among the three best of those
        shipped; `top3_same` the share of places with the same three. 1 for fp32, which ships the trained ones.
    """

    text: str
    positions: int
    most: float
    top3_agreement: float
    top3_same: float


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


def refuse_difference(found: Parity, run: str) -> None:
    """Raise RunError where the graph is not the network."""
    if not found.most <= MOST:
        raise RunError(
            f"{run}: the exported graph differs from the trained network by {found.most:.1e} nats on {found.text} "
            f"(allowed {MOST:g}); nothing was written"
        )


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
