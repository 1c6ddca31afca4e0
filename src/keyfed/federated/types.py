r"""The few values that every method, engine and transport share.

    θ ──► clients solve locally ──► reports (scalars) ──► mediator: share (scale, mass) per client and layer
                                                                        │
    θ' ◄── server rule ◄── total^l = Σ_k scale_k^l · upload_k^l ,  mass^l = Σ_k mass_k^l

Fixed once: an upload points towards the client (w_k − θ), so the server *adds*; losses are nats per token; a layer is
one named parameter tensor; only `Aggregate.mean` divides. Everything local carries a leading client axis: "stacked"
means `[m, …]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Generator, Tensor

from keyfed.federated.cohort import Fate
from keyfed.federated.reasons import Reason as Reason
from keyfed.federated.spec import MethodSpec

if TYPE_CHECKING:
    from keyfed.federated.descent import ClientBatch, Descent

Params = dict[str, Tensor]
ClientId = str
Memory = Any  # whatever a mediator keeps between rounds: a small, JSON-able value
LayerNumbers = Mapping[str, float]  # one number a layer
Public = dict[str, Any]  # numbers that everybody may know, by which clients weigh themselves: JSON-able, text keys
Facts = dict[str, list[float]]  # what a client sends with its upload, inside the sum
Sums = Mapping[str, Sequence[float]]  # facts added up over clients
Distance = Callable[[Params, Params], Mapping[str, Tensor]]  # (θ, stacked uploads) → numbers [m] for every layer


class Gradient(NamedTuple):
    """One local step of m stacked clients.

    Attributes:
      nats: summed loss of the step's tokens, [m].
      tokens: predicted tokens, [m]; 0 for a client that has run out of text (its step is masked).
      grads: gradient of each client's own mean nats per token, stacked.
      hits: tokens that were the first guess, [m]; None where they are not counted.
    """

    nats: Tensor
    tokens: Tensor
    grads: Params
    hits: Tensor | None = None


class Objective(Protocol):
    """The local problem of m stacked clients, as the solver sees it; engines make one from text and model.

    Attributes:
      pace: each client's own factor on the step size, [m]; None where all go by the method's.
      whole: tokens of each client's whole epoch, [m], known after its steps were made. What a client weighs must not
        depend on where it happened to stop.
    """

    clients: int
    pace: Tensor | None
    whole: Tensor

    def steps(self, epoch: int) -> Iterator[Callable[[Params], Gradient]]:
        """Yield the epoch's steps in order; each takes the stacked parameters and returns a `Gradient`."""
        ...

    def run_steps(self, block: ClientBatch, descent: Descent) -> None:
        """Take every step of a descent in place; `descent.run_steps` is the plain form, one step after the other."""
        ...


class Solution(NamedTuple):
    """What a local solver returns for m stacked clients.

    Attributes:
      upload: points from θ towards the client, stacked.
      loss: mean nats per token over the last local epoch as trained, [m].
      tokens: tokens of the client's whole epoch, [m]; 0 for a client that predicted nothing.
      worked: tokens predicted over all epochs, [m].
      join_weight: the weight in a running mean of a client that keeps state; None for the others.
      state: the state to keep if the upload is acknowledged, stacked. Layers under "sent/" are what the server has of
        this client; the engine adds what was in fact uploaded, so that rounding and compression are made good later.
      curve: nats, hits and tokens of every step, [steps, 3, m] an epoch; None where they are not counted.
    """

    upload: Params
    loss: Tensor
    tokens: Tensor
    worked: Tensor
    join_weight: JoinWeight | None = None
    state: Params | None = None
    curve: tuple[Tensor, ...] | None = None


class JoinWeight(NamedTuple):
    """Weight α_k in a running mean, fixed when a client joins, [m]; and whether it joins with this upload, [m]."""

    weight: Tensor
    joining: Tensor


