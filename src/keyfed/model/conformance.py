"""What a language model must be to be trained here, and a suite that checks whether it reads text as one must.

    module(tokens)         → logits, or (logits, state)     at the start of a text
    module(tokens, state)  → (logits, state)                going on from there

`tokens` is [batch, time] int64; `logits` is [batch, time, vocabulary], where position t may use tokens up to and
including t and predicts token t + 1; `state` is any nest of tuples, lists and dictionaries of tensors. A module that
returns logits alone has no memory: its context ends where a window ends.

Every check stands for a defect found in published code that no loss curve shows. It runs on the models we ship and on a
user's own `torch.nn.Module`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from keyfed.errors import DataError, ShapeMismatch
from keyfed.model import language_model as lm

Predictor = Callable[[Tensor], Tensor]
"""tokens [batch, time] int64 → logits [batch, time, vocabulary]; position t may use tokens ≤ t."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor | float]
"""(logits [batch, time, vocabulary], targets [batch, time], mask [batch, time], 0 = padding) → one number."""

WINDOW = 20  # tokens a model reads before a prediction
FEWEST_WINDOWS, MOST_WINDOWS = 64, 512  # of the held-out text, side by side without overlap
BATCH = 6  # rows of the structural checks; differs from WINDOW, so that swapped axes show in the shape
CHANGE = 1e-5  # of a prediction, relative to the largest logit where that is above 1
LOGITS_AT_A_TIME = 8_000_000


def logits_of(out: Any, tokens: Tensor, vocab_size: int) -> Tensor:
    """Take the logits out of what a module returned and check their shape.

    Example:
      >>> import torch
      >>> list(logits_of((torch.zeros(2, 5, 9), "a state"), torch.zeros(2, 5), 9).shape)
      [2, 5, 9]
    """
    logits = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(logits, Tensor):
        raise ShapeMismatch(
            f"tokens {list(tokens.shape)} gave {type(out).__name__}, expected logits [batch, time, vocabulary] or a "
            "pair (logits, state)"
        )
    got, want = list(logits.shape), [*tokens.shape, vocab_size]
    if got != want:
        swapped = got[:2] == [want[1], want[0]]
        hint = "set batch_first, or transpose" if swapped else "every token read gives a row of logits"
        raise ShapeMismatch(f"tokens {want[:2]} gave logits {got}, expected {want}: {hint}")
    return logits


