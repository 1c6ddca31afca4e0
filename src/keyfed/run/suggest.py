"""Next-word suggestions from a trained model: what the strip above a keyboard would show."""

from __future__ import annotations

import torch
from torch import Tensor

from keyfed.engine.kernels import KERNELS
from keyfed.model.language_model import ModelSpec, ModelState, Params, features, initial_state, output_layer, stack
from keyfed.text.vocab import BOS, EOS, PAD, UNK, Vocab

NEVER = (PAD, BOS, EOS, UNK)
PROMPTS = ("the people of the united", "i would like to", "we have to")
BEAM = 12
LONGEST_WORD = 24


class _Reader:
    """A model that reads one token after the other."""

    def __init__(self, spec: ModelSpec, params: Params) -> None:
        self.spec = spec
        self.params = stack(params, 1)
        self.weight, self.bias = output_layer(spec, self.params)

    @torch.no_grad()
    def read(self, rows: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Read [rows, time] tokens and return the log-probabilities after the last one, [rows, V], and the state."""
        state = state or initial_state(self.spec, self.params, rows.shape[0])
        x, state = features(self.spec, self.params, rows[None], state, recurrence=KERNELS[self.spec.cell])
        logits = torch.baddbmm(self.bias[:, None], x[:, -1], self.weight.mT)[0]
        return logits.log_softmax(-1), state


def suggest(spec: ModelSpec, params: Params, vocab: Vocab, text: str, k: int = 3) -> list[str]:
    """Return the k most probable next words after `text`, specials left out.

    A character model completes the word being typed (or starts a new one after a blank) by a beam search over
    characters.
    """
    ids = vocab.encode_context(text).astype("int64")
    context = torch.tensor([[EOS, *ids.tolist()]])  # a text starts where a line starts
    reader = _Reader(spec, params)
    logp, state = reader.read(context)
    if vocab.kind == "char":
        typed = text.rsplit(None, 1)[-1] if text and not text[-1].isspace() else ""
        return [typed + rest for rest in _complete(reader, vocab, logp[0], state, k)]
    logp[0, list(NEVER)] = -torch.inf
    return [vocab.words[i] for i in logp[0].topk(min(k, len(vocab) - len(NEVER))).indices.tolist()]


def _complete(reader: _Reader, vocab: Vocab, logp: Tensor, state: ModelState, k: int) -> list[str]:
    """Beam search for the k most probable character strings that end in a blank or a line end."""
    ends = [i for i, w in enumerate(vocab.words) if i == EOS or w.isspace()]
    logp = logp.clone()
    logp[[PAD, BOS, UNK]] = -torch.inf
    if not any(w.strip() for w in vocab.words[len(NEVER) :]):
        return []
    first = logp.clone()
    first[ends] = -torch.inf  # the first character of a suggestion is not a blank
    scores, tokens = first.topk(min(BEAM, int(torch.isfinite(first).sum())))
    beams = [(float(s), [int(t)]) for s, t in zip(scores, tokens, strict=True)]
    state = _repeat(state, [0] * len(beams))
    finished: list[tuple[float, list[int]]] = []
    for _ in range(LONGEST_WORD):
        logps, state = reader.read(torch.tensor([[b[1][-1]] for b in beams]), state)
        logps[:, [PAD, BOS, UNK]] = -torch.inf
        over = logps[:, ends].logsumexp(-1)
        finished += [(s + float(o), t) for (s, t), o in zip(beams, over, strict=True)]
        logps[:, ends] = -torch.inf
        total = torch.tensor([b[0] for b in beams])[:, None] + logps
        best, flat = total.flatten().topk(min(BEAM, total.numel()))
        rows, columns = flat // total.shape[1], flat % total.shape[1]
        beams = [(float(s), [*beams[r][1], int(c)]) for s, r, c in zip(best, rows.tolist(), columns, strict=True)]
        state = _repeat(state, rows.tolist())
        finished = sorted(finished, reverse=True)[:k]
        if len(finished) == k and finished[-1][0] >= beams[0][0]:
            break
    return [vocab.decode(t) for _, t in finished]


def _repeat(state: ModelState, rows: list[int]) -> ModelState:
    return tuple(tuple(s[:, rows] for s in layer) for layer in state)