class Solver(NamedTuple):
    """How a client works.

    Attributes:
      solve: (θ, objective, round) → Solution; with `start`, the clients' stacked state is the fourth argument.
      start: the state of a client that has none yet, from θ (not stacked); None where clients keep nothing.
      still: clients take no step of their own; the server's step is the only one.
      first: `start` wants the first θ of the run, whenever a client joins; `run_round` has it from the server's state.
    """

    solve: Callable[..., Solution]
    start: Callable[[Params], Params] | None = None
    still: bool = False
    first: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a client tells before anything is summed: scalars only.

    Attributes:
      distance: how far each layer moved, for methods that ask for it; empty for the others.
      weight: α_k of a client that keeps state; 0 for the others.
      joining: the upload is everything the client stands for, not an increment.
    """

    client: ClientId
    tokens: int
    loss: float
    worked: int
    distance: LayerNumbers = field(default_factory=dict)
    weight: float = 0.0
    joining: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a client enters the sum, layer by layer: total += scale · upload, mass += mass.

    Attributes:
      log: both are multiplied by e^log. Kept apart because e^log may exceed any float: the sum divides by the largest
        e^log it has seen, which `Aggregate.mean` and `effective_clients` do not notice. None is 0.
      clipped: the client itself shortened its upload to the clip, so a private sum counts it among the clipped.
      statistics: numbers within [0, 1] that a private sum adds up as well, with noise of their own.
      silent: only the statistics count: a private sum adds zeros for the upload and its mass.
    """

    scale: LayerNumbers
    mass: LayerNumbers
    log: LayerNumbers | None = None
    clipped: bool = False
    statistics: LayerNumbers = field(default_factory=dict)
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A client left out of the round, with a typed reason."""

    client: ClientId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The linear sum over the clients that arrived.

    Attributes:
      weight: Σ scale per layer, and `squares` Σ scale²: for the effective number of clients.
      weights: each contributor's share of the sum per layer, scale / Σ scale; None where they are not public.
      facts: sums of what clients sent with their uploads, where no report leaves them; else empty.
      public: the public numbers that this sum was formed with, where clients weigh themselves by such; else None.
      norms: of the uploads, as they came, where they are limited; else empty.
      shortened: clients whose upload was longer than its cap.
      step: factor on the server's step size; 1 unless the run has diverged (`soundness`).
      adaptive: which branch of a switch weighed the clients (`Mediator.adaptive`); None without a switch.
    """

    total: Params
    mass: LayerNumbers
    weight: LayerNumbers
    squares: LayerNumbers
    contributors: tuple[ClientId, ...]
    refused: tuple[Refusal, ...] = ()
    weights: Mapping[ClientId, LayerNumbers] | None = None
    facts: Sums = field(default_factory=dict)
    public: Public | None = None
    norms: tuple[float, ...] = ()
    shortened: tuple[ClientId, ...] = ()
    step: float = 1.0
    adaptive: bool | None = None

    def mean(self) -> Params:
        """Return total / mass, layer by layer; a layer of mass 0 takes no step."""
        return {
            name: total / self.mass[name] if self.mass[name] > 0 else total.new_zeros(total.shape)
            for name, total in self.total.items()
        }

    def effective_clients(self) -> LayerNumbers:
        """Return (Σ scale)² / Σ scale² per layer: m when all count alike, 1 when one client is everything."""
        return {name: w**2 / self.squares[name] if w > 0 else 0.0 for name, w in self.weight.items()}


class PrivateRule(NamedTuple):
    """How a client weighs itself by its own report and public numbers, so that only sums leave the clients.

    Every number that a client tells lies within [0, 1] (a share's scale and mass too): it fits a sum of fixed point.
    Histograms are one-hot at a client. The one that sums adds "loss" and "count" for `learn`: the sum of the
    contributors' losses, and their number. It adds "ratio", r, for `learn` and `start`. A scale below 1/r is raised to
    1/r before it enters a secure sum (`federated.public.rules.held`), and a scale of 0 is refused there.

    Attributes:
      init: public numbers before the first round.
      share: (report, layers, public) → the client's share.
      facts: (report, layers, public) → what the client sends as well; names and lengths do not depend on the client.
      first: (report, layers) → what it tells before the first sum, for `start`.
      start: (public, sums of `first`) → public numbers for the first round.
      learn: (public, sums of `facts`, contributors) → public numbers for the next round.
      least: (layers, public) → the least scale of any client, layer by layer, of a rule whose scales are known
        beforehand: a sum that does not allow it is refused. None: 1/r, by raising what is less.
      adaptive: public → whether a switch weighs by its adaptive branch; None without a switch.
    """

    init: Callable[[], Public]
    share: Callable[[Report, Sequence[str], Public], Share]
    facts: Callable[[Report, Sequence[str], Public], Facts]
    first: Callable[[Report, Sequence[str]], Facts]
    start: Callable[[Public, Sums], Public]
    learn: Callable[[Public, Sums, int], Public]
    least: Callable[[Sequence[str], Public], LayerNumbers] | None = None
    adaptive: Callable[[Public], bool] | None = None


