"""Noise that is correlated over rounds: prefix sums carry that of a few blocks, whoever draws it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from keyfed.private.dp.accounting import forest_sensitivity
from keyfed.private.dp.noise import KeptTree, change_of, derived_tree, group_of, nodes_of, system

SHAPE = torch.Size((5,))


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 7, 8, 13, 100])
def test_blocks_make_up_the_rounds_exactly(rounds):
    covered = [r for height, number in nodes_of(rounds) for r in range(number << height, (number + 1) << height)]
    assert covered == list(range(rounds))


def test_the_noise_of_a_prefix_is_that_of_its_blocks():
    prefix = torch.zeros(SHAPE, dtype=torch.float64)
    noise_of = {}
    for leaf in range(20):
        plus, minus = change_of(leaf)
        prefix += derived_tree(1, leaf)("w", SHAPE)
        assert len(plus) == 1
        (node,) = plus
        noise_of[node] = prefix - sum(noise_of[n] for n in nodes_of(leaf + 1) if n != node)
        assert all(n in nodes_of(leaf) for n in minus)
        torch.testing.assert_close(prefix, sum(noise_of[n] for n in nodes_of(leaf + 1)))
    apart = torch.stack(list(noise_of.values()))
    assert len({tuple(row.tolist()) for row in apart}) == 20  # every block has a noise of its own


@pytest.mark.parametrize("leaf", [0, 3, 6, 7])
def test_the_variance_of_a_prefix_is_its_number_of_blocks(leaf):
    many = torch.Size((40_000,))
    prefix = sum(derived_tree(3, k)("w", many) for k in range(leaf + 1))
    assert float(prefix.std()) == pytest.approx(math.sqrt(len(nodes_of(leaf + 1))), rel=0.02)


def test_kept_noise_is_taken_off_as_it_was_put_on_and_is_logarithmic():
    tree = KeptTree(system)
    prefix, most = torch.zeros(SHAPE, dtype=torch.float64), 0
    for leaf in range(100):
        prefix += tree.leaf(leaf)("w", SHAPE)
        most = max(most, len(tree.state))
        torch.testing.assert_close(prefix, sum(tree.state.values()))
    assert most <= 7


def test_kept_noise_survives_a_checkpoint():
    tree, again = KeptTree(system), KeptTree(system)
    for leaf in range(5):
        tree.leaf(leaf)("layer/with/slashes", SHAPE)
    again.load({key: t.clone() for key, t in tree.state.items()})
    assert again.state.keys() == tree.state.keys()
    change = again.leaf(5)("layer/with/slashes", SHAPE)
    (new,) = [t for key, t in again.state.items() if key not in tree.state]
    taken = [t for key, t in tree.state.items() if key not in again.state]
    torch.testing.assert_close(change, new - sum(taken))


def test_clients_take_part_as_far_apart_as_their_groups():
    names = [f"c{k}" for k in range(200)]
    turns = {name: [t for t in range(40) if group_of(name, 8, 1) == t % 8] for name in names}
    assert all(b - a == 8 for rounds in turns.values() for a, b in itertools.pairwise(rounds))
    assert len({group_of(name, 8, 1) for name in names}) == 8


@pytest.mark.parametrize(("leaves", "gap"), [(13, 3), (16, 4), (20, 7)])
def test_no_client_moves_the_blocks_by_more_than_the_forests_sensitivity(leaves, gap):
    """Search: any client, each round's part of norm 1 at most, in rounds at least `gap` apart."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(2_000):
        rounds, at = [], int(torch.randint(0, leaves, (), generator=generator))
        while at < leaves:
            rounds.append(at)
            at += gap + int(torch.randint(0, 3, (), generator=generator))
        blocks = {n for t in range(1, leaves + 1) for n in nodes_of(t)} | {
            (h, j) for h in range(5) for j in range(leaves >> h)
        }
        moved = sum(sum(j << h <= r < (j + 1) << h for r in rounds) ** 2 for h, j in blocks)
        worst = max(worst, moved)
    assert worst <= forest_sensitivity(leaves, gap)
    assert worst >= 0.8 * forest_sensitivity(leaves, gap)
