"""One client's part of a sum as 32-bit integers: exact addition, rounding within a step, overflow as an error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyfed.engine.sums.codec import MOST_MEMBERS, SumLayout
from keyfed.errors import SecureSumError, SecureSumOverflow
from keyfed.federated.types import Share

LIKE = {"bias": torch.zeros(3), "weight": torch.zeros(2, 2)}
COUNTS, FACTS = ("tokens", "nats"), {"bits": 2, "histogram": 3}
RANGES = {"bias": 1, "weight": -6}


def layout_of(members: int = 5, ranges=RANGES) -> SumLayout:
    return SumLayout.of(LIKE, COUNTS, FACTS, members, ranges)


def number(most: float):
    return st.floats(-most, most, allow_nan=False, width=32)


@st.composite
def client(draw):
    """One client's part, within the ranges of `RANGES`."""
    upload = {
        "bias": torch.tensor(draw(st.lists(number(1.875), min_size=3, max_size=3))),
        "weight": torch.tensor(draw(st.lists(number(0.0146484375), min_size=4, max_size=4))).view(2, 2),
    }
    unit = st.floats(0, 1)
    scale = {name: draw(unit) for name in LIKE}
    share = Share(scale, {name: draw(st.sampled_from([0.0, s])) for name, s in scale.items()})
    facts = {name: draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)) for name, n in FACTS.items()}
    counts = {"tokens": draw(st.integers(0, 2**32 - 1)), "nats": draw(st.floats(0, 1e9))}
    return upload, share, facts, counts


@given(st.lists(client(), min_size=1, max_size=6), st.integers(6, 100))
def test_a_sum_of_vectors_is_read_as_the_sum_of_what_was_written(clients, members):
    layout = layout_of(members)
    vectors = [layout.encode(*one) for one in clients]
    assert all(v.dtype == np.uint32 and v.shape == (layout.length,) for v in vectors)
    total = np.zeros(layout.length, np.uint32)
    for vector in vectors:
        total += vector
    read = layout.decode(total, LIKE, layout.members)
    each = [layout.decode(vector, LIKE, layout.members) for vector in vectors]
    m = len(clients)
    for name, step in ((name, layout.step(name)) for name in LIKE):
        exact = sum(upload[name].double() * share.scale[name] for upload, share, _, _ in clients)
        # float32 holds 24 bits of the sum; the integers themselves are within half a step a client
        slack = m * step / 2 + float(exact.abs().max()) * 2**-23
        assert float((read.total[name].double() - exact).abs().max()) <= slack
        units = 2.0 ** (1 - layout.bits)
        for numbers, of in ((read.weight, "scale"), (read.mass, "mass")):
            assert numbers[name] == pytest.approx(sum(getattr(c[1], of)[name] for c in clients), abs=m * units / 2)
        assert read.weight[name] == pytest.approx(sum(e.weight[name] for e in each), abs=1e-15)
        assert read.squares[name] >= read.weight[name] ** 2 / members
    assert read.counts["tokens"] == sum(c[3]["tokens"] for c in clients)
    assert read.counts["nats"] == pytest.approx(sum(c[3]["nats"] for c in clients), abs=m * 2**-17)
    for name in FACTS:
        assert read.facts[name] == [sum(column) for column in zip(*(c[2][name] for c in clients), strict=True)]


@given(client())
def test_one_client_is_read_back_within_half_a_step(one):
    layout = layout_of(2)
    upload, share, _, _ = one
    read = layout.decode(layout.encode(*one), LIKE, layout.members)
    for name, u in upload.items():
        wrong = (read.total[name].double() - u.double() * share.scale[name]).abs()
        assert float(wrong.max()) <= layout.step(name) / 2 + float(u.abs().max()) * 2**-24


@pytest.mark.parametrize("members", [1, 2, 3, 64, 65, 1000, MOST_MEMBERS])
def test_as_many_clients_as_there_may_be_at_the_edge_of_the_range_do_not_wrap_around(members):
    layout = layout_of(members)
    assert layout.bits == 31 - math.ceil(math.log2(members))
    edge = {name: torch.full(p.shape, 2.0 ** RANGES[name], dtype=torch.float64) for name, p in LIKE.items()}
    for name, u in edge.items():
        u -= layout.step(name)
    ones = dict.fromkeys(LIKE, 1.0)
    most = 2**32 - 2**-16
    for sign in (1, -1):
        vector = layout.encode(
            {name: sign * u for name, u in edge.items()}, Share(ones, ones), {"bits": [1, 1], "histogram": [1, 0, 1]},
            dict.fromkeys(COUNTS, most),
        )  # fmt: skip
        total = np.multiply(vector, np.uint32(members))  # members times the same vector, modulo 2^32
        read = layout.decode(total, {name: p.double() for name, p in LIKE.items()}, layout.members)
        for name, u in edge.items():
            assert torch.equal(read.total[name], sign * members * u)
            assert read.mass[name] == read.weight[name] == members
            assert read.joined[name] == 0
        assert read.counts["tokens"] == members * most
        assert read.facts["histogram"] == [members, 0, members]


def changed(**changes):
    upload = {name: p.clone() for name, p in LIKE.items()}
    ones = dict.fromkeys(LIKE, 1.0)
    whole = {
        "upload": upload, "share": Share(ones, ones), "facts": {"bits": [0.0, 1.0], "histogram": [0.0, 1.0, 0.0]},
        "counts": {"tokens": 1, "nats": 2.5},
    }  # fmt: skip
    return list((whole | changes).values())