@dataclass(frozen=True, slots=True)
class WeighingRule:
    """How much one client counts, from its own report alone. The one place where a method's weights are defined.

    Three forms are read off it: the plain share (`weigh.from_rule`), the masked one by public numbers
    (`public.rules.masked`), and the differentially private one (`private.dp.private_method`).

    Attributes:
      weight: (report, layer) → the client's weight, at least 0; its logarithm where `exponential`.
      exponential: the client counts e^weight, as in a softmax.
      bound: largest weight that counts, an option of the method; ∞ for none.
      largest: largest weight that can occur, where it is known before the run; else ∞.
      least: smallest weight that can occur, of a rule whose weights are all known before the run; else None.
      joins: the weight enters the mass only when a client joins a running mean.
    """

    weight: Callable[[Report, str], float]
    exponential: bool = False
    bound: float = math.inf
    largest: float = math.inf
    least: float | None = None
    joins: bool = False


class LossSwitch(NamedTuple):
    """`adaptive` while the mean loss changes by at least `threshold`, else `otherwise` (`weigh.switch_on_loss`)."""

    adaptive: Rule
    otherwise: Rule
    threshold: float


class TopK(NamedTuple):
    """`inner`, for the share `beta` of the clients that have the lowest loss (`weigh.top_k`)."""

    beta: float
    inner: Rule


Rule = WeighingRule | LossSwitch | TopK


class Mediator(NamedTuple):
    """Decides how much each client counts.

    Attributes:
      init: memory before the first round.
      weigh: (memory, reports, layers) → (memory, shares). Shares is None where `share` exists: the clients have
        weighed themselves while they trained, and their uploads are already in the sum. A client without a share does
        not upload.
      share: a client's own share from its own report, for rules that need nothing of the others. Such rules stream
        (memory O(block × model)) and can hide every report.
      private: the same rule, or the nearest to it, by public numbers only; None where there is none.
      released: (the server rule's state) → `share` for the next round, for rules that go by what private rounds have
        released; None for the others.
      rule: what all forms are read off; None for a mediator that has only what it says here.
      adaptive: (memory before the round, after it, the server rule's state) → whether a switch weighed the round by its
        adaptive branch; None without a switch.
    """

    init: Callable[[], Memory]
    weigh: Callable[[Memory, Mapping[ClientId, Report], Sequence[str]], tuple[Memory, Mapping[ClientId, Share] | None]]
    share: Callable[[Report, Sequence[str]], Share] | None = None
    private: PrivateRule | None = None
    released: Callable[[Params], Callable[[Report, Sequence[str]], Share]] | None = None
    rule: Rule | None = None
    adaptive: Callable[[Memory, Memory, Params], bool] | None = None


class Noise(NamedTuple):
    """White noise on uploads (at the clients), on their sum or on their mean (at the server).

    Attributes:
      at: who adds it; "client-first": before distances are measured (`upload.noise_on`).
      draw: (tensors to be like, generator of this round and place) → the noise.
    """

    at: Literal["client", "client-first", "sum", "server"]
    draw: Callable[[Params, Generator], Params]


class Codec(NamedTuple):
    """How an upload is written for the wire and read back.

    Attributes:
      pack: (upload, generator for stochastic rounding) → the tensors that are sent.
      unpack: (what was sent, shapes to be like) → the upload the server sees.
      feedback: what was left out is kept by the client and added to its next upload.
    """

    pack: Callable[[Params, Generator], Params]
    unpack: Callable[[Params, Params], Params]
    feedback: bool


class ServerRule(NamedTuple):
    """How the server moves: state = init(θ), (θ', state') = step(θ, aggregate, state).

    Attributes:
      served: (θ, state) → the model that is validated, tested and exported, θ itself of most rules; training goes on
        from θ whatever it is.
    """

    init: Callable[[Params], Params]
    step: Callable[[Params, Aggregate, Params], tuple[Params, Params]]
    served: Callable[[Params, Params], Params] = lambda params, state: params


