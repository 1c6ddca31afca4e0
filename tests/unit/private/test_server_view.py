"""What the server sees depends on the sum and on nothing else of the values."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from keyfed.errors import SecureSumError
from keyfed.private.secagg import member as member_side
from keyfed.private.secagg import shamir
from keyfed.private.secagg.wire import add_mask, commitment, self_key

WORDS = 20_000
# Two inputs of three clients with one sum, as far apart as can be.
ONE = np.array([0, 0, 3_000_000_000], np.uint32)
OTHER = np.array([1_000_000_000] * 3, np.uint32)


def chi_square(data: bytes) -> float:
    """Distance of the byte histogram from the uniform one, 255 degrees of freedom."""
    counts, expected = np.bincount(np.frombuffer(data, np.uint8), minlength=256), len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum())


def server_view(make_cohort, share, columns: np.ndarray, seed: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run a sum of `columns` [clients, words]; return the uploads, the uploads without own masks, and the total."""
    cohort = make_cohort(len(columns), length=columns.shape[1], pool=seed, seed=seed)
    sums = share(cohort)
    sent = sums.upload(dict(zip(cohort.names, columns, strict=True)))
    sums.answer(cohort.names)
    total = sums.collector.total()
    opened = {name: vector.copy() for name, vector in sent.items()}
    for name, vector in opened.items():  # the seeds of survivors are all the server ever opens beside the sum
        add_mask(vector, self_key(sums.collector._seed(name), cohort.terms().digest(), name), -1)
    words = columns.shape[1]
    return np.stack([v[:words] for v in sent.values()]), np.stack([v[:words] for v in opened.values()]), total


@pytest.mark.parametrize("values", [ONE, OTHER], ids=["one", "other"])
def test_bytes_of_a_view_are_uniform(make_cohort, share, values):
    columns = np.repeat(values[:, None], WORDS, axis=1)
    sent, opened, total = server_view(make_cohort, share, columns, "histogram")
    assert (total == 3_000_000_000).all()
    for view in (*sent, *opened):
        assert chi_square(view.tobytes()) < 330
    assert chi_square(columns.tobytes()) > 1e5  # the measure sees what is not hidden


def test_a_distinguisher_does_no_better_than_a_coin(make_cohort, share):
    """Every word is drawn from one of the two inputs; logistic regression on all bits of the view guesses which."""
    coins = np.frombuffer(b"".join(self_key(bytes([i]) * 32, b"", "coins") for i in range(80)), np.uint8)
    labels = np.unpackbits(coins)[:WORDS].astype(bool)
    columns = np.where(labels, ONE[:, None], OTHER[:, None])
    sent, opened, total = server_view(make_cohort, share, columns, "distinguisher")
    assert (total == 3_000_000_000).all()

    def accuracy(*views: np.ndarray) -> float:
        bits = np.concatenate([np.unpackbits(v.astype("<u4")[:, :, None].view(np.uint8), axis=2) for v in views])
        features = np.moveaxis(bits, 1, 0).reshape(WORDS, -1).astype(np.float64)
        half = WORDS // 2
        fitted = LogisticRegression(max_iter=200).fit(features[:half], labels[:half])
        return float(fitted.score(features[half:], labels[half:]))

    assert 0.47 < accuracy(sent, opened) < 0.53
    assert accuracy(columns) == 1.0  # the distinguisher sees what is not hidden
    partly = sent.copy()
    partly[0] = columns[0]
    assert accuracy(partly) == 1.0


def linear_forms(make_cohort, share, monkeypatch, size: int) -> dict[str, dict[tuple[str, ...], int]]:
    """Record, from the real client, which masks go into its upload with which sign."""
    cohort = make_cohort(size)
    sums = share(cohort)
    labels: dict[bytes, tuple[str, ...]] = {}
    forms: dict[str, dict[tuple[str, ...], int]] = {}
    pair_key = member_side.pair_key

    def labelled_pair(agreed, digest, one, other):
        key = pair_key(agreed, digest, one, other)
        assert labels.setdefault(key, tuple(sorted((one, other)))) == tuple(sorted((one, other)))
        return key

    monkeypatch.setattr(member_side, "pair_key", labelled_pair)
    for name in cohort.names:
        form: dict[tuple[str, ...], int] = {}
        monkeypatch.setattr(member_side, "add_mask", lambda _, key, sign, f=form: f.update({labels.get(key, ()): sign}))
        sums.members[name].masked(np.zeros(8, np.uint32), sums.alive, sums.parcels[name])
        forms[name] = {label or (name,): sign for label, sign in form.items()}
    return forms