@dataclass(frozen=True, slots=True)
class Check:
    """What was demanded, whether it holds, what was measured and, on failure, the usual causes."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Trial:
    predict: Predictor
    windows: Tensor  # [n, WINDOW + 1]: inputs and, one later, targets
    rows: Tensor  # a small batch of inputs, [BATCH, WINDOW]
    other: Tensor  # as much other text
    vocab_size: int
    pad: int
    seed: int
    loss: Loss


Outcome = tuple[bool, str]
Words = Collection[str]


def check_model(
    predict: Predictor | nn.Module,
    text: Tensor | NDArray[Any],
    *,
    vocab_size: int,
    pad: int = 0,
    seed: int = 0,
    loss: Loss | None = None,
) -> list[Check]:
    """Run every check on a trained model; a check that raises has failed, the others still run.

    Args:
      predict: the model. A module is put in evaluation mode and restored afterwards, and gets its tokens on the
        device of its parameters; where it returns a tuple (logits, state), the logits are taken.
      text: held-out stream of token ids, [tokens]; the model must not have been trained on it.
      vocab_size: number of tokens the model tells apart, specials included.
      pad: token that fills batches up.
      seed: of the shuffles.
      loss: the loss the model is trained with, to see that it ignores padding; None takes the masked mean.

    Raises:
      DataError: the text is too short, or holds ids outside the vocabulary.

    Example:
      >>> constant = lambda tokens: torch.zeros(*tokens.shape, 9)  # knows nothing, does nothing wrong
      >>> checks = check_model(constant, torch.arange(2_000) % 9, vocab_size=9)
      >>> [check.name for check in checks if not check.passed]
      ['context is used']
    """
    windows = _windows(text, vocab_size)
    rows, other = windows[: 2 * BATCH, :-1].contiguous().view(2, BATCH, WINDOW)
    model = _shaped(predict, vocab_size)
    trial = _Trial(model, windows, rows, other, vocab_size, pad, seed, loss or masked_mean_nats)
    modes = [(m, m.training) for m in predict.modules()] if isinstance(predict, nn.Module) else []
    if isinstance(predict, nn.Module):
        predict.eval()
    try:
        with torch.no_grad():
            checks = [_run(name, check, trial) for name, check in CHECKS.items()]
    finally:
        for module, training in modes:
            module.training = training
    *others, repeats = checks
    if repeats.passed or repeats.detail.startswith("raised"):
        return checks
    note = f'. But equal calls differ: first mend "{repeats.name}"'
    return [c if c.passed else replace(c, detail=c.detail + note) for c in others] + [repeats]


def check_vocabulary(vocab_words: Words, train_words: Words, test_words: Words, specials: Words) -> Check:
    """Check that no word entered the vocabulary because the test text has it.

    Such words turn unknown test tokens into known ones: the perplexity is that of another task. Words that occur
    in neither text (from public word vectors, say) are no leak.

    Example:
      >>> check_vocabulary(["a", "b"], train_words=["a"], test_words=["a", "b"], specials=[]).passed
      False
    """
    leaked = (set(vocab_words) - set(specials)) & (set(test_words) - set(train_words))
    detail = f"{len(leaked)} of {len(vocab_words)} words occur in the test text and not in training"
    if leaked:
        some = ", ".join(sorted(leaked)[:5]) + (", …" if len(leaked) > 5 else "")
        detail += f" ({some}): the vocabulary was built on the test file; count the training text only"
    return Check("vocabulary from training", not leaked, detail)


def passed(checks: Collection[Check]) -> bool:
    """Return whether all checks passed; no checks at all prove nothing."""
    return len(checks) > 0 and all(check.passed for check in checks)


def predictor_of(spec: lm.ModelSpec, params: lm.Params) -> Predictor:
    """Return one of our models (parameters not stacked) as a predictor, every row from the zero state."""
    lm.check_params(spec, params, "conformance")
    stacked = lm.stack(params, 1)
    weight, bias = lm.output_layer(spec, stacked)

    def predict(tokens: Tensor) -> Tensor:
        state = lm.initial_state(spec, stacked, len(tokens))
        x, _ = lm.features(spec, stacked, tokens[None].to(weight.device), state)
        return F.linear(x[0].transpose(0, 1), weight[0], bias[0])

    return predict


def masked_mean_nats(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of −log p(target) where the mask is 1: the loss that padding cannot touch."""
    nats = _nats(logits[mask > 0], targets[mask > 0])
    return nats.sum() / max(1, len(nats))


def _context_is_used(trial: _Trial) -> Outcome:
    """Shuffle everything before the last token read: the prediction after it must get worse.

    The last token stays. A model that reads across the batch axis sees, at its position, that token and those of
    other rows: its perplexity is plausible, a bigram's, and here it gains exactly 0. The comparison is paired:
    the same targets, with and without the order of their context.
    """
    inputs, targets = trial.windows[:, :-1], trial.windows[:, -1]
    generator = torch.Generator().manual_seed(trial.seed)
    order = torch.rand(len(inputs), WINDOW - 1, generator=generator).argsort(1)
    real = _nats_after(trial, inputs, targets)

    def loses(context: Tensor) -> tuple[bool, str]:
        worse = _nats_after(trial, context, targets) - real
        mean, error = float(worse.mean()), float(worse.std()) / len(worse) ** 0.5
        return mean > max(2 * error, CHANGE), f"{mean:+.4f} ± {error:.4f}"

    used, change = loses(torch.cat([inputs[:, :-1].gather(1, order), inputs[:, -1:]], 1))
    measured = f"{float(real.mean()):.3f} nats, {change} with the context shuffled before its last token"
    if used:
        return True, measured
    last, change = loses(torch.cat([inputs[:, :-1], inputs[:, -1:].roll(1, 0)], 1))
    return False, f"{measured}, {change} with only that token replaced: " + (
        "only the last token is used. The recurrence runs over the batch axis (batch_first, a transposed batch), "
        "the state is reset at every token, or it is a bigram or too little trained to beat one"
        if last
        else "no context is used. A unigram, an untrained model, or targets that are not the next token"
    )


