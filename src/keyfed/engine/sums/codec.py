r"""One client's upload as one vector of 32-bit integers, and what the sum of such vectors says.

    [ scale·upload, layer by layer | scale, mass, scale², joined of every layer | counts in limbs | facts ]
    [ clipped scale·upload, layer by layer | clipped mass of every layer | half counts ]          in a private round

Everything is fixed point modulo 2^32 (two's complement), so that vectors can be masked and added without rounding. The
sum of what is written is exactly what the sum is read as. With m members a number x of a block with range 2^e is
written as

.. math::  q = \mathrm{round}(x / 2^{e − b}),\qquad b = 31 − ⌈\log_2 m⌉,\qquad |q| ≤ 2^b − 1

and m · (2^b − 1) < 2^31: a sum never wraps around. A number out of its range is an error at the client (nothing is
sent), never a wrong sum. Counts (tokens, nats) are exact to 2^−16 below 2^32, in three limbs of 16 bits.

A client that lies may add any integers at all. A sum that k honest clients cannot have is an error too: nothing is read
of it.

A clipped upload has no number beyond the clip S, so its fixed point is known without asking any client. Steps are
S/2^18 (`fixed_point`), with which 4,096 clients fit. Rounding is towards zero, so that it never lengthens an upload.
The step is the same however many are drawn: else one client more could round all the others anew. Half counts lie
within ±½ and are written the same way, with 1 for S. No other number of a client is in the vector: nothing is
calibrated. What liars make of such a sum is brought back (`folded`), never an error: whether a private sum opens must
not depend on what clients send.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keyfed.errors import DoesNotFit, Lied, PrivacyError, SecureSumError, SecureSumOverflow
from keyfed.federated.types import Facts, LayerNumbers, Params, Share
from keyfed.private.dp.accounting import MOST_MEMBERS as MOST_PRIVATE
from keyfed.private.dp.noise import clip_factor, norm_of

Vector = NDArray[np.uint32]

MOST_MEMBERS = 1 << 15
LIMB, LIMBS = 16, 3
FACT_BITS = 15  # a fact within [0, 1] is a multiple of 2^−15
MOST_COUNTS = 3  # half counts that a vector has room for: within the clip, its loss, below the limit
MOST_WORD = 2**30  # of a private sum; beyond it a word is a liar's
SHARES = 4  # of every layer: scale, mass, scale², and scale once more of a client that joins


class Read(NamedTuple):
    """What a sum says: the uploads' total, numbers per layer, sums of counts and of facts.

    Attributes:
      weight: Σ scale; `mass` Σ mass; `squares` Σ scale²; `joined` Σ scale over the clients that join.
    """

    total: Params
    weight: LayerNumbers
    mass: LayerNumbers
    squares: LayerNumbers
    joined: LayerNumbers
    counts: Mapping[str, float]
    facts: Facts


@dataclass(frozen=True, slots=True)
class SumLayout:
    """Where each number lies; the same for all members of a sum.

    Attributes:
      layers: shape of every layer, in order; empty for a sum without uploads.
      counts: names of the counts.
      facts: name and length of every fact.
      members: how many clients may add up.
      ranges: exponent e of every layer: no |scale·upload| reaches 2^e.
    """

    layers: Mapping[str, torch.Size]
    counts: tuple[str, ...]
    facts: Mapping[str, int]
    members: int
    ranges: Mapping[str, int]

    @classmethod
    def of(
        cls, like: Params, counts: Sequence[str], facts: Mapping[str, int], members: int, ranges: Mapping[str, int]
    ) -> SumLayout:
        """Lay out the sum of uploads that are like these tensors."""
        if not 1 <= members <= MOST_MEMBERS:
            raise SecureSumError(f"a secure sum of {members} clients; expected 1 to {MOST_MEMBERS}")
        return cls({name: p.shape for name, p in like.items()}, tuple(counts), dict(facts), members, dict(ranges))

    @property
    def length(self) -> int:
        """Number of coordinates; it depends on neither members nor ranges."""
        uploads = sum(shape.numel() for shape in self.layers.values())
        return uploads + SHARES * len(self.layers) + LIMBS * len(self.counts) + sum(self.facts.values())

    @property
    def bits(self) -> int:
        """Bits of a number, sign not counted: b = 31 − ⌈log2 m⌉."""
        return 31 - (self.members - 1).bit_length()

    def step(self, layer: str) -> float:
        """Distance between two neighbouring numbers of a layer."""
        return 2.0 ** (self.ranges[layer] - self.bits)

    def encode(
        self, upload: Params, share: Share, facts: Facts, counts: Mapping[str, float], joining: bool = False
    ) -> Vector:
        """Write one client's numbers; `joining`: its upload is its difference to θ, and stands for all of it.

        Raises:
          SecureSumOverflow: a number of a layer is out of its range; nothing was written.
          DoesNotFit: another number is; no range of a layer has to do with it.
        """
        numbers = [
            self._fraction(x, f"the {what} of layer {name}")
            for name in self.layers
            for what, x in (
                ("scale", share.scale[name]), ("mass", share.mass[name]), ("squared scale", share.scale[name] ** 2),
                ("joined scale", share.scale[name] * joining),
            )
        ]  # fmt: skip
        for name in self.counts:
            numbers += _limbs(counts[name], name)
        for name, length in self.facts.items():
            numbers += _bits_of(facts[name], length, name)
        # Layers come last: a share beyond 1 makes their numbers too large as well, and no range is to blame.
        pieces = [self._written(name, upload[name], share.scale[name]) for name in self.layers]
        return np.concatenate([*pieces, _words(np.array(numbers, np.int64))])

    def decode(self, total: Vector, like: Params, arrived: int) -> Read:
        """Read a sum of vectors; totals get the types and places of `like`.

        Args:
          arrived: how many vectors it is of.

        Raises:
          SecureSumError: the sum has another length, or no honest clients can have it.
        """
        if total.shape != (self.length,) or total.dtype != np.uint32:
            raise SecureSumError(f"a sum of {total.shape} {total.dtype}; expected {self.length} numbers of 32 bits")
        at, uploads = 0, {}
        for name, shape in self.layers.items():
            size = shape.numel()
            summed = torch.from_numpy(total[at : at + size].view(np.int32).astype(np.float64))
            largest = float(summed.abs().amax()) if size else 0.0
            must(largest <= arrived * (2.0**self.bits - 1), f"layer {name} is beyond {arrived} times its range")
            uploads[name] = summed.mul_(self.step(name)).view(shape).to(like[name])
            at += size
        signed = total[at:].view(np.int32).astype(np.int64).tolist()
        whole = total[at:].tolist()
        weight, mass, squares, joined = self._shares(signed, arrived)
        at = SHARES * len(self.layers)
        counts: dict[str, float] = {}
        for name in self.counts:
            limbs = whole[at : at + LIMBS]
            must(max(limbs) <= arrived * ((1 << LIMB) - 1), f"{name} is below 0 or beyond what is counted")
            counts[name] = sum(limb << (LIMB * n) for n, limb in enumerate(limbs)) / (1 << LIMB)
            at += LIMBS
        facts: Facts = {}
        for name, length in self.facts.items():
            facts[name] = [x / (1 << FACT_BITS) for x in whole[at : at + length]]
            must(all(x <= arrived for x in facts[name]), f"{name} is not within 0 and {arrived}")
            at += length
        return Read(uploads, weight, mass, squares, joined, counts, facts)

    @property
    def unit(self) -> float:
        """Distance between two neighbouring shares, whose range is 2, so that 1 is written exactly."""
        return 2.0 ** (1 - self.bits)

    def _shares(self, signed: Sequence[int], clients: int) -> list[dict[str, float]]:
        """Read Σ scale, Σ mass, Σ scale² and Σ joined scale of every layer."""
        one = 1 << self.bits - 1
        for n, name in enumerate(self.layers):
            weight, *others = own = signed[SHARES * n : SHARES * (n + 1)]
            inside = all(0 <= x <= clients * one for x in own)
            must(inside, f"a share of layer {name} is not within 0 and {clients}")
            # each client's scale² and joined scale are at most its scale, and rounding keeps that order
            must(max(others[1:]) <= weight, f"squared or joined scales of layer {name} are above the scales")
        read = [{name: signed[SHARES * n + k] * self.unit for n, name in enumerate(self.layers)} for k in range(SHARES)]
        # Σ scale² is at least (Σ scale)²/m: what rounding took from small squares is not read as more clients.
        read[2] = {name: max(s, read[0][name] ** 2 / self.members) for name, s in read[2].items()}
        return read

    def _written(self, name: str, upload: Tensor, scale: float) -> Vector:
        if upload.shape != self.layers[name]:
            raise SecureSumError(f"layer {name} is {list(upload.shape)}; expected {list(self.layers[name])}")
        # The step is a power of two: dividing by it rounds nothing.
        numbers = upload.detach().to("cpu", torch.float64).reshape(-1) * scale
        numbers = numbers.div_(self.step(name)).round_()
        largest = float(numbers.abs().amax()) if numbers.numel() else 0.0
        if not math.isfinite(largest):
            raise DoesNotFit(f"layer {name} has a number that is not finite; nothing was sent")
        if not largest <= 2.0**self.bits - 1:
            raise SecureSumOverflow(
                f"layer {name} has a number of size {largest * self.step(name):.4g}, beyond the public range "
                f"{2.0 ** self.ranges[name]:.4g}; nothing was sent, and ranges grow once this happens often"
            )
        return _words(numbers.numpy())

    def _fraction(self, x: float, what: str) -> int:
        if not 0 <= x <= 1:
            raise DoesNotFit(
                f"{what} is {x:.4g}, and a secure sum holds shares within 0 and 1; this client does not fit the public "
                "numbers of the run and takes no part"
            )
        return round(x * (1 << self.bits - 1))


def must(holds: bool, otherwise: str) -> None:
    """Fail closed unless something holds of a sum that holds of every sum of honest clients."""
    if not holds:
        raise Lied(f"a sum that cannot be right: {otherwise}; a client lied, and nothing is learnt from it")


def _limbs(x: float, what: str) -> list[int]:
    """Write a number of at least 0 and below 2^32 in limbs of 16 bits, the smallest first, to the nearest 2^−16."""
    whole = round(x * (1 << LIMB)) if math.isfinite(x) else -1
    if not 0 <= whole < 1 << LIMB * LIMBS:
        raise DoesNotFit(f"{what} is {x:.6g}; a secure sum counts from 0 to below {1 << LIMB * (LIMBS - 1):,}")
    return [(whole >> (LIMB * n)) & ((1 << LIMB) - 1) for n in range(LIMBS)]


def _bits_of(numbers: Sequence[float], length: int, what: str) -> list[int]:
    if len(numbers) != length or not all(0 <= x <= 1 for x in numbers):
        raise DoesNotFit(f"{what} is {list(numbers)}; expected {length} numbers within 0 and 1")
    return [round(x * (1 << FACT_BITS)) for x in numbers]


def _words(numbers: NDArray[Any]) -> Vector:
    return numbers.astype(np.int64).astype(np.uint32)


class ClippedUpload(NamedTuple):
    """What one client adds to a private sum, or the sum of that: layers and masses, clipped together, and half counts.

    Attributes:
      masses: times `mass_unit`; none where the method divides by a public number.
      halves: each within ±½ for one client.
    """

    layers: Params
    masses: dict[str, float]
    halves: dict[str, float]


def mass_unit(clip: float, layers: int) -> float:
    """Return κ = S/(2√L): masses of 1 in all L layers, times κ, take half of the clip S."""
    return clip / (2 * math.sqrt(max(1, layers)))


def half(number: float) -> float:
    """Return what a client adds to a half count for a number t within [0, 1]: t − ½, never beyond ±½.

    ±½ and not 0 or 1: then one client more or less moves the count by ½ at most.

    Example:
      >>> half(1.0), half(0.25), half(-7.0)
      (0.5, -0.25, -0.5)
    """
    if math.isnan(number):
        raise PrivacyError("a client tells a number that is none, which nothing bounds; it must be refused before")
    return min(max(number, 0.0), 1.0) - 0.5


def clip_upload(
    upload: Params, share: Share, clip: float, layers: Collection[str], *, masses: bool, statistics: Iterable[str]
) -> ClippedUpload:
    """Clip [scale·upload, κ·mass] as one vector to the norm S, in double precision: a ratio does not notice it.

    Args:
      layers: those that are trained.
      masses: the method divides by its own mass.
      statistics: names of the half counts: "within" says that nothing was clipped, the others are `Share.statistics`.
    """
    assert share.log is None, "a private share is a number within [0, 1]"
    unit = mass_unit(clip, len(layers))
    own = {name: unit * share.mass[name] for name in layers} if masses else {}
    scaled = {name: upload[name].double() * share.scale[name] for name in layers}
    norm = norm_of(scaled.values(), own.values())
    factor = 0.0 if share.silent else clip_factor(norm, clip)
    clipped = {name: layer.mul_(factor) for name, layer in scaled.items()}
    # A client that keeps state has clipped its upload itself; counted as it arrives it would always be within, and
    # the clip would shrink to nothing. One that is silent counts as if it were not, for the same reason.
    known = {"within": float(norm <= clip and not share.clipped), **share.statistics}
    return ClippedUpload(
        clipped, {name: factor * mass for name, mass in own.items()}, {name: half(known[name]) for name in statistics}
    )


def words_of(like: Params) -> int:
    """Numbers in the vector of a clipped upload: every parameter, a mass for every layer, the half counts."""
    return sum(p.numel() for p in like.values()) + len(like) + MOST_COUNTS


def fixed_point(clip: float) -> float:
    """Return the step with which sums of up to 4,096 clipped uploads fit into 32 bits, however many are drawn.

    Example:
      >>> fixed_point(1.0) == 2.0**-18
      True
    """
    return clip * MOST_PRIVATE / MOST_WORD


def encode_clipped(own: ClippedUpload, layers: Collection[str], clip: float) -> Vector:
    numbers = torch.cat([own.layers[name].flatten().cpu() for name in layers]).numpy()
    weights = np.array([own.masses.get(name, 0.0) for name in layers])
    halves = np.zeros(MOST_COUNTS)
    halves[: len(own.halves)] = list(own.halves.values())
    pieces = [np.concatenate([numbers, weights]) / fixed_point(clip), halves / fixed_point(1.0)]
    return _words(np.trunc(np.concatenate(pieces)))


def decode_clipped(total: Vector, like: Params, statistics: Iterable[str], clip: float) -> ClippedUpload:
    """Read a sum of clipped uploads, layers in double precision on the devices of `like`."""
    numbers, place = folded(total), 0
    layers: Params = {}
    for name, p in like.items():
        summed = numbers[place : place + p.numel()] * fixed_point(clip)
        layers[name] = torch.from_numpy(summed).reshape(p.shape).to(p.device)
        place += p.numel()
    masses = {name: float(numbers[place + n]) * fixed_point(clip) for n, name in enumerate(like)}
    place += len(like)
    return ClippedUpload(
        layers, masses, {name: float(numbers[place + n]) * fixed_point(1.0) for n, name in enumerate(statistics)}
    )


def folded(total: Vector) -> NDArray[np.float64]:
    """Read words as signed numbers within ±2³⁰: a triangle wave, on which neighbours on the circle stay neighbours.

    A sum of honest clients stays within ±2³⁰; beyond that a number is folded back, 2³¹ − v and −2³¹ − v. Else a liar
    could put a number next to the seam, where the smallest change of an honest client flips its sign.

    Example:
      >>> folded(np.array([5, 2**32 - 5, 2**30, 2**31 - 1, 2**31, 2**31 + 1], np.uint32)).tolist()
      [5.0, -5.0, 1073741824.0, 1.0, 0.0, -1.0]
    """
    signed = total.astype(np.int32).astype(np.float64)
    turned = np.copysign(2.0**31, signed) - signed
    return np.where(np.abs(signed) > MOST_WORD, turned, signed)