OVERFLOWS = {
    "beyond the range": (
        {"upload": {**LIKE, "weight": torch.full((2, 2), -0.016)}},
        r"layer weight has a number of size 0\.016, beyond the public range 0\.01562; .* ranges grow once",
    ),
    "no number": ({"upload": {**LIKE, "bias": torch.tensor([0.0, math.nan, 0.0])}}, "layer bias .* not finite"),
    "mass": (
        {"share": Share(dict.fromkeys(LIKE, 1.0), {"bias": 0.5, "weight": 1.5})},
        r"the mass of layer weight is 1\.5, and a secure sum holds shares within 0 and 1",
    ),
    "scale": (
        {"share": Share({"bias": -0.1, "weight": 1.0}, dict.fromkeys(LIKE, 1.0))}, "the scale of layer bias is -0.1"
    ),
    "count": ({"counts": {"tokens": 2**32, "nats": 0.0}}, "tokens is 4.29497e.09; a secure sum counts from 0 to below"),
    "loss": ({"counts": {"tokens": 1, "nats": math.inf}}, "nats is inf"),
    "fact": ({"facts": {"bits": [0.0, 1.5], "histogram": [0.0] * 3}}, "bits is .*expected 2 numbers within 0 and 1"),
    "too few facts": ({"facts": {"bits": [0.0], "histogram": [0.0] * 3}}, "bits is .*expected 2 numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(OVERFLOWS))
def test_what_does_not_fit_is_an_error_before_anything_is_sent(case):
    changes, message = OVERFLOWS[case]
    layout = layout_of()
    layout.encode(*changed())
    with pytest.raises(SecureSumOverflow, match=message):
        layout.encode(*changed(**changes))


@pytest.mark.parametrize("case", list(OVERFLOWS))
def test_what_may_leave_a_client_that_does_not_fit_has_no_number_and_no_name_in_it(case):
    with pytest.raises(SecureSumOverflow) as found:
        layout_of().encode(*changed(**OVERFLOWS[case][0]))
    public = found.value.public_text
    assert not any(c.isdigit() for c in public)
    assert not any(name in public for name in (*LIKE, *COUNTS, *FACTS))
    assert public == type(found.value).public_text, "the same for everybody"
    assert found.value.reason == ("out of range" if case == "beyond the range" else "does not fit")


HONEST = 3  # clients, of five that may be
FIRST_SHARE = 3 + 4  # after the uploads of both layers: scale, mass, scale², joined of "bias", then of "weight"
FIRST_LIMB = FIRST_SHARE + 8
FIRST_FACT = FIRST_LIMB + 6
UNIT = 1 << 27  # a share of 1, where five may add up
LIES = {
    "a number beyond all ranges": (0, HONEST * (2**28 - 1) + 1, "layer bias is beyond 3 times its range"),
    "a mass that takes the others' away": (FIRST_SHARE + 1, -4 * UNIT, "a share of layer bias is not within 0 and 3"),
    "a scale of 4": (FIRST_SHARE, UNIT, "a share of layer bias is not within 0 and 3"),
    "squares below 0": (FIRST_SHARE + 6, -4 * UNIT, "a share of layer weight is not within 0 and 3"),
    "squares above the scales": (FIRST_SHARE, -1, "squared or joined scales of layer bias are above the scales"),
    "fewer than no tokens": (FIRST_LIMB + 1, -HONEST - 1, "tokens is below 0"),
    "a negative fact": (FIRST_FACT, -(1 << 15), "bits is not within 0 and 3"),
    "a fact of two": (FIRST_FACT + 1, 1 << 15, "bits is not within 0 and 3"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_sum_that_no_honest_clients_can_have_is_not_read(lie):
    layout = layout_of(5)
    total = np.multiply(layout.encode(*changed()), np.uint32(HONEST))
    assert layout.decode(total, LIKE, HONEST).mass == dict.fromkeys(LIKE, 3.0)
    place, added, message = LIES[lie]
    total[place] = (int(total[place]) + added) % 2**32
    with pytest.raises(SecureSumError, match=f"a sum that cannot be right: {message}"):
        layout.decode(total, LIKE, HONEST)


def test_a_sum_or_a_layer_of_another_shape_is_refused():
    layout = layout_of()
    with pytest.raises(SecureSumError, match=r"layer bias is \[4\]; expected \[3\]"):
        layout.encode(*changed(upload={**LIKE, "bias": torch.zeros(4)}))
    for wrong in (np.zeros(layout.length + 1, np.uint32), np.zeros(layout.length, np.int64)):
        with pytest.raises(SecureSumError, match=f"expected {layout.length} numbers of 32 bits"):
            layout.decode(wrong, LIKE, layout.members)
    for members in (0, MOST_MEMBERS + 1):
        with pytest.raises(SecureSumError, match=f"a secure sum of {members} clients; expected 1 to"):
            layout_of(members)


def test_the_length_depends_on_neither_members_nor_ranges():
    assert layout_of(2).length == layout_of(900, {"bias": 20, "weight": 20}).length == 3 + 4 + 4 * 2 + 3 * 2 + 5
