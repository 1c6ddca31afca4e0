"""A user's own `torch.nn.Module` in the engine: called with any client's parameters, stacked by `vmap` where torch can.

The contract is in `keyfed.model.conformance`. Layers are the module's named parameters that want a gradient, a tied
one once. Everything else in it (buffers, frozen parameters) is a constant, which the factory must make alike whenever
it is called with the same seed. A module is called a few times when it is opened (`try_out`), so that a mistake is one
line now and not wrong arithmetic later.

A module's state cannot be reset in the middle of a call. Packed rows are therefore cut where lines begin
(`line_pieces`): what goes on with the carried state is one call, what begins a line is called as a text begins.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from keyfed.errors import ConfigError, KeyfedError
from keyfed.federated.cohort import derive_seed
from keyfed.model.conformance import logits_of
from keyfed.model.language_model import Batch, Params
from keyfed.model.output import TokenScores, score_logits


class ModuleNetwork:
    """A module as the engine sees it. Made again in other processes from its factory, never sent there.

    Attributes:
      name: qualified name of the factory.
      shapes: of every layer, in the order they are stored and sent.
      window: tokens of a training window, the most it is given to read at once.
    """

    def __init__(self, make: MakeModule, vocab: int, window: int, seed: int) -> None:
        self.name = qualified_name(make)
        self.window = window
        self._made_from = (make, vocab, window, seed)
        self._module, self._device = build_module(make, vocab, seed, self.name), torch.device("cpu")
        self.shapes = {name: tuple(p.shape) for name, p in self._layers(self._module).items()}
        with seeded(seed, torch.device("cpu")):
            self._habits = try_out(self._module, vocab, window, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleNetwork, self._made_from

    def init_params(self, seed: int) -> Params:
        """The module's own initial parameters, drawn with this seed."""
        make, vocab, _, _ = self._made_from
        made = self._layers(build_module(make, vocab, seed, self.name))
        return {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in made.items()}

    def _layers(self, module: nn.Module) -> dict[str, nn.Parameter]:
        layers = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not layers:
            raise ConfigError(f'module "{self.name}" has no parameter that wants a gradient; there is nothing to train')
        for name, p in layers.items():
            if p.dtype != torch.float32:
                raise ConfigError(f'module "{self.name}": "{name}" is {p.dtype}, expected torch.float32; call .float()')
        return layers

    def unshareable(self) -> str | None:
        """Say why other processes cannot make this module, or None."""
        make = self._made_from[0]
        try:
            reference = bytes(ForkingPickler.dumps(make))
        except Exception as e:
            return f"other processes cannot make {self.name} ({first_line(e)}); move it to a file of its own"
        if b"__main__" in reference:
            return f"{self.name} is defined in the script itself; move it to a file of its own"
        return None

    def unstackable(self, device: str) -> str | None:
        """Say why clients must go through this module one at a time on a device, or None."""
        if self._habits.random:
            return f"{self.name} draws random numbers, which must not depend on who else is in the block"
        vocab = self._made_from[1]
        theta = {name: p.to(device) for name, p in self.init_params(self._made_from[3]).items()}
        two = {name: torch.stack([p, p * 0.5]).requires_grad_() for name, p in theta.items()}
        tokens = trial_tokens(vocab, min(self.window, TRIAL_TIME), 4).to(device).view(2, 2, -1)
        batch = Batch(tokens, tokens.flip(0), torch.ones(tokens.shape, device=device))
        alone = [
            ({name: w[k : k + 1] for name, w in two.items()}, Batch(*(part[k : k + 1] for part in batch[:3])))
            for k in (0, 1)
        ]
        none = torch.zeros(1, dtype=torch.int64)
        try:
            with warnings.catch_warnings():
                # Without a batching rule torch loops inside, slower than one client at a time.
                warnings.filterwarnings("error", message="There is a performance drop")
                loss, _, _, state = self._stacked(two, batch, None)
                loss = loss + self._stacked(two, batch, state)[0]
                torch.autograd.grad(loss.sum(), list(two.values()), materialize_grads=True)
        except Exception as e:
            return f"torch cannot stack {self.name} over clients ({first_line(e)})"
        for k, (params, own) in enumerate(alone):
            first, *_, state = self.step(params, own, None, none, none)
            both = first + self.step(params, own, state, none, none)[0]
            if not torch.allclose(loss[k], both[0], rtol=1e-3, atol=1e-4):
                return f"{self.name} gives other numbers when clients are stacked"
        return None

    def step(
        self,
        params: Params,
        batch: Batch,
        state: NestedState | None,
        seeds: Tensor,
        taken: Tensor,
        count: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, NestedState]:
        """Return (mean nats per real token [m], real tokens [m], hits [m], new state) of m stacked clients' batches.

        Args:
          state: carried state, stacked; None at the start of a text.
          seeds, taken: each client's seed of the round and its number of this step, for what the module draws.
          count: count the tokens that were the first guess; without it there are no hits.
        """
        if len(batch.inputs) > 1:
            if self._habits.random:
                raise ConfigError(
                    f'module "{self.name}" draws random numbers (dropout) and is not stacked; set train.block=1'
                )
            if batch.starts is None:
                return self._stacked(params, batch, state, count)
            return self._one_by_one(params, batch, state, seeds, taken, count)
        one = {name: p.squeeze(0) for name, p in params.items()}
        scale, counts = _scale(batch, params)
        before = None if state is None else tree_map(lambda s: s.squeeze(0), state)
        run = partial(self._mean_nats, one, batch.inputs[0], batch.targets[0], scale[0], before, count)
        if batch.starts is not None:
            run = partial(self._packed_nats, one, batch.inputs[0], batch.targets[0], scale[0], before, count)
            run = partial(run, batch.starts[0])
        if self._habits.random:
            with seeded(derive_seed(int(seeds[0]), "module", int(taken[0])), batch.inputs.device):
                loss, hits, after = run()
        else:
            loss, hits, after = run()
        return loss[None], counts, hits[None] if count else None, tree_map(lambda s: s.detach()[None], after)

    def _one_by_one(
        self, params: Params, batch: Batch, state: NestedState | None, seeds: Tensor, taken: Tensor, count: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, NestedState]:
        """`step` of each client after the other: lines begin at other places in each, and `vmap` cannot stack them."""
        assert batch.starts is not None
        found = []
        for k in range(len(batch.inputs)):
            one = slice(k, k + 1)
            own = {name: p[one] for name, p in params.items()}
            text = Batch(batch.inputs[one], batch.targets[one], batch.mask[one], batch.starts[one])
            before = None if state is None else tree_map(lambda s, one=one: s[one], state)
            found.append(self.step(own, text, before, seeds[one], taken[one], count))
        loss, counts, hits, after = zip(*found, strict=True)
        joined = tree_map(lambda *parts: torch.cat(parts), *after)
        return torch.cat(loss), torch.cat(counts), torch.cat(hits) if count else None, joined

    def _stacked(
        self, params: Params, batch: Batch, state: NestedState | None, count: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None, NestedState]:
        scale, counts = _scale(batch, params)
        over = (0, 0, 0, 0, None if state is None else 0)
        run = vmap(partial(self._mean_nats, count=count), in_dims=over, randomness="error")
        loss, hits, after = run(params, batch.inputs, batch.targets, scale, state)
        return loss, counts, hits if count else None, tree_map(lambda s: s.detach(), after)

    def _mean_nats(
        self,
        params: Params,
        inputs: Tensor,
        targets: Tensor,
        scale: Tensor,
        state: NestedState | None,
        count: bool = False,
    ) -> tuple[Tensor, Tensor, NestedState]:
        """One client's Σ scale · nats, its hits (0 unless they are counted) and its state."""
        logits, after = self.call(params, inputs, state, training=True)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        hits = ((logits.detach().argmax(-1) == targets) & (scale > 0)).sum() if count else torch.zeros(())
        return (nats * scale.flatten()).sum(), hits, after

    def _packed_nats(
        self,
        params: Params,
        inputs: Tensor,
        targets: Tensor,
        scale: Tensor,
        state: NestedState | None,
        count: bool,
        starts: Tensor,
    ) -> tuple[Tensor, Tensor, NestedState]:
        """`_mean_nats` of rows that hold several lines, each read from its own start; `starts` is [rows, time]."""
        time = inputs.shape[1]
        found, ends, last_rows = [], [], []
        for number, pieces in enumerate(line_pieces(starts)):
            if not pieces:
                continue
            row, begin, end = torch.tensor(pieces, device=inputs.device).T
            at = begin[:, None] + torch.arange(int((end - begin).max()), device=inputs.device)
            real, where = at < end[:, None], (row[:, None], at.clamp(max=time - 1))
            goes_on = number == 0 and self.stateful and state is not None
            before = self.keep(state, row.tolist()) if goes_on else None
            loss, hits, after = self._mean_nats(
                params, inputs[where] * real, targets[where] * real, scale[where] * real, before, count
            )
            found.append((loss, hits))
            whole = [k for k, piece in enumerate(pieces) if piece[2] == time]
            if self.stateful and whole:
                ends.append(self.keep(after, whole))
                last_rows += [pieces[k][0] for k in whole]
        loss, hits = (torch.stack(parts).sum(0) for parts in zip(*found, strict=True))
        return loss, hits, self.keep(self._join(ends), sorted(range(len(last_rows)), key=last_rows.__getitem__))

    def _join(self, states: Sequence[NestedState]) -> NestedState:
        """Put the rows of several states, not stacked, behind each other."""
        if not states:
            return ()
        leaves = zip(*(tree_flatten(state)[0] for state in states), strict=True)
        axes = self._habits.axes or ()
        joined = [torch.cat(parts, axis or 0) for parts, axis in zip(leaves, axes, strict=True)]
        return tree_unflatten(joined, tree_flatten(states[0])[1])

    def call(
        self, params: Params, tokens: Tensor, state: NestedState | None, *, training: bool
    ) -> tuple[Tensor, NestedState]:
        """Run the module with one client's parameters: (logits, state), the state () where it keeps none."""
        if self._device != tokens.device:
            self._device = tokens.device
            self._module.to(self._device)
        arguments = (tokens, state) if self.stateful and state is not None else (tokens,)
        out = functional_call(self._module.train(training), params, arguments)
        return (out[0], out[1]) if self.stateful else (out, ())

    def keep(self, state: NestedState, rows: slice | Sequence[int]) -> NestedState:
        """Pick rows of a state that is not stacked."""
        leaves, nest = tree_flatten(state)
        kept = [
            leaf if axis is None else leaf[(slice(None),) * axis + (rows,)].contiguous()
            for leaf, axis in zip(leaves, self._habits.axes or (0,) * len(leaves), strict=True)
        ]
        return tree_unflatten(kept, nest)

    def unpackable(self) -> str | None:
        """Say why its rows cannot hold several lines, or None."""
        if self.stateful and None in (self._habits.axes or ()):
            return f"{self.name} keeps a state that all rows share, which cannot be reset where one row begins a line"
        return None

    @property
    def stateful(self) -> bool:
        return self._habits.axes is not None


