r"""Tree aggregation (DP-FTRL): noise for running sums whose clients nobody has to sample.

What matters of a training run are its prefix sums P_t = Σ_{s≤t} x_s. Every whole dyadic block of rounds has one noise
vector; P_t is released with the noise N_t of the blocks that make up [0, t), one for every 1 among the binary digits of
t, so its variance grows with log t and not with t. A round's own release is the difference,

.. math::  A_t = x_t + N_{t+1} − N_t,

from which every server rule goes on as post-processing. One client that takes part at least `gap` rounds apart moves
the blocks by `accounting.forest_sensitivity`; no round's cohort need be secret or random. There is no restart.

References:
  Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, *Practical and Private (Deep) Learning without Sampling or Shuffling*,
  ICML 2021 (arXiv 2103.00039), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from keyfed.federated.sampling import derive_seed
from keyfed.private.dp.noise import Draw, derived

Node = tuple[int, int]  # height h and number j: the block of rounds [j·2^h, (j+1)·2^h)


def nodes_of(rounds: int) -> list[Node]:
    """Return the blocks that make up the first rounds, the largest first.

    Example:
      >>> nodes_of(6)  # rounds 0 to 3, and 4 to 5
      [(2, 0), (1, 2)]
    """
    found, start = [], 0
    for height in range(rounds.bit_length() - 1, -1, -1):
        if rounds >> height & 1:
            found.append((height, start >> height))
            start += 1 << height
    return found


def change_of(leaf: int) -> tuple[list[Node], list[Node]]:
    """Return the blocks whose noise a leaf's release adds, and those whose noise it takes off.

    Example:
      >>> change_of(5)  # from the block of 4 and round 4 to the block of 4 and the block of 2
      ([(1, 2)], [(0, 4)])
    """
    before, after = nodes_of(leaf), nodes_of(leaf + 1)
    return [n for n in after if n not in before], [n for n in before if n not in after]


def derived_tree(seed: int, leaf: int) -> Draw:
    """Noise of one leaf in a simulation; every block's is derived from the seed, so nothing need be kept."""
    plus, minus = change_of(leaf)

    def node(place: Node, name: str, shape: torch.Size) -> Tensor:
        return derived(derive_seed(seed, "tree"), place[0], place[1])(name, shape)

    def draw(name: str, shape: torch.Size) -> Tensor:
        noise = torch.zeros(shape, dtype=torch.float64)
        for place in plus:
            noise += node(place, name, shape)
        for place in minus:
            noise -= node(place, name, shape)
        return noise

    return draw


class KeptTree:
    """Noise of a deployment: drawn once, kept as long as a later round takes it off again, O(log T) vectors.

    `state` and `load` are for the checkpoint: noise that was lost cannot be taken off, and drawing a block again would
    release two sums under the same noise.
    """

    def __init__(self, fresh: Callable[[], Draw]) -> None:
        self._fresh = fresh
        self._kept: dict[tuple[Node, str], Tensor] = {}

    def leaf(self, leaf: int) -> Draw:
        """Return the noise of one leaf; leaves come in order, each once."""
        plus, minus = change_of(leaf)
        fresh = self._fresh()

        def draw(name: str, shape: torch.Size) -> Tensor:
            noise = torch.zeros(shape, dtype=torch.float64)
            for place in plus:
                made = self._kept[place, name] = fresh(name, shape)
                noise += made
            for place in minus:
                noise -= self._kept.pop((place, name))
            return noise

        return draw

    @property
    def state(self) -> dict[str, Tensor]:
        """What must be in the checkpoint."""
        return {f"{height}/{number}/{name}": t for ((height, number), name), t in self._kept.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._kept = {}
        for key, tensor in state.items():
            height, number, name = key.split("/", 2)
            self._kept[(int(height), int(number)), name] = tensor


def group_of(client: str, groups: int, seed: int) -> int:
    """Return which of `groups` turns a client has: it takes part in rounds t ≡ group, so at least `groups` apart."""
    return derive_seed(seed, "separation", client) % groups
