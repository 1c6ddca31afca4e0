"""Next-word suggestions from a trained model: what the strip above a keyboard would show."""

from __future__ import annotations

import torch
from torch import Tensor

from keyfed.engine.network import Network, NetworkState, Reader, reader_of
from keyfed.model.language_model import Params
from keyfed.text.batches import line_read
from keyfed.text.vocab import BOS, EOS, PAD, UNK, Vocab

NEVER = (PAD, BOS, EOS, UNK)
PROMPTS = ("how do i install", "i would like to", "we have to")
BEAM = 12
LONGEST_WORD = 24


def suggest(spec: Network, params: Params, vocab: Vocab, text: str, k: int = 3, *, lines: bool = False) -> list[str]:
    """Return the k most probable next words after `text`, specials left out.

    A character model completes the word being typed (or starts a new one after a blank) by a beam search over
    characters.

    Args:
      lines: whether the model learnt from single lines (sentences or packed lines); it then reads the last one only.
    """
    ids = [EOS, *vocab.encode_context(text).tolist()]  # a text starts where a line starts
    context = torch.tensor([line_read(ids) if lines else ids])
    reader = reader_of(spec, params)
    logits, state = reader.after(context, None)
    logp = logits.log_softmax(-1)
    if vocab.kind == "char":
        typed = text.rsplit(None, 1)[-1] if text and not text[-1].isspace() else ""
        return [typed + rest for rest in _complete(reader, vocab, logp[0], state, k)]
    logp[0, list(NEVER)] = -torch.inf
    return [vocab.words[i] for i in logp[0].topk(min(k, len(vocab) - len(NEVER))).indices.tolist()]


def _complete(reader: Reader, vocab: Vocab, logp: Tensor, state: NetworkState, k: int) -> list[str]:
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
    state = reader.keep(state, [0] * len(beams))
    finished: list[tuple[float, list[int]]] = []
    for _ in range(LONGEST_WORD):
        logits, state = reader.after(torch.tensor([[b[1][-1]] for b in beams]), state)
        logps = logits.log_softmax(-1)
        logps[:, [PAD, BOS, UNK]] = -torch.inf
        over = logps[:, ends].logsumexp(-1)
        finished += [(s + float(o), t) for (s, t), o in zip(beams, over, strict=True)]
        logps[:, ends] = -torch.inf
        total = torch.tensor([b[0] for b in beams])[:, None] + logps
        best, flat = total.flatten().topk(min(BEAM, total.numel()))
        rows, columns = flat // total.shape[1], flat % total.shape[1]
        beams = [(float(s), [*beams[r][1], int(c)]) for s, r, c in zip(best, rows.tolist(), columns, strict=True)]
        state = reader.keep(state, rows.tolist())
        finished = sorted(finished, reverse=True)[:k]
        if len(finished) == k and finished[-1][0] >= beams[0][0]:
            break
    return [vocab.decode(t) for _, t in finished]