class ModuleReader:
    """A trained module that reads text; `keyfed.engine.network.Reader`."""

    def __init__(self, network: ModuleNetwork, params: Params) -> None:
        self.span = network.window
        self._network = network
        self._params = params

    @torch.no_grad()
    def read(self, tokens: Tensor, state: NestedState | None) -> tuple[Tensor, NestedState]:
        """[rows, time] tokens → logits [rows, time, vocabulary], window by window as it was trained."""
        parts = []
        for window in tokens.split(self.span, 1):
            logits, state = self._network.call(self._params, window, state, training=False)
            parts.append(logits)
        return torch.cat(parts, 1), state

    def score(self, logits: Tensor, targets: Tensor) -> TokenScores:
        return score_logits(logits[None], targets[None])

    def logits(self, read: Tensor) -> Tensor:
        return read

    @torch.no_grad()
    def after(self, tokens: Tensor, state: NestedState | None) -> tuple[Tensor, NestedState]:
        """Logits after the last token, [rows, vocabulary]; a module without state reads the last window once more."""
        if self._network.stateful:
            logits, state = self.read(tokens, state)
            return logits[:, -1], state
        last = (tokens if state is None else torch.cat([state, tokens], 1))[:, -self.span :]
        return self.read(last, None)[0][:, -1], last

    def keep(self, state: NestedState, rows: slice | Sequence[int]) -> NestedState:
        """Pick rows of a state."""
        return self._network.keep(state, rows)