@pytest.mark.parametrize("gone", [(), ("c3",)], ids=["all stay", "one is lost"])
def test_in_a_tiny_ring_every_view_of_one_input_is_a_view_of_the_other(make_cohort, share, monkeypatch, gone):
    """Over Z/3: all masks enumerated, the views of two inputs are the same set, each view equally often.

    The server opens the own masks of survivors and the pairs with the lost; so only pairs of survivors are drawn.
    """
    forms = linear_forms(make_cohort, share, monkeypatch, 4)
    survivors = [name for name in forms if name not in gone]
    assert all(forms[name][(name,)] == 1 and len(forms[name]) == 4 for name in survivors)
    pairs = [
        label for label in forms["c0"] | forms["c1"] | forms["c2"] if len(label) == 2 and not set(label) & set(gone)
    ]

    def views(values: tuple[int, ...]) -> list[tuple[int, ...]]:
        found = []
        for masks in product(range(3), repeat=len(pairs)):
            drawn = dict(zip(pairs, masks, strict=True))
            hidden = (sum(sign * drawn.get(label, 0) for label, sign in forms[name].items()) for name in survivors)
            found.append(tuple((x + h) % 3 for x, h in zip(values, hidden, strict=True)))
        return sorted(found)

    inputs = list(product(range(3), repeat=len(survivors)))
    first = {total: next(x for x in inputs if sum(x) % 3 == total) for total in range(3)}
    seen = {total: views(x) for total, x in first.items()}
    assert all(views(x) == seen[sum(x) % 3] for x in inputs[:: 1 if gone else 5])
    assert len(set(seen[0])) == 3 ** (len(survivors) - 1)  # everything with that sum is seen
    assert not set(seen[0]) & set(seen[1])  # and nothing with another


def test_a_late_upload_of_a_client_declared_lost_cannot_be_read(make_cohort, share, entropy):
    cohort = make_cohort(4, threshold=3, length=WORDS, pool="late", seed="late")
    sums = share(cohort)
    zeros = np.zeros(WORDS, np.uint32)
    late = sums.members["c3"].masked(zeros, sums.alive, sums.parcels["c3"])
    sums.upload(dict.fromkeys(("c0", "c1", "c2"), zeros))
    sums.answer(["c0", "c1", "c2"])
    assert not sums.collector.total().any()
    with pytest.raises(SecureSumError, match="c3 came after the survivors were settled"):
        sums.collector.take_masked("c3", late)
    # The server holds the mask key of c3 and takes away all pairs' masks: the seed's mask stays.
    private, digest = sums.collector._mask("c3"), cohort.terms().digest()
    for name in ("c0", "c1", "c2"):
        agreed = member_side.agree(private, cohort.signed[name].mask)
        add_mask(late, member_side.pair_key(agreed, digest, "c3", name), 1)
    assert chi_square(late.tobytes()) < 330
    seed = entropy("late sum c3")(32)  # known to c3 alone
    mask = np.zeros(WORDS, np.uint32)
    add_mask(mask, self_key(seed, digest, "c3"), 1)
    assert (late[:WORDS] == mask).all()
    # Every share it got of c3 is of that key, none of the seed.
    shares = {
        place: sums.collector._answers[name]["c3"] for name, place in cohort.terms().places().items() if name != "c3"
    }
    assert shamir.join(shares, 3) == private.private_bytes_raw()
    assert commitment(shamir.join(shares, 3), digest, "c3") != sums.collector._commitments["c3"]


def test_what_was_shared_before_the_values_cannot_depend_on_them(make_cohort, share):
    """With the same entropy, packages and answers are the same bytes whatever the values; the rest is tested above."""
    transcripts = []
    for value in (0, 2**31):
        cohort = make_cohort(4, pool="same", seed="same")
        sums = share(cohort)
        sums.upload({name: np.full(8, value, np.uint32) for name in cohort.names})
        answers = [sums.members[name].unmask(sums.collector.survivors) for name in cohort.names]
        transcripts.append((sums.parcels, answers))
    assert transcripts[0] == transcripts[1]
