"""Ranges of secure sums: they follow many clients quickly, a single one slowly, and a liar nowhere."""

from __future__ import annotations

import pytest

from keyfed.federated.public.numbers import (
    HELD_BY_ONE,
    MOST_RAISED,
    PATIENCE,
    first_ranges,
    magnitude_bucket,
    next_ranges,
    raised_bits,
)

FIRST = {"bias": -3, "weight": 2}
CLIENTS = 8


def started() -> dict:
    return {"ranges": dict(FIRST), "first": dict(FIRST), "outside": 0}


def told(outside: int = 0, large: float = 0.0, small: float = 0.0) -> dict[str, list[float]]:
    uses = {f"large/{name}": [large] for name in FIRST} | {f"small/{name}": [small] for name in FIRST}
    return uses | {"out of range": [float(outside)]}


def after(rounds: int, sums, public=None, clients: int = CLIENTS) -> list[int]:
    """Return by how many bits ranges are above the first ones after each round."""
    public, bits = public or started(), []
    for _ in range(rounds):
        public = next_ranges(public, sums, clients)
        bits.append(public["ranges"]["bias"] - FIRST["bias"])
        assert public["ranges"]["weight"] - FIRST["weight"] == bits[-1]
        assert raised_bits(public) == max(0, bits[-1])
    return bits


def test_a_single_client_out_of_range_lifts_ranges_by_a_bit_in_three_rounds():
    assert after(7, told(outside=1)) == [0, 0, 1, 1, 1, 2, 2]
    assert PATIENCE == 3


def test_a_quarter_out_of_range_lifts_them_at_once_and_no_further_than_the_cap():
    assert after(6, told(outside=3)) == [2, 4, 6, 8, 8, 8]
    assert after(1, told(outside=2), clients=CLIENTS) == [0], "two of ten are less than a quarter"
    assert after(2, told(outside=5), clients=0) == [2, 4], "also where the sum stayed closed"


@pytest.mark.parametrize("lie", [told(outside=1), told(large=1.0), told(outside=1, large=1.0)], ids=str)
def test_a_liar_in_every_round_takes_no_more_than_a_few_bits(lie):
    assert max(after(200, lie)) == MOST_RAISED, "the others use their ranges: eight bits at most"
    honest = {**lie, **{f"small/{name}": [CLIENTS - 1.0] for name in FIRST}}
    assert max(after(200, honest)) == HELD_BY_ONE + 1, "the others are small, and say so"


def test_ranges_come_down_again_when_nobody_needs_them():
    public = {**started(), "ranges": {name: e + 8 for name, e in FIRST.items()}}
    assert after(9, told(small=CLIENTS), public) == [7, 6, 5, 4, 3, 2, 1, 0, -1]
    assert after(7, told(small=CLIENTS - 1), public) == [7, 6, 5, 4, 3, 2, 2], "one client holds two bits"
    assert after(3, told(small=CLIENTS / 2), public) == [8, 8, 8], "half of the clients need them"


def test_first_ranges_are_four_times_the_largest_number():
    largest = {"bias": magnitude_bucket(0.6), "weight": magnitude_bucket(0.01), "frozen": magnitude_bucket(0.0)}
    assert first_ranges(largest) == {"bias": 2, "weight": -4, "frozen": 2}
    assert first_ranges({"bias": 0}) == {"bias": 2}