def line_pieces(starts: Tensor) -> list[list[tuple[int, int, int]]]:
    """Cut packed rows where lines begin: groups of (row, begin, end) that can be read side by side.

    The first group goes on from the carried state, all others begin a line. Groups are padded behind the end of a
    piece; a piece that reaches the window's end, whose state is carried on, is with others of its length only.

    Example:
      >>> line_pieces(torch.tensor([[False, False, True, False], [True, True, False, False]]))
      [[(0, 0, 2)], [(1, 0, 1)], [(0, 2, 4)], [(1, 1, 4)]]
    """
    rows, time = starts.shape
    carried: list[tuple[int, int, int]] = []
    inner: list[tuple[int, int, int]] = []
    last: dict[int, list[tuple[int, int, int]]] = {}
    for row in range(rows):
        cuts = torch.nonzero(starts[row])[:, 0].tolist()
        if not cuts or cuts[0] > 0:
            carried.append((row, 0, cuts[0] if cuts else time))
        inner += [(row, begin, end) for begin, end in pairwise(cuts)]
        if cuts:
            last.setdefault(time - cuts[-1], []).append((row, cuts[-1], time))
    return [carried, inner, *(last[length] for length in sorted(last))]


def _scale(batch: Batch, params: Params) -> tuple[Tensor, Tensor]:
    """What each position counts in its client's mean, and each client's number of real tokens."""
    mask = batch.mask.to(next(iter(params.values())).dtype)
    counts = mask.sum((1, 2))
    return mask / counts.clamp(min=1)[:, None, None], counts