def _causal(trial: _Trial) -> Outcome:
    """Change all tokens from some place on: every earlier prediction must stay.

    A model that sees its target copies it: its perplexity is worth nothing, for a keyboard has no next word yet.
    """
    rows, reference = trial.rows, trial.predict(trial.rows)
    known = torch.unique(trial.windows[trial.windows != trial.pad])
    different = known[(torch.searchsorted(known, rows) + 1) % len(known)]
    pairs = {}
    for at in (1, WINDOW // 3, 2 * WINDOW // 3, WINDOW - 1):
        changed = torch.cat([rows[:, :at], different[:, at:]], 1)
        pairs[f"tokens from place {at} on changed"] = (trial.predict(changed)[:, :at], reference[:, :at])
    return _unchanged(
        pairs,
        "the future is read. A bidirectional layer, attention without a causal mask, a convolution centred on "
        "its token, a normalisation over time, or targets among the inputs",
    )


def _rows_independent(trial: _Trial) -> Outcome:
    """Put a row in other company, in another order and alone: its predictions must stay.

    Rows are texts of different people. What crosses between them is no context, and is not there on a phone.
    """
    rows, reference = trial.rows, trial.predict(trial.rows)
    crowd = trial.predict(torch.cat([trial.other, rows, trial.other]))[BATCH : 2 * BATCH]
    alone = torch.cat([trial.predict(row[None]) for row in rows])
    turned = trial.predict(rows.flip(0)).flip(0)
    return _unchanged(
        {"rows reversed": (turned, reference), "one row": (alone, reference), "more rows": (crowd, reference)},
        "rows influence each other. The recurrence or attention runs over the batch axis (batch_first), one "
        "state is shared by all rows, or a normalisation takes its statistics over the batch",
    )


def _padding_neutral(trial: _Trial) -> Outcome:
    """Fill a batch up with padding, in time and with empty rows: real predictions and the loss must stay.

    Padding is easy to predict: counted, it flatters the loss, by an amount that depends on who shares the batch.
    """
    rows, targets, pad = trial.rows, trial.windows[:BATCH, 1:], trial.pad
    reference = trial.predict(rows)
    pairs = {
        "padding after each row": (trial.predict(F.pad(rows, (0, 5), value=pad))[:, :WINDOW], reference),
        "rows of padding": (trial.predict(F.pad(rows, (0, 0, 0, 3), value=pad))[:BATCH], reference),
    }
    lengths = [WINDOW - 5 * i % (WINDOW // 2) for i in range(BATCH)]
    beyond = torch.arange(WINDOW) >= torch.tensor(lengths)[:, None]
    ragged = trial.predict(rows.masked_fill(beyond, pad))
    for i, n in enumerate(lengths):
        pairs[f"rows of unequal length, row {i}"] = (ragged[i, :n], trial.predict(rows[:, :n])[i])
    same, detail = _unchanged(
        pairs,
        "padding is read. Padded at the left, positions counted from the end, a backward layer that starts in "
        "the padding, or rows that influence each other",
    )

    both, ones = (0, 5, 0, 3), torch.ones(rows.shape)
    logits = trial.predict(F.pad(rows, both, value=pad))
    plain = float(trial.loss(reference, targets, ones))
    padded = float(trial.loss(logits, F.pad(targets, both, value=pad), F.pad(ones, both)))
    equal = abs(plain - padded) <= CHANGE * max(1.0, abs(plain))  # false for NaN
    detail += f"; loss {plain:.6f} without and {padded:.6f} with padding"
    if same and not equal:
        detail += ": padding is counted in the loss. Use the mask, and divide by the number of real tokens"
    return same and equal, detail


def _probabilities(trial: _Trial) -> Outcome:
    """Look at the numbers themselves: finite logits of the right shape whose softmax sums to one."""
    logits = trial.predict(trial.rows).double()
    share = float(logits.isfinite().double().mean())
    if share < 1:
        return False, f"only {share:.2%} of the logits are finite: training diverged, or words are masked by −∞"
    if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
        return False, "the outputs are probabilities, not logits: the loss would take the softmax a second time"
    off = float((F.log_softmax(logits, -1).exp().sum(-1) - 1).abs().max())
    return off < 1e-6, f"finite logits; probabilities sum to one within {off:.0e}"


def _evaluation_repeats(trial: _Trial) -> Outcome:
    """Call twice, and once more after other text: the same text must get the same predictions.

    Otherwise a score depends on chance or on what was scored before, and two methods cannot be compared.
    """
    first, again = trial.predict(trial.rows), trial.predict(trial.rows)
    trial.predict(trial.other)
    trial.predict(trial.windows[: BATCH + 1, : WINDOW // 2])
    return _unchanged(
        {"the same call": (again, first), "the same call after others": (trial.predict(trial.rows), first)},
        "predictions are not a function of the tokens. Dropout left on (eval() overridden, F.dropout without "
        "training=self.training), a state kept from the last call, or running statistics updated on the way",
    )


CHECKS: dict[str, Callable[[_Trial], Outcome]] = {
    "context is used": _context_is_used,
    "causal": _causal,
    "rows independent": _rows_independent,
    "padding neutral": _padding_neutral,
    "probabilities": _probabilities,
    "evaluation repeats": _evaluation_repeats,
}


def _run(name: str, check: Callable[[_Trial], Outcome], trial: _Trial) -> Check:
    try:
        return Check(name, *check(trial))
    except Exception as error:
        return Check(name, False, f"raised {type(error).__name__}: {error}")


def _windows(text: Tensor | NDArray[Any], vocab_size: int) -> Tensor:
    """Cut the stream into windows of WINDOW inputs and a target, spread evenly over it, [n, WINDOW + 1]."""
    stream = text.detach().cpu().numpy() if isinstance(text, Tensor) else np.asarray(text)
    if stream.ndim != 1 or stream.dtype.kind not in "iu":
        raise DataError(f"conformance: text {stream.dtype} {list(stream.shape)}, expected token ids, [tokens]")
    span, need = WINDOW + 1, FEWEST_WINDOWS * (WINDOW + 1)
    if len(stream) < need:
        raise DataError(f"conformance: {len(stream)} tokens of held-out text, at least {need} are needed")
    starts = np.linspace(0, len(stream) - span, min(MOST_WINDOWS, len(stream) // span)).astype(np.int64)
    windows = stream[starts[:, None] + np.arange(span)].astype(np.int64)
    if not 0 <= (low := windows.min()) <= (high := windows.max()) < vocab_size:
        raise DataError(f"conformance: token ids from {low} to {high} in a vocabulary of {vocab_size}")
    return torch.from_numpy(windows)


def _shaped(predict: Predictor | nn.Module, vocab_size: int) -> Predictor:
    """Wrap a model: tokens to its device, logits out of a tuple and back, their shape checked."""
    weight = next(predict.parameters(), None) if isinstance(predict, nn.Module) else None
    device = "cpu" if weight is None else weight.device

    def shaped(tokens: Tensor) -> Tensor:
        out: Any = predict(tokens.to(device, copy=True))
        return logits_of(out, tokens, vocab_size).detach().to("cpu", copy=True)

    return shaped


def _unchanged(pairs: Mapping[str, tuple[Tensor, Tensor]], cause: str) -> Outcome:
    """Compare predictions pairwise; say which pair differs most, and the usual cause if that is too much."""
    changes = {}
    for name, (got, want) in pairs.items():
        apart = torch.where(got == want, 0.0, (got.double() - want.double()).abs())  # −∞ equals −∞
        scale = torch.where(want.isfinite(), want.double().abs(), 0.0).max().clamp(min=1)
        changes[name] = float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max() / scale)
    worst = max(changes, key=changes.__getitem__)
    limit = max(CHANGE, 64 * torch.finfo(pairs[worst][0].dtype).eps)  # half precision rounds more coarsely
    same = changes[worst] <= limit
    measured = f"predictions change by at most {changes[worst]:.0e} (allowed {limit:.0e}; most with {worst})"
    return same, measured if same else f"{measured}: {cause}"


def _nats_after(trial: _Trial, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats of the token that follows each window, [n]."""
    size = min(64, max(BATCH, LOGITS_AT_A_TIME // (WINDOW * trial.vocab_size)))
    parts = [slice(at, at + size) for at in range(0, len(inputs), size)]
    return torch.cat([_nats(trial.predict(inputs[part])[:, -1], targets[part]) for part in parts])


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p(target), [n] float64, of logits [n, vocabulary]."""
    return F.cross_entropy(logits.double(), targets, reduction="none")