@dataclass(frozen=True, slots=True)
class Method:
    """A way of learning across clients: solver + mediator + server rule.

    Attributes:
      distance: measured where the upload is and sent in the report; None where the mediator asks for none.
      noise: added before the sum; None for none.
      codec: how uploads are compressed; None sends them as they are.
      uploading: share of the reporting clients that upload (top-K); 1 for all.
      batch_size: rows (streams or sentences) of a local step; `epochs` those of a round.
      cohort: "sample" draws a cohort each round, "all" takes every client (FedSGD), "pooled" trains one client that
        holds everybody's text (central training, the limit a federation is measured against).
      spec: how to build this method again elsewhere; None for a method written outside the package.
      report_free: clients weigh themselves by public numbers (`Mediator.private`) and no report leaves them. The
        mediator's memory is then those numbers; see `federated.public.rules.privately`.
      halvings: how often the local step size of this round is halved, since the run diverged; `run_round` sets it.
      origin: the first θ, for clients that start from it (`Solver.first`); `run_round` sets it.
    """

    name: str
    solver: Solver
    mediator: Mediator
    server: ServerRule
    batch_size: int
    epochs: int
    cohort: Literal["sample", "all", "pooled"] = "sample"
    distance: Distance | None = None
    uploading: float = 1.0
    noise: Noise | None = None
    codec: Codec | None = None
    spec: MethodSpec | None = None
    report_free: bool = False
    halvings: int = 0
    origin: Params | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last rounds were like, for limits on what one client may do (`soundness.caps_of`).

    Attributes:
      norms: of each round the median norm of its uploads; of a round without reports how far θ moved.
      tokens: of each round the median of the clients' tokens; none of rounds without reports.
    """

    norms: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()


class Caps(NamedTuple):
    """What one upload of a round may be at most; None for no cap.

    Attributes:
      norm: its norm, beyond which it is shortened (or refused, where its client keeps state).
      tokens: the tokens it counts for.
      against: how far it may point against the other uploads of its round (`soundness.opposed`); None: any direction.
      trim: share of the uploads that is left out at either end of every number; None: none.
    """

    norm: float | None = None
    tokens: int | None = None
    against: float | None = None
    trim: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Everything that survives a round; a checkpoint holds it.

    Attributes:
      halvings: how often the local step size was halved because training diverged.
      server_halvings: the same of the server's step size.
      failed: rounds in a row that diverged.
    """

    params: Params
    mediator: Memory
    server: Params
    round: int
    seen: Seen = Seen()
    halvings: int = 0
    server_halvings: int = 0
    failed: int = 0

    def served(self, method: Method) -> Params:
        """Return the model that is validated, tested and exported: θ, or the server rule's average of it."""
        return method.server.served(self.params, self.server)


class Accumulator(Protocol):
    """A round's sum: uploads are added as each client ends."""

    def add(self, client: ClientId, upload: Params, share: Share) -> None:
        """Add one client; the upload is only valid until this returns."""
        ...

    def refuse(self, client: ClientId) -> None:
        """Hear that a client which could have uploaded was refused, for what it trained."""
        ...

    def aggregate(self, refused: Sequence[Refusal]) -> Aggregate:
        """Return the sum over those added."""
        ...


class Federation(Protocol):
    """A transport: a simulation in this process, or real clients. Methods do not know which."""

    def expect(self, outcomes: Mapping[ClientId, Fate]) -> None:
        """Say what becomes of the clients of the next round; real clients are not known beforehand."""
        ...

    def limit(self, caps: Caps) -> None:
        """Say what uploads of the next round may be at most; only runs with limits do."""
        ...

    def train(
        self, params: Params, cohort: Sequence[ClientId], method: Method, round: int, public: Public | None = None
    ) -> Mapping[ClientId, Report]:
        """Let the cohort solve locally; return the reports of those who answered.

        Args:
          public: what the clients of a hidden method weigh themselves by; they return no reports.
        """
        ...

    def collect(self, shares: Mapping[ClientId, Share] | None) -> Aggregate:
        """Return the sum of scale · upload over those who uploaded."""
        ...

    def acknowledge(self, contributors: Sequence[ClientId]) -> None:
        """Tell clients whose upload is in the sum (stateful methods move on only then)."""
        ...


class SimulatedFederation(Federation, Protocol):
    """A federation inside this machine, which knows more of a round than real clients tell.

    Attributes:
      compression_error: of the last round: mean over the clients that trained; None without compression.
      curves: learning curves of the last round (`engine.task.CohortCurves`), where steps are counted.
      secure: what the last round's secure sum cost; None for a plain one.
    """

    compression_error: float | None
    curves: Any
    secure: Mapping[str, Any] | None

    def gather_by(self, gather: Callable[[Params], Accumulator], clip: float | None = None) -> None:
        """Say how the next rounds are summed.

        Args:
          clip: largest norm of an upload that a client which keeps state books as sent; None for no clip.
        """
        ...