MakeModule = Callable[[int], nn.Module]
"""Size of the vocabulary → a new module, its parameters drawn from torch's global generator."""
NestedState = Any  # a nest of tensors; () for a module that keeps none, None at the start of a text
TRIAL_TIME = 5  # tokens of a row in the trial calls, where the window allows; rows are one and two more


@dataclass(frozen=True, slots=True)
class Habits:
    """What the trial calls showed.

    Attributes:
      axes: the axis of each tensor of the state that counts rows (None: rows share it); None for no state at all.
      random: it draws random numbers while it trains.
    """

    axes: tuple[int | None, ...] | None
    random: bool


def qualified_name(make: object) -> str:
    """Name a factory as Python finds it: module and name; of a partial, that of its function."""
    inner = getattr(make, "func", make)
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', type(inner).__name__)}"


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch's global generator, the only one a module knows, start at this seed; put it back afterwards."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        yield


def build_module(make: MakeModule, vocab: int, seed: int, name: str) -> nn.Module:
    """Make a module whose random numbers are those of a seed, on the CPU."""
    if isinstance(make, nn.Module) or not callable(make):
        raise ConfigError(
            f"module is a {type(make).__name__}; expected a function that takes the vocabulary's size and returns a "
            "new nn.Module, e.g. module=lambda vocab_size: MyModel(vocab_size)"
        )
    with seeded(seed, torch.device("cpu")):
        try:
            module = make(vocab)
        except KeyfedError:
            raise
        except Exception as e:
            raise ConfigError(f'module "{name}" could not be made for a vocabulary of {vocab}: {first_line(e)}') from e
    if not isinstance(module, nn.Module):
        raise ConfigError(f'module "{name}" returned a {type(module).__name__}; expected a torch.nn.Module')
    return module.to("cpu")


def trial_tokens(vocab: int, time: int, rows: int) -> Tensor:
    return torch.arange(rows * time).remainder(vocab).view(rows, time)


@torch.no_grad()
def try_out(module: nn.Module, vocab: int, window: int, name: str) -> Habits:
    """Call the module as training will, and refuse what cannot be trained."""
    time = min(window, TRIAL_TIME)

    def call(rows: int, state: NestedState = None) -> Any:
        tokens = trial_tokens(vocab, time, rows)
        try:
            out = module(tokens) if state is None else module(tokens, state)
            logits = logits_of(out, tokens, vocab)
        except KeyfedError as e:
            raise ConfigError(f'module "{name}": {e}') from e
        except Exception as e:
            raise ConfigError(
                f'module "{name}" failed on tokens {list(tokens.shape)}: {first_line(e)}; it is called '
                "module(tokens) at the start of a text and module(tokens, state) afterwards"
            ) from e
        if not bool(torch.isfinite(logits).all()):
            raise ConfigError(
                f'module "{name}" gives logits that are not finite before any training; look at its start'
            )
        return out

    before = {key: b.clone() for key, b in module.named_buffers()}
    drawn = torch.get_rng_state()
    module.train()
    out = call(time + 1)
    random = not torch.equal(drawn, torch.get_rng_state())
    for key, b in module.named_buffers():
        if key not in before or not torch.equal(b, before[key]):
            raise ConfigError(
                f'module "{name}": buffer "{key}" changes while training, and no method averages buffers; use a layer '
                "without running statistics (LayerNorm for BatchNorm)"
            )
    if isinstance(out, Tensor):
        return Habits(None, random)
    if len(out) != 2:
        raise ConfigError(f'module "{name}" returned {len(out)} values; expected logits, or a pair (logits, state)')
    module.eval()
    state, more = _tensors(call(time + 1)[1], name), _tensors(call(time + 2)[1], name)
    again = call(time + 1, out[1])
    if isinstance(again, Tensor) or tree_flatten(again[1])[1] != tree_flatten(out[1])[1]:
        raise ConfigError(f'module "{name}" returns a state of another form once it is given one; keep its form')
    return Habits(tuple(_row_axis(a, b, name) for a, b in zip(state, more, strict=True)), random)


def _tensors(state: Any, name: str) -> list[Tensor]:
    leaves, _ = tree_flatten(state)
    if not leaves or any(not isinstance(leaf, Tensor) for leaf in leaves):
        got = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})) or "nothing"
        raise ConfigError(
            f'module "{name}" returned a state of {got}; expected tensors (in tuples, lists or dictionaries), or '
            "logits alone from a module that keeps no state"
        )
    return leaves


def _row_axis(few: Tensor, more: Tensor, name: str) -> int | None:
    """The axis that grew with the number of rows, by which a state is cut; None where rows share a tensor."""
    grew = [axis for axis, (a, b) in enumerate(zip(few.shape, more.shape, strict=False)) if a != b]
    if len(grew) > 1 or few.dim() != more.dim():
        raise ConfigError(
            f'module "{name}": a state of {list(few.shape)} became {list(more.shape)} with one row more; expected one '
            "axis that counts rows"
        )
    return grew[0] if grew else None


def first_line(error: Exception) -> str:
    """Say an error of somebody else's code in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
